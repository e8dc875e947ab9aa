//! [`ZerosGain`]: bytes and speed of a model without its zeros, in records.

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// The gain of a model's zeros where they are not stored, on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ZerosGain {
    /// Bytes of the decoder's linears as they are stored.
    pub dense_bytes: ByteSize,
    /// Their bytes without zeros: a bit per weight, and the kept weights. Estimated from some rows.
    pub compact_bytes: ByteSize,
    /// The speed of a token's products without zeros, in times the speed of the dense products on this machine; absent where memory had no
    /// room for the measurement.
    pub times_as_fast: Option<f64>,
}

/// A speed in words, from how many times as fast it is: "1.30 times as fast", or "1.25 times as slow".
pub fn speed_in_words(times: f64) -> String {
    if times < 1.0 {
        format!("{:.2} times as slow", 1.0 / times)
    } else {
        format!("{times:.2} times as fast")
    }
}
