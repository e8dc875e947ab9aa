//! The streams of a sweep: calibration samples and evaluation windows, embedded; and the sweep they pass.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::eval_state::{KeptStreams, StateKeeper};
use super::final_states;
use super::opened::WholeModel;
use super::outputs::Outputs;
use super::settled_run::{RunTask, SettledRun};
use super::task_log;
use crate::checkpoint::WeightSource;
use crate::eval::answers::own_segments;
use crate::eval::{DenseHead, Meeting, MeetingRole, Perplexity, TaskAnswers};
use crate::linalg::StoredDtype;
use crate::model::on_device::candle_dtype;
use crate::model::{Embedding, ModelConfig};
use crate::pipeline::embed;
use crate::run::manifest::{Perplexities, SweepMeasurements};
use crate::run::tasks::TaskResults;
use crate::run::{Event, Events, Moment, Phase};
use crate::runtime::{
    Devices, Editor, Finished, HiddenStates, PackedSamples, Passenger, SampleShare, Side, Sweep,
    SweepReport, memory,
};
use crate::settings::Settings;
use crate::tasks::{self, PackedTasks, RequestScore};

/// The embedded streams and the devices they pass.
pub(super) struct Streams<'a> {
    devices: Devices,
    /// The calibration samples; the editor of a pruning run takes them.
    pub(super) calibration: Option<HiddenStates>,
    perplexities: Vec<Perplexity<'a>>,
    answers: Vec<TaskAnswers<'a>>,
    packed: Option<&'a PackedTasks>,
    settings: &'a Settings,
}

impl<'a> Streams<'a> {
    /// Opens the devices and embeds every stream that the rest of the run needs. A resumed run whose layers are finished needs no
    /// samples. A resumed run that has measured its perplexities needs no windows.
    ///
    /// # Errors
    /// Fails when a device cannot be opened, the embedding cannot be read, or a spill file cannot be written.
    pub(super) fn embed(
        job: &'a SettledRun,
        outputs: &Outputs<'_>,
        events: &'a dyn Events,
    ) -> Result<Self> {
        let devices = job.open_devices()?;
        let needs_samples = outputs.finished_layers() < job.model.config.num_hidden_layers;
        let calibration = match needs_samples {
            true => job.embedded_samples(&devices, events)?,
            false => None,
        };
        let perplexities = job.embedded_windows(&devices, outputs, events)?;
        let answers = job.embedded_packs(&devices, outputs, events)?;
        let (packed, settings) = (job.texts.tasks.as_ref(), &job.settings);
        Ok(Self { devices, calibration, perplexities, answers, packed, settings })
    }

    /// Passes all streams through the model. `finished` layers come from an earlier process; `editor` prunes the later layers.
    ///
    /// # Errors
    /// Fails when a layer cannot be read or written, for weights and activations that are not finite, and when the run is asked
    /// to stop.
    pub(super) fn sweep(
        &mut self,
        job: &SettledRun,
        finished: Option<Finished>,
        editor: Option<&mut dyn Editor>,
        events: &dyn Events,
    ) -> Result<SweepReport> {
        let layers = finished.as_ref().map_or(0, |finished| finished.layers);
        let passes =
            passes(job, layers, self.perplexities.len()) + passes_of_packs(job, self.answers.len());
        let passengers = self.perplexities.iter_mut();
        let mut passengers: Vec<&mut dyn Passenger> =
            passengers.map(|passenger| passenger as &mut dyn Passenger).collect();
        passengers.extend(self.answers.iter_mut().map(|of| of as &mut dyn Passenger));
        let work = SweepWork { finished, editor, passengers: &mut passengers, passes, passed: 0 };
        job.sweep(&self.devices, work, events)
    }

    /// Passes the streams of an evaluation through the model. Between layers they are saved in the run folder `folder`, from which an earlier
    /// process is continued.
    ///
    /// # Errors
    /// Fails as [`Streams::sweep`].
    pub(super) fn sweep_evaluation(
        &mut self,
        job: &SettledRun,
        folder: Option<&Path>,
        events: &dyn Events,
    ) -> Result<SweepReport> {
        let streams = [self.perplexities.len(), self.answers.len()];
        let mut kept = KeptStreams {
            perplexities: &mut self.perplexities,
            answers: &mut self.answers,
            keeper: StateKeeper::of(job, folder, events)?,
        };
        let passed = kept.continue_earlier()?;
        let layers = job.model.config.num_hidden_layers as u64 + 1;
        let all = passes(job, 0, streams[0]) + passes_of_packs(job, streams[1]);
        let passes = all / layers * (layers - passed as u64);
        let passengers: &mut [&mut dyn Passenger] = &mut [&mut kept];
        let work = SweepWork { finished: None, editor: None, passengers, passes, passed };
        job.sweep(&self.devices, work, events)
    }

    /// The samples of a pass that always has them.
    ///
    /// # Errors
    /// Fails where the pass has no samples.
    pub(super) fn samples(&mut self) -> Result<HiddenStates> {
        self.calibration.take().context("the pass has samples")
    }

    /// The devices of the sweep.
    pub(super) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Leaves the final states for the cells of a sweep, if this is its run of the dense model.
    ///
    /// # Errors
    /// Fails when the file cannot be written, and when a rank has left.
    pub(super) fn leave_states(&mut self, job: &SettledRun) -> Result<()> {
        let Some((path, _)) = job.left_states() else {
            return Ok(());
        };
        let shape = job.final_states(self.devices.is_empty());
        let mut windows = self.perplexities.iter_mut();
        windows.try_for_each(|windows| final_states::write(&path, windows, shape, &job.ranks))
    }

    /// Everything that the sweep has measured.
    pub(super) fn measured(&self, job: &SettledRun) -> SweepMeasurements {
        SweepMeasurements { perplexity: self.perplexities(job), tasks: self.tasks() }
    }

    /// The scores of the requests of tasks, by the name of the model.
    pub(super) fn scores(&self) -> BTreeMap<&'static str, &[RequestScore]> {
        let scores = self.answers.iter();
        scores.filter_map(|of| Some((of.of_side().name(), of.scores()?))).collect()
    }

    /// Writes the file of `--log-samples`, if it is asked for; `dense` are the scores of a model that has passed before.
    ///
    /// # Errors
    /// Fails when the file cannot be written.
    pub(super) fn log_samples(
        &self,
        job: &SettledRun,
        dense: Option<&[RequestScore]>,
    ) -> Result<()> {
        let asked = self.settings.evaluation.tasks.log_samples.as_ref();
        let Some((path, packed)) = asked.zip(self.packed).filter(|_| job.ranks.is_first()) else {
            return Ok(());
        };
        let mut models = self.scores();
        if let Some(dense) = dense {
            let own = models.remove(Side::Dense.name());
            models.extend(own.map(|own| (Side::Pruned.name(), own)));
            models.insert(Side::Dense.name(), dense);
        }
        match models.is_empty() {
            true => Ok(()),
            false => task_log::write(path, packed, &models),
        }
    }

    /// The accuracies of the tasks, after the sweep; `None` without tasks.
    pub(super) fn tasks(&self) -> Option<TaskResults> {
        let packed = self.packed.filter(|_| !self.answers.is_empty())?;
        let mut results = TaskResults {
            num_fewshot: self.settings.evaluation.tasks.num_fewshot,
            tokens_sha256: packed.layout.sha256.clone(),
            ..TaskResults::default()
        };
        for answers in &self.answers {
            let reports =
                tasks::reports(&packed.layout.tasks, answers.scores().unwrap_or_default());
            match answers.of_side() {
                Side::Dense => results.dense = reports,
                Side::Pruned => results.pruned = reports,
            }
        }
        Some(results)
    }

    /// The perplexities, after the sweep.
    pub(super) fn perplexities(&self, job: &SettledRun) -> Perplexities {
        job.perplexities(&self.perplexities)
    }
}

/// The work of a sweep.
pub(super) struct SweepWork<'e, 's, 'p> {
    /// Layers of an earlier process.
    pub(super) finished: Option<Finished>,
    /// It prunes the later layers.
    pub(super) editor: Option<&'e mut dyn Editor>,
    pub(super) passengers: &'s mut [&'p mut dyn Passenger],
    /// The steps of the progress bar.
    pub(super) passes: u64,
    /// Layers that all passengers have passed in an earlier process.
    pub(super) passed: usize,
}

/// The passes of packs of tasks through layers and the head.
fn passes_of_packs(job: &SettledRun, streams: usize) -> u64 {
    let packs = SampleShare::here(job.texts.packs(), &job.ranks).own().len();
    (packs * streams * (job.model.config.num_hidden_layers + 1)) as u64
}

/// The passes of a sweep: a sample through a layer, or through the head. Each sample passes the `finished` layers once.
/// 0 for a training, whose steps take different times: its layers are counted.
pub(super) fn passes(job: &SettledRun, finished: usize, streams_of_windows: usize) -> u64 {
    if matches!(job.task, RunTask::Recover(_)) {
        return 0;
    }
    let layers = job.model.config.num_hidden_layers;
    let here = |samples| SampleShare::here(samples, &job.ranks).own().len();
    let samples = here(job.samples().map_or(0, |samples| samples.nsamples));
    let calibration = samples * job.passes_of_a_sample(finished);
    let windows = here(job.texts.windows()) * streams_of_windows;
    (calibration + windows * (layers + 1)) as u64
}

impl SettledRun {
    /// Opens the devices of the plan.
    pub(super) fn open_devices(&self) -> Result<Devices> {
        let simulation = self.settings.device.simulate.as_ref();
        let devices = Devices::open(&self.plan, self.model.gpu_dtype, simulation)?;
        if let Some(gauge) = devices.gauge() {
            self.model.clock.read_devices(gauge);
        }
        Ok(devices)
    }

    /// The embedded calibration samples; `None` where no statistics are made of them.
    pub(super) fn embedded_samples(
        &self,
        devices: &Devices,
        events: &dyn Events,
    ) -> Result<Option<HiddenStates>> {
        let samples = self.samples();
        samples
            .map(|samples| self.embedded(devices, "calibration", &samples.tokens, events))
            .transpose()
    }

    /// The calibration samples, embedded by a model of the same width.
    pub(super) fn embedded_by(
        &self,
        model: (&dyn WeightSource, &ModelConfig),
        devices: &Devices,
        events: &dyn Events,
    ) -> Result<HiddenStates> {
        let samples = self.samples().context("samples to embed")?;
        self.embedded_from(model, devices, "targets", &samples.tokens, events)
    }

    /// The embedded windows of every side that the run has yet to measure.
    pub(super) fn embedded_windows<'a>(
        &'a self,
        devices: &Devices,
        outputs: &Outputs<'_>,
        events: &'a dyn Events,
    ) -> Result<Vec<Perplexity<'a>>> {
        let model = &self.model;
        let mut perplexities = Vec::new();
        let windows = self.texts.windows.as_ref();
        if let Some(windows) = windows.filter(|_| outputs.measured().is_none()) {
            let sides = self.measured_sides();
            let of_run = match self.meeting_of_sides(sides) {
                Some(of_run) => Some(of_run),
                None => self.meeting_of_sweep(devices)?,
            };
            for &side in sides {
                let perplexity = Perplexity::new(
                    side,
                    self.embedded(devices, self.named(side).name(), &windows.tokens, events)?,
                    &windows.tokens,
                    model.config.num_hidden_layers,
                    model.reporter(events),
                );
                let role = match side {
                    Side::Dense => MeetingRole::Dense,
                    Side::Pruned => MeetingRole::Model,
                };
                let of_run = of_run.clone().map(|meeting| (meeting, role));
                let compared = || {
                    let comparison = self.comparison.as_ref()?;
                    Some((Arc::clone(&comparison.meeting), comparison.role))
                };
                let meeting = of_run.or_else(compared);
                let keeps_states = self.left_states().is_some();
                let perplexity = perplexity.named(self.named(side)).keeping_states(keeps_states);
                perplexities.push(perplexity.in_meeting(meeting));
            }
        }
        Ok(perplexities)
    }

    /// The embedded packs of tasks of every side that the run has yet to measure.
    fn embedded_packs<'a>(
        &'a self,
        devices: &Devices,
        outputs: &Outputs<'_>,
        events: &'a dyn Events,
    ) -> Result<Vec<TaskAnswers<'a>>> {
        let Some(packed) = self.texts.tasks.as_ref().filter(|_| outputs.measured().is_none())
        else {
            return Ok(Vec::new());
        };
        let model = &self.model;
        let embedded = |side: &Side| -> Result<TaskAnswers<'a>> {
            let share = SampleShare::here(packed.layout.packs(), &self.ranks);
            events.emit(Event::PhaseStarted {
                phase: format!("embed {} tasks", self.named(*side).name()),
                unit: "packs",
                steps: share.own().len() as u64,
            });
            let embedding = Embedding::open(&*model.source, &model.config)?;
            let dtype = if devices.is_empty() { StoredDtype::F32 } else { model.gpu_dtype };
            let own = share.own().to_vec();
            let packs = PackedSamples {
                segments: own_segments(packed, &share)?,
                share,
                hidden_size: model.config.hidden_size,
            };
            let mut hidden =
                HiddenStates::of_packs(self.spill_folder().as_deref(), packs, candle_dtype(dtype))?
                    .on_devices(devices.homes());
            let embed = || -> Result<()> {
                for (at, &pack) in own.iter().enumerate() {
                    hidden.put(at, embedding.rows(&packed.pack(pack)?.tokens)?)?;
                }
                Ok(())
            };
            model.clock.measure(Phase::Embed, embed).context("embedding the tasks")?;
            // The last pack may be small, and the allocator keeps small blocks.
            memory::release_freed();
            let layers = model.config.num_hidden_layers;
            let answers = TaskAnswers::new(*side, hidden, packed, layers, model.reporter(events));
            Ok(answers.named(self.named(*side)))
        };
        self.measured_sides().iter().map(embedded).collect()
    }

    /// The comparison of the two sides of a run that prunes.
    fn meeting_of_sides(&self, sides: &[Side]) -> Option<Arc<Meeting>> {
        let compares = sides.len() > 1 && self.pruning().is_some();
        let positions = self.settings.evaluation.kl_positions;
        compares.then(|| Meeting::new(positions, DenseHead::Same))
    }

    /// The comparison of a cell with the dense model, which has passed in an earlier run of the sweep.
    fn meeting_of_sweep(&self, devices: &Devices) -> Result<Option<Arc<Meeting>>> {
        let evaluation = &self.settings.evaluation;
        let path = evaluation.dense_states.as_ref().filter(|_| self.dense().is_some());
        let shape = self.final_states(devices.is_empty());
        path.map(|path| final_states::open(path, shape, evaluation.kl_positions)).transpose()
    }

    /// Sweeps over the layers.
    ///
    /// # Errors
    /// Fails as [`Sweep::run`].
    pub(super) fn sweep(
        &self,
        devices: &Devices,
        work: SweepWork<'_, '_, '_>,
        events: &dyn Events,
    ) -> Result<SweepReport> {
        let SweepWork { finished, editor, passengers, passes, passed } = work;
        let model = &self.model;
        if editor.is_some() {
            model.clock.mark(Moment::BeforePruning, events);
        }
        events.emit(Event::SweepStarted {
            layers: model.config.num_hidden_layers,
            finished: finished.as_ref().map_or(passed, |finished| finished.layers),
            passes,
        });
        let sweep = Sweep {
            source: model.layers(),
            finished,
            passed,
            seqlen: self.texts.longest(model.seqlen),
            settings: self.plan.memory_settings.clone(),
            products: model.products,
            activations: self.settings.weights.map_or_else(Default::default, |of| of.activations),
            devices,
            ranks: self.ranks.clone(),
            reporter: model.reporter(events),
        };
        let swept = sweep.run(editor, passengers);
        events.emit(Event::SweepDone);
        swept
    }

    /// The perplexities, after the sweep that these streams have passed.
    pub(super) fn perplexities(&self, streams: &[Perplexity<'_>]) -> Perplexities {
        let whole = self.model.part_of.as_ref();
        let mut measured = Perplexities {
            dense: whole.and_then(WholeModel::dense).or(self.dense()),
            pruned: None,
            divergence: streams.iter().find_map(Perplexity::divergence),
        };
        for (side, passenger) in self.measured_sides().iter().zip(streams) {
            match side {
                Side::Dense => measured.dense = passenger.report(),
                Side::Pruned => measured.pruned = passenger.report(),
            }
        }
        measured
    }

    /// A stream of embedded samples, `tokens` `[samples, seqlen]`, in the dtype of the devices that compute.
    fn embedded(
        &self,
        devices: &Devices,
        stream: &str,
        tokens: &[u32],
        events: &dyn Events,
    ) -> Result<HiddenStates> {
        let model = (&*self.model.source, &*self.model.config);
        self.embedded_from(model, devices, stream, tokens, events)
    }

    fn embedded_from(
        &self,
        (source, config): (&dyn WeightSource, &ModelConfig),
        devices: &Devices,
        stream: &str,
        tokens: &[u32],
        events: &dyn Events,
    ) -> Result<HiddenStates> {
        let model = &self.model;
        let share = SampleShare::here(tokens.len() / model.seqlen, &self.ranks);
        events.emit(Event::PhaseStarted {
            phase: format!("embed {stream} samples"),
            unit: "samples",
            steps: share.own().len() as u64,
        });
        let embedding = Embedding::open(source, config)?;
        let dtype = if devices.is_empty() { StoredDtype::F32 } else { model.gpu_dtype };
        let mut hidden = HiddenStates::of_share(
            self.spill_folder().as_deref(),
            share,
            [model.seqlen, config.hidden_size],
            candle_dtype(dtype),
        )?
        .on_devices(devices.homes());
        model
            .clock
            .measure(Phase::Embed, || embed(&mut hidden, &embedding, tokens, model.seqlen))
            .context("embedding the samples")?;
        hidden.warn_of_displaced(0, events);
        Ok(hidden)
    }
}
