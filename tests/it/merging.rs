//! `prune merge`: the results of mergekit and of the papers' code, bits that depend on nothing but the command, and runs that were
//! interrupted.

mod bits;
mod devices;
mod distances;
mod goldens;
mod interrupted;
mod memory;
mod methods;
mod pruned;
mod random;
mod recipes;
mod stacks;
mod vocabulary;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;
use safetensors::{Dtype, SafeTensors};

use crate::support::Place;

/// Every tensor of a model of one file: shape and elements.
pub(crate) fn tensors(file: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f64>)> {
    let bytes = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            let elements = numbers(view.dtype(), view.data());
            (name, (view.shape().to_vec(), elements))
        })
        .collect()
}

/// Stored elements as numbers.
fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let words = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    let pairs = bytes.chunks(2);
    match dtype {
        Dtype::F64 => bytes
            .chunks(8)
            .map(|bytes| f64::from_le_bytes(bytes.try_into().expect("eight bytes")))
            .collect(),
        Dtype::F32 => bytes
            .chunks(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")).into())
            .collect(),
        Dtype::BF16 => pairs.map(|bytes| half::bf16::from_bits(words(bytes)).into()).collect(),
        Dtype::F16 => pairs.map(|bytes| half::f16::from_bits(words(bytes)).into()).collect(),
        other => panic!("{other:?} is no dtype of these tests"),
    }
}

/// A base `m` and two experts `e1` and `e2` of its shape, all of random weights, in files of a few tensors.
fn place(num_hidden_layers: usize) -> Place {
    let place = Place::empty();
    for (name, seed) in [("m", 0), ("e1", 1), ("e2", 2)] {
        place.checkpoint(
            name,
            &RandomCheckpoint {
                num_hidden_layers,
                dtype: StoredDtype::Bf16,
                max_shard: ByteSize(150_000),
                seed,
                ..RandomCheckpoint::default()
            },
        );
    }
    place
}

/// Runs `prune merge`, which must succeed, in the folder of a place.
fn merge(place: &Place, line: &str) {
    let ran = place.run(&format!("merge {line}"));
    assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
}
