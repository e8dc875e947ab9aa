//! [`LayoutWriter`]: writes an output with any [`Layout`]. Several threads write tensors at once, each tensor piece by piece.
//!
//! `create` allocates every file as `<name>.partial`. A thread begins a tensor, writes its bytes in order in pieces of any size, and
//! finishes it; only then its hash is recorded. No tensor is held whole. `sync` returns the hashes of tensors that are on the disk.
//! A later process continues with `reopen`: it compares the synced tensors with these hashes, and writes every unsynced or damaged
//! tensor again. `finish` reads everything back and gives the files their names, `config.json` last.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::Context;
use sha2::{Digest, Sha256};

use super::header::TensorEntry;
use super::layout::Layout;
use super::names::{CHUNK_BYTES, INDEX_FILE};
use super::output_files::{OutputFiles, ReopenedFiles, TensorRecord};
use super::publish::Published;
use super::source::Checkpoint;
use super::target::{OUTPUT_FLAGS, refuse_source_folder};
use super::verify::Checks;
use super::verify_tensor::ExpectedMatrix;
use super::weight_source::WeightSource;
use crate::bytes::{hex, unhex};
use crate::run::Events;
use crate::run::verification::Verification;

/// The writer of an output with a layout of its own; see the first lines of this file.
#[derive(Debug)]
pub struct LayoutWriter {
    files: OutputFiles,
    /// In the order of [`Layout::tensors`].
    progress: Vec<TensorProgress>,
    syncing: Mutex<()>,
}

/// The state of a tensor. Threads on different tensors share no lock.
#[derive(Debug, Default)]
struct TensorProgress {
    /// A [`TensorStream`] exists.
    is_open: AtomicBool,
    /// SHA-256 of all its bytes, once they were written.
    digest: OnceLock<[u8; 32]>,
}

impl LayoutWriter {
    /// Creates the folder `target` and allocates every file of `layout` in it. Old `*.partial` files are replaced.
    ///
    /// # Errors
    /// Fails when `target` is or lies in a folder of `sources`, holds weights that this output does not replace, or has no room for
    /// the output. Without room, no partial file stays.
    pub fn create(
        layout: Layout,
        target: &Path,
        sources: &[&Path],
        events: &dyn Events,
    ) -> anyhow::Result<Self> {
        for source in sources {
            refuse_source_folder(source, target, OUTPUT_FLAGS)?;
        }
        Ok(Self::over(OutputFiles::create(layout, target, events)?))
    }

    /// Opens the files that an earlier process left in `target`, published or not, and compares each tensor of `finished` (name →
    /// SHA-256 in hex, from [`LayoutWriter::sync`]) with its hash. Returns the names of damaged tensors, which are to be written again.
    /// Returns `None`, and changes nothing, if a file is missing or does not fit the layout, or if a tensor is damaged after files were
    /// published.
    ///
    /// # Errors
    /// Fails when `target` is or lies in a folder of `sources`, and when a file cannot be read or renamed.
    pub fn reopen(
        layout: Layout,
        target: &Path,
        sources: &[&Path],
        finished: &BTreeMap<String, String>,
        events: &dyn Events,
    ) -> anyhow::Result<Option<(Self, Vec<String>)>> {
        for source in sources {
            refuse_source_folder(source, target, OUTPUT_FLAGS)?;
        }
        let phase = "check finished tensors";
        let Some(ReopenedFiles { files, intact, damaged }) =
            OutputFiles::reopen(layout, target, finished, phase, events)?
        else {
            return Ok(None);
        };
        let mut writer = Self::over(files);
        for (at, digest) in intact {
            writer.progress[at].digest = digest.into();
        }
        Ok(Some((writer, damaged)))
    }

    fn over(files: OutputFiles) -> Self {
        let mut progress = Vec::new();
        progress.resize_with(files.layout().tensors().len(), TensorProgress::default);
        Self { files, progress, syncing: Mutex::new(()) }
    }

    /// The layout of the output.
    pub fn layout(&self) -> &Layout {
        self.files.layout()
    }

    /// Begins the tensor `name` at its first byte; the bytes of an unfinished stream are overwritten.
    ///
    /// # Errors
    /// Fails when the layout has no such tensor, when the tensor was finished before, and while it has an open stream.
    pub fn begin(&self, name: &str) -> anyhow::Result<TensorStream<'_>> {
        let Some(at) = self.layout().position(name) else {
            anyhow::bail!("tensor `{name}` is not in the layout of the output");
        };
        let progress = &self.progress[at];
        if progress.is_open.swap(true, Ordering::AcqRel) {
            anyhow::bail!("tensor `{name}` is being written already");
        }
        let stream = TensorStream {
            files: &self.files,
            entry: &self.layout().tensors()[at],
            progress,
            done: 0,
            hasher: Sha256::new(),
        };
        if progress.digest.get().is_some() {
            anyhow::bail!("tensor `{name}` was written twice");
        }
        Ok(stream)
    }

    /// Copies the tensor `name` of `source`, whose bytes stay as they are.
    ///
    /// # Errors
    /// Fails as [`LayoutWriter::begin`] and [`TensorStream::write`], and when the source cannot be read.
    pub fn copy(&self, source: &Checkpoint, name: &str) -> anyhow::Result<()> {
        let entry = source.entry(name);
        let entry = entry.with_context(|| format!("tensor `{name}` is not in the source"))?;
        let mut stream = self.begin(name)?;
        let mut buffer = Vec::new();
        for start in (0..entry.bytes).step_by(CHUNK_BYTES) {
            buffer.resize((entry.bytes - start).min(CHUNK_BYTES as u64) as usize, 0);
            source.read(entry, start, &mut buffer)?;
            stream.write(&buffer)?;
        }
        stream.finish()
    }

    /// Takes tensors for finished that another process has written into the same files: by name, the SHA-256 of their bytes in hex.
    ///
    /// # Errors
    /// Fails for a tensor that the layout does not have or that is finished, and for a hash that is none.
    pub fn know(&self, digests: &BTreeMap<String, String>) -> anyhow::Result<()> {
        for (name, digest) in digests {
            let at = self.layout().position(name);
            let known = at.zip(unhex(digest));
            let set = known.map(|(at, digest)| self.progress[at].digest.set(digest));
            anyhow::ensure!(matches!(set, Some(Ok(()))), "no tensor `{name}` is to be written");
        }
        Ok(())
    }

    /// Returns whether the tensor `name` is finished.
    pub fn is_recorded(&self, name: &str) -> bool {
        let at = self.layout().position(name);
        at.is_some_and(|at| self.progress[at].digest.get().is_some())
    }

    /// Waits until every tensor that was finished before this call is on the disk. Returns the SHA-256 of these tensors in hex, by
    /// name. Threads may go on writing meanwhile.
    ///
    /// # Errors
    /// Fails when the disk refuses.
    pub fn sync(&self) -> anyhow::Result<BTreeMap<String, String>> {
        // A second sync must not return before the first, whose bytes it would take for synced.
        let _alone = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        let tensors = self.layout().tensors().iter().zip(&self.progress);
        let recorded: BTreeMap<String, String> = tensors
            .filter_map(|(entry, progress)| Some((entry.name.clone(), hex(progress.digest.get()?))))
            .collect();
        self.files.sync()?;
        Ok(recorded)
    }

    /// Reads every file back and checks it, then gives the files their names. The index of the layout is published unless `published`
    /// has an index.
    ///
    /// The check compares every header and the SHA-256 of every tensor with what was written. It counts the zeros of each `expected`
    /// matrix and its N:M groups. The bytes may come from the page cache.
    ///
    /// # Errors
    /// Fails when a tensor is not finished, when any check fails, and when a file cannot be read, written or renamed. After a failed
    /// check, no file was renamed.
    pub fn finish(
        self,
        published: Published,
        expected: &[ExpectedMatrix],
        events: &dyn Events,
    ) -> anyhow::Result<Verification> {
        self.finish_if(&|_| Ok(()), published, expected, events)
    }

    /// [`LayoutWriter::finish`] with a further check of the files that were read back, before any of them gets its name.
    ///
    /// # Errors
    /// Fails as [`LayoutWriter::finish`], and with the error of `check`.
    pub fn finish_if(
        self,
        check: &dyn Fn(&Verification) -> anyhow::Result<()>,
        mut published: Published,
        expected: &[ExpectedMatrix],
        events: &dyn Events,
    ) -> anyhow::Result<Verification> {
        self.sync()?;
        let progress = self.progress.iter();
        let records: Vec<Option<TensorRecord>> = progress
            .map(|progress| {
                let digest = *progress.digest.get()?;
                Some(TensorRecord { digest, rewritten: true })
            })
            .collect();
        let verification =
            self.files.verify(&records, Checks { expected, ..Checks::default() }, events)?;
        check(&verification)?;
        if let Some(index) = self.layout().index_json()
            && !published.has(INDEX_FILE)
        {
            published.written.push((INDEX_FILE, index));
        }
        self.files.publish(&published, &verification)?;
        Ok(verification)
    }
}

/// A tensor that is being written. A stream that is dropped before [`TensorStream::finish`] records nothing.
#[derive(Debug)]
pub struct TensorStream<'w> {
    files: &'w OutputFiles,
    entry: &'w TensorEntry,
    progress: &'w TensorProgress,
    /// Written bytes.
    done: u64,
    hasher: Sha256,
}

impl TensorStream<'_> {
    /// Writes the next bytes: elements in the layout's dtype, row-major, little-endian. A failed write may be repeated.
    ///
    /// # Errors
    /// Fails when the tensor has fewer bytes left, or the disk refuses.
    pub fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let left = self.entry.bytes - self.done;
        if bytes.len() as u64 > left {
            anyhow::bail!(
                "tensor `{}` has {left} of its {} bytes left, {} were handed over",
                self.entry.name,
                self.entry.bytes,
                bytes.len()
            );
        }
        self.files.put(self.entry, self.done, bytes)?;
        self.hasher.update(bytes);
        self.done += bytes.len() as u64;
        Ok(())
    }

    /// Records the tensor as written.
    ///
    /// # Errors
    /// Fails when bytes are missing.
    pub fn finish(mut self) -> anyhow::Result<()> {
        if self.done != self.entry.bytes {
            anyhow::bail!(
                "tensor `{}` has {} bytes, {} were written",
                self.entry.name,
                self.entry.bytes,
                self.done
            );
        }
        let digest = self.hasher.finalize_reset().into();
        // This is the tensor's only stream, so the tensor is not recorded yet.
        let recorded = self.progress.digest.set(digest);
        recorded.map_err(|_| anyhow::anyhow!("tensor `{}` was written twice", self.entry.name))
    }
}

impl Drop for TensorStream<'_> {
    fn drop(&mut self) {
        self.progress.is_open.store(false, Ordering::Release);
    }
}
