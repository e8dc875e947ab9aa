//! Settings of `prune recover`, and their defaults for each way.
//!
//! ```text
//! rate of kept weights   0.064 / hidden_size        1e-3 for 64, 1.6e-5 for 4096
//! the same in blocks     0.256 / hidden_size        4e-3 for 64, 6.3e-5 for 4096
//! rate of factors        0.016 / √hidden_size       2e-3 for 64, 2.5e-4 for 4096
//! ```
//!
//! The first two follow the scaling of Adam's rate with the width (Yang et al. 2022, arXiv:2203.03466). The third is near 1e-3 for a
//! width of 256, as in docs/recovery.md, and near QLoRA's 2e-4 for 7B (Dettmers et al. 2023, arXiv:2305.14314).

use std::path::PathBuf;

use serde::{Serialize, Serializer};

use crate::quantized::FourBitFormat;
use crate::recovery::optimizers::ScheduleShape;

/// The value of `--target-modules` for all linear layers of the decoder.
pub const ALL_LINEAR: &str = "all-linear";

/// The share of the teacher in the loss of the whole model.
pub const DISTILL_WEIGHT: f64 = 0.5;

/// Settings of a recovery training.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecoverySettings {
    /// `--how`.
    pub how: RecoveryWay,
    /// `--teacher`: the dense model; `None` without a teacher.
    pub teacher: Option<PathBuf>,
    /// `--distill-weight`: the share of the divergence from the teacher in the loss of the whole model; `None` for
    /// [`DISTILL_WEIGHT`].
    pub distill_weight: Option<f64>,
    /// `--train`.
    pub trains: TrainedKind,
    /// `--rank` of the factors.
    pub rank: usize,
    /// `--alpha` of the factors: their product is scaled by alpha / rank.
    pub alpha: f64,
    /// `--target-modules`: names of linear layers, or [`ALL_LINEAR`].
    pub target_modules: Vec<String>,
    /// `--train-norms`.
    pub train_norms: bool,
    /// `--optim`: a name of [`OPTIMIZERS`](crate::recovery::optimizers::OPTIMIZERS).
    pub optim: String,
    /// `--lr`; `None` for the rate that fits the width.
    pub lr: Option<f64>,
    /// `--schedule`.
    #[serde(serialize_with = "by_shape")]
    pub schedule: ScheduleShape,
    /// `--warmup` steps; `None` for a twentieth of the steps of a training of the whole model, and none for blocks.
    pub warmup: Option<u64>,
    /// `--weight-decay`.
    pub weight_decay: f64,
    /// `--momentum` of `sgd`.
    pub momentum: f64,
    /// `--steps`; `None` where epochs decide.
    pub steps: Option<u64>,
    /// `--epochs`; `None` where steps decide.
    pub epochs: Option<u64>,
    /// `--batch-size`: examples of a step before accumulation.
    pub batch_size: usize,
    /// `--accumulate`: a step has so many times more examples.
    pub accumulate: usize,
    /// `--keep-activations`: the last layers whose activations stay in memory until the backward pass.
    pub keep_activations: usize,
    /// `--max-grad-norm`; `None` for no limit.
    pub max_grad_norm: Option<f64>,
    /// `--base-quant`: the format of the frozen base; `None` for the stored format.
    #[serde(serialize_with = "by_format")]
    pub base_quant: Option<FourBitFormat>,
    /// `--per-document`: examples do not run over the ends of documents.
    pub per_document: bool,
    /// `--held-out`: examples that are not trained on.
    pub held_out: usize,
    /// `--eval-every` steps the held-out loss is measured; `None` for ten times in a training.
    pub eval_every: Option<u64>,
    /// `--patience`: the training ends after so many measurements without an improvement.
    pub patience: Option<u64>,
    /// `--save-adapter`.
    pub save_adapter: bool,
    /// `--save-every` steps the training is saved; `None` for about every ten minutes.
    pub save_every: Option<u64>,
    /// `--stochastic-rounding` of bf16 weights.
    pub stochastic_rounding: bool,
}

/// Ways of recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RecoveryWay {
    /// Each layer learns to reproduce the dense layer's output.
    Blocks,
    /// Low-rank factors under the mask learn from the next token.
    Lora,
    /// All kept weights learn from the next token.
    Full,
}

/// Kinds of trained parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainedKind {
    /// All kept weights.
    Weights,
    /// Low-rank factors.
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
        let is_whole = how != RecoveryWay::Blocks;
        Self {
            how,
            teacher: None,
            distill_weight: None,
            trains: match how {
                RecoveryWay::Lora => TrainedKind::Factors,
                RecoveryWay::Blocks | RecoveryWay::Full => TrainedKind::Weights,
            },
            rank: 16,
            alpha: 32.0,
            target_modules: vec![ALL_LINEAR.to_string()],
            train_norms: false,
            optim: "adamw".to_string(),
            lr: None,
            schedule: ScheduleShape::Cosine,
            warmup: None,
            weight_decay: 0.0,
            momentum: 0.0,
            steps: is_whole.then_some(200),
            epochs: (!is_whole).then_some(4),
            batch_size: if is_whole { 4 } else { 8 },
            accumulate: 1,
            keep_activations: 0,
            max_grad_norm: is_whole.then_some(0.3),
            base_quant: None,
            per_document: false,
            held_out: if is_whole { 8 } else { 0 },
            eval_every: None,
            patience: None,
            save_adapter: false,
            save_every: None,
            stochastic_rounding: false,
        }
    }

    /// The learning rate for a model of this width.
    pub fn rate(&self, hidden_size: usize) -> f64 {
        let width = hidden_size as f64;
        self.lr.unwrap_or(match (self.trains, self.how) {
            (TrainedKind::Weights, RecoveryWay::Blocks) => 0.256 / width,
            (TrainedKind::Weights, _) => 0.064 / width,
            (TrainedKind::Factors, _) => 0.016 / width.sqrt(),
        })
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

fn by_shape<S: Serializer>(shape: &ScheduleShape, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(shape.name())
}

fn by_format<S: Serializer>(format: &Option<FourBitFormat>, to: S) -> Result<S::Ok, S::Error> {
    format.map(FourBitFormat::name).serialize(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_fall_with_the_width() {
        let full = RecoverySettings::of(RecoveryWay::Full);
        assert_eq!(full.rate(64), 1e-3);
        assert!((full.rate(4096) - 1.5625e-5).abs() < 1e-12);
        assert_eq!(RecoverySettings::of(RecoveryWay::Blocks).rate(64), 4e-3);
        let lora = RecoverySettings::of(RecoveryWay::Lora);
        assert_eq!(lora.rate(64), 2e-3);
        assert_eq!(lora.rate(4096), 2.5e-4);
        let asked = RecoverySettings { lr: Some(0.5), ..lora };
        assert_eq!(asked.rate(4096), 0.5);
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
