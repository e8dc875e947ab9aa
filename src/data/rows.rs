//! Rows of a data set as JSON objects: from JSON lines, or from a parquet file with nested columns.
//!
//! A list of structs on the hub is a struct of lists in parquet (`choices.text`, `choices.label`), and the same in JSON. A line or a row has
//! at most 1 MiB: data of a task are sentences.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::line_memory::LineMemory;
use super::parquet_rows::object;
use super::parquet_text::ParquetFile;
use super::text_file::for_each_line;
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The most bytes of a line, and of the values of a row.
const LONGEST: u64 = 1 << 20;

/// The place of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPlace {
    path: Arc<Path>,
    /// Lines count from 1, rows of parquet from 0.
    number: u64,
}

impl RowPlace {
    fn is_parquet(&self) -> bool {
        is_parquet(&self.path)
    }

    /// The failure of a row.
    pub fn failure(&self, why: impl fmt::Display) -> Failure {
        let (path, number) = (self.path.display(), self.number);
        match self.is_parquet() {
            true => Failure::new(format!("`{path}`, row {number} (counted from 0): {why}")),
            false => Failure::new(format!("`{path}`, line {number}: {why}")),
        }
    }
}

fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "parquet")
}

/// Gives every row of a file to `take`: of a parquet file by its name, else of JSON lines. Empty lines are passed over.
///
/// # Errors
/// Fails for a file that cannot be read, a row that is too long, a line that is no JSON object, and when `take` fails.
pub fn for_each_row(
    path: &Path,
    take: &mut dyn FnMut(RowPlace, Map<String, Value>) -> Result<()>,
) -> Result<()> {
    match is_parquet(path) {
        true => parquet_rows(path, take),
        false => json_lines(path, take),
    }
}

/// The hint for a line that is no question; the object is a question of a user's own task.
pub const OBJECTS: &str =
    r#"write an object per line, like {"context": "...", "choices": ["...", "..."], "label": 0}"#;

fn json_lines(
    path: &Path,
    take: &mut dyn FnMut(RowPlace, Map<String, Value>) -> Result<()>,
) -> Result<()> {
    let (mut number, shared) = (0, Arc::from(path));
    for_each_line(path, LineMemory::UNBOUNDED, &mut |line| {
        number += 1;
        let place = RowPlace { path: Arc::clone(&shared), number };
        // Some editors begin a file with a mark of its encoding.
        let mark = if number == 1 { "\u{feff}" } else { "" };
        let line = line.strip_prefix(mark).unwrap_or(line);
        if line.trim().is_empty() {
            return Ok(());
        }
        if line.len() as u64 > LONGEST {
            return Err(too_long(&place, line.len() as u64).into());
        }
        let row: Value = serde_json::from_str(line)
            .map_err(|error| place.failure(format!("it is no JSON: {error}")).hint(OBJECTS))?;
        match row {
            Value::Object(row) => take(place, row),
            other => Err(place
                .failure(format!("it is {}, not an object", kind(&other)))
                .hint(OBJECTS)
                .into()),
        }
    })
}

fn too_long(place: &RowPlace, bytes: u64) -> Failure {
    place
        .failure(format!("it has {}, and {} is the limit", ByteSize(bytes), ByteSize(LONGEST)))
        .hint("shorten the texts of this row, or leave it out")
}

/// The kind of a JSON value, in words.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn parquet_rows(
    path: &Path,
    take: &mut dyn FnMut(RowPlace, Map<String, Value>) -> Result<()>,
) -> Result<()> {
    let file = ParquetFile::open(path)?;
    let (mut number, shared) = (0, Arc::from(path));
    file.for_each_row(None, &mut |row| {
        let place = RowPlace { path: Arc::clone(&shared), number };
        number += 1;
        let row = object(&row, true).map_err(|why| place.failure(why))?;
        let text = serde_json::to_string(&row).context("writing a row as JSON")?;
        if text.len() as u64 > LONGEST {
            return Err(too_long(&place, text.len() as u64).into());
        }
        take(place, serde_json::from_str(&text).context("reading a row as JSON")?)?;
        Ok(true)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Result<Vec<(u64, Map<String, Value>)>> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("x.jsonl");
        std::fs::write(&path, text)?;
        let mut rows = Vec::new();
        for_each_row(&path, &mut |place, row| {
            rows.push((place.number, row));
            Ok(())
        })?;
        Ok(rows)
    }

    #[test]
    fn lines_are_objects_with_their_numbers() {
        let rows = rows("{\"a\": 1}\n\n{\"a\": [\"x\"]}").unwrap();
        assert_eq!(rows.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(rows[1].1["a"][0], "x");
    }

    #[test]
    fn a_bad_line_is_named() {
        let long = format!("{{}}\n{{\"a\": \"{}\"}}", "x".repeat(3 << 20));
        for (text, why) in [
            ("{}\n[1]\n", "line 2: it is a list, not an object"),
            ("{}\n{\n", "line 2: it is no JSON"),
            (&long, "line 2: it has 3.00 MiB, and 1.00 MiB is the limit"),
        ] {
            let error = rows(text).expect_err("must fail").to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
