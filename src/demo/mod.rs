//! Models made from nothing, for trying the program and for its tests: [`RandomCheckpoint`] writes a Llama of any shape
//! to a folder, so that the real reader and writer run on it.

mod layout;
mod noise;
mod random_checkpoint;
mod tokenizer;

#[cfg(test)]
mod random_checkpoint_tests;

pub use random_checkpoint::RandomCheckpoint;
