//! YAML files as values of serde, within limits, and the errors of `serde-saphyr` as failures.
//!
//! `serde-saphyr` reads words as PyYAML does (YAML 1.1: `yes`, `off`, `~`, `1_000`), since recipes are written for mergekit. It differs
//! in numbers with a leading zero or a colon (`010`, `1:30`), which PyYAML reads as octal and sexagesimal: they are refused here.

use serde::de::DeserializeOwned;
use serde_saphyr::{DefaultMessageFormatter, Error, MessageFormatter as _, Options};

use super::place::{Place, unknown};
use crate::failure::{Failure, blaming};

/// Bytes of the largest file.
const LARGEST: usize = 1 << 20;

/// Bytes of all texts after aliases are unfolded. Aliases make a recipe larger than its file.
const LARGEST_UNFOLDED: usize = 4 << 20;

/// Lists, maps and texts after aliases are unfolded.
const MOST_NODES: usize = 1 << 16;

/// The deepest nesting of lists and maps. A recipe that uses everything needs 11.
const DEEPEST: usize = 32;

/// Reads the only document of a file.
///
/// # Errors
/// Fails, with file and line, for a file that is too large, is not YAML, holds no document or several, unfolds to more than the limits,
/// repeats a key, has an alias inside its own anchor or a tag of its own, and for values that are no `T`.
pub(super) fn read<T: DeserializeOwned>(text: &str, file: &str) -> Result<T, Failure> {
    read_by(text, file, |text| serde_saphyr::from_str_with_options(text, options()))
}

/// Reads all documents of a file. Empty documents do not count.
///
/// # Errors
/// Fails as [`read`], but not for several documents.
pub(super) fn read_all<T: DeserializeOwned>(text: &str, file: &str) -> Result<Vec<T>, Failure> {
    let all: Vec<T> =
        read_by(text, file, |text| serde_saphyr::from_multiple_with_options(text, options()))?;
    match all.is_empty() {
        true => Err(Failure::new(format!("`{file}` is empty"))),
        false => Ok(all),
    }
}

/// Reads a file by `parse`, within the limits.
fn read_by<T>(
    text: &str,
    file: &str,
    parse: impl FnOnce(&str) -> Result<T, Error>,
) -> Result<T, Failure> {
    if text.len() > LARGEST {
        return Err(Failure::new(format!(
            "`{file}` is too large for a recipe: {} bytes, at most {LARGEST} are read",
            text.len()
        )));
    }
    Place::begin(file);
    let unreadable = Failure::new(format!("`{file}` cannot be read as YAML"));
    blaming(unreadable, || parse(text))?.map_err(|error| failure(&error, file))
}

fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: DEEPEST,
            max_nodes: MOST_NODES,
            max_recorded_anchor_events: MOST_NODES,
            max_total_scalar_bytes: LARGEST_UNFOLDED,
            // The sizes above bound what aliases can do.
            enforce_alias_anchor_ratio: false,
        },
        leading_zero_numbers_as_strings: true,
        // Text without quotes is no number and no switch, as in mergekit.
        no_schema: true,
        reject_unsupported_tags: true,
        with_snippet: false,
    }
}

fn failure(error: &Error, file: &str) -> Failure {
    let place = Place::line(error.location().map_or(1, |location| location.line()));
    let mut cause = error;
    while let Error::AliasError { error, .. } | Error::WithSnippet { error, .. } = cause {
        cause = error;
    }
    match cause {
        Error::Message { msg, .. } => told(&place, msg, file),
        Error::SerdeUnknownField { field: given, expected, .. }
        | Error::SerdeUnknownVariant { variant: given, expected, .. } => {
            unknown(&place, &format!("`{given}` is not known here"), given, expected)
        }
        Error::SerdeInvalidType { unexpected, expected, .. }
        | Error::SerdeInvalidValue { unexpected, expected, .. } => {
            place.failure(format!("expected {expected}, found {unexpected}"))
        }
        Error::Unexpected { expected: "mapping start", .. } => {
            place.failure("expected a map of keys and values")
        }
        Error::Unexpected { expected: "sequence start", .. } => place.failure("expected a list"),
        Error::InvalidScalar { ty: "u64", .. } => place.failure("expected a whole number from 0 on"),
        Error::InvalidScalar { ty: "boolean", .. } => place.failure("expected true or false"),
        Error::QuotingRequired { value, .. } => place
            .failure(format!("expected text, found `{value}`"))
            .hint(format!("write it in quotes: \"{value}\"")),
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            place.failure(format!("the key `{key}` stands here twice"))
        }
        Error::MultipleDocuments { .. } => {
            place.failure("a second document begins; a recipe is one document")
        }
        Error::Eof { .. } => Failure::new(format!("`{file}` is empty")),
        Error::Budget { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => place
            .failure("the recipe is too large or too deep once its aliases are unfolded")
            .detail(format!(
                "at most {LARGEST_UNFOLDED} bytes of text, {MOST_NODES} values and {DEEPEST} lists and maps in one another"
            )),
        other => {
            let message = DefaultMessageFormatter.format_message(other);
            let failure = place.failure(&message);
            if message.contains("tab") { failure.hint("indent with spaces") } else { failure }
        }
    }
}

/// A failure of ours that came as text through serde, with or without its place.
fn told(place: &Place, text: &str, file: &str) -> Failure {
    let mut lines = text.lines();
    let message = lines.next().unwrap_or_default();
    let failure = match message.starts_with(&format!("`{file}` line ")) {
        true => Failure::new(message),
        false => place.failure(message),
    };
    lines.fold(failure, |failure, line| match line.strip_prefix("hint: ") {
        Some(hint) => failure.hint(hint),
        None => failure.detail(line.trim_start()),
    })
}
