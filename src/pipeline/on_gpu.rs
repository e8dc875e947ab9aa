//! What one GPU holds in each phase while it computes decoder layers: the formulas of the CUDA path.
//!
//! e bytes per element of the arithmetic (the checkpoint's dtype; f32 for f32), S tokens, H hidden, I intermediate, Q = heads ·
//! head_dim, K = key/value heads · head_dim, V vocabulary, t the tokens the MLP handles at once, b = 128 queries at once:
//!
//! ```text
//! layer      stored bytes, twice where the next one is uploaded meanwhile
//! attention  e·S·(3H + 3Q + 4K) + 2·4·heads·b·S          hidden, normed, out; q, k, v, rotated copies; scores and softmax in f32
//! MLP        e·(2·S·H + t·(H + 3·I)) + 4·t·I             gate, up, their product; its squares in f32
//! scoring    3·4·R·in                                    score, threshold test and mask of R rows, at most 64 MiB
//! head       e·V·H + 2·4·r·V                             logits of r rows and their softmax
//! context    512 MiB                                     CUDA context, cuBLAS workspace, kernels
//! ```
//!
//! The context's figure is from the literature (0.3 to 0.6 GiB) and differs with card and driver.

use super::workload::{Job, part};
use crate::bytes::ByteSize;
use crate::linalg::StoredDtype;
use crate::model::{Projection, footprint};
use crate::placement::Need;
use crate::pruning::ColumnSquares;
use crate::run::knobs::Knobs;

/// CUDA context, cuBLAS workspace, kernels.
const CONTEXT: ByteSize = ByteSize(512 << 20);

/// Queries whose scores exist at once.
const QUERIES_AT_ONCE: usize = 128;

/// Scores, thresholds and masks that exist at once.
const SCORES_AT_ONCE: usize = 64 << 20;

/// Bytes per element of the arithmetic for weights of this dtype.
pub(super) fn element(dtype: StoredDtype) -> usize {
    dtype.bytes()
}

/// What each GPU that computes layers holds.
pub(super) fn needs(job: &Job<'_>, knobs: &Knobs) -> Vec<Need> {
    let config = job.config;
    let e = element(job.dtype);
    let (s, h, i) = (job.seqlen, config.hidden_size, config.intermediate_size);
    let (q, k) = (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    );
    let layer = footprint::layer_weights(config, job.dtype, knobs);
    let mut layers = vec![part("context", CONTEXT), part("this layer", layer)];
    if knobs.prefetch {
        layers.push(part("the next layer", layer));
    }
    let groups = knobs
        .attention_heads
        .map_or(1, |heads| config.num_key_value_heads.div_ceil(heads.max(1)));
    let scores = 2 * 4 * config.num_attention_heads.div_ceil(groups) * QUERIES_AT_ONCE.min(s) * s;
    let attention = e * s * (3 * h + q + (2 * q + 4 * k) / groups) + scores;
    let t = knobs.mlp_tokens.min(s);
    let mlp = e * (2 * s * h + t * (h + 3 * i)) + 4 * t * i;
    let with_layers = |phase, what: &str, bytes: usize| Need {
        phase,
        parts: [layers.clone(), vec![part(what, ByteSize(bytes as u64))]].concat(),
    };
    let mut needs = Vec::new();
    let columns: usize = super::output_error::widths(config)
        .iter()
        .map(|&width| ColumnSquares::bytes(width))
        .sum();
    if job.samples > 0 {
        needs.push(with_layers(
            "calibrate",
            "activations and statistics",
            attention.max(mlp) + columns,
        ));
    }
    if job.prunes {
        let widest = Projection::ALL
            .iter()
            .map(|projection| projection.shape(config))
            .map(|(rows, columns)| {
                (3 * 4 * rows * columns).min(SCORES_AT_ONCE.max(3 * 4 * columns))
            })
            .max()
            .unwrap_or(0);
        needs.push(with_layers(
            "score and mask",
            "scores and masks",
            widest + columns,
        ));
    }
    if job.samples > 0 {
        needs.push(with_layers("propagate", "activations", attention.max(mlp)));
    }
    if job.windows > 0 {
        needs.push(with_layers("evaluate", "activations", attention.max(mlp)));
        let v = config.vocab_size;
        let rows = (knobs.logits_bytes.0 as usize / 4 / v.max(1)).clamp(1, s);
        let held = knobs.head_rows.unwrap_or(v).min(v);
        needs.push(Need {
            phase: "head",
            parts: vec![
                part("context", CONTEXT),
                part("head", ByteSize::of(held * h, e)),
                part("logits", ByteSize::of(2 * rows * held, 4)),
                part("one sample", ByteSize::of(2 * s * h, e)),
            ],
        });
    }
    needs
}
