//! Random checkpoints of any shape, for tests, benches and scale runs. Behind the cargo feature `synthetic`.
//!
//! [`RandomCheckpoint`] writes a folder in the layout of transformers, so that the real reader and writer run on it. The family's
//! record (`model::family`) says which tensors the checkpoint has.

mod checkpoint;
mod layout;
mod noise;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use checkpoint::RandomCheckpoint;
