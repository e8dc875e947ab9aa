//! Settings of `prune plan`.

use std::path::PathBuf;

use super::run::Settings;
use crate::placement::Rate;

/// Settings of `prune plan`.
#[derive(Debug, Clone)]
pub struct PlanSettings {
    /// The models to plan for.
    pub subject: PlanSubject,
    /// The run to plan.
    pub run: Settings,
    /// `--inventory`: a file that describes the machine to plan for; `None` for this machine.
    pub inventory: Option<PathBuf>,
    /// `--rank` of the factors of trainings; the default of `prune recover` if absent.
    pub rank: Option<usize>,
    /// `--sparsity-ratio` of a generating model; `None` for the zeros of the checkpoint.
    pub zeros: Option<f64>,
    /// `--batch-size` of trainings; the default of `prune recover` if absent.
    pub batch_size: Option<usize>,
}

/// The ranks of `prune plan --ranks`, each on a machine of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankSettings {
    /// `--ranks`: the most ranks.
    pub ranks: usize,
    /// `--network`: the bytes that a rank sends per second.
    pub network: Rate,
    /// `--storage`: the bytes per second of the storage that all ranks share; the rate of the machine's disk if absent.
    pub storage: Option<Rate>,
}

/// Models of `prune plan`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanSubject {
    /// The checkpoint of the settings.
    Model,
    /// A published shape by its name.
    Shape(String),
    /// All published shapes.
    Table,
}
