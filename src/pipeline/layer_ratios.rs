//! Ratios per layer, from a JSON file.

use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::bytes::read_given_settings;
use crate::failure::Failure;

/// Per-layer ratios as read: a list for all layers, or some layers by index.
#[derive(Debug, Clone, PartialEq)]
pub enum LayerRatios {
    /// One ratio per layer.
    All(Vec<f64>),
    /// Ratios of some layers; the others take `--sparsity-ratio`.
    Some(Vec<(usize, f64)>),
}

impl LayerRatios {
    /// Reads a JSON file: `[0.5, 0.6, …]` with one ratio per layer, or `{"0": 0.3, "31": 0.7}` for some.
    ///
    /// # Errors
    /// Fails when the file cannot be read or holds something else.
    pub fn load(path: &Path) -> Result<Self> {
        const HINT: &str = "write [0.5, 0.6, ...] with one ratio per layer, or {\"0\": 0.3, \"31\": 0.7} for some of them";
        let text = read_given_settings(path).map_err(|error| {
            Failure::new(format!(
                "cannot read layer ratios from `{}`: {error}",
                path.display()
            ))
            .hint(HINT)
        })?;
        let bad = |why: String| {
            Failure::new(format!(
                "`{}` does not hold layer ratios: {why}",
                path.display()
            ))
            .hint(HINT)
        };
        let json: Value = serde_json::from_str(&text)
            .map_err(|error| bad(format!("it is not JSON ({error})")))?;
        let ratio = |value: &Value| {
            value
                .as_f64()
                .ok_or_else(|| bad(format!("{value} is not a number")))
        };
        match &json {
            Value::Array(values) => Ok(Self::All(
                values.iter().map(ratio).collect::<Result<_, _>>()?,
            )),
            Value::Object(entries) => {
                let layer = |key: &str| {
                    // "00" and "+0" would name layer 0 once more.
                    let index = key.parse::<usize>().ok();
                    index
                        .filter(|index| index.to_string() == key)
                        .ok_or_else(|| bad(format!("`{key}` is not a layer's index")))
                };
                Ok(Self::Some(
                    entries
                        .iter()
                        .map(|(key, value)| Ok((layer(key)?, ratio(value)?)))
                        .collect::<Result<_, Failure>>()?,
                ))
            }
            _ => Err(bad("it is neither a list nor an object".into()).into()),
        }
    }
}
