//! Text to token ids and back, with the special tokens that `transformers` would add.
//!
//! This wraps the `tokenizers` crate, which the Python "fast" tokenizers run too, so ids agree with theirs. Two rules are not in
//! `tokenizer.json`: for the Llama classes, `transformers` builds the post-processor from `add_bos_token` and `add_eos_token` of
//! `tokenizer_config.json`, and the space before a text from `add_prefix_space` ([`TokenizerConfig`]).

use std::io::{self, ErrorKind};
use std::path::Path;

use anyhow::Result;
use sha2::{Digest, Sha256};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    DecoderWrapper, Encoding, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, Token, TokenizerImpl,
};

use super::line_memory::LineMemory;
use super::text_cut::CutRule;
use super::tokenizer_config::{PrefixSpace, TokenizerConfig};
use super::tokenizer_file::{LARGEST, no_tokenizer, unreadable};
use super::{digest, tokenizer_bounds};
use crate::bytes::hex;
use crate::failure::{Failure, blaming};
use crate::input::{self, Expected};

/// The library's stream, for a tokenizer of any kind.
pub(super) type DecodeStream<'t> = tokenizers::DecodeStream<
    't,
    ModelWrapper,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// Ids, and the bytes of the text that each stands for.
pub(super) type PlacedIds = (Vec<u32>, Vec<(usize, usize)>);

/// A model's tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    sha256: String,
    largest_id: u32,
    /// The token that begins a text, by `tokenizer_config.json` or the post-processor.
    bos: Option<u32>,
    /// The token that ends a text, by `tokenizer_config.json`.
    eos: Option<u32>,
    /// Set only if `tokenizer_config.json` and `tokenizer.json` add different special tokens.
    pub(super) special: Option<SpecialTokens>,
    /// Facts about which `tokenizer_config.json` and `tokenizer.json` disagree.
    warnings: Vec<String>,
    cuts: Option<Cuts>,
    /// The longest part of a text that is encoded in one call, in bytes.
    longest_uncut: usize,
    /// The failure for a panic of the library.
    damaged: Failure,
}

fn cannot_tokenize(text: &str, error: &tokenizers::Error) -> Failure {
    Failure::new(format!("cannot tokenize a text of {} bytes: {error}", text.len()))
}

const FAILED: &str = "the tokenizer library failed";

/// The longest text that is encoded in one call. A call takes about 120 bytes per byte of text: 3.8 GiB. If texts can be cut, a
/// text of words never has a piece of this length.
pub(super) const LONGEST_PIECE: usize = 32 << 20;

/// The rule for encoding a long text in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cuts {
    /// The ends of pieces.
    pub(super) rule: CutRule,
    /// Special ids before the text.
    pub(super) before: Vec<u32>,
    /// Special ids after the text.
    pub(super) after: Vec<u32>,
}

/// Ids before and after a text, in place of the post-processor's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpecialTokens {
    bos: Option<u32>,
    eos: Option<u32>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model folder, and `tokenizer_config.json` if it exists.
    ///
    /// # Errors
    /// Fails when the folder has no `tokenizer.json` (the hint tells how to convert a `tokenizer.model`), when a file is damaged,
    /// or when the configuration asks for a special token that the vocabulary lacks.
    pub fn load(model_folder: &Path) -> Result<Self> {
        let path = model_folder.join("tokenizer.json");
        let bytes = match input::read(&path, LARGEST, Expected::Json) {
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
        // The library panics on some values of the wrong type.
        let parsed = blaming(damaged(FAILED.into()), || parse(&bytes))?;
        let mut inner = parsed.map_err(|error| damaged(error.to_string()))?;
        let parts = [
            ("normalizer", serde_json::to_value(inner.get_normalizer())?),
            ("decoder", serde_json::to_value(inner.get_decoder())?),
        ];
        for (name, part) in parts {
            tokenizer_bounds::check(&part, name, &path)?;
        }
        let sha256 = digest::of_bytes(&bytes);
        drop(bytes);
        // Some files are saved with truncation or padding. A plain call of transformers uses neither.
        inner.with_truncation(None).map_err(|error| damaged(error.to_string()))?;
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
            bos: None,
            eos: None,
            special: None,
            warnings: Vec::new(),
            cuts: None,
            longest_uncut: LONGEST_PIECE,
            damaged: damaged(FAILED.into()),
        };
        let config_path = model_folder.join("tokenizer_config.json");
        if let Some(config) = TokenizerConfig::read(&config_path)? {
            tokenizer.follow(&config, &config_path)?;
        }
        if tokenizer.bos.is_none() {
            let damaged = tokenizer.damaged.clone();
            let around = blaming(damaged, || tokenizer.around(true))?;
            tokenizer.bos = around.and_then(|(before, _)| before.first().copied());
        }
        let damaged = tokenizer.damaged.clone();
        tokenizer.cuts = blaming(damaged, || tokenizer.find_cuts())?;
        Ok(tokenizer)
    }

    /// Facts about which `tokenizer_config.json` and `tokenizer.json` disagree, for a warning each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// SHA-256 of `tokenizer.json` in hex, as `sha256sum` prints it. A mark follows if `tokenizer_config.json` changes the space before
    /// a text ("…-space", "…+space") or the special tokens ("…+bos", "…+eos", "…+bos+eos", "…+plain"), because the same file then gives
    /// different ids.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The largest id of the tokenizer, added tokens included. The model's embedding needs more rows than this.
    pub fn largest_id(&self) -> u32 {
        self.largest_id
    }

    /// True if long texts are encoded in pieces. If false, one call takes memory in proportion to the text.
    pub fn is_bounded(&self) -> bool {
        self.cuts.is_some()
    }

    /// The same tokenizer for texts whose parts are bounded.
    #[must_use]
    pub fn with_lines(self, lines: LineMemory) -> Self {
        Self { longest_uncut: lines.longest_uncut(LONGEST_PIECE), ..self }
    }

    /// The longest part of a text that is encoded in one call, in bytes.
    pub(super) fn longest_uncut(&self) -> usize {
        self.longest_uncut
    }

    /// The cuts of a long text; `None` if no cut is proven safe.
    pub(super) fn cuts(&self) -> Option<&Cuts> {
        self.cuts.as_ref()
    }

    /// The ids of a text in one call, with special tokens.
    pub(super) fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.encoded(text, self.special.is_none())?;
        let SpecialTokens { bos, eos } =
            self.special.unwrap_or(SpecialTokens { bos: None, eos: None });
        Ok(bos.into_iter().chain(encoding.get_ids().iter().copied()).chain(eos).collect())
    }

    /// The ids of a text that contains its special tokens, as a rendered chat template does. No special token is added.
    ///
    /// # Errors
    /// Fails when the tokenizer's model cannot express the text.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_bare(text)
    }

    /// Returns whether two model folders have the same `tokenizer.json`, byte for byte. No vocabulary is loaded.
    ///
    /// # Errors
    /// Fails when a file cannot be read.
    pub fn is_common_to(folders: [&Path; 2]) -> Result<bool> {
        let [one, other] = folders.map(|folder| digest::of_file(&folder.join("tokenizer.json")));
        Ok(one? == other?)
    }

    /// The first id below `ids` whose token differs from the token of `other`, and both tokens. Ids that one of them lacks are padding.
    pub fn first_difference(&self, other: &Self, ids: usize) -> Option<(u32, String, String)> {
        let ids = u32::try_from(ids).unwrap_or(u32::MAX);
        let both = (0..ids)
            .filter_map(|id| Some((id, self.inner.id_to_token(id)?, other.inner.id_to_token(id)?)));
        both.into_iter().find(|(_, own, theirs)| own != theirs)
    }

    /// The ids of a text that contains its special tokens, and the bytes of the text that each stands for.
    ///
    /// # Errors
    /// Fails as [`Tokenizer::encode_plain`].
    pub(super) fn encode_with_places(&self, text: &str) -> Result<PlacedIds> {
        let encoding = blaming(self.damaged.clone(), || self.inner.encode(text, false))?;
        let encoding = encoding.map_err(|error| cannot_tokenize(text, &error))?;
        Ok((encoding.get_ids().to_vec(), encoding.get_offsets().to_vec()))
    }

    /// The id of a token by its name, like `</s>`.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token that ends a text: `eos_token` of `tokenizer_config.json`, for the Llama classes `</s>` if it has none. `None` without
    /// that file, and if the vocabulary lacks the token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The token that begins a text: `bos_token` of `tokenizer_config.json`, else the token that the tokenizer puts first. `None` without
    /// such a token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The text of [`Tokenizer::bos`], like `<s>`.
    pub fn bos_text(&self) -> Option<String> {
        self.inner.id_to_token(self.bos?)
    }

    /// The ids of a text in one call, without special tokens.
    pub(super) fn encode_bare(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encoded(text, false)?.get_ids().to_vec())
    }

    /// A call of the library. `encode_fast` skips the offsets, which are not needed. The encoding holds a string per token, too.
    fn encoded(&self, text: &str, has_special_tokens: bool) -> Result<Encoding> {
        let encoding =
            blaming(self.damaged.clone(), || self.inner.encode_fast(text, has_special_tokens))?;
        Ok(encoding.map_err(|error| cannot_tokenize(text, &error))?)
    }

    /// The safe cuts and the special ids of this tokenizer; `None` if the cuts or the ids cannot be proven.
    fn find_cuts(&self) -> Option<Cuts> {
        let rule = CutRule::of(&self.inner)?;
        // A piece is encoded without special tokens, so the post-processor must add none then.
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
        Some(Cuts { rule, before, after })
    }

    /// The ids that the post-processor puts before and after a text. The text here is one id that no token has.
    fn around(&self, has_special_tokens: bool) -> Option<(Vec<u32>, Vec<u32>)> {
        const TEXT: u32 = u32::MAX;
        let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let processed = self.inner.post_process(text, None, has_special_tokens).ok()?;
        let (before, after) =
            processed.get_ids().split_at(processed.get_ids().iter().position(|id| *id == TEXT)?);
        let after = &after[1..];
        (!after.contains(&TEXT)).then(|| (before.to_vec(), after.to_vec()))
    }

    /// The text of ids, without special tokens.
    ///
    /// # Errors
    /// Fails when the tokenizer's decoder refuses the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let text = blaming(self.damaged.clone(), || self.inner.decode(ids, true))?;
        Ok(text.map_err(|error| {
            Failure::new(format!("cannot turn {} token ids into text: {error}", ids.len()))
        })?)
    }

    /// The text of tokens as they come, without special tokens; for [`Tokenizer::step`].
    pub(super) fn decode_stream(&self) -> DecodeStream<'_> {
        self.inner.decode_stream(true)
    }

    /// Takes a token into a stream. The inner result is the text that the token completes, or the library's refusal.
    /// Fails when the library panics.
    pub(super) fn step(
        &self,
        stream: &mut DecodeStream<'_>,
        id: u32,
    ) -> Result<tokenizers::Result<Option<String>>> {
        Ok(blaming(self.damaged.clone(), || stream.step(id))?)
    }

    /// Tells tokens that may add to a text from special tokens and from ids without a token.
    pub(super) fn has_text(&self, id: u32) -> bool {
        let token = self.inner.id_to_token(id);
        token.is_some_and(|token| !self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// Follows `tokenizer_config.json` where it decides, and keeps a warning for every fact about which the two files disagree.
    fn follow(&mut self, config: &TokenizerConfig, path: &Path) -> Result<()> {
        let default = config.is_llama().then_some("</s>");
        let bos = config.token("bos_token", config.is_llama().then_some("<s>"));
        self.bos = bos.and_then(|token| self.id_of(token));
        self.eos = config.token("eos_token", default).and_then(|token| self.id_of(token));
        let (space, warning) = config.set_prefix_space(&mut self.inner)?;
        self.sha256 += space.mark();
        self.warnings.extend(warning);
        let added = config.added_tokens_warning(&|token| self.id_of(token));
        self.warnings.extend(added);
        let damaged = self.damaged.clone();
        if let Some((before, after)) = blaming(damaged, || self.around(true))? {
            let of_file = [!before.is_empty(), !after.is_empty()];
            self.warnings.extend(config.special_tokens_warning(of_file));
        }
        match self.configured_special_tokens(config, path)? {
            Some(special) => self.apply(special),
            None => Ok(()),
        }
    }

    /// The special tokens of `tokenizer_config.json`; `None` if it names no Llama class or has no `add_bos_token`.
    fn configured_special_tokens(
        &self,
        config: &TokenizerConfig,
        path: &Path,
    ) -> Result<Option<SpecialTokens>> {
        let (true, Some(add_bos)) = (config.is_llama(), config.flag("add_bos_token")) else {
            return Ok(None);
        };
        let add_eos = config.flag("add_eos_token").unwrap_or(false);
        // The defaults of the class, if the configuration does not name the tokens.
        let bos =
            if add_bos { Some(self.named_token(config, "bos_token", "<s>", path)?) } else { None };
        let eos =
            if add_eos { Some(self.named_token(config, "eos_token", "</s>", path)?) } else { None };
        Ok(Some(SpecialTokens { bos, eos }))
    }

    /// The id of a token that the configuration names by a string, or by an object with `content`.
    fn named_token(
        &self,
        config: &TokenizerConfig,
        key: &str,
        default: &str,
        path: &Path,
    ) -> Result<u32> {
        let named = config.token(key, Some(default));
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

    /// Uses the configured special tokens, unless `tokenizer.json` adds the same tokens.
    fn apply(&mut self, special: SpecialTokens) -> Result<()> {
        // Post-processors do not depend on the text, so one probe is enough.
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

    /// The possible values of [`Tokenizer::sha256`] for a model folder: the hash of `tokenizer.json`, alone and with each mark that
    /// `tokenizer_config.json` may add. Does not load the tokenizer. Fails when there is no `tokenizer.json` or it cannot be read.
    pub(super) fn possible_hashes(model_folder: &Path) -> Result<Vec<String>> {
        let mut hasher = Sha256::new();
        let path = model_folder.join("tokenizer.json");
        match input::open(&path, Expected::Json)
            .and_then(|mut file| io::copy(&mut file, &mut hasher))
        {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(no_tokenizer(model_folder).into());
            }
            Err(error) => return Err(unreadable(&path, &error).into()),
        }
        let sha256 = hex(&hasher.finalize());
        let marks = [(true, true), (true, false), (false, true), (false, false)];
        let marks = marks.map(|(bos, eos)| suffix(bos, eos));
        let hashes = PrefixSpace::ALL.into_iter().flat_map(|space| {
            let of_space = format!("{sha256}{}", space.mark());
            let marked = marks.map(|mark| format!("{of_space}{mark}"));
            marked.into_iter().chain([of_space])
        });
        Ok(hashes.collect())
    }
}

/// The mark after the hash if the configuration overrules `tokenizer.json`.
fn suffix(has_bos: bool, has_eos: bool) -> &'static str {
    match (has_bos, has_eos) {
        (true, true) => "+bos+eos",
        (true, false) => "+bos",
        (false, true) => "+eos",
        (false, false) => "+plain",
    }
}

/// Parses a `tokenizer.json`. For a model of unknown type, the library parses generic values twice. Nearly all models are byte
/// pairs, so this type is tried first.
fn parse(bytes: &[u8]) -> tokenizers::Result<tokenizers::Tokenizer> {
    type BytePairTokenizer = TokenizerImpl<
        BPE,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    >;
    match serde_json::from_slice::<BytePairTokenizer>(bytes) {
        Ok(tokenizer) => Ok(tokenizer.into()),
        Err(_) => tokenizers::Tokenizer::from_bytes(bytes),
    }
}
