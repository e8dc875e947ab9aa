//! The door every pruning method comes through.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Result;

use super::mask::Mask;
use super::target::Target;
use crate::failure::Failure;
use crate::linalg::StoredMatrix;

/// What a method must know about a linear's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: no calibration text, no forward pass.
    Nothing,
    /// The mean sum of squares of every column, [`super::ColumnSquares`].
    ColumnSquares,
}

/// One matrix to prune.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The module's full name, for errors.
    pub name: &'a str,
    /// Mean sums of squares of the input's columns `[in_features]`; empty for methods that need nothing.
    pub statistics: &'a [f32],
    /// How much goes, and in which pattern.
    pub target: Target,
    /// The original's `--use_variant`: rows may differ in sparsity.
    pub use_variant: bool,
    /// Adds up the time of scoring, where someone wants to know.
    pub score_time: Option<&'a ScoreTime>,
}

/// Time spent on scores, added over the threads.
#[derive(Debug, Default)]
pub struct ScoreTime(AtomicU64);

impl ScoreTime {
    /// Runs `body`, which scores.
    pub(super) fn measure<R>(&self, body: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let result = body();
        let nanoseconds = began.elapsed().as_nanos() as u64;
        self.0.fetch_add(nanoseconds, Ordering::Relaxed);
        result
    }

    /// Seconds so far, of all threads together.
    pub fn seconds(&self) -> f64 {
        self.0.load(Ordering::Relaxed) as f64 / 1e9
    }
}

/// A pruning method. Those that only score weights implement [`super::select::ScoreMethod`] and select through it; methods
/// that change the weights they keep do so in [`PruningMethod::prune`].
pub trait PruningMethod: Sync {
    /// What `--prune-method` calls it.
    fn name(&self) -> &'static str;

    /// One line for the help text.
    fn summary(&self) -> &'static str;

    /// Where it is published.
    fn source(&self) -> &'static str;

    /// What it must know about inputs.
    fn needs(&self) -> Needs;

    /// Whether `--use-variant` means something to it.
    fn has_variant(&self) -> bool {
        false
    }

    /// Whether [`PruningMethod::prune`] changes the weights it keeps. Those of such a method stay in memory until their layer is
    /// done, whatever the plan says of weights that rest on disk.
    fn changes_weights(&self) -> bool {
        false
    }

    /// Chooses what goes from `weight` `[out_features, in_features]`, and changes what stays where the method does that.
    /// The caller writes the zeros.
    ///
    /// # Errors
    /// Fails on weights or statistics that are not finite, naming matrix, row and column, and on a pattern that does not
    /// divide the input features.
    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask>;
}

/// An N:M pattern needs in_features to be a multiple of M.
///
/// # Errors
/// Fails when it is not, naming the matrix.
pub fn check_groups(name: &str, in_features: usize, n: usize, m: usize) -> Result<()> {
    if !in_features.is_multiple_of(m) {
        return Err(Failure::new(format!("`{name}` has {in_features} input features, which {m} does not divide"))
            .detail(format!("a {n}:{m} pattern prunes {n} of each aligned group of {m}; a shorter last group would break it"))
            .hint(format!("use an M that divides {in_features}, or leave the matrix out with --exclude '*{}'", short(name)))
            .into());
    }
    Ok(())
}

fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}
