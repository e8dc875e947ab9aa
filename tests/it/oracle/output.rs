//! The output folder, read by candle and by the safetensors crate.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result};
use prune::job;
use prune::linalg::StoredDtype;
use prune::pruning::Pattern;
use prune::run::Silent;
use prune::settings::{CalibrationSettings, EvalSides, Settings};
use prune::synthetic::RandomCheckpoint;
use safetensors::SafeTensors;

use super::{LOGITS, compare, distance, ours, prompt, sharp};
use crate::support::sparsity;

/// Name, dtype, shape and stored bytes of every tensor in a folder of one shard.
fn stored(folder: &Path) -> Result<HashMap<String, (String, Vec<u8>)>> {
    let bytes = std::fs::read(folder.join("model.safetensors"))?;
    let tensors = SafeTensors::deserialize(&bytes)?;
    let owned = tensors.iter().map(|(name, view)| {
        (name.to_owned(), (format!("{:?} {:?}", view.dtype(), view.shape()), view.data().to_vec()))
    });
    Ok(owned.collect())
}

#[test]
fn a_pruned_folder_loads_in_candle_and_differs_from_its_source_only_by_zeros() {
    let text: String = (0..4000).map(|i| char::from(b'a' + (i * i % 25) as u8)).collect();
    let runs = [
        ("wanda", Pattern::Unstructured, StoredDtype::Bf16, 2),
        ("wanda", Pattern::NOfM { n: 2, m: 4 }, StoredDtype::F16, 2),
        ("magnitude", Pattern::Unstructured, StoredDtype::F32, 4),
    ];
    for (method, pattern, dtype, element_bytes) in runs {
        let source = sharp(&RandomCheckpoint { dtype, ..RandomCheckpoint::default() }).unwrap();
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("text.txt"), &text).unwrap();
        let mut settings = Settings::pruning(source.path());
        settings.sparsity = Some(sparsity(method, 0.5, pattern));
        settings.calibration = Some(CalibrationSettings {
            dataset: place.path().join("text.txt").display().to_string().parse().unwrap(),
            nsamples: 4,
            ..CalibrationSettings::default()
        });
        settings.seqlen = Some(64);
        settings.evaluation.eval = EvalSides::None;
        settings.evaluation.text_cache = Some(place.path().join("cache"));
        settings.output.save = Some(place.path().join("run"));
        job::prune(settings, &Silent, None).unwrap();
        let output = place.path().join("run").join("model");
        compare(&output, &[1, 5, 200]).context(method).unwrap();
        let tokens = prompt(200, 320);
        let moved =
            distance(&ours(&output, &tokens).unwrap(), &ours(source.path(), &tokens).unwrap());
        assert!(moved > 100.0 * LOGITS, "pruning changed logits by {moved} only");

        let (before, mut after) = (stored(source.path()).unwrap(), stored(&output).unwrap());
        for (name, (kind, before)) in before {
            let (kind_after, after) = after.remove(&name).unwrap();
            assert_eq!(kind, kind_after, "{name}");
            let is_zero = |element: &&[u8]| element.iter().all(|byte| *byte == 0);
            let elements = before.chunks(element_bytes).zip(after.chunks(element_bytes));
            let changed = elements.filter(|(before, after)| before != after);
            let changed: Vec<&[u8]> = changed.map(|(_, after)| after).collect();
            assert!(changed.iter().all(is_zero), "{name}: a weight that was kept changed");
            let zeros = after.chunks(element_bytes).filter(is_zero).count();
            if name.contains("_proj.weight") {
                let weights = after.len() / element_bytes;
                assert!(
                    (weights / 2..=weights / 2 + weights / 100).contains(&zeros),
                    "{name}: {zeros} of {weights}"
                );
            } else {
                assert!(changed.is_empty(), "{name} is no matrix of a decoder layer");
            }
        }
        assert!(after.is_empty(), "{:?}", after.keys());
    }
}
