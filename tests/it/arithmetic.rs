//! `--dtype`: products in bf16, and in f32 by parts, on CPUs that have them. Other CPUs refuse with a reason.

use prune::linalg::{StoredDtype, product::Kernel};
use prune::run::Manifest;
use prune::synthetic::RandomCheckpoint;

use half::bf16;
use prune::checkpoint::Checkpoint;
use prune::model::{Dtypes, ModelConfig, stored_dtypes};

use crate::support::{Place, rewrite};

fn checkpoint(dtype: StoredDtype) -> Place {
    Place::with(&RandomCheckpoint {
        hidden_size: 192,
        intermediate_size: 520,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        dtype,
        ..RandomCheckpoint::default()
    })
}

fn masks(run: &Manifest) -> Vec<Option<&str>> {
    let matrices = run.layers.iter().flat_map(|layer| &layer.matrices);
    matrices.map(|matrix| matrix.mask_sha256.as_deref()).collect()
}

fn perplexities(run: &Manifest) -> [f64; 2] {
    [run.perplexity.dense, run.perplexity.pruned]
        .map(|report| report.expect("both were measured").perplexity)
}

/// A run with both perplexities.
fn run(place: &Place, save: &str, more: &str) -> Manifest {
    let flags = format!("--model m --sparsity-ratio 0.5 --eval both --save {save}");
    place.prune(&format!("{flags} {more}"));
    place.manifest(save)
}

/// Asks for arithmetic that this CPU does not have.
fn is_refused(place: &Place, dtype: &str, reason: &str) {
    let flags = format!("--model m --sparsity-ratio 0.5 --eval none --dtype {dtype}");
    let ran = place.run(&flags);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains(reason) && ran.stderr.contains("--dtype f32"), "{}", ran.stderr);
    eprintln!("skipped: {reason} to compare");
}

/// Neither threads nor the way work is cut up change what comes out.
fn depends_on_nothing_else(place: &Place, dtype: &str, as_it_is: &Manifest) {
    for more in [
        "--threads 1",
        "--hidden-states disk",
        r#"--memory-settings {"weights":"matrix","prefetch":false,"mlp_tokens":16}"#,
        r#"--memory-settings {"keep_packed":false}"#,
        r#"--memory-settings {"attention_heads":1}"#,
    ] {
        let other = run(place, "other", &format!("--dtype {dtype} --force {more}"));
        assert_eq!(masks(as_it_is), masks(&other), "{more:?}");
        assert_eq!(perplexities(as_it_is), perplexities(&other), "{more:?}");
    }
}

#[test]
fn bf16_results_are_near_those_of_f32_and_depend_on_nothing_else() {
    for dtype in [StoredDtype::Bf16, StoredDtype::F16, StoredDtype::F32] {
        let place = checkpoint(dtype);
        if Kernel::best_bf16().is_none() {
            return is_refused(&place, "bf16", "no bf16 products");
        }
        let wide = run(&place, "f32", "--dtype f32");
        let narrow = run(&place, "bf16", "--dtype bf16");
        assert_eq!(wide.arithmetic.dtype, "f32");
        assert_eq!(narrow.arithmetic.dtype, "bf16");
        assert!(narrow.arithmetic.kernel.contains("bf16"), "{}", narrow.arithmetic.kernel);
        for (wide, narrow) in perplexities(&wide).into_iter().zip(perplexities(&narrow)) {
            assert!((wide / narrow - 1.0).abs() < 0.01, "{dtype:?}: {wide} {narrow}");
            assert_ne!(wide, narrow, "the other products were used");
        }
        let by_default = run(&place, "default", "");
        match dtype {
            StoredDtype::Bf16 => {
                assert_eq!(by_default.arithmetic.dtype, "bf16", "what auto takes");
                assert_eq!(masks(&narrow), masks(&by_default));
            }
            // Weights of other checkpoints would be rounded: that has to be asked for.
            _ => assert_eq!(by_default.arithmetic.dtype, "f32", "what auto takes"),
        }
        depends_on_nothing_else(&place, "bf16", &narrow);
    }
}

#[test]
fn f32_by_parts_is_f32_and_depends_on_nothing_else() {
    for dtype in [StoredDtype::Bf16, StoredDtype::F16, StoredDtype::F32] {
        let place = checkpoint(dtype);
        if !Kernel::has_split() {
            return is_refused(&place, "bf16x3", "no AMX tiles");
        }
        let fused = run(&place, "f32", "--dtype f32");
        let parts = run(&place, "parts", "--dtype bf16x3");
        assert_eq!(parts.arithmetic.dtype, "f32");
        assert_ne!(parts.arithmetic.kernel, fused.arithmetic.kernel);
        for (fused, parts) in perplexities(&fused).into_iter().zip(perplexities(&parts)) {
            // Rounding moves them in the eighth digit; a near-tie that falls the other way may move the pruned one further.
            assert!((fused / parts - 1.0).abs() < 1e-6, "{dtype:?}: {fused} {parts}");
            assert_ne!(fused, parts, "the other products were used");
        }
        let equal = masks(&fused).iter().zip(masks(&parts)).filter(|(a, b)| *a == b).count();
        // A near-tie may fall the other way; these are 14 matrices.
        assert!(equal + 2 >= masks(&fused).len(), "{dtype:?}: {equal} masks are equal");
        if dtype != StoredDtype::Bf16 {
            let by_default = run(&place, "default", "");
            assert_eq!(by_default.arithmetic.kernel, parts.arithmetic.kernel, "what auto takes");
            assert_eq!(masks(&parts), masks(&by_default));
        }
        if dtype == StoredDtype::F16 {
            depends_on_nothing_else(&place, "bf16x3", &parts);
        }
    }
}

/// A machine in a file does not say what its CPU multiplies: bf16 is planned where it is asked for.
#[test]
fn a_plan_is_made_for_the_arithmetic_it_is_asked_for() {
    let place = Place::new();
    let machine = r#"{"cpu": {"memory": "64GiB", "threads": 4}}"#;
    std::fs::write(place.path("machine.json"), machine).expect("a file can be written");
    let planned = |more: &str| {
        let base = "plan --shape llama-3.2-1b --inventory machine.json --json";
        let ran = place.run(&format!("{base} {more}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran.stdout
    };
    let (f32, bf16) = (planned("--dtype f32"), planned("--dtype bf16"));
    assert_eq!(planned(""), f32);
    assert!(bf16.contains("this layer, packed") && !f32.contains("this layer, packed"));
}

/// Matrices that read the same rows in different dtypes: what comes out is what the same numbers give in one.
#[test]
fn dtypes_may_be_mixed_within_a_layer() {
    let names = [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "lm_head.weight",
    ];
    let place = checkpoint(StoredDtype::F32);
    let rounded = |bytes: &[u8]| -> Vec<bf16> {
        let (numbers, _) = bytes.as_chunks::<4>();
        let numbers = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
        numbers.map(bf16::from_f32).collect()
    };
    rewrite(&place, |name, _, bytes| {
        if names.contains(&name) {
            let rounded = rounded(bytes);
            *bytes = rounded.iter().flat_map(|number| number.to_f32().to_le_bytes()).collect();
        }
        true
    });
    let wide = run(&place, "wide", "--dtype f32");
    rewrite(&place, |name, info, bytes| {
        if names.contains(&name) {
            info.dtype = safetensors::Dtype::BF16;
            let rounded = rounded(bytes);
            *bytes = rounded.iter().flat_map(|number| number.to_le_bytes()).collect();
        }
        true
    });
    let mixed = run(&place, "mixed", "--dtype f32");
    assert_eq!(masks(&wide), masks(&mixed));
    assert_eq!(perplexities(&wide), perplexities(&mixed));

    let path = place.path("m");
    let (source, config) = (
        Checkpoint::open(&path).expect("just written"),
        ModelConfig::load(&path).expect("just written"),
    );
    let dtypes = Dtypes { layers: StoredDtype::F32, head: StoredDtype::Bf16 };
    assert_eq!(stored_dtypes(&source, &config), dtypes);
    let ran = place.run("plan --model m");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}
