//! [`CheckpointWriter`]: writes a checkpoint with the layout of its source, tensor by tensor, in any order.
//!
//! The output has the names, dtypes, shapes and shards of the source, so its headers are known before the first weight. If the source
//! is a view ([`Checkpoint::view`]), the shards are new.
//!
//! `create` allocates every file as `<name>.partial` in its final size, so that a full disk is found before the work. `write` writes a
//! tensor to its position. `check_finished_until` reads whole files back while later layers are computed. `finish` copies the unwritten
//! tensors, reads the other files back, and then gives all files their names, `config.json` last. If the process is killed at any moment,
//! the target folder does not load as a model. A later process continues with `reopen`: it compares the tensors that were synced and
//! recorded with their hashes, and writes every unrecorded or damaged tensor again.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use sha2::{Digest, Sha256};

use super::layout::Layout;
use super::names::{CHUNK_BYTES, INDEX_FILE};
use super::output_files::{OutputFiles, ReopenedFiles, TensorRecord};
use super::publish::Published;
use super::source::Checkpoint;
use super::target::{OUTPUT_FLAGS, refuse_source_folder};
use super::verify::{CheckedFile, Checks, FileCheck, by_name};
use super::verify_tensor::{CheckPace, ExpectedMatrix};
use super::weight_source::WeightSource;
use super::written::PartialModel;
use crate::bytes::hex;
use crate::disk::positioned;
use crate::run::verification::{Verification, VerifyLevel};
use crate::run::{Events, Meter};

/// The writer of a run's output; see the first lines of this file.
#[derive(Debug)]
pub struct CheckpointWriter {
    source: Arc<Checkpoint>,
    files: OutputFiles,
    /// In the order of [`Layout::tensors`].
    recorded: Vec<Option<TensorRecord>>,
    /// Indices of tensors to be copied unchanged, in reverse file order (the last is copied first).
    untouched: Vec<usize>,
    copying: Option<Copying>,
    checks_early: bool,
    /// Files that were checked early, in the order of [`Layout::files`].
    checked: Vec<Option<CheckedFile>>,
    /// A file whose check has begun.
    checking: Option<(usize, FileCheck)>,
    own: Published,
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

/// Bytes that [`Pace::Beside`] copies at once; a memory plan counts them with the program's own memory.
const SMALL_PIECE: u64 = 256 << 10;

impl CheckpointWriter {
    /// Creates the folder `target` and allocates every file of the output in it. Old `*.partial` files are replaced.
    ///
    /// # Errors
    /// Fails when `target` is the source's folder or lies in it, holds weights that this output does not replace, or has no room for
    /// the output. Without room, no partial file stays.
    pub fn create(
        source: &Arc<Checkpoint>,
        target: &Path,
        events: &dyn Events,
    ) -> anyhow::Result<Self> {
        refuse_source_folder(source.folder(), target, OUTPUT_FLAGS)?;
        let files = OutputFiles::create(Layout::of(source)?, target, events)?;
        Ok(Self::over(source, files))
    }

    fn over(source: &Arc<Checkpoint>, files: OutputFiles) -> Self {
        Self {
            source: Arc::clone(source),
            recorded: vec![None; files.layout().tensors().len()],
            untouched: Vec::new(),
            copying: None,
            checks_early: false,
            checked: files.layout().files().iter().map(|_| None).collect(),
            checking: None,
            files,
            own: Published::default(),
        }
    }

    /// Declares the tensors that will be rewritten. Tensors that are not named may be copied early.
    pub fn will_write<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) {
        let names: HashSet<&str> = names.into_iter().collect();
        let others = self.files.layout().tensors().iter().enumerate();
        self.untouched = others
            .filter(|(_, entry)| !names.contains(entry.name.as_str()))
            .map(|(at, _)| at)
            .collect();
        self.untouched.reverse();
    }

    /// Opens the files that an earlier process left in `target`, published or not, and compares each tensor of `finished` (name →
    /// SHA-256 in hex, from [`CheckpointWriter::sync`]) with its hash. Returns `None`, and changes nothing, if a file is missing or
    /// does not fit the layout, or if a tensor is damaged after files were published.
    ///
    /// # Errors
    /// Fails when `target` is the source's folder or lies in it, and when a file cannot be read or renamed.
    pub fn reopen(
        source: &Arc<Checkpoint>,
        target: &Path,
        finished: &BTreeMap<String, String>,
        events: &dyn Events,
    ) -> anyhow::Result<Option<(Self, Vec<String>)>> {
        refuse_source_folder(source.folder(), target, OUTPUT_FLAGS)?;
        let layout = Layout::of(source)?;
        let phase = "check finished layers";
        let Some(ReopenedFiles { files, intact, damaged }) =
            OutputFiles::reopen(layout, target, finished, phase, events)?
        else {
            return Ok(None);
        };
        let mut writer = Self::over(source, files);
        for (at, digest) in intact {
            writer.recorded[at] = Some(TensorRecord { digest, rewritten: true });
        }
        Ok(Some((writer, damaged)))
    }

    /// Declares the files that are published with the weights and are no plain copies of the source's.
    pub fn will_publish(&mut self, own: Published) {
        self.own = own;
    }

    /// Forgets written tensors, so that they can be written again.
    pub fn forget<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) {
        for at in names.into_iter().filter_map(|name| self.files.layout().position(name)) {
            self.recorded[at] = None;
        }
    }

    /// The current model: written tensors come from the output, unwritten tensors from the source.
    ///
    /// # Errors
    /// Fails when the system has no more open files.
    pub fn written(&self) -> anyhow::Result<PartialModel> {
        let files = self.files.handles()?;
        let tensors = self.files.layout().tensors().iter();
        let written = tensors
            .zip(&self.recorded)
            .filter(|(_, recorded)| recorded.is_some_and(|recorded| recorded.rewritten))
            .map(|(entry, _)| (entry.name.clone(), (entry.shard, entry.offset)))
            .collect();
        Ok(PartialModel::new(Arc::clone(&self.source), files, written))
    }

    /// Writes the whole tensor `name`: its elements in the source's dtype, row-major, little-endian.
    ///
    /// # Errors
    /// Fails when the tensor is unknown, `bytes` does not have the length of the source's tensor, the tensor was written before,
    /// or the disk refuses.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let Some(at) = self.files.layout().position(name) else {
            let folder = self.source.folder().display();
            anyhow::bail!("tensor `{name}` is not in `{folder}`");
        };
        let entry = &self.files.layout().tensors()[at];
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
            self.files.put(entry, 0, bytes)
        });
        written?;
        self.recorded[at] = Some(TensorRecord { digest, rewritten: true });
        Ok(())
    }

    /// Writes the vector `name` of the source with its elements in a new order: `order[new] = old`.
    ///
    /// # Errors
    /// Fails as [`CheckpointWriter::write`], and when the source cannot be read or the tensor does not have `order.len()` elements.
    pub fn write_permuted(&mut self, name: &str, order: &[usize]) -> anyhow::Result<()> {
        let entry = self.source.entry(name);
        let entry = entry.with_context(|| format!("tensor `{name}` is not in the source"))?;
        let size = entry.bytes as usize / order.len().max(1);
        anyhow::ensure!(
            entry.bytes == (size * order.len()) as u64,
            "tensor `{name}` has {} bytes, which are not {} elements",
            entry.bytes,
            order.len()
        );
        let mut old = vec![0; entry.bytes as usize];
        self.source.read(entry, 0, &mut old)?;
        let elements = order.iter().map(|&from| &old[from * size..][..size]);
        self.write(name, &elements.collect::<Vec<_>>().concat())
    }

    /// Waits until all written tensors are on the disk, before a layer is recorded as done. Returns their SHA-256 in hex, by name.
    pub fn sync(&mut self) -> anyhow::Result<BTreeMap<String, String>> {
        self.files.sync()?;
        let tensors = self.files.layout().tensors().iter().zip(&self.recorded);
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

    /// Declares whether [`CheckpointWriter::check_finished_until`] has an effect. It compares nothing with the source.
    pub fn will_check_early(&mut self, level: VerifyLevel) {
        self.checks_early = level == VerifyLevel::Quick;
    }

    /// Reads finished files back and checks them on this thread, until none is left or `is_over` returns true:
    /// [`CheckpointWriter::finish`] has less to do. Bytes that are on the disk are read from there. `expected` has the matrices of all
    /// finished layers.
    ///
    /// # Errors
    /// Fails as the check of [`CheckpointWriter::finish`].
    pub fn check_finished_until(
        &mut self,
        expected: &[ExpectedMatrix],
        is_over: &dyn Fn() -> bool,
    ) -> anyhow::Result<()> {
        let expected = by_name(expected, self.files.layout())?;
        while self.checks_early && !is_over() {
            let begun = self.checking.as_ref().map(|(at, _)| *at);
            let mut unchecked = (0..self.checked.len()).filter(|&at| self.checked[at].is_none());
            let shard = |at: usize| Some((at, self.files.written_shard(at, &self.recorded)?));
            let found = begun.map_or_else(|| unchecked.find_map(shard), shard);
            let Some((at, shard)) = found else {
                return Ok(());
            };
            let mut check = match self.checking.take() {
                Some((_, check)) => check,
                None => {
                    positioned::forget_cached(shard.file);
                    FileCheck::begin(&shard)?
                }
            };
            let is_done = loop {
                let pace = CheckPace::Beside(SMALL_PIECE as usize);
                match check.step(&shard, &expected, None, pace)? {
                    true if is_over() => break false,
                    true => {}
                    false => break true,
                }
            };
            match is_done {
                true => self.checked[at] = Some(check.end(&shard)?),
                false => self.checking = Some((at, check)),
            }
        }
        Ok(())
    }

    /// Copies the unwritten tensors from the source, reads every file back and checks it, then gives the files their names.
    ///
    /// The check compares every header and the SHA-256 of every tensor with what was written. It counts the zeros of each `expected`
    /// matrix and its N:M groups. With [`VerifyLevel::Full`] it also compares rewritten tensors with the source, element by element.
    /// The bytes may come from the page cache.
    ///
    /// # Errors
    /// Fails when any check fails, and when a file cannot be read, written or renamed. After a failed check, no file was renamed.
    pub fn finish(
        mut self,
        expected: &[ExpectedMatrix],
        level: VerifyLevel,
        events: &dyn Events,
    ) -> anyhow::Result<Verification> {
        self.copy_untouched(events)?;
        self.sync()?;
        let verification = self.verify(expected, level, events)?;
        let mut published = self.own.with_sidecars(self.source.folder())?;
        if self.source.is_view() {
            // The source's index names other files.
            published.copied.retain(|(_, name)| name != INDEX_FILE);
            let index = self.files.layout().index_json();
            published.written.extend(index.map(|json| (INDEX_FILE, json)));
        }
        self.files.publish(&published, &verification)?;
        Ok(verification)
    }

    pub(super) fn copy_untouched(&mut self, events: &dyn Events) -> anyhow::Result<()> {
        let tensors = self.files.layout().tensors().iter();
        let pending = tensors.zip(&self.recorded).filter(|(_, recorded)| recorded.is_none());
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
        let position = &self.files.layout().tensors()[at];
        let Some(entry) = source.entry(&position.name) else {
            let folder = source.folder().display();
            anyhow::bail!("`{folder}` has no tensor `{}`", position.name);
        };
        let mut copying = match self.copying.take() {
            Some(copying) if copying.at == at => copying,
            _ => Copying { at, done: 0, hasher: Sha256::new() },
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
                rayon::join(|| self.files.put(position, *done, buffer), || hasher.update(&*buffer))
                    .0?
            }
            Pace::Beside => {
                hasher.update(&*buffer);
                self.files.put(position, *done, buffer)?;
            }
        }
        copying.done += length;
        if copying.done == entry.bytes {
            self.recorded[at] =
                Some(TensorRecord { digest: copying.hasher.finalize().into(), rewritten: false });
        } else {
            self.copying = Some(copying);
        }
        Ok(length)
    }

    pub(super) fn verify(
        &mut self,
        expected: &[ExpectedMatrix],
        level: VerifyLevel,
        events: &dyn Events,
    ) -> anyhow::Result<Verification> {
        let source = (level == VerifyLevel::Full).then_some(&*self.source);
        let checked = std::mem::take(&mut self.checked);
        self.files.verify(&self.recorded, Checks { expected, source, checked }, events)
    }
}
