//! Order statistics of magnitudes, exact, in two reads of the values and without sorting.
//!
//! The bits of |x| order like |x| (IEEE 754 §5.10), and a turn of the bits of negative x makes them order like x. The first read counts
//! the upper 16 bits, which finds the bin of the wanted position. The second read counts the lower 16 bits of the values in that bin.
//! Counts of several tensors are added, so a search among all weights of a model needs no more memory than a search in a single tensor.

/// Values of the bits that the first read counts.
const UPPER_BINS: usize = 1 << 16;
/// Values of the bits that the second read counts.
pub const LOWER_BINS: usize = 1 << 16;
/// All bits but the sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// The bits of |x|.
#[inline(always)]
pub fn key(value: f32) -> u32 {
    value.to_bits() & MAGNITUDE
}

/// Bits that order like x, its sign included.
#[inline(always)]
pub fn signed_key(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits > MAGNITUDE { !bits } else { bits | !MAGNITUDE }
}

/// The value with these [`signed_key`] bits.
pub fn from_signed_key(key: u32) -> f32 {
    f32::from_bits(if key > MAGNITUDE { key & MAGNITUDE } else { !key })
}

/// The value at a position of the ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrderStatistic {
    /// Its [`key`], or its [`signed_key`] where these are counted.
    pub key: u32,
    /// Smaller values.
    pub below: u64,
    /// Values equal to it.
    pub equal: u64,
}

/// The counts of a tensor in a read.
#[derive(Debug, Clone, PartialEq)]
pub enum Counts {
    /// Of the first read.
    Upper(Vec<u64>),
    /// Of the second read, per wanted position.
    Lower(Vec<(u32, Vec<u64>)>),
}

impl Counts {
    /// Counts nothing yet, for the read that `search` is at.
    pub fn of(search: &Search) -> Self {
        match &search.stage {
            Stage::Upper(_) => Self::Upper(vec![0; UPPER_BINS]),
            Stage::Lower(bins) => {
                Self::Lower(bins.iter().map(|bin| (bin.upper, vec![0; LOWER_BINS])).collect())
            }
            Stage::Found(_) => Self::Lower(Vec::new()),
        }
    }

    /// Counts magnitudes.
    pub fn add(&mut self, values: &[f32]) {
        self.add_keys(values, key);
    }

    /// Counts the bits of values.
    pub fn add_keys(&mut self, values: &[f32], key: impl Fn(f32) -> u32) {
        match self {
            Self::Upper(counts) => count_upper(counts, values, key),
            Self::Lower(bins) => {
                for (upper, counts) in bins {
                    count_lower(*upper, counts, values, &key);
                }
            }
        }
    }
}

/// Counts the upper bits of values.
fn count_upper(counts: &mut [u64], values: &[f32], key: impl Fn(f32) -> u32) {
    for value in values {
        counts[(key(*value) >> 16) as usize] += 1;
    }
}

/// Counts the lower bits of the values with these upper bits.
fn count_lower(upper: u32, counts: &mut [u64], values: &[f32], key: impl Fn(f32) -> u32) {
    for value in values {
        let key = key(*value);
        if key >> 16 == upper {
            counts[(key & 0xffff) as usize] += 1;
        }
    }
}

/// A bin of the first read with a wanted position.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Bin {
    upper: u32,
    /// Values in smaller bins.
    below: u64,
    counts: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Upper(Vec<u64>),
    Lower(Vec<Bin>),
    Found(Vec<OrderStatistic>),
}

/// The search for the values at some positions of the ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Search {
    positions: Vec<u64>,
    stage: Stage,
}

impl Search {
    /// Begins a search for these positions, from 0.
    pub fn new(positions: Vec<u64>) -> Self {
        Self { positions, stage: Stage::Upper(vec![0; UPPER_BINS]) }
    }

    /// Searches for the value at this position alone. The position counts from the end of the first read on.
    pub fn aim(&mut self, position: u64) {
        self.positions = vec![position];
    }

    /// Counts magnitudes in the current read, straight into the bins of the search.
    pub fn add_values(&mut self, values: &[f32]) {
        match &mut self.stage {
            Stage::Upper(counts) => count_upper(counts, values, key),
            Stage::Lower(bins) => {
                for Bin { upper, counts, .. } in bins {
                    count_lower(*upper, counts, values, key);
                }
            }
            Stage::Found(_) => {}
        }
    }

    /// Adds the counts of a tensor in the current read.
    pub fn add(&mut self, counts: &Counts) {
        let sum = |all: &mut Vec<u64>, more: &Vec<u64>| {
            for (all, more) in all.iter_mut().zip(more) {
                *all += more;
            }
        };
        match (&mut self.stage, counts) {
            (Stage::Upper(all), Counts::Upper(more)) => sum(all, more),
            (Stage::Lower(bins), Counts::Lower(more)) => {
                for (bin, (_, more)) in bins.iter_mut().zip(more) {
                    sum(&mut bin.counts, more);
                }
            }
            _ => {}
        }
    }

    /// Ends a read: all values are counted.
    ///
    /// # Panics
    /// Panics where fewer values were counted than a position asks for.
    pub fn advance(&mut self) {
        let at = |counts: &[u64], position: u64| {
            let mut below = 0;
            for (bin, count) in counts.iter().enumerate() {
                if position < below + count {
                    return (bin as u32, below);
                }
                below += count;
            }
            panic!("position {position} is beyond the {below} values that were counted")
        };
        let positions = self.positions.iter().copied();
        let stage = std::mem::replace(&mut self.stage, Stage::Found(Vec::new()));
        self.stage = match stage {
            Stage::Upper(counts) => {
                let bins: Vec<(u32, u64)> = positions.map(|of| at(&counts, of)).collect();
                // The bins of the two reads are never in memory together.
                drop(counts);
                let bins = bins.into_iter().map(|(upper, below)| {
                    let counts = vec![0; LOWER_BINS];
                    Bin { upper, below, counts }
                });
                Stage::Lower(bins.collect())
            }
            Stage::Lower(bins) => Stage::Found(
                bins.iter()
                    .zip(positions)
                    .map(|(bin, position)| {
                        let (lower, below) = at(&bin.counts, position - bin.below);
                        OrderStatistic {
                            key: bin.upper << 16 | lower,
                            below: bin.below + below,
                            equal: bin.counts[lower as usize],
                        }
                    })
                    .collect(),
            ),
            found @ Stage::Found(_) => found,
        };
    }

    /// The values at the positions, once both reads have ended.
    pub fn found(&self) -> Option<&[OrderStatistic]> {
        match &self.stage {
            Stage::Found(found) => Some(found),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(tensors: &[&[f32]], positions: &[u64]) -> Vec<OrderStatistic> {
        let mut search = Search::new(positions.to_vec());
        for _ in 0..2 {
            let counts: Vec<Counts> = tensors
                .iter()
                .map(|tensor| {
                    let mut counts = Counts::of(&search);
                    counts.add(tensor);
                    counts
                })
                .collect();
            for counts in &counts {
                search.add(counts);
            }
            search.advance();
        }
        search.found().expect("two reads").to_vec()
    }

    #[test]
    fn positions_are_those_of_the_sorted_magnitudes() {
        // Values of both signs that share upper bits, with zeros and ties.
        let mut values: Vec<f32> = (0..3000u32)
            .map(|i| {
                let magnitude = f32::from_bits(0x3f00_0000 + (i * 7919) % 150_000);
                if i % 3 == 0 { -magnitude } else { magnitude }
            })
            .collect();
        values.extend([0.0, -0.0, 1e-40, f32::MAX, 0.25, -0.25, 0.25]);
        let mut sorted: Vec<u32> = values.iter().map(|value| key(*value)).collect();
        sorted.sort_unstable();
        let (first, second) = values.split_at(1234);
        for position in [0, 1, 2, 5, 1500, values.len() - 1] {
            let wanted = sorted[position];
            let found = search(&[first, second], &[position as u64])[0];
            assert_eq!(found.key, wanted, "position {position}");
            let below = sorted.iter().filter(|key| **key < wanted).count() as u64;
            let equal = sorted.iter().filter(|key| **key == wanted).count() as u64;
            assert_eq!((found.below, found.equal), (below, equal));
        }
    }

    #[test]
    fn signed_bits_order_like_numbers() {
        let values = [f32::MIN, -2.0, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.5, 2.0, f32::MAX];
        let keys = values.map(signed_key);
        assert!(keys.is_sorted_by(|one, other| one < other));
        assert_eq!(keys.map(|key| from_signed_key(key).to_bits()), values.map(f32::to_bits));
    }

    #[test]
    fn two_positions_may_share_a_bin() {
        let values = [3.0f32, -1.0, 2.0, 1.0, 1.0];
        let found = search(&[&values], &[1, 2]);
        let one = OrderStatistic { key: 1.0f32.to_bits(), below: 0, equal: 3 };
        assert_eq!(found, [one, one]);
    }
}
