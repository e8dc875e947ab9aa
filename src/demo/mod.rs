//! The model of `prune demo`, which is inside the binary.

pub mod embedded;
