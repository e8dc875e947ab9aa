//! Tokenizers of an output that are not in the folder of a merged model: in an adapter's folder, or in the folder of another model.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::models::{InputModelFiles, InputModels};
use crate::data::ChatTemplate;
use crate::job::located;
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::{ModelSpec, TokenizerRecipe, TokenizerSource};
use crate::merging::vocabulary::{ModelTokens, TOKENIZER_FILE};
use crate::model::EMBEDDING;
use crate::run::Events;
use crate::settings::MergeSettings;

/// The tokenizer that was saved with an adapter.
pub(super) struct AdapterTokenizer {
    pub(super) folder: PathBuf,
    /// The model with the adapter.
    pub(super) name: String,
}

/// The tokenizer of the donor's adapter, if one was saved with it. Warns of tokenizers of other adapters, and of tokens without rows.
///
/// # Errors
/// Fails when a tokenizer or a chat template cannot be read.
pub(super) fn of_donor(
    donor: usize,
    inputs: &InputModels,
    tensors: &[MergeTensor],
    events: &dyn Events,
) -> Result<Option<AdapterTokenizer>> {
    let mut found = None;
    for (at, model) in inputs.models.iter().enumerate() {
        let folder = model.tokenizer_folder();
        if folder == model.folder {
            if at == donor
                && let Some(rows) = model.grown_rows()
            {
                events.warn(format!(
                    "the adapter in `{}` has {rows} tokens and no `{TOKENIZER_FILE}` in its folder: the output has the tokenizer of its base; copy the tokenizer's files into the adapter's folder",
                    model.spec
                ));
            }
            continue;
        }
        if at != donor {
            if is_other(folder, &inputs.models[donor].folder)? {
                events.warn(format!(
                    "the tokenizer and the chat template of the adapter in `{}` are left out: `tokenizer_source: {}` takes them",
                    model.spec, model.spec
                ));
            }
            continue;
        }
        let embedding = tensors.iter().find(|tensor| tensor.recipe.name == EMBEDDING);
        let rows = embedding.map_or(usize::MAX, |embedding| embedding.shape[0]);
        let tokens = ModelTokens::read(model.spec.to_string(), folder, rows)?;
        match tokens.without_rows.first() {
            Some(token) => events.warn(format!(
                "the tokenizer of the adapter in `{}` has {} tokens without a row, `{}` among them: the base's tokenizer is taken",
                model.spec,
                tokens.without_rows.len(),
                token.escape_debug()
            )),
            None => found = Some(AdapterTokenizer { folder: folder.to_path_buf(), name: tokens.name }),
        }
    }
    Ok(found)
}

/// Bytes of the `tokenizer.json` in a folder.
pub(super) fn tokenizer_size(folder: &Path) -> u64 {
    let file = std::fs::metadata(folder.join(TOKENIZER_FILE));
    file.map_or(0, |file| file.len())
}

/// The model of the tokenizer with its folder, where it is none of the models that are merged.
pub(super) fn other_folder(
    tokenizer: &TokenizerRecipe,
    settings: &MergeSettings,
    inputs: &InputModels,
    events: &dyn Events,
) -> Result<Option<(ModelSpec, PathBuf)>> {
    let TokenizerSource::Model(spec) = &tokenizer.source else {
        return Ok(None);
    };
    if inputs.models.iter().any(|model| model.spec == *spec) {
        return Ok(None);
    }
    let adapter_of = |model: &&InputModelFiles| {
        let (path, revision) = model.spec.adapter.as_ref()?;
        Some((path, revision) == (&spec.model, &spec.revision))
    };
    // The folder of an adapter that is merged.
    if let Some(model) = inputs.models.iter().find(|model| adapter_of(model) == Some(true)) {
        let folder = model.adapter.as_ref().map(|adapter| adapter.folder().to_path_buf());
        return Ok(folder.map(|folder| (spec.clone(), folder)));
    }
    let (revision, cache) = (spec.revision.as_deref(), settings.cache_dir.as_deref());
    let folder = located::tokenizer(&spec.model, revision, cache, events)?;
    Ok(Some((spec.clone(), folder)))
}

/// Returns whether two folders have different tokenizers or chat templates.
fn is_other(one: &Path, other: &Path) -> Result<bool> {
    let template = |folder: &Path| -> Result<Option<String>> {
        let found = ChatTemplate::find(folder)?;
        Ok(found.map(|template| template.text().trim().to_string()))
    };
    let digest = |folder: &Path| ModelTokens::digest("", folder).ok();
    Ok(digest(one) != digest(other) || template(one)? != template(other)?)
}
