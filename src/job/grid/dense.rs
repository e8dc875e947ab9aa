//! The dense perplexity of a sweep: measured once, in the run folder `dense`, and shown by every cell. Ranks share its windows.

use std::path::Path;

use anyhow::Result;

use super::records::{self, CommonSettings};
use crate::job::folder::RunFolder;
use crate::job::folder::lock::FolderInUse;
use crate::job::run::eval_on;
use crate::ranks::Ranks;
use crate::run::{Events, Manifest};
use crate::settings::{EvalSides, OutputSettings, Settings};

/// The name of the run folder in the folder of the sweep.
const DENSE: &str = "dense";

/// The record of the dense perplexity; `None` where cells do not show it. If another process is measuring it now, this
/// process measures it too: that takes no longer than waiting.
///
/// # Errors
/// Fails as `prune eval`.
pub(super) fn perplexity(
    ranks: &Ranks,
    run: &Settings,
    (out, common): (&Path, &CommonSettings),
    events: &dyn Events,
) -> Result<Option<Manifest>> {
    if run.evaluation.eval != EvalSides::Both {
        return Ok(None);
    }
    let folder = out.join(DENSE);
    let found = match ranks.is_first() {
        true => {
            let found = measured(&folder, common)?;
            ranks.tell_others(&found)?;
            found
        }
        false => ranks.hear_first()?,
    };
    if let Some(manifest) = found {
        if ranks.is_first() {
            let output = OutputSettings { save: Some(folder), ..OutputSettings::default() };
            RunFolder::at(&[], &output, false)?.tidy_finished(events)?;
        }
        return Ok(Some(manifest));
    }
    let mut settings = run.clone();
    settings.sparsity = None;
    settings.calibration = None;
    // The dense model is the source; a cell that drops layers or width measures it in its own pass.
    settings.layer_drop = None;
    settings.width_drop = None;
    settings.evaluation.eval = EvalSides::Dense;
    settings.evaluation.max_perplexity = None;
    settings.evaluation.max_kl = None;
    settings.output =
        OutputSettings { save: Some(folder.clone()), force: true, ..OutputSettings::default() };
    match eval_on(ranks, settings.clone(), events) {
        Ok(manifest) if !ranks.is_first() => Ok(Some(manifest)),
        Ok(manifest) => {
            records::write(&folder, &records::record_of(None, common, None))?;
            Ok(Some(manifest))
        }
        Err(error) if !error.is::<FolderInUse>() => Err(error),
        Err(_) => {
            events.note(format!(
                "another process measures the dense perplexity in `{}`; this one measures it, too",
                folder.display()
            ));
            settings.output.save = None;
            eval_on(ranks, settings, events).map(Some)
        }
    }
}

/// The record of an earlier process, under these settings.
fn measured(folder: &Path, common: &CommonSettings) -> Result<Option<Manifest>> {
    match records::read(folder)? {
        Some(record) if record.settings == *common => records::manifest(folder),
        _ => Ok(None),
    }
}
