//! [`OutputFiles`]: the weight files of an output on the disk, from their allocation to their names. Both writers use it.
//!
//! Each file exists as `<name>.partial` in its final size from the start, so that a full disk is found before the work. Threads may
//! write different tensors at once: every write has its own position, and no lock is taken.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::atomic::cannot_write;
use super::header::TensorEntry;
use super::layout::Layout;
use super::names::CHUNK_BYTES;
use super::publish::{Published, publish};
use super::target::{OutputShard, allocate, left_behind, refuse_other_weights, unpublish};
use super::verify::{Checks, verify_shards};
use super::verify_tensor::{WrittenShard, WrittenTensor};
use crate::bytes::unhex;
use crate::disk;
use crate::disk::positioned::read_exact_at;
use crate::run::verification::Verification;
use crate::run::{Events, Meter};

/// The record of an output tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorRecord {
    /// SHA-256 of the bytes given to the disk.
    pub(super) digest: [u8; 32],
    /// False for a copy of the source's bytes.
    pub(super) rewritten: bool,
}

/// The weight files of an output; see the first lines of this file.
#[derive(Debug)]
pub(super) struct OutputFiles {
    layout: Layout,
    target: PathBuf,
    /// In the order of [`Layout::files`].
    shards: Vec<OutputShard>,
}

/// The files of an earlier process, opened again.
#[derive(Debug)]
pub(super) struct ReopenedFiles {
    pub(super) files: OutputFiles,
    /// Finished tensors that are as recorded: their indices in [`Layout::tensors`], and their SHA-256.
    pub(super) intact: Vec<(usize, [u8; 32])>,
    /// Names of damaged tensors.
    pub(super) damaged: Vec<String>,
}

impl OutputFiles {
    /// Creates the folder `target` and allocates every file in it. Old `*.partial` files are replaced.
    ///
    /// Fails when `target` holds weights that this output does not replace, or has no room. Without room, no partial file stays.
    pub(super) fn create(
        layout: Layout,
        target: &Path,
        events: &dyn Events,
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(target).map_err(|error| cannot_write(target, &error))?;
        let old_partials = refuse_other_weights(&layout, target)?;
        for partial in old_partials {
            disk::remove(&partial).map_err(|error| cannot_write(&partial, &error))?;
        }
        if layout.added_formats() > 0 {
            events.note(format!(
                "added `\"format\":\"pt\"` to the header of {} of {} files: transformers needs it",
                layout.added_formats(),
                layout.files().len()
            ));
        }
        let shards = allocate(&layout, target, events)?;
        Ok(Self { layout, target: target.to_path_buf(), shards })
    }

    /// Opens the files that an earlier process left in `target`, published or not, and compares each tensor of `finished` (name →
    /// SHA-256 in hex) with its hash. Returns `None`, and changes nothing, if a file is missing or does not fit the layout, or if a
    /// tensor is damaged after files were published. `phase` names the comparison.
    pub(super) fn reopen(
        layout: Layout,
        target: &Path,
        finished: &BTreeMap<String, String>,
        phase: &str,
        events: &dyn Events,
    ) -> anyhow::Result<Option<ReopenedFiles>> {
        let Some((shards, published)) = left_behind(&layout, target)? else {
            return Ok(None);
        };
        let files = Self { layout, target: target.to_path_buf(), shards };
        let reopened = files.compare_with_hashes(finished, phase, events)?;
        if !published.is_empty() {
            if !reopened.damaged.is_empty() {
                // The folder may hold the model of another run now.
                return Ok(None);
            }
            unpublish(target, &published)?;
        }
        Ok(Some(reopened))
    }

    /// Reads the finished tensors back.
    fn compare_with_hashes(
        self,
        finished: &BTreeMap<String, String>,
        phase: &str,
        events: &dyn Events,
    ) -> anyhow::Result<ReopenedFiles> {
        let (mut known, mut damaged) = (Vec::new(), Vec::new());
        for (name, digest) in finished {
            match self.layout.position(name) {
                Some(at) => known.push((at, unhex(digest))),
                None => damaged.push(name.clone()),
            }
        }
        let bytes_of = |at: usize| self.layout.tensors()[at].bytes;
        let total = known.iter().map(|(at, _)| bytes_of(*at)).sum();
        let mut meter = Meter::start(events, phase, total);
        let mut intact = Vec::with_capacity(known.len());
        // A few at a time, so that progress is shown and an interruption is noticed.
        for some in known.chunks(2 * rayon::current_num_threads()) {
            events.check()?;
            let found: anyhow::Result<Vec<[u8; 32]>> =
                some.par_iter().map(|(at, _)| self.digest_of(*at)).collect();
            for ((at, digest), found) in some.iter().zip(found?) {
                meter.add(bytes_of(*at));
                if *digest == Some(found) {
                    intact.push((*at, found));
                } else {
                    damaged.push(self.layout.tensors()[*at].name.clone());
                }
            }
        }
        meter.finish();
        Ok(ReopenedFiles { files: self, intact, damaged })
    }

    /// SHA-256 of the output's bytes of tensor `at`.
    fn digest_of(&self, at: usize) -> anyhow::Result<[u8; 32]> {
        let entry = &self.layout.tensors()[at];
        let shard = &self.shards[entry.shard];
        let (mut hasher, mut buffer) = (Sha256::new(), Vec::new());
        let mut start = 0;
        while start < entry.bytes {
            let length = (entry.bytes - start).min(CHUNK_BYTES as u64);
            buffer.resize(length as usize, 0);
            read_exact_at(&shard.file, &mut buffer, entry.offset + start)
                .map_err(|error| cannot_write(&shard.partial, &error))?;
            hasher.update(&buffer);
            start += length;
        }
        Ok(hasher.finalize().into())
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A second handle of every file, with its path.
    ///
    /// Fails when the system has no more open files.
    pub(super) fn handles(&self) -> anyhow::Result<Vec<(PathBuf, File)>> {
        let shards = self.shards.iter();
        shards
            .map(|shard| match shard.file.try_clone() {
                Ok(file) => Ok((shard.partial.clone(), file)),
                Err(error) => Err(cannot_write(&shard.partial, &error).into()),
            })
            .collect()
    }

    /// Writes `bytes` at byte `start` of `entry`, a tensor of the layout.
    pub(super) fn put(&self, entry: &TensorEntry, start: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let shard = &self.shards[entry.shard];
        let written = disk::write_all_at(&shard.file, bytes, entry.offset + start);
        // Set after the write: a concurrent sync that clears it earlier may miss these bytes.
        shard.is_dirty.store(true, Ordering::Release);
        written.map_err(|error| {
            cannot_write(&shard.partial, &error)
                .detail(format!("while writing tensor `{}`", entry.name))
                .into()
        })
    }

    /// Waits until all bytes of finished [`OutputFiles::put`]s are on the disk. Only one thread may call it at a time.
    pub(super) fn sync(&self) -> anyhow::Result<()> {
        for shard in &self.shards {
            if shard.is_dirty.swap(false, Ordering::AcqRel) {
                disk::sync(&shard.file).map_err(|error| {
                    // The state on the disk is unknown, so the next call syncs again.
                    shard.is_dirty.store(true, Ordering::Release);
                    cannot_write(&shard.partial, &error)
                })?;
            }
        }
        Ok(())
    }

    /// A file with its tensors; `None` while one of them is neither written nor copied. `records` are in the order of
    /// [`Layout::tensors`].
    pub(super) fn written_shard<'s>(
        &'s self,
        at: usize,
        records: &[Option<TensorRecord>],
    ) -> Option<WrittenShard<'s>> {
        let tensors = self.layout.tensors().iter().zip(records);
        let tensors = tensors.filter(|(entry, _)| entry.shard == at).map(|(entry, recorded)| {
            let TensorRecord { digest, rewritten } = (*recorded)?;
            Some(WrittenTensor { entry, digest, rewritten })
        });
        let (planned, shard) = (&self.layout.files()[at], &self.shards[at]);
        Some(WrittenShard {
            file_name: &planned.file_name,
            path: &shard.partial,
            file: &shard.file,
            header: &planned.header,
            file_bytes: planned.file_bytes,
            tensors: tensors.collect::<Option<_>>()?,
        })
    }

    /// Reads every file back that was not checked before, and checks it. `records` are in the order of [`Layout::tensors`].
    pub(super) fn verify(
        &self,
        records: &[Option<TensorRecord>],
        checks: Checks<'_>,
        events: &dyn Events,
    ) -> anyhow::Result<Verification> {
        let mut tensors = self.layout.tensors().iter().zip(records);
        if let Some((entry, _)) = tensors.find(|(_, recorded)| recorded.is_none()) {
            anyhow::bail!("tensor `{}` was neither written nor copied", entry.name);
        }
        let shards = (0..self.shards.len()).filter_map(|at| self.written_shard(at, records));
        let shards: Vec<WrittenShard<'_>> = shards.collect();
        verify_shards(&self.layout, &shards, checks, events)
    }

    /// Gives the verified files their names, with the files beside them.
    pub(super) fn publish(
        self,
        published: &Published,
        verification: &Verification,
    ) -> anyhow::Result<()> {
        publish(&self.layout, &self.target, self.shards, published, verification)
    }
}
