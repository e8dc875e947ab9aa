//! [`ModelTokens`]: the tokens of one model, from its `tokenizer.json`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Deserialize;
use serde_json::Value;

use crate::bytes::{ByteSize, read_whole};
use crate::failure::Failure;

/// The tokenizer of a model, as the library `tokenizers` writes it.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// The largest `tokenizer.json` that is read. Those of 256,000 tokens have 34 MB.
const LARGEST: ByteSize = ByteSize(128 << 20);

/// The tokens of one model.
#[derive(Debug, Clone)]
pub struct ModelTokens {
    /// The model, for messages.
    pub name: String,
    /// The folder of its files.
    pub folder: PathBuf,
    /// Rows of its embedding.
    pub rows: usize,
    /// Text → id, of tokens that have a row.
    pub ids: HashMap<String, usize>,
    /// Entries of `added_tokens`, by text, in their order.
    pub added: Vec<(String, Value)>,
}

/// What is read of the file.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Value>,
    model: TokenModel,
}

#[derive(Deserialize)]
struct TokenModel {
    vocab: Vocab,
}

/// BPE, WordPiece and WordLevel have a map, Unigram a list of texts and scores.
#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    Map(HashMap<String, usize>),
    List(Vec<(String, f64)>),
}

impl ModelTokens {
    /// Reads the tokens of the model in a folder, whose embedding has `rows` rows.
    ///
    /// # Errors
    /// Fails without a `tokenizer.json`, and for one that has no list of tokens.
    pub fn read(name: String, folder: &Path, rows: usize) -> Result<Self> {
        let path = folder.join(TOKENIZER_FILE);
        let cannot = |why: String| {
            Failure::new(format!(
                "cannot read the tokens of `{name}` from `{}`: {why}",
                path.display()
            ))
            .hint("a merge of vocabularies needs a tokenizer.json of every model; transformers writes one with save_pretrained")
        };
        let bytes = read_whole(&path, LARGEST).map_err(|error| cannot(error.to_string()))?;
        let file: File =
            serde_json::from_slice(&bytes).map_err(|error| cannot(error.to_string()))?;
        let mut ids = match file.model.vocab {
            Vocab::Map(ids) => ids,
            Vocab::List(list) => list.into_iter().map(|(text, _)| text).zip(0..).collect(),
        };
        let mut added = Vec::with_capacity(file.added_tokens.len());
        for entry in file.added_tokens {
            let text = entry.get("content").and_then(Value::as_str);
            let id = entry.get("id").and_then(Value::as_u64);
            let (Some(text), Some(id)) = (text.map(str::to_string), id) else {
                return Err(
                    cannot("an added token has no `content` or no `id`".to_string()).into(),
                );
            };
            ids.insert(text.clone(), id as usize);
            // Added tokens without a row are not used.
            if (id as usize) < rows {
                added.push((text, entry));
            }
        }
        ids.retain(|_, id| *id < rows);
        if ids.is_empty() {
            return Err(cannot("it has no tokens".to_string()).into());
        }
        Ok(Self {
            name,
            folder: folder.to_path_buf(),
            rows,
            ids,
            added,
        })
    }

    /// Texts of all tokens by ascending id.
    pub(super) fn in_order(&self) -> Vec<(&str, usize)> {
        let mut tokens: Vec<(&str, usize)> = self
            .ids
            .iter()
            .map(|(text, id)| (text.as_str(), *id))
            .collect();
        tokens.sort_by_key(|&(text, id)| (id, text));
        tokens
    }

    /// The entry of an added token.
    pub(super) fn added(&self, text: &str) -> Option<&Value> {
        let mut added = self.added.iter();
        added.find(|(of, _)| of == text).map(|(_, entry)| entry)
    }
}
