//! HellaSwag (Zellers et al. 2019, arXiv:1905.07830): the most likely end of a story. Texts are cleaned of the marks of WikiHow.

use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::python_text::{capitalize, strip};
use crate::tasks::row::TaskRow;

/// The task.
pub(in crate::tasks) const HELLASWAG: TaskKind = TaskKind {
    name: "hellaswag",
    repository: "Rowan/hellaswag",
    config: None,
    evaluated: "validation",
    examples: "train",
    draws: ExampleDraws::OneMore,
    has_acc_norm: true,
    question,
};

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let (activity, first) = (row.text("activity_label")?, row.text("ctx_a")?);
    let second = capitalize(row.text("ctx_b")?);
    let endings: Vec<String> = row.texts("endings")?.into_iter().map(cleaned).collect();
    let target = row.index_in_text("label", 0, endings.len())?;
    let context = cleaned(&format!("{activity}: {first} {second}"));
    Ok(Question { contexts: vec![context], answers: endings, target })
}

/// The text without the marks: stripped, ` [title]` as `. `, brackets removed, two spaces as one. The strip comes first, so a bracket
/// that is removed at an end leaves a space there.
fn cleaned(text: &str) -> String {
    let text = strip(text).replace(" [title]", ". ");
    without_brackets(&text).replace("  ", " ")
}

/// Removes `\[.*?\]`: the shortest match from each opening bracket, not across line breaks.
fn without_brackets(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut left = text;
    while let Some(open) = left.find('[') {
        let (before, rest) = left.split_at(open);
        out.push_str(before);
        let line = rest.split('\n').next().unwrap_or_default();
        match line.find(']') {
            Some(close) => left = &rest[close + 1..],
            None => {
                out.push('[');
                left = &rest[1..];
            }
        }
    }
    out.push_str(left);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_removed_as_regular_expressions_remove_them() {
        for (text, expected) in [
            ("[header] How to [title] Sit [step] Sit.", " How to. Sit Sit."),
            ("a [b [c] d] e", "a d] e"),
            ("open [ stays\n] here", "open [ stays\n] here"),
            ("three   spaces", "three  spaces"),
            ("  [x]", ""),
            ("[a\n[b] c", "[a\n c"),
        ] {
            assert_eq!(cleaned(text), expected, "{text:?}");
        }
    }
}
