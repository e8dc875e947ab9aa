//! Settings of multiple-choice tasks.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::deciding::not_deciding;
use super::values::share;
use crate::tasks::{QuestionLimit, TASKS, TaskSpec, ZERO_SHOT};

/// Task flags.
#[derive(Debug, Clone, Args, Serialize)]
#[command(next_help_heading = "Evaluation")]
pub struct TaskSettings {
    /// Multiple-choice tasks, as in lm-evaluation-harness
    ///
    /// Of boolq, rte, hellaswag, winogrande, arc_easy, arc_challenge, openbookqa, piqa and mmlu; or NAME=FILE, JSON lines of your own with
    /// `context`, `choices` and `label` (from 0). Texts, few-shot examples and metrics are as in version 0.4.13.
    #[arg(long, value_name = "TASKS", value_delimiter = ',')]
    #[serde(serialize_with = "not_deciding")]
    pub tasks: Vec<TaskSpec>,

    /// Folder of the tasks' files: a folder per task, with parquet or JSON lines per split [default: download them from the hub]
    #[arg(hide_short_help = true, long, value_name = "DIR")]
    #[serde(serialize_with = "not_deciding")]
    pub tasks_from: Option<PathBuf>,

    /// The seven tasks of the Python original: boolq, rte, hellaswag, winogrande, arc_easy, arc_challenge, openbookqa
    #[arg(hide_short_help = true, long)]
    #[serde(serialize_with = "not_deciding")]
    pub eval_zero_shot: bool,

    /// Examples before each question
    #[arg(hide_short_help = true, long, value_name = "N", default_value_t = 0)]
    #[serde(serialize_with = "not_deciding")]
    pub num_fewshot: usize,

    /// Only the first N questions of each task; below 1 a share of them
    #[arg(hide_short_help = true, long, value_name = "N")]
    #[serde(serialize_with = "not_deciding")]
    pub limit: Option<QuestionLimit>,

    /// Begin every question with the token of a beginning, or with none [default: as the tokenizer does]
    #[arg(hide_short_help = true, long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    #[serde(serialize_with = "not_deciding")]
    pub add_bos: Option<bool>,

    /// Gate: exit with code 4 where the mean accuracy of the tasks is below X, from 0 to 1
    #[arg(hide_short_help = true, long, value_name = "X", value_parser = share)]
    #[serde(serialize_with = "not_deciding")]
    pub min_accuracy: Option<f64>,

    /// File for the log-likelihood of every choice, a JSON line per question
    #[arg(hide_short_help = true, long, value_name = "FILE")]
    #[serde(serialize_with = "not_deciding")]
    pub log_samples: Option<PathBuf>,
}

impl Default for TaskSettings {
    fn default() -> Self {
        super::defaults::without_flags()
    }
}

impl TaskSettings {
    /// The tasks, each once.
    pub fn asked(&self) -> Vec<TaskSpec> {
        let of_original = TASKS.iter().take(if self.eval_zero_shot { ZERO_SHOT } else { 0 });
        let of_original =
            of_original.map(|kind| TaskSpec { name: kind.name.to_string(), file: None });
        let mut asked: Vec<TaskSpec> = Vec::new();
        for task in of_original.chain(self.tasks.iter().cloned()) {
            if !asked.contains(&task) {
                asked.push(task);
            }
        }
        asked
    }

    /// Returns whether no task is asked for.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty() && !self.eval_zero_shot
    }
}
