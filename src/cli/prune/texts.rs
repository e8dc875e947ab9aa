//! The texts of a run, as token ids.

use anyhow::Result;

use super::PruneArgs;
use crate::cli::args::{CalibrationArgs, EvalSides};
use crate::cli::console::Console;
use crate::cli::session::Session;
use crate::data::{self, Calibration, Evaluation, Role, TextCache};
use crate::model::Embedding;

/// The token ids of a run.
pub(super) struct Texts {
    pub(super) calibration: Option<Calibration>,
    pub(super) windows: Option<Evaluation>,
    /// How many perplexities are measured on the windows.
    pub(super) sides: usize,
}

impl Texts {
    /// Checks that both texts are there, then tokenises them; the tokenizer is gone when this returns.
    pub(super) fn tokenise(
        args: &PruneArgs,
        session: &Session,
        calibrates: bool,
        console: &Console,
    ) -> Result<Self> {
        let evaluates = args.eval != EvalSides::None;
        let calibration_text = calibrates
            .then(|| {
                Embedding::open(&*session.checkpoint, &session.config)?;
                session.check_text(&args.calibration.dataset, Role::Calibration, console)
            })
            .transpose()?;
        let evaluation_text = evaluates
            .then(|| session.check_evaluation(&args.evaluation, console))
            .transpose()?;
        let mut texts = Self {
            calibration: None,
            windows: None,
            sides: args.eval.sides().len(),
        };
        if !calibrates && !evaluates {
            return Ok(texts);
        }
        let cache = TextCache::open(args.evaluation.text_cache.clone());
        let tokenizer = session.tokenizer()?;
        if let Some(dataset) = &calibration_text {
            let CalibrationArgs { nsamples, seed, .. } = &args.calibration;
            let samples = session.clock.measure("tokenise", || {
                data::calibration(
                    dataset,
                    &tokenizer,
                    *nsamples as usize,
                    session.seqlen,
                    *seed,
                    &cache,
                    console,
                )
            })?;
            session.check_ids(&samples.tokens, &tokenizer, "calibration")?;
            texts.calibration = Some(samples);
        }
        if let Some(dataset) = &evaluation_text {
            texts.windows =
                Some(session.evaluation(&args.evaluation, dataset, &tokenizer, &cache, console)?);
        }
        Ok(texts)
    }

    /// Evaluation windows.
    pub(super) fn windows(&self) -> usize {
        self.windows.as_ref().map_or(0, |windows| windows.windows)
    }

    /// Tokens of all calibration samples.
    pub(super) fn calibration_tokens(&self) -> usize {
        let samples = self.calibration.as_ref();
        samples.map_or(0, |samples| samples.tokens.len())
    }

    /// Samples per stream of hidden states, calibration first.
    pub(super) fn streams(&self) -> Vec<usize> {
        let windows = self.windows();
        let calibration = self
            .calibration
            .as_ref()
            .map_or(0, |samples| samples.nsamples);
        std::iter::once(calibration)
            .chain(std::iter::repeat_n(windows, self.sides))
            .collect()
    }
}
