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
//! **`error`**: E_l(ρ) = Σ over the matrices of a layer of ‖X(W − W_ρ)ᵀ‖² / ‖XWᵀ‖², W_ρ the matrix with Wanda's mask of ratio ρ, on the
//! calibration rows of `output_error.rs`. The curve is measured at the points of [`grid`], and linear in between. Ratios from S − λ' to
//! S + λ' with mean S are chosen so that Σ_l E_l is smallest: from the lowest ratios on, the layer whose error grows least takes the next
//! step, as for any sum of convex functions.

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::calibrate::{Calibrator, LayerStatistics};
use super::output_error::DenseOutput;
use crate::failure::Failure;
use crate::linalg::{StoredMatrix, Weight};
use crate::model::{DecoderLayer, ModelConfig, Observation, Projection};
use crate::pruning::column_squares::ColumnSquaresKind;
use crate::pruning::wanda::{self, Wanda};
use crate::pruning::{self, Pattern, Request, Target};
use crate::run::Events;
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
    let at = |curve: &[f64], step: usize| {
        let place = step as f64 * (POINTS - 1) as f64 / STEPS as f64;
        let left = (place as usize).min(POINTS - 2);
        let share = place - left as f64;
        curve[left] * (1.0 - share) + curve[left + 1] * share
    };
    let mut steps = vec![0; curves.len()];
    // Half of all steps: the mean is the middle of the band.
    for _ in 0..curves.len() * STEPS / 2 {
        let growth =
            |layer: usize| at(&curves[layer], steps[layer] + 1) - at(&curves[layer], steps[layer]);
        let open = (0..curves.len()).filter(|&layer| steps[layer] < STEPS);
        let Some(next) = open.min_by(|&one, &other| growth(one).total_cmp(&growth(other))) else {
            break;
        };
        steps[next] += 1;
    }
    let of_steps = |steps: &usize| low + (high - low) * *steps as f64 / STEPS as f64;
    steps.iter().map(of_steps).collect()
}

/// An editor that measures what an allocation needs, and changes nothing.
pub struct AllocationMeter<'a> {
    calibrator: Calibrator<'a>,
    allocation: Allocation,
    outliers: f64,
    points: Vec<f64>,
    /// D, or the curve, of every layer.
    measured: Vec<Vec<f64>>,
}

impl<'a> AllocationMeter<'a> {
    /// Measures with `samples`, the embedded ones.
    ///
    /// # Arguments
    /// * `outliers`: M
    /// * `points`: the ratios of the curves
    pub fn new(
        allocation: Allocation,
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
        }
    }

    /// D, a single number, or the curve, of every layer.
    pub fn into_measured(self) -> Vec<Vec<f64>> {
        self.measured
    }

    /// The numbers of one layer.
    fn measure(
        &self,
        layer: &mut DecoderLayer,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
    ) -> Result<Vec<f64>> {
        if self.allocation == Allocation::Error {
            let mut curve = vec![0.0; self.points.len()];
            for projection in layer.projections().collect::<Vec<_>>() {
                with_held(layer, projection, |layer| {
                    self.add_curve(layer, projection, statistics, compute, &mut curve)
                })?;
            }
            return Ok(curve);
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

    /// Adds the squared errors of one matrix, which is in memory, to the curve.
    fn add_curve(
        &self,
        layer: &mut DecoderLayer,
        projection: Projection,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
        curve: &mut [f64],
    ) -> Result<()> {
        let name = projection.full_name(layer.index());
        let rows = statistics.rows(projection);
        let products = compute.workspace().product_context();
        let dense = DenseOutput::of(layer.linear(projection), rows, products)?;
        let weight = held(layer, projection)?.clone();
        for (error, &ratio) in curve.iter_mut().zip(&self.points) {
            let pattern = Pattern::Unstructured;
            let target = Target { ratio, pattern };
            let request = Request::new(&name, statistics.of(projection), target);
            let mut pruned = weight.clone();
            let mask = pruning::prune(&Wanda, &mut pruned, &request)?;
            pruned.zero_bits(mask.bits());
            *layer.linear_mut(projection).weight_mut() = Weight::Held(pruned);
            let products = compute.workspace().product_context();
            let relative = dense.error_of(layer.linear(projection), products)?;
            *error += relative.unwrap_or_default().powi(2);
        }
        *layer.linear_mut(projection).weight_mut() = Weight::Held(weight);
        Ok(())
    }
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
        drop(statistics);
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
        self.calibrator.pass(&layer, compute)?;
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
