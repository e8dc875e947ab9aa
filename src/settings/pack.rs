//! Settings of `prune pack`. `prune unpack` has no others than [`ConversionSettings`].

use clap::Args;

use super::conversion::ConversionSettings;
use crate::packed::PackedValues;

/// Settings of `prune pack`.
#[derive(Debug, Clone, Args)]
pub struct PackSettings {
    /// Stored values of kept weights [default: exact]
    ///
    /// `exact` keeps their bits: unpacking restores every byte. `int8` rounds them to 8 bits, with an f16 scale per row and 128 columns:
    /// half of the size, and another model. Zeros stay 0 in both.
    #[arg(long, value_name = "VALUES", default_value = "exact", hide_default_value = true)]
    pub values: PackedValues,

    /// Source, result and machine.
    #[command(flatten)]
    pub output: ConversionSettings,
}
