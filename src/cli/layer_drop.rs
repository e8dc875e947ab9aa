//! Flags of smaller models: layers that are dropped.

use clap::Args;
use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::pipeline::layer_drop::DropRule;
use crate::settings::{DropCount, LayerDropSettings};

/// Flags of dropped layers.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Smaller models")]
pub(super) struct LayerDropArgs {
    /// Drop N layers, or as many as `auto` finds, before weights are pruned
    ///
    /// The calibration samples score the layers of the dense model. The model without the dropped layers is smaller and faster
    /// everywhere. Its layers are numbered anew: --include, --exclude and --layer-ratios mean the new numbers. Without
    /// --sparsity-ratio and --sparsity-type, no weight is pruned. `auto` drops layers with a score below three quarters of the median,
    /// at most a quarter of the layers. Example: --drop-layers 8
    #[arg(long, value_name = "N|auto")]
    drop_layers: Option<DropCount>,

    /// Rule that chooses the layers to drop
    #[arg(long, value_name = "RULE", default_value = "influence", requires = "drop_layers")]
    drop_rule: DropRule,

    /// Drop these layers, counted from 0, in place of those that a rule chooses
    ///
    /// Layers are separated by commas. They are scored all the same. Example: --layers-dropped 21,22,25
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "drop_layers")]
    layers_dropped: Vec<usize>,
}

impl LayerDropArgs {
    pub(super) fn settings(&self) -> Option<LayerDropSettings> {
        let mut layers_dropped = self.layers_dropped.clone();
        layers_dropped.sort_unstable();
        layers_dropped.dedup();
        let listed = Some(layers_dropped.len()).filter(|&number| number > 0);
        Some(LayerDropSettings {
            drop_layers: self.drop_layers.or(listed.map(DropCount::Number))?,
            drop_rule: self.drop_rule,
            layers_dropped,
        })
    }
}

impl ValueEnum for DropRule {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Influence, Self::Angle]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Influence => {
                "The layers whose outputs are closest to their inputs, by the mean cosine of all tokens"
            }
            Self::Angle => {
                "The span of consecutive layers that turns the last token of a sample least"
            }
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}
