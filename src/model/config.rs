//! `config.json` of a model: read and checked, never written. An output has a byte-for-byte copy of the file, unless it is a smaller
//! model (`smaller`).
//!
//! Key names follow Hugging Face transformers, in both spellings: 4.x (`rope_theta`, `rope_scaling`) and 5.x
//! (`rope_parameters`). A key that the family's record decides (`family`) is read as the record says.

mod keys;
mod pairs;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::family::{self, Bias, Family, SlidingWindow};
use super::projection::Projection;
use crate::failure::Failure;
use crate::input::{cannot_read, read_settings};
use crate::linalg::attention::Heads;
use keys::{ANOTHER_MODEL, Keys, LARGEST_SIZE};
pub use pairs::disagreements;
pub use rope::RopeScaling;

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
    /// Tokens that a token sees in attention, itself included; `None` for all before it.
    pub sliding_window: Option<usize>,
    /// ε of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Linears with a bias.
    pub biases: Vec<Projection>,
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
            cannot_read(&path, &error)
                .or_hint("--model wants a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json")
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
    pub fn from_json(json: &Value) -> Result<Self> {
        let family = family::identify(json)?;
        let keys = Keys(json);
        check_is_computed(&keys, family)?;
        let (hidden_size, heads) = heads(&keys, family)?;
        let (rope_theta, rope_scaling) = rope::read(&keys)?;
        let rms_norm_eps = keys.number("rms_norm_eps", Some(1e-6), |eps| {
            // As f32, which the norms are computed in.
            (f32::MIN_POSITIVE.into()..1.0).contains(&eps)
        });
        let rms_norm_eps = rms_norm_eps.map_err(|value| {
            Failure::new(format!("`rms_norm_eps` is {value}; it must lie between 0 and 1"))
        })?;
        let mut biases = Vec::new();
        for &(projection, bias) in family.linears {
            if let Bias::IfSet(key) = bias
                && keys.flag(key)?
            {
                biases.push(projection);
            }
        }
        Ok(Self {
            family,
            hidden_size,
            intermediate_size: keys.size("intermediate_size", None)?,
            num_hidden_layers: keys.size_up_to(MOST_LAYERS, "num_hidden_layers", None)?,
            num_attention_heads: heads.num_heads,
            num_key_value_heads: heads.num_key_value_heads,
            head_dim: heads.head_dim,
            vocab_size: keys.size("vocab_size", None)?,
            max_position_embeddings: keys
                .size("max_position_embeddings", Some(family.default_positions))?,
            sliding_window: sliding_window(&keys, family)?,
            rms_norm_eps,
            rope_theta,
            rope_scaling,
            biases,
            tie_word_embeddings: keys.flag("tie_word_embeddings")?,
        })
    }

    /// The linears of a decoder layer, in the order of the reference.
    pub fn projections(&self) -> impl ExactSizeIterator<Item = Projection> + Clone + use<> {
        self.family.linears.iter().map(|&(projection, _)| projection)
    }

    /// The names of the weights of all decoder linears, layer by layer.
    pub fn linear_names(&self) -> impl Iterator<Item = String> + use<'_> {
        let layers = 0..self.num_hidden_layers;
        layers.flat_map(|layer| self.projections().map(move |one| one.tensor_name(layer)))
    }

    /// Returns whether a linear has a bias.
    pub fn has_bias(&self, projection: Projection) -> bool {
        self.biases.contains(&projection)
    }

    /// The number of weights in a decoder layer's linears.
    pub fn layer_weights(&self) -> usize {
        self.projections().map(|projection| projection.elements(self)).sum()
    }

    /// The number of weights in a decoder layer's norms.
    pub fn norm_weights(&self) -> usize {
        self.family.norms.len() * self.hidden_size
    }

    /// The longest sequence that can be computed, in tokens: `max_position_embeddings`, or any length where rotary frequencies are
    /// stretched with the sequence; at most the sliding window.
    pub fn longest_sequence(&self) -> usize {
        match self.rope_scaling {
            RopeScaling::Dynamic { .. } => self.sliding_window.unwrap_or(LARGEST_SIZE as usize),
            _ => self.context_length(),
        }
    }

    /// Tokens that attention sees at once: `max_position_embeddings`, at most the sliding window.
    pub fn context_length(&self) -> usize {
        let positions = self.max_position_embeddings;
        positions.min(self.sliding_window.unwrap_or(positions))
    }

    /// Head counts and width, in the form attention takes them.
    pub fn heads(&self) -> Heads {
        Heads {
            num_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
        }
    }
}

impl Projection {
    /// (out_features, in_features) in a model of this configuration.
    pub fn shape(self, config: &ModelConfig) -> (usize, usize) {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let queries = config.num_attention_heads * config.head_dim;
        let keys = config.num_key_value_heads * config.head_dim;
        match self {
            Self::Q => (queries, hidden),
            Self::K | Self::V => (keys, hidden),
            Self::O => (hidden, queries),
            Self::Gate | Self::Up => (intermediate, hidden),
            Self::Down => (hidden, intermediate),
        }
    }

    /// The number of weights in a model of this configuration.
    pub fn elements(self, config: &ModelConfig) -> usize {
        let (rows, columns) = self.shape(config);
        rows * columns
    }
}

/// Refuses quantised checkpoints and activations that the family does not have.
fn check_is_computed(keys: &Keys<'_>, family: &Family) -> Result<()> {
    if let Some(quantization) = keys.given("quantization_config") {
        let method =
            quantization.get("quant_method").and_then(Value::as_str).unwrap_or("an unnamed method");
        return Err(Failure::new(format!("the checkpoint is quantised ({method})"))
            .hint("prune the unquantised checkpoint and quantise the result")
            .into());
    }
    let activation = family.activation.name();
    match keys.given("hidden_act") {
        Some(found) if found != activation => {
            let failure = Failure::new(format!(
                "`hidden_act` is {found}; the MLP of {} uses \"{activation}\"",
                family.architecture
            ));
            Err(match found {
                Value::String(_) => failure.hint(ANOTHER_MODEL).into(),
                _ => failure.into(),
            })
        }
        _ => Ok(()),
    }
}

/// Reads `hidden_size` and the heads, and checks that they fit together.
fn heads(keys: &Keys<'_>, family: &Family) -> Result<(usize, Heads)> {
    let hidden_size = keys.size("hidden_size", None)?;
    let num_heads = keys.size("num_attention_heads", None)?;
    let default = family.default_key_value_heads.unwrap_or(num_heads);
    let num_key_value_heads = keys.size("num_key_value_heads", Some(default))?;
    if num_heads % num_key_value_heads != 0 {
        return Err(Failure::new(format!(
            "`num_attention_heads` {num_heads} is not a multiple of `num_key_value_heads` {num_key_value_heads}"
        ))
        .into());
    }
    let divides = hidden_size.is_multiple_of(num_heads);
    if keys.given("head_dim").is_none() && !divides {
        return Err(Failure::new(format!(
            "`hidden_size` {hidden_size} is not a multiple of `num_attention_heads` {num_heads}, and there is no `head_dim`"
        ))
        .into());
    }
    let head_dim = keys.size("head_dim", Some(hidden_size / num_heads))?;
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

fn sliding_window(keys: &Keys<'_>, family: &Family) -> Result<Option<usize>> {
    match (family.sliding_window, keys.0.get("sliding_window")) {
        (SlidingWindow::Never, _) | (_, Some(Value::Null)) => Ok(None),
        (SlidingWindow::AllLayers { default }, _) => {
            keys.size("sliding_window", Some(default)).map(Some)
        }
    }
}
