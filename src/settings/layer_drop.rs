//! Settings of dropped layers.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use serde::{Serialize, Serializer};

use crate::pipeline::layer_drop::DropRule;

/// Flags of dropped layers.
#[derive(Debug, Clone, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Smaller models")]
pub struct LayerDropSettings {
    /// Drop N layers, or as many as `auto` finds
    ///
    /// Layers are dropped before weights are pruned. The calibration samples score the layers of the dense model. The model without the dropped layers is smaller and faster
    /// everywhere. Its layers are numbered anew: --include, --exclude and --layer-ratios mean the new numbers. Without
    /// --sparsity-ratio and --sparsity-type, no weight is pruned. `auto` drops layers with a score below three quarters of the median,
    /// at most a quarter of the layers, or as few as --target-params or --target-size allows. Example: --drop-layers 8
    #[arg(long, value_name = "N|auto")]
    #[serde(serialize_with = "count_as_text")]
    pub drop_layers: Option<DropCount>,

    /// Rule that chooses the layers to drop
    #[arg(
        hide_short_help = true,
        long,
        value_name = "RULE",
        default_value = "influence",
        requires = "drop_layers"
    )]
    pub drop_rule: DropRule,

    /// Drop these layers, counted from 0, instead of layers that a rule chooses
    ///
    /// Layers are separated by commas. They are scored all the same. Example: --layers-dropped 21,22,25
    #[arg(
        hide_short_help = true,
        long,
        value_name = "LIST",
        value_delimiter = ',',
        conflicts_with = "drop_layers"
    )]
    pub layers_dropped: Vec<usize>,
}

impl LayerDropSettings {
    /// The same settings with the list in order, and its length as the number of layers.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.layers_dropped.sort_unstable();
        self.layers_dropped.dedup();
        self.drop_layers = Some(self.count());
        self
    }

    /// The number of layers to drop.
    pub fn count(&self) -> DropCount {
        self.drop_layers.unwrap_or(DropCount::Number(self.layers_dropped.len()))
    }
}

fn count_as_text<S: Serializer>(count: &Option<DropCount>, to: S) -> Result<S::Ok, S::Error> {
    count.map(|count| count.to_string()).serialize(to)
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
