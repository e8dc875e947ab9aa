//! `--eval`: the perplexities of the models and of the merge. Each model is read once, layer by layer.
//!
//! The inputs are measured before the merge, so that a text that is missing or a model that does not fit ends the run early. The state of
//! the run keeps every perplexity.

use std::path::Path;

use anyhow::{Context, Result};

use super::job::MergeJob;
use super::models::put_on;
use crate::adapter::Adapter;
use crate::job::device_records::DeviceRecords;
use crate::job::folder::state_file::StateFile;
use crate::job::opened::OpenedModel;
use crate::job::outputs::Outputs;
use crate::job::pass::settle_pass;
use crate::job::recorder::Recorder;
use crate::job::streams::Streams;
use crate::run::Events;
use crate::run::merging::{MERGED, ModelPerplexity};
use crate::settings::{EvalSides, MergeEval, ModelSettings};

/// A model to measure.
struct EvaluatedModel<'a> {
    name: String,
    folder: &'a Path,
    adapter: Option<&'a Adapter>,
}

impl MergeJob {
    /// Measures the models that are merged.
    ///
    /// # Errors
    /// Fails for everything that can be wrong with text, models and memory.
    pub(super) fn evaluate_inputs(
        &self,
        state: &mut StateFile<'_>,
        devices: &mut DeviceRecords,
        recorder: &Recorder<'_>,
    ) -> Result<()> {
        let is_asked = self.settings.eval == MergeEval::All;
        for input in self.merge.inputs.models.iter().filter(|_| is_asked) {
            let (name, adapter) = (input.spec.to_string(), input.adapter.as_deref());
            let model = EvaluatedModel { name, folder: &input.folder, adapter };
            self.evaluate(&model, state, devices, recorder)?;
        }
        Ok(())
    }

    /// Measures the merged model, which is complete.
    ///
    /// # Errors
    /// As [`MergeJob::evaluate_inputs`].
    pub(super) fn evaluate_merged(
        &self,
        state: &mut StateFile<'_>,
        devices: &mut DeviceRecords,
        recorder: &Recorder<'_>,
    ) -> Result<()> {
        if self.settings.eval == MergeEval::None {
            return Ok(());
        }
        let (name, folder) = (MERGED.to_string(), self.folder.model_folder()?);
        self.evaluate(&EvaluatedModel { name, folder, adapter: None }, state, devices, recorder)
    }

    /// Measures a model, unless the state has its perplexity.
    fn evaluate(
        &self,
        model: &EvaluatedModel<'_>,
        state: &mut StateFile<'_>,
        devices: &mut DeviceRecords,
        recorder: &Recorder<'_>,
    ) -> Result<()> {
        let name = &model.name;
        if state.run().perplexities_of_models.iter().any(|row| row.model == *name) {
            return Ok(());
        }
        let row = self
            .perplexity(model, devices, recorder)
            .with_context(|| format!("measuring the perplexity of `{name}`"))?;
        recorder.note(format!("perplexity   {:.4} of {name}", row.report.perplexity));
        state.change(|run| run.perplexities_of_models.push(row))
    }

    fn perplexity(
        &self,
        of: &EvaluatedModel<'_>,
        devices: &mut DeviceRecords,
        events: &dyn Events,
    ) -> Result<ModelPerplexity> {
        let mut settings = self.settings.measuring(ModelSettings::of(of.folder));
        settings.evaluation.eval = EvalSides::Dense;
        let mut model =
            OpenedModel::open(&settings.model, &settings.device, settings.seqlen, events)?;
        if let Some(adapter) = of.adapter {
            put_on(&mut model, adapter.clone())?;
        }
        let job = settle_pass(settings, model, None, events)?;
        let mut streams = Streams::embed(&job, &Outputs::default(), events)?;
        let swept = streams.sweep(&job, None, None, events)?;
        devices.add(swept.fallbacks, swept.devices);
        self.clock.add(&job.model.clock.report());
        let windows = job.texts.windows.as_ref();
        Ok(ModelPerplexity {
            model: of.name.clone(),
            report: streams.perplexities(&job).dense.context("a model is measured")?,
            text: windows.context("a text is measured")?.protocol.clone(),
        })
    }
}
