//! [`InputRows`]: rows of one tensor of one input model, in f32, read when they are needed.

use std::ops::Range;

use anyhow::Result;

/// The rows of one tensor of one input model. Vectors have one row.
pub trait InputRows: Send + Sync {
    /// Fills `values` with some rows in f32, `[rows, columns]`. Reads through `bytes`, which is scratch memory.
    ///
    /// # Errors
    /// Fails when the rows cannot be read.
    fn read(&self, rows: Range<usize>, bytes: &mut Vec<u8>, values: &mut [f32]) -> Result<()>;
}
