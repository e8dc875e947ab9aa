//! Places where a text may be cut, so that the ids of the pieces in sequence are exactly the ids of the whole text.
//!
//! Tokenizing a text in one call takes many times its size in memory, so long texts are encoded in pieces. A cut is safe only if
//! no step of the tokenizer reaches across it. [`CutRule::of`] knows three kinds of tokenizers and proves the rule from
//! `tokenizer.json`. A tokenizer of no known kind has no rule, and its texts are encoded whole.
//!
//! *Added tokens* (`<s>`, `<|eot_id|>`) are searched first, in the raw text, for all kinds. Apart from spaces around it, no added token
//! may contain white space or "▁", or begin or end with a letter. Then none can overlap or touch a cut "letter, space, letter" or
//! "newline, letter", nor reach it by the white space that it strips, so the same added tokens are found in the pieces.
//!
//! *Spaces become "▁"* (Llama 2: `Prepend` and `Replace`; or `Replace` alone; or `Metaspace` with any `prepend_scheme`). The cut is before
//! a space between two letters. `Prepend` puts "▁" before each stretch of text between added tokens, so the piece after the cut begins
//! after the space, and `Prepend` restores the space. With `Replace` alone and with `Metaspace`, the piece keeps its space; it then begins
//! with "▁", and no scheme adds a second "▁". `Metaspace` with `split` never lets a token reach over such a place. If the whole text is a
//! single word of byte-pair merges, a merge over the cut would make a token with "▁" directly after a letter. All results of merges are in
//! the vocabulary, so there is no such merge if the vocabulary has no such token. Merges within a side are ordered by rank, then position,
//! and do not depend on the text across the cut. Four more conditions: "▁" is in the vocabulary (a run of unknown characters ends there),
//! no drop-out, no affixes for the first and last parts of words, and no `ignore_merges`.
//!
//! *Byte level with a known pattern* (GPT-2's, also as `use_regex`; Llama 3's). Each pre-token is encoded alone, so a cut is safe if the
//! pattern begins a match there in any context, and looks at nothing beyond. It does before a space that follows a letter: the alternatives
//! that match letters end with the last letter. It does after a newline that precedes a letter: in Llama 3's pattern each match of the last
//! newline of white space ends with it; in GPT-2's pattern this holds for a newline that is the only white space there. Both patterns look
//! ahead only by `\s+(?!\S)`, within white space. That white space does not touch a cut before a space, and gives the same match at a cut
//! after a newline. `add_prefix_space` changes a piece that begins with a letter, so it excludes newlines.

use std::collections::HashMap;

use serde_json::{Value, json};
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;

/// The pre-tokenizing pattern of GPT-2. `ByteLevel` with `use_regex` applies it, too.
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The sign for a space in SentencePiece's vocabularies.
const SPACE: char = '▁';

/// The safe cuts for a tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CutRule {
    /// The normalizer puts a space before every piece, so the piece omits the space at the cut.
    is_space_put_back: bool,
    newlines: Newlines,
}

/// The newlines after which a text may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Newlines {
    None,
    /// Newlines without white space before them.
    Lone,
    /// All newlines before a letter.
    All,
}

/// A safe cut, in bytes of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TextCut {
    /// The end of the piece before it.
    pub(super) end: usize,
    /// The beginning of the piece after it.
    pub(super) next: usize,
}

impl CutRule {
    /// The rule for a tokenizer; `None` if no cut is proven safe.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let added = tokenizer.get_added_tokens_decoder();
        if !added.values().all(|token| keeps_off_cuts(&token.content)) {
            return None;
        }
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        byte_level(&normalizer, &pre_tokenizer)
            .or_else(|| spaces_replaced(&normalizer, &pre_tokenizer, tokenizer.get_model()))
    }

    /// The first safe cut at byte `from` or after it; `from` is at least 1. A cut depends on one character on each side, so a
    /// text that grows is searched again from its last byte.
    pub(super) fn find(self, text: &str, from: usize) -> Option<TextCut> {
        let bytes = text.as_bytes();
        (from.max(1)..bytes.len().saturating_sub(1)).find_map(|at| {
            let is_before_letter = || text[at + 1..].chars().next().is_some_and(is_letter);
            let before = || text[..at].chars().next_back();
            match bytes[at] {
                b' ' if before().is_some_and(is_letter) && is_before_letter() => {
                    Some(TextCut { end: at, next: at + usize::from(self.is_space_put_back) })
                }
                b'\n' if is_before_letter() => {
                    let is_safe = match self.newlines {
                        Newlines::None => false,
                        Newlines::Lone => before().is_some_and(|c| !c.is_whitespace()),
                        Newlines::All => true,
                    };
                    is_safe.then_some(TextCut { end: at + 1, next: at + 1 })
                }
                _ => None,
            }
        })
    }
}

/// The rule for byte-level tokenizers with a known pattern.
fn byte_level(normalizer: &Value, pre_tokenizer: &Value) -> Option<CutRule> {
    if !normalizer.is_null() {
        return None;
    }
    let (split, last) = match pre_tokenizer["type"].as_str()? {
        "ByteLevel" => (None, pre_tokenizer),
        "Sequence" => match pre_tokenizer["pretokenizers"].as_array()?.as_slice() {
            [split, last] => (Some(split), last),
            _ => return None,
        },
        _ => return None,
    };
    let pattern = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let has_own_pattern = last["use_regex"].as_bool()?;
    let newlines = match split {
        None if has_own_pattern => Newlines::Lone,
        Some(split) if !has_own_pattern && *split == pattern(GPT_2) => Newlines::Lone,
        Some(split) if !has_own_pattern && *split == pattern(LLAMA_3) => Newlines::All,
        _ => return None,
    };
    if last["type"] != "ByteLevel" {
        return None;
    }
    // After a split, the prefix would be added to every pre-token. No known tokenizer has this, and the proof does not cover it.
    let adds_space = last["add_prefix_space"].as_bool()?;
    if adds_space && split.is_some() {
        return None;
    }
    Some(CutRule {
        is_space_put_back: false,
        newlines: if adds_space { Newlines::None } else { newlines },
    })
}

/// The rule for tokenizers that replace spaces by "▁".
fn spaces_replaced(
    normalizer: &Value,
    pre_tokenizer: &Value,
    model: &ModelWrapper,
) -> Option<CutRule> {
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let rule = |is_space_put_back| CutRule { is_space_put_back, newlines: Newlines::None };
    let (rule, splits) = if pre_tokenizer.is_null() {
        let both = json!({"type": "Sequence", "normalizers": [prepend, replace]});
        let alone = json!({"type": "Sequence", "normalizers": [replace]});
        if *normalizer == both {
            (rule(true), false)
        } else if *normalizer == replace || *normalizer == alone {
            (rule(false), false)
        } else {
            return None;
        }
    } else {
        let is_metaspace =
            pre_tokenizer["type"] == "Metaspace" && pre_tokenizer["replacement"] == "▁";
        if !normalizer.is_null() || !is_metaspace {
            return None;
        }
        (rule(false), pre_tokenizer["split"].as_bool()?)
    };
    let ModelWrapper::BPE(model) = model else {
        return None;
    };
    (splits || no_merge_reaches_over_a_space(model)).then_some(rule)
}

/// True if no byte-pair merge over a whole text reaches over a place between a character and "▁".
fn no_merge_reaches_over_a_space(model: &BPE) -> bool {
    let is_set = |affix: &Option<String>| affix.as_deref().is_some_and(|affix| !affix.is_empty());
    let is_plain = model.dropout.is_none_or(|share| share == 0.0)
        && !is_set(&model.continuing_subword_prefix)
        && !is_set(&model.end_of_word_suffix)
        && !model.ignore_merges;
    // An unknown character followed by a space would become "▁▁".
    let is_unknown_a_space = model.unk_token.as_deref().is_some_and(|token| token.ends_with(SPACE));
    if !is_plain || is_unknown_a_space {
        return false;
    }
    let vocabulary: HashMap<String, u32> = tokenizers::Model::get_vocab(model);
    vocabulary.contains_key("▁") && vocabulary.keys().all(|token| !has_space_inside(token))
}

/// True if a token has "▁" after a character that is not "▁".
fn has_space_inside(token: &str) -> bool {
    token.trim_start_matches(SPACE).contains(SPACE)
}

/// True if an added token can neither touch nor overlap a cut, with spaces or with "▁" in their place.
fn keeps_off_cuts(token: &str) -> bool {
    let core = token.trim_matches([' ', SPACE]);
    let is_letter_at = |c: Option<char>| c.is_none_or(is_letter);
    !core.contains(|c: char| c.is_whitespace() || c == SPACE)
        && !is_letter_at(core.chars().next())
        && !is_letter_at(core.chars().next_back())
}

/// True for common letters (`\p{L}`) of many scripts. The ranges have no gaps in any version of Unicode since 3.0.
fn is_letter(c: char) -> bool {
    matches!(
        c,
        'a'..='z'
            | 'A'..='Z'
            | 'À'..='Ö'
            | 'Ø'..='ö'
            | 'ø'..='ſ'
            | 'Α'..='Ρ'
            | 'Σ'..='Ω'
            | 'ά'..='ώ'
            | 'А'..='я'
            | 'א'..='ת'
            | 'ء'..='غ'
            | 'ف'..='ي'
            | 'ぁ'..='ゔ'
            | 'ァ'..='ヺ'
            | '一'..='龥'
            | '가'..='힣'
    )
}
