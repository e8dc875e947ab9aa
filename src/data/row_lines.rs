//! Rows of columns as lines of JSON: the form in which all further code reads documents.

use std::path::Path;

use anyhow::Result;

use super::document::FORMS;
use super::ordered_json::OrderedJson;
use crate::failure::Failure;

/// Columns that a message names at most.
const MOST_NAMED: usize = 20;

/// A row as a line.
pub(super) fn write_line(row: &OrderedJson) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(row)?;
    line.push(b'\n');
    Ok(line)
}

/// The failure for columns that make no document.
pub(super) fn unknown_columns(path: &Path, found: &[&str]) -> Failure {
    let mut names = found.iter().take(MOST_NAMED).copied().collect::<Vec<_>>();
    if found.len() > names.len() {
        names.push("…");
    }
    Failure::new(format!("`{}` has no columns that documents are made of", path.display()))
        .detail(format!("columns found: {}", names.join(", ")))
        .hint(FORMS)
}
