//! [`CandleMixer`]: formulas computed by candle's operators on a candle device. With the feature `cuda`, the device is a GPU; tests use
//! the CPU.
//!
//! Every operation is a separate operator, so every operation is rounded, and the bits are equal to the bits of
//! [`OnCpu`](crate::merging::methods::OnCpu).

use anyhow::Result;
use candle_core::{Device, Tensor};

use crate::merging::methods::{Divisor, Formula, Mixer, Mixture, WeightedSum};

/// A device of candle's.
#[derive(Debug)]
pub struct CandleMixer(pub Device);

impl Mixer for CandleMixer {
    fn mix(&mut self, formula: &Formula<'_>, merged: &mut [f32]) -> Result<()> {
        let result = match formula {
            Formula::Sum(sum) => self.sum(sum)?,
            Formula::Mixture(mixture) => self.mixture(mixture)?,
        };
        merged.copy_from_slice(&result.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }
}

impl CandleMixer {
    /// Copies values to the device, `[rows, columns]`.
    fn copy(&self, values: &[f32], columns: usize) -> Result<Tensor> {
        let rows = values.len() / columns;
        Ok(Tensor::from_slice(values, (rows, columns), &self.0)?)
    }

    fn number(&self, value: f32) -> Result<Tensor> {
        Ok(Tensor::new(&[[value]], &self.0)?)
    }

    fn sum(&self, of: &WeightedSum<'_>) -> Result<Tensor> {
        let mut sum: Option<Tensor> = None;
        for (source, &weight) in of.sources.iter().zip(of.weights) {
            let source = self.copy(source, of.columns)?;
            let part = source.broadcast_mul(&self.number(weight)?)?;
            sum = Some(match sum {
                None => part,
                Some(sum) => (sum + part)?,
            });
        }
        let Some(sum) = sum else {
            anyhow::bail!("a sum has models");
        };
        Ok(match of.divisor == 1.0 {
            true => sum,
            false => sum.broadcast_div(&self.number(of.divisor)?)?,
        })
    }

    fn mixture(&self, of: &Mixture<'_>) -> Result<Tensor> {
        let base = self.copy(of.base, of.columns)?;
        let zeros = base.zeros_like()?;
        let mut voted = Vec::with_capacity(of.shares.len());
        for share in &of.shares {
            let votes = match share.votes {
                [] => self.number(share.weight)?,
                votes => Tensor::from_slice(votes, (1, of.columns), &self.0)?,
            };
            let values = self.copy(share.trimmed, of.columns)?.broadcast_mul(&votes)?;
            let votes = match of.divisor {
                Divisor::Count => zeros.ones_like()?,
                _ => votes.broadcast_as(zeros.shape())?.contiguous()?,
            };
            voted.push((votes, values));
        }
        let signs = of.elects.then(|| elect(&voted, &zeros, of.tie)).transpose()?;
        let (mut mixed, mut weights) = (zeros.clone(), zeros.clone());
        for (votes, values) in &voted {
            let (mut votes, mut values) = (votes.clone(), values.clone());
            if let Some(signs) = &signs {
                let agrees = (&values * signs)?.gt(&zeros)?;
                values = agrees.where_cond(&values, &zeros)?;
                votes = agrees.where_cond(&votes, &zeros)?;
            }
            mixed = (mixed + values)?;
            weights = (weights + votes)?;
        }
        let mean = match of.common_divisor() {
            Some(divisor) => mixed.broadcast_div(&self.number(divisor)?)?,
            None => {
                let divisor = weights.eq(&zeros)?.where_cond(&zeros.ones_like()?, &weights)?;
                (mixed / divisor)?
            }
        };
        Ok((base + mean.broadcast_mul(&self.number(of.lambda)?)?)?)
    }
}

/// Signs of the sums, 1 or −1.
fn elect(voted: &[(Tensor, Tensor)], zeros: &Tensor, tie: f32) -> Result<Tensor> {
    let mut sums = zeros.clone();
    for (_, values) in voted {
        sums = (sums + values)?;
    }
    let ones = zeros.ones_like()?;
    let others = ones.neg()?;
    Ok(match tie > 0.0 {
        true => sums.lt(zeros)?.where_cond(&others, &ones)?,
        false => sums.gt(zeros)?.where_cond(&ones, &others)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merging::methods::{OnCpu, Share};

    const COLUMNS: usize = 70;

    /// Values with equal magnitudes, zeros of both signs, and cancelling pairs.
    fn values(seed: u32) -> Vec<f32> {
        let mut state = seed;
        let value = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match state >> 29 {
                0 => 0.0,
                1 => -0.0,
                2 => 0.25,
                3 => -0.25,
                _ => ((state >> 8) as f32 / 16_777_216.0 - 0.5) * 0.1,
            }
        };
        (0..3 * COLUMNS).map(value).collect()
    }

    fn assert_same(formula: &Formula<'_>) {
        let (mut ours, mut theirs) = (vec![0.0; 3 * COLUMNS], vec![0.0; 3 * COLUMNS]);
        OnCpu.mix(formula, &mut ours).unwrap();
        CandleMixer(Device::Cpu).mix(formula, &mut theirs).unwrap();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&ours), bits(&theirs), "{formula:?}");
        // The formula of some rows gives these rows of the whole result.
        OnCpu.mix(&formula.rows(1..3), &mut theirs[COLUMNS..]).unwrap();
        assert_eq!(bits(&ours), bits(&theirs), "{formula:?}");
    }

    #[test]
    fn a_device_gives_the_bits_of_the_cpu() {
        let (base, one, two) = (values(1), values(2), values(3));
        let votes: Vec<f32> = values(4)[..COLUMNS].iter().map(|value| value.abs()).collect();
        for (weights, divisor) in [([0.3, 0.7], 1.0), ([0.3, 0.7], 3.0), ([-1.0, 0.5], -0.5)] {
            assert_same(&Formula::Sum(WeightedSum {
                columns: COLUMNS,
                sources: vec![&one, &two],
                weights: &weights,
                divisor,
            }));
        }
        for votes in [&[][..], &votes] {
            for divisor in [Divisor::One, Divisor::Weights, Divisor::Count] {
                for (elects, tie, weights) in [
                    (true, 1.0, [0.6, 0.6]),
                    (true, -1.0, [0.6, 0.6]),
                    (false, 1.0, [0.6, 0.3]),
                    (false, 1.0, [0.6, -0.6]),
                ] {
                    let share = |weight: f32, trimmed| Share { weight, votes, trimmed };
                    assert_same(&Formula::Mixture(Mixture {
                        columns: COLUMNS,
                        base: &base,
                        shares: vec![share(weights[0], &one), share(weights[1], &two)],
                        elects,
                        divisor,
                        lambda: 1.1,
                        tie,
                    }));
                }
            }
        }
    }
}
