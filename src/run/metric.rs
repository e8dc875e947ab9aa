//! Measured values of a model by name, for tables and charts: perplexity, divergence, accuracies.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Manifest;
use super::tasks::{TaskReport, TaskResults};
use crate::failure::Failure;

/// A measured value of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Metric {
    /// Perplexity: `perplexity`.
    Perplexity,
    /// Mean KL divergence from the dense model, in nat: `kl`.
    Kl,
    /// Share of positions at which the dense model ranks the same token first: `same_top`.
    SameTop,
    /// Mean of the accuracies of all tasks: `accuracy`.
    Accuracy,
    /// Accuracy of the task with this name.
    Task(String),
}

impl Metric {
    /// The metrics that charts show.
    pub const DRAWN: [Self; 3] = [Self::Perplexity, Self::Kl, Self::Accuracy];

    /// The value of the model that a run made; of a run that makes none, of the model that it measured. `None` where it was not measured.
    pub fn of_result(&self, manifest: &Manifest) -> Option<f64> {
        let measured = &manifest.perplexity;
        let tasks = || manifest.tasks.as_ref().map(TaskResults::of_result);
        match self {
            Self::Perplexity => manifest.perplexity_of_result(),
            Self::Kl => measured.divergence.map(|of| of.kl_mean.value),
            Self::SameTop => measured.divergence.map(|of| of.same_top.value),
            Self::Accuracy | Self::Task(_) => self.of_tasks(tasks()?),
        }
    }

    /// The value of the dense model of a run that prunes; `None` where it was not measured, for every other run, and for divergences.
    pub fn of_dense(&self, manifest: &Manifest) -> Option<f64> {
        match self {
            Self::Perplexity => manifest.dense_perplexity(),
            Self::Kl | Self::SameTop => None,
            Self::Accuracy | Self::Task(_) => {
                // As with perplexities: before the training of a recovery, no model is dense.
                let prunes = manifest.pruning.is_some() && manifest.recovery.is_none();
                let tasks = manifest.tasks.as_ref().filter(|_| prunes)?;
                self.of_tasks(&tasks.dense)
            }
        }
    }

    /// The accuracy of all tasks, or of one task.
    fn of_tasks(&self, reports: &[TaskReport]) -> Option<f64> {
        match self {
            Self::Task(name) => reports.iter().find(|of| of.task == *name).map(|of| of.acc.value),
            _ => TaskResults::mean(reports),
        }
    }

    /// The name in tables and charts.
    pub fn title(&self) -> String {
        match self {
            Self::Perplexity => "perplexity".to_string(),
            Self::Kl => "mean KL".to_string(),
            Self::SameTop => "same top token".to_string(),
            Self::Accuracy => "mean accuracy".to_string(),
            Self::Task(name) => format!("{name} accuracy"),
        }
    }

    /// Returns whether a smaller value is better.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Perplexity | Self::Kl)
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Perplexity => "perplexity",
            Self::Kl => "kl",
            Self::SameTop => "same_top",
            Self::Accuracy => "accuracy",
            Self::Task(name) => name,
        })
    }
}

impl FromStr for Metric {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        Ok(match text {
            "" => {
                return Err(Failure::usage("a metric has no name")
                    .hint("name metrics like --metrics perplexity,kl,accuracy"));
            }
            "perplexity" => Self::Perplexity,
            "kl" => Self::Kl,
            "same_top" => Self::SameTop,
            "accuracy" => Self::Accuracy,
            task => Self::Task(task.to_string()),
        })
    }
}

impl From<Metric> for String {
    fn from(metric: Metric) -> Self {
        metric.to_string()
    }
}

impl TryFrom<String> for Metric {
    type Error = Failure;

    fn try_from(text: String) -> Result<Self, Failure> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for name in ["perplexity", "kl", "same_top", "accuracy", "boolq"] {
            assert_eq!(name.parse::<Metric>().unwrap().to_string(), name);
        }
        assert!("".parse::<Metric>().is_err());
    }
}
