//! Settings of masks that close while they train: the sparsity that they reach, and the steps on the way.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use serde::{Serialize, Serializer};

use super::values::share;
use crate::failure::Failure;
use crate::pipeline::LayerRatios;
use crate::pipeline::allocation::Allocation;
use crate::pruning::{Pattern, Target};

/// The share of the steps in which masks close.
const CLOSE_BY: f64 = 0.6;

/// Choices of a training.
const CHOICES: u64 = 50;

/// Flags of masks that close.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Sparsity")]
pub struct ClosingSettings {
    /// Remove weights during the training, until this share of them, or N of each M neighbours, is zero
    ///
    /// For `full`, and for `blocks` with weights. The sparsity rises from the sparsity of the model as 1 - (1 - t)^3. Each choice removes the weights with the lowest
    /// |W| * sqrt(v) of their matrix, where v is the second moment of AdamW. AdamW has a beta2 of 0.95 then.
    #[arg(long, value_name = "RATIO|N:M")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub close_to: Option<CloseTarget>,

    /// Share of the steps in which weights are removed; the rest trains with the last mask [default: 0.6]
    #[arg(hide_short_help = true, long, value_name = "SHARE", value_parser = share)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub close_by: Option<f64>,

    /// Steps from one choice to the next [default: 1/50 of the steps]
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_every: Option<u64>,

    /// JSON file with a final sparsity per layer: [0.7, 0.8, ...], or {"0": 0.7} for some
    #[arg(hide_short_help = true, long = "layer-ratios", value_name = "FILE")]
    #[serde(skip)]
    pub layer_ratios_file: Option<PathBuf>,

    /// The content of `--layer-ratios`.
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_ratios: Option<LayerRatios>,

    /// Rule for the final sparsity of each layer: `owl` measures the model before the training [default: uniform]
    #[arg(hide_short_help = true, long, value_name = "RULE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocate: Option<Allocation>,
}

/// The value of `--close-to`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CloseTarget(pub Target);

impl FromStr for CloseTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains(':') {
            // The hint of a pattern names values of --sparsity-type.
            let pattern: Pattern = text.parse().map_err(|failure: Failure| failure.message)?;
            let Pattern::NOfM { n, m } = pattern else { return Err("it is no pattern".into()) };
            return Ok(Self(Target { ratio: n as f64 / m as f64, pattern }));
        }
        let ratio = share(text).map_err(|_| wrong_ratio(text))?;
        if ratio == 0.0 || ratio == 1.0 {
            return Err(wrong_ratio(text));
        }
        Ok(Self(Target { ratio, pattern: Pattern::Unstructured }))
    }
}

/// The reason against a ratio.
fn wrong_ratio(text: &str) -> String {
    let percent = text.trim_end_matches('%').parse::<f64>();
    let percent = percent.ok().filter(|percent| *percent > 1.0 && *percent < 100.0);
    let like = percent.map_or(0.8, |percent| percent / 100.0);
    format!("it is no share between 0 and 1, like {like}, and no N:M, like 2:4")
}

impl fmt::Display for CloseTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.pattern {
            Pattern::Unstructured => write!(formatter, "{}", self.0.ratio),
            pattern => write!(formatter, "{pattern}"),
        }
    }
}

impl Serialize for CloseTarget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl ClosingSettings {
    /// The share of the steps in which masks close.
    pub fn by(&self) -> f64 {
        self.close_by.unwrap_or(CLOSE_BY)
    }

    /// Steps from one choice to the next in a training of so many steps.
    pub fn every(&self, steps: u64) -> u64 {
        self.mask_every.unwrap_or(steps / CHOICES).max(1)
    }

    /// A flag that is given and needs `--close-to`.
    pub fn flag_without_target(&self) -> Option<&'static str> {
        let given = [
            ("--close-by", self.close_by.is_some()),
            ("--mask-every", self.mask_every.is_some()),
            ("--layer-ratios", self.layer_ratios.is_some()),
            ("--allocate", self.allocate.is_some()),
        ];
        let mut given = given.into_iter().filter(|(_, is_given)| *is_given);
        given.next().map(|(flag, _)| flag).filter(|_| self.close_to.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_ratio_or_a_pattern() {
        let target = |text: &str| text.parse::<CloseTarget>();
        assert_eq!(target("0.8").unwrap().0.count_of(10), 8);
        let groups = target("2:4").unwrap();
        assert_eq!(groups.0, Target { ratio: 0.5, pattern: Pattern::NOfM { n: 2, m: 4 } });
        assert_eq!(
            (groups.to_string(), target("0.85").unwrap().to_string()),
            ("2:4".into(), "0.85".into())
        );
        for (text, remedy) in
            [("80", "0.8"), ("90%", "0.9"), ("1", "0.8"), ("0", "0.8"), ("x", "2:4")]
        {
            let error = target(text).unwrap_err();
            assert!(error.contains(&format!("like {remedy}")), "{text}: {error}");
        }
        assert!(target("4:4").is_err() && target("0:4").is_err());
    }

    #[test]
    fn choices_are_a_fiftieth_of_the_steps_apart() {
        let settings = ClosingSettings::default();
        assert_eq!([300, 200, 10].map(|steps| settings.every(steps)), [6, 4, 1]);
        let asked = ClosingSettings { mask_every: Some(9), ..settings };
        assert_eq!(asked.every(300), 9);
        assert_eq!(asked.flag_without_target(), Some("--mask-every"));
    }
}
