//! `prune sweep --propagate dense`: cells of one seed share the statistics, and each equals the run of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{masks, table};
use crate::support::{Place, TEXTS, assert_cells_after, saved_cells};

/// Every kind of statistics, a refinement, changed weights, and a method without samples.
const GRID: &str = "sweep --model m --methods wanda,sparsegpt,ladder,wanda+dsnot,magnitude --ratios 0.4,0.6 --seeds 0,1 \
                    --propagate dense --keep-models --save-masks --save out";

/// The weights and masks in the folder of a cell, by name.
fn weights(cell: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for folder in [cell.to_path_buf(), cell.join("model")] {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|kind| kind == "safetensors") {
                let bytes = fs::read(&path).expect("a file");
                found.insert(path.file_name().expect("a name").to_string_lossy().into(), bytes);
            }
        }
    }
    assert!(found.len() > 1, "{}", cell.display());
    found
}

/// The weights of all cells of the sweep, by name of the cell.
fn all_weights(place: &Place) -> BTreeMap<String, BTreeMap<String, Vec<u8>>> {
    let cells = table(place)["cells"].as_array().expect("a list").clone();
    let names = cells.iter().map(|cell| cell["name"].as_str().expect("a name").to_string());
    names
        .map(|name| {
            let of_cell = weights(&place.path("out").join(&name));
            (name, of_cell)
        })
        .collect()
}

#[test]
fn cells_that_share_statistics_have_the_bytes_of_single_runs() {
    for (more, budget) in [("", ""), ("--hidden-states disk --max-memory cpu=", "64MiB")] {
        let place = Place::new();
        let ran = place.run(&format!("{GRID} {TEXTS} {more}{budget}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        for note in [
            "cells 1 to 8 of 18 share their statistics: wanda-0.4-seed0, wanda-0.6-seed0, ",
            "cells 11 to 18 of 18 share their statistics",
        ] {
            assert!(ran.stderr.contains(note), "{note}: {}", ran.stderr);
        }
        for (cell, of_sweep) in all_weights(&place) {
            let mut parts = cell.rsplitn(3, '-');
            let (seed, ratio, method) = (parts.next(), parts.next(), parts.next());
            let seed = seed.and_then(|seed| seed.strip_prefix("seed")).expect("a seed");
            let (method, ratio) = (method.expect("a method"), ratio.expect("a ratio"));
            let method = method.replace('+', " --refine ");
            place.prune(&format!(
                "--model m --prune-method {method} --sparsity-ratio {ratio} --seed {seed} --propagate dense --eval both --save-masks \
                 --save single/{cell} {more}{budget}"
            ));
            let single = format!("single/{cell}");
            assert!(weights(&place.path(&single)) == of_sweep, "{cell}");
            let (alone, shared) = (place.manifest(&single), place.manifest(&format!("out/{cell}")));
            assert_eq!(masks(&alone), masks(&shared), "{cell}");
            assert_eq!(alone.perplexity, shared.perplexity, "{cell}");
            assert_eq!(alone.calibration, shared.calibration, "{cell}");
            let errors = |manifest: &prune::run::Manifest| -> Vec<Option<f64>> {
                let matrices = manifest.layers.iter().flat_map(|layer| &layer.matrices);
                matrices.map(|matrix| matrix.relative_output_error).collect()
            };
            assert_eq!(errors(&alone), errors(&shared), "{cell}");
            let expected = match (method.as_str(), seed) {
                ("magnitude", _) => None,
                _ => Some(8),
            };
            assert_eq!((alone.cells_at_once, shared.cells_at_once), (None, expected), "{cell}");
            // A sweep has the flags for the cells that read them.
            let used = |warning: &&String| !warning.contains(" is not used: ");
            let of_alone: Vec<&String> = alone.warnings.iter().filter(used).collect();
            assert_eq!(of_alone, shared.warnings.iter().collect::<Vec<_>>(), "{cell}");
        }
    }
}

/// Runs a sweep of two cells with a fault at every `step`-th file operation, each time in a new folder, and then the same command
/// without the fault. The cells must end with the bytes of a sweep without faults. Calls `faulty` with the outcome of every faulty run.
fn ends_with_the_same_bytes(fault: &str, step: usize, faulty: &mut dyn FnMut(&Place, Option<i32>)) {
    let place = Place::new();
    let grid = GRID.replace("wanda,sparsegpt,ladder,wanda+dsnot,magnitude", "wanda,sparsegpt");
    let line = format!("{} {TEXTS}", grid.replace("0.4,0.6 --seeds 0,1", "0.5"));
    assert_eq!(place.run(&line).code, 0);
    let (expected, bytes) = (table(&place), all_weights(&place));
    for at in (7..).step_by(step).take(14) {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let mut command = place.command(&line);
        let ended = command.env("PRUNE_FAULT", format!("{fault}:{at}")).output();
        let code = ended.expect("the binary").status.code();
        // The sweep has fewer operations.
        if code == Some(0) {
            continue;
        }
        faulty(&place, code);
        let saved = saved_cells(&place.path("out"));
        let again = place.run(&line);
        assert_eq!(again.code, 0, "{fault}:{at}: {}", again.stderr);
        assert_cells_after(&saved, &format!("{fault}:{at}"));
        assert_eq!(table(&place), expected, "{fault}:{at}");
        assert!(all_weights(&place) == bytes, "{fault}:{at}");
        for cell in bytes.keys() {
            assert!(!place.path("out").join(cell).join("unfinished.json").exists());
        }
    }
}

#[test]
#[cfg(unix)]
fn killed_at_any_operation_cells_that_share_statistics_end_with_the_same_bytes() {
    let mut layers = BTreeSet::new();
    ends_with_the_same_bytes("kill", 29, &mut |place, code| {
        assert_eq!(code, None, "killed");
        let state = fs::read(place.path("out/wanda-0.5-seed0/unfinished.json"));
        if let Ok(state) = state {
            let state: Value = serde_json::from_slice(&state).expect("whole");
            layers.insert(state["layers"].as_array().map_or(0, Vec::len));
        }
    });
    assert!(layers.len() > 1, "killed in one layer only: {layers:?}");
}

#[test]
fn a_cell_that_fails_leaves_the_others_alone() {
    let mut failed = BTreeSet::new();
    ends_with_the_same_bytes("fail", 23, &mut |place, code| {
        assert_eq!(code, Some(1));
        if place.path("out/sweep.json").exists() {
            let cells = table(place)["cells"].as_array().expect("a list").clone();
            failed.insert(cells.iter().filter(|cell| cell["state"] == "failed").count());
        }
    });
    assert!(failed.contains(&1), "{failed:?}");
}

#[test]
fn cells_continue_at_their_own_layers() {
    let place = Place::new();
    let grid = GRID.replace("wanda,sparsegpt,ladder,wanda+dsnot,magnitude", "wanda,sparsegpt");
    let line = format!("{grid} {TEXTS}");
    assert_eq!(place.run(&line).code, 0);
    let (expected, bytes) = (table(&place), all_weights(&place));
    // One cell of the first seed is gone, so it runs alone; two of the second are, so they run together.
    for cell in ["wanda-0.4-seed0", "wanda-0.4-seed1", "sparsegpt-0.6-seed1"] {
        fs::remove_dir_all(place.path("out").join(cell)).expect("removed");
    }
    let ran = place.run(&line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for note in [
        "cell 4 of 8: wanda-0.4-seed0",
        "cells 7 to 8 of 8 share their statistics: wanda-0.4-seed1, sparsegpt-0.6-seed1",
    ] {
        assert!(ran.stderr.contains(note), "{note}: {}", ran.stderr);
    }
    assert_eq!(table(&place), expected);
    assert!(all_weights(&place) == bytes);
}

#[test]
fn cells_follow_one_another_where_the_budget_is_too_small_for_all() {
    let place = Place::new();
    let ratios: Vec<String> = (20..60).map(|percent| format!("0.{percent}")).collect();
    let ratios = ratios.join(",");
    let flags = format!("--propagate dense --eval pruned --hidden-states ram {TEXTS}");
    let single =
        format!("--model m --sparsity-ratio 0.5 --no-save-model --save single --force {flags}");
    // Now the token ids are in the cache, and no run needs memory for the tokenizer.
    assert_eq!(place.run(&single).code, 0);
    // A refusal names a budget that fits as far as is known then: the memory of the texts is known later.
    let mut budget = "cpu=1MiB".to_string();
    loop {
        let single = place.run(&format!("{single} --max-memory {budget}"));
        if single.code == 0 {
            break;
        }
        let hint = single.stderr.rsplit("--max-memory ").next();
        let next = hint.and_then(|hint| hint.split([',', '\n']).next());
        let next = next.expect("a budget that fits").trim().to_string();
        assert_ne!(next, budget, "{}", single.stderr);
        budget = next;
    }
    let line = format!(
        "sweep --model m --methods wanda --ratios {ratios} --save out --max-memory {budget} {flags}"
    );
    let ran = place.run(&line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let note =
        "  these cells follow one another: together they cannot begin (this run does not fit into ";
    assert!(ran.stderr.contains(note), "{}", ran.stderr);
    assert!(ran.stderr.contains("cell 40 of 40: wanda-0.59-seed0"), "{}", ran.stderr);
    assert_eq!(place.manifest("out/wanda-0.59-seed0").cells_at_once, None);
}

#[test]
fn a_shard_has_the_cells_of_as_few_seeds_as_possible() {
    let place = Place::new();
    for (shard, seed) in [("1/2", "seed0"), ("2/2", "seed1")] {
        let grid = GRID.replace(",magnitude", "");
        let ran = place.run(&format!("{grid} {TEXTS} --dry-run --shard {shard}"));
        assert_eq!(ran.stdout.lines().count(), 8);
        assert!(ran.stdout.lines().all(|line| line.ends_with(seed)), "{}", ran.stdout);
    }
}
