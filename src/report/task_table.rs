//! The rows of multiple-choice tasks in the table at the end of a run: a line per task, and the mean.

use std::collections::BTreeMap;

use crate::run::Manifest;
use crate::run::tasks::{Accuracy, TaskReport, TaskResults};

/// Names and values of the rows.
pub(super) fn rows(manifest: &Manifest) -> Vec<(String, String)> {
    let Some(results) = &manifest.tasks else {
        return Vec::new();
    };
    let TaskResults { dense, pruned, num_fewshot, .. } = results;
    let (model, before) = match pruned.is_empty() {
        true => (dense, None),
        false => (pruned, (!dense.is_empty()).then_some(dense)),
    };
    let shots = if *num_fewshot > 0 { format!(", {num_fewshot} examples") } else { String::new() };
    let columns = if before.is_some() { "dense, model ± error" } else { "accuracy ± error" };
    let mut rows = vec![("tasks".to_string(), format!("{columns}{shots}"))];
    let dense: BTreeMap<&str, &TaskReport> =
        before.into_iter().flatten().map(|report| (report.task.as_str(), report)).collect();
    for report in model {
        let dense = dense.get(report.task.as_str()).copied();
        let mut add = |metric: &str, of: Accuracy, dense: Option<Accuracy>| {
            let questions = questions_in_words(report.questions);
            let value = format!("{} ({metric}, {questions})", percent(of, dense));
            rows.push((format!("  {}", report.task), value));
        };
        add("acc", report.acc, dense.map(|dense| dense.acc));
        if let Some(norm) = report.acc_norm {
            add("acc_norm", norm, dense.and_then(|dense| dense.acc_norm));
        }
    }
    if let Some(mean) = TaskResults::mean(model).filter(|_| model.len() > 1) {
        let dense = before.and_then(|dense| TaskResults::mean(dense));
        let without_error = |value| Accuracy { value, error: None };
        let value = percent(without_error(mean), dense.map(without_error));
        rows.push(("  mean".to_string(), format!("{value} (acc)")));
    }
    rows
}

/// A share in per cent, after the share of the dense model.
fn percent(of: Accuracy, dense: Option<Accuracy>) -> String {
    let dense = dense.map_or(String::new(), |dense| format!("{:6.2}, ", 100.0 * dense.value));
    let error = of.error.map_or(String::new(), |error| format!(" ± {:.2}", 100.0 * error));
    format!("{dense}{:6.2}{error} %", 100.0 * of.value)
}

/// "1 question", "200 questions".
pub(super) fn questions_in_words(questions: usize) -> String {
    let noun = if questions == 1 { "question" } else { "questions" };
    format!("{questions} {noun}")
}
