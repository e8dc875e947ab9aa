//! The speed of decoding, compared with the memory's: the bytes that a token reads, and the rate of a loop that only reads them.

use std::hint::black_box;
use std::time::Instant;

use super::generator::Generator;
use crate::bytes::ByteSize;
use crate::run::DecodingSpeed;

/// Passes of the reading loop; the fastest counts.
const PASSES: usize = 5;

/// Reads all weights in memory, and compares the rate with the rate of decoding.
///
/// # Arguments
/// * `tokens_per_second`: of decoding
/// * `dense`: bytes that a token reads where all matrices are held as stored
pub fn decoding_speed(
    generator: &Generator,
    tokens_per_second: f64,
    dense: ByteSize,
) -> DecodingSpeed {
    let weights: Vec<_> = generator.weights().collect();
    let bytes_per_token: ByteSize = weights.iter().map(|weight| weight.bytes_held()).sum();
    // The loop runs on a thread of the pool, as decoding does.
    let pass = || {
        let began = Instant::now();
        rayon::scope(|_| {
            for weight in &weights {
                black_box(weight.read_through());
            }
        });
        began.elapsed().as_secs_f64()
    };
    let seconds = (0..PASSES).map(|_| pass()).fold(f64::INFINITY, f64::min);
    let read_loop = bytes_per_token.0 as f64 / seconds.max(f64::MIN_POSITIVE);
    let limit = |bytes: ByteSize| read_loop / (bytes.0 as f64).max(1.0);
    DecodingSpeed {
        bytes_per_token,
        bytes_per_second: bytes_per_token.0 as f64 * tokens_per_second,
        read_loop_bytes_per_second: read_loop,
        share: tokens_per_second / limit(bytes_per_token),
        limit_tokens_per_second: limit(bytes_per_token),
        dense_limit_tokens_per_second: limit(dense),
    }
}
