//! `--dtype bf16`: products in bf16 where the CPU has them, refused with a reason elsewhere.

use prune::demo::RandomCheckpoint;
use prune::linalg::{StoredDtype, product::Kernel};
use prune::run::Manifest;

use crate::cli::Place;

fn bf16_checkpoint() -> Place {
    Place::with(&RandomCheckpoint {
        hidden_size: 192,
        intermediate_size: 520,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    })
}

fn masks(run: &Manifest) -> Vec<Option<&str>> {
    let matrices = run.layers.iter().flat_map(|layer| &layer.matrices);
    matrices
        .map(|matrix| matrix.mask_sha256.as_deref())
        .collect()
}

fn perplexities(run: &Manifest) -> [f64; 2] {
    [run.perplexity.dense, run.perplexity.pruned]
        .map(|report| report.expect("both were measured").perplexity)
}

#[test]
fn results_are_near_those_of_f32_and_depend_on_nothing_else() {
    let place = bf16_checkpoint();
    let run = |save: &str, more: &[&str]| {
        place.prune(
            &[
                &[
                    "--model",
                    "m",
                    "--sparsity-ratio",
                    "0.5",
                    "--eval",
                    "both",
                    "--save",
                    save,
                ],
                more,
            ]
            .concat(),
        );
        place.manifest(save)
    };
    if Kernel::best_bf16().is_none() {
        let ran = place.run(&[
            "--model",
            "m",
            "--sparsity-ratio",
            "0.5",
            "--dtype",
            "bf16",
            "--eval",
            "none",
        ]);
        assert_eq!(ran.code, 1);
        assert!(
            ran.stderr.contains("no bf16 products") && ran.stderr.contains("--dtype f32"),
            "{}",
            ran.stderr
        );
        eprintln!("skipped: this CPU has no bf16 products to compare");
        return;
    }
    let (wide, narrow) = (
        run("f32", &["--dtype", "f32"]),
        run("bf16", &["--dtype", "bf16"]),
    );
    assert_eq!(
        (
            wide.arithmetic.dtype.as_str(),
            narrow.arithmetic.dtype.as_str()
        ),
        ("f32", "bf16")
    );
    assert!(
        narrow.arithmetic.kernel.contains("bf16"),
        "{}",
        narrow.arithmetic.kernel
    );
    for (wide, narrow) in perplexities(&wide).into_iter().zip(perplexities(&narrow)) {
        assert!((wide / narrow - 1.0).abs() < 0.01, "{wide} {narrow}");
        assert_ne!(wide, narrow, "the other products were used");
    }
    let by_default = run("default", &[]);
    assert_eq!(by_default.arithmetic.dtype, "bf16", "what auto takes");
    assert_eq!(masks(&narrow), masks(&by_default));
    for more in [
        &["--threads", "1"][..],
        &["--hidden-states", "disk"],
        &[
            "--knobs",
            r#"{"weights": "matrix", "prefetch": false, "mlp_tokens": 16}"#,
        ],
        &["--knobs", r#"{"keep_packed": false}"#],
        &["--knobs", r#"{"attention_heads": 1}"#],
    ] {
        let other = run("other", &[&["--dtype", "bf16", "--force"], more].concat());
        assert_eq!(masks(&narrow), masks(&other), "{more:?}");
        assert_eq!(perplexities(&narrow), perplexities(&other), "{more:?}");
    }
}

#[test]
fn other_checkpoints_are_refused() {
    let place = Place::new();
    let ran = place.run(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--dtype",
        "bf16",
        "--eval",
        "none",
    ]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(
        ran.stderr
            .contains("--dtype bf16 is for bf16 checkpoints, and this one is f32"),
        "{}",
        ran.stderr
    );
}

/// A machine in a file does not say what its CPU multiplies: bf16 is planned where it is asked for.
#[test]
fn a_plan_is_made_for_the_arithmetic_it_is_asked_for() {
    let place = Place::new();
    let machine = r#"{"cpu": {"memory": "64GiB", "threads": 4}}"#;
    std::fs::write(place.path("machine.json"), machine).expect("a file can be written");
    let planned = |more: &[&str]| {
        let base = [
            "plan",
            "--shape",
            "llama-3.2-1b",
            "--inventory",
            "machine.json",
            "--json",
        ];
        let ran = place.run(&[&base, more].concat());
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran.stdout
    };
    let (f32, bf16) = (planned(&["--dtype", "f32"]), planned(&["--dtype", "bf16"]));
    assert_eq!(planned(&[]), f32);
    assert!(bf16.contains("this layer, packed") && !f32.contains("this layer, packed"));
}
