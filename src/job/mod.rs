//! A run, from settings to record. Each command's work is one function here; it speaks through events and prints nothing.
//!
//! | file | story |
//! | --- | --- |
//! | `run` | the story of a run: settle → outputs → streams → work → finish → record |
//! | `prune` | `prune`: the sweep that prunes |
//! | `eval` | `prune eval`: a run without outputs and editor |
//! | `against` | `prune eval --against`: the dense model that passes the windows first |
//! | `eval_state` | an evaluation between two layers, from which a later process continues |
//! | `final_states` | the dense model's final states in a file, which the cells of a sweep compare with |
//! | `grid` | `prune sweep`: a run for every cell of a grid, and the table |
//! | `recover` | `prune recover`: the training, and the sweep that writes what was trained |
//! | `merge` | `prune merge`: settle → outputs → pass → finish → record |
//! | `generate`, `inspect`, `plan`, `demo`, `quantize`, `pack`, `unpack` | the other commands |
//! | `demo_packing` | the end of `demo`: files and decoding with and without zeros |
//! | `settle` | everything that can be wrong is checked, and nothing is written |
//! | `members` | a run of several ranks: the first rank settles and writes, the others sweep with it |
//! | `settled_run`, `pass` | what a settled run has; a pass that only measures |
//! | `inputs` | results of other runs, and the sweep that a run shares with them |
//! | `opened`, `located` | the checkpoint, from a folder or the hub |
//! | `task_log` | `--log-samples`: the log-likelihoods of choices, as JSON lines |
//! | `texts` | texts found, then turned into token ids |
//! | `planned`, `machine` | threads, GPUs and memory; the three stages of planning |
//! | `outputs`, `same_run` | files created, or reopened from an unfinished run; the comparison of two runs |
//! | `tensor_files` | files whose tensors are finished in any order, of a merge, a quantisation and a packing |
//! | `pack_plan`, `original_files` | the pieces of a packing that fit into the memory; the files that it keeps beside the weights |
//! | `conversion` | the output folder of `quantize`, `pack` and `unpack` |
//! | `unused_flags` | warnings of flags that a run was given and does not read |
//! | `disk_room` | the check that disks have room for the files of a run |
//! | `folder` | the run folder: refusals, lock, state of an unfinished run, memory log |
//! | `streams` | samples and windows, and the sweep they pass |
//! | `layer_drop`, `width_drop`, `target_size` | the passes that make a smaller model the source of the run, and the size that it has to meet |
//! | `earlier_pruning` | the record of the pruning that made a model |
//! | `published` | the files beside the weights that strangers read: `pruning.json` and the model card |
//! | `device_records`, `model_report` | facts that records and comparisons of runs share |
//! | `rank_reports` | time, memory and communication of all ranks |
//! | `record`, `profile`, `recorder` | `run.json`, the profile in it, the warnings of a run |
//! | `interruption` | messages for a run that ends early |
//! | `allocate` | the pass that decides the ratios of layers: samples through the dense model, before anything is pruned |
//! | `plan_recover` | `prune plan --recover`: the memory of trainings, from headers or published shapes alone |
//! | `plan_ranks` | `prune plan --ranks`: time, bytes sent and memory on several ranks |
//! | `plan_generate` | `prune plan --generate`: the memory of text generation for each form of the weights |
//! | `planned_texts` | texts and plan of a run: what a text needs is known when its tokenizer is, so both are made together |
//! | `weight_choice` | the form in which the matrices of a generating or evaluated model are in memory |
//! | `zeros_gain` | the gain of a model's zeros on this machine, measured |
//! | `resolved` | the pruning part of a run: method, way of the samples and targets, resolved against the model |

mod against;
mod allocate;
mod conversion;
pub mod demo;
mod demo_packing;
mod device_records;
mod disk_room;
mod earlier_pruning;
mod eval;
mod eval_state;
mod final_states;
pub mod folder;
pub mod generate;
pub mod grid;
mod inputs;
pub mod inspect;
mod interruption;
mod layer_drop;
mod located;
pub mod machine;
mod members;
mod merge;
mod model_report;
mod opened;
mod original_files;
mod outputs;
mod pack;
mod pack_plan;
mod pass;
pub mod plan;
pub mod plan_generate;
pub mod plan_ranks;
pub mod plan_recover;
mod planned;
mod planned_texts;
mod profile;
mod prune;
mod published;
mod quantize;
mod rank_reports;
mod record;
mod recorder;
pub mod recover;
mod resolved;
mod run;
mod same_run;
mod settle;
mod settled_run;
mod streams;
mod target_size;
mod task_log;
mod tensor_files;
mod texts;
mod unpack;
mod unused_flags;
mod weight_choice;
mod width_drop;
mod zeros_gain;

pub use generate::generate;
pub use inspect::inspect;
pub use merge::{merge, merge_on, peft_methods};
pub use pack::pack;
pub use plan::plan;
pub use quantize::quantize;
pub use run::{eval, eval_on, prune, prune_on, recover, recover_given, recover_on};
pub use unpack::unpack;
