//! Runs with methods that change weights, refinements, other ways of the samples, and measured ratios: the same bytes after a kill, with
//! one thread and with eight, and with the statistics of one input at a time.

use std::collections::BTreeMap;

use super::{of_layers, outcome, with_fault};
use crate::support::Place;

/// What a run adds to the common flags.
const RUNS: [&str; 11] = [
    "--prune-method sparsegpt --sparsity-ratio 0.5",
    "--prune-method sparsegpt --blocksize 32 --percdamp 0.1 --sparsity-type 2:4",
    "--prune-method sparsegpt --sparsity-ratio 0.5 --true-sequential",
    "--prune-method sparsegpt --sparsity-ratio 0.5 --propagate dense",
    "--prune-method alps --sparsity-type 2:4",
    "--prune-method ladder --sparsity-ratio 0.6 --allocate error",
    "--sparsity-ratio 0.6 --refine weights",
    "--sparsity-ratio 0.6 --refine dsnot --dsnot-mlp",
    "--sparsity-ratio 0.6 --allocate owl",
    "--sparsity-type 2:4 --permute-channels",
    "--prune-method sparsegpt --sparsity-type 2:4 --permute-channels",
];

fn flags(run: &str, more: &str) -> String {
    format!("--model m {run} --eval pruned --save-masks --save out {more}")
}

/// The weights and masks of the finished run.
fn weights(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let mut files = outcome(&place.path("out"));
    files.retain(|name, _| name.ends_with(".safetensors"));
    assert!(files.len() > 1, "{:?}", files.keys());
    files
}

#[test]
fn methods_that_repair_leave_the_same_bytes_whatever_happens() {
    for run in RUNS {
        let place = of_layers(3);
        let finish = |more: &str| {
            let ran = place.prune(&flags(run, more));
            assert_eq!(ran.code, 0, "{run} {more}: {}", ran.stderr);
            weights(&place)
        };
        let undisturbed = finish("--threads 1");
        for more in [
            "--threads 8",
            r#"--memory-settings {"statistics":"input","mlp_tokens":7}"#,
            r#"--memory-settings {"weights":"matrix"} --hidden-states disk"#,
        ] {
            assert!(finish(&format!("{more} --force")) == undisturbed, "{run} {more}");
        }
        let mut killed = 0;
        for at in [60, 90, 120] {
            let forced = flags(run, "--force");
            if with_fault(&place, &forced, &format!("kill:{at}")).is_some() {
                break;
            }
            killed += 1;
            assert!(finish("") == undisturbed, "{run}: killed at operation {at}");
        }
        assert!(killed > 0, "{run}: every run was over before its kill");
    }
}
