//! [`PackScan`]: the original weight files, each read once from its beginning to its end.
//!
//! The read gives the SHA-256 of every file, by which a restored file is known to be the original, and the kept elements of every matrix,
//! which decide its form and the layout of the output. The next piece is read while a piece is hashed and counted.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::matrix::{MatrixSize, PackedValues};
use crate::bytes::hex;
use crate::checkpoint::{Checkpoint, TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::linalg::bitmask::{KeptCounts, count};
use crate::linalg::convert::widen;
use crate::linalg::select::first_not_finite;
use crate::run::packing::{ScannedFile, ScannedMatrix};
use crate::run::{Events, Meter};

/// Bytes that a thread counts at once: a multiple of four elements of any dtype.
const SHARE_BYTES: usize = 256 << 10;

/// Keeps what a packing or a restoration has done.
pub trait PackJournal {
    /// Keeps the counts and hashes of the files that are read.
    ///
    /// # Errors
    /// Fails when the record cannot be written.
    fn files_scanned(&mut self, files: &BTreeMap<String, ScannedFile>) -> Result<()>;

    /// Keeps the hashes of the tensors that are on the disk.
    ///
    /// # Errors
    /// Fails when the record cannot be written.
    fn tensors_written(&mut self, digests: BTreeMap<String, String>) -> Result<()>;
}

/// A checkpoint whose files are read.
#[derive(Debug, Clone, Copy)]
pub struct PackScan<'a> {
    /// The original checkpoint.
    pub source: &'a Checkpoint,
    /// The tensor names of the decoder linears.
    pub matrices: &'a BTreeSet<String>,
    /// The values of the output. For codes of 8 bits, magnitudes are measured.
    pub values: PackedValues,
    /// Bytes that are read at once, a multiple of 16.
    pub piece: usize,
}

impl PackScan<'_> {
    /// Reads the files that no earlier process has read.
    ///
    /// # Arguments
    /// * `known`: the files that an earlier process has read
    ///
    /// # Errors
    /// Fails where a file cannot be read or has another length than its header says; with codes of 8 bits also for a weight that is not
    /// finite.
    pub fn run(
        &self,
        mut known: BTreeMap<String, ScannedFile>,
        journal: &mut dyn PackJournal,
        events: &dyn Events,
    ) -> Result<BTreeMap<String, ScannedFile>> {
        let shards = self.source.shards();
        let bytes = shards.iter().map(|shard| shard.file_bytes).sum();
        let mut meter = Meter::start(events, "count", bytes);
        for (index, shard) in shards.iter().enumerate() {
            if known.contains_key(&shard.file_name) {
                meter.add(shard.file_bytes);
                continue;
            }
            let scanned = self.file(index, &mut meter, events)?;
            known.insert(shard.file_name.clone(), scanned);
            journal.files_scanned(&known)?;
        }
        meter.finish();
        Ok(known)
    }

    fn file(
        &self,
        index: usize,
        meter: &mut Meter<'_>,
        events: &dyn Events,
    ) -> Result<ScannedFile> {
        let shard = &self.source.shards()[index];
        let mut hasher = Sha256::new();
        hasher.update((shard.header.len() as u64).to_le_bytes());
        hasher.update(&shard.header);
        meter.add(shard.data_start);
        let entries: Vec<&TensorEntry> =
            self.source.tensors().filter(|entry| entry.shard == index).collect();
        // The opening of the checkpoint has checked that tensors follow each other without holes to the end.
        let pieces: Vec<(&TensorEntry, u64)> = entries
            .iter()
            .flat_map(|&entry| (0..entry.bytes).step_by(self.piece).map(move |at| (entry, at)))
            .collect();
        let read = |at: usize, buffer: &mut Vec<u8>| -> Result<()> {
            let Some(&(entry, start)) = pieces.get(at) else {
                return Ok(());
            };
            buffer.resize((entry.bytes - start).min(self.piece as u64) as usize, 0);
            self.source.read(entry, start, buffer)
        };
        let mut matrices: BTreeMap<String, ScannedMatrix> = BTreeMap::new();
        let (mut current, mut next) = (Vec::new(), Vec::new());
        read(0, &mut current)?;
        for (at, &(entry, start)) in pieces.iter().enumerate() {
            events.check()?;
            let size = MatrixSize::of(entry).filter(|_| self.matrices.contains(&entry.name));
            let (counts, (hashed, more)) = rayon::join(
                || size.map(|size| self.counts(entry, size, start, &current)).transpose(),
                || rayon::join(|| hasher.update(&current), || read(at + 1, &mut next)),
            );
            let ((), counts) = (hashed, counts?);
            more?;
            if let Some(counts) = counts {
                let known = matrices.entry(entry.name.clone()).or_default();
                known.kept += counts.kept;
                known.most_of_four = known.most_of_four.max(counts.most_of_four);
                known.largest = known.largest.max(counts.largest);
            }
            meter.add(current.len() as u64);
            std::mem::swap(&mut current, &mut next);
        }
        Ok(ScannedFile { sha256: hex(&hasher.finalize()), matrices })
    }

    /// The counts of a piece of a matrix that begins at byte `start`.
    fn counts(
        &self,
        entry: &TensorEntry,
        size: MatrixSize,
        start: u64,
        piece: &[u8],
    ) -> Result<ScannedMatrix> {
        let each = size.dtype.bytes();
        let parts = piece.par_chunks(SHARE_BYTES).enumerate();
        let parts = parts.map(|(part, bytes)| -> Result<(KeptCounts, f32)> {
            let first = (start as usize + part * SHARE_BYTES) / each;
            let largest = match self.values {
                PackedValues::Exact => 0.0,
                PackedValues::Int8 => self.largest(entry, size.dtype, first, bytes)?,
            };
            Ok((count(each, bytes), largest))
        });
        let none = || (KeptCounts::NONE, 0.0f32);
        let both = |one: (KeptCounts, f32), more: (KeptCounts, f32)| {
            Ok((one.0.and(more.0), one.1.max(more.1)))
        };
        let (counts, largest) = parts.try_reduce(none, both)?;
        let most_of_four = match size.columns % 4 {
            0 => counts.most_of_four,
            _ => 4,
        };
        Ok(ScannedMatrix { kept: counts.kept, most_of_four, largest })
    }

    /// The largest magnitude of some weights, the first of which has the index `first`.
    fn largest(
        &self,
        entry: &TensorEntry,
        dtype: StoredDtype,
        first: usize,
        bytes: &[u8],
    ) -> Result<f32> {
        let mut wide = vec![0.0; bytes.len() / dtype.bytes()];
        widen(dtype, bytes, &mut wide);
        if let Some(at) = first_not_finite(&wide) {
            return Err(Failure::new(format!(
                "tensor `{}` cannot be rounded to codes",
                entry.name
            ))
            .detail(format!(
                "element {} is {}; it is in `{}`",
                first + at,
                wide[at],
                self.source.file_of(entry)
            ))
            .hint(format!(
                "keep the bits of the weights: leave --values {} out",
                PackedValues::Int8.name()
            ))
            .into());
        }
        Ok(wide.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs())))
    }
}
