//! Even parts of work, without a short last part.
//!
//! The parts of a product do not change its bits. Parts have a least size, because packing the factors of a small part costs more
//! than multiplying them.

use std::ops::Range;

/// The least rows (tokens) of a part.
pub const LEAST_ROWS: usize = 64;

/// The least columns (output features) of a part.
pub const LEAST_COLUMNS: usize = 64;

fn count(total: usize, at_most: usize, at_least: usize) -> usize {
    total.div_ceil(at_most.max(1)).min(total / at_least.max(1)).max(1)
}

/// Cuts `0..total` into even parts of at most `at_most`, but at least `at_least`; no parts if `total` is 0.
pub fn parts(
    total: usize,
    at_most: usize,
    at_least: usize,
) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
    let count = if total == 0 { 0 } else { count(total, at_most, at_least) };
    (0..count).map(move |part| part * total / count..(part + 1) * total / count)
}

/// The size of the largest of the [`parts`].
pub fn largest_part(total: usize, at_most: usize, at_least: usize) -> usize {
    total.div_ceil(count(total, at_most, at_least))
}

/// Elements of a weight that are read or expanded at once: 16 MiB of f32, about the size of an L3 cache.
const ELEMENTS_AT_ONCE: usize = 1 << 22;

/// Upper bound of the rows of a weight that are read or expanded at once.
pub(super) fn rows_at_once(in_features: usize) -> usize {
    (ELEMENTS_AT_ONCE / in_features.max(1)).max(64)
}

/// Weight bytes of a task that multiplies rows with one token: some ten microseconds, long compared with the cost of scheduling.
pub(super) const TASK_BYTES: usize = 1 << 17;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_even_cover_everything_and_are_never_too_small() {
        for total in [0, 1, 64, 65, 129, 130, 200, 1000, 2048, 2049] {
            for at_most in [0, 1, 64, 65, 100, 1024, usize::MAX] {
                let parts: Vec<_> = parts(total, at_most, LEAST_ROWS).collect();
                let sizes: Vec<usize> = parts.iter().map(Range::len).collect();
                assert_eq!(sizes.iter().sum::<usize>(), total);
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(sizes.len() == 1 || sizes.iter().all(|&size| size >= LEAST_ROWS));
                if let (Some(&most), Some(&least)) = (sizes.iter().max(), sizes.iter().min()) {
                    assert!(most - least <= 1);
                    assert_eq!(most, largest_part(total, at_most, LEAST_ROWS));
                    assert!(most <= at_most.max(2 * LEAST_ROWS), "{total} {at_most}");
                }
            }
        }
        assert_eq!(parts(2048, 1024, LEAST_ROWS).collect::<Vec<_>>(), [0..1024, 1024..2048]);
    }
}
