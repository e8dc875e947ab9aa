//! The pass of all windows through both heads.

use std::ops::Range;

use anyhow::{Context, Result};
use candle_core::Tensor;

use super::position::{Position, PositionValues, VALUES, see};
use super::summary::summarise;
use crate::eval::next_token::{self, NextToken};
use crate::linalg::parts::{LEAST_ROWS, parts};
use crate::model::Head;
use crate::model::head::logit_rows;
use crate::run::divergence::{DivergenceReport, KlPositions};
use crate::runtime::{Compute, HiddenStates, SampleShare};

/// The two heads, and the final states of the windows that pass them.
pub(in crate::eval) struct HeadPair<'a> {
    pub(in crate::eval) dense: (&'a Head, &'a mut HiddenStates),
    pub(in crate::eval) model: (&'a Head, &'a mut HiddenStates),
}

/// The outcome of the pass on this rank: the numbers of every token of both models for their perplexities, and the divergence.
pub(in crate::eval) struct ComparedWindows {
    pub(in crate::eval) dense: Vec<NextToken>,
    pub(in crate::eval) model: Vec<NextToken>,
    pub(in crate::eval) report: DivergenceReport,
}

/// Passes all windows of `tokens` `[windows, seqlen]` through both heads. Calls `passed` after each window.
///
/// # Errors
/// Fails when a head or states cannot be read, for a token beyond the vocabulary, and when the run is asked to stop.
pub(in crate::eval) fn compare(
    heads: HeadPair<'_>,
    tokens: &[u32],
    which: KlPositions,
    compute: &mut Compute<'_>,
    passed: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<ComparedWindows> {
    let HeadPair { dense: (dense_head, dense), model: (head, model) } = heads;
    let (share, ranks, seqlen) = (model.share().clone(), compute.ranks().clone(), model.seqlen());
    let (steps, first) = (model.samples(), which.first(seqlen));
    let mut positions = vec![Position::default(); steps * (seqlen - first)];
    let mut seen = [0, 1].map(|_| vec![NextToken::default(); steps * seqlen]);
    let chunks = head.chunks().len();
    for (chunk, rows) in head.chunks().enumerate() {
        let parts_of = [dense_head.chunk(rows.clone())?, head.chunk(rows.clone())?];
        let at_most = logit_rows(compute.settings().logits_bytes, rows.len());
        let mut kept = Vec::new();
        for (window, &number) in share.own().iter().enumerate() {
            let tokens = &tokens[number * seqlen..(number + 1) * seqlen];
            let states = [dense.get(window)?, model.get(window)?];
            let window_positions = window * (seqlen - first)..(window + 1) * (seqlen - first);
            let mut of_window = WindowNumbers {
                positions: &mut positions[window_positions],
                seen: seen.each_mut().map(|seen| &mut seen[window * seqlen..(window + 1) * seqlen]),
                first,
                rows: &rows,
                tokens,
            };
            for part in parts(seqlen, at_most, LEAST_ROWS) {
                let context = compute.context();
                let some = |side: usize| -> Result<Tensor> {
                    Ok(states[side].narrow(0, part.start, part.len())?)
                };
                parts_of[0].logits(&some(0)?, context, |_, logits| {
                    kept.clear();
                    kept.extend_from_slice(logits);
                    Ok(())
                })?;
                parts_of[1].logits(&some(1)?, context, |_, logits| {
                    of_window.see(part.start, [&kept, logits]);
                    Ok(())
                })?;
            }
            passed((chunk * steps + window + 1) / chunks)?;
        }
    }
    let own = values_by_window(&positions, seqlen - first)?;
    drop(positions);
    let by_rank = ranks.all_gather(bytemuck::cast_slice(&own))?;
    let of_window = (seqlen - first - 1) * VALUES;
    let by_rank = by_rank.iter().map(|bytes| -> Vec<Vec<f64>> {
        let numbers: Vec<f64> = bytemuck::pod_collect_to_vec(bytes);
        numbers.chunks_exact(of_window.max(1)).map(<[f64]>::to_vec).collect()
    });
    let all = SampleShare::in_order(share.all(), by_rank.collect()).concat();
    let values = all.as_chunks().0.iter().map(|&numbers| PositionValues::of(numbers));
    let report = summarise(which, &values.collect::<Vec<_>>());
    let [dense, model] = seen;
    Ok(ComparedWindows { dense, model, report })
}

/// The numbers of a window's tokens.
struct WindowNumbers<'a> {
    /// The positions of the window, from `first` on.
    positions: &'a mut [Position],
    seen: [&'a mut [NextToken]; 2],
    first: usize,
    rows: &'a Range<usize>,
    tokens: &'a [u32],
}

impl WindowNumbers<'_> {
    /// Takes logits of both models of the tokens from `start` on.
    fn see(&mut self, start: usize, logits: [&[f32]; 2]) {
        let (rows, next) = (self.rows, &self.tokens[start + 1..]);
        for (seen, logits) in self.seen.iter_mut().zip(logits) {
            next_token::see(&mut seen[start..], logits, rows, next);
        }
        let passed_over = self.first.saturating_sub(start);
        if passed_over >= next.len() {
            return;
        }
        let logits = logits.map(|logits| logits.get(passed_over * rows.len()..).unwrap_or(&[]));
        let positions = &mut self.positions[(start + passed_over) - self.first..];
        see(positions, logits, rows, &next[passed_over..]);
    }
}

/// The values of all positions, as numbers. The last token of a window predicts nothing.
fn values_by_window(positions: &[Position], per_window: usize) -> Result<Vec<f64>> {
    let mut own = Vec::with_capacity(positions.len() * VALUES);
    for window in positions.chunks_exact(per_window) {
        for position in &window[..per_window - 1] {
            // Ids were checked against the embedding, which has as many rows as there are logits.
            let values = position.values().context("a token is beyond the head's vocabulary")?;
            own.extend(values.numbers());
        }
    }
    Ok(own)
}
