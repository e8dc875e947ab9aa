//! The record of multiple-choice tasks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A share of right answers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    /// Right answers over questions.
    pub value: f64,
    /// Its standard error; absent for a single question.
    pub error: Option<f64>,
}

/// A subject of MMLU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SubjectReport {
    /// The subject.
    pub subject: String,
    /// Its group.
    pub group: String,
    /// Questions.
    pub questions: usize,
    /// The share of questions whose right choice has the largest log-likelihood.
    pub acc: Accuracy,
}

/// A task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// The task.
    pub task: String,
    /// Questions.
    pub questions: usize,
    /// The share of questions whose right choice has the largest log-likelihood.
    pub acc: Accuracy,
    /// The same by log-likelihood per character; absent for tasks that do not report it.
    pub acc_norm: Option<Accuracy>,
    /// The subjects of MMLU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub subjects: Vec<SubjectReport>,
    /// The groups of subjects.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub groups: BTreeMap<String, Accuracy>,
}

/// The tasks of both models. `dense` is the source of a run that prunes, and the model that an evaluation measures.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskResults {
    /// Examples before each question.
    #[serde(default)]
    pub num_fewshot: usize,
    /// SHA-256 in hex of all token ids, as int32, little endian.
    #[serde(default)]
    pub tokens_sha256: String,
    /// The tasks of the model as it was read; empty where it was not measured.
    #[serde(default)]
    pub dense: Vec<TaskReport>,
    /// The tasks of the changed model; empty where there is none.
    #[serde(default)]
    pub pruned: Vec<TaskReport>,
}

impl TaskResults {
    /// The tasks of the model that a run made, or of the model that it measured.
    pub fn of_result(&self) -> &[TaskReport] {
        if self.pruned.is_empty() { &self.dense } else { &self.pruned }
    }

    /// The mean of the accuracies of several tasks, as papers print it; `None` without tasks.
    pub fn mean(reports: &[TaskReport]) -> Option<f64> {
        let sum: f64 = reports.iter().map(|report| report.acc.value).sum();
        (!reports.is_empty()).then(|| sum / reports.len() as f64)
    }
}
