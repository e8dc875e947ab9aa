//! The memory of the merge pass: formulas, and the workers and pieces that fit.

use std::collections::BTreeSet;

use super::models::InputModels;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::merge::MergeTensor;
use crate::merging::Scope;
use crate::placement::Budget;
use crate::placement::inventory::Rates;
use crate::recipe::{Declaration, Parameter};
use crate::run::plan::{
    DevicePlan, HiddenStatesPlan, MemoryPart, PartKind, PhasePlan, TimeEstimate,
};
use crate::run::{HiddenStatesStorage, MemorySettings, Phase, Plan};

/// The program before it opens a model: thread stacks, lists of tensors.
const PROGRAM: ByteSize = ByteSize(8 << 20);

/// Bytes of the read-back: a few pieces of files per thread.
const READ_BACK: ByteSize = ByteSize(64 << 20);

/// Bytes of the counts of one expert in a read, at most: two tables of 65,536 counts.
const COUNTS: u64 = 2 * 65_536 * 8;

/// Elements of a source that a thread of a recent CPU widens, measures or merges in a second.
const ELEMENTS_PER_SECOND: f64 = 3e8;

/// Workers and pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PassSize {
    pub(super) workers: usize,
    pub(super) piece_elements: usize,
}

/// Bytes and elements that a pass reads, every read of a row counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PassWork {
    pub(super) bytes: u64,
    pub(super) elements: u64,
}

impl PassWork {
    /// The time of a pass and of its read-back. Files come from the disk every time; where memory caches them, it is faster.
    pub(super) fn time(&self, output: ByteSize, threads: usize, rates: &Rates) -> TimeEstimate {
        let disk = (self.bytes + 2 * output.0) as f64 / (rates.disk_gb_s * 1e9);
        let compute = self.elements as f64 / (threads as f64 * ELEMENTS_PER_SECOND);
        TimeEstimate {
            seconds: disk.max(compute),
            compute,
            disk,
            transfers: 0.0,
        }
    }
}

/// The numbers of a pass that decide its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MergeShape {
    /// Elements of the longest row.
    pub(super) longest_row: usize,
    /// The most sources of a tensor.
    pub(super) sources: usize,
    /// True if magnitudes are counted.
    pub(super) searches: bool,
    /// Groups of tensors that are counted together; 0 where each is counted by itself.
    pub(super) groups: usize,
    /// Bytes of the factors of an adapter for one tensor.
    pub(super) factor_bytes: u64,
    /// Bytes of activation statistics.
    pub(super) statistics_bytes: u64,
    /// Bytes of the rules of rows.
    pub(super) vocabulary_bytes: u64,
}

impl MergeShape {
    /// The numbers of a pass over these tensors.
    pub(super) fn of(
        tensors: &[MergeTensor],
        declaration: &Declaration,
        scope: Scope,
        inputs: &InputModels,
    ) -> Self {
        let trims = |parameter| declaration.per_model.iter().any(|(of, _)| *of == parameter);
        let groups = match scope {
            Scope::Tensor => 0,
            Scope::Layer => {
                let layers = tensors.iter().map(|tensor| tensor.recipe.layer);
                layers.collect::<BTreeSet<_>>().len()
            }
            Scope::Model => 1,
        };
        Self {
            longest_row: tensors
                .iter()
                .map(|tensor| tensor.matrix().1)
                .max()
                .unwrap_or(1),
            sources: tensors
                .iter()
                .map(|tensor| tensor.recipe.sources.len())
                .max()
                .unwrap_or(1),
            searches: trims(Parameter::Density),
            groups,
            factor_bytes: inputs.factor_bytes(),
            statistics_bytes: 0,
            vocabulary_bytes: 0,
        }
    }

    /// The memory of a pass.
    ///
    /// ```text
    /// worker = piece · (4 B · (sources + experts + 1) + 4 B read + 4 B written) + counts + factors
    /// ```
    fn parts(&self, size: PassSize) -> Vec<MemoryPart> {
        let piece = size.piece_elements.max(self.longest_row) as u64;
        // Sources, trimmed differences, the merged rows; stored bytes that are read and written.
        let floats = 2 * self.sources as u64 + 3;
        let pieces = size.workers as u64 * piece * 4 * floats;
        let searches = if self.searches {
            self.sources as u64
        } else {
            0
        };
        // Each worker counts, and so does each group.
        let counts = COUNTS * searches * (size.workers as u64 + self.groups as u64);
        let factors = size.workers as u64 * self.factor_bytes;
        let part = |kind, bytes| MemoryPart {
            kind,
            bytes: ByteSize(bytes),
        };
        [
            part(PartKind::Program, PROGRAM.0),
            part(PartKind::TensorPieces, pieces),
            part(PartKind::MagnitudeCounts, counts),
            part(PartKind::AdapterFactors, factors),
            part(PartKind::Statistics, self.statistics_bytes),
            part(PartKind::Vocabulary, self.vocabulary_bytes),
        ]
        .into_iter()
        .filter(|part| part.bytes > ByteSize::ZERO)
        .collect()
    }

    fn bytes(&self, size: PassSize) -> ByteSize {
        self.parts(size).iter().map(|part| part.bytes).sum()
    }

    /// The largest pass that fits: fewer workers first, then smaller pieces.
    ///
    /// # Errors
    /// Fails where one worker with single rows does not fit, with the numbers.
    pub(super) fn fit(
        &self,
        wanted: PassSize,
        budget: Option<ByteSize>,
    ) -> Result<PassSize, Failure> {
        let Some(budget) = budget else {
            return Ok(wanted);
        };
        let mut size = wanted;
        while self.bytes(size) > budget {
            if size.workers > 1 {
                size.workers -= 1;
            } else if size.piece_elements > self.longest_row {
                size.piece_elements /= 2;
            } else {
                let needed = self.bytes(size);
                // A budget is printed in whole MiB, rounded up.
                let enough = Budget::default().with_cpu(needed);
                return Err(
                    Failure::new(format!("this merge does not fit into {budget}"))
                        .detail(format!(
                            "one worker with one row of {} elements per model needs {needed}",
                            self.longest_row
                        ))
                        .hint(format!("use --max-memory {enough}")),
                );
            }
        }
        Ok(size)
    }

    /// The plan of a pass.
    pub(super) fn plan(
        &self,
        size: PassSize,
        budget: Option<ByteSize>,
        time: TimeEstimate,
    ) -> Plan {
        let parts = self.parts(size);
        let bytes: ByteSize = parts.iter().map(|part| part.bytes).sum();
        let phase = |phase, bytes, parts| PhasePlan {
            phase,
            device: "cpu".to_string(),
            bytes,
            parts,
        };
        let read_back = PROGRAM + READ_BACK;
        let pieces = MemoryPart {
            kind: PartKind::FilePieces,
            bytes: READ_BACK,
        };
        Plan {
            devices: vec![DevicePlan {
                device: "cpu".to_string(),
                budget,
                peak: bytes.max(read_back),
                peak_phase: Some(match bytes > read_back {
                    true => Phase::Merge,
                    false => Phase::SaveAndVerify,
                }),
            }],
            layers: Vec::new(),
            hidden_states: HiddenStatesPlan {
                storage: HiddenStatesStorage::Ram,
                bytes: ByteSize::ZERO,
            },
            memory_settings: MemorySettings::default(),
            phases: vec![
                phase(Phase::Merge, bytes, parts),
                phase(Phase::SaveAndVerify, read_back, vec![pieces]),
            ],
            time,
            notes: vec![format!(
                "{} workers, pieces of {} elements",
                size.workers, size.piece_elements
            )],
        }
    }
}
