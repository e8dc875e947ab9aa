//! Tiling of a device's work, and the memory of each tile. Plans and the ledger consist of these numbers.
//!
//! e bytes per element of the arithmetic; S tokens of a sample, H hidden_size, I intermediate_size, V vocab_size; a group of
//! key/value heads with its queries is q and k elements wide, all of them Q and K; b queries and t tokens at once, w the largest window.
//! [x: y] is y in families that have x:
//!
//! ```text
//! input      e·S·H, beside each of the next four;  forward e·S·H more: the output of the sample before
//! attention  e·S·([norm before: H] + Q) normed, context, and the larger of
//!            e·S·max(2q + k, q + 3k) q, k, v of a group, one of them before norm and rotation;
//!            e·S·(q + 2k) + e·b·q + e·h·b·min(S, w + b) the same, queries or result of a block, and scores of h heads
//! o          e·S·(Q + H) context and output;  [norm after: e·S·2H the output and its norm]
//! MLP        e·S·H output, and the larger of e·t·([norm before: H] + 2I) normed, gate, up;  e·t·(I + H) down
//!            [norm after: e·t·2H the output of down, and its norm]
//! grams      8·Σ T(n) sums of inputs of n columns in panels of p rows, T(n) elements of an upper triangle;
//!            4·(2·p·n + t·n) two panels and t rows turned, with e·n·r + [f16, bf16: 4·t·n] rows; r = S and no output before q and o, else t
//! observed   48·Σ n sums of inputs of n columns, joined, and the sums of the sample before
//! product    4·n·(w + 2·m) + 4·1024·w   n rows of w columns, their products before and after a change, and weights of some of m features
//! head       e·S·H, and the larger of e·r·H + [f16, bf16: e]·r·v + [bound: 4]·r·v + 4·r·v;  12·r·v  normed and logits of r tokens for v rows
//!            of the vocabulary; the logits, less the largest, and their exponentials
//! training   3·e·S·H + (12 + 2e + [bound: 4])·r·V + (56 + 4e)·r·H the same, forwards and back, and the gradient
//! backward   e·S·(2H + [norm before: H]) input, gradient, normed, with static bytes of factors, and the largest of
//!   MLP      e·S·(Q + H) context and the input of the MLP; e·t·([norm before: H] + [norm after: H]) and e·t·g·I, the graph of the activation,
//!            g = 29, with GELU 36;  4·P sums;  [t < S: e·S·H + 4·m gradients of tokens before, m of P are of the MLP]
//!   norm     the same with (56 + 4e)·t·H + [norm after: 2·e·t·I] in place of the graph
//!   weights  e·S·(Q + H) + e·t·([norms: 2H] + 3I) and 4·(2P + p) the sums and the sample's gradients, of P parameters each, and a matrix's
//!            new sum, of at most p parameters; (3e + 8)·M the whole gradient of the largest matrix, of M weights
//!   heads    e·S·(H + 2Q + 2K) states and gradients, 8·P, e·S·(2q + 4k) + 2·e·b·q + 8·S·k a group, with the larger of
//!            (12 + [bound: 4])·h·b·min(S, w + b) its scores and their gradients;  [norm: t·(56 + 4e)·q] the graph of q's norm
//!   input    e·S·(2H + Q + 2K) gradients, e·t·3H, 8·P, and [norm before: (56 + 4e)·t·H]
//! factors    e·P and 1 byte per weight of the masks of P parameters
//! norms      [factor 1 + w: (8 + e)·min(S·H, 2²⁰) rows in f32, in f16 and bf16], in all but products and grams
//! ```

use std::ops::Range;

use super::gram::DeviceGrams;
use super::operators::NORMED_AT_ONCE;
use crate::bytes::ByteSize;
use crate::model::family::Activation;
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
    /// Trained parameters of the MLP's matrices.
    pub of_mlp: usize,
    /// Weights of the largest trained matrix.
    pub largest_matrix: usize,
    /// Weights of all matrices whose factors are trained.
    pub masked: usize,
}

impl TrainedSizes {
    /// Memory of masks and factors.
    fn factors(&self, element: usize) -> usize {
        match self.masked {
            0 => 0,
            masked => masked + element * self.parameters,
        }
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

    /// Memory of a sample that passes a layer, with the output of the sample before, which the host takes meanwhile. `element` is e.
    pub fn pass_bytes(&self, config: &ModelConfig, seqlen: usize, element: usize) -> ByteSize {
        let before = ByteSize::of(element, seqlen * config.hidden_size);
        before + self.capture_bytes(config, seqlen, element, &[])
    }

    /// Memory of a sample that is observed, while rows of inputs with `grams` columns enter Gram matrices; without the sums, which
    /// [`DeviceGrams::bytes`] counts.
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
        let group = s * (2 * q + k).max(q + 3 * k);
        let block = s * (q + 2 * k) + b * q + heads * b * keys;
        let attention = s * (with(NormRole::BeforeAttention, h) + all) + block.max(group);
        let out = (s * (all + h)).max(with(NormRole::AfterAttention, s * 2 * h));
        let t = self.mlp_tokens.min(s);
        let wide = (with(NormRole::BeforeMlp, h) + 2 * i).max(i + h);
        let mlp = s * h + t * wide.max(with(NormRole::AfterMlp, 2 * h));
        let sums = 48 * (h + all + (h + i) * s.div_ceil(t.max(1)));
        let pass = element * attention.max(out).max(mlp);
        // Rows enter a Gram matrix in f32, after their squares.
        let widened_rows = if element == size_of::<f32>() { 0 } else { size_of::<f32>() * t };
        let points = [(h, s, 0), (all, s, 0), (h, t, s * h), (i, t, s * h)].into_iter();
        let points = points.filter(|(n, ..)| grams.contains(n)).map(|(n, alive, out)| {
            let rows = n * (element * alive + widened_rows) + element * out;
            rows + DeviceGrams::adding_bytes(&[n], t).0 as usize
        });
        let adding = points.max().unwrap_or(0);
        let widened = Self::widened_bytes(config, s, element);
        ByteSize((element * s * h + pass.max(adding) + sums) as u64) + widened
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
        let [all, keys] = [LinearRole::Q, LinearRole::K].map(|role| spec.rows(role));
        let gradients = size_of::<f32>() * trained.parameters;
        let norm_graph = 56 + 4 * element;

        let states = element * s * (all + h);
        let normed = element * t * (with(NormRole::BeforeMlp, h) + with(NormRole::AfterMlp, h));
        let of_activation = match spec.activation {
            Activation::Silu => 29,
            Activation::GeluTanh => 36,
        };
        let graph = element * t * of_activation * i;
        let of_norm = t * h * norm_graph + with(NormRole::AfterMlp, 2 * element * t * i);
        let of_mlp = size_of::<f32>() * trained.of_mlp;
        let before = if t < s { element * s * h + of_mlp } else { 0 };
        let mlp = states + normed + graph.max(of_norm) + gradients + before;

        let new = size_of::<f32>() * trained.most_parameters;
        let whole = (3 * element + 8) * trained.largest_matrix;
        let weights = states + normed + element * t * 3 * i + 2 * gradients + new + whole;

        let (b, seen) = self.block(config, s);
        let bound = spec.scoring.soft_cap.map_or(0, |_| size_of::<f32>());
        let scores = (3 * size_of::<f32>() + bound) * heads * b * seen;
        let of_group = scores.max(with(NormRole::Query, t * norm_graph * q));
        let group = element * (s * (2 * q + 4 * k) + 2 * b * q) + 2 * size_of::<f32>() * s * k;
        let of_heads = element * s * (h + 2 * all + 2 * keys) + group + of_group;
        let of_heads = of_heads + 2 * gradients;

        let of_input = element * (s * (2 * h + all + 2 * keys) + 3 * t * h) + 2 * gradients;
        let of_input = of_input + with(NormRole::BeforeAttention, t * h * norm_graph);

        let sample = element * s * (2 * h + with(NormRole::BeforeAttention, h));
        let most = mlp.max(weights).max(of_heads).max(of_input);
        ByteSize((sample + most + trained.factors(element)) as u64)
            + Self::widened_bytes(config, s, element)
    }

    /// Memory of a window in the head, for `rows` rows of the vocabulary. `element` is e.
    pub fn head_bytes(
        &self,
        config: &ModelConfig,
        seqlen: usize,
        rows: usize,
        element: usize,
    ) -> ByteSize {
        let (h, tokens) = (config.hidden_size, self.logit_tokens(rows).min(seqlen));
        let wide = size_of::<f32>();
        let narrow = if element == wide { 0 } else { element };
        let bound = config.logit_cap.map_or(0, |_| wide);
        let logits = element * tokens * h + (narrow + bound + wide) * tokens * rows;
        let exponentials = 3 * wide * tokens * rows;
        ByteSize((element * seqlen * h + logits.max(exponentials)) as u64)
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
