//! Allocation of a model's sparsity to its layers: OWL's outliers, or curves of output error.
//!
//! S is the ratio of the model, L its layers, all of the same size. The samples pass the *dense* layers; nothing is pruned.
//!
//! **`owl`**: A = |W|·√s over all matrices of a layer, Wanda's scores; D_l = 100 · the fraction of A above M times the mean of A. Then
//!
//! ```text
//! r_l = 2λ · (D_l − min D) / (max D − min D)        ratio_l = S + mean(r) − r_l
//! ```
//!
//! Layers with many outliers keep more; the ratios span a band of width 2λ. Yin et al. 2023, "Outlier Weighed Layerwise Sparsity",
//! arXiv:2310.05175 §3; reference: `prune_wanda_outlier` in luuyin/OWL. Equal D give the uniform ratio, where the reference divides by
//! zero. Ratios below 0.01 or above 0.999 are set to this bound, and all ratios between the bounds move by the same amount, so that the
//! mean stays S; the reference sets a ratio that is not positive to 0.01, and its mean drifts.
//!
//! **`error`**: e_m(ρ)² = ‖X(W − W_ρ)ᵀ‖² / ‖XWᵀ‖² for each matrix m, W_ρ the matrix with Wanda's mask of ratio ρ, X the calibration rows
//! of `output_error.rs`. What a layer adds to the residual stream h comes out of o and of down, so
//!
//! ```text
//! E_l(ρ) = (‖o‖² / ‖h‖²) · Σ_{q, k, v, o} e_m(ρ)² + (‖down‖² / ‖h‖²) · Σ_{gate, up, down} e_m(ρ)²
//! ```
//!
//! estimates the error of the stream after layer l, relative to the stream: ‖o‖² and ‖down‖² are mean squares of their outputs over the
//! rows, and ‖h‖² is the sum of both and of the median over all tokens before the layer (a few tokens of a large model have huge norms).
//! Later layers make more or less of an error. So the first tokens of a few samples also pass layer l pruned at S, by Wanda's masks, and
//! all later layers dense: F_l is the median over these tokens of ‖h' − h‖² / ‖h‖² after the last layer, and E_l is scaled to be F_l at S.
//!
//! The curve is measured at the points of [`grid`], and a parabola is fitted to it. Ratios from S − λ' to S + λ' with mean S make Σ_l E_l
//! smallest: from the lowest ratios on, the layer whose error grows least takes the next step, which is exact for a sum of convex
//! functions.
//!
//! The sum ranks ratios by the error of one layer at a time. A trial shows whether they also serve a model that is pruned everywhere
//! (`trial.rs`): it tries these ratios, the ratios of `owl` and equal ratios. The ratios with the least loss are taken.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// M, as in the reference's scripts.
pub const OUTLIERS: f64 = 5.0;
/// λ, as in the reference.
pub const OWL_BAND: f64 = 0.08;
/// λ' of `error`.
pub const ERROR_BAND: f64 = 0.15;
/// The lowest and the highest ratio of a layer by OWL.
const LOWEST: f64 = 0.01;
const HIGHEST: f64 = 0.999;
/// Steps of the band in which `error` deals out ratios.
const STEPS: usize = 200;
/// Points of a curve.
const POINTS: usize = 7;

/// Samples of a trial, and their tokens at most.
pub(super) const TRIED: (usize, usize) = (16, 512);
/// Allocations that are tried.
pub const CANDIDATES: usize = 3;

/// `--allocate`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Allocation {
    /// The same ratio for all layers
    #[default]
    Uniform,
    /// OWL: layers with many outliers keep more
    Owl,
    /// Curves of output error against the ratio
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

    /// Half the width of the band of ratios around the model's ratio; `None` gives the allocation's default.
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
    let scaled: Vec<f64> = outliers.iter().map(|d| (d - low) / span * 2.0 * band).collect();
    let mean = scaled.iter().sum::<f64>() / scaled.len() as f64;
    let ratios: Vec<f64> = scaled.iter().map(|r| ratio + mean - r).collect();
    bounded(&ratios, ratio)
}

/// Ratios between [`LOWEST`] and [`HIGHEST`] with the mean of `ratios`, which is `mean`: all move by the same amount, as far as the bounds
/// let them.
fn bounded(ratios: &[f64], mean: f64) -> Vec<f64> {
    let (low, high) = (LOWEST.min(mean), HIGHEST.max(mean));
    let moved = |by: f64| -> Vec<f64> {
        let moved = ratios.iter().map(|ratio| (ratio + by).clamp(low, high));
        moved.collect()
    };
    let unmoved = moved(0.0);
    if unmoved == ratios {
        return unmoved;
    }
    // The mean grows with the amount, so halving an interval finds it. All ratios lie between −1 and 2.
    let (mut least, mut most) = (-2.0, 2.0);
    for _ in 0..60 {
        let middle = (least + most) / 2.0;
        if moved(middle).iter().sum::<f64>() < mean * ratios.len() as f64 {
            least = middle;
        } else {
            most = middle;
        }
    }
    moved(most)
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
        pairs.map(|(place, error)| place.powi(power) * error).sum::<f64>()
    };
    // The places are symmetric, so odd moments vanish, and the slope is independent of the bend.
    let (count, second, fourth) = (moment(0), moment(2), moment(4));
    let bend = (count * product(2) - second * product(0)) / (count * fourth - second * second);
    [product(1) / second, bend.max(0.0)]
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
    }

    #[test]
    fn ratios_at_the_bounds_keep_the_mean_that_was_asked_for() {
        // 0.13 and −0.03 without bounds: the second is 0.01, so the first gives up 0.04.
        let ratios = owl_ratios(&[1.0, 3.0], 0.05, 0.08);
        assert!((ratios[0] - 0.09).abs() < 1e-12 && ratios[1] == 0.01, "{ratios:?}");
        for asked in [0.002, 0.02, 0.5, 0.97, 0.99, 0.9995] {
            let ratios = owl_ratios(&[0.5, 4.0, 1.0, 2.0, 1.5], asked, 0.2);
            let mean = ratios.iter().sum::<f64>() / 5.0;
            assert!((mean - asked).abs() < 1e-9, "{asked}: {ratios:?}");
            assert!(ratios.iter().all(|ratio| *ratio > 0.0 && *ratio < 1.0), "{ratios:?}");
            assert!(ratios[1] <= ratios[0], "{ratios:?}");
        }
    }

    #[test]
    fn error_takes_more_where_it_costs_less_and_keeps_the_mean() {
        let steep: Vec<f64> = grid(0.7, 0.15).iter().map(|r| 4.0 * r.powi(4)).collect();
        let flat: Vec<f64> = grid(0.7, 0.15).iter().map(|r| r.powi(4)).collect();
        let ratios = error_ratios(&[steep, flat.clone(), flat], 0.7, 0.15);
        assert!(ratios[0] < 0.7 && ratios[1] > 0.7, "{ratios:?}");
        let mean = ratios.iter().sum::<f64>() / 3.0;
        assert!((mean - 0.7).abs() < 1e-12, "{ratios:?}");
        assert!(ratios.iter().all(|ratio| (ratio - 0.7).abs() < 0.15 + 1e-9), "{ratios:?}");
        let alike = vec![vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; 2];
        let near_one = error_ratios(&alike, 0.99, 0.15);
        assert!(near_one.iter().all(|ratio| *ratio < 1.0), "{near_one:?}");
    }
}
