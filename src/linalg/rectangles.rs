//! A matrix that several threads write to, each in a rectangle of its own.
//!
//! Slices cannot say that: the rows of two rectangles beside each other alternate in memory. [`cut`] checks that no two overlap
//! and that all lie inside, and a [`Rectangle`] gives out its own rows only.

#![expect(
    unsafe_code,
    reason = "disjoint rectangles of one slice, for several threads"
)]

use std::marker::PhantomData;
use std::ops::Range;

/// Some rows and columns of a matrix, which no one else reads or writes.
#[derive(Debug)]
pub(super) struct Rectangle<'a> {
    /// The first element of the matrix.
    matrix: *mut f32,
    stride: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: a rectangle is the only way to its elements, like the `&mut [f32]` it was cut from.
unsafe impl Send for Rectangle<'_> {}
// SAFETY: nothing can be read or written through a shared reference to it.
unsafe impl Sync for Rectangle<'_> {}

/// Cuts a matrix whose rows begin `stride` elements apart.
///
/// # Arguments
/// * `rows`, `columns`: in order, none overlapping the one before
///
/// # Panics
/// When they overlap or reach beyond the matrix.
pub(super) fn cut<'a>(
    matrix: &'a mut [f32],
    stride: usize,
    rows: &[Range<usize>],
    columns: &[Range<usize>],
) -> impl Iterator<Item = Rectangle<'a>> {
    let are_apart = |ranges: &[Range<usize>]| {
        ranges.iter().all(|range| range.start <= range.end)
            && ranges.windows(2).all(|pair| pair[0].end <= pair[1].start)
    };
    let last = |ranges: &[Range<usize>]| ranges.last().map_or(0, |range| range.end);
    let (last_row, last_column) = (last(rows), last(columns));
    assert!(
        are_apart(rows) && are_apart(columns) && last_column <= stride,
        "rectangles must not overlap"
    );
    assert!(
        last_row == 0 || (last_row - 1) * stride + last_column <= matrix.len(),
        "a rectangle reaches beyond its matrix"
    );
    let matrix = matrix.as_mut_ptr();
    // Those of the same columns follow one another: they read the same rows of W.
    let (rows, columns) = (rows.to_vec(), columns.to_vec());
    columns.into_iter().flat_map(move |columns| {
        rows.clone().into_iter().map(move |rows| Rectangle {
            matrix,
            stride,
            rows,
            columns: columns.clone(),
            lifetime: PhantomData,
        })
    })
}

impl Rectangle<'_> {
    /// Its rows in the matrix.
    pub(super) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Its columns in the matrix.
    pub(super) fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// One of its rows.
    pub(super) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows.len(), "a rectangle has its own rows only");
        let first = (self.rows.start + row) * self.stride + self.columns.start;
        // SAFETY: `cut` checked that the last element of the last row is inside the matrix, which stays borrowed for the
        // rectangle's lifetime, and that no other rectangle has these elements; `&mut self` keeps it to one row at a time.
        unsafe { std::slice::from_raw_parts_mut(self.matrix.add(first), self.columns.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_belongs_to_one_rectangle_and_gaps_to_none() {
        let mut matrix = vec![0.0; 4 * 7 + 5];
        let rectangles = cut(&mut matrix, 7, &[0..2, 2..5], &[0..1, 1..3, 4..5]);
        for (index, mut rectangle) in rectangles.enumerate() {
            for row in 0..rectangle.rows().len() {
                rectangle
                    .row(row)
                    .iter_mut()
                    .for_each(|value| *value += (index + 1) as f32);
            }
        }
        for (at, value) in matrix.iter().enumerate() {
            let (row, column) = (at / 7, at % 7);
            let columns = match column {
                0 => 0,
                1 | 2 => 1,
                4 => 2,
                _ => {
                    assert_eq!(*value, 0.0);
                    continue;
                }
            };
            assert_eq!(*value, (columns * 2 + usize::from(row >= 2) + 1) as f32);
        }
    }

    #[test]
    #[should_panic(expected = "must not overlap")]
    fn rectangles_that_overlap_are_refused() {
        drop(cut(&mut [0.0; 16], 4, &[0..2, 1..3], &[0..2, 2..4]));
    }

    #[test]
    #[should_panic(expected = "beyond its matrix")]
    fn rectangles_beyond_the_matrix_are_refused() {
        drop(cut(&mut [0.0; 15], 4, &[0..2, 2..4], &[0..2, 2..4]));
    }
}
