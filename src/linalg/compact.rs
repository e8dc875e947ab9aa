//! A weight matrix without its zeros: a bit per weight, and the kept values.
//!
//! ```text
//! bytes = rows · (8·⌈columns/64⌉ + 4) + kept · bytes of a value  [+ rows · 2·⌈columns/128⌉ scales of 8-bit codes]
//! ```
//!
//! A matrix of [`KeptForm::AllCodes`] has a code for every weight, zeros included, and no bit per weight.
//!
//! Kept is a weight whose bits are not all 0, so −0 and the payload of a NaN stay. A matrix of b-bit values with a share z of zeros
//! takes 1 + (1 − z)·b bits per weight. 8-bit codes are symmetric, with a scale for a row's 128 columns: w ≈ scale · code, |code| ≤ 127.
//!
//! A matrix is a list of parts of some rows each, so that it can be made part by part from a file, without memory for the dense matrix.

mod restored;

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use half::{bf16, f16};
use rayon::prelude::*;

use super::bitmask::{WORD, gather, kept, mark, mask_bytes};
use super::int8;
use super::large_pages::Buffer;
use super::parts::{TASK_BYTES, rows_at_once};
use super::stored::{StoredDtype, StoredMatrix};
use crate::bytes::ByteSize;

/// The form of kept values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptForm {
    /// In the dtype of the dense matrix, without a change.
    Stored(StoredDtype),
    /// 8-bit codes.
    Codes,
    /// 8-bit codes of all weights, zeros included.
    AllCodes,
}

impl KeptForm {
    /// Returns whether values are 8-bit codes.
    pub fn is_coded(self) -> bool {
        matches!(self, Self::Codes | Self::AllCodes)
    }
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
pub struct CompactPart {
    rows: usize,
    /// Words of a row's mask.
    words: usize,
    /// `[rows, words]`, or `[words]` that all rows share: 1 = kept, the lowest bit is the lowest column. Bits behind the last column are 0.
    masks: Buffer<u64>,
    keeps_all: bool,
    /// The first value of each row, and the end of the last row.
    starts: Vec<u32>,
    values: KeptValues,
}

/// The kept values of a part, row by row, and behind them a window of unused values.
#[derive(Debug)]
pub(super) enum KeptValues {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
    Bf16(Buffer<bf16>),
    Codes(Codes),
}

/// 8-bit codes and their scales.
#[derive(Debug)]
pub(super) struct Codes {
    pub values: Buffer<i8>,
    /// `[rows, blocks]`
    scales: Buffer<f16>,
    /// Blocks of a row.
    blocks: usize,
}

impl Codes {
    #[inline(always)]
    pub(super) fn scales_of(&self, row: usize) -> &[f16] {
        &self.scales[row * self.blocks..(row + 1) * self.blocks]
    }
}

impl KeptValues {
    /// The values, or the codes, and the bytes of each.
    fn bytes(&self) -> (&[u8], usize) {
        match self {
            Self::F32(values) => (bytemuck::cast_slice(values), 4),
            Self::F16(values) => (bytemuck::cast_slice(values), 2),
            Self::Bf16(values) => (bytemuck::cast_slice(values), 2),
            Self::Codes(codes) => (bytemuck::cast_slice(&codes.values), 1),
        }
    }
}

impl CompactPart {
    pub(super) fn values(&self) -> &KeptValues {
        &self.values
    }

    #[inline(always)]
    pub(super) fn mask(&self, row: usize) -> &[u64] {
        let first = if self.keeps_all { 0 } else { row * self.words };
        &self.masks[first..first + self.words]
    }

    /// True if the values have all weights, zeros included.
    pub(super) fn keeps_all(&self) -> bool {
        self.keeps_all
    }

    #[inline(always)]
    pub(super) fn start(&self, row: usize) -> usize {
        self.starts[row] as usize
    }
}

impl CompactMatrix {
    /// Puts a matrix together from parts.
    ///
    /// # Arguments
    /// * `part_of`: the part with a range of rows, in this form
    ///
    /// # Errors
    /// Fails where `part_of` does.
    ///
    /// # Panics
    /// Panics when a part has other rows.
    pub fn of_parts(
        rows: usize,
        columns: usize,
        form: KeptForm,
        mut part_of: impl FnMut(Range<usize>) -> Result<CompactPart>,
    ) -> Result<Self> {
        let at_once = rows_at_once(columns);
        let mut parts = Vec::with_capacity(rows.div_ceil(at_once));
        for first in (0..rows).step_by(at_once) {
            let range = first..rows.min(first + at_once);
            let part = part_of(range.clone())?;
            assert_eq!(part.rows, range.len(), "rows of the matrix");
            parts.push(part);
        }
        let tasks = parts
            .iter()
            .enumerate()
            .flat_map(|(number, part)| part.tasks().into_iter().map(move |rows| (number, rows)));
        let tasks = tasks.collect();
        Ok(Self { rows, columns, form, tasks, parts: parts.into() })
    }

    /// The compact form of a matrix in memory.
    ///
    /// # Errors
    /// Fails as [`CompactPart::of`].
    pub fn of(dense: &StoredMatrix, form: KeptForm) -> Result<Self> {
        Self::of_parts(dense.rows(), dense.columns(), form, |rows| {
            CompactPart::of(&dense.some_rows(rows)?, form)
        })
    }

    /// Rows of the largest part.
    pub fn rows_of_part(rows: usize, columns: usize) -> usize {
        rows_at_once(columns).min(rows)
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
            let scales = match &part.values {
                KeptValues::Codes(codes) => bytemuck::cast_slice(&codes.scales),
                _ => &[],
            };
            [bytemuck::cast_slice(&part.masks), part.values.bytes().0, scales]
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
            KeptForm::Codes | KeptForm::AllCodes => StoredDtype::F32,
        }
    }

    /// Bytes of a matrix with this number of kept weights.
    pub fn bytes(rows: usize, columns: usize, kept: usize, form: KeptForm) -> ByteSize {
        let mask = size_of::<u64>() * columns.div_ceil(WORD);
        let scales = size_of::<f16>() * columns.div_ceil(int8::GROUP);
        let (row, value) = match form {
            KeptForm::Stored(dtype) => (mask, dtype.bytes()),
            KeptForm::Codes => (mask + scales, 1),
            KeptForm::AllCodes => (scales, 1),
        };
        ByteSize((rows * (row + size_of::<u32>()) + kept * value) as u64)
    }

    /// The tasks of a product, in the order of the rows: a part, and rows of it.
    pub(super) fn tasks(&self) -> impl ExactSizeIterator<Item = (&CompactPart, Range<usize>)> {
        self.tasks.iter().map(|(part, rows)| (&self.parts[*part], rows.clone()))
    }
}

/// Rows that a thread makes compact at a time.
const ROWS_AT_ONCE: usize = 16;

impl CompactPart {
    /// The kept weights of rows.
    ///
    /// # Errors
    /// Fails for 8-bit codes of weights that are not finite or whose largest has no f16 scale, and without memory.
    pub fn of(dense: &StoredMatrix, form: KeptForm) -> Result<Self> {
        let (rows, columns) = (dense.rows(), dense.columns());
        let each = dense.dtype().bytes();
        if form.is_coded() {
            int8::check(dense)?;
        }
        let keeps_all = form == KeptForm::AllCodes;
        let mut all = vec![u8::MAX; mask_bytes(columns)];
        if let Some(last) = all.last_mut() {
            *last >>= 8 * mask_bytes(columns) - columns;
        }
        let slabs = (0..rows).step_by(ROWS_AT_ONCE).collect::<Vec<_>>().into_par_iter();
        let slabs = slabs.map(|first| {
            let mut slab = Slab::default();
            let (mut wide, mut mask) = (vec![0.0; columns], all.clone());
            for row in first..rows.min(first + ROWS_AT_ONCE) {
                let bytes = &dense.as_bytes()[row * columns * each..(row + 1) * columns * each];
                if !keeps_all {
                    mark(each, bytes, &mut mask);
                    slab.mask.extend_from_slice(&mask);
                }
                slab.counts.push(kept(&mask));
                match form {
                    KeptForm::Stored(_) => gather(each, bytes, &mask, &mut slab.values),
                    KeptForm::Codes | KeptForm::AllCodes => {
                        dense.widen_rows(row, &mut wide);
                        int8::encode(&wide, &mask, &mut slab.scales, &mut slab.values);
                    }
                }
            }
            slab
        });
        let slabs: Vec<Slab> = slabs.collect();
        let joined = |of: fn(&Slab) -> &[u8]| slabs.iter().map(of).collect::<Vec<_>>();
        let counts = slabs.iter().flat_map(|slab| &slab.counts);
        let ends = counts.scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        let offsets: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let masks = if keeps_all { vec![&all[..]] } else { joined(|slab| &slab.mask) };
        Self::from_slices(
            [rows, columns],
            form,
            &masks,
            &offsets,
            [&joined(|slab| &slab.values), &joined(|slab| &slab.scales)],
        )
    }

    /// Rows whose parts are known.
    ///
    /// # Arguments
    /// * `shape`: rows and columns
    /// * `mask`: a bit per column, 1 = kept, the lowest bit first; rows begin on bytes, bits behind the last column are 0
    /// * `offsets`: the index of each row's first value, and their number at the end; the bits of the masks agree with them
    /// * `values`: the bytes of the values, and the f16 scales of 8-bit codes
    ///
    /// # Errors
    /// Fails without memory.
    ///
    /// # Panics
    /// Panics when the parts do not have the sizes of the shape, and when offsets and masks disagree.
    pub fn of_kept(
        shape: [usize; 2],
        form: KeptForm,
        mask: &[u8],
        offsets: &[usize],
        [values, scales]: [&[u8]; 2],
    ) -> Result<Self> {
        Self::from_slices(shape, form, &[mask], offsets, [&[values], &[scales]])
    }

    /// [`CompactPart::of_kept`] of parts that are in several slices, each of whole rows.
    fn from_slices(
        [rows, columns]: [usize; 2],
        form: KeptForm,
        masks: &[&[u8]],
        offsets: &[usize],
        [values, scales]: [&[&[u8]]; 2],
    ) -> Result<Self> {
        let words = columns.div_ceil(WORD);
        assert_eq!(offsets.len(), rows + 1, "an offset for every row");
        let keeps_all = form == KeptForm::AllCodes;
        let of_masks = if keeps_all { words } else { rows * words };
        let mut wide_masks = Buffer::zeros(of_masks)?;
        let of_rows = masks.iter().flat_map(|masks| masks.chunks_exact(mask_bytes(columns).max(1)));
        assert_eq!(of_rows.clone().count() * words, of_masks, "a mask for every row, or for all");
        for (words, mask) in wide_masks.chunks_exact_mut(words.max(1)).zip(of_rows) {
            for (word, bytes) in words.iter_mut().zip(mask.chunks(8)) {
                let mut all = [0; 8];
                all[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_le_bytes(all);
            }
        }
        // Kernels step over values by the bits of masks.
        let bits = |mask: &[u64]| mask.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        let mut of_rows = offsets.windows(2).enumerate();
        let of_row = |row: usize| &wide_masks[if keeps_all { 0 } else { row * words }..][..words];
        let agrees =
            of_rows.all(|(row, ends)| ends[1].checked_sub(ends[0]) == Some(bits(of_row(row))));
        assert!(agrees && offsets[0] == 0, "offsets that agree with the masks");
        let kept = offsets[rows];
        let starts = offsets.iter().map(|&at| at as u32).collect();
        let values = match form {
            KeptForm::Stored(StoredDtype::F32) => KeptValues::F32(joined(values, kept)?),
            KeptForm::Stored(StoredDtype::F16) => KeptValues::F16(joined(values, kept)?),
            KeptForm::Stored(StoredDtype::Bf16) => KeptValues::Bf16(joined(values, kept)?),
            KeptForm::Codes | KeptForm::AllCodes => {
                let blocks = columns.div_ceil(int8::GROUP);
                let (values, scales) = (joined(values, kept)?, joined(scales, rows * blocks)?);
                KeptValues::Codes(Codes { values, scales, blocks })
            }
        };
        Ok(Self { rows, words, masks: wide_masks, keeps_all, starts, values })
    }

    /// Ranges of rows with about as many bytes each.
    fn tasks(&self) -> Vec<Range<usize>> {
        let (_, value_bytes) = self.values.bytes();
        let of_mask = if self.keeps_all { 0 } else { self.words * size_of::<u64>() };
        let bytes_to = |row: usize| row * of_mask + self.start(row) * value_bytes;
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
}

/// Some rows in compact form.
#[derive(Default)]
struct Slab {
    mask: Vec<u8>,
    counts: Vec<usize>,
    values: Vec<u8>,
    scales: Vec<u8>,
}

/// The elements of several slices, and a window of unused elements.
///
/// # Panics
/// Panics when there are not `count` elements.
fn joined<E: bytemuck::Pod>(slices: &[&[u8]], count: usize) -> Result<Buffer<E>> {
    let mut out = Buffer::zeros(count + int8::GROUP)?;
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut out[..count]);
    assert_eq!(slices.iter().map(|slice| slice.len()).sum::<usize>(), bytes.len(), "all elements");
    let mut rest = bytes;
    for slice in slices {
        let (own, behind) = rest.split_at_mut(slice.len());
        own.copy_from_slice(slice);
        rest = behind;
    }
    Ok(out)
}
