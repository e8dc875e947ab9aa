//! [`CheckpointWriter`]: writes a checkpoint with the layout of its source, tensor by tensor, in any order.
//!
//! Names, dtypes, shapes and shards stay, so the headers are known before the first weight: `create` allocates every file as
//! `<name>.partial` in its final size (a full disk is found before the work, not after), `write` puts a tensor in its place,
//! `finish` copies the rest verbatim, reads everything back, and only then gives the files their names, `config.json` last.
//! Killed at any moment, the target folder does not load as a model. Another process goes on with `reopen`: what was synced and
//! noted is read back and held against its hash, everything else is written again.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rayon::prelude::*;

use sha2::{Digest, Sha256};

use super::atomic::{cannot_write, sync_folder, write_atomic};
use super::header::TensorEntry;
use super::meter::Meter;
use super::sidecars::{CONFIG_FILE, SUMS_FILE, copy_sidecar, sidecars_in};
use super::source::{Checkpoint, WeightSource};
use super::target::{
    OutputShard, allocate, left_behind, refuse_other_weights, refuse_source_folder, unpublish,
};
use super::verify::{
    ExpectedMatrix, Verification, VerifyLevel, WrittenShard, WrittenTensor, verify_shards,
};
use super::written::Written;
use super::{CHUNK_BYTES, INDEX_FILE};
use crate::bytes::{hex, unhex};
use crate::disk;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;
use crate::run::Events;

/// Where pruned weights go.
pub trait WeightSink: Send {
    /// Writes the whole tensor `name`: its elements in the source's dtype, row-major, little-endian.
    ///
    /// # Errors
    ///
    /// Fails when the tensor is unknown, `bytes` has another length than the source's tensor, the tensor was written before,
    /// or the disk refuses.
    fn write(&mut self, name: &str, bytes: &[u8]) -> anyhow::Result<()>;

    /// Waits until everything written so far is on the disk: call it before a layer is recorded as done. Returns the SHA-256 of each
    /// tensor written, in hex, by name.
    ///
    /// # Errors
    ///
    /// Fails when the device reports an error.
    fn sync(&mut self) -> anyhow::Result<BTreeMap<String, String>>;

    /// Does, piece by piece on this thread, what can be done before all is written, until nothing is left of it or `is_over` says so.
    ///
    /// # Errors
    ///
    /// As [`WeightSink::write`].
    fn go_ahead(&mut self, is_over: &dyn Fn() -> bool) -> anyhow::Result<()>;
}

/// What is known of one output tensor, in the order of [`Checkpoint::tensors`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Recorded {
    /// SHA-256 of the bytes handed to the disk.
    digest: [u8; 32],
    /// False where the bytes are the source's.
    rewritten: bool,
}

/// Writes the output of one run; see the module's first lines.
#[derive(Debug)]
pub struct CheckpointWriter {
    source: Arc<Checkpoint>,
    target: PathBuf,
    shards: Vec<OutputShard>,
    recorded: Vec<Option<Recorded>>,
    /// Tensors nobody will hand over, as far as that is known, those in front last.
    untouched: Vec<usize>,
    copying: Option<Copying>,
}

/// A tensor that is being copied.
#[derive(Debug)]
struct Copying {
    at: usize,
    /// Bytes that are copied.
    done: u64,
    hasher: Sha256,
}

/// How tensors are copied.
#[derive(Debug, Clone, Copy)]
enum Pace {
    /// By large pieces, on all threads.
    Fast,
    /// By small pieces, on this thread, while others compute.
    Beside,
}

/// What is copied at once beside other work: small enough for the program's own share of a memory plan.
const SMALL_PIECE: u64 = 256 << 10;

impl CheckpointWriter {
    /// Makes the folder `target` and allocates every file of the output in it. Old `*.partial` files there are replaced.
    ///
    /// # Errors
    ///
    /// Fails when `target` is the source's folder or lies in it, holds other weights, or has no room for the output; in the
    /// last case no partial file stays.
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
            .filter(|shard| shard.output_header.1)
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
        })
    }

    /// Says that only tensors of these names will be handed over: the others may be copied before the end.
    pub fn will_write<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) {
        let names: HashSet<&str> = names.into_iter().collect();
        let others = self.source.tensors().enumerate();
        self.untouched = others
            .filter(|(_, entry)| !names.contains(entry.name.as_str()))
            .map(|(at, _)| at)
            .collect();
        self.untouched.reverse();
    }

    /// Takes the files up again that an earlier process left in `target`, published or not, and holds each tensor of `finished`
    /// (name → SHA-256 in hex, as [`WeightSink::sync`] gave it) against its hash. `None` where a file is missing or is not the one
    /// this source would be written to, or a published one is not what was written: then there is nothing to go on from, and nothing
    /// was changed.
    ///
    /// # Errors
    ///
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
        };
        let damaged = writer.take_up(finished, events)?;
        if !published.is_empty() {
            if !damaged.is_empty() {
                // Another run's model may be there by now.
                return Ok(None);
            }
            unpublish(target, &published)?;
        }
        Ok(Some(Reopened { writer, damaged }))
    }

    /// Reads the finished tensors back; returns the names of those that are not what was written.
    fn take_up(
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
        // A few at a time, so that progress is told and an interruption heard.
        for some in known.chunks(2 * rayon::current_num_threads()) {
            events.check()?;
            let found: anyhow::Result<Vec<[u8; 32]>> = some
                .par_iter()
                .map(|(_, entry, _)| self.digest_of(entry))
                .collect();
            for ((at, entry, digest), found) in some.iter().zip(found?) {
                meter.add(entry.bytes);
                if *digest == Some(found) {
                    self.recorded[*at] = Some(Recorded {
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

    /// SHA-256 of what lies in the output where `entry` goes.
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

    /// Forgets tensors that were written, so that they are written again.
    pub fn forget<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) {
        for at in names
            .into_iter()
            .filter_map(|name| self.source.position(name))
        {
            self.recorded[at] = None;
        }
    }

    /// The model as it is now: tensors that were written, and the source's for the rest.
    ///
    /// # Errors
    ///
    /// Fails when the system has no more open files.
    pub fn written(&self) -> anyhow::Result<Written> {
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
        Ok(Written::new(Arc::clone(&self.source), files, written))
    }

    /// Copies what was not written from the source, reads every file back and checks it, then gives the files their names.
    ///
    /// The check compares headers and the SHA-256 of every tensor with what was written, counts the zeros of each `expected`
    /// matrix and its N:M groups; with [`VerifyLevel::Full`] it also compares rewritten tensors with the source, element by
    /// element. What it reads may come from the page cache.
    ///
    /// # Errors
    ///
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
        self.publish(&verification)?;
        Ok(verification)
    }

    /// Copies every tensor that was not written.
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

    /// Copies the next piece of a tensor that was not written; returns its length.
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
            self.recorded[at] = Some(Recorded {
                digest: copying.hasher.finalize().into(),
                rewritten: false,
            });
        } else {
            self.copying = Some(copying);
        }
        Ok(length)
    }

    /// Reads the partial files back.
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

    /// Copies the sidecars and renames the partial files, `config.json` last. What has a name by then is listed with its hash.
    fn publish(self, verification: &Verification) -> anyhow::Result<()> {
        let Self {
            source,
            target,
            shards,
            ..
        } = self;
        // A process that slept while another finished this model must not spoil it.
        for OutputShard { partial, file, .. } in &shards {
            if !disk::is_at(file, partial).map_err(|error| cannot_write(partial, &error))? {
                return Err(
                    Failure::new(format!("`{}` is not there any more", partial.display()))
                        .detail("another process has finished this model, or removed the file")
                        .hint("give the same command again: it goes on from what is there")
                        .into(),
                );
            }
        }
        // From here until the end, an older model in this folder must not load with half of the new files.
        let config = target.join(CONFIG_FILE);
        disk::remove(&config).map_err(|error| cannot_write(&config, &error))?;
        sync_folder(&target)?;
        let files = verification.files.iter();
        let mut sums: BTreeMap<String, String> = files
            .map(|file| (file.file.clone(), file.sha256.clone()))
            .collect();
        let sidecars = sidecars_in(source.folder())?;
        let is_late = |name: &str| name == INDEX_FILE || name == CONFIG_FILE;
        for name in &sidecars {
            let sum = if is_late(name) {
                let path = source.folder().join(name);
                let bytes = fs::read(&path).map_err(|error| {
                    Failure::new(format!("cannot read `{}`", path.display()))
                        .detail(error.to_string())
                })?;
                hex(&Sha256::digest(&bytes))
            } else {
                copy_sidecar(source.folder(), &target, name)?
            };
            sums.insert(name.clone(), sum);
        }
        for (output, shard) in shards.into_iter().zip(source.shards()) {
            let OutputShard { partial, file, .. } = output;
            // Windows renames no open file.
            drop(file);
            let path = target.join(&shard.file_name);
            disk::rename(&partial, &path).map_err(|error| cannot_write(&path, &error))?;
        }
        let sums: String = sums
            .iter()
            .map(|(name, sum)| format!("{sum}  {name}\n"))
            .collect();
        write_atomic(&target.join(SUMS_FILE), sums.as_bytes())?;
        for name in sidecars.iter().filter(|name| is_late(name)) {
            copy_sidecar(source.folder(), &target, name)?;
            sync_folder(&target)?;
        }
        Ok(())
    }

    /// Where the data of `entry` begins in the output; it moves when the header grew.
    fn output_offset(&self, entry: &TensorEntry) -> u64 {
        // Entries come from the source, whose shards the output repeats one by one.
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

/// What an earlier process left, taken up.
#[derive(Debug)]
pub struct Reopened {
    /// Goes on with it.
    pub writer: CheckpointWriter,
    /// Tensors that are not what was written.
    pub damaged: Vec<String>,
}

impl WeightSink for CheckpointWriter {
    fn go_ahead(&mut self, is_over: &dyn Fn() -> bool) -> anyhow::Result<()> {
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

    fn sync(&mut self) -> anyhow::Result<BTreeMap<String, String>> {
        for shard in &self.shards {
            if shard.is_dirty.swap(false, Ordering::Relaxed) {
                disk::sync(&shard.file).map_err(|error| {
                    // What the disk has of it is not known; it is asked again.
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

    fn write(&mut self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
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
        // The disk may take its time, so it is this thread that waits for it; the others may have to multiply meanwhile.
        let mut digest = [0; 32];
        let written = rayon::in_place_scope(|scope| {
            scope.spawn(|_| digest = Sha256::digest(bytes).into());
            self.put(entry, 0, bytes)
        });
        written?;
        self.recorded[at] = Some(Recorded {
            digest,
            rewritten: true,
        });
        Ok(())
    }
}
