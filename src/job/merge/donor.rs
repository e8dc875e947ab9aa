//! The model whose configuration and tokenizer the output gets, and the changes of the configuration.

use anyhow::{Context, Result};
use serde_json::Value;

use super::layer_settings;
use super::models::InputModels;
use super::vocabulary::OutputVocabulary;
use crate::checkpoint::CONFIG_FILE;
use crate::linalg::StoredDtype;
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::Recipe;
use crate::model::{EMBEDDING, HEAD, text_settings_mut};

/// The model whose configuration and tokenizer the output gets: the base, else the first.
pub(super) struct Donor {
    /// Its index among the models.
    pub(super) model: usize,
    /// The configuration of the output.
    pub(super) config: Value,
}

impl Donor {
    /// Takes the donor's configuration, with the output's layers, vocabulary and dtype.
    pub(super) fn of(
        recipe: &Recipe,
        inputs: &InputModels,
        tensors: &[MergeTensor],
        vocabulary: &OutputVocabulary,
    ) -> Result<Self> {
        let model = inputs.donor(recipe);
        let donor = inputs.models.get(model).context("a merge has models")?;
        let mut config = donor.config.clone();
        let object = config.as_object_mut().with_context(|| {
            format!("`{}` is no object", donor.folder.join(CONFIG_FILE).display())
        })?;
        let layers = tensors.iter().filter_map(|tensor| tensor.recipe.layer);
        let layers = layers.max().map_or(0, |last| last + 1);
        let settings = text_settings_mut(object);
        layer_settings::write(settings, tensors, inputs)?;
        settings.insert("num_hidden_layers".to_string(), layers.into());
        let embedding = tensors.iter().find(|tensor| tensor.recipe.name == EMBEDDING);
        if let Some(rows) = embedding.and_then(|embedding| embedding.shape.first()) {
            settings.insert("vocab_size".to_string(), (*rows).into());
        }
        let has_head = tensors.iter().any(|tensor| tensor.recipe.name == HEAD);
        if has_head == donor.is_tied {
            object.insert("tie_word_embeddings".to_string(), (!has_head).into());
            let settings = text_settings_mut(object);
            if let Some(own) = settings.get_mut("tie_word_embeddings") {
                *own = (!has_head).into();
            }
        }
        // transformers 5 writes `dtype`, 4 wrote `torch_dtype`; both read either.
        let key = match object.contains_key("dtype") {
            true => "dtype",
            false => "torch_dtype",
        };
        let dtype = widest(tensors).torch_name();
        object.insert(key.to_string(), dtype.into());
        let settings = text_settings_mut(object);
        for key in ["dtype", "torch_dtype"] {
            if let Some(own) = settings.get_mut(key) {
                *own = dtype.into();
            }
        }
        vocabulary.configure(&donor.folder, &mut config)?;
        Ok(Self { model, config })
    }
}

/// The widest dtype of the output.
pub(super) fn widest(tensors: &[MergeTensor]) -> StoredDtype {
    let dtypes = tensors.iter().map(|tensor| tensor.dtype);
    dtypes.reduce(StoredDtype::wider).unwrap_or(StoredDtype::F32)
}
