//! The vocabulary of the output: `--vocab`, the recipe's `tokenizer` and `chat_template`, and `--unsafe-truncate-embeddings`.
//!
//! Without any of them the embeddings of all models must have as many rows.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::models::{InputModelFiles, InputModels};
use super::other_tokenizer::{self, other_folder, tokenizer_size};
use crate::bytes::hex;
use crate::checkpoint::CONFIG_FILE;
use crate::failure::Failure;
use crate::merging::methods::Semantics;
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::{ModelSpec, Recipe, TokenizerRecipe, TokenizerSource};
use crate::merging::vocabulary::{
    EditedFiles, ModelTokens, RowMap, TOKENIZER_FILE, TokenModels, TokenizerEdit, Vocabulary,
    chat_template, limit_token_ids,
};
use crate::model::{EMBEDDING, HEAD, ModelConfig, text_settings};
use crate::run::Events;
use crate::run::merging::VocabularyReport;
use crate::settings::MergeSettings;

/// Tokens that the console lists.
const LISTED: usize = 10;
/// Tokens that the record lists, of each kind.
const RECORDED: usize = 1000;
/// The largest vocabulary of a model whose embedding is not merged, so that a damaged tokenizer asks for no huge output.
const MOST_TOKENS: usize = 1 << 24;

/// The vocabulary of a merge.
#[derive(Default)]
pub(super) struct OutputVocabulary {
    /// The folder of the tokenizer, if it is not the donor's.
    tokenizer: Option<PathBuf>,
    /// The name of the tokenizer's model.
    name: String,
    edit: TokenizerEdit,
    /// The rules of rows, by tensor.
    pub(super) maps: BTreeMap<String, Arc<RowMap>>,
    /// Present where the recipe or a flag decides on the vocabulary.
    pub(super) report: Option<VocabularyReport>,
    /// SHA-256 of all tokenizers that decide on the result.
    digest: Option<String>,
    /// Bytes of all `tokenizer.json` whose tokens were read.
    read_bytes: u64,
}

impl OutputVocabulary {
    /// Decides on the rows of embedding and head: `tensors` get that many.
    ///
    /// # Errors
    /// Fails for models of different vocabularies where nothing says what to do with them, for a tokenizer that cannot be read, and for
    /// tokens and templates that are not there.
    pub(super) fn settle(
        settings: &MergeSettings,
        recipe: &Recipe,
        inputs: &InputModels,
        tensors: &mut [MergeTensor],
        events: &dyn Events,
    ) -> Result<Self> {
        let mut vocabulary = match &recipe.tokenizer {
            Some(_) if settings.semantics == Semantics::Peft => {
                return Err(Failure::usage(
                    "--semantics peft combines adapters of one base, whose tokens stay",
                )
                .hint("leave --vocab and the recipe's tokenizer out")
                .into());
            }
            Some(_) if settings.unsafe_truncate_embeddings => {
                return Err(Failure::usage(
                    "--unsafe-truncate-embeddings has no meaning for a recipe with a tokenizer",
                )
                .hint("leave the flag out")
                .into());
            }
            Some(tokenizer) => {
                let other = other_folder(tokenizer, settings, inputs, events)?;
                Self::of_recipe(tokenizer, recipe, inputs, other, tensors)?
            }
            None => {
                let mut kept = Self::as_it_is(settings, inputs, tensors, events)?;
                let donor = inputs.donor(recipe);
                if let Some(of) = other_tokenizer::of_donor(donor, inputs, tensors, events)? {
                    kept.read_bytes += tokenizer_size(&of.folder);
                    (kept.tokenizer, kept.name) = (Some(of.folder), of.name);
                }
                kept
            }
        };
        if let Some(asked) = &recipe.chat_template {
            let folders = inputs.models.iter().map(InputModelFiles::template_folder);
            let folders: Vec<&Path> = folders.collect::<Result<_>>()?;
            vocabulary.edit.chat_template = chat_template(asked, &folders)?;
            if vocabulary.edit.chat_template.is_none() {
                events.warn("no model has a chat template, so the output has none".to_string());
            }
        }
        Ok(vocabulary)
    }

    /// The vocabulary of models with equally many rows, or of models that are cut to the fewest rows.
    fn as_it_is(
        settings: &MergeSettings,
        inputs: &InputModels,
        tensors: &mut [MergeTensor],
        events: &dyn Events,
    ) -> Result<Self> {
        let rows = rows_by_model(inputs, tensors)?;
        let (Some(&least), Some(&most)) = (rows.values().min(), rows.values().max()) else {
            return Ok(Self::kept());
        };
        if least == most {
            return Ok(Self {
                read_bytes: warn_of_other_tokens(inputs, &rows, events),
                ..Self::kept()
            });
        }
        if !settings.unsafe_truncate_embeddings {
            let failure = Failure::new("the models have different vocabularies");
            let counted = rows
                .iter()
                .map(|(&model, rows)| format!("`{}`: {rows} tokens", inputs.models[model].spec));
            return Err(counted
                .fold(failure, Failure::detail)
                .hint("use --vocab base for the tokens of the base, or --vocab union for those of all models")
                .into());
        }
        set_rows(tensors, least);
        let donor = &inputs.models[0];
        let path = donor.folder.join(TOKENIZER_FILE);
        let removed = match path.exists() {
            true => ModelTokens::read(donor.spec.to_string(), &donor.folder, least)?.without_rows,
            false => Vec::new(),
        };
        Ok(Self {
            edit: TokenizerEdit {
                removed: removed.clone(),
                rows: least,
                ..TokenizerEdit::default()
            },
            report: Some(VocabularyReport {
                source: "truncated".to_string(),
                rows: least,
                tokens: least,
                dropped: removed.len(),
                dropped_tokens: first(removed, RECORDED),
                ..VocabularyReport::default()
            }),
            ..Self::default()
        })
    }

    /// The donor's vocabulary as it is.
    fn kept() -> Self {
        let edit = TokenizerEdit { rows: usize::MAX, ..TokenizerEdit::default() };
        Self { edit, ..Self::default() }
    }

    /// The vocabulary that a recipe describes. `other` is the model of the tokenizer where it is not merged.
    fn of_recipe(
        tokenizer: &TokenizerRecipe,
        recipe: &Recipe,
        inputs: &InputModels,
        other: Option<(ModelSpec, PathBuf)>,
        tensors: &mut [MergeTensor],
    ) -> Result<Self> {
        let rows = rows_by_model(inputs, tensors)?;
        let mut specs: Vec<ModelSpec> = Vec::new();
        let mut tokens = Vec::new();
        for (number, model) in inputs.models.iter().enumerate() {
            let name = model.spec.to_string();
            // A model whose embedding is not merged may still give its tokenizer.
            let own = rows.get(&number).copied();
            let own = own.unwrap_or_else(|| configured_rows(model.settings()));
            tokens.push(ModelTokens::read(name, model.tokenizer_folder(), own)?);
            specs.push(model.spec.clone());
        }
        if let Some((spec, folder)) = other {
            // An adapter's folder has a tokenizer and no configuration.
            let rows = match folder.join(CONFIG_FILE).is_file() {
                false => MOST_TOKENS,
                true => {
                    let config = ModelConfig::read_json(&folder)?;
                    configured_rows(text_settings(&config).unwrap_or(&config))
                }
            };
            tokens.push(ModelTokens::read(spec.to_string(), &folder, rows)?);
            specs.push(spec);
        }
        let base = recipe.base_model.as_ref();
        let models = TokenModels {
            tokens: &tokens,
            specs: &specs,
            base: base.and_then(|base| specs.iter().position(|of| of == base)),
        };
        let vocabulary = Vocabulary::of(tokenizer, &models)?;
        let mut maps: BTreeMap<String, Arc<RowMap>> = BTreeMap::new();
        let mut known: BTreeMap<Vec<usize>, Arc<RowMap>> = BTreeMap::new();
        for tensor in tensors.iter().filter(|tensor| has_tokens(tensor)) {
            let sources = tensor.recipe.sources.iter().map(|source| source.model);
            let sources: Vec<usize> = sources.collect();
            let map = match known.get(&sources) {
                Some(map) => Arc::clone(map),
                None => Arc::new(vocabulary.rows_of(tokenizer, &models, &sources)?),
            };
            known.insert(sources, Arc::clone(&map));
            maps.insert(tensor.recipe.name.clone(), map);
        }
        set_rows(tensors, vocabulary.rows);
        let own = &tokens[vocabulary.tokenizer];
        let mut dropped = vocabulary.dropped(&models);
        // These are taken out of the output's tokenizer.
        dropped.extend(own.without_rows.iter().cloned());
        dropped.retain(|text| !vocabulary.has(text));
        dropped.sort_unstable();
        dropped.dedup();
        let without: Vec<String> =
            known.values().next().map_or(Vec::new(), |map| map.without_rows.clone());
        let texts = |entries: &[Value]| -> Vec<String> {
            let texts = entries.iter().filter_map(|entry| entry["content"].as_str());
            texts.map(str::to_string).collect()
        };
        let source = match &tokenizer.source {
            TokenizerSource::Base => "base".to_string(),
            TokenizerSource::Union => "union".to_string(),
            TokenizerSource::Model(spec) => spec.to_string(),
        };
        let mut digest = Sha256::new();
        tokens.iter().for_each(|of| digest.update(&of.sha256));
        Ok(Self {
            tokenizer: Some(own.folder.clone()),
            name: own.name.clone(),
            edit: TokenizerEdit {
                added: vocabulary.added.clone(),
                removed: own.without_rows.clone(),
                rows: vocabulary.rows,
                chat_template: None,
            },
            maps,
            report: Some(VocabularyReport {
                source,
                rows: vocabulary.rows,
                tokens: vocabulary.tokens,
                added: vocabulary.added.len(),
                added_tokens: first(texts(&vocabulary.added), RECORDED),
                dropped: dropped.len(),
                dropped_tokens: first(dropped, RECORDED),
                zero: without.len(),
                zero_tokens: first(without, RECORDED),
            }),
            digest: Some(hex(&digest.finalize())),
            read_bytes: tokens.iter().map(|of| tokenizer_size(&of.folder)).sum(),
        })
    }

    /// The settings that decide the outcome in addition to the recipe, by name.
    pub(super) fn deciding(&self) -> BTreeMap<String, String> {
        let rows = self.report.as_ref().map(|report| {
            let digest = self.digest.as_deref().unwrap_or("truncated");
            ("vocabulary".to_string(), format!("{} {digest}", report.rows))
        });
        let template = self.edit.chat_template.as_ref();
        let template = template.map(|text| ("chat_template".to_string(), text.clone()));
        rows.into_iter().chain(template).collect()
    }

    /// Bytes of the rules of rows.
    pub(super) fn bytes(&self) -> u64 {
        // Embedding and head mostly share them.
        let mut maps: Vec<&Arc<RowMap>> = self.maps.values().collect();
        maps.dedup_by(|one, other| Arc::ptr_eq(one, other));
        maps.iter().map(|map| map.bytes()).sum()
    }

    /// Bytes that the tokens of all models take while they are compared or joined: texts and numbers in a table, and a file at a time.
    pub(super) fn tokenizer_bytes(&self) -> u64 {
        3 * self.read_bytes
    }

    /// Bytes of the files of the tokenizer while they are written: a changed `tokenizer.json`, as it was and as it is.
    pub(super) fn published_bytes(&self) -> u64 {
        match self.edit.added.is_empty() && self.edit.removed.is_empty() {
            true => 0,
            false => 2 * self.tokenizer.as_deref().map_or(0, tokenizer_size),
        }
    }

    /// Writes the ids of special tokens into the configuration of the output.
    ///
    /// # Errors
    /// Fails when the configuration of the tokenizer's model cannot be read.
    pub(super) fn configure(&self, donor: &Path, config: &mut Value) -> Result<()> {
        let Some(config) = config.as_object_mut() else {
            return Ok(());
        };
        let other = self.tokenizer.as_deref().filter(|folder| *folder != donor);
        if let Some(folder) = other.filter(|folder| folder.join(CONFIG_FILE).is_file()) {
            let own = ModelConfig::read_json(folder)?;
            for name in ["bos_token_id", "eos_token_id", "pad_token_id"] {
                match own.get(name) {
                    Some(id) => config.insert(name.to_string(), id.clone()),
                    None => config.remove(name),
                };
            }
        }
        limit_token_ids(config, self.edit.rows);
        Ok(())
    }

    /// The folder of the tokenizer's files, and the files that change.
    ///
    /// # Errors
    /// Fails when a file cannot be read or changed.
    pub(super) fn files<'a>(&'a self, donor: &'a Path) -> Result<(&'a Path, EditedFiles)> {
        let folder = self.tokenizer.as_deref().unwrap_or(donor);
        Ok((folder, self.edit.files(&self.name, folder)?))
    }

    /// Tells what becomes of the tokens.
    pub(super) fn announce(&self, events: &dyn Events) {
        let Some(report) = &self.report else {
            return;
        };
        let padding = match report.rows - report.tokens {
            0 => String::new(),
            rows => format!(", {rows} rows of padding"),
        };
        let source = match report.source.as_str() {
            "base" => "the base's tokens",
            "union" => "the tokens of all models",
            "truncated" => "cut by number: rows may change their tokens",
            other => &format!("the tokens of {other}"),
        };
        events.note(format!("vocabulary   {} tokens{padding}: {source}", report.tokens));
        for (what, count, tokens) in [
            ("added", report.added, &report.added_tokens),
            ("dropped", report.dropped, &report.dropped_tokens),
        ] {
            if count > 0 {
                events.note(format!("             {what}: {}", listed(count, tokens)));
            }
        }
        if report.zero > 0 {
            events.warn(format!(
                "no merged model has a row for {}: zeros stand there",
                listed(report.zero, &report.zero_tokens)
            ));
        }
    }
}

/// The first tokens of a list.
fn listed(count: usize, tokens: &[String]) -> String {
    let shown: Vec<String> =
        tokens.iter().take(LISTED).map(|text| format!("`{}`", text.escape_debug())).collect();
    match count - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn first(mut tokens: Vec<String>, count: usize) -> Vec<String> {
    tokens.truncate(count);
    tokens
}

/// Returns true for a tensor with a row per token.
fn has_tokens(tensor: &MergeTensor) -> bool {
    [EMBEDDING, HEAD].contains(&tensor.recipe.name.as_str())
}

/// Rows of the embeddings and heads that are merged, by number of the model.
fn rows_by_model(inputs: &InputModels, tensors: &[MergeTensor]) -> Result<BTreeMap<usize, usize>> {
    let mut rows: BTreeMap<usize, usize> = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| has_tokens(tensor)) {
        for source in &tensor.recipe.sources {
            let model = &inputs.models[source.model];
            let entry = model.entry(&source.tensor);
            let entry = entry.with_context(|| format!("tensor `{}` is missing", source.tensor))?;
            let own = entry.shape.first().copied().unwrap_or(0);
            let known = *rows.entry(source.model).or_insert(own);
            if known != own {
                return Err(Failure::new(format!(
                    "the embedding of `{}` has {known} rows and its head has {own}",
                    model.spec
                ))
                .hint(match &model.spec.adapter {
                    Some(_) => "save the adapter with `embed_tokens` and `lm_head` in `modules_to_save`, with as many rows in both",
                    None => "save the model with as many rows in both",
                })
                .into());
            }
        }
    }
    Ok(rows)
}

/// Gives embedding and head this number of rows.
fn set_rows(tensors: &mut [MergeTensor], rows: usize) {
    for tensor in tensors.iter_mut().filter(|tensor| has_tokens(tensor)) {
        if let Some(own) = tensor.shape.first_mut() {
            *own = rows;
        }
    }
}

/// Warns where models have equally many rows but different tokens in them, and returns the bytes that were read for it. A merge of
/// weights alone needs no tokenizer, so a tokenizer that cannot be read is passed over.
fn warn_of_other_tokens(
    inputs: &InputModels,
    rows: &BTreeMap<usize, usize>,
    events: &dyn Events,
) -> u64 {
    let folders = rows.keys().map(|&of| inputs.models[of].tokenizer_folder());
    let folders: BTreeSet<&Path> = folders.collect();
    let digests: BTreeSet<Option<String>> = folders
        .iter()
        .map(|folder| ModelTokens::digest(&folder.display().to_string(), folder).ok())
        .collect();
    if digests.len() < 2 {
        return 0;
    }
    let mut others: BTreeMap<String, ModelTokens> = BTreeMap::new();
    for (&model, &rows) in rows {
        let model = &inputs.models[model];
        let name = model.spec.to_string();
        // Most models share their tokenizer: it is hashed, not parsed again.
        let folder = model.tokenizer_folder();
        let known = ModelTokens::digest(&name, folder);
        if known.is_ok_and(|digest| !others.contains_key(&digest))
            && let Ok(tokens) = ModelTokens::read(name, folder, rows)
        {
            others.insert(tokens.sha256.clone(), tokens);
        }
    }
    let read = others.values().map(|of| tokenizer_size(&of.folder)).sum();
    let mut tokens = others.values();
    let Some(first) = tokens.next() else {
        return read;
    };
    for other in tokens {
        let differing = first.first_difference(other);
        if let Some(token) = differing.or_else(|| other.first_difference(first)) {
            events.warn(format!(
                "`{}` and `{}` have as many tokens, but not the same: `{}` is one of them. --vocab base or --vocab union merges rows of the same token",
                first.name,
                other.name,
                token.escape_debug()
            ));
        }
    }
    read
}

/// Rows of a model whose embedding is not merged, by its configuration.
fn configured_rows(config: &Value) -> usize {
    let rows = config.get("vocab_size").and_then(Value::as_u64);
    rows.map_or(MOST_TOKENS, |rows| (rows as usize).min(MOST_TOKENS))
}
