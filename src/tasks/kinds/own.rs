//! A user's own task: JSON lines (or parquet) with `context`, `choices` and `label`, the index of the right choice from 0.

use crate::data::rows::OBJECTS;
use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::row::TaskRow;

/// The form of such tasks; the user names them. Examples, if asked for, come from the same file.
pub(in crate::tasks) const OWN: TaskKind = TaskKind {
    name: "own",
    repository: "",
    config: None,
    evaluated: "",
    examples: "",
    draws: ExampleDraws::OneMore,
    has_acc_norm: true,
    question,
};

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let with_form = |failure: Failure| failure.hint(OBJECTS);
    let context = row.text("context").map_err(with_form)?.to_string();
    let choices = row.texts("choices").map_err(with_form)?;
    if choices.iter().any(|choice| choice.is_empty()) {
        let empty = row.failure("a choice is an empty text");
        return Err(empty.hint("write every choice, or leave the row out"));
    }
    row.value("label").map_err(with_form)?;
    let target = row.index("label", 0, choices.len())?;
    Ok(Question::of_choices(context, &choices, target))
}
