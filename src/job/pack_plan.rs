//! The plan of a packing or an unpacking: the size of the pieces that fits into the memory, or the refusal.

use anyhow::Result;

use crate::bytes::ByteSize;
use crate::checkpoint::CHUNK_BYTES;
use crate::failure::Failure;
use crate::packed::{LEAST_PIECE, PIECE};
use crate::placement::{Inventory, cpu_budget};
use crate::run::plan::{MemoryPart, PartKind, PhasePlan, TimeEstimate};
use crate::run::{Phase, Plan};
use crate::settings::ConversionSettings;

/// The program, its lists of tensors and the stacks of its threads.
const PROGRAM: ByteSize = ByteSize(8 << 20);

/// Bytes that a thread of a recent CPU packs or restores in a second.
const BYTES_PER_SECOND: f64 = 1e9;

/// A pass over a checkpoint, in numbers.
pub(super) struct PassCost<'a> {
    /// `packing` or `unpacking`.
    pub(super) name: &'a str,
    pub(super) phase: Phase,
    /// Bytes that the pass holds, for pieces of so many bytes.
    pub(super) memory: &'a dyn Fn(usize) -> ByteSize,
    /// Bytes that are held from the beginning to the end.
    pub(super) held: ByteSize,
    /// Bytes that are read and written.
    pub(super) disk: u64,
}

impl PassCost<'_> {
    /// The largest piece that fits, and the plan.
    ///
    /// # Errors
    /// Fails where the smallest piece does not fit, with the bytes that are enough.
    pub(super) fn plan(
        &self,
        settings: &ConversionSettings,
        threads: usize,
    ) -> Result<(usize, Plan)> {
        let inventory = Inventory::here(threads);
        let budget = cpu_budget(&inventory, &settings.budget());
        let program = PROGRAM + self.held;
        let of_pass = |piece| program + (self.memory)(piece);
        let read_back = program + ByteSize(CHUNK_BYTES as u64);
        let mut piece = PIECE;
        while budget.is_some_and(|budget| of_pass(piece) > budget) && piece > LEAST_PIECE {
            piece /= 2;
        }
        let peak = of_pass(piece).max(read_back);
        if let Some(budget) = budget.filter(|budget| peak > *budget) {
            let least = settings.budget().with_cpu(of_pass(LEAST_PIECE).max(read_back));
            return Err(Failure::new(format!("this {} does not fit into {budget}", self.name))
                .detail(format!("at least {peak} are needed"))
                .hint(format!("use --max-memory {least}"))
                .into());
        }
        let phase = |phase, bytes: ByteSize| {
            let part = |kind, bytes| MemoryPart { kind, bytes };
            let pieces = ByteSize(bytes.0 - program.0);
            let parts =
                vec![part(PartKind::Program, program), part(PartKind::TensorPieces, pieces)];
            PhasePlan::on_cpu(phase, parts)
        };
        let compute = self.disk as f64 / (BYTES_PER_SECOND * threads as f64);
        let disk = self.disk as f64 / (inventory.rates.disk_gb_s * 1e9);
        let phases =
            vec![phase(self.phase, of_pass(piece)), phase(Phase::SaveAndVerify, read_back)];
        let time = TimeEstimate::overlapped(compute, disk);
        let pieces = format!("pieces of {}", ByteSize(piece as u64));
        Ok((piece, Plan::on_cpu(budget, phases, time, pieces)))
    }
}
