//! The memory of the merge pass: formulas, and the workers and pieces that fit.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::resolved::ResolvedMerge;
use crate::bytes::ByteSize;
use crate::checkpoint::CHUNK_BYTES;
use crate::failure::Failure;
use crate::merging::methods::Scope;
use crate::merging::pass::MergeTensor;
use crate::placement::Budget;
use crate::placement::inventory::Rates;
use crate::run::plan::{MemoryPart, PartKind, PhasePlan, TimeEstimate};
use crate::run::{Phase, Plan};
use crate::settings::MergeSettings;

/// The program with opened models: thread stacks, headers.
const PROGRAM: u64 = 6 << 20;

/// Bytes of the lists of tensors and their sources, per source of a tensor: names, shapes, values, the record.
const LISTED: u64 = 1 << 10;

/// Freed pieces that the allocator keeps while the files are read back, in small parts between memory in use.
const LEFT_OVER: u64 = 2 << 20;

/// Bytes of the counts of a search in a read, at most: two tables of 65,536 counts.
const COUNTS: u64 = 2 * 65_536 * 8;

/// Elements of a source that a thread of a recent CPU widens, measures or merges in a second.
const ELEMENTS_PER_SECOND: f64 = 3e8;

/// Workers and pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
        TimeEstimate::overlapped(compute, disk)
    }
}

/// The numbers of a pass that decide its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MergeShape {
    /// Elements of the longest row.
    pub(super) longest_row: usize,
    /// Elements of every tensor, the largest first.
    pub(super) elements: Vec<u64>,
    /// The most sources of a tensor.
    pub(super) sources: usize,
    /// The most sources of a tensor without its base.
    pub(super) experts: usize,
    /// Sources of all tensors.
    pub(super) listed: usize,
    /// Bytes of an element as it is read, at most, and as it is written.
    pub(super) stored_bytes: u64,
    /// Bytes of the largest tensor that is written.
    pub(super) largest_tensor: u64,
    /// True if zeros are compared with the zeros of all sources.
    pub(super) keeps_zeros: bool,
    /// Order statistics that a worker searches at a time.
    pub(super) searches: u64,
    /// Groups of tensors that are counted together; 0 where each is counted by itself.
    pub(super) groups: usize,
    /// Bytes of the factors of an adapter for a single tensor.
    pub(super) factor_bytes: u64,
    /// Bytes of activation statistics.
    pub(super) statistics_bytes: u64,
    /// Bytes of the rules of rows.
    pub(super) vocabulary_bytes: u64,
    /// Bytes of the tokenizers that are compared or joined before the merge.
    pub(super) tokenizer_bytes: u64,
    /// Bytes of the files beside the weights, while they are written.
    pub(super) published_bytes: u64,
}

impl MergeShape {
    /// The numbers of the pass of a merge, as far as the tensors, the settings and a file of statistics decide them.
    pub(super) fn of(merge: &ResolvedMerge, settings: &MergeSettings, scope: Scope) -> Self {
        let ResolvedMerge { tensors, vocabulary, .. } = merge;
        let groups = match scope {
            Scope::Tensor => 0,
            Scope::Layer => {
                let layers = tensors.iter().map(|tensor| tensor.recipe.layer);
                layers.collect::<BTreeSet<_>>().len()
            }
            Scope::Model => 1,
        };
        let mut elements: Vec<u64> = tensors.iter().map(MergeTensor::elements).collect();
        elements.sort_unstable_by(|one, other| other.cmp(one));
        let sources = || tensors.iter().map(|tensor| tensor.recipe.sources.len());
        let experts = tensors.iter().map(|tensor| {
            let bases = usize::from(tensor.recipe.base.is_some());
            tensor.recipe.sources.len() - bases
        });
        let experts = experts.max().unwrap_or(1);
        let written = || tensors.iter().map(|tensor| tensor.dtype.bytes() as u64);
        let bytes = tensors.iter().map(MergeTensor::elements).zip(written());
        let statistics = settings.saliency_file.as_ref();
        let statistics = statistics.and_then(|file| file.metadata().ok());
        Self {
            elements,
            longest_row: tensors.iter().map(|tensor| tensor.matrix().1).max().unwrap_or(1),
            sources: sources().max().unwrap_or(1),
            experts,
            listed: sources().sum(),
            stored_bytes: 4 + written().max().unwrap_or(4),
            largest_tensor: bytes.map(|(elements, bytes)| elements * bytes).max().unwrap_or(0),
            keeps_zeros: settings.keep_zeros,
            searches: merge.method.searches(experts) as u64,
            groups,
            factor_bytes: merge.inputs.factor_bytes(),
            statistics_bytes: statistics.map_or(0, |file| file.len()),
            vocabulary_bytes: vocabulary.bytes(),
            tokenizer_bytes: vocabulary.tokenizer_bytes(),
            published_bytes: vocabulary.published_bytes(),
        }
    }

    /// The program with its lists.
    fn program(&self) -> u64 {
        PROGRAM + LISTED * self.listed as u64
    }

    /// The memory of a pass.
    ///
    /// ```text
    /// worker = piece · (4 B · (sources + experts + 1) + stored + written) + counts + factors
    /// ```
    ///
    /// A piece has no more elements than its tensor; the workers have the largest tensors.
    fn parts(&self, size: PassSize) -> Vec<MemoryPart> {
        let piece = size.piece_elements.max(self.longest_row) as u64;
        // Sources, trimmed differences, the merged rows; stored bytes that are read and written. Random words are less than counts.
        let floats = (self.sources + self.experts + 1) as u64;
        // Rows before factors, and a mark per element.
        let zeros = if self.keeps_zeros { 5 } else { 0 };
        let tensors = self.elements.iter().take(size.workers);
        let elements: u64 = tensors.map(|elements| piece.min(*elements)).sum();
        let pieces = elements * (4 * floats + self.stored_bytes + zeros);
        // Each worker counts, and so does each group.
        let counts = COUNTS * self.searches * (size.workers as u64 + self.groups as u64);
        let factors = size.workers as u64 * self.factor_bytes;
        [
            part(PartKind::Program, self.program()),
            part(PartKind::TensorPieces, pieces),
            part(PartKind::MagnitudeCounts, counts),
            part(PartKind::AdapterFactors, factors),
            part(PartKind::Statistics, self.statistics_bytes),
            part(PartKind::Vocabulary, self.vocabulary_bytes),
        ]
        .into()
    }

    fn bytes(&self, size: PassSize) -> ByteSize {
        sum(&self.parts(size))
    }

    /// The memory while the tokens of the models are compared or joined.
    fn reading(&self) -> Vec<MemoryPart> {
        vec![
            part(PartKind::Program, self.program()),
            part(PartKind::Tokenizer, self.tokenizer_bytes),
        ]
    }

    /// The memory while the files are read back and published.
    fn read_back(&self) -> Vec<MemoryPart> {
        let piece = self.largest_tensor.min(CHUNK_BYTES as u64);
        vec![
            part(PartKind::Program, self.program() + LEFT_OVER),
            part(PartKind::FilePieces, piece + self.published_bytes),
            part(PartKind::Vocabulary, self.vocabulary_bytes),
            part(PartKind::Statistics, self.statistics_bytes),
        ]
    }

    /// The least memory that is enough for every phase.
    pub(super) fn least(&self) -> ByteSize {
        let smallest = PassSize { workers: 1, piece_elements: self.longest_row };
        self.bytes(smallest).max(self.fixed())
    }

    /// The memory of the phases that nothing makes smaller.
    fn fixed(&self) -> ByteSize {
        sum(&self.reading()).max(sum(&self.read_back()))
    }

    /// The largest pass that fits: fewer workers first, then smaller pieces.
    ///
    /// # Errors
    /// Fails where a single worker with single rows does not fit, or where a fixed phase does not fit, with the numbers.
    pub(super) fn fit(
        &self,
        wanted: PassSize,
        budget: Option<ByteSize>,
    ) -> Result<PassSize, Failure> {
        let Some(budget) = budget else {
            return Ok(wanted);
        };
        let mut size = wanted;
        let fixed = self.fixed();
        while self.bytes(size) > budget {
            if size.workers > 1 {
                size.workers -= 1;
            } else if size.piece_elements > self.longest_row {
                size.piece_elements /= 2;
            } else {
                let needed = self.bytes(size);
                let why = format!(
                    "one worker with one row of {} elements per model needs {needed}",
                    self.longest_row
                );
                return Err(too_little(budget, self.least(), why));
            }
        }
        if fixed > budget {
            let phase = match sum(&self.reading()) > sum(&self.read_back()) {
                true => "reading the tokenizers",
                false => "reading the output back",
            };
            return Err(too_little(budget, fixed, format!("{phase} needs {fixed}")));
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
        let mut phases = vec![
            PhasePlan::on_cpu(Phase::Merge, self.parts(size)),
            PhasePlan::on_cpu(Phase::SaveAndVerify, self.read_back()),
        ];
        if self.tokenizer_bytes > 0 {
            phases.insert(0, PhasePlan::on_cpu(Phase::Tokenize, self.reading()));
        }
        let PassSize { workers, piece_elements } = size;
        let note = format!("{workers} workers, pieces of {piece_elements} elements");
        Plan::on_cpu(budget, phases, time, note)
    }
}

fn part(kind: PartKind, bytes: u64) -> MemoryPart {
    MemoryPart { kind, bytes: ByteSize(bytes) }
}

fn sum(parts: &[MemoryPart]) -> ByteSize {
    parts.iter().map(|part| part.bytes).sum()
}

/// The refusal of a budget. A budget is printed in whole MiB, rounded up.
fn too_little(budget: ByteSize, needed: ByteSize, why: String) -> Failure {
    let enough = Budget::default().with_cpu(needed);
    Failure::new(format!("this merge does not fit into {budget}"))
        .detail(why)
        .hint(format!("use --max-memory {enough}"))
}
