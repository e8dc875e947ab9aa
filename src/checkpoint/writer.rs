//! [`CheckpointWriter`]: writes a checkpoint with the layout of its source, tensor by tensor, in any order.
//!
//! The output has the names, dtypes, shapes and shards of the source, so its headers are known before the first weight. `create`
//! allocates every file as `<name>.partial` in its final size, so that a full disk is found before the work. `write` writes a tensor
//! to its position. `finish` copies the other tensors, reads everything back, and then gives the files their names, `config.json`
//! last. If the process is killed at any moment, the target folder does not load as a model. Another process continues with
//! `reopen`: tensors that were synced and recorded are compared with their hashes, all others are written again.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rayon::prelude::*;

use sha2::{Digest, Sha256};

use super::atomic::cannot_write;
use super::header::TensorEntry;
use super::names::CHUNK_BYTES;
use super::publish::publish;
use super::sidecars::OwnFiles;
use super::source::{Checkpoint, WeightSource};
use super::target::{
    OutputShard, allocate, left_behind, refuse_other_weights, refuse_source_folder, unpublish,
};
use super::verify::verify_shards;
use super::verify_tensor::{ExpectedMatrix, WrittenShard, WrittenTensor};
use super::written::PartialModel;
use crate::bytes::{hex, unhex};
use crate::disk;
use crate::disk::positioned::read_exact_at;
use crate::run::verification::{Verification, VerifyLevel};
use crate::run::{Events, Meter};

/// The record of an output tensor, in the order of [`Checkpoint::tensors`].
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorRecord {
    /// SHA-256 of the bytes given to the disk.
    digest: [u8; 32],
    /// False for a copy of the source's bytes.
    rewritten: bool,
}

/// The writer of a run's output; see the first lines of this file.
#[derive(Debug)]
pub struct CheckpointWriter {
    source: Arc<Checkpoint>,
    target: PathBuf,
    shards: Vec<OutputShard>,
    recorded: Vec<Option<TensorRecord>>,
    /// Indices of tensors to be copied unchanged, in reverse file order (the last is copied first).
    untouched: Vec<usize>,
    copying: Option<Copying>,
    own: OwnFiles,
}

/// A tensor that is being copied.
#[derive(Debug)]
struct Copying {
    at: usize,
    /// Copied bytes.
    done: u64,
    hasher: Sha256,
}

/// The speed of a copy.
#[derive(Debug, Clone, Copy)]
enum Pace {
    /// Large pieces, on all threads.
    Fast,
    /// Small pieces on this thread, while other threads compute.
    Beside,
}

/// Bytes copied at once while other threads compute; a memory plan counts them with the program's own memory.
const SMALL_PIECE: u64 = 256 << 10;

impl CheckpointWriter {
    /// Creates the folder `target` and allocates every file of the output in it. Old `*.partial` files are replaced.
    ///
    /// # Errors
    /// Fails when `target` is the source's folder or lies in it, holds other weights, or has no room for the output. Without room, no
    /// partial file stays.
    pub fn create(
        source: &Arc<Checkpoint>,
        target: &Path,
        events: &dyn Events,
    ) -> anyhow::Result<Self> {
        refuse_source_folder(source.folder(), target)?;
        fs::create_dir_all(target).map_err(|error| cannot_write(target, &error))?;
        let old_partials = refuse_other_weights(source, target)?;
        for partial in old_partials {
            disk::remove(&partial).map_err(|error| cannot_write(&partial, &error))?;
        }

        let without_format = source
            .shards()
            .iter()
            .filter(|shard| shard.output_header.adds_format)
            .count();
        if without_format > 0 {
            events.note(format!(
                "added `\"format\":\"pt\"` to the header of {without_format} of {} files: transformers needs it",
                source.shards().len()
            ));
        }
        let shards = allocate(source, target, events)?;
        let recorded = vec![None; source.tensors().count()];
        Ok(Self {
            source: Arc::clone(source),
            target: target.to_path_buf(),
            shards,
            recorded,
            untouched: Vec::new(),
            copying: None,
            own: OwnFiles::default(),
        })
    }

    /// Declares the tensors that will be rewritten; the others may be copied early.
    pub fn will_write<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) {
        let names: HashSet<&str> = names.into_iter().collect();
        let others = self.source.tensors().enumerate();
        self.untouched = others
            .filter(|(_, entry)| !names.contains(entry.name.as_str()))
            .map(|(at, _)| at)
            .collect();
        self.untouched.reverse();
    }

    /// Opens the files that an earlier process left in `target`, published or not, and compares each tensor of `finished` (name →
    /// SHA-256 in hex, from [`CheckpointWriter::sync`]) with its hash. Returns `None`, and changes nothing, if a file is missing or
    /// belongs to another output, or a published one is damaged.
    ///
    /// # Errors
    /// Fails when `target` is the source's folder or lies in it, and when a file cannot be read or renamed.
    pub fn reopen(
        source: &Arc<Checkpoint>,
        target: &Path,
        finished: &BTreeMap<String, String>,
        events: &dyn Events,
    ) -> anyhow::Result<Option<Reopened>> {
        refuse_source_folder(source.folder(), target)?;
        let Some((shards, published)) = left_behind(source, target)? else {
            return Ok(None);
        };
        let mut writer = Self {
            source: Arc::clone(source),
            target: target.to_path_buf(),
            shards,
            recorded: vec![None; source.tensors().count()],
            untouched: Vec::new(),
            copying: None,
            own: OwnFiles::default(),
        };
        let damaged = writer.compare_with_hashes(finished, events)?;
        if !published.is_empty() {
            if !damaged.is_empty() {
                // The folder may hold the model of another run now.
                return Ok(None);
            }
            unpublish(target, &published)?;
        }
        Ok(Some(Reopened { writer, damaged }))
    }

    /// Reads the finished tensors back; returns the names of damaged ones.
    fn compare_with_hashes(
        &mut self,
        finished: &BTreeMap<String, String>,
        events: &dyn Events,
    ) -> anyhow::Result<Vec<String>> {
        let source = Arc::clone(&self.source);
        let known: Vec<(usize, &TensorEntry, Option<[u8; 32]>)> = finished
            .iter()
            .filter_map(|(name, digest)| {
                let at = source.position(name)?;
                Some((at, source.entry(name)?, unhex(digest)))
            })
            .collect();
        let mut damaged: Vec<String> = finished
            .keys()
            .filter(|name| source.position(name).is_none())
            .cloned()
            .collect();
        let total = known.iter().map(|(_, entry, _)| entry.bytes).sum();
        let mut meter = Meter::start(events, "check finished layers", total);
        // A few at a time, so that progress is shown and an interruption is noticed.
        for some in known.chunks(2 * rayon::current_num_threads()) {
            events.check()?;
            let found: anyhow::Result<Vec<[u8; 32]>> = some
                .par_iter()
                .map(|(_, entry, _)| self.digest_of(entry))
                .collect();
            for ((at, entry, digest), found) in some.iter().zip(found?) {
                meter.add(entry.bytes);
                if *digest == Some(found) {
                    self.recorded[*at] = Some(TensorRecord {
                        digest: found,
                        rewritten: true,
                    });
                } else {
                    damaged.push(entry.name.clone());
                }
            }
        }
        meter.finish();
        Ok(damaged)
    }

    /// SHA-256 of the output's bytes at the position of `entry`.
    fn digest_of(&self, entry: &TensorEntry) -> anyhow::Result<[u8; 32]> {
        let shard = &self.shards[entry.shard];
        let (mut hasher, mut buffer) = (Sha256::new(), Vec::new());
        let mut start = 0;
        while start < entry.bytes {
            let length = (entry.bytes - start).min(CHUNK_BYTES as u64);
            buffer.resize(length as usize, 0);
            let offset = self.output_offset(entry) + start;
            read_exact_at(&shard.file, &mut buffer, offset)
                .map_err(|error| cannot_write(&shard.partial, &error))?;
            hasher.update(&buffer);
            start += length;
        }
        Ok(hasher.finalize().into())
    }

    /// Declares the files that are published with the weights and are no plain copies of the source's.
    pub fn will_publish(&mut self, own: OwnFiles) {
        self.own = own;
    }

    /// Forgets written tensors, so that they can be written again.
    pub fn forget<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) {
        for at in names
            .into_iter()
            .filter_map(|name| self.source.position(name))
        {
            self.recorded[at] = None;
        }
    }

    /// The current model: written tensors from the output, all others from the source.
    ///
    /// # Errors
    /// Fails when the system has no more open files.
    pub fn written(&self) -> anyhow::Result<PartialModel> {
        let mut files = Vec::with_capacity(self.shards.len());
        for shard in &self.shards {
            let file = shard
                .file
                .try_clone()
                .map_err(|error| cannot_write(&shard.partial, &error))?;
            files.push((shard.partial.clone(), file));
        }
        let written = self
            .source
            .tensors()
            .zip(&self.recorded)
            .filter(|(_, recorded)| recorded.is_some_and(|recorded| recorded.rewritten))
            .map(|(entry, _)| (entry.name.clone(), self.output_offset(entry)))
            .collect();
        Ok(PartialModel::new(Arc::clone(&self.source), files, written))
    }

    /// Writes the whole tensor `name`: its elements in the source's dtype, row-major, little-endian.
    ///
    /// # Errors
    /// Fails when the tensor is unknown, `bytes` has another length than the source's tensor, the tensor was written before,
    /// or the disk refuses.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let source = Arc::clone(&self.source);
        let (Some(at), Some(entry)) = (source.position(name), source.entry(name)) else {
            anyhow::bail!("tensor `{name}` is not in `{}`", source.folder().display());
        };
        if self.recorded[at].is_some() {
            anyhow::bail!("tensor `{name}` was written twice");
        }
        if bytes.len() as u64 != entry.bytes {
            anyhow::bail!(
                "tensor `{name}` has {} bytes, {} were handed over",
                entry.bytes,
                bytes.len()
            );
        }
        // This thread waits for the disk; the other threads may have products to compute.
        let mut digest = [0; 32];
        let written = rayon::in_place_scope(|scope| {
            scope.spawn(|_| digest = Sha256::digest(bytes).into());
            self.put(entry, 0, bytes)
        });
        written?;
        self.recorded[at] = Some(TensorRecord {
            digest,
            rewritten: true,
        });
        Ok(())
    }

    /// Waits until all written tensors are on the disk, before a layer is recorded as done. Returns their SHA-256 in hex, by name.
    pub fn sync(&mut self) -> anyhow::Result<BTreeMap<String, String>> {
        for shard in &self.shards {
            if shard.is_dirty.swap(false, Ordering::Relaxed) {
                disk::sync(&shard.file).map_err(|error| {
                    // The state on the disk is unknown, so the next call syncs again.
                    shard.is_dirty.store(true, Ordering::Relaxed);
                    cannot_write(&shard.partial, &error)
                })?;
            }
        }
        let tensors = self.source.tensors().zip(&self.recorded);
        Ok(tensors
            .filter_map(|(entry, recorded)| {
                let recorded = recorded.filter(|recorded| recorded.rewritten)?;
                Some((entry.name.clone(), hex(&recorded.digest)))
            })
            .collect())
    }

    /// Copies unchanged tensors piece by piece on this thread, until none is left or `is_over` returns true.
    pub fn copy_untouched_until(&mut self, is_over: &dyn Fn() -> bool) -> anyhow::Result<()> {
        let mut buffer = Vec::new();
        while let Some(&at) = self.untouched.last() {
            while self.recorded[at].is_none() {
                if is_over() {
                    return Ok(());
                }
                self.copy_piece(at, &mut buffer, Pace::Beside)?;
            }
            self.untouched.pop();
        }
        Ok(())
    }

    /// Copies the other tensors from the source, reads every file back and checks it, then gives the files their names.
    ///
    /// The check compares headers and the SHA-256 of every tensor with the written ones, and counts the zeros of each `expected` matrix
    /// and its N:M groups. With [`VerifyLevel::Full`] it also compares rewritten tensors with the source, element by element. The bytes
    /// may come from the page cache.
    ///
    /// # Errors
    /// Fails when a file cannot be read or written, or any check fails; then nothing was renamed.
    pub fn finish(
        mut self,
        expected: &[ExpectedMatrix],
        level: VerifyLevel,
        events: &dyn Events,
    ) -> anyhow::Result<Verification> {
        self.copy_untouched(events)?;
        self.sync()?;
        let verification = self.verify(expected, level, events)?;
        publish(
            &self.source,
            &self.target,
            self.shards,
            &self.own,
            &verification,
        )?;
        Ok(verification)
    }

    pub(super) fn copy_untouched(&mut self, events: &dyn Events) -> anyhow::Result<()> {
        let source = Arc::clone(&self.source);
        let pending = source
            .tensors()
            .zip(&self.recorded)
            .filter(|(_, recorded)| recorded.is_none());
        let bytes = pending.map(|(entry, _)| entry.bytes).sum::<u64>();
        let done = self.copying.as_ref().map_or(0, |copying| copying.done);
        let mut meter = Meter::start(events, "copy", bytes.saturating_sub(done));
        let mut buffer = Vec::new();
        let begun = self.copying.as_ref().map(|copying| copying.at);
        for at in begun.into_iter().chain(0..self.recorded.len()) {
            while self.recorded[at].is_none() {
                events.check()?;
                meter.add(self.copy_piece(at, &mut buffer, Pace::Fast)?);
            }
        }
        meter.finish();
        Ok(())
    }

    /// Copies the next piece of an unwritten tensor; returns its length.
    fn copy_piece(&mut self, at: usize, buffer: &mut Vec<u8>, pace: Pace) -> anyhow::Result<u64> {
        let source = Arc::clone(&self.source);
        let Some(entry) = source.tensors().nth(at) else {
            anyhow::bail!("`{}` has no tensor {at}", source.folder().display());
        };
        let mut copying = match self.copying.take() {
            Some(copying) if copying.at == at => copying,
            _ => Copying {
                at,
                done: 0,
                hasher: Sha256::new(),
            },
        };
        let most = match pace {
            Pace::Fast => CHUNK_BYTES as u64,
            Pace::Beside => SMALL_PIECE,
        };
        let length = (entry.bytes - copying.done).min(most);
        buffer.resize(length as usize, 0);
        source.read(entry, copying.done, buffer)?;
        let Copying { done, hasher, .. } = &mut copying;
        match pace {
            Pace::Fast => {
                rayon::join(
                    || self.put(entry, *done, buffer),
                    || hasher.update(&*buffer),
                )
                .0?
            }
            Pace::Beside => {
                hasher.update(&*buffer);
                self.put(entry, *done, buffer)?;
            }
        }
        copying.done += length;
        if copying.done == entry.bytes {
            self.recorded[at] = Some(TensorRecord {
                digest: copying.hasher.finalize().into(),
                rewritten: false,
            });
        } else {
            self.copying = Some(copying);
        }
        Ok(length)
    }

    pub(super) fn verify(
        &self,
        expected: &[ExpectedMatrix],
        level: VerifyLevel,
        events: &dyn Events,
    ) -> anyhow::Result<Verification> {
        let mut shards: Vec<WrittenShard<'_>> = self
            .shards
            .iter()
            .zip(self.source.shards())
            .map(|(shard, source)| WrittenShard {
                file_name: &source.file_name,
                path: &shard.partial,
                file: &shard.file,
                header: &shard.header,
                file_bytes: shard.file_bytes,
                tensors: Vec::new(),
            })
            .collect();
        for (entry, recorded) in self.source.tensors().zip(&self.recorded) {
            let Some(recorded) = recorded else {
                anyhow::bail!("tensor `{}` was neither written nor copied", entry.name);
            };
            shards[entry.shard].tensors.push(WrittenTensor {
                entry,
                offset: self.output_offset(entry),
                digest: recorded.digest,
                rewritten: recorded.rewritten,
            });
        }
        verify_shards(&self.source, &shards, expected, level, events)
    }

    /// The start of the data of `entry` in the output; it differs from the source's if the header grew.
    fn output_offset(&self, entry: &TensorEntry) -> u64 {
        // The output has the same shards as the source.
        let header = self.shards[entry.shard].header.len() as u64;
        header + (entry.offset - self.source.shards()[entry.shard].data_start)
    }

    fn put(&self, entry: &TensorEntry, start: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let shard = &self.shards[entry.shard];
        shard.is_dirty.store(true, Ordering::Relaxed);
        disk::write_all_at(&shard.file, bytes, self.output_offset(entry) + start).map_err(
            |error| {
                cannot_write(&shard.partial, &error)
                    .detail(format!("while writing tensor `{}`", entry.name))
            },
        )?;
        Ok(())
    }
}

/// The output of an earlier process, opened again.
#[derive(Debug)]
pub struct Reopened {
    /// The writer that continues it.
    pub writer: CheckpointWriter,
    /// Names of damaged tensors.
    pub damaged: Vec<String>,
}
