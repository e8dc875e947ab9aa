//! [`PartialModel`]: the model during a run. Written tensors come from the output, unwritten tensors from the source.
//!
//! A resumed run propagates its samples through the finished layers on the disk.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::header::TensorEntry;
use super::source::Checkpoint;
use super::weight_source::WeightSource;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;

/// The files of a [`PartialModel`], and the written tensors in them: the index of a file, and the start of its bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WrittenPlaces {
    files: Vec<PathBuf>,
    written: HashMap<String, (usize, u64)>,
}

/// A source of weights over unfinished files; see the first lines of this file.
#[derive(Debug)]
pub struct PartialModel {
    source: Arc<Checkpoint>,
    /// The output's files.
    files: Vec<(PathBuf, File)>,
    /// Written tensors → the index of their file, and the start of their bytes in it.
    written: HashMap<String, (usize, u64)>,
}

impl PartialModel {
    pub(super) fn new(
        source: Arc<Checkpoint>,
        files: Vec<(PathBuf, File)>,
        written: HashMap<String, (usize, u64)>,
    ) -> Self {
        Self { source, files, written }
    }

    /// The places of the written tensors, for another process.
    pub fn places(&self) -> WrittenPlaces {
        let files = self.files.iter().map(|(path, _)| path.clone()).collect();
        WrittenPlaces { files, written: self.written.clone() }
    }

    /// The same model in another process, which only reads.
    ///
    /// # Errors
    /// Fails when a file cannot be opened here: the folder must be on a file system that all processes share.
    pub fn at(source: Arc<Checkpoint>, places: WrittenPlaces) -> anyhow::Result<Self> {
        let open = |path: PathBuf| match File::open(&path) {
            Ok(file) => Ok((path, file)),
            Err(error) => Err(Failure::new(format!("cannot read `{}`: {error}", path.display()))
                .detail("the first rank has written finished layers there, and all ranks read them")
                .hint("name a folder with --save that all machines share")),
        };
        let files = places.files.into_iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { source, files, written: places.written })
    }

    /// The place of a written tensor: path and file, and the start of its bytes.
    fn place_of(&self, entry: &TensorEntry) -> Option<(&Path, &File, u64)> {
        let (file, offset) = self.written.get(&entry.name)?;
        let (path, file) = self.files.get(*file)?;
        Some((path, file, *offset))
    }
}

impl WeightSource for PartialModel {
    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.source.entry(name)
    }

    fn read(&self, entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
        let Some((path, file, offset)) = self.place_of(entry) else {
            return self.source.read(entry, start, buffer);
        };
        let end = start.checked_add(buffer.len() as u64);
        anyhow::ensure!(
            end.is_some_and(|end| end <= entry.bytes),
            "{} bytes from {start} leave the {} bytes of `{}`",
            buffer.len(),
            entry.bytes,
            entry.name
        );
        read_exact_at(file, buffer, offset + start).map_err(|error| {
            Failure::new(format!("cannot read `{}`", path.display()))
                .detail(format!("tensor `{}`: {error}", entry.name))
                .into()
        })
    }

    fn place(&self) -> String {
        self.source.place()
    }

    fn file_of(&self, entry: &TensorEntry) -> String {
        match self.place_of(entry) {
            Some((path, ..)) => path.display().to_string(),
            None => self.source.file_of(entry),
        }
    }
}
