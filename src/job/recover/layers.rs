//! The sweep of a recovery: it trains layer by layer, or merges what was trained, and measures the perplexities.

use anyhow::{Context, Result};

use super::super::outputs::Outputs;
use super::super::record::RunResults;
use super::super::settled_run::SettledRun;
use super::super::streams::Streams;
use super::base::FrozenBase;
use super::resolved::Recovery;
use super::steps::{Trained, states_dtype, without_model};
use crate::linalg::StoredDtype;
use crate::model::on_device::candle_dtype;
use crate::pipeline::expected;
use crate::recovery::optimizers::rounding::Bf16Rounding;
use crate::recovery::{BlockTeacher, BlockTrainer, BufferReuse, Diverged, LayerOutput, Merger};
use crate::run::manifest::LayerReport;
use crate::run::{Events, RecoveryReport};
use crate::runtime::{Editor, HiddenStates};

impl Recovery {
    /// Trains or merges the layers that are left, and measures the perplexities.
    ///
    /// # Errors
    /// Fails when the run is asked to stop, for a loss or gradients that are not finite, and where files cannot be read or written.
    pub(super) fn sweep_layers(
        &self,
        job: &SettledRun,
        (outputs, streams): (&mut Outputs<'_>, &mut Streams<'_>),
        trained: Option<&Trained>,
        events: &dyn Events,
    ) -> Result<RunResults> {
        let finished = outputs.finished(&job.model.config)?;
        let measured = outputs.measured();
        let output = LayerOutput {
            layers: outputs.layers_before.clone(),
            norms: norms_dtype(job, self),
            output: outputs.receivers(),
            events,
        };
        let rounding = match self.settings.stochastic_rounding {
            true => Bf16Rounding::Stochastic { seed: job.seed(), step: 0 },
            false => Bf16Rounding::Nearest,
        };
        let (swept, layers) = match trained {
            Some(trained) => {
                let mut merger = Merger {
                    part: &self.part,
                    config: &job.model.config,
                    store: &trained.store,
                    base: trained.base.layers(job, self, 0),
                    rounding,
                    output,
                };
                let editor: &mut dyn Editor = &mut merger;
                let swept = streams.sweep(job, finished, Some(editor), events)?;
                (swept, merger.output.layers)
            }
            None => {
                let mut trainer = block_trainer(job, self, streams, output, events)?;
                trainer.rounding = rounding;
                let editor: &mut dyn Editor = &mut trainer;
                let swept = streams.sweep(job, finished, Some(editor), events);
                let swept = swept.map_err(|error| match error.downcast_ref::<Diverged>() {
                    Some(diverged) => {
                        let detail = "not all layers are trained, so there is no model";
                        without_model(job, self, diverged, detail).into()
                    }
                    None => error,
                })?;
                (swept, trainer.output.layers)
            }
        };
        let swept = match trained {
            Some(trained) => trained.devices.clone().and(swept),
            None => swept,
        };
        let measured = measured.unwrap_or_else(|| streams.measured(job));
        if let Some(state) = &mut outputs.state {
            state.measured(measured.clone(), &layers)?;
        }
        let report = report(job, self, &layers, trained)?;
        Ok(RunResults {
            expected: expected::expected_of(&layers, self.pattern()),
            swept,
            perplexity: measured.perplexity,
            tasks: measured.tasks,
            layers: Some(layers),
            recovery: Some(report),
            ..RunResults::default()
        })
    }
}

/// The editor that trains layer by layer.
fn block_trainer<'t>(
    job: &'t SettledRun,
    recovery: &'t Recovery,
    streams: &mut Streams<'_>,
    output: LayerOutput<'t>,
    events: &'t dyn Events,
) -> Result<BlockTrainer<'t>> {
    let (model, states) = (&job.model, streams.calibration.take());
    let teacher = recovery.teacher.as_ref().context("blocks have a teacher")?;
    let samples = job.texts.samples();
    let schedule = recovery.schedule(samples);
    let order = recovery.given.order(samples, job.seed())?;
    let (steps, per_step) = (schedule.steps, recovery.settings.per_step());
    let batch = move |layer: usize, step: u64| {
        let step = layer * steps as usize + step as usize;
        order.examples_of(step, per_step)
    };
    let none = || HiddenStates::new(None, 0, [model.seqlen, 1], candle_dtype(StoredDtype::F32));
    let targets = match &states {
        Some(_) => {
            let dense = (&*teacher.source, &*teacher.config);
            job.embedded_by(dense, streams.devices(), events)?
        }
        None => none()?,
    };
    Ok(BlockTrainer {
        teacher: BlockTeacher {
            source: teacher.source.clone(),
            config: teacher.config.clone(),
            ends: teacher.layer_ends.clone(),
        },
        config: model.config.clone(),
        base: FrozenBase::open(job, recovery, events)?.layers(job, recovery, 0),
        part: &recovery.part,
        optimizer: recovery.optimizer(),
        closing: recovery.closing_masks(schedule.steps),
        max_grad_norm: recovery.settings.max_grad_norm,
        schedule,
        batch: Box::new(batch),
        seed: job.seed(),
        states: match states {
            Some(states) => states,
            None => none()?,
        },
        targets,
        rounding: Bf16Rounding::Nearest,
        output,
        spare: BufferReuse::default(),
        clock: &model.clock,
        events,
    })
}

/// The dtype of stored norms.
fn norms_dtype(job: &SettledRun, recovery: &Recovery) -> StoredDtype {
    let names = recovery.norms_of(0, &job.model.config);
    let entry = names.first().and_then(|name| job.model.source.entry(name));
    let dtype = entry.and_then(|entry| crate::model::stored_dtype(entry).ok());
    dtype.unwrap_or(job.model.dtype())
}

fn report(
    job: &SettledRun,
    recovery: &Recovery,
    layers: &[LayerReport],
    trained: Option<&Trained>,
) -> Result<RecoveryReport> {
    let config = &job.model.config;
    let settings = &recovery.settings;
    let matrices = layers.iter().flat_map(|layer| &layer.matrices);
    let new_zeros = matrices.map(|matrix| matrix.zeros.saturating_sub(matrix.zeros_before));
    let texts = &job.texts;
    let (text, examples) = match (&texts.examples, &texts.calibration) {
        (Some((examples, held)), _) => {
            let held = held.as_ref().map_or(0, |held| held.len());
            (examples.protocol().clone(), [examples.len(), held])
        }
        (None, Some(samples)) => (samples.protocol.clone(), [samples.nsamples, 0]),
        (None, None) => Default::default(),
    };
    let head = trained.map(|trained| &trained.head);
    let is_factors = settings.trains == crate::settings::TrainedKind::Factors;
    let schedule = recovery.schedule(examples[0]);
    Ok(RecoveryReport {
        how: settings.how.name().to_string(),
        teacher: recovery.teacher_folder().map(|folder| folder.display().to_string()),
        trains: settings.trains.name().to_string(),
        rank: is_factors.then_some(settings.rank),
        target_modules: recovery.part.ids.iter().map(|id| id.module().to_string()).collect(),
        parameters: recovery.trained_parameters(config),
        optim: settings.optim.clone(),
        rate: schedule.rate,
        steps_of: schedule.steps,
        base_quant: settings.base_quant.map(|format| format.name().to_string()),
        text,
        examples,
        steps: head.map(|head| head.steps.clone()).unwrap_or_default(),
        held_out: head.map(|head| head.held_out.clone()).unwrap_or_default(),
        best_step: head.and_then(|head| head.best_step),
        closing: recovery.closing_report(schedule.steps, config),
        divergence: head.and_then(|head| head.divergence.clone()),
        new_zeros: new_zeros.sum(),
        adapter: job.adapter_folder(recovery).map(|folder| folder.display().to_string()),
        states: states_dtype(job.model.products).name().to_string(),
    })
}
