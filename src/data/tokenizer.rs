//! Text to token ids and back, with the special tokens that `transformers` would add.
//!
//! Wraps the `tokenizers` crate, which is also what the Python "fast" tokenizers run, so ids agree with theirs. One rule
//! lives outside `tokenizer.json`: for the Llama classes, `transformers` rebuilds the post-processor from
//! `add_bos_token` / `add_eos_token` of `tokenizer_config.json`, whatever `tokenizer.json` says.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;

use anyhow::Result;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    DecoderWrapper, Encoding, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Token,
    TokenizerImpl,
};

use super::cut::CutRule;
use super::digest;
use super::encoder::Encoder;
use crate::bytes::{ByteSize, hex, read_settings, read_whole};
use crate::failure::{Failure, blaming};

/// A model's tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    sha256: String,
    largest_id: u32,
    /// Set only where `tokenizer_config.json` asks for other special tokens than `tokenizer.json` adds.
    special: Option<SpecialTokens>,
    cuts: Option<Cuts>,
    /// What a panic of the library means.
    damaged: Failure,
}

/// The largest `tokenizer.json` that is read; published ones have up to 35 MB.
pub(super) const LARGEST: ByteSize = ByteSize(256 << 20);
/// Why a file is refused that made the library panic.
const BROKE_OFF: &str = "the library that reads it broke off";

/// How a long text is encoded in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cuts {
    /// Where pieces end.
    pub(super) rule: CutRule,
    /// Special ids before the whole text.
    pub(super) before: Vec<u32>,
    /// Special ids behind it.
    pub(super) after: Vec<u32>,
}

/// Ids put around a text in place of the post-processor's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SpecialTokens {
    bos: Option<u32>,
    eos: Option<u32>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model folder, and `tokenizer_config.json` where there is one.
    ///
    /// # Errors
    ///
    /// Fails when the folder has no `tokenizer.json` (with the way to convert a `tokenizer.model`), when one of the two files
    /// is damaged, or when the configuration asks for a beginning-of-text token that the vocabulary lacks.
    pub fn load(model_folder: &Path) -> Result<Self> {
        let path = model_folder.join("tokenizer.json");
        let bytes = match read_whole(&path, LARGEST) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(no_tokenizer(model_folder).into());
            }
            Err(error) => return Err(unreadable(&path, &error).into()),
        };
        let damaged = |why: String| {
            Failure::new(format!("`{}` is not a tokenizer we can read: {why}", path.display()))
                .hint("copy it from the model's page again, or write it anew with a current `transformers` (save_pretrained)")
        };
        // The library panics on some parts of the wrong type.
        let parsed = blaming(damaged(BROKE_OFF.into()), || parse(&bytes))?;
        let mut inner = parsed.map_err(|error| damaged(error.to_string()))?;
        let sha256 = digest::of_bytes(&bytes);
        drop(bytes);
        // A file may have been saved with truncation or padding switched on; transformers switches both off for a plain call.
        inner
            .with_truncation(None)
            .map_err(|error| damaged(error.to_string()))?;
        inner.with_padding(None);

        let largest_id = inner
            .get_vocab(true)
            .into_values()
            .max()
            .ok_or_else(|| damaged("its vocabulary is empty".into()))?;
        let mut tokenizer = Self {
            inner,
            sha256,
            largest_id,
            special: None,
            cuts: None,
            damaged: damaged(BROKE_OFF.into()),
        };
        if let Some(special) = tokenizer.configured_special_tokens(model_folder)? {
            tokenizer.apply(special)?;
        }
        let damaged = tokenizer.damaged.clone();
        tokenizer.cuts = blaming(damaged, || tokenizer.find_cuts())?;
        Ok(tokenizer)
    }

    /// SHA-256 of `tokenizer.json` in hex, as `sha256sum` prints it. Where `tokenizer_config.json` changes the special
    /// tokens, what it decided is appended ("…+bos", "…+bos+eos", "…+plain"): the same file then gives other ids.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The largest id the tokenizer can produce, added tokens included; a model's embedding needs more rows than this.
    pub fn largest_id(&self) -> u32 {
        self.largest_id
    }

    /// The ids of a text, special tokens included: those of one call over the whole text. Where it is proven safe for this
    /// tokenizer, a long text is encoded in pieces by several threads, in memory that does not grow with it.
    ///
    /// # Errors
    ///
    /// Fails when the tokenizer's model cannot express the text (no unknown token and no byte fallback).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut nobody = |_| ();
        let mut encoder = Encoder::new(self, &mut nobody);
        encoder.push(text)?;
        encoder.finish()
    }

    /// Whether long texts are encoded in pieces. Where they are not, one call takes memory in proportion to the text.
    pub fn is_bounded(&self) -> bool {
        self.cuts.is_some()
    }

    /// How a long text is cut; none where no cut is proven safe.
    pub(super) fn cuts(&self) -> Option<&Cuts> {
        self.cuts.as_ref()
    }

    /// The ids of a text in one call, special tokens included.
    pub(super) fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.encoded(text, self.special.is_none())?;
        let SpecialTokens { bos, eos } = self.special.unwrap_or(SpecialTokens {
            bos: None,
            eos: None,
        });
        Ok(bos
            .into_iter()
            .chain(encoding.get_ids().iter().copied())
            .chain(eos)
            .collect())
    }

    /// The ids of a text as it stands: special tokens that it spells become theirs, none is added.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_bare(text)
    }

    /// The id of a token by its name, like `</s>`.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The ids of a text in one call, without special tokens.
    pub(super) fn encode_bare(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encoded(text, false)?.get_ids().to_vec())
    }

    /// One call. `encode_fast` skips the offsets, which nobody here reads. The encoding also holds a string per token.
    fn encoded(&self, text: &str, has_special_tokens: bool) -> Result<Encoding> {
        let encoding = blaming(self.damaged.clone(), || {
            self.inner.encode_fast(text, has_special_tokens)
        })?;
        Ok(encoding.map_err(|error| {
            Failure::new(format!(
                "cannot tokenize a text of {} bytes: {error}",
                text.len()
            ))
        })?)
    }

    /// The rule for this tokenizer's cuts, and what stands around a whole text; none where either is not known for sure.
    fn find_cuts(&self) -> Option<Cuts> {
        let rule = CutRule::of(&self.inner)?;
        // Pieces are encoded without special tokens, which must then be none.
        let (before, after) = self.around(false)?;
        if !before.is_empty() || !after.is_empty() {
            return None;
        }
        let (before, after) = match self.special {
            None => self.around(true)?,
            Some(SpecialTokens { bos, eos }) => {
                (bos.into_iter().collect(), eos.into_iter().collect())
            }
        };
        Some(Cuts {
            rule,
            before,
            after,
        })
    }

    /// What the post-processor puts before and behind a text, told by one that consists of an id nobody has.
    fn around(&self, has_special_tokens: bool) -> Option<(Vec<u32>, Vec<u32>)> {
        const TEXT: u32 = u32::MAX;
        let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let processed = self
            .inner
            .post_process(text, None, has_special_tokens)
            .ok()?;
        let (before, after) = processed
            .get_ids()
            .split_at(processed.get_ids().iter().position(|id| *id == TEXT)?);
        let after = &after[1..];
        (!after.contains(&TEXT)).then(|| (before.to_vec(), after.to_vec()))
    }

    /// The text of some ids, without special tokens.
    ///
    /// # Errors
    ///
    /// Fails when the tokenizer's decoder refuses them.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let text = blaming(self.damaged.clone(), || self.inner.decode(ids, true))?;
        Ok(text.map_err(|error| {
            Failure::new(format!(
                "cannot turn {} token ids into text: {error}",
                ids.len()
            ))
        })?)
    }

    /// What `tokenizer_config.json` says about special tokens; none where the file is absent, names another class or is
    /// silent about `add_bos_token`.
    fn configured_special_tokens(&self, model_folder: &Path) -> Result<Option<SpecialTokens>> {
        let path = model_folder.join("tokenizer_config.json");
        let text = match read_settings(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(&path, &error).into()),
        };
        let config: Value = serde_json::from_str(&text).map_err(|error| {
            Failure::new(format!("`{}` is not valid JSON: {error}", path.display()))
                .hint("copy it from the model's page again")
        })?;
        let is_llama = matches!(
            config["tokenizer_class"].as_str(),
            Some("LlamaTokenizer" | "LlamaTokenizerFast")
        );
        let (true, Some(add_bos)) = (is_llama, config["add_bos_token"].as_bool()) else {
            return Ok(None);
        };
        let add_eos = config["add_eos_token"].as_bool().unwrap_or(false);
        // The class's own defaults where the configuration does not name the tokens.
        let bos = if add_bos {
            Some(self.named_token(&config, "bos_token", "<s>", &path)?)
        } else {
            None
        };
        let eos = if add_eos {
            Some(self.named_token(&config, "eos_token", "</s>", &path)?)
        } else {
            None
        };
        Ok(Some(SpecialTokens { bos, eos }))
    }

    /// The id of a token that the configuration names as a string, or as an object with `content`.
    fn named_token(&self, config: &Value, key: &str, default: &str, path: &Path) -> Result<u32> {
        let named = match config.get(key) {
            None => Some(default),
            Some(value) => value.as_str().or_else(|| value["content"].as_str()),
        };
        let id = named.and_then(|token| self.inner.token_to_id(token));
        let asked = || {
            Failure::new(format!(
                "`{}` asks for add_{key}, but there is no such token",
                path.display()
            ))
        };
        Ok(id.ok_or_else(|| {
            asked()
                .detail(format!("`{key}` is {}", named.unwrap_or("null")))
                .hint(format!("correct `{key}` or set `add_{key}` to false"))
        })?)
    }

    /// Takes over the configured special tokens if `tokenizer.json` would not add the same.
    fn apply(&mut self, special: SpecialTokens) -> Result<()> {
        // Templates do not depend on the text, so one probe tells.
        const PROBE: &str = "a";
        let as_file_says = self.encode_whole(PROBE)?;
        self.special = Some(special);
        if self.encode_whole(PROBE)? == as_file_says {
            self.special = None;
            return Ok(());
        }
        self.sha256 += suffix(special.bos.is_some(), special.eos.is_some());
        Ok(())
    }

    /// The values that [`Tokenizer::sha256`] may have for a model folder, found without loading the tokenizer: the hash of
    /// `tokenizer.json`, and that with each mark that `tokenizer_config.json` can add.
    ///
    /// # Errors
    ///
    /// Fails when there is no `tokenizer.json` or it cannot be read.
    pub(super) fn possible_hashes(model_folder: &Path) -> Result<Vec<String>> {
        let mut hasher = Sha256::new();
        let path = model_folder.join("tokenizer.json");
        match File::open(&path).and_then(|mut file| io::copy(&mut file, &mut hasher)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(no_tokenizer(model_folder).into());
            }
            Err(error) => return Err(unreadable(&path, &error).into()),
        }
        let sha256 = hex(&hasher.finalize());
        let marks = [(true, true), (true, false), (false, true), (false, false)];
        let marked = marks.map(|(bos, eos)| format!("{sha256}{}", suffix(bos, eos)));
        Ok(marked.into_iter().chain([sha256]).collect())
    }
}

/// What is appended to the hash where the configuration overrules `tokenizer.json`.
fn suffix(has_bos: bool, has_eos: bool) -> &'static str {
    match (has_bos, has_eos) {
        (true, true) => "+bos+eos",
        (true, false) => "+bos",
        (false, true) => "+eos",
        (false, false) => "+plain",
    }
}

/// The failure for a file that is there and cannot be read.
pub(super) fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("cannot read `{}`: {error}", path.display()))
        .hint("copy it from the model's page again")
}

/// Reads a `tokenizer.json`. The library reads the model of one into generic values twice before it looks at its type; told
/// the type, it does without. Nearly all are byte-pair models, and for the others it decides again.
fn parse(bytes: &[u8]) -> tokenizers::Result<tokenizers::Tokenizer> {
    type OfBytePairs = TokenizerImpl<
        BPE,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    >;
    match serde_json::from_slice::<OfBytePairs>(bytes) {
        Ok(tokenizer) => Ok(tokenizer.into()),
        Err(_) => tokenizers::Tokenizer::from_bytes(bytes),
    }
}

/// The failure for a folder without `tokenizer.json`.
pub(super) fn no_tokenizer(folder: &Path) -> Failure {
    let shown = folder.display();
    if folder.join("tokenizer.model").is_file() {
        return Failure::new(format!("`{shown}` has only `tokenizer.model`; we read `tokenizer.json`")).hint(format!(
            "convert it once: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{shown}', \
             use_fast=True).save_pretrained('{shown}')\""
        ));
    }
    Failure::new(format!("no tokenizer in `{shown}`"))
        .detail("looked for `tokenizer.json`")
        .hint("copy `tokenizer.json` and `tokenizer_config.json` from the model's page into the folder")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::data::testing::shared;

    /// A copy of the small real tokenizer with another configuration beside it.
    fn stories_with(config: &str) -> Option<(tempfile::TempDir, Result<Tokenizer>)> {
        let source = shared("models/stories260k/tokenizer.json")?;
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::copy(source, folder.path().join("tokenizer.json")).expect("copy");
        fs::write(folder.path().join("tokenizer_config.json"), config).expect("write");
        let loaded = Tokenizer::load(folder.path());
        Some((folder, loaded))
    }

    #[test]
    fn a_folder_without_tokenizer_json_is_told_how_to_get_one() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let empty = Tokenizer::load(folder.path())
            .err()
            .expect("must fail")
            .to_string();
        assert!(empty.contains("no tokenizer"), "{empty}");
        fs::write(folder.path().join("tokenizer.model"), "x").expect("write");
        let only_model = Tokenizer::load(folder.path())
            .err()
            .expect("must fail")
            .to_string();
        assert!(only_model.contains("save_pretrained"), "{only_model}");
        fs::write(folder.path().join("tokenizer.json"), "{}").expect("write");
        assert!(
            Tokenizer::load(folder.path())
                .err()
                .expect("must fail")
                .to_string()
                .contains("not a tokenizer")
        );
    }

    #[test]
    fn explicit_add_bos_token_of_the_llama_class_overrules_tokenizer_json() {
        let Some((_folder, loaded)) =
            stories_with(r#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}"#)
        else {
            return;
        };
        let with_bos = loaded.expect("load");
        assert_eq!(
            with_bos.special, None,
            "tokenizer.json adds the same token itself"
        );
        let ids = with_bos.encode("Once upon a time").expect("encode");
        assert_eq!(ids[0], 1, "<s> has id 1");
        assert_eq!(with_bos.decode(&ids).expect("decode"), "Once upon a time");
        assert_eq!(with_bos.largest_id(), 511, "config.json: vocab_size 512");

        let Some((_folder, loaded)) =
            stories_with(r#"{"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": false}"#)
        else {
            return;
        };
        let without = loaded.expect("load");
        assert_eq!(
            without.encode("Once upon a time").expect("encode"),
            ids[1..]
        );
        assert_eq!(without.sha256(), format!("{}+plain", with_bos.sha256()));

        let config = r#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false, "add_eos_token": true, "eos_token": {"content": "</s>"}}"#;
        let Some((_folder, loaded)) = stories_with(config) else {
            return;
        };
        assert_eq!(
            loaded
                .expect("load")
                .encode("Once upon a time")
                .expect("encode"),
            [&ids[1..], &[2]].concat()
        );
    }

    #[test]
    fn other_classes_and_silent_configurations_leave_tokenizer_json_alone() {
        for config in [
            r#"{"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": false}"#,
            r#"{"tokenizer_class": "LlamaTokenizer"}"#,
        ] {
            let Some((_folder, loaded)) = stories_with(config) else {
                return;
            };
            assert_eq!(loaded.expect("load").encode("a").expect("encode")[0], 1);
        }
    }

    #[test]
    fn a_configured_token_that_does_not_exist_is_refused() {
        let config = r#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "bos_token": "<no such>"}"#;
        let Some((_folder, loaded)) = stories_with(config) else {
            return;
        };
        assert!(
            loaded
                .err()
                .expect("must fail")
                .to_string()
                .contains("add_bos_token")
        );
    }

    #[test]
    fn the_real_llama_tokenizers_give_the_ids_of_transformers() {
        for name in ["llama2", "llama3"] {
            let Some(folder) = shared(&format!("data/tokenizers/{name}")) else {
                return;
            };
            let tokenizer = Tokenizer::load(&folder).expect("load");
            let golden: Value =
                serde_json::from_slice(&fs::read(folder.join("golden_ids.json")).expect("read"))
                    .expect("JSON");
            for entry in golden["strings"].as_array().expect("a list") {
                let expected: Vec<u32> =
                    serde_json::from_value(entry["fast"].clone()).expect("ids");
                assert_eq!(
                    tokenizer
                        .encode(entry["text"].as_str().expect("text"))
                        .expect("encode"),
                    expected,
                    "{name}: {}",
                    entry["text"]
                );
            }
            let Some(text) = shared("data/wikitext2/wiki.test.head1000.raw") else {
                return;
            };
            let ids = tokenizer
                .encode(&fs::read_to_string(text).expect("read"))
                .expect("encode");
            let expected = &golden["files"]["wiki.test.head1000.raw"]["fast"];
            assert_eq!(ids.len() as u64, expected["n"].as_u64().expect("a count"));
            assert_eq!(
                digest::of_ids(&ids),
                expected["sha256_int32le"].as_str().expect("a hash")
            );
        }
    }
}
