//! Settings of width that is dropped: MLP channels and attention heads.

use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::deciding::as_text;

/// Flags of dropped width.
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Smaller models")]
pub struct WidthDropSettings {
    /// Drop this share of the width of every layer
    ///
    /// The calibration samples score the MLP channels (and heads, see --width-of) of every layer. Each layer loses the same number, so
    /// the result is a plain model with a smaller intermediate_size. The weights behind the dropped channels are refitted by least
    /// squares. Without --sparsity-ratio and --sparsity-type, no weight is pruned in addition. Needs --save. Example: --drop-width 0.2
    #[arg(long, value_name = "SHARE", required = false)]
    #[serde(serialize_with = "as_text")]
    pub drop_width: WidthShare,

    /// Parts of a layer that become narrower
    #[arg(
        hide_short_help = true,
        long,
        value_name = "PART",
        default_value = "mlp",
        requires = "drop_width"
    )]
    pub width_of: WidthOf,

    /// Keep the weights behind the dropped width as they are
    #[arg(hide_short_help = true, long, requires = "drop_width")]
    pub no_width_refit: bool,
}

/// A share of a layer's width, between 0 and 1, both excluded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WidthShare(pub f64);

impl fmt::Display for WidthShare {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl FromStr for WidthShare {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(share) if share > 0.0 && share < 1.0 => Ok(Self(share)),
            Ok(_) => Err("the share must lie between 0 and 1, as 0.2 does".to_string()),
            Err(_) => Err("expected a share between 0 and 1, as 0.2".to_string()),
        }
    }
}

/// The parts of a layer that become narrower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum WidthOf {
    /// Channels of the MLP: the result loads everywhere
    #[default]
    Mlp,
    /// Key/value heads with their query heads: the result needs a program that reads head_dim
    Heads,
    /// Both, with the same share
    Both,
}

impl WidthOf {
    /// `mlp`, `heads` or `both`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Heads => "heads",
            Self::Both => "both",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_lies_between_0_and_1() {
        assert_eq!("0.2".parse::<WidthShare>().unwrap().to_string(), "0.2");
        for text in ["", "0", "1", "-0.1", "2", "NaN", "half"] {
            assert!(text.parse::<WidthShare>().is_err(), "{text}");
        }
    }
}
