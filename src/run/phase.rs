//! The phases of a run: the clock measures them, the plan predicts their memory, the profile adds up their times.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A phase, in the order of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Tokenizer and texts are loaded, texts become token ids.
    #[serde(alias = "tokenise")]
    Tokenize,
    /// Output files get their final size.
    Allocate,
    /// The files of an interrupted run are compared with its record.
    Check,
    /// Token ids become hidden states.
    Embed,
    /// The run waits for a layer's weights.
    Read,
    /// Samples pass the dense layer, and statistics are collected.
    Calibrate,
    /// Weights are scored, and the lowest scores are chosen.
    #[serde(rename = "score and mask")]
    Score,
    /// The outputs of a pruned matrix are compared with the outputs of the dense matrix.
    #[serde(rename = "output error")]
    OutputError,
    /// Samples pass the pruned layer.
    Propagate,
    /// Evaluation windows pass the dense layer.
    #[serde(rename = "evaluate dense")]
    EvaluateDense,
    /// Evaluation windows pass the pruned layer.
    #[serde(rename = "evaluate pruned", alias = "evaluate")]
    EvaluatePruned,
    /// Examples pass a layer in training.
    Forward,
    /// Gradients pass a layer.
    Backward,
    /// Parameters change, and become the weights of a layer.
    Update,
    /// The run waits for written weights.
    Write,
    /// Logits and losses of the evaluation windows.
    Head,
    /// Unchanged tensors are copied, and the files are read back.
    #[serde(rename = "save and verify")]
    SaveAndVerify,
    /// Tensors of several models become the tensors of a merged model.
    Merge,
    /// Matrices become codes of 4 bits.
    Quantize,
    /// Zeros of matrices are counted, and weights become a mask and the kept values.
    Pack,
    /// Packed matrices become dense.
    Unpack,
    /// A model writes text.
    Generate,
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(formatter)
    }
}

/// The title of a phase inside a layer: "layer 2 of 0-31: calibrate". Layers count from 0, as in the names of tensors.
///
/// # Arguments
/// * `layers`: decoder layers of the model
pub fn in_layer(layer: usize, layers: usize, phase: impl fmt::Display) -> String {
    format!("layer {layer} of 0-{}: {phase}", layers.saturating_sub(1))
}

/// A moment of a run at which its memory is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// The run begins.
    Start,
    /// The checkpoint is open, and the texts are tokens.
    ModelLoaded,
    /// The sweep begins.
    BeforePruning,
    /// All layers are pruned.
    AfterPruning,
    /// The head follows.
    BeforeEvaluation,
    /// Perplexities are known.
    AfterEvaluation,
    /// Unchanged tensors are copied next.
    BeforeSaving,
    /// The model is written.
    AfterSaving,
    /// The run ends.
    End,
    /// This layer is finished.
    Layer(usize),
    /// This step of a training is over.
    Step(u64),
    /// Samples have passed this layer, which an earlier process finished.
    PassedLayer(usize),
}

impl fmt::Display for Moment {
    /// Writes the key of the original's memory log, or the layer.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Start => "01_start",
            Self::ModelLoaded => "02_model_loaded",
            Self::BeforePruning => "03_before_pruning",
            Self::AfterPruning => "04_after_pruning",
            Self::BeforeEvaluation => "05_before_eval",
            Self::AfterEvaluation => "06_after_eval",
            Self::BeforeSaving => "07_before_save_model",
            Self::AfterSaving => "08_after_save_model",
            Self::End => "09_end",
            Self::Layer(index) => return write!(formatter, "layer_{index}"),
            Self::Step(number) => return write!(formatter, "step_{number}"),
            Self::PassedLayer(index) => return write!(formatter, "passed_{index}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_printed_as_run_json_spells_it() {
        let json = serde_json::to_string(&Phase::Score).unwrap();
        assert_eq!(json, "\"score and mask\"");
        assert_eq!(serde_json::from_str::<Phase>(&json).unwrap(), Phase::Score);
        assert_eq!(format!("{:<8}|", Phase::Head), "head    |");
    }
}
