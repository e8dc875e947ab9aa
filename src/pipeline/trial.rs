//! The trial of allocations: a few tokens pass the model pruned with each of them, and their loss decides.
//!
//! Estimates that add up over layers rank ratios by the errors of one layer at a time. The loss of a model that is pruned everywhere is not
//! their sum. So each candidate is tried: some tokens of the calibration pass the layers pruned by Wanda at its ratios. The statistics of
//! a layer are made of these tokens, as the pruned layers before it left them. The loss is the mean of −ln p of the next token, in nat.

use std::sync::Arc;

use anyhow::{Context, Result, bail};

use super::allocate::{copy_of, with_pruned};
use super::allocation::CANDIDATES;
use super::calibrate::Calibrator;
use crate::bytes::ByteSize;
use crate::checkpoint::WeightSource;
use crate::model::{DecoderLayer, Head, InputId, LayerContext, ModelConfig};
use crate::pruning::statistics::column_squares::ColumnSquaresKind;
use crate::run::MemorySettings;
use crate::runtime::{Compute, Editor, HiddenStates, Reporter};

/// Rows of the head in memory at once, and logits in bytes: less than a layer, which is gone by then.
const HEAD_ROWS: usize = 2048;
const LOGITS: ByteSize = ByteSize(8 << 20);

/// An editor that passes some tokens through every candidate, and changes nothing.
pub struct Trial<'a> {
    /// The ratios of every layer, and the tokens after the layers so far.
    candidates: Vec<(Vec<f64>, Calibrator<'a>)>,
}

impl<'a> Trial<'a> {
    /// Tries `candidates`, the ratios of every layer, with `embedded` tokens.
    ///
    /// # Errors
    /// Fails when a hidden state cannot be read.
    pub fn new(
        candidates: [Vec<f64>; CANDIDATES],
        mut embedded: HiddenStates,
        config: &'a ModelConfig,
        reporter: Reporter<'a>,
    ) -> Result<Self> {
        let begin = |ratios| {
            let stream = Some((copy_of(&mut embedded)?, &ColumnSquaresKind as _));
            Ok((ratios, Calibrator::of(stream, config, reporter)))
        };
        let candidates = candidates.into_iter().map(begin);
        Ok(Self { candidates: candidates.collect::<Result<_>>()? })
    }

    /// The loss of every candidate after the sweep, in nat per token.
    ///
    /// # Arguments
    /// * `tokens`: `[samples, seqlen]` of the calibration, of which the first of each sample were embedded
    ///
    /// # Errors
    /// Fails when the head or a hidden state cannot be read.
    pub fn losses(
        self,
        source: &Arc<dyn WeightSource>,
        config: &Arc<ModelConfig>,
        (tokens, seqlen): (&[u32], usize),
    ) -> Result<Vec<f64>> {
        let head = Head::at_rest(source, config, HEAD_ROWS.min(config.vocab_size))?;
        let settings = MemorySettings { logits_bytes: LOGITS, ..MemorySettings::default() };
        let mut context = LayerContext::with_settings(config, seqlen, settings);
        let mut losses = Vec::with_capacity(self.candidates.len());
        for (_, calibrator) in self.candidates {
            let mut stream = calibrator.into_samples().context("tokens to try")?;
            let (mut sum, mut count) = (0.0, 0);
            for sample in 0..stream.samples() {
                let tokens = &tokens[sample * seqlen..][..stream.seqlen()];
                let following = tokens.iter().skip(1).copied().map(Some);
                let targets: Vec<_> = following.chain([None]).collect();
                let state = stream.get(sample)?;
                sum += head.loss(&state, &targets, &mut context)?;
                count += targets.len() - 1;
            }
            losses.push(sum / count as f64);
        }
        Ok(losses)
    }
}

impl Editor for Trial<'_> {
    fn edit(&mut self, mut layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        for (ratios, calibrator) in &mut self.candidates {
            let statistics = calibrator.observe(&layer, &InputId::ALL, compute)?;
            let statistics = statistics.context("tokens to try")?;
            let ratio = ratios[layer.index()];
            with_pruned(&mut layer, ratio, &|one| statistics.of(one), |layer| {
                calibrator.forward(layer, compute)
            })?;
            calibrator.reporter.events.check()?;
        }
        Ok(layer)
    }

    fn pass(&mut self, _layer: &DecoderLayer, _compute: &mut Compute<'_>) -> Result<()> {
        bail!("a trial is not resumed")
    }

    fn has_samples(&self) -> bool {
        true
    }
}
