//! The run folder: what may be written where, and what is refused.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::checkpoint::{
    MASKS_FILE, PARTIAL_SUFFIX, is_model_file, refuse_source_folder, write_atomic,
};
use crate::failure::Failure;
use crate::pruning::METHODS;
use crate::report;
use crate::run::Manifest;

/// Where a run leaves its results.
#[derive(Debug, Clone)]
pub(super) struct RunFolder {
    /// `--save`: manifest and log.
    pub(super) run: Option<PathBuf>,
    /// The model's folder; `None` when no model is written.
    pub(super) model: Option<PathBuf>,
    is_forced: bool,
}

/// The record of a finished run in its folder.
pub(super) const MANIFEST: &str = "run.json";

impl RunFolder {
    /// Checks that nothing of value would be overwritten. Writes nothing.
    ///
    /// # Errors
    /// Fails when the run folder holds a finished run or the model folder holds files, unless forced; and, forced or not, when
    /// either is a file or lies in the `source` folder, whose files would otherwise be replaced.
    pub(super) fn check(
        source: &Path,
        save: Option<&Path>,
        save_model: Option<&Path>,
        writes_model: bool,
        is_forced: bool,
    ) -> Result<Self> {
        let model = writes_model
            .then(|| {
                save_model
                    .map(Path::to_path_buf)
                    .or_else(|| save.map(|save| save.join("model")))
            })
            .flatten();
        for folder in [save, model.as_deref()].into_iter().flatten() {
            let nearest = folder.ancestors().find(|path| path.exists());
            if let Some(file) = nearest.filter(|path| !path.is_dir()) {
                return Err(Failure::new(format!(
                    "`{}` is a file; results go into a folder",
                    file.display()
                ))
                .hint("choose another --save or --save-model folder")
                .into());
            }
            refuse_source_folder(source, folder)?;
        }
        if let Some(run) = save
            && run.join(MANIFEST).exists()
            && !is_forced
        {
            return Err(
                Failure::new(format!("`{}` holds a finished run", run.display()))
                    .hint("choose another --save folder, or replace it with --force")
                    .into(),
            );
        }
        if let Some(model) = &model {
            let files = files_in(model)?;
            if let Some(other) = files
                .iter()
                .find(|name| !name.ends_with(PARTIAL_SUFFIX))
                .filter(|_| !is_forced)
            {
                return Err(Failure::new(format!("the model folder `{}` is not empty: it holds `{other}`", model.display()))
                    .hint("choose another --save or --save-model folder, or replace its model files with --force")
                    .into());
            }
        }
        Ok(Self {
            run: save.map(Path::to_path_buf),
            model,
            is_forced,
        })
    }

    /// Makes room: with `--force`, the old run's files go, `config.json` first, so that what is left never looks finished.
    /// Files that are no part of a checkpoint stay.
    ///
    /// # Errors
    /// Fails when a folder cannot be made or a file not be removed.
    pub(super) fn prepare(&self) -> Result<()> {
        let remove = |path: PathBuf| match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("removing `{}`", path.display()))
            }
            _ => Ok(()),
        };
        if let (Some(model), true) = (&self.model, self.is_forced) {
            remove(model.join("config.json"))?;
            for name in files_in(model)?.iter().filter(|name| is_model_file(name)) {
                remove(model.join(name))?;
            }
        }
        if let Some(run) = &self.run {
            std::fs::create_dir_all(run)
                .with_context(|| format!("creating the run folder `{}`", run.display()))?;
            remove(run.join(MANIFEST))?;
            remove(run.join(super::memory_log::FILE))?;
            remove(run.join(MASKS_FILE))?;
            remove(run.join(format!("{MASKS_FILE}{PARTIAL_SUFFIX}")))?;
            for method in METHODS {
                remove(run.join(report::log::file_name(method.name())))?;
            }
        }
        Ok(())
    }

    /// What a run that ends before its time leaves behind, in words.
    pub(super) fn unfinished(&self, masks: Option<&Path>) -> Option<String> {
        let masks = masks.and_then(Path::parent);
        let mut folders: Vec<&Path> = self.model.as_deref().into_iter().chain(masks).collect();
        folders.dedup();
        let folders: Vec<String> = folders
            .iter()
            .map(|folder| format!("`{}`", folder.display()))
            .collect();
        (!folders.is_empty()).then(|| {
            format!(
                "unfinished files stay in {} (*.partial); the same command replaces them",
                folders.join(" and ")
            )
        })
    }

    /// Where `--save-masks` puts the masks.
    ///
    /// # Errors
    /// Fails with exit code 2 without a run folder, and when that is the model's folder.
    pub(super) fn masks(&self) -> Result<PathBuf> {
        let Some(run) = &self.run else {
            return Err(Failure::usage("--save-masks needs a run folder")
                .hint(format!("add --save DIR; the masks become DIR/{MASKS_FILE}"))
                .into());
        };
        let absolute = |path: &Path| {
            std::path::absolute(path).map(|path| path.components().as_path().to_path_buf())
        };
        if let Some(model) = &self.model
            && absolute(model).ok() == absolute(run).ok()
        {
            return Err(Failure::usage(format!(
                "--save-masks would put {MASKS_FILE} beside the model's weights"
            ))
            .hint("some programs load every .safetensors file of a folder; choose another --save-model folder")
            .into());
        }
        Ok(run.join(MASKS_FILE))
    }

    /// Writes manifest and log.
    ///
    /// # Errors
    /// Fails when a file cannot be written.
    pub(super) fn record(&self, manifest: &Manifest) -> Result<()> {
        let Some(run) = &self.run else { return Ok(()) };
        if let (Some(pruning), Some(text)) = (&manifest.pruning, report::log::text(manifest)) {
            write_atomic(
                &run.join(report::log::file_name(&pruning.method)),
                text.as_bytes(),
            )?;
        }
        let mut json =
            serde_json::to_vec_pretty(manifest).context("writing the manifest as JSON")?;
        json.push(b'\n');
        write_atomic(&run.join(MANIFEST), &json)
    }
}

fn files_in(folder: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("listing `{}`", folder.display())),
    };
    let names: std::io::Result<Vec<String>> = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect();
    let mut names = names.with_context(|| format!("listing `{}`", folder.display()))?;
    names.sort();
    Ok(names)
}
