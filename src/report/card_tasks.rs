//! Tasks in a model card: the hub's `model-index` in the front matter, and a table.
//!
//! The hub reads the `model-index` of a card (its documentation: "Model cards", evaluation results) and lists the values beside the model.

use std::fmt::Write as _;

use super::front_matter::{code, quoted};
use crate::run::tasks::{Accuracy, TaskReport, TaskResults};

/// The metrics of a task, by name.
fn metrics(report: &TaskReport) -> impl Iterator<Item = (&'static str, Accuracy)> {
    [("acc", Some(report.acc)), ("acc_norm", report.acc_norm)]
        .into_iter()
        .filter_map(|(name, of)| Some((name, of?)))
}

/// The entry `model-index` for the tasks of the model of this name; empty without tasks.
pub(super) fn model_index(name: &str, results: &TaskResults) -> String {
    let reports = results.of_result();
    if reports.is_empty() {
        return String::new();
    }
    let mut text = format!("model-index:\n- name: {}\n  results:\n", quoted(name));
    for report in reports {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "  - task:\n      type: text-generation\n    dataset:\n      name: {task}\n      type: {task}\n    metrics:\n",
            task = quoted(&report.task)
        );
        for (metric, of) in metrics(report) {
            let shots = results.num_fewshot;
            let _ = writeln!(
                text,
                "    - type: {metric}\n      name: {}\n      value: {:.4}",
                quoted(&format!("{metric} ({shots}-shot)")),
                of.value
            );
        }
    }
    text
}

/// The section of the tasks; empty without tasks.
pub(super) fn section(results: &TaskResults) -> String {
    let reports = results.of_result();
    if reports.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "\n## Tasks\n\n{}-shot, as lm-evaluation-harness 0.4.13 asks.\n\n| Task | Metric | Source | This model | ± |\n| --- | --- | --- | --- | --- |\n",
        results.num_fewshot
    );
    for report in reports {
        let source = results.dense.iter().find(|of| of.task == report.task);
        let source = source.filter(|_| !results.pruned.is_empty());
        for (metric, of) in metrics(report) {
            let before =
                source.and_then(|source| metrics(source).find(|(name, _)| *name == metric));
            let before = before.map_or("-".to_string(), |(_, of)| format!("{:.4}", of.value));
            let error = of.error.map_or("-".to_string(), |error| format!("{error:.4}"));
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "| {} | {metric} | {before} | {:.4} | {error} |",
                code(&report.task),
                of.value
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_an_index_for_the_hub_and_a_table() {
        let report = |value: f64| TaskReport {
            task: "piqa".to_string(),
            questions: 40,
            acc: Accuracy { value, error: Some(0.01) },
            acc_norm: Some(Accuracy { value: 0.5, error: None }),
            subjects: Vec::new(),
            groups: Default::default(),
        };
        let (dense, pruned) = (vec![report(0.75)], vec![report(0.25)]);
        let results = TaskResults { dense, pruned, ..TaskResults::default() };
        let index = model_index("m", &results);
        let expected = "model-index:\n- name: \"m\"\n  results:\n  - task:\n      type: text-generation\n    dataset:\n      name: \"piqa\"\n      type: \"piqa\"\n    metrics:\n    - type: acc\n      name: \"acc (0-shot)\"\n      value: 0.2500\n";
        assert!(index.starts_with(expected), "{index}");
        let table = section(&results);
        assert!(table.contains("| `piqa` | acc | 0.7500 | 0.2500 | 0.0100 |"), "{table}");
        assert_eq!(
            section(&TaskResults::default()) + &model_index("m", &TaskResults::default()),
            ""
        );
    }
}
