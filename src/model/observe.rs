//! The observer that sees the inputs of its linears there.

use super::linears::InputId;
use crate::linalg::columns::ColumnSums;

/// Data that a device sends of its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromDevice<'a> {
    /// All rows: they reach [`Observer::observe`].
    Rows,
    /// Column sums, and the rows at these positions of the sample, ascending: they reach [`Observer::observe_sums`].
    Sums(&'a [usize]),
    /// The same as [`FromDevice::Sums`]. XᵀX of all rows is added to a sum over samples, which stays on the device.
    Gram(&'a [usize]),
}

/// Sees the inputs of a layer's linears while a sample passes through.
pub trait Observer: Send {
    /// Takes the next rows `[tokens, in_features]` of the current sample; a sample may arrive in several calls.
    fn observe(&mut self, point: InputId, rows: &[f32]);

    /// The data that a device sends at a point. The CPU always shows all rows.
    fn wants(&mut self, _point: InputId) -> FromDevice<'_> {
        FromDevice::Rows
    }

    /// Takes the sums of the sample's next rows, which stay on a device.
    ///
    /// # Arguments
    /// * `kept`: the rows at the positions that [`FromDevice`] names, `[rows, in_features]`
    fn observe_sums(&mut self, _point: InputId, _sums: &ColumnSums<'_>, _kept: &[f32]) {}
}
