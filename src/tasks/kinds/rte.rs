//! RTE (Wang et al. 2018, arXiv:1804.07461), from GLUE: does the second sentence follow from the first.

use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::row::TaskRow;

/// The task.
pub(in crate::tasks) const RTE: TaskKind = TaskKind {
    name: "rte",
    repository: "nyu-mll/glue",
    config: Some("rte"),
    evaluated: "validation",
    examples: "train",
    draws: ExampleDraws::OneMore,
    has_acc_norm: false,
    question,
};

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let (first, second) = (row.text("sentence1")?, row.text("sentence2")?);
    let context = format!("{first}\nQuestion: {second} True or False?\nAnswer:");
    Ok(Question::of_choices(context, &["True", "False"], row.index("label", 0, 2)?))
}
