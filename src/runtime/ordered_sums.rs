//! Sums of arrays whose terms are made on several ranks, added up in the order of the terms: the bits of a single process.
//!
//! ```text
//! sum = ((term 0 + term 1) + term 2) + …          per element
//! a term      its rank cuts every array into equal parts and sends each part to the rank that owns it
//! an owner    adds the parts in the order of the terms
//! the end     the owners send their parts of the sums to all ranks
//! ```
//!
//! A rank makes its next term before it waits for the terms in between, so ranks work at the same time. Bytes that a rank sends for arrays
//! of g bytes, with t terms of its own on R ranks: (t + 1) · g · (R − 1)/R. A process alone adds to its first term and sends nothing.

use anyhow::Result;

use crate::linalg::elementwise;
use crate::ranks::Ranks;
use crate::ranks::arrays::owned;

/// The sums of some arrays.
pub struct OrderedSums<'a> {
    ranks: &'a Ranks,
    /// By term, the rank that makes it.
    makers: Vec<usize>,
    /// Terms that are added.
    added: usize,
    /// Elements of each array.
    lengths: Vec<usize>,
    /// By array, the sums of the part that this rank owns.
    sums: Vec<Vec<f32>>,
}

impl<'a> OrderedSums<'a> {
    /// Sums without a term.
    ///
    /// # Arguments
    /// * `makers`: by term, the rank that makes it
    /// * `lengths`: elements of each array
    pub fn new(ranks: &'a Ranks, makers: Vec<usize>, lengths: Vec<usize>) -> Self {
        let sums = lengths.iter().map(|&length| {
            let own = owned(length, ranks.rank(), ranks.size());
            // The identity of addition: 0 + −0 would be +0.
            if ranks.is_alone() { Vec::new() } else { vec![-0.0; own.len()] }
        });
        let sums = sums.collect();
        Self { ranks, makers, added: 0, lengths, sums }
    }

    /// Adds a term that this rank has made. Its terms come in ascending order. The arrays may be used again, but not their content.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub fn add(&mut self, term: usize, arrays: Vec<&mut Vec<f32>>) -> Result<()> {
        if self.ranks.is_alone() {
            self.added += 1;
            if self.added > 1 {
                let pairs = self.sums.iter_mut().zip(arrays);
                pairs.for_each(|(sum, array)| elementwise::add(sum, array));
                return Ok(());
            }
            // The first term becomes the sum, and a single term needs no second memory.
            let length = |length| if self.makers.len() > 1 { length } else { 0 };
            let arrays = arrays.into_iter();
            let taken =
                arrays.map(|array| std::mem::replace(array, vec![0.0; length(array.len())]));
            self.sums = taken.collect();
            return Ok(());
        }
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        for to in (0..size).filter(|&to| to != rank) {
            for array in &arrays {
                let part = &array[owned(array.len(), to, size)];
                self.ranks.send(to, bytemuck::cast_slice(part))?;
            }
        }
        self.receive_until(term)?;
        for (sum, array) in self.sums.iter_mut().zip(&arrays) {
            elementwise::add(sum, &array[owned(array.len(), rank, size)]);
        }
        self.added += 1;
        Ok(())
    }

    /// Adds the terms of other ranks before `term`.
    fn receive_until(&mut self, term: usize) -> Result<()> {
        for maker in &self.makers[self.added..term] {
            for sum in &mut self.sums {
                let part = self.ranks.receive(*maker)?;
                let part: Vec<f32> = bytemuck::pod_collect_to_vec(&part);
                elementwise::add(sum, &part);
            }
        }
        self.added = term;
        Ok(())
    }

    /// Waits for the last terms, and returns the whole sums.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub fn finish(mut self) -> Result<Vec<Vec<f32>>> {
        if self.ranks.is_alone() {
            return Ok(self.sums);
        }
        self.receive_until(self.makers.len())?;
        let whole = self.lengths.iter().zip(self.sums).map(|(&length, own)| {
            let parts = self.ranks.all_gather(bytemuck::cast_slice(&own))?;
            drop(own);
            let mut whole = vec![0.0; length];
            for (owner, part) in parts.iter().enumerate() {
                let place = &mut whole[owned(length, owner, self.ranks.size())];
                bytemuck::cast_slice_mut::<f32, u8>(place).copy_from_slice(part);
            }
            Ok(whole)
        });
        whole.collect()
    }
}

/// Numbers of all terms in their order, from the numbers of the terms that this rank makes.
///
/// # Errors
/// Fails when a rank has left.
pub fn gathered(makers: &[usize], own: &[f64], ranks: &Ranks) -> Result<Vec<f64>> {
    let by_rank = ranks.all_gather(bytemuck::cast_slice(own))?;
    let by_rank = by_rank.iter().map(|bytes| bytemuck::pod_collect_to_vec::<u8, f64>(bytes));
    let mut by_rank: Vec<_> = by_rank.map(Vec::into_iter).collect();
    Ok(makers.iter().filter_map(|&maker| by_rank[maker].next()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::threads;

    const LENGTHS: [usize; 3] = [5, 1, 1000];

    /// Numbers of different magnitudes, whose sum depends on the order; some are −0.
    fn term(number: usize) -> Vec<Vec<f32>> {
        let value = |at: usize| match (number + at) % 7 {
            0 => -0.0,
            of => 10f32.powi(of as i32 - 3) * (at as f32 + 0.1) * (1.0 - 2.0 * (number % 2) as f32),
        };
        LENGTHS.iter().map(|&length| (0..length).map(value).collect()).collect()
    }

    fn sum(ranks: &Ranks, makers: &[usize]) -> Result<Vec<Vec<u32>>> {
        let mut sums = OrderedSums::new(ranks, makers.to_vec(), LENGTHS.to_vec());
        let own = makers.iter().enumerate().filter(|(_, maker)| **maker == ranks.rank());
        let mut numbers = Vec::new();
        for (number, _) in own {
            let mut arrays = term(number);
            sums.add(number, arrays.iter_mut().collect())?;
            numbers.push(number as f64);
        }
        let sums = sums.finish()?;
        let all: Vec<f64> = (0..makers.len()).map(|number| number as f64).collect();
        assert_eq!(gathered(makers, &numbers, ranks)?, all);
        Ok(sums.iter().map(|sum| sum.iter().map(|value| value.to_bits()).collect()).collect())
    }

    #[test]
    fn sums_of_ranks_have_the_bits_of_one_process() {
        for terms in [1, 2, 7] {
            let alone = sum(&Ranks::alone(), &vec![0; terms]).unwrap();
            for size in [2, 3, 8] {
                // In turn, all on the last rank, and in an order without a rule.
                let in_turn = (0..terms).map(|term| term % size).collect();
                let mixed = (0..terms).map(|term| (term * term + 1) % size).collect();
                for makers in [in_turn, vec![size - 1; terms], mixed] {
                    let joined = threads::run(size, |ranks| {
                        Ok((sum(ranks, &makers)?, ranks.traffic().bytes_sent as usize))
                    });
                    for (rank, outcome) in joined.into_iter().enumerate() {
                        let (sums, sent) = outcome.unwrap();
                        assert_eq!(sums, alone, "{terms} terms by {makers:?}");
                        let own = makers.iter().filter(|maker| **maker == rank).count();
                        let bytes = 4 * LENGTHS.iter().sum::<usize>() * (size - 1) / size;
                        // Lengths of messages, and parts that are not equal.
                        let more = (own + 1) * LENGTHS.len() * 16 * size;
                        // An owner sends its part to every other rank.
                        assert!(sent <= (own + 1) * bytes + more, "{sent}, {own} of {bytes}");
                    }
                }
            }
        }
    }
}
