//! The sweeps that measure activations, model by model and layer by layer, into the file.

use std::path::Path;

use anyhow::{Context, Result};

use super::saliency::Saliency;
use super::saliency_file::{MeasuredModel, SaliencyFile};
use crate::job::device_records::DeviceRecords;
use crate::job::outputs::Outputs;
use crate::job::settled_run::SettledRun;
use crate::job::streams::Streams;
use crate::pipeline::activations::{ActivationJournal, ActivationMeter, LayerSquares};
use crate::run::Events;
use crate::runtime::{Finished, Reporter};

impl Saliency {
    /// Measures the models whose statistics the file does not have, and returns the statistics of all models. Every finished layer is in
    /// the file at once, so a later process continues there.
    ///
    /// # Errors
    /// Fails when a layer cannot be read, for activations that are not finite, when a device fails for a reason besides lack of
    /// memory, and when the file cannot be written.
    pub(super) fn measure(
        &self,
        devices: &mut DeviceRecords,
        reporter: Reporter<'_>,
    ) -> Result<SaliencyFile> {
        let mut file = self.found.clone();
        for asked in &self.asked {
            let Some(job) = &asked.job else { continue };
            let at = file.begin(&asked.measurement);
            let mut journal = FileJournal { path: &self.path, file: &mut file, at };
            let name = &asked.measurement.model;
            let swept = sweep(job, &mut journal, name, reporter.events)
                .with_context(|| format!("measuring the activations of `{name}`"))?;
            devices.add(swept.fallbacks, swept.devices);
            reporter.clock.add(&job.model.clock.report());
        }
        Ok(file)
    }
}

/// Passes the samples of a model through its layers; finished layers are not measured again.
fn sweep(
    job: &SettledRun,
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
    let samples = streams.samples()?;
    let finished = (layers > 0).then(|| Finished { layers, written: model.layers() });
    let mut meter = ActivationMeter::new(samples, journal, &model.config, model.reporter(events));
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
