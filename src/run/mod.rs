//! A run as plain records: its events, its plan, its state on disk, and its manifest.
//!
//! Nothing here computes or prints. Any room may use these records.
//!
//! | file | content |
//! | --- | --- |
//! | `allocation` | the record of an allocation: what was measured of the layers, and the ratios it led to |
//! | `command_line` | command lines in messages, quoted so that a shell reads them back |
//! | `divergence` | the divergence of a model from the dense model |
//! | `events` | what library code emits instead of printing |
//! | `fallback` | records of units of work that a device had no memory for |
//! | `gate` | limits of measured values, and their outcomes |
//! | `generation` | the text that a model wrote, as a plain record: the object of `prune generate --json` |
//! | `grid` | records of a sweep: a grid of pruning runs in a folder |
//! | `inspection` | the findings of `prune inspect` |
//! | `layer_drop` | the record of dropped layers: scores, choice, and sizes before and after |
//! | `manifest` | `run.json`: everything needed to trust, repeat or compare a run |
//! | `measured` | parts of several records: a text, a perplexity, a phase, a process |
//! | `memory_settings` | settings that trade memory for time |
//! | `merging` | records of a merge: what was counted in each tensor |
//! | `metric` | measured values of a model by name, for tables and charts |
//! | `meter` | progress of copies, downloads and scans: bytes go in, events with whole MiB come out |
//! | `packing` | the results of `prune pack` and `prune unpack`, as plain records: the objects of `--json` |
//! | `phase` | the phases of a run: the clock measures them, the plan predicts their memory, the profile adds up their times |
//! | `plan` | the predicted memory and time of a run |
//! | `profile` | the profile of a run on the CPU: time per part of the work, and speed relative to the CPU's peak |
//! | `pruning_record` | `pruning.json`: the record of a pruning run that is published with its model |
//! | `quantization` | the result of `prune quantize`, as a plain record: the object of `--json` |
//! | `rank_report` | time, memory and communication of a rank of a run over several processes |
//! | `recovery` | the record of a recovery training: settings as resolved, losses, held-out measurements |
//! | `state` | `unfinished.json`: the finished work of a run that has not ended, so that a later process can continue it |
//! | `tasks` | accuracies of multiple-choice tasks |
//! | `verification` | the verification of a written model, as the record has it |
//! | `zeros_gain` | bytes and speed of a model without its zeros |
//! | `width_drop` | the record of dropped width: sizes before and after, and what was lost |

pub mod allocation;
pub mod command_line;
pub mod divergence;
pub mod events;
pub mod fallback;
pub mod gate;
pub mod generation;
pub mod grid;
pub mod inspection;
pub mod layer_drop;
pub mod manifest;
pub mod measured;
pub mod memory_settings;
pub mod merging;
mod meter;
pub mod metric;
pub mod packing;
pub mod phase;
pub mod plan;
pub mod profile;
pub mod pruning_record;
pub mod quantization;
pub mod rank_report;
pub mod recovery;
pub mod state;
pub mod tasks;
pub mod verification;
pub mod width_drop;
pub mod zeros_gain;

pub use allocation::AllocationReport;
pub use events::{Event, Events, Silent, Stopped, Unfinished};
pub use fallback::FallbackReport;
pub use generation::{DecodingSpeed, GenerationReport};
pub use inspection::Inspection;
pub use layer_drop::LayerDropReport;
pub use manifest::{Manifest, TextProtocol};
pub use memory_settings::{MemorySettings, WeightsHeld};
pub use meter::Meter;
pub use packing::{PackingReport, UnpackingReport};
pub use phase::{Moment, Phase};
pub use plan::{HiddenStatesStorage, Plan};
pub use pruning_record::PruningRecord;
pub use quantization::QuantizationReport;
pub use recovery::RecoveryReport;
pub use state::RunState;
pub use width_drop::WidthDropReport;
pub use zeros_gain::ZerosGain;
