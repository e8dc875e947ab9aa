//! Checkpoint files with arbitrary damage: an error, never a panic.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use prune::checkpoint::Checkpoint;
use prune::model::{DecoderLayer, ModelConfig};

use prune::synthetic::RandomCheckpoint;

use crate::support::{Place, TEXTS, rewrite};

/// Opens a folder as a run does, down to the shapes; what it says does not matter here.
fn open(folder: &Path) -> anyhow::Result<()> {
    let config = ModelConfig::load(folder)?;
    let checkpoint = Checkpoint::open(folder)?;
    for layer in 0..config.num_hidden_layers {
        DecoderLayer::check(&checkpoint, &config, layer)?;
    }
    Ok(())
}

/// Some bytes replaced: where (as a fraction of the length) and by what.
fn mutations() -> impl Strategy<Value = Vec<(f64, u8)>> {
    // Half of the bytes are digits and marks, which keep JSON alive and change what it says.
    let byte = prop_oneof![any::<u8>(), prop::sample::select(b"0123456789,:{}[]\"- ".to_vec())];
    prop::collection::vec((0.0..1.0f64, byte), 1..6)
}

fn mutated(bytes: &[u8], length: usize, mutations: &[(f64, u8)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (at, byte) in mutations {
        bytes[(at * length as f64) as usize] = *byte;
    }
    bytes
}

#[test]
fn a_weight_that_is_not_finite_is_an_error_with_a_remedy_and_no_promise_to_continue() {
    let place = Place::new();
    rewrite(&place, |name, _, bytes| {
        if name == "model.layers.1.mlp.up_proj.weight" {
            bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        true
    });
    place.checkpoint("good", &RandomCheckpoint::default());
    for (line, kept) in [
        ("--model m --sparsity-ratio 0.5 --prune-method magnitude --save out", true),
        ("--model m --sparsity-ratio 0.5 --prune-method sparsegpt --save out", true),
        ("quantize --to nf4 m --save out", true),
    ] {
        let texts = if line.starts_with("quantize") { "" } else { TEXTS };
        let ran = place.run(&format!("{line} {texts}"));
        assert_eq!(ran.code, 1, "{line}\n{}", ran.stderr);
        assert!(ran.stderr.contains("model.layers.1.mlp.up_proj"), "{line}\n{}", ran.stderr);
        let hint = ran.stderr.lines().last().unwrap_or_default();
        assert!(hint.starts_with("hint: ") && hint.contains("--force"), "{line}\n{}", ran.stderr);
        assert!(!ran.stderr.contains("continues"), "{line}\n{}", ran.stderr);
        assert_eq!(place.path("out/unfinished.json").exists(), kept, "{line}");
        // The remedy: another checkpoint, and --force.
        let forced = line.replace("m --", "good --");
        let ran = place.run(&format!("{forced} {texts} --force"));
        assert_eq!(ran.code, 0, "{forced}\n{}", ran.stderr);
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_in_a_header_or_a_config_make_opening_panic(
        header in mutations(),
        config in mutations(),
        cut in 0.0..1.0f64,
    ) {
        let place = Place::new();
        let folder = place.path("m");
        let (weights_path, config_path) = (folder.join("model.safetensors"), folder.join("config.json"));
        let weights = fs::read(&weights_path).expect("it was written");
        let settings = fs::read(&config_path).expect("it was written");
        prop_assert!(open(&folder).is_ok());
        let mut length = [0; 8];
        length.copy_from_slice(&weights[..8]);
        let header_end = 8 + u64::from_le_bytes(length) as usize;

        fs::write(&weights_path, mutated(&weights, header_end, &header)).expect("it can be replaced");
        let _ = open(&folder);
        fs::write(&weights_path, &weights[..(cut * weights.len() as f64) as usize]).expect("it can be replaced");
        prop_assert!(open(&folder).is_err());
        fs::write(&weights_path, &weights).expect("it can be replaced");
        fs::write(&config_path, mutated(&settings, settings.len(), &config)).expect("it can be replaced");
        let _ = open(&folder);
    }
}
