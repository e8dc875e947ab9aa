//! Memory of each phase of a run, computed from the model's shape and the [`MemorySettings`]. Plans consist of these numbers.
//!
//! Symbols: L tokens of a sample, H hidden_size, I intermediate_size, Q and K the widths of all queries and all keys, V
//! vocab_size, e bytes of a stored element. Sizes are bytes; activations are f32, 4 bytes per element.
//!
//! | function | memory of |
//! | --- | --- |
//! | [`layer_weights`] | a decoder layer, in use or waiting: weights, or masks; norms and biases |
//! | [`layer_packed`] | the packed weights of a layer, if products keep them |
//! | [`context`] | the rotary tables, from the first layer to the end of the run |
//! | [`products`](SamplePass::products) | the packed factors of products, from the first product on |
//! | [`forward`](SamplePass::forward) | a sample inside a layer |
//! | [`score`] | a matrix that is scored |
//! | [`head`] | the head, logits, and three numbers per token of the windows |
//! | [`divergence`] | the comparison of two models at their heads |
//! | [`hidden_states`] | the states of a sample between layers |
//!
//! A plan adds the parts that exist together: `layer_weights` (twice when reading ahead) + `context` + a phase + hidden states.
//! The head's phase has no layer. The workspace of [`forward`](SamplePass::forward) stays until the run ends, so [`score`] is added to it
//! ([`workspace`]), and [`head`] uses it. Counted elsewhere: statistics and rows for output errors (`pipeline`), a state per stream on
//! its way to disk, the program, tokens and the tokenizer.

use super::config::ModelConfig;
use super::head::{Head, largest_chunk, largest_tokens};
use super::layer::layout::AttentionLayout;
use super::layer::sizes::{backward_elements, kept_elements};
use super::linears::{InputId, LinearId, LinearRole};
use super::reading::stored_dtype;
use super::rotary::Rotary;
use super::tensors::TensorRole;
use crate::bytes::ByteSize;
use crate::checkpoint::WeightSource;
use crate::linalg::parts::{LEAST_ROWS, largest_part};
use crate::linalg::product::{self, Kernel, PackedWeight, Product};
use crate::linalg::{Linear, StoredDtype, attention};
use crate::run::memory_settings::{MemorySettings, WeightsHeld};

/// Dtypes of stored weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtypes {
    /// The dtype of decoder layers; the widest dtype if they differ.
    pub layers: StoredDtype,
    /// The dtype of the head, or of the embedding if it is the head.
    pub head: StoredDtype,
}

impl Dtypes {
    /// The same dtype for all weights.
    pub fn all(dtype: StoredDtype) -> Self {
        Self { layers: dtype, head: dtype }
    }
}

/// Dtypes of a checkpoint's decoder layers and head, for plans, without tensors that
/// [`DecoderLayer::check`](super::DecoderLayer::check) and [`Head::check`] refuse.
pub fn stored_dtypes(source: &dyn WeightSource, config: &ModelConfig) -> Dtypes {
    let of = |name: &str| stored_dtype(source.entry(name)?).ok();
    let layers = config
        .linear_names()
        .filter_map(|name| of(&name))
        .reduce(StoredDtype::wider)
        .unwrap_or(StoredDtype::F32);
    Dtypes { layers, head: of(Head::tensor_name(config)).unwrap_or(layers) }
}

/// Bytes of an f32.
const F32: usize = 4;

/// Bytes per thread while a token is computed: scores and contexts of its attention, and memory that no other part counts. An allowance:
/// with the scores and contexts alone, measured peaks of small models pass the plan.
const OF_A_TOKEN: usize = 2 << 20;

/// Memory of a decoder layer: weights e · (2·H·Q + 2·H·K + 3·H·I), or masks of 1 bit per weight if matrices stay on disk; norms
/// 4 · 2·H, with two norms; 4 bytes per element of a bias.
pub fn layer_weights(
    config: &ModelConfig,
    dtype: StoredDtype,
    settings: &MemorySettings,
) -> ByteSize {
    let mut bytes = ByteSize::of(config.norm_weights(), F32);
    for id in config.linears() {
        let (rows, columns) = id.shape(config);
        bytes = bytes
            + match settings.weights {
                WeightsHeld::Layer => ByteSize::of(rows * columns, dtype.bytes()),
                WeightsHeld::Matrix => ByteSize::of((rows * columns).div_ceil(8), 1),
            };
        if config.has_bias(id) {
            bytes = bytes + ByteSize::of(rows, F32);
        }
    }
    bytes
}

/// Memory of a decoder layer's packed weights, in addition to [`layer_weights`]: 2·p · (2·H·Q + 2·H·K + 3·H·I), rows and columns
/// rounded up to 32. p is the number of bf16 parts of an element: 1 in bf16 products; in split f32 products 1 for bf16, 2 for f16 and 3
/// for f32 weights.
pub fn layer_packed(config: &ModelConfig, kernel: Kernel) -> ByteSize {
    let bytes = config.linears().map(|id| {
        let (rows, columns) = id.shape(config);
        ByteSize::of(PackedWeight::bytes(kernel, rows, columns), 1)
    });
    bytes.sum()
}

/// The number of a model's weights without biases.
pub fn parameters(config: &ModelConfig) -> u64 {
    config
        .tensors()
        .filter(|tensor| !matches!(tensor.role, TensorRole::Bias(_)))
        .map(|tensor| tensor.shape.iter().product::<usize>() as u64)
        .sum()
}

/// Memory of the hidden states of a sample of `seqlen` tokens: 4·L·H.
pub fn hidden_states(config: &ModelConfig, seqlen: usize) -> ByteSize {
    ByteSize::of(seqlen * config.hidden_size, F32)
}

/// Memory of the rotary tables, 4·L·r each with r rotated elements of a head, which exist from the first layer on.
pub fn context(config: &ModelConfig, seqlen: usize) -> ByteSize {
    ByteSize::of(Rotary::bytes(&config.ropes, seqlen), 1)
}

/// Returns whether a layer's weights stay packed while the layer is in use.
pub fn keeps_packed(kernel: Kernel, settings: &MemorySettings) -> bool {
    kernel.keeps() && settings.keeps_packed()
}

/// A sample's pass through a layer, and the settings of the memory for it.
#[derive(Clone, Copy)]
pub struct SamplePass<'a> {
    /// The shape of the model.
    pub config: &'a ModelConfig,
    /// The kernel of the products of activations.
    pub kernel: Kernel,
    /// Tokens of the sample.
    pub seqlen: usize,
    /// Threads that compute.
    pub threads: usize,
    /// The sizes of parts.
    pub settings: &'a MemorySettings,
}

impl SamplePass<'_> {
    /// Memory of the packed factors of products: X, and per thread a slab of W unless W stays packed.
    /// `head` is the kernel of the head, if logits are computed.
    pub fn products(self, head: Option<Kernel>) -> ByteSize {
        let Self { config, seqlen, threads, settings, .. } = self;
        let of_head = head.map(|kernel| {
            let rows = largest_chunk(config.vocab_size, settings.head_rows);
            Product {
                kernel,
                tokens: largest_tokens(seqlen, settings.logits_bytes, rows),
                columns: vec![rows],
                inner: config.hidden_size,
                is_kept: false,
                is_in_parts: false,
            }
        });
        let others = of_head.into_iter().collect();
        let all = self.forward_products(others);
        ByteSize::of(product::packed_bytes(&all, threads), 1)
    }

    /// The products of a layer, and `others`.
    pub(super) fn forward_products(self, others: Vec<Product>) -> Vec<Product> {
        let Self { config, kernel, seqlen, settings, .. } = self;
        let mlp_tokens = largest_part(seqlen, settings.mlp_tokens, LEAST_ROWS);
        let spec = config.layer(0);
        // Rows whose first is inside a packed unit are packed again: of a group of heads, or of a role in a matrix of several.
        let begins = |role: LinearRole| PackedWeight::begins_at(kernel, spec.part(role).1.start);
        let begins_within = |input: InputId| match input {
            InputId::Attention => {
                let is_parted = settings.attention_heads.is_some();
                (is_parted && !PackedWeight::begins_at(kernel, config.head_dim))
                    || ![LinearRole::K, LinearRole::V].into_iter().all(begins)
            }
            InputId::Mlp => !begins(LinearRole::Up),
            InputId::O | InputId::Down => false,
        };
        let layout = AttentionLayout::new(&spec, seqlen, settings);
        // Linears with the same input are multiplied together.
        let of_layer = InputId::ALL.into_iter().flat_map(|point| {
            let is_mlp = matches!(point, InputId::Mlp | InputId::Down);
            let shapes =
                config.linears().filter(move |id| id.input() == point).map(|id| id.shape(config));
            let columns: Vec<Vec<usize>> = match point {
                InputId::Attention => layout.group_columns().map(Vec::from).collect(),
                InputId::Mlp => vec![vec![config.intermediate_size; 2]],
                _ => vec![shapes.clone().map(|(rows, _)| rows).collect()],
            };
            let product = move |columns| Product {
                kernel,
                tokens: if is_mlp { mlp_tokens } else { seqlen },
                columns,
                inner: shapes.clone().map(|(_, columns)| columns).max().unwrap_or(0),
                is_kept: keeps_packed(kernel, settings) && !begins_within(point),
                is_in_parts: false,
            };
            columns.into_iter().map(product)
        });
        of_layer.chain(others).collect()
    }

    /// Memory of a sample that passes a layer (calibrate, propagate, evaluate): the [`workspace`], and the larger of attention's scratch
    /// ([`attention::scratch_bytes`]) and the output 4·L·H. The owner of the input counts the input.
    /// Observation takes no more, because attention's output is also the MLP's input.
    pub fn forward(self, dtype: StoredDtype) -> ByteSize {
        let Self { config, kernel, seqlen, threads, settings } = self;
        let scratch = attention::scratch_bytes(kernel, config.head_dim, seqlen, seqlen, threads);
        workspace(config, dtype, seqlen, settings)
            + ByteSize::of(scratch, 1).max(hidden_states(config, seqlen))
    }

    /// Memory of a sample's backward pass through a layer: [`backward_elements`] · 4, scratch of attention, the sample, the gradient of the
    /// output and the gradient of the input, 3·4·L·H. Gradients of weights come in addition, and kept activations ([`kept_activations`]).
    pub fn backward(self, is_kept: bool) -> ByteSize {
        let Self { config, kernel, seqlen, threads, settings } = self;
        let elements = backward_elements(config, seqlen, settings.mlp_tokens, is_kept);
        let scratch = attention::backward::backward_scratch_bytes(
            kernel,
            config.head_dim,
            seqlen,
            config.widest_scoring(),
            threads,
        );
        let state = hidden_states(config, seqlen);
        ByteSize::of(elements, F32) + ByteSize::of(scratch, 1) + state + state + state
    }

    /// Memory of the packed factors of the products of a backward pass, beyond [`products`](SamplePass::products): dy·W and dyᵀ·x of the largest matrix,
    /// the second by the kernel `of_gradients`.
    pub fn backward_products(self, of_gradients: Kernel, is_of_factors: bool) -> ByteSize {
        let all = self.gradient_products(of_gradients, is_of_factors);
        let forward = self.products(None);
        let backward = ByteSize::of(product::packed_bytes(&all, self.threads), 1);
        ByteSize(backward.0.saturating_sub(forward.0))
    }

    /// The products of a layer's backward pass.
    pub(super) fn gradient_products(
        self,
        of_gradients: Kernel,
        is_of_factors: bool,
    ) -> Vec<Product> {
        let Self { config, kernel, seqlen, settings, .. } = self;
        let mlp_tokens = largest_part(seqlen, settings.mlp_tokens, LEAST_ROWS);
        let of_matrix = |id: LinearId| {
            let (out, inner) = id.shape(config);
            let tokens = match id.is_attention() {
                true => seqlen,
                false => mlp_tokens,
            };
            let product = |kernel, tokens, inner_of_product, is_in_parts| Product {
                kernel,
                tokens,
                columns: vec![inner],
                inner: inner_of_product,
                is_kept: false,
                is_in_parts,
            };
            [product(kernel, tokens, out, false), product(of_gradients, out, tokens, is_of_factors)]
        };
        config.linears().flat_map(of_matrix).collect()
    }
}

/// Memory of the workspace after the first sample: [`activations`] and [`rows_read`].
pub fn workspace(
    config: &ModelConfig,
    dtype: StoredDtype,
    seqlen: usize,
    settings: &MemorySettings,
) -> ByteSize {
    activations(config, seqlen, settings) + rows_read(config, dtype, settings)
}

/// Memory of activations: 4 bytes times the larger of attention and MLP:
///
/// * attention: L·max(H, Q) + L·Q + 2·L·K; in p groups of heads L·H + L·Q + (L·Q + 2·L·K) / p
/// * MLP: t·(H + 2·I), t the tokens at once
pub fn activations(config: &ModelConfig, seqlen: usize, settings: &MemorySettings) -> ByteSize {
    let layout = AttentionLayout::new(&config.layer(0), seqlen, settings);
    let attention: usize = layout.buffers().iter().sum();
    let tokens = largest_part(seqlen, settings.mlp_tokens, LEAST_ROWS);
    let mlp = tokens * (config.hidden_size + 2 * config.intermediate_size);
    ByteSize::of(attention.max(mlp), F32)
}

/// Memory of a weight's rows that are read at once if matrices stay on disk: e·in·r for the largest matrix, r·in about 2²². Else zero.
pub fn rows_read(config: &ModelConfig, dtype: StoredDtype, settings: &MemorySettings) -> ByteSize {
    if settings.weights == WeightsHeld::Layer {
        return ByteSize::ZERO;
    }
    let bytes = config.linears().map(|id| {
        let (rows, columns) = id.shape(config);
        ByteSize::of(Linear::rows_at_once(columns, rows) * columns, dtype.bytes())
    });
    bytes.max().unwrap_or_default()
}

/// Memory of text generation: the prompt passes in blocks as in `pass` ([`forward`](SamplePass::forward)), and the last block sees
/// `capacity` cached tokens; a row of logits, 4·V; the [`context`] of all positions.
pub fn generation(pass: &SamplePass<'_>, dtype: StoredDtype, capacity: usize) -> ByteSize {
    let SamplePass { config, kernel, seqlen: block, threads, .. } = *pass;
    let scratch = |keys| attention::scratch_bytes(kernel, config.head_dim, block, keys, threads);
    let behind_a_cache = scratch(capacity).saturating_sub(scratch(block));
    pass.forward(dtype)
        + ByteSize::of(behind_a_cache, 1)
        + ByteSize::of(config.vocab_size, F32)
        + pass.products(None)
        + ByteSize::of(threads, OF_A_TOKEN)
        + context(config, capacity)
}

/// Memory of the activations of a layer and a sample that are kept for the backward pass.
pub fn kept_activations(config: &ModelConfig, seqlen: usize) -> ByteSize {
    ByteSize::of(kept_elements(config, seqlen), F32)
}

/// Memory of the head's weight in its stored dtype: e·V·H.
pub fn head_weight(config: &ModelConfig, dtype: StoredDtype) -> ByteSize {
    ByteSize::of(config.vocab_size * config.hidden_size, dtype.bytes())
}

/// Memory of scoring a matrix, in addition to layer and workspace:
///
/// * the mask, 1 bit per weight. If matrices stay on disk, the layer counts it too.
/// * the matrix, e·in·out, if matrices stay on disk
/// * per thread a row of scores, 4·in, and the larger of their keys, 4·in, and 2¹⁹ bytes of counters for a threshold over the whole
///   matrix
/// * a list of rows, 8·out, and column factors, 4·in
pub fn score(
    config: &ModelConfig,
    dtype: StoredDtype,
    threads: usize,
    settings: &MemorySettings,
) -> ByteSize {
    let scored = config.linears().map(|id| {
        let (rows, columns) = id.shape(config);
        let matrix = match settings.weights {
            WeightsHeld::Layer => ByteSize::ZERO,
            WeightsHeld::Matrix => ByteSize::of(rows * columns, dtype.bytes()),
        };
        matrix
            + ByteSize::of((rows * columns).div_ceil(8), 1)
            + ByteSize::of(threads, F32 * columns + (F32 * columns).max(COUNTERS))
            + ByteSize::of(rows, size_of::<usize>())
            + ByteSize::of(columns, F32)
    });
    scored.max().unwrap_or_default()
}

/// A histogram of 2¹⁶ counters of 8 bytes.
const COUNTERS: usize = 8 << 16;

/// Memory of norm and head while logits are computed, in addition to [`context`]:
///
/// * the head's weight, e·c·H with c = V or the rows in memory at once; the norm, 4·H
/// * normed states and logits, 4·t·(H + c) for t tokens with 4·t·c about the budget of logits; at least the [`activations`] that the
///   layers left
/// * the [`rows_read`] that the layers left
/// * 24 bytes per token of all windows of one side: largest logit, sum of exponentials, logit of the next token
pub fn head(
    config: &ModelConfig,
    dtypes: Dtypes,
    passed: HeadTokens,
    settings: &MemorySettings,
) -> ByteSize {
    let HeadTokens { windows, seqlen, with_logits } = passed;
    let columns = config.hidden_size;
    let rows = largest_chunk(config.vocab_size, settings.head_rows);
    let tokens = largest_tokens(with_logits, settings.logits_bytes, rows);
    head_chunk(config, dtypes, settings)
        + ByteSize::of(tokens * (columns + rows), F32).max(activations(config, seqlen, settings))
        + rows_read(config, dtypes.layers, settings)
        + ByteSize::of(windows * seqlen, PER_PREDICTION)
}

/// The tokens that pass the head.
#[derive(Debug, Clone, Copy)]
pub struct HeadTokens {
    /// Windows of one side whose tokens all have logits.
    pub windows: usize,
    /// Tokens of a window or another sample.
    pub seqlen: usize,
    /// Tokens of a sample that have logits.
    pub with_logits: usize,
}

/// Memory of the rows of the head that are in memory at once, e·c·H, and of the norm, 4·H.
pub fn head_chunk(config: &ModelConfig, dtypes: Dtypes, settings: &MemorySettings) -> ByteSize {
    let rows = largest_chunk(config.vocab_size, settings.head_rows);
    ByteSize::of(rows * config.hidden_size, dtypes.head.bytes())
        + ByteSize::of(config.hidden_size, F32)
}

/// Memory of the comparison of two models at their heads, in addition to [`head`]: the logits of the dense model, 4·t·c, the three numbers
/// per token of the second side, and 160 bytes per token for the numbers of its position while ranks exchange them.
pub fn divergence(
    config: &ModelConfig,
    seqlen: usize,
    windows: usize,
    settings: &MemorySettings,
) -> ByteSize {
    let rows = largest_chunk(config.vocab_size, settings.head_rows);
    let tokens = largest_tokens(seqlen, settings.logits_bytes, rows);
    ByteSize::of(tokens * rows, F32)
        + ByteSize::of(windows * seqlen, PER_PREDICTION + PER_COMPARISON)
}

/// Bytes per position of a comparison.
const PER_COMPARISON: usize = 160;

/// Bytes per token between two parts of the vocabulary.
const PER_PREDICTION: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn llama_2_7b() -> ModelConfig {
        ModelConfig::from_json(
            &json!({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}),
        )
        .unwrap()
    }

    #[test]
    fn a_llama_2_7b_layer_weighs_what_its_parameters_say() {
        let (config, mut settings) = (llama_2_7b(), MemorySettings::default());
        // 4·4096² + 3·4096·11008 = 202,375,168 weights of two bytes, and two norms of 4096 f32.
        let norms = 2 * 4096 * 4;
        assert_eq!(
            layer_weights(&config, StoredDtype::Bf16, &settings),
            ByteSize(404_750_336 + norms)
        );
        settings.weights = WeightsHeld::Matrix;
        assert_eq!(
            layer_weights(&config, StoredDtype::Bf16, &settings),
            ByteSize(202_375_168 / 8 + norms)
        );
        assert_eq!(hidden_states(&config, 2048), ByteSize(32 << 20));
    }

    #[test]
    fn every_knob_makes_its_phase_smaller() {
        let (config, default) = (llama_2_7b(), MemorySettings::default());
        let dtype = StoredDtype::Bf16;
        let pass = |settings: &MemorySettings| workspace(&config, dtype, 2048, settings);
        // Attention: four times 2048·4096 elements (128 MiB); MLP: 1024·(4096 + 2·11008) (102 MiB).
        assert_eq!(pass(&default), ByteSize(128 << 20));
        let half = MemorySettings { attention_heads: Some(16), mlp_tokens: 512, ..default.clone() };
        // normed and context, half of q, k and v: 2 + 1.5 times 32 MiB.
        assert_eq!(pass(&half), ByteSize(112 << 20));
        let passed = HeadTokens { windows: 166, seqlen: 2048, with_logits: 2048 };
        let end = |settings: &MemorySettings| head(&config, Dtypes::all(dtype), passed, settings);
        let parts = MemorySettings {
            head_rows: Some(4000),
            logits_bytes: ByteSize(8 << 20),
            ..default.clone()
        };
        assert!(end(&parts) < end(&half) && end(&half) <= end(&default));
        let matrix = MemorySettings { weights: WeightsHeld::Matrix, ..default.clone() };
        assert!(score(&config, dtype, 2, &matrix) > score(&config, dtype, 2, &default));
    }
}
