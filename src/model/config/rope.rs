//! The keys of rotary positions in a `config.json`: the base frequency and its scaling.
//!
//! transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` and `rope_scaling`. Both are read; `pairs` decides between them.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::keys::{ANOTHER_MODEL, Keys};
use super::pairs::rope_place;
use crate::failure::Failure;

/// Upper bound of the numbers that scale rotary frequencies. They are computed with as f32.
const LARGEST_ROPE: f64 = 1e12;

/// Scaling of rotary frequencies, for contexts longer than the trained context.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "rope_type")]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// Ratio of the new context length to the trained context length.
        factor: f64,
    },
    /// NTK-aware: the base grows with the sequence once it is longer than the trained context.
    Dynamic {
        /// Ratio of the new context length to the trained context length.
        factor: f64,
    },
    /// Llama 3.1's scaling: low frequencies divided by `factor`, high frequencies kept, a ramp between.
    Llama3 {
        /// Ratio of the new context length to the trained context length.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context the model was trained with, in tokens.
        original_max_position_embeddings: usize,
    },
}

/// Reads the base of the rotary frequencies and their scaling.
pub(super) fn read(config: &Keys<'_>) -> Result<(f64, RopeScaling)> {
    let place = rope_place(config);
    let parameters = config.given(place);
    if let Some(parameters) = parameters.filter(|parameters| !parameters.is_object()) {
        return Err(Failure::new(format!(
            "`{place}` is {parameters}; it must be an object, or null"
        ))
        .into());
    }
    let inner = parameters.map(Keys);
    let with_theta = inner.as_ref().filter(|inner| inner.given("rope_theta").is_some());
    let theta = with_theta
        .unwrap_or(config)
        .number("rope_theta", Some(10_000.0), |theta| theta > 1.0 && theta <= LARGEST_ROPE)
        .map_err(|value| {
            Failure::new(format!(
                "`rope_theta` is {value}; it must be a number above 1, and up to {LARGEST_ROPE:e}"
            ))
        })?;
    let scaling = inner.map_or(Ok(RopeScaling::Default), |inner| scaling(&inner, place))?;
    Ok((theta, scaling))
}

fn scaling(keys: &Keys<'_>, place: &str) -> Result<RopeScaling> {
    let number = |key: &str, least: f64| {
        keys.number(key, None, |value| (least..=LARGEST_ROPE).contains(&value)).map_err(|value| {
            Failure::new(format!(
                "`{place}.{key}` is {value}; it must be a number from {least} to {LARGEST_ROPE:e}"
            ))
        })
    };
    // A factor below 1 would shrink the context. transformers calls it invalid.
    let factor = || number("factor", 1.0);
    let kind = match keys.given("rope_type").or_else(|| keys.given("type")) {
        None => "default",
        Some(Value::String(kind)) => kind,
        Some(other) => {
            return Err(Failure::new(format!(
                "the type of `{place}` is {other}; it must be a name"
            ))
            .into());
        }
    };
    Ok(match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: factor()? },
        "dynamic" => RopeScaling::Dynamic { factor: factor()? },
        "llama3" => {
            // As small as a ratio of wavelengths can sensibly be.
            let frequency = |key| number(key, 1e-6);
            let (low, high) = (frequency("low_freq_factor")?, frequency("high_freq_factor")?);
            // Compared as f32: a later division is by their difference.
            if low as f32 >= high as f32 {
                return Err(Failure::new(format!(
                    "`{place}`: low_freq_factor {low} must be smaller than high_freq_factor {high}"
                ))
                .into());
            }
            RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: keys
                    .size("original_max_position_embeddings", None)?,
            }
        }
        other => {
            return Err(Failure::new(format!("rotary scaling `{other}` is not supported"))
                .detail("supported: default, linear, dynamic, llama3")
                .hint(ANOTHER_MODEL)
                .into());
        }
    })
}
