//! The main job: the editor that calibrates, prunes and writes one layer at a time.
//!
//! | file | story |
//! | --- | --- |
//! | `prune` | the editor: calibrate, score, mask, write, propagate |
//! | `calibrate` | the calibration stream and its statistics |
//! | `output_error` | how far a pruned matrix's output is from the dense one's |
//! | `targets` | which matrices lose how much, resolved before anything runs |
//! | `layer_ratios` | ratios per layer, from a file |
//! | `expected` | masks, tensors and zeros of finished layers, for those who check them |
//! | `save_masks` | masks into a file, as they come |
//! | `workload` | a run in numbers, for the planner |

pub mod calibrate;
pub mod expected;
pub mod layer_ratios;
mod output_error;
#[cfg(test)]
mod plan_tests;
pub mod prune;
pub mod save_masks;
pub mod targets;
pub mod workload;

pub use calibrate::{CalibrationStream, LayerStatistics, embed};
pub use layer_ratios::LayerRatios;
pub use prune::{PrunedMatrix, Pruner, Record, SelectionTime, Watcher};
pub use save_masks::SaveMasks;
pub use targets::{Selection, TargetPlan};
pub use workload::RunShape;
