//! The texts of a run, as token ids.

use anyhow::Result;

use super::PruneArgs;
use crate::bytes::ByteSize;
use crate::cli::args::EvalSides;
use crate::cli::console::Console;
use crate::cli::session::Session;
use crate::data::{self, Calibration, Draw, Evaluation, Role, Source, TextCache};
use crate::model::Embedding;
use crate::run::Phase;
use crate::runtime::Side;

/// The token ids of a run.
pub(super) struct Texts {
    pub(super) calibration: Option<Calibration>,
    pub(super) windows: Option<Evaluation>,
    /// How many perplexities are measured on the windows.
    pub(super) sides: &'static [Side],
}

/// Where the texts of a run are.
pub(super) struct Located {
    calibration: Option<Source>,
    evaluation: Option<Source>,
    cache: TextCache,
}

impl Located {
    /// Checks that both texts are there.
    pub(super) fn find(
        args: &PruneArgs,
        session: &Session,
        calibrates: bool,
        console: &Console,
    ) -> Result<Self> {
        let evaluates = args.eval != EvalSides::None;
        let calibration = calibrates
            .then(|| {
                Embedding::open(&*session.checkpoint, &session.config)?;
                session.check_text(&args.calibration.dataset, Role::Calibration, console)
            })
            .transpose()?;
        let evaluation = evaluates
            .then(|| session.check_evaluation(&args.evaluation, console))
            .transpose()?;
        Ok(Self {
            calibration,
            evaluation,
            cache: TextCache::open(args.evaluation.text_cache.clone()),
        })
    }

    /// What tokenising them takes at its peak.
    pub(super) fn tokenising(&self, session: &Session) -> Result<ByteSize> {
        let texts = self.calibration.iter().chain(&self.evaluation);
        session.tokenising(texts, &self.cache)
    }
}

impl Texts {
    /// Tokenises both texts; the tokenizer is gone when this returns.
    pub(super) fn tokenise(
        args: &PruneArgs,
        session: &Session,
        located: &Located,
        console: &Console,
    ) -> Result<Self> {
        let Located {
            calibration,
            evaluation,
            cache,
        } = located;
        let mut texts = Self {
            calibration: None,
            windows: None,
            sides: args.eval.sides(),
        };
        if calibration.is_none() && evaluation.is_none() {
            return Ok(texts);
        }
        let tokenizer = session.tokenizer()?;
        if let Some(source) = calibration {
            let draw = Draw {
                nsamples: args.calibration.nsamples as usize,
                seqlen: session.seqlen,
                seed: args.calibration.seed,
            };
            let samples = session.clock.measure(Phase::Tokenise, || {
                data::calibration(source, &tokenizer, draw, cache, console)
            })?;
            session.check_ids(&samples.tokens, &tokenizer, "calibration")?;
            texts.calibration = Some(samples);
        }
        if let Some(source) = evaluation {
            texts.windows =
                Some(session.evaluation(&args.evaluation, source, &tokenizer, cache, console)?);
        }
        Ok(texts)
    }

    /// Evaluation windows.
    pub(super) fn windows(&self) -> usize {
        self.windows.as_ref().map_or(0, |windows| windows.windows)
    }

    /// Calibration samples.
    pub(super) fn samples(&self) -> usize {
        let samples = self.calibration.as_ref();
        samples.map_or(0, |samples| samples.nsamples)
    }
}
