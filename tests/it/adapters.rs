//! LoRA adapters: folded into their base, and combined as peft combines them, against what peft 0.21.2 computed; and adapters that are
//! refused.
//!
//! The goldens and their adapters are in `goldens/merge` and `models/stories260k-experts`; `support::shared` finds them.

mod combined;
mod goldens;
mod hostile;
mod tied;
mod tokens;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prune::bytes::hex;
use prune::checkpoint::{Checkpoint, WeightSource, encode_header};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::support::Place;

/// A tensor of f32.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Tensor {
    /// The largest magnitude.
    fn largest(&self) -> f64 {
        let magnitudes = self.values.iter().map(|value| f64::from(value.abs()));
        magnitudes.fold(0.0, f64::max)
    }

    /// SHA-256 of its bytes.
    fn sha256(&self) -> String {
        hex(&Sha256::digest(bytemuck::cast_slice(&self.values)))
    }
}

/// The tensors of one file, which are f32.
fn tensors(folder: &Path, file: &str) -> BTreeMap<String, Tensor> {
    let checkpoint = Checkpoint::open_file(folder, file).expect("a safetensors file");
    let read = |entry: &prune::checkpoint::TensorEntry| {
        assert_eq!(entry.dtype, Dtype::F32, "{}", entry.name);
        let mut values = vec![0.0f32; entry.elements()];
        checkpoint.read(entry, 0, bytemuck::cast_slice_mut(&mut values)).expect("it is there");
        Tensor { shape: entry.shape.clone(), values }
    };
    let tensors = checkpoint.tensors();
    tensors.map(|entry| (entry.name.clone(), read(entry))).collect()
}

/// The merged model of a run folder.
fn merged(place: &Place, run: &str) -> BTreeMap<String, Tensor> {
    tensors(&place.path(run).join("model"), "model.safetensors")
}

/// The combined adapter of a run folder.
fn combined_adapter(place: &Place, run: &str) -> BTreeMap<String, Tensor> {
    tensors(&place.path(run).join("adapter"), "adapter_model.safetensors")
}

/// Runs `prune merge` with these flags. The run must succeed.
#[track_caller]
fn merge(place: &Place, flags: &str) {
    let ran = place.run(&format!("merge {flags}"));
    assert_eq!(ran.code, 0, "{flags}\n{}", ran.stderr);
}

/// Writes an adapter: a config, and tensors of f32 by their keys.
pub(crate) fn write_adapter(
    place: &Place,
    name: &str,
    config: &Value,
    tensors: &[(String, Tensor)],
) {
    let folder = place.path(name);
    fs::create_dir_all(&folder).expect("a new folder");
    fs::write(folder.join("adapter_config.json"), config.to_string()).expect("a new file");
    let (mut infos, mut data): (_, Vec<u8>) = (Vec::new(), Vec::new());
    for (key, tensor) in tensors {
        let start = data.len();
        data.extend_from_slice(bytemuck::cast_slice(&tensor.values));
        let info = TensorInfo {
            dtype: Dtype::F32,
            shape: tensor.shape.clone(),
            data_offsets: (start, data.len()),
        };
        infos.push((key.clone(), info));
    }
    let mut file = encode_header(&BTreeMap::new(), &infos);
    file.extend(data);
    fs::write(folder.join("adapter_model.safetensors"), file).expect("a new file");
}

/// A tensor of these values.
pub(crate) fn tensor(shape: &[usize], values: Vec<f32>) -> Tensor {
    Tensor { shape: shape.to_vec(), values }
}

/// Elements that all differ, in `[-0.1, 0.1]`; `seed` moves them.
fn waves(shape: &[usize], seed: f32) -> Tensor {
    let count = shape.iter().product::<usize>();
    Tensor {
        shape: shape.to_vec(),
        values: (0..count).map(|at| 0.1 * (at as f32 * 0.7 + seed).sin()).collect(),
    }
}

/// The two factors of a linear layer.
pub(crate) fn pair(
    module: &str,
    rank: usize,
    rows: usize,
    columns: usize,
) -> Vec<(String, Tensor)> {
    let key = |factor: &str| format!("base_model.model.{module}.{factor}.weight");
    vec![(key("lora_A"), waves(&[rank, columns], 1.0)), (key("lora_B"), waves(&[rows, rank], 2.0))]
}
