//! [`TokenizerEdit`]: the files of a tokenizer with tokens added and removed.
//!
//! `tokenizer.json` keeps the text of everything that does not change: a list of 280,000 merges is copied, not parsed.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use super::tokens::{TOKENIZER_FILE, read_tokenizer};
use crate::bytes::json_file;
use crate::failure::Failure;
use crate::input::{read_settings, with_remedy};

/// Settings of generation, with ids of tokens.
const GENERATION_FILE: &str = "generation_config.json";

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
/// Files with a chat template, which take precedence over the template in `tokenizer_config.json`.
const TEMPLATES: [&str; 2] = ["chat_template.jinja", "chat_template.json"];

/// Files that belong to the tokenizer.
pub const TOKENIZER_FILES: [&str; 10] = [
    TOKENIZER_FILE,
    "tokenizer.model",
    CONFIG,
    SPECIAL,
    ADDED,
    "vocab.json",
    "merges.txt",
    TEMPLATES[0],
    TEMPLATES[1],
    GENERATION_FILE,
];

/// Changes of a tokenizer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenizerEdit {
    /// Entries of `added_tokens`.
    pub added: Vec<Value>,
    /// Tokens that have no row.
    pub removed: Vec<String>,
    /// Rows of the embedding: ids from this number on are removed from the settings of generation.
    pub rows: usize,
    /// The chat template of the output; `None` keeps the model's.
    pub chat_template: Option<String>,
}

/// Files of a tokenizer that are not copied as they are.
#[derive(Debug)]
pub struct EditedFiles {
    /// Names and contents.
    pub written: Vec<(&'static str, Vec<u8>)>,
    /// Names of files that the output has not.
    pub left_out: &'static [&'static str],
}

impl TokenizerEdit {
    /// The files of the folder that change.
    ///
    /// # Errors
    /// Fails when a file cannot be read or is not what its name says, and for a tokenizer whose tokens cannot be removed.
    pub fn files(&self, name: &str, folder: &Path) -> Result<EditedFiles> {
        let mut written = Vec::new();
        let mut write = |name, value: Value| {
            written.push((name, json_file(&value)?));
            anyhow::Ok(())
        };
        let removed: HashSet<&str> = self.removed.iter().map(String::as_str).collect();
        // A removed token may come back with a row from a model that has it.
        let added = self.added.iter().filter_map(|entry| entry["content"].as_str());
        let added: HashSet<&str> = added.collect();
        let gone: HashSet<&str> = removed.difference(&added).copied().collect();
        let changes_tokens = !self.added.is_empty() || !removed.is_empty();
        let config = read_object(folder, CONFIG)?;
        if let Some(template) = &self.chat_template {
            let mut config = config.unwrap_or_default();
            self.edit_config(&mut config, &removed, &gone);
            config.insert("chat_template".into(), template.as_str().into());
            write(CONFIG, config.into())?;
        } else if let Some(mut config) = config.filter(|_| changes_tokens) {
            self.edit_config(&mut config, &removed, &gone);
            write(CONFIG, config.into())?;
        }
        if let Some(mut special) = read_object(folder, SPECIAL)?.filter(|_| !gone.is_empty()) {
            remove_names(&mut special, &gone);
            write(SPECIAL, special.into())?;
        }
        if let Some(mut added) = read_object(folder, ADDED)?.filter(|_| changes_tokens) {
            added.retain(|text, _| !removed.contains(text.as_str()));
            for entry in &self.added {
                let text = entry["content"].as_str().unwrap_or_default();
                added.insert(text.to_string(), entry["id"].clone());
            }
            write(ADDED, added.into())?;
        }
        if let Some(mut generation) = read_object(folder, GENERATION_FILE)?
            && limit_token_ids(&mut generation, self.rows)
        {
            write(GENERATION_FILE, generation.into())?;
        }
        if changes_tokens {
            let bytes = read_tokenizer(name, folder)?;
            let edited = self
                .edit_tokenizer(&bytes, &removed)
                .with_context(|| format!("changing the tokenizer of `{name}`"))?;
            written.push((TOKENIZER_FILE, edited));
        }
        Ok(EditedFiles {
            written,
            left_out: match &self.chat_template {
                Some(_) => &TEMPLATES,
                None => &[],
            },
        })
    }

    /// Changes `added_tokens_decoder`, if it is there, and removes names of tokens that are gone.
    fn edit_config(
        &self,
        config: &mut Map<String, Value>,
        removed: &HashSet<&str>,
        gone: &HashSet<&str>,
    ) {
        remove_names(config, gone);
        let Some(Value::Object(decoder)) = config.get_mut("added_tokens_decoder") else {
            return;
        };
        decoder
            .retain(|_, entry| !entry["content"].as_str().is_some_and(|of| removed.contains(of)));
        for entry in &self.added {
            let mut token = entry.clone();
            let id = token.as_object_mut().and_then(|token| token.remove("id"));
            decoder.insert(id.unwrap_or_default().to_string(), token);
        }
    }

    fn edit_tokenizer(&self, bytes: &[u8], removed: &HashSet<&str>) -> Result<Vec<u8>> {
        let mut file: RawObject<'_> = serde_json::from_slice(bytes)?;
        let mut tokens: Vec<Value> = match file.get("added_tokens") {
            Some(tokens) => serde_json::from_str(tokens)?,
            None => Vec::new(),
        };
        tokens.retain(|token| !token["content"].as_str().is_some_and(|of| removed.contains(of)));
        tokens.extend(self.added.iter().cloned());
        file.set("added_tokens", to_raw_value(&tokens)?);
        if !removed.is_empty() {
            let model = file.get("model").context("a tokenizer has a model")?;
            if let Some(model) = without_tokens(model, removed)? {
                file.set("model", model);
            }
        }
        Ok(serde_json::to_vec(&file)?)
    }
}

/// Removes ids of tokens that have no row, and returns true if there were any.
pub fn limit_token_ids(settings: &mut Map<String, Value>, rows: usize) -> bool {
    let is_out = |id: &Value| id.as_u64().is_some_and(|id| id >= rows as u64);
    let mut changed = false;
    settings.retain(|name, value| {
        if !name.ends_with("_token_id") {
            return true;
        }
        if let Value::Array(ids) = value {
            let count = ids.len();
            ids.retain(|id| !is_out(id));
            changed |= ids.len() < count;
            return !ids.is_empty();
        }
        let out = is_out(value);
        changed |= out;
        !out
    });
    changed
}

/// Removes entries such as `pad_token` that name a removed token: transformers would add the token again, without a row.
fn remove_names(settings: &mut Map<String, Value>, removed: &HashSet<&str>) {
    let is_removed = |token: &Value| {
        let text = token.as_str().or_else(|| token["content"].as_str());
        text.is_some_and(|text| removed.contains(text))
    };
    settings.retain(|name, value| match value {
        Value::Array(tokens) if name.ends_with("_tokens") => {
            tokens.retain(|token| !is_removed(token));
            true
        }
        value => !(name.ends_with("_token") && is_removed(value)),
    });
}

/// The model of a tokenizer without some tokens and their merges; `None` if it has none of them.
fn without_tokens(model: &str, removed: &HashSet<&str>) -> Result<Option<Box<RawValue>>> {
    let mut model: RawObject<'_> = serde_json::from_str(model)?;
    let vocab = model.get("vocab").context("a tokenizer has a vocabulary")?;
    let Ok(mut vocab) = serde_json::from_str::<RawObject<'_>>(vocab) else {
        return Err(Failure::new("tokens of a Unigram tokenizer cannot be removed")
            .detail("its ids are places in a list")
            .hint("use the tokenizer of another model")
            .into());
    };
    let count = vocab.0.len();
    vocab.0.retain(|(text, _)| !removed.contains(text.as_str()));
    if vocab.0.len() == count {
        return Ok(None);
    }
    let vocab = to_raw_value(&vocab)?;
    if let Some(merges) = model.get("merges") {
        let mut merges: Vec<Merge<'_>> = serde_json::from_str(merges)?;
        merges.retain(|merge| {
            let [left, right] = merge.parts();
            let whole = format!("{left}{right}");
            [left, right, &whole].iter().all(|part| !removed.contains(*part))
        });
        let merges = to_raw_value(&merges)?;
        model.set("merges", merges);
    }
    model.set("vocab", vocab);
    Ok(Some(to_raw_value(&model)?))
}

/// A merge of BPE: `"a b"`, or `["a", "b"]`.
#[derive(Deserialize, Serialize)]
#[serde(untagged)]
enum Merge<'a> {
    Line(#[serde(borrow)] Cow<'a, str>),
    Pair([String; 2]),
}

impl Merge<'_> {
    fn parts(&self) -> [&str; 2] {
        match self {
            Self::Line(line) => line.split_once(' ').unwrap_or((line, "")).into(),
            Self::Pair([left, right]) => [left, right],
        }
    }
}

/// Reads a file that holds an object; `None` if the file is not there.
fn read_object(folder: &Path, name: &str) -> Result<Option<Map<String, Value>>> {
    let path = folder.join(name);
    if !path.exists() {
        return Ok(None);
    }
    let cannot = |why: String| Failure::new(format!("cannot read `{}`: {why}", path.display()));
    let text =
        read_settings(&path).map_err(|error| with_remedy(cannot(error.to_string()), &error))?;
    let object = serde_json::from_str(&text).map_err(|error| cannot(error.to_string()))?;
    Ok(Some(object))
}

/// An object whose entries keep their order and their text.
struct RawObject<'a>(Vec<(String, Cow<'a, RawValue>)>);

impl RawObject<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let mut entries = self.0.iter();
        entries.find(|(of, _)| of == key).map(|(_, value)| value.get())
    }

    fn set(&mut self, key: &str, value: Box<RawValue>) {
        match self.0.iter_mut().find(|(of, _)| of == key) {
            Some((_, old)) => *old = Cow::Owned(value),
            None => self.0.push((key.to_string(), Cow::Owned(value))),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for RawObject<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RawEntries;
        impl<'de> Visitor<'de> for RawEntries {
            type Value = Vec<(String, Cow<'de, RawValue>)>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::with_capacity(map.size_hint().unwrap_or(0));
                while let Some((key, value)) = map.next_entry::<String, &'de RawValue>()? {
                    entries.push((key, Cow::Borrowed(value)));
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(RawEntries).map(RawObject)
    }
}

impl Serialize for RawObject<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn folder(files: &[(&str, &Value)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, value) in files {
            fs::write(folder.path().join(name), value.to_string()).unwrap();
        }
        folder
    }

    fn written(edit: &TokenizerEdit, folder: &Path, name: &str) -> Value {
        let files = edit.files("m", folder).unwrap().written;
        let (_, bytes) = files.iter().find(|(of, _)| *of == name).unwrap();
        serde_json::from_slice(bytes).unwrap()
    }

    fn removing(tokens: &[&str]) -> TokenizerEdit {
        TokenizerEdit {
            removed: tokens.iter().map(|token| (*token).to_string()).collect(),
            rows: 3,
            ..TokenizerEdit::default()
        }
    }

    #[test]
    fn removed_tokens_take_their_merges_along() {
        for merges in [json!(["a b", "ab a"]), json!([["a", "b"], ["ab", "a"]])] {
            let tokenizer = json!({
                "added_tokens": [{"id": 4, "content": "<pad>"}],
                "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3}, "merges": merges},
            });
            let folder = folder(&[(TOKENIZER_FILE, &tokenizer)]);
            let edited = written(&removing(&["aba", "<pad>"]), folder.path(), TOKENIZER_FILE);
            assert_eq!(
                edited,
                json!({
                    "added_tokens": [],
                    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [merges[0]]},
                })
            );
        }
    }

    #[test]
    fn tokens_of_a_list_are_not_removed() {
        let tokenizer = json!({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}});
        let folder = folder(&[(TOKENIZER_FILE, &tokenizer)]);
        let error = removing(&["b"]).files("m", folder.path()).unwrap_err();
        assert!(format!("{error:#}").contains("Unigram"), "{error:#}");
    }

    #[test]
    fn every_file_with_tokens_follows() {
        let tokenizer = json!({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}});
        let config = json!({
            "pad_token": "<pad>",
            "eos_token": {"content": "</s>"},
            "added_tokens_decoder": {"2": {"content": "</s>"}, "3": {"content": "<pad>"}},
        });
        let special =
            json!({"pad_token": {"content": "<pad>"}, "additional_special_tokens": ["<pad>", "x"]});
        let added = json!({"<pad>": 3});
        let generation = json!({"eos_token_id": [2, 3], "pad_token_id": 3, "max_length": 9});
        let folder = folder(&[
            (TOKENIZER_FILE, &tokenizer),
            (CONFIG, &config),
            (SPECIAL, &special),
            (ADDED, &added),
            (GENERATION_FILE, &generation),
        ]);
        let edit = TokenizerEdit {
            added: vec![json!({"id": 1, "content": "<new>", "special": true})],
            ..removing(&["<pad>"])
        };
        let of = |name| written(&edit, folder.path(), name);
        assert_eq!(of(TOKENIZER_FILE)["added_tokens"], json!(edit.added));
        assert_eq!(
            of(CONFIG),
            json!({
                "eos_token": {"content": "</s>"},
                "added_tokens_decoder": {"1": {"content": "<new>", "special": true}, "2": {"content": "</s>"}},
            })
        );
        assert_eq!(of(SPECIAL), json!({"additional_special_tokens": ["x"]}));
        assert_eq!(of(ADDED), json!({"<new>": 1}));
        assert_eq!(of(GENERATION_FILE), json!({"eos_token_id": [2], "max_length": 9}));
        // Nothing changes, so nothing is written.
        let none = TokenizerEdit { rows: 4, ..TokenizerEdit::default() };
        assert!(none.files("m", folder.path()).unwrap().written.is_empty());
    }
}
