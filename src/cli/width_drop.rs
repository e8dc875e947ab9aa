//! Flags of smaller models: width that is dropped.

use clap::Args;
use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::settings::{WidthDropSettings, WidthOf, WidthShare};

/// Flags of dropped width.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Smaller models")]
pub(super) struct WidthDropArgs {
    /// Drop this share of the width of every layer, and refit the weights that stay
    ///
    /// The calibration samples score the MLP channels (and heads, see --width-of) of every layer. Each layer loses the same number, so
    /// the result is a plain model with a smaller intermediate_size. The weights behind the dropped channels are refitted by least
    /// squares. Without --sparsity-ratio and --sparsity-type, no weight is pruned in addition. Needs --save. Example: --drop-width 0.2
    #[arg(long, value_name = "SHARE")]
    drop_width: Option<WidthShare>,

    /// Parts of a layer that become narrower
    #[arg(long, value_name = "PART", default_value = "mlp", requires = "drop_width")]
    width_of: WidthOf,

    /// Keep the weights behind the dropped width as they are
    #[arg(long, requires = "drop_width")]
    no_width_refit: bool,
}

impl WidthDropArgs {
    pub(super) fn settings(&self) -> Option<WidthDropSettings> {
        Some(WidthDropSettings {
            drop_width: self.drop_width?,
            width_of: self.width_of,
            no_width_refit: self.no_width_refit,
        })
    }
}

impl ValueEnum for WidthOf {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Mlp, Self::Heads, Self::Both]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Mlp => "Channels of the MLP: the result loads everywhere",
            Self::Heads => {
                "Key/value heads with their query heads: the result needs a program that reads head_dim"
            }
            Self::Both => "Both, with the same share",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}
