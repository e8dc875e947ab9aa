//! A smaller model made of parts of a larger model: its configuration, and the place of its tensors in the larger model.
//!
//! An edit of the structure (layers that are dropped) changes the shape of a model, and leaves every tensor that stays as it is. So the
//! smaller model is a [`ModelConfig`], the matching `config.json`, and a view of the checkpoint
//! ([`Checkpoint::view`](crate::checkpoint::Checkpoint::view)). Everything that reads or writes models works on these three alone.
//! A narrower model ([`Width`]) has matrices of its own, so its view takes them from a second checkpoint
//! ([`Checkpoint::with_tensors_of`](crate::checkpoint::Checkpoint::with_tensors_of)).

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::config::{ModelConfig, layer_lists, text_settings_mut};

/// The beginning of the names of a layer's tensors.
const LAYERS: &str = "model.layers.";

/// A model with some layers of a larger model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptLayers {
    /// The layers of the larger model that stay, in ascending order.
    kept: Vec<usize>,
    /// Number of layers of the larger model.
    before: usize,
}

impl KeptLayers {
    /// All of a model's `layers` layers without the `dropped` layers.
    pub fn without(layers: usize, dropped: &[usize]) -> Self {
        // A record may name any number of layers.
        let dropped: BTreeSet<usize> = dropped.iter().copied().collect();
        Self {
            kept: (0..layers).filter(|layer| !dropped.contains(layer)).collect(),
            before: layers,
        }
    }

    /// The kept layers of the larger model, by their new numbers.
    pub fn layers(&self) -> &[usize] {
        &self.kept
    }

    /// The name of a tensor in the smaller model; `None` if it belongs to a layer that is not there.
    pub fn rename(&self, name: &str) -> Option<String> {
        let Some((layer, rest)) = name.strip_prefix(LAYERS).and_then(|rest| rest.split_once('.'))
        else {
            return Some(name.to_owned());
        };
        let layer: usize = layer.parse().ok()?;
        let number = self.kept.binary_search(&layer).ok()?;
        Some(format!("{LAYERS}{number}.{rest}"))
    }

    /// The configuration of the smaller model.
    pub fn config(&self, of: &ModelConfig) -> ModelConfig {
        ModelConfig {
            num_hidden_layers: self.kept.len(),
            layers: self.kept.iter().filter_map(|&layer| of.layers.get(layer).copied()).collect(),
            ..of.clone()
        }
    }

    /// Changes a `config.json`: the number of layers, lists with an entry per layer (`layer_types`), and the number of first layers with
    /// full attention (`max_window_layers`). Layers whose kind follows from their number get such a list.
    pub fn edit_json(&self, of: &ModelConfig, config: &mut Map<String, Value>) {
        let config = text_settings_mut(config);
        // A window that begins at a layer begins at another number once layers are gone.
        // A list of the file may be longer than the model.
        let has_windows = of.layers.iter().any(|kind| kind.window.is_some());
        for (key, list) in layer_lists(of.family, &of.layers) {
            if key != "layer_types" || has_windows {
                config.insert(key.to_owned(), list.into());
            }
        }
        for (key, value) in config.iter_mut() {
            match value {
                Value::Array(entries) if key.contains("layer") && entries.len() == self.before => {
                    let kept = self.kept.iter().map(|&layer| entries[layer].take());
                    *value = kept.collect();
                }
                Value::Number(number) if key == "max_window_layers" => {
                    let first = number.as_u64().unwrap_or_default();
                    let is_first = |layer: &&usize| (**layer as u64) < first;
                    let kept = self.kept.iter().filter(is_first).count();
                    *value = kept.into();
                }
                _ => {}
            }
        }
        config.insert("num_hidden_layers".to_owned(), self.kept.len().into());
    }
}

/// The sizes of a narrower model, the same in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width {
    /// MLP channels.
    pub intermediate_size: usize,
    /// Key/value heads; each keeps its query heads.
    pub num_key_value_heads: usize,
}

impl Width {
    /// The configuration of the narrower model.
    pub fn config(&self, of: &ModelConfig) -> ModelConfig {
        let queries = of.num_attention_heads / of.num_key_value_heads;
        ModelConfig {
            intermediate_size: self.intermediate_size,
            num_key_value_heads: self.num_key_value_heads,
            num_attention_heads: queries * self.num_key_value_heads,
            ..of.clone()
        }
    }

    /// Changes a `config.json`: the sizes, and `head_dim`, which programs otherwise compute from the number of heads.
    pub fn edit_json(&self, of: &ModelConfig, config: &mut Map<String, Value>) {
        let config = text_settings_mut(config);
        let narrower = self.config(of);
        let mut set = |key: &str, value: usize| config.insert(key.to_owned(), value.into());
        set("intermediate_size", narrower.intermediate_size);
        if narrower.num_attention_heads != of.num_attention_heads {
            set("num_attention_heads", narrower.num_attention_heads);
            set("num_key_value_heads", narrower.num_key_value_heads);
            set("head_dim", narrower.head_dim);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tensors_of_kept_layers_get_the_next_numbers() {
        let kept = KeptLayers::without(12, &[0, 3]);
        let renamed = |name: &str| kept.rename(name);
        assert_eq!(kept.layers().len(), 10);
        assert_eq!(renamed("model.layers.0.mlp.up_proj.weight"), None);
        assert_eq!(
            renamed("model.layers.2.input_layernorm.weight").as_deref(),
            Some("model.layers.1.input_layernorm.weight")
        );
        assert_eq!(
            renamed("model.layers.11.mlp.up_proj.weight").as_deref(),
            Some("model.layers.9.mlp.up_proj.weight")
        );
        // Beyond the layers of the configuration.
        assert_eq!(renamed("model.layers.12.mlp.up_proj.weight"), None);
        for other in ["model.embed_tokens.weight", "lm_head.weight"] {
            assert_eq!(renamed(other).as_deref(), Some(other));
        }
    }

    #[test]
    fn lists_of_layers_lose_the_same_entries() {
        let mut config = json!({
            "num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"], "max_window_layers": 3,
            "eos_token_id": [1, 2, 3, 4], "other_layers": [1, 2],
        });
        let llama = ModelConfig::from_json(&json!({"model_type": "llama", "hidden_size": 8,
            "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 1, "vocab_size": 8}));
        let llama = llama.unwrap();
        KeptLayers::without(4, &[1]).edit_json(&llama, config.as_object_mut().unwrap());
        let expected = json!({
            "num_hidden_layers": 3, "layer_types": ["a", "c", "d"], "max_window_layers": 2,
            "eos_token_id": [1, 2, 3, 4], "other_layers": [1, 2],
        });
        assert_eq!(config, expected);
    }
}
