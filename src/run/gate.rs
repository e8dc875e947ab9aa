//! Limits of measured values, and their outcomes: `--max-perplexity`, `--max-kl`, `--min-accuracy`.

use serde::{Deserialize, Serialize};

use super::divergence::DivergenceReport;
use super::measured::{PerplexityReport, null_is_nan};

/// Returns whether a value meets its limit: at most the limit for a loss, at least the limit otherwise. NaN and infinity meet no limit, not
/// even an infinite limit.
pub fn meets(is_loss: bool, limit: f64, value: f64) -> bool {
    value.is_finite() && if is_loss { value <= limit } else { value >= limit }
}

/// A limit of a measured value, and its outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LimitReport {
    /// The flag: `--max-kl`.
    pub flag: String,
    /// The limit.
    pub limit: f64,
    /// The name of the value: `mean KL`.
    pub name: String,
    /// The value; `null` in JSON unless it is finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub value: f64,
    /// The value is a number on the right side of the limit.
    pub is_met: bool,
}

impl LimitReport {
    /// Compares the mean accuracy with `--min-accuracy`; `None` where either is absent.
    pub fn of_accuracy(limit: Option<f64>, measured: Option<f64>) -> Option<Self> {
        let (limit, value) = (limit?, measured?);
        Some(Self {
            flag: "--min-accuracy".to_string(),
            limit,
            name: "the mean accuracy".to_string(),
            value,
            is_met: meets(false, limit, value),
        })
    }

    /// Compares the mean divergence with `--max-kl`; `None` where either is absent.
    pub fn of_divergence(limit: Option<f64>, measured: Option<DivergenceReport>) -> Option<Self> {
        let (limit, value) = (limit?, measured?.kl_mean.value);
        Some(Self {
            flag: "--max-kl".to_string(),
            limit,
            name: "mean KL".to_string(),
            value,
            is_met: meets(true, limit, value),
        })
    }
}

/// `--max-perplexity` and its outcome.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GateReport {
    /// The limit.
    pub max_perplexity: f64,
    /// The perplexity that was compared with the limit; `null` in JSON unless it is finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub perplexity: f64,
    /// The perplexity is a number and not above the limit.
    pub is_met: bool,
}

impl GateReport {
    /// Compares a measured perplexity with a limit; `None` where either is absent.
    pub fn of(limit: Option<f64>, measured: Option<PerplexityReport>) -> Option<Self> {
        Some(Self::new(limit?, measured?.perplexity))
    }

    /// Compares a perplexity with a limit.
    pub fn new(max_perplexity: f64, perplexity: f64) -> Self {
        Self { max_perplexity, perplexity, is_met: meets(true, max_perplexity, perplexity) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_admits_the_limit_and_only_finite_numbers() {
        assert!(GateReport::new(10.0, 10.0).is_met);
        assert!(!GateReport::new(10.0, 10.1).is_met);
        assert!(!GateReport::new(10.0, f64::NAN).is_met);
        assert!(!GateReport::new(f64::INFINITY, f64::INFINITY).is_met);
    }
}
