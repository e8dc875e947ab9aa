//! Real ranks, started by `mpirun`: the program of the feature `mpi`, which `PRUNE_MPI` names. `.ci/run` builds it where there is an MPI.

use std::process::{Command, Output};

use prune::run::Manifest;

use super::{files, outcome, place};
use crate::support::Place;

/// The program, and the launcher with the flags that a machine with few processors needs.
fn launcher(size: usize) -> Option<(Command, String)> {
    let Ok(program) = std::env::var("PRUNE_MPI") else {
        eprintln!("skipped: real ranks, without a program of the feature `mpi` in PRUNE_MPI");
        return None;
    };
    let mut command = Command::new(std::env::var("PRUNE_MPIRUN").unwrap_or("mpirun".to_string()));
    let help =
        Command::new(command.get_program()).arg("--version").output().expect("mpirun starts");
    if String::from_utf8_lossy(&help.stdout).contains("Open MPI") {
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    }
    command.args(["-n", &size.to_string()]);
    Some((command, program))
}

/// Runs the program on `size` ranks in the folder of `place`.
fn run(place: &Place, size: usize, line: &str) -> Option<Output> {
    let (mut command, program) = launcher(size)?;
    command.arg(program).args(line.split(' ')).current_dir(place.path("."));
    command.env("PRUNE_CACHE", place.path(".cache")).env("HF_HUB_OFFLINE", "1");
    Some(command.output().expect("mpirun starts"))
}

#[test]
fn ranks_of_mpi_have_the_bits_of_one_process() {
    let place = place();
    let flags = |method: &str| {
        format!(
            "--model m --dataset train.txt --eval-dataset test.txt --seqlen 48 --use-cpu --nsamples 7 --eval both \
             --eval-windows 5 --sparsity-ratio 0.5 --prune-method {method} --threads 1"
        )
    };
    for method in ["wanda", "sparsegpt"] {
        let alone = place.run(&format!("{} --save {method}-0", flags(method)));
        assert_eq!(alone.code, 0, "{}", alone.stderr);
        for size in [1, 2, 3, 4] {
            let save = format!("{method}-{size}");
            let line = format!("{} --save {save}", flags(method));
            let Some(ran) = run(&place, size, &line) else {
                return;
            };
            let stderr = String::from_utf8_lossy(&ran.stderr);
            assert!(ran.status.success(), "{stderr}");
            let tables = String::from_utf8_lossy(&ran.stdout).matches("perplexity").count();
            let expected = alone.stdout.matches("perplexity").count();
            assert_eq!(
                tables,
                expected,
                "one rank prints: {}",
                String::from_utf8_lossy(&ran.stdout)
            );
            let manifest = place.manifest(&save);
            let planned = manifest.plan.as_ref().and_then(|plan| plan.cpu()).expect("a plan").peak;
            for rank in &manifest.ranks {
                let peak = rank.peak_anonymous.expect("Linux tells it");
                let limit = planned.0 as f64 * 1.1;
                assert!(peak.0 as f64 <= limit, "rank {}: {peak}, planned {planned}", rank.rank);
            }
            let (first, other) = (format!("{method}-0"), &save);
            assert_eq!(outcome(&place.manifest(other)), outcome(&place.manifest(&first)));
            assert_eq!(files(&place, other), files(&place, &first));
        }
    }
}

#[test]
fn trainings_over_mpi_have_the_bits_of_one_process() {
    let place = place();
    let pruned =
        place.run("--model m --prune-method magnitude --sparsity-ratio 0.5 --use-cpu --eval none --save pruned");
    assert_eq!(pruned.code, 0, "{}", pruned.stderr);
    for (way, more) in [
        ("full", "--batch-size 5 --held-out 2"),
        ("blocks", "--teacher m --nsamples 7 --batch-size 3"),
    ] {
        let line = |save: &str| {
            format!(
                "recover --model pruned/model --how {way} {more} --dataset train.txt --eval-dataset test.txt --seqlen 48 \
                 --steps 4 --eval both --eval-windows 3 --use-cpu --threads 1 --save {save}"
            )
        };
        let alone = place.run(&line(way));
        assert_eq!(alone.code, 0, "{}", alone.stderr);
        for size in [1, 2, 3] {
            let save = format!("{way}-{size}");
            let Some(ran) = run(&place, size, &line(&save)) else {
                return;
            };
            assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
            let (first, other) = (place.manifest(way), place.manifest(&save));
            assert_eq!(other.perplexity, first.perplexity, "{way} on {size}");
            assert_eq!(files(&place, &save), files(&place, way), "{way} on {size}");
            let planned = other.plan.as_ref().and_then(|plan| plan.cpu()).expect("a plan").peak;
            for rank in &other.ranks {
                let peak = rank.peak_anonymous.expect("Linux tells it");
                let limit = planned.0 as f64 * 1.1;
                assert!(peak.0 as f64 <= limit, "rank {}: {peak}, planned {planned}", rank.rank);
            }
        }
    }
}

#[test]
fn merges_over_mpi_have_the_bytes_of_one_process() {
    let place = super::merging::place();
    let line = |save: &str| {
        format!(
            "merge --base m --model e1 --model e2 --method della --density 0.5 --threads 1 --save {save}"
        )
    };
    let alone = place.run(&line("one"));
    assert_eq!(alone.code, 0, "{}", alone.stderr);
    for size in [1, 2, 3] {
        let save = format!("of-{size}");
        let Some(ran) = run(&place, size, &line(&save)) else {
            return;
        };
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        assert!(files(&place, &save) == files(&place, "one"), "{size} ranks");
        let record = place.manifest(&save);
        assert_eq!(record.ranks.len(), if size == 1 { 0 } else { size });
        let planned = record.plan.as_ref().and_then(|plan| plan.cpu()).expect("a plan").peak;
        for rank in &record.ranks {
            let peak = rank.peak_anonymous.expect("Linux tells it");
            assert!(peak.0 as f64 <= planned.0 as f64 * 1.1, "{peak}, planned {planned}");
        }
    }
}

#[test]
fn evaluations_over_mpi_have_the_bits_of_one_process() {
    let place = place();
    place.write_questions();
    let pruned = place.run(
        "--model m --prune-method magnitude --sparsity-ratio 0.5 --use-cpu --eval none --save out",
    );
    assert_eq!(pruned.code, 0, "{}", pruned.stderr);
    let line = "eval out/model --against m --eval-dataset test.txt --seqlen 48 --eval-windows 5 --tasks own=own.jsonl \
                --use-cpu --threads 1 --json";
    let measured = |stdout: &str| {
        let record: Manifest = serde_json::from_str(stdout).expect("a record");
        assert!(record.perplexity.divergence.is_some() && record.tasks.is_some());
        (record.perplexity, record.tasks, record.against.expect("the dense model").perplexity)
    };
    let alone = place.run(line);
    assert_eq!(alone.code, 0, "{}", alone.stderr);
    for size in [1, 2, 3] {
        let Some(ran) = run(&place, size, line) else {
            return;
        };
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let stdout = String::from_utf8_lossy(&ran.stdout);
        assert_eq!(measured(&stdout), measured(&alone.stdout), "{size} ranks");
    }
}
