//! Parsers of flag values: numbers in a range, and JSON.

use serde::de::DeserializeOwned;

/// A value as JSON.
pub(super) fn from_json<T: DeserializeOwned>(json: &str) -> Result<T, serde_json::Error> {
    serde_json::from_str(json)
}

/// A number that a condition holds for; `what` completes "it is no number …".
fn number(text: &str, what: &str, holds: impl Fn(f64) -> bool) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && holds(value) => Ok(value),
        _ => Err(format!("it is no number {what}")),
    }
}

/// A perplexity, which is at least 1.
pub(super) fn perplexity(text: &str) -> Result<f64, String> {
    number(text, "of at least 1", |value| value >= 1.0)
}

/// A number from 0 to 1.
pub fn share(text: &str) -> Result<f64, String> {
    number(text, "from 0 to 1", |value| (0.0..=1.0).contains(&value))
}

/// A number above 0.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    number(text, "above 0", |value| value > 0.0)
}

/// A number of at least 0.
pub(super) fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "of at least 0", |value| value >= 0.0)
}
