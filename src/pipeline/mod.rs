//! The main job: the editor that calibrates, prunes and writes one layer at a time.
//!
//! | file | story |
//! | --- | --- |
//! | `prune` | the editor: calibrate, score, mask, write, propagate |
//! | `calibrate` | the calibration stream and its statistics |
//! | `output_error` | how far a pruned matrix's output is from the dense one's |
//! | `targets` | which matrices lose how much, resolved before anything runs |
//! | `layer_ratios` | ratios per layer, from a file |
//! | `resume` | the state of a run on the disk, and what of it still stands |
//! | `save_masks` | masks into a file, as they come |
//! | `workload` | a run in numbers, for the planner |

pub mod calibrate;
pub mod layer_ratios;
mod output_error;
#[cfg(test)]
mod plan_tests;
pub mod prune;
pub mod resume;
pub mod save_masks;
pub mod targets;
pub mod workload;

pub use calibrate::{CalibrationStream, LayerStatistics, embed};
pub use layer_ratios::LayerRatios;
pub use prune::{PrunedMatrix, Pruner, Record, SelectionTime, Watcher};
pub use resume::StateFile;
pub use save_masks::SaveMasks;
pub use targets::{Selection, TargetPlan};
pub use workload::RunShape;
