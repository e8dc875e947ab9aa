//! The place of a value in a recipe: the beginning of every error about it.

use std::fmt;
use std::sync::Arc;

use crate::failure::Failure;

/// The origin of a part of a recipe. It is no part of the content: two recipes with different places are equal.
#[derive(Debug, Clone)]
pub enum Place {
    /// A line of a file, counted from 1.
    Line(Arc<str>, usize),
    /// The command line.
    Flags,
}

impl PartialEq for Place {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Place {
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
    // The distance of long words costs their product.
    if given.len() > 64 {
        return None;
    }
    let given = given.to_lowercase().replace('-', "_");
    let wrong_at_most = (given.chars().count() / 4).clamp(1, 3);
    candidates
        .into_iter()
        .map(|candidate| (strsim::osa_distance(&given, candidate), candidate))
        .filter(|(wrong, _)| *wrong <= wrong_at_most)
        .min_by_key(|(wrong, _)| *wrong)
        .map(|(_, candidate)| candidate)
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
