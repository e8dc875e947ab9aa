//! A model that reads tokens and computes the logits of the next token.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use crate::bytes::ByteSize;
use crate::checkpoint::WeightSource;
use crate::linalg::{CodedActivations, Products, Weight};
use crate::model::footprint::SamplePass;
use crate::model::{
    CacheDtype, Dtypes, Embedding, Head, KvCache, LayerContext, ModelConfig, WeightForms, footprint,
};
use crate::placement::{Residency, Sizes};
use crate::run::{Events, MemorySettings};
use crate::runtime::{LayerSource, LayerStore};

/// Tokens of a prompt that pass through the model together: enough that products repay the widening of weights, and few enough that
/// activations are small compared with the weights.
pub const PROMPT_BLOCK: usize = 512;

/// A model whose layers are in memory, or read at each use.
pub struct Generator {
    source: Arc<dyn WeightSource>,
    config: Arc<ModelConfig>,
    layers: LayerStore,
    head: Head,
    arithmetic: DecodingArithmetic,
}

/// The arithmetic of a generating model.
#[derive(Debug, Clone, Copy, Default)]
pub struct DecodingArithmetic {
    /// Products of stored weights.
    pub products: Products,
    /// Activations of products with 8-bit codes.
    pub activations: CodedActivations,
    /// Keys and values of earlier tokens.
    pub cache: CacheDtype,
}

/// A sequence, and the machine that computes it.
#[derive(Debug, Clone, Copy)]
pub struct SequenceShape {
    /// Tokens of prompt and text together, at most.
    pub capacity: usize,
    /// Worker threads.
    pub threads: usize,
    /// Arithmetic.
    pub arithmetic: DecodingArithmetic,
}

/// The state after some tokens: keys and values of every layer, and the logits after the last token.
pub struct Sequence {
    cache: KvCache,
    context: LayerContext,
    logits: Vec<f32>,
    capacity: usize,
}

impl Generator {
    /// Reads the head and the layers that stay in memory.
    ///
    /// # Errors
    /// Fails when a tensor is missing, has a wrong shape, or cannot be read.
    pub fn load(layers: LayerSource, residency: Residency, events: &dyn Events) -> Result<Self> {
        let (source, config) = (Arc::clone(&layers.source), Arc::clone(&layers.config));
        Embedding::open(&*source, &config)?;
        let head = Head::load_in(&*source, &config, layers.forms.head()).context("in the head")?;
        let layers = LayerStore::load(layers, residency, events)?;
        Ok(Self { source, config, layers, head, arithmetic: DecodingArithmetic::default() })
    }

    /// The same model with this arithmetic.
    #[must_use]
    pub fn with_arithmetic(self, arithmetic: DecodingArithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    /// [`Generator::load`] with all layers in memory, as stored.
    pub fn load_all(
        source: Arc<dyn WeightSource>,
        config: Arc<ModelConfig>,
        events: &dyn Events,
    ) -> Result<Self> {
        let residency = Residency::all(config.num_hidden_layers);
        Self::load(LayerSource::as_stored(source, config), residency, events)
    }

    /// The memory of a sequence, in a process that holds `held` bytes already.
    pub fn sizes(
        config: &ModelConfig,
        dtypes: Dtypes,
        shape: SequenceShape,
        held: ByteSize,
    ) -> Sizes {
        let SequenceShape { capacity, threads, arithmetic } = shape;
        let pass = SamplePass {
            config,
            kernel: arithmetic.products.of_activations(),
            seqlen: PROMPT_BLOCK.min(capacity),
            threads,
            settings: &settings(),
        };
        Sizes {
            layers: config.num_hidden_layers,
            layer: footprint::layer_weights(config, dtypes.layers, &MemorySettings::default()),
            head: footprint::head_weight(config, dtypes.head),
            kv_cache: KvCache::bytes(config, arithmetic.cache, capacity, PROMPT_BLOCK),
            workspace: footprint::generation(&pass, dtypes.layers, capacity),
            held,
        }
    }

    /// The sizes of a model whose matrices are held in these forms, from the sizes with matrices as stored. In addition to the matrices
    /// there are the rows that are restored for a product of many tokens, or made compact while a matrix is read. The rows of a head that
    /// is rounded are freed before a layer is read.
    pub fn sizes_in(
        config: &ModelConfig,
        dtypes: Dtypes,
        forms: &WeightForms,
        dense: Sizes,
        capacity: usize,
    ) -> Sizes {
        let of_matrices = |forms: &WeightForms| forms.layer_bytes(config, dtypes.layers).0;
        let matrices = of_matrices(&WeightForms::dense());
        let [head, rounded] = forms.head_bytes(config, dtypes.head);
        let block = PROMPT_BLOCK.min(capacity);
        let restored = forms.restored_bytes(rayon::current_num_threads());
        let workspace = dense.workspace
            + forms.made_bytes(config, dtypes.layers).max(restored)
            + forms.rounded_bytes(config, block, block.min(settings().mlp_tokens));
        let layer = ByteSize(dense.layer.0 - matrices + of_matrices(forms));
        let later = layer + dense.kv_cache;
        let workspace = workspace.max(ByteSize(rounded.0.saturating_sub(later.0)));
        Sizes { layer, head, workspace, ..dense }
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The layers in memory.
    pub fn residency(&self) -> Residency {
        self.layers.residency()
    }

    /// The weights in memory that every token reads: all matrices of the layers in memory, and the head.
    pub fn weights(&self) -> impl Iterator<Item = &Weight> {
        let layers = self.layers.resident();
        let matrices =
            layers.flat_map(|layer| layer.linear_ids().map(|id| layer.linear(id).weight()));
        matrices.chain(std::iter::once(self.head.weight()))
    }

    /// An empty sequence with room for `capacity` tokens.
    ///
    /// # Errors
    /// Fails when the model has fewer positions, and when the memory cannot be allocated.
    pub fn begin(&self, capacity: usize) -> Result<Sequence> {
        let positions = self.config.max_position_embeddings;
        ensure!(
            capacity <= positions,
            "a sequence of {capacity} tokens does not fit the model's {positions} positions"
        );
        Ok(Sequence {
            cache: KvCache::new(&self.config, self.arithmetic.cache, capacity, PROMPT_BLOCK)?,
            context: LayerContext::with_settings(&self.config, capacity, settings())
                .with_products(self.arithmetic.products)
                .with_coded_activations(self.arithmetic.activations),
            logits: Vec::new(),
            capacity,
        })
    }

    /// Reads tokens, at most [`PROMPT_BLOCK`] at a time, at the end of `sequence`. Returns the logits `[vocab_size]` after the last token.
    ///
    /// # Errors
    /// Fails for no tokens, for more tokens than the sequence has room for, for an id beyond the embedding, and when a streamed layer
    /// cannot be read. The sequence is invalid then.
    pub fn read<'a>(&mut self, sequence: &'a mut Sequence, tokens: &[u32]) -> Result<&'a [f32]> {
        ensure!(!tokens.is_empty(), "there is nothing to read");
        let (read, room) = (sequence.tokens(), sequence.capacity);
        ensure!(
            read + tokens.len() <= room,
            "{} tokens follow {read}, and there is room for {room}",
            tokens.len()
        );
        let embedding = Embedding::open(&*self.source, &self.config)?;
        let Sequence { cache, context, logits, .. } = sequence;
        let blocks = tokens.len().div_ceil(PROMPT_BLOCK);
        for (number, block) in tokens.chunks(PROMPT_BLOCK).enumerate() {
            let mut hidden = embedding.rows(block)?;
            for index in 0..self.config.num_hidden_layers {
                hidden = self.layers.with_layer(index, |layer| {
                    layer.forward_cached(&hidden, cache.layer(index), context)
                })?;
            }
            if number + 1 == blocks {
                self.head.last_logits(&hidden, context, logits)?;
            }
        }
        Ok(&sequence.logits)
    }
}

/// A prompt multiplies each weight once per block, so packed copies of all weights would cost their memory for little.
fn settings() -> MemorySettings {
    MemorySettings { keep_packed: false, ..MemorySettings::default() }
}

impl Sequence {
    /// Tokens read so far.
    pub fn tokens(&self) -> usize {
        self.cache.tokens()
    }

    /// Logits `[vocab_size]` of the token after the last read token; empty before the first.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Removes all tokens, and keeps the memory.
    pub fn clear(&mut self) {
        self.cache.clear();
        self.logits.clear();
    }
}
