//! `unfinished.json` while this process works on its run: what is written after every layer, and which layers still stand when a
//! later process continues.
//!
//! A layer is recorded only when its bytes and masks are synced. A later process compares every recorded tensor with its hash. The
//! first layer with a difference, and all layers after it, are done again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::bytes::{ByteSize, read_whole};
use crate::checkpoint::{check_sealed_json, write_sealed_json};
use crate::disk;
use crate::failure::Failure;
use crate::job::recorder::Recorder;
use crate::merging::pass::MergeJournal;
use crate::packed::PackJournal;
use crate::pipeline::LayerJournal;
use crate::pipeline::expected::{bias_of, pruned, tensor_of};
use crate::quantized::QuantizeJournal;
use crate::run::manifest::{LayerReport, Manifest, SessionReport, SweepMeasurements};
use crate::run::merging::MergedTensor;
use crate::run::packing::ScannedFile;
use crate::run::quantization::QuantizedMatrix;
use crate::run::state::{FILE, SCHEMA, TRAINING_FILE, merge_phases};
use crate::run::{Events, RunState};
use crate::runtime::Clock;

/// The largest state that is read: a model of 1000 layers has a few MiB.
const LARGEST: ByteSize = ByteSize(256 << 20);

/// `unfinished.json` while this process works on it.
pub struct StateFile<'a> {
    path: PathBuf,
    /// The state that earlier sessions left, with the layers this session finished.
    state: RunState,
    clock: &'a Clock,
    recorder: &'a Recorder<'a>,
}

impl<'a> StateFile<'a> {
    /// The state file of the run in `folder`.
    pub(in crate::job) fn path(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    /// The state in `folder`; `None` where the folder has no state.
    ///
    /// # Errors
    /// Fails for a damaged file, and for a file whose version is not `SCHEMA`.
    pub fn read(folder: &Path) -> Result<Option<RunState>> {
        let path = Self::path(folder);
        let cannot = |why: String| {
            Failure::new(format!("cannot continue from `{}`", path.display()))
                .detail(why)
                .hint(format!("start over with --force, or remove `{}`", folder.display()))
        };
        let text = match read_whole(&path, LARGEST) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|error| cannot(error.to_string()))?,
        };
        check_sealed_json(&text).map_err(|error| cannot(error.to_string()))?;
        let state: RunState =
            serde_json::from_slice(&text).map_err(|error| cannot(error.to_string()))?;
        let in_order = state.layers.iter().enumerate();
        if state.schema != SCHEMA || !in_order.clone().all(|(at, layer)| layer.layer == at) {
            return Err(cannot("it is of another version, or damaged".to_string()).into());
        }
        Ok(Some(state))
    }

    /// Writes the state of a new run in `folder`.
    pub(in crate::job) fn create(folder: &Path, state: &RunState) -> Result<()> {
        write(&Self::path(folder), state)
    }

    /// Begins a session: of a new run, or of an unfinished run whose finished layers are in `state`.
    pub(in crate::job) fn begin(
        folder: &Path,
        mut state: RunState,
        clock: &'a Clock,
        recorder: &'a Recorder<'a>,
        started_unix_seconds: u64,
    ) -> Result<Self> {
        state.sessions.push(SessionReport {
            started_unix_seconds,
            seconds: clock.seconds(),
            first_layer: state.layers.len(),
        });
        let file = Self { path: Self::path(folder), state, clock, recorder };
        file.write()?;
        Ok(file)
    }

    /// The run as it is recorded.
    pub(in crate::job) fn run(&self) -> &RunState {
        &self.state
    }

    /// Changes the record of the run.
    ///
    /// # Errors
    /// Fails when the file cannot be written; the state before is still there.
    pub(in crate::job) fn change(&mut self, change: impl FnOnce(&mut RunState)) -> Result<()> {
        change(&mut self.state);
        self.write()
    }

    /// Records what was measured: from now on only the output is left to finish.
    ///
    /// # Errors
    /// Fails as [`StateFile::change`].
    pub(in crate::job) fn measured(
        &mut self,
        measured: SweepMeasurements,
        layers: &[LayerReport],
    ) -> Result<()> {
        self.change(|run| {
            run.perplexity = Some(measured.perplexity);
            run.tasks = measured.tasks;
            run.layers = layers.to_vec();
        })
    }

    /// The state with this session as it is now.
    fn now(&self) -> RunState {
        let mut state = self.state.clone();
        if let Some(session) = state.sessions.last_mut() {
            session.seconds = self.clock.seconds();
        }
        state.warnings = merged_warnings(&self.state.warnings, self.recorder.warnings());
        state.phases = merge_phases(&self.state.phases, &self.clock.report());
        // Seconds of work: the seconds of earlier sessions come first.
        let earlier = state.sessions.iter().rev().skip(1).rev();
        let before: f64 = earlier.map(|session| session.seconds).sum();
        let samples = self.clock.samples().into_iter().map(|mut sample| {
            sample.seconds += before;
            sample
        });
        state.memory.extend(samples);
        state
    }

    fn write(&self) -> Result<()> {
        write(&self.path, &self.now())
    }

    /// Puts what earlier sessions did into the record of the whole run.
    pub(in crate::job) fn complete(&self, manifest: &mut Manifest) {
        let now = self.now();
        manifest.arguments = now.arguments;
        manifest.started_unix_seconds = now.started_unix_seconds;
        manifest.seconds = now.sessions.iter().map(|session| session.seconds).sum();
        manifest.sessions = now.sessions;
        let peaks = now.phases.iter().filter_map(|phase| phase.peak_anonymous);
        manifest.peak_anonymous = peaks.max();
        manifest.phases = now.phases;
        manifest.memory = now.memory;
        manifest.warnings = now.warnings;
    }

    /// Removes the state of a finished run, also of a training: nothing is left to continue. If a power cut brings the file back, the
    /// record beside it tells that the run is finished. A training that diverged keeps its state.
    pub(in crate::job) fn remove(&self) -> Result<()> {
        if self.state.divergence.is_some() {
            return Ok(());
        }
        let training = self.path.with_file_name(TRAINING_FILE);
        disk::remove(&training).with_context(|| format!("removing `{}`", training.display()))?;
        disk::remove(&self.path).with_context(|| format!("removing `{}`", self.path.display()))
    }
}

impl LayerJournal for StateFile<'_> {
    fn layer_done(
        &mut self,
        layers: &[LayerReport],
        tensors: BTreeMap<String, String>,
    ) -> Result<()> {
        self.change(|run| {
            run.layers = layers.to_vec();
            run.tensors = tensors;
        })
    }
}

/// A tensor that was written but whose counts have not come is not recorded: it would not be merged again, and its counts would be
/// missing.
impl MergeJournal for StateFile<'_> {
    fn tensors_done(
        &mut self,
        tensors: Vec<MergedTensor>,
        digests: BTreeMap<String, String>,
    ) -> Result<()> {
        self.change(|run| {
            run.merged.extend(tensors);
            run.tensors = digests;
            run.keep_counted_tensors();
        })
    }
}

impl QuantizeJournal for StateFile<'_> {
    fn matrix_done(
        &mut self,
        matrices: &BTreeMap<String, QuantizedMatrix>,
        digests: Option<BTreeMap<String, String>>,
    ) -> Result<()> {
        self.change(|run| {
            run.quantized.clone_from(matrices);
            if let Some(digests) = digests {
                run.tensors = digests;
            }
        })
    }
}

impl PackJournal for StateFile<'_> {
    fn files_scanned(&mut self, files: &BTreeMap<String, ScannedFile>) -> Result<()> {
        self.change(|run| run.scanned.clone_from(files))
    }

    fn tensors_written(&mut self, digests: BTreeMap<String, String>) -> Result<()> {
        self.change(|run| run.tensors = digests)
    }
}

fn write(path: &Path, state: &RunState) -> Result<()> {
    let json = serde_json::to_string_pretty(state).context("writing the run's state as JSON")?;
    write_sealed_json(path, &(json + "\n"))
}

/// The beginning of the names of all modules of a layer: `model.layers.3.`
fn prefix_of(module: &str, layer: usize) -> Option<&str> {
    let number = format!(".{layer}.");
    let end = module.find(&number)? + number.len();
    module.get(..end)
}

/// Both, each once.
fn merged_warnings(before: &[String], now: Vec<String>) -> Vec<String> {
    let mut all = before.to_vec();
    all.extend(now.into_iter().filter(|text| !before.contains(text)));
    all
}

impl RunState {
    /// Keeps the tensors of a merge whose counts are recorded.
    pub(in crate::job) fn keep_counted_tensors(&mut self) {
        let counted: BTreeSet<&str> = self.merged.iter().map(|of| of.name.as_str()).collect();
        self.tensors.retain(|name, _| counted.contains(name.as_str()));
    }

    /// Keeps the layers before the first with a tensor that is not recorded or among `damaged` (names of modules: matrices, and norms that
    /// were trained). Returns the matrices of the layers that go.
    pub fn keep_whole_layers(&mut self, damaged: &BTreeSet<String>) -> Vec<String> {
        let is_whole = |layer: &LayerReport| {
            let matrices = || pruned(std::slice::from_ref(layer));
            let prefix = matrices().find_map(|matrix| prefix_of(&matrix.name, layer.layer));
            let is_damaged = |name: &String| prefix.is_some_and(|prefix| name.starts_with(prefix));
            !damaged.iter().any(is_damaged)
                && matrices().all(|matrix| self.tensors.contains_key(&tensor_of(&matrix.name)))
        };
        let whole = self.layers.iter().take_while(|layer| is_whole(layer)).count();
        let gone = self.layers.split_off(whole);
        if gone.is_empty() {
            return Vec::new();
        }
        // The perplexities belong to the whole model.
        self.perplexity = None;
        let names: Vec<String> = pruned(&gone).map(|matrix| matrix.name.clone()).collect();
        for name in &names {
            self.tensors.remove(&tensor_of(name));
            self.tensors.remove(&bias_of(name));
        }
        names
    }
}

/// Tells how far the unfinished run is.
pub(in crate::job) fn announce(state: &RunState, layers: usize, events: &dyn Events) {
    let finished = state.layers.len();
    events.note(match (finished, &state.perplexity) {
        (_, Some(_)) => {
            "continuing an unfinished run: all layers are pruned and measured".to_string()
        }
        (finished, None) => {
            format!("continuing an unfinished run: {finished} of {layers} layers are finished")
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::manifest::MatrixReport;

    fn layer(index: usize) -> LayerReport {
        let matrix = |name: &str, pruned| MatrixReport {
            name: format!("model.layers.{index}.{name}"),
            shape: [2, 2],
            zeros_before: 0,
            zeros: 2,
            pruned,
            mask_sha256: pruned.map(|_| format!("mask {index}")),
            relative_output_error: None,
        };
        LayerReport {
            layer: index,
            seconds: 1.0,
            sparsity: 0.5,
            permutation: None,
            training: None,
            matrices: vec![matrix("q", Some(2)), matrix("k", None)],
        }
    }

    fn state(layers: usize) -> RunState {
        let layers: Vec<LayerReport> = (0..layers).map(layer).collect();
        RunState {
            schema: SCHEMA,
            tensors: pruned(&layers)
                .map(|matrix| (tensor_of(&matrix.name), "hash".to_string()))
                .collect(),
            layers,
            perplexity: Some(SweepMeasurements::default().perplexity),
            ..RunState::default()
        }
    }

    #[test]
    fn a_damaged_layer_and_all_after_it_are_done_again() {
        let mut whole = state(3);
        assert!(whole.keep_whole_layers(&BTreeSet::new()).is_empty());
        assert_eq!((whole.layers.len(), whole.perplexity.is_some()), (3, true));

        let mut broken = state(3);
        let damaged = ["model.layers.1.q".to_string()].into();
        let gone = broken.keep_whole_layers(&damaged);
        assert_eq!(gone, ["model.layers.1.q", "model.layers.2.q"]);
        assert_eq!((broken.layers.len(), broken.perplexity), (1, None));
        assert_eq!(broken.tensors.len(), 1);

        // A norm belongs to its own layer only: `layers.11` is not part of layer 1.
        let mut norm = state(2);
        let damaged = ["model.layers.1.input_layernorm".to_string()].into();
        norm.keep_whole_layers(&damaged);
        assert_eq!(norm.layers.len(), 1);
        let mut other = state(2);
        other.keep_whole_layers(&["model.layers.11.q".to_string()].into());
        assert_eq!(other.layers.len(), 2);

        let mut missing = state(2);
        missing.tensors.remove("model.layers.0.q.weight");
        missing.keep_whole_layers(&BTreeSet::new());
        assert_eq!(missing.layers.len(), 0);
    }

    #[test]
    fn a_warning_is_told_once() {
        let before = ["a".to_string()];
        let merged = merged_warnings(&before, vec!["a".to_string(), "b".to_string()]);
        assert_eq!(merged, ["a", "b"]);
    }

    #[test]
    fn a_state_that_is_none_is_refused_with_a_way_out() -> Result<()> {
        let folder = tempfile::tempdir()?;
        assert!(StateFile::read(folder.path())?.is_none());
        let mut odd = state(2);
        odd.layers.swap(0, 1);
        let path = StateFile::path(folder.path());
        // A state without a seal, as older versions wrote it, and a seal around a text that is no valid state.
        let text = serde_json::to_string(&state(2))?;
        for (text, is_sealed) in [
            ("{".to_string(), false),
            (text, false),
            ("{}".to_string(), true),
            (serde_json::to_string(&odd)?, true),
        ] {
            match is_sealed {
                true => write_sealed_json(&path, &text)?,
                false => std::fs::write(&path, text)?,
            }
            let error = StateFile::read(folder.path()).unwrap_err().to_string();
            assert!(error.contains("unfinished.json") && error.contains("--force"), "{error}");
        }
        Ok(())
    }
}
