//! The end of the model on a device: the last norm, some rows of the head, and three numbers per token for the loss.
//!
//! The numbers of a token with logits l over some rows of the vocabulary are max_j l_j, Σ_j e^(l_j − max), and the logit of the next
//! token if it is among the rows. `eval` combines the parts of the vocabulary. Trainings compute loss and gradient from the whole head.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::ops;
use rayon::prelude::*;

use super::training::piece;
use super::{Tiling, bounded, bounded_backward, copy, rms_norm, upload_factor};
use crate::linalg::exp;
use crate::model::LayerContext;
use crate::model::head::HeadChunk;

/// The norm and some rows of the head on a device.
#[derive(Debug)]
pub struct DeviceHead {
    norm: Tensor,
    rms_norm_eps: f32,
    /// Bound of the logits.
    logit_cap: Option<f32>,
    /// `[rows, hidden_size]`
    weight: Tensor,
    rows: Range<usize>,
}

/// The log-sum-exp of a token's logits over some rows of the vocabulary, and the next token's logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogSumExpPart {
    /// The largest logit.
    pub largest: f32,
    /// Σ e^(logit − largest).
    pub sum: f64,
    /// The logit of the next token, if its row is among these.
    pub logit: Option<f32>,
}

impl LogSumExpPart {
    /// Computes the parts of several tokens from logits `[tokens, rows.len()]` on the host. `next` are the next tokens.
    /// Tokens without a next token, as the last token of a window, are left out.
    pub fn of_logits(logits: &[f32], rows: &Range<usize>, next: &[u32]) -> Vec<Self> {
        logits
            .par_chunks_exact(rows.len().max(1))
            .zip(next)
            .map(|(logits, &next)| {
                let largest = exp::largest(logits);
                let next = next as usize;
                Self {
                    largest,
                    sum: exp::sum_exp_minus(logits, largest),
                    logit: rows.contains(&next).then(|| logits[next - rows.start]),
                }
            })
            .collect()
    }

    /// Computes the parts of a window's tokens on the host.
    pub fn on_host(
        chunk: &HeadChunk<'_>,
        state: &Tensor,
        tokens: &[u32],
        context: &mut LayerContext,
    ) -> Result<Vec<Self>> {
        let mut seen = Vec::with_capacity(tokens.len());
        chunk.logits(state, context, |first, logits| {
            seen.extend(Self::of_logits(logits, &chunk.rows, &tokens[first + 1..]));
            Ok(())
        })?;
        Ok(seen)
    }
}

impl DeviceHead {
    /// Copies the norm and some rows of the head onto a device.
    ///
    /// # Errors
    /// Fails when the device has too little memory, and for a chunk whose rows are not in memory.
    pub fn new(chunk: &HeadChunk<'_>, dtype: DType, device: &Device) -> Result<Self> {
        let (_, rms_norm_eps) = chunk.head().norm();
        let weight = chunk.weight().context("a device copies a head that is in memory")?;
        Ok(Self {
            norm: upload_factor(chunk.head().norm_weight(), dtype, device)?,
            rms_norm_eps,
            logit_cap: chunk.head().logit_cap(),
            weight: copy(weight, device)?.to_dtype(dtype)?,
            rows: chunk.rows.clone(),
        })
    }

    /// The rows of the vocabulary.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Logits of some tokens in f32.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let normed = rms_norm(hidden, &self.norm, self.rms_norm_eps)?;
        let logits = normed.matmul(&self.weight.t()?)?.to_dtype(DType::F32)?;
        Ok(match self.logit_cap {
            None => logits,
            Some(cap) => bounded(logits, cap)?,
        })
    }

    /// Computes the parts of a window's tokens, except the last token, which has no next token.
    ///
    /// # Arguments
    /// * `hidden`: `[seqlen, hidden_size]` on the device, the output of the last layer
    /// * `tokens`: `[seqlen]`
    pub fn window(
        &self,
        hidden: &Tensor,
        tokens: &[u32],
        cut: &Tiling,
    ) -> Result<Vec<LogSumExpPart>> {
        let count = tokens.len().saturating_sub(1);
        let at_once = cut.logit_tokens(self.rows.len());
        let device = hidden.device();
        let mut seen = Vec::with_capacity(count);
        while seen.len() < count {
            let first = seen.len();
            let some = at_once.min(count - first);
            let rows = hidden.narrow(0, first, some)?.contiguous()?;
            let logits = self.logits(&rows)?;
            let next: Vec<Option<u32>> = tokens[first + 1..first + 1 + some]
                .iter()
                .map(|&token| {
                    let row = token as usize;
                    self.rows.contains(&row).then(|| (row - self.rows.start) as u32)
                })
                .collect();
            let index: Vec<u32> = next.iter().map(|row| row.unwrap_or(0)).collect();
            let index = Tensor::from_vec(index, (some, 1), device)?;
            let chosen = logits.gather(&index, 1)?.squeeze(1)?;
            let largest = logits.max_keepdim(D::Minus1)?;
            let sums = logits.broadcast_sub(&largest)?.exp()?.sum(D::Minus1)?;
            let host = |tensor: &Tensor| -> Result<Vec<f32>> {
                Ok(tensor.to_device(&Device::Cpu)?.to_vec1()?)
            };
            let (largest, sums, chosen) =
                (host(&largest.squeeze(1)?)?, host(&sums)?, host(&chosen)?);
            for (token, next) in next.iter().enumerate() {
                seen.push(LogSumExpPart {
                    largest: largest[token],
                    sum: f64::from(sums[token]),
                    logit: next.map(|_| chosen[token]),
                });
            }
        }
        Ok(seen)
    }

    /// Returns Σ −ln p of the targets, in nat, and the gradient of `scale` times this sum with respect to `hidden`, in the dtype of the
    /// arithmetic. The gradient with respect to logits l is softmax(l), less 1 for the target, and passes their bound. The head must be whole.
    ///
    /// # Arguments
    /// * `hidden`: `[seqlen, hidden_size]` on the device, the output of the last layer
    /// * `targets`: `[seqlen]`; `None` where no loss counts
    ///
    /// # Errors
    /// Fails for a target that is not in the vocabulary, and when the device fails, mostly for lack of memory.
    pub fn loss_gradient(
        &self,
        hidden: &Tensor,
        targets: &[Option<u32>],
        scale: f32,
        cut: &Tiling,
    ) -> Result<(f64, Tensor)> {
        let (device, dtype) = (hidden.device(), hidden.dtype());
        let mut rows = targets.iter().flatten().map(|&target| target as usize);
        ensure!(
            rows.all(|target| self.rows.contains(&target)),
            "a target is not in the vocabulary of {}",
            self.rows.len()
        );
        let (mut loss, mut gradients) = (0.0, Vec::new());
        let at_once = cut.logit_tokens(self.rows.len()).max(1);
        for (part, targets) in targets.chunks(at_once).enumerate() {
            let some = targets.len();
            let column = |of: &dyn Fn(&Option<u32>) -> f32| -> Result<Tensor> {
                let values: Vec<f32> = targets.iter().map(of).collect();
                Ok(Tensor::from_vec(values, (some, 1), device)?)
            };
            let index: Vec<u32> = targets.iter().map(|one| one.unwrap_or(0)).collect();
            let index = Tensor::from_vec(index, (some, 1), device)?;
            let hidden = hidden.narrow(0, part * at_once, some)?.contiguous()?;
            let logits = self.logits(&hidden)?;
            let kept = self.logit_cap.map(|cap| (cap, logits.clone()));
            let chosen = logits.gather(&index, 1)?;
            let largest = logits.max_keepdim(D::Minus1)?;
            let exponentials = {
                let logits = logits;
                let lower = logits.broadcast_sub(&largest)?;
                drop(logits);
                lower.exp()?
            };
            let sums = exponentials.sum_keepdim(D::Minus1)?;
            let of_tokens = ((sums.log()? + largest)? - chosen)?;
            let of_tokens = of_tokens.flatten_all()?.to_device(&Device::Cpu)?;
            let of_tokens: Vec<f32> = of_tokens.to_vec1()?;
            let counted = of_tokens.iter().zip(targets).filter(|(_, to)| to.is_some());
            loss += counted.map(|(loss, _)| f64::from(*loss)).sum::<f64>();
            let weights = column(&|to| if to.is_some() { scale } else { 0.0 })?;
            let dlogits = {
                let exponentials = exponentials;
                exponentials.broadcast_mul(&weights.div(&sums)?)?
            };
            let mut dlogits = dlogits.scatter_add(&index, &weights.neg()?, 1)?;
            if let Some((cap, logits)) = kept {
                dlogits = bounded_backward(logits, dlogits, cap)?;
            }
            let dnormed = dlogits.to_dtype(dtype)?.matmul(&self.weight)?;
            drop(dlogits);
            let factor = self.norm.to_dtype(dtype)?;
            let (of_hidden, _) = piece(&[&hidden], &dnormed, |inputs| {
                Ok(ops::rms_norm_slow(&inputs[0], &factor, self.rms_norm_eps)?)
            })?;
            gradients.extend(of_hidden);
        }
        Ok((loss, Tensor::cat(&gradients, 0)?))
    }
}
