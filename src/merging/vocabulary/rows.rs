//! [`Vocabulary`]: the tokens of an output; [`RowMap`]: a rule for each row of every source of its embedding or head.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde_json::{Value, json};

use super::tokens::ModelTokens;
use crate::failure::Failure;
use crate::merging::recipe::{
    ModelSpec, TokenName, TokenRecipe, TokenRow, TokenizerRecipe, TokenizerSource,
};

/// The row of a source in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowRule {
    /// This row of the source itself.
    Own(u32),
    /// A row of the source that is named here.
    Of {
        /// The number of its model.
        model: u32,
        /// Its row.
        row: u32,
    },
    /// The mean of some rows, by its number in [`RowMap::means`].
    Mean(u32),
    /// Zeros.
    Zero,
    /// The mean of all rows of tokens, as this source brings them.
    Padding,
}

/// The vocabulary of an output.
#[derive(Debug, Clone, PartialEq)]
pub struct Vocabulary {
    /// Rows of the output.
    pub rows: usize,
    /// Rows of tokens; the rows after them are padding.
    pub tokens: usize,
    /// The number of the model whose tokenizer the output gets.
    pub tokenizer: usize,
    /// Entries of `added_tokens` that this tokenizer lacks.
    pub added: Vec<Value>,
    /// Text → id.
    ids: HashMap<String, usize>,
}

/// The rows of a tensor of the output.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowMap {
    /// Rows of tokens; the rows after them are padding.
    pub tokens: usize,
    /// The rule for each row, by number of the model.
    pub rules: BTreeMap<usize, Vec<RowRule>>,
    /// Model and row of all rows of a mean.
    pub means: Vec<Vec<(u32, u32)>>,
    /// Tokens that no source has a row for.
    pub without_rows: Vec<String>,
}

/// The models of a merge, with the models that only give a tokenizer.
pub struct TokenModels<'a> {
    /// Their tokens.
    pub tokens: &'a [ModelTokens],
    /// Their names in the recipe.
    pub specs: &'a [ModelSpec],
    /// The number of the base model.
    pub base: Option<usize>,
}

impl Vocabulary {
    /// The vocabulary that a recipe describes.
    ///
    /// # Errors
    /// Fails for a model that is not there.
    pub fn of(recipe: &TokenizerRecipe, models: &TokenModels<'_>) -> Result<Self, Failure> {
        let tokenizer = match &recipe.source {
            TokenizerSource::Base | TokenizerSource::Union => models.base.unwrap_or(0),
            TokenizerSource::Model(spec) => models.find(spec)?,
        };
        let mut ids = models.tokens[tokenizer].ids.clone();
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
            // Ordinary tokens come before added tokens, as in mergekit.
            for model in models.tokens {
                let known: HashSet<&str> = model.added.iter().map(|(text, _)| &**text).collect();
                for (text, _) in model.in_order() {
                    if !known.contains(text) {
                        add(text, None);
                    }
                }
            }
            for (text, entry) in models.tokens.iter().flat_map(|model| &model.added) {
                add(text, Some(entry));
            }
        }
        for (text, _) in &recipe.tokens.0 {
            add(text, None);
        }
        let multiple = recipe.pad_to_multiple_of.unwrap_or(1);
        Ok(Self { rows: next.next_multiple_of(multiple), tokens: next, tokenizer, added, ids })
    }

    /// Returns true if the output has a token of this text.
    pub fn has(&self, text: &str) -> bool {
        self.ids.contains_key(text)
    }

    /// The tokens of models that the output has not, sorted.
    pub fn dropped(&self, models: &TokenModels<'_>) -> Vec<String> {
        let all = models.tokens.iter().flat_map(|model| model.ids.keys());
        let dropped: BTreeSet<&String> = all.filter(|text| !self.has(text)).collect();
        dropped.into_iter().cloned().collect()
    }

    /// The rows of a tensor whose sources are the models of these numbers.
    ///
    /// # Errors
    /// Fails for a row of a model that is not among the sources, and for a token that a model has not.
    pub fn rows_of(
        &self,
        recipe: &TokenizerRecipe,
        models: &TokenModels<'_>,
        sources: &[usize],
    ) -> Result<RowMap, Failure> {
        let mut rules = vec![RowRule::Padding; self.rows];
        // Ids without a token have a row all the same.
        rules[..self.tokens].fill(RowRule::Zero);
        let mut map = RowMap {
            tokens: self.tokens,
            rules: sources.iter().map(|model| (*model, rules.clone())).collect(),
            ..RowMap::default()
        };
        let single: HashMap<&str, &TokenRecipe> =
            recipe.tokens.0.iter().map(|(text, token)| (text.as_str(), token)).collect();
        let mut texts: Vec<(&String, &usize)> = self.ids.iter().collect();
        texts.sort_unstable_by_key(|(_, id)| **id);
        for (text, &id) in texts {
            map.add(text, id, single.get(text.as_str()).copied(), models, sources)?;
        }
        Ok(map)
    }
}

impl RowMap {
    /// Adds the rules of a token.
    fn add(
        &mut self,
        text: &str,
        id: usize,
        asked: Option<&TokenRecipe>,
        models: &TokenModels<'_>,
        sources: &[usize],
    ) -> Result<(), Failure> {
        let is_forced = asked.is_some_and(|asked| asked.force);
        let row_of = |model: usize| models.tokens[model].ids.get(text).map(|row| *row as u32);
        let owners: Vec<(usize, u32)> =
            sources.iter().filter_map(|&model| Some((model, row_of(model)?))).collect();
        // The recipe's row is looked up even where every source has the token, so that a mistake is noticed.
        let named = asked.and_then(|asked| asked.source.as_ref());
        let named = named.map(|named| models.row(text, named, sources));
        let other = match named.transpose()? {
            Some(named) => named,
            None if owners.len() == sources.len() && !is_forced => RowRule::Zero,
            None => self.without_name(text, &owners, models.base),
        };
        for (&model, rules) in &mut self.rules {
            rules[id] = match row_of(model) {
                Some(row) if !is_forced => RowRule::Own(row),
                _ => other,
            };
        }
        Ok(())
    }

    /// The rule of a token that some sources lack, where the recipe names no row.
    fn without_name(
        &mut self,
        text: &str,
        owners: &[(usize, u32)],
        base: Option<usize>,
    ) -> RowRule {
        let of_base = owners.iter().find(|(model, _)| Some(*model) == base);
        match (owners, of_base) {
            ([], _) => {
                self.without_rows.push(text.to_string());
                RowRule::Zero
            }
            (&[(model, row)], _) | (_, Some(&(model, row))) => {
                RowRule::Of { model: model as u32, row }
            }
            _ => {
                let rows = owners.iter().map(|(model, row)| (*model as u32, *row));
                self.means.push(rows.collect());
                RowRule::Mean(self.means.len() as u32 - 1)
            }
        }
    }

    /// Bytes of the rules.
    pub fn bytes(&self) -> u64 {
        let rules = self.rules.values().map(Vec::len).sum::<usize>() * size_of::<RowRule>();
        let means = self.means.iter().map(|mean| 24 + 8 * mean.len());
        (rules + means.sum::<usize>()) as u64
    }
}

impl TokenModels<'_> {
    /// The number of a model that the recipe names.
    fn find(&self, spec: &ModelSpec) -> Result<usize, Failure> {
        let found = self.specs.iter().position(|of| of == spec);
        found.ok_or_else(|| {
            let names = self.specs.iter().map(|spec| format!("`{spec}`"));
            let names: Vec<String> = names.collect();
            Failure::new(format!("the tokenizer of the recipe names `{spec}`, which is not merged"))
                .detail(format!("models are {}", names.join(", ")))
                .hint("name one of these models")
        })
    }

    /// The row that a recipe names for a token.
    fn row(&self, text: &str, named: &TokenRow, sources: &[usize]) -> Result<RowRule, Failure> {
        let (spec, name) = match named {
            TokenRow::Zero => return Ok(RowRule::Zero),
            TokenRow::Model(spec) => (spec, TokenName::Text(text.to_string())),
            TokenRow::Token(spec, name) => (spec, name.clone()),
        };
        let refused = |why: String| {
            Failure::new(why).detail(format!("the recipe takes the row of `{text}` from it"))
        };
        let model = self.find(spec)?;
        if !sources.contains(&model) {
            return Err(refused(format!("the model `{spec}` is not merged into this embedding")));
        }
        let tokens = &self.tokens[model];
        let row = match &name {
            TokenName::Text(name) => tokens
                .ids
                .get(name)
                .copied()
                .ok_or_else(|| refused(format!("the model `{spec}` has no token `{name}`")))?,
            TokenName::Id(id) if *id < tokens.rows => *id,
            TokenName::Id(id) => {
                return Err(refused(format!(
                    "the model `{spec}` has no token {id}: its embedding has {} rows",
                    tokens.rows
                )));
            }
        };
        Ok(RowRule::Of { model: model as u32, row: row as u32 })
    }
}

/// An entry of `added_tokens`: a copy of `entry` with a new id, or a plain entry.
fn entry_of(text: &str, id: usize, entry: Option<&Value>) -> Value {
    let mut entry = entry.cloned().unwrap_or_else(|| {
        json!({
            "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": true, "special": false,
        })
    });
    entry["id"] = id.into();
    entry
}
