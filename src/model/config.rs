//! `config.json` of a Llama: read, checked, and never written (the file itself is copied byte for byte).
//!
//! Key names are those of Hugging Face transformers' `ModelConfig`, both the 4.x spelling (`rope_theta`, `rope_scaling`)
//! and the 5.x one (`rope_parameters`).

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::family;
use crate::bytes::read_settings;
use crate::failure::Failure;
use crate::linalg::attention::Heads;

/// How rotary frequencies are stretched beyond the context a model was trained with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "rope_type")]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// How many times longer the context becomes.
        factor: f64,
    },
    /// NTK-aware: the base grows with the sequence once it is longer than the trained context.
    Dynamic {
        /// How many times longer the context becomes.
        factor: f64,
    },
    /// Llama 3.1's: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// How many times longer the context becomes.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context the model was trained with, in tokens.
        original_max_position_embeddings: usize,
    },
}

/// The numbers that fix a Llama's shape and arithmetic.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Elements per head; `hidden_size / num_attention_heads` unless given.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The context length, in tokens.
    pub max_position_embeddings: usize,
    /// ε of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Stretching of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Whether q, k, v and o have biases.
    pub attention_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
}

/// Sizes above this are nonsense in a config and would only lead to absurd allocations. Products of two of them, and of a byte count,
/// fit a u64 with room for the layers.
const LARGEST_SIZE: u64 = 1 << 24;
/// More decoder layers than this no model has; each takes a line in plans and reports.
const MOST_LAYERS: u64 = 1 << 12;
/// Numbers that stretch rotary frequencies are computed with as f32, and are nowhere near this.
const LARGEST_ROPE: f64 = 1e12;

/// What to do about a config that was damaged or edited.
const TAKE_ANOTHER: &str =
    "take the config.json this checkpoint was published with, or correct the value";

impl ModelConfig {
    /// Reads `config.json` in a model folder.
    ///
    /// # Errors
    /// Fails when the file is missing, larger than any config or not JSON, for any architecture or option we do not compute, and for
    /// values out of range; each error names the key.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = read_settings(&path).map_err(|error| {
            Failure::new(format!("cannot read `{}`: {error}", path.display()))
                .hint("--model wants a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json")
        })?;
        let json: Value = serde_json::from_str(&text).map_err(|error| {
            Failure::new(format!("`{}` is not JSON: {error}", path.display())).hint(TAKE_ANOTHER)
        })?;
        Self::from_json(&json)
            .map_err(|error| match error.downcast::<Failure>() {
                Ok(failure) if failure.hint.is_none() => failure.hint(TAKE_ANOTHER).into(),
                Ok(failure) => failure.into(),
                Err(error) => error,
            })
            .with_context(|| format!("in `{}`", path.display()))
    }

    /// Checks a parsed `config.json`; see [`ModelConfig::load`].
    pub fn from_json(json: &Value) -> Result<Self> {
        family::identify(json)?;
        let keys = Keys(json);
        if let Some(quantization) = json
            .get("quantization_config")
            .filter(|value| !value.is_null())
        {
            let method = quantization
                .get("quant_method")
                .and_then(Value::as_str)
                .unwrap_or("an unnamed method");
            return Err(
                Failure::new(format!("the checkpoint is quantised ({method})"))
                    .hint("prune the unquantised checkpoint and quantise the result")
                    .into(),
            );
        }
        if let Some(activation) = keys.given("hidden_act")
            && activation != "silu"
        {
            return Err(Failure::new(format!(
                "`hidden_act` is {activation}; a Llama's MLP uses \"silu\""
            ))
            .into());
        }
        let hidden_size = keys.size("hidden_size", None)?;
        let num_attention_heads = keys.size("num_attention_heads", None)?;
        let num_key_value_heads = keys.size("num_key_value_heads", Some(num_attention_heads))?;
        if num_attention_heads % num_key_value_heads != 0 {
            return Err(Failure::new(format!(
                "`num_attention_heads` {num_attention_heads} is not a multiple of `num_key_value_heads` {num_key_value_heads}"
            ))
            .into());
        }
        let head_dim = match json.get("head_dim") {
            None | Some(Value::Null) => {
                if hidden_size % num_attention_heads != 0 {
                    return Err(Failure::new(format!(
                        "`hidden_size` {hidden_size} is not a multiple of `num_attention_heads` {num_attention_heads}, and there is no `head_dim`"
                    ))
                    .into());
                }
                hidden_size / num_attention_heads
            }
            Some(_) => keys.size("head_dim", None)?,
        };
        if head_dim % 2 != 0 {
            return Err(Failure::new(format!(
                "`head_dim` {head_dim} is odd; rotary positions need pairs"
            ))
            .into());
        }
        if num_attention_heads as u64 * head_dim as u64 > LARGEST_SIZE {
            return Err(Failure::new(format!(
                "`num_attention_heads` {num_attention_heads} times `head_dim` {head_dim} is more than {LARGEST_SIZE}"
            ))
            .into());
        }
        let (rope_theta, rope_scaling) = rope(json)?;
        let rms_norm_eps = keys.number("rms_norm_eps", Some(1e-6), |eps| {
            // As f32, which the norms are computed in.
            (f32::MIN_POSITIVE.into()..1.0).contains(&eps)
        });
        let rms_norm_eps = rms_norm_eps.map_err(|value| {
            Failure::new(format!(
                "`rms_norm_eps` is {value}; it must lie between 0 and 1"
            ))
        })?;
        Ok(Self {
            hidden_size,
            intermediate_size: keys.size("intermediate_size", None)?,
            num_hidden_layers: keys.size_up_to(MOST_LAYERS, "num_hidden_layers", None)?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: keys.size("vocab_size", None)?,
            max_position_embeddings: keys.size("max_position_embeddings", Some(2048))?,
            rms_norm_eps,
            rope_theta,
            rope_scaling,
            attention_bias: keys.flag("attention_bias")?,
            mlp_bias: keys.flag("mlp_bias")?,
            tie_word_embeddings: keys.flag("tie_word_embeddings")?,
        })
    }

    /// The longest sequence there is: `max_position_embeddings`, except where rotary frequencies are stretched with the sequence.
    pub fn longest_sequence(&self) -> usize {
        match self.rope_scaling {
            RopeScaling::Dynamic { .. } => LARGEST_SIZE as usize,
            _ => self.max_position_embeddings,
        }
    }

    /// Head counts and width, as attention wants them.
    pub fn heads(&self) -> Heads {
        Heads {
            num_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
        }
    }
}

struct Keys<'a>(&'a Value);

impl Keys<'_> {
    /// The value of a key that is there and not null.
    fn given(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        self.size_up_to(LARGEST_SIZE, key, default)
    }

    fn size_up_to(&self, largest: u64, key: &str, default: Option<usize>) -> Result<usize> {
        let value = match (self.given(key), default) {
            (None, Some(default)) => return Ok(default),
            (None, None) => return Err(Failure::new(format!("`{key}` is missing")).into()),
            (Some(value), _) => value,
        };
        match value.as_u64() {
            Some(size) if (1..=largest).contains(&size) => Ok(size as usize),
            _ => Err(Failure::new(format!(
                "`{key}` is {value}; it must be a whole number from 1 to {largest}"
            ))
            .into()),
        }
    }

    /// A number within bounds; as an error what stands there instead.
    fn number(
        &self,
        key: &str,
        default: Option<f64>,
        is_within: impl Fn(f64) -> bool,
    ) -> Result<f64, &Value> {
        let Some(value) = self.given(key) else {
            return default.ok_or(&Value::Null);
        };
        value
            .as_f64()
            .filter(|&number| is_within(number))
            .ok_or(value)
    }

    fn flag(&self, key: &str) -> Result<bool> {
        match self.given(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => {
                Err(Failure::new(format!("`{key}` is {value}; it must be true or false")).into())
            }
        }
    }
}

/// Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).
fn rope(json: &Value) -> Result<(f64, RopeScaling)> {
    let keys = Keys(json);
    let (place, parameters) = match keys.given("rope_parameters") {
        Some(parameters) => ("rope_parameters", Some(parameters)),
        None => ("rope_scaling", keys.given("rope_scaling")),
    };
    if let Some(parameters) = parameters.filter(|parameters| !parameters.is_object()) {
        return Err(Failure::new(format!(
            "`{place}` is {parameters}; it must be an object, or null"
        ))
        .into());
    }
    let of_theta = match parameters.map(Keys) {
        Some(inner) if inner.given("rope_theta").is_some() => inner,
        _ => Keys(json),
    };
    let theta = of_theta
        .number("rope_theta", Some(10_000.0), |theta| {
            theta > 1.0 && theta <= LARGEST_ROPE
        })
        .map_err(|value| {
            Failure::new(format!(
                "`rope_theta` is {value}; it must be a number above 1, and up to {LARGEST_ROPE:e}"
            ))
        })?;
    let Some(parameters) = parameters else {
        return Ok((theta, RopeScaling::Default));
    };
    let inner = Keys(parameters);
    let number = |key: &str, least: f64| {
        inner
            .number(key, None, |value| (least..=LARGEST_ROPE).contains(&value))
            .map_err(|value| {
                Failure::new(format!(
                    "`{place}.{key}` is {value}; it must be a number from {least} to {LARGEST_ROPE:e}"
                ))
            })
    };
    // Below 1 it would shrink the context, and transformers calls it invalid.
    let factor = || number("factor", 1.0);
    let kind = match inner.given("rope_type").or_else(|| inner.given("type")) {
        None => "default",
        Some(Value::String(kind)) => kind,
        Some(other) => {
            return Err(Failure::new(format!(
                "the type of `{place}` is {other}; it must be a name"
            ))
            .into());
        }
    };
    let scaling = match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: factor()? },
        "dynamic" => RopeScaling::Dynamic { factor: factor()? },
        "llama3" => {
            // As small as a ratio of wavelengths can sensibly be.
            let of_frequency = |key| number(key, 1e-6);
            let (low, high) = (
                of_frequency("low_freq_factor")?,
                of_frequency("high_freq_factor")?,
            );
            // As f32: they are divided by their difference.
            if low as f32 >= high as f32 {
                return Err(Failure::new(format!(
                    "`{place}`: low_freq_factor {low} must be smaller than high_freq_factor {high}"
                ))
                .into());
            }
            RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: inner
                    .size("original_max_position_embeddings", None)?,
            }
        }
        other => {
            return Err(
                Failure::new(format!("rotary scaling `{other}` is not supported"))
                    .detail("supported: default, linear, dynamic, llama3")
                    .into(),
            );
        }
    };
    Ok((theta, scaling))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tiny() -> Value {
        json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
            "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 512})
    }

    fn with(key: &str, value: Value) -> Value {
        let mut config = tiny();
        config[key] = value;
        config
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let config = ModelConfig::from_json(&tiny()).unwrap();
        assert_eq!(
            (
                config.num_key_value_heads,
                config.head_dim,
                config.max_position_embeddings
            ),
            (8, 8, 2048)
        );
        assert_eq!(
            (config.rope_theta, config.rope_scaling),
            (10_000.0, RopeScaling::Default)
        );
        assert!(!config.tie_word_embeddings && !config.attention_bias && !config.mlp_bias);
    }

    #[test]
    fn rotary_scaling_is_read_under_the_old_and_the_new_key() {
        let llama3 = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
        let old = ModelConfig::from_json(&with("rope_scaling", llama3.clone())).unwrap();
        let mut new = llama3;
        new["rope_theta"] = json!(500_000.0);
        let new = ModelConfig::from_json(&with("rope_parameters", new)).unwrap();
        assert_eq!(old.rope_scaling, new.rope_scaling);
        assert_eq!(new.rope_theta, 500_000.0);
        let linear = ModelConfig::from_json(&with(
            "rope_scaling",
            json!({"type": "linear", "factor": 2.0}),
        ))
        .unwrap();
        assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        let refusals = [
            (
                with("architectures", json!(["MistralForCausalLM"])),
                "the architecture `MistralForCausalLM` is not supported",
            ),
            (with("model_type", json!("qwen2")), "is not supported"),
            (
                with("rope_scaling", json!({"rope_type": "yarn", "factor": 2.0})),
                "rotary scaling `yarn` is not supported",
            ),
            (
                with("rope_scaling", json!({"rope_type": "linear"})),
                "`rope_scaling.factor` is null; it must be a number from 1 to 1e12",
            ),
            (
                with("quantization_config", json!({"quant_method": "gptq"})),
                "the checkpoint is quantised (gptq)",
            ),
            (
                with("hidden_act", json!("gelu")),
                "`hidden_act` is \"gelu\"",
            ),
            (with("hidden_act", json!(5)), "`hidden_act` is 5"),
            (with("hidden_size", json!(0)), "`hidden_size` is 0"),
            (with("hidden_size", json!(-5)), "`hidden_size` is -5"),
            (with("vocab_size", json!(1u64 << 60)), "`vocab_size` is"),
            (
                with("num_key_value_heads", json!(3)),
                "is not a multiple of `num_key_value_heads` 3",
            ),
            (with("head_dim", json!(7)), "`head_dim` 7 is odd"),
            (with("hidden_size", json!(60)), "there is no `head_dim`"),
            (
                with("num_hidden_layers", json!(1_000_000_000)),
                "from 1 to 4096",
            ),
            (
                with("head_dim", json!(1 << 22)),
                "times `head_dim` 4194304 is more than",
            ),
            (with("rms_norm_eps", json!(0.0)), "`rms_norm_eps` is 0"),
            (
                with("rms_norm_eps", json!(1e-300)),
                "`rms_norm_eps` is 1e-300",
            ),
            (with("rms_norm_eps", json!("x")), "`rms_norm_eps` is \"x\""),
            (
                with("attention_bias", json!("no")),
                "`attention_bias` is \"no\"",
            ),
            (with("rope_theta", json!(1e300)), "`rope_theta` is 1e+300"),
            (with("rope_scaling", json!(2.0)), "`rope_scaling` is 2.0"),
            (
                with("rope_scaling", json!({"type": 7})),
                "is 7; it must be a name",
            ),
            (
                with("rope_scaling", json!({"type": "dynamic", "factor": 1e-300})),
                "`rope_scaling.factor` is 1e-300",
            ),
            (
                with(
                    "rope_scaling",
                    json!({"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1.0 + 1e-12,
                    "original_max_position_embeddings": 8192}),
                ),
                "must be smaller than high_freq_factor",
            ),
            (
                with(
                    "rope_scaling",
                    json!({"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                    "original_max_position_embeddings": 1e300}),
                ),
                "`original_max_position_embeddings` is 1e+300",
            ),
            (with("rope_theta", json!("x")), "`rope_theta` is \"x\""),
        ];
        for (config, message) in refusals {
            let error = ModelConfig::from_json(&config).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
