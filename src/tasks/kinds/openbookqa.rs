//! OpenBookQA (Mihaylov et al. 2018, arXiv:1809.02789): the end of a sentence of elementary science.

use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::row::TaskRow;

/// The task.
pub(in crate::tasks) const OPENBOOKQA: TaskKind = TaskKind {
    name: "openbookqa",
    repository: "allenai/openbookqa",
    config: Some("main"),
    evaluated: "test",
    examples: "train",
    draws: ExampleDraws::Exactly,
    has_acc_norm: true,
    question,
};

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let context = row.text("question_stem")?.to_string();
    let choices = row.texts("choices/text")?;
    let answer = row.text("answerKey")?.trim_start();
    let target = row.index_of(answer, "choices/label", choices.len())?;
    Ok(Question::of_choices(context, &choices, target))
}
