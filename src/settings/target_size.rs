//! Settings of a size that a smaller model has to meet.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use serde::Serialize;

use super::deciding::as_text;
use crate::bytes::ByteSize;

/// Flags of the size that is asked for. One of them is given.
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Smaller models")]
pub struct TargetSizeSettings {
    /// Drop layers or width until the model has at most this many parameters
    ///
    /// Needs --drop-layers auto or --drop-width auto, which says what goes. As little goes as possible. Example: --drop-layers auto
    /// --target-params 800M
    #[arg(hide_short_help = true, long, value_name = "COUNT")]
    #[serde(serialize_with = "as_optional_text")]
    pub target_params: Option<ParameterCount>,

    /// Drop layers or width until the tensors have at most this many bytes
    ///
    /// Otherwise as --target-params. Example: --drop-width auto --target-size 2GiB
    #[arg(hide_short_help = true, long, value_name = "SIZE", conflicts_with = "target_params")]
    #[serde(serialize_with = "as_optional_text")]
    pub target_size: Option<ByteSize>,
}

/// A number of parameters: `800M`, `1.5B` or `800000000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterCount(pub u64);

impl fmt::Display for ParameterCount {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl FromStr for ParameterCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, factor) = match text.char_indices().next_back() {
            Some((at, 'k' | 'K')) => (&text[..at], 1e3),
            Some((at, 'm' | 'M')) => (&text[..at], 1e6),
            Some((at, 'b' | 'B')) => (&text[..at], 1e9),
            _ => (text, 1.0),
        };
        let count = number.parse::<f64>().map(|number| number * factor);
        match count {
            Ok(count) if (1.0..1e15).contains(&count) => Ok(Self(count as u64)),
            _ => Err("write a number of parameters like 800M, 1.5B or 800000000".to_string()),
        }
    }
}

fn as_optional_text<T: fmt::Display, S: serde::Serializer>(
    value: &Option<T>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => as_text(value, to),
        None => to.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_may_have_a_unit() {
        for (text, count) in
            [("800M", 800_000_000), ("1.5B", 1_500_000_000), ("260k", 260_000), ("7", 7)]
        {
            assert_eq!(text.parse(), Ok(ParameterCount(count)));
        }
        for text in ["", "0", "-1M", "M", "1.5G", "NaN", "infB", "é"] {
            assert!(text.parse::<ParameterCount>().is_err(), "{text}");
        }
    }
}
