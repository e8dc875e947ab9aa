//! Small bases and adapters for the tests of this room.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::TensorInfo;
use tempfile::TempDir;

use crate::checkpoint::{Checkpoint, encode_header};
use crate::linalg::{StoredDtype, StoredMatrix};

/// A tensor to put into a file.
#[derive(Clone)]
pub(super) struct TestTensor {
    name: String,
    shape: Vec<usize>,
    dtype: StoredDtype,
    pub(super) values: Vec<f32>,
}

/// A tensor of f32 with these values.
pub(super) fn tensor(name: &str, shape: &[usize], values: &[f32]) -> TestTensor {
    TestTensor {
        name: name.into(),
        shape: shape.to_vec(),
        dtype: StoredDtype::F32,
        values: values.to_vec(),
    }
}

/// A tensor of f32 whose elements all differ; `seed` moves them.
pub(super) fn waves(name: &str, shape: &[usize], seed: f32) -> TestTensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.7 + seed).sin()).collect();
    tensor(name, shape, &values)
}

impl TestTensor {
    /// The same values, stored as `dtype`.
    pub(super) fn stored_as(mut self, dtype: StoredDtype) -> Self {
        self.dtype = dtype;
        self
    }
}

/// Writes a safetensors file.
pub(super) fn write(folder: &Path, name: &str, tensors: &[TestTensor]) {
    let mut data = Vec::new();
    let mut infos = Vec::new();
    for tensor in tensors {
        let start = data.len();
        let count = tensor.values.len();
        let stored = StoredMatrix::from_f32(tensor.dtype, 1, count, &tensor.values);
        data.extend_from_slice(stored.as_bytes());
        let dtype = tensor.dtype.in_file();
        let info =
            TensorInfo { dtype, shape: tensor.shape.clone(), data_offsets: (start, data.len()) };
        infos.push((tensor.name.clone(), info));
    }
    let mut bytes = encode_header(&BTreeMap::new(), &infos);
    bytes.extend_from_slice(&data);
    fs::write(folder.join(name), bytes).unwrap();
}

/// An adapter's folder.
pub(super) fn adapter(config: &str, tensors: &[TestTensor]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("adapter_config.json"), config).unwrap();
    write(folder.path(), "adapter_model.safetensors", tensors);
    folder
}

/// The tensors of [`base`]: a linear layer `q` of 3 x 4 with a bias, a linear layer `v` of 2 x 4, an embedding `embed` of 5 x 4.
pub(super) fn base_tensors(dtype: StoredDtype) -> Vec<TestTensor> {
    [
        waves("q.weight", &[3, 4], 0.1),
        waves("q.bias", &[3], 0.2),
        waves("v.weight", &[2, 4], 0.3),
        waves("embed.weight", &[5, 4], 0.4),
    ]
    .map(|tensor| tensor.stored_as(dtype))
    .to_vec()
}

/// A base model.
pub(super) fn base(dtype: StoredDtype) -> (TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "model.safetensors", &base_tensors(dtype));
    let base = Checkpoint::open(folder.path()).unwrap();
    (folder, base)
}

/// A config with rank 2, α 4 and these settings.
pub(super) fn config(settings: &str) -> String {
    format!(r#"{{"peft_type": "LORA", "r": 2, "lora_alpha": 4{settings}}}"#)
}

/// The factors of a linear layer, rank 2.
pub(super) fn pair(module: &str, rows: usize, columns: usize) -> Vec<TestTensor> {
    let key = |ending: &str| format!("base_model.model.{module}.{ending}.weight");
    vec![waves(&key("lora_A"), &[2, columns], 1.0), waves(&key("lora_B"), &[rows, 2], 2.0)]
}
