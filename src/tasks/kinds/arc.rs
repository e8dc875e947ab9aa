//! ARC (Clark et al. 2018, arXiv:1803.05457): science questions with three to five choices. The place of the answer among the labels
//! decides, never the letter: labels are A to E or 1 to 4.

use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::row::TaskRow;

/// The easy questions.
pub(in crate::tasks) const ARC_EASY: TaskKind = TaskKind {
    name: "arc_easy",
    repository: "allenai/ai2_arc",
    config: Some("ARC-Easy"),
    evaluated: "test",
    examples: "train",
    draws: ExampleDraws::Exactly,
    has_acc_norm: true,
    question,
};

/// The questions that word counts and retrieval do not answer.
pub(in crate::tasks) const ARC_CHALLENGE: TaskKind =
    TaskKind { name: "arc_challenge", config: Some("ARC-Challenge"), ..ARC_EASY };

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let context = format!("Question: {}\nAnswer:", row.text("question")?);
    let choices = row.texts("choices/text")?;
    let target = row.index_of(row.text("answerKey")?, "choices/label", choices.len())?;
    Ok(Question::of_choices(context, &choices, target))
}
