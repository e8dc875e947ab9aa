//! Gradients of a linear y = x·Wᵀ + b, from the gradient of a loss with respect to y.
//!
//! ```text
//! dx ← dy·W            [tokens, in] = [tokens, out] · [out, in]
//! dW ← dW + dyᵀ·x      [out, in]    = [out, tokens] · [tokens, in]
//! ```
//!
//! Both are the products of a forward pass with factors that are read by columns ([`Strided::transposed`]), so they have its kernels and
//! its speed. Sums are f32, along `out` or along tokens, from the first to the last. dW accumulates over samples in f32. Where the
//! forward pass rounds x and W to bf16, these products round dy, x and W. b has no gradient here: biases are not trained.

use anyhow::Result;

use super::Linear;
use super::parts::{LEAST_COLUMNS, parts, rows_at_once};
use super::product::{Factor, ProductJob, Strided, Values};
use super::profile::Part;
use super::weight::{ProductContext, Weight};

impl Linear {
    /// Writes dy·W to `dx`, or adds it.
    ///
    /// # Arguments
    /// * `dy`: `[tokens, out_features]`
    /// * `dx`: `[tokens, in_features]`
    /// * `adds`: the product is added to `dx`, as for linears that share x
    ///
    /// # Errors
    /// Fails when a weight at rest cannot be read.
    ///
    /// # Panics
    /// Panics when a slice does not have the size of its shape.
    pub fn backward(
        &self,
        dy: &[f32],
        dx: &mut [f32],
        adds: bool,
        context: &mut ProductContext,
    ) -> Result<()> {
        let (inner, columns) = (self.out_features(), self.in_features());
        let tokens = dy.len() / inner.max(1);
        assert!(
            dy.len() == tokens * inner && dx.len() == tokens * columns,
            "dy must be [tokens, out_features], and dx [tokens, in_features]"
        );
        let kernel = context.kernel(self.weight());
        let rows = Strided::rows(Values::F32(dy), inner);
        let mut job = |weight: Values<'_>, dy, inner, adds, packed: &mut _| {
            let mut job = [ProductJob {
                weight: Factor::Strided(Strided::transposed(weight, columns)),
                columns,
                out: &mut *dx,
                stride: columns,
                adds,
            }];
            kernel.products_of(dy, (tokens, inner), &mut job, packed);
        };
        context.watch.count(2 * tokens * inner * columns);
        match self.weight() {
            Weight::Held(weight) => {
                let values = weight.values_of(0..inner);
                job(values, rows, inner, adds, &mut context.packed);
            }
            weight @ (Weight::Compact(_) | Weight::AtRest(_)) => {
                // Some rows of W at a time: each adds its part of the sums.
                for part in parts(inner, rows_at_once(columns), LEAST_COLUMNS) {
                    let before = context.watch.enter(Part::Read);
                    let ProductContext { packed, read, .. } = context;
                    let values = weight.restored(part.clone(), read)?;
                    let adds = adds || part.start > 0;
                    let dy = rows.at(0, part.start);
                    context.watch.enter(before);
                    if let Some(values) = values {
                        job(values, dy, part.len(), adds, packed);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds dyᵀ·x to `gradient`.
    ///
    /// # Arguments
    /// * `dy`: `[tokens, out_features]`
    /// * `x`: `[tokens, in_features]`, the input of the forward pass
    /// * `gradient`: dW `[out_features, in_features]`
    ///
    /// # Panics
    /// Panics when a slice does not have the size of its shape.
    pub fn add_weight_gradient(
        &self,
        dy: &[f32],
        x: &[f32],
        gradient: &mut [f32],
        context: &mut ProductContext,
    ) {
        let (rows, columns) = (self.out_features(), self.in_features());
        let tokens = dy.len() / rows.max(1);
        assert!(
            dy.len() == tokens * rows && x.len() == tokens * columns,
            "dy must be [tokens, out_features], and x [tokens, in_features]"
        );
        assert_eq!(gradient.len(), rows * columns, "dW must be [out_features, in_features]");
        if tokens == 0 {
            return;
        }
        let kernel = context.products.of_gradients(self.weight().dtype());
        let mut job = [ProductJob {
            weight: Factor::Strided(Strided::transposed(Values::F32(x), columns)),
            columns,
            out: gradient,
            stride: columns,
            adds: true,
        }];
        let dy = Strided::transposed(Values::F32(dy), rows);
        context.watch.count(2 * tokens * rows * columns);
        kernel.products_of(dy, (rows, tokens), &mut job, &mut context.packed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::stored::{StoredDtype, StoredMatrix};
    use super::super::weight::{MatrixAtRest, Products, RowSource};
    use super::*;
    use std::sync::Arc;

    fn wave(count: usize, pace: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * pace).sin()).collect()
    }

    /// Every arithmetic of this CPU, and the largest relative rounding of a factor.
    fn arithmetics() -> Vec<(Products, f64)> {
        let mut all = vec![(Products::F32, 0.0)];
        for kernel in super::super::product::Kernel::all() {
            if kernel.is_bf16() {
                all.push((Products::Bf16(kernel), 1.0 / 256.0));
                all.push((Products::AllBf16(kernel), 1.0 / 128.0));
            }
        }
        if super::super::product::Kernel::has_split() {
            all.push((Products::Split, 0.0));
        }
        all
    }

    #[test]
    fn both_gradients_are_the_sums_of_their_formulas() {
        for (tokens, rows, columns) in [(1, 3, 2), (37, 50, 70), (130, 129, 65)] {
            let (x, dy) = (wave(tokens * columns, 0.37), wave(tokens * rows, 0.71));
            let weight = wave(rows * columns, 0.53);
            for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
                let matrix = StoredMatrix::from_f32(dtype, rows, columns, &weight);
                let mut wide = vec![0.0; rows * columns];
                matrix.widen_rows(0, &mut wide);
                let linear = Linear::new(matrix, Some(vec![1.0; rows]));
                for (products, rounding) in arithmetics() {
                    let mut context = ProductContext { products, ..ProductContext::new() };
                    let (mut dx, mut dw) = (vec![1.0; x.len()], vec![1.0; weight.len()]);
                    linear.backward(&dy, &mut dx, true, &mut context).unwrap();
                    linear.add_weight_gradient(&dy, &x, &mut dw, &mut context);
                    let is_close = |got: f32, terms: Vec<f64>, what: &str| {
                        let exact = 1.0 + terms.iter().sum::<f64>();
                        let size = 1.0 + terms.iter().map(|term| term.abs()).sum::<f64>();
                        // Two factors are rounded, and the sum.
                        let allowed = (2.0 * rounding + 2e-6) * size;
                        let apart = (f64::from(got) - exact).abs();
                        assert!(apart <= allowed, "{what} {products:?} {dtype:?}: {got} {exact}");
                    };
                    for (at, &got) in dx.iter().enumerate() {
                        let (token, column) = (at / columns, at % columns);
                        let term = |row| {
                            f64::from(dy[token * rows + row])
                                * f64::from(wide[row * columns + column])
                        };
                        is_close(got, (0..rows).map(term).collect(), "dx");
                    }
                    for (at, &got) in dw.iter().enumerate() {
                        let (row, column) = (at / columns, at % columns);
                        let term = |token| {
                            f64::from(dy[token * rows + row])
                                * f64::from(x[token * columns + column])
                        };
                        is_close(got, (0..tokens).map(term).collect(), "dW");
                    }
                }
            }
        }
    }

    struct InMemory(StoredMatrix);

    impl RowSource for InMemory {
        fn read_rows(&self, first_row: usize, bytes: &mut [u8]) -> Result<()> {
            let start = first_row * self.0.columns() * self.0.dtype().bytes();
            bytes.copy_from_slice(&self.0.as_bytes()[start..start + bytes.len()]);
            Ok(())
        }
    }

    #[test]
    fn a_weight_at_rest_gives_what_one_in_memory_gives() {
        // 64 rows at once, so that several parts add their sums.
        let (tokens, rows, columns) = (9, 200, 1 << 16);
        let matrix =
            StoredMatrix::from_f32(StoredDtype::Bf16, rows, columns, &wave(rows * columns, 0.53));
        let dy = wave(tokens * rows, 0.71);
        let rest =
            MatrixAtRest::new(Arc::new(InMemory(matrix.clone())), matrix.dtype(), rows, columns);
        let run = |linear: Linear| {
            let mut dx = vec![f32::NAN; tokens * columns];
            let mut context = ProductContext::new();
            linear.backward(&dy, &mut dx, false, &mut context).unwrap();
            dx
        };
        let rest = run(Linear::new(Weight::AtRest(rest), None));
        for (held, rest) in run(Linear::new(matrix, None)).iter().zip(&rest) {
            // 200 products below 1.
            assert!((held - rest).abs() < 1e-4, "{held} {rest}");
        }
    }
}
