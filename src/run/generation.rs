//! The text that a model wrote, as a plain record: the object of `prune generate --json`.

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// Decoding compared with a loop that only reads the weights, in the same process with the same threads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DecodingSpeed {
    /// The weights that a token reads: the matrices of all layers and the head. Keys and values come in addition.
    pub bytes_per_token: ByteSize,
    /// Bytes of weights that decoding read in a second.
    pub bytes_per_second: f64,
    /// Bytes that the loop read in a second.
    pub read_loop_bytes_per_second: f64,
    /// Decoding's share of it.
    pub share: f64,
    /// Tokens per second at the loop's rate.
    pub limit_tokens_per_second: f64,
    /// The same with all matrices as stored.
    pub dense_limit_tokens_per_second: f64,
}

/// A prompt and its continuation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerationReport {
    /// The version of this program.
    pub prune_version: String,
    /// The folder the model was read from.
    pub model: String,
    /// The text given to the model: with a chat template, the rendered text.
    pub prompt: String,
    /// The text that the model added, without special tokens.
    pub text: String,
    /// The tokens of the prompt, special tokens included.
    pub prompt_ids: Vec<u32>,
    /// The tokens that the model added, the end token included.
    pub ids: Vec<u32>,
    /// The cause of the end: `eos`, `max_tokens`, `positions`, or `stopped` when the reader closed the output.
    pub finish: String,
    /// The sampling temperature; at 0 the likeliest token is chosen.
    pub temperature: f64,
    /// The probability of the smallest set of tokens that is sampled from.
    pub top_p: Option<f64>,
    /// The number of likeliest tokens that are sampled from.
    pub top_k: Option<usize>,
    /// The seed of sampling.
    pub seed: u64,
    /// Prompt tokens per second.
    pub prompt_tokens_per_second: f64,
    /// New tokens per second, without the first token; absent with a single token.
    pub tokens_per_second: Option<f64>,
    /// The form of the decoder's matrices in memory: `dense`, `compact` or `int8`.
    pub weights: String,
    /// The form of the head's matrix in memory: `stored` or `int8`; empty in older records.
    #[serde(default)]
    pub head: String,
    /// The element type of cached keys and values: `f32` or `bf16`; empty in older records.
    #[serde(default)]
    pub kv_cache: String,
    /// Layers kept in memory.
    pub layers_in_memory: usize,
    /// Layers read from disk for every token.
    pub layers_streamed: usize,
    /// The memory budget, by the command line or the system; absent without either.
    pub budget: Option<ByteSize>,
    /// The predicted memory.
    pub predicted: ByteSize,
    /// The peak memory; absent on systems that do not report it.
    pub peak_anonymous: Option<ByteSize>,
    /// Worker threads.
    pub threads: usize,
    /// Decoding compared with the speed of memory, with `--bench`.
    pub decoding: Option<DecodingSpeed>,
    /// All warnings.
    pub warnings: Vec<String>,
    /// The text of the model of `--compare`.
    pub compare: Option<Box<GenerationReport>>,
}
