//! The main job: the editor that calibrates, prunes and writes a model layer by layer.
//!
//! | file | story |
//! | --- | --- |
//! | `permute` | a new order of an MLP's channels before it is pruned |
//! | `prune` | the editor: calibrate, score, mask, write, propagate |
//! | `activations` | an editor that changes nothing: it measures the inputs of linears |
//! | `allocation` | ratios of layers from measurements of the layers |
//! | `allocate`, `trial` | the editors that take these measurements, and change nothing |
//! | `calibrate` | the calibration samples and their statistics |
//! | `joined` | the observations of several ranks, put together |
//! | `flow` | the way of the samples through a layer |
//! | `output` | the receivers of a pruned layer: files, masks, the journal of finished layers |
//! | `output_error` | the difference between the outputs of a matrix before and after pruning |
//! | `targets` | the ratio of every matrix, resolved before anything runs |
//! | `layer_ratios` | ratios per layer, from a file |
//! | `expected` | masks, tensors and zeros of finished layers, for verification |
//! | `shared` | several editors that share the statistics of a sweep |
//! | `solve` | the pruning of a matrix whose rows the ranks share |
//! | `save_masks` | masks into a file, as they come |
//! | `layer_drop`, `layer_scores` | scores of whole layers, and the pass that measures them |
//! | `width_drop` | the editor that makes layers narrower |
//! | `workload` | a run in numbers, for the planner |

pub mod activations;
pub mod allocate;
pub mod allocation;
pub mod calibrate;
pub mod expected;
pub mod flow;
mod joined;
pub mod layer_drop;
pub mod layer_ratios;
pub mod layer_scores;
pub mod output;
mod output_error;
pub mod permute;
#[cfg(test)]
mod plan_tests;
pub mod prune;
pub mod save_masks;
pub mod shared;
mod solve;
pub mod targets;
pub mod trial;
pub mod width_drop;
pub mod workload;

pub use calibrate::{Calibrator, LayerStatistics, embed};
pub use expected::check_verification;
pub use flow::{Flow, ObservationOrder, Propagation};
pub use layer_ratios::LayerRatios;
pub use output::{LayerJournal, MaskObserver, Output, PrunedMatrix};
pub use prune::Pruner;
pub use save_masks::SaveMasks;
pub use shared::{SharedPruning, SharingCell};
pub use targets::{Selection, TargetPlan};
pub use workload::{
    AgainstShape, Observed, RanksShape, RunShape, TaskShape, TeacherShape, TrainingShape,
};
