//! The record of a recovery training: settings as resolved, losses, held-out measurements. Part of `run.json`; schema: docs/dev/records.md.

use serde::{Deserialize, Serialize};

use super::measured::TextProtocol;

/// A recovery training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RecoveryReport {
    /// `blocks`, `lora` or `full`.
    pub how: String,
    /// The dense model's folder; absent without a teacher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<String>,
    /// `weights` or `factors`.
    pub trains: String,
    /// Rank of the factors; absent where weights are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Trained matrices of a layer, by their names in peft: `q_proj`.
    pub target_modules: Vec<String>,
    /// Trained parameters of the whole model.
    pub parameters: u64,
    /// The optimizer.
    pub optim: String,
    /// The largest learning rate.
    pub rate: f64,
    /// Steps that were asked for; for blocks, of each layer.
    pub steps_of: u64,
    /// The dtype of stored hidden states.
    pub states: String,
    /// The format of the frozen base: `nf4`, `nf4-double`; absent where it is as stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_quant: Option<String>,
    /// The text that was trained on.
    pub text: TextProtocol,
    /// The numbers of training examples and of held-out examples.
    pub examples: [usize; 2],
    /// The steps of a training of the whole model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepReport>,
    /// Measurements of the held-out examples.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held_out: Vec<HeldOutReport>,
    /// The step whose parameters were written; absent for blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_step: Option<u64>,
    /// Masks that closed; absent where they stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing: Option<ClosingReport>,
    /// The end of a training whose loss exploded, or was not finite. `steps` and `held_out` then end at the best state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub divergence: Option<Divergence>,
    /// Trained weights that were not zero before and are now.
    pub new_zeros: u64,
    /// The folder of the adapter; absent without an adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
}

/// Masks that closed during a training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClosingReport {
    /// The sparsity in the end, as asked for: `0.8`, `2:4`.
    pub to: String,
    /// The sparsity of each layer in the end; absent where all layers have the sparsity that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_ratios: Vec<f64>,
    /// The sparsity of the trained matrices before the first step.
    pub before: f64,
    /// The last step that removed weights. Held-out losses of earlier steps belong to lower sparsities.
    pub last_step: u64,
    /// The sparsity after each choice; for blocks, in every layer.
    pub choices: Vec<ChoiceReport>,
}

impl ClosingReport {
    /// The sparsity in the end: as asked for, or the mean of the layers' own.
    pub fn end(&self) -> String {
        match self.choices.last().filter(|_| !self.layer_ratios.is_empty()) {
            Some(last) => format!("{:.4}", last.sparsity),
            None => self.to.clone(),
        }
    }
}

/// The sparsity after a choice.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ChoiceReport {
    /// The step, from 1.
    pub step: u64,
    /// Zeros over all weights of the trained matrices.
    pub sparsity: f64,
}

/// The end of a training whose loss exploded after a good measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// The step in which it was noticed.
    pub step: u64,
    /// The learning rate of that step.
    pub rate: f64,
    /// The number and its name: `the loss is NaN`.
    pub what: String,
    /// The last step of the state that was kept.
    pub best_step: u64,
    /// The held-out loss of that state, in nat.
    pub best_loss: f64,
}

impl Divergence {
    /// Two lines: the failure, and the state that was kept.
    pub fn lines(&self) -> [String; 2] {
        let Self { step, rate, what, best_step, best_loss } = self;
        [
            format!(
                "the training diverged: {what} in step {step}, with a learning rate of {rate:e}"
            ),
            format!(
                "the model is that of step {best_step}, with a held-out loss of {best_loss:.4}"
            ),
        ]
    }

    /// A smaller rate to continue with.
    pub fn smaller_rate(&self) -> String {
        format!("{:.0e}", self.rate / 10.0)
    }
}

/// A step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss over the predicted tokens, in nat, before the update.
    pub loss: f64,
    /// The norm of the gradients before clipping.
    pub norm: f64,
    /// The learning rate.
    pub rate: f64,
    /// Predicted tokens.
    pub predicted: u64,
}

/// A measurement of the held-out examples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HeldOutReport {
    /// Steps before it.
    pub step: u64,
    /// Mean loss over the predicted tokens, in nat.
    pub loss: f64,
    /// exp(loss).
    pub perplexity: f64,
}

/// The losses of a layer that is trained alone: mean squared errors before the update of each step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlockLoss {
    /// In the first step.
    pub first: f64,
    /// In the last step.
    pub last: f64,
    /// In every step.
    pub losses: Vec<f64>,
}
