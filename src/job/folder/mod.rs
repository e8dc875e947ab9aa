//! The run folder: checks of the places results are written to, and the files in them.
//!
//! | file | content |
//! | --- | --- |
//! | `files` | names of the files in a run folder |
//! | `leftovers` | files that a killed process left in the folders of a finished run |
//! | `lock` | one run per folder: the file `prune.lock` names the process that works here, on network file systems too |
//! | `memory_log` | `memory_log.csv` of `--log-memory` |
//! | `owner` | the owner of a folder's lock: host, boot, process and batch job, and whether that process still lives |
//! | `state_file` | `unfinished.json` while this process works on its run |

mod files;
mod leftovers;
pub(crate) mod lock;
pub(super) mod memory_log;
mod owner;
pub mod state_file;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};

use self::files::{files_in, is_temporary};
use self::lock::FolderLock;
use self::state_file::StateFile;
use crate::bytes::{ByteSize, LARGEST_RECORD, json_file, read_whole};
use crate::checkpoint::{
    CONFIG_FILE, MASKS_FILE, PARTIAL_SUFFIX, SUMS_FILE, is_model_file, refuse_source_folder,
    write_atomic,
};
use crate::disk;
use crate::failure::Failure;
use crate::job::disk_room;
use crate::pruning::METHODS;
use crate::report;
use crate::run::manifest::GateReport;
pub(crate) use crate::run::manifest::MANIFEST_FILE as MANIFEST;
pub(in crate::job) use crate::run::manifest::RESULT_FOLDER as MODEL;
use crate::run::verification::VerifiedFile;
use crate::run::{Events, Manifest, RunState, state};
use crate::settings::{EvaluationSettings, OutputSettings};

/// The folders of a run's results.
#[derive(Debug)]
pub(in crate::job) struct RunFolder {
    /// `--save`: manifest and log.
    pub(in crate::job) run: Option<PathBuf>,
    /// The model's folder; `None` when no model is written.
    pub(super) model: Option<PathBuf>,
    is_forced: bool,
    /// The flag that named the model's folder.
    model_flag: &'static str,
    /// While this process works there.
    locks: Vec<Arc<FolderLock>>,
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        // The inner folder first: what was made for its lock alone goes with it.
        while self.locks.pop().is_some() {}
    }
}

/// The folder of the matrices of a narrower model, while the run lasts.
const NARROWER: &str = "narrower";

impl RunFolder {
    /// Checks where results would go. Writes nothing.
    ///
    /// # Errors
    /// Fails when either folder is a file or lies in the folder of a source, whose files would otherwise be replaced.
    pub(in crate::job) fn at(
        sources: &[&Path],
        output: &OutputSettings,
        writes_model: bool,
    ) -> Result<Self> {
        let model_flag = if output.save_model.is_some() { "--save-model" } else { "--save" };
        Self::placed(sources, output, writes_model, model_flag)
    }

    /// As [`RunFolder::at`], for a command whose `--save` names the model's folder.
    ///
    /// # Errors
    /// As [`RunFolder::at`].
    pub(in crate::job) fn of_model(source: &Path, save: &Path, is_forced: bool) -> Result<Self> {
        let output = OutputSettings {
            save_model: Some(save.to_path_buf()),
            force: is_forced,
            ..OutputSettings::default()
        };
        Self::placed(&[source], &output, true, "--save")
    }

    /// Checks the folders; `model_flag` is the flag that named the model's folder.
    fn placed(
        sources: &[&Path],
        output: &OutputSettings,
        writes_model: bool,
        model_flag: &'static str,
    ) -> Result<Self> {
        let save = output.save.as_deref();
        let model = output.save_model.clone();
        let model = model.or_else(|| save.map(|save| save.join(MODEL)));
        let model = model.filter(|_| writes_model && !output.no_save_model);
        let mut resolved = Vec::new();
        let flagged = save.map(|save| (save, "--save"));
        let flagged = flagged.into_iter().chain(model.as_deref().map(|model| (model, model_flag)));
        for (folder, flag) in flagged {
            let nearest = folder.ancestors().find(|path| path.exists());
            if let Some(file) = nearest.filter(|path| !path.is_dir()) {
                return Err(Failure::new(format!(
                    "`{}` is a file; results go into a folder",
                    file.display()
                ))
                .hint(format!("choose another {flag} folder"))
                .into());
            }
            let mut places =
                sources.iter().map(|source| refuse_source_folder(source, folder, flag));
            // Every source gives the same place.
            let place = places.next().transpose()?;
            places.try_for_each(|place| place.map(drop))?;
            resolved.extend(place);
        }
        if let Some(record) = save.map(|save| save.join(MANIFEST)).filter(|path| path.is_dir()) {
            return Err(Failure::new(format!(
                "`{}` is a folder; the record of the run needs this name",
                record.display()
            ))
            .hint("remove that folder, or choose another --save folder")
            .into());
        }
        // Two spellings may name the same folder.
        let is_one = matches!(&resolved[..], [save, model] if save == model);
        Ok(Self {
            run: save.map(Path::to_path_buf),
            model: if is_one { output.save.clone() } else { model },
            is_forced: output.force,
            model_flag,
            locks: Vec::new(),
        })
    }

    /// The model's folder, for commands that always write a model.
    ///
    /// # Errors
    /// Fails where no model is written.
    pub(in crate::job) fn model_folder(&self) -> Result<&Path> {
        self.model.as_deref().context("the output has a folder")
    }

    /// The folder of an unfinished run's state; `None` without a model, since finished layers are then not kept.
    pub(in crate::job) fn state(&self) -> Option<&Path> {
        let model = self.model.as_deref()?;
        Some(self.run.as_deref().unwrap_or(model))
    }

    /// Keeps other processes out until this is dropped.
    pub(in crate::job) fn lock(&mut self, events: &dyn Events) -> Result<()> {
        // The model's folder too: another run may name it with --save-model.
        let model = self.model.clone();
        let model = model.filter(|model| self.run.as_ref() != Some(model));
        for folder in self.run.clone().into_iter().chain(model) {
            let place = folder.display().to_string();
            let end = events.when_lock_lost();
            let lock = FolderLock::take(&folder, events, move |why| end(&place, &why))?;
            self.locks.push(lock);
        }
        Ok(())
    }

    /// From now on the model files of this folder may be replaced, as with `--force`: a training that diverged wrote them, and it resumes.
    pub(in crate::job) fn replace_model(&mut self) {
        self.is_forced = true;
    }

    /// Checks that no result would be overwritten, and returns the state of an unfinished run. If its record exists too, only the last
    /// step of that run is missing ([`RunFolder::record_of_the_last_step`]).
    ///
    /// # Errors
    /// Fails when the run folder holds a finished run or the model folder holds files that no unfinished run explains, unless
    /// forced; and when the state of an unfinished run cannot be read, or cannot be continued without a model.
    pub(in crate::job) fn look(&self) -> Result<Option<RunState>> {
        let is_finished = self.run.as_ref().is_some_and(|run| run.join(MANIFEST).exists());
        if is_finished && self.is_forced {
            return self.refuse_to_part().map(|()| None);
        }
        let Some(folder) = self.state() else {
            if let Some(run) = self.run.as_ref().filter(|run| StateFile::path(run).exists()) {
                let refusal = format!("`{}` holds an unfinished run", run.display());
                let hint = "choose another --save folder, or finish that run first";
                return Err(Failure::new(refusal).hint(hint).into());
            }
            return match is_finished {
                true => Err(self.is_finished()),
                false => self.refuse_results().map(|()| None),
            };
        };
        match StateFile::read(folder) {
            Ok(None) if is_finished => Err(self.is_finished()),
            Ok(None) => {
                self.refuse_results()?;
                self.refuse_files(true).map(|()| None)
            }
            Err(_) if self.is_forced => Ok(None),
            state => state,
        }
    }

    /// Refuses to replace the record of a run whose model would stay: the new record would not describe it.
    fn refuse_to_part(&self) -> Result<()> {
        let Some(run) = self.run.as_ref().filter(|_| self.model.is_none()) else {
            return Ok(());
        };
        let model = run.join(MODEL);
        if !model.join(CONFIG_FILE).exists() {
            return Ok(());
        }
        Err(Failure::new(format!(
            "`{}` holds a finished run and its model, and this one writes no model",
            run.display()
        ))
        .detail(format!(
            "--force would leave `{}` beside a record that is not its own",
            model.display()
        ))
        .hint("choose another --save folder, or remove that one first")
        .into())
    }

    fn is_finished(&self) -> anyhow::Error {
        let run = self.run.as_deref().unwrap_or(Path::new("."));
        Failure::new(format!("`{}` holds a finished run", run.display()))
            .hint("choose another --save folder, or replace it with --force")
            .into()
    }

    /// Names of the files in the run folder that a new run removes, besides the record.
    fn results() -> Vec<String> {
        let logs = METHODS.iter().map(|method| report::log::file_name(method.name()));
        let others = [memory_log::FILE, MASKS_FILE, state::TRAINING_FILE].map(String::from);
        logs.chain(others).collect()
    }

    /// Refuses, unless forced, a run folder with results that have no record, as the Python original leaves them.
    fn refuse_results(&self) -> Result<()> {
        let Some(run) = self.run.as_ref().filter(|_| !self.is_forced) else {
            return Ok(());
        };
        let results = Self::results();
        let mut files = files_in(run)?;
        files.retain(|name| results.contains(name));
        if files.is_empty() {
            return Ok(());
        }
        Err(Failure::new(format!(
            "`{}` holds results of another run: {}",
            run.display(),
            files.join(", ")
        ))
        .hint("choose another --save folder, or replace these files with --force")
        .into())
    }

    /// Refuses a model folder with files in it, unless forced. With `partials`, partial files count too: they belong to a run whose
    /// state is elsewhere.
    pub(in crate::job) fn refuse_files(&self, partials: bool) -> Result<()> {
        let Some(model) = self.model.as_ref().filter(|_| !self.is_forced) else {
            return Ok(());
        };
        let is_ours = |name: &str| {
            name.starts_with(lock::FILE)
                || is_temporary(name)
                || [state::FILE, state::TRAINING_FILE, memory_log::FILE, NARROWER].contains(&name)
                || (!partials && name.ends_with(PARTIAL_SUFFIX))
        };
        let files = files_in(model)?;
        // A list of hashes that never got its name: a run was killed while it published this folder, so a run wrote all of it.
        let is_list = |name: &String| is_temporary(name) && name[1..].starts_with(SUMS_FILE);
        let has_config = files.iter().any(|name| name == CONFIG_FILE);
        if !has_config && files.iter().any(is_list) {
            return Ok(());
        }
        match files.iter().find(|name| !is_ours(name)) {
            Some(other) => Err(Failure::new(format!(
                "the model folder `{}` is not empty: it holds `{other}`",
                model.display()
            ))
            .hint(format!(
                "choose another {} folder, or replace its model files with --force",
                self.model_flag
            ))
            .into()),
            None => Ok(()),
        }
    }

    /// The record of a run that was cut off when only its state was left to remove, with the gate of this command; removes the state.
    /// `None` where the model does not match the record: then the run continues from the state.
    pub(in crate::job) fn record_of_the_last_step(
        &self,
        evaluation: &EvaluationSettings,
    ) -> Result<Option<Manifest>> {
        let (Some(run), Some(folder)) = (&self.run, self.state()) else {
            return Ok(None);
        };
        let path = run.join(MANIFEST);
        if !path.exists() {
            return Ok(None);
        }
        let reading = || format!("reading `{}`", path.display());
        let text = read_whole(&path, LARGEST_RECORD).with_context(reading)?;
        let mut manifest: Manifest = serde_json::from_slice(&text).with_context(reading)?;
        if !self.has_the_model_of(&manifest) {
            return Ok(None);
        }
        let gate = GateReport::of(evaluation.max_perplexity, manifest.perplexity.pruned);
        let limits = evaluation.limits(&manifest.perplexity, manifest.tasks.as_ref());
        if manifest.gate != gate || manifest.limits != limits {
            (manifest.gate, manifest.limits) = (gate, limits);
            self.record(&manifest)?;
        }
        let recovery = manifest.recovery.as_ref();
        if recovery.is_some_and(|recovery| recovery.divergence.is_some()) {
            // A run with a changed learning rate may continue from the state.
            return Ok(Some(manifest));
        }
        remove(folder.join(state::TRAINING_FILE))?;
        remove(StateFile::path(folder))?;
        Ok(Some(manifest))
    }

    /// Returns true if the model of a record is complete: its configuration, which is written last, and weight files of their lengths.
    fn has_the_model_of(&self, manifest: &Manifest) -> bool {
        let (Some(model), Some(output)) = (&self.model, &manifest.output) else {
            return false;
        };
        let has = |file: &VerifiedFile| {
            let metadata = std::fs::metadata(model.join(&file.file));
            metadata.is_ok_and(|metadata| metadata.len() == file.bytes)
        };
        model.join(CONFIG_FILE).is_file() && output.verification.files.iter().all(has)
    }

    /// Makes room for a new run: with `--force`, the old run's files go, its record and `config.json` first, so that what is left never
    /// looks finished. Files that are no part of a checkpoint stay.
    pub(in crate::job) fn prepare(&self) -> Result<()> {
        if let Some(folder) = self.state() {
            remove(StateFile::path(folder))?;
        }
        self.make_room(&[])
    }

    /// Makes room for the files of an unfinished run that are made anew. Its state stays, and a training that was saved: they are all
    /// that is left of its work.
    pub(in crate::job) fn prepare_again(&self) -> Result<()> {
        self.make_room(&[state::TRAINING_FILE])
    }

    /// Removes the files of an earlier run, except the files `kept`.
    fn make_room(&self, kept: &[&str]) -> Result<()> {
        if let Some(run) = &self.run {
            std::fs::create_dir_all(run)
                .with_context(|| format!("creating the run folder `{}`", run.display()))?;
            remove(run.join(MANIFEST))?;
            sync(run)?;
        }
        if let (Some(model), true) = (&self.model, self.is_forced)
            && model.is_dir()
        {
            remove(model.join(CONFIG_FILE))?;
            sync(model)?;
            for name in files_in(model)?.iter().filter(|name| is_model_file(name)) {
                remove(model.join(name))?;
            }
        }
        if let Some(run) = &self.run {
            remove(run.join(format!("{MASKS_FILE}{PARTIAL_SUFFIX}")))?;
            for name in Self::results() {
                if !kept.contains(&&*name) {
                    remove(run.join(name))?;
                }
            }
        }
        self.tidy()
    }

    /// Bytes of the model files that make room for a new run's.
    pub(in crate::job) fn replaced_bytes(&self) -> ByteSize {
        let Some(model) = &self.model else {
            return ByteSize::ZERO;
        };
        let names = files_in(model).unwrap_or_default();
        let goes = |name: &&String| {
            is_model_file(name) && (self.is_forced || name.ends_with(PARTIAL_SUFFIX))
        };
        let bytes = |name: &String| {
            let metadata = std::fs::metadata(model.join(name));
            ByteSize(metadata.map_or(0, |metadata| metadata.len()))
        };
        names.iter().filter(goes).map(bytes).sum()
    }

    /// Checks that the disk has room for a model of so many bytes.
    ///
    /// # Errors
    /// Fails with the needed and the free bytes.
    pub(in crate::job) fn check_disk(&self, needed: ByteSize) -> Result<()> {
        let more = ByteSize(needed.0.saturating_sub(self.replaced_bytes().0));
        let model = self.model.iter().map(|model| (&**model, more, "the model"));
        disk_room::check(&model.collect::<Vec<_>>())
    }

    /// Removes what a process that was killed left of small files it was about to write.
    pub(in crate::job) fn tidy(&self) -> Result<()> {
        for folder in [&self.run, &self.model].into_iter().flatten() {
            for name in files_in(folder)?.iter().filter(|name| is_temporary(name)) {
                remove(folder.join(name))?;
            }
        }
        Ok(())
    }

    /// The folder of the matrices of `--drop-width`; `None` without a run folder.
    pub(in crate::job) fn narrower(&self) -> Option<PathBuf> {
        self.run.as_ref().map(|run| run.join(NARROWER))
    }

    /// The file of `--save-masks`.
    ///
    /// # Errors
    /// Fails with exit code 2 without a run folder, and when that is the model's folder.
    pub(in crate::job) fn masks(&self) -> Result<PathBuf> {
        let Some(run) = &self.run else {
            return Err(Failure::usage("--save-masks needs a run folder")
                .hint(format!("add --save DIR; the masks become DIR/{MASKS_FILE}"))
                .into());
        };
        if self.model.as_ref() == Some(run) {
            return Err(Failure::usage(format!(
                "--save-masks would put {MASKS_FILE} beside the model's weights"
            ))
            .hint("some programs load every .safetensors file of a folder; choose another --save-model folder")
            .into());
        }
        Ok(run.join(MASKS_FILE))
    }

    /// Writes manifest and log.
    pub(in crate::job) fn record(&self, manifest: &Manifest) -> Result<()> {
        let Some(run) = &self.run else { return Ok(()) };
        if let (Some(pruning), Some(text)) = (&manifest.pruning, report::log::text(manifest)) {
            write_atomic(&run.join(report::log::file_name(&pruning.method)), text.as_bytes())?;
        }
        write_atomic(&run.join(MANIFEST), &json_file(manifest)?)
    }

    /// The refusal of `--resume` without an unfinished run.
    pub(in crate::job) fn nothing_to_resume(&self) -> Failure {
        match self.state() {
            Some(folder) => Failure::new(format!(
                "--resume: there is no unfinished run in `{}`",
                folder.display()
            ))
            .hint("leave --resume out to begin one"),
            None => Failure::usage("--resume needs the folder of the model that is unfinished")
                .hint("add --save DIR, and leave --no-save-model out"),
        }
    }
}

fn remove(path: PathBuf) -> Result<()> {
    disk::remove(&path).with_context(|| format!("removing `{}`", path.display()))
}

fn sync(folder: &Path) -> Result<()> {
    disk::sync_folder(folder).with_context(|| format!("syncing `{}`", folder.display()))
}
