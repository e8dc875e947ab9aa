//! Means, quantiles and standard errors over positions.
//!
//! ```text
//! u(x)         = √((E[x²] − E[x]²) / (n − 1))                   error of a mean
//! u(ln ratio)  = √(u_q² + u_p² − 2·cov/(n − 1))                 cov of the two losses
//! u(RMS Δp)    = ½·u(Δp²) / RMS Δp,   u(same top s) = √(s(1 − s)/(n − 1))
//! quantile f   = linear interpolation at f·(n − 1)
//! ```
//!
//! Reference: ggml-org/llama.cpp, `tools/perplexity/perplexity.cpp`. Sums are f64, in the order of the positions.

use super::position::PositionValues;
use crate::run::divergence::{DivergenceReport, Estimate, KlPositions};

/// Summarises the positions, at least one.
pub(super) fn summarise(which: KlPositions, values: &[PositionValues]) -> DivergenceReport {
    let count = values.len() as f64;
    let estimate = |of: &dyn Fn(&PositionValues) -> f64| -> Estimate {
        let (sum, squares) = values
            .iter()
            .map(of)
            .fold((0.0, 0.0), |(sum, squares), value| (sum + value, squares + value * value));
        let mean = sum / count;
        let variance = (squares / count - mean * mean).max(0.0);
        // A variance that is not a number stays so: `max` would hide it.
        let variance = if squares.is_finite() { variance } else { f64::NAN };
        Estimate { value: mean, error: (variance / (count - 1.0)).sqrt() }
    };
    let (dense, model) = (estimate(&|of| of.dense), estimate(&|of| of.model));
    let product = values.iter().map(|of| of.dense * of.model).sum::<f64>() / count;
    let covariance = (product - dense.value * model.value) / (count - 1.0);
    let log_ratio = Estimate {
        value: model.value - dense.value,
        error: (model.error.powi(2) + dense.error.powi(2) - 2.0 * covariance).max(0.0).sqrt(),
    };
    let exponential = |of: Estimate| {
        let value = of.value.exp();
        Estimate { value, error: value * of.error }
    };
    let difference = |of: &PositionValues| (-of.model).exp() - (-of.dense).exp();
    let square = estimate(&|of| difference(of).powi(2));
    let rms = square.value.sqrt();
    let same = estimate(&|of| f64::from(u8::from(of.is_same_top)));
    let mut kl: Vec<f64> = values.iter().map(|of| of.kl).collect();
    kl.sort_by(f64::total_cmp);
    DivergenceReport {
        which,
        positions: values.len() as u64,
        kl_mean: estimate(&|of| of.kl),
        kl_median: quantile(&kl, 0.5),
        kl_90: quantile(&kl, 0.9),
        kl_95: quantile(&kl, 0.95),
        kl_99: quantile(&kl, 0.99),
        kl_max: quantile(&kl, 1.0),
        same_top: same,
        perplexity_dense: exponential(dense),
        perplexity_model: exponential(model),
        perplexity_ratio: exponential(log_ratio),
        log_ratio,
        probability_difference: estimate(&difference),
        probability_difference_rms: Estimate {
            value: rms,
            // Equal probabilities everywhere have no error.
            error: if rms > 0.0 { 0.5 * square.error / rms } else { 0.0 },
        },
        correlation: covariance / (dense.error * model.error),
    }
}

/// The quantile `share` of ascending values, between two of them by linear interpolation.
fn quantile(ascending: &[f64], share: f64) -> f64 {
    let place = share * (ascending.len().max(1) - 1) as f64;
    let (below, part) = (place.floor() as usize, place.fract());
    match (ascending.get(below), ascending.get(below + 1)) {
        (Some(low), Some(high)) if part > 0.0 => low + part * (high - low),
        (Some(low), _) => *low,
        (None, _) => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated_and_errors_follow_their_formulas() {
        let kl = [1.0, 2.0, 3.0, 10.0];
        assert_eq!(
            (quantile(&kl, 0.5), quantile(&kl, 1.0), quantile(&kl, 0.75)),
            (2.5, 10.0, 4.75)
        );
        let of = |kl: f64, dense: f64, model: f64| PositionValues {
            kl,
            dense,
            model,
            is_same_top: kl < 2.0,
        };
        let report =
            summarise(KlPositions::All, &[of(1.0, 1.0, 2.0), of(2.0, 2.0, 2.0), of(3.0, 3.0, 5.0)]);
        // Mean 2, E[x²] − 4 = 14/3 − 4 = 2/3, divided by n − 1 = 2.
        assert_eq!((report.kl_mean.value, report.positions), (2.0, 3));
        assert!((report.kl_mean.error - (1.0f64 / 3.0).sqrt()).abs() < 1e-15);
        // s = 1/3: √(1/3·2/3/2) = 1/3.
        assert!((report.same_top.error - 1.0 / 3.0).abs() < 1e-15);
        assert!((report.log_ratio.value - 1.0).abs() < 1e-15);
        // Losses (1, 2, 3) and (2, 2, 5): variances 2/3 and 2, covariance 1; u² = (2/3 + 2 − 2) / 2.
        assert!((report.log_ratio.error - (1.0f64 / 3.0).sqrt()).abs() < 1e-15);
        assert!((report.correlation - 3f64.sqrt() / 2.0).abs() < 1e-14);
    }

    #[test]
    fn a_model_that_overflows_has_no_divergence_that_is_a_number() {
        let of = PositionValues { kl: f64::NAN, dense: 1.0, model: f64::NAN, is_same_top: false };
        let report = summarise(KlPositions::All, &[of, of]);
        assert!(report.kl_mean.value.is_nan() && report.kl_max.is_nan());
        assert!(report.kl_mean.error.is_nan() && report.perplexity_model.value.is_nan());
    }
}
