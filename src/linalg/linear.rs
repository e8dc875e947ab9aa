//! A linear layer with its weight in the stored dtype: y = x·Wᵀ + b.
//!
//! x `[tokens, in_features]`, W `[out_features, in_features]`, y `[tokens, out_features]`; products accumulate in f32. Weights are packed
//! from their stored bytes as they are multiplied (`product`), so no f32 copy of a matrix exists. A weight at rest is read some rows
//! at a time for every product, and gives the same bits.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use anyhow::Result;
use rayon::prelude::*;

use super::one_token;
use super::parts::{LEAST_COLUMNS, largest_part, parts, rows_at_once};
use super::permute;
use super::product::{self, Factor, Kernel, PackedWeight, ProductJob};
use super::profile::Part;
use super::stored::StoredMatrix;
use super::weight::{CodedActivations, ProductContext, Weight};

/// A weight `[out_features, in_features]` and an optional bias `[out_features]`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Vec<f32>>,
    /// The packed weight. The first product makes it if the context keeps packed weights.
    packed: OnceLock<Arc<PackedWeight>>,
    is_reused: bool,
}

/// Some output features of a linear, and the memory for their values.
#[derive(Debug)]
pub struct LinearOutput<'a> {
    /// The linear.
    pub linear: &'a Linear,
    /// The output features that are computed.
    pub features: Range<usize>,
    /// `[tokens, features.len()]`, row-major; its old content is ignored.
    pub out: &'a mut [f32],
}

/// Arithmetic of a product whose x has a single token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SingleToken {
    /// The kernels for many tokens. A token's values do not depend on the number of tokens.
    AsMany,
    /// A matrix-vector product over the stored weight, at the speed of memory. Its order of sums differs.
    MatrixVector,
}

impl Linear {
    /// Creates a linear layer with a bias that is widened to f32.
    pub fn new(weight: impl Into<Weight>, bias: Option<Vec<f32>>) -> Self {
        Self { weight: weight.into(), bias, packed: OnceLock::new(), is_reused: false }
    }

    /// The same linear for many products: a product may keep the packed weight for the next product ([`ProductContext::keeps_packed`]).
    #[must_use]
    pub fn reused(mut self) -> Self {
        self.is_reused = true;
        self
    }

    /// The weight in its stored dtype.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// The weight, for a change. The packed weight is dropped.
    pub fn weight_mut(&mut self) -> &mut Weight {
        self.drop_packed();
        &mut self.weight
    }

    /// Frees the packed weight.
    pub fn drop_packed(&mut self) {
        self.packed = OnceLock::new();
    }

    /// The weight, if it is in memory.
    pub fn into_weight(self) -> Option<StoredMatrix> {
        match self.weight {
            Weight::Held(matrix) => Some(matrix),
            Weight::Compact(_) | Weight::AtRest(_) => None,
        }
    }

    /// Reorders the output features of a weight in memory, and of the bias, by `order[new] = old`.
    ///
    /// # Panics
    /// Panics when `order` does not name every output feature once.
    pub fn permute_outputs(&mut self, order: &[usize]) {
        if let Some(weight) = self.weight_mut().held_mut() {
            weight.permute_rows(order);
            if let Some(bias) = &mut self.bias {
                permute::permute(bias, order);
            }
        }
    }

    /// Reorders the input features of a weight in memory by `order[new] = old`.
    ///
    /// # Panics
    /// Panics when `order` does not have a place per input feature.
    pub fn permute_inputs(&mut self, order: &[usize]) {
        if let Some(weight) = self.weight_mut().held_mut() {
            weight.permute_columns(order);
        }
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

    /// Rows of a weight at rest of this shape that are read at once.
    pub fn rows_at_once(in_features: usize, out_features: usize) -> usize {
        largest_part(out_features, rows_at_once(in_features), LEAST_COLUMNS)
    }

    /// Writes x·Wᵀ + b to `out` `[tokens, out_features]`; see [`forward_all`].
    ///
    /// # Errors
    /// Fails when a weight at rest cannot be read.
    ///
    /// # Panics
    /// Panics when a slice does not have the size its shape says.
    pub fn forward(
        &self,
        x: &[f32],
        out: &mut [f32],
        single: SingleToken,
        context: &mut ProductContext,
    ) -> Result<()> {
        let mut outputs = [LinearOutput { linear: self, features: 0..self.out_features(), out }];
        forward_all(&mut outputs, x, single, context)
    }

    /// Returns X·Wᵀ without the bias, `[tokens, out_features]`.
    pub fn multiply(&self, x: &[f32], context: &mut ProductContext) -> Result<Vec<f32>> {
        let mut out = vec![0.0; x.len() / self.in_features().max(1) * self.out_features()];
        let mut outputs =
            [LinearOutput { linear: self, features: 0..self.out_features(), out: &mut out }];
        multiply(&mut outputs, x, context)?;
        Ok(out)
    }

    /// Some rows of a weight in memory, in the form a product takes them.
    fn factor<'a>(
        &'a self,
        weight: &'a StoredMatrix,
        kernel: Kernel,
        rows: &Range<usize>,
        context: &mut ProductContext,
    ) -> Factor<'a> {
        let is_kept = kernel.keeps()
            && context.keeps_packed
            && self.is_reused
            && PackedWeight::begins_at(kernel, rows.start);
        if !is_kept {
            return Factor::Stored(weight.values_of(rows.clone()));
        }
        let part = context.watch.enter(Part::Pack);
        let kept = self.packed.get().unwrap_or_else(|| {
            // All threads pack before the cell is entered. A thread inside the cell would wait for itself.
            let (out_features, in_features) = (self.out_features(), self.in_features());
            let values = weight.values_of(0..out_features);
            let packed = PackedWeight::of(kernel, values, out_features, in_features);
            self.packed.get_or_init(|| packed.into())
        });
        context.watch.enter(part);
        Factor::Packed(kept, rows.start)
    }

    /// Adds the bias of some output features to `[tokens, features.len()]`.
    fn add_bias(&self, features: &Range<usize>, out: &mut [f32]) {
        if let Some(bias) = &self.bias {
            let bias = &bias[features.clone()];
            out.par_chunks_mut(bias.len().max(1))
                .for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
    }
}

/// Writes x·Wᵀ + b of several linears with the same x, which is packed once for all of them.
///
/// # Arguments
/// * `x`: `[tokens, in_features]`, row-major
/// * `single`: the arithmetic if x has one token. A sweep takes [`SingleToken::AsMany`], because its results must not depend on
///   the number of tokens in the last chunk.
/// * `context`: the arithmetic, and scratch memory that grows with the first product
///
/// # Errors
/// Fails when a weight at rest cannot be read.
///
/// # Panics
/// Panics when a slice does not have the size its shape says, or output features do not exist.
pub fn forward_all(
    outputs: &mut [LinearOutput<'_>],
    x: &[f32],
    single: SingleToken,
    context: &mut ProductContext,
) -> Result<()> {
    let is_one_token = outputs.first().is_some_and(|one| one.linear.in_features() == x.len());
    if is_one_token && single == SingleToken::MatrixVector {
        multiply_one_token(outputs, x, context)?;
    } else {
        multiply(outputs, x, context)?;
    }
    for LinearOutput { linear, features, out } in outputs {
        linear.add_bias(features, out);
    }
    Ok(())
}

/// [`multiply`] for a token, at the speed of memory where the output is whole and the weight is in memory.
fn multiply_one_token(
    outputs: &mut [LinearOutput<'_>],
    x: &[f32],
    context: &mut ProductContext,
) -> Result<()> {
    let form_of = |one: &LinearOutput<'_>, context: &ProductContext| {
        let is_whole = one.features == (0..one.linear.out_features());
        one.linear.weight.one_token_form(context).filter(|_| is_whole)
    };
    let forms: Vec<_> = outputs.iter().map(|one| form_of(one, context)).collect();
    let mut input = std::mem::take(&mut context.input);
    input.set(x, |form| forms.contains(&Some(form)));
    for (one, form) in outputs.iter_mut().zip(forms) {
        match (&one.linear.weight, form) {
            (Weight::Held(weight), Some(form)) => one_token::dense(weight, &input, form, one.out),
            (Weight::Compact(weight), Some(form)) => {
                one_token::compact(weight, &input, form, one.out);
            }
            (Weight::AtRest(_), _) | (_, None) => {
                multiply(std::slice::from_mut(one), x, context)?;
            }
        }
    }
    context.input = input;
    Ok(())
}

/// [`forward_all`] without the biases.
fn multiply(
    outputs: &mut [LinearOutput<'_>],
    x: &[f32],
    context: &mut ProductContext,
) -> Result<()> {
    let Some(first) = outputs.first() else {
        return Ok(());
    };
    let (inner, kernel) = (first.linear.in_features(), context.kernel(&first.linear.weight));
    if outputs.iter().any(|one| context.kernel(&one.linear.weight) != kernel) {
        // Each kernel packs x for itself. Such layers are rare.
        for one in outputs.chunks_mut(1) {
            multiply(one, x, context)?;
        }
        return Ok(());
    }
    let tokens = x.len() / inner.max(1);
    assert_eq!(x.len(), tokens * inner, "x must be [tokens, in_features]");
    let (mut jobs, mut jobs_of_codes, mut at_rest) = (Vec::new(), Vec::new(), Vec::new());
    for LinearOutput { linear, features, out } in outputs {
        assert!(linear.in_features() == inner, "linears that share x must have the same width");
        let columns = features.len();
        assert_eq!(out.len(), tokens * columns, "out must be [tokens, out_features]");
        context.watch.count(2 * tokens * inner * columns);
        let job = |weight, out| ProductJob { weight, columns, out, stride: columns, adds: false };
        match &linear.weight {
            Weight::Held(weight) => {
                jobs.push(job(linear.factor(weight, kernel, features, context), out));
            }
            Weight::Compact(matrix) => {
                let rounds =
                    matrix.form().is_coded() && context.activations == CodedActivations::Int8;
                let jobs = if rounds { &mut jobs_of_codes } else { &mut jobs };
                jobs.push(job(Factor::Restored(matrix, features.start), out));
            }
            Weight::AtRest(_) => at_rest.push((&linear.weight, features.clone(), out)),
        }
    }
    if !jobs.is_empty() {
        product::products(kernel, x, inner, &mut jobs, &mut context.packed);
    }
    if !jobs_of_codes.is_empty() {
        context.input.round(x, inner);
        let ProductContext { packed, input, .. } = &mut *context;
        product::products(kernel, input.rounded(), inner, &mut jobs_of_codes, packed);
    }
    for (weight, features, out) in at_rest {
        for part in parts(features.len(), rows_at_once(inner), LEAST_COLUMNS) {
            let before = context.watch.enter(Part::Read);
            let first = features.start + part.start;
            let values = weight.restored(first..first + part.len(), &mut context.read)?;
            context.watch.enter(before);
            let Some(values) = values else { continue };
            let mut job = [ProductJob {
                weight: Factor::Stored(values),
                columns: part.len(),
                out: &mut out[part.start..],
                stride: features.len(),
                adds: false,
            }];
            product::products(kernel, x, inner, &mut job, &mut context.packed);
        }
    }
    context.watch.move_to(Part::Pack, context.packed.take_time());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::compact::{CompactMatrix, KeptForm};
    use super::super::product::RestoredWeight;
    use super::super::stored::{StoredDtype, StoredMatrix};
    use super::super::weight::Products;
    use super::*;

    /// x·Wᵀ + b of a linear, by the kernels for many tokens.
    fn forward(linear: &Linear, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len() / linear.in_features() * linear.out_features()];
        linear
            .forward(x, &mut out, SingleToken::AsMany, &mut ProductContext::new())
            .expect("the weight is in memory");
        out
    }

    #[test]
    fn product_is_the_same_for_a_weight_in_any_dtype_and_adds_the_bias() {
        // Small integers are exact in all three dtypes, and so are their products and sums.
        let (tokens, inner, columns) = (5, 70, 130);
        let weight: Vec<f32> = (0..inner * columns).map(|i| ((i * 7) % 11) as f32 - 5.0).collect();
        let x: Vec<f32> = (0..tokens * inner).map(|i| ((i * 3) % 5) as f32 - 2.0).collect();
        let bias: Vec<f32> = (0..columns).map(|i| i as f32).collect();
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let linear = Linear::new(
                StoredMatrix::from_f32(dtype, columns, inner, &weight),
                Some(bias.clone()),
            );
            let y = forward(&linear, &x);
            for token in 0..tokens {
                for column in 0..columns {
                    let exact: f32 =
                        (0..inner).map(|k| x[token * inner + k] * weight[column * inner + k]).sum();
                    assert_eq!(y[token * columns + column], exact + bias[column], "{dtype:?}");
                }
            }
        }
    }

    #[test]
    fn weights_of_different_dtypes_share_x_as_each_alone() {
        let (tokens, inner, columns) = (9, 70, [40, 33, 64]);
        let x: Vec<f32> = (0..tokens * inner).map(|i| (i as f32 * 0.29).cos()).collect();
        let dtypes = [StoredDtype::Bf16, StoredDtype::F32, StoredDtype::F16];
        let linears = [0, 1, 2].map(|at| {
            let weight: Vec<f32> =
                (0..inner * columns[at]).map(|i| (i as f32 * 0.13).sin()).collect();
            let matrix = StoredMatrix::from_f32(dtypes[at], columns[at], inner, &weight);
            Linear::new(matrix, Some(vec![at as f32; columns[at]]))
        });
        let mut together = columns.map(|columns| vec![f32::NAN; tokens * columns]);
        let mut jobs: Vec<_> = linears
            .iter()
            .zip(together.iter_mut())
            .map(|(linear, out)| LinearOutput { linear, features: 0..linear.out_features(), out })
            .collect();
        let single = SingleToken::AsMany;
        forward_all(&mut jobs, &x, single, &mut ProductContext::new()).unwrap();
        for (linear, together) in linears.iter().zip(&together) {
            assert!(*together == forward(linear, &x));
        }
    }

    #[test]
    fn a_matrix_vector_product_gives_what_the_kernels_for_many_tokens_give() {
        let (inner, columns) = (300, 70);
        let weight: Vec<f32> = (0..inner * columns).map(|i| (i as f32 * 0.13).sin()).collect();
        let x: Vec<f32> = (0..2 * inner).map(|i| (i as f32 * 0.29).cos()).collect();
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let linear = Linear::new(
                StoredMatrix::from_f32(dtype, columns, inner, &weight),
                Some((0..columns).map(|i| i as f32).collect()),
            );
            let (mut context, mut one) = (ProductContext::new(), vec![0.0; columns]);
            let single = SingleToken::MatrixVector;
            let two = forward(&linear, &x);
            for (x, two) in x.chunks(inner).zip(two.chunks(columns)) {
                linear.forward(x, &mut one, single, &mut context).unwrap();
                for (one, two) in one.iter().zip(two) {
                    // 300 products below 1, summed in a different order.
                    assert!((one - two).abs() < 1e-4, "{dtype:?}: {one} {two}");
                }
            }
            let mut several = vec![0.0; 2 * columns];
            linear.forward(&x, &mut several, single, &mut context).unwrap();
            assert_eq!(several, two, "several tokens have the bits of many");
        }
    }

    #[test]
    fn a_weight_of_any_size_is_multiplied_slab_by_slab() {
        let (inner, columns) = (1 << 16, 300);
        let weight: Vec<f32> =
            (0..inner * columns).map(|i| if i % inner == i / inner { 3.0 } else { 0.0 }).collect();
        let linear =
            Linear::new(StoredMatrix::from_f32(StoredDtype::Bf16, columns, inner, &weight), None);
        let x: Vec<f32> = (0..inner).map(|i| i as f32).collect();
        let y = forward(&linear, &x);
        assert_eq!(y, (0..columns).map(|i| 3.0 * i as f32).collect::<Vec<_>>());
    }

    #[test]
    fn a_compact_weight_gives_the_bits_of_the_weight_with_its_zeros() {
        // More columns than a slab of any kernel, and no multiple of a vector, a word of a mask or a block of codes.
        let (rows, columns, tokens) = (130, 2500, 9);
        let weight = |at: usize| match at * 7 % 11 {
            0..6 => 0.0,
            _ => (at as f32 * 0.71).sin(),
        };
        let values: Vec<f32> = (0..rows * columns).map(weight).collect();
        let x: Vec<f32> = (0..tokens * columns).map(|at| (at as f32 * 0.37).cos()).collect();
        let product = |weight: Weight, products: Products, features: Range<usize>| {
            let linear = Linear::new(weight, None);
            let mut context = ProductContext { products, ..ProductContext::new() };
            context.activations = CodedActivations::F32;
            let mut out = vec![0.0; tokens * features.len()];
            let mut outputs = [LinearOutput { linear: &linear, features, out: &mut out }];
            forward_all(&mut outputs, &x, SingleToken::AsMany, &mut context).unwrap();
            out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let dense = StoredMatrix::from_f32(dtype, rows, columns, &values);
            let stored = CompactMatrix::of(&dense, KeptForm::Stored(dtype)).unwrap();
            let coded = CompactMatrix::of(&dense, KeptForm::Codes).unwrap();
            let mut buffer = product::RowBuffer::default();
            coded.restore(0..rows, 0..columns, &mut buffer);
            let of_codes = StoredMatrix::from_f32(StoredDtype::F32, rows, columns, &buffer.whole);
            let bf16 = Kernel::best_bf16().map(|kernel| {
                // Codes are rounded to bf16, whatever the other weights of the model do.
                (Products::Bf16(kernel), Products::AllBf16(kernel))
            });
            for (compact, dense, is_coded) in [(stored, dense, false), (coded, of_codes, true)] {
                for features in [0..rows, 17..rows] {
                    for (products, all) in bf16.into_iter().chain([(Products::F32, Products::F32)])
                    {
                        let compact = Weight::Compact(compact.clone());
                        let got = product(compact, products, features.clone());
                        let of_dense = if is_coded { all } else { products };
                        let expected = product(dense.clone().into(), of_dense, features.clone());
                        assert_eq!(got, expected, "{dtype:?} {products:?}");
                    }
                }
            }
        }
    }
}
