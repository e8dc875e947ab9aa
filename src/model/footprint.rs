//! What a model's parts weigh in memory, from its configuration alone: the numbers a plan is made of.

use super::config::LlamaConfig;
use super::head::logit_rows;
use super::layer::{MLP_TOKENS, Projection};
use crate::bytes::ByteSize;
use crate::linalg::{Linear, StoredDtype, attention};

/// The weights of one decoder layer in their stored dtype.
pub fn layer_weights(config: &LlamaConfig, dtype: StoredDtype) -> ByteSize {
    Projection::ALL
        .iter()
        .map(|projection| projection.shape(config))
        .map(|(rows, columns)| ByteSize::of(rows * columns, dtype.bytes()))
        .sum()
}

/// The hidden states of one sample of `seqlen` tokens, in f32.
pub fn hidden_states(config: &LlamaConfig, seqlen: usize) -> ByteSize {
    ByteSize::of(seqlen * config.hidden_size, 4)
}

/// Scratch and activations while one sample passes a layer: the larger of attention and MLP, plus widened weights.
pub fn workspace(
    config: &LlamaConfig,
    dtype: StoredDtype,
    seqlen: usize,
    threads: usize,
) -> ByteSize {
    let hidden = seqlen * config.hidden_size;
    let queries = seqlen * config.num_attention_heads * config.head_dim;
    let keys = seqlen * config.num_key_value_heads * config.head_dim;
    // hidden, normed, q, k, v and one more of q while it is rotated, the context, o's output
    let attention = 4 * (2 * hidden + 2 * queries + 2 * keys + queries.max(hidden))
        + attention::scratch_bytes(seqlen, threads);
    let tokens = seqlen.min(MLP_TOKENS);
    let mlp =
        4 * (hidden + 2 * tokens * config.hidden_size + 2 * tokens * config.intermediate_size);
    let panel = match dtype {
        StoredDtype::F32 => 0,
        StoredDtype::F16 | StoredDtype::Bf16 => Projection::ALL
            .iter()
            .map(|projection| projection.shape(config))
            .map(|(rows, columns)| Linear::panel_bytes(columns, rows))
            .max()
            .unwrap_or(0),
    };
    // The MLP's two wide buffers stay allocated while attention runs.
    let kept = 4 * 2 * tokens * config.intermediate_size;
    ByteSize((attention + kept).max(mlp) as u64) + ByteSize(panel as u64)
}

/// Norm and head while logits are made: the head's weight, one chunk of logits, widened rows.
pub fn head(config: &LlamaConfig, dtype: StoredDtype, seqlen: usize) -> ByteSize {
    let panel = if dtype == StoredDtype::F32 {
        0
    } else {
        Linear::panel_bytes(config.hidden_size, config.vocab_size)
    };
    ByteSize::of(config.vocab_size * config.hidden_size, dtype.bytes())
        + ByteSize::of(
            logit_rows(config.vocab_size).min(seqlen) * config.vocab_size,
            4,
        )
        + ByteSize(panel as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_llama_2_7b_layer_weighs_what_its_parameters_say() {
        let config = LlamaConfig::from_json(
            &json!({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}),
        )
        .unwrap();
        // 4·4096² + 3·4096·11008 = 202,375,168 weights of two bytes.
        assert_eq!(
            layer_weights(&config, StoredDtype::Bf16),
            ByteSize(404_750_336)
        );
        assert_eq!(hidden_states(&config, 2048), ByteSize(32 << 20));
    }
}
