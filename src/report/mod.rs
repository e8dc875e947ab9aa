//! From manifests to something a person or another program reads. Sees no tensor.
//!
//! | file | what it makes |
//! | --- | --- |
//! | `table`, `log`, `memory_log` | the table at the end of a run, and the original's files |
//! | `profile` | the table of `--profile` |
//! | `inspection` | the table of `prune inspect` |
//! | `page` | the page of `prune report`, from one or several runs |
//! | `comparison` | which runs may share a chart |
//! | `plots/` | pictures as SVG |
//! | `settings`, `html`, `date` | tables, escaped text, moments |

pub mod comparison;
mod date;
pub mod demo_table;
mod html;
pub mod inspection;
pub mod log;
#[cfg(test)]
pub(crate) mod made_up;
pub mod memory_log;
pub mod page;
pub mod plan;
pub mod plots;
pub mod profile;
mod settings;
pub mod table;
