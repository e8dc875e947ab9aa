//! Several ranks give the bits of one process: masks, files and perplexities, for every method and for samples that do not divide.
//!
//! The ranks are threads of this process. `mpi` starts real ranks where this machine has an MPI.

mod merging;
mod mpi;
mod recovery;

use std::collections::BTreeMap;
use std::fs;

use prune::job::{self, grid::GridOutcome};
use prune::linalg::StoredDtype;
use prune::pipeline::Selection;
use prune::pruning::methods::METHODS;
use prune::ranks::{Ranks, threads};
use prune::run::metric::Metric;
use prune::run::{Manifest, Silent};
use prune::settings::{EvalSides, GridSettings, GridShard, Settings};
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use crate::support::{Place, settings_of};

/// A checkpoint whose down has an input of several panels of a Gram matrix.
fn place() -> Place {
    Place::with(&RandomCheckpoint {
        hidden_size: 64,
        intermediate_size: 208,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    })
}

/// Everything of a record that must not depend on the ranks.
fn outcome(manifest: &Manifest) -> Vec<String> {
    let matrices = manifest.layers.iter().flat_map(|layer| &layer.matrices);
    let mut outcome: Vec<String> =
        matrices.map(|matrix| serde_json::to_string(matrix).expect("a record")).collect();
    outcome.push(serde_json::to_string(&manifest.perplexity).expect("a record"));
    outcome
}

/// The flags of a run in this place.
fn line(place: &Place, flags: &str) -> String {
    let path = |name: &str| place.path(name).display().to_string();
    format!(
        "--model {} --dataset {} --eval-dataset {} --text-cache {} --seqlen 48 --use-cpu {flags}",
        path("m"),
        path("train.txt"),
        path("test.txt"),
        path("cache")
    )
}

/// Prunes on `size` ranks into the folder `save`; the record of every rank.
fn prune(place: &Place, size: usize, save: &str, flags: &str) -> Vec<anyhow::Result<Manifest>> {
    let save = place.path(save).display().to_string();
    let line = line(place, &format!("{flags} --save {save}"));
    threads::run(size, |ranks| on(ranks, &line))
}

fn on(ranks: &Ranks, line: &str) -> anyhow::Result<Manifest> {
    let done = job::prune_on(ranks, settings_of(line)?, &Silent, None);
    if let Err(error) = &done {
        ranks.leave(Some(error.to_string()));
    }
    done
}

/// The files of a model folder, by name.
fn files(place: &Place, save: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = place.path(save).join("model");
    let names = place.names(&format!("{save}/model")).into_iter();
    // The record of a run names its command line.
    names
        .filter(|name| name.ends_with(".safetensors"))
        .map(|name| {
            let bytes = fs::read(folder.join(&name)).expect("a listed file");
            (name, bytes)
        })
        .collect()
}

#[test]
fn every_method_gives_the_same_bits_on_any_number_of_ranks() {
    let place = place();
    for method in METHODS {
        let name = method.name();
        let flags = format!(
            "--prune-method {name} --sparsity-ratio 0.5 --nsamples 7 --eval both --eval-windows 5"
        );
        let alone = prune(&place, 1, &format!("{name}-1"), &flags).remove(0).unwrap();
        // Solvers take their time without optimisation; their statistics are SparseGPT's.
        let sizes = if matches!(name, "wanda" | "sparsegpt") { &[2, 3, 8][..] } else { &[3] };
        for &size in sizes {
            let save = format!("{name}-{size}");
            for manifest in prune(&place, size, &save, &flags) {
                assert_eq!(outcome(&manifest.unwrap()), outcome(&alone), "{name} on {size}");
            }
            assert_eq!(
                files(&place, &save),
                files(&place, &format!("{name}-1")),
                "{name} on {size}"
            );
        }
    }
}

#[test]
fn ranks_without_samples_and_other_ways_of_samples_give_the_same_bits() {
    let place = place();
    let lines = [
        "--prune-method wanda --sparsity-ratio 0.5 --nsamples 1 --eval-windows 2",
        "--prune-method sparsegpt --sparsity-type 2:4 --nsamples 1 --eval none",
        "--prune-method sparsegpt --sparsity-ratio 0.6 --nsamples 5 --memory-settings {\"statistics\":\"input\"} --eval-windows 1",
        "--prune-method ladder --sparsity-ratio 0.6 --nsamples 5 --true-sequential --eval none",
        "--prune-method wanda --sparsity-ratio 0.5 --nsamples 5 --refine dsnot --hidden-states disk --eval-windows 3",
        "--prune-method wanda --sparsity-ratio 0.5 --nsamples 5 --drop-layers 1 --allocate owl --eval-windows 3",
        "--prune-method wanda --sparsity-ratio 0.5 --nsamples 5 --drop-width 0.25 --eval-windows 3",
    ];
    for (number, flags) in lines.into_iter().enumerate() {
        let alone = prune(&place, 1, &format!("{number}-1"), flags).remove(0).unwrap();
        for size in [4] {
            let save = format!("{number}-{size}");
            for manifest in prune(&place, size, &save, flags) {
                assert_eq!(outcome(&manifest.unwrap()), outcome(&alone), "{flags} on {size}");
            }
            assert_eq!(files(&place, &save), files(&place, &format!("{number}-1")), "{flags}");
        }
    }
}

#[test]
fn a_sweep_on_several_ranks_has_the_cells_of_one() {
    let place = place();
    let flags = "--prune-method wanda --nsamples 3 --eval-windows 3 --no-save-model";
    let sweep_with = |ranks: &Ranks, eval: &str, save: &str| {
        let save = place.path(save).display().to_string();
        let run = settings_of(&line(&place, &format!("{flags} --eval {eval} --save {save}")))?;
        let target = |ratio| Selection { sparsity_ratio: Some(ratio), ..Selection::default() };
        let settings = GridSettings {
            run,
            methods: ["wanda", "magnitude"].map(str::to_string).to_vec(),
            targets: vec![target(0.4), target(0.5)],
            seeds: vec![0, 1],
            shard: GridShard::WHOLE,
            metrics: vec![Metric::Perplexity, Metric::Kl],
        };
        job::grid::grid_on(ranks, &settings, &Silent)
    };
    let sweep = |ranks: &Ranks, save: &str| sweep_with(ranks, "both", save);
    let cells = |outcome: &GridOutcome| -> Vec<(String, [Option<f64>; 3])> {
        let cells = outcome.record.cells.iter();
        let of = cells.map(|cell| {
            let values = [cell.pruned_perplexity, cell.dense_perplexity, cell.value(&Metric::Kl)];
            assert!(values.iter().all(Option::is_some), "{}: {values:?}", cell.name);
            (cell.name.clone(), values)
        });
        of.collect()
    };
    let alone = sweep(&Ranks::alone(), "one").unwrap();
    assert_eq!((alone.record.cells.len(), alone.elsewhere), (6, 0));
    for size in [2, 3] {
        let save = format!("sweep-{size}");
        for outcome in threads::run(size, |ranks| sweep(ranks, &save)) {
            let outcome = outcome.unwrap();
            assert_eq!(cells(&outcome), cells(&alone), "{size} ranks");
            assert!(outcome.failed.is_empty() && outcome.elsewhere == 0 && outcome.cells == 6);
        }
        assert!(place.path(&save).join("sweep.json").is_file());
    }
    // A rank that leaves ends the cells of all: the first rank does not work through its share.
    let ended = threads::run(2, |ranks| {
        if !ranks.is_first() {
            ranks.leave(Some("no memory".to_string()));
            return Ok(());
        }
        while ranks.departure().is_none() {
            std::thread::yield_now();
        }
        sweep_with(ranks, "none", "left").map(drop)
    });
    let error = ended[0].as_ref().expect_err("a rank has left");
    assert_eq!(error.to_string(), "rank 1: no memory");
    let cells = alone.record.cells.iter();
    let finished =
        cells.filter(|cell| place.path("left").join(&cell.name).join("run.json").exists());
    assert_eq!(finished.count(), 0);
}

#[test]
fn perplexity_on_several_ranks_has_the_bits_of_one() {
    let place = place();
    let line = line(&place, "--eval pruned --eval-windows 7");
    let eval = |ranks: &Ranks| {
        let settings = Settings { sparsity: None, calibration: None, ..settings_of(&line)? };
        job::eval_on(ranks, settings, &Silent)
    };
    let alone = eval(&Ranks::alone()).unwrap();
    assert!(alone.perplexity.dense.or(alone.perplexity.pruned).is_some());
    for size in [2, 3, 4, 8] {
        for manifest in threads::run(size, eval) {
            assert_eq!(manifest.unwrap().perplexity, alone.perplexity, "{size}");
        }
    }
}

#[test]
fn divergences_and_tasks_on_several_ranks_have_the_bits_of_one() {
    let place = place();
    let rows: String = (0..9)
        .map(|at| {
            let context = "the cat ".repeat(1 + at % 4);
            format!("{{\"context\": \"{context}\", \"choices\": [\"sat\", \"a mat\"], \"label\": {}}}\n", at % 2)
        })
        .collect();
    fs::write(place.path("own.jsonl"), rows).expect("written");
    let tasks = format!("--eval-windows 7 --tasks own={}", place.path("own.jsonl").display());
    // Everything that was measured.
    let measured = |manifest: &Manifest| {
        let against = manifest.against.as_ref().map(|of| of.perplexity);
        (manifest.perplexity.clone(), against, manifest.tasks.clone())
    };
    let flags = format!("--prune-method magnitude --sparsity-ratio 0.5 --eval both {tasks}");
    let pruned = measured(&prune(&place, 1, "out", &flags).remove(0).unwrap());
    assert!(pruned.0.divergence.is_some() && pruned.2.is_some());
    for size in [2, 3] {
        for manifest in prune(&place, size, &format!("out-{size}"), &flags) {
            assert_eq!(measured(&manifest.unwrap()), pruned, "{size}");
        }
    }
    let line = line(&place, &tasks).replace("/m ", "/out/model ");
    let eval = |ranks: &Ranks| {
        let mut settings = Settings { sparsity: None, calibration: None, ..settings_of(&line)? };
        settings.evaluation.eval = EvalSides::Dense;
        settings.evaluation.against = Some(place.path("m"));
        job::eval_on(ranks, settings, &Silent)
    };
    let alone = measured(&eval(&Ranks::alone()).unwrap());
    assert_eq!(alone.0.divergence, pruned.0.divergence);
    assert_eq!(alone.2, pruned.2);
    for size in [2, 3, 8] {
        for manifest in threads::run(size, eval) {
            assert_eq!(measured(&manifest.unwrap()), alone, "{size}");
        }
    }
}

#[test]
fn a_rank_sends_the_numbers_of_its_samples_and_no_hidden_state() {
    let place = place();
    let flags = "--sparsity-ratio 0.5 --nsamples 7 --eval none";
    let manifest = prune(&place, 2, "out", flags).remove(0).unwrap();
    assert_eq!(manifest.ranks.len(), 2);
    assert!(manifest.ranks.iter().enumerate().all(|(rank, report)| report.rank == rank));
    // Rank 1 has samples 1, 3 and 5. Per layer, for inputs of 64, 64, 64 and 208 columns: f64 sums of squares, f32 rows of output
    // errors, of which each sample has 256 / 7.
    let (layers, columns, samples) = (2.0, 400.0, 3.0);
    let expected = layers * columns * samples * (8.0 + 4.0 * 256.0 / 7.0);
    let sent = manifest.ranks[1].bytes_sent as f64;
    assert!(
        sent > expected && sent < 1.02 * expected + 2000.0,
        "{sent} bytes, expected {expected}"
    );
    // Rank 0 has four samples, and passes the second layer on to rank 1.
    let weights: usize =
        manifest.layers[1].matrices.iter().map(|of| of.shape.iter().product::<usize>()).sum();
    let least = expected / samples * 4.0 + 2.0 * weights as f64;
    let sent = manifest.ranks[0].bytes_sent as f64;
    assert!(sent > least, "{sent} bytes, at least {least}");
}

#[test]
fn a_plan_of_ranks_has_the_bytes_of_the_formula_and_less_time_and_memory() {
    let place = Place::empty();
    let rows = |method: &str| -> Vec<Value> {
        let ran = place.run(&format!(
            "plan --shape llama-2-7b --prune-method {method} --nsamples 128 --ranks 6 --max-memory cpu=60GiB --json"
        ));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        serde_json::from_str(&ran.stdout).expect("a table")
    };
    let number = |row: &Value, name: &str| row[name].as_f64().expect("a number");
    let wanda = rows("wanda");
    let sizes: Vec<f64> = wanda.iter().map(|row| number(row, "ranks")).collect();
    assert_eq!(sizes, [1.0, 2.0, 4.0, 6.0]);
    // 32 layers with inputs of 3 · 4096 + 11008 columns; half of 128 samples, and of 256 rows of output errors.
    let columns = 23_296.0;
    let expected = 32.0 * columns * (64.0 * 8.0 + 128.0 * 4.0);
    assert_eq!([0, 1].map(|at| number(&wanda[at], "bytes_sent")), [0.0, expected]);
    for pair in wanda.windows(2) {
        for name in ["seconds", "peak"] {
            assert!(number(&pair[1], name) < number(&pair[0], name), "{name}: {pair:?}");
        }
    }
    let sparsegpt = rows("sparsegpt");
    // Sums and squares of columns, and 17 shares of G: 16 rounds, and the whole.
    let grams = 2.0 * (3.0 * 4096.0 * 4096.0 + 11_008.0 * 11_008.0) * 17.0 / 2.0;
    // Half of the rows of every matrix, with a mask bit per weight, and two reads of 2¹⁶ counts per block of 128 columns.
    let weights = 4.0 * 4096.0 * 4096.0 + 3.0 * 4096.0 * 11_008.0;
    let solved = (weights * (2.0 + 1.0 / 8.0) + (6.0 * 32.0 + 86.0) * 262_144.0) / 2.0;
    let sent = number(&sparsegpt[1], "bytes_sent");
    let least = expected + 32.0 * (columns * 64.0 * 8.0 + grams + solved);
    assert!(sent >= least && sent < 1.05 * least, "{sent}, at least {least}");
}

#[test]
fn an_error_of_a_rank_ends_all_ranks_with_it() {
    let place = place();
    let flags = "--sparsity-ratio 0.5 --nsamples 4 --eval none --save";
    let lines = ["good", "bad"]
        .map(|save| line(&place, &format!("{flags} {}", place.path(save).display())));
    let missing = lines[1].replace("/m ", "/missing ");
    let ended =
        threads::run(3, |ranks| on(ranks, if ranks.rank() == 1 { &missing } else { &lines[0] }));
    for (rank, ended) in ended.into_iter().enumerate() {
        let error = format!("{:#}", ended.unwrap_err());
        let of_other = error.starts_with("rank 1: ");
        assert_eq!(of_other, rank != 1, "{error}");
    }
}

#[test]
fn a_command_of_a_single_process_is_refused_on_several_ranks() {
    let place = place();
    let pack = place.command("pack m --save out").env("PMI_SIZE", "2").output();
    let message = String::from_utf8(pack.unwrap().stderr).unwrap();
    assert!(
        message.contains("`prune pack` runs in a single process, and 2 were started"),
        "{message}"
    );
    let merge = place.command("merge --help").env("PMI_SIZE", "2").output().unwrap();
    assert!(merge.status.success(), "help is for every process");
    let plan = place.command("plan --model m --seqlen 48").env("PMI_SIZE", "2").output().unwrap();
    assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
}
