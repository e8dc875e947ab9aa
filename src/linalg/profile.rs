//! Where the time of the arithmetic goes: a watch that is told what is being done, and counts operations.
//!
//! Times are of the thread that asks for a product and waits for it, so of the wall clock; each moment counts for one part. A
//! part has what belongs to it beside products: the norm before, the activation, the residual after.

use std::time::{Duration, Instant};

/// What the time is spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Nothing of the below.
    Elsewhere,
    /// Weights at rest are read for a product.
    Read,
    /// Activations are brought into the form they are multiplied in, and weights where they stay packed. What tasks pack while they
    /// multiply is part of the products.
    Pack,
    /// The norm before attention; queries, keys and values.
    Qkv,
    /// Rotation, scores, softmax, context.
    Attention,
    /// Attention's output and the residual.
    O,
    /// The norm before the MLP, its three products, activation and residual.
    Mlp,
    /// What calibration observes.
    Statistics,
    /// Outputs of a matrix before and after pruning.
    OutputError,
    /// The last norm, logits and losses.
    Head,
}

impl Part {
    /// All of them, in this order.
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

/// Adds up what each part took.
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
    /// From now on time counts for `part`; returns what it counted for before, to go back to.
    pub fn enter(&mut self, part: Part) -> Part {
        let now = Instant::now();
        self.spent[self.part as usize].time += now.saturating_duration_since(self.since);
        self.since = now;
        std::mem::replace(&mut self.part, part)
    }

    /// So much of the current part's time was spent on `part`.
    pub fn move_to(&mut self, part: Part, time: Duration) {
        self.since += time;
        self.spent[part as usize].time += time;
    }

    /// The current part has done so many operations.
    pub fn count(&mut self, operations: usize) {
        self.spent[self.part as usize].operations += operations as u64;
    }

    /// What a part took up to the last change of parts.
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
