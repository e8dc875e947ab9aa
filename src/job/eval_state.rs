//! An evaluation between two layers: the hidden states of its windows and packs in the run folder, so that a later process continues.
//!
//! | file | streams |
//! | --- | --- |
//! | `evaluation.state` | of the model |
//! | `evaluation.dense.state` | of the dense model of `--against`, which passes first |
//!
//! A sealed file has a line of JSON ([`StatesHead`]) and the states, stream by stream. It is replaced after a layer if all saves
//! together take at most a [`SHARE`]th of the time, and small states after every layer. The head passes again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::same_run;
use super::settled_run::SettledRun;
use crate::bytes::{ByteSize, LARGEST_RECORD};
use crate::checkpoint::{open_sealed, write_sealed_with};
use crate::disk;
use crate::eval::{MeetingRole, Perplexity, TaskAnswers};
use crate::model::{DecoderLayer, Head};
use crate::run::state::{EVALUATION_FILE, EVALUATION_FILE_OF_DENSE};
use crate::run::{Event, Events, Unfinished};
use crate::runtime::{Compute, HiddenStates, Passenger, Side};

/// Saving takes at most this part of the time.
const SHARE: u32 = 20;

/// States of at most this size are saved after every layer.
const SMALL: u64 = 4 << 20;

/// Bytes per second of a first save: hashing without instructions for it. An estimate.
const FIRST_RATE: f64 = 200e6;

/// The first line of the content.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct StatesHead {
    /// Everything that decides the states, by name.
    settings: BTreeMap<String, String>,
    /// Layers that all streams have passed.
    layers: usize,
    /// Bytes of each stream.
    streams: Vec<u64>,
}

/// The streams of an evaluation, which are saved between two layers.
pub(super) struct KeptStreams<'s, 'a> {
    pub(super) perplexities: &'s mut [Perplexity<'a>],
    pub(super) answers: &'s mut [TaskAnswers<'a>],
    /// The file; `None` where nothing is saved.
    pub(super) keeper: Option<StateKeeper<'s>>,
}

impl KeptStreams<'_, '_> {
    fn states(&mut self) -> Vec<&mut HiddenStates> {
        let windows = self.perplexities.iter_mut().map(Perplexity::states);
        windows.chain(self.answers.iter_mut().map(TaskAnswers::states)).collect()
    }

    /// Replaces the states by the states that an earlier process has saved. Returns the layers that these have passed; 0 without a file of this
    /// evaluation.
    pub(super) fn continue_earlier(&mut self) -> Result<usize> {
        let Some(keeper) = self.keeper.take() else {
            return Ok(0);
        };
        let layers = keeper.load(&mut self.states());
        self.keeper = Some(keeper);
        layers
    }
}

impl Passenger for KeptStreams<'_, '_> {
    fn side(&self) -> Side {
        Side::Dense
    }

    fn layer(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        for windows in self.perplexities.iter_mut() {
            windows.layer(layer, compute)?;
        }
        for answers in self.answers.iter_mut() {
            answers.layer(layer, compute)?;
        }
        if let Some(mut keeper) = self.keeper.take() {
            let is_usable = keeper.passed(layer.index() + 1, &mut self.states());
            self.keeper = is_usable.then_some(keeper);
        }
        Ok(())
    }

    fn finish(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<()> {
        for windows in self.perplexities.iter_mut() {
            windows.finish(head, compute)?;
        }
        self.answers.iter_mut().try_for_each(|answers| answers.finish(head, compute))
    }
}

/// Removes the files of an evaluation that is over.
///
/// # Errors
/// Fails when a file cannot be removed.
pub(super) fn remove(folder: &Path) -> Result<()> {
    for name in [EVALUATION_FILE, EVALUATION_FILE_OF_DENSE] {
        let path = folder.join(name);
        disk::remove(&path).with_context(|| format!("removing `{}`", path.display()))?;
    }
    Ok(())
}

/// The file of an evaluation.
pub(super) struct StateKeeper<'a> {
    path: PathBuf,
    settings: BTreeMap<String, String>,
    /// The command of the evaluation.
    arguments: &'a [String],
    num_hidden_layers: usize,
    events: &'a dyn Events,
    began: Instant,
    /// The duration of the last save.
    took: Option<Duration>,
    /// The duration of all saves.
    spent: Duration,
}

impl<'a> StateKeeper<'a> {
    /// The file of the evaluation `job` in the run folder `folder`. `None` on several ranks, which have parts of the states each.
    pub(super) fn of(
        job: &'a SettledRun,
        folder: Option<&Path>,
        events: &'a dyn Events,
    ) -> Result<Option<Self>> {
        let Some(folder) = folder.filter(|_| job.ranks.is_alone()) else {
            return Ok(None);
        };
        let name = match job.comparison.as_ref().map(|of| of.role) {
            Some(MeetingRole::Dense) => EVALUATION_FILE_OF_DENSE,
            _ => EVALUATION_FILE,
        };
        let mut settings = same_run::early(&job.settings, &job.model, &job.folder)?;
        settings.extend(same_run::late(&job.texts, &job.model, &job.settings.device, &job.plan));
        settings.insert("form of weights".to_string(), job.model.forms.form().name().to_string());
        Ok(Some(Self {
            path: folder.join(name),
            settings,
            arguments: &job.settings.arguments,
            num_hidden_layers: job.model.config.num_hidden_layers,
            events,
            began: Instant::now(),
            took: None,
            spent: Duration::ZERO,
        }))
    }

    fn head(&self, layers: usize, states: &[&mut HiddenStates]) -> StatesHead {
        let streams = states.iter().map(|states| states.all_bytes()).collect();
        StatesHead { settings: self.settings.clone(), layers, streams }
    }

    /// Loads the states of an earlier process, and returns the layers that they have passed. States of another evaluation are left alone.
    fn load(&self, states: &mut [&mut HiddenStates]) -> Result<usize> {
        let (head, mut file) = match self.open() {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(0),
            Err(error) => {
                self.events.warn(format!(
                    "`{}` cannot be used, and the evaluation begins again: {error:#}",
                    self.path.display()
                ));
                return Ok(0);
            }
        };
        if head != self.head(head.layers, states) {
            return Ok(0);
        }
        for states in states {
            let reading = || format!("reading `{}`", self.path.display());
            states.read_all(&mut file).with_context(reading)?;
        }
        let (layers, all) = (head.layers, self.num_hidden_layers);
        self.events.note(format!(
            "continuing an unfinished evaluation: {layers} of {all} layers are passed"
        ));
        self.announce();
        Ok(layers)
    }

    /// Opens the file after its first line; `None` without a file.
    fn open(&self) -> Result<Option<(StatesHead, BufReader<File>)>> {
        let mut file = match open_sealed(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut line = Vec::new();
        (&mut file).take(LARGEST_RECORD.0).read_until(b'\n', &mut line)?;
        Ok(Some((serde_json::from_slice(&line)?, file)))
    }

    /// Saves the states after a layer, if it is time. Returns false where they cannot be saved; then the evaluation continues without saving.
    fn passed(&mut self, layers: usize, states: &mut [&mut HiddenStates]) -> bool {
        let bytes: u64 = states.iter().map(|states| states.all_bytes()).sum();
        let takes = self.took.unwrap_or(Duration::from_secs_f64(bytes as f64 / FIRST_RATE));
        if bytes > SMALL && (self.spent + takes) * SHARE > self.began.elapsed() {
            return true;
        }
        let began = Instant::now();
        let saved = self.save(layers, bytes, states);
        self.took = Some(began.elapsed());
        self.spent += began.elapsed();
        match &saved {
            Ok(()) => self.announce(),
            Err(why) => self.events.warn(format!(
                "an interruption would repeat this evaluation: its states are not saved ({why:#})"
            )),
        }
        saved.is_ok()
    }

    /// From now on an interruption leaves states.
    fn announce(&self) {
        let folder = self.path.parent().unwrap_or(&self.path);
        let left = Unfinished::resumable("layers", folder, "evaluation", self.arguments);
        self.events.emit(Event::IfInterrupted(Some(left)));
    }

    fn save(&self, layers: usize, bytes: u64, states: &mut [&mut HiddenStates]) -> Result<()> {
        if let Some(room) = self.path.parent().and_then(disk::room)
            && room.free.0 < bytes
        {
            anyhow::bail!("{} are needed, {} are free", ByteSize(bytes), room.free);
        }
        let head = serde_json::to_string(&self.head(layers, states))? + "\n";
        write_sealed_with(&self.path, &mut |file: &mut dyn Write| {
            file.write_all(head.as_bytes())?;
            let mut all = states.iter_mut();
            all.try_for_each(|states| states.write_all(file).map_err(io::Error::other))
        })
    }
}
