//! Settings of dropped layers.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::as_text;
use crate::pipeline::layer_drop::DropRule;

/// Flags of dropped layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerDropSettings {
    /// `--drop-layers`; the length of the list of `--layers-dropped`.
    #[serde(serialize_with = "as_text")]
    pub drop_layers: DropCount,
    /// `--drop-rule`.
    pub drop_rule: DropRule,
    /// `--layers-dropped`: the layers to drop, in place of a rule; empty without the flag.
    pub layers_dropped: Vec<usize>,
}

/// The number of layers to drop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropCount {
    /// This many.
    Number(usize),
    /// As many as the scores call for, at most a quarter.
    Auto,
}

impl fmt::Display for DropCount {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(formatter),
            Self::Auto => formatter.write_str("auto"),
        }
    }
}

impl FromStr for DropCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(number) if number > 0 => Ok(Self::Number(number)),
            Ok(_) => Err("0 drops nothing; leave the flag out".to_string()),
            Err(_) => Err("expected a number of layers, or auto".to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_a_positive_number_or_auto() {
        for text in ["auto", "1", "12"] {
            assert_eq!(text.parse::<DropCount>().unwrap().to_string(), text);
        }
        for text in ["", "0", "-1", "two", "1.5"] {
            assert!(text.parse::<DropCount>().is_err(), "{text}");
        }
    }
}
