//! A linear layer that owns its weight in the stored dtype: y = x·Wᵀ + b.
//!
//! x `[tokens, in_features]`, W `[out_features, in_features]`, y `[tokens, out_features]`, products accumulated in f32.
//! Half-precision weights are widened a panel of rows at a time into the workspace (docs/performance.md
//! has what that costs), so no f32 copy of a matrix ever exists. Callers do not see how the product is made.

use rayon::prelude::*;

use super::matmul::{Threads, View, matmul};
use super::stored::StoredMatrix;

/// Elements of a weight panel widened at once: 16 MiB of f32, about what an L3 cache holds.
const PANEL_ELEMENTS: usize = 1 << 22;

/// A weight `[out_features, in_features]` and an optional bias `[out_features]`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// The weight in its stored dtype.
    pub weight: StoredMatrix,
    /// The bias, widened to f32.
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// Output features.
    pub fn out_features(&self) -> usize {
        self.weight.rows()
    }

    /// Input features.
    pub fn in_features(&self) -> usize {
        self.weight.columns()
    }

    /// Bytes of scratch [`Linear::forward_into`] needs for a weight of this shape and dtype.
    pub fn panel_bytes(in_features: usize, out_features: usize) -> usize {
        4 * in_features * panel_rows(in_features).min(out_features)
    }

    /// Writes x·Wᵀ + b to `out`.
    ///
    /// # Arguments
    /// * `x`: `[tokens, in_features]`, row-major
    /// * `out`: `[tokens, out_features]`, row-major; its old content is ignored
    /// * `panel`: scratch for widened rows, grown on first use
    ///
    /// # Panics
    /// When a slice does not have the size its shape says.
    pub fn forward_into(&self, x: &[f32], out: &mut [f32], panel: &mut Vec<f32>) {
        let (inner, columns) = (self.in_features(), self.out_features());
        let tokens = x.len() / inner.max(1);
        assert_eq!(x.len(), tokens * inner, "x must be [tokens, in_features]");
        assert_eq!(
            out.len(),
            tokens * columns,
            "out must be [tokens, out_features]"
        );
        let lhs = View::strided(x, tokens, inner, inner);
        if let Some(weight) = self.weight.as_f32() {
            let rhs = View::strided(weight, columns, inner, inner).transposed();
            matmul(out, columns, 1.0, lhs, rhs, Threads::All);
        } else {
            let rows_at_once = panel_rows(inner).min(columns);
            if panel.len() < rows_at_once * inner {
                panel.resize(rows_at_once * inner, 0.0);
            }
            for first_row in (0..columns).step_by(rows_at_once) {
                let rows = rows_at_once.min(columns - first_row);
                let wide = &mut panel[..rows * inner];
                self.weight.widen_rows_parallel(first_row, wide);
                let rhs = View::strided(wide, rows, inner, inner).transposed();
                matmul(&mut out[first_row..], columns, 1.0, lhs, rhs, Threads::All);
            }
        }
        if let Some(bias) = &self.bias {
            out.par_chunks_mut(columns)
                .for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
    }

    /// [`Linear::forward_into`] into a new vector.
    pub fn forward(&self, x: &[f32], panel: &mut Vec<f32>) -> Vec<f32> {
        let mut out = vec![0.0; x.len() / self.in_features().max(1) * self.out_features()];
        self.forward_into(x, &mut out, panel);
        out
    }
}

fn panel_rows(in_features: usize) -> usize {
    (PANEL_ELEMENTS / in_features.max(1)).max(64)
}

#[cfg(test)]
mod tests {
    use super::super::stored::StoredDtype;
    use super::*;

    #[test]
    fn product_is_the_same_for_a_weight_in_any_dtype_and_adds_the_bias() {
        // Small integers are exact in all three dtypes, and so are their products and sums.
        let (tokens, inner, columns) = (5, 70, 130);
        let weight: Vec<f32> = (0..inner * columns)
            .map(|i| ((i * 7) % 11) as f32 - 5.0)
            .collect();
        let x: Vec<f32> = (0..tokens * inner)
            .map(|i| ((i * 3) % 5) as f32 - 2.0)
            .collect();
        let bias: Vec<f32> = (0..columns).map(|i| i as f32).collect();
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let linear = Linear {
                weight: StoredMatrix::from_f32(dtype, columns, inner, &weight),
                bias: Some(bias.clone()),
            };
            let y = linear.forward(&x, &mut Vec::new());
            for token in 0..tokens {
                for column in 0..columns {
                    let exact: f32 = (0..inner)
                        .map(|k| x[token * inner + k] * weight[column * inner + k])
                        .sum();
                    assert_eq!(
                        y[token * columns + column],
                        exact + bias[column],
                        "{dtype:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_weight_larger_than_one_panel_is_multiplied_panel_by_panel() {
        // 65536 inner elements allow 64 rows a panel: 150 rows need three, the last one short.
        let (inner, columns) = (1 << 16, 150);
        let weight: Vec<f32> = (0..inner * columns)
            .map(|i| if i % inner == i / inner { 3.0 } else { 0.0 })
            .collect();
        let linear = Linear {
            weight: StoredMatrix::from_f32(StoredDtype::Bf16, columns, inner, &weight),
            bias: None,
        };
        let x: Vec<f32> = (0..inner).map(|i| i as f32).collect();
        let y = linear.forward(&x, &mut Vec::new());
        assert_eq!(y, (0..columns).map(|i| 3.0 * i as f32).collect::<Vec<_>>());
    }
}
