//! WinoGrande (Sakaguchi et al. 2019, arXiv:1907.10641): a sentence with a gap. The options become contexts, and the rest of the sentence
//! is scored after each.

use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::python_text::strip;
use crate::tasks::row::TaskRow;

/// The task.
pub(in crate::tasks) const WINOGRANDE: TaskKind = TaskKind {
    name: "winogrande",
    repository: "allenai/winogrande",
    config: Some("winogrande_xl"),
    evaluated: "validation",
    examples: "train",
    draws: ExampleDraws::OneMore,
    has_acc_norm: false,
    question,
};

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let Some((before, rest)) = row.text("sentence")?.split_once('_') else {
        let gap = row.failure("its sentence has no gap `_`");
        return Err(gap.hint("mark the gap with `_`, or leave the row out"));
    };
    let contexts = [row.text("option1")?, row.text("option2")?];
    let contexts = contexts.map(|option| format!("{before}{option}")).to_vec();
    let target = row.index_in_text("answer", 1, 2)?;
    Ok(Question { contexts, answers: vec![strip(rest).to_string()], target })
}
