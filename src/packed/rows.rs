//! [`CompactRows`]: the parts of some rows of a packed matrix, read and checked.
//!
//! Numbers in a file decide what is read. So offsets are compared with the bits of each row's mask before values are read, and a
//! difference names the row and both numbers.

use std::ops::Range;

use anyhow::Result;

use super::matrix::{OFFSET_BYTES, PackedMatrix, broken};
use crate::checkpoint::{Checkpoint, KeptRows, WeightSource};
use crate::linalg::bitmask::{has_two_of_four, kept, padding_is_clear, scatter};
use crate::linalg::convert::narrow;
use crate::linalg::int8;

/// The parts of consecutive rows. Buffers keep their memory for the next rows.
#[derive(Debug, Default)]
pub struct CompactRows {
    /// The mask, [`PackedMatrix::mask_bytes`] per row.
    pub mask: Vec<u8>,
    /// The index of each row's first value in `values`, and their number at the end: rows + 1 numbers.
    pub offsets: Vec<usize>,
    /// The stored values of all rows, [`PackedMatrix::value_bytes`] each.
    pub values: Vec<u8>,
    /// f16 scales, [`PackedMatrix::groups`] per row; empty for exact values.
    pub scales: Vec<u8>,
    /// Bytes of the offsets in the file.
    stored_offsets: Vec<u8>,
    /// A row of rounded weights.
    wide: Vec<f32>,
}

impl CompactRows {
    /// Reads the parts of `rows` from the files of the packed checkpoint.
    ///
    /// # Errors
    /// Fails when the rows leave the matrix, when a file cannot be read, and where mask, offsets and values do not agree; the message
    /// names the matrix, the row and the numbers.
    pub fn read(
        &mut self,
        base: &Checkpoint,
        matrix: &PackedMatrix,
        rows: Range<usize>,
    ) -> Result<()> {
        if rows.start > rows.end || rows.end > matrix.rows {
            anyhow::bail!("rows {rows:?} leave the {} of `{}`", matrix.rows, matrix.name);
        }
        let of_row = matrix.mask_bytes();
        self.mask.resize(rows.len() * of_row, 0);
        base.read(&matrix.bitmask, (rows.start * of_row) as u64, &mut self.mask)?;
        let first = match matrix.row_offsets {
            Some(_) => self.read_offsets(base, matrix, &rows)?,
            None => self.count_two_of_four(matrix, &rows)?,
        };
        let each = matrix.value_bytes();
        let count = self.offsets.last().copied().unwrap_or(0);
        self.values.resize(count * each, 0);
        base.read(&matrix.compressed, (first * each) as u64, &mut self.values)?;
        self.scales.clear();
        if let Some(scales) = &matrix.scales {
            let of_row = 2 * matrix.groups();
            self.scales.resize(rows.len() * of_row, 0);
            base.read(scales, (rows.start * of_row) as u64, &mut self.scales)?;
            if let Some(at) = int8::first_wrong_scale(&self.scales) {
                let (row, group) = (rows.start + at / matrix.groups(), at % matrix.groups());
                let why = format!("scale {group} of row {row} in `{}` is no scale", scales.name);
                return Err(broken(&matrix.name, why).into());
            }
        }
        Ok(())
    }

    /// Reads the offsets of rows with any mask; returns the index of the first value in the file.
    fn read_offsets(
        &mut self,
        base: &Checkpoint,
        matrix: &PackedMatrix,
        rows: &Range<usize>,
    ) -> Result<usize> {
        self.offsets.clear();
        self.offsets.push(0);
        let Some(entry) = matrix.row_offsets.as_ref().filter(|_| !rows.is_empty()) else {
            return Ok(0);
        };
        let all = matrix.kept();
        // The row after the last one tells where the last one ends.
        let stored = rows.start..(rows.end + 1).min(matrix.rows);
        self.stored_offsets.resize(OFFSET_BYTES * stored.len(), 0);
        base.read(entry, (OFFSET_BYTES * rows.start) as u64, &mut self.stored_offsets)?;
        let words = self.stored_offsets.as_chunks::<OFFSET_BYTES>().0.iter();
        let starts = words.map(|&word| i64::from_le_bytes(word)).chain([all as i64]);
        let mut starts = starts.take(rows.len() + 1);
        let first = starts.next().unwrap_or(0);
        if first < 0 || first > all as i64 || (rows.start == 0 && first != 0) {
            let why = format!(
                "row {} begins at value {first} by `{}`; there are {all} values, and the first row begins at 0",
                rows.start, entry.name
            );
            return Err(broken(&matrix.name, why).into());
        }
        let of_row = matrix.mask_bytes();
        let mut before = first;
        for ((at, mask), next) in self.mask.chunks(of_row.max(1)).enumerate().zip(starts) {
            let (row, bits) = (rows.start + at, kept(mask));
            if !padding_is_clear(mask, matrix.columns) {
                return Err(padding(matrix, row));
            }
            if next.checked_sub(before) != Some(bits as i64) || next > all as i64 {
                let why = format!(
                    "the mask of row {row} keeps {bits} columns, `{}` gives it the values {before} to {next} of {all}",
                    entry.name
                );
                return Err(broken(&matrix.name, why).into());
            }
            before = next;
            self.offsets.push((next - first) as usize);
        }
        Ok(first as usize)
    }

    /// Checks masks of 2:4; returns the index of the first value in the file.
    fn count_two_of_four(&mut self, matrix: &PackedMatrix, rows: &Range<usize>) -> Result<usize> {
        let each = matrix.columns / 2;
        for (at, mask) in self.mask.chunks(matrix.mask_bytes().max(1)).enumerate() {
            let row = rows.start + at;
            if !padding_is_clear(mask, matrix.columns) {
                return Err(padding(matrix, row));
            }
            if !has_two_of_four(mask, matrix.columns) {
                let why = format!(
                    "row {row} of `{}` has four columns that do not keep two; the format keeps exactly two",
                    matrix.bitmask.name
                );
                return Err(broken(&matrix.name, why).into());
            }
        }
        self.offsets.clear();
        self.offsets.extend((0..=rows.len()).map(|row| row * each));
        Ok(rows.start * each)
    }

    /// The rows as they are stored.
    pub fn kept(&self) -> KeptRows<'_> {
        KeptRows {
            mask: &self.mask,
            offsets: &self.offsets,
            values: &self.values,
            scales: &self.scales,
        }
    }

    /// Restores all rows: bytes of the dense matrix in its dtype.
    ///
    /// # Arguments
    /// * `dense`: [`PackedMatrix::row_bytes`] per row, replaced
    pub fn expand(&mut self, matrix: &PackedMatrix, dense: &mut [u8]) {
        let (each, of_mask) = (matrix.value_bytes(), matrix.mask_bytes().max(1));
        let of_scales = 2 * matrix.groups();
        let mut stored = Vec::new();
        let rows = dense.chunks_mut(matrix.row_bytes().max(1)).zip(self.mask.chunks(of_mask));
        for (row, ((dense, mask), ends)) in rows.zip(self.offsets.windows(2)).enumerate() {
            let values = &self.values[ends[0] * each..ends[1] * each];
            if matrix.scales.is_none() {
                scatter(each, values, mask, dense);
                continue;
            }
            self.wide.resize(matrix.columns, 0.0);
            let scales = &self.scales[row * of_scales..(row + 1) * of_scales];
            int8::decode(values, scales, mask, &mut self.wide);
            narrow(matrix.dtype, &self.wide, &mut stored);
            dense.copy_from_slice(&stored);
        }
    }
}

fn padding(matrix: &PackedMatrix, row: usize) -> anyhow::Error {
    let why = format!(
        "row {row} of `{}` has a bit after its {} columns",
        matrix.bitmask.name, matrix.columns
    );
    broken(&matrix.name, why).into()
}
