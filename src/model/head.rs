//! The end of the model: the last norm and the language-model head, for some tokens and some rows of the vocabulary at a time. Some
//! families bound the logits l to c·tanh(l/c).
//!
//! The head's weight is the largest matrix of a model. It is in memory as a whole, or it stays in the checkpoint and some rows of
//! the vocabulary are read at a time ([`Head::chunks`]). The norm is then computed again for each part.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::Tensor;

use super::config::ModelConfig;
use super::context::LayerContext;
use super::embedding::EMBEDDING;
use super::norms::NormWeight;
use super::reading::{matrix_at_rest, read_compact, read_matrix, read_vector};
use super::weight_form::HeadForm;
use crate::bytes::ByteSize;
use crate::checkpoint::WeightSource;
use crate::linalg::linear::{LinearOutput, SingleToken, forward_all};
use crate::linalg::parts::{LEAST_ROWS, largest_part, parts};
use crate::linalg::profile::Part;
use crate::linalg::{KeptForm, Linear, StoredMatrix, Weight, elementwise, tensor};

/// The largest number of tokens whose logits fit `bytes` of f32, at least 1; `vocabulary` logits per token.
pub fn logit_rows(bytes: ByteSize, vocabulary: usize) -> usize {
    usize::try_from(bytes.0 / 4 / vocabulary.max(1) as u64).unwrap_or(usize::MAX).max(1)
}

/// Rows of the vocabulary in the largest part that is in memory at once.
pub(super) fn largest_chunk(vocab_size: usize, head_rows: Option<usize>) -> usize {
    largest_part(vocab_size, head_rows.unwrap_or(usize::MAX), LEAST_VOCABULARY)
}

/// Tokens of the largest part of a sample whose logits for a part of the vocabulary exist at once.
pub(super) fn largest_tokens(seqlen: usize, bytes: ByteSize, vocabulary: usize) -> usize {
    largest_part(seqlen, logit_rows(bytes, vocabulary), LEAST_ROWS)
}

/// Smallest part of the vocabulary. In a product of two or more tokens such a part has the same bits as the whole.
const LEAST_VOCABULARY: usize = 129;

/// Bytes that are compared at once, per tensor.
const COMPARED_BYTES: usize = 1 << 20;

/// The name of the last norm's tensor.
pub const NORM: &str = "model.norm.weight";
/// The head of a model without tied embeddings.
pub const HEAD: &str = "lm_head.weight";

/// Norm and head, in memory or at rest.
#[derive(Debug)]
pub struct Head {
    norm: NormWeight,
    rms_norm_eps: f32,
    lm_head: Linear,
    /// Bound of the logits.
    logit_cap: Option<f32>,
    /// Rows of the vocabulary in memory at once.
    rows_at_once: Option<usize>,
}

/// Some rows of the vocabulary, in memory.
#[derive(Debug)]
pub struct HeadChunk<'a> {
    head: &'a Head,
    /// The rows of the vocabulary.
    pub rows: Range<usize>,
    /// The weight of these rows; `None` if the head's own weight is in memory.
    read: Option<Linear>,
}

impl Head {
    /// The name of the head's tensor: `lm_head.weight`, or the embedding if the two are tied.
    pub fn tensor_name(config: &ModelConfig) -> &'static str {
        if config.tie_word_embeddings { EMBEDDING } else { HEAD }
    }

    /// Checks shapes. Reads headers only.
    ///
    /// # Errors
    /// Fails when the norm or the head is missing or has a wrong shape.
    pub fn check(source: &dyn WeightSource, config: &ModelConfig) -> Result<()> {
        source.require(NORM, &[config.hidden_size])?;
        source.require(Self::tensor_name(config), &[config.vocab_size, config.hidden_size])?;
        Ok(())
    }

    /// Returns whether the checkpoint has an `lm_head.weight` that is not used: `config.json` ties the head to the embedding, and the bytes
    /// of the two differ. Both tensors are read up to the first difference.
    pub fn is_passed_over(source: &dyn WeightSource, config: &ModelConfig) -> Result<bool> {
        let tensors = (source.entry(EMBEDDING), source.entry(HEAD));
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

    /// Reads norm and head. With `rows_at_once`, the head stays in the checkpoint ([`Head::at_rest`]).
    ///
    /// # Errors
    /// Fails when a tensor is missing, has the wrong shape, or cannot be read.
    pub fn open(
        source: &Arc<dyn WeightSource>,
        config: &ModelConfig,
        rows_at_once: Option<usize>,
    ) -> Result<Self> {
        match rows_at_once {
            None => Self::load(&**source, config),
            Some(rows) => Self::at_rest(source, config, rows),
        }
    }

    /// Reads norm and head.
    pub fn load(source: &dyn WeightSource, config: &ModelConfig) -> Result<Self> {
        let (name, rows) = (Self::tensor_name(config), config.vocab_size);
        let weight = read_matrix(source, name, rows, config.hidden_size)?;
        Self::with_weight(source, config, weight.into(), None)
    }

    /// Reads norm and head, the head in this form. An embedding that is the head is not changed.
    ///
    /// # Errors
    /// Fails as [`Head::open`], and for 8-bit codes of weights that have none.
    pub fn load_in(
        source: &dyn WeightSource,
        config: &ModelConfig,
        form: HeadForm,
    ) -> Result<Self> {
        let (name, shape) = (Self::tensor_name(config), [config.vocab_size, config.hidden_size]);
        match form {
            HeadForm::Stored => Self::load(source, config),
            HeadForm::Int8 => {
                let matrix = read_compact(source, name, shape, KeptForm::AllCodes)?;
                Self::with_weight(source, config, Weight::Compact(matrix), None)
            }
        }
    }

    /// Reads the norm. The head stays in the checkpoint; `rows_at_once` rows of it are in memory at a time.
    pub fn at_rest(
        source: &Arc<dyn WeightSource>,
        config: &ModelConfig,
        rows_at_once: usize,
    ) -> Result<Self> {
        let (name, rows) = (Self::tensor_name(config), config.vocab_size);
        let weight = matrix_at_rest(source, name, rows, config.hidden_size)?;
        Self::with_weight(&**source, config, Weight::AtRest(weight), Some(rows_at_once))
    }

    fn with_weight(
        source: &dyn WeightSource,
        config: &ModelConfig,
        weight: Weight,
        rows_at_once: Option<usize>,
    ) -> Result<Self> {
        Ok(Self {
            norm: NormWeight::new(
                read_vector(source, NORM, config.hidden_size)?,
                config.family.norms_add_one,
            ),
            rms_norm_eps: config.rms_norm_eps as f32,
            lm_head: Linear::new(weight, None),
            logit_cap: config.logit_cap,
            rows_at_once,
        })
    }

    /// The last norm.
    pub(super) fn norm_weight(&self) -> &NormWeight {
        &self.norm
    }

    /// The factor of the last norm, and ε.
    pub(super) fn norm(&self) -> (&[f32], f32) {
        (self.norm.factor(), self.rms_norm_eps)
    }

    /// The bound of the logits.
    pub(super) fn logit_cap(&self) -> Option<f32> {
        self.logit_cap
    }

    /// The weight of the head.
    pub fn weight(&self) -> &Weight {
        self.lm_head.weight()
    }

    /// The head's linear.
    pub(super) fn lm_head(&self) -> &Linear {
        &self.lm_head
    }

    /// Returns whether the weight is in memory as a whole.
    pub fn is_in_memory(&self) -> bool {
        self.rows_at_once.is_none()
    }

    /// Rows of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.lm_head.out_features()
    }

    /// The parts of the vocabulary, which are in memory in turn. A head in memory is a single part.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        let at_most = self.rows_at_once.unwrap_or(usize::MAX);
        parts(self.vocab_size(), at_most, LEAST_VOCABULARY)
    }

    /// Reads a part of [`Head::chunks`], unless the head is in memory.
    pub fn chunk(&self, rows: Range<usize>) -> Result<HeadChunk<'_>> {
        let read = match self.lm_head.weight() {
            Weight::AtRest(weight) => Some(Linear::new(weight.read(rows.clone())?, None)),
            Weight::Held(_) | Weight::Compact(_) => None,
        };
        Ok(HeadChunk { head: self, rows, read })
    }

    /// Calls `body(first_token, logits)` with logits `[tokens, vocab_size]` of as many tokens at a time as the settings allow.
    ///
    /// # Arguments
    /// * `hidden`: `[seqlen, hidden_size]`, the output of the last layer
    ///
    /// # Errors
    /// Fails when `hidden` has a wrong width, when a head at rest cannot be read, and when `body` fails.
    pub fn logits(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        body: impl FnMut(usize, &[f32]) -> Result<()> + Send,
    ) -> Result<()> {
        let whole = 0..self.vocab_size();
        self.some_logits(&self.lm_head, whole, hidden, context, body)
    }

    /// Writes the logits `[vocab_size]` after the last token of `hidden` `[tokens, hidden_size]`, for text generation.
    ///
    /// # Arguments
    /// * `logits`: resized to the vocabulary
    ///
    /// # Errors
    /// Fails when `hidden` has a wrong width or no token, and when a head at rest cannot be read.
    pub fn last_logits(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let (tokens, hidden_size) = hidden.dims2()?;
        ensure!(
            tokens > 0 && hidden_size == self.norm.stored().len(),
            "{tokens} hidden states are {hidden_size} wide, the head needs {}",
            self.norm.stored().len()
        );
        logits.resize(self.vocab_size(), 0.0);
        tensor::with_slice(hidden, |hidden| {
            let ([normed], products) = context.workspace().buffers([hidden_size]);
            let last = &hidden[(tokens - 1) * hidden_size..];
            elementwise::rms_norm(last, self.norm.factor(), self.rms_norm_eps, normed);
            self.lm_head.forward(normed, logits, SingleToken::MatrixVector, products)?;
            self.bound(logits);
            Ok(())
        })?
    }

    /// logits ← c·tanh(logits / c), with a bound c.
    pub(super) fn bound(&self, logits: &mut [f32]) {
        if let Some(cap) = self.logit_cap {
            elementwise::soft_cap(logits, cap);
        }
    }

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
            hidden_size == self.norm.stored().len(),
            "hidden states are {hidden_size} wide, the head needs {}",
            self.norm.stored().len()
        );
        let at_most = logit_rows(context.settings().logits_bytes, rows.len());
        // The pass runs on a thread of the pool, as in a layer.
        let mut pass = |hidden: &[f32]| -> Result<()> {
            for part in parts(seqlen, at_most, LEAST_ROWS) {
                let ([normed, logits], products) = context
                    .workspace()
                    .buffers([part.len() * hidden_size, part.len() * rows.len()]);
                products.watch.enter(Part::Head);
                let hidden = &hidden[part.start * hidden_size..part.end * hidden_size];
                elementwise::rms_norm(hidden, self.norm.factor(), self.rms_norm_eps, normed);
                let mut outputs =
                    [LinearOutput { linear, features: rows.clone(), out: &mut *logits }];
                forward_all(&mut outputs, normed, SingleToken::AsMany, products)?;
                self.bound(logits);
                body(part.start, logits)?;
                products.watch.enter(Part::Elsewhere);
            }
            Ok(())
        };
        tensor::with_slice(hidden, |hidden| rayon::scope(|_| pass(hidden)))?
    }
}

impl HeadChunk<'_> {
    /// The head of these rows.
    pub fn head(&self) -> &Head {
        self.head
    }

    /// Bytes per stored element.
    pub fn stored_bytes(&self) -> usize {
        self.weight().map_or(0, |weight| weight.dtype().bytes())
    }

    /// The weights `[rows.len(), hidden_size]`, if they are in memory.
    pub(super) fn weight(&self) -> Option<&StoredMatrix> {
        self.read
            .as_ref()
            .map_or_else(|| self.head.lm_head.weight().held(), |read| read.weight().held())
    }

    /// Calls `body` as [`Head::logits`] does, with logits `[tokens, rows.len()]` of these rows.
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
