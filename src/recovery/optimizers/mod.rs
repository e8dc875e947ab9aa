//! The mathematics of recovery training: optimizers, learning rates, clipping, rounding.
//!
//! Every function works on slices: a flattened parameter in f32, its gradient, and the state of the optimizer as bytes. This room
//! knows no models, files or devices. Weights that are stored in bf16 have f32 master values, which belong to the caller;
//! [`rounding`] makes the stored values from them.
//!
//! Work is divided into parts of a fixed size, and sums have a fixed order. So results do not depend on threads.
//!
//! | file | content |
//! | --- | --- |
//! | `adamw` | AdamW in f32 |
//! | `adamw8bit` | AdamW with 8-bit states, in blocks of 256 elements |
//! | `choice` | the weights that a closing mask removes from a matrix |
//! | `clip` | clipping of gradients by their global norm |
//! | `closing` | the steps in which masks close, and the sparsity after each of them |
//! | `kept` | the mask of kept weights: one bit per element of a flattened parameter, 1 = kept, least significant bit first |
//! | `optimizer` | `Optimizer`: a step on a flattened parameter |
//! | `schedule` | learning rates of steps: constant, linear or cosine, after a linear warm-up |
//! | `sgd` | gradient descent with optional momentum |
//! | `table` | the table of optimizers by name |
//! | `trainer_names` | names of optimizers in transformers' Trainer |

pub mod adamw;
pub mod adamw8bit;
pub mod choice;
pub mod clip;
pub mod closing;
pub mod kept;
pub mod optimizer;
pub mod rounding;
pub mod schedule;
pub mod sgd;
pub mod table;
pub mod trainer_names;

#[cfg(test)]
mod adamw8bit_tests;

pub use choice::{ChoiceEdge, TrainedMatrix};
pub use closing::ClosingSchedule;
pub use kept::KeptMask;
pub use optimizer::{Hyperparameters, Optimizer, TrainingStep};
pub use schedule::{Schedule, ScheduleShape};
pub use table::{OPTIMIZERS, OptimizerKind, find};
pub use trainer_names::nearest;
