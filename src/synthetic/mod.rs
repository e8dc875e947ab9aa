//! Random checkpoints of any shape, for tests, benches and scale runs. Only the cargo feature `synthetic` compiles this room.
//!
//! [`RandomCheckpoint`] writes a folder in the layout of transformers, so that the real reader and writer run on it. The family's
//! record (`model::family`) says which tensors the checkpoint has.
//!
//! | file | content |
//! | --- | --- |
//! | `checkpoint` | `RandomCheckpoint`: a model of any shape with random weights, in the layout of transformers |
//! | `layout` | the tensors of a random checkpoint: names, shapes, means and deviations, and the file each of them is in |
//! | `noise` | random numbers by index instead of in sequence, so that element `i` of a tensor is the same on any number of threads |
//! | `tokenizer` | the tokenizer of a random checkpoint: a given tokenizer, or one token per byte and four special tokens |

mod checkpoint;
mod layout;
mod noise;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use checkpoint::RandomCheckpoint;
