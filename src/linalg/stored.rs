//! A weight matrix in its stored dtype.
//!
//! A matrix is never converted as a whole: the bytes written must equal the bytes read, and an f32 copy of a bf16 layer would double the
//! memory of the run. Arithmetic widens a few rows at a time to f32.

use std::sync::Arc;

use anyhow::Result;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use safetensors::Dtype;

use clap::ValueEnum;

use super::large_pages::ask_for_large_pages;
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// Element types of stored weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub enum StoredDtype {
    /// IEEE 754 single precision
    #[value(aliases = ["float32", "float", "fp32", "torch.float32", "torch.float"])]
    F32,
    /// IEEE 754 half precision
    #[value(aliases = ["float16", "half", "fp16", "torch.float16", "torch.half"])]
    F16,
    /// The first half of a number in single precision
    #[value(aliases = ["bfloat16", "torch.bfloat16"])]
    Bf16,
}

impl StoredDtype {
    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The dtype of a tensor in a file; `None` for a dtype that no weights are read in.
    pub fn of_file(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::F16 => Some(Self::F16),
            Dtype::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// The dtype in a file's header.
    pub fn in_file(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
        }
    }

    /// Returns the dtype with the longer significand: f32 before f16, and f16 before bf16.
    #[must_use]
    pub fn wider(self, other: Self) -> Self {
        let bits = |dtype| match dtype {
            Self::F32 => 24,
            Self::F16 => 11,
            Self::Bf16 => 8,
        };
        if bits(other) > bits(self) { other } else { self }
    }

    /// PyTorch's name.
    pub fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// The name used in reports: `f32`, `f16` or `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum StoredValues {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// A row-major matrix `[rows, columns]` in its stored dtype; for a linear layer `[out_features, in_features]`.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredMatrix {
    rows: usize,
    columns: usize,
    /// Copies share the elements until a copy changes.
    pub(super) values: Arc<StoredValues>,
}

/// A table of 256 rows of eight elements: an element has all bits set if its bit of the row's index is 0.
macro_rules! kept {
    ($element:ty) => {{
        let mut table = [[0; 8]; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut place = 0;
            while place < 8 {
                if byte >> place & 1 == 0 {
                    table[byte][place] = <$element>::MAX;
                }
                place += 1;
            }
            byte += 1;
        }
        table
    }};
}

/// Runs `$body` with `$slice` bound to the typed values.
macro_rules! typed {
    ($values:expr, $slice:ident => $body:expr) => {
        match $values {
            StoredValues::F32($slice) => $body,
            StoredValues::F16($slice) => $body,
            StoredValues::Bf16($slice) => $body,
        }
    };
}

fn allocate<T: Clone + bytemuck::Zeroable>(count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| {
        let bytes = ByteSize::of(count, size_of::<T>());
        Failure::new(format!("cannot allocate {bytes} for a weight matrix"))
    })?;
    ask_for_large_pages(&mut values);
    values.resize(count, T::zeroed());
    Ok(values)
}

impl StoredMatrix {
    /// Creates a matrix of zeros. [`StoredMatrix::as_bytes_mut`] fills it.
    pub fn zeros(dtype: StoredDtype, rows: usize, columns: usize) -> Result<Self> {
        let count = rows.checked_mul(columns).ok_or_else(|| {
            Failure::new(format!("a matrix of {rows} x {columns} elements is larger than memory"))
        })?;
        let values = match dtype {
            StoredDtype::F32 => StoredValues::F32(allocate(count)?),
            StoredDtype::F16 => StoredValues::F16(allocate(count)?),
            StoredDtype::Bf16 => StoredValues::Bf16(allocate(count)?),
        };
        Ok(Self { rows, columns, values: Arc::new(values) })
    }

    /// Stores f32 values as `dtype`, rounding to nearest even; `values` is row-major `[rows, columns]`.
    ///
    /// # Panics
    /// Panics when `values` does not hold `rows * columns` elements.
    pub fn from_f32(dtype: StoredDtype, rows: usize, columns: usize, values: &[f32]) -> Self {
        assert_eq!(
            values.len(),
            rows * columns,
            "a matrix of {rows} x {columns} needs that many values"
        );
        let values = match dtype {
            StoredDtype::F32 => StoredValues::F32(values.to_vec()),
            StoredDtype::F16 => {
                StoredValues::F16(values.iter().map(|&value| f16::from_f32(value)).collect())
            }
            StoredDtype::Bf16 => {
                StoredValues::Bf16(values.iter().map(|&value| bf16::from_f32(value)).collect())
            }
        };
        Self { rows, columns, values: Arc::new(values) }
    }

    /// Replaces all elements, rounding each once. Takes memory only where a copy of the matrix shares its elements.
    ///
    /// # Panics
    /// Panics when there is not a value for every element.
    pub fn set_f32(&mut self, values: &[f32]) {
        assert_eq!(values.len(), self.elements(), "a value for every element");
        let rounded = values.par_iter();
        match Arc::make_mut(&mut self.values) {
            StoredValues::F32(stored) => stored.copy_from_slice(values),
            StoredValues::F16(stored) => {
                let pairs = stored.par_iter_mut().zip(rounded);
                pairs.for_each(|(stored, value)| *stored = f16::from_f32(*value));
            }
            StoredValues::Bf16(stored) => {
                let pairs = stored.par_iter_mut().zip(rounded);
                pairs.for_each(|(stored, value)| *stored = bf16::from_f32(*value));
            }
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// The element type.
    pub fn dtype(&self) -> StoredDtype {
        match *self.values {
            StoredValues::F32(_) => StoredDtype::F32,
            StoredValues::F16(_) => StoredDtype::F16,
            StoredValues::Bf16(_) => StoredDtype::Bf16,
        }
    }

    /// The stored bytes, little-endian, row-major.
    pub fn as_bytes(&self) -> &[u8] {
        typed!(&*self.values, values => bytemuck::cast_slice(values))
    }

    /// The stored bytes, for a change.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        typed!(Arc::make_mut(&mut self.values), values => bytemuck::cast_slice_mut(values))
    }

    pub(super) fn values_of(&self, rows: std::ops::Range<usize>) -> super::product::Values<'_> {
        let range = rows.start * self.columns..rows.end * self.columns;
        match &*self.values {
            StoredValues::F32(values) => super::product::Values::F32(&values[range]),
            StoredValues::F16(values) => super::product::Values::F16(&values[range]),
            StoredValues::Bf16(values) => super::product::Values::Bf16(&values[range]),
        }
    }

    /// A copy of some rows.
    ///
    /// # Errors
    /// Fails without memory.
    pub(super) fn some_rows(&self, rows: std::ops::Range<usize>) -> Result<Self> {
        let row_bytes = self.columns * self.dtype().bytes();
        let mut copy = Self::zeros(self.dtype(), rows.len(), self.columns)?;
        let bytes = &self.as_bytes()[rows.start * row_bytes..rows.end * row_bytes];
        copy.as_bytes_mut().copy_from_slice(bytes);
        Ok(copy)
    }

    /// Widens whole rows, beginning with `first_row`, into `wide`. The conversion is exact for all three dtypes.
    ///
    /// # Panics
    /// Panics when `wide` is not a whole number of rows or reaches beyond the matrix.
    pub fn widen_rows(&self, first_row: usize, wide: &mut [f32]) {
        assert_eq!(wide.len() % self.columns.max(1), 0, "only whole rows are widened");
        let start = first_row * self.columns;
        let range = start..start + wide.len();
        match &*self.values {
            StoredValues::F32(values) => wide.copy_from_slice(&values[range]),
            StoredValues::F16(values) => values[range].convert_to_f32_slice(wide),
            StoredValues::Bf16(values) => widen_bf16(&values[range], wide),
        }
    }

    /// Writes +0 wherever `is_pruned(row, column)`; kept elements do not change a bit.
    pub fn zero_where(&mut self, is_pruned: impl Fn(usize, usize) -> bool + Sync) {
        let columns = self.columns.max(1);
        typed!(Arc::make_mut(&mut self.values), values => {
            values.par_chunks_mut(columns).enumerate().for_each(|(row, values)| {
                for (column, value) in values.iter_mut().enumerate() {
                    if is_pruned(row, column) {
                        *value = bytemuck::Zeroable::zeroed();
                    }
                }
            });
        });
    }

    /// Writes +0 wherever a bit is set; kept elements do not change a bit. The loop has no branch, since a mask is unpredictable.
    ///
    /// # Arguments
    /// * `pruned`: a bit per element, row-major without padding between rows, least significant bit first
    ///
    /// # Panics
    /// Panics when `pruned` does not have a bit per element, rounded up to bytes.
    pub fn zero_bits(&mut self, pruned: &[u8]) {
        assert_eq!(
            pruned.len(),
            (self.rows * self.columns).div_ceil(8),
            "a mask has a bit for every weight"
        );
        let tasks = pruned.par_chunks(CHUNK / 8);
        match Arc::make_mut(&mut self.values) {
            StoredValues::F32(values) => zero_bits_of(values, pruned),
            StoredValues::F16(values) => {
                keep_halves(bytemuck::cast_slice_mut(values), tasks, CHUNK)
            }
            StoredValues::Bf16(values) => {
                keep_halves(bytemuck::cast_slice_mut(values), tasks, CHUNK)
            }
        }
    }

    /// The mask of the elements that equal zero, of either sign: a bit per element, 1 = zero, row-major without padding, least
    /// significant bit first, as [`StoredMatrix::zero_bits`] takes it.
    pub fn zeros_mask(&self) -> Vec<u8> {
        match &*self.values {
            // The sign bit is ignored.
            StoredValues::F32(values) => {
                zeros_mask(bytemuck::cast_slice::<_, u32>(values), |bits| bits << 1 == 0)
            }
            StoredValues::F16(values) => {
                zeros_mask(bytemuck::cast_slice::<_, u16>(values), |bits| bits << 1 == 0)
            }
            StoredValues::Bf16(values) => {
                zeros_mask(bytemuck::cast_slice::<_, u16>(values), |bits| bits << 1 == 0)
            }
        }
    }

    /// Counts the elements that equal zero, of either sign.
    pub fn count_zeros(&self) -> u64 {
        let columns = self.columns.max(1);
        match &*self.values {
            // The sign bit is ignored.
            StoredValues::F32(values) => {
                count_zeros(bytemuck::cast_slice(values), columns, u32::MAX >> 1)
            }
            StoredValues::F16(values) => {
                count_zeros(bytemuck::cast_slice(values), columns, u16::MAX >> 1)
            }
            StoredValues::Bf16(values) => {
                count_zeros(bytemuck::cast_slice(values), columns, u16::MAX >> 1)
            }
        }
    }
}

/// Widens bfloat16, which is the upper half of an f32, by one vector shift. `half` has an extra step for NaNs: with it, products with
/// bf16 weights have 0.88 of the speed of f32 weights, without it 0.93 (2048 tokens, 4096 x 11008).
pub(super) fn widen_bf16(values: &[bf16], wide: &mut [f32]) {
    for (wide, value) in wide.iter_mut().zip(values) {
        *wide = f32::from_bits(u32::from(value.to_bits()) << 16);
    }
}

/// Elements of a task that sets zeros: whole bytes of bits.
const CHUNK: usize = 1 << 15;

/// Writes +0 wherever a bit is set, as [`StoredMatrix::zero_bits`] does.
///
/// # Panics
/// Panics when `pruned` does not have a bit per element, rounded up to bytes.
pub fn zero_bits_of(values: &mut [f32], pruned: &[u8]) {
    assert_eq!(pruned.len(), values.len().div_ceil(8), "a mask has a bit for every weight");
    bytemuck::cast_slice_mut::<f32, u32>(values)
        .par_chunks_mut(CHUNK)
        .zip(pruned.par_chunks(CHUNK / 8))
        .for_each(|(values, bits)| keep_some(values, bits, &WORDS));
}

/// Writes +0 wherever a bit is set; the first value has the bit at `first`.
///
/// # Panics
/// Panics when `pruned` has too few bits.
pub(super) fn zero_bits_from(values: &mut [f32], pruned: &[u8], first: usize) {
    let values = bytemuck::cast_slice_mut::<f32, u32>(values);
    let (begun, whole) = values.split_at_mut(values.len().min((8 - first % 8) % 8));
    for (at, value) in begun.iter_mut().enumerate() {
        let bit = first + at;
        *value &= (u32::from(pruned[bit / 8] >> (bit % 8)) & 1).wrapping_sub(1);
    }
    let pruned = &pruned[first.div_ceil(8)..];
    assert!(whole.len() <= 8 * pruned.len(), "a mask has a bit for every weight");
    keep_some(whole, pruned, &WORDS);
}

/// A bit per element, 1 = zero.
fn zeros_mask<T: Copy + Sync>(values: &[T], is_zero: impl Fn(T) -> bool + Sync) -> Vec<u8> {
    let byte = |values: &[T]| {
        let bits = values.iter().enumerate();
        bits.fold(0u8, |byte, (bit, value)| byte | u8::from(is_zero(*value)) << bit)
    };
    values.par_chunks(8).map(byte).collect()
}

fn keep_halves(values: &mut [u16], tasks: rayon::slice::Chunks<'_, u8>, chunk: usize) {
    values
        .par_chunks_mut(chunk)
        .zip(tasks)
        .for_each(|(values, bits)| keep_some(values, bits, &HALVES));
}

/// The factors of eight elements for every byte of a mask: all bits set for an element that stays.
static HALVES: [[u16; 8]; 256] = kept!(u16);
static WORDS: [[u32; 8]; 256] = kept!(u32);

/// Combines every value with the factor of its bit.
fn keep_some<T: Copy + std::ops::BitAndAssign>(
    values: &mut [T],
    bits: &[u8],
    kept: &[[T; 8]; 256],
) {
    let (whole, rest) = values.as_chunks_mut::<8>();
    for (values, byte) in whole.iter_mut().zip(bits) {
        for (value, kept) in values.iter_mut().zip(&kept[usize::from(*byte)]) {
            *value &= *kept;
        }
    }
    let byte = bits.get(whole.len()).copied().unwrap_or(0);
    for (value, kept) in rest.iter_mut().zip(&kept[usize::from(byte)]) {
        *value &= *kept;
    }
}

/// Counts the elements that have none of these bits.
fn count_zeros<T>(values: &[T], chunk: usize, bits: T) -> u64
where
    T: Copy + Send + Sync + PartialEq + Default + std::ops::BitAnd<Output = T>,
{
    struct Count<'a, T>(&'a [T], T);
    impl<T> WithSimd for Count<'_, T>
    where
        T: Copy + PartialEq + Default + std::ops::BitAnd<Output = T>,
    {
        type Output = u64;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> u64 {
            let Self(values, bits) = self;
            // Narrow counters fit a register many times. They cannot overflow within a block.
            let blocks = values.chunks(1 << 14).map(|block| {
                let zeros = block.iter().map(|value| u16::from(*value & bits == T::default()));
                u64::from(zeros.sum::<u16>())
            });
            blocks.sum()
        }
    }
    values.par_chunks(chunk).map(|values| Arch::new().dispatch(Count(values, bits))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_zero_what_they_stand_for_and_nothing_else() {
        let values: Vec<f32> = (0..7 * 13).map(|i| i as f32 - 45.0).collect();
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let mut by_bits = StoredMatrix::from_f32(dtype, 7, 13, &values);
            let mut by_place = by_bits.clone();
            let goes = |row: usize, column: usize| (row * 13 + column) % 5 < 2;
            let mut bits = vec![0u8; (7 * 13usize).div_ceil(8)];
            for bit in (0..7 * 13).filter(|bit| goes(bit / 13, bit % 13)) {
                bits[bit / 8] |= 1 << (bit % 8);
            }
            by_bits.zero_bits(&bits);
            by_place.zero_where(goes);
            assert_eq!(by_bits.as_bytes(), by_place.as_bytes(), "{dtype:?}");
        }
    }

    #[test]
    fn widening_is_exact_and_bytes_round_trip() {
        let values = [1.0f32, -2.5, 0.0, -0.0, 65504.0, 2f32.powi(-24)];
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let matrix = StoredMatrix::from_f32(dtype, 2, 3, &values);
            let mut copy = StoredMatrix::zeros(dtype, 2, 3).unwrap();
            copy.as_bytes_mut().copy_from_slice(matrix.as_bytes());
            assert_eq!(matrix, copy);
            let mut wide = [9.0f32; 3];
            matrix.widen_rows(1, &mut wide);
            assert_eq!(wide[0].to_bits(), (-0.0f32).to_bits());
            assert_eq!(wide[2], 2f32.powi(-24), "{dtype:?}");
            assert_eq!(matrix.count_zeros(), 2);
        }
    }

    #[test]
    fn zeroing_touches_only_the_named_elements() {
        let mut matrix =
            StoredMatrix::from_f32(StoredDtype::Bf16, 2, 2, &[1.0, -1.0, 3.0, f32::NAN]);
        matrix.zero_where(|row, column| (row, column) == (0, 1));
        let mut wide = [0.0; 4];
        matrix.widen_rows(0, &mut wide);
        assert_eq!(wide[1].to_bits(), 0, "pruned weights are +0");
        assert_eq!((wide[0], wide[2]), (1.0, 3.0));
        assert!(wide[3].is_nan());
    }
}
