//! Keys and values of the tokens a model has read. With them the next token costs the work of one token.
//!
//! Each layer has two arrays `[tokens, num_key_value_heads * head_dim]` in f32, or rounded to bf16, which takes half the memory; rotary
//! positions are applied to the keys. Attention widens bf16 as it reads, so no f32 copy exists. Grouped-query models keep their few key
//! heads once. Memory for the longest sequence is reserved at the start, and used as tokens come. A layer with an attention window keeps
//! the tokens of two windows and a block at most.

use std::collections::TryReserveError;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use serde::Serialize;

use super::config::ModelConfig;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::product::Values;

/// Element type of cached keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CacheDtype {
    /// As computed
    #[default]
    F32,
    /// Rounded to bf16: half the memory, another text
    Bf16,
}

impl CacheDtype {
    /// The name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }
}

/// Keys or values, token by token.
#[derive(Debug)]
enum CachedValues {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl CachedValues {
    fn reserve(dtype: CacheDtype, elements: usize) -> Result<Self, TryReserveError> {
        let mut values = match dtype {
            CacheDtype::F32 => Self::F32(Vec::new()),
            CacheDtype::Bf16 => Self::Bf16(Vec::new()),
        };
        match &mut values {
            Self::F32(values) => values.try_reserve_exact(elements)?,
            Self::Bf16(values) => values.try_reserve_exact(elements)?,
        }
        Ok(values)
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    fn append(&mut self, new: &[f32]) {
        match self {
            Self::F32(values) => values.extend_from_slice(new),
            Self::Bf16(values) => {
                let before = values.len();
                values.resize(before + new.len(), bf16::ZERO);
                values[before..].convert_from_f32_slice(new);
            }
        }
    }

    /// Removes the first elements.
    fn remove(&mut self, elements: usize) {
        match self {
            Self::F32(values) => drop(values.drain(..elements)),
            Self::Bf16(values) => drop(values.drain(..elements)),
        }
    }

    fn values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::Bf16(values) => Values::Bf16(values),
        }
    }
}

/// Keys and values of a layer.
#[derive(Debug)]
pub struct LayerCache {
    width: usize,
    capacity: usize,
    /// Tokens that later tokens see, at most.
    window: Option<usize>,
    /// Tokens that were removed, because no later token sees them.
    removed: usize,
    keys: CachedValues,
    values: CachedValues,
}

impl LayerCache {
    /// Number of tokens so far, which is the position of the next token.
    pub fn tokens(&self) -> usize {
        self.removed + self.keys.len() / self.width
    }

    /// Keys of the tokens in memory `[tokens, num_key_value_heads * head_dim]`, with rotary positions.
    pub fn keys(&self) -> Values<'_> {
        self.keys.values()
    }

    /// Values `[tokens, num_key_value_heads * head_dim]`.
    pub fn values(&self) -> Values<'_> {
        self.values.values()
    }

    /// Adds the keys and values of the next tokens, and returns the number of tokens in memory before them.
    ///
    /// With a window, tokens that no later token sees are removed as soon as they are as many as the window, so that a token costs a
    /// constant time.
    ///
    /// # Errors
    /// Fails when the slices differ in length, hold a fraction of a token, or exceed the capacity.
    pub fn append(&mut self, keys: &[f32], values: &[f32]) -> Result<usize> {
        ensure!(
            keys.len() == values.len() && keys.len().is_multiple_of(self.width),
            "keys and values of whole tokens are cached"
        );
        ensure!(
            self.tokens() + keys.len() / self.width <= self.capacity,
            "the cache has room for {} tokens, and {} follow {}",
            self.capacity,
            keys.len() / self.width,
            self.tokens()
        );
        if let Some(window) = self.window {
            // The next token sees the window with itself.
            let before = self.keys.len() / self.width;
            let unseen = before.saturating_sub(window - 1);
            if unseen >= window {
                self.removed += unseen;
                self.keys.remove(unseen * self.width);
                self.values.remove(unseen * self.width);
            }
        }
        let before = self.keys.len() / self.width;
        self.keys.append(keys);
        self.values.append(values);
        Ok(before)
    }
}

/// Tokens whose keys and values are in memory at once in a layer.
fn reserved(window: Option<usize>, capacity: usize, block: usize) -> usize {
    let at_most = window.map(|window| window.saturating_mul(2).saturating_add(block));
    capacity.min(at_most.unwrap_or(capacity))
}

/// The caches of all layers.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
}

impl KvCache {
    /// Reserves memory for `capacity` tokens, which come in blocks of at most `block`.
    pub fn new(
        config: &ModelConfig,
        dtype: CacheDtype,
        capacity: usize,
        block: usize,
    ) -> Result<Self> {
        let width = config.num_key_value_heads * config.head_dim;
        let reserve = |tokens: usize| {
            CachedValues::reserve(dtype, tokens.saturating_mul(width)).map_err(|_| {
                Failure::new(format!(
                    "cannot allocate {} for the keys and values of {capacity} tokens",
                    Self::bytes(config, dtype, capacity, block)
                ))
                .hint("use a smaller --max-tokens")
            })
        };
        let layers = (0..config.num_hidden_layers).map(|layer| {
            let window = config.layer(layer).scoring.window;
            let tokens = reserved(window, capacity, block);
            let (keys, values) = (reserve(tokens)?, reserve(tokens)?);
            Ok(LayerCache { width, capacity, window, removed: 0, keys, values })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }

    /// Bytes that [`KvCache::new`] reserves.
    pub fn bytes(
        config: &ModelConfig,
        dtype: CacheDtype,
        capacity: usize,
        block: usize,
    ) -> ByteSize {
        let of_a_token = 2 * dtype.bytes() * config.num_key_value_heads * config.head_dim;
        let tokens = config.layers.iter().map(|kind| reserved(kind.window, capacity, block));
        let tokens = tokens.fold(0, usize::saturating_add);
        ByteSize::of(tokens, of_a_token)
    }

    /// The cache of a layer.
    ///
    /// # Panics
    /// Panics when the model has no such layer.
    pub fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    /// Number of tokens that passed all layers.
    pub fn tokens(&self) -> usize {
        self.layers.iter().map(LayerCache::tokens).min().unwrap_or(0)
    }

    /// Removes all tokens and keeps the memory.
    pub fn clear(&mut self) {
        for layer in &mut self.layers {
            layer.keys.remove(layer.keys.len());
            layer.values.remove(layer.values.len());
            layer.removed = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config() -> ModelConfig {
        ModelConfig::from_json(&json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 8,
            "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 10}))
        .unwrap()
    }

    fn wide(values: Values<'_>) -> Vec<f32> {
        match values {
            Values::F32(values) => values.to_vec(),
            Values::F16(values) => values.to_f32_vec(),
            Values::Bf16(values) => values.to_f32_vec(),
        }
    }

    #[test]
    fn bf16_is_the_nearest_number_in_half_the_memory() {
        let mut cache = KvCache::new(&config(), CacheDtype::Bf16, 3, 3).unwrap();
        let layer = cache.layer(0);
        let new: Vec<f32> = (0..48).map(|i| (i as f32 * 0.37).sin()).collect();
        layer.append(&new[..16], &new[16..32]).unwrap();
        assert_eq!(layer.append(&new[16..], &new[..32]).unwrap(), 1);
        let rounded = |x: &f32| bf16::from_f32(*x).to_f32();
        assert_eq!(wide(layer.keys()), new.iter().map(rounded).collect::<Vec<_>>());
        assert_eq!(wide(layer.values())[..16], wide(layer.keys())[16..32]);
        let (CachedValues::Bf16(keys), CachedValues::Bf16(values)) = (&layer.keys, &layer.values)
        else {
            panic!("asked for above");
        };
        assert_eq!((keys.capacity(), values.capacity()), (48, 48));
    }

    #[test]
    fn grouped_heads_are_kept_once() {
        // 5 tokens · 3 layers · (keys and values) · 2 heads of 8 · 4 or 2 bytes
        for (dtype, bytes) in [(CacheDtype::F32, 4), (CacheDtype::Bf16, 2)] {
            assert_eq!(KvCache::bytes(&config(), dtype, 5, 5), ByteSize(5 * 3 * 2 * 16 * bytes));
        }
    }

    #[test]
    fn more_tokens_than_reserved_and_halves_of_tokens_are_refused() {
        let mut cache = KvCache::new(&config(), CacheDtype::F32, 2, 2).unwrap();
        let layer = cache.layer(0);
        layer.append(&[1.0; 16], &[2.0; 16]).unwrap();
        assert_eq!(layer.tokens(), 1);
        assert!(layer.append(&[1.0; 8], &[2.0; 8]).is_err());
        assert!(layer.append(&[1.0; 32], &[2.0; 32]).is_err());
        assert_eq!((layer.keys.len(), wide(layer.values())[15]), (16, 2.0));
        assert_eq!(cache.tokens(), 0, "the other layers have seen none");
        cache.clear();
        assert_eq!(cache.layer(0).tokens(), 0);
    }

    #[test]
    fn a_window_keeps_the_tokens_that_the_next_token_sees_in_the_reserved_memory() {
        const WINDOW: usize = 4;
        let config = ModelConfig::from_json(&json!({"model_type": "mistral", "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 10,
            "sliding_window": WINDOW}))
        .unwrap();
        let address = |layer: &LayerCache| match &layer.keys {
            CachedValues::F32(keys) => keys.as_ptr().addr(),
            CachedValues::Bf16(keys) => keys.as_ptr().addr(),
        };
        let dtypes = [CacheDtype::F32, CacheDtype::Bf16];
        for (block, dtype) in
            [1, 3].into_iter().flat_map(|block| dtypes.map(|dtype| (block, dtype)))
        {
            let mut cache = KvCache::new(&config, dtype, 60, block).unwrap();
            let layer = cache.layer(0);
            let (memory, room) = (address(layer), 2 * WINDOW + block);
            for first in (0..60).step_by(block) {
                let tokens: Vec<f32> =
                    (first..first + block).flat_map(|token| [token as f32; 8]).collect();
                let before = layer.append(&tokens, &tokens).unwrap();
                assert!(before >= first.min(WINDOW - 1), "{before} tokens before token {first}");
                assert_eq!(layer.tokens(), first + block);
                assert!(layer.keys.len() <= room * 8, "{} values", layer.keys.len());
                let oldest = layer.tokens() - layer.keys.len() / 8;
                let first = (wide(layer.keys())[0], wide(layer.values())[0]);
                assert_eq!(first, (oldest as f32, oldest as f32));
            }
            assert_eq!(address(layer), memory, "the reserved memory is enough");
            assert!(layer.append(&[0.0; 8], &[0.0; 8]).is_err(), "the sequence is full");
        }
    }
}
