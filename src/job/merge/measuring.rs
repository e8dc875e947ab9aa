//! The sweeps that measure activations, model by model and layer by layer, into the file.

use std::path::Path;

use anyhow::{Context, Result};

use super::devices::DeviceRecords;
use super::saliency::Saliency;
use super::saliency_file::{MeasuredModel, SaliencyFile};
use crate::job::outputs::Outputs;
use crate::job::settle::Job;
use crate::job::streams::Streams;
use crate::pipeline::activations::{ActivationJournal, ActivationMeter, LayerSquares};
use crate::run::{Events, Plan};
use crate::runtime::{Clock, Finished};

/// The statistics of a merge, and what measuring them took.
#[derive(Default)]
pub(super) struct MeasuredStatistics {
    pub(super) file: SaliencyFile,
    pub(super) devices: DeviceRecords,
}

impl Saliency {
    /// Measures the models whose statistics the file does not have. Every finished layer is in the file at once, so a later process
    /// continues there.
    ///
    /// # Errors
    /// Fails when a layer cannot be read, for activations that are not finite, when a device fails for a reason besides lack of
    /// memory, and when the file cannot be written.
    pub(super) fn measure(&self, clock: &Clock, events: &dyn Events) -> Result<MeasuredStatistics> {
        let mut activations =
            MeasuredStatistics { file: self.found.clone(), ..MeasuredStatistics::default() };
        for asked in &self.asked {
            let Some(job) = &asked.job else { continue };
            let file = &mut activations.file;
            let at = file.begin(&asked.measurement);
            let mut journal = FileJournal { path: &self.path, file, at };
            let name = &asked.measurement.model;
            let swept = sweep(job, &mut journal, name, events)
                .with_context(|| format!("measuring the activations of `{name}`"))?;
            activations.devices.add(swept.fallbacks, swept.devices);
            clock.add(&job.model.clock.report());
        }
        Ok(activations)
    }
}

/// Passes the samples of a model through its layers; finished layers are not measured again.
fn sweep(
    job: &Job,
    journal: &mut FileJournal<'_>,
    name: &str,
    events: &dyn Events,
) -> Result<crate::runtime::SweepReport> {
    let layers = journal.model().layers.len();
    let model = &job.model;
    events.note(match layers {
        0 => format!("measuring the activations of {name}"),
        _ => format!(
            "measuring the activations of {name}: {layers} of {} layers are finished",
            model.config.num_hidden_layers
        ),
    });
    let mut streams = Streams::embed(job, &Outputs::default(), events)?;
    let samples = streams.calibration.take();
    let samples = samples.context("a measurement has samples")?;
    let finished = (layers > 0).then(|| Finished { layers, written: model.source.clone() });
    let mut meter = ActivationMeter::new(samples, journal, &model.config, &model.clock, events);
    streams.sweep(job, finished, Some(&mut meter), events)
}

/// Replaces the file after every layer.
struct FileJournal<'a> {
    path: &'a Path,
    file: &'a mut SaliencyFile,
    /// The model that is measured.
    at: usize,
}

impl FileJournal<'_> {
    fn model(&self) -> &MeasuredModel {
        &self.file.models[self.at]
    }
}

impl ActivationJournal for FileJournal<'_> {
    fn layer_measured(&mut self, means: LayerSquares) -> Result<()> {
        self.file.models[self.at].layers.push(means);
        self.file.write(self.path)
    }
}

/// The plan of the whole run: the plan of the measurement, then the plan of the merge. The larger peak counts, times add up.
pub(in crate::job) fn joined(measuring: Plan, merging: Plan) -> Plan {
    let mut devices = measuring.devices;
    for device in merging.devices {
        match devices.iter_mut().find(|known| known.device == device.device) {
            Some(known) if known.peak >= device.peak => {}
            Some(known) => *known = device,
            None => devices.push(device),
        }
    }
    let mut phases = measuring.phases;
    for phase in merging.phases {
        let is_it = |known: &&mut crate::run::plan::PhasePlan| {
            known.phase == phase.phase && known.device == phase.device
        };
        match phases.iter_mut().find(is_it) {
            Some(known) if known.bytes >= phase.bytes => {}
            Some(known) => *known = phase,
            None => phases.push(phase),
        }
    }
    let mut notes = measuring.notes;
    notes.extend(merging.notes);
    Plan {
        devices,
        layers: measuring.layers,
        hidden_states: measuring.hidden_states,
        memory_settings: measuring.memory_settings,
        phases,
        time: measuring.time.plus(&merging.time),
        notes,
    }
}
