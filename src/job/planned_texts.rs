//! Texts and plan of a run: what a text needs is known when its tokenizer is, so both are made together.

use std::sync::Arc;

use anyhow::Result;

use super::inputs::RunInputs;
use super::opened::OpenedModel;
use super::planned::Planning;
use super::same_run;
use super::settled_run::sides_left;
use super::texts::{TextSources, Texts};
use crate::data::footprint::{self, Encoding, TokenizerSize};
use crate::data::{Examples, tokenizing_threads};
use crate::pipeline::RunShape;
use crate::run::{Events, Manifest, Moment, Plan};
use crate::runtime::memory;
use crate::settings::Settings;

/// Plans a run before its texts are found, so that a run that cannot fit fails early. A refused run is planned again with the memory
/// of its tokenizer: it is refused again, with advice that is enough for the whole run.
pub(super) fn plan_early(
    planning: &Planning<'_>,
    shape: &mut RunShape<'_>,
    model: &OpenedModel,
) -> Result<()> {
    let Err(refusal) = planning.plan(shape) else {
        return Ok(());
    };
    if (shape.samples + shape.windows > 0 || shape.trains.is_some())
        && let Ok(size) = TokenizerSize::of(&model.folder)
    {
        shape.tokenizing = footprint::load_tokenizer(size);
        shape.retained = footprint::retained(size, model.threads);
        planning.plan(shape)?;
    }
    Err(refusal)
}

impl Planning<'_> {
    /// Tokenizes the texts and plans the run with them. `shape` is the run before its texts are known. `given` may have an earlier run's record
    /// of the dense perplexity. If this run would measure a different perplexity, the plan has room for the measurement.
    ///
    /// Returns the number of layers whose frozen weights stay in memory during a training, too.
    ///
    /// # Errors
    /// Fails as [`tokenize`], and where the run does not fit.
    pub(super) fn texts_and_plan(
        &self,
        settings: &Settings,
        model: &OpenedModel,
        mut shape: RunShape<'_>,
        given: &RunInputs<'_>,
        events: &dyn Events,
    ) -> Result<(Arc<Texts>, Plan, usize)> {
        let dense = given.dense;
        plan_early(self, &mut shape, model)?;
        let mut texts = tokenize(settings, model, self, &mut shape, events)?;
        given.training.replace(&mut texts, settings, model)?;
        memory::release_freed();
        model.clock.mark(Moment::ModelLoaded, events);
        shape.of_all_ranks = given.of_all_ranks(texts.samples(), texts.windows());
        if shape.samples > 0 {
            shape.samples = given.samples_here(texts.samples());
        }
        if shape.windows > 0 {
            // Packs of tasks take the memory and the time of windows with as many tokens.
            shape.seqlen = texts.longest(model.seqlen);
            let packs = texts.task_rows().div_ceil(shape.seqlen);
            let packs = given.samples_here(packs);
            shape.windows = given.samples_here(texts.windows()) + packs;
            shape.tasks = texts.task_shape(packs);
        }
        if let (Some(trains), Some((examples, held))) = (&mut shape.trains, &texts.examples) {
            let held = held.as_ref().map_or(0, Examples::len);
            trains.known_examples(examples.len() + held, held);
        }
        let mut plan = self.plan(&shape)?;
        let is_usable = |dense: &Manifest| {
            same_run::dense_of(dense, &texts, model, &settings.device, &plan).is_some()
        };
        if dense.is_some_and(|dense| !is_usable(dense)) {
            shape.sides = sides_left(settings.evaluation.eval, model, false);
            shape.against = None;
            plan = self.plan(&shape)?;
        }
        let mut resident = 0;
        if let Some(trains) = &mut shape.trains {
            trains.resident_layers = trains.fitting(&plan, model.config.num_hidden_layers);
            resident = trains.resident_layers;
            if resident > 0 {
                plan = self.plan(&shape)?;
            }
        }
        self.name_faster_dtype(settings.model.dtype, &mut plan, &shape)?;
        Ok((Arc::new(texts), plan, resident))
    }
}

/// Tokenizes the texts. Their memory is planned before the tokenizer is loaded. Only a loaded tokenizer tells whether texts can be
/// cut; if they cannot, the memory of a single call is planned, too.
///
/// # Errors
/// Fails when tokenizing does not fit, and for texts that are missing, too short or cannot be read.
fn tokenize(
    settings: &Settings,
    model: &OpenedModel,
    planning: &Planning<'_>,
    shape: &mut RunShape<'_>,
    events: &dyn Events,
) -> Result<Texts> {
    let mut sources = TextSources::find(settings, model, events)?;
    (shape.tokenizing, shape.retained) = sources.memory(model, Encoding::InPieces)?;
    planning.plan(shape)?;
    let Some(tokenizer) = sources.tokenizer(model, events)? else {
        return Ok(Texts::default());
    };
    if !tokenizer.is_bounded() {
        sources.bound_lines_in_one_call();
        (shape.tokenizing, shape.retained) = sources.memory(model, Encoding::InOneCall)?;
        planning.plan(shape)?;
    }
    tokenizing_threads()?.install(|| sources.tokenize(settings, model, &tokenizer, events))
}
