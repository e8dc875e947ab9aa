//! The ties of a run to other runs: their results, and the sweep that it shares with them.

use std::sync::Arc;

use super::recover::GivenTraining;
use super::settled_run::SettledRun;
use crate::pipeline::RanksShape;
use crate::pruning::Technique;
use crate::ranks::Ranks;
use crate::run::Manifest;
use crate::runtime::blocks::SampleBlocks;

/// Requests and results of other runs that a run is settled with.
#[derive(Default)]
pub(super) struct RunInputs<'a> {
    /// The record of a run that has measured the dense perplexity. It is used where this run would measure the same.
    pub(super) dense: Option<&'a Manifest>,
    /// Data of a training, in place of the data that texts and seeds give.
    pub(super) training: Arc<GivenTraining>,
    /// The runs that share its sweep.
    pub(super) sharing: Sharing<'a>,
    /// The ranks that share its samples and windows.
    pub(super) ranks: Ranks,
}

/// The place of a run among the runs that share a sweep.
#[derive(Default)]
pub(super) enum Sharing<'a> {
    /// It has the sweep alone.
    #[default]
    Alone,
    /// It is the first run; the runs after it have these techniques. Texts and plan are made for all.
    First(Vec<Technique>),
    /// It takes texts and plan of the first run.
    Next(&'a SettledRun),
}

impl RunInputs<'_> {
    /// The most samples that a rank has of this many, or windows.
    pub(super) fn samples_here(&self, samples: usize) -> usize {
        SampleBlocks::new(samples).most_of(self.ranks.size())
    }

    /// The samples and windows of all ranks, for a plan; `None` for a run of a single process.
    pub(super) fn of_all_ranks(&self, samples: usize, windows: usize) -> Option<RanksShape> {
        let ranks = self.ranks.size();
        (!self.ranks.is_alone()).then_some(RanksShape { ranks, samples, windows, reading: 1.0 })
    }

    /// The techniques of the runs after the first in the sweep. Only the first run knows them.
    pub(super) fn shared_with(&self) -> Vec<Technique> {
        match &self.sharing {
            Sharing::First(others) => others.clone(),
            Sharing::Alone | Sharing::Next(_) => Vec::new(),
        }
    }

    /// The number of runs in the sweep.
    pub(super) fn runs_at_once(&self) -> usize {
        match &self.sharing {
            Sharing::Alone => 1,
            Sharing::First(others) => 1 + others.len(),
            Sharing::Next(first) => first.pruning().map_or(1, |pruning| pruning.runs_at_once),
        }
    }
}
