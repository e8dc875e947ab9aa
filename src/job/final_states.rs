//! The dense model's final states in a file: the run of the dense model leaves them, and the cells of a sweep compare with them.
//!
//! The file has the states of all windows, sample by sample, `[windows, seqlen, hidden_size]` in the dtype of the arithmetic. It gets its name
//! when it is whole.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::DType;

use super::inputs::RunInputs;
use super::settled_run::SettledRun;
use crate::bytes::ByteSize;
use crate::eval::{Meeting, Perplexity};
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::model::on_device::candle_dtype;
use crate::ranks::Ranks;
use crate::run::divergence::KlPositions;
use crate::runtime::{HiddenStates, random};
use crate::settings::{EvalSides, Settings};

/// The states of all windows in numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct StatesShape {
    pub(super) windows: usize,
    /// Of a window: seqlen, hidden_size.
    pub(super) state: [usize; 2],
    pub(super) dtype: DType,
}

impl StatesShape {
    fn bytes(&self) -> u64 {
        HiddenStates::file_bytes(self.windows, self.state, self.dtype)
    }
}

/// Writes the states of this rank's windows. The file gets its name when the states of all ranks are in it.
///
/// # Errors
/// Fails when the file cannot be written, and when a rank has left.
pub(super) fn write(
    path: &Path,
    windows: &mut Perplexity<'_>,
    shape: StatesShape,
    ranks: &Ranks,
) -> Result<()> {
    let states = windows.states();
    // Several processes, also of several machines, may write the file of one sweep. Ranks write it together.
    let name = match ranks.is_first() {
        true => {
            let name = format!("{:016x}.part", random());
            ranks.tell_others(&name)?;
            name
        }
        false => ranks.hear_first()?,
    };
    let part = path.with_extension(name);
    let mut write = || -> Result<()> {
        let file = File::options().create(true).truncate(false).write(true).open(&part)?;
        file.set_len(shape.bytes())?;
        states.write_to(&file)?;
        // The name must not outlive the bytes in a power cut.
        Ok(file.sync_all()?)
    };
    write().with_context(|| {
        format!("writing the dense model's final states to `{}`", part.display())
    })?;
    states.clear();
    ranks.all_gather(&[])?;
    if ranks.is_first() {
        std::fs::rename(&part, path).with_context(|| format!("naming `{}`", path.display()))?;
    }
    Ok(())
}

/// The file's states, for a comparison.
///
/// # Errors
/// Fails where the file is not there, or is the file of other windows or of another dtype.
pub(super) fn open(
    path: &Path,
    shape: StatesShape,
    positions: KlPositions,
) -> Result<Arc<Meeting>> {
    let refused = |why: String| {
        Failure::new(format!(
            "the dense model's final states cannot be read from `{}`: {why}",
            path.display()
        ))
        .hint("remove the file if it is still there, and give the same command again: the dense model passes once more")
    };
    let file = File::open(path).map_err(|error| refused(error.to_string()))?;
    let found = file.metadata().map_err(|error| refused(error.to_string()))?.len();
    if found != shape.bytes() {
        return Err(refused(format!("it has {found} bytes, not {}", shape.bytes())).into());
    }
    let StatesShape { windows, state, dtype } = shape;
    Ok(Meeting::with(positions, HiddenStates::of_file(file, windows, state, dtype)))
}

/// Returns whether the run is a cell that compares with the dense model's states.
pub(super) fn compares(settings: &Settings, given: &RunInputs<'_>) -> bool {
    given.dense.is_some() && settings.evaluation.dense_states.is_some()
}

impl SettledRun {
    /// The dense model's final states of this run's windows.
    ///
    /// # Arguments
    /// * `on_host`: the CPU computes
    pub(super) fn final_states(&self, on_host: bool) -> StatesShape {
        let dtype = if on_host { StoredDtype::F32 } else { self.model.gpu_dtype };
        StatesShape {
            windows: self.texts.windows(),
            state: [self.model.seqlen, self.model.config.hidden_size],
            dtype: candle_dtype(dtype),
        }
    }

    /// The file that this run leaves for other runs, and its size.
    pub(super) fn left_states(&self) -> Option<(PathBuf, ByteSize)> {
        let evaluation = &self.settings.evaluation;
        let path = evaluation.dense_states.clone();
        let shape = self.final_states(self.plan.devices.len() <= 1);
        path.filter(|_| evaluation.eval == EvalSides::Dense)
            .map(|path| (path, ByteSize(shape.bytes())))
    }
}
