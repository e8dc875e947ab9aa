//! The tensors that store an NF4 matrix `P.weight`, as bitsandbytes names them:
//!
//! | name | form |
//! | --- | --- |
//! | `P.weight` | u8 `[weights / 2, 1]`, two codes per byte |
//! | `P.weight.absmax` | f32 `[blocks]`; with double quantisation u8 codes |
//! | `P.weight.quant_map` | f32 `[16]`, the codebook |
//! | `P.weight.nested_absmax` | f32 `[blocks / 256]`, with double quantisation only |
//! | `P.weight.nested_quant_map` | f32 `[256]`, the signed dynamic map, with double quantisation only |
//! | `P.weight.quant_state.bitsandbytes__nf4` | u8, JSON: dtype and shape of the dense matrix, sizes of blocks, the offset of the scales |

use anyhow::Result;
use clap::ValueEnum;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{PlannedTensor, TensorEntry};
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::linalg::dynamic_map::DynamicMap;
use crate::linalg::nf4::{self, BLOCK, CODEBOOK, NESTED_BLOCK};

/// The end of the name of a `quant_state`.
pub(super) const STATE: &str = ".quant_state.bitsandbytes__nf4";
/// The ends of the names of the tensors beside `P.weight` and the `quant_state`.
pub(super) const ABSMAX: &str = ".absmax";
pub(super) const QUANT_MAP: &str = ".quant_map";
pub(super) const NESTED_ABSMAX: &str = ".nested_absmax";
pub(super) const NESTED_QUANT_MAP: &str = ".nested_quant_map";

/// The longest `quant_state` that is read, in bytes.
pub(super) const LONGEST_STATE: u64 = 1 << 12;

/// A 4-bit format to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum FourBitFormat {
    /// NF4 with f32 scales: 4.5 bits per weight
    Nf4,
    /// NF4 with 8-bit scales: 4.13 bits per weight
    Nf4Double,
}

impl FourBitFormat {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
            Self::Nf4Double => "nf4-double",
        }
    }

    /// The tensors of a matrix, in the order in which they are written; the JSON of the state has `state_bytes` bytes.
    pub(super) fn tensors(
        self,
        name: &str,
        weights: usize,
        state_bytes: usize,
    ) -> Vec<PlannedTensor> {
        let blocks = nf4::blocks(weights);
        let tensor = |end: &str, dtype, shape: &[usize]| PlannedTensor {
            name: format!("{name}{end}"),
            dtype,
            shape: shape.to_vec(),
        };
        let scales = match self {
            Self::Nf4 => Dtype::F32,
            Self::Nf4Double => Dtype::U8,
        };
        let mut tensors = vec![
            tensor("", Dtype::U8, &[nf4::packed_bytes(weights), 1]),
            tensor(ABSMAX, scales, &[blocks]),
            tensor(QUANT_MAP, Dtype::F32, &[CODEBOOK.len()]),
            tensor(STATE, Dtype::U8, &[state_bytes]),
        ];
        if self == Self::Nf4Double {
            let nested = blocks.div_ceil(NESTED_BLOCK);
            tensors.push(tensor(NESTED_ABSMAX, Dtype::F32, &[nested]));
            tensors.push(tensor(NESTED_QUANT_MAP, Dtype::F32, &[256]));
        }
        tensors
    }

    /// The JSON of a `quant_state`, as bitsandbytes writes it; `offset` is the mean of the scales.
    pub(super) fn state_json(self, entry: &TensorEntry, offset: f32) -> Result<String> {
        let dtype = python_dtype(entry.dtype).ok_or_else(|| {
            Failure::new(format!("tensor `{}` is stored as {}", entry.name, entry.dtype))
                .detail("f32, f16 and bf16 can be quantised")
        })?;
        let shape = &entry.shape;
        let nested = match self {
            Self::Nf4 => String::new(),
            Self::Nf4Double => format!(
                r#", "nested_blocksize": {NESTED_BLOCK}, "nested_dtype": "float32", "nested_offset": {}"#,
                python_float(offset.into())
            ),
        };
        Ok(format!(
            r#"{{"quant_type": "nf4", "blocksize": {BLOCK}, "dtype": "{dtype}", "shape": {shape:?}{nested}}}"#
        ))
    }
}

/// The name of a dtype in Python.
pub(super) fn python_dtype(dtype: Dtype) -> Option<&'static str> {
    StoredDtype::of_file(dtype).map(StoredDtype::torch_name)
}

/// A number as Python prints it: the shortest digits, with an exponent of two digits below 1e-4.
fn python_float(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-4 {
        let text = format!("{value:e}");
        return match text.split_once("e-") {
            Some((digits, exponent)) => format!("{digits}e-{exponent:0>2}"),
            None => text,
        };
    }
    format!("{value:?}")
}

/// The JSON of a `quant_state` that is read.
#[derive(Debug, Deserialize)]
pub(super) struct QuantState {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    pub(super) shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    pub(super) nested_offset: Option<f64>,
}

impl QuantState {
    /// Parses the state of the tensor `name`.
    ///
    /// # Errors
    /// Fails for JSON that is no state, and for a quantisation type or a block size that is not computed here.
    pub(super) fn parse(name: &str, json: &[u8]) -> Result<Self> {
        let state: Self = serde_json::from_slice(json)
            .map_err(|error| broken(name, format!("its quant_state cannot be read: {error}")))?;
        let is_known = state.quant_type == "nf4"
            && state.blocksize == BLOCK
            && state.nested_blocksize.is_none_or(|size| size == NESTED_BLOCK)
            && state.nested_blocksize.is_some() == state.nested_offset.is_some();
        if !is_known {
            return Err(Failure::new(format!("tensor `{name}` has a 4-bit format that is not read"))
                .detail(format!(
                    "found {} with blocks of {} and {:?}; read is nf4 with blocks of {BLOCK} and {NESTED_BLOCK}",
                    state.quant_type, state.blocksize, state.nested_blocksize
                ))
                .hint("use the unquantised checkpoint, or quantise it: prune quantize --to nf4-double DIR --save OUT")
                .into());
        }
        Ok(state)
    }

    /// The dtype of the dense matrix.
    pub(super) fn dtype(&self, name: &str) -> Result<Dtype> {
        let dtypes = [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter();
        let mut known = dtypes.filter(|&dtype| python_dtype(dtype) == Some(&self.dtype));
        known.next().ok_or_else(|| {
            broken(name, format!("its quant_state has the dtype `{}`", self.dtype)).into()
        })
    }
}

/// The failure of a tensor that is not stored as its format says.
pub(super) fn broken(name: &str, why: String) -> Failure {
    Failure::new(format!("the 4-bit tensor `{name}` is broken"))
        .detail(why)
        .hint("download the checkpoint again, or quantise the dense one again: prune quantize --to nf4-double DIR --save OUT")
}

/// The bytes of the codebook and of the nested map.
pub(super) fn maps() -> [Vec<u8>; 2] {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    [bytes(&CODEBOOK), bytes(DynamicMap::signed().values())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_printed_as_python_does() {
        // repr() of each in Python 3.12.
        for (value, text) in [
            (0.32861053943634033, "0.32861053943634033"),
            (0.0, "0.0"),
            (1.0, "1.0"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (0.0001, "0.0001"),
            (2.5e-11, "2.5e-11"),
        ] {
            assert_eq!(python_float(value), text);
        }
    }

    #[test]
    fn states_of_other_formats_are_refused() {
        let with = |from: &str, to: &str| {
            let json =
                r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 2]}"#;
            QuantState::parse("q", json.replace(from, to).as_bytes())
                .err()
                .map(|error| error.to_string())
        };
        assert_eq!(with("", ""), None);
        for (from, to) in [("nf4", "fp4"), ("64", "128"), ("}", r#", "nested_blocksize": 256}"#)] {
            assert!(with(from, to).unwrap().contains("not read"), "{to}");
        }
        assert!(with("[2, 2]", "\"\"").unwrap().contains("broken"));
        assert!(QuantState::parse("q", b"\xff").is_err());
    }
}
