//! The divergence of a model from the dense model: the final states of both meet at their heads, some rows at a time.
//!
//! ```text
//! dense sweep   states ──┐ (`Meeting`)
//! model sweep   states ──┴─ heads, rows of the vocabulary in turn ─ numbers of every position ─ `summary`
//! ```
//!
//! Both sweeps are one where a run prunes. Logits of both sides exist for a few hundred tokens at a time, and no logits are kept. The heads
//! are read in parts where memory is short.
//!
//! | file | content |
//! | --- | --- |
//! | `compare` | the pass of all windows through both heads |
//! | `position` | the numbers of a position, from logits in parts |
//! | `summary` | means, quantiles and errors over positions |

mod compare;
mod position;
mod summary;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::checkpoint::WeightSource;
use crate::model::ModelConfig;
use crate::run::divergence::{DivergenceReport, KlPositions};
use crate::run::manifest::PerplexityReport;
use crate::runtime::HiddenStates;

pub(super) use compare::{HeadPair, compare};

/// The head that the dense states pass.
#[derive(Clone)]
pub enum DenseHead {
    /// The head of the model that is compared: a run that prunes changes no head.
    Same,
    /// The head of a checkpoint.
    Of(Arc<dyn WeightSource>, Arc<ModelConfig>),
}

/// The part of a model in a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeetingRole {
    /// It is the dense model: its final states wait.
    Dense,
    /// It is compared with the dense model, whose states are there.
    Model,
}

/// The place where the final states of the dense model wait for the model.
pub struct Meeting {
    /// The positions that are compared.
    pub positions: KlPositions,
    head: DenseHead,
    state: Mutex<MeetingState>,
}

/// The states that wait, and the outcome.
#[derive(Default)]
struct MeetingState {
    dense: Option<HiddenStates>,
    perplexity: Option<PerplexityReport>,
    report: Option<DivergenceReport>,
}

impl Meeting {
    /// Nothing waits yet.
    pub fn new(positions: KlPositions, head: DenseHead) -> Arc<Self> {
        Arc::new(Self { positions, head, state: Mutex::default() })
    }

    /// The dense states wait already: an earlier run has made them, with the head of the model that is compared.
    pub fn with(positions: KlPositions, dense: HiddenStates) -> Arc<Self> {
        let meeting = Self::new(positions, DenseHead::Same);
        meeting.leave(dense);
        meeting
    }

    /// The divergence, after both sweeps.
    pub fn report(&self) -> Option<DivergenceReport> {
        self.state().report
    }

    /// The dense perplexity, after both sweeps.
    pub fn dense_perplexity(&self) -> Option<PerplexityReport> {
        self.state().perplexity
    }

    fn state(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn head(&self) -> &DenseHead {
        &self.head
    }

    /// Leaves the dense states.
    pub(super) fn leave(&self, hidden: HiddenStates) {
        self.state().dense = Some(hidden);
    }

    /// Takes the dense states.
    pub(super) fn take(&self) -> Option<HiddenStates> {
        self.state().dense.take()
    }

    pub(super) fn measured_dense(&self, report: PerplexityReport) {
        self.state().perplexity = Some(report);
    }

    pub(super) fn measured(&self, report: DivergenceReport) {
        self.state().report = Some(report);
    }
}
