//! The statement `{% generation %}`, with which a template marks the text that the model writes.
//!
//! `transformers` adds the statement to Jinja. Here it becomes a filter block with the same rules for white space, and the filter puts
//! marks around the text of the block. [`found`] takes the marks out again and returns their places.

use std::borrow::Cow;
use std::sync::LazyLock;

use minijinja::{Error, Value};
use regex::Regex;

use serde::{Deserialize, Serialize};

/// A rendered beginning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::data) struct RenderedText {
    pub(in crate::data) text: String,
    /// The bytes that the template marks by `{% generation %}`, in order.
    pub(in crate::data) marked: Vec<(usize, usize)>,
}

/// The name of the filter.
pub(super) const FILTER: &str = "prune_generation_marks";
/// The marks. The first character of each is no character of any text.
const BEGIN: &str = "\u{fdd0}generation\u{fdd0}";
const END: &str = "\u{fdd1}generation\u{fdd1}";

static STATEMENT: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").ok());

/// Returns whether a template marks the text that the model writes.
pub(super) fn are_in(template: &str) -> bool {
    STATEMENT.as_ref().is_some_and(|statement| statement.is_match(template))
}

/// The template with filter blocks for the statement.
pub(super) fn as_filters(template: &str) -> Cow<'_, str> {
    let Some(statement) = STATEMENT.as_ref() else {
        return Cow::Borrowed(template);
    };
    statement.replace_all(template, |found: &regex::Captures<'_>| {
        let (left, right) = (&found[1], &found[3]);
        match found.get(2) {
            Some(_) => format!("{{%{left} endfilter {right}%}}"),
            None => format!("{{%{left} filter {FILTER} {right}%}}"),
        }
    })
}

/// The filter: the text of a block between marks.
pub(super) fn around(text: String) -> Result<Value, Error> {
    Ok(Value::from_safe_string(format!("{BEGIN}{text}{END}")))
}

/// A rendered text without its marks, and their places.
pub(super) fn found(rendered: &str) -> RenderedText {
    let (mut text, mut marked) = (String::with_capacity(rendered.len()), Vec::new());
    let (mut begin, mut rest) = (None, rendered);
    while let Some(at) = rest.find(['\u{fdd0}', '\u{fdd1}']) {
        text += &rest[..at];
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix(BEGIN) {
            begin = Some(text.len());
            rest = after;
        } else if let Some(after) = rest.strip_prefix(END) {
            marked.extend(begin.take().map(|begin| (begin, text.len())));
            rest = after;
        } else {
            // A character of the conversation itself.
            let after = rest.chars().next().map_or(rest.len(), char::len_utf8);
            text += &rest[..after];
            rest = &rest[after..];
        }
    }
    text += rest;
    RenderedText { text, marked }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_taken_out_and_their_places_are_returned() {
        let rendered = format!("a{BEGIN}bc{END}d\u{fdd0}{BEGIN}{END}");
        let found = found(&rendered);
        assert_eq!(found.text, "abcd\u{fdd0}");
        assert_eq!(found.marked, [(1, 3), (7, 7)]);
        let template = "{%- generation %}x{% endgeneration -%}{% set generation = 1 %}";
        assert!(are_in(template) && !are_in("{% set generation = 1 %}{{ generation }}"));
        assert_eq!(
            as_filters(template),
            format!("{{%- filter {FILTER} %}}x{{% endfilter -%}}{{% set generation = 1 %}}")
        );
    }
}
