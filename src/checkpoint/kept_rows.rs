//! [`KeptRows`]: rows of a matrix that a source stores without its zeros.

/// Some rows of a matrix that is stored without its zeros.
#[derive(Debug, Clone, Copy)]
pub struct KeptRows<'a> {
    /// A bit per column, 1 = kept, the lowest bit first. Every row begins on a byte.
    pub mask: &'a [u8],
    /// The index of each row's first value, and their number at the end.
    pub offsets: &'a [usize],
    /// The bytes of the values, in the dtype of the matrix, or 8-bit codes.
    pub values: &'a [u8],
    /// The f16 scales of 8-bit codes; empty for other values.
    pub scales: &'a [u8],
}
