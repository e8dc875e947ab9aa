//! [`Group`]: tensors that are trimmed together, and what they measure together.
//!
//! Tensors are measured by several threads in any order. Counts are integers, and norms are added in the order of the tensors' names,
//! so the order does not change a result.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::linalg::order_statistics::{Counts, OrderStatistic, Search};

/// Norms below this number are not used for rescaling, as in mergekit.
const SMALLEST_NORM: f64 = 1e-7;

/// Tensors that are trimmed together. A method measures into it, and [`Group::settle`] ends each read.
#[derive(Debug)]
pub struct Group {
    /// Elements of all its tensors.
    elements: u64,
    measured: Mutex<Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    /// Per expert; `None` where nothing is searched.
    searches: BTreeMap<usize, Search>,
    /// Per tensor and expert: Σ|D| before and after trimming.
    norms: BTreeMap<String, Vec<[f64; 2]>>,
    /// The number of entries with a positive sum minus the number of entries with a negative sum.
    balance: i64,
}

impl Group {
    /// A group of tensors with `elements` elements.
    pub fn new(elements: u64) -> Self {
        Self { elements, measured: Mutex::default() }
    }

    /// Elements of all its tensors.
    pub(super) fn elements(&self) -> u64 {
        self.elements
    }

    /// Ends a read of all tensors.
    pub fn settle(&self) {
        for search in self.measured().searches.values_mut() {
            search.advance();
        }
    }

    fn measured(&self) -> MutexGuard<'_, Measured> {
        // A thread that panics ends the process.
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to count for an expert, in the read that its search is at.
    pub(super) fn counts(&self, expert: usize, positions: &[u64]) -> Counts {
        let mut measured = self.measured();
        let search = measured.searches.entry(expert);
        Counts::of(search.or_insert_with(|| Search::new(positions.to_vec())))
    }

    /// Adds the counts of a tensor.
    pub(super) fn add_counts(&self, expert: usize, counts: &Counts) {
        if let Some(search) = self.measured().searches.get_mut(&expert) {
            search.add(counts);
        }
    }

    /// The order statistics that were found for an expert.
    pub(super) fn found(&self, expert: usize) -> Option<Vec<OrderStatistic>> {
        Some(self.measured().searches.get(&expert)?.found()?.to_vec())
    }

    /// Adds the norms of a tensor.
    pub(super) fn add_norms(&self, tensor: &str, norms: Vec<[f64; 2]>) {
        self.measured().norms.insert(tensor.to_string(), norms);
    }

    /// The factor that gives a trimmed expert its norm back; 1 where a norm is very small.
    pub(super) fn factor(&self, expert: usize) -> f32 {
        let measured = self.measured();
        let norms = measured.norms.values().filter_map(|of| of.get(expert));
        let [before, after] =
            norms.fold([0.0; 2], |sum, norm| [sum[0] + norm[0], sum[1] + norm[1]]);
        if before < SMALLEST_NORM || after < SMALLEST_NORM { 1.0 } else { (before / after) as f32 }
    }

    /// Adds the signs of a tensor's sums.
    pub(super) fn add_signs(&self, balance: i64) {
        self.measured().balance += balance;
    }

    /// The sign that most sums have; 0 where both are equally frequent.
    pub(super) fn majority(&self) -> f32 {
        self.measured().balance.signum() as f32
    }
}
