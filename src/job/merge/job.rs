//! A settled merge: recipe, models, tensors, plan. Nothing is written yet.

use std::collections::BTreeMap;

use super::combined::CombinedJob;
use super::memory::PassSize;
use super::models::InputModels;
use super::published::Donor;
use super::saliency::Saliency;
use super::vocabulary::OutputVocabulary;
use crate::checkpoint::Layout;
use crate::job::folder::RunFolder;
use crate::merging::methods::{MergeMethod, MethodSettings};
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::Recipe;
use crate::run::{Manifest, Plan, RunState};
use crate::runtime::Clock;
use crate::settings::MergeSettings;

/// A merge that can begin.
pub(super) struct MergeJob {
    pub(super) settings: MergeSettings,
    pub(super) recipe: Recipe,
    pub(super) method: &'static dyn MergeMethod,
    pub(super) method_settings: MethodSettings,
    pub(super) inputs: InputModels,
    /// The combination of adapters, with `--semantics peft`.
    pub(super) combined: Option<CombinedJob>,
    pub(super) tensors: Vec<MergeTensor>,
    pub(super) left_out: Vec<String>,
    pub(super) num_hidden_layers: usize,
    pub(super) layout: Layout,
    /// The tokens and the tokenizer of the output.
    pub(super) vocabulary: OutputVocabulary,
    /// The model whose configuration the output gets.
    pub(super) donor: Donor,
    pub(super) folder: RunFolder,
    pub(super) size: PassSize,
    pub(super) plan: Plan,
    pub(super) threads: usize,
    /// Activation statistics; `None` for a merge without.
    pub(super) saliency: Option<Saliency>,
    /// Everything that decides the outcome, by name.
    pub(super) deciding: BTreeMap<String, String>,
    /// The state that an earlier process left of this run.
    pub(super) unfinished: Option<RunState>,
    pub(super) clock: Clock,
    pub(super) started_unix_seconds: u64,
}

/// The outcome of settling.
pub(super) enum SettledMerge {
    /// A merge that can begin.
    Job(Box<MergeJob>),
    /// The record of a run that had finished already.
    Finished(Box<Manifest>),
}
