//! The order in which training takes its examples: a pure function of the seed and the step, so a resumed run needs no state.
//!
//! An epoch is a permutation of all examples, CPython's `random.Random((seed << 32) + epoch).shuffle(list(range(n)))`. The epochs
//! form an endless sequence. Step s with n examples takes the places s·n to s·n + n − 1 of it, also over
//! the border of two epochs.

use anyhow::Result;

use super::PythonRandom;
use crate::failure::Failure;

/// An endless sequence of examples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExampleOrder {
    sequence: OrderKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum OrderKind {
    /// A permutation of all examples per epoch.
    Shuffled { examples: usize, seed: u64 },
    /// A recorded sequence, again and again.
    Given(Vec<usize>),
}

impl ExampleOrder {
    /// An order of `examples` examples by permutations.
    ///
    /// # Errors
    /// Fails when there is no example.
    pub fn new(examples: usize, seed: u64) -> Result<Self> {
        if examples == 0 {
            return Err(Failure::new("there is no example to train on").into());
        }
        Ok(Self { sequence: OrderKind::Shuffled { examples, seed } })
    }

    /// An order given as rows, such as the batches of a recorded run. The rows are joined, and begin again after the
    /// last index.
    ///
    /// # Errors
    /// Fails when the rows have no index, or an index that is not below `examples`.
    pub fn from_rows(rows: &[Vec<usize>], examples: usize) -> Result<Self> {
        let given = rows.concat();
        if given.is_empty() {
            return Err(Failure::new("the given order has no example").into());
        }
        if let Some(wrong) = given.iter().find(|index| **index >= examples) {
            return Err(Failure::new(format!(
                "the given order names example {wrong}, but there are {examples}, counted from 0"
            ))
            .into());
        }
        Ok(Self { sequence: OrderKind::Given(given) })
    }

    /// Returns the examples of a step, in order: `per_step` indices.
    ///
    /// Draws the permutations that the step touches, O(examples) each. Epochs repeat after 2^32.
    pub fn examples_of(&self, step: usize, per_step: usize) -> Vec<usize> {
        let begin = step as u128 * per_step as u128;
        let places = begin..begin + per_step as u128;
        match &self.sequence {
            OrderKind::Given(given) => {
                let place = |place: u128| given[(place % given.len() as u128) as usize];
                places.map(place).collect()
            }
            OrderKind::Shuffled { examples, seed } => {
                let (mut epoch, mut order) = (None, Vec::new());
                let mut at = |place: u128| {
                    let of_place = place / *examples as u128;
                    if epoch != Some(of_place) {
                        order = (0..*examples).collect();
                        PythonRandom::of_part(*seed, of_place as u32).shuffle(&mut order);
                        epoch = Some(of_place);
                    }
                    order[(place % *examples as u128) as usize]
                };
                places.map(&mut at).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_walk_through_cpythons_permutations_and_over_their_borders() {
        let order = ExampleOrder::new(10, 0).expect("an order");
        // CPython: epochs 0 and 1 of seed 0, see the tests of the generator.
        let two_epochs = [7, 8, 1, 5, 3, 4, 2, 0, 9, 6, 6, 8, 9, 7, 5, 3, 0, 4, 1, 2];
        for per_step in [1, 2, 3, 4, 7, 10, 20] {
            for step in 0..two_epochs.len() / per_step {
                let expected = &two_epochs[step * per_step..][..per_step];
                assert_eq!(order.examples_of(step, per_step), expected);
            }
        }
        let other = ExampleOrder::new(10, 7).expect("an order");
        // random.Random((7 << 32) + 3)
        assert_eq!(other.examples_of(3, 10), [7, 4, 9, 2, 5, 3, 8, 6, 1, 0]);
        assert_eq!(order.examples_of(5, 0), [0usize; 0]);
    }

    #[test]
    fn every_epoch_has_every_example_once_also_in_steps_of_more_than_an_epoch() {
        let order = ExampleOrder::new(3, 5).expect("an order");
        let taken = order.examples_of(1, 9);
        for epoch in taken.chunks(3) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2]);
        }
        // A step is far away, and nothing overflows.
        assert_eq!(order.examples_of(usize::MAX, usize::from(u16::MAX)).len(), 65535);
    }

    #[test]
    fn recorded_rows_are_taken_as_they_stand_and_then_again() {
        let order = ExampleOrder::from_rows(&[vec![2, 0], vec![1, 1]], 3).expect("an order");
        let steps: Vec<Vec<usize>> = (0..3).map(|step| order.examples_of(step, 2)).collect();
        assert_eq!(steps, [[2, 0], [1, 1], [2, 0]]);
        let refused = |rows: &[Vec<usize>], examples| {
            let error = ExampleOrder::from_rows(rows, examples).expect_err("must fail");
            error.to_string()
        };
        assert!(refused(&[vec![0, 3]], 3).contains("example 3, but there are 3"));
        assert!(refused(&[vec![]], 3).contains("has no example"));
        assert!(ExampleOrder::new(0, 1).is_err());
    }
}
