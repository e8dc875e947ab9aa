//! A weight matrix without its zeros: a bit per weight, and the kept values.
//!
//! ```text
//! bytes = rows · (8·⌈columns/64⌉ + 4) + kept · bytes of a value  [+ rows · 2·⌈columns/128⌉ scales of 8-bit codes]
//! ```
//!
//! Kept is a weight whose bits are not all 0, so −0 and the payload of a NaN stay. A matrix of b-bit values with a share z of zeros
//! takes 1 + (1 − z)·b bits per weight. 8-bit codes are symmetric, with a scale for a row's 128 columns: w ≈ scale · code, |code| ≤ 127.
//!
//! A matrix is a list of parts of some rows each, so that it can be made part by part from a file, without memory for the dense matrix.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use half::{bf16, f16};
use rayon::prelude::*;

use super::buffer_pool::grow;
use super::linear::rows_at_once;
use super::one_token::{CODES, GROUP, TASK_BYTES, largest, spread};
use super::product::Values;
use super::stored::{StoredDtype, StoredMatrix};
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// Columns that share a scale.
pub const SCALE_BLOCK: usize = CODES;

/// The form of kept values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptForm {
    /// In the dtype of the dense matrix, without a change.
    Stored(StoredDtype),
    /// 8-bit codes.
    Codes,
}

/// A matrix `[rows, columns]` without its zeros.
#[derive(Debug, Clone)]
pub struct CompactMatrix {
    rows: usize,
    columns: usize,
    form: KeptForm,
    parts: Arc<[CompactPart]>,
    /// Rows of a task, by the part.
    tasks: Arc<[(usize, Range<usize>)]>,
}

/// Some rows of a compact matrix.
#[derive(Debug)]
pub(super) struct CompactPart {
    rows: usize,
    /// Words of a row's mask.
    words: usize,
    /// `[rows, words]`: 1 = kept, the lowest bit is the lowest column. Bits behind the last column are 0.
    masks: Vec<u64>,
    /// The first value of each row, and the end of the last row.
    starts: Vec<u32>,
    values: KeptValues,
}

/// The kept values of a part, row by row, and behind them a window of unused values.
#[derive(Debug)]
pub(super) enum KeptValues {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Codes(Codes),
}

/// 8-bit codes and their scales.
#[derive(Debug)]
pub(super) struct Codes {
    pub values: Vec<i8>,
    /// `[rows, blocks]`
    scales: Vec<f16>,
    /// Blocks of a row.
    blocks: usize,
}

impl Codes {
    #[inline(always)]
    pub(super) fn scales_of(&self, row: usize) -> &[f16] {
        &self.scales[row * self.blocks..(row + 1) * self.blocks]
    }
}

/// Widens a scale, which is not negative. The library asks for the CPU's features at every conversion.
#[inline(always)]
pub(super) fn wide_scale(scale: f16) -> f32 {
    // The exponents of f16 and f32 begin 112 apart. This is exact for subnormal numbers, too.
    const BETWEEN: f32 = 5.192_296_9e33;
    f32::from_bits(u32::from(scale.to_bits()) << 13) * BETWEEN
}

impl CompactPart {
    pub(super) fn values(&self) -> &KeptValues {
        &self.values
    }

    #[inline(always)]
    pub(super) fn mask(&self, row: usize) -> &[u64] {
        &self.masks[row * self.words..(row + 1) * self.words]
    }

    #[inline(always)]
    pub(super) fn start(&self, row: usize) -> usize {
        self.starts[row] as usize
    }
}

impl CompactMatrix {
    /// Takes the kept weights of rows that arrive part by part.
    ///
    /// # Arguments
    /// * `rows_of`: the stored rows of a range, from which a part is made
    ///
    /// # Errors
    /// Fails where `rows_of` does, for 8-bit codes of a weight that is not finite or too large, and without memory.
    pub fn from_rows(
        rows: usize,
        columns: usize,
        form: KeptForm,
        mut part_of: impl FnMut(Range<usize>) -> Result<StoredMatrix>,
    ) -> Result<Self> {
        let at_once = rows_at_once(columns);
        let mut parts = Vec::with_capacity(rows.div_ceil(at_once));
        for first in (0..rows).step_by(at_once) {
            let range = first..rows.min(first + at_once);
            let dense = part_of(range.clone())?;
            assert_eq!(
                (dense.rows(), dense.columns()),
                (range.len(), columns),
                "rows of the matrix"
            );
            parts.push(CompactPart::of(&dense, form)?);
        }
        Ok(Self::of_parts(rows, columns, form, parts))
    }

    fn of_parts(rows: usize, columns: usize, form: KeptForm, parts: Vec<CompactPart>) -> Self {
        let tasks = parts
            .iter()
            .enumerate()
            .flat_map(|(number, part)| part.tasks().into_iter().map(move |rows| (number, rows)));
        Self { rows, columns, form, tasks: tasks.collect(), parts: parts.into() }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The memory of the matrix, without the unused values behind each part.
    pub fn bytes_held(&self) -> ByteSize {
        Self::bytes(self.rows, self.columns, self.kept(), self.form)
    }

    /// The masks, and the kept values with their scales, as stored in memory.
    pub(super) fn arrays(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().flat_map(|part| {
            let (values, scales): (&[u8], &[u8]) = match &part.values {
                KeptValues::F32(values) => (bytemuck::cast_slice(values), &[]),
                KeptValues::F16(values) => (bytemuck::cast_slice(values), &[]),
                KeptValues::Bf16(values) => (bytemuck::cast_slice(values), &[]),
                KeptValues::Codes(codes) => {
                    (bytemuck::cast_slice(&codes.values), bytemuck::cast_slice(&codes.scales))
                }
            };
            [bytemuck::cast_slice(&part.masks), values, scales]
        })
    }

    /// The form of the kept values.
    pub fn form(&self) -> KeptForm {
        self.form
    }

    /// Kept weights.
    pub fn kept(&self) -> usize {
        self.parts.iter().map(|part| part.start(part.rows)).sum()
    }

    /// The dtype of expanded rows: of the dense matrix, and f32 for 8-bit codes.
    pub fn dtype(&self) -> StoredDtype {
        match self.form {
            KeptForm::Stored(dtype) => dtype,
            KeptForm::Codes => StoredDtype::F32,
        }
    }

    /// Bytes of a matrix with this number of kept weights.
    pub fn bytes(rows: usize, columns: usize, kept: usize, form: KeptForm) -> ByteSize {
        let row = size_of::<u64>() * columns.div_ceil(GROUP) + size_of::<u32>();
        let (value, scales) = match form {
            KeptForm::Stored(dtype) => (dtype.bytes(), 0),
            KeptForm::Codes => (1, size_of::<f16>() * columns.div_ceil(SCALE_BLOCK)),
        };
        ByteSize((rows * (row + scales) + kept * value) as u64)
    }

    /// The tasks of a product, in the order of the rows: a part, and rows of it.
    pub(super) fn tasks(&self) -> impl ExactSizeIterator<Item = (&CompactPart, Range<usize>)> {
        self.tasks.iter().map(|(part, rows)| (&self.parts[*part], rows.clone()))
    }

    /// Expands rows into the buffer of their dtype, of which they become the content.
    ///
    /// # Arguments
    /// * `whole`: for f32
    /// * `half`: for the bits of f16 and bf16
    ///
    /// # Panics
    /// Panics when the matrix does not have the rows.
    pub(super) fn expand<'b>(
        &self,
        rows: Range<usize>,
        whole: &'b mut Vec<f32>,
        half: &'b mut Vec<u16>,
    ) -> Values<'b> {
        assert!(rows.end <= self.rows, "rows of the matrix");
        let elements = rows.len() * self.columns;
        match self.dtype() {
            StoredDtype::F32 => {
                let out = grow(whole, elements);
                self.for_rows(rows, out, |part, row, out| match &part.values {
                    KeptValues::F32(values) => part.expand_row(row, values, out),
                    KeptValues::Codes(codes) => part.expand_codes(row, codes, out),
                    KeptValues::F16(_) | KeptValues::Bf16(_) => unreachable!("parts share a form"),
                });
                Values::F32(out)
            }
            StoredDtype::F16 | StoredDtype::Bf16 => {
                let out = grow(half, elements);
                self.for_rows(rows, out, |part, row, out| match &part.values {
                    KeptValues::F16(values) => {
                        part.expand_row(row, bytemuck::cast_slice::<_, u16>(values), out);
                    }
                    KeptValues::Bf16(values) => {
                        part.expand_row(row, bytemuck::cast_slice::<_, u16>(values), out);
                    }
                    KeptValues::F32(_) | KeptValues::Codes(_) => {
                        unreachable!("parts share a form")
                    }
                });
                match self.dtype() {
                    StoredDtype::F16 => Values::F16(bytemuck::cast_slice(out)),
                    _ => Values::Bf16(bytemuck::cast_slice(out)),
                }
            }
        }
    }

    /// Calls `expand` with the part, the row in it and the memory of every row, on all threads.
    fn for_rows<E: Send>(
        &self,
        rows: Range<usize>,
        out: &mut [E],
        expand: impl Fn(&CompactPart, usize, &mut [E]) + Sync,
    ) {
        let at_once = rows_at_once(self.columns);
        let rows_of_out = out.par_chunks_mut(self.columns.max(1)).enumerate();
        rows_of_out.for_each(|(number, out)| {
            let row = rows.start + number;
            expand(&self.parts[row / at_once], row % at_once, out);
        });
    }
}

impl CompactPart {
    /// The kept weights of rows.
    fn of(dense: &StoredMatrix, form: KeptForm) -> Result<Self> {
        let columns = dense.columns();
        let rows = 0..dense.rows();
        let words = columns.div_ceil(GROUP);
        let part = |masks: Vec<u64>, starts, values| {
            Ok(Self { rows: dense.rows(), words, masks, starts, values })
        };
        match (form, dense.values_of(rows)) {
            (KeptForm::Stored(_), Values::F32(values)) => {
                let (masks, starts) = masks_of(values, columns, |value| value.to_bits() != 0);
                let kept = gather(values, columns, &masks, &starts)?;
                part(masks, starts, KeptValues::F32(kept))
            }
            (KeptForm::Stored(_), Values::F16(values)) => {
                let (masks, starts) = masks_of(values, columns, |value| value.to_bits() != 0);
                let kept = gather(values, columns, &masks, &starts)?;
                part(masks, starts, KeptValues::F16(kept))
            }
            (KeptForm::Stored(_), Values::Bf16(values)) => {
                let (masks, starts) = masks_of(values, columns, |value| value.to_bits() != 0);
                let kept = gather(values, columns, &masks, &starts)?;
                part(masks, starts, KeptValues::Bf16(kept))
            }
            (KeptForm::Codes, _) => {
                let mut wide = vec![0.0; dense.elements()];
                dense.widen_rows(0, &mut wide);
                let scales = scales_of(&wide, columns)?;
                let (masks, starts) = masks_of(&wide, columns, |value| value.to_bits() << 1 != 0);
                let blocks = columns.div_ceil(SCALE_BLOCK);
                let mut codes = vec![0i8; wide.len()];
                let rows =
                    codes.par_chunks_mut(columns.max(1)).zip(wide.par_chunks(columns.max(1)));
                rows.zip(scales.par_chunks(blocks.max(1))).for_each(|((codes, wide), scales)| {
                    encode(wide, scales, codes);
                });
                drop(wide);
                let values = gather(&codes, columns, &masks, &starts)?;
                part(masks, starts, KeptValues::Codes(Codes { values, scales, blocks }))
            }
        }
    }

    /// Ranges of rows with about as many bytes each.
    fn tasks(&self) -> Vec<Range<usize>> {
        let value_bytes = match &self.values {
            KeptValues::F32(_) => 4,
            KeptValues::F16(_) | KeptValues::Bf16(_) => 2,
            KeptValues::Codes(_) => 1,
        };
        let bytes_to =
            |row: usize| row * self.words * size_of::<u64>() + self.start(row) * value_bytes;
        let mut tasks = Vec::new();
        let mut first = 0;
        for end in 1..=self.rows {
            if end == self.rows || bytes_to(end) - bytes_to(first) >= TASK_BYTES {
                tasks.push(first..end);
                first = end;
            }
        }
        tasks
    }

    #[inline(always)]
    fn expand_row<E: Copy + Default>(&self, row: usize, values: &[E], out: &mut [E]) {
        let mut at = self.start(row);
        for (kept, out) in self.mask(row).iter().zip(out.chunks_mut(GROUP)) {
            let mut group = [E::default(); GROUP];
            if let Some(values) = values[at..].first_chunk() {
                spread(values, *kept, &mut group);
            }
            out.copy_from_slice(&group[..out.len()]);
            at += kept.count_ones() as usize;
        }
    }

    fn expand_codes(&self, row: usize, codes: &Codes, out: &mut [f32]) {
        let mut narrow = vec![0; out.len()];
        self.expand_row(row, &codes.values, &mut narrow);
        let blocks = out.chunks_mut(SCALE_BLOCK).zip(narrow.chunks(SCALE_BLOCK));
        for ((out, codes), scale) in blocks.zip(codes.scales_of(row)) {
            let scale = wide_scale(*scale);
            out.iter_mut().zip(codes).for_each(|(out, code)| *out = scale * f32::from(*code));
        }
    }
}

/// The mask of every row, and where its kept values begin.
fn masks_of<E: Copy + Sync>(
    values: &[E],
    columns: usize,
    is_kept: impl Fn(E) -> bool + Sync,
) -> (Vec<u64>, Vec<u32>) {
    let words = columns.div_ceil(GROUP);
    let rows = values.len().checked_div(columns).unwrap_or(0);
    let mut masks = vec![0u64; rows * words];
    let both = masks.par_chunks_mut(words.max(1)).zip(values.par_chunks(columns.max(1)));
    let counts = both.map(|(masks, values)| {
        for (mask, values) in masks.iter_mut().zip(values.chunks(GROUP)) {
            let bits = values.iter().enumerate();
            *mask = bits.fold(0, |mask, (bit, value)| mask | u64::from(is_kept(*value)) << bit);
        }
        masks.iter().map(|mask| mask.count_ones()).sum::<u32>()
    });
    let counts: Vec<u32> = counts.collect();
    let mut starts = Vec::with_capacity(rows + 1);
    starts.push(0);
    starts.extend(counts.iter().scan(0, |end, count| {
        *end += count;
        Some(*end)
    }));
    (masks, starts)
}

/// The kept values of all rows, and a window of unused values.
fn gather<E: Copy + Default + Send + Sync>(
    values: &[E],
    columns: usize,
    masks: &[u64],
    starts: &[u32],
) -> Result<Vec<E>> {
    let kept = starts.last().map_or(0, |end| *end as usize);
    let mut out = Vec::new();
    out.try_reserve_exact(kept + CODES).map_err(|_| {
        let bytes = ByteSize::of(kept + CODES, size_of::<E>());
        Failure::new(format!("cannot allocate {bytes} for the kept values of a weight matrix"))
    })?;
    out.resize(kept + CODES, E::default());
    let mut rest = &mut out[..kept];
    let mut rows = Vec::with_capacity(starts.len());
    for pair in starts.windows(2) {
        let (row, behind) = rest.split_at_mut((pair[1] - pair[0]) as usize);
        rest = behind;
        rows.push(row);
    }
    let words = columns.div_ceil(GROUP).max(1);
    let sources = values.par_chunks(columns.max(1)).zip(masks.par_chunks(words));
    rows.into_par_iter().zip(sources).for_each(|(out, (values, masks))| {
        let mut next = 0;
        for (group, &mask) in values.chunks(GROUP).zip(masks) {
            let mut left = mask;
            while left != 0 {
                out[next] = group[left.trailing_zeros() as usize];
                next += 1;
                left &= left - 1;
            }
        }
    });
    Ok(out)
}

/// The scale of every block: max |w| / 127, rounded up to f16, so that no code is beyond 127.
///
/// # Errors
/// Fails for a weight that is not finite, and for weights beyond the range of the scale.
fn scales_of(wide: &[f32], columns: usize) -> Result<Vec<f16>> {
    let rows = wide.par_chunks(columns.max(1));
    let scales = rows.enumerate().map(|(row, wide)| {
        wide.chunks(SCALE_BLOCK)
            .enumerate()
            .map(|(block, wide)| {
                let largest = largest(wide);
                let scale = f16_from_above(largest / 127.0);
                if !scale.is_finite() {
                    let first = block * SCALE_BLOCK;
                    return Err(Failure::new("a weight has no 8-bit code")
                        .detail(format!(
                            "row {row}, columns {first} to {}: the largest is {largest}, and 8.3e6 has a code",
                            first + wide.len() - 1
                        ))
                        .hint("leave --weights int8 out"));
                }
                Ok(scale)
            })
            .collect::<Result<Vec<_>, Failure>>()
    });
    let scales = scales.collect::<Result<Vec<_>, Failure>>()?;
    Ok(scales.concat())
}

/// The lowest f16 that is not below a number; NaN for NaN.
fn f16_from_above(value: f32) -> f16 {
    let nearest = f16::from_f32(value);
    match nearest.to_f32() < value {
        true => f16::from_bits(nearest.to_bits() + 1),
        false => nearest,
    }
}

/// The codes of a row.
fn encode(wide: &[f32], scales: &[f16], codes: &mut [i8]) {
    let blocks = wide.chunks(SCALE_BLOCK).zip(codes.chunks_mut(SCALE_BLOCK));
    for ((wide, codes), scale) in blocks.zip(scales) {
        let scale = wide_scale(*scale);
        for (code, w) in codes.iter_mut().zip(wide) {
            *code = if *w == 0.0 { 0 } else { (w / scale).round_ties_even() as i8 };
        }
    }
}
