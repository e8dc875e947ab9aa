//! Tables, files and pages made from manifests. Reads no tensor.
//!
//! | file | output |
//! | --- | --- |
//! | `task_table` | the rows of multiple-choice tasks |
//! | `table`, `log`, `memory_log` | the table at the end of a run, and the files of the Python original |
//! | `profile` | the table of `--profile` |
//! | `inspection` | the table of `prune inspect` |
//! | `quantization` | the result of `prune quantize` |
//! | `packing` | the results of `prune pack` and `prune unpack` |
//! | `card`, `front_matter` | the model card beside the weights, and the facts it takes over from the source's card |
//! | `card_tasks` | tasks in a model card |
//! | `cards` | the cards of pruned, merged, recovered and quantised models |
//! | `page` | the page of `prune report` for its runs |
//! | `grid` | the table of a sweep, and the parts of its page |
//! | `merges` | the parts of table and page that only merges have |
//! | `divergences` | the rows of a comparison with the dense model |
//! | `recoveries` | the parts of the table that only recovery trainings have |
//! | `comparison` | groups of runs that may share a chart |
//! | `costs` | bytes and speeds of the models of several runs |
//! | `settings`, `format` | tables; escaped text, durations, moments |
//! | `demo_table` | the result of `prune demo`, as records and as a table of at most 80 columns |
//! | `plan` | the table of a plan, printed before a run and by `prune plan` |
//! | `plots` | pictures as SVG text, a file per picture |
//! | `training_plan`, `generation_plan`, `rank_plan` | the tables of `prune plan --recover`, `--generate` and `--ranks` |

pub mod card;
mod card_tasks;
pub mod cards;
pub mod comparison;
pub mod costs;
pub mod demo_table;
mod divergences;
mod format;
pub mod front_matter;
pub mod generation_plan;
pub mod grid;
pub mod inspection;
pub mod log;
#[cfg(test)]
pub(crate) mod made_up;
pub mod memory_log;
mod merges;
pub mod packing;
pub mod page;
pub mod plan;
pub mod plots;
pub mod profile;
pub mod quantization;
pub mod rank_plan;
mod recoveries;
mod settings;
pub mod table;
mod task_table;
pub mod training_plan;

pub use format::{count, millions, three_digits, trimmed};
