//! Models for comparisons: every family, with settings that reach each difference between families and between layers.

use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

pub(super) const SEQLEN: usize = 75;
pub(super) const HIDDEN: usize = 48;
pub(super) const VOCABULARY: usize = 307;

/// A Llama of two layers.
pub(super) fn llama(dtype: StoredDtype) -> RandomCheckpoint {
    RandomCheckpoint {
        hidden_size: HIDDEN,
        intermediate_size: 80,
        num_attention_heads: 6,
        vocab_size: VOCABULARY,
        max_position_embeddings: SEQLEN,
        dtype,
        ..RandomCheckpoint::default()
    }
}

/// A model of two layers with these further keys in `config.json`.
fn of_family(model_type: &str, settings: Value) -> RandomCheckpoint {
    let of_family = RandomCheckpoint::of_family(model_type).expect("a family");
    let settings = settings.as_object().expect("keys").clone();
    RandomCheckpoint { family: of_family.family, settings, ..llama(StoredDtype::F32) }
}

/// Models of all families. Windows are shorter than a sample; of most models a layer has one and a layer has none.
pub(super) fn families() -> Vec<RandomCheckpoint> {
    let longrope =
        json!({"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5]});
    vec![
        RandomCheckpoint { attention_bias: true, mlp_bias: true, ..of_family("llama", json!({})) },
        of_family("mistral", json!({"sliding_window": 20})),
        of_family(
            "qwen2",
            json!({"use_sliding_window": true, "max_window_layers": 1, "sliding_window": 3}),
        ),
        RandomCheckpoint {
            attention_bias: true,
            head_dim: Some(12),
            ..of_family("qwen3", json!({}))
        },
        of_family(
            "gemma2",
            json!({"query_pre_attn_scalar": 6, "sliding_window": 20, "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 4.0}),
        ),
        of_family(
            "gemma3_text",
            json!({"query_pre_attn_scalar": 12, "sliding_window": 30, "sliding_window_pattern": 2,
                "rope_local_base_freq": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        ),
        of_family(
            "phi3",
            json!({"partial_rotary_factor": 0.5, "sliding_window": 40, "rope_scaling": longrope}),
        ),
        RandomCheckpoint { num_key_value_heads: 3, ..of_family("olmo2", json!({})) },
        of_family(
            "smollm3",
            json!({"no_rope_layers": [1, 0], "use_sliding_window": true, "sliding_window": 33}),
        ),
    ]
}
