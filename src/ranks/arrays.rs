//! Arrays that all ranks hold: parts that are put together, and integers that are added up.

use std::ops::Range;

use anyhow::Result;

use super::{PIECE, Ranks};

/// The elements of an array that a rank owns.
pub fn owned(length: usize, rank: usize, ranks: usize) -> Range<usize> {
    let start = |rank: usize| length * rank / ranks;
    start(rank)..start(rank + 1)
}

impl Ranks {
    /// Fills an array that every rank has filled in its own part.
    ///
    /// # Arguments
    /// * `part_of`: the part of a rank
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub fn gather_parts(
        &self,
        array: &mut [u8],
        part_of: &dyn Fn(usize) -> Range<usize>,
    ) -> Result<()> {
        let longest = (0..self.size()).map(|rank| part_of(rank).len()).max().unwrap_or_default();
        for first in (0..longest).step_by(PIECE) {
            let piece_of = |rank: usize| {
                let part = part_of(rank);
                let at = |byte: usize| part.end.min(part.start + byte);
                at(first)..at(first + PIECE)
            };
            let pieces = self.all_gather(&array[piece_of(self.rank())])?;
            for (rank, piece) in pieces.iter().enumerate() {
                array[piece_of(rank)].copy_from_slice(piece);
            }
        }
        Ok(())
    }

    /// Replaces every number by its sum over all ranks. Numbers at the ends that are 0 on all ranks are not sent, and a number is sent in as
    /// many bytes as the largest sum may need.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub fn sum(&self, numbers: &mut [u64]) -> Result<()> {
        if self.is_alone() {
            return Ok(());
        }
        let is_used = |number: &u64| *number > 0;
        let first = numbers.iter().position(is_used).unwrap_or(numbers.len());
        let end = numbers.iter().rposition(is_used).map_or(0, |last| last + 1);
        let largest = numbers.iter().max().copied().unwrap_or_default();
        let of_all = self.all_gather(bytemuck::cast_slice(&[first as u64, end as u64, largest]))?;
        let of_all: Vec<[u64; 3]> =
            of_all.iter().flat_map(|bytes| bytemuck::pod_collect_to_vec(bytes)).collect();
        let first = of_all.iter().map(|of| of[0]).min().unwrap_or_default() as usize;
        let end = of_all.iter().map(|of| of[1]).max().unwrap_or_default() as usize;
        let largest: u64 = of_all.iter().map(|of| of[2]).sum();
        if first >= end {
            return Ok(());
        }
        let width = (u64::BITS - largest.leading_zeros()).div_ceil(u8::BITS) as usize;
        let used = &mut numbers[first..end];
        let encoded = |numbers: &[u64]| -> Vec<u8> {
            numbers.iter().flat_map(|number| number.to_le_bytes().into_iter().take(width)).collect()
        };
        let decoded = |bytes: &[u8]| -> Vec<u64> {
            let number = |bytes: &[u8]| {
                bytes.iter().rev().fold(0, |number, byte| number << u8::BITS | u64::from(*byte))
            };
            bytes.chunks_exact(width).map(number).collect()
        };
        let part_of = |rank: usize| owned(end - first, rank, self.size());
        let parts = self.exchange(&|to| encoded(&used[part_of(to)]))?;
        let mut own = vec![0; part_of(self.rank()).len()];
        for part in parts {
            own.iter_mut().zip(decoded(&part)).for_each(|(sum, more)| *sum += more);
        }
        for (rank, part) in self.all_gather(&encoded(&own))?.iter().enumerate() {
            used[part_of(rank)].copy_from_slice(&decoded(part));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::threads;

    #[test]
    fn integers_are_added_over_all_ranks() {
        // Numbers with zeros at the ends, large numbers, none at all, and fewer numbers than ranks.
        for (length, most) in [(1000, 1u64 << 40), (1000, 3), (2, 255), (5, 0), (0, 1)] {
            for size in [1, 2, 3, 8] {
                let of = |rank: usize| -> Vec<u64> {
                    let number = |at: usize| match at {
                        at if at < length / 4 || at == length - 1 => 0,
                        at => most * ((at * 7 + rank * 13) % 11) as u64 / 11,
                    };
                    (0..length).map(number).collect()
                };
                let expected: Vec<u64> =
                    (0..length).map(|at| (0..size).map(|rank| of(rank)[at]).sum()).collect();
                let sums = threads::run(size, |ranks| {
                    let mut numbers = of(ranks.rank());
                    ranks.sum(&mut numbers)?;
                    Ok(numbers)
                });
                for sum in sums {
                    assert_eq!(sum.unwrap(), expected, "{length} numbers to {most} on {size}");
                }
            }
        }
    }

    #[test]
    fn parts_of_any_length_are_put_together() {
        for length in [0, 5, 3 * PIECE + 7] {
            let expected: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            for size in [1, 2, 3] {
                let part_of = |rank: usize| owned(length, rank, size);
                let gathered = threads::run(size, |ranks| {
                    let (own, mut array) = (part_of(ranks.rank()), vec![0; length]);
                    array[own.clone()].copy_from_slice(&expected[own]);
                    ranks.gather_parts(&mut array, &part_of)?;
                    Ok(array)
                });
                assert!(gathered.into_iter().all(|array| array.unwrap() == expected));
            }
        }
    }
}
