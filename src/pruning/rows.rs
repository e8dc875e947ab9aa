//! The rows of a matrix that a process solves, while other processes solve the other rows.
//!
//! Solvers treat every row on its own, except where weights of the whole matrix compete. There all processes add up integers, which have the
//! same sum in any order. So the rows get the bits that they have in a single process.

use std::fmt::{self, Debug, Formatter};

use anyhow::Result;

/// The processes that solve the rows of a matrix together.
pub trait RowSolvers: Sync {
    /// The number of processes.
    fn count(&self) -> usize;

    /// The place of this process in the order of the rows.
    fn place(&self) -> usize;

    /// Replaces every number by its sum over all processes. They call it equally often, with equally many numbers.
    ///
    /// # Errors
    /// Fails when a process has left.
    fn sum(&self, numbers: &mut [u64]) -> Result<()>;
}

/// A process that solves all rows.
struct Alone;

impl RowSolvers for Alone {
    fn count(&self) -> usize {
        1
    }

    fn place(&self) -> usize {
        0
    }

    fn sum(&self, _numbers: &mut [u64]) -> Result<()> {
        Ok(())
    }
}

/// The rows of a matrix that this process solves.
#[derive(Clone, Copy)]
pub struct OwnRows<'a> {
    /// The row of the matrix that is the first of its own rows.
    pub first: usize,
    /// The rows of the matrix.
    pub all: usize,
    /// The processes that solve them.
    pub solvers: &'a dyn RowSolvers,
}

impl Debug for OwnRows<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "rows from {} of {}", self.first, self.all)
    }
}

impl OwnRows<'static> {
    /// All rows of a matrix.
    pub fn whole(rows: usize) -> Self {
        Self { first: 0, all: rows, solvers: &Alone }
    }
}

impl OwnRows<'_> {
    /// Some numbers of every process, in the order of the rows.
    ///
    /// # Errors
    /// Fails when a process has left.
    pub fn gathered<const N: usize>(&self, own: [u64; N]) -> Result<Vec<[u64; N]>> {
        let mut numbers = vec![[0; N]; self.solvers.count()];
        numbers[self.solvers.place()] = own;
        self.solvers.sum(numbers.as_flattened_mut())?;
        Ok(numbers)
    }
}
