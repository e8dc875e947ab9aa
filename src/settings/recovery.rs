//! Settings of `prune recover`, and their defaults for each way.
//!
//! ```text
//! rate of kept weights   0.04 / (hidden_size · d²)  3.9e-3 for 64, 6.1e-5 for 4096, both at 60 % zeros
//! kept weights in blocks 0.08 / (hidden_size · d²)  7.8e-3 for 64, 1.2e-4 for 4096
//! rate of factors        0.016 / (√hidden_size · d) 5e-3 for 64, 6.3e-4 for 4096
//! while masks close      0.2 / (hidden_size · d)    1.6e-2 for 64, 2.4e-4 for 4096, both to 80 % zeros
//! ```
//!
//! d is the share of weights that are not zero (in the end, where masks close), and at least a fifth: a sparser model has lost more, and its
//! best rate is higher. The best of some rates on stories260k after `ladder`:
//!
//! | zeros | `full`, 200 steps | `blocks` | `lora`, 150 steps |
//! | --- | --- | --- | --- |
//! | 50 % | 3e-3 | 8e-3 | |
//! | 60 % | 3e-3 | 8e-3 | 1.2e-2 |
//! | 70 % | 1e-2 | 1.6e-2 | |
//! | 80 % | 2e-2 | 3.2e-2 | 1.2e-2 |
//!
//! From its dense model with itself as teacher, 300 steps that close: 4.89, 5.34 and 6.02 at 50, 60 and 70 % zeros with this rule, 5.42,
//! 5.69 and 6.09 with the rate of 80 %; 5.33 and 5.81 for 2:4.
//!
//! Kept weights follow the scaling of Adam's rate with the width (Yang et al. 2022, arXiv:2203.03466). The rate of factors is 2.5e-4 for a
//! dense model of 7B, near QLoRA's 2e-4 (Dettmers et al. 2023, arXiv:2305.14314).

use std::convert::Infallible;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::closing::ClosingSettings;
use super::deciding::not_deciding;
use super::values::{not_negative, positive, share};
use crate::quantized::FourBitFormat;
use crate::recovery::optimizers::{ScheduleShape, find};

/// The value of `--target-modules` for all linear layers of the decoder.
pub const ALL_LINEAR: &str = "all-linear";

/// The share of kept weights below which the default rate no longer rises.
const LEAST_DENSITY: f64 = 0.2;

/// The optimizer with a momentum of its own.
const SGD: &str = "sgd";

/// The share of the teacher in the loss of the whole model.
pub const DISTILL_WEIGHT: f64 = 0.5;

/// Flags of a recovery training.
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Training")]
pub struct RecoverySettings {
    /// Way of the training
    #[arg(long, value_name = "WAY", default_value = "blocks")]
    pub how: RecoveryWay,

    /// Dense model that is learned from
    ///
    /// `blocks` needs it. The checkpoint that was pruned: a folder, or an id on the hub. It has the shape of the model. `blocks` learns the outputs of its
    /// layers, `lora` and `full` its logits together with the text.
    // Runs compare the teacher by the fingerprint of its files.
    #[arg(long, value_name = "DIR|ID")]
    #[serde(serialize_with = "not_deciding")]
    pub teacher: Option<PathBuf>,

    /// Share of the teacher's logits in the loss of `lora` and `full` [default: 0.5 with --teacher]
    ///
    /// The loss of a token is (1 - W) times its own, and W times the divergence (KL) of the probabilities from the teacher's. A step also
    /// passes its examples through the teacher.
    #[arg(hide_short_help = true, long, value_name = "W", value_parser = share)]
    pub distill_weight: Option<f64>,

    /// Trained parameters of `blocks` [default: weights]
    #[arg(
        hide_short_help = true,
        long = "train",
        value_name = "KIND",
        default_value = "weights",
        hide_default_value = true,
        default_value_if("how", "lora", "factors")
    )]
    pub trains: TrainedKind,

    /// Rank of the factors
    #[arg(long, value_name = "R", default_value = "16", value_parser = counts(1..=65536))]
    pub rank: usize,

    /// Scale of the factors' product, times the rank
    #[arg(hide_short_help = true, long, value_name = "A", default_value = "32", value_parser = positive)]
    pub alpha: f64,

    /// Linear layers that are trained, separated by commas
    #[arg(hide_short_help = true, long, value_name = "NAMES", default_value = ALL_LINEAR, value_delimiter = ',')]
    pub target_modules: Vec<String>,

    /// Also train the weights of the norms
    #[arg(hide_short_help = true, long)]
    pub train_norms: bool,

    /// Format of the frozen base
    ///
    /// Only factors have a frozen base. The matrices are quantised once, as bitsandbytes does it, into a file in the offload folder. Masks are taken before. The
    /// result is merged into the quantised base.
    #[arg(long, value_name = "FORMAT")]
    pub base_quant: Option<FourBitFormat>,

    /// Round bf16 weights up or down by chance, in proportion to the distances
    #[arg(hide_short_help = true, long)]
    pub stochastic_rounding: bool,

    /// Optimizer
    ///
    /// adamw, adamw8bit, paged-adamw8bit, paged-adamw32bit or sgd. The 8-bit states are those of bitsandbytes. `paged` keeps parameters, gradients and states in a file in the offload folder,
    /// so memory does not grow with the depth of the model. Names of transformers' Trainer for the same rules are accepted, like
    /// `paged_adamw_8bit` and `adamw_torch`.
    #[arg(long, value_name = "NAME", default_value = "adamw", value_parser = optimizer, help_heading = OPTIMIZER)]
    pub optim: String,

    /// Learning rate [default: fits width and zeros]
    ///
    /// The default is 0.04 / (hidden_size * d^2) for weights, in blocks 0.08 / (hidden_size * d^2), and 0.016 / (sqrt(hidden_size) * d) for factors, where d is the share of weights that are not zero, at least 0.2; with --close-to 0.2 / (hidden_size * d), with the share in the end.
    #[arg(long, value_name = "RATE", value_parser = positive, help_heading = OPTIMIZER)]
    pub lr: Option<f64>,

    /// Shape of the learning rate after the warm-up
    #[arg(hide_short_help = true, long, value_name = "SHAPE", default_value = "cosine", help_heading = OPTIMIZER)]
    pub schedule: ScheduleShape,

    /// Steps in which the rate rises from 0 [default: a twentieth of the steps; none for blocks]
    #[arg(hide_short_help = true, long, value_name = "STEPS", help_heading = OPTIMIZER)]
    pub warmup: Option<u64>,

    /// Steps; for blocks, of each layer [default: 200]
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000), help_heading = OPTIMIZER)]
    pub steps: Option<u64>,

    /// Passes over the examples [default for blocks: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000), help_heading = OPTIMIZER)]
    pub epochs: Option<u64>,

    /// Decoupled weight decay
    #[arg(hide_short_help = true, long, value_name = "DECAY", default_value = "0", value_parser = not_negative, help_heading = OPTIMIZER)]
    pub weight_decay: f64,

    /// Momentum of sgd
    #[arg(hide_short_help = true, long, value_name = "M", default_value = "0", value_parser = not_negative, help_heading = OPTIMIZER)]
    pub momentum: f64,

    /// Examples of a step [default: 4; 8 for blocks]
    ///
    /// They pass each layer one after the other, so memory grows with their hidden states only.
    #[arg(long, value_name = "N", default_value = "8", hide_default_value = true, default_value_ifs = whole("4"), value_parser = counts(1..=1_000_000), help_heading = OPTIMIZER)]
    pub batch_size: usize,

    /// Factor of the batch size, for scripts that accumulate gradients
    #[arg(hide_short_help = true, long, value_name = "N", default_value = "1", value_parser = counts(1..=1_000_000), help_heading = OPTIMIZER)]
    pub accumulate: usize,

    /// Keep the activations of the last N layers for the backward pass in place of computing them again
    ///
    /// Each layer takes 4 bytes per token for 2 queries, 2 keys, 1 hidden_size and 2 intermediate_size, for all examples of a step, and
    /// its weights stay in memory, too. A step is faster, and its result has the same bits.
    #[arg(hide_short_help = true, long, value_name = "N", default_value = "0", help_heading = OPTIMIZER)]
    #[serde(serialize_with = "not_deciding")]
    pub keep_activations: usize,

    /// Limit of the gradients' norm; 0 for none [default: 0.3; none for blocks]
    #[arg(hide_short_help = true, long, value_name = "NORM", default_value_ifs = whole("0.3"), hide_default_value = true, value_parser = not_negative, help_heading = OPTIMIZER)]
    pub max_grad_norm: Option<f64>,

    /// Also write an adapter for peft: SAVE/adapter
    #[arg(long, help_heading = OPTIMIZER)]
    #[serde(serialize_with = "not_deciding")]
    pub save_adapter: bool,

    /// Steps between two saved states of the training [default: those of ten minutes]
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = OPTIMIZER)]
    #[serde(serialize_with = "not_deciding")]
    pub save_every: Option<u64>,

    /// Make an example of each document instead of packing all into rows
    #[arg(hide_short_help = true, long, help_heading = TEXT)]
    pub per_document: bool,

    /// Examples that are not trained on, for a loss at intervals; the best state is kept [default: 8; none for blocks]
    #[arg(hide_short_help = true, long, value_name = "N", default_value = "0", hide_default_value = true, default_value_ifs = whole("8"), help_heading = TEXT)]
    pub held_out: usize,

    /// Steps between two measurements of the held-out loss [default: a tenth of the steps]
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = TEXT)]
    pub eval_every: Option<u64>,

    /// Stop after N measurements without a better one
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = TEXT)]
    pub patience: Option<u64>,

    /// Masks that close.
    #[command(flatten)]
    #[serde(flatten)]
    pub closing: ClosingSettings,
}

/// Heading of the optimizer's flags.
const OPTIMIZER: &str = "Optimizer";
/// Heading of the flags of the training's text.
pub const TEXT: &str = "Text";

/// Whole numbers of a range.
fn counts(range: std::ops::RangeInclusive<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

/// A default of trainings of the whole model.
fn whole(value: &'static str) -> [(&'static str, &'static str, &'static str); 2] {
    [RecoveryWay::Lora, RecoveryWay::Full].map(|how| ("how", how.name(), value))
}

/// The name of an optimizer. An alias means the same run. An unknown name is refused later, when the model is at hand.
fn optimizer(name: &str) -> Result<String, Infallible> {
    Ok(find(name).map_or(name, |kind| kind.name).to_string())
}

/// Ways of recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum RecoveryWay {
    /// Each layer learns to reproduce the dense layer's output
    Blocks,
    /// Low-rank factors under the mask learn from the next token
    Lora,
    /// All kept weights learn from the next token
    Full,
}

/// Kinds of trained parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TrainedKind {
    /// All kept weights
    Weights,
    /// Low-rank factors under the mask
    Factors,
}

impl RecoveryWay {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::Lora => "lora",
            Self::Full => "full",
        }
    }
}

impl TrainedKind {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Factors => "factors",
        }
    }
}

impl RecoverySettings {
    /// The defaults of a way.
    pub fn of(how: RecoveryWay) -> Self {
        super::defaults::with_flags::<Self>(&["--how", how.name()]).settled()
    }

    /// The same settings with the length of the way where no flag names one, and without a limit of 0 on the gradients' norm.
    #[must_use]
    pub fn settled(mut self) -> Self {
        if self.steps.is_none() && self.epochs.is_none() {
            match self.how {
                RecoveryWay::Blocks => self.epochs = Some(4),
                RecoveryWay::Lora | RecoveryWay::Full => self.steps = Some(200),
            }
        }
        self.max_grad_norm = self.max_grad_norm.filter(|limit| *limit > 0.0);
        self
    }

    /// The learning rate for a model of this width, with this share of zeros.
    pub fn rate(&self, hidden_size: usize, sparsity: f64) -> f64 {
        let width = hidden_size as f64;
        let target = self.closing.close_to.map(|target| target.0.ratio);
        let density = (1.0 - target.unwrap_or(sparsity)).max(LEAST_DENSITY);
        self.lr.unwrap_or(match (self.trains, self.how) {
            _ if target.is_some() => 0.2 / (width * density),
            (TrainedKind::Weights, RecoveryWay::Blocks) => 0.08 / (width * density.powi(2)),
            (TrainedKind::Weights, _) => 0.04 / (width * density.powi(2)),
            (TrainedKind::Factors, _) => 0.016 / (width.sqrt() * density),
        })
    }

    /// The names of the settings that this way of training does not read, with the reasons.
    pub fn unread(&self) -> Vec<(&'static str, String)> {
        let how = self.how.name();
        let mut unread = Vec::new();
        if self.trains == TrainedKind::Weights {
            let reason =
                format!("--how {how} trains all kept weights, and only factors have a rank");
            unread.extend(["rank", "alpha"].map(|name| (name, reason.clone())));
        }
        if find(&self.optim).is_some_and(|kind| kind.name != SGD) {
            unread
                .push(("momentum", format!("it is for --optim {SGD}, and this is {}", self.optim)));
        }
        if self.how == RecoveryWay::Blocks {
            let reason = "--how blocks trains layer by layer on samples".to_string();
            let names = ["held_out", "eval_every", "patience", "save_every", "per_document"];
            unread.extend(names.map(|name| (name, reason.clone())));
        }
        unread
    }

    /// Examples of a step.
    pub fn per_step(&self) -> usize {
        self.batch_size * self.accumulate
    }

    /// Steps of a training with so many examples; for blocks, of each layer.
    pub fn steps_of(&self, examples: usize) -> u64 {
        let per_step = self.per_step().max(1);
        let of_epochs = |epochs: u64| (epochs * examples as u64).div_ceil(per_step as u64);
        self.steps.or(self.epochs.map(of_epochs)).unwrap_or(1)
    }

    /// Steps of the warm-up of a training of so many steps.
    pub fn warmup_of(&self, steps: u64) -> u64 {
        let own = match self.how {
            RecoveryWay::Blocks => 0,
            RecoveryWay::Lora | RecoveryWay::Full => steps / 20,
        };
        self.warmup.unwrap_or(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_fall_with_the_width() {
        let full = RecoverySettings::of(RecoveryWay::Full);
        assert_eq!(full.rate(64, 0.5), 2.5e-3);
        assert_eq!(full.rate(64, 0.8), full.rate(64, 0.95));
        assert!((full.rate(4096, 0.5) - 3.90625e-5).abs() < 1e-12);
        for (target, rate) in [("0.8", 1.0 / 64.0), ("2:4", 0.4 / 64.0), ("0.9", 1.0 / 64.0)] {
            let closing = ClosingSettings { close_to: target.parse().ok(), ..Default::default() };
            let closes = RecoverySettings { closing, ..full.clone() };
            assert!((closes.rate(64, 0.3) - rate).abs() < 1e-12, "{target}");
        }
        assert_eq!(RecoverySettings::of(RecoveryWay::Blocks).rate(64, 0.5), 5e-3);
        let lora = RecoverySettings::of(RecoveryWay::Lora);
        assert_eq!(lora.rate(64, 0.5), 4e-3);
        assert_eq!(lora.rate(4096, 0.0), 2.5e-4);
        let asked = RecoverySettings { lr: Some(0.5), ..lora };
        assert_eq!(asked.rate(4096, 0.6), 0.5);
    }

    #[test]
    fn steps_come_from_epochs_where_no_number_is_given() {
        let blocks = RecoverySettings::of(RecoveryWay::Blocks);
        assert_eq!(blocks.steps_of(128), 64);
        // The last step takes examples of the next epoch.
        assert_eq!(blocks.steps_of(3), 2);
        assert_eq!(blocks.warmup_of(64), 0);
        let full = RecoverySettings::of(RecoveryWay::Full);
        assert_eq!((full.steps_of(7), full.warmup_of(200)), (200, 10));
    }
}
