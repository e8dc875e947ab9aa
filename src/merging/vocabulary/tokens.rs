//! [`ModelTokens`]: the tokens of a model, from its `tokenizer.json`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::bytes::{ByteSize, hex};
use crate::failure::Failure;
use crate::input::{self, Expected};

/// The tokenizer of a model, as the library `tokenizers` writes it.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// The largest `tokenizer.json` that is read. With 256,000 tokens, the file has 34 MB.
const LARGEST: ByteSize = ByteSize(128 << 20);

/// Bytes that are hashed at once.
const PIECE: usize = 1 << 18;

/// The tokens of a model.
#[derive(Debug, Clone)]
pub struct ModelTokens {
    /// The model, for messages.
    pub name: String,
    /// The folder of its files.
    pub folder: PathBuf,
    /// SHA-256 of its `tokenizer.json`, in hex.
    pub sha256: String,
    /// Rows of its embedding.
    pub rows: usize,
    /// Text → id, of tokens that have a row.
    pub ids: HashMap<String, usize>,
    /// Entries of `added_tokens` that have a row, in their order.
    pub added: Vec<(String, Value)>,
    /// Tokens without a row, sorted.
    pub without_rows: Vec<String>,
}

/// The part of `tokenizer.json` that is read.
#[derive(Deserialize)]
struct TokenizerContents {
    #[serde(default)]
    added_tokens: Vec<Value>,
    model: TokenizerModel,
}

#[derive(Deserialize)]
struct TokenizerModel {
    vocab: TokenList,
}

/// BPE, WordPiece and WordLevel have a map, Unigram a list of texts and scores.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenList {
    Map(HashMap<String, usize>),
    List(Vec<(String, f64)>),
}

/// Reads the `tokenizer.json` of a folder.
///
/// # Errors
/// Fails when the file is missing, larger than 128 MiB or unreadable.
pub(super) fn read_tokenizer(name: &str, folder: &Path) -> Result<Vec<u8>> {
    let path = folder.join(TOKENIZER_FILE);
    let bytes = input::read(&path, LARGEST, Expected::Json);
    Ok(bytes.map_err(|error| {
        let failure = cannot_read(name, &path, &error.to_string());
        input::with_remedy(failure, &error)
    })?)
}

/// SHA-256 of a regular file of at most [`LARGEST`], which is read in pieces.
fn sha256_of(path: &Path) -> io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > LARGEST.0 {
        return Err(io::Error::other(format!("it is no file of up to {LARGEST}")));
    }
    let (mut hasher, mut piece) = (Sha256::new(), vec![0; PIECE]);
    let mut file = File::open(path)?.take(LARGEST.0);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hex(&hasher.finalize())),
            length => hasher.update(&piece[..length]),
        }
    }
}

fn cannot_read(name: &str, path: &Path, why: &str) -> Failure {
    Failure::new(format!(
        "cannot read the tokens of `{name}` from `{}`: {why}",
        path.display()
    ))
    .hint("a merge of vocabularies needs the tokenizer.json of every model; transformers writes one with save_pretrained")
}

impl ModelTokens {
    /// SHA-256 of the `tokenizer.json` in a folder, in hex.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub fn digest(name: &str, folder: &Path) -> Result<String> {
        let path = folder.join(TOKENIZER_FILE);
        Ok(sha256_of(&path).map_err(|error| cannot_read(name, &path, &error.to_string()))?)
    }

    /// Reads the tokens of the model in a folder, whose embedding has `rows` rows.
    ///
    /// # Errors
    /// Fails if `tokenizer.json` cannot be read or has no tokens.
    pub fn read(name: String, folder: &Path, rows: usize) -> Result<Self> {
        let bytes = read_tokenizer(&name, folder)?;
        let cannot = |why: &str| cannot_read(&name, &folder.join(TOKENIZER_FILE), why);
        let file: TokenizerContents =
            serde_json::from_slice(&bytes).map_err(|error| cannot(&error.to_string()))?;
        let mut ids = match file.model.vocab {
            TokenList::Map(ids) => ids,
            TokenList::List(list) => list.into_iter().map(|(text, _)| text).zip(0..).collect(),
        };
        let mut added = Vec::with_capacity(file.added_tokens.len());
        for entry in file.added_tokens {
            let text = entry.get("content").and_then(Value::as_str);
            let id = entry.get("id").and_then(Value::as_u64);
            let (Some(text), Some(id)) = (text.map(str::to_string), id) else {
                return Err(cannot("an added token has no `content` or no `id`").into());
            };
            ids.insert(text.clone(), id as usize);
            added.push((text, entry));
        }
        let mut without_rows: Vec<String> = Vec::new();
        ids.retain(|text, id| {
            let has_row = *id < rows;
            if !has_row {
                without_rows.push(text.clone());
            }
            has_row
        });
        without_rows.sort_unstable();
        added.retain(|(text, _)| ids.contains_key(text));
        if ids.is_empty() {
            return Err(cannot("it has no tokens").into());
        }
        Ok(Self {
            name,
            folder: folder.to_path_buf(),
            sha256: hex(&Sha256::digest(&bytes)),
            rows,
            ids,
            added,
            without_rows,
        })
    }

    /// Texts of all tokens by ascending id.
    pub(super) fn in_order(&self) -> Vec<(&str, usize)> {
        let ids = self.ids.iter();
        let mut tokens: Vec<(&str, usize)> = ids.map(|(text, id)| (text.as_str(), *id)).collect();
        tokens.sort_unstable_by_key(|&(text, id)| (id, text));
        tokens
    }

    /// The first token of this model, by id, that the compared model lacks or has under a different id.
    pub fn first_difference(&self, other: &Self) -> Option<String> {
        let mut tokens = self.in_order().into_iter();
        let found = tokens.find(|(text, id)| other.ids.get(*text) != Some(id))?;
        Some(found.0.to_string())
    }
}
