//! The dense model of a sweep: measured once, in the run folder `dense`, and shown by every cell. Its final states stay in that folder until
//! no cell is left that compares with them. Ranks share its windows.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::records::{self, CommonSettings};
use crate::job::folder::RunFolder;
use crate::job::folder::lock::FolderInUse;
use crate::job::run::eval_on;
use crate::ranks::Ranks;
use crate::run::{Events, Manifest};
use crate::settings::{EvalSides, OutputSettings, Settings};

/// The name of the run folder in the folder of the sweep.
const DENSE: &str = "dense";

/// The file of the final states in it. Parts of the file begin with the same name.
const STATES: &str = "final_states";

/// The dense model, measured.
pub(super) struct DenseRun {
    pub(super) manifest: Manifest,
    /// The file of its final states; `None` where no cell compares with them.
    pub(super) states: Option<PathBuf>,
}

/// The run of the dense model, before it is known whether an earlier process has done it.
pub(super) struct DenseModel<'a> {
    ranks: &'a Ranks,
    run: &'a Settings,
    common: &'a CommonSettings,
    folder: PathBuf,
    /// The file that the run leaves, where a cell needs it.
    states: Option<PathBuf>,
}

impl<'a> DenseModel<'a> {
    /// The dense model of the sweep in `out`; `None` where cells do not show it.
    ///
    /// # Arguments
    /// * `run`: the settings that all cells share
    pub(super) fn of(
        ranks: &'a Ranks,
        run: &'a Settings,
        common: &'a CommonSettings,
        out: &Path,
    ) -> Option<Self> {
        let folder = out.join(DENSE);
        // A cell that drops layers or width measures the source in its own pass.
        let compares = run.layer_drop.is_none() && run.width_drop.is_none();
        let states = compares.then(|| folder.join(STATES));
        (run.evaluation.eval == EvalSides::Both).then_some(Self {
            ranks,
            run,
            common,
            folder,
            states,
        })
    }

    /// Measures the dense model, unless an earlier process has. If another process is measuring it now, this process measures it too: that
    /// takes no longer than waiting.
    ///
    /// # Arguments
    /// * `has_work`: a cell is not finished, so the final states are needed
    ///
    /// # Errors
    /// Fails as `prune eval`.
    pub(super) fn measured(self, has_work: bool, events: &dyn Events) -> Result<DenseRun> {
        let found = match self.ranks.is_first() {
            true => {
                let needed = self.states.as_ref().filter(|_| has_work);
                let has_states = needed.is_none_or(|path| path.is_file());
                let found = if has_states { measured(&self.folder, self.common)? } else { None };
                self.ranks.tell_others(&found)?;
                found
            }
            false => self.ranks.hear_first()?,
        };
        let manifest = match found {
            None => self.measure(events)?,
            Some(manifest) => {
                if self.ranks.is_first() {
                    RunFolder::at(&[], &self.output(), false)?.tidy_finished(events)?;
                }
                manifest
            }
        };
        Ok(DenseRun { manifest, states: self.states })
    }

    fn output(&self) -> OutputSettings {
        OutputSettings { save: Some(self.folder.clone()), ..OutputSettings::default() }
    }

    /// Measures the dense model, which leaves its final states.
    fn measure(&self, events: &dyn Events) -> Result<Manifest> {
        let mut settings = self.run.clone();
        settings.sparsity = None;
        settings.calibration = None;
        // The dense model is the source.
        settings.layer_drop = None;
        settings.width_drop = None;
        settings.evaluation.eval = EvalSides::Dense;
        settings.evaluation.max_perplexity = None;
        settings.evaluation.max_kl = None;
        settings.evaluation.tasks.min_accuracy = None;
        settings.evaluation.dense_states.clone_from(&self.states);
        settings.output = OutputSettings { force: true, ..self.output() };
        match eval_on(self.ranks, settings.clone(), events) {
            Ok(manifest) => {
                if self.ranks.is_first() {
                    records::write(&self.folder, &records::record_of(None, self.common, None))?;
                }
                Ok(manifest)
            }
            Err(error) if !error.is::<FolderInUse>() => Err(error),
            Err(_) => {
                events.note(format!(
                    "another process measures the dense model in `{}`; this one measures it, too",
                    self.folder.display()
                ));
                settings.output.save = None;
                eval_on(self.ranks, settings, events)
            }
        }
    }
}

/// Removes the final states of the dense model: no cell needs them any more.
///
/// # Errors
/// Fails when a file cannot be removed.
pub(super) fn tidy(out: &Path) -> Result<()> {
    let folder = out.join(DENSE);
    let Ok(entries) = std::fs::read_dir(&folder) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry.with_context(|| format!("listing `{}`", folder.display()))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        if name.is_some_and(|name| name.starts_with(STATES)) {
            std::fs::remove_file(&path)
                .with_context(|| format!("removing `{}`", path.display()))?;
        }
    }
    Ok(())
}

/// The record of the dense model of the sweep in `out`, under these settings.
///
/// # Errors
/// Fails for records that cannot be read.
pub(super) fn record(out: &Path, common: &CommonSettings) -> Result<Option<Manifest>> {
    measured(&out.join(DENSE), common)
}

/// The record of an earlier process, under these settings.
fn measured(folder: &Path, common: &CommonSettings) -> Result<Option<Manifest>> {
    match records::read(folder)? {
        Some(record) if record.settings == *common => records::manifest(folder),
        _ => Ok(None),
    }
}
