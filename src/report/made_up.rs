//! Manifests for the tests of this room: a run of two layers as `run.json` described it before memory samples and output errors
//! came. Reading these manifests proves that old files load.

use serde_json::{Value, json};

use crate::run::manifest::{PerplexityReport, SCHEMA};
use crate::run::{GenerationReport, Manifest};

const MATRICES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// A run with two layers of seven matrices 10 × 10, without perplexities.
pub(crate) fn manifest(method: &str, ratio: f64) -> Manifest {
    let zeros = (100.0 * ratio).round() as u64;
    let layers: Vec<Value> = (0..2)
        .map(|layer| {
            let matrices: Vec<Value> = MATRICES
                .iter()
                .map(|name| {
                    json!({"name": format!("model.layers.{layer}.{name}"), "shape": [10, 10], "zeros_before": 0,
                           "zeros": zeros, "pruned": zeros, "mask_sha256": "00"})
                })
                .collect();
            json!({"layer": layer, "seconds": 0.5, "sparsity": ratio, "matrices": matrices})
        })
        .collect();
    let text = json!({"dataset": "text", "path": "train.txt", "convention": "as it stands", "text_sha256": "aaaabbbbccccdddd",
        "tokenizer_sha256": "eeee", "total_tokens": 4000, "tokens_used": 256, "windows": 4, "seqlen": 64, "tokens_sha256": "1234567",
        "seed": 0, "starts": [1, 2, 3, 4]});
    let manifest = json!({
        "schema": SCHEMA, "prune_version": "0.1.0", "command": "prune",
        "arguments": ["prune", "--model", "m"], "started_unix_seconds": 1_772_368_440u64, "seconds": 10.0,
        "model": {"path": "m", "identity": "i", "config": {}, "parameters": 1400, "bytes": 5600},
        "arithmetic": {"device": "cpu", "dtype": "f32", "kernel": "gemm", "cpu_features": ["avx2"], "threads": 2},
        "pruning": {"method": method, "sparsity_ratio": ratio, "sparsity_type": "unstructured",
            "include": [], "exclude": [], "matrices": 14, "matrices_in_model": 14, "layer_ratios": null},
        "calibration": text, "sparsity": {"zeros": 14 * zeros, "zeros_before": 0, "weights": 1400, "ratio": ratio},
        "layers": layers, "perplexity": {"dense": null, "pruned": null}, "evaluation": null, "hidden_states": "ram",
        "phases": [{"phase": "calibrate", "seconds": 6.0, "peak_anonymous": 1 << 25},
                   {"phase": "score and mask", "seconds": 4.0, "peak_anonymous": 1 << 24}],
        "peak_anonymous": 1 << 25, "output": null, "warnings": [],
    });
    serde_json::from_value(manifest).expect("a manifest without the newest fields")
}

/// Adds dense and pruned perplexities over 5 windows of 64 tokens.
pub(super) fn evaluated(manifest: &mut Manifest, dense: f64, pruned: f64) {
    let report = |perplexity: f64| PerplexityReport {
        perplexity,
        mean_loss: perplexity.ln(),
        standard_error: 0.01,
        windows: 5,
        seqlen: 64,
    };
    manifest.perplexity.dense = Some(report(dense));
    manifest.perplexity.pruned = Some(report(pruned));
    let text = json!({"dataset": "text", "path": "test.txt", "text_sha256": "9999888877776666",
        "tokenizer_sha256": "eeee", "windows": 5, "seqlen": 64, "tokens_used": 320, "tokens_sha256": "5555"});
    manifest.evaluation = serde_json::from_value(text).expect("a text");
}

/// Makes the run a recovery by factors of rank 2.
pub(super) fn recovered(manifest: &mut Manifest) {
    let recovery = json!({"how": "lora", "trains": "factors", "rank": 2, "target_modules": ["q_proj"], "parameters": 80,
        "optim": "adamw", "rate": 0.001, "steps_of": 1, "states": "f32", "text": manifest.calibration.take(),
        "examples": [4, 2], "new_zeros": 0});
    manifest.pruning = None;
    manifest.recovery = serde_json::from_value(recovery).expect("a recovery");
}

/// The speed of a model with compact weights; `compare` has the name and the speed of the second model.
pub(super) fn speed(
    model: &str,
    tokens_per_second: f64,
    compare: Option<(&str, f64)>,
) -> GenerationReport {
    let compare = compare.map(|(model, rate)| speed(model, rate, None));
    let report = json!({"prune_version": "0.2.0", "model": model, "prompt": "a", "text": "b", "prompt_ids": [1], "ids": [2, 3],
        "finish": "max_tokens", "temperature": 0.0, "top_p": null, "top_k": null, "seed": 0, "prompt_tokens_per_second": 100.0,
        "tokens_per_second": tokens_per_second, "weights": "compact", "layers_in_memory": 2, "layers_streamed": 0, "budget": null,
        "predicted": 1 << 25, "peak_anonymous": null, "threads": 2, "decoding": null, "warnings": [], "compare": compare});
    serde_json::from_value(report).expect("a result of prune generate")
}
