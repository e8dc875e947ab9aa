//! The end of the model: the last norm and the language-model head, applied to some tokens and some rows of the vocabulary at a
//! time.
//!
//! The head's weight is the largest matrix of a model. It is held whole, or it rests in the checkpoint and a range of the
//! vocabulary is read at a time ([`Head::chunks`]); hidden states are normed anew for each.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::Tensor;

use super::config::ModelConfig;
use super::context::LayerContext;
use super::embedding::EMBEDDING;
use super::{matrix_at_rest, read_matrix, read_vector};
use crate::bytes::ByteSize;
use crate::checkpoint::WeightSource;
use crate::linalg::linear::{LinearOutput, SingleToken, forward_all};
use crate::linalg::parts::{LEAST_ROWS, largest_part, parts};
use crate::linalg::profile::Part;
use crate::linalg::{Linear, StoredMatrix, Weight, elementwise, tensor};

/// Tokens whose logits exist at once, at most, where all of them may take `bytes` of f32 and each has `vocabulary`.
pub fn logit_rows(bytes: ByteSize, vocabulary: usize) -> usize {
    usize::try_from(bytes.0 / 4 / vocabulary.max(1) as u64)
        .unwrap_or(usize::MAX)
        .max(1)
}

/// Rows of the vocabulary in the largest part that is in memory at once.
pub(super) fn largest_chunk(vocab_size: usize, head_rows: Option<usize>) -> usize {
    largest_part(
        vocab_size,
        head_rows.unwrap_or(usize::MAX),
        LEAST_VOCABULARY,
    )
}

/// Tokens of the largest part whose logits for one chunk of the vocabulary exist at once.
pub(super) fn largest_tokens(seqlen: usize, bytes: ByteSize, vocabulary: usize) -> usize {
    largest_part(seqlen, logit_rows(bytes, vocabulary), LEAST_ROWS)
}

/// A part of the vocabulary this large has the bits of the whole in a product of any number of tokens from two.
const LEAST_VOCABULARY: usize = 129;

/// Bytes of two tensors that are compared at once.
const COMPARED_BYTES: usize = 1 << 20;

/// The last norm's weight.
pub const NORM: &str = "model.norm.weight";
const LM_HEAD: &str = "lm_head.weight";

/// Norm and head, in memory or at rest.
#[derive(Debug)]
pub struct Head {
    norm: Vec<f32>,
    rms_norm_eps: f32,
    lm_head: Linear,
    /// Rows of the vocabulary in memory at once.
    rows_at_once: Option<usize>,
}

/// Some of the vocabulary's rows, in memory.
#[derive(Debug)]
pub struct HeadChunk<'a> {
    head: &'a Head,
    /// Which rows.
    pub rows: Range<usize>,
    /// Those rows; `None` where they are the head's own weight.
    read: Option<Linear>,
}

impl Head {
    /// The tensor the head's weight is read from: `lm_head.weight`, or the embedding where they are tied.
    pub fn tensor_name(config: &ModelConfig) -> &'static str {
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
    pub fn check(source: &dyn WeightSource, config: &ModelConfig) -> Result<()> {
        source.require(NORM, &[config.hidden_size])?;
        source.require(
            Self::tensor_name(config),
            &[config.vocab_size, config.hidden_size],
        )?;
        Ok(())
    }

    /// Whether there is a head that is passed over: `lm_head.weight` with other bytes than the embedding that `config.json` says is the head.
    /// Both are read up to the first difference.
    ///
    /// # Errors
    /// Fails when reading fails.
    pub fn is_passed_over(source: &dyn WeightSource, config: &ModelConfig) -> Result<bool> {
        let tensors = (source.entry(EMBEDDING), source.entry(LM_HEAD));
        let (true, (Some(embedding), Some(lm_head))) = (config.tie_word_embeddings, tensors) else {
            return Ok(false);
        };
        if (embedding.dtype, &embedding.shape) != (lm_head.dtype, &lm_head.shape) {
            return Ok(true);
        }
        let mut buffers = [vec![0; COMPARED_BYTES], vec![0; COMPARED_BYTES]];
        for start in (0..embedding.bytes).step_by(COMPARED_BYTES) {
            let length = (embedding.bytes - start).min(COMPARED_BYTES as u64) as usize;
            for (entry, buffer) in [embedding, lm_head].into_iter().zip(&mut buffers) {
                source.read(entry, start, &mut buffer[..length])?;
            }
            if buffers[0][..length] != buffers[1][..length] {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads norm and head.
    ///
    /// # Errors
    /// As [`Head::check`], and when reading fails.
    pub fn load(source: &dyn WeightSource, config: &ModelConfig) -> Result<Self> {
        let (name, rows) = (Self::tensor_name(config), config.vocab_size);
        let weight = read_matrix(source, name, rows, config.hidden_size)?;
        Self::with_weight(source, config, weight.into(), None)
    }

    /// Reads the norm; `rows_at_once` rows of the vocabulary are read when they are needed.
    ///
    /// # Errors
    /// As [`Head::check`], and when reading fails.
    pub fn at_rest(
        source: &Arc<dyn WeightSource>,
        config: &ModelConfig,
        rows_at_once: usize,
    ) -> Result<Self> {
        let (name, rows) = (Self::tensor_name(config), config.vocab_size);
        let weight = matrix_at_rest(source, name, rows, config.hidden_size)?;
        Self::with_weight(
            &**source,
            config,
            Weight::AtRest(weight),
            Some(rows_at_once),
        )
    }

    fn with_weight(
        source: &dyn WeightSource,
        config: &ModelConfig,
        weight: Weight,
        rows_at_once: Option<usize>,
    ) -> Result<Self> {
        Ok(Self {
            norm: read_vector(source, NORM, config.hidden_size)?,
            rms_norm_eps: config.rms_norm_eps as f32,
            lm_head: Linear::new(weight, None),
            rows_at_once,
        })
    }

    /// The last norm's weight and its ε.
    pub(super) fn norm(&self) -> (&[f32], f32) {
        (&self.norm, self.rms_norm_eps)
    }

    /// Rows of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.lm_head.out_features()
    }

    /// The parts of the vocabulary that are in memory one at a time; all of it where the head is held.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        let at_most = self.rows_at_once.unwrap_or(usize::MAX);
        parts(self.vocab_size(), at_most, LEAST_VOCABULARY)
    }

    /// Reads one of [`Head::chunks`], where it is not held anyway.
    ///
    /// # Errors
    /// Fails when it cannot be read.
    pub fn chunk(&self, rows: Range<usize>) -> Result<HeadChunk<'_>> {
        let read = match self.lm_head.weight() {
            Weight::AtRest(weight) => Some(Linear::new(weight.read(rows.clone())?, None)),
            Weight::Held(_) => None,
        };
        Ok(HeadChunk {
            head: self,
            rows,
            read,
        })
    }

    /// Calls `body(first_token, logits)` with logits `[tokens, vocab_size]` of as many tokens at a time as the settings allow.
    ///
    /// # Arguments
    /// * `hidden`: `[seqlen, hidden_size]`, what left the last layer
    ///
    /// # Errors
    /// Fails when `hidden` is not a whole number of tokens, when a head at rest cannot be read, and when `body` does.
    pub fn logits(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        body: impl FnMut(usize, &[f32]) -> Result<()> + Send,
    ) -> Result<()> {
        let whole = 0..self.vocab_size();
        self.some_logits(&self.lm_head, whole, hidden, context, body)
    }

    /// Writes the logits `[vocab_size]` after the last token of `hidden` `[tokens, hidden_size]`, what a writing model asks for.
    ///
    /// # Arguments
    /// * `logits`: becomes as long as the vocabulary
    ///
    /// # Errors
    /// Fails when `hidden` is not a whole number of tokens, or none, and when a head at rest cannot be read.
    pub fn last_logits(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let (tokens, hidden_size) = hidden.dims2()?;
        ensure!(
            tokens > 0 && hidden_size == self.norm.len(),
            "{tokens} hidden states are {hidden_size} wide, the head takes {}",
            self.norm.len()
        );
        logits.resize(self.vocab_size(), 0.0);
        tensor::with_slice(hidden, |hidden| {
            let ([normed], products) = context.workspace().buffers([hidden_size]);
            let last = &hidden[(tokens - 1) * hidden_size..];
            elementwise::rms_norm(last, &self.norm, self.rms_norm_eps, normed);
            self.lm_head
                .forward(normed, logits, SingleToken::MatrixVector, products)
        })?
    }

    /// Logits of some `rows` of `linear`.
    fn some_logits(
        &self,
        linear: &Linear,
        rows: Range<usize>,
        hidden: &Tensor,
        context: &mut LayerContext,
        mut body: impl FnMut(usize, &[f32]) -> Result<()> + Send,
    ) -> Result<()> {
        let (seqlen, hidden_size) = hidden.dims2()?;
        ensure!(
            hidden_size == self.norm.len(),
            "hidden states are {hidden_size} wide, the head takes {}",
            self.norm.len()
        );
        let at_most = logit_rows(context.settings().logits_bytes, rows.len());
        // On a thread of the pool, as a layer is.
        let mut pass = |hidden: &[f32]| -> Result<()> {
            for part in parts(seqlen, at_most, LEAST_ROWS) {
                let ([normed, logits], products) = context
                    .workspace()
                    .buffers([part.len() * hidden_size, part.len() * rows.len()]);
                products.watch.enter(Part::Head);
                let hidden = &hidden[part.start * hidden_size..part.end * hidden_size];
                elementwise::rms_norm(hidden, &self.norm, self.rms_norm_eps, normed);
                let mut outputs = [LinearOutput {
                    linear,
                    features: rows.clone(),
                    out: &mut *logits,
                }];
                forward_all(&mut outputs, normed, SingleToken::AsMany, products)?;
                body(part.start, logits)?;
                products.watch.enter(Part::Elsewhere);
            }
            Ok(())
        };
        tensor::with_slice(hidden, |hidden| rayon::scope(|_| pass(hidden)))?
    }
}

impl HeadChunk<'_> {
    /// The head it is a part of.
    pub(super) fn head(&self) -> &Head {
        self.head
    }

    /// Bytes per element of its weights as they are stored.
    pub fn stored_bytes(&self) -> usize {
        self.weight().map_or(0, |weight| weight.dtype().bytes())
    }

    /// Its weights `[rows.len(), hidden_size]`, where they are in memory by themselves.
    pub(super) fn weight(&self) -> Option<&StoredMatrix> {
        self.read.as_ref().map_or_else(
            || self.head.lm_head.weight().held(),
            |read| read.weight().held(),
        )
    }

    /// As [`Head::logits`], for these rows of the vocabulary: logits are `[tokens, rows.len()]`.
    ///
    /// # Errors
    /// As [`Head::logits`].
    pub fn logits(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        body: impl FnMut(usize, &[f32]) -> Result<()> + Send,
    ) -> Result<()> {
        match &self.read {
            Some(read) => {
                let rows = 0..self.rows.len();
                self.head.some_logits(read, rows, hidden, context, body)
            }
            None => {
                let (linear, rows) = (&self.head.lm_head, self.rows.clone());
                self.head.some_logits(linear, rows, hidden, context, body)
            }
        }
    }
}
