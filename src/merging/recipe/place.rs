//! Values of a recipe and their places: the beginning of every error about them.

use std::cell::RefCell;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::Deserialize;
use serde_saphyr::Spanned;

use crate::failure::{self, Failure};

thread_local! {
    /// The file that this thread reads: serde hands nothing down to the values it makes.
    static FILE: RefCell<Arc<str>> = RefCell::new(Arc::from(""));
}

/// The origin of a part of a recipe. It is no part of the content: two recipes with different places are equal.
#[derive(Debug, Clone)]
pub enum Place {
    /// A line of a file, counted from 1.
    Line(Arc<str>, usize),
    /// The command line.
    Flags,
}

/// A value and its place.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "Spanned<T>", bound(deserialize = "T: Deserialize<'de>"))]
pub struct Placed<T> {
    /// Its place in the recipe.
    pub place: Place,
    /// The value itself.
    pub value: T,
}

impl<T> From<Spanned<T>> for Placed<T> {
    fn from(spanned: Spanned<T>) -> Self {
        Self { place: Place::line(spanned.referenced.line()), value: spanned.value }
    }
}

impl<T> Deref for Placed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl PartialEq for Place {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Place {
    /// Names the file that this thread reads from here on.
    pub(super) fn begin(file: &str) {
        FILE.set(Arc::from(file));
    }

    /// A line of the file that this thread reads.
    pub(super) fn line(line: u64) -> Self {
        Self::Line(FILE.with_borrow(Arc::clone), usize::try_from(line).unwrap_or(usize::MAX))
    }

    /// A failure at this place. Mistakes on the command line are of usage.
    pub fn failure(&self, message: impl fmt::Display) -> Failure {
        match self {
            Self::Line(..) => Failure::new(format!("{self}: {message}")),
            Self::Flags => Failure::usage(message.to_string()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(file, line) => write!(f, "`{file}` line {line}"),
            Self::Flags => f.write_str("the command line"),
        }
    }
}

/// The candidate that `given` is a misspelling of. A quarter of the letters may be wrong, at least 1 and at most 3.
pub(super) fn meant<'a>(
    given: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let given = given.replace('-', "_");
    failure::meant(&given, candidates, 4).first().copied()
}

/// The refusal of a name, with a proposal and the list of known names.
pub(super) fn unknown(place: &Place, message: &str, given: &str, known: &[&str]) -> Failure {
    let failure =
        place.failure(message).detail(format!("known here: {}", listed(known.iter().copied())));
    match meant(given, known.iter().copied()) {
        Some(name) => failure.hint(format!("write `{name}`")),
        None => failure,
    }
}

/// Names in backticks, separated by commas.
pub(super) fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_proposed_for_its_misspelling_only() {
        let names = ["weight", "density", "lambda", "t"];
        assert_eq!(meant("wieght", names), Some("weight"));
        assert_eq!(meant("Density", names), Some("density"));
        assert_eq!(meant("lamda", names), Some("lambda"));
        assert_eq!(meant("select_topk", names), None);
        assert_eq!(meant(&"weight".repeat(1000), names), None);
        assert_eq!(meant("dare-ties", ["dare_ties"]), Some("dare_ties"));
    }
}
