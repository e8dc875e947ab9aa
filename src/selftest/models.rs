//! Models made on the spot, and the comparison of results.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use serde_json::{Value, json};

use crate::checkpoint::{Checkpoint, WeightSource};
use crate::linalg::columns::{self, ColumnSums};
use crate::linalg::gram::GramMatrix;
use crate::linalg::{Products, StoredDtype};
use crate::model::observe::FromDevice;
use crate::model::on_device::LogSumExpPart;
use crate::model::{
    DecoderLayer, Embedding, InputId, InputMap, LayerContext, ModelConfig, Observer,
};
use crate::pipeline::{MaskObserver, PrunedMatrix};
use crate::pruning::Mask;
use crate::run::Silent;
use crate::synthetic::RandomCheckpoint;

/// A model with its first layer in memory.
pub(super) struct Model {
    pub(super) config: ModelConfig,
    pub(super) source: Arc<dyn WeightSource>,
    pub(super) layer: DecoderLayer,
    pub(super) context: LayerContext,
    pub(super) tokens: Vec<u32>,
    pub(super) state: Tensor,
}

impl Model {
    pub(super) fn open(folder: &Path, seqlen: usize) -> Result<Self> {
        let config = ModelConfig::load(folder)?;
        let source: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(folder)?);
        let layer = DecoderLayer::load(&*source, &config, 0)?;
        let context = LayerContext::new(&config, seqlen);
        let vocabulary = config.vocab_size as u32;
        let tokens: Vec<u32> = (0..seqlen as u32).map(|t| t * 7919 % vocabulary).collect();
        let state = Embedding::open(&*source, &config)?.rows(&tokens)?;
        Ok(Self { config, source, layer, context, tokens, state })
    }

    /// A model of random weights, written to the folder unless it is there.
    pub(super) fn random(
        folder: &Path,
        name: &str,
        shape: &RandomCheckpoint,
        seqlen: usize,
    ) -> Result<Self> {
        let folder = folder.join(name);
        if !folder.exists() {
            shape.write(&folder, &Silent)?;
        }
        Self::open(&folder, seqlen)
    }
}

/// The wide model: rows of 11008, grouped-query heads.
pub(super) fn wide() -> RandomCheckpoint {
    RandomCheckpoint {
        hidden_size: 1024,
        intermediate_size: 11008,
        num_hidden_layers: 1,
        num_attention_heads: 16,
        num_key_value_heads: 4,
        vocab_size: 4003,
        max_position_embeddings: 1024,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    }
}

/// Models whose first layer has what a layer of Llama lacks: windows, bounds, further norms or none before a block, heads that rotate in
/// part or not at all, fused matrices.
pub(super) fn families() -> Result<Vec<RandomCheckpoint>> {
    let shapes = [
        (
            "qwen2",
            json!({"use_sliding_window": true, "max_window_layers": 0, "sliding_window": 70}),
        ),
        ("qwen3", json!({})),
        (
            "gemma2",
            json!({"sliding_window": 70, "attn_logit_softcapping": 0.01, "final_logit_softcapping": 0.1}),
        ),
        ("gemma3_text", json!({"sliding_window": 70, "attn_logit_softcapping": 1.0})),
        ("phi3", json!({"partial_rotary_factor": 0.75, "sliding_window": 200})),
        ("olmo2", json!({})),
        ("smollm3", json!({"no_rope_layers": [0]})),
    ];
    let shapes = shapes.into_iter().map(|(family, settings)| {
        let Value::Object(settings) = settings else { anyhow::bail!("keys of {family}") };
        Ok(RandomCheckpoint {
            num_hidden_layers: 1,
            settings,
            ..RandomCheckpoint::of_family(family)?
        })
    });
    shapes.collect()
}

/// A model whose Gram matrices have several panels on a device.
pub(super) fn several_panels() -> RandomCheckpoint {
    RandomCheckpoint { hidden_size: 1024, intermediate_size: 1600, ..wide() }
}

/// Column sums of squares at the four points.
pub(super) struct Sums(pub(super) InputMap<Vec<f32>>);

impl Sums {
    pub(super) fn new(config: &ModelConfig) -> Self {
        Self(config.input_widths().map(|_, width| vec![0.0; width]))
    }
}

impl Observer for Sums {
    fn observe(&mut self, point: InputId, rows: &[f32]) {
        let sums = &mut self.0[point];
        for row in rows.chunks_exact(sums.len()) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += value * value;
            }
        }
    }

    fn wants(&mut self, _point: InputId) -> FromDevice<'_> {
        FromDevice::Sums(&[])
    }

    fn observe_sums(&mut self, point: InputId, observed: &ColumnSums<'_>, _kept: &[f32]) {
        let sums = &mut self.0[point];
        for (sum, square) in sums.iter_mut().zip(observed.squares) {
            *sum += *square as f32;
        }
    }
}

/// Gram matrices and column sums at the four points: of the rows that the CPU shows; a device sums them up itself.
pub(super) struct Grams(InputMap<(GramMatrix, Vec<f64>)>);

impl Grams {
    pub(super) fn new(config: &ModelConfig) -> Self {
        let widths = config.input_widths();
        Self(widths.map(|_, width| (GramMatrix::new(width, Products::F32), vec![0.0; width])))
    }

    /// Adds rows of the upper triangle.
    pub(super) fn add(&mut self, point: InputId, first: usize, sums: &[f32]) {
        self.0[point].0.add_upper(first, sums);
    }

    /// Each of them whole.
    pub(super) fn all(&mut self) -> Vec<Vec<f32>> {
        let points = self.0.iter_mut();
        let whole = points.flat_map(|(_, (gram, values))| {
            gram.finish();
            [gram.square(), values.iter().map(|&sum| sum as f32).collect()]
        });
        whole.collect()
    }
}

impl Observer for Grams {
    fn observe(&mut self, point: InputId, rows: &[f32]) {
        let (gram, values) = &mut self.0[point];
        gram.add_rows(rows);
        for row in rows.chunks_exact(values.len()) {
            columns::add_sums(values, row);
        }
    }

    fn wants(&mut self, _point: InputId) -> FromDevice<'_> {
        FromDevice::Gram(&[])
    }

    fn observe_sums(&mut self, point: InputId, sums: &ColumnSums<'_>, _kept: &[f32]) {
        columns::add_sums(&mut self.0[point].1, sums.values);
    }
}

/// All masks of a run, in order.
#[derive(Default)]
pub(super) struct Masks(Vec<Mask>);

impl MaskObserver for Masks {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        self.0.push(matrix.mask.clone());
        Ok(())
    }
}

impl Masks {
    /// The share of equal bits.
    pub(super) fn agreement(&self, other: &Self) -> Result<f64> {
        ensure!(
            !self.0.is_empty() && self.0.len() == other.0.len(),
            "{} and {} masks",
            self.0.len(),
            other.0.len()
        );
        let (mut bits, mut apart) = (0u64, 0u64);
        for (ours, theirs) in self.0.iter().zip(&other.0) {
            bits += (ours.rows() * ours.columns()) as u64;
            let pairs = ours.bits().iter().zip(theirs.bits());
            apart += pairs.map(|(a, b)| u64::from((a ^ b).count_ones())).sum::<u64>();
        }
        Ok(1.0 - apart as f64 / bits as f64)
    }
}

pub(super) fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// −ln p of the next token at each position.
pub(super) fn losses(seen: &[LogSumExpPart]) -> Vec<f32> {
    let loss = |seen: &LogSumExpPart| {
        let logit = f64::from(seen.logit.unwrap_or(f32::NAN));
        (seen.sum.ln() + f64::from(seen.largest) - logit) as f32
    };
    seen.iter().map(loss).collect()
}

/// The largest difference, relative to the largest element of `ours`; infinite if lengths differ or are 0, or if a value of `theirs`
/// is not finite.
pub(super) fn difference(ours: &[f32], theirs: &[f32]) -> f32 {
    let largest = ours.iter().fold(0f32, |max, value| max.max(value.abs()));
    let apart = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
    let is_whole = ours.len() == theirs.len()
        && !ours.is_empty()
        && theirs.iter().all(|value| value.is_finite());
    if is_whole { apart.fold(0.0, f32::max) / largest } else { f32::INFINITY }
}
