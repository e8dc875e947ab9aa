//! What a model wrote, as a plain record: the object of `prune generate --json`.

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// One prompt and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerationReport {
    /// The version of this program.
    pub prune_version: String,
    /// The folder the model was read from.
    pub model: String,
    /// The text the model was given; with a chat template the rendered one.
    pub prompt: String,
    /// What it added, without special tokens.
    pub text: String,
    /// The tokens of the prompt, special ones included.
    pub prompt_ids: Vec<u32>,
    /// The tokens it added, one that ended the text included.
    pub ids: Vec<u32>,
    /// Why it ended: `eos`, `max_tokens`, `positions`, or `stopped` where nobody read any more.
    pub finish: String,
    /// 0: the likeliest token each time.
    pub temperature: f64,
    /// Drawn from the smallest set of tokens whose probabilities reach this.
    pub top_p: Option<f64>,
    /// Drawn from so many of the likeliest.
    pub top_k: Option<usize>,
    /// Of the draws.
    pub seed: u64,
    /// How fast the prompt was read.
    pub prompt_tokens_per_second: f64,
    /// How fast tokens came, the first one aside; none where there was no other.
    pub tokens_per_second: Option<f64>,
    /// Layers kept in memory.
    pub layers_in_memory: usize,
    /// Layers read from disk for every token.
    pub layers_streamed: usize,
    /// What memory it was to stay within, where the system tells or the command line did.
    pub budget: Option<ByteSize>,
    /// What it was expected to take.
    pub predicted: ByteSize,
    /// The most memory it took, where the system tells.
    pub peak_anonymous: Option<ByteSize>,
    /// Worker threads.
    pub threads: usize,
    /// Everything that was warned of.
    pub warnings: Vec<String>,
    /// What the model of `--compare` wrote.
    pub compare: Option<Box<GenerationReport>>,
}
