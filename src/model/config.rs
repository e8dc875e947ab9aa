//! `config.json` of a model: read and checked, never written. An output has a byte-for-byte copy of the file, unless it is a smaller
//! model (`smaller`).
//!
//! Key names follow Hugging Face transformers, in both spellings: 4.x (`rope_theta`, `rope_scaling`) and 5.x
//! (`rope_parameters`). A key that the family's record decides (`family`) is read as the record says.

mod keys;
mod layers;
mod pairs;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::family::{self, Activation, ActivationKey, Bias, Family, ScoreScale, SoftCaps};
use super::linears::LinearId;
use crate::failure::Failure;
use crate::input::{cannot_read, read_settings};
use crate::linalg::attention::{Heads, Scoring};
use keys::{ANOTHER_MODEL, Keys, LARGEST_SIZE};
pub use keys::{completed_settings, text_settings, text_settings_mut};
pub use layers::{LayerKind, layer_kinds, layer_lists};
pub use pairs::disagreements;
pub use rope::{Rope, RopeScaling};

/// The numbers that fix a model's shape and arithmetic.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// The family's record.
    pub family: &'static Family,
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
    /// Activation of the MLP's gate.
    pub activation: Activation,
    /// Factor of attention's scores.
    pub score_scale: f32,
    /// Bound of attention's scores.
    pub score_cap: Option<f32>,
    /// Bound of the logits.
    pub logit_cap: Option<f32>,
    /// Factor of the embeddings.
    pub embedding_scale: Option<f32>,
    /// Rotary tables, which layers choose from.
    pub ropes: Vec<Rope>,
    /// The facts in which decoder layers may differ, by layer.
    pub layers: Vec<LayerKind>,
    /// Linears with a bias.
    pub biases: Vec<LinearId>,
    /// True if the head is the embedding.
    pub tie_word_embeddings: bool,
}

/// Upper bound of the number of decoder layers. Each layer takes a line in plans and reports.
const MOST_LAYERS: u64 = 1 << 12;

/// Hint for a config that was damaged or edited. It asks for no edit: a wrong value gives a wrong result.
const TAKE_ANOTHER: &str = "take the config.json this checkpoint was published with";

impl ModelConfig {
    /// Reads `config.json` in a model folder.
    ///
    /// # Errors
    /// Fails when the file is missing, larger than any config or not JSON, for any architecture or option we do not compute, and for
    /// values out of range; each error names the key.
    pub fn load(folder: &Path) -> Result<Self> {
        Self::of_json(folder, &Self::read_json(folder)?)
    }

    /// Parses `config.json` in a model folder, and checks nothing else.
    ///
    /// # Errors
    /// Fails when the file is missing, larger than any config or not JSON.
    pub fn read_json(folder: &Path) -> Result<Value> {
        let path = folder.join("config.json");
        let text = read_settings(&path).map_err(|error| {
            cannot_read(&path, &error).or_hint(
                "name a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json",
            )
        })?;
        let json = serde_json::from_str(&text).map_err(|error| {
            Failure::new(format!("`{}` is not JSON: {error}", path.display())).hint(TAKE_ANOTHER)
        })?;
        Ok(json)
    }

    /// Checks the parsed `config.json` of a folder, which may have been changed after it was read.
    ///
    /// # Errors
    /// Fails as [`ModelConfig::load`]; the error names the folder.
    pub fn of_json(folder: &Path, json: &Value) -> Result<Self> {
        let path = folder.join("config.json");
        Self::from_json(json)
            .map_err(|error| match error.downcast::<Failure>() {
                Ok(failure) if failure.hint.is_none() => failure.hint(TAKE_ANOTHER).into(),
                Ok(failure) => failure.into(),
                Err(error) => error,
            })
            .with_context(|| format!("in `{}`", path.display()))
    }

    /// Checks a parsed `config.json`; see [`ModelConfig::load`].
    ///
    /// A model of several media has the settings of its text model in `text_config`.
    pub fn from_json(json: &Value) -> Result<Self> {
        let family = family::identify(json)?;
        let inside = completed_settings(json);
        let keys = Keys(inside.as_ref().unwrap_or(json));
        refuse_quantized(&Keys(json))?;
        refuse_quantized(&keys)?;
        let activation = computed_activation(&keys, family)?;
        let (hidden_size, heads) = heads(&keys, family)?;
        let num_hidden_layers = keys.whole(1..=MOST_LAYERS, "num_hidden_layers", None)?;
        let max_position_embeddings =
            keys.size("max_position_embeddings", Some(family.defaults.positions))?;
        let ropes = rope::read(&keys, family, heads.head_dim, max_position_embeddings)?;
        let layers = layers::read(&keys, family, num_hidden_layers)?;
        let rms_norm_eps = keys.number("rms_norm_eps", Some(family.defaults.rms_norm_eps), |eps| {
            // As f32, which the norms are computed in.
            (f32::MIN_POSITIVE.into()..1.0).contains(&eps)
        });
        let rms_norm_eps = rms_norm_eps.map_err(|value| {
            Failure::new(format!("`rms_norm_eps` is {value}; it must lie between 0 and 1"))
        })?;
        let mut biases = Vec::new();
        for &(id, bias) in family.linears {
            let has_bias = match bias {
                Bias::Never => false,
                Bias::Always => true,
                Bias::IfSet(key) => keys.flag(key, false)?,
            };
            if has_bias {
                biases.push(id);
            }
        }
        let [score_cap, logit_cap] = soft_caps(&keys, family)?;
        Ok(Self {
            family,
            hidden_size,
            intermediate_size: keys.size("intermediate_size", None)?,
            num_hidden_layers,
            num_attention_heads: heads.num_heads,
            num_key_value_heads: heads.num_key_value_heads,
            head_dim: heads.head_dim,
            vocab_size: keys.size("vocab_size", None)?,
            max_position_embeddings,
            rms_norm_eps,
            activation,
            score_scale: score_scale(&keys, family, heads.head_dim)?,
            score_cap,
            logit_cap,
            embedding_scale: family.scales_embedding.then(|| (hidden_size as f32).sqrt()),
            ropes,
            layers,
            biases,
            // The whole model's key counts before the text model's.
            tie_word_embeddings: Keys(json).flag(
                "tie_word_embeddings",
                keys.flag("tie_word_embeddings", family.defaults.is_tied)?,
            )?,
        })
    }

    /// The linears of a decoder layer, in the order of the reference.
    pub fn linears(&self) -> impl ExactSizeIterator<Item = LinearId> + Clone + use<> {
        self.family.linears.iter().map(|&(id, _)| id)
    }

    /// The names of the weights of all decoder linears, layer by layer.
    pub fn linear_names(&self) -> impl Iterator<Item = String> + use<'_> {
        let layers = 0..self.num_hidden_layers;
        layers.flat_map(|layer| self.linears().map(move |one| one.tensor_name(layer)))
    }

    /// Returns whether a linear has a bias.
    pub fn has_bias(&self, id: LinearId) -> bool {
        self.biases.contains(&id)
    }

    /// The number of weights in a decoder layer's linears.
    pub fn layer_weights(&self) -> usize {
        self.linears().map(|id| id.elements(self)).sum()
    }

    /// The number of weights in a decoder layer's norms.
    pub fn norm_weights(&self) -> usize {
        let spec = self.layer(0);
        self.family.norms.iter().map(|&(role, _)| spec.norm_width(role)).sum()
    }

    /// The longest sequence that can be computed, in tokens: `max_position_embeddings`, or any length where rotary frequencies are
    /// stretched with the sequence.
    pub fn longest_sequence(&self) -> usize {
        let is_dynamic = |rope: &Rope| matches!(rope.scaling, RopeScaling::Dynamic { .. });
        match self.ropes.iter().any(is_dynamic) {
            true => LARGEST_SIZE as usize,
            false => self.max_position_embeddings,
        }
    }

    /// Head counts and width, in the form attention takes them.
    pub fn heads(&self) -> Heads {
        self.layer(0).heads
    }
}

impl LinearId {
    /// (out_features, in_features) in a model of this configuration.
    pub fn shape(self, config: &ModelConfig) -> (usize, usize) {
        config.layer(0).shape(self)
    }

    /// The number of weights in a model of this configuration.
    pub fn elements(self, config: &ModelConfig) -> usize {
        let (rows, columns) = self.shape(config);
        rows * columns
    }
}

/// Returns whether a `quantization_config` of compressed-tensors describes a checkpoint whose weights are stored as they are: a pruned
/// model with `sparsity_config: {format: dense}`, without quantised groups.
pub fn is_stored_dense(quantization: &Value) -> bool {
    let is_empty = |key: &str| match quantization.get(key) {
        None | Some(Value::Null) => true,
        Some(Value::Object(groups)) => groups.is_empty(),
        Some(_) => false,
    };
    let text = |of: &Value, key: &str| of.get(key).and_then(Value::as_str).map(str::to_string);
    let sparsity = quantization.get("sparsity_config");
    text(quantization, "quant_method").as_deref() == Some("compressed-tensors")
        && sparsity.and_then(|of| text(of, "format")).as_deref() == Some("dense")
        && is_empty("config_groups")
        && is_empty("kv_cache_scheme")
}

/// Refuses quantised checkpoints.
fn refuse_quantized(keys: &Keys<'_>) -> Result<()> {
    if let Some(quantization) = keys.given("quantization_config").filter(|of| !is_stored_dense(of))
    {
        let method =
            quantization.get("quant_method").and_then(Value::as_str).unwrap_or("an unnamed method");
        return Err(Failure::new(format!("the checkpoint is quantised ({method})"))
            .hint("prune the unquantised checkpoint and quantise the result")
            .into());
    }
    Ok(())
}

/// Refuses models whose arithmetic is not computed, and returns the activation of the MLP.
fn computed_activation(keys: &Keys<'_>, family: &Family) -> Result<Activation> {
    if keys.flag("use_bidirectional_attention", false).unwrap_or(true) {
        return Err(Failure::new("`use_bidirectional_attention` is set: tokens see later tokens")
            .hint("choose a causal model")
            .into());
    }
    let ActivationKey { key, default } = family.activation;
    let found = keys.given(key);
    let name = found.map_or(Some(default), Value::as_str);
    let is_named = |names: &[&str]| name.is_some_and(|name| names.contains(&name));
    if let Some((activation, _)) = Activation::NAMES.iter().find(|(_, names)| is_named(names)) {
        return Ok(*activation);
    }
    let known: Vec<&str> = Activation::NAMES.iter().map(|(_, names)| names[0]).collect();
    let found = found.unwrap_or(&Value::Null);
    let failure =
        Failure::new(format!("`{key}` is {found}; an MLP is computed with {}", known.join(" or ")));
    Err(match name {
        Some(_) => failure.hint(ANOTHER_MODEL).into(),
        None => failure.into(),
    })
}

/// Reads the scale of attention's scores.
fn score_scale(keys: &Keys<'_>, family: &Family, head_dim: usize) -> Result<f32> {
    let ScoreScale::QueryScalar { default } = family.scale else {
        return Ok(Scoring::of_width(head_dim).scale);
    };
    let key = "query_pre_attn_scalar";
    let scalar = keys.number(key, Some(default), |value| (1e-6..=1e12).contains(&value));
    let scalar = scalar.map_err(|value| {
        Failure::new(format!("`{key}` is {value}; it must be a number from 1e-6 to 1e12"))
    })?;
    Ok(1.0 / (scalar as f32).sqrt())
}

/// Reads the bounds of scores and logits.
fn soft_caps(keys: &Keys<'_>, family: &Family) -> Result<[Option<f32>; 2]> {
    let Some(SoftCaps { attention, logits }) = family.soft_caps else {
        return Ok([None, None]);
    };
    let read = |key: &str, default: Option<f64>| -> Result<Option<f32>> {
        match keys.0.get(key) {
            None => Ok(default.map(|cap| cap as f32)),
            Some(Value::Null) => Ok(None),
            Some(_) => {
                let cap = keys.number(key, None, |cap| (1e-3..=1e6).contains(&cap));
                let cap = cap.map_err(|value| {
                    Failure::new(format!(
                        "`{key}` is {value}; it must be a number from 0.001 to 1e6, or null"
                    ))
                })?;
                Ok(Some(cap as f32))
            }
        }
    };
    Ok([read("attn_logit_softcapping", attention)?, read("final_logit_softcapping", logits)?])
}

/// Reads `hidden_size` and the heads, and checks that they fit together.
fn heads(keys: &Keys<'_>, family: &Family) -> Result<(usize, Heads)> {
    let hidden_size = keys.size("hidden_size", None)?;
    let num_heads = keys.size("num_attention_heads", None)?;
    let default = family.defaults.key_value_heads.unwrap_or(num_heads);
    let num_key_value_heads = keys.size("num_key_value_heads", Some(default))?;
    if num_heads % num_key_value_heads != 0 {
        return Err(Failure::new(format!(
            "`num_attention_heads` {num_heads} is not a multiple of `num_key_value_heads` {num_key_value_heads}"
        ))
        .into());
    }
    let divides = hidden_size.is_multiple_of(num_heads);
    let default_width = family.defaults.head_dim;
    if keys.given("head_dim").is_none() && default_width.is_none() && !divides {
        return Err(Failure::new(format!(
            "`hidden_size` {hidden_size} is not a multiple of `num_attention_heads` {num_heads}, and there is no `head_dim`"
        ))
        .into());
    }
    let head_dim = keys.size("head_dim", Some(default_width.unwrap_or(hidden_size / num_heads)))?;
    if head_dim % 2 != 0 {
        return Err(Failure::new(format!(
            "`head_dim` {head_dim} is odd; rotary positions need pairs"
        ))
        .into());
    }
    if num_heads as u64 * head_dim as u64 > LARGEST_SIZE {
        return Err(Failure::new(format!(
            "`num_attention_heads` {num_heads} times `head_dim` {head_dim} is more than {LARGEST_SIZE}"
        ))
        .into());
    }
    let heads = Heads { num_heads, num_key_value_heads, head_dim };
    Ok((hidden_size, heads))
}
