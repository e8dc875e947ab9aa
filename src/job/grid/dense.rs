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

/// The dense model of the sweep; `None` where cells do not show it. If another process is measuring it now, this process measures it too:
/// that takes no longer than waiting.
///
/// # Arguments
/// * `has_work`: a cell of this process is not finished
///
/// # Errors
/// Fails as `prune eval`.
pub(super) fn measure(
    ranks: &Ranks,
    (run, has_work): (&Settings, bool),
    (out, common): (&Path, &CommonSettings),
    events: &dyn Events,
) -> Result<Option<DenseRun>> {
    if run.evaluation.eval != EvalSides::Both {
        return Ok(None);
    }
    let folder = out.join(DENSE);
    // A cell that drops layers or width measures the source in its own pass.
    let compares = run.layer_drop.is_none() && run.width_drop.is_none();
    let states = compares.then(|| folder.join(STATES));
    let manifest =
        perplexity(ranks, run, (&folder, common), states.as_ref().filter(|_| has_work), events)?;
    Ok(Some(DenseRun { manifest, states }))
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

/// The record of the dense perplexity. The run leaves its final states in the file `states`.
fn perplexity(
    ranks: &Ranks,
    run: &Settings,
    (folder, common): (&Path, &CommonSettings),
    states: Option<&PathBuf>,
    events: &dyn Events,
) -> Result<Manifest> {
    let found = match ranks.is_first() {
        true => {
            let has_states = states.is_none_or(|path| path.is_file());
            let found = if has_states { measured(folder, common)? } else { None };
            ranks.tell_others(&found)?;
            found
        }
        false => ranks.hear_first()?,
    };
    if let Some(manifest) = found {
        if ranks.is_first() {
            let save = Some(folder.to_path_buf());
            let output = OutputSettings { save, ..OutputSettings::default() };
            RunFolder::at(&[], &output, false)?.tidy_finished(events)?;
        }
        return Ok(manifest);
    }
    let mut settings = run.clone();
    settings.sparsity = None;
    settings.calibration = None;
    // The dense model is the source.
    settings.layer_drop = None;
    settings.width_drop = None;
    settings.evaluation.eval = EvalSides::Dense;
    settings.evaluation.max_perplexity = None;
    settings.evaluation.max_kl = None;
    settings.evaluation.tasks.min_accuracy = None;
    settings.evaluation.dense_states = states.cloned();
    let save = Some(folder.to_path_buf());
    settings.output = OutputSettings { save, force: true, ..OutputSettings::default() };
    match eval_on(ranks, settings.clone(), events) {
        Ok(manifest) if !ranks.is_first() => Ok(manifest),
        Ok(manifest) => {
            records::write(folder, &records::record_of(None, common, None))?;
            Ok(manifest)
        }
        Err(error) if !error.is::<FolderInUse>() => Err(error),
        Err(_) => {
            events.note(format!(
                "another process measures the dense perplexity in `{}`; this one measures it, too",
                folder.display()
            ));
            settings.output.save = None;
            eval_on(ranks, settings, events)
        }
    }
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
