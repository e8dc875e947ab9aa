//! Masks: the pruned weights of a matrix, a bit each.

use crate::bytes::hex;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// A mask `[rows, columns]`: bit 1 = pruned, row-major without padding between rows, least significant bit first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    rows: usize,
    columns: usize,
    bits: Vec<u8>,
}

/// Eight rows of any length end on a byte boundary, so tasks of that many rows share no byte.
const ROWS_PER_TASK: usize = 8;

/// The bits of a row.
#[derive(Debug)]
pub struct RowBits<'a> {
    bits: &'a mut [u8],
    /// The row's first bit.
    first: usize,
    columns: usize,
}

impl RowBits<'_> {
    /// Prunes the columns for which `is_pruned` is true. It is called once per column, in order. The code does not branch on its
    /// result, which no processor could predict.
    pub fn set_where(&mut self, mut is_pruned: impl FnMut(usize) -> bool) {
        let (mut column, end) = (0, self.first + self.columns);
        while column < self.columns && !(self.first + column).is_multiple_of(8) {
            let bit = self.first + column;
            self.bits[bit / 8] |= u8::from(is_pruned(column)) << (bit % 8);
            column += 1;
        }
        let whole = (self.columns - column) / 8;
        let from = (self.first + column) / 8;
        for byte in &mut self.bits[from..from + whole] {
            let flags = std::array::from_fn(|place| u8::from(is_pruned(column + place)));
            *byte |= packed(flags);
            column += 8;
        }
        for bit in self.first + column..end {
            self.bits[bit / 8] |= u8::from(is_pruned(bit - self.first)) << (bit % 8);
        }
    }
}

/// Eight flags, 0 or 1, as the bits of a byte: flag i is moved from bit 8·i to bit 56 + i, and no two terms meet on the way.
fn packed(flags: [u8; 8]) -> u8 {
    (u64::from_le_bytes(flags).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
}

impl Mask {
    /// A mask that prunes nothing.
    pub fn none(rows: usize, columns: usize) -> Self {
        Self { rows, columns, bits: vec![0; (rows * columns).div_ceil(8)] }
    }

    /// The mask with these bits.
    ///
    /// # Panics
    /// Panics when there is not a bit for every weight, rounded up to bytes.
    pub fn from_bits(rows: usize, columns: usize, bits: Vec<u8>) -> Self {
        let bytes = (rows * columns).div_ceil(8);
        assert_eq!(bits.len(), bytes, "a mask has a bit for every weight");
        Self { rows, columns, bits }
    }

    /// Builds a mask row by row on all threads.
    ///
    /// # Arguments
    /// * `scratch`: makes the buffers that a task reuses between rows
    /// * `fill(scratch, row, bits)`: sets the pruned columns of a row, all of which are clear
    ///
    /// # Errors
    /// Fails with the error of the lowest task that failed.
    pub fn by_rows<S, E: Send>(
        rows: usize,
        columns: usize,
        scratch: impl Fn() -> S + Sync + Send,
        fill: impl Fn(&mut S, usize, &mut RowBits<'_>) -> Result<(), E> + Sync + Send,
    ) -> Result<Self, E> {
        let mut mask = Self::none(rows, columns);
        if columns == 0 {
            return Ok(mask);
        }
        mask.bits.par_chunks_mut(columns).enumerate().try_for_each_init(
            scratch,
            |scratch, (task, bits)| {
                for row_in_task in 0..ROWS_PER_TASK.min(rows - task * ROWS_PER_TASK) {
                    let mut row = RowBits { bits, first: row_in_task * columns, columns };
                    fill(scratch, task * ROWS_PER_TASK + row_in_task, &mut row)?;
                }
                Ok(())
            },
        )?;
        Ok(mask)
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns whether a weight is pruned.
    #[inline]
    pub fn is_pruned(&self, row: usize, column: usize) -> bool {
        let bit = row * self.columns + column;
        self.bits[bit / 8] >> (bit % 8) & 1 == 1
    }

    /// The number of pruned weights.
    pub fn count(&self) -> u64 {
        self.bits
            .par_chunks(1 << 16)
            .map(|bytes| bytes.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>())
            .sum()
    }

    /// The packed bits.
    pub fn bits(&self) -> &[u8] {
        &self.bits
    }

    /// Converts the mask into its packed bits.
    pub fn into_bits(self) -> Vec<u8> {
        self.bits
    }

    /// SHA-256 of the packed bits, in hex: two runs that chose the same weights have the same hash.
    pub fn sha256(&self) -> String {
        hex(&Sha256::digest(&self.bits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_packed_without_row_padding() {
        let mask = Mask::by_rows(
            11,
            3,
            || (),
            |(), row, bits| {
                bits.set_where(|column| column == row % 3);
                Ok::<_, ()>(())
            },
        )
        .unwrap();
        // Row 0 sets bit 0, row 1 bit 3 + 1, row 2 bit 6 + 2 (second byte, bit 0).
        assert_eq!((mask.bits()[0], mask.bits()[1] & 1), (0b0001_0001, 1));
        assert_eq!(mask.count(), 11);
        assert!(
            (0..11)
                .all(|row| (0..3).all(|column| mask.is_pruned(row, column) == (column == row % 3)))
        );
    }

    #[test]
    fn rows_of_any_length_lose_the_chosen_columns() {
        let is_chosen = |row: usize, column: usize| (row * 5 + column * 3) % 7 < 3;
        for columns in [1, 3, 8, 13, 16, 27] {
            let mask = Mask::by_rows(
                11,
                columns,
                || (),
                |(), row, bits| {
                    bits.set_where(|column| is_chosen(row, column));
                    Ok::<_, ()>(())
                },
            )
            .unwrap();
            for (row, column) in
                (0..11).flat_map(|row| (0..columns).map(move |column| (row, column)))
            {
                assert_eq!(mask.is_pruned(row, column), is_chosen(row, column), "{columns}");
            }
        }
    }

    #[test]
    fn the_hash_is_that_of_the_packed_bytes() {
        // python3 -c "import hashlib; print(hashlib.sha256(bytes([0])).hexdigest())"
        assert_eq!(
            Mask::none(2, 2).sha256(),
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
        );
    }
}
