//! The error of a pruned matrix's output against the dense matrix's output, measured on a few calibration tokens.
//!
//! e = ‖X·Wᵀ − X·W′ᵀ‖_F / ‖X·Wᵀ‖_F
//!
//! * X `[tokens, in_features]`: rows of the matrix's input, as the calibration samples brought them to the *dense* layer after the
//!   pruned layers before it; the rows its statistics are made of
//! * W, W′ `[out_features, in_features]`: the matrix before and after pruning; its bias, the same in both, is left out
//! * products in f32 as in the forward pass, both sums of squares in f64; 0/0 is 0
//!
//! It is what the layer-wise pruning methods try to keep small (Frantar and Alistarh 2023, arXiv:2301.00774, equation 1, there squared and
//! without the denominator), and it tells which matrix suffers most. It is neither the error of the layer, which also depends on the
//! residual stream, softmax and all matrices of the layer, nor the error of the model, which perplexity measures. It is an estimate from
//! at most [`TOKENS`] tokens. As the difference of two f32 products it cannot tell errors below about 1e-6 from none.
//!
//! Every sample gives the same number of tokens, up to rounding. They are spread evenly over its positions, and their first position
//! changes from sample to sample. The choice depends on the number of samples and their length alone, not on threads nor on how rows are
//! split into calls.

use std::borrow::Cow;

use anyhow::Result;
use candle_core::{Device, Tensor};

use crate::bytes::ByteSize;
use crate::linalg::profile::Part;
use crate::linalg::{Linear, ProductContext, permute};
use crate::model::on_device::squares_of_difference;
use crate::model::{DecoderLayer, InputId, InputMap, LinearId, ModelConfig};
use crate::runtime::Compute;
use crate::runtime::engine::OutOfMemory;

/// Tokens kept per layer, at most: 25 MiB of input rows for Llama-2-7B's shape.
pub(super) const TOKENS: usize = 256;

/// Bytes of the rows of the four points, which are held from the first sample of a layer until its last matrix is pruned; with
/// `has_outputs` also the bytes of the outputs of a matrix, before and after it is pruned.
pub(super) fn bytes(
    config: &ModelConfig,
    samples: usize,
    seqlen: usize,
    has_outputs: bool,
) -> ByteSize {
    let outputs = config.linears().map(|of| of.shape(config).0).max();
    let outputs = outputs.filter(|_| has_outputs).unwrap_or(0);
    let row = config.input_widths().values().sum::<usize>() + 2 * outputs;
    ByteSize::of(TOKENS.min(samples * seqlen) * row, size_of::<f32>())
}

/// The number of rows that are kept of all samples.
pub(super) fn tokens(samples: usize, seqlen: usize) -> usize {
    TOKENS.min(samples.saturating_mul(seqlen))
}

/// The positions of a sample whose rows are kept, ascending.
fn positions(sample: usize, samples: usize, seqlen: usize) -> Vec<usize> {
    let kept = TOKENS.min(samples * seqlen);
    let share = (sample + 1) * kept / samples - sample * kept / samples;
    // Fractional parts of multiples of the golden ratio: the most even sequence of first positions, in units of 2^-64.
    let first = (sample as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..share as u128)
        .map(|rank| (((rank << 64) + u128::from(first)) * seqlen as u128 / share as u128) >> 64)
        .map(|position| position as usize)
        .collect()
}

/// Some rows of the four inputs of a layer, from a single sample.
#[derive(Debug, Clone)]
pub(super) struct SampleRows {
    /// The positions of the rows, ascending.
    chosen: Vec<usize>,
    points: InputMap<Point>,
}

#[derive(Debug, Clone)]
struct Point {
    width: usize,
    /// Rows seen so far.
    seen: usize,
    /// `[chosen, width]`
    rows: Vec<f32>,
}

impl SampleRows {
    /// Room for rows of `widths` elements at the four points, from the sample with the index `sample` of `samples` of `seqlen` tokens.
    pub(super) fn new(
        widths: &InputMap<usize>,
        sample: usize,
        samples: usize,
        seqlen: usize,
    ) -> Self {
        let chosen = positions(sample, samples, seqlen);
        let points = InputMap::new(|input| Point {
            width: widths[input],
            seen: 0,
            rows: Vec::with_capacity(chosen.len() * widths[input]),
        });
        Self { chosen, points }
    }

    /// The positions whose rows are kept, ascending.
    pub(super) fn chosen(&self) -> &[usize] {
        &self.chosen
    }

    /// The kept rows of the points that are asked for, in the order of the points.
    pub(super) fn of(&self, is_asked: &dyn Fn(InputId) -> bool) -> Vec<f32> {
        let asked = InputId::ALL.into_iter().filter(|point| is_asked(*point));
        asked.flat_map(|point| &self.points[point].rows).copied().collect()
    }

    /// The same with the kept rows of these points, from [`SampleRows::of`].
    #[must_use]
    pub(super) fn with(mut self, is_asked: &dyn Fn(InputId) -> bool, mut rows: &[f32]) -> Self {
        let chosen = self.chosen.len();
        for point in InputId::ALL.into_iter().filter(|point| is_asked(*point)) {
            let own = &mut self.points[point];
            let (now, later) = rows.split_at((chosen * own.width).min(rows.len()));
            (own.rows, rows) = (now.to_vec(), later);
        }
        self
    }

    /// Takes the next rows at this point, which were chosen already.
    pub(super) fn add_chosen(&mut self, point: InputId, rows: &[f32]) {
        self.points[point].rows.extend_from_slice(rows);
    }

    /// Takes the next rows `[tokens, in_features]` of the sample at this point.
    pub(super) fn add_rows(&mut self, point: InputId, rows: &[f32]) {
        let point = &mut self.points[point];
        let tokens = rows.len() / point.width;
        for &position in &self.chosen {
            if (point.seen..point.seen + tokens).contains(&position) {
                let start = (position - point.seen) * point.width;
                point.rows.extend_from_slice(&rows[start..start + point.width]);
            }
        }
        point.seen += tokens;
    }
}

/// Some rows of the four inputs of a layer, from all samples.
#[derive(Debug, Clone)]
pub(super) struct InputRows(InputMap<Vec<f32>>);

impl InputRows {
    /// Room for rows of `widths` elements at the four points, from `samples` of `seqlen` tokens.
    pub(super) fn new(widths: &InputMap<usize>, samples: usize, seqlen: usize) -> Self {
        let tokens = TOKENS.min(samples * seqlen);
        // The rows of a single sample are taken over as they are.
        let room = if samples > 1 { tokens } else { 0 };
        Self(InputMap::new(|input| Vec::with_capacity(room * widths[input])))
    }

    /// Takes the next sample's rows.
    pub(super) fn add_sample(&mut self, sample: SampleRows) {
        for (input, point) in sample.points {
            let rows = &mut self.0[input];
            if rows.capacity() == 0 {
                *rows = point.rows;
            } else {
                rows.extend_from_slice(&point.rows);
            }
        }
    }

    /// Puts the columns of an input into a new order: `order[new] = old`.
    pub(super) fn permute(&mut self, point: InputId, order: &[usize]) {
        permute::permute_columns(&mut self.0[point], order);
    }

    /// X `[tokens, in_features]` of a linear.
    pub(super) fn of(&self, id: LinearId) -> &[f32] {
        &self.0[id.input()]
    }
}

/// X·Wᵀ of a matrix of a layer, kept until the mask is applied.
pub(super) struct DenseOutput<'a> {
    rows: &'a [f32],
    id: LinearId,
    output: MatrixOutput,
}

/// An output `[tokens, out_features]`.
enum MatrixOutput {
    Host(Vec<f32>),
    /// On the device that has the layer.
    Device(Tensor),
}

impl MatrixOutput {
    /// X·Wᵀ without the bias, on a device that has the layer or on the CPU. Fails when a weight at rest cannot be read.
    fn of(
        layer: &DecoderLayer,
        id: LinearId,
        rows: &[f32],
        compute: &mut Compute<'_>,
    ) -> Result<Self> {
        if let Some(output) = compute.product(layer, id, rows)? {
            return Ok(Self::Device(output));
        }
        let products = compute.workspace().product_context();
        Ok(Self::Host(product(layer.linear(id), rows, products)?))
    }

    /// Σ y², and Σ (y − z)² with a second output z of the same shape.
    fn squares(&self, other: &Self) -> Result<[f64; 2]> {
        if let [Self::Device(dense), Self::Device(pruned)] = [self, other] {
            match squares_of_difference(dense, pruned) {
                // Without memory on the device, the host computes the sums.
                Err(error) if OutOfMemory::of(&error).is_some() => {}
                squares => return squares,
            }
        }
        let [mut dense, mut difference] = [0.0f64, 0.0];
        for (&y, &z) in self.host()?.iter().zip(&*other.host()?) {
            difference += (f64::from(y) - f64::from(z)).powi(2);
            dense += f64::from(y).powi(2);
        }
        Ok([dense, difference])
    }

    fn host(&self) -> Result<Cow<'_, [f32]>> {
        Ok(match self {
            Self::Host(output) => Cow::Borrowed(output),
            Self::Device(output) => {
                Cow::Owned(output.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()?)
            }
        })
    }
}

impl<'a> DenseOutput<'a> {
    /// The output of a matrix that is not pruned yet. Fails when a weight at rest cannot be read, and when a device fails.
    pub(super) fn of(
        layer: &DecoderLayer,
        id: LinearId,
        rows: &'a [f32],
        compute: &mut Compute<'_>,
    ) -> Result<Self> {
        let output = MatrixOutput::of(layer, id, rows, compute)?;
        Ok(Self { rows, id, output })
    }

    /// The mean over the rows of the squared length of the output `[tokens, out_features]`.
    pub(super) fn mean_square(&self, in_features: usize) -> Result<f64> {
        let [sum, _] = self.output.squares(&self.output)?;
        Ok(sum / (self.rows.len() / in_features.max(1)).max(1) as f64)
    }

    /// The relative error of the same matrix, pruned now. `None` where it is not finite: an output overflows, or it was zero and is not any
    /// more. Fails when a weight at rest cannot be read, and when a device fails.
    pub(super) fn error_of(
        &self,
        layer: &DecoderLayer,
        compute: &mut Compute<'_>,
    ) -> Result<Option<f64>> {
        let pruned = MatrixOutput::of(layer, self.id, self.rows, compute)?;
        Ok(relative(self.output.squares(&pruned)?))
    }
}

/// √(Σ (y − z)² / Σ y²), where it is finite; 0/0 is 0.
fn relative([dense, difference]: [f64; 2]) -> Option<f64> {
    let error = if difference == 0.0 { 0.0 } else { (difference / dense).sqrt() };
    error.is_finite().then_some(error)
}

/// X·Wᵀ without the bias on the CPU.
fn product(linear: &Linear, rows: &[f32], context: &mut ProductContext) -> Result<Vec<f32>> {
    context.watch.enter(Part::OutputError);
    let output = linear.multiply(rows, context)?;
    context.watch.enter(Part::Elsewhere);
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::{StoredDtype, StoredMatrix};
    use crate::model::family::FAMILIES;

    /// Numbers without much of a pattern in [-1, 1).
    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        (0..count)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
            })
            .collect()
    }

    #[test]
    fn the_error_is_that_of_three_plain_loops() {
        let (tokens, inner, outer) = (17, 40, 23);
        let x = noise(tokens * inner, 1);
        let values = noise(outer * inner, 2);
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let mut linear = Linear::new(
                StoredMatrix::from_f32(dtype, outer, inner, &values),
                Some(noise(outer, 3)),
            );
            let mut stored = vec![0.0; outer * inner];
            linear.weight().held().unwrap().widen_rows(0, &mut stored);
            let is_removed = |row: usize, column: usize| (row * 7 + column * 3) % 5 < 2;

            let output = |linear: &Linear| {
                MatrixOutput::Host(product(linear, &x, &mut ProductContext::new()).unwrap())
            };
            let dense = output(&linear);
            let weight = linear.weight_mut().held_mut().unwrap();
            weight.zero_where(is_removed);
            let error = relative(dense.squares(&output(&linear)).unwrap()).unwrap();

            let (mut difference, mut norm) = (0.0f64, 0.0f64);
            for token in 0..tokens {
                for row in 0..outer {
                    let (mut all, mut lost) = (0.0f64, 0.0f64);
                    for column in 0..inner {
                        let term = f64::from(x[token * inner + column])
                            * f64::from(stored[row * inner + column]);
                        all += term;
                        lost += if is_removed(row, column) { term } else { 0.0 };
                    }
                    difference += lost * lost;
                    norm += all * all;
                }
            }
            let expected = (difference / norm).sqrt();
            // 40 products of f32, so some 1e-6 of the output.
            assert!((error - expected).abs() < 1e-5, "{error} {expected}");
            assert!(error > 0.1 && error < 1.0);
        }
    }

    #[test]
    fn nothing_lost_of_nothing_is_no_error_and_something_of_nothing_is_none() {
        let mut linear =
            Linear::new(StoredMatrix::from_f32(StoredDtype::F32, 1, 2, &[1.0, 1.0]), None);
        let output = |linear: &Linear, x: &[f32]| {
            MatrixOutput::Host(product(linear, x, &mut ProductContext::new()).unwrap())
        };
        let rows = [[0.0, 0.0], [1.0, -1.0]];
        let [zeros, cancelled] = rows.map(|x| output(&linear, &x));
        linear.weight_mut().held_mut().unwrap().zero_where(|_, column| column == 0);
        let [of_zeros, of_cancelled] = rows.map(|x| output(&linear, &x));
        assert_eq!(relative(zeros.squares(&of_zeros).unwrap()), Some(0.0));
        assert_eq!(relative(cancelled.squares(&of_cancelled).unwrap()), None);
    }

    #[test]
    fn tokens_are_spread_evenly_over_samples_and_positions() {
        for (samples, seqlen) in [(128, 2048), (8, 256), (3, 100), (1, 4096), (700, 64)] {
            let kept: Vec<Vec<usize>> =
                (0..samples).map(|sample| positions(sample, samples, seqlen)).collect();
            assert_eq!(kept.iter().map(Vec::len).sum::<usize>(), TOKENS);
            let (least, most) = (TOKENS / samples, TOKENS.div_ceil(samples));
            for positions in &kept {
                assert!((least..=most).contains(&positions.len()));
                assert!(positions.windows(2).all(|pair| pair[0] < pair[1]));
                assert!(positions.iter().all(|&position| position < seqlen));
            }
            // No eighth of the positions has more than one and a half times its part of the tokens, nor less than half.
            for eighth in 0..8 {
                let count = kept
                    .iter()
                    .flatten()
                    .filter(|&&position| position * 8 / seqlen == eighth)
                    .count();
                assert!((16..=48).contains(&count), "{samples} {seqlen}: {count}");
            }
        }
    }

    #[test]
    fn few_tokens_are_all_kept() {
        for sample in 0..3 {
            assert_eq!(positions(sample, 3, 40), (0..40).collect::<Vec<_>>());
        }
    }

    #[test]
    fn kept_rows_do_not_depend_on_how_they_arrive() {
        let (samples, seqlen) = (5, 90);
        let widths = InputMap::new(|input| [3, 2, 3, 4][input as usize]);
        let kept = |rows_at_once: usize| {
            let mut kept = InputRows::new(&widths, samples, seqlen);
            for sample in 0..samples {
                let mut rows_of = SampleRows::new(&widths, sample, samples, seqlen);
                for point in InputId::ALL {
                    let width = widths[point];
                    let rows: Vec<f32> =
                        (0..seqlen * width).map(|i| (sample * 10_000 + i) as f32).collect();
                    for rows in rows.chunks(rows_at_once * width) {
                        rows_of.add_rows(point, rows);
                    }
                }
                kept.add_sample(rows_of);
            }
            kept
        };
        let (whole, split) = (kept(seqlen), kept(7));
        for &(id, _) in FAMILIES[0].linears {
            assert_eq!(whole.of(id), split.of(id));
            let width = widths[id.input()];
            assert_eq!(whole.of(id).len(), TOKENS * width);
        }
        let first = positions(0, samples, seqlen)[0];
        assert_eq!(&whole.of(LinearId::Q)[..3], [0, 1, 2].map(|i| (first * 3 + i) as f32));
    }
}
