//! The output folder, read by candle and by the safetensors crate.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result};
use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;
use safetensors::SafeTensors;

use super::{LOGITS, compare, distance, ours, prompt, sharp};
use crate::support;

/// Name, dtype, shape and stored bytes of every tensor in a folder of one shard.
fn stored(folder: &Path) -> Result<HashMap<String, (String, Vec<u8>)>> {
    let bytes = std::fs::read(folder.join("model.safetensors"))?;
    let tensors = SafeTensors::deserialize(&bytes)?;
    let owned = tensors.iter().map(|(name, view)| {
        (
            name.to_owned(),
            (
                format!("{:?} {:?}", view.dtype(), view.shape()),
                view.data().to_vec(),
            ),
        )
    });
    Ok(owned.collect())
}

#[test]
fn a_pruned_folder_loads_in_candle_and_differs_from_its_source_only_by_zeros() {
    let text: String = (0..4000)
        .map(|i| char::from(b'a' + (i * i % 25) as u8))
        .collect();
    let runs = [
        ("wanda", "unstructured", StoredDtype::Bf16, 2),
        ("wanda", "2:4", StoredDtype::F16, 2),
        ("magnitude", "unstructured", StoredDtype::F32, 4),
    ];
    for (method, pattern, dtype, element_bytes) in runs {
        let source = sharp(&RandomCheckpoint {
            dtype,
            ..RandomCheckpoint::default()
        })
        .unwrap();
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("text.txt"), &text).unwrap();
        let folder = place.path().display();
        let model = source.path().display();
        let arguments = format!(
            "--model {model} --prune-method {method} --sparsity-type {pattern} --sparsity-ratio 0.5 \
             --dataset {folder}/text.txt --nsamples 4 --seqlen 64 --eval none --save {folder}/run \
             --text-cache {folder}/cache"
        );
        support::prune_in_process(&arguments, None).unwrap();
        let output = place.path().join("run").join("model");
        compare(&output, &[1, 5, 200]).context(method).unwrap();
        let tokens = prompt(200, 320);
        let moved = distance(
            &ours(&output, &tokens).unwrap(),
            &ours(source.path(), &tokens).unwrap(),
        );
        assert!(
            moved > 100.0 * LOGITS,
            "pruning changed logits by {moved} only"
        );

        let (before, mut after) = (stored(source.path()).unwrap(), stored(&output).unwrap());
        for (name, (kind, before)) in before {
            let (kind_after, after) = after.remove(&name).unwrap();
            assert_eq!(kind, kind_after, "{name}");
            let is_zero = |element: &&[u8]| element.iter().all(|byte| *byte == 0);
            let elements = before
                .chunks(element_bytes)
                .zip(after.chunks(element_bytes));
            let changed = elements.filter(|(before, after)| before != after);
            let changed: Vec<&[u8]> = changed.map(|(_, after)| after).collect();
            assert!(
                changed.iter().all(is_zero),
                "{name}: a weight that was kept changed"
            );
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
