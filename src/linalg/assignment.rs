//! The linear sum assignment problem: every row takes a different column, and the sum of the gains is the largest.
//!
//! Maximize Σ_i gain[i, σ(i)] over permutations σ, gain `[n, n]` in f64. Shortest augmenting paths with dual variables, O(n³): Jonker and
//! Volgenant 1987, "A Shortest Augmenting Path Algorithm for Dense and Sparse Linear Assignment Problems", in the form of Crouse 2016,
//! "On Implementing 2D Rectangular Assignment Algorithms"; reference: `scipy.optimize.linear_sum_assignment`. Before it, columns are
//! reduced and rows take free columns whose reduced cost is zero, as in the first paper. A single thread does it all, so the result is
//! always the same. On equal paths, the last free column wins, or the first column if none is free.

/// No row or column.
const NONE: usize = usize::MAX;

/// Returns the column of every row. `gains` is `[n, n]`, row-major, and finite.
///
/// # Panics
/// Panics when `gains` has not n² elements.
#[must_use]
pub fn assign(gains: &[f64], n: usize) -> Vec<usize> {
    assert_eq!(gains.len(), n * n, "a row of gains per column");
    let mut search = AugmentingSearch::new(gains, n);
    search.take_free_columns();
    for row in 0..n {
        if search.column_of[row] == NONE {
            search.augment(row);
        }
    }
    search.column_of
}

/// The state of the search; the cost of an element is its negated gain.
struct AugmentingSearch<'a> {
    gains: &'a [f64],
    n: usize,
    /// Dual variables.
    rows: Vec<f64>,
    columns: Vec<f64>,
    column_of: Vec<usize>,
    row_of: Vec<usize>,
    /// The shortest path to every column, and the row before it.
    shortest: Vec<f64>,
    before: Vec<usize>,
    /// Columns that the path tree has not reached.
    remaining: Vec<usize>,
}

impl<'a> AugmentingSearch<'a> {
    fn new(gains: &'a [f64], n: usize) -> Self {
        Self {
            gains,
            n,
            rows: vec![0.0; n],
            columns: vec![0.0; n],
            column_of: vec![NONE; n],
            row_of: vec![NONE; n],
            shortest: vec![0.0; n],
            before: vec![NONE; n],
            remaining: Vec::with_capacity(n),
        }
    }

    /// Makes all reduced costs at least zero, and gives rows the free columns where they are zero: first the row's own.
    fn take_free_columns(&mut self) {
        let n = self.n;
        self.columns.fill(f64::INFINITY);
        for gains in self.gains.chunks_exact(n.max(1)) {
            for (least, gain) in self.columns.iter_mut().zip(gains) {
                *least = least.min(-gain);
            }
        }
        for row in 0..n {
            let gains = &self.gains[row * n..][..n];
            let reduced = gains.iter().zip(&self.columns).map(|(gain, v)| -gain - v);
            let least = reduced.clone().fold(f64::INFINITY, f64::min);
            self.rows[row] = least;
            let is_free = |column: usize| self.row_of[column] == NONE;
            let own = -gains[row] - self.columns[row] == least && is_free(row);
            let found = match own {
                true => Some(row),
                false => reduced
                    .enumerate()
                    .find(|&(column, cost)| cost == least && is_free(column))
                    .map(|(column, _)| column),
            };
            if let Some(column) = found {
                self.column_of[row] = column;
                self.row_of[column] = row;
            }
        }
    }

    /// Finds the shortest path from a free row to a free column, and assigns along it.
    fn augment(&mut self, free_row: usize) {
        let n = self.n;
        self.shortest.fill(f64::INFINITY);
        self.remaining.clear();
        self.remaining.extend(0..n);
        // Columns of the tree, in the order in which they were reached.
        let mut reached = Vec::new();
        let (mut row, mut length) = (free_row, 0.0);
        let sink = loop {
            let gains = &self.gains[row * n..][..n];
            let base = length - self.rows[row];
            let (mut next, mut lowest) = (NONE, f64::INFINITY);
            for (at, &column) in self.remaining.iter().enumerate() {
                let path = base - gains[column] - self.columns[column];
                if path < self.shortest[column] {
                    self.shortest[column] = path;
                    self.before[column] = row;
                }
                let shortest = self.shortest[column];
                let is_free = self.row_of[column] == NONE;
                if next == NONE || shortest < lowest || (shortest == lowest && is_free) {
                    (next, lowest) = (at, shortest);
                }
            }
            length = lowest;
            let column = self.remaining.remove(next);
            reached.push(column);
            match self.row_of[column] {
                NONE => break column,
                owner => row = owner,
            }
        };
        self.rows[free_row] += length;
        for &column in &reached {
            let slack = length - self.shortest[column];
            self.columns[column] -= slack;
            if self.row_of[column] != NONE {
                self.rows[self.row_of[column]] += slack;
            }
        }
        let mut column = sink;
        loop {
            let row = self.before[column];
            self.row_of[column] = row;
            column = std::mem::replace(&mut self.column_of[row], column);
            if row == free_row {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(gains: &[f64], columns: &[usize]) -> f64 {
        let n = columns.len();
        let rows = columns.iter().enumerate();
        rows.map(|(row, column)| gains[row * n + column]).sum()
    }

    /// All permutations, by exchanges.
    fn best_of_all(gains: &[f64], columns: &mut Vec<usize>, first: usize) -> f64 {
        if first == columns.len() {
            return sum(gains, columns);
        }
        let mut best = f64::NEG_INFINITY;
        for other in first..columns.len() {
            columns.swap(first, other);
            best = best.max(best_of_all(gains, columns, first + 1));
            columns.swap(first, other);
        }
        best
    }

    fn is_permutation(columns: &[usize]) -> bool {
        let mut sorted = columns.to_vec();
        sorted.sort_unstable();
        sorted.iter().enumerate().all(|(at, column)| at == *column)
    }

    #[test]
    fn no_other_assignment_gains_more() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        for n in 1..=7 {
            for distinct in [2, 5, 1_000_000] {
                let gains: Vec<f64> =
                    (0..n * n).map(|_| (random() % distinct) as f64 - 3.0).collect();
                let columns = assign(&gains, n);
                assert!(is_permutation(&columns), "{columns:?}");
                let best = best_of_all(&gains, &mut (0..n).collect(), 0);
                assert_eq!(sum(&gains, &columns), best, "{gains:?}");
            }
        }
    }

    #[test]
    fn equal_gains_leave_everything_in_its_place() {
        let n = 50;
        assert_eq!(assign(&vec![1.5; n * n], n), Vec::from_iter(0..n));
        assert!(assign(&[], 0).is_empty());
    }
}
