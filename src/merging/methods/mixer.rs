//! The elementwise end of a merge, after trimming: [`Formula`], and the CPU that computes it.
//!
//! ```text
//! weighted sum   W = Σ_t w_t W_t / n
//! mixture        V_t = v_t T_t,  s = sign(Σ_t V_t),  W = W₀ + λ Σ_t V_t [sign V_t = s] / n
//! ```
//!
//! All operations are f32 and each is rounded, in the order above. So a device that rounds every operation gives the same bits.

use std::ops::Range;

use anyhow::Result;
use pulp::{Arch, Simd, WithSimd};

/// Computes formulas: the CPU, or a device.
pub trait Mixer {
    /// Computes the merged elements, `[rows, columns]`.
    ///
    /// # Errors
    /// Fails when a device fails.
    fn mix(&mut self, formula: &Formula<'_>, merged: &mut [f32]) -> Result<()>;
}

/// An elementwise formula, with the values of some rows.
#[derive(Debug, Clone)]
pub enum Formula<'a> {
    /// A sum of models.
    Sum(WeightedSum<'a>),
    /// Differences that are added to the base.
    Mixture(Mixture<'a>),
}

/// Σ_t w_t W_t / divisor.
#[derive(Debug, Clone)]
pub struct WeightedSum<'a> {
    /// Elements of a row.
    pub columns: usize,
    /// W_t, `[rows, columns]` each.
    pub sources: Vec<&'a [f32]>,
    /// w_t.
    pub weights: &'a [f32],
    /// n; a division by 1 is left out.
    pub divisor: f32,
}

/// Trimmed differences of the experts, elected and averaged.
#[derive(Debug, Clone)]
pub struct Mixture<'a> {
    /// Elements of a row.
    pub columns: usize,
    /// W₀, `[rows, columns]`.
    pub base: &'a [f32],
    /// The experts.
    pub shares: Vec<Share<'a>>,
    /// True if entries that disagree with the elected sign are left out.
    pub elects: bool,
    /// n.
    pub divisor: Divisor,
    /// λ.
    pub lambda: f32,
    /// The sign of entries whose sum is zero.
    pub tie: f32,
}

/// An expert's part of a mixture.
#[derive(Debug, Clone, Copy)]
pub struct Share<'a> {
    /// v_t where `votes` is empty, and the expert's part of the divisor.
    pub weight: f32,
    /// v_t per column; empty for `weight`.
    pub votes: &'a [f32],
    /// T_t, `[rows, columns]`.
    pub trimmed: &'a [f32],
}

/// The number that a sum of entries is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divisor {
    /// 1.
    One,
    /// The sum of the votes that agree; 0 becomes 1.
    Weights,
    /// The number of experts that agree; 0 becomes 1.
    Count,
}

impl<'a> Formula<'a> {
    /// Elements of a row.
    pub fn columns(&self) -> usize {
        match self {
            Self::Sum(sum) => sum.columns,
            Self::Mixture(mixture) => mixture.columns,
        }
    }

    /// Values that it reads per element of the result.
    pub fn sources(&self) -> usize {
        match self {
            Self::Sum(sum) => sum.sources.len(),
            Self::Mixture(mixture) => mixture.shares.len() + 1,
        }
    }

    /// The formula of some rows.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Self {
        let columns = self.columns();
        let of = rows.start * columns..rows.end * columns;
        match self {
            Self::Sum(sum) => Self::Sum(WeightedSum {
                sources: sum.sources.iter().map(|all| &all[of.clone()]).collect(),
                ..*sum
            }),
            Self::Mixture(mixture) => {
                let shares = mixture
                    .shares
                    .iter()
                    .map(|share| Share { trimmed: &share.trimmed[of.clone()], ..*share });
                Self::Mixture(Mixture {
                    base: &mixture.base[of.clone()],
                    shares: shares.collect(),
                    ..*mixture
                })
            }
        }
    }
}

impl Mixture<'_> {
    /// The number that divides all entries; `None` if each entry has its own divisor.
    pub fn common_divisor(&self) -> Option<f32> {
        let has_votes = self.shares.iter().any(|share| !share.votes.is_empty());
        let sum: f32 = self.shares.iter().map(|share| share.weight).sum();
        match self.divisor {
            Divisor::One => Some(1.0),
            _ if self.elects || has_votes => None,
            _ if sum.abs() < 1e-8 => Some(1.0),
            _ => Some(sum),
        }
    }
}

/// The CPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct OnCpu;

impl Mixer for OnCpu {
    fn mix(&mut self, formula: &Formula<'_>, merged: &mut [f32]) -> Result<()> {
        let arch = Arch::new();
        match formula {
            Formula::Sum(sum) => {
                let sources = sum.sources.iter().zip(sum.weights).enumerate();
                for (at, (source, &weight)) in sources {
                    arch.dispatch(AddWeighted { source, weight, is_first: at == 0, merged });
                }
                if sum.divisor != 1.0 {
                    merged.iter_mut().for_each(|value| *value /= sum.divisor);
                }
            }
            Formula::Mixture(mixture) => arch.dispatch(Mix { mixture, merged }),
        }
        Ok(())
    }
}

struct AddWeighted<'a> {
    source: &'a [f32],
    weight: f32,
    is_first: bool,
    merged: &'a mut [f32],
}

impl WithSimd for AddWeighted<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let pairs = self.merged.iter_mut().zip(self.source);
        if self.is_first {
            pairs.for_each(|(merged, value)| *merged = self.weight * value);
        } else {
            pairs.for_each(|(merged, value)| *merged += self.weight * value);
        }
    }
}

/// A mixture, computed row by row.
struct Mix<'a, 'm> {
    mixture: &'a Mixture<'m>,
    merged: &'a mut [f32],
}

/// Columns that are mixed at once. Loops over arrays of this length become vector instructions.
const LANES: usize = 64;

type Lanes = [f32; LANES];

impl WithSimd for Mix<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { mixture, merged } = self;
        let common = mixture.common_divisor();
        let rows = merged.chunks_mut(mixture.columns).enumerate();
        for (row, merged) in rows {
            let first = row * mixture.columns;
            for (block, merged) in merged.chunks_mut(LANES).enumerate() {
                let column = block * LANES;
                mix(mixture, common, first + column, column, merged);
            }
        }
    }
}

/// Mixes the elements from `start` on, in the columns from `column` on.
#[inline(always)]
fn mix(
    mixture: &Mixture<'_>,
    common: Option<f32>,
    start: usize,
    column: usize,
    merged: &mut [f32],
) {
    let range = start..start + merged.len();
    let mut signs = [0.0; LANES];
    if mixture.elects {
        for share in &mixture.shares {
            let (_, values) = share.load(range.clone(), column);
            for (sum, value) in signs.iter_mut().zip(&values) {
                *sum += value;
            }
        }
        elect(&mut signs, mixture.tie);
    }
    let (mut mixed, mut weights) = ([0.0; LANES], [0.0; LANES]);
    for share in &mixture.shares {
        let (mut votes, values) = share.load(range.clone(), column);
        if mixture.divisor == Divisor::Count {
            votes = [1.0; LANES];
        }
        add_agreeing(
            (&mut mixed, &mut weights),
            (&votes, &values),
            mixture.elects.then_some(&signs),
        );
    }
    match common {
        Some(common) => weights = [common; LANES],
        None => {
            for weight in &mut weights {
                *weight = if *weight == 0.0 { 1.0 } else { *weight };
            }
        }
    }
    let sums = mixed.iter().zip(&weights);
    for ((merged, base), (mixed, weight)) in merged.iter_mut().zip(&mixture.base[range]).zip(sums) {
        *merged = base + mixed / weight * mixture.lambda;
    }
}

/// Turns sums into signs. A sum of 0 gets the sign of `tie`. If `tie` is 0 too, the sign is −1, as in the reference's comparison.
#[inline(always)]
fn elect(sums: &mut Lanes, tie: f32) {
    let tie = if tie > 0.0 { 1.0 } else { -1.0 };
    for sum in sums {
        let sign = if *sum < 0.0 { -1.0 } else { tie };
        *sum = if *sum > 0.0 { 1.0 } else { sign };
    }
}

/// Adds values and their votes where they agree with the signs, or everywhere.
#[inline(always)]
fn add_agreeing(
    (mixed, weights): (&mut Lanes, &mut Lanes),
    (votes, values): (&Lanes, &Lanes),
    signs: Option<&Lanes>,
) {
    let ones = [0.0; LANES];
    let is_plain = signs.is_none();
    let signs = signs.unwrap_or(&ones);
    for at in 0..LANES {
        let agrees = is_plain | (values[at] * signs[at] > 0.0);
        mixed[at] += if agrees { values[at] } else { 0.0 };
        weights[at] += if agrees { votes[at] } else { 0.0 };
    }
}

impl Share<'_> {
    /// Votes and voted differences of some elements of a row; the first element is in `column`. Differences past the last element are 0.
    #[inline(always)]
    fn load(&self, range: Range<usize>, column: usize) -> (Lanes, Lanes) {
        let columns = column..column + range.len();
        let (mut votes, mut values) = ([self.weight; LANES], [0.0; LANES]);
        copy(&mut values, &self.trimmed[range]);
        if !self.votes.is_empty() {
            votes = [0.0; LANES];
            copy(&mut votes, &self.votes[columns]);
        }
        for (value, vote) in values.iter_mut().zip(&votes) {
            *value *= vote;
        }
        (votes, values)
    }
}

#[inline(always)]
fn copy(lanes: &mut Lanes, from: &[f32]) {
    match from.first_chunk::<LANES>() {
        Some(whole) => *lanes = *whole,
        None => lanes[..from.len()].copy_from_slice(from),
    }
}
