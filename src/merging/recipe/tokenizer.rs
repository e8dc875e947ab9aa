//! The tokenizer of a merge as a recipe describes it: `tokenizer_source`, or `tokenizer` with rows for single tokens.

use clap::ValueEnum;

use super::fields::{Fields, entries};
use super::model_spec::ModelSpec;
use super::yaml::{Content, Node};
use crate::failure::Failure;

/// The largest `pad_to_multiple_of`.
const LARGEST_MULTIPLE: usize = 1 << 16;

/// The vocabulary of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizerRecipe {
    /// The tokenizer.
    pub source: TokenizerSource,
    /// Rows of single tokens, in the order of the recipe. Tokens that the tokenizer lacks are added in this order.
    pub tokens: Vec<(String, TokenRecipe)>,
    /// The number of rows is padded to a multiple of this.
    pub pad_to_multiple_of: Option<usize>,
}

/// The origin of the output's tokenizer.
#[derive(Debug, Clone, PartialEq, ValueEnum)]
pub enum TokenizerSource {
    /// The tokens of the base model
    // Without a base model, the first model's tokenizer.
    Base,
    /// The tokens of all models
    Union,
    /// The tokenizer of a model, merged or not
    #[value(skip)]
    Model(ModelSpec),
}

/// The row of a token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRecipe {
    /// The origin of the row; `None` means the rule for tokens that some models lack.
    pub source: Option<TokenRow>,
    /// The row also replaces the rows of models that have the token.
    pub force: bool,
}

/// The origin of a token's row.
#[derive(Debug, Clone, PartialEq)]
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
        Self { source, tokens: Vec::new(), pad_to_multiple_of: None }
    }

    /// Reads the map under `tokenizer`.
    pub(super) fn from_node(node: Node) -> Result<Self, Failure> {
        let known = ["source", "tokens", "pad_to_multiple_of"];
        let mut fields = Fields::open(node, "`tokenizer`", &known)?;
        let source = fields.take("source").map(TokenizerSource::from_node);
        let mut recipe = Self::of(source.transpose()?.unwrap_or(TokenizerSource::Union));
        if let Some(tokens) = fields.take("tokens") {
            for entry in entries(tokens, "`tokens`")? {
                let token = TokenRecipe::from_node(entry.value)?;
                recipe.tokens.push((entry.key, token));
            }
        }
        if let Some(node) = fields.take("pad_to_multiple_of") {
            let multiple = node.count("`pad_to_multiple_of`")?;
            if !(1..=LARGEST_MULTIPLE).contains(&multiple) {
                return Err(node.wrong(
                    "`pad_to_multiple_of`",
                    &format!("a number from 1 to {LARGEST_MULTIPLE}"),
                ));
            }
            recipe.pad_to_multiple_of = Some(multiple);
        }
        Ok(recipe)
    }
}

impl TokenizerSource {
    /// Reads `base`, `union` or a model.
    pub(super) fn from_node(node: Node) -> Result<Self, Failure> {
        match node.scalar().map(|scalar| scalar.text.as_str()) {
            Some("base") => Ok(Self::Base),
            Some("union") => Ok(Self::Union),
            _ => Ok(Self::Model(ModelSpec::from_node(node)?)),
        }
    }
}

impl TokenRecipe {
    fn from_node(node: Node) -> Result<Self, Failure> {
        let mut fields = Fields::open(node, "a token", &["source", "force"])?;
        let source = fields.take("source").map(TokenRow::from_node);
        let force = fields.take("force").map(|force| force.switch("`force`"));
        Ok(Self { source: source.transpose()?, force: force.transpose()?.unwrap_or(false) })
    }
}

impl TokenRow {
    fn from_node(node: Node) -> Result<Self, Failure> {
        let has_kind = match &node.content {
            Content::Map(entries) => entries.iter().any(|entry| entry.key == "kind"),
            _ => false,
        };
        if !has_kind {
            return Ok(Self::Model(ModelSpec::from_node(node)?));
        }
        let known = ["kind", "model", "token", "token_id"];
        let mut fields = Fields::open(node, "a token's source", &known)?;
        let kind = fields.require("kind", "a token's source")?;
        match kind.text("`kind`")?.as_str() {
            "zero" => match known.iter().find_map(|key| fields.take(key)) {
                Some(more) => {
                    Err(more.place.failure("a token's source of the kind `zero` has no other key"))
                }
                None => Ok(Self::Zero),
            },
            "model_token" => {
                let model =
                    fields.require("model", "a token's source of the kind `model_token`")?;
                let model = ModelSpec::from_node(model)?;
                match (fields.take("token"), fields.take("token_id")) {
                    (Some(token), None) => {
                        let token = token.text("`token`")?;
                        Ok(Self::Token(model, TokenName::Text(token)))
                    }
                    (None, Some(id)) => {
                        let id = id.count("`token_id`")?;
                        Ok(Self::Token(model, TokenName::Id(id)))
                    }
                    _ => Err(fields.place.failure(
                        "a token's source of the kind `model_token` needs `token` or `token_id`, not both",
                    )),
                }
            }
            _ => Err(kind.wrong("`kind`", "`zero` or `model_token`")),
        }
    }
}
