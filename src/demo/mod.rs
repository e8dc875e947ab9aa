//! Models that need no download, for trying the program and for its tests: the small Llama inside the binary
//! ([`embedded`]), and [`RandomCheckpoint`], which writes a random Llama of any shape. Both go to a folder, so that the
//! real reader and writer run on them.

pub mod embedded;
mod layout;
mod noise;
mod random_checkpoint;
mod tokenizer;

#[cfg(test)]
mod random_checkpoint_tests;

pub use random_checkpoint::RandomCheckpoint;
