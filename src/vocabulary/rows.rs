//! [`Vocabulary`]: the tokens of an output, and a rule for each row of every model's embedding and head.

use std::collections::HashMap;

use anyhow::Result;
use serde_json::{Value, json};

use super::tokens::ModelTokens;
use crate::failure::Failure;
use crate::recipe::{
    ModelSpec, TokenName, TokenRecipe, TokenRow, TokenizerRecipe, TokenizerSource,
};

/// The row of a model in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowRule {
    /// This row of the model itself.
    Own(usize),
    /// A row of another model.
    Of {
        /// The model.
        model: usize,
        /// Its row.
        row: usize,
    },
    /// The mean of some rows, by its number in [`Vocabulary::means`].
    Mean(usize),
    /// Zeros.
    Zero,
    /// The mean of all rows of tokens, as this model brings them.
    Padding,
}

/// The vocabulary of an output.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Vocabulary {
    /// Rows of the output.
    pub rows: usize,
    /// Rows of tokens; the others are padding.
    pub tokens: usize,
    /// Per model one rule for each row.
    pub rules: Vec<Vec<RowRule>>,
    /// Model and row of all rows of a mean.
    pub means: Vec<Vec<(usize, usize)>>,
    /// The model whose tokenizer the output gets.
    pub tokenizer: usize,
    /// Entries of `added_tokens` that this tokenizer lacks.
    pub added: Vec<Value>,
    /// Tokens that no model has a row for.
    pub without_rows: Vec<String>,
}

/// The models of a merge.
pub struct Models<'a> {
    /// Their tokens.
    pub tokens: &'a [ModelTokens],
    /// Their names in the recipe.
    pub specs: &'a [&'a ModelSpec],
    /// The number of the base model.
    pub base: Option<usize>,
    /// The numbers of the models whose embeddings are merged.
    pub merged: &'a [usize],
}

impl Vocabulary {
    /// Cuts the embeddings of `models` models to `rows` rows.
    pub fn truncated(models: usize, rows: usize) -> Self {
        Self {
            rows,
            tokens: rows,
            rules: vec![(0..rows).map(RowRule::Own).collect(); models],
            ..Self::default()
        }
    }

    /// The vocabulary that a recipe describes.
    ///
    /// # Errors
    /// Fails for models and tokens that are not there.
    pub fn of(recipe: &TokenizerRecipe, models: &Models<'_>) -> Result<Self, Failure> {
        let tokenizer = match &recipe.source {
            TokenizerSource::Base | TokenizerSource::Union => models.base.unwrap_or(0),
            TokenizerSource::Model(spec) => models.find(spec)?,
        };
        let own = &models.tokens[tokenizer];
        let mut ids = own.ids.clone();
        let mut added = Vec::new();
        let mut next = ids.values().max().map_or(0, |last| last + 1);
        let mut add = |text: &str, entry: Option<&Value>| {
            if ids.contains_key(text) {
                return;
            }
            ids.insert(text.to_string(), next);
            added.push(entry_of(text, next, entry));
            next += 1;
        };
        if recipe.source == TokenizerSource::Union {
            let others = || models.tokens.iter();
            // Ordinary tokens come before added ones, as in mergekit.
            for of in others() {
                for (text, _) in of.in_order() {
                    if of.added(text).is_none() {
                        add(text, None);
                    }
                }
            }
            for of in others() {
                for (text, entry) in &of.added {
                    add(text, Some(entry));
                }
            }
        }
        for (text, _) in &recipe.tokens {
            add(text, None);
        }
        let tokens = next;
        let multiple = recipe.pad_to_multiple_of.unwrap_or(1);
        let mut vocabulary = Self {
            rows: tokens.next_multiple_of(multiple),
            tokens,
            rules: Vec::new(),
            means: Vec::new(),
            tokenizer,
            added,
            without_rows: Vec::new(),
        };
        vocabulary.rules = vec![vec![RowRule::Padding; vocabulary.rows]; models.tokens.len()];
        // Ids without a token have a row all the same.
        for rules in &mut vocabulary.rules {
            rules[..tokens].fill(RowRule::Zero);
        }
        let single: HashMap<&str, &TokenRecipe> = recipe
            .tokens
            .iter()
            .map(|(text, token)| (text.as_str(), token))
            .collect();
        let mut texts: Vec<(&String, &usize)> = ids.iter().collect();
        texts.sort_by_key(|(_, id)| **id);
        for (text, &id) in texts {
            vocabulary.add_rules(text, id, single.get(text.as_str()).copied(), models)?;
        }
        Ok(vocabulary)
    }

    /// Adds the rules of one token.
    fn add_rules(
        &mut self,
        text: &str,
        id: usize,
        asked: Option<&TokenRecipe>,
        models: &Models<'_>,
    ) -> Result<(), Failure> {
        let is_forced = asked.is_some_and(|asked| asked.force);
        let row_of = |model: usize| models.tokens[model].ids.get(text).copied();
        let owners: Vec<(usize, usize)> = models
            .merged
            .iter()
            .filter_map(|&model| Some((model, row_of(model)?)))
            .collect();
        let is_everywhere = owners.len() == models.merged.len();
        // The recipe's row is looked up even where every model has the token: a mistake should not go unnoticed.
        let named = asked.and_then(|asked| asked.source.as_ref());
        let named = named.map(|named| models.row(text, named)).transpose()?;
        let other = match named {
            Some(named) => named,
            None if is_everywhere && !is_forced => RowRule::Zero,
            None => self.rule_without_name(text, &owners, models),
        };
        for (model, rules) in self.rules.iter_mut().enumerate() {
            rules[id] = match row_of(model) {
                Some(row) if !is_forced => RowRule::Own(row),
                _ => other,
            };
        }
        Ok(())
    }

    /// The rule of a token that some models lack, where the recipe names no row.
    fn rule_without_name(
        &mut self,
        text: &str,
        owners: &[(usize, usize)],
        models: &Models<'_>,
    ) -> RowRule {
        let base = owners.iter().find(|(model, _)| Some(*model) == models.base);
        match (owners, base) {
            ([], _) => {
                self.without_rows.push(text.to_string());
                RowRule::Zero
            }
            (&[(model, row)], _) | (_, Some(&(model, row))) => RowRule::Of { model, row },
            _ => {
                self.means.push(owners.to_vec());
                RowRule::Mean(self.means.len() - 1)
            }
        }
    }
}

impl Models<'_> {
    /// The number of a model that the recipe names.
    fn find(&self, spec: &ModelSpec) -> Result<usize, Failure> {
        let found = self.specs.iter().position(|of| *of == spec);
        found.ok_or_else(|| {
            let names: Vec<String> = self.specs.iter().map(|spec| format!("`{spec}`")).collect();
            Failure::new(format!(
                "the tokenizer of the recipe names `{spec}`, which is not merged"
            ))
            .detail(format!("models are {}", names.join(", ")))
            .hint("name one of these models")
        })
    }

    /// The row that a recipe names for a token.
    fn row(&self, text: &str, named: &TokenRow) -> Result<RowRule, Failure> {
        let (spec, name) = match named {
            TokenRow::Zero => return Ok(RowRule::Zero),
            TokenRow::Model(spec) => (spec, TokenName::Text(text.to_string())),
            TokenRow::Token(spec, name) => (spec, name.clone()),
        };
        let model = self.find(spec)?;
        let tokens = &self.tokens[model];
        let row = match &name {
            TokenName::Text(name) => tokens.ids.get(name).copied().ok_or_else(|| {
                Failure::new(format!("the model `{spec}` has no token `{name}`"))
                    .detail(format!("the recipe takes the row of `{text}` from it"))
            })?,
            TokenName::Id(id) if *id < tokens.rows => *id,
            TokenName::Id(id) => {
                return Err(Failure::new(format!(
                    "the model `{spec}` has no token {id}: its embedding has {} rows",
                    tokens.rows
                ))
                .detail(format!("the recipe takes the row of `{text}` from it")));
            }
        };
        Ok(RowRule::Of { model, row })
    }
}

/// An entry of `added_tokens`: one of another model with a new id, or a plain one.
fn entry_of(text: &str, id: usize, entry: Option<&Value>) -> Value {
    let mut entry = entry.cloned().unwrap_or_else(|| {
        json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": true, "special": false,
        })
    });
    entry["id"] = id.into();
    entry
}
