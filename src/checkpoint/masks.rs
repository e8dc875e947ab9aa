//! [`MaskWriter`]: masks as packed bits in a safetensors file, written one by one, in any order.
//!
//! All sizes are known before the first mask. So the file gets its header and its whole length before the work begins, under a
//! partial name, and no mask stays in memory. The file is read back before it gets its final name.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use sha2::{Digest, Sha256};

use super::atomic::{cannot_write, sync_folder};
use super::header::{encode_header, in_a_row};
use super::names::{CHUNK_BYTES, partial_of};
use super::target::allocate_file;
use crate::bytes::{ByteSize, hex};
use crate::disk;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;
use crate::run::{Events, Meter};

/// The name of the masks in a run folder.
pub const MASKS_FILE: &str = "masks.safetensors";

/// The layout in words, for the metadata of the file.
const LAYOUT: &str = "one uint8 tensor per pruned matrix [out_features, in_features]: one bit per weight, 1 = pruned, \
    row-major without padding between rows, least significant bit first";

const LAYOUT_VERSION: &str = "1";

/// Writes the masks of a run; see the module's first lines.
#[derive(Debug)]
pub struct MaskWriter {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    /// Masks by name, in the order of the file.
    masks: BTreeMap<String, Slot>,
}

/// The position of a mask.
#[derive(Debug, Clone, Copy)]
struct Slot {
    offset: u64,
    bytes: usize,
    /// SHA-256 of the bytes given to the disk.
    digest: Option<[u8; 32]>,
}

struct MaskLayout {
    header: Vec<u8>,
    file_bytes: u64,
    masks: BTreeMap<String, Slot>,
}

impl MaskLayout {
    fn of(matrices: &BTreeMap<String, [usize; 2]>, mut metadata: BTreeMap<String, String>) -> Self {
        let shapes =
            serde_json::to_string(matrices).expect("strings and integers always have a JSON form");
        for (key, text) in [
            ("format", "pt"),
            ("prune_masks", LAYOUT_VERSION),
            ("layout", LAYOUT),
            ("shapes", &shapes),
        ] {
            metadata.insert(key.into(), text.into());
        }
        let bytes = matrices.iter().map(|(name, [rows, columns])| {
            (name.clone(), Dtype::U8, vec![(rows * columns).div_ceil(8)])
        });
        let tensors = in_a_row(bytes);
        let end = tensors.last().map_or(0, |(_, info)| info.data_offsets.1);
        let header = encode_header(&metadata, &tensors);
        let file_bytes = (header.len() + end) as u64;
        let masks = tensors
            .into_iter()
            .map(|(name, info)| {
                let (start, end) = info.data_offsets;
                let slot = Slot {
                    offset: (header.len() + start) as u64,
                    bytes: end - start,
                    digest: None,
                };
                (name, slot)
            })
            .collect();
        Self { header, file_bytes, masks }
    }
}

impl MaskWriter {
    /// Allocates the file for masks of these matrices, `(name, [out_features, in_features])`, as `<path>.partial`.
    ///
    /// The file's metadata is `metadata` (the origin of the masks) with the version, a description of the layout, and the shapes of
    /// all matrices as JSON. Tensors are in the order of their names, as in files written by the safetensors library.
    ///
    /// # Errors
    /// Fails when the disk refuses or has no room; then no partial file stays.
    pub fn create(
        path: &Path,
        matrices: &BTreeMap<String, [usize; 2]>,
        metadata: BTreeMap<String, String>,
        events: &dyn Events,
    ) -> anyhow::Result<Self> {
        let layout = MaskLayout::of(matrices, metadata);
        let partial = partial_of(path);
        let mut meter = Meter::start(events, "allocate masks", layout.file_bytes);
        let allocated = allocate_file(&partial, &layout.header, layout.file_bytes, &mut meter)
            .and_then(|file| {
                disk::sync_folder(path.parent().unwrap_or(Path::new(".")))?;
                Ok(file)
            });
        let file = allocated.map_err(|error| {
            // The first error is reported.
            let _ = disk::remove(&partial);
            cannot_write(&partial, &error)
                .detail(format!("the masks need {}", ByteSize(layout.file_bytes)))
        })?;
        meter.finish();
        Ok(Self { path: path.to_path_buf(), partial, file, masks: layout.masks })
    }

    /// Opens the file that an earlier process left, finished or not, and compares each mask of `finished` (matrix → SHA-256 of its
    /// bits, in hex) with its hash. Also returns the names of damaged masks: the hash differs, or no matrix has the name. Returns
    /// `None` if the file is missing or its layout is different.
    ///
    /// # Errors
    /// Fails when the file cannot be read or renamed.
    pub fn reopen(
        path: &Path,
        matrices: &BTreeMap<String, [usize; 2]>,
        metadata: BTreeMap<String, String>,
        finished: &BTreeMap<String, String>,
    ) -> anyhow::Result<Option<(Self, Vec<String>)>> {
        let MaskLayout { header, file_bytes, mut masks } = MaskLayout::of(matrices, metadata);
        let partial = partial_of(path);
        if !partial.is_file() {
            if !path.is_file() {
                return Ok(None);
            }
            // Otherwise, after a power cut, the final name could stand over half-written masks.
            disk::rename(path, &partial)
                .and_then(|()| disk::sync_folder(path.parent().unwrap_or(Path::new("."))))
                .map_err(|error| cannot_write(path, &error))?;
        }
        let cannot = |error: std::io::Error| cannot_write(&partial, &error);
        let file = disk::open(&partial).map_err(cannot)?;
        let length = file.metadata().map_err(cannot)?.len();
        let mut found = vec![0; header.len()];
        if length != file_bytes || read_exact_at(&file, &mut found, 0).is_err() || found != header {
            return Ok(None);
        }
        let mut damaged = Vec::new();
        for (name, digest) in finished {
            let Some(slot) = masks.get_mut(name) else {
                damaged.push(name.clone());
                continue;
            };
            let mut bits = vec![0; slot.bytes];
            read_exact_at(&file, &mut bits, slot.offset).map_err(cannot)?;
            let found: [u8; 32] = Sha256::digest(&bits).into();
            if hex(&found) == *digest {
                slot.digest = Some(found);
            } else {
                damaged.push(name.clone());
            }
        }
        let writer = Self { path: path.to_path_buf(), partial, file, masks };
        Ok(Some((writer, damaged)))
    }

    /// Forgets written masks, so that they can be written again.
    pub fn forget<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) {
        for name in names {
            if let Some(slot) = self.masks.get_mut(name) {
                slot.digest = None;
            }
        }
    }

    /// Waits until every mask written so far is on the disk.
    pub fn sync(&self) -> anyhow::Result<()> {
        disk::sync(&self.file).map_err(|error| cannot_write(&self.partial, &error).into())
    }

    /// Writes the packed `bits` of the matrix `name`.
    ///
    /// # Errors
    /// Fails when the matrix is unknown, `bits` has the wrong length, the mask was written before, or the disk refuses.
    pub fn write(&mut self, name: &str, bits: &[u8]) -> anyhow::Result<()> {
        let Some(slot) = self.masks.get_mut(name) else {
            anyhow::bail!("no mask of `{name}` was announced");
        };
        if slot.digest.is_some() {
            anyhow::bail!("the mask of `{name}` was written twice");
        }
        if bits.len() != slot.bytes {
            anyhow::bail!(
                "the mask of `{name}` has {} bytes, {} were handed over",
                slot.bytes,
                bits.len()
            );
        }
        disk::write_all_at(&self.file, bits, slot.offset).map_err(|error| {
            cannot_write(&self.partial, &error)
                .detail(format!("while writing the mask of `{name}`"))
        })?;
        slot.digest = Some(Sha256::digest(bits).into());
        Ok(())
    }

    /// Reads every mask back, then gives the file its name.
    ///
    /// # Errors
    /// Fails when a mask is missing or damaged, or the disk refuses; then the file keeps its partial name.
    pub fn finish(self) -> anyhow::Result<()> {
        let Self { path, partial, file, masks } = self;
        disk::sync(&file).map_err(|error| cannot_write(&partial, &error))?;
        let mut buffer = Vec::new();
        for (name, slot) in &masks {
            let Some(written) = slot.digest else {
                anyhow::bail!("the mask of `{name}` was not written");
            };
            let wrong = |why: String| {
                Failure::new(format!("verification failed in `{}`: {why}", partial.display()))
                    .hint("check the disk and memory, then run again")
            };
            let mut hasher = Sha256::new();
            for start in (0..slot.bytes).step_by(CHUNK_BYTES) {
                buffer.resize(CHUNK_BYTES.min(slot.bytes - start), 0);
                read_exact_at(&file, &mut buffer, slot.offset + start as u64)
                    .map_err(|error| wrong(format!("the mask of `{name}`: {error}")))?;
                hasher.update(&buffer);
            }
            if hasher.finalize().as_slice() != written {
                return Err(wrong(format!("the mask of `{name}` is not what was written")).into());
            }
        }
        // Windows cannot rename an open file.
        drop(file);
        disk::rename(&partial, &path).map_err(|error| cannot_write(&path, &error))?;
        match path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            Some(folder) => sync_folder(folder),
            None => sync_folder(Path::new(".")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use safetensors::SafeTensors;

    use super::super::test_files::folder;
    use super::*;
    use crate::run::Silent;

    fn matrices() -> BTreeMap<String, [usize; 2]> {
        // 15 bits take two bytes, 8 bits take one.
        [("b".to_owned(), [2, 4]), ("a".to_owned(), [3, 5])].into()
    }

    #[test]
    fn masks_in_any_order_become_one_file_that_the_library_reads() {
        let place = folder();
        let path = place.path().join(MASKS_FILE);
        let method = [("method".to_owned(), "wanda".to_owned())].into();
        let mut writer = MaskWriter::create(&path, &matrices(), method, &Silent).unwrap();
        writer.write("b", &[7]).unwrap();
        assert!(!path.exists(), "it has its name only when it is finished");
        writer.write("a", &[1, 2]).unwrap();
        writer.finish().unwrap();

        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("a").unwrap().data(), [1, 2]);
        assert_eq!(file.tensor("b").unwrap().data(), [7]);
        assert_eq!(file.tensor("a").unwrap().dtype(), Dtype::U8);
        assert_eq!(bytes[bytes.len() - 3..], [1, 2, 7], "in the order of names");
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().as_ref().unwrap();
        assert_eq!(metadata["method"], "wanda");
        assert_eq!(metadata["prune_masks"], "1");
        assert_eq!(metadata["shapes"], r#"{"a":[3,5],"b":[2,4]}"#);
    }

    #[test]
    fn unknown_and_missing_masks_are_refused() {
        let place = folder();
        let path = place.path().join(MASKS_FILE);
        let mut writer = MaskWriter::create(&path, &matrices(), BTreeMap::new(), &Silent).unwrap();
        let says = |result: anyhow::Result<()>| result.unwrap_err().to_string();
        assert!(says(writer.write("c", &[0])).contains("no mask of `c`"));
        assert!(says(writer.write("b", &[0, 0])).contains("has 1 bytes, 2 were handed over"));
        writer.write("b", &[0]).unwrap();
        assert!(says(writer.write("b", &[0])).contains("written twice"));
        assert!(says(writer.finish()).contains("`a` was not written"));
        assert!(!path.exists());
    }

    #[test]
    fn a_file_with_changed_bytes_keeps_its_partial_name() {
        let place = folder();
        let path = place.path().join(MASKS_FILE);
        let mut writer = MaskWriter::create(&path, &matrices(), BTreeMap::new(), &Silent).unwrap();
        writer.write("a", &[1, 2]).unwrap();
        writer.write("b", &[7]).unwrap();
        let partial = place.path().join("masks.safetensors.partial");
        let mut bytes = fs::read(&partial).unwrap();
        *bytes.last_mut().unwrap() = 6;
        fs::write(&partial, bytes).unwrap();
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains("`b` is not what was written"), "{error}");
        assert!(!path.exists());
    }
}
