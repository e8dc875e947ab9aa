//! [`Checkpoint`]: an opened folder. Headers are read once. Any thread reads weights on demand, by positioned reads into its own
//! buffer.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use rayon::prelude::*;
use safetensors::tensor::TensorInfo;
use sha2::{Digest, Sha256};

use super::folder::{FolderWeights, find_weights};
use super::header::{Header, OutputHeader, TensorEntry};
use super::naming::Naming;
use super::weight_source::{KeptRows, WeightSource};
use crate::bytes::{ByteSize, hex};
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;
use crate::input::{self, Expected};

/// Bytes that [`Checkpoint::fingerprint`] hashes at each of three places of a tensor.
const FINGERPRINT_BYTES: usize = 512;

/// An open safetensors file of a checkpoint.
#[derive(Debug)]
pub struct Shard {
    /// Its name in the folder.
    pub file_name: String,
    /// Its JSON header as stored, padding included, without the 8 bytes of its length.
    pub header: Vec<u8>,
    /// Its length in bytes.
    pub file_bytes: u64,
    /// The position in the file where the tensors' bytes begin.
    pub data_start: u64,
    /// The header of the output file that is written from this shard.
    pub(super) output_header: OutputHeader,
    file: File,
}

impl Shard {
    fn try_clone(&self) -> anyhow::Result<Self> {
        let file = self.file.try_clone();
        Ok(Self {
            file_name: self.file_name.clone(),
            header: self.header.clone(),
            output_header: self.output_header.clone(),
            file: file.with_context(|| format!("opening `{}` again", self.file_name))?,
            ..*self
        })
    }
}

/// A checkpoint folder, opened for reading: every header checked, every file kept open.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    shards: Arc<[Shard]>,
    /// Tensors, ordered by shard and offset.
    entries: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
    /// Tensors were left out or renamed: see [`Checkpoint::view`].
    is_view: bool,
    /// The names in the files.
    naming: Naming,
    /// The reader of tensors that the files store in another form.
    restorer: Option<Restorer>,
}

/// A reader of tensors that files store in another form.
#[derive(Clone)]
struct Restorer(Arc<dyn WeightSource>);

impl fmt::Debug for Restorer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Restorer({})", self.0.place())
    }
}

impl Checkpoint {
    /// Opens `folder`, which holds `model.safetensors`, or `model.safetensors.index.json` and its shards. Reads only headers.
    ///
    /// # Errors
    /// Fails when the folder or a shard is missing, when the folder holds only pickles, and when a header disagrees with itself, with
    /// the length of its file, or with the index.
    pub fn open(folder: &Path) -> anyhow::Result<Self> {
        let FolderWeights { shards: names, weight_map } = find_weights(folder)?;
        let mut shards: Vec<Shard> = Vec::with_capacity(names.len());
        let mut entries: Vec<TensorEntry> = Vec::new();
        let mut by_name: HashMap<String, usize> = HashMap::new();
        for file_name in names {
            let path = folder.join(&file_name);
            let (shard, found) = open_shard(&path, file_name, shards.len())?;
            for entry in found {
                if let Some(first) = by_name.insert(entry.name.clone(), entries.len()) {
                    // `first` indexes an entry pushed earlier, whose shard is open.
                    let other = &shards[entries[first].shard].file_name;
                    return Err(Failure::new(format!("tensor `{}` is in two files", entry.name))
                        .detail(format!(
                            "`{other}` and `{}` in `{}`",
                            shard.file_name,
                            folder.display()
                        ))
                        .hint("download the checkpoint again into an empty folder")
                        .into());
                }
                entries.push(entry);
            }
            shards.push(shard);
        }
        for (name, file_name) in &weight_map {
            // A name that no file has matters only if the model needs the tensor.
            let found = by_name.get(name).map(|&at| shards[entries[at].shard].file_name.as_str());
            if let Some(other) = found.filter(|found| found != file_name) {
                return Err(Failure::new(format!(
                    "shard `{file_name}` does not hold tensor `{name}`"
                ))
                .detail(format!(
                    "the index in `{}` says so, but it is in `{other}`",
                    folder.display()
                ))
                .hint("download the checkpoint again")
                .into());
            }
        }
        let naming = Naming::of(entries.iter().map(|entry| entry.name.as_str()));
        entries.iter_mut().for_each(|entry| entry.name = naming.used(&entry.name));
        let names = entries.iter().map(|entry| entry.name.clone());
        Ok(Self {
            folder: folder.to_path_buf(),
            shards: shards.into(),
            by_name: names.zip(0..).collect(),
            entries,
            is_view: false,
            naming,
            restorer: None,
        })
    }

    /// Opens a single safetensors file of a folder. Reads only its header.
    ///
    /// # Errors
    /// Fails when the file cannot be opened, and when its header disagrees with itself or with the length of the file.
    pub fn open_file(folder: &Path, file_name: &str) -> anyhow::Result<Self> {
        let (shard, entries) = open_shard(&folder.join(file_name), file_name.to_owned(), 0)?;
        let by_name =
            entries.iter().enumerate().map(|(at, entry)| (entry.name.clone(), at)).collect();
        Ok(Self {
            folder: folder.to_path_buf(),
            shards: [shard].into(),
            entries,
            by_name,
            is_view: false,
            naming: Naming::PLAIN,
            restorer: None,
        })
    }

    /// The tensors `entries` of this checkpoint in place of its tensors, all of them read by `restorer`, which knows an entry by its file
    /// and its position. The output of this view has files of its own, [`super::Layout::of`].
    ///
    /// # Errors
    /// Fails when two tensors have the same name.
    pub fn presenting(
        &self,
        entries: Vec<TensorEntry>,
        restorer: Arc<dyn WeightSource>,
    ) -> anyhow::Result<Self> {
        let by_name: HashMap<String, usize> =
            entries.iter().map(|entry| entry.name.clone()).zip(0..).collect();
        if by_name.len() != entries.len() {
            anyhow::bail!("two tensors of `{}` have the same name", self.place());
        }
        Ok(Self {
            folder: self.folder.clone(),
            shards: Arc::clone(&self.shards),
            entries,
            by_name,
            is_view: true,
            naming: self.naming,
            restorer: Some(Restorer(restorer)),
        })
    }

    /// The tensors of this checkpoint under new names: `rename` returns the new name, or `None` for a tensor that is left out. The
    /// view reads the same files. Its output has files of its own, [`super::Layout::of`].
    ///
    /// # Errors
    /// Fails when two tensors get the same name.
    pub fn view(&self, rename: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Self> {
        let mut entries: Vec<TensorEntry> = Vec::new();
        let mut by_name: HashMap<String, usize> = HashMap::new();
        for entry in &self.entries {
            let Some(name) = rename(&entry.name) else {
                continue;
            };
            if by_name.insert(name.clone(), entries.len()).is_some() {
                anyhow::bail!("two tensors of `{}` would be `{name}`", self.place());
            }
            entries.push(TensorEntry { name, ..entry.clone() });
        }
        Ok(Self {
            folder: self.folder.clone(),
            shards: Arc::clone(&self.shards),
            entries,
            by_name,
            is_view: true,
            naming: self.naming,
            restorer: self.restorer.clone(),
        })
    }

    /// This checkpoint, with each tensor of `other` in place of its own tensor of the same name, whatever the shapes. It reads the
    /// files of both checkpoints. Its output has files of its own, [`super::Layout::of`].
    ///
    /// # Errors
    /// Fails for a tensor that this checkpoint does not have, when the system has no more open files, and where either stores tensors in
    /// another form.
    pub fn with_tensors_of(&self, other: &Self) -> anyhow::Result<Self> {
        if self.restorer.is_some() || other.restorer.is_some() {
            anyhow::bail!("`{}` stores its tensors in another form", self.place());
        }
        let shards = self.shards.iter().chain(other.shards.iter());
        let shards: anyhow::Result<Vec<Shard>> = shards.map(Shard::try_clone).collect();
        let mut entries = self.entries.clone();
        for entry in &other.entries {
            let Some(at) = self.position(&entry.name) else {
                anyhow::bail!("`{}` has no tensor `{}`", self.place(), entry.name);
            };
            entries[at] = TensorEntry { shard: self.shards.len() + entry.shard, ..entry.clone() };
        }
        Ok(Self {
            folder: self.folder.clone(),
            shards: shards?.into(),
            entries,
            by_name: self.by_name.clone(),
            is_view: true,
            naming: self.naming,
            restorer: None,
        })
    }

    /// The name in the files, from the name the program uses.
    pub fn stored_name<'n>(&self, used: &'n str) -> Cow<'n, str> {
        self.naming.stored(used)
    }

    /// The name the program uses, from the name in the files.
    pub fn used_name(&self, stored: &str) -> String {
        self.naming.used(stored)
    }

    /// The names in the files.
    pub(super) fn naming(&self) -> Naming {
        self.naming
    }

    /// Returns whether this is a view of some tensors.
    pub(super) fn is_view(&self) -> bool {
        self.is_view
    }

    /// The folder, as the user gave it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The files, sorted by name.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Every tensor, in file order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorEntry> {
        self.entries.iter()
    }

    /// The stored bytes of all tensors, headers not counted.
    pub fn total_bytes(&self) -> ByteSize {
        self.entries.iter().map(|entry| ByteSize(entry.bytes)).sum()
    }

    /// SHA-256 over every shard's name, length and header, in hex. It identifies a layout without reading weights; checkpoints with the
    /// same layout and different weights share it.
    pub fn identity(&self) -> String {
        let mut hasher = Sha256::new();
        for shard in self.shards.iter() {
            // The lengths keep two lists of shards from feeding the same bytes.
            hasher.update((shard.file_name.len() as u64).to_le_bytes());
            hasher.update(&shard.file_name);
            hasher.update(shard.file_bytes.to_le_bytes());
            hasher.update((shard.header.len() as u64).to_le_bytes());
            hasher.update(&shard.header);
        }
        hex(&hasher.finalize())
    }

    /// SHA-256 over [`Checkpoint::identity`] and a few bytes from the beginning, the middle and the end of every tensor. It distinguishes
    /// checkpoints of the same architecture without reading them whole. Checkpoints that differ only in unread bytes share it.
    pub fn fingerprint(&self) -> anyhow::Result<String> {
        let pieces: anyhow::Result<Vec<[u8; 3 * FINGERPRINT_BYTES]>> = self
            .entries
            .par_iter()
            .map(|entry| {
                let mut pieces = [0; 3 * FINGERPRINT_BYTES];
                let length = FINGERPRINT_BYTES.min(entry.bytes as usize);
                let last = entry.bytes - length as u64;
                for (piece, start) in pieces.chunks_mut(FINGERPRINT_BYTES).zip([0, last / 2, last])
                {
                    self.read(entry, start, &mut piece[..length])?;
                }
                Ok(pieces)
            })
            .collect();
        let mut hasher = Sha256::new();
        hasher.update(self.identity());
        for pieces in pieces? {
            hasher.update(pieces);
        }
        Ok(hex(&hasher.finalize()))
    }

    /// The index of the tensor `name` in [`Checkpoint::tensors`].
    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }
}

impl WeightSource for Checkpoint {
    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.position(name).and_then(|at| self.entries.get(at))
    }

    fn kept_rows(
        &self,
        entry: &TensorEntry,
        rows: Range<usize>,
        is_coded: bool,
        take: &mut dyn FnMut(KeptRows<'_>),
    ) -> anyhow::Result<bool> {
        match &self.restorer {
            Some(Restorer(restorer)) => restorer.kept_rows(entry, rows, is_coded, take),
            None => Ok(false),
        }
    }

    fn read(&self, entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
        if let Some(Restorer(restorer)) = &self.restorer {
            return restorer.read(entry, start, buffer);
        }
        let cannot = |why: String| {
            Failure::new(format!(
                "cannot read tensor `{}` from `{}`",
                entry.name,
                self.file_of(entry)
            ))
            .detail(why)
        };
        let end = start.checked_add(buffer.len() as u64).filter(|&end| end <= entry.bytes);
        let (Some(_), Some(shard)) = (end, self.shards.get(entry.shard)) else {
            let length = buffer.len();
            return Err(cannot(format!(
                "{length} bytes from {start} leave its {} bytes",
                entry.bytes
            ))
            .into());
        };
        let offset = entry.offset + start;
        read_exact_at(&shard.file, buffer, offset).map_err(|error| {
            let failure =
                cannot(format!("{} bytes at file offset {offset}: {error}", buffer.len()));
            match error.kind() {
                std::io::ErrorKind::UnexpectedEof => failure
                    .detail("the file became shorter after it was opened")
                    .hint("run again when nothing else writes to that folder"),
                _ => failure,
            }
        })?;
        Ok(())
    }

    fn place(&self) -> String {
        self.folder.display().to_string()
    }

    fn file_of(&self, entry: &TensorEntry) -> String {
        match self.shards.get(entry.shard) {
            Some(shard) => self.folder.join(&shard.file_name).display().to_string(),
            None => format!("shard {}", entry.shard),
        }
    }
}

/// The tensors of file `index`, ordered by offset.
pub(super) fn entries_of(header: &Header, index: usize) -> Vec<TensorEntry> {
    let data_start = header.data_start();
    let entry = |(name, info): &(String, TensorInfo)| TensorEntry {
        name: name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
        shard: index,
        offset: data_start + info.data_offsets.0 as u64,
        bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
    };
    let mut entries: Vec<TensorEntry> = header.tensors.iter().map(entry).collect();
    entries.sort_by_key(|entry| (entry.offset, entry.bytes));
    entries
}

/// Opens a file and lists its tensors by offset.
fn open_shard(
    path: &Path,
    file_name: String,
    index: usize,
) -> anyhow::Result<(Shard, Vec<TensorEntry>)> {
    let cannot = |error: &std::io::Error| {
        Failure::new(format!("cannot open `{}`", path.display())).detail(error.to_string())
    };
    let file = input::open(path, Expected::Weights)
        .map_err(|error| input::with_remedy(cannot(&error), &error))?;
    let file_bytes = file.metadata().map_err(|error| cannot(&error))?.len();
    let header = Header::read(&file, file_bytes, path)?;
    let data_start = header.data_start();
    let output_header = header.with_format();
    let entries = entries_of(&header, index);
    let shard =
        Shard { file_name, header: header.json, file_bytes, data_start, output_header, file };
    Ok((shard, entries))
}
