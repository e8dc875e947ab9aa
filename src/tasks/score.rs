//! From log-likelihoods to accuracies, as lm-evaluation-harness 0.4.13 computes them.
//!
//! ```text
//! acc       the choice with the largest log-likelihood is the right one;  acc_norm  … with the largest log-likelihood per character
//! error     √(Σ(x − mean)² / (n − 1)) / √n
//! groups    acc = Σ nᵢ·accᵢ / N,  error = √(Σ (nᵢ − 1)·nᵢ·errorᵢ² / (N − k) / N)  for k subjects with N questions
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::asked::{AskedQuestion, AskedTask};
use crate::run::tasks::{Accuracy, SubjectReport, TaskReport};

/// The score of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RequestScore {
    /// Σ ln p of the continuation's tokens.
    pub log_likelihood: f64,
    /// Every token of the continuation has the largest logit.
    pub is_greedy: bool,
}

/// The first of the largest values; 0 where no value is a number.
fn first_largest(values: impl Iterator<Item = f64>) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (at, value) in values.enumerate() {
        if value > best.1 {
            best = (at, value);
        }
    }
    best.0
}

impl AskedQuestion {
    fn scores<'a>(&self, scores: &'a [RequestScore]) -> &'a [RequestScore] {
        &scores[self.first_request..self.first_request + self.choices as usize]
    }

    /// The choice with the largest log-likelihood.
    pub fn chosen(&self, scores: &[RequestScore]) -> usize {
        first_largest(self.scores(scores).iter().map(|of| of.log_likelihood))
    }

    /// The choice with the largest log-likelihood per character. A choice without characters is never chosen.
    ///
    /// # Arguments
    /// * `characters`: of each choice
    pub fn chosen_per_character(&self, scores: &[RequestScore], characters: &[u32]) -> usize {
        let per_character = self.scores(scores).iter().zip(characters);
        first_largest(per_character.map(|(of, &characters)| match characters {
            0 => f64::NEG_INFINITY,
            _ => of.log_likelihood / f64::from(characters),
        }))
    }
}

impl AskedTask {
    fn accuracy(&self, chosen: impl Fn(&AskedQuestion) -> usize) -> Accuracy {
        let count = self.questions.len() as f64;
        let right: Vec<f64> = self
            .questions
            .iter()
            .map(|question| f64::from(u8::from(chosen(question) == question.target as usize)))
            .collect();
        let value = right.iter().sum::<f64>() / count;
        let squares: f64 = right.iter().map(|right| (right - value).powi(2)).sum();
        let error = (squares / (count - 1.0)).sqrt() / count.sqrt();
        Accuracy { value, error: (right.len() > 1).then_some(error) }
    }
}

/// The accuracies of all tasks. The subjects of MMLU are a single task.
pub fn reports(tasks: &[AskedTask], scores: &[RequestScore]) -> Vec<TaskReport> {
    let mut reports: Vec<TaskReport> = Vec::new();
    for task in tasks {
        let acc = task.accuracy(|question| question.chosen(scores));
        let of_norm = || {
            let characters = |question: &AskedQuestion| task.characters(question);
            task.accuracy(|of| of.chosen_per_character(scores, characters(of)))
        };
        let questions = task.questions.len();
        let Some((subject, group)) = &task.subject else {
            reports.push(TaskReport {
                task: task.task.clone(),
                questions,
                acc,
                acc_norm: task.has_acc_norm.then(of_norm),
                subjects: Vec::new(),
                groups: BTreeMap::new(),
            });
            continue;
        };
        let subject =
            SubjectReport { subject: subject.clone(), group: group.clone(), questions, acc };
        match reports.iter_mut().find(|report| report.task == task.task) {
            Some(report) => report.subjects.push(subject),
            None => reports.push(TaskReport {
                task: task.task.clone(),
                questions: 0,
                acc,
                acc_norm: None,
                subjects: vec![subject],
                groups: BTreeMap::new(),
            }),
        }
    }
    for report in reports.iter_mut().filter(|report| !report.subjects.is_empty()) {
        report.questions = report.subjects.iter().map(|of| of.questions).sum();
        report.acc = pooled(report.subjects.iter());
        let groups = report.subjects.iter().map(|of| of.group.clone());
        let groups: BTreeMap<String, Accuracy> = groups
            .map(|group| {
                let accuracy = pooled(report.subjects.iter().filter(|of| of.group == group));
                (group, accuracy)
            })
            .collect();
        report.groups = groups;
    }
    reports
}

/// The accuracy of several subjects, in which all questions count the same.
fn pooled<'a>(subjects: impl Iterator<Item = &'a SubjectReport> + Clone) -> Accuracy {
    let all: f64 = subjects.clone().map(|of| of.questions as f64).sum();
    let right: f64 = subjects.clone().map(|of| of.questions as f64 * of.acc.value).sum();
    let count = subjects.clone().count() as f64;
    let squares: Option<f64> = subjects
        .map(|of| {
            let questions = of.questions as f64;
            Some((questions - 1.0) * questions * of.acc.error?.powi(2))
        })
        .sum();
    Accuracy {
        value: right / all,
        error: squares
            .filter(|_| all > count)
            .map(|squares| (squares / (all - count) / all).sqrt()),
    }
}
