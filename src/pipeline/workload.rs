//! What a run needs in memory, from shapes alone, and where its hidden states therefore rest.

use super::output_error;
use crate::bytes::ByteSize;
use crate::linalg::StoredDtype;
use crate::model::{LlamaConfig, footprint};

/// The parts of a run that are in memory at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Two decoder layers in their stored dtype: the one in use and the one being read.
    pub layers: ByteSize,
    /// Scratch and activations of one sample; 0 where none passes the layers.
    pub workspace: ByteSize,
    /// The head and one chunk of logits, while perplexity is taken; 0 without evaluation.
    pub head: ByteSize,
    /// The hidden states of all streams.
    pub hidden_states: ByteSize,
    /// The calibration tokens on which output errors are measured, and one matrix's outputs for them; 0 without calibration.
    pub output_errors: ByteSize,
}

/// How much of the available memory a run plans to use; the rest is for the program itself and everyone else.
const USABLE: f64 = 0.8;

impl Workload {
    /// For streams with these numbers of samples, each of `seqlen` tokens.
    pub fn new(
        config: &LlamaConfig,
        dtype: StoredDtype,
        seqlen: usize,
        streams: &[usize],
        evaluates: bool,
        threads: usize,
    ) -> Self {
        let layer = footprint::layer_weights(config, dtype);
        let passes_samples = streams.iter().any(|&samples| samples > 0);
        let state = footprint::hidden_states(config, seqlen);
        Self {
            layers: layer + layer,
            workspace: if passes_samples {
                footprint::workspace(config, dtype, seqlen, threads)
            } else {
                ByteSize::ZERO
            },
            head: if evaluates {
                footprint::head(config, dtype, seqlen)
            } else {
                ByteSize::ZERO
            },
            hidden_states: ByteSize(
                state
                    .0
                    .saturating_mul(streams.iter().map(|&samples| samples as u64).sum()),
            ),
            output_errors: ByteSize::ZERO,
        }
    }

    /// With output errors measured on a part of this many calibration tokens.
    #[must_use]
    pub fn with_output_errors(mut self, config: &LlamaConfig, calibration_tokens: usize) -> Self {
        self.output_errors = output_error::bytes(config, calibration_tokens);
        self
    }

    /// The peak with hidden states on disk: layers and head never exist together.
    pub fn without_hidden_states(&self) -> ByteSize {
        self.layers.max(self.head) + self.workspace + self.output_errors
    }

    /// Whether hidden states fit beside the rest. Without knowledge of the machine they are assumed to.
    pub fn fits_in_ram(&self, available: Option<ByteSize>) -> bool {
        available.is_none_or(|available| {
            (self.without_hidden_states() + self.hidden_states).0 as f64
                <= available.0 as f64 * USABLE
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn wikitext2_on_a_7b_needs_what_the_design_says() {
        let config = LlamaConfig::from_json(
            &json!({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}),
        )
        .unwrap();
        let workload = Workload::new(&config, StoredDtype::Bf16, 2048, &[166], true, 2);
        // 166 windows · 2048 tokens · 4096 · 4 bytes.
        assert_eq!(workload.hidden_states, ByteSize(166 * 2048 * 4096 * 4));
        assert!(
            workload.fits_in_ram(Some(ByteSize(16 << 30)))
                && !workload.fits_in_ram(Some(ByteSize(6 << 30)))
        );
        assert!(
            workload.without_hidden_states() < ByteSize(3 << 29),
            "{}",
            workload.without_hidden_states()
        );
    }
}
