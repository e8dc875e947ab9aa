//! How the factors of a product are cut so that a part comes out with the bits it has in the whole.
//!
//! The `gemm` crate sums along the inner size in blocks that depend on that size alone, except in small products: those
//! with a single row or column, those of at most 256 results, and those of at most 64 rows *and* 64 columns are summed
//! otherwise. A part of a large product must therefore not be small itself. Parts are even, so that no short last one is
//! left over, and a part is rather larger than wished than too small.

use std::ops::Range;

/// Rows (tokens) a part needs, however many columns there are.
pub const LEAST_ROWS: usize = 65;

/// Columns (output features) a part needs in a product of this many rows.
pub fn least_columns(rows: usize) -> usize {
    // 65 · 4 and 2 · 129 are the first products beyond 256; 129 is beyond 64 too.
    if rows >= LEAST_ROWS { 4 } else { 129 }
}

fn count(total: usize, at_most: usize, at_least: usize) -> usize {
    total
        .div_ceil(at_most.max(1))
        .min(total / at_least.max(1))
        .max(1)
}

/// Cuts `0..total` into even parts of at most `at_most`, but none smaller than `at_least`; nothing where `total` is 0.
pub fn parts(
    total: usize,
    at_most: usize,
    at_least: usize,
) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
    let count = if total == 0 {
        0
    } else {
        count(total, at_most, at_least)
    };
    (0..count).map(move |part| part * total / count..(part + 1) * total / count)
}

/// The size of the largest of these [`parts`].
pub fn largest_part(total: usize, at_most: usize, at_least: usize) -> usize {
    total.div_ceil(count(total, at_most, at_least))
}

#[cfg(test)]
mod tests {
    use super::super::matmul::{Threads, View, matmul};
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
        assert_eq!(
            parts(2048, 1024, LEAST_ROWS).collect::<Vec<_>>(),
            [0..1024, 1024..2048]
        );
    }

    /// What every knob of the memory plan rests on.
    #[test]
    fn a_part_of_a_product_has_the_bits_of_the_whole() {
        let values = |count: usize, pace: f32| -> Vec<f32> {
            (0..count).map(|i| (i as f32 * pace).sin()).collect()
        };
        for (rows, inner, columns) in [
            (200, 700, 300),
            (333, 1500, 131),
            (20, 900, 600),
            (3, 600, 400),
            (131, 64, 523),
        ] {
            let (a, b) = (values(rows * inner, 0.37), values(columns * inner, 0.71));
            let product = |rows: Range<usize>, columns: Range<usize>| {
                let mut out = vec![0.0; rows.len() * columns.len()];
                let lhs = View::strided(&a[rows.start * inner..], rows.len(), inner, inner);
                let rhs = View::strided(&b[columns.start * inner..], columns.len(), inner, inner);
                matmul(
                    &mut out,
                    columns.len(),
                    1.0,
                    lhs,
                    rhs.transposed(),
                    Threads::All,
                );
                out
            };
            let whole = product(0..rows, 0..columns);
            for at_most in [1, 70, 150] {
                for some_rows in parts(rows, at_most, LEAST_ROWS) {
                    let part = product(some_rows.clone(), 0..columns);
                    let same = &whole[some_rows.start * columns..some_rows.end * columns];
                    assert!(
                        part == same,
                        "{rows} x {inner} x {columns}: rows {some_rows:?}"
                    );
                }
                for some_columns in parts(columns, at_most, least_columns(rows)) {
                    let part = product(0..rows, some_columns.clone());
                    for row in 0..rows {
                        let same = &whole[row * columns..][some_columns.clone()];
                        let part = &part[row * some_columns.len()..][..some_columns.len()];
                        assert!(
                            part == same,
                            "{rows} x {inner} x {columns}: columns {some_columns:?}, row {row}"
                        );
                    }
                }
            }
        }
    }
}
