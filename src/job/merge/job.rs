//! A settled merge: recipe, models, tensors, plan. Nothing is written yet.

use super::memory::PassSize;
use super::resolved::ResolvedMerge;
use super::saliency::Saliency;
use crate::checkpoint::Layout;
use crate::job::folder::RunFolder;
use crate::job::same_run::RunIdentity;
use crate::merging::methods::MethodSettings;
use crate::ranks::Ranks;
use crate::run::Plan;
use crate::runtime::Clock;
use crate::settings::MergeSettings;

/// A merge that can begin.
pub(super) struct MergeJob {
    pub(super) settings: MergeSettings,
    /// The recipe with its models, and every tensor.
    pub(super) merge: ResolvedMerge,
    pub(super) method_settings: MethodSettings,
    pub(super) layout: Layout,
    pub(super) folder: RunFolder,
    pub(super) size: PassSize,
    pub(super) plan: Plan,
    pub(super) threads: usize,
    /// Activation statistics; `None` for a merge without.
    pub(super) saliency: Option<Saliency>,
    pub(super) identity: RunIdentity,
    pub(super) clock: Clock,
    pub(super) started_unix_seconds: u64,
    /// The ranks that share its tensors.
    pub(super) ranks: Ranks,
}
