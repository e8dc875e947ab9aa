//! The schedule of a mask that closes while it trains: its steps, and the sparsity after each of them.
//!
//! ```text
//! q    = min(1, step / (by · steps))
//! s(q) = s₀ + (s − s₀) · (1 − (1 − q)³)
//! ```
//!
//! s₀ is the sparsity before the training, s the target. Most weights are removed early, while the rest has many steps left to make up
//! for them (M. Zhu, S. Gupta, "To prune, or not to prune", 2017, arXiv 1710.01878, equation 1). Steps are counted from 1.

/// The steps in which masks close; see the module's first lines.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClosingSchedule {
    /// Steps of the training.
    pub steps: u64,
    /// The share of the steps in which masks close.
    pub by: f64,
    /// Steps from one choice to the next.
    pub every: u64,
}

impl ClosingSchedule {
    /// The last step that changes a mask. Then the sparsity is the target.
    pub fn last(&self) -> u64 {
        ((self.by * self.steps as f64).ceil() as u64).clamp(1, self.steps.max(1))
    }

    /// Returns whether weights are removed at the end of a step.
    pub fn closes_in(&self, step: u64) -> bool {
        step == self.last() || step < self.last() && step.is_multiple_of(self.every.max(1))
    }

    /// The sparsity after a step, on the way from `first` to `target`.
    pub fn sparsity(&self, step: u64, first: f64, target: f64) -> f64 {
        if step >= self.last() {
            return target;
        }
        let left = 1.0 - (step as f64 / (self.by * self.steps as f64)).min(1.0);
        first + (target - first) * (1.0 - left.powi(3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sparsity_rises_as_a_cube_and_then_stands_still() {
        let schedule = ClosingSchedule { steps: 300, by: 0.6, every: 6 };
        assert_eq!(schedule.last(), 180);
        let closing: Vec<u64> = (1..=300).filter(|&step| schedule.closes_in(step)).collect();
        assert_eq!((closing.len(), closing[0], closing[29]), (30, 6, 180));
        // Half of the way: an eighth of the weights is left to remove.
        assert_eq!(schedule.sparsity(90, 0.0, 0.8), 0.8 * 0.875);
        assert!((schedule.sparsity(90, 0.6, 0.8) - 0.775).abs() < 1e-12);
        for step in [180, 181, 300] {
            assert_eq!(schedule.sparsity(step, 0.3, 0.9), 0.9);
        }
    }

    #[test]
    fn the_last_choice_comes_in_time_whatever_the_distance_of_choices() {
        for (steps, by, every, last) in [(10, 0.55, 4, 6), (3, 1.0, 7, 3), (1, 0.01, 1, 1)] {
            let schedule = ClosingSchedule { steps, by, every };
            let mut closing = (1..=steps).filter(|&step| schedule.closes_in(step));
            assert_eq!(closing.next_back(), Some(last));
            assert_eq!(schedule.sparsity(last, 0.1, 0.7), 0.7);
        }
    }
}
