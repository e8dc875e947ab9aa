//! The end of the model: the last norm and the language-model head, applied a few rows at a time.

use anyhow::Result;
use candle_core::Tensor;

use super::config::LlamaConfig;
use super::embedding::EMBEDDING;
use super::{read_matrix, read_vector};
use crate::checkpoint::WeightSource;
use crate::linalg::{Linear, tensor};

/// Logits that exist at once, in elements: 128 MiB of f32, 1048 tokens of a vocabulary of 32 000 or 261 of 128 256.
const LOGITS_AT_ONCE: usize = 1 << 25;

/// Tokens whose logits exist at once.
pub fn logit_rows(vocab_size: usize) -> usize {
    (LOGITS_AT_ONCE / vocab_size.max(1)).max(1)
}

/// The last norm's weight.
pub const NORM: &str = "model.norm.weight";
const LM_HEAD: &str = "lm_head.weight";

/// Norm and head, in memory.
#[derive(Debug)]
pub struct Head {
    norm: Tensor,
    rms_norm_eps: f32,
    lm_head: Linear,
}

impl Head {
    /// The tensor the head's weight is read from: `lm_head.weight`, or the embedding where they are tied.
    pub fn tensor_name(config: &LlamaConfig) -> &'static str {
        if config.tie_word_embeddings {
            EMBEDDING
        } else {
            LM_HEAD
        }
    }

    /// Checks shapes, reading headers only.
    ///
    /// # Errors
    /// Fails when the norm or the head is missing or of another shape.
    pub fn check(source: &dyn WeightSource, config: &LlamaConfig) -> Result<()> {
        source.require(NORM, &[config.hidden_size])?;
        source.require(
            Self::tensor_name(config),
            &[config.vocab_size, config.hidden_size],
        )?;
        Ok(())
    }

    /// Reads norm and head.
    ///
    /// # Errors
    /// As [`Head::check`], and when reading fails.
    pub fn load(source: &dyn WeightSource, config: &LlamaConfig) -> Result<Self> {
        let norm = tensor::from_vec(
            read_vector(source, NORM, config.hidden_size)?,
            &[config.hidden_size],
        )?;
        let weight = read_matrix(
            source,
            Self::tensor_name(config),
            config.vocab_size,
            config.hidden_size,
        )?;
        Ok(Self {
            norm,
            rms_norm_eps: config.rms_norm_eps as f32,
            lm_head: Linear { weight, bias: None },
        })
    }

    /// Rows of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.lm_head.out_features()
    }

    /// Calls `body(first_token, logits)` with logits `[tokens, vocab_size]` of at most [`logit_rows`] tokens at a time.
    ///
    /// # Arguments
    /// * `hidden`: `[seqlen, hidden_size]`, what left the last layer
    /// * `logits`, `panel`: scratch, grown on first use
    ///
    /// # Errors
    /// Fails when `hidden` is not a whole number of tokens, and when `body` does.
    pub fn logits(
        &self,
        hidden: &Tensor,
        logits: &mut Vec<f32>,
        panel: &mut Vec<f32>,
        mut body: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (seqlen, _) = hidden.dims2()?;
        let rows = logit_rows(self.vocab_size());
        for first in (0..seqlen).step_by(rows) {
            let tokens = rows.min(seqlen - first);
            let normed = candle_nn::ops::rms_norm(
                &hidden.narrow(0, first, tokens)?,
                &self.norm,
                self.rms_norm_eps,
            )?;
            let length = tokens * self.vocab_size();
            if logits.len() < length {
                logits.resize(length, 0.0);
            }
            tensor::with_slice(&normed, |normed| {
                self.lm_head
                    .forward_into(normed, &mut logits[..length], panel)
            })?;
            body(first, &logits[..length])?;
        }
        Ok(())
    }
}
