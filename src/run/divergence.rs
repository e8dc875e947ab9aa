//! The record of the divergence of a model from the dense model, position by position of the evaluation windows.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::measured::null_is_nan;

/// The positions of a window that are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum KlPositions {
    /// Every position that predicts a token
    #[default]
    All,
    /// From the middle of the window on, as llama.cpp's `perplexity` tool compares
    SecondHalf,
}

impl KlPositions {
    /// The first position of a window of `seqlen` tokens.
    pub fn first(self, seqlen: usize) -> usize {
        match self {
            Self::All => 0,
            Self::SecondHalf => seqlen / 2,
        }
    }
}

/// A mean over positions, or a function of it, and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The value; `null` in JSON unless it is finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub value: f64,
    /// Its standard error; `null` in JSON unless it is finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub error: f64,
}

/// KL(dense ‖ model) = Σ_v p(v)·(ln p(v) − ln q(v)) in nat at every compared position; p is the dense model's, q the model's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DivergenceReport {
    /// The positions of a window that are compared.
    pub which: KlPositions,
    /// The number of compared positions.
    pub positions: u64,
    /// Mean KL.
    pub kl_mean: Estimate,
    /// Median KL.
    #[serde(deserialize_with = "null_is_nan")]
    pub kl_median: f64,
    /// The 90 % quantile of KL.
    #[serde(deserialize_with = "null_is_nan")]
    pub kl_90: f64,
    /// The 95 % quantile of KL.
    #[serde(deserialize_with = "null_is_nan")]
    pub kl_95: f64,
    /// The 99 % quantile of KL.
    #[serde(deserialize_with = "null_is_nan")]
    pub kl_99: f64,
    /// The largest KL.
    #[serde(deserialize_with = "null_is_nan")]
    pub kl_max: f64,
    /// The share of positions at which both models rank the same token first.
    pub same_top: Estimate,
    /// The dense model's perplexity over these positions.
    pub perplexity_dense: Estimate,
    /// The model's perplexity over these positions.
    pub perplexity_model: Estimate,
    /// The model's perplexity divided by the dense model's.
    pub perplexity_ratio: Estimate,
    /// The logarithm of the ratio: the mean of ln p(t) − ln q(t) over the right tokens t.
    pub log_ratio: Estimate,
    /// The mean of q(t) − p(t) over the right tokens t.
    pub probability_difference: Estimate,
    /// The root of the mean square of q(t) − p(t).
    pub probability_difference_rms: Estimate,
    /// Pearson's correlation of −ln p(t) and −ln q(t).
    #[serde(deserialize_with = "null_is_nan")]
    pub correlation: f64,
}
