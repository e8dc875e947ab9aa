//! BoolQ (Clark et al. 2019, arXiv:1905.10044), from SuperGLUE: a passage and a question with the answer no or yes.

use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::row::TaskRow;

/// The task.
pub(in crate::tasks) const BOOLQ: TaskKind = TaskKind {
    name: "boolq",
    repository: "aps/super_glue",
    config: Some("boolq"),
    evaluated: "validation",
    examples: "train",
    draws: ExampleDraws::OneMore,
    has_acc_norm: false,
    question,
};

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let (passage, asked) = (row.text("passage")?, row.text("question")?);
    let context = format!("{passage}\nQuestion: {asked}?\nAnswer:");
    Ok(Question::of_choices(context, &["no", "yes"], row.index("label", 0, 2)?))
}
