//! Merges on several ranks have the bytes of one process: every method, tensors that are trimmed together, several files, statistics; and a
//! stopped merge is continued by other ranks.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Parser;
use prune::job;
use prune::linalg::StoredDtype;
use prune::merging::methods::METHODS;
use prune::ranks::{Ranks, threads};
use prune::run::{Event, Events, Manifest, Silent};
use prune::settings::MergeSettings;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use super::files;
use crate::support::{Place, split};

/// Matrices of the layers.
const LINEARS: usize = 3 * 7;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    settings: MergeSettings,
}

/// A base and two models of its shape, with texts.
pub(super) fn place() -> Place {
    let shape = |seed| RandomCheckpoint {
        num_hidden_layers: 3,
        dtype: StoredDtype::Bf16,
        seed,
        ..RandomCheckpoint::default()
    };
    let place = Place::with(&shape(0));
    place.checkpoint("e1", &shape(1));
    place.checkpoint("e2", &shape(2));
    place
}

fn line(place: &Place, flags: &str, save: &str) -> String {
    let path = |name: &str| place.path(name).display().to_string();
    let models = match flags.contains("passthrough") {
        true => format!("--model {}", path("e1")),
        false => format!("--base {} --model {} --model {}", path("m"), path("e1"), path("e2")),
    };
    let flags = flags.replace("TEXT", &path("train.txt"));
    format!("{models} {flags} --save {}", path(save))
}

fn merge(ranks: &Ranks, line: &str, events: &dyn Events) -> anyhow::Result<Manifest> {
    let words = std::iter::once("merge".to_owned()).chain(split(line));
    let done = job::merge_on(ranks, Flags::try_parse_from(words)?.settings, events);
    if let Err(error) = &done {
        ranks.leave(Some(error.to_string()));
    }
    done
}

/// Everything of a record that must not depend on the ranks.
fn outcome(manifest: &Manifest) -> Value {
    let mut merge = serde_json::to_value(&manifest.merge).expect("a record");
    if let Some(statistics) = merge["saliency"].as_object_mut() {
        statistics.remove("file");
    }
    merge
}

/// Flags of every method that merges three models of one shape, and the ways to share work or statistics among tensors.
fn all_flags() -> Vec<String> {
    let more = |name: &str| match name {
        "slerp" | "nearswap" | "arcee_fusion" => None,
        "dare_linear" | "dare_ties" | "della" | "della_linear" | "ties" | "breadcrumbs"
        | "breadcrumbs_ties" => Some("--density 0.5"),
        "regmean_diag" => Some("--saliency experts --dataset TEXT --nsamples 3 --seqlen 32"),
        _ => Some(""),
    };
    let names = METHODS.iter().map(|method| method.declaration().name);
    let of_methods = names.filter_map(|name| Some(format!("--method {name} {}", more(name)?)));
    let others = [
        "--method ties --density 0.4 --trim-scope model --out-shard-size 40KB",
        "--method ties --density 0.4 --saliency base --dataset TEXT --nsamples 3 --seqlen 32",
        "--method task_arithmetic --eval merged --eval-dataset TEXT --eval-windows 2 --seqlen 32",
    ];
    of_methods.chain(others.map(String::from)).collect()
}

#[test]
fn merges_have_the_same_bytes_on_any_number_of_ranks() {
    let place = place();
    for (number, flags) in all_flags().into_iter().enumerate() {
        let first = format!("{number}-1");
        let alone = match merge(&Ranks::alone(), &line(&place, &flags, &first), &Silent) {
            Ok(alone) => alone,
            Err(error) => panic!("{flags}: {error:#}"),
        };
        let expected = files(&place, &first);
        for size in [2, 3, 8] {
            let save = format!("{number}-{size}");
            let line = line(&place, &flags, &save);
            for manifest in threads::run(size, |ranks| merge(ranks, &line, &Silent)) {
                let manifest = manifest.unwrap_or_else(|error| panic!("{flags}: {error:#}"));
                assert!(outcome(&manifest) == outcome(&alone), "{flags} on {size}");
                assert_eq!(manifest.ranks.len(), size);
            }
            assert!(files(&place, &save) == expected, "{flags} on {size}");
        }
    }
}

/// Counts merged matrices, and stops after some.
struct StopAfter {
    merged: AtomicUsize,
    most: usize,
}

impl Events for StopAfter {
    fn emit(&self, event: Event) {
        if matches!(event, Event::MatrixMerged { .. }) {
            self.merged.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn is_stopping(&self) -> bool {
        self.merged.load(Ordering::Relaxed) >= self.most
    }
}

#[test]
fn a_stopped_merge_is_continued_by_another_number_of_ranks() {
    let place = place();
    let flags = "--method della --density 0.5 --threads 1";
    merge(&Ranks::alone(), &line(&place, flags, "whole"), &Silent).unwrap();
    let expected = files(&place, "whole");
    let line = line(&place, flags, "out");
    // The rank that is asked to stop, and the matrices that are merged by then: few, so that a fast merge is not over before. The first
    // rank counts the matrices of all.
    for (before, stops, merged, after) in [(2, 0, 2, 3), (3, 0, 2, 1), (1, 0, 2, 2), (3, 2, 1, 2)] {
        let _ = fs::remove_dir_all(place.path("out"));
        let stopped = threads::run(before, |ranks| {
            let most = if ranks.rank() == stops { merged } else { usize::MAX };
            let done = merge(ranks, &line, &StopAfter { merged: 0.into(), most });
            done.map(drop)
        });
        assert!(stopped.iter().all(Result::is_err), "{before} ranks");
        let state = fs::read(place.path("out/unfinished.json")).expect("a state");
        let state: Value = serde_json::from_slice(&state).expect("JSON");
        let names = state["tensors"].as_object().expect("tensors").keys();
        let saved = names.filter(|name| name.contains("_proj")).count();
        // The first rank records what it has counted.
        let least = if stops == 0 { merged } else { 0 };
        assert!(saved >= least && saved < LINEARS, "{before} ranks: {saved} saved");
        let merged = threads::run(after, |ranks| {
            let events = StopAfter { merged: 0.into(), most: usize::MAX };
            merge(ranks, &line, &events)?;
            Ok(events.merged.into_inner())
        });
        // The first rank counts the matrices of all.
        let merged = merged.into_iter().next().expect("a rank").unwrap();
        assert_eq!(merged, LINEARS - saved, "{before}, then {after}");
        assert!(files(&place, "out") == expected, "{before}, then {after}");
    }
}

#[test]
fn recipes_of_a_file_are_merged_one_after_the_other() {
    let place = place();
    let path = |name: &str| place.path(name).display().to_string();
    let recipe = format!(
        "merge_method: linear\nname: first\nmodels:\n  - model: {0}\n    parameters: {{weight: 1}}\n  - model: {1}\n    \
         parameters: {{weight: 2}}\n---\nmerge_method: task_arithmetic\nbase_model: {2}\nmodels:\n  - model: first\n    \
         parameters: {{weight: 0.5}}\n",
        path("e1"),
        path("e2"),
        path("m")
    );
    fs::write(place.path("recipe.yaml"), recipe).expect("written");
    let line = |save: &str| format!("{} --save {}", path("recipe.yaml"), path(save));
    merge(&Ranks::alone(), &line("one"), &Silent).unwrap();
    for manifest in threads::run(2, |ranks| merge(ranks, &line("two"), &Silent)) {
        manifest.unwrap();
    }
    for folder in ["", "/merges/first"] {
        let [one, two] = ["one", "two"].map(|save| files(&place, &format!("{save}{folder}")));
        assert!(one == two && !one.is_empty(), "{folder}");
    }
    // The second process finds the first merge finished.
    fs::remove_dir_all(place.path("two/model")).expect("removed");
    fs::remove_file(place.path("two/run.json")).expect("removed");
    for manifest in threads::run(3, |ranks| merge(ranks, &line("two"), &Silent)) {
        manifest.unwrap();
    }
    assert!(files(&place, "two") == files(&place, "one"));
}

#[test]
fn a_rank_that_does_not_see_the_files_of_the_first_ends_all() {
    let place = place();
    let flags = "--method linear";
    let lines = ["out", "elsewhere"].map(|save| line(&place, flags, save));
    let ended = threads::run(2, |ranks| merge(ranks, &lines[ranks.rank()], &Silent));
    let errors: Vec<String> =
        ended.into_iter().map(|of| format!("{:#}", of.unwrap_err())).collect();
    assert!(
        errors[1].contains("does not see the files in") && errors[1].contains("elsewhere"),
        "{errors:?}"
    );
    assert!(errors[0].starts_with("rank 1: "), "{errors:?}");
}
