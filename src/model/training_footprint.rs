//! Memory of a training of the whole model beyond its layers: the buffers that layers and the head share, and packed factors.
//! All of them grow to their largest use and stay until the training is over, so every phase after the first step has them.
//!
//! ```text
//! activations   4 · max(backward pass, forward pass, t · (H + m·V))     t tokens at once at the head, m = 2 with a teacher
//! packed        the factors of the products of a layer, forwards and backwards, and of the head: dy [t, V]
//! rows          e · H · r of a head at rest, r rows at once
//! factors       per thread a piece of B·A, and of W' in f32 and in the stored dtype
//! ```

use super::config::ModelConfig;
use super::footprint::{self, Dtypes, SamplePass};
use super::head::largest_tokens;
use super::layer::sizes::backward_elements;
use crate::bytes::ByteSize;
use crate::linalg::low_rank::applying_bytes;
use crate::linalg::product::{self, Product};
use crate::linalg::{Linear, Products, StoredDtype};
use crate::run::memory_settings::MemorySettings;

/// Bytes of an f32.
const F32: usize = 4;

/// A training of the whole model, as far as its buffers depend on it.
#[derive(Debug, Clone, Copy)]
pub struct TrainingBuffers<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// The dtypes of its weights.
    pub dtypes: Dtypes,
    /// Tokens of an example.
    pub seqlen: usize,
    /// Worker threads.
    pub threads: usize,
    /// The arithmetic.
    pub products: Products,
    /// The settings that trade memory for time.
    pub settings: &'a MemorySettings,
    /// Factors are trained, not weights.
    pub has_factors: bool,
    /// No layer computes activations again.
    pub is_kept: bool,
    /// The shape of a teacher whose logits are learned, and the dtype of its head.
    pub teacher: Option<(&'a ModelConfig, StoredDtype)>,
}

impl TrainingBuffers<'_> {
    /// Tokens whose logits exist at once, of so many models.
    fn tokens(&self, models: usize) -> usize {
        let at_most = ByteSize(self.settings.logits_bytes.0 / models as u64);
        largest_tokens(self.seqlen, at_most, self.largest(|config| config.vocab_size))
    }

    /// The larger size of model and teacher.
    fn largest(&self, of: impl Fn(&ModelConfig) -> usize) -> usize {
        let taught = self.teacher.map_or(0, |(config, _)| of(config));
        of(self.config).max(taught)
    }

    /// Rows of the head that are multiplied at once: all, or as many as are read at once.
    fn head_rows(&self) -> usize {
        let (rows, columns) = (self.config.vocab_size, self.config.hidden_size);
        match self.settings.head_rows {
            None => rows,
            Some(_) => Linear::rows_at_once(columns, rows),
        }
    }

    /// Memory of the activations of layers and head, which use it in turn.
    pub fn activations(&self) -> ByteSize {
        let Self { config, settings, .. } = *self;
        let backward = backward_elements(config, self.seqlen, settings.mlp_tokens, self.is_kept);
        // Held-out examples have no teacher; their logits have no gradient, which needs a copy of bounded logits.
        let copies = usize::from(self.teacher.is_some()) + usize::from(config.logit_cap.is_some());
        let [width, vocabulary] =
            [self.largest(|of| of.hidden_size), self.largest(|of| of.vocab_size)];
        let models = 1..=1 + copies;
        let head = models.map(|models| self.tokens(models) * (width + models * vocabulary));
        let largest = head.max().unwrap_or(0).max(backward);
        let forward = footprint::activations(config, self.seqlen, settings);
        ByteSize::of(largest, F32).max(forward)
    }

    /// Memory of packed factors, and of the rows of a head at rest.
    pub fn packed(&self) -> ByteSize {
        let Self { config, settings, .. } = *self;
        let kernel = self.products.kernel(self.dtypes.layers);
        let of_gradients = self.products.of_gradients(self.dtypes.layers);
        let pass =
            SamplePass { config, kernel, seqlen: self.seqlen, threads: self.threads, settings };
        let mut all = pass.forward_products(Vec::new());
        all.extend(pass.gradient_products(of_gradients, self.has_factors));
        let (rows, columns) = (self.head_rows(), config.hidden_size);
        let product = |dtype, columns, inner| Product {
            kernel: self.products.kernel(dtype),
            tokens: self.tokens(1),
            columns: vec![columns],
            inner,
            is_kept: false,
            is_in_parts: false,
        };
        all.push(product(self.dtypes.head, rows, columns));
        all.push(product(self.dtypes.head, columns, rows));
        all.extend(
            self.teacher.map(|(of, dtype)| product(dtype, rows.min(of.vocab_size), of.hidden_size)),
        );
        let read = match settings.head_rows {
            None => ByteSize::ZERO,
            Some(_) => ByteSize::of(rows * columns, self.dtypes.head.bytes()),
        };
        let packed = ByteSize::of(product::packed_bytes(&all, self.threads), 1);
        packed + read + self.applying()
    }

    /// Memory of turning factors into the weights of a layer.
    fn applying(&self) -> ByteSize {
        match self.has_factors {
            true => applying_bytes(self.threads, self.dtypes.layers),
            false => ByteSize::ZERO,
        }
    }
}
