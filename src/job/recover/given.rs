//! Data of a training, in place of the data that texts and seeds give, so that tests repeat a recorded training.

use std::fmt;
use std::sync::Arc;

use anyhow::{Result, ensure};

use super::super::opened::OpenedModel;
use super::super::texts::Texts;
use crate::data::{Calibration, ExampleOrder, Examples};
use crate::recovery::{LayerParameters, MaskReceiver};
use crate::settings::Settings;

/// The parameters of a layer before the first step, from the parameters that the seed gives.
pub type InitialParameters = dyn Fn(usize, LayerParameters) -> LayerParameters + Send + Sync;

/// Recorded data of a training.
#[derive(Default)]
pub struct GivenTraining {
    /// Token ids of the examples or samples, `[examples, seqlen]` row-major; empty to use the text.
    pub tokens: Vec<u32>,
    /// The examples of steps, row after row; `None` for the order of the seed.
    pub order: Option<Vec<Vec<usize>>>,
    /// The first parameters; `None` for the parameters that the seed gives.
    pub initial: Option<Box<InitialParameters>>,
    /// The learning rates of the steps; `None` for the rates of the schedule.
    pub rates: Option<Vec<f64>>,
    /// Sees every mask that closes.
    pub masks: Option<Arc<MaskReceiver>>,
}

impl fmt::Debug for GivenTraining {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} given tokens", self.tokens.len())
    }
}

impl GivenTraining {
    /// Replaces the examples of the text.
    pub(in crate::job) fn replace(
        &self,
        texts: &mut Texts,
        settings: &Settings,
        model: &OpenedModel,
    ) -> Result<()> {
        if self.tokens.is_empty() {
            return Ok(());
        }
        let (tokens, seqlen) = (self.tokens.clone(), model.seqlen);
        ensure!(
            tokens.len().is_multiple_of(seqlen),
            "{} given tokens are no examples of {seqlen}",
            tokens.len()
        );
        let examples = Examples::from_tokens(tokens, self.tokens.len() / seqlen, seqlen)?;
        if settings.trains_whole() {
            texts.examples = Some((examples, None));
        } else {
            texts.calibration = Some(Calibration {
                nsamples: examples.len(),
                seqlen,
                protocol: examples.protocol().clone(),
                tokens: self.tokens.clone(),
            });
        }
        Ok(())
    }

    /// The order of `examples` examples.
    pub(super) fn order(&self, examples: usize, seed: u64) -> Result<ExampleOrder> {
        match &self.order {
            Some(rows) => ExampleOrder::from_rows(rows, examples),
            None => ExampleOrder::new(examples, seed),
        }
    }

    /// The first parameters of a layer.
    pub(super) fn initial(&self, layer: usize, parameters: LayerParameters) -> LayerParameters {
        match &self.initial {
            Some(initial) => initial(layer, parameters),
            None => parameters,
        }
    }
}
