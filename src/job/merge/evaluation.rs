//! `--eval`: the perplexities of the models and of the merge. Each model is read once, layer by layer.
//!
//! The inputs are measured before the merge, so that a text that is missing or a model that does not fit ends the run early. The state of
//! the run keeps every perplexity.

use std::path::Path;

use anyhow::{Context, Result};

use super::job::MergeJob;
use super::models::{open_adapter, put_on};
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
        if self.settings.eval != MergeEval::All {
            return Ok(());
        }
        for model in &self.inputs.models {
            let adapter = model.adapter.as_ref().map(|adapter| adapter.folder());
            let name = model.spec.to_string();
            self.evaluate(&name, &model.folder, adapter, state, devices, recorder)?;
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
        let folder = self.folder.model.as_ref().context("a merge has a folder")?;
        self.evaluate(MERGED, folder, None, state, devices, recorder)
    }

    /// Measures a model, unless the state has its perplexity.
    fn evaluate(
        &self,
        name: &str,
        folder: &Path,
        adapter: Option<&Path>,
        state: &mut StateFile<'_>,
        devices: &mut DeviceRecords,
        recorder: &Recorder<'_>,
    ) -> Result<()> {
        let is_measured = |row: &ModelPerplexity| row.model == name;
        if state.perplexities_of_models().iter().any(is_measured) {
            return Ok(());
        }
        let row = self
            .perplexity(name, folder, adapter, devices, recorder)
            .with_context(|| format!("measuring the perplexity of `{name}`"))?;
        recorder.note(format!("perplexity   {:.4} of {name}", row.report.perplexity));
        state.model_measured(row)
    }

    fn perplexity(
        &self,
        name: &str,
        folder: &Path,
        adapter: Option<&Path>,
        devices: &mut DeviceRecords,
        events: &dyn Events,
    ) -> Result<ModelPerplexity> {
        let mut settings = self.settings.measuring(ModelSettings::of(folder));
        settings.evaluation.eval = EvalSides::Dense;
        let mut model =
            OpenedModel::open(&settings.model, &settings.device, settings.seqlen, events)?;
        if let Some(adapter) = adapter {
            let adapter = open_adapter(adapter, model.config.tie_word_embeddings)?;
            put_on(&mut model, adapter)?;
        }
        let job = settle_pass(settings, model, None, events)?;
        let mut streams = Streams::embed(&job, &Outputs::default(), events)?;
        let swept = streams.sweep(&job, None, None, events)?;
        devices.add(swept.fallbacks, swept.devices);
        self.clock.add(&job.model.clock.report());
        let windows = job.texts.windows.as_ref();
        Ok(ModelPerplexity {
            model: name.to_string(),
            report: streams.perplexities(&job).dense.context("a model is measured")?,
            text: windows.context("a text is measured")?.protocol.clone(),
        })
    }
}
