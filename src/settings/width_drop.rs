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
    /// squares. Without --sparsity-ratio and --sparsity-type, no weight is pruned in addition. Needs --save. `auto` drops as little as
    /// --target-params or --target-size allows. Example: --drop-width 0.2
    #[arg(long, value_name = "SHARE|auto", required = false)]
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

/// A share of a layer's width.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WidthShare {
    /// Between 0 and 1, both excluded.
    Share(f64),
    /// The smallest share that meets a target size.
    Auto,
}

impl WidthShare {
    /// The share; 0 where it is not decided yet.
    pub fn share(self) -> f64 {
        match self {
            Self::Share(share) => share,
            Self::Auto => 0.0,
        }
    }
}

impl fmt::Display for WidthShare {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Share(share) => share.fmt(formatter),
            Self::Auto => formatter.write_str("auto"),
        }
    }
}

impl FromStr for WidthShare {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(share) if share > 0.0 && share < 1.0 => Ok(Self::Share(share)),
            Ok(_) => Err("the share must lie between 0 and 1, as 0.2 does".to_string()),
            Err(_) => Err("expected a share between 0 and 1, as 0.2, or auto".to_string()),
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
        for text in ["0.2", "auto"] {
            assert_eq!(text.parse::<WidthShare>().unwrap().to_string(), text);
        }
        for text in ["", "0", "1", "-0.1", "2", "NaN", "half"] {
            assert!(text.parse::<WidthShare>().is_err(), "{text}");
        }
    }
}
