//! A linear layer that owns its weight in the stored dtype: y = x·Wᵀ + b.
//!
//! x `[tokens, in_features]`, W `[out_features, in_features]`, y `[tokens, out_features]`, products accumulated in f32.
//! Weights are packed from their stored bytes as they are multiplied (`product`), so no f32 copy of a matrix ever exists. A weight
//! that is not in memory is read a panel of rows at a time at every product, with the same bits. Callers do not see how the
//! product is made.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use anyhow::Result;
use rayon::prelude::*;

use super::matvec;
use super::parts::{LEAST_COLUMNS, largest_part, parts};
use super::product::{self, Factor, Kernel, PackedWeight, ProductJob};
use super::profile::Part;
use super::weight::{Panel, Weight};

/// Elements of a weight at rest read at once: 16 MiB of f32, about what an L3 cache holds.
const PANEL_ELEMENTS: usize = 1 << 22;

/// A weight `[out_features, in_features]` and an optional bias `[out_features]`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Vec<f32>>,
    /// The weight as products read it, from the first of them on, where the panel says to keep it.
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

    /// Rows of a weight of this shape that are read at once where it is at rest.
    pub fn panel_rows(in_features: usize, out_features: usize) -> usize {
        largest_part(out_features, panel_rows(in_features), LEAST_COLUMNS)
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
        forward_all(&mut [(self, rows, out)], x, panel)
    }

    /// The weight of some output features as a product takes it; `None` where it is not in memory.
    fn factor(&self, kernel: Kernel, rows: &Range<usize>, panel: &mut Panel) -> Option<Factor<'_>> {
        let inner = self.in_features();
        let weight = self.weight.held()?;
        let is_kept = kernel.keeps()
            && panel.keeps_packed
            && self.is_reused
            && PackedWeight::begins_at(kernel, rows.start);
        Some(if is_kept {
            let part = panel.watch.enter(Part::Pack);
            let kept = self.packed.get().unwrap_or_else(|| {
                // Packed before the cell is entered: all threads pack, and none may come here meanwhile and wait for itself.
                let rows = 0..self.out_features();
                let of_all = weight.values_of(rows);
                let packed = PackedWeight::of(kernel, of_all, self.out_features(), inner);
                self.packed.get_or_init(|| packed.into())
            });
            panel.watch.enter(part);
            Factor::Packed(kept, rows.start)
        } else {
            Factor::Stored(weight.values_of(rows.clone()))
        })
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
        multiply(&mut [(self, 0..self.out_features(), &mut out)], x, panel)?;
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

/// Writes x·Wᵀ + b of several linears that read the same x, which is prepared once for all.
///
/// # Arguments
/// * `linears`: each with the output features wanted, and `[tokens, features]` for them
/// * `x`: `[tokens, in_features]`, row-major
///
/// # Errors
/// Fails when a weight at rest cannot be read.
///
/// # Panics
/// When a slice does not have the size its shape says, or output features are not there.
pub fn forward_all(
    linears: &mut [(&Linear, Range<usize>, &mut [f32])],
    x: &[f32],
    panel: &mut Panel,
) -> Result<()> {
    multiply(linears, x, panel)?;
    for (linear, rows, out) in linears {
        if let Some(bias) = &linear.bias {
            let bias = &bias[rows.clone()];
            out.par_chunks_mut(bias.len().max(1))
                .for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
    }
    Ok(())
}

/// [`forward_all`] without the biases.
fn multiply(
    linears: &mut [(&Linear, Range<usize>, &mut [f32])],
    x: &[f32],
    panel: &mut Panel,
) -> Result<()> {
    let Some((first, ..)) = linears.first() else {
        return Ok(());
    };
    let (inner, dtype) = (first.in_features(), first.weight.dtype());
    if linears.iter().any(|(one, ..)| one.weight.dtype() != dtype) {
        // Rare, and each has a kernel of its own then.
        for one in linears.chunks_mut(1) {
            multiply(one, x, panel)?;
        }
        return Ok(());
    }
    let tokens = x.len() / inner.max(1);
    assert_eq!(x.len(), tokens * inner, "x must be [tokens, in_features]");
    for (linear, rows, out) in &*linears {
        assert!(
            linear.in_features() == inner,
            "linears that share x must have the same width"
        );
        assert_eq!(
            out.len(),
            tokens * rows.len(),
            "out must be [tokens, out_features]"
        );
        panel.watch.count(2 * tokens * inner * rows.len());
    }
    let kernel = panel.kernel(dtype);
    let (mut held, mut at_rest): (Vec<_>, Vec<_>) = linears
        .iter_mut()
        .partition(|(linear, ..)| linear.weight.held().is_some());
    let mut jobs = Vec::with_capacity(held.len());
    for (linear, rows, out) in &mut held {
        if let Some(weight) = linear.factor(kernel, rows, panel) {
            jobs.push(ProductJob {
                weight,
                columns: rows.len(),
                out,
                stride: rows.len(),
            });
        }
    }
    if !jobs.is_empty() {
        product::products(kernel, x, inner, &mut jobs, &mut panel.packed);
    }
    for (linear, rows, out) in &mut at_rest {
        let Weight::AtRest(weight) = &linear.weight else {
            continue;
        };
        let columns = rows.len();
        for part in parts(columns, panel_rows(inner), LEAST_COLUMNS) {
            let before = panel.watch.enter(Part::Read);
            let first = rows.start + part.start;
            let Panel { packed, read, .. } = panel;
            let values = weight.read_values(first..first + part.len(), read)?;
            panel.watch.enter(before);
            let mut job = [ProductJob {
                weight: Factor::Stored(values),
                columns: part.len(),
                out: &mut out[part.start..],
                stride: columns,
            }];
            product::products(kernel, x, inner, &mut job, packed);
        }
    }
    panel.watch.move_to(Part::Pack, panel.packed.take_time());
    Ok(())
}

/// Rows read at once, where there are as many.
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
    fn weights_of_different_dtypes_share_x_as_each_alone() {
        let (tokens, inner, columns) = (9, 70, [40, 33, 64]);
        let x: Vec<f32> = (0..tokens * inner)
            .map(|i| (i as f32 * 0.29).cos())
            .collect();
        let dtypes = [StoredDtype::Bf16, StoredDtype::F32, StoredDtype::F16];
        let linears = [0, 1, 2].map(|at| {
            let weight: Vec<f32> = (0..inner * columns[at])
                .map(|i| (i as f32 * 0.13).sin())
                .collect();
            let matrix = StoredMatrix::from_f32(dtypes[at], columns[at], inner, &weight);
            Linear::new(matrix, Some(vec![at as f32; columns[at]]))
        });
        let mut together = columns.map(|columns| vec![f32::NAN; tokens * columns]);
        let mut jobs: Vec<_> = linears
            .iter()
            .zip(together.iter_mut())
            .map(|(linear, out)| (linear, 0..linear.out_features(), &mut out[..]))
            .collect();
        forward_all(&mut jobs, &x, &mut Panel::new()).unwrap();
        for (linear, together) in linears.iter().zip(&together) {
            assert!(*together == linear.forward(&x, &mut Panel::new()).unwrap());
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
    fn a_weight_of_any_size_is_multiplied_slab_by_slab() {
        let (inner, columns) = (1 << 16, 300);
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
