//! `memory_log.csv` of `--log-memory`: the original's checkpoints, each appended at once, so that the log of a run that was
//! killed for its memory still shows where.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::bytes::ByteSize;
use crate::job::machine::unix_seconds;
use crate::placement::inventory;
use crate::report::memory_log as text;
use crate::run::manifest::MemorySample;

/// The file's name in the run folder.
pub(crate) const FILE: &str = "memory_log.csv";

/// The rows of the log.
#[derive(Debug)]
pub(in crate::job) struct MemoryLog {
    started_unix_seconds: u64,
    total: Option<ByteSize>,
    /// Rows that wait for the file.
    waiting: String,
    file: Option<(PathBuf, File)>,
}

impl Default for MemoryLog {
    /// An empty log of a run that begins now.
    fn default() -> Self {
        Self {
            started_unix_seconds: unix_seconds(),
            total: inventory::total_memory(),
            waiting: String::new(),
            file: None,
        }
    }
}

impl MemoryLog {
    /// Opens the file, continues the file of an earlier process, and writes the rows so far.
    pub(in crate::job) fn write_to(&mut self, path: &Path) -> Result<()> {
        let creating = || format!("creating `{}`", path.display());
        let file = File::options().create(true).append(true).open(path);
        let file = file.with_context(creating)?;
        if file.metadata().with_context(creating)?.len() == 0 {
            self.waiting.insert_str(0, text::CSV_HEADER);
        }
        self.file = Some((path.to_path_buf(), file));
        self.append("")
    }

    /// Takes a sample.
    ///
    /// # Errors
    /// Fails once when the file cannot be written; the run continues without the file.
    pub(in crate::job) fn add(&mut self, sample: &MemorySample) -> Result<()> {
        self.append(&text::csv_row(sample, self.started_unix_seconds, self.total))
    }

    fn append(&mut self, row: &str) -> Result<()> {
        self.waiting += row;
        let Some((path, file)) = &mut self.file else {
            return Ok(());
        };
        let rows = std::mem::take(&mut self.waiting);
        let written = file.write_all(rows.as_bytes()).and_then(|()| file.flush());
        let written = written.with_context(|| format!("`{}` is incomplete", path.display()));
        if written.is_err() {
            self.file = None;
        }
        written
    }
}
