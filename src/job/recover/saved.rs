//! `training.state`: a training of the whole model between two steps, so that another process continues with the same bits.
//!
//! The file has one line of JSON, the [`TrainingHead`], and then the bytes of [`Shelf::save`]: values, optimizer states, and the best
//! values. The order of the examples is a function of the step, so it needs no state. The file appears whole or not at all. A file of
//! other settings is passed over.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::bytes::LARGEST_RECORD;
use crate::checkpoint::write_atomic_with;
use crate::recovery::Shelf;
use crate::run::recovery::{HeldOutReport, StepReport};
use crate::run::state::TRAINING_FILE;

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
}

/// The place of the file.
pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(TRAINING_FILE)
}

/// Writes a training.
///
/// # Errors
/// Fails when the disk refuses; an older file then stays.
pub(super) fn write(folder: &Path, head: &TrainingHead, shelf: &Shelf) -> Result<()> {
    let mut line = serde_json::to_vec(head).context("writing the state of the training")?;
    line.push(b'\n');
    write_atomic_with(&path(folder), &mut |out| {
        let mut out = BufWriter::with_capacity(PIECE, out);
        out.write_all(&line)?;
        shelf.save(&mut out).map_err(std::io::Error::other)?;
        out.flush()
    })
}

/// Reads a training with these settings into a shelf whose layers are put. `None` where there is none, or one of other settings.
///
/// # Errors
/// Fails when the file cannot be read, or ends early.
pub(super) fn read(
    folder: &Path,
    settings: &BTreeMap<String, String>,
    shelf: &mut Shelf,
) -> Result<Option<TrainingHead>> {
    let path = path(folder);
    let file = match File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        file => file.with_context(|| format!("reading `{}`", path.display()))?,
    };
    let reading = || format!("reading `{}`", path.display());
    let mut file = BufReader::with_capacity(PIECE, file);
    let mut line = Vec::new();
    let mut first = (&mut file).take(LARGEST_RECORD.0);
    first.read_until(b'\n', &mut line).with_context(reading)?;
    let head: TrainingHead = serde_json::from_slice(&line).with_context(reading)?;
    if head.settings != *settings {
        return Ok(None);
    }
    shelf.load(&mut file).with_context(reading)?;
    Ok(Some(head))
}
