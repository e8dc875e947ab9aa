//! Settings of `prune quantize`.

use clap::Args;

use super::conversion::ConversionSettings;
use crate::quantized::FourBitFormat;

/// Settings of `prune quantize`.
#[derive(Debug, Clone, Args)]
pub struct QuantizeSettings {
    /// Format of the decoder linears
    ///
    /// `nf4` has f32 scales, 4.5 bits per weight; `nf4-double` has 8-bit scales, 4.13 bits per weight. Embedding, head, norms and biases
    /// stay as they are. Pruned weights stay exactly 0.
    #[arg(long, value_name = "FORMAT")]
    pub to: FourBitFormat,

    /// Source, result and machine.
    #[command(flatten)]
    pub output: ConversionSettings,
}
