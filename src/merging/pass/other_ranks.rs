//! A pass over several ranks: each rank merges its share of the tensors into the same files, and the first rank records all of them.
//!
//! ```text
//! rank 0      merges its share ── takes reports ── records ── … until all shares are done
//! rank 1 …    merge their shares ── sync ── report ── … ── end
//! ```
//!
//! Tensors are the units, and no tensor depends on the others, so the bytes are the bytes of a single process. Only reports are sent. All
//! ranks see the files, and the first rank reads everything back at the end.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::merge_pass::{MergeJournal, MergeTensor};
use crate::checkpoint::LayoutWriter;
use crate::ranks::Ranks;
use crate::run::merging::MergedTensor;

/// A message to the first rank.
#[derive(Serialize, Deserialize)]
enum ShareReport {
    /// Tensors are on the disk; by name, the SHA-256 of their bytes.
    Done { tensors: Vec<MergedTensor>, digests: BTreeMap<String, String> },
    /// The share is done.
    End,
}

/// The ranks whose shares are not done, as the first rank sees them.
pub(super) struct OtherRanks<'a> {
    ranks: &'a Ranks,
    working: Vec<usize>,
}

impl<'a> OtherRanks<'a> {
    /// All ranks but the first; none on another rank.
    pub(super) fn of(ranks: &'a Ranks) -> Self {
        let working = if ranks.is_first() { (1..ranks.size()).collect() } else { Vec::new() };
        Self { ranks, working }
    }

    /// Returns whether a share is not done.
    pub(super) fn are_working(&self) -> bool {
        !self.working.is_empty()
    }

    /// Waits for no rank any more.
    pub(super) fn forget(&mut self) {
        self.working.clear();
    }

    /// The tensors whose reports have arrived. The writer learns their hashes.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub(super) fn arrived(&mut self, writer: &LayoutWriter) -> Result<Vec<MergedTensor>> {
        let mut all = Vec::new();
        let ranks = self.ranks;
        let mut still_working = Vec::new();
        for &rank in &self.working {
            let mut is_done = false;
            while let Some(report) = ranks.try_receive(rank)? {
                match serde_json::from_slice(&report)? {
                    ShareReport::Done { tensors, digests } => {
                        writer.know(&digests)?;
                        all.extend(tensors);
                    }
                    ShareReport::End => {
                        is_done = true;
                        // A later message belongs to what comes after the pass.
                        break;
                    }
                }
            }
            if !is_done {
                still_working.push(rank);
            }
        }
        self.working = still_working;
        Ok(all)
    }
}

/// The journal of a rank that is not the first.
pub(super) struct ToFirstRank<'a>(pub(super) &'a Ranks);

impl ToFirstRank<'_> {
    /// Reports that the share is done.
    ///
    /// # Errors
    /// Fails when the door is closed.
    pub(super) fn end(&self) -> Result<()> {
        self.0.send(0, &serde_json::to_vec(&ShareReport::End)?)
    }
}

impl MergeJournal for ToFirstRank<'_> {
    fn tensors_done(
        &mut self,
        tensors: Vec<MergedTensor>,
        mut digests: BTreeMap<String, String>,
    ) -> Result<()> {
        let own = tensors.iter().filter_map(|tensor| digests.remove_entry(&tensor.name));
        let digests = own.collect();
        self.0.send(0, &serde_json::to_vec(&ShareReport::Done { tensors, digests })?)
    }
}

/// The share of a rank in the tensors that are left, in their order. A tensor goes to the rank with the fewest elements so far.
pub(super) fn own_share(left: Vec<usize>, tensors: &[MergeTensor], ranks: &Ranks) -> Vec<usize> {
    let mut elements = vec![0; ranks.size()];
    let is_own = |at: &usize| {
        let least = (0..elements.len()).min_by_key(|&rank| elements[rank]).unwrap_or(0);
        elements[least] += tensors[*at].elements();
        least == ranks.rank()
    };
    left.into_iter().filter(is_own).collect()
}
