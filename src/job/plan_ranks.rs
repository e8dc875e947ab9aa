//! `prune plan --ranks`: time, bytes sent and memory of a run on several ranks, each a machine of its own.
//!
//! ```text
//! time(R) = plan of the largest share of samples and windows
//!         + bytes that a rank sends / network
//! ```
//!
//! Every rank reads all weights from the storage that all share, or the first rank reads them for all, whichever is quicker
//! (`runtime/rank_reads.rs`). Every rank scores all matrices, and solves its rows. Messages do not overlap with computing; weights do.
//! Ranks compute on their CPUs. The writing of the model is in every row: the first rank does it.

use anyhow::Result;

use super::machine;
use super::plan::{Subject, inventory, run_shape};
use super::planned::plan as plan_run;
use crate::pipeline::{RanksShape, RunShape};
use crate::placement::Rate;
use crate::report::rank_plan::RankRow;
use crate::run::Events;
use crate::runtime::blocks::SampleBlocks;
use crate::settings::{PlanSettings, RankSettings};

/// Plans a run on 1, 2, 4 … ranks, up to the ranks of the settings, a row each.
///
/// # Errors
/// Fails as `prune plan`.
pub fn rank_table(
    settings: &PlanSettings,
    ranks: &RankSettings,
    events: &dyn Events,
) -> Result<Vec<RankRow>> {
    let mut machine_of_rank = inventory(settings)?;
    machine_of_rank.gpus.clear();
    if let Some(storage) = ranks.storage {
        machine_of_rank.rates.disk_gb_s = storage.gigabytes();
    }
    // All ranks read from the storage, or the first rank reads for all: the quicker way, as in a run.
    let passed_on = |storage: Rate| (storage.gigabytes() / ranks.network.gigabytes()).max(1.0);
    let subject = Subject::of_settings(settings, events)?;
    let whole = run_shape(settings, &subject, machine_of_rank.cpu.threads)?;
    let policy = machine::policy(&settings.run.device)?;
    let mut rows: Vec<RankRow> = Vec::new();
    let mut size = 1;
    while size <= ranks.ranks {
        let share = |samples: usize| SampleBlocks::new(samples).most_of(size);
        let mut shape = whole.clone();
        (shape.samples, shape.windows) = (share(whole.samples), share(whole.windows));
        let RunShape { samples, windows, .. } = whole;
        let reading = ranks.storage.map_or(1.0, |storage| passed_on(storage).min(size as f64));
        let all = RanksShape { ranks: size, samples, windows, reading };
        shape.of_all_ranks = (size > 1).then_some(all);
        let plan = plan_run(&shape, &machine_of_rank, &policy)?;
        let sent = shape.bytes_sent();
        let seconds = plan.time.seconds + ranks.network.seconds(sent);
        let alone = rows.first().map_or(seconds, |first| first.seconds);
        rows.push(RankRow {
            ranks: size,
            seconds,
            efficiency: alone / (size as f64 * seconds),
            bytes_sent: sent as u64,
            peak: plan.cpu().map(|cpu| cpu.peak).unwrap_or_default(),
        });
        size = match size {
            size if size < ranks.ranks => ranks.ranks.min(2 * size),
            size => size + 1,
        };
    }
    Ok(rows)
}
