//! Saved masks.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prune::checkpoint::{Checkpoint, WeightSource};
use prune::job;
use prune::pipeline::{MaskObserver, PrunedMatrix};
use prune::pruning::Pattern;
use prune::run::Silent;
use prune::settings::{EvalSides, OutputSettings, Settings};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{prune_to, pruned};
use crate::support::{self, Place, sparsity};

/// Tensors and metadata of a masks file.
fn masks(path: &Path) -> (BTreeMap<String, Vec<u8>>, BTreeMap<String, String>) {
    let bytes = fs::read(path).expect("the masks were written");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let metadata = header.metadata().clone().unwrap_or_default();
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors = file
        .iter()
        .map(|(name, view)| {
            assert_eq!(view.dtype(), Dtype::U8);
            assert_eq!(view.shape(), [view.data().len()]);
            (name.to_owned(), view.data().to_vec())
        })
        .collect();
    (tensors, metadata.into_iter().collect())
}

#[test]
fn saved_masks_are_the_ones_of_run_json_and_of_the_zeros() {
    let place = Place::new();
    place.prune(
        "--model m --sparsity-ratio 0.6 --exclude model.layers.1.mlp.* --eval none \
         --save out --save-masks",
    );
    assert_eq!(
        place.names("out"),
        ["log_wanda.txt", "masks.safetensors", "model", "run.json"].map(String::from).into(),
        "no partial file"
    );
    let (masks, metadata) = masks(&place.path("out/masks.safetensors"));
    let manifest = place.manifest("out");
    let reported: BTreeMap<String, String> = manifest
        .layers
        .iter()
        .flat_map(|layer| &layer.matrices)
        .filter_map(|matrix| Some((matrix.name.clone(), matrix.mask_sha256.clone()?)))
        .collect();
    let hashes: BTreeMap<String, String> = masks
        .iter()
        .map(|(name, bits)| {
            let digest = Sha256::digest(bits);
            let hex = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            (name.clone(), hex)
        })
        .collect();
    assert_eq!(hashes, reported);
    assert_eq!(masks.len(), 11, "three matrices of layer 1 were left alone");

    // The settings that decide the result, as in run.json.
    for (name, text) in [
        ("prune_method", "wanda"),
        ("sparsity_ratio", "0.6"),
        ("sparsity_type", "unstructured"),
        ("exclude", r#"["model.layers.1.mlp.*"]"#),
        ("nsamples", "4"),
        ("seed", "0"),
        ("seqlen", "64"),
    ] {
        assert_eq!(metadata[name], text, "{name}");
        assert!(manifest.settings.contains_key(name), "{name}");
    }
    assert!(!metadata.contains_key("save"));
    assert_eq!(metadata["prune_masks"], "1");
    assert!(metadata["layout"].contains("1 = pruned"));
    let shapes: BTreeMap<String, [usize; 2]> = serde_json::from_str(&metadata["shapes"]).unwrap();
    let model = Checkpoint::open(&place.path("out/model")).unwrap();
    let dense = Checkpoint::open(&place.path("m")).unwrap();
    for (name, bits) in &masks {
        let entry = model.entry(&format!("{name}.weight")).unwrap();
        assert_eq!(entry.shape, shapes[name]);
        let (mut now, mut before) = (vec![0; entry.bytes as usize], vec![0; entry.bytes as usize]);
        model.read(entry, 0, &mut now).unwrap();
        dense.read(entry, 0, &mut before).unwrap();
        let ((now, _), (before, _)) = (now.as_chunks::<4>(), before.as_chunks::<4>());
        for (at, (now, before)) in now.iter().zip(before).enumerate() {
            let is_pruned = bits[at / 8] >> (at % 8) & 1 == 1;
            let expected = if is_pruned { &[0; 4] } else { before };
            assert_eq!(now, expected, "{name} at {at}");
        }
    }
}

/// Keeps the packed bits it is shown.
#[derive(Default)]
struct Seen(BTreeMap<String, Vec<u8>>);

impl MaskObserver for Seen {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> anyhow::Result<()> {
        let name = matrix.id.full_name(matrix.layer);
        self.0.insert(name, matrix.mask.bits().to_vec());
        Ok(())
    }
}

#[test]
fn a_watcher_of_the_caller_and_the_saved_masks_see_the_same() {
    let place = Place::new();
    let (model, save) = (place.path("m"), place.path("out"));
    let mut seen = Seen::default();
    let mut settings = Settings::pruning(model);
    settings.sparsity = Some(sparsity("magnitude", 0.5, Pattern::Unstructured));
    settings.evaluation.eval = EvalSides::None;
    settings.output = OutputSettings {
        save: Some(save.clone()),
        no_save_model: true,
        save_masks: true,
        ..OutputSettings::default()
    };
    job::prune(settings, &Silent, Some(&mut seen)).unwrap();
    assert_eq!(seen.0.len(), 14);
    assert!(seen.0 == masks(&save.join("masks.safetensors")).0);
}

#[test]
fn masks_go_with_the_run_they_belong_to() {
    let place = pruned("--sparsity-ratio 0.5 --save-masks");
    let (first, _) = masks(&place.path("out/masks.safetensors"));
    prune_to(&place, "out", "--sparsity-ratio 0.25 --save-masks --force");
    let (second, _) = masks(&place.path("out/masks.safetensors"));
    assert!(first != second);
    // As a killed run leaves it.
    fs::write(place.path("out/masks.safetensors.partial"), "half").unwrap();
    prune_to(&place, "out", "--sparsity-ratio 0.5 --force");
    assert_eq!(
        place.names("out"),
        ["log_magnitude.txt", "model", "run.json"].map(String::from).into(),
        "no masks of another run stay beside run.json"
    );
    // Masks need no model beside them.
    prune_to(&place, "alone", "--sparsity-ratio 0.5 --save-masks --no-save-model");
    assert!(masks(&place.path("alone/masks.safetensors")).0 == first);
}

#[test]
fn masks_without_a_place_of_their_own_are_refused_before_anything_runs() {
    let place = Place::new();
    let given = "--model m --sparsity-ratio 0.5 --save-masks";
    for (more, first, hint) in [
        (
            "",
            "error: --save-masks needs a run folder",
            "hint: add --save DIR; the masks become DIR/masks.safetensors",
        ),
        (
            "--save out --save-model ./out",
            "error: --save-masks would put masks.safetensors beside the model's weights",
            "hint: some programs load every .safetensors file of a folder; choose another --save-model folder",
        ),
    ] {
        let ran = place.run(&format!("{given} {more}"));
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        assert_eq!(ran.stderr.lines().next(), Some(first));
        assert_eq!(ran.stderr.lines().last(), Some(hint));
        assert!(!place.path("out").exists());
    }
}

#[test]
fn masks_lie_in_the_file_as_the_reference_saved_them() {
    let Some(shared) = support::shared() else {
        return;
    };
    let model = shared.join("models/stories260k").display().to_string();
    for (golden, flags) in
        [("0.5-unstructured", "--sparsity-ratio 0.5"), ("0.5-2of4", "--sparsity-type 2:4")]
    {
        let place = Place::empty();
        let arguments = [
            &format!("--model {model} --prune-method magnitude --eval"),
            "none --no-save-model --save out --save-masks",
            flags,
        ];
        let ran = place.run(&arguments.join(" "));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let name = format!("goldens/stories260k/stories260k-float32-magnitude-{golden}");
        let reference = fs::read(shared.join(format!("{name}.masks.safetensors"))).unwrap();
        let ours = fs::read(place.path("out/masks.safetensors")).unwrap();
        // The headers differ in their metadata; everything after them is equal, and the names with their places.
        let data = |file: &[u8]| {
            let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let mut header: BTreeMap<String, Value> =
                serde_json::from_slice(&file[8..8 + length]).unwrap();
            header.remove("__metadata__");
            (header, file[8 + length..].to_vec())
        };
        assert!(data(&ours) == data(&reference), "{golden}");
    }
}
