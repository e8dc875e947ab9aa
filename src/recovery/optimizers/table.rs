//! [`OPTIMIZERS`]: the table of optimizers by name.

use std::fmt;

use super::adamw::AdamW;
use super::adamw8bit::AdamW8bit;
use super::optimizer::{Hyperparameters, Optimizer};
use super::sgd::Sgd;
use super::trainer_names::{SAME, underscored};

/// An optimizer as users name it.
#[derive(Clone, Copy)]
pub struct OptimizerKind {
    /// The name on the command line.
    pub name: &'static str,
    /// One line for the help.
    pub about: &'static str,
    /// States stay in a file, and are in memory only during the step of their parameter. The arithmetic is the
    /// same as for states in memory.
    pub is_paged: bool,
    /// Makes the optimizer.
    pub build: fn(Hyperparameters) -> Box<dyn Optimizer>,
}

impl fmt::Debug for OptimizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// All optimizers.
pub const OPTIMIZERS: &[OptimizerKind] = &[
    OptimizerKind {
        name: "adamw",
        about: "AdamW with f32 states: 8 bytes per trained weight",
        is_paged: false,
        build: |settings| Box::new(AdamW::new(settings)),
    },
    OptimizerKind {
        name: "adamw8bit",
        about: "AdamW with 8-bit states: about 2 bytes per trained weight",
        is_paged: false,
        build: |settings| Box::new(AdamW8bit::new(settings)),
    },
    OptimizerKind {
        name: "paged-adamw8bit",
        about: "adamw8bit with states in a file",
        is_paged: true,
        build: |settings| Box::new(AdamW8bit::new(settings)),
    },
    OptimizerKind {
        name: "paged-adamw32bit",
        about: "adamw with states in a file",
        is_paged: true,
        build: |settings| Box::new(AdamW::new(settings)),
    },
    OptimizerKind {
        name: "sgd",
        about: "gradient descent; no state without momentum",
        is_paged: false,
        build: |settings| Box::new(Sgd::new(settings)),
    },
];

/// The optimizer with a name: ours, or the Trainer's for the same rule. Dashes count as underscores, and case does not matter.
pub fn find(name: &str) -> Option<&'static OptimizerKind> {
    let given = underscored(name);
    let ours = |name: &str| OPTIMIZERS.iter().find(|kind| underscored(kind.name) == name);
    let of_trainer = SAME.iter().find(|(name, _)| *name == given);
    ours(&given).or_else(|| ours(&underscored(of_trainer?.1)))
}

#[cfg(test)]
mod tests {
    use super::super::{KeptMask, TrainingStep};
    use super::*;

    fn values(count: usize, seed: u32) -> Vec<f32> {
        let value = |i: u32| {
            (i.wrapping_mul(2_654_435_761).wrapping_add(seed) as f32 / 2f32.powi(32)) - 0.5
        };
        (0..count as u32).map(value).collect()
    }

    /// Twelve steps; the state passes through a file's bytes after step `interrupted`.
    fn trained(kind: &OptimizerKind, count: usize, interrupted: u64, threads: usize) -> Vec<u32> {
        let settings =
            Hyperparameters { weight_decay: 0.1, momentum: 0.9, ..Hyperparameters::default() };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut optimizer = (kind.build)(settings);
            let mut parameter = values(count, 7);
            let pruned: Vec<f32> = values(count, 99).iter().map(|v| v.max(0.0)).collect();
            let kept = KeptMask::of_nonzero(&pruned);
            let mut state = vec![0; optimizer.state_bytes(count)];
            for number in 1..=12 {
                let step = TrainingStep { number, rate: 1e-2 };
                let gradient = values(count, number as u32 * 1013);
                optimizer.update(step, &mut parameter, &gradient, Some(&kept), &mut state);
                if number == interrupted {
                    let mut file = tempfile::tempfile().unwrap();
                    use std::io::{Read, Seek, Write};
                    file.write_all(&state).unwrap();
                    file.rewind().unwrap();
                    state.clear();
                    file.read_to_end(&mut state).unwrap();
                    optimizer = (kind.build)(settings);
                }
            }
            for (at, value) in parameter.iter().enumerate() {
                assert!(kept.is_kept(at) || value.to_bits() == 0, "{kind:?} {at}");
            }
            assert_ne!(parameter, values(count, 7));
            parameter.iter().map(|value| value.to_bits()).collect()
        })
    }

    #[test]
    fn a_state_survives_a_file_and_results_do_not_depend_on_threads() {
        for kind in OPTIMIZERS {
            for count in [1000, 50_001] {
                let whole = trained(kind, count, 0, 1);
                assert_eq!(trained(kind, count, 5, 1), whole, "{kind:?}: resumed");
                assert_eq!(trained(kind, count, 0, 3), whole, "{kind:?}: three threads");
            }
        }
    }

    #[test]
    fn names_are_found_and_paged_ones_compute_the_same() {
        for kind in OPTIMIZERS {
            assert_eq!(find(kind.name).unwrap().about, kind.about);
        }
        assert!(find("adam").is_none());
        for (paged, plain) in [("paged-adamw8bit", "adamw8bit"), ("paged-adamw32bit", "adamw")] {
            let [paged, plain] = [paged, plain].map(|name| find(name).unwrap());
            assert!(paged.is_paged && !plain.is_paged);
            assert_eq!(trained(paged, 5000, 0, 1), trained(plain, 5000, 0, 1));
        }
    }

    #[test]
    fn states_have_documented_sizes() {
        let bytes = |name: &str, elements| {
            (find(name).unwrap().build)(Hyperparameters::default()).state_bytes(elements)
        };
        assert_eq!(bytes("adamw", 1000), 8000);
        assert_eq!(bytes("sgd", 1000), 0);
        // Below 4096 elements: f32 states.
        assert_eq!(bytes("adamw8bit", 4095), 4095 * 8);
        // Two codes per element, two scales per block of 256: 2.03 bytes per element.
        assert_eq!(bytes("adamw8bit", 4096), 2 * 4096 + 8 * 16);
        assert_eq!(bytes("adamw8bit", 5000), 2 * 5000 + 8 * 20);
    }
}
