//! The end of the model on a device: the last norm, some rows of the head, and three numbers per token for the loss.
//!
//! The numbers of a token with logits l over some rows of the vocabulary are max_j l_j, Σ_j e^(l_j − max), and the logit of the next
//! token if it is among the rows. `eval` combines the parts of the vocabulary. Trainings compute loss and gradient from the whole head.

use std::ops::Range;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::operators::{bounded, rms_norm};
use super::{Tiling, copy, operators, upload_factor};
use crate::linalg::exp;
use crate::model::LayerContext;
use crate::model::head::HeadChunk;

/// The norm and some rows of the head on a device.
#[derive(Debug)]
pub struct DeviceHead {
    pub(super) norm: Tensor,
    pub(super) rms_norm_eps: f32,
    /// Bound of the logits.
    pub(super) logit_cap: Option<f32>,
    /// `[rows, hidden_size]`
    pub(super) weight: Tensor,
    pub(super) rows: Range<usize>,
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
            weight: operators::cast(&copy(weight, device)?, dtype)?,
            rows: chunk.rows.clone(),
        })
    }

    /// The rows of the vocabulary.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Logits of some tokens in f32.
    pub(super) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let normed = rms_norm(hidden, &self.norm, self.rms_norm_eps)?;
        let logits = operators::matmul(&normed, &self.weight.t()?)?;
        let logits = operators::cast(&logits, DType::F32)?;
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
            let rows = operators::contiguous(&hidden.narrow(0, first, some)?)?;
            let logits = self.logits(&rows)?;
            let next: Vec<Option<u32>> = tokens[first + 1..first + 1 + some]
                .iter()
                .map(|&token| {
                    let row = token as usize;
                    self.rows.contains(&row).then(|| (row - self.rows.start) as u32)
                })
                .collect();
            let index: Vec<u32> = next.iter().map(|row| row.unwrap_or(0)).collect();
            let index = operators::upload(&index, (some, 1), device)?;
            let chosen = operators::chosen(&logits, &index)?.squeeze(1)?;
            let largest = operators::largest(&logits)?;
            let sums = operators::sum_exp(&operators::minus(&logits, &largest)?)?;
            let numbers = operators::cat(&[largest.squeeze(1)?, sums, chosen], 0)?;
            let numbers: Vec<f32> = operators::download(&numbers)?;
            let (largest, rest) = numbers.split_at(some);
            let (sums, chosen) = rest.split_at(some);
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
}
