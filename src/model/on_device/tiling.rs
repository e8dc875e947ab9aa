//! Tiling of a device's work, and the memory of each tile. Plans and the ledger consist of these numbers.
//!
//! e bytes per element of the arithmetic; S tokens of a sample, H hidden_size, I intermediate_size, V vocab_size; a group of
//! key/value heads with its queries is q and k elements wide, all of them Q and K; b queries and t tokens at once, w the largest window.
//! [x: y] is y in families that have x:
//!
//! ```text
//! sample     e·S·H input and e·S·H output
//! attention  e·S·([norm before: H] + Q) normed, context, and the larger of
//!            e·S·(2q + 2k) q, k, v of a group, and q or k before norm and rotation;
//!            e·S·(q + 2k) + 2·e·b·q + e·h·b·min(S, w + b) the same, queries and result of a block, and scores of h heads
//!            [norm after: at least e·S·H] the output of o before its norm
//! MLP        e·t·([norm before: H] + 2I) normed, gate, up;  [norm after: at least 2·e·t·H] the output of down, and its norm
//! observed   e·S·(H + Q) normed and context; 48·Σ n sums of inputs of n columns, joined, and the sums of the sample before
//! product    4·n·(w + 2·m) + 4·1024·w   n rows of w columns, their products before and after a change, and weights of some of m features
//! grams      8·Σ T(n) sums of inputs of n columns in panels of p rows, T(n) elements of an upper triangle;
//!            4·(2·p·n + t·n) a product, with max(e·t·(2H + I) + 4·t·I, e·S·(H + Q) + 4·t·max(H, Q)) rows
//! head       e·H·r + (e + 12)·r·v logits of r tokens for v rows of the vocabulary, their exponentials and sums
//! training   3·e·S·H + (12 + 2e + [bound: 4])·r·V + (56 + 4e)·r·H the same, forwards and back, and the gradient
//! backward   e·S·(5H + [norm before: H] + [norm after: H] + 2Q + 2K) states and gradients of the sample, and the largest of
//!            e·S·(4q + 4k) + 16·S·k a group, with the larger of
//!              (16 + 2e + [bound: 4])·h·b·min(S, w + b) its scores and their gradients;  [norm: t·(56 + 4e)·q] the graph of q's norm
//!            e·t·(4H + 28I) the graph of the MLP's activation
//!            t·(56 + 4e)·H + [norm after: 2·e·t·I] the graph of a norm, with gate and up
//! norms      [factor 1 + w: (8 + e)·min(S·H, 2²⁰) rows in f32, in f16 and bf16], in all but products and grams
//! trained    4·(2P + p) the sums and a sample's gradients, of P parameters each, and a matrix's new sum, of at most p parameters;
//!            (3e + 8)·M the whole gradient of the largest matrix, of M weights;  and of factors e·P and 1 byte per weight of their masks
//! ```

use std::ops::Range;

use super::gram::DeviceGrams;
use super::operators::NORMED_AT_ONCE;
use crate::bytes::ByteSize;
use crate::model::{LayerSpec, LinearId, LinearRole, ModelConfig, NormRole};
use crate::run::MemorySettings;

/// Memory of a device before the first computation: CUDA context, cuBLAS workspace, kernels. The literature gives 0.3 to 0.6 GiB; it
/// differs with card and driver.
pub const CONTEXT: ByteSize = ByteSize(512 << 20);

/// Queries whose scores exist at once, if memory suffices.
const QUERIES: usize = 512;

/// Output features of [`super::DeviceLayer::product`] at once.
pub(super) const PRODUCT_FEATURES: usize = 1024;

/// The largest index of candle's CUDA kernels.
const LARGEST_INDEX: usize = i32::MAX as usize;

/// Smallest tiles. A smaller tile would take less memory than the weights it is multiplied with.
const LEAST_QUERIES: usize = 16;
const LEAST_TOKENS: usize = 32;

/// Tiling of a device's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Key/value heads of attention at once.
    pub key_value_heads: usize,
    /// Queries whose scores exist at once.
    pub queries: usize,
    /// Tokens of the MLP at once.
    pub mlp_tokens: usize,
    /// Logits that exist at once, in bytes of f32.
    pub logits_bytes: ByteSize,
}

/// The sizes of the trained part of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrainedSizes {
    /// Trained parameters.
    pub parameters: usize,
    /// Parameters of the matrix with the most of them.
    pub most_parameters: usize,
    /// Weights of the largest trained matrix.
    pub largest_matrix: usize,
    /// Weights of all matrices whose factors are trained.
    pub masked: usize,
}

impl TrainedSizes {
    /// Memory of the gradients on a device, and of masks and factors.
    fn bytes(&self, element: usize) -> ByteSize {
        let sums = 4 * (2 * self.parameters + self.most_parameters);
        let factors = match self.masked {
            0 => 0,
            masked => masked + element * self.parameters,
        };
        ByteSize((sums + factors + (3 * element + 8) * self.largest_matrix) as u64)
    }
}

impl Tiling {
    /// The tiling that the memory settings ask for.
    pub fn of(settings: &MemorySettings, config: &ModelConfig) -> Self {
        Self {
            key_value_heads: settings
                .attention_heads
                .unwrap_or(usize::MAX)
                .clamp(1, config.num_key_value_heads),
            queries: QUERIES,
            mlp_tokens: settings.mlp_tokens.max(1),
            logits_bytes: settings.logits_bytes,
        }
    }

    /// The largest tiling whose tensors candle's kernels can index: their indices have 32 bits, so the scores of a block,
    /// heads · queries · `seqlen`, stay below 2³¹ elements.
    #[must_use]
    pub fn with_indices_of_32_bits(self, config: &ModelConfig, seqlen: usize) -> Self {
        let (spec, mut cut) = (config.layer(0), self);
        let scores = |cut: &Self| {
            let [heads, ..] = cut.group(&spec);
            heads.saturating_mul(cut.queries.min(seqlen)).saturating_mul(seqlen)
        };
        while scores(&cut) > LARGEST_INDEX && (cut.queries > 1 || cut.key_value_heads > 1) {
            match cut.queries > LEAST_QUERIES || cut.key_value_heads == 1 {
                true => cut.queries = (cut.queries / 2).max(1),
                false => cut.key_value_heads /= 2,
            }
        }
        cut
    }

    /// Returns whether candle's kernels can index a sample of `seqlen` tokens; `false` where no tiling helps.
    pub fn can_index(config: &ModelConfig, seqlen: usize) -> bool {
        let queries = config.num_attention_heads * config.head_dim;
        seqlen.saturating_mul(config.hidden_size.max(queries)) <= LARGEST_INDEX
    }

    /// The next smaller tiling; `None` if all tiles have their smallest size.
    pub fn smaller(&self) -> Option<Self> {
        let half = |value: usize, least: usize| (value / 2).max(least).min(value);
        let smaller = Self {
            key_value_heads: half(self.key_value_heads, 1),
            queries: half(self.queries, LEAST_QUERIES),
            mlp_tokens: half(self.mlp_tokens, LEAST_TOKENS),
            logits_bytes: ByteSize((self.logits_bytes.0 / 2).max(1 << 16).min(self.logits_bytes.0)),
        };
        (smaller != *self).then_some(smaller)
    }

    /// Key/value heads at once: all of them where norms go over all heads.
    fn heads_at_once(&self, spec: &LayerSpec) -> usize {
        let all = spec.heads.num_key_value_heads.max(1);
        match spec.family.head_norms_are_wide {
            true => all,
            false => self.key_value_heads.clamp(1, all),
        }
    }

    /// Groups of key/value heads that are computed in turn.
    pub(super) fn groups(&self, spec: &LayerSpec) -> impl Iterator<Item = Range<usize>> + use<> {
        let (all, at_once) = (spec.heads.num_key_value_heads, self.heads_at_once(spec));
        (0..all).step_by(at_once).map(move |first| first..all.min(first + at_once))
    }

    /// Query heads of the largest group, and the widths of its queries and of its keys.
    fn group(&self, spec: &LayerSpec) -> [usize; 3] {
        let keys = self.heads_at_once(spec);
        let heads = keys * (spec.heads.num_heads / spec.heads.num_key_value_heads.max(1));
        [heads, heads * spec.heads.head_dim, keys * spec.heads.head_dim]
    }

    /// Scores of a block: queries, and the most keys that these see in any layer.
    fn block(&self, config: &ModelConfig, seqlen: usize) -> (usize, usize) {
        let queries = self.queries.min(seqlen);
        let window = config.widest_scoring().window.unwrap_or(usize::MAX);
        (queries, window.saturating_add(queries).min(seqlen))
    }

    /// Tokens whose logits for `rows` rows of the vocabulary exist at once.
    pub fn logit_tokens(&self, rows: usize) -> usize {
        crate::model::head::logit_rows(self.logits_bytes, rows)
    }

    /// Memory of a sample inside a layer: the larger of attention and MLP. `element` is e.
    pub fn pass_bytes(&self, config: &ModelConfig, seqlen: usize, element: usize) -> ByteSize {
        self.capture_bytes(config, seqlen, element, &[])
    }

    /// The same, while rows of inputs with `grams` columns enter Gram matrices; without the sums, which [`DeviceGrams::bytes`] counts.
    pub fn capture_bytes(
        &self,
        config: &ModelConfig,
        seqlen: usize,
        element: usize,
        grams: &[usize],
    ) -> ByteSize {
        let (s, h, i) = (seqlen, config.hidden_size, config.intermediate_size);
        let spec = config.layer(0);
        let with = |norm, elements| if spec.has_norm(norm) { elements } else { 0 };
        let ([heads, q, k], all) = (self.group(&spec), spec.rows(LinearRole::Q));
        let (b, keys) = self.block(config, s);
        let block = element * (s * (q + 2 * k) + 2 * b * q + heads * b * keys);
        let group = element * s * (2 * q + 2 * k);
        let attention = element * s * (with(NormRole::BeforeAttention, h) + all) + block.max(group);
        let attention = attention.max(element * with(NormRole::AfterAttention, s * h));
        let t = self.mlp_tokens.min(s);
        let wide = with(NormRole::BeforeMlp, h) + 2 * i;
        let mlp = element * t * wide.max(with(NormRole::AfterMlp, 2 * h));
        let sums = 48 * (h + all + (h + i) * s.div_ceil(t.max(1)));
        let pass = ByteSize((attention.max(mlp) + sums) as u64);
        // Rows enter a Gram matrix in f32, after their squares and before the next product.
        let down = element * t * (2 * h + i) + 4 * t * i;
        let others = element * s * (h + all) + 4 * t * h.max(all);
        let adding = ByteSize(down.max(others) as u64) + DeviceGrams::adding_bytes(grams, t);
        let widened = Self::widened_bytes(config, s, element);
        ByteSize::of(element, 2 * s * h) + pass.max(adding) + widened
    }

    /// Memory of a product of some rows on a device, with the product that it is compared with.
    pub fn product_bytes(config: &ModelConfig, id: LinearId, rows: usize) -> ByteSize {
        let (features, columns) = id.shape(config);
        let weights = PRODUCT_FEATURES.min(features) * columns;
        // The pieces of the product exist beside the whole product.
        ByteSize::of(rows * (columns + 3 * features) + weights, size_of::<f32>())
    }

    /// Memory of the choice of a matrix's lowest scores: their bits, and a number per column.
    pub fn choice_bytes(rows: usize, columns: usize) -> ByteSize {
        ByteSize((rows * columns / 8 + size_of::<f32>() * (columns + 1)) as u64)
    }

    /// Memory of a sample on its way back through a layer, with the gradients of what is trained. `element` is e.
    pub fn backward_bytes(
        &self,
        config: &ModelConfig,
        seqlen: usize,
        element: usize,
        trained: TrainedSizes,
    ) -> ByteSize {
        let (s, h, i) = (seqlen, config.hidden_size, config.intermediate_size);
        let spec = config.layer(0);
        let with = |norm, elements| if spec.has_norm(norm) { elements } else { 0 };
        let ([heads, q, k], t) = (self.group(&spec), self.mlp_tokens.min(s));
        let group = element * s * (4 * q + 4 * k) + 16 * s * k;
        let (b, keys) = self.block(config, s);
        let bound = spec.scoring.soft_cap.map_or(0, |_| size_of::<f32>());
        let scores = (16 + 2 * element + bound) * heads * b * keys;
        let graph = 56 + 4 * element;
        let of_group = scores.max(with(NormRole::Query, t * graph * q));
        let mlp = element * t * (4 * h + 28 * i);
        let norm = t * h * graph + with(NormRole::AfterMlp, 2 * element * t * i);
        let norms = with(NormRole::BeforeAttention, h) + with(NormRole::AfterAttention, h);
        let states = element
            * s
            * (5 * h + norms + 2 * spec.rows(LinearRole::Q) + 2 * spec.rows(LinearRole::K));
        let piece = (group + of_group).max(mlp).max(norm);
        let widened = Self::widened_bytes(config, s, element);
        ByteSize((states + piece) as u64) + widened + trained.bytes(element)
    }

    /// Memory of a window in the head, for `rows` rows of the vocabulary. `element` is e.
    pub fn head_bytes(
        &self,
        config: &ModelConfig,
        seqlen: usize,
        rows: usize,
        element: usize,
    ) -> ByteSize {
        let tokens = self.logit_tokens(rows).min(seqlen);
        ByteSize::of(element, (seqlen + tokens) * config.hidden_size)
            + ByteSize::of(element + 12, tokens * rows)
            + Self::widened_bytes(config, tokens, element)
    }

    /// Memory of a sample in the whole head of a training, forwards and back. `element` is e.
    pub fn head_backward_bytes(
        &self,
        config: &ModelConfig,
        seqlen: usize,
        element: usize,
    ) -> ByteSize {
        let (rows, h) = (config.vocab_size, config.hidden_size);
        let tokens = self.logit_tokens(rows).clamp(1, seqlen);
        let bound = config.logit_cap.map_or(0, |_| size_of::<f32>());
        ByteSize::of(element, 3 * seqlen * h)
            + ByteSize::of(12 + 2 * element + bound, tokens * rows)
            + ByteSize::of(56 + 4 * element, tokens * h)
            + Self::widened_bytes(config, tokens, element)
    }

    /// Temporary memory of a copy with a cast: the stored bytes of the largest matrix; zero without a cast.
    pub fn cast_bytes(config: &ModelConfig, stored: usize, element: usize) -> ByteSize {
        if stored == element {
            return ByteSize::ZERO;
        }
        let largest = config.linears().map(|id| id.elements(config)).max();
        ByteSize::of(largest.unwrap_or(0), stored)
    }

    /// Memory of a layer's weights on a device: e · (2·H·Q + 2·H·K + 3·H·I), and the norms.
    pub fn layer_bytes(config: &ModelConfig, element: usize) -> ByteSize {
        ByteSize::of(element, config.layer_weights()) + Self::norm_bytes(config, element)
    }

    /// Memory of a layer's norms on a device: e per weight, or 4 where the factor is 1 + w.
    pub fn norm_bytes(config: &ModelConfig, element: usize) -> ByteSize {
        let of_factor = if config.family.norms_add_one { size_of::<f32>() } else { element };
        ByteSize::of(config.norm_weights(), of_factor)
    }

    /// Memory of norms whose factor has another dtype than the arithmetic.
    fn widened_bytes(config: &ModelConfig, seqlen: usize, element: usize) -> ByteSize {
        let is_widened = config.family.norms_add_one && element != size_of::<f32>();
        let rows = (seqlen * config.hidden_size).min(NORMED_AT_ONCE);
        ByteSize::of(if is_widened { rows } else { 0 }, 2 * size_of::<f32>() + element)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn scores_are_cut_so_that_32_bits_index_them() {
        let config = ModelConfig::from_json(&json!({"model_type": "llama", "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}))
        .unwrap();
        let queries = |seqlen| {
            let cut = Tiling::of(&MemorySettings::default(), &config);
            let cut = cut.with_indices_of_32_bits(&config, seqlen);
            assert!(cut.key_value_heads * cut.queries.min(seqlen) * seqlen < 1 << 31);
            cut.queries
        };
        // 32 heads · 512 queries · 2¹⁷ tokens are 2³¹ scores.
        assert_eq!(queries(2048), QUERIES);
        assert_eq!(queries((1 << 17) - 1), QUERIES);
        assert_eq!(queries(1 << 17), QUERIES / 2);
        // A hidden state of 2¹⁹ · 4096 elements cannot be cut.
        assert!(Tiling::can_index(&config, (1 << 19) - 1) && !Tiling::can_index(&config, 1 << 19));
    }
}
