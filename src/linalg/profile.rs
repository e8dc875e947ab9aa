//! The profiler of arithmetic: time and operations of each part of a layer.
//!
//! Times are wall time of the thread that waits for a product; each moment counts for one part. A part includes the steps around its
//! products: the norm before, the activation, the residual after.

use std::time::{Duration, Instant};

/// The parts of the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Work that no part below counts.
    Elsewhere,
    /// Reading weights that are at rest.
    Read,
    /// Packing activations, and weights that stay packed. Packing inside the tasks of a product counts for the product.
    Pack,
    /// The norm before attention; queries, keys and values.
    Qkv,
    /// Rotation, scores, softmax, context.
    Attention,
    /// Attention's output and the residual.
    O,
    /// The norm before the MLP, its three products, activation and residual.
    Mlp,
    /// The statistics of calibration.
    Statistics,
    /// Outputs of a matrix before and after pruning.
    OutputError,
    /// The last norm, logits and losses.
    Head,
}

impl Part {
    /// All parts, in this order.
    pub const ALL: [Self; 10] = [
        Self::Elsewhere,
        Self::Read,
        Self::Pack,
        Self::Qkv,
        Self::Attention,
        Self::O,
        Self::Mlp,
        Self::Statistics,
        Self::OutputError,
        Self::Head,
    ];
}

/// Time and operations of a part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    /// Wall time.
    pub time: Duration,
    /// Floating-point operations of its products.
    pub operations: u64,
}

/// The profiler: adds up time and operations of each part.
#[derive(Debug, Clone)]
pub struct Watch {
    part: Part,
    since: Instant,
    spent: [Spent; Part::ALL.len()],
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            part: Part::Elsewhere,
            since: Instant::now(),
            spent: [Spent::default(); Part::ALL.len()],
        }
    }
}

impl Watch {
    /// Counts the time from now on for `part`; returns the part before, for the caller to restore.
    pub fn enter(&mut self, part: Part) -> Part {
        let now = Instant::now();
        self.spent[self.part as usize].time += now.saturating_duration_since(self.since);
        self.since = now;
        std::mem::replace(&mut self.part, part)
    }

    /// Moves some of the current part's time to `part`.
    pub fn move_to(&mut self, part: Part, time: Duration) {
        self.since += time;
        self.spent[part as usize].time += time;
    }

    /// Adds operations to the current part.
    pub fn count(&mut self, operations: usize) {
        self.spent[self.part as usize].operations += operations as u64;
    }

    /// The cost of a part up to the last change of parts.
    pub fn spent(&self, part: Part) -> Spent {
        self.spent[part as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_moment_counts_for_one_part() {
        let began = Instant::now();
        let mut watch = Watch::default();
        let pause = Duration::from_millis(5);
        assert_eq!(watch.enter(Part::Qkv), Part::Elsewhere);
        watch.count(7);
        std::thread::sleep(2 * pause);
        watch.move_to(Part::Pack, pause);
        let before = watch.enter(Part::Pack);
        assert_eq!(before, Part::Qkv);
        std::thread::sleep(pause);
        watch.enter(before);
        watch.enter(Part::Elsewhere);
        let all: Duration = Part::ALL.iter().map(|part| watch.spent(*part).time).sum();
        assert!(all <= began.elapsed());
        assert!(watch.spent(Part::Qkv).time >= pause && watch.spent(Part::Pack).time >= 2 * pause);
        assert_eq!(watch.spent(Part::Qkv).operations, 7);
        assert_eq!(watch.spent(Part::Mlp), Spent::default());
    }
}
