//! Comparison of two sources by what is read: a file and its copy are the same text, and so are raw and parquet files of a split.

use std::fs;
use std::path::Path;

use super::cache::TextCache;
use super::digest;
use super::joined::JoinedText;
use super::source::{Files, Source};
use crate::run::Silent;

impl Source {
    /// Returns true if both read the same file or a copy of it, or rows that join to the same text, as a raw file and parquet may. A file
    /// that cannot be read equals no file: reading it for its ids gives the error.
    pub fn is_same_text(&self, other: &Self, cache: &TextCache) -> bool {
        let of_other = other.paths();
        let mut paths = self.paths().iter();
        if paths.any(|path| of_other.iter().any(|other| is_same_file(path, other))) {
            return true;
        }
        let (Files::Rows(_), Files::Rows(_)) = (&self.files, &other.files) else {
            return false;
        };
        // The role decides how rows are joined.
        let in_its_role = Self { role: other.role, ..self.clone() };
        let sha256 = |source| {
            let text = JoinedText::open(source, cache, &Silent).and_then(|text| text.digest()).ok();
            text.map(|text| text.sha256)
        };
        sha256(&in_its_role).is_some_and(|one| Some(one) == sha256(other))
    }
}

/// Compares the contents of two files; only files of equal length are read.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let length = |path| fs::metadata(path).ok().map(|metadata| metadata.len());
    let sha256 = |path| digest::of_file(path).ok();
    let is_one_path = || fs::canonicalize(one).ok() == fs::canonicalize(other).ok();
    length(one).is_some()
        && length(one) == length(other)
        && (is_one_path() || sha256(one) == sha256(other))
}
