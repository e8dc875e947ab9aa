//! Multiple-choice tasks: questions from files, requests as token ids, packs of requests, and accuracies.
//!
//! ```text
//! files ─ rows ─ questions (after few-shot examples) ─ requests (token ids) ─ packs ─ the sweep (`eval`) ─ scores ─ accuracies
//! ```
//!
//! Texts, ids and metrics are as in lm-evaluation-harness 0.4.13 (EleutherAI). A task is a file of `kinds` and a line of the table.
//!
//! | file | content |
//! | --- | --- |
//! | `asked` | questions without their texts, and the samples that their requests become |
//! | `examples` | few-shot examples, drawn with CPython's generator |
//! | `kind` | a task as data, and a question |
//! | `kinds` | the tasks, a file each |
//! | `pack` | requests as samples of a sweep |
//! | `python_text` | Python's methods of texts |
//! | `request` | contexts and answers as token ids |
//! | `row` | typed access to the columns of a row |
//! | `score` | from log-likelihoods to accuracies |
//! | `source` | the files of tasks: rows read, examples drawn, questions made |
//! | `table` | the table of tasks, and their names on the command line |
//! | `tree` | requests that pass together, in a file |

mod asked;
mod examples;
mod kind;
mod kinds;
mod pack;
mod python_text;
mod request;
mod row;
mod score;
mod source;
mod table;
mod tree;

pub use asked::{AskedQuestion, AskedTask, PackShape, Prediction, RequestIds, TaskPack};
pub use kind::{Question, TaskKind};
pub use pack::{PackedTasks, TaskLayout};
pub use request::{ScoredRequest, TaskTokens};
pub use score::{RequestScore, reports};
pub use source::{HubSplit, TaskFiles, TaskQuestions, TaskRequest, find};
pub use table::{QuestionLimit, TASKS, TaskSpec, ZERO_SHOT};
