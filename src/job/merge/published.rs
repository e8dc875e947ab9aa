//! The files beside the weights of a merged model: configuration, tokenizer, recipe, record and card.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;

use super::job::MergeJob;
use super::layer_settings;
use super::models::InputModels;
use super::vocabulary::OutputVocabulary;
use crate::checkpoint::{
    CARD_FILE, CONFIG_FILE, INDEX_FILE, MERGE_CONFIG_FILE, MERGING_FILE, Published, sidecars_in,
};
use crate::linalg::StoredDtype;
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::{Recipe, without_folders};
use crate::merging::vocabulary::TOKENIZER_FILES;
use crate::model::{EMBEDDING, HEAD};
use crate::report::merge_card;
use crate::run::merging::MergeReport;

/// The model whose configuration and tokenizer the output gets: the base, else the first.
pub(super) struct Donor {
    pub(super) folder: PathBuf,
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
        let base = recipe.base_model.as_ref();
        let models = &inputs.models;
        let donor = models.iter().find(|model| Some(&model.spec) == base);
        let donor = donor.or(models.first()).context("a merge has models")?;
        let mut config = donor.config.clone();
        let object = config.as_object_mut().with_context(|| {
            format!("`{}` is no object", donor.folder.join(CONFIG_FILE).display())
        })?;
        let layers = tensors.iter().filter_map(|tensor| tensor.recipe.layer);
        let layers = layers.max().map_or(0, |last| last + 1);
        layer_settings::write(object, tensors, inputs)?;
        object.insert("num_hidden_layers".to_string(), layers.into());
        let has_head = tensors.iter().any(|tensor| tensor.recipe.name == HEAD);
        if has_head == donor.is_tied {
            object.insert("tie_word_embeddings".to_string(), (!has_head).into());
        }
        let embedding = tensors.iter().find(|tensor| tensor.recipe.name == EMBEDDING);
        if let Some(rows) = embedding.and_then(|embedding| embedding.shape.first()) {
            object.insert("vocab_size".to_string(), (*rows).into());
        }
        // transformers 5 writes `dtype`, 4 wrote `torch_dtype`; both read either.
        let key = match object.contains_key("dtype") {
            true => "dtype",
            false => "torch_dtype",
        };
        object.insert(key.to_string(), widest(tensors).torch_name().into());
        vocabulary.configure(&donor.folder, &mut config)?;
        Ok(Self { folder: donor.folder.clone(), config })
    }
}

/// The widest dtype of the output.
pub(super) fn widest(tensors: &[MergeTensor]) -> StoredDtype {
    let dtypes = tensors.iter().map(|tensor| tensor.dtype);
    dtypes.reduce(StoredDtype::wider).unwrap_or(StoredDtype::F32)
}

impl MergeJob {
    /// The files that are published with the merged model.
    pub(super) fn published(&self, report: &MergeReport) -> Result<Published> {
        let mut config = serde_json::to_vec_pretty(&self.donor.config)?;
        config.push(b'\n');
        let public = report.without_paths(self.recipe.to_yaml(without_folders), without_folders);
        let mut record = serde_json::to_vec_pretty(&public)?;
        record.push(b'\n');
        let mut written = vec![
            (CONFIG_FILE.to_string(), config),
            (MERGE_CONFIG_FILE.to_string(), public.recipe.clone().into_bytes()),
            (MERGING_FILE.to_string(), record),
        ];
        if !self.settings.no_model_card {
            written.push((CARD_FILE.to_string(), merge_card::text(&public).into_bytes()));
        }
        if let Some(index) = self.layout.index_json() {
            written.push((INDEX_FILE.to_string(), index));
        }
        let (tokenizer, edited) = self.vocabulary.files(&self.donor.folder)?;
        written.extend(edited.written);
        let mut copied = Vec::new();
        for (folder, has_tokenizer) in [(&*self.donor.folder, false), (tokenizer, true)] {
            let sidecars = sidecars_in(folder)?.into_iter().filter(|name| {
                TOKENIZER_FILES.contains(&name.as_str()) == has_tokenizer
                    && name != INDEX_FILE
                    && !edited.left_out.contains(&name.as_str())
                    && !written.iter().any(|(own, _)| own == name)
            });
            copied.extend(sidecars.map(|name| (folder.join(&name), name)));
        }
        Ok(Published { written, copied })
    }
}
