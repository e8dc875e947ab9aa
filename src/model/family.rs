//! The model families. Each family has a record, which holds everything that distinguishes it.
//!
//! [`identify`] finds the record of a `config.json`, and [`ModelConfig`](super::ModelConfig) keeps it. The configuration, the
//! layers on CPU and GPU, the memory formulas and the random checkpoints of tests read the record; none of them asks for a
//! family's name. docs/dev/adding-a-family.md shows how to add a family. The defaults of keys are the defaults of transformers 5.24.

use anyhow::Result;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::linears::LinearId;
use super::norms::NormRole;
use crate::failure::Failure;

/// A model family.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// Names of the family in `architectures[0]` of `config.json`; the first is the usual name.
    pub architectures: &'static [&'static str],
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Published models of the family, for messages.
    pub models: &'static str,
    /// Linears of a decoder layer, in the order of the reference, each with the rule for its bias.
    pub linears: &'static [(LinearId, Bias)],
    /// RMS norms of a layer, each with its name inside the layer.
    pub norms: &'static [(NormRole, &'static str)],
    /// Norms multiply by 1 + w instead of w. The last norm of the model does, too.
    pub norms_add_one: bool,
    /// Norms of queries and keys go over all heads at once, not over each head.
    pub head_norms_are_wide: bool,
    /// Activation of the MLP's gate.
    pub activation: ActivationKey,
    /// Layers with an attention window.
    pub windows: Windows,
    /// Rotary positions of the layers.
    pub rotation: Rotation,
    /// Scaling types of rotary frequencies.
    pub rope_types: &'static [&'static str],
    /// Scale of attention's scores.
    pub scale: ScoreScale,
    /// Bounds of scores and logits; `None` if the family has no such keys.
    pub soft_caps: Option<SoftCaps>,
    /// Embeddings are multiplied by √hidden_size.
    pub scales_embedding: bool,
    /// Values of keys that a `config.json` may leave out.
    pub defaults: Defaults,
    /// Sizes that the settings of a text model inside another model may leave out.
    pub sizes: DefaultSizes,
}

/// Rule for the bias of a linear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// No bias, whatever `config.json` says.
    Never,
    /// A bias, whatever `config.json` says.
    Always,
    /// A bias if this key of `config.json` is true.
    IfSet(&'static str),
}

/// Activation of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// x / (1 + e⁻ˣ)
    Silu,
    /// x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))
    GeluTanh,
}

impl Activation {
    /// The names in `config.json`; the first is the usual name.
    pub const NAMES: [(Self, &'static [&'static str]); 2] =
        [(Self::Silu, &["silu", "swish"]), (Self::GeluTanh, &["gelu_pytorch_tanh", "gelu_new"])];
}

/// The key of the activation, and the activation of a `config.json` without this key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationKey {
    /// The key.
    pub key: &'static str,
    /// The usual name of the activation.
    pub default: &'static str,
}

/// Layers of a family that have an attention window, and where its size comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// No layer has a window. The key `sliding_window` is ignored, as transformers ignores it.
    Never,
    /// All layers have the window that the key `sliding_window` gives; null means none.
    AllLayers {
        /// The window of a `config.json` without this key.
        default: Option<usize>,
    },
    /// With `use_sliding_window`, the layers from `max_window_layers` on, or the layers that `layer_types` names.
    LastLayers {
        /// The window of a `config.json` without the key `sliding_window`.
        default: usize,
        /// `max_window_layers` of a `config.json` without this key.
        first: usize,
    },
    /// All layers but every n-th, or the layers that `layer_types` names.
    AllButEvery {
        /// The window of a `config.json` without the key `sliding_window`.
        default: usize,
        /// n of a `config.json` without the key `sliding_window_pattern`.
        period: usize,
        /// The family reads the key `sliding_window_pattern`.
        has_key: bool,
    },
    /// With `use_sliding_window`, the layers without rotation, or the layers that `layer_types` names.
    Unrotated,
}

/// Rotary positions of a family's layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rotation {
    /// The same for all layers, over all of a head.
    Whole,
    /// The same for all layers, over the first `partial_rotary_factor` of a head.
    Partial,
    /// Layers with a window have a base of their own without scaling, `rope_local_base_freq`.
    Local {
        /// The base of a `config.json` without this key.
        base: f64,
    },
    /// Layers where `no_rope_layers` has 0 are not rotated; without the list, every n-th layer.
    NotEvery {
        /// n of a `config.json` without the key `no_rope_layer_interval`.
        period: usize,
    },
}

/// The scale of attention's scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScoreScale {
    /// 1 / √head_dim
    HeadDim,
    /// 1 / √`query_pre_attn_scalar`
    QueryScalar {
        /// The value of a `config.json` without this key.
        default: f64,
    },
}

/// Bounds c of values x, as c·tanh(x/c), of a `config.json` without their keys; `None` for no bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftCaps {
    /// `attn_logit_softcapping`: of attention's scores.
    pub attention: Option<f64>,
    /// `final_logit_softcapping`: of the logits.
    pub logits: Option<f64>,
}

/// Values of keys that a `config.json` may leave out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    /// `num_key_value_heads`; `None` means as many as query heads.
    pub key_value_heads: Option<usize>,
    /// `head_dim`; `None` means hidden_size / heads.
    pub head_dim: Option<usize>,
    /// `max_position_embeddings`.
    pub positions: usize,
    /// `rms_norm_eps`.
    pub rms_norm_eps: f64,
    /// `rope_theta`.
    pub rope_theta: f64,
    /// `tie_word_embeddings`.
    pub is_tied: bool,
}

/// The default sizes of a family in transformers. Its version 4 leaves default values out of `text_config`; only there do they count.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DefaultSizes {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
}

impl Family {
    /// The names of the norms' tensors of a layer.
    pub fn norm_names(&self, layer: usize) -> impl Iterator<Item = (NormRole, String)> {
        let names = self.norms.iter();
        names.map(move |(role, name)| (*role, format!("model.layers.{layer}.{name}.weight")))
    }
}

impl Serialize for Family {
    /// Writes the model type, which names the record.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.model_type)
    }
}

/// The seven matrices of most families, with a rule for the biases of q, k and v, of o, and of the MLP.
const fn separate(qkv: Bias, o: Bias, mlp: Bias) -> [(LinearId, Bias); 7] {
    [
        (LinearId::Q, qkv),
        (LinearId::K, qkv),
        (LinearId::V, qkv),
        (LinearId::O, o),
        (LinearId::GATE, mlp),
        (LinearId::UP, mlp),
        (LinearId::DOWN, mlp),
    ]
}

const IF_ATTENTION: Bias = Bias::IfSet("attention_bias");
const IF_MLP: Bias = Bias::IfSet("mlp_bias");

/// The norms before attention and MLP.
const BEFORE: (NormRole, &str) = (NormRole::BeforeAttention, "input_layernorm");
const BEFORE_MLP: (NormRole, &str) = (NormRole::BeforeMlp, "post_attention_layernorm");
/// The norms of queries and keys.
const QUERY: (NormRole, &str) = (NormRole::Query, "self_attn.q_norm");
const KEY: (NormRole, &str) = (NormRole::Key, "self_attn.k_norm");
/// The norms after attention and after the MLP, of families whose MLP has a norm of its own before it.
const AFTER: (NormRole, &str) = (NormRole::AfterAttention, "post_attention_layernorm");
const BEFORE_FEEDFORWARD: (NormRole, &str) = (NormRole::BeforeMlp, "pre_feedforward_layernorm");
const AFTER_FEEDFORWARD: (NormRole, &str) = (NormRole::AfterMlp, "post_feedforward_layernorm");

const LLAMA: Family = Family {
    architectures: &["LlamaForCausalLM", "LLaMAForCausalLM"],
    model_type: "llama",
    models: "Llama 1, 2, 3, 3.1, 3.2, TinyLlama, and others with Llama's decoder",
    linears: &separate(IF_ATTENTION, IF_ATTENTION, IF_MLP),
    norms: &[BEFORE, BEFORE_MLP],
    norms_add_one: false,
    head_norms_are_wide: false,
    activation: ActivationKey { key: "hidden_act", default: "silu" },
    windows: Windows::Never,
    rotation: Rotation::Whole,
    rope_types: &["default", "linear", "dynamic", "llama3", "yarn", "longrope"],
    scale: ScoreScale::HeadDim,
    soft_caps: None,
    scales_embedding: false,
    defaults: Defaults {
        key_value_heads: None,
        head_dim: None,
        positions: 2048,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        is_tied: false,
    },
    sizes: DefaultSizes {
        hidden_size: 4096,
        intermediate_size: 11_008,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        vocab_size: 32_000,
    },
};

const MISTRAL: Family = Family {
    architectures: &["MistralForCausalLM"],
    model_type: "mistral",
    models: "Mistral 7B, Mistral Nemo, Mistral Small 24B, and others with Mistral's decoder",
    linears: &separate(Bias::Never, Bias::Never, Bias::Never),
    windows: Windows::AllLayers { default: Some(4096) },
    defaults: Defaults { key_value_heads: Some(8), positions: 131_072, ..LLAMA.defaults },
    sizes: DefaultSizes { intermediate_size: 14_336, ..LLAMA.sizes },
    ..LLAMA
};

const QWEN2: Family = Family {
    architectures: &["Qwen2ForCausalLM"],
    model_type: "qwen2",
    models: "Qwen 1.5, 2, 2.5 and QwQ 32B",
    linears: &separate(Bias::Always, Bias::Never, Bias::Never),
    windows: Windows::LastLayers { default: 4096, first: 28 },
    defaults: Defaults { key_value_heads: Some(32), positions: 32_768, ..LLAMA.defaults },
    sizes: DefaultSizes { intermediate_size: 22_016, vocab_size: 151_936, ..LLAMA.sizes },
    ..LLAMA
};

const QWEN3: Family = Family {
    architectures: &["Qwen3ForCausalLM"],
    model_type: "qwen3",
    models: "Qwen 3 from 0.6B to 32B",
    linears: &separate(IF_ATTENTION, IF_ATTENTION, Bias::Never),
    norms: &[BEFORE, QUERY, KEY, BEFORE_MLP],
    defaults: Defaults { head_dim: Some(128), ..QWEN2.defaults },
    ..QWEN2
};

const GEMMA2: Family = Family {
    architectures: &["Gemma2ForCausalLM"],
    model_type: "gemma2",
    models: "Gemma 2 2B, 9B and 27B",
    linears: &separate(IF_ATTENTION, IF_ATTENTION, Bias::Never),
    norms: &[BEFORE, AFTER, BEFORE_FEEDFORWARD, AFTER_FEEDFORWARD],
    norms_add_one: true,
    activation: ActivationKey { key: "hidden_activation", default: "gelu_pytorch_tanh" },
    windows: Windows::AllButEvery { default: 4096, period: 2, has_key: false },
    scale: ScoreScale::QueryScalar { default: 256.0 },
    soft_caps: Some(SoftCaps { attention: Some(50.0), logits: Some(30.0) }),
    scales_embedding: true,
    defaults: Defaults {
        key_value_heads: Some(4),
        head_dim: Some(256),
        positions: 8192,
        is_tied: true,
        ..LLAMA.defaults
    },
    sizes: DefaultSizes {
        hidden_size: 2304,
        intermediate_size: 9216,
        num_hidden_layers: 26,
        num_attention_heads: 8,
        vocab_size: 256_000,
    },
    ..LLAMA
};

const GEMMA3: Family = Family {
    architectures: &["Gemma3ForCausalLM"],
    model_type: "gemma3_text",
    models: "Gemma 3 270M and 1B, and the text part of 4B, 12B and 27B",
    norms: &[BEFORE, QUERY, KEY, AFTER, BEFORE_FEEDFORWARD, AFTER_FEEDFORWARD],
    windows: Windows::AllButEvery { default: 4096, period: 6, has_key: true },
    rotation: Rotation::Local { base: 10_000.0 },
    soft_caps: Some(SoftCaps { attention: None, logits: None }),
    defaults: Defaults { positions: 131_072, rope_theta: 1_000_000.0, ..GEMMA2.defaults },
    sizes: DefaultSizes { vocab_size: 262_208, ..GEMMA2.sizes },
    ..GEMMA2
};

const PHI3: Family = Family {
    architectures: &["Phi3ForCausalLM"],
    model_type: "phi3",
    models: "Phi-3 mini and medium, Phi-3.5 mini, Phi-4 and Phi-4 mini",
    linears: &[
        (LinearId::QKV, Bias::Never),
        (LinearId::O, Bias::Never),
        (LinearId::GATE_UP, Bias::Never),
        (LinearId::DOWN, Bias::Never),
    ],
    windows: Windows::AllLayers { default: None },
    rotation: Rotation::Partial,
    rope_types: &["default", "longrope"],
    defaults: Defaults { positions: 4096, rms_norm_eps: 1e-5, ..LLAMA.defaults },
    sizes: DefaultSizes {
        hidden_size: 3072,
        intermediate_size: 8192,
        vocab_size: 32_064,
        ..LLAMA.sizes
    },
    ..LLAMA
};

const OLMO2: Family = Family {
    architectures: &["Olmo2ForCausalLM"],
    model_type: "olmo2",
    models: "OLMo 2 1B, 7B, 13B and 32B",
    linears: &separate(IF_ATTENTION, IF_ATTENTION, Bias::Never),
    norms: &[QUERY, KEY, AFTER, AFTER_FEEDFORWARD],
    head_norms_are_wide: true,
    defaults: Defaults { rms_norm_eps: 1e-5, ..LLAMA.defaults },
    sizes: DefaultSizes { vocab_size: 50_304, ..LLAMA.sizes },
    ..LLAMA
};

const SMOLLM3: Family = Family {
    architectures: &["SmolLM3ForCausalLM"],
    model_type: "smollm3",
    models: "SmolLM 3 3B",
    windows: Windows::Unrotated,
    rotation: Rotation::NotEvery { period: 4 },
    defaults: Defaults {
        key_value_heads: Some(4),
        positions: 32_768,
        rope_theta: 2_000_000.0,
        is_tied: true,
        ..LLAMA.defaults
    },
    sizes: DefaultSizes {
        hidden_size: 2048,
        num_hidden_layers: 36,
        num_attention_heads: 16,
        vocab_size: 128_256,
        ..LLAMA.sizes
    },
    ..LLAMA
};

/// All families that can be pruned.
pub static FAMILIES: [Family; 9] =
    [LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, SMOLLM3];

const EXPERTS: &str = "its layers have a mixture of experts, which is not computed";
const DELTA_NETS: &str = "some of its layers are gated delta nets, which are not computed";

/// Families that users bring and that have no record, by `model_type`, and the reason.
const NOT_YET: [(&str, &str); 20] = [
    ("mixtral", EXPERTS),
    ("qwen2_moe", EXPERTS),
    ("qwen3_moe", EXPERTS),
    ("qwen3_vl_moe_text", EXPERTS),
    ("phimoe", EXPERTS),
    ("olmoe", EXPERTS),
    ("gpt_oss", EXPERTS),
    ("glm4_moe", EXPERTS),
    ("llama4_text", EXPERTS),
    ("deepseek_v2", EXPERTS),
    ("deepseek_v3", EXPERTS),
    ("deepseek_v32", EXPERTS),
    ("qwen3_next", DELTA_NETS),
    ("qwen3_5", DELTA_NETS),
    ("qwen3_5_text", DELTA_NETS),
    ("qwen3_5_moe", DELTA_NETS),
    ("qwen3_5_moe_text", DELTA_NETS),
    (
        "gemma3n_text",
        "its layers have per-layer embeddings and shared keys, which are not computed",
    ),
    ("gemma4", "its full layers have heads of another width, which is not computed"),
    ("gemma4_text", "its full layers have heads of another width, which is not computed"),
];

/// Finds the family of a `config.json`; of a model of several media, the family of its text model.
///
/// # Errors
/// Fails for an architecture without a record, and names it. Fails for a file that names neither architecture nor model type.
pub fn identify(config: &Value) -> Result<&'static Family> {
    let text = config.get("text_config").filter(|text| text.is_object());
    let model_type = text.unwrap_or(config).get("model_type").and_then(Value::as_str);
    // The architecture of a model of several media says nothing of its text model.
    let architectures = if text.is_some() { None } else { config.get("architectures") };
    // An older file may have a name in place of the list.
    let first = architectures.map(|names| names.get(0).unwrap_or(names));
    let architecture = first.and_then(Value::as_str);
    let is_known = |family: &&Family| {
        model_type.is_none_or(|name| name == family.model_type)
            && architecture.is_none_or(|name| family.architectures.contains(&name))
    };
    if (model_type.is_some() || architecture.is_some())
        && let Some(family) = FAMILIES.iter().find(is_known)
    {
        return Ok(family);
    }
    if text.is_some() && model_type.is_none() {
        return Err(
            Failure::new("`text_config` has no `model_type`, which names its family").into()
        );
    }
    if let Some((_, why)) = NOT_YET.iter().find(|(name, _)| model_type == Some(name)) {
        let name = architecture.or(model_type).unwrap_or_default();
        return Err(Failure::new(format!("the architecture `{name}` is not supported yet"))
            .detail(*why)
            .hint("choose a dense model of a supported family: docs/families.md")
            .into());
    }
    // An unknown architecture is the reason by itself. A known architecture is refused because its model type does not fit.
    let architecture_is_known = |name| FAMILIES.iter().any(|one| one.architectures.contains(&name));
    let refused = match (architecture, model_type) {
        (None, None) => {
            // A file without names is incomplete, which the caller's hint covers.
            return Err(Failure::new("neither `architectures` nor `model_type` is given").into());
        }
        (Some(name), None) | (None, Some(name)) => format!("`{name}`"),
        (Some(name), _) if !architecture_is_known(name) => format!("`{name}`"),
        (Some(name), Some(model_type)) => format!("`{name}` of model type `{model_type}`"),
    };
    let supported = FAMILIES.iter().map(|one| one.architectures[0]);
    let supported = supported.collect::<Vec<_>>().join(", ");
    // With the name of a supported family, the weights of an unsupported model would be computed, wrongly.
    Err(Failure::new(format!("the architecture {refused} is not supported"))
        .detail(format!("supported: {supported}"))
        .hint("choose a model of a supported family (docs/families.md); a changed config.json does not make it one")
        .into())
}
