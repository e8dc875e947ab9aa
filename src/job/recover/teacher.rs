//! The dense model that a recovery learns from: opened, of the model's shape, and with weights that differ from the model's.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};

use super::super::located::{self, OpenedWeights};
use super::super::opened::OpenedModel;
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::linalg::convert;
use crate::model::{DecoderLayer, Embedding, LinearId, ModelConfig, stored_dtype};
use crate::run::Events;
use crate::settings::{ModelSettings, Settings};

/// Elements that are compared at once.
pub(super) const PIECE: usize = 1 << 18;

/// The share of zeros from which on a piece of a matrix counts as pruned. Dense weights have few zeros, by chance.
const PRUNED: f64 = 0.01;

/// The dense model.
pub(in crate::job) struct Teacher {
    /// Its folder as given, or its snapshot in the hub's cache.
    pub(super) folder: PathBuf,
    pub(super) source: Arc<dyn WeightSource>,
    /// The fingerprint of its files.
    pub(super) fingerprint: String,
}

impl Teacher {
    /// Opens a teacher.
    ///
    /// # Errors
    /// Fails for a model that is missing, cannot be read, or has the wrong shape.
    pub(super) fn open(
        folder: &Path,
        settings: &Settings,
        model: &OpenedModel,
        events: &dyn Events,
    ) -> Result<Self> {
        let of = ModelSettings {
            cache_dir: settings.model.cache_dir.clone(),
            ..ModelSettings::of(folder)
        };
        let (folder, _) = located::model(&of, events).context("in --teacher")?;
        let config = located::config(&folder).context("in --teacher")?;
        check_shape(&config, &model.config, &folder)?;
        let weights = OpenedWeights::open(&folder, events).context("in --teacher")?;
        let fingerprint = weights.checkpoint.fingerprint()?;
        let source = weights.source();
        Embedding::open(&*source, &config).context("in --teacher")?;
        for layer in 0..config.num_hidden_layers {
            DecoderLayer::check(&*source, &config, layer).context("in --teacher")?;
        }
        Ok(Self { folder, source, fingerprint })
    }

    /// Refuses a teacher whose trained matrices equal the model's: there is nothing to learn from it. Warns where it has the zeros of
    /// the model. Reads up to the first difference, which for a pruned model and its dense model is in the first piece.
    ///
    /// # Errors
    /// Fails when all values are equal, and when a matrix cannot be read.
    pub(super) fn check_differs(
        &self,
        model: &OpenedModel,
        ids: &[LinearId],
        events: &dyn Events,
    ) -> Result<()> {
        let config = &model.config;
        for layer in 0..config.num_hidden_layers {
            for id in ids {
                let (rows, columns) = id.shape(config);
                let name = id.tensor_name(layer);
                let of_teacher = self.source.require(&name, &[rows, columns])?;
                let of_model = model.source.require(&name, &[rows, columns])?;
                for first in (0..rows * columns).step_by(PIECE) {
                    let count = PIECE.min(rows * columns - first);
                    let taught = values(&*self.source, of_teacher, first, count)?;
                    let own = values(&*model.source, of_model, first, count)?;
                    if taught != own {
                        self.warn_of_zeros(&taught, &own, events);
                        return Ok(());
                    }
                }
            }
        }
        Err(Failure::new(format!(
            "the teacher `{}` has the weights of the model",
            self.folder.display()
        ))
        .detail(
            "all matrices that would be trained are equal, so there is nothing to learn from it",
        )
        .hint("name the dense model that was pruned: --teacher DENSE")
        .into())
    }

    /// Warns where a piece of a pruned matrix has its zeros in the teacher, too.
    fn warn_of_zeros(&self, taught: &[f32], own: &[f32], events: &dyn Events) {
        let is_zero = |value: &f32| *value == 0.0;
        let zeros = own.iter().filter(|value| is_zero(value)).count();
        let mut pairs = taught.iter().zip(own);
        let has_them = pairs.all(|(taught, own)| !is_zero(own) || is_zero(taught));
        if has_them && zeros as f64 > PRUNED * own.len() as f64 {
            events.warn(format!(
                "the teacher `{}` has the zeros of the model, so it is no dense model; name the one that was pruned with --teacher",
                self.folder.display()
            ));
        }
    }
}

/// Some elements of a tensor, in f32.
pub(super) fn values(
    source: &dyn WeightSource,
    entry: &TensorEntry,
    first: usize,
    count: usize,
) -> Result<Vec<f32>> {
    let dtype = stored_dtype(entry)?;
    let mut bytes = vec![0; count * dtype.bytes()];
    source.read(entry, (first * dtype.bytes()) as u64, &mut bytes)?;
    let mut values = vec![0.0; count];
    convert::widen(dtype, &bytes, &mut values);
    Ok(values)
}

/// Refuses a teacher whose shape differs from the model's.
fn check_shape(teacher: &ModelConfig, model: &ModelConfig, folder: &Path) -> Result<()> {
    let facts = |config: &ModelConfig| {
        [
            ("num_hidden_layers", config.num_hidden_layers),
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_attention_heads", config.num_attention_heads),
            ("num_key_value_heads", config.num_key_value_heads),
            ("head_dim", config.head_dim),
            ("vocab_size", config.vocab_size),
        ]
    };
    let both = facts(teacher).into_iter().zip(facts(model));
    let mut different = both.filter(|(teacher, model)| teacher.1 != model.1).peekable();
    if different.peek().is_none() {
        return Ok(());
    }
    let mut failure = Failure::new(format!(
        "the teacher `{}` has another shape than the model",
        folder.display()
    ));
    for ((name, teacher), (_, model)) in different {
        failure = failure.detail(format!("{name} is {teacher} there, {model} here"));
    }
    Err(failure
        .hint("name the dense model that was pruned; a model with fewer layers or less width can use --how lora or full")
        .into())
}
