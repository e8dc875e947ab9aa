//! The tokenizer of a random checkpoint: a given tokenizer, or one token per byte and four special tokens. The byte tokenizer needs
//! no training and reproduces any text.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::input::{self, Expected};

/// Tokens of the byte tokenizer: 256 bytes and four special tokens.
pub(super) const BYTE_TOKENS: usize = 260;

/// `<s>`, the first token of every text.
const BOS: u64 = 256;

/// `</s>`.
const EOS: u64 = 257;

/// `<pad>`.
const PAD: u64 = 259;

const SPECIALS: [(&str, u64); 4] = [("<s>", BOS), ("</s>", EOS), ("<unk>", 258), ("<pad>", PAD)];

/// The files of a tokenizer, and the ids that config.json repeats.
pub(super) struct TokenizerFiles {
    pub(super) json: Vec<u8>,
    /// `tokenizer_config.json`, if it exists.
    pub(super) config: Option<Vec<u8>>,
    /// Token at the start of a text.
    pub(super) bos: Option<u64>,
    /// Token at the end of a text.
    pub(super) eos: Option<u64>,
    /// Token that pads a batch.
    pub(super) pad: Option<u64>,
}

impl TokenizerFiles {
    pub(super) fn of_bytes(
        vocab_size: usize,
        max_position_embeddings: usize,
    ) -> Result<Self, Failure> {
        if vocab_size < BYTE_TOKENS {
            return Err(Failure::new(format!(
                "cannot write a random checkpoint: vocab_size {vocab_size} is too small"
            ))
            .detail(format!("the byte tokenizer has {BYTE_TOKENS} tokens")));
        }
        let config = tokenizer_config(max_position_embeddings);
        Ok(Self {
            json: format!("{:#}\n", tokenizer_json()).into_bytes(),
            config: Some(format!("{config:#}\n").into_bytes()),
            bos: Some(BOS),
            eos: Some(EOS),
            pad: Some(PAD),
        })
    }

    /// The tokenizer of a folder or of a `tokenizer.json`, with the `tokenizer_config.json` next to it.
    /// Fails when a file cannot be read, and when the vocabulary is too small for the tokenizer.
    pub(super) fn read(given: &Path, vocab_size: usize) -> anyhow::Result<Self> {
        let path = if given.is_dir() { given.join("tokenizer.json") } else { given.to_owned() };
        let (json, tokens) = read_json(&path)?;
        let needed = highest_id(&tokens).map_or(0, |id| id.saturating_add(1));
        if needed > vocab_size as u64 {
            return Err(Failure::new(format!(
                "the tokenizer `{}` does not fit the model",
                path.display()
            ))
            .detail(format!("it has {needed} tokens, vocab_size is {vocab_size}"))
            .into());
        }
        let config_path = path.with_file_name("tokenizer_config.json");
        let mut found = Self { json, config: None, bos: None, eos: None, pad: None };
        if config_path.is_file() {
            let (bytes, config) = read_json(&config_path)?;
            let id = |key: &str| special_id(&tokens, &config[key]);
            (found.bos, found.eos, found.pad) = (id("bos_token"), id("eos_token"), id("pad_token"));
            found.config = Some(bytes);
        }
        Ok(found)
    }
}

/// The largest file that is copied. Published tokenizers have up to 35 MB.
const LARGEST: ByteSize = ByteSize(256 << 20);

fn read_json(path: &Path) -> anyhow::Result<(Vec<u8>, Value)> {
    let bad = |why: String| Failure::new(format!("cannot read `{}`", path.display())).detail(why);
    let bytes = input::read(path, LARGEST, Expected::Json)
        .map_err(|error| input::cannot_read(path, &error))?;
    let value = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
    Ok((bytes, value))
}

/// The highest id in a `tokenizer.json`. BPE and WordPiece map tokens to ids; Unigram lists the tokens in order.
fn highest_id(tokens: &Value) -> Option<u64> {
    let vocab = match &tokens["model"]["vocab"] {
        Value::Object(ids) => ids.values().filter_map(Value::as_u64).max(),
        Value::Array(list) => (list.len() as u64).checked_sub(1),
        _ => None,
    };
    let added = tokens["added_tokens"].as_array().into_iter().flatten();
    vocab.max(added.filter_map(|token| token["id"].as_u64()).max())
}

/// The id of a special token. `tokenizer_config.json` names it as text or as an object with `content`.
fn special_id(tokens: &Value, name: &Value) -> Option<u64> {
    let content = name.as_str().or_else(|| name["content"].as_str())?;
    let added = tokens["added_tokens"].as_array()?;
    added.iter().find(|token| token["content"] == content).and_then(|token| token["id"].as_u64())
}

/// `tokenizer.json` in the format of the `tokenizers` library: BPE without merges over the byte-level alphabet.
fn tokenizer_json() -> Value {
    let mut vocab = Map::new();
    for byte in 0..=255 {
        vocab.insert(byte_character(byte).to_string(), json!(byte));
    }
    for (content, id) in SPECIALS {
        vocab.insert(content.into(), json!(id));
    }
    let added: Vec<Value> = SPECIALS
        .iter()
        .map(|(content, id)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true
            })
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let sequence = |id: &str, type_id: u64| json!({"Sequence": {"id": id, "type_id": type_id}});
    let bos = |type_id: u64| json!({"SpecialToken": {"id": "<s>", "type_id": type_id}});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos(0), sequence("A", 0)],
            "pair": [bos(0), sequence("A", 0), bos(1), sequence("B", 1)],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    })
}

fn tokenizer_config(max_position_embeddings: usize) -> Value {
    json!({
        "add_bos_token": true,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": false,
        "eos_token": "</s>",
        "model_max_length": max_position_embeddings,
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>"
    })
}

/// The printable character that stands for a byte in GPT-2's alphabet. Visible characters of Latin-1 stand for themselves; invisible
/// characters are numbered from U+0100 in byte order.
fn byte_character(byte: u8) -> char {
    let is_visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_visible(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&before| !is_visible(before)).count() as u32;
    char::from_u32(0x100 + rank).expect("U+0100 to U+0143 are characters")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_the_round_trip_and_begins_with_bos() -> anyhow::Result<()> {
        let tokenizer = tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&tokenizer_json())?)
            .map_err(anyhow::Error::msg)?;
        assert_eq!(tokenizer.get_vocab_size(true), BYTE_TOKENS);
        let text = "Grüße,\n\tworld \u{1f980} 123";
        let encoding = tokenizer.encode(text, true).map_err(anyhow::Error::msg)?;
        let bytes: Vec<u64> = encoding.get_ids().iter().map(|&id| id.into()).collect();
        let expected: Vec<u64> = std::iter::once(BOS).chain(text.bytes().map(u64::from)).collect();
        assert_eq!(bytes, expected);
        assert_eq!(tokenizer.decode(encoding.get_ids(), true).map_err(anyhow::Error::msg)?, text);
        Ok(())
    }
}
