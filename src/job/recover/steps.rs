//! The steps of a training of the whole model: from the first step, or from the steps that an earlier process saved.

use std::borrow::Cow;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::super::settled_run::{SettledRun, offload_folder};
use super::base::FrozenBase;
use super::resolved::Recovery;
use super::saved::{self, TrainingHead};
use crate::adapter::TrainedAdapter;
use crate::data::{ExampleOrder, Examples};
use crate::failure::Failure;
use crate::linalg::{Products, StoredDtype};
use crate::model::on_device::candle_dtype;
use crate::model::{ModelConfig, text_settings};
use crate::recovery::optimizers::{Schedule, TrainingStep};
use crate::recovery::{
    Distillation, Diverged, Example, ParameterStore, StorePlace, Trainer, TrainerParts,
};
use crate::run::recovery::{Divergence, HeldOutReport, StepReport};
use crate::run::{Event, Events, Moment};
use crate::runtime::SweepReport;
use crate::settings::RecoverySettings;

/// Time between two saved states, unless `--save-every` says so.
const SAVE_INTERVAL: Duration = Duration::from_secs(600);

/// Rows of the memory log of a training, about.
const MEMORY_ROWS: u64 = 20;

/// The rise of the held-out loss above its lowest value, in nat, from which on a training has diverged: the perplexity is twenty times as
/// high. Overfitting rises more slowly; `--patience` ends it.
const EXPLOSION: f64 = 3.0;

/// A training that is over.
pub(super) struct Trained {
    pub(super) base: FrozenBase,
    pub(super) store: ParameterStore,
    pub(super) head: TrainingHead,
    /// The report of the devices that computed the steps.
    pub(super) devices: SweepReport,
}

impl Trained {
    /// The end of a training that diverged, whose best state is the result.
    pub(super) fn divergence(&self) -> Option<&Divergence> {
        self.head.divergence.as_ref()
    }

    /// Writes the factors as an adapter for peft; the best factors where they were kept.
    ///
    /// # Errors
    /// Fails when the disk refuses.
    pub(super) fn write_adapter(
        &self,
        job: &SettledRun,
        recovery: &Recovery,
        folder: &Path,
    ) -> Result<()> {
        let (config, part) = (&job.model.config, &recovery.part);
        let of_layer = |layer: usize| {
            let matrices = part.ids.iter().map(|id| {
                let (out, inner) = id.shape(config);
                (id.full_name(layer), [out, inner])
            });
            matrices.collect()
        };
        let modules = part.ids.iter();
        let adapter = TrainedAdapter {
            base: job.model.base_name(),
            rank: recovery.settings.rank,
            alpha: recovery.settings.alpha,
            modules: modules.map(|one| one.module().to_string()).collect(),
            is_inside: text_settings(&ModelConfig::read_json(&job.model.folder)?).is_some(),
            layers: (0..config.num_hidden_layers).map(of_layer).collect(),
        };
        adapter.write(folder, &|layer| {
            let values = self.store.best_values(layer)?;
            Ok(values.into_iter().map(Cow::into_owned).collect())
        })
    }
}

/// Trains the whole model.
///
/// # Errors
/// Fails when the run is asked to stop, for a loss or gradients that are not finite, and where files cannot be read or written. The
/// steps before are saved where a run folder exists.
pub(super) fn train(job: &SettledRun, recovery: &Recovery, events: &dyn Events) -> Result<Trained> {
    let base = FrozenBase::open(job, recovery, events)?;
    let (examples, held) = job.texts.examples.as_ref().context("examples to train on")?;
    let seed = job.seed();
    let mut training = Training {
        job,
        recovery,
        examples,
        held: held.as_ref(),
        order: recovery.given.order(examples.len(), seed)?,
        schedule: recovery.schedule(examples.len()),
        head: TrainingHead { settings: job.identity.deciding.clone(), ..TrainingHead::default() },
        saved: Instant::now(),
        events,
    };
    let mut trainer = training.trainer(&base)?;
    job.model.clock.mark(Moment::BeforePruning, events);
    trainer.initialise(seed, &|layer, initial| recovery.given.initial(layer, initial))?;
    if let Some(head) = saved::read_on_all_ranks(job, trainer.parameters_mut())? {
        let done = head.steps.len();
        events.note(format!("continuing the training after step {done}"));
        trainer.restart_after(head.restarted_after);
        training.head = head;
    }
    if !training.head.is_over
        && let Err(error) = training.run(&mut trainer)
    {
        match error.downcast::<Diverged>() {
            Ok(diverged) => training.end_with_best(&mut trainer, diverged)?,
            Err(error) => {
                training.save_what_was_done(&trainer);
                return Err(error);
            }
        }
    }
    job.model.clock.mark(Moment::AfterPruning, events);
    let head = std::mem::take(&mut training.head);
    let (store, devices) = trainer.finish();
    Ok(Trained { base, store, head, devices })
}

/// The failure of a training that diverged and leaves no model. The same command diverges again.
pub(super) fn without_model(
    job: &SettledRun,
    recovery: &Recovery,
    diverged: &Diverged,
    detail: &str,
) -> Failure {
    // The state that is saved belongs to this rate.
    let is_saved = job.folder.state().is_some() && !job.settings.output.force;
    // The default of a dense model is the lowest default.
    let fitting = RecoverySettings { lr: None, ..recovery.settings.clone() };
    let fitting = fitting.rate(job.model.config.hidden_size, 0.0);
    let hint = match recovery.settings.lr.filter(|rate| *rate > fitting) {
        Some(rate) => format!(
            "leave --lr {rate:e} out{}; the default rate fits the model's width and zeros",
            if is_saved { " and add --force" } else { "" }
        ),
        None => format!(
            "use a smaller rate, like --lr {:.0e}{}, more --warmup, or a smaller --max-grad-norm",
            diverged.at.rate / 10.0,
            if is_saved { " --force" } else { "" }
        ),
    };
    Failure::new(diverged.to_string()).detail(detail).hint(hint).lasting()
}

struct Training<'a> {
    job: &'a SettledRun,
    recovery: &'a Recovery,
    examples: &'a Examples,
    held: Option<&'a Examples>,
    order: ExampleOrder,
    schedule: Schedule,
    head: TrainingHead,
    /// The time of the last saved state.
    saved: Instant,
    events: &'a dyn Events,
}

impl<'a> Training<'a> {
    fn trainer(&self, base: &FrozenBase) -> Result<Trainer<'a>> {
        let (job, recovery, model) = (self.job, self.recovery, &self.job.model);
        let optimizer = recovery.optimizer();
        let place = match recovery.is_paged() {
            true => StorePlace::File(offload_folder(&job.settings)),
            false => StorePlace::Memory,
        };
        let config = &model.config;
        let specs = recovery.part.parameters(config);
        let store = ParameterStore::new(specs, &*optimizer, config.num_hidden_layers, &place)?
            .closing(recovery.closing.is_some());
        let mut settings = job.plan.memory_settings.clone();
        // A weight that is packed for a single product costs memory and saves nothing.
        settings.keep_packed &= recovery.settings.per_step() > 1;
        // The weights of a layer are made when it is needed, so devices copy none ahead.
        settings.prefetch = false;
        let arithmetic = (&settings, model.products);
        let devices = job.open_devices()?;
        let compute = devices.compute(config, model.seqlen, arithmetic, self.events)?;
        let compute = compute.with_ranks(job.ranks.clone());
        let teacher = recovery.teacher.as_ref().map(|teacher| {
            let weight = recovery.distill_weight();
            let source = teacher.source.clone();
            let configs = [&teacher.config, config];
            Distillation::open(source, configs, weight as f32, settings.head_rows)
        });
        let distillation = teacher.transpose()?;
        Trainer::new(TrainerParts {
            distillation,
            source: model.source.clone(),
            config: config.clone(),
            base: base.layers(job, recovery, recovery.resident_layers),
            part: recovery.part.clone(),
            store,
            optimizer,
            closing: recovery.closing_masks(self.schedule.steps),
            max_grad_norm: recovery.settings.max_grad_norm,
            compute,
            spill_folder: job.spill_folder(),
            states: candle_dtype(states_dtype(model.products)),
            kept_layers: recovery.settings.keep_activations,
            seqlen: model.seqlen,
            clock: &model.clock,
            events: self.events,
        })
    }

    /// Performs the steps that are left.
    fn run(&mut self, trainer: &mut Trainer<'_>) -> Result<()> {
        let steps = self.schedule.steps;
        let per_step = self.recovery.settings.per_step();
        let done = self.head.steps.len() as u64;
        self.events.emit(Event::PhaseStarted {
            phase: format!("train {}", self.recovery.settings.how.name()),
            unit: "steps",
            steps: steps - done.min(steps),
        });
        let start = Instant::now();
        // An earlier process may have ended between a step and its measurement.
        let measured = self.head.held_out.last().map_or(0, |report| report.step);
        if done > measured && self.is_measured_after(done) {
            self.measure(trainer, done)?;
        }
        for step in done..steps {
            if self.is_out_of_patience() {
                break;
            }
            let chosen = self.order.examples_of(step as usize, per_step);
            let at = TrainingStep { number: step + 1, rate: self.rate_of(step) };
            let outcome = with_examples(self.examples, &chosen, |batch| trainer.step(batch, at))?;
            self.head.steps.push(StepReport {
                step: at.number,
                loss: outcome.loss,
                norm: outcome.norm,
                rate: at.rate,
                predicted: outcome.predicted as u64,
            });
            self.events.emit(Event::TrainingStep {
                step: at.number,
                steps,
                layer: None,
                loss: outcome.loss,
                rate: at.rate,
                tokens: (per_step * self.examples.seqlen()) as u64,
            });
            self.events.emit(Event::Progress { done: at.number - done });
            if at.number.is_multiple_of((steps / MEMORY_ROWS).max(1)) {
                let clock = &self.job.model.clock;
                clock.mark(Moment::Step(at.number), self.events);
            }
            if self.is_measured_after(at.number) {
                self.measure(trainer, at.number)?;
            }
            if self.is_saved_after(at.number) {
                self.save(trainer)?;
            }
        }
        self.events.emit(Event::PhaseDone {
            phase: format!("train {}", self.recovery.settings.how.name()),
            elapsed: start.elapsed(),
        });
        self.head.is_over = true;
        self.save(trainer)
    }

    /// Makes the best state the result of a training that diverged.
    ///
    /// # Errors
    /// Fails with the divergence where no good state was measured, and when files cannot be read or written.
    fn end_with_best(&mut self, trainer: &mut Trainer<'_>, diverged: Diverged) -> Result<()> {
        let best = self.head.best_step;
        let best = best.and_then(|best| self.head.held_out.iter().find(|one| one.step == best));
        let Some(best) = best else {
            self.save_what_was_done(trainer);
            let detail = "no good state was measured before, so there is no model";
            return Err(without_model(self.job, self.recovery, &diverged, detail).into());
        };
        let divergence = Divergence {
            step: diverged.at.number,
            rate: diverged.at.rate,
            what: diverged.what,
            best_step: best.step,
            best_loss: best.loss,
        };
        self.events.warn(divergence.lines().join("; "));
        trainer.parameters_mut().return_to_best()?;
        self.head.return_to_best(divergence);
        self.save(trainer)
    }

    /// Saves the finished steps of a training that ends with an error.
    fn save_what_was_done(&mut self, trainer: &Trainer<'_>) {
        if trainer.is_between_steps() && !self.head.steps.is_empty() {
            // The reason for the end matters more; an older state stays.
            if let Err(failed) = self.save(trainer) {
                let events = self.events;
                events.warn(format!("the last steps are not saved: {failed:#}"));
            }
        }
    }

    /// Measures the held-out examples, and keeps the values if they are the best.
    ///
    /// # Errors
    /// Fails with [`Diverged`] for a loss that exploded, and as [`Trainer::loss`].
    fn measure(&mut self, trainer: &mut Trainer<'_>, step: u64) -> Result<()> {
        let Some(held) = self.held else { return Ok(()) };
        let all: Vec<usize> = (0..held.len()).collect();
        let loss = with_examples(held, &all, |batch| trainer.loss(batch))?;
        let from = self.first_comparable();
        let known: Vec<f64> = self.comparable().map(|report| report.loss).collect();
        // With a teacher, the loss of a step is no loss of tokens.
        let is_comparable = from == 0 && self.recovery.teacher.is_none();
        let first = self.head.steps.first().filter(|_| is_comparable).map(|report| report.loss);
        let lowest = known.iter().copied().chain(first).fold(f64::INFINITY, f64::min);
        if !loss.is_finite() || loss > lowest + EXPLOSION {
            let before = match lowest.is_finite() {
                true => format!(" ({lowest:.4} before)"),
                false => String::new(),
            };
            return Err(Diverged {
                what: format!("the held-out loss is {loss:.4}{before}"),
                at: TrainingStep { number: step, rate: self.rate_of(step.saturating_sub(1)) },
            }
            .into());
        }
        let is_best = step >= from && known.into_iter().fold(f64::INFINITY, f64::min) > loss;
        // A measurement is recorded only when the values are kept: a state that is saved in between measures again.
        if is_best {
            trainer.parameters_mut().keep_best()?;
            self.head.best_step = Some(step);
        }
        self.head.held_out.push(HeldOutReport { step, loss, perplexity: loss.exp() });
        self.events.note(format!(
            "step {step}: held-out loss {loss:.4}, perplexity {:.4}{}",
            loss.exp(),
            match (is_best, step >= from) {
                (true, _) => "",
                (false, true) => ", not the best",
                (false, false) => ", at a lower sparsity than the result",
            }
        ));
        Ok(())
    }

    /// The learning rate of a step, from 0.
    fn rate_of(&self, step: u64) -> f64 {
        let given = self.recovery.given.rates.as_ref();
        let given = given.and_then(|rates| rates.get(step as usize).copied());
        given.unwrap_or_else(|| self.schedule.rate_of(step))
    }

    /// The step from which on all masks are the last masks: held-out losses before belong to lower sparsities.
    fn first_comparable(&self) -> u64 {
        let closing = self.recovery.closing_masks(self.schedule.steps);
        closing.map_or(0, |closing| closing.last_change())
    }

    fn is_measured_after(&self, step: u64) -> bool {
        let steps = self.schedule.steps;
        let every = self.recovery.settings.eval_every;
        let every = every.unwrap_or((steps / 10).max(1));
        step == steps || step.is_multiple_of(every.max(1))
    }

    /// The measurements with the masks of the result.
    fn comparable(&self) -> impl Iterator<Item = &HeldOutReport> {
        let from = self.first_comparable();
        self.head.held_out.iter().filter(move |report| report.step >= from)
    }

    /// Returns whether the last measurements, as many as `--patience`, were worse than the best before them.
    fn is_out_of_patience(&self) -> bool {
        let Some(patience) = self.recovery.settings.patience else {
            return false;
        };
        let best = self.head.best_step.unwrap_or(0);
        let later = self.comparable().filter(|report| report.step > best);
        later.count() as u64 >= patience
    }

    fn is_saved_after(&self, step: u64) -> bool {
        match self.recovery.settings.save_every {
            Some(every) => step.is_multiple_of(every.max(1)),
            None => self.saved.elapsed() >= SAVE_INTERVAL,
        }
    }

    fn save(&mut self, trainer: &Trainer<'_>) -> Result<()> {
        self.saved = Instant::now();
        match self.job.folder.state() {
            Some(folder) => saved::write(folder, &self.head, trainer.store()),
            None => Ok(()),
        }
    }
}

/// The dtype of stored hidden states: the dtype of the arithmetic.
pub(super) fn states_dtype(products: Products) -> StoredDtype {
    match products {
        Products::Bf16(_) | Products::AllBf16(_) => StoredDtype::Bf16,
        Products::F32 | Products::Split => StoredDtype::F32,
    }
}

/// Calls `body` with some examples.
fn with_examples<R>(
    examples: &Examples,
    chosen: &[usize],
    body: impl FnOnce(&[Example<'_>]) -> R,
) -> R {
    let targets: Vec<Vec<Option<u32>>> =
        chosen.iter().map(|&example| examples.targets_of(example)).collect();
    let batch: Vec<Example<'_>> = chosen
        .iter()
        .zip(&targets)
        .map(|(&example, targets)| Example { tokens: examples.tokens_of(example), targets })
        .collect();
    body(&batch)
}
