//! Permutations of rows and columns: `order[new]` is the old place of the element that comes to `new`.

use bytemuck::Pod;
use rayon::prelude::*;

use super::stored::{StoredMatrix, StoredValues};

/// Reorders the blocks of `values`, `size` elements each. It needs the memory of a block and of a bit per block.
///
/// # Panics
/// Panics when `order` does not name every block once.
pub fn permute_blocks<T: Copy>(values: &mut [T], size: usize, order: &[usize]) {
    assert_eq!(values.len(), size * order.len(), "one place per block");
    let mut is_done = vec![false; order.len()];
    let mut first_block = Vec::with_capacity(size);
    for start in 0..order.len() {
        if is_done[start] {
            continue;
        }
        first_block.clear();
        first_block.extend_from_slice(&values[start * size..][..size]);
        let mut at = start;
        loop {
            assert!(!is_done[at], "a permutation names every place once");
            is_done[at] = true;
            let from = order[at];
            if from == start {
                break;
            }
            values.copy_within(from * size..(from + 1) * size, at * size);
            at = from;
        }
        values[at * size..][..size].copy_from_slice(&first_block);
    }
}

/// Reorders the elements of a vector.
pub fn permute<T: Copy>(values: &mut [T], order: &[usize]) {
    permute_blocks(values, 1, order);
}

/// Reorders the columns of every row of `values`, with a copy of a row per task.
pub fn permute_columns<T: Pod + Send + Sync>(values: &mut [T], order: &[usize]) {
    values.par_chunks_mut(order.len().max(1)).for_each_init(Vec::new, |old, row| {
        old.clear();
        old.extend_from_slice(row);
        for (value, &from) in row.iter_mut().zip(order) {
            *value = old[from];
        }
    });
}

/// The inverse of a permutation: the new place of every old place.
#[must_use]
pub fn inverse(order: &[usize]) -> Vec<usize> {
    let mut places = vec![0; order.len()];
    for (new, &old) in order.iter().enumerate() {
        places[old] = new;
    }
    places
}

impl StoredMatrix {
    /// Reorders the rows.
    ///
    /// # Panics
    /// Panics when `order` does not name every row once.
    pub fn permute_rows(&mut self, order: &[usize]) {
        let columns = self.columns();
        match std::sync::Arc::make_mut(&mut self.values) {
            StoredValues::F32(values) => permute_blocks(values, columns, order),
            StoredValues::F16(values) => permute_blocks(values, columns, order),
            StoredValues::Bf16(values) => permute_blocks(values, columns, order),
        }
    }

    /// Reorders the columns.
    ///
    /// # Panics
    /// Panics when the length of `order` is not the length of a row, or `order` names a column that does not exist.
    pub fn permute_columns(&mut self, order: &[usize]) {
        assert_eq!(order.len(), self.columns(), "one place per column");
        match std::sync::Arc::make_mut(&mut self.values) {
            StoredValues::F32(values) => permute_columns(values, order),
            StoredValues::F16(values) => permute_columns(values, order),
            StoredValues::Bf16(values) => permute_columns(values, order),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::StoredDtype;

    /// Two cycles and a fixed point.
    const ORDER: [usize; 6] = [2, 1, 5, 4, 3, 0];

    #[test]
    fn rows_and_columns_come_from_the_places_that_the_order_names() {
        let values: Vec<f32> = (0..36).map(|at| at as f32).collect();
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let mut matrix = StoredMatrix::from_f32(dtype, 6, 6, &values);
            matrix.permute_rows(&ORDER);
            matrix.permute_columns(&ORDER);
            let mut found = vec![0.0; 36];
            matrix.widen_rows(0, &mut found);
            for (at, value) in found.iter().enumerate() {
                let (row, column) = (ORDER[at / 6], ORDER[at % 6]);
                assert_eq!(*value, (row * 6 + column) as f32, "{dtype:?}");
            }
        }
    }

    #[test]
    fn the_inverse_leads_back() {
        let mut values = [10, 11, 12, 13, 14, 15];
        permute(&mut values, &ORDER);
        assert_eq!(values, [12, 11, 15, 14, 13, 10]);
        permute(&mut values, &inverse(&ORDER));
        assert_eq!(values, [10, 11, 12, 13, 14, 15]);
    }
}
