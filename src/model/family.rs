//! The model families. Each family has a record, which holds everything that distinguishes it.
//!
//! [`identify`] finds the record of a `config.json`, and [`ModelConfig`](super::ModelConfig) keeps it. The configuration, the
//! layers on CPU and GPU, the memory formulas and the random checkpoints of tests read the record; none of them asks for a
//! family's name. A record can express only what the arithmetic of a layer computes. docs/dev/adding-a-family.md shows how to add a family.

use anyhow::Result;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::projection::Projection::{self, Down, Gate, K, O, Q, Up, V};
use crate::failure::Failure;

/// A model family.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// `architectures[0]` in `config.json`.
    pub architecture: &'static str,
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Published models of the family, for messages.
    pub models: &'static str,
    /// Linears of a decoder layer, in the order of the reference, each with the rule for its bias.
    pub linears: &'static [(Projection, Bias)],
    /// Names of the two RMS norms of a layer: before attention, and before the MLP.
    pub norms: [&'static str; 2],
    /// Activation of the MLP's gate.
    pub activation: Activation,
    /// Attention window of the layers.
    pub sliding_window: SlidingWindow,
    /// `num_key_value_heads` of a `config.json` without this key; `None` means as many as query heads.
    pub default_key_value_heads: Option<usize>,
    /// `max_position_embeddings` of a `config.json` without this key.
    pub default_positions: usize,
}

/// Rule for the bias of a linear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// No bias, whatever `config.json` says.
    Never,
    /// A bias if this key of `config.json` is true.
    IfSet(&'static str),
}

/// Activation of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + e⁻ˣ)
    Silu,
}

impl Activation {
    /// The value of `hidden_act` in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
        }
    }
}

/// Attention window of a family's layers, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlidingWindow {
    /// Every token sees all tokens before it. The key `sliding_window` is ignored, as transformers ignores it.
    Never,
    /// All layers have the window that the key `sliding_window` gives; null means none.
    AllLayers {
        /// The window of a `config.json` without this key.
        default: usize,
    },
}

impl Family {
    /// The names of the norms' tensors of a layer.
    pub fn norm_names(&self, layer: usize) -> [String; 2] {
        self.norms.map(|norm| format!("model.layers.{layer}.{norm}.weight"))
    }
}

impl Serialize for Family {
    /// Writes the model type, which names the record.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.model_type)
    }
}

/// All families that can be pruned.
pub static FAMILIES: [Family; 2] = [
    Family {
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        models: "Llama 1, 2, 3, 3.1, 3.2, TinyLlama, and others with Llama's decoder",
        linears: &[
            (Q, Bias::IfSet("attention_bias")),
            (K, Bias::IfSet("attention_bias")),
            (V, Bias::IfSet("attention_bias")),
            (O, Bias::IfSet("attention_bias")),
            (Gate, Bias::IfSet("mlp_bias")),
            (Up, Bias::IfSet("mlp_bias")),
            (Down, Bias::IfSet("mlp_bias")),
        ],
        norms: ["input_layernorm", "post_attention_layernorm"],
        activation: Activation::Silu,
        sliding_window: SlidingWindow::Never,
        default_key_value_heads: None,
        default_positions: 2048,
    },
    Family {
        architecture: "MistralForCausalLM",
        model_type: "mistral",
        models: "Mistral 7B, Mistral Nemo, Mistral Small 24B, and others with Mistral's decoder",
        linears: &[
            (Q, Bias::Never),
            (K, Bias::Never),
            (V, Bias::Never),
            (O, Bias::Never),
            (Gate, Bias::Never),
            (Up, Bias::Never),
            (Down, Bias::Never),
        ],
        norms: ["input_layernorm", "post_attention_layernorm"],
        activation: Activation::Silu,
        sliding_window: SlidingWindow::AllLayers { default: 4096 },
        default_key_value_heads: Some(8),
        default_positions: 131_072,
    },
];

/// Finds the family of a `config.json`.
///
/// # Errors
/// Fails for an architecture without a record, and names it. Fails for a file that names neither architecture nor model type.
pub fn identify(config: &Value) -> Result<&'static Family> {
    let model_type = config.get("model_type").and_then(Value::as_str);
    let architecture =
        config.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str);
    let is_known = |family: &&Family| {
        model_type.is_none_or(|name| name == family.model_type)
            && architecture.is_none_or(|name| name == family.architecture)
    };
    if (model_type.is_some() || architecture.is_some())
        && let Some(family) = FAMILIES.iter().find(is_known)
    {
        return Ok(family);
    }
    // An unknown architecture is the reason by itself. A known architecture is refused because its model type does not fit.
    let architecture_is_known = |name| FAMILIES.iter().any(|one| one.architecture == name);
    let refused = match (architecture, model_type) {
        (None, None) => {
            // A file without names is incomplete, which the caller's hint covers.
            return Err(Failure::new("neither `architectures` nor `model_type` is given").into());
        }
        (Some(name), None) | (None, Some(name)) => format!("`{name}`"),
        (Some(name), _) if !architecture_is_known(name) => format!("`{name}`"),
        (Some(name), Some(model_type)) => format!("`{name}` of model type `{model_type}`"),
    };
    let supported = FAMILIES.iter().map(|one| format!("{}: {}", one.architecture, one.models));
    let supported = supported.collect::<Vec<_>>().join("; ");
    // With the name of a supported family, the weights of an unsupported model would be computed, wrongly.
    Err(Failure::new(format!("the architecture {refused} is not supported"))
        .detail(format!("supported: {supported}"))
        .hint("choose a model of a supported family; a changed config.json does not make it one")
        .into())
}
