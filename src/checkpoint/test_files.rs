//! Small checkpoints for the tests of this room.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use super::header::encode_header;

/// A tensor to put into a test file.
#[derive(Debug, Clone)]
pub(super) struct TestTensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) data: Vec<u8>,
}

/// A tensor of `dtype` whose element `i` is `i + 1`, so none is zero and every place differs.
pub(super) fn counting(name: &str, dtype: Dtype, shape: &[usize]) -> TestTensor {
    let values = 1..=shape.iter().product::<usize>();
    let data = values.flat_map(|value| element(dtype, value as f32)).collect();
    TestTensor { name: name.into(), dtype, shape: shape.to_vec(), data }
}

/// The stored bytes of an element.
pub(super) fn element(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::F32 => value.to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::I64 => (value as i64).to_le_bytes().to_vec(),
        other => panic!("no test needs {other}"),
    }
}

/// The bytes of a safetensors file, with `format` in its metadata where given.
pub(super) fn file_bytes(format: Option<&str>, tensors: &[TestTensor]) -> Vec<u8> {
    let metadata: BTreeMap<String, String> =
        format.map(|format| ("format".into(), format.into())).into_iter().collect();
    let mut start = 0;
    let infos: Vec<(String, TensorInfo)> = tensors
        .iter()
        .map(|tensor| {
            let data_offsets = (start, start + tensor.data.len());
            start = data_offsets.1;
            (
                tensor.name.clone(),
                TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets },
            )
        })
        .collect();
    let mut bytes = encode_header(&metadata, &infos);
    for tensor in tensors {
        bytes.extend_from_slice(&tensor.data);
    }
    bytes
}

/// A file with any header text and `data_bytes` zeros.
pub(super) fn file_with_header(json: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

/// A matrix in each of the three dtypes, and an I64 that no method touches.
pub(super) fn mixed_tensors() -> Vec<TestTensor> {
    vec![
        counting("a.weight", Dtype::F32, &[4, 8]),
        counting("b.weight", Dtype::F16, &[2, 8]),
        counting("c.weight", Dtype::BF16, &[2, 4]),
        counting("d.ids", Dtype::I64, &[3]),
    ]
}

/// `mixed_tensors` in a single file, with a few sidecars.
pub(super) fn write_single(folder: &Path, format: Option<&str>) {
    write(folder, "model.safetensors", &file_bytes(format, &mixed_tensors()));
    write_sidecars(folder);
}

/// `mixed_tensors` in two files and an index.
pub(super) fn write_sharded(folder: &Path) {
    let tensors = mixed_tensors();
    let mut weight_map = serde_json::Map::new();
    for (at, part) in tensors.chunks(2).enumerate() {
        let name = format!("model-0000{}-of-00002.safetensors", at + 1);
        write(folder, &name, &file_bytes(Some("pt"), part));
        weight_map.extend(part.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
    }
    write_index(folder, &serde_json::Value::Object(weight_map));
    write_sidecars(folder);
}

/// An index with this `weight_map`.
pub(super) fn write_index(folder: &Path, weight_map: &serde_json::Value) {
    let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
    write(folder, "model.safetensors.index.json", index.to_string().as_bytes());
}

fn write_sidecars(folder: &Path) {
    for name in ["config.json", "tokenizer.json", "LICENSE.txt"] {
        write(folder, name, format!("content of {name}").as_bytes());
    }
}

/// Writes a file of a test folder.
pub(super) fn write(folder: &Path, name: &str, bytes: &[u8]) {
    fs::write(folder.join(name), bytes).expect("the temporary folder is writable");
}

/// An empty folder that is removed with the test.
pub(super) fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("the system has a temporary folder")
}
