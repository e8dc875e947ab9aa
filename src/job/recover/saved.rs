//! `training.state`: a training of the whole model between two steps, so that a later process continues with the same bits.
//!
//! After its seal the file has one line of JSON, the [`TrainingHead`], and then the bytes of [`ParameterStore::save`]: values, optimizer states, and
//! the best values. The order of the examples is a function of the step, so it needs no state. The file appears whole or not at all. A file
//! whose settings differ is passed over; after a divergence, the settings `OF_THE_RATE` may differ.

use std::collections::BTreeMap;
use std::io::{BufRead, BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::super::settled_run::SettledRun;
use crate::bytes::LARGEST_RECORD;
use crate::checkpoint::{open_sealed, write_sealed_with};
use crate::failure::Failure;
use crate::recovery::ParameterStore;
use crate::run::recovery::{Divergence, HeldOutReport, StepReport};
use crate::run::state::{OF_THE_RATE, TRAINING_FILE};

/// Bytes that are written at once.
const PIECE: usize = 1 << 20;

/// The first line of the file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct TrainingHead {
    /// All settings that decide the outcome, by name.
    pub(super) settings: BTreeMap<String, String>,
    /// The steps that are done.
    pub(super) steps: Vec<StepReport>,
    /// The measurements of the held-out examples.
    pub(super) held_out: Vec<HeldOutReport>,
    /// The step whose values are the best; `None` before the first measurement.
    pub(super) best_step: Option<u64>,
    /// The training is over; layers are merged next.
    pub(super) is_over: bool,
    /// Set if the loss exploded; the values are then the best values.
    #[serde(default)]
    pub(super) divergence: Option<Divergence>,
    /// Steps before the optimizer began with fresh states, after a divergence.
    #[serde(default)]
    pub(super) restarted_after: u64,
}

impl TrainingHead {
    /// Goes back to the steps and measurements of the best state, from which a new learning rate continues with a fresh optimizer.
    pub(super) fn return_to_best(&mut self, divergence: Divergence) {
        let best = divergence.best_step;
        self.steps.retain(|report| report.step <= best);
        self.held_out.retain(|report| report.step <= best);
        self.restarted_after = best;
        self.is_over = true;
        self.divergence = Some(divergence);
    }
}

/// The place of the file.
pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(TRAINING_FILE)
}

/// Writes a training.
///
/// # Errors
/// Fails when the disk refuses; an older file then stays.
pub(super) fn write(folder: &Path, head: &TrainingHead, store: &ParameterStore) -> Result<()> {
    let mut line = serde_json::to_vec(head).context("writing the state of the training")?;
    line.push(b'\n');
    write_sealed_with(&path(folder), &mut |out| {
        let mut out = BufWriter::with_capacity(PIECE, out);
        out.write_all(&line)?;
        store.save(&mut out).map_err(std::io::Error::other)?;
        out.flush()
    })
}

/// The place of a saved training, which the first rank tells.
#[derive(Serialize, Deserialize)]
struct SavedPlace {
    folder: PathBuf,
    settings: BTreeMap<String, String>,
}

/// Reads the training of a run on every rank: the first rank finds it, and all others read the same file.
///
/// # Errors
/// Fails as [`read`], and where ranks do not read the same file.
pub(super) fn read_on_all_ranks(
    job: &SettledRun,
    store: &mut ParameterStore,
) -> Result<Option<TrainingHead>> {
    let ranks = &job.ranks;
    let (head, place) = match ranks.is_first() {
        true => {
            let folder = job.folder.state();
            let head =
                folder.map(|folder| read(folder, &job.identity.deciding, store)).transpose()?;
            let (head, settings) = (head.flatten(), job.identity.deciding.clone());
            let folder = folder.filter(|_| head.is_some());
            let place = folder.map(|of| SavedPlace { folder: of.to_path_buf(), settings });
            ranks.tell_others(&place)?;
            (head, place)
        }
        false => {
            let place: Option<SavedPlace> = ranks.hear_first()?;
            let head =
                place.as_ref().map(|of| read(&of.folder, &of.settings, store)).transpose()?;
            (head.flatten(), place)
        }
    };
    let steps = ranks.all_gather_values(&head.as_ref().map(|head| head.steps.len()))?;
    if let Some(place) = place {
        ensure!(
            steps.iter().all(|of_rank| *of_rank == steps[0]),
            Failure::new(format!("not all ranks see `{}`", path(&place.folder).display()))
                .detail("every rank continues from this file")
                .hint("name a folder with --save that all machines share")
        );
    }
    Ok(head)
}

/// Reads a training with these settings into a store whose layers are put. `None` where no training is saved, or its settings differ.
///
/// # Errors
/// Fails when the file cannot be read, and when it is not as it was written.
pub(super) fn read(
    folder: &Path,
    settings: &BTreeMap<String, String>,
    store: &mut ParameterStore,
) -> Result<Option<TrainingHead>> {
    let path = path(folder);
    let damaged = |why: &dyn std::fmt::Display| {
        Failure::new(format!("the saved training `{}` cannot be continued", path.display()))
            .detail(why.to_string())
            .hint(format!("remove `{}`, and the same command begins with step 1", path.display()))
    };
    let mut file = match open_sealed(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(damaged(&error).into()),
        Ok(file) => file,
    };
    let mut line = Vec::new();
    let mut first = (&mut file).take(LARGEST_RECORD.0);
    first.read_until(b'\n', &mut line).map_err(|error| damaged(&error))?;
    let mut head: TrainingHead = serde_json::from_slice(&line).map_err(|error| damaged(&error))?;
    let is_same = head.settings == *settings;
    let may_go_on = head.divergence.is_some() && differ_in_the_rate(&head.settings, settings);
    if !is_same && !may_go_on {
        return Ok(None);
    }
    store.load(&mut file).map_err(|error| damaged(&error))?;
    if !is_same {
        (head.is_over, head.divergence) = (false, None);
        head.settings.clone_from(settings);
    }
    Ok(Some(head))
}

/// Returns whether two runs have equal settings apart from `OF_THE_RATE`.
fn differ_in_the_rate(one: &BTreeMap<String, String>, other: &BTreeMap<String, String>) -> bool {
    let is_rate = |name: &&String| OF_THE_RATE.contains(&name.as_str());
    let names = one.keys().chain(other.keys());
    let mut others = names.filter(|name| !is_rate(name));
    others.all(|name| one.get(name) == other.get(name))
}
