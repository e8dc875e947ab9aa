//! `tokenizer_config.json`, and the facts that it states in addition to `tokenizer.json`.
//!
//! Two files may disagree about the same fact: the tokens around a text, the space before it, the added tokens. transformers 4 follows
//! `tokenizer_config.json` for the Llama classes, transformers 5 often follows `tokenizer.json`. The table of outcomes is in
//! docs/datasets.md; every disagreement gives a warning that names the key and the side that is used.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::tokenizer_file::unreadable;
use crate::failure::Failure;
use crate::input::read_settings;

/// The parsed `tokenizer_config.json` of a model.
pub(super) struct TokenizerConfig(Value);

/// A change of the space that `tokenizer.json` puts before a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PrefixSpace {
    /// As in `tokenizer.json`.
    OfFile,
    /// `add_prefix_space` removes it.
    Removed,
    /// `add_prefix_space` adds it.
    Added,
}

impl PrefixSpace {
    pub(super) const ALL: [Self; 3] = [Self::OfFile, Self::Removed, Self::Added];

    /// The mark after a tokenizer's hash, because the same file then gives different ids.
    pub(super) fn mark(self) -> &'static str {
        match self {
            Self::OfFile => "",
            Self::Removed => "-space",
            Self::Added => "+space",
        }
    }
}

impl TokenizerConfig {
    /// Reads the file; `None` if it is absent.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        let text = match read_settings(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(path, &error).into()),
        };
        let config = serde_json::from_str(&text).map_err(|error| {
            Failure::new(format!("`{}` is not valid JSON: {error}", path.display()))
                .hint("copy it from the model's page again")
        })?;
        Ok(Some(Self(config)))
    }

    /// The classes that build their post-processor and normalizer from this file, in transformers 4.
    pub(super) fn is_llama(&self) -> bool {
        matches!(self.0["tokenizer_class"].as_str(), Some("LlamaTokenizer" | "LlamaTokenizerFast"))
    }

    /// A flag; `None` if it is absent or null.
    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        self.0[key].as_bool()
    }

    /// The name of a token: a string, or an object with `content`.
    pub(super) fn token<'v>(&'v self, key: &str, default: Option<&'v str>) -> Option<&'v str> {
        match self.0.get(key) {
            None => default,
            Some(value) => value.as_str().or_else(|| value["content"].as_str()),
        }
    }

    /// The warning for special tokens that this file asks for and `tokenizer.json` does not add, or the reverse; `None` where they agree.
    ///
    /// # Arguments
    /// * `of_file`: whether the post-processor of `tokenizer.json` adds a first and a last token
    pub(super) fn special_tokens_warning(&self, of_file: [bool; 2]) -> Option<String> {
        if !self.is_llama() {
            return None;
        }
        let used_here = self.flag("add_bos_token").is_some();
        let keys = [("add_bos_token", true, "before"), ("add_eos_token", false, "after")];
        let differing = keys
            .iter()
            .zip(of_file)
            .find(|((key, default, _), is_added)| self.flag(key).unwrap_or(*default) != *is_added);
        let ((key, default, place), is_added) = differing?;
        let asked = match self.flag(key) {
            Some(flag) => format!("`{key}` is {flag} in tokenizer_config.json"),
            None => format!(
                "tokenizer_config.json has no `{key}`, which means {default} to transformers 4"
            ),
        };
        let found = if is_added { "adds" } else { "does not add" };
        let side = if used_here { "tokenizer_config.json" } else { "tokenizer.json" };
        Some(format!(
            "{asked}, and `post_processor` of tokenizer.json {found} a token {place} each text: {side} is used; other programs may \
             use the other file (transformers 4 follows tokenizer_config.json, 5 tokenizer.json), so make the two agree"
        ))
    }

    /// The warning for added tokens of this file that `tokenizer.json` has under a different id, or lacks; `None` where they agree.
    pub(super) fn added_tokens_warning(
        &self,
        id_of: &dyn Fn(&str) -> Option<u32>,
    ) -> Option<String> {
        let added = self.0["added_tokens_decoder"].as_object()?;
        let mut differing = added.iter().filter_map(|(id, token)| {
            let (id, content) = (id.parse::<u32>().ok()?, token["content"].as_str()?);
            (id_of(content) != Some(id)).then_some((id, content))
        });
        let (id, content) = differing.next()?;
        let found = match id_of(content) {
            Some(other) => format!("has it as {other}"),
            None => "does not have it".to_owned(),
        };
        Some(format!(
            "`added_tokens_decoder` of tokenizer_config.json has the token `{content}` as {id}, tokenizer.json {found} ({} tokens differ): \
             tokenizer.json is used, transformers adds the tokens that it lacks",
            1 + differing.count()
        ))
    }

    /// Sets the space before a text as `add_prefix_space` asks for it. Returns the change, and a warning if the key is not followed.
    ///
    /// transformers 4 builds the normalizer of a Llama tokenizer anew where the key is given, and sets the key of a byte-level
    /// pre-tokenizer of any class.
    ///
    /// # Errors
    /// Fails when the library does not accept a changed part.
    pub(super) fn set_prefix_space(
        &self,
        tokenizer: &mut tokenizers::Tokenizer,
    ) -> Result<(PrefixSpace, Option<String>)> {
        let Some(asked) = self.flag("add_prefix_space") else {
            return Ok((PrefixSpace::OfFile, None));
        };
        let pre_tokenizer = value_of(tokenizer.get_pre_tokenizer())?;
        if pre_tokenizer["type"] == "ByteLevel" {
            if pre_tokenizer["add_prefix_space"] == asked {
                return Ok((PrefixSpace::OfFile, None));
            }
            let mut changed = pre_tokenizer;
            changed["add_prefix_space"] = json!(asked);
            tokenizer.with_pre_tokenizer(Some(part::<tokenizers::PreTokenizerWrapper>(changed)?));
            let change = match asked {
                true => PrefixSpace::Added,
                false => PrefixSpace::Removed,
            };
            return Ok((change, None));
        }
        if !self.is_llama() {
            return Ok((PrefixSpace::OfFile, None));
        }
        let normalizer = value_of(tokenizer.get_normalizer())?;
        let is_metaspace = pre_tokenizer["type"] == "Metaspace";
        let is_added = has_part(&normalizer, "normalizers", "Prepend")
            || is_metaspace && pre_tokenizer["prepend_scheme"] != "never";
        match (asked, is_added) {
            (true, false) => Ok((
                PrefixSpace::OfFile,
                Some(
                    "`add_prefix_space` is true in tokenizer_config.json, and tokenizer.json adds no space before a text: tokenizer.json \
                     is used; transformers 4 adds the space, 5 does not"
                        .to_owned(),
                ),
            )),
            (false, true) => {
                remove_prefix(tokenizer, normalizer, pre_tokenizer)?;
                Ok((PrefixSpace::Removed, None))
            }
            _ => Ok((PrefixSpace::OfFile, None)),
        }
    }
}

/// Removes the space before a text from all parts of a Llama tokenizer, as transformers' converter leaves it out.
fn remove_prefix(
    tokenizer: &mut tokenizers::Tokenizer,
    normalizer: Value,
    mut pre_tokenizer: Value,
) -> Result<()> {
    let normalizer = without(normalizer, "normalizers", "Prepend");
    let normalizer = (!normalizer.is_null())
        .then(|| part::<tokenizers::NormalizerWrapper>(normalizer))
        .transpose()?;
    tokenizer
        .with_normalizer(normalizer)
        .map_err(|error| anyhow::anyhow!("changing a normalizer: {error}"))?;
    let mut decoder = value_of(tokenizer.get_decoder())?;
    if pre_tokenizer["type"] == "Metaspace" {
        pre_tokenizer["prepend_scheme"] = json!("never");
        tokenizer.with_pre_tokenizer(Some(part::<tokenizers::PreTokenizerWrapper>(pre_tokenizer)?));
        if decoder["type"] == "Metaspace" {
            decoder["prepend_scheme"] = json!("never");
        }
    }
    // The decoder strips the space that the normalizer put before the text.
    let decoder = without(decoder, "decoders", "Strip");
    let decoder =
        (!decoder.is_null()).then(|| part::<tokenizers::DecoderWrapper>(decoder)).transpose()?;
    tokenizer.with_decoder(decoder);
    Ok(())
}

fn value_of(part: Option<&impl Serialize>) -> Result<Value> {
    Ok(serde_json::to_value(part)?)
}

fn part<T: DeserializeOwned>(value: Value) -> Result<T> {
    Ok(serde_json::from_value(value)?)
}

/// Returns whether a part, or a member of its sequence, is of a type.
fn has_part(part: &Value, sequence: &str, kind: &str) -> bool {
    let mut inner = part[sequence].as_array().into_iter().flatten();
    part["type"] == kind || inner.any(|part| part["type"] == kind)
}

/// A part without the members of its sequence that are of a type; null if the part itself is.
fn without(mut part: Value, sequence: &str, kind: &str) -> Value {
    if part["type"] == kind {
        return Value::Null;
    }
    if let Some(inner) = part.get_mut(sequence).and_then(Value::as_array_mut) {
        inner.retain(|part| part["type"] != kind);
    }
    part
}
