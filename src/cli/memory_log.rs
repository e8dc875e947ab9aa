//! `--log-memory`: the original's checkpoints as they are reached, appended to `memory_log.csv` at once, so that the log of a
//! run that was killed for its memory still shows where.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use crate::bytes::ByteSize;
use crate::placement::inventory;
use crate::report::memory_log as text;
use crate::run::manifest::MemorySample;

/// The file's name in the run folder.
pub(super) const FILE: &str = "memory_log.csv";

/// What was logged, and where it goes.
#[derive(Debug)]
pub(super) struct MemoryLog {
    started_unix_seconds: u64,
    total: Option<ByteSize>,
    samples: Vec<MemorySample>,
    file: Option<(PathBuf, File)>,
    /// The first write that failed; the run goes on without the file.
    failure: Option<String>,
}

impl Default for MemoryLog {
    /// An empty log of a run that begins now.
    fn default() -> Self {
        Self {
            started_unix_seconds: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |elapsed| elapsed.as_secs()),
            total: inventory::total_memory(),
            samples: Vec::new(),
            file: None,
            failure: None,
        }
    }
}

impl MemoryLog {
    /// Opens the file, which goes on where an earlier process left one, and writes what there is.
    ///
    /// # Errors
    /// Fails when it cannot be created.
    pub(super) fn write_to(&mut self, path: &Path) -> Result<()> {
        let creating = || format!("creating `{}`", path.display());
        let file = File::options().create(true).append(true).open(path);
        let file = file.with_context(creating)?;
        let is_new = file.metadata().with_context(creating)?.len() == 0;
        self.file = Some((path.to_path_buf(), file));
        if is_new {
            self.append(text::CSV_HEADER);
        }
        for sample in &self.samples.clone() {
            self.append(&text::csv_row(
                sample,
                self.started_unix_seconds,
                self.total,
            ));
        }
        Ok(())
    }

    /// Takes a sample, and returns the line that tells it.
    pub(super) fn add(&mut self, sample: MemorySample) -> String {
        self.append(&text::csv_row(
            &sample,
            self.started_unix_seconds,
            self.total,
        ));
        let line = text::line(&sample, self.total);
        self.samples.push(sample);
        line
    }

    /// The table at the end.
    pub(super) fn summary(&self) -> String {
        let mut summary = text::summary(&self.samples, self.total);
        if let Some(failure) = &self.failure {
            summary += &format!("{failure}\n");
        }
        summary
    }

    fn append(&mut self, row: &str) {
        let Some((path, file)) = &mut self.file else {
            return;
        };
        if let Err(error) = file.write_all(row.as_bytes()).and_then(|()| file.flush()) {
            self.failure = Some(format!("`{}` is incomplete: {error}", path.display()));
            self.file = None;
        }
    }
}
