//! A linear layer that owns its weight in the stored dtype: y = x·Wᵀ + b.
//!
//! x `[tokens, in_features]`, W `[out_features, in_features]`, y `[tokens, out_features]`, products accumulated in f32.
//! Half-precision weights are widened a panel of rows at a time into the workspace (docs/performance.md
//! has what that costs), so no f32 copy of a matrix ever exists. A weight that is not in memory is read panel by panel at
//! every product, with the same bits. Callers do not see how the product is made.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use anyhow::Result;
use rayon::prelude::*;

use super::bf16::{self, Factor, PackedWeight};
use super::matmul::{Threads, View, matmul};
use super::matvec;
use super::parts::{largest_part, least_columns, parts};
use super::profile::Part;
use super::stored::StoredDtype;
use super::weight::{Panel, Products, Weight, grow};

/// Elements of a weight panel widened at once: 16 MiB of f32, about what an L3 cache holds.
const PANEL_ELEMENTS: usize = 1 << 22;

/// A weight `[out_features, in_features]` and an optional bias `[out_features]`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Vec<f32>>,
    /// The weight as bf16 products read it, from the first of them on, where the panel says to keep it.
    packed: OnceLock<Arc<PackedWeight>>,
    is_reused: bool,
}

impl Linear {
    /// A linear layer.
    ///
    /// # Arguments
    /// * `bias`: widened to f32
    pub fn new(weight: impl Into<Weight>, bias: Option<Vec<f32>>) -> Self {
        Self {
            weight: weight.into(),
            bias,
            packed: OnceLock::new(),
            is_reused: false,
        }
    }

    /// The same, of which there will be many products: what is prepared for one may be kept for the next ([`Panel::keeps_packed`]).
    #[must_use]
    pub fn reused(mut self) -> Self {
        self.is_reused = true;
        self
    }

    /// The weight in its stored dtype.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// The weight, to be changed: what was prepared for products is dropped.
    pub fn weight_mut(&mut self) -> &mut Weight {
        self.packed = OnceLock::new();
        &mut self.weight
    }

    /// The bias, as f32.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Output features.
    pub fn out_features(&self) -> usize {
        self.weight.rows()
    }

    /// Input features.
    pub fn in_features(&self) -> usize {
        self.weight.columns()
    }

    /// Rows of a weight of this shape that are widened at once where they are not f32 in memory, in a product of `tokens` rows.
    pub fn panel_rows(in_features: usize, out_features: usize, tokens: usize) -> usize {
        let at_least = least_columns(tokens);
        largest_part(out_features, panel_rows(in_features), at_least)
    }

    /// Writes x·Wᵀ + b to `out`.
    ///
    /// # Arguments
    /// * `x`: `[tokens, in_features]`, row-major
    /// * `out`: `[tokens, out_features]`, row-major; its old content is ignored
    /// * `panel`: how it is multiplied, and scratch that grows on first use
    ///
    /// # Errors
    /// Fails when a weight at rest cannot be read.
    ///
    /// # Panics
    /// When a slice does not have the size its shape says.
    pub fn forward_into(&self, x: &[f32], out: &mut [f32], panel: &mut Panel) -> Result<()> {
        self.forward_rows_into(0..self.out_features(), x, out, panel)
    }

    /// [`Linear::forward_into`] for some of the output features: `out` is `[tokens, rows.len()]`.
    ///
    /// # Errors
    /// Fails when a weight at rest cannot be read.
    ///
    /// # Panics
    /// When a slice does not have the size its shape says, or `rows` are not there.
    pub fn forward_rows_into(
        &self,
        rows: Range<usize>,
        x: &[f32],
        out: &mut [f32],
        panel: &mut Panel,
    ) -> Result<()> {
        self.product(rows.clone(), x, out, panel)?;
        if let Some(bias) = &self.bias {
            let bias = &bias[rows];
            out.par_chunks_mut(bias.len())
                .for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
        Ok(())
    }

    /// Writes x·Wᵀ of some output features to `out`, `[tokens, rows.len()]`.
    fn product(
        &self,
        rows: Range<usize>,
        x: &[f32],
        out: &mut [f32],
        panel: &mut Panel,
    ) -> Result<()> {
        let (inner, columns) = (self.in_features(), rows.len());
        let tokens = x.len() / inner.max(1);
        assert_eq!(x.len(), tokens * inner, "x must be [tokens, in_features]");
        assert_eq!(
            out.len(),
            tokens * columns,
            "out must be [tokens, out_features]"
        );
        panel.watch.count(2 * tokens * inner * columns);
        let lhs = View::strided(x, tokens, inner, inner);
        if let (Products::Bf16(kernel), StoredDtype::Bf16) = (panel.products, self.weight.dtype()) {
            self.multiply_bf16(kernel, rows.clone(), x, out, panel)?;
        } else if let Some(weight) = self.weight.held().and_then(|weight| weight.as_f32()) {
            let weight = &weight[rows.start * inner..rows.end * inner];
            let rhs = View::strided(weight, columns, inner, inner).transposed();
            matmul(out, columns, 1.0, lhs, rhs, Threads::All);
        } else {
            for part in parts(columns, panel_rows(inner), least_columns(tokens)) {
                let (first, length) = (rows.start + part.start, part.len());
                let wide: &[f32] = match &self.weight {
                    Weight::Held(weight) => {
                        let part = panel.watch.enter(Part::Pack);
                        let wide = grow(&mut panel.wide, length * inner);
                        weight.widen_rows_parallel(first, wide);
                        panel.watch.enter(part);
                        wide
                    }
                    Weight::AtRest(weight) => {
                        let part = panel.watch.enter(Part::Read);
                        weight.read_wide(first..first + length, panel)?;
                        panel.watch.enter(part);
                        &panel.wide[..length * inner]
                    }
                };
                let rhs = View::strided(wide, length, inner, inner).transposed();
                matmul(&mut out[part.start..], columns, 1.0, lhs, rhs, Threads::All);
            }
        }
        Ok(())
    }

    /// x·Wᵀ in bf16, some output features.
    fn multiply_bf16(
        &self,
        kernel: bf16::Kernel,
        rows: Range<usize>,
        x: &[f32],
        out: &mut [f32],
        panel: &mut Panel,
    ) -> Result<()> {
        let (inner, columns) = (self.in_features(), rows.len());
        let packed = &mut panel.packed;
        match &self.weight {
            Weight::Held(weight) => {
                let Some(weight) = weight.as_bf16() else {
                    return Ok(());
                };
                let keeps = panel.keeps_packed && self.is_reused;
                let factor = if keeps && PackedWeight::begins_at(rows.start) {
                    let part = panel.watch.enter(Part::Pack);
                    let kept = self.packed.get_or_init(|| {
                        Arc::new(PackedWeight::of(weight, self.out_features(), inner))
                    });
                    panel.watch.enter(part);
                    Factor::Packed(kept, rows.start, columns)
                } else {
                    Factor::Stored(&weight[rows.start * inner..rows.end * inner])
                };
                bf16::product(kernel, x, factor, inner, out, columns, packed);
            }
            Weight::AtRest(weight) => {
                let tokens = x.len() / inner.max(1);
                for part in parts(columns, panel_rows(inner), least_columns(tokens)) {
                    let first = rows.start + part.start;
                    let before = panel.watch.enter(Part::Read);
                    let stored =
                        weight.read_stored(first..first + part.len(), &mut panel.stored)?;
                    panel.watch.enter(before);
                    let stored = Factor::Stored(bytemuck::cast_slice(stored));
                    let out = &mut out[part.start..];
                    bf16::product(kernel, x, stored, inner, out, columns, packed);
                }
            }
        }
        panel.watch.move_to(Part::Pack, panel.packed.take_time());
        Ok(())
    }

    /// [`Linear::forward_into`] for a model that writes token by token: a single token's product goes straight over the
    /// stored weight, at the speed of memory. It sums in another order than a product of several tokens, so the sweep, whose
    /// results must not depend on how many tokens are left for the last chunk, does not come here.
    ///
    /// # Errors
    /// As [`Linear::forward_into`].
    ///
    /// # Panics
    /// When a slice does not have the size its shape says.
    pub fn forward_few_into(&self, x: &[f32], out: &mut [f32], panel: &mut Panel) -> Result<()> {
        let Some(weight) = self.weight.held().filter(|_| x.len() == self.in_features()) else {
            return self.forward_into(x, out, panel);
        };
        matvec::product(weight, x, out);
        if let Some(bias) = &self.bias {
            out.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        Ok(())
    }

    /// X·Wᵀ without the bias, in a new vector.
    ///
    /// # Errors
    /// As [`Linear::forward_into`].
    pub fn product_alone(&self, x: &[f32], panel: &mut Panel) -> Result<Vec<f32>> {
        let mut out = vec![0.0; x.len() / self.in_features().max(1) * self.out_features()];
        self.product(0..self.out_features(), x, &mut out, panel)?;
        Ok(out)
    }

    /// [`Linear::forward_into`] into a new vector.
    ///
    /// # Errors
    /// As [`Linear::forward_into`].
    pub fn forward(&self, x: &[f32], panel: &mut Panel) -> Result<Vec<f32>> {
        let mut out = vec![0.0; x.len() / self.in_features().max(1) * self.out_features()];
        self.forward_into(x, &mut out, panel)?;
        Ok(out)
    }
}

/// Rows widened at once, where there are as many.
fn panel_rows(in_features: usize) -> usize {
    (PANEL_ELEMENTS / in_features.max(1)).max(64)
}

#[cfg(test)]
mod tests {
    use super::super::stored::{StoredDtype, StoredMatrix};
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
            let linear = Linear::new(
                StoredMatrix::from_f32(dtype, columns, inner, &weight),
                Some(bias.clone()),
            );
            let y = linear.forward(&x, &mut Panel::new()).unwrap();
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
    fn one_token_gives_what_the_panels_give() {
        let (inner, columns) = (300, 70);
        let weight: Vec<f32> = (0..inner * columns)
            .map(|i| (i as f32 * 0.13).sin())
            .collect();
        let x: Vec<f32> = (0..2 * inner).map(|i| (i as f32 * 0.29).cos()).collect();
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let linear = Linear::new(
                StoredMatrix::from_f32(dtype, columns, inner, &weight),
                Some((0..columns).map(|i| i as f32).collect()),
            );
            let (mut panel, mut one) = (Panel::new(), vec![0.0; columns]);
            let two = linear.forward(&x, &mut panel).unwrap();
            for (x, two) in x.chunks(inner).zip(two.chunks(columns)) {
                linear.forward_few_into(x, &mut one, &mut panel).unwrap();
                for (one, two) in one.iter().zip(two) {
                    // 300 products below 1 summed in another order.
                    assert!((one - two).abs() < 1e-4, "{dtype:?}: {one} {two}");
                }
            }
            let mut several = vec![0.0; 2 * columns];
            linear
                .forward_few_into(&x, &mut several, &mut panel)
                .unwrap();
            assert_eq!(several, two, "several tokens go the common way");
        }
    }

    #[test]
    fn a_weight_larger_than_one_panel_is_multiplied_panel_by_panel() {
        // 65536 inner elements allow 64 rows a panel, a single token wants 129 at least: 300 rows are two panels of 150.
        let (inner, columns) = (1 << 16, 300);
        assert_eq!(Linear::panel_rows(inner, columns, 1), 150);
        let weight: Vec<f32> = (0..inner * columns)
            .map(|i| if i % inner == i / inner { 3.0 } else { 0.0 })
            .collect();
        let linear = Linear::new(
            StoredMatrix::from_f32(StoredDtype::Bf16, columns, inner, &weight),
            None,
        );
        let x: Vec<f32> = (0..inner).map(|i| i as f32).collect();
        let y = linear.forward(&x, &mut Panel::new()).unwrap();
        assert_eq!(y, (0..columns).map(|i| 3.0 * i as f32).collect::<Vec<_>>());
    }
}
