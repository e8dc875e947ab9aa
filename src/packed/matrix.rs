//! The tensors that store a matrix `P.weight` `[R, C]`, as compressed-tensors names them:
//!
//! | name | form |
//! | --- | --- |
//! | `P.compressed` | the kept values by row and ascending column: `[kept]`, or `[R, C/2]` for 2:4, in the dtype of the weight; i8 codes |
//! | `P.bitmask` | u8 `[R, ceil(C/8)]`: 1 = kept, bit 0 is the lowest column, the bits after the last column are 0 |
//! | `P.row_offsets` | i64 `[R]`: the index of each row's first value; absent for 2:4 |
//! | `P.shape` | i64 `[2]`, or `[2, 1]` for 2:4: R and C |
//! | `P.compressed_scale` | f16 `[R, ceil(C/128)]`, for i8 codes only; not part of compressed-tensors |

use anyhow::Result;
use clap::ValueEnum;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, PlannedTensor, TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::linalg::bitmask::mask_bytes;
use crate::linalg::int8::GROUP;

/// The format of checkpoints that only this program reads: rounded values are no layout of compressed-tensors.
pub(super) const OWN_METHOD: &str = "prune-bitmask";

/// The end of the name of a matrix.
pub(super) const WEIGHT: &str = ".weight";
/// The ends of the names of its parts.
pub(super) const COMPRESSED: &str = ".compressed";
pub(super) const BITMASK: &str = ".bitmask";
pub(super) const ROW_OFFSETS: &str = ".row_offsets";
pub(super) const SHAPE: &str = ".shape";
pub(super) const SCALE: &str = ".compressed_scale";

/// Bytes of an i64.
pub(super) const OFFSET_BYTES: usize = 8;

/// The form of the mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PackForm {
    /// Any columns of a row may be kept.
    #[serde(rename = "sparse-bitmask")]
    Bitmask,
    /// Exactly two of each four columns are stored.
    #[serde(rename = "sparse-24-bitmask")]
    TwoOfFour,
}

impl PackForm {
    /// The name of the format in compressed-tensors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bitmask => "sparse-bitmask",
            Self::TwoOfFour => "sparse-24-bitmask",
        }
    }
}

/// The kept values of a packed checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PackedValues {
    /// The bits of the weights; unpacking restores every byte
    #[default]
    Exact,
    /// Lossy: 8-bit codes with a scale per row and 128 columns
    Int8,
}

impl PackedValues {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Int8 => "int8",
        }
    }
}

/// The place and form of a packed matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedMatrix {
    /// The name of the dense matrix, as the program uses it ("model.layers.0.self_attn.q_proj.weight").
    pub name: String,
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub columns: usize,
    /// The dtype of the dense matrix.
    pub dtype: StoredDtype,
    /// The form of the mask.
    pub form: PackForm,
    /// The kept values, in row order.
    pub compressed: TensorEntry,
    /// The mask, [`PackedMatrix::mask_bytes`] per row.
    pub bitmask: TensorEntry,
    /// The index of each row's first value; `None` for 2:4, whose rows have columns / 2 values.
    pub row_offsets: Option<TensorEntry>,
    /// The f16 scales of i8 codes, [`PackedMatrix::groups`] per row; `None` for exact values.
    pub scales: Option<TensorEntry>,
}

/// The size of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MatrixSize {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) dtype: StoredDtype,
}

impl MatrixSize {
    /// The size of a dense matrix; `None` for a tensor that is no matrix of f32, f16 or bf16.
    pub(super) fn of(entry: &TensorEntry) -> Option<Self> {
        match (entry.shape.as_slice(), StoredDtype::of_file(entry.dtype)) {
            (&[rows, columns], Some(dtype)) => Some(Self { rows, columns, dtype }),
            _ => None,
        }
    }

    /// The tensors that store a matrix with `kept` values.
    pub(super) fn parts(
        self,
        name: &str,
        form: PackForm,
        values: PackedValues,
        kept: u64,
    ) -> Vec<PlannedTensor> {
        let Self { rows, columns, dtype } = self;
        let module = module_of(name);
        let tensor = |end: &str, dtype, shape: &[usize]| PlannedTensor {
            name: format!("{module}{end}"),
            dtype,
            shape: shape.to_vec(),
        };
        let dtype = match values {
            PackedValues::Exact => dtype.in_file(),
            PackedValues::Int8 => Dtype::I8,
        };
        let mask = tensor(BITMASK, Dtype::U8, &[rows, mask_bytes(columns)]);
        let mut parts = match form {
            PackForm::Bitmask => vec![
                tensor(COMPRESSED, dtype, &[kept as usize]),
                mask,
                tensor(ROW_OFFSETS, Dtype::I64, &[rows]),
                tensor(SHAPE, Dtype::I64, &[2]),
            ],
            PackForm::TwoOfFour => vec![
                tensor(COMPRESSED, dtype, &[rows, columns / 2]),
                mask,
                tensor(SHAPE, Dtype::I64, &[2, 1]),
            ],
        };
        if values == PackedValues::Int8 {
            parts.push(tensor(SCALE, Dtype::F16, &[rows, columns.div_ceil(GROUP)]));
        }
        parts
    }
}

/// The bytes of some tensors.
pub(super) fn bytes_of(parts: &[PlannedTensor]) -> u64 {
    let bytes = |part: &PlannedTensor| {
        part.shape.iter().product::<usize>() as u64 * (part.dtype.bitsize() / 8) as u64
    };
    parts.iter().map(bytes).sum()
}

/// The module of a weight: its name without the end.
pub(super) fn module_of(name: &str) -> &str {
    name.strip_suffix(WEIGHT).unwrap_or(name)
}

impl PackedMatrix {
    /// Bytes of the mask of a row.
    pub fn mask_bytes(&self) -> usize {
        mask_bytes(self.columns)
    }

    /// Scales of a row of i8 codes.
    pub fn groups(&self) -> usize {
        self.columns.div_ceil(GROUP)
    }

    /// Bytes of a stored value.
    pub fn value_bytes(&self) -> usize {
        match self.scales {
            None => self.dtype.bytes(),
            Some(_) => 1,
        }
    }

    /// Bytes of a row of the dense matrix.
    pub fn row_bytes(&self) -> usize {
        self.columns * self.dtype.bytes()
    }

    /// The number of stored values.
    pub fn kept(&self) -> usize {
        self.compressed.elements()
    }

    /// The bytes of all parts.
    pub fn stored_bytes(&self) -> u64 {
        let others = [&self.row_offsets, &self.scales].into_iter().flatten();
        let shape = 2 * OFFSET_BYTES as u64;
        let parts = [&self.compressed, &self.bitmask].into_iter().chain(others);
        shape + parts.map(|part| part.bytes).sum::<u64>()
    }

    /// Checks the parts of the matrix whose mask is `bitmask`, from their headers and its `shape`.
    ///
    /// # Arguments
    /// * `module`: the beginning of the names of all parts
    ///
    /// # Errors
    /// Fails for a part that is missing or does not have the dtype and shape that the other parts need.
    pub(super) fn open(base: &Checkpoint, module: &str, expected: Expectation) -> Result<Self> {
        let name = format!("{module}{WEIGHT}");
        let part = |end: &str| {
            let part = format!("{module}{end}");
            let missing = || broken(&name, format!("`{part}` is missing in `{}`", base.place()));
            base.entry(&part).cloned().ok_or_else(missing)
        };
        let (compressed, bitmask) = (part(COMPRESSED)?, part(BITMASK)?);
        let shape = part(SHAPE)?;
        let form = expected.form.unwrap_or(match base.entry(&format!("{module}{ROW_OFFSETS}")) {
            Some(_) => PackForm::Bitmask,
            None => PackForm::TwoOfFour,
        });
        let of_shape: &[usize] = if form == PackForm::Bitmask { &[2] } else { &[2, 1] };
        check_part(&name, &shape, Dtype::I64, of_shape)?;
        let [rows, columns] = read_shape(base, &name, &shape)?;
        if let Some([expected_rows, expected_columns]) = expected.shape
            && (rows, columns) != (expected_rows, expected_columns)
        {
            let why = format!(
                "`{}` says [{rows}, {columns}], `packed.json` says [{expected_rows}, {expected_columns}]",
                shape.name
            );
            return Err(broken(&name, why).into());
        }
        let dtype = match expected.dtype {
            Some(dtype) => dtype,
            None => StoredDtype::of_file(compressed.dtype).ok_or_else(|| {
                let of = compressed.dtype;
                broken(&name, format!("`{}` is {of}; F32, F16 and BF16 are read", compressed.name))
            })?,
        };
        check_part(&name, &bitmask, Dtype::U8, &[rows, mask_bytes(columns)])?;
        let is_int8 = expected.values == PackedValues::Int8;
        let stored = if is_int8 { Dtype::I8 } else { dtype.in_file() };
        let row_offsets = match form {
            PackForm::Bitmask => {
                let kept = compressed.elements();
                check_part(&name, &compressed, stored, &[kept])?;
                if kept > rows * columns {
                    let why = format!("{kept} values are more than {rows} x {columns} elements");
                    return Err(broken(&name, why).into());
                }
                let offsets = part(ROW_OFFSETS)?;
                check_part(&name, &offsets, Dtype::I64, &[rows])?;
                Some(offsets)
            }
            PackForm::TwoOfFour => {
                if columns % 4 != 0 {
                    let why = format!("{columns} columns are no multiple of 4");
                    return Err(broken(&name, why).into());
                }
                check_part(&name, &compressed, stored, &[rows, columns / 2])?;
                None
            }
        };
        let scales = match is_int8 {
            true => {
                let scales = part(SCALE)?;
                check_part(&name, &scales, Dtype::F16, &[rows, columns.div_ceil(GROUP)])?;
                Some(scales)
            }
            false => None,
        };
        Ok(Self { name, rows, columns, dtype, form, compressed, bitmask, row_offsets, scales })
    }
}

/// Facts of a matrix that `packed.json` states; `None` where there is no such file.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Expectation {
    pub(super) form: Option<PackForm>,
    pub(super) shape: Option<[usize; 2]>,
    pub(super) dtype: Option<StoredDtype>,
    pub(super) values: PackedValues,
}

fn check_part(name: &str, part: &TensorEntry, dtype: Dtype, shape: &[usize]) -> Result<()> {
    if part.dtype == dtype && part.shape == shape {
        return Ok(());
    }
    let why =
        format!("`{}` is {} {:?}, {dtype} {shape:?} expected", part.name, part.dtype, part.shape);
    Err(broken(name, why).into())
}

/// Rows and columns, whose bytes can be counted: 16 bytes per element do not overflow.
fn read_shape(base: &Checkpoint, name: &str, shape: &TensorEntry) -> Result<[usize; 2]> {
    let mut bytes = [0; 2 * OFFSET_BYTES];
    base.read(shape, 0, &mut bytes)?;
    let words = bytes.as_chunks::<OFFSET_BYTES>().0;
    let [rows, columns] = [words[0], words[1]].map(i64::from_le_bytes);
    let size = |value: i64| usize::try_from(value).ok();
    let sizes = size(rows).zip(size(columns)).filter(|(rows, columns)| {
        rows.checked_mul(*columns).is_some_and(|all| all < usize::MAX / 16)
    });
    let Some((rows, columns)) = sizes else {
        return Err(broken(name, format!("`{}` says [{rows}, {columns}]", shape.name)).into());
    };
    Ok([rows, columns])
}

/// The dtype of a matrix by its name in `packed.json`.
pub(super) fn dtype_named(name: &str) -> Option<StoredDtype> {
    let dtypes = [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16];
    dtypes.into_iter().find(|dtype| dtype.in_file().to_string() == name)
}

/// The failure of a matrix that is not stored as its format says.
pub(super) fn broken(name: &str, why: String) -> Failure {
    Failure::new(format!("the packed matrix `{name}` is broken")).detail(why).hint(
        "download the checkpoint again, or pack the dense one again: prune pack DENSE --save OUT",
    )
}
