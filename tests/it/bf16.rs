//! `--dtype bf16`: products in bf16 where the CPU has them, refused with a reason elsewhere.

use prune::demo::RandomCheckpoint;
use prune::linalg::{StoredDtype, bf16::Kernel};
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
    if Kernel::best().is_none() {
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
