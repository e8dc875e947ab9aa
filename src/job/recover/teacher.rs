//! The dense model that a recovery learns from: opened, of a shape that this training can use, and with weights that differ from the
//! model's. `lora` and `full` need the same tokens, `blocks` needs the same hidden_size and the layers that were kept.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};

use super::super::earlier_pruning::read_record;
use super::super::located::{self, OpenedWeights};
use super::super::opened::OpenedModel;
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::data::Tokenizer;
use crate::failure::Failure;
use crate::linalg::convert;
use crate::model::{DecoderLayer, Embedding, LinearId, ModelConfig, stored_dtype, stored_dtypes};
use crate::pipeline::TeacherShape;
use crate::run::Events;
use crate::run::pruning_record::PRUNING_FILE;
use crate::settings::{ModelSettings, RecoveryWay, Settings};

/// Elements that are compared at once.
pub(super) const PIECE: usize = 1 << 18;

/// The file of a model's tokens.
const TOKENIZER: &str = "tokenizer.json";

/// The share of zeros from which on a piece of a matrix counts as pruned. Dense weights have few zeros, by chance.
const PRUNED: f64 = 0.01;

/// The dense model.
pub(in crate::job) struct Teacher {
    /// Its folder as given, or its snapshot in the hub's cache.
    pub(super) folder: PathBuf,
    pub(super) source: Arc<dyn WeightSource>,
    pub(super) config: Arc<ModelConfig>,
    /// By layer of the model, the end of the teacher's layers that it stands for.
    pub(super) layer_ends: Vec<usize>,
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
        let recovery = settings.recovery.as_ref();
        let layer_ends = match recovery.is_some_and(|of| of.how == RecoveryWay::Blocks) {
            true => layer_ends(&config, model, &folder)?,
            false => {
                check_tokens(&config, model, &folder)?;
                Vec::new()
            }
        };
        let weights = OpenedWeights::open(&folder, events).context("in --teacher")?;
        let fingerprint = weights.checkpoint.fingerprint()?;
        let source = weights.source();
        Embedding::open(&*source, &config).context("in --teacher")?;
        for layer in 0..config.num_hidden_layers {
            DecoderLayer::check(&*source, &config, layer).context("in --teacher")?;
        }
        Ok(Self { folder, source, config: Arc::new(config), layer_ends, fingerprint })
    }

    /// Its shape, for the memory plan.
    pub(super) fn shape(&self) -> TeacherShape {
        let dtypes = stored_dtypes(&*self.source, &self.config);
        TeacherShape { config: Arc::clone(&self.config), dtypes }
    }

    /// Refuses a teacher whose trained matrices equal the model's: there is nothing to learn from it. Warns where it has the zeros of
    /// the model. A dense model whose masks close may be its own teacher. A teacher of another shape is not compared. Reads up to the first difference, which for a pruned model and its dense
    /// model is in the first piece.
    ///
    /// # Errors
    /// Fails when all values are equal, and when a matrix cannot be read.
    pub(super) fn check_differs(
        &self,
        model: &OpenedModel,
        ids: &[LinearId],
        closes: bool,
        events: &dyn Events,
    ) -> Result<()> {
        let config = &model.config;
        if *self.config != **config {
            return Ok(());
        }
        let (mut zeros, mut weights) = (0, 0);
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
                    zeros += own.iter().filter(|value| **value == 0.0).count();
                    weights += count;
                }
            }
            // Equal dense layers are enough: the whole model need not be read.
            if closes && zeros as f64 <= PRUNED * weights as f64 {
                return Ok(());
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

/// Refuses a teacher with other tokens than the model's. Ids beyond the shorter of both vocabularies are padding.
fn check_tokens(teacher: &ModelConfig, model: &OpenedModel, folder: &Path) -> Result<()> {
    let sizes = [teacher.vocab_size, model.config.vocab_size];
    let has_tokenizer = |folder: &Path| folder.join(TOKENIZER).is_file();
    if !(has_tokenizer(folder) && has_tokenizer(&model.folder)) {
        let [there, here] = sizes;
        if there == here {
            return Ok(());
        }
        return Err(refused(folder, "may have other tokens than the model")
            .detail(format!(
                "vocab_size is {there} there, {here} here, and a {TOKENIZER} is missing"
            ))
            .hint(format!(
                "put a {TOKENIZER} into both folders, so that their tokens can be compared"
            ))
            .into());
    }
    if Tokenizer::is_common_to([folder, &model.folder])? {
        return Ok(());
    }
    let [there, here] = [folder, &model.folder].map(Tokenizer::load);
    let (there, here) = (there.context("in --teacher")?, here?);
    let common = sizes.into_iter().min().unwrap_or_default();
    let Some((id, theirs, own)) = there.first_difference(&here, common) else {
        return Ok(());
    };
    Err(refused(folder, "has other tokens than the model")
        .detail(format!("token {id} is {theirs:?} there, {own:?} here"))
        .hint("name a model with the tokenizer of this model, as the dense model that was pruned has it")
        .into())
}

/// By layer of the model, the end of the teacher's layers that it stands for: its own layer, and layers after it that were dropped.
///
/// # Errors
/// Fails for a teacher of another width, and where `pruning.json` does not tell which of its layers the model has.
fn layer_ends(teacher: &ModelConfig, model: &OpenedModel, folder: &Path) -> Result<Vec<usize>> {
    let (config, layers) = (&model.config, teacher.num_hidden_layers);
    if teacher.hidden_size != config.hidden_size {
        let [there, here] = [teacher.hidden_size, config.hidden_size];
        return Err(refused(folder, "has another width than the model")
            .detail(format!("hidden_size is {there} there, {here} here"))
            .hint("--how lora and full learn from logits, so they take a teacher of any width")
            .into());
    }
    if layers == config.num_hidden_layers {
        return Ok((1..=layers).collect());
    }
    let record = read_record(&model.folder).and_then(Result::ok);
    let kept = record.and_then(|record| record.layer_drop).map(|drop| drop.kept);
    let fits = |kept: &Vec<usize>| {
        kept.len() == config.num_hidden_layers
            && kept.is_sorted_by(|a, b| a < b)
            && kept.last().is_some_and(|last| *last < layers)
    };
    let Some(kept) = kept.filter(fits) else {
        return Err(refused(folder, "has other layers than the model")
            .detail(format!(
                "num_hidden_layers is {layers} there, {} here, and `{}` does not tell which of them were kept",
                config.num_hidden_layers,
                model.folder.join(PRUNING_FILE).display()
            ))
            .hint("name a model with the layers of this one, such as the smaller model before weights were removed; --how lora and full need no map of layers")
            .into());
    };
    Ok(kept.into_iter().skip(1).chain([layers]).collect())
}

fn refused(folder: &Path, why: &str) -> Failure {
    Failure::new(format!("the teacher `{}` {why}", folder.display()))
}
