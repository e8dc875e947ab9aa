//! Allocation of a model's sparsity to its layers: OWL's outliers, or curves of output error.
//!
//! S is the ratio of the model, L its layers, all of one size. The samples pass the *dense* layers; nothing is pruned.
//!
//! **`owl`**: A = |W|·√s over all matrices of a layer, Wanda's scores; D_l = 100 · the fraction of A above M times the mean of A. Then
//!
//! ```text
//! r_l = 2λ · (D_l − min D) / (max D − min D)        ratio_l = S + mean(r) − r_l
//! ```
//!
//! and 0.01 where that is not positive. Layers with many outliers keep more; the ratios span a band of width 2λ. Yin et al. 2023,
//! "Outlier Weighed Layerwise Sparsity", arXiv:2310.05175 §3; reference: `prune_wanda_outlier` in luuyin/OWL. Equal D give the uniform
//! ratio, where the reference divides by zero.
//!
//! **`error`**: e_m(ρ)² = ‖X(W − W_ρ)ᵀ‖² / ‖XWᵀ‖² for each matrix m, W_ρ the matrix with Wanda's mask of ratio ρ, X the calibration rows
//! of `output_error.rs`. What a layer adds to the residual stream h comes out of o and of down, so
//!
//! ```text
//! E_l(ρ) = (‖o‖² / ‖h‖²) · Σ_{q, k, v, o} e_m(ρ)² + (‖down‖² / ‖h‖²) · Σ_{gate, up, down} e_m(ρ)²
//! ```
//!
//! estimates the error of the stream behind layer l, relative to the stream: ‖o‖² and ‖down‖² are mean squares of their outputs over the
//! rows, and ‖h‖² is the sum of both and of the median over all tokens before the layer (a few tokens of a large model have huge norms).
//! Later layers make more or less of an error. So the first tokens of a few samples also pass layer l pruned at S, by Wanda's masks, and
//! all later layers dense: F_l is the median over these tokens of ‖h' − h‖² / ‖h‖² behind the last layer, and E_l is scaled to be F_l at S.
//!
//! The curve is measured at the points of [`grid`], and a parabola is fitted to it. Ratios from S − λ' to S + λ' with mean S make Σ_l E_l
//! smallest: from the lowest ratios on, the layer whose error grows least takes the next step, which is exact for a sum of convex
//! functions.

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::calibrate::{Calibrator, LayerStatistics};
use super::output_error::DenseOutput;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::{StoredMatrix, Weight, tensor};
use crate::model::{DecoderLayer, ModelConfig, Observation, Projection};
use crate::pruning::column_squares::ColumnSquaresKind;
use crate::pruning::wanda::{self, Wanda};
use crate::pruning::{self, Pattern, Request, Target};
use crate::run::{Events, Phase};
use crate::runtime::{Clock, Compute, Editor, HiddenStates};

/// M, as in the reference's scripts.
pub const OUTLIERS: f64 = 5.0;
/// λ, as in the reference.
pub const OWL_BAND: f64 = 0.08;
/// λ' of `error`.
pub const ERROR_BAND: f64 = 0.15;
/// Steps of the band in which `error` deals out ratios.
const STEPS: usize = 200;
/// Points of a curve.
const POINTS: usize = 7;

/// Samples whose errors are followed to the last layer, and their tokens at most.
const FOLLOWED: (usize, usize) = (4, 256);

/// Bytes of the followed samples: one stream per layer, and one that nothing disturbs.
pub fn followed_bytes(config: &ModelConfig, samples: usize, seqlen: usize) -> ByteSize {
    let tokens = samples.min(FOLLOWED.0) * seqlen.min(FOLLOWED.1);
    let streams = config.num_hidden_layers + 1;
    ByteSize::of(streams * tokens * config.hidden_size, size_of::<f32>())
}

/// `--allocate`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Allocation {
    /// The same ratio for all layers.
    #[default]
    Uniform,
    /// By outliers.
    Owl,
    /// By curves of output error.
    Error,
}

impl Allocation {
    /// The value of the flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Owl => "owl",
            Self::Error => "error",
        }
    }

    /// The band of ratios around the model's, in one direction.
    pub fn band(self, asked: Option<f64>) -> f64 {
        asked.unwrap_or(match self {
            Self::Uniform => 0.0,
            Self::Owl => OWL_BAND,
            Self::Error => ERROR_BAND,
        })
    }
}

/// The ratios at which the curves of `error` are measured: evenly spaced over the band.
pub fn grid(ratio: f64, band: f64) -> Vec<f64> {
    let (low, high) = limits(ratio, band);
    let step = (high - low) / (POINTS - 1) as f64;
    (0..POINTS).map(|point| low + step * point as f64).collect()
}

/// The band, inside the possible ratios and with the model's ratio in its middle.
fn limits(ratio: f64, band: f64) -> (f64, f64) {
    let band = band.min(ratio).min(0.995 - ratio).max(0.0);
    (ratio - band, ratio + band)
}

/// OWL's ratios from D.
pub fn owl_ratios(outliers: &[f64], ratio: f64, band: f64) -> Vec<f64> {
    let low = outliers.iter().copied().fold(f64::INFINITY, f64::min);
    let high = outliers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let span = high - low;
    if span.is_nan() || span <= 0.0 {
        return vec![ratio; outliers.len()];
    }
    let scaled: Vec<f64> = outliers
        .iter()
        .map(|d| (d - low) / span * 2.0 * band)
        .collect();
    let mean = scaled.iter().sum::<f64>() / scaled.len() as f64;
    let of_layer = |r: &f64| match ratio + mean - r {
        positive if positive > 0.0 => positive.min(0.999),
        _ => 0.01,
    };
    scaled.iter().map(of_layer).collect()
}

/// The ratios with the smallest sum of errors.
///
/// # Arguments
/// * `curves`: the errors of every layer at the points of [`grid`]
pub fn error_ratios(curves: &[Vec<f64>], ratio: f64, band: f64) -> Vec<f64> {
    let (low, high) = limits(ratio, band);
    let parabolas: Vec<[f64; 2]> = curves.iter().map(|curve| parabola(curve)).collect();
    // Without the constant, which no choice changes; places go from −1 to 1.
    let at = |[slope, bend]: [f64; 2], step: usize| {
        let place = 2.0 * step as f64 / STEPS as f64 - 1.0;
        slope * place + bend * place * place
    };
    let mut steps = vec![0; curves.len()];
    // Half of all steps: the mean is the middle of the band.
    for _ in 0..curves.len() * STEPS / 2 {
        let growth = |layer: usize| {
            at(parabolas[layer], steps[layer] + 1) - at(parabolas[layer], steps[layer])
        };
        let open = (0..curves.len()).filter(|&layer| steps[layer] < STEPS);
        let Some(next) = open.min_by(|&one, &other| growth(one).total_cmp(&growth(other))) else {
            break;
        };
        steps[next] += 1;
    }
    let of_steps = |steps: &usize| low + (high - low) * *steps as f64 / STEPS as f64;
    steps.iter().map(of_steps).collect()
}

/// Slope and bend of the parabola nearest to a curve, over places from −1 to 1; never concave.
fn parabola(curve: &[f64]) -> [f64; 2] {
    let places: Vec<f64> = (0..curve.len())
        .map(|point| 2.0 * point as f64 / (curve.len() - 1).max(1) as f64 - 1.0)
        .collect();
    let moment = |power: i32| places.iter().map(|place| place.powi(power)).sum::<f64>();
    let product = |power: i32| {
        let pairs = places.iter().zip(curve);
        pairs
            .map(|(place, error)| place.powi(power) * error)
            .sum::<f64>()
    };
    // The places are symmetric, so odd moments vanish, and the slope is independent of the bend.
    let (count, second, fourth) = (moment(0), moment(2), moment(4));
    let bend = (count * product(2) - second * product(0)) / (count * fourth - second * second);
    [product(1) / second, bend.max(0.0)]
}

/// An editor that measures what an allocation needs, and changes nothing.
pub struct AllocationMeter<'a> {
    calibrator: Calibrator<'a>,
    allocation: Allocation,
    outliers: f64,
    points: Vec<f64>,
    /// D, or the curve, of every layer.
    measured: Vec<Vec<f64>>,
    /// The undisturbed stream, then those disturbed in each layer; empty for `owl`.
    followed: Vec<HiddenStates>,
    /// S.
    ratio: f64,
}

impl<'a> AllocationMeter<'a> {
    /// Measures with `samples`, the embedded ones.
    ///
    /// # Arguments
    /// * `outliers`: M
    /// * `points`: the ratios of the curves
    /// * `ratio`: S
    pub fn new(
        (allocation, ratio): (Allocation, f64),
        (outliers, points): (f64, Vec<f64>),
        samples: HiddenStates,
        config: &'a ModelConfig,
        clock: &'a Clock,
        events: &'a dyn Events,
    ) -> Self {
        let stream = Some((samples, &ColumnSquaresKind as _));
        Self {
            calibrator: Calibrator::of(stream, config, clock, events),
            allocation,
            outliers,
            points,
            measured: Vec::new(),
            followed: Vec::new(),
            ratio,
        }
    }

    /// D, a single number, or the curve, of every layer.
    ///
    /// # Errors
    /// Fails where a followed hidden state is not finite.
    pub fn into_measured(mut self) -> Result<Vec<Vec<f64>>> {
        if self.followed.is_empty() {
            return Ok(self.measured);
        }
        let mut undisturbed = self.followed.remove(0);
        let middle = self.points.len() / 2; // S.
        for (curve, disturbed) in self.measured.iter_mut().zip(&mut self.followed) {
            let error = relative_error(&mut undisturbed, disturbed)?;
            let scale = match curve[middle] {
                positive if positive > 0.0 => error / positive,
                _ => 1.0,
            };
            curve.iter_mut().for_each(|value| *value *= scale);
        }
        Ok(self.measured)
    }

    /// Passes the followed streams through a layer, and begins the one that is disturbed in it.
    fn follow(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
    ) -> Result<()> {
        if self.followed.is_empty() {
            self.followed.push(self.calibrator.first_tokens(FOLLOWED)?);
        }
        let mut disturbed = copy_of(&mut self.followed[0])?;
        let mut dense = Vec::new();
        for projection in layer.projections().collect::<Vec<_>>() {
            let weight = layer.linear_mut(projection).weight_mut();
            let at_rest = match weight {
                Weight::Held(_) => None,
                Weight::AtRest(_) => weight.hold()?,
            };
            let whole = held(layer, projection)?.clone();
            let pruned = pruned(layer, projection, statistics, self.ratio)?;
            *layer.linear_mut(projection).weight_mut() = Weight::Held(pruned);
            dense.push((
                projection,
                at_rest.map_or(Weight::Held(whole), Weight::AtRest),
            ));
        }
        let nothing = |_| ();
        compute.forward(Phase::Propagate, layer, &mut disturbed, &nothing)?;
        for (projection, weight) in dense {
            *layer.linear_mut(projection).weight_mut() = weight;
        }
        for stream in &mut self.followed {
            compute.forward(Phase::Propagate, layer, stream, &nothing)?;
        }
        self.followed.push(disturbed);
        Ok(())
    }

    /// The numbers of one layer.
    fn measure(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
    ) -> Result<Vec<f64>> {
        if self.allocation == Allocation::Error {
            return self.curve(layer, statistics, compute);
        }
        let mut sum = (0.0, 0);
        for projection in layer.projections().collect::<Vec<_>>() {
            with_held(layer, projection, |layer| {
                sum.0 += sum_over_scores(layer, projection, statistics, f64::from)?;
                sum.1 += held(layer, projection)?.elements();
                Ok(())
            })?;
        }
        let limit = (self.outliers * (sum.0 / sum.1 as f64)) as f32;
        let mut above = 0.0;
        for projection in layer.projections().collect::<Vec<_>>() {
            with_held(layer, projection, |layer| {
                let is_above = |score: f32| f64::from(u8::from(score > limit));
                above += sum_over_scores(layer, projection, statistics, is_above)?;
                Ok(())
            })?;
        }
        Ok(vec![100.0 * above / sum.1 as f64])
    }

    /// E_l at every point.
    fn curve(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
    ) -> Result<Vec<f64>> {
        // Attention, and the MLP: the errors, and the mean square of what they add to the stream.
        let mut parts = [
            (vec![0.0; self.points.len()], 0.0),
            (vec![0.0; self.points.len()], 0.0),
        ];
        for projection in layer.projections().collect::<Vec<_>>() {
            let (errors, added) = &mut parts[usize::from(!projection.is_attention())];
            with_held(layer, projection, |layer| {
                let square = self.add_errors(layer, projection, statistics, compute, errors)?;
                if matches!(
                    projection.observed_at(),
                    Observation::OInput | Observation::DownInput
                ) {
                    *added += square;
                }
                Ok(())
            })?;
        }
        let before = self.calibrator.median_square()?;
        let stream = before + parts.iter().map(|(_, added)| added).sum::<f64>();
        let of_point = |point: usize| -> f64 {
            parts
                .iter()
                .map(|(errors, added)| errors[point] * added / stream)
                .sum()
        };
        Ok((0..self.points.len()).map(of_point).collect())
    }

    /// Adds e_m² of one matrix, which is in memory, at every point; returns the mean square of its output.
    fn add_errors(
        &self,
        layer: &mut DecoderLayer,
        projection: Projection,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
        errors: &mut [f64],
    ) -> Result<f64> {
        let rows = statistics.rows(projection);
        let products = compute.workspace().product_context();
        let dense = DenseOutput::of(layer.linear(projection), rows, products)?;
        let weight = held(layer, projection)?.clone();
        for (error, &ratio) in errors.iter_mut().zip(&self.points) {
            *layer.linear_mut(projection).weight_mut() = Weight::Held(weight.clone());
            let pruned = pruned(layer, projection, statistics, ratio)?;
            *layer.linear_mut(projection).weight_mut() = Weight::Held(pruned);
            let products = compute.workspace().product_context();
            let relative = dense.error_of(layer.linear(projection), products)?;
            *error += relative.unwrap_or_default().powi(2);
        }
        let mean_square = dense.mean_square(weight.rows());
        *layer.linear_mut(projection).weight_mut() = Weight::Held(weight);
        Ok(mean_square)
    }
}

/// A matrix, which is in memory, pruned by Wanda.
fn pruned(
    layer: &DecoderLayer,
    projection: Projection,
    statistics: &LayerStatistics,
    ratio: f64,
) -> Result<StoredMatrix> {
    let name = projection.full_name(layer.index());
    let pattern = Pattern::Unstructured;
    let request = Request::new(&name, statistics.of(projection), Target { ratio, pattern });
    let mut weight = held(layer, projection)?.clone();
    let mask = pruning::prune(&Wanda, &mut weight, &request)?;
    weight.zero_bits(mask.bits());
    Ok(weight)
}

/// A copy of a stream.
fn copy_of(stream: &mut HiddenStates) -> Result<HiddenStates> {
    let (samples, seqlen) = (stream.samples(), stream.seqlen());
    let width = stream.get(0)?.dims()[1];
    let mut copy = HiddenStates::new(None, "followed", samples, seqlen, width, DType::F32)?;
    for sample in 0..samples {
        // States are replaced, never changed in place.
        copy.put(sample, stream.get(sample)?)?;
    }
    Ok(copy)
}

/// The median over all tokens of ‖h' − h‖² / ‖h‖².
fn relative_error(undisturbed: &mut HiddenStates, disturbed: &mut HiddenStates) -> Result<f64> {
    let mut errors = Vec::new();
    for sample in 0..undisturbed.samples() {
        let (whole, other) = (undisturbed.get(sample)?, disturbed.get(sample)?);
        let width = whole.dims()[1].max(1);
        tensor::with_slice(&whole, |whole| {
            tensor::with_slice(&other, |other| {
                for (whole, other) in whole.chunks_exact(width).zip(other.chunks_exact(width)) {
                    let square = |value: f64| value * value;
                    let norm: f64 = whole.iter().map(|&value| square(f64::from(value))).sum();
                    let pairs = whole.iter().zip(other);
                    let gap: f64 = pairs
                        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
                        .sum();
                    errors.push(gap / norm);
                }
            })
        })??;
    }
    let middle = errors.len() / 2;
    let (_, median, _) = errors.select_nth_unstable_by(middle, f64::total_cmp);
    ensure!(
        median.is_finite(),
        "hidden states behind a pruned layer are not finite"
    );
    Ok(*median)
}

/// Runs `work` while a matrix is in memory.
fn with_held(
    layer: &mut DecoderLayer,
    projection: Projection,
    work: impl FnOnce(&mut DecoderLayer) -> Result<()>,
) -> Result<()> {
    let at_rest = match layer.linear(projection).weight() {
        Weight::Held(_) => None,
        Weight::AtRest(_) => layer.linear_mut(projection).weight_mut().hold()?,
    };
    work(layer)?;
    if let Some(at_rest) = at_rest {
        *layer.linear_mut(projection).weight_mut() = Weight::AtRest(at_rest);
    }
    Ok(())
}

fn held(layer: &DecoderLayer, projection: Projection) -> Result<&StoredMatrix> {
    let weight = layer.linear(projection).weight().held();
    weight.with_context(|| {
        format!(
            "`{}` is measured in memory",
            projection.full_name(layer.index())
        )
    })
}

/// Σ of a function of Wanda's scores of a matrix. The order of the sum is fixed.
fn sum_over_scores(
    layer: &DecoderLayer,
    projection: Projection,
    statistics: &LayerStatistics,
    of: impl Fn(f32) -> f64 + Sync,
) -> Result<f64> {
    let name = projection.full_name(layer.index());
    let pattern = Pattern::Unstructured;
    let request = Request::new(
        &name,
        statistics.of(projection),
        Target {
            ratio: 0.0,
            pattern,
        },
    );
    let norms = wanda::input_norms(&request)?;
    let weight = held(layer, projection)?;
    let rows: Vec<f64> = (0..weight.rows())
        .into_par_iter()
        .map_init(
            || vec![0.0f32; weight.columns()],
            |scores, row| {
                weight.widen_rows(row, scores);
                scores.iter_mut().for_each(|value| *value = value.abs());
                wanda::score(scores, &norms);
                scores.iter().map(|&score| of(score)).sum()
            },
        )
        .collect();
    Ok(rows.iter().sum())
}

impl Editor for AllocationMeter<'_> {
    fn edit(&mut self, mut layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let observed = self
            .calibrator
            .observe(&layer, &Observation::ALL, compute)?;
        let statistics = observed.context("every layer is measured with samples")?;
        let measured = self.measure(&mut layer, &statistics, compute)?;
        if self.allocation == Allocation::Error {
            self.follow(&mut layer, &statistics, compute)?;
        }
        drop(statistics);
        self.calibrator.pass(&layer, compute)?;
        if !measured.iter().all(|value| value.is_finite()) {
            return Err(Failure::new(format!(
                "layer {} cannot be given a ratio: its outputs are not finite",
                layer.index()
            ))
            .hint("check the weights of this model with prune inspect")
            .into());
        }
        self.measured.push(measured);
        self.calibrator.events.check()?;
        Ok(layer)
    }

    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        self.calibrator.pass(layer, compute)
    }

    fn has_samples(&self) -> bool {
        self.calibrator.has_samples()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owl_gives_layers_with_outliers_lower_ratios_around_the_mean() {
        let ratios = owl_ratios(&[1.0, 3.0, 2.0], 0.7, 0.08);
        let expected = [0.78, 0.62, 0.70];
        for (ratio, expected) in ratios.iter().zip(expected) {
            assert!((ratio - expected).abs() < 1e-12, "{ratios:?}");
        }
        assert_eq!(owl_ratios(&[2.0, 2.0], 0.7, 0.08), [0.7, 0.7]);
        assert_eq!(owl_ratios(&[1.0, 3.0], 0.05, 0.08), [0.13, 0.01]);
    }

    #[test]
    fn error_takes_more_where_it_costs_less_and_keeps_the_mean() {
        let steep: Vec<f64> = grid(0.7, 0.15).iter().map(|r| 4.0 * r.powi(4)).collect();
        let flat: Vec<f64> = grid(0.7, 0.15).iter().map(|r| r.powi(4)).collect();
        let ratios = error_ratios(&[steep, flat.clone(), flat], 0.7, 0.15);
        assert!(ratios[0] < 0.7 && ratios[1] > 0.7, "{ratios:?}");
        let mean = ratios.iter().sum::<f64>() / 3.0;
        assert!((mean - 0.7).abs() < 1e-12, "{ratios:?}");
        assert!(
            ratios
                .iter()
                .all(|ratio| (0.55..=0.85 + 1e-12).contains(ratio))
        );
        let alike = vec![vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; 2];
        let near_one = error_ratios(&alike, 0.99, 0.15);
        assert!(near_one.iter().all(|ratio| *ratio < 1.0), "{near_one:?}");
    }
}
