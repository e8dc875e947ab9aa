//! PIQA (Bisk et al. 2020, arXiv:1911.11641): the better of two solutions of an everyday problem.

use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::row::TaskRow;

/// The task.
pub(in crate::tasks) const PIQA: TaskKind = TaskKind {
    name: "piqa",
    repository: "baber/piqa",
    config: None,
    evaluated: "validation",
    examples: "train",
    draws: ExampleDraws::OneMore,
    has_acc_norm: true,
    question,
};

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let context = format!("Question: {}\nAnswer:", row.text("goal")?);
    let choices = [row.text("sol1")?, row.text("sol2")?];
    Ok(Question::of_choices(context, &choices, row.index("label", 0, 2)?))
}
