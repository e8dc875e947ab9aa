//! Rectangles of a matrix, each written by one thread.
//!
//! Slices cannot express rectangles: the rows of two rectangles side by side alternate in memory. [`cut`] checks that no two overlap
//! and that all are inside the matrix, and a [`Rectangle`] lends only its own rows.

#![expect(unsafe_code, reason = "disjoint rectangles of one slice, for several threads")]

use std::marker::PhantomData;
use std::ops::Range;

/// Rows and columns of a matrix, with exclusive access.
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

/// Elements from the first to the last of a matrix with these strides; 0 for an empty matrix, `None` if the number overflows.
pub(super) fn extent(
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
) -> Option<usize> {
    if rows == 0 || columns == 0 {
        return Some(0);
    }
    let last_row = (rows - 1).checked_mul(row_stride)?;
    let last_column = (columns - 1).checked_mul(column_stride)?;
    last_row.checked_add(last_column)?.checked_add(1)
}

/// Checks that a slice of `length` elements holds a matrix whose rows begin `stride` elements apart.
///
/// # Panics
/// Panics when the matrix exceeds the slice.
pub(super) fn assert_holds(length: usize, rows: usize, columns: usize, stride: usize) {
    assert!(
        extent(rows, columns, stride, 1).is_some_and(|extent| extent <= length),
        "the result reaches beyond its slice"
    );
}

/// Cuts a matrix whose rows begin `stride` elements apart, by `rows` and `columns` in order.
///
/// # Panics
/// Panics when ranges overlap or exceed the matrix.
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
        extent(last_row, last_column, stride, 1).is_some_and(|extent| extent <= matrix.len()),
        "a rectangle reaches beyond its matrix"
    );
    let matrix = matrix.as_mut_ptr();
    // Rectangles of the same columns are consecutive, because they read the same rows of W.
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
    pub(super) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    pub(super) fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Lends a row of the rectangle, counted from its first.
    pub(super) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows.len(), "a rectangle has its own rows only");
        let first = (self.rows.start + row) * self.stride + self.columns.start;
        // SAFETY: `cut` checked that the last element of the last row is inside the matrix, which stays borrowed for the
        // rectangle's lifetime, and that no second rectangle has these elements; `&mut self` keeps it to one row at a time.
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
                rectangle.row(row).iter_mut().for_each(|value| *value += (index + 1) as f32);
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

    // 2 · 2⁶³ is 0 in 64 bits: the last row would seem to be the first.
    #[test]
    #[should_panic(expected = "beyond its matrix")]
    fn a_stride_that_overflows_is_refused() {
        drop(cut(&mut [0.0; 4], usize::MAX / 2 + 1, &[0..1, 1..3], &[0..1, 1..2]));
    }

    #[test]
    fn an_extent_ends_with_the_last_element_of_the_last_row() {
        assert_eq!(extent(3, 2, 5, 1), Some(12));
        assert_eq!(extent(2, 3, 1, 4), Some(10));
        assert_eq!(extent(0, 2, usize::MAX, usize::MAX), Some(0));
        assert_eq!(extent(1, 1, usize::MAX, usize::MAX), Some(1));
        for (rows, columns, row_stride) in
            [(3, 1, usize::MAX / 2 + 1), (2, 2, usize::MAX), (2, 1, usize::MAX)]
        {
            assert_eq!(extent(rows, columns, row_stride, 1), None);
        }
    }
}
