//! Which weights of a matrix are pruned, one bit each.

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

impl Mask {
    /// A mask that prunes nothing.
    pub fn none(rows: usize, columns: usize) -> Self {
        Self {
            rows,
            columns,
            bits: vec![0; (rows * columns).div_ceil(8)],
        }
    }

    /// Builds a mask row by row on all threads.
    ///
    /// # Arguments
    /// * `scratch`: makes what one task reuses between rows
    /// * `fill(scratch, row, set)`: calls `set(column)` for every pruned column of a row
    ///
    /// # Errors
    /// The error of the lowest task that failed.
    pub fn by_rows<S, E: Send>(
        rows: usize,
        columns: usize,
        scratch: impl Fn() -> S + Sync + Send,
        fill: impl Fn(&mut S, usize, &mut dyn FnMut(usize)) -> Result<(), E> + Sync + Send,
    ) -> Result<Self, E> {
        let mut mask = Self::none(rows, columns);
        if columns == 0 {
            return Ok(mask);
        }
        mask.bits
            .par_chunks_mut(columns)
            .enumerate()
            .try_for_each_init(scratch, |scratch, (task, bits)| {
                for row_in_task in 0..ROWS_PER_TASK.min(rows - task * ROWS_PER_TASK) {
                    let first_bit = row_in_task * columns;
                    let mut set = |column: usize| {
                        let bit = first_bit + column;
                        bits[bit / 8] |= 1 << (bit % 8);
                    };
                    fill(scratch, task * ROWS_PER_TASK + row_in_task, &mut set)?;
                }
                Ok(())
            })?;
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

    /// Whether a weight is pruned.
    #[inline]
    pub fn is_pruned(&self, row: usize, column: usize) -> bool {
        let bit = row * self.columns + column;
        self.bits[bit / 8] >> (bit % 8) & 1 == 1
    }

    /// How many weights are pruned.
    pub fn count(&self) -> u64 {
        self.bits
            .par_chunks(1 << 16)
            .map(|bytes| {
                bytes
                    .iter()
                    .map(|byte| u64::from(byte.count_ones()))
                    .sum::<u64>()
            })
            .sum()
    }

    /// The packed bits.
    pub fn bits(&self) -> &[u8] {
        &self.bits
    }

    /// The packed bits, the mask given up.
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
            |(), row, set| {
                set(row % 3);
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
    fn the_hash_is_that_of_the_packed_bytes() {
        // python3 -c "import hashlib; print(hashlib.sha256(bytes([0])).hexdigest())"
        assert_eq!(
            Mask::none(2, 2).sha256(),
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
        );
    }
}
