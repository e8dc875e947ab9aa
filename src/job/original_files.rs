//! The files of a model folder beside its weights, which a packed folder keeps so that the original folder can be restored.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Result;
use sha2::{Digest, Sha256};

use crate::bytes::{ByteSize, LARGEST_SETTINGS, hex};
use crate::checkpoint::{
    CONFIG_FILE, Checkpoint, INDEX_FILE, PACKED_FILE, PARTIAL_SUFFIX, SUMS_FILE, sidecars_in,
};
use crate::failure::Failure;
use crate::input::{self, Expected};
use crate::packed::record::{LARGEST, OriginalFile};

/// The largest file that is kept though its name is none of a tokenizer, a licence or a setting.
const LARGEST_OTHER: ByteSize = ByteSize(64 << 20);

/// The names that a packed folder needs for its own files.
const TEXTS: [&str; 3] = [CONFIG_FILE, INDEX_FILE, SUMS_FILE];

/// Bytes that are hashed at once.
const PIECE: usize = 1 << 20;

/// The files of a folder beside its weights.
#[derive(Debug, Default)]
pub(super) struct OriginalFiles {
    /// Lengths and hashes of all kept files.
    pub(super) files: BTreeMap<String, OriginalFile>,
    /// The content of the files whose names the packed folder needs.
    pub(super) texts: BTreeMap<String, String>,
    /// Files that are copied: paths and names.
    pub(super) copied: Vec<(PathBuf, String)>,
    /// Names of files that are not kept.
    pub(super) left_out: Vec<String>,
}

impl OriginalFiles {
    /// Looks through the folder of a checkpoint, and hashes the files that are kept.
    ///
    /// # Errors
    /// Fails when the folder cannot be listed or a file that belongs to the model cannot be read.
    pub(super) fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let folder = checkpoint.folder();
        let sidecars = sidecars_in(folder)?;
        let cannot_list = |error: std::io::Error| {
            Failure::new(format!("cannot list `{}`", folder.display())).detail(error.to_string())
        };
        let mut names = Vec::new();
        for entry in fs::read_dir(folder).map_err(cannot_list)? {
            names.push(entry.map_err(cannot_list)?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        let mut found = Self::default();
        for name in names {
            let path = folder.join(&name);
            if checkpoint.shards().iter().any(|shard| shard.file_name == name) {
                continue;
            }
            if path.is_dir() {
                found.left_out.push(format!("{name}/"));
            } else if TEXTS.contains(&name.as_str()) {
                found.add_text(&path, name)?;
            } else if sidecars.contains(&name) || is_kept(&path, &name) {
                let file = hash_of(&path)?;
                found.files.insert(name.clone(), file);
                found.copied.push((path, name));
            } else {
                found.left_out.push(name);
            }
        }
        Ok(found)
    }

    fn add_text(&mut self, path: &Path, name: String) -> Result<()> {
        let most = if name == INDEX_FILE { LARGEST } else { LARGEST_SETTINGS };
        let bytes = input::read(path, most, Expected::Copied)
            .map_err(|error| input::cannot_read(path, &error))?;
        let file = OriginalFile { bytes: bytes.len() as u64, sha256: hex(&Sha256::digest(&bytes)) };
        match String::from_utf8(bytes) {
            Ok(text) => {
                self.texts.insert(name.clone(), text);
                self.files.insert(name, file);
            }
            Err(_) => self.left_out.push(name),
        }
        Ok(())
    }
}

/// Returns whether a file that is no known part of a model is kept: a small file, and no weights or remains of a run.
fn is_kept(path: &Path, name: &str) -> bool {
    let is_of_a_run = ["prune.lock", "unfinished.json", "training.state", PACKED_FILE];
    let is_small = fs::metadata(path)
        .is_ok_and(|metadata| metadata.is_file() && metadata.len() <= LARGEST_OTHER.0);
    is_small
        && !name.ends_with(".safetensors")
        && !name.ends_with(PARTIAL_SUFFIX)
        && !is_of_a_run.contains(&name)
        // Names that are no UTF-8 have this character.
        && !name.contains('\u{fffd}')
        && crate::checkpoint::is_plain_name(name)
        && input::open(path, Expected::Copied).is_ok()
}

/// Length and hash of a file.
///
/// # Errors
/// Fails when it cannot be read.
pub(super) fn hash_of(path: &Path) -> Result<OriginalFile> {
    let mut reader =
        input::open(path, Expected::Copied).map_err(|error| input::cannot_read(path, &error))?;
    let (mut hasher, mut buffer, mut bytes) = (Sha256::new(), vec![0; PIECE], 0);
    loop {
        let read = reader.read(&mut buffer);
        let length = read.map_err(|error| input::cannot_read(path, &error))?;
        if length == 0 {
            return Ok(OriginalFile { bytes, sha256: hex(&hasher.finalize()) });
        }
        hasher.update(&buffer[..length]);
        bytes += length as u64;
    }
}
