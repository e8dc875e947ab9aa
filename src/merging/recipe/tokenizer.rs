//! The tokenizer of a merge as a recipe describes it: `tokenizer_source`, or `tokenizer` with rows for single tokens.

use clap::ValueEnum;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::model_spec::{ModelForm, ModelSpec};
use crate::failure::Failure;
use crate::input::InOrder;

/// The largest `pad_to_multiple_of`.
const LARGEST_MULTIPLE: usize = 1 << 16;

/// The vocabulary of the output.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerRecipe {
    /// The tokenizer.
    #[serde(default)]
    pub source: TokenizerSource,
    /// Rows of single tokens, in the order of the recipe. Tokens that the tokenizer lacks are added in this order.
    #[serde(default)]
    pub tokens: InOrder<TokenRecipe>,
    /// The number of rows is padded to a multiple of this.
    #[serde(default, deserialize_with = "multiple")]
    pub pad_to_multiple_of: Option<usize>,
}

/// The origin of the output's tokenizer.
#[derive(Debug, Clone, PartialEq, Default, ValueEnum, Deserialize)]
#[serde(try_from = "ModelForm")]
pub enum TokenizerSource {
    /// The tokens of the base model
    // Without a base model, the first model's tokenizer.
    Base,
    /// The tokens of all models
    #[default]
    Union,
    /// The tokenizer of a model, merged or not
    #[value(skip)]
    Model(ModelSpec),
}

/// The row of a token.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRecipe {
    /// The origin of the row; `None` means the rule for tokens that some models lack.
    pub source: Option<TokenRow>,
    /// The row also replaces the rows of models that have the token.
    #[serde(default)]
    pub force: bool,
}

/// The origin of a token's row.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "TokenRowForm")]
pub enum TokenRow {
    /// The row that a model has for this token.
    Model(ModelSpec),
    /// Zeros.
    Zero,
    /// The row that a model has for the token that is named here.
    Token(ModelSpec, TokenName),
}

/// A token of a model.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenName {
    /// Its text.
    Text(String),
    /// Its id.
    Id(usize),
}

impl TokenizerRecipe {
    /// A tokenizer without rules for single tokens.
    pub fn of(source: TokenizerSource) -> Self {
        Self { source, tokens: InOrder::default(), pad_to_multiple_of: None }
    }
}

fn multiple<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    let multiple = Option::deserialize(deserializer)?;
    match multiple {
        Some(multiple) if !(1..=LARGEST_MULTIPLE).contains(&multiple) => {
            Err(D::Error::custom(format!(
                "`pad_to_multiple_of` must be a number from 1 to {LARGEST_MULTIPLE}, found {multiple}"
            )))
        }
        multiple => Ok(multiple),
    }
}

impl TryFrom<ModelForm> for TokenizerSource {
    type Error = Failure;

    fn try_from(form: ModelForm) -> Result<Self, Failure> {
        match form {
            ModelForm::Text(text) if text == "base" => Ok(Self::Base),
            ModelForm::Text(text) if text == "union" => Ok(Self::Union),
            model => Ok(Self::Model(model.try_into()?)),
        }
    }
}

/// A token's source as a recipe writes it.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a token's source: a model, {kind: zero}, {kind: model_token, model: MODEL, token: TEXT} or {kind: model_token, model: MODEL, token_id: NUMBER}"
)]
enum TokenRowForm {
    Model(ModelSpec),
    Kind(TokenRowKind),
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum TokenRowKind {
    Zero {},
    ModelToken { model: ModelSpec, token: Option<String>, token_id: Option<usize> },
}

impl TryFrom<TokenRowForm> for TokenRow {
    type Error = Failure;

    fn try_from(form: TokenRowForm) -> Result<Self, Failure> {
        match form {
            TokenRowForm::Model(model) => Ok(Self::Model(model)),
            TokenRowForm::Kind(TokenRowKind::Zero {}) => Ok(Self::Zero),
            TokenRowForm::Kind(TokenRowKind::ModelToken { model, token, token_id }) => {
                match (token, token_id) {
                    (Some(token), None) => Ok(Self::Token(model, TokenName::Text(token))),
                    (None, Some(id)) => Ok(Self::Token(model, TokenName::Id(id))),
                    _ => Err(Failure::new(
                        "a token's source of the kind `model_token` needs `token` or `token_id`, not both",
                    )),
                }
            }
        }
    }
}
