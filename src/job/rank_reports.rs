//! The reports of all ranks at the end of a run: time, memory and communication.

use anyhow::Result;

use crate::ranks::{Ranks, neighbors};
use crate::run::rank_report::RankReport;
use crate::runtime::Clock;

/// The reports of all ranks, in their order; none of a run of a single process.
///
/// # Errors
/// Fails when a rank has left.
pub(super) fn gather(ranks: &Ranks, clock: &Clock, threads: usize) -> Result<Vec<RankReport>> {
    if ranks.is_alone() {
        return Ok(Vec::new());
    }
    let traffic = ranks.traffic();
    let phases = clock.report();
    ranks.all_gather_values(&RankReport {
        rank: ranks.rank(),
        host: neighbors::host(),
        threads,
        seconds: clock.seconds(),
        peak_anonymous: phases.iter().filter_map(|phase| phase.peak_anonymous).max(),
        bytes_sent: traffic.bytes_sent,
        waited_seconds: traffic.waited_seconds,
    })
}
