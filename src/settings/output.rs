//! Settings of the files that a run writes.

use std::path::PathBuf;

use serde::Serialize;

use crate::run::verification::VerifyLevel;

/// Output flags.
#[derive(Debug, Clone, Default, Serialize)]
pub struct OutputSettings {
    /// `--save`: the run folder.
    pub save: Option<PathBuf>,
    /// `--save-model`: the model's folder; `None` for `model` in the run folder.
    pub save_model: Option<PathBuf>,
    /// `--no-save-model`.
    pub no_save_model: bool,
    /// `--no-model-card`.
    pub no_model_card: bool,
    /// `--save-masks`.
    pub save_masks: bool,
    /// `--force`: replace a finished run.
    pub force: bool,
    /// `--resume`: fail where there is nothing to resume.
    pub resume: bool,
    /// `--log-memory`.
    pub log_memory: bool,
    /// `--profile`: measure the peak of the CPU as well.
    pub profile: bool,
    /// `--verify`.
    pub verify: VerifyLevel,
}
