//! [`PackedRecord`]: `packed.json`, what the layout of compressed-tensors cannot say.
//!
//! It has the header of every original weight file, `config.json` and the index as they were, and the hash of every original file. So the
//! original folder can be restored byte for byte. A reader must understand every key: unknown keys and versions are refused.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::matrix::{PackForm, PackedValues, dtype_named};
use crate::bytes::{ByteSize, unhex};
use crate::checkpoint::{Checkpoint, INDEX_FILE, Layout, TensorEntry, WeightSource, is_plain_name};
use crate::failure::Failure;
use crate::input::{self, Expected};
use crate::linalg::StoredDtype;

/// The file's name.
pub use crate::checkpoint::PACKED_FILE;

/// The version of the format. A reader refuses others.
pub const FORMAT: u32 = 1;

/// The largest record that is read. Headers have most of it: a thousand layers take a MiB.
pub const LARGEST: ByteSize = ByteSize(256 << 20);

/// The content of `packed.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedRecord {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of the program that packed.
    pub prune_version: String,
    /// The kept values.
    pub values: PackedValues,
    /// Every file of the original folder that unpacking restores.
    pub files: BTreeMap<String, OriginalFile>,
    /// The JSON header of every original weight file as stored, padding included, without the 8 bytes of its length.
    pub headers: BTreeMap<String, String>,
    /// The content of the files whose names the packed folder uses itself: `config.json`, the index, `SHA256SUMS`.
    pub texts: BTreeMap<String, String>,
    /// The packed matrices, by tensor name as in the files.
    pub matrices: BTreeMap<String, MatrixRecord>,
}

/// A file of the original folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OriginalFile {
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of the whole file, in hex.
    pub sha256: String,
}

/// A packed matrix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatrixRecord {
    /// The dtype of the dense matrix by its name in safetensors: `BF16`.
    pub dtype: String,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// The form of the mask.
    pub form: PackForm,
}

impl MatrixRecord {
    /// The dtype of the dense matrix.
    ///
    /// # Errors
    /// Fails for all names but F32, F16 and BF16.
    pub fn dtype(&self) -> Result<StoredDtype> {
        dtype_named(&self.dtype).ok_or_else(|| {
            let of = &self.dtype;
            Failure::new(format!("`{PACKED_FILE}` has a matrix of the dtype `{of}`"))
                .detail("F32, F16 and BF16 are read")
                .hint(AGAIN)
                .into()
        })
    }
}

const AGAIN: &str =
    "download the checkpoint again, or pack the dense one again: prune pack DENSE --save OUT";

impl PackedRecord {
    /// Reads the record of a folder; `None` where there is none.
    ///
    /// # Errors
    /// Fails for a file that cannot be read, is larger than [`LARGEST`], is no record, has unknown keys, or is of another version.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(PACKED_FILE);
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let bytes = input::read(&path, LARGEST, Expected::Json)
            .map_err(|error| input::cannot_read(&path, &error).or_hint(AGAIN))?;
        Self::parse(&bytes).map(Some).map_err(|why| {
            let shown = path.display();
            Failure::new(format!("cannot read `{shown}`: it is no record of a packed checkpoint"))
                .detail(why)
                .hint(format!("{AGAIN}; a newer version of prune may read it"))
                .into()
        })
    }

    /// Parses a record.
    ///
    /// # Errors
    /// Fails with the reason for bytes that are no record of this version.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        // Read first: another version has other keys.
        #[derive(Deserialize)]
        struct RecordVersion {
            format: u32,
        }
        let RecordVersion { format } =
            serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if format != FORMAT {
            return Err(format!("its format is {format}, this program reads {FORMAT}"));
        }
        let record: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        record.check()?;
        Ok(record)
    }

    /// Checks names and hashes.
    fn check(&self) -> Result<(), String> {
        for (name, file) in &self.files {
            if !is_plain_name(name) || name == PACKED_FILE {
                return Err(format!("`{name}` is no name of an original file"));
            }
            if unhex(&file.sha256).is_none() {
                return Err(format!("the hash of `{name}` is no SHA-256"));
            }
        }
        let parts = self.headers.keys().chain(self.texts.keys());
        if let Some(name) = parts.clone().find(|name| !self.files.contains_key(*name)) {
            return Err(format!("`{name}` is not among the files"));
        }
        if self.headers.is_empty() {
            return Err("it has no headers".to_string());
        }
        let is_weights = |name: &&String| name.ends_with(".safetensors");
        if let Some(name) = self.headers.keys().find(|name| !is_weights(name)) {
            return Err(format!("`{name}` is no name of a weight file"));
        }
        if let Some(name) = self.texts.keys().find(|name| self.headers.contains_key(*name)) {
            return Err(format!("`{name}` is a text and a weight file"));
        }
        Ok(())
    }

    /// Names of the original files that the packed folder has as they were.
    pub fn copied(&self) -> impl Iterator<Item = (&str, &OriginalFile)> {
        let files = self.files.iter();
        let is_copied =
            |name: &str| !self.headers.contains_key(name) && !self.texts.contains_key(name);
        files.map(|(name, file)| (name.as_str(), file)).filter(move |(name, _)| is_copied(name))
    }

    /// The layout of the original weight files; names of tensors are translated as in `base`.
    ///
    /// # Errors
    /// Fails for a header that is not valid or does not agree with the length of its file.
    pub fn layout(&self, base: &Checkpoint) -> Result<Layout> {
        let files = self.headers.iter().map(|(name, header)| {
            let bytes = self.files.get(name).map_or(0, |file| file.bytes);
            (name.clone(), header.clone().into_bytes(), bytes)
        });
        Layout::restored(base, files.collect(), self.texts.contains_key(INDEX_FILE))
    }

    /// Sorts the tensors of a packed checkpoint in the order of the original files, and checks that they are the original tensors.
    ///
    /// # Errors
    /// Fails for a tensor that is missing, added, or of another dtype or shape.
    pub(super) fn sort(&self, base: &Checkpoint, entries: &mut [TensorEntry]) -> Result<()> {
        let layout = self.layout(base)?;
        let differs = |why: String| {
            Failure::new(format!("`{}` is not the checkpoint of its `{PACKED_FILE}`", base.place()))
                .detail(why)
                .hint(AGAIN)
        };
        for entry in entries.iter() {
            match layout.entry(&entry.name) {
                Some(original)
                    if (original.dtype, &original.shape) == (entry.dtype, &entry.shape) => {}
                Some(original) => {
                    return Err(differs(format!(
                        "tensor `{}` is {} {:?}, it was {} {:?}",
                        entry.name, entry.dtype, entry.shape, original.dtype, original.shape
                    ))
                    .into());
                }
                None => {
                    return Err(differs(format!("tensor `{}` was not there", entry.name)).into());
                }
            }
        }
        let originals = layout.tensors();
        if entries.len() != originals.len() {
            let has = |name: &str| entries.iter().any(|entry| entry.name == name);
            let missing = originals.iter().find(|entry| !has(&entry.name));
            let name = missing.map_or("", |entry| entry.name.as_str());
            return Err(differs(format!("tensor `{name}` is missing")).into());
        }
        entries.sort_by_key(|entry| {
            layout
                .entry(&entry.name)
                .map(|original| (original.shard, original.offset, original.bytes))
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"format":1,"prune_version":"0","values":"exact","files":{"model.safetensors":{"bytes":8,
        "sha256":"0000000000000000000000000000000000000000000000000000000000000000"}},
        "headers":{"model.safetensors":"{}"},"texts":{},"matrices":{"a.weight":{"dtype":"F32","shape":[1,2],"form":"sparse-bitmask"}}}"#;

    #[test]
    fn what_is_not_understood_is_refused() {
        assert_eq!(PackedRecord::parse(GOOD.as_bytes()).map(|record| record.matrices.len()), Ok(1));
        for (from, to, why) in [
            ("\"format\":1", "\"format\":2,\"new\":0", "its format is 2, this program reads 1"),
            ("\"texts\"", "\"more\":1,\"texts\"", "unknown field `more`"),
            ("\"bytes\":8", "\"bytes\":8,\"x\":1", "unknown field `x`"),
            ("\"bytes\":8", "\"bytes\":-8", "invalid value"),
            ("\"form\":\"sparse-bitmask\"", "\"form\":\"sparse\"", "unknown variant `sparse`"),
            ("\"model.safetensors\":{\"b", "\"../model.safetensors\":{\"b", "is no name"),
            ("\"headers\":{\"model.", "\"headers\":{\"other.", "`other.safetensors` is not among"),
            ("\"texts\":{}", "\"texts\":{\"model.safetensors\":\"\"}", "a text and a weight file"),
            ("\"0000", "\"x000", "is no SHA-256"),
            ("[1,2]", "[1,2,3]", "trailing"),
        ] {
            let bad = GOOD.replace(from, to);
            assert_ne!(bad, GOOD, "{from}");
            let found = PackedRecord::parse(bad.as_bytes()).expect_err(to);
            assert!(found.contains(why), "{to}: {found}");
        }
    }
}
