//! Typed access to the columns of a row. Every failure names the file and the row.

use serde_json::{Map, Value};

use crate::data::rows::{RowPlace, kind};
use crate::failure::Failure;

/// A row of a data set.
#[derive(Debug, Clone)]
pub(in crate::tasks) struct TaskRow {
    place: RowPlace,
    columns: Map<String, Value>,
}

/// A row as a text, which takes a fraction of the memory.
#[derive(Debug, Clone)]
pub(in crate::tasks) struct StoredRow {
    place: RowPlace,
    json: Box<str>,
}

impl StoredRow {
    /// The row.
    ///
    /// # Errors
    /// Does not fail for a row that was written as JSON before.
    pub(super) fn row(&self) -> Result<TaskRow, Failure> {
        let columns = serde_json::from_str(&self.json);
        let columns = columns.map_err(|error| self.place.failure(format!("as JSON: {error}")))?;
        Ok(TaskRow { place: self.place.clone(), columns })
    }

    /// Returns whether both have the same columns, wherever they are.
    pub(super) fn has_columns_of(&self, other: &Self) -> bool {
        self.json == other.json
    }

    /// Bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.json.len()
    }
}

impl TaskRow {
    pub(super) fn new(place: RowPlace, columns: Map<String, Value>) -> Self {
        Self { place, columns }
    }

    /// The row as a text.
    pub(super) fn stored(&self) -> StoredRow {
        let json = serde_json::to_string(&self.columns).unwrap_or_default().into_boxed_str();
        StoredRow { place: self.place.clone(), json }
    }

    /// The failure of this row.
    pub(super) fn failure(&self, why: impl std::fmt::Display) -> Failure {
        self.place.failure(why)
    }

    /// A column, or a field inside it: `choices/text`.
    pub(super) fn value(&self, name: &str) -> Result<&Value, Failure> {
        let (column, field) = name.split_once('/').unwrap_or((name, ""));
        let value = self.columns.get(column);
        let value = if field.is_empty() { value } else { value.and_then(|of| of.get(field)) };
        value.ok_or_else(|| {
            let names: Vec<&str> = self.columns.keys().map(String::as_str).collect();
            self.failure(format!("it has no `{}`", name.replace('/', ".")))
                .detail(format!("its columns are {}", names.join(", ")))
                .hint("use the files of the data set that docs/evaluation.md names for this task")
        })
    }

    fn wrong(&self, name: &str, value: &Value, wanted: &str) -> Failure {
        let name = name.replace('/', ".");
        self.failure(format!("`{name}` is {}, not {wanted}", kind(value)))
            .hint("correct this value, or leave the row out")
    }

    /// A text.
    pub(super) fn text(&self, name: &str) -> Result<&str, Failure> {
        let value = self.value(name)?;
        value.as_str().ok_or_else(|| self.wrong(name, value, "a text"))
    }

    /// A list of texts, not empty.
    pub(super) fn texts(&self, name: &str) -> Result<Vec<&str>, Failure> {
        let value = self.value(name)?;
        let texts = value.as_array().and_then(|values| values.iter().map(Value::as_str).collect());
        let texts: Vec<&str> = texts.ok_or_else(|| self.wrong(name, value, "a list of texts"))?;
        match texts.is_empty() {
            true => Err(self
                .failure(format!("`{}` is empty", name.replace('/', ".")))
                .hint("give every question its choices, or leave the row out")),
            false => Ok(texts),
        }
    }

    /// The index of the right choice: a column with a number, counted from `first`.
    pub(super) fn index(&self, name: &str, first: i64, choices: usize) -> Result<usize, Failure> {
        let value = self.value(name)?;
        let number = value.as_i64().ok_or_else(|| self.wrong(name, value, "a whole number"))?;
        self.checked(name, number, first, choices)
    }

    /// The same, where the number is written as a text.
    pub(super) fn index_in_text(
        &self,
        name: &str,
        first: i64,
        choices: usize,
    ) -> Result<usize, Failure> {
        let text = self.text(name)?;
        let number = text.trim().parse().map_err(|_| {
            self.failure(format!("`{name}` is `{}`, not a number", shortened(text)))
                .hint("evaluated splits have labels; a test split may hide them")
        })?;
        self.checked(name, number, first, choices)
    }

    fn checked(
        &self,
        name: &str,
        number: i64,
        first: i64,
        choices: usize,
    ) -> Result<usize, Failure> {
        let index = number.checked_sub(first).and_then(|index| usize::try_from(index).ok());
        index.filter(|index| *index < choices).ok_or_else(|| {
            let last = first + choices as i64 - 1;
            self.failure(format!("`{name}` is {number}, and the choices are {first} to {last}"))
                .hint("correct the label; a label of -1 marks a hidden answer")
        })
    }

    /// The place of `key` among the labels of the choices.
    pub(super) fn index_of(
        &self,
        key: &str,
        labels: &str,
        choices: usize,
    ) -> Result<usize, Failure> {
        let all = self.texts(labels)?;
        let index = all.iter().position(|label| *label == key).filter(|index| *index < choices);
        index.ok_or_else(|| {
            let key = shortened(key);
            self.failure(format!("its answer `{key}` is none of {}", all.join(", ")))
                .hint("correct the answer, or leave the row out")
        })
    }
}

/// The first characters of a text, for a message.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}
