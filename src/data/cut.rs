//! Where a text may be cut so that the ids of the pieces, one after the other, are exactly those of the whole.
//!
//! Tokenizing a text in one call takes many times its size in memory, so long texts are encoded in pieces. A cut is safe only
//! where nothing the tokenizer does reaches across it, which depends on the tokenizer; [`CutRule::of`] knows these kinds and
//! proves each from `tokenizer.json`. A tokenizer of any other kind has no rule, and its texts are encoded whole.
//!
//! *Added tokens* (`<s>`, `<|eot_id|>`) are searched for in the raw text first, in all kinds. Every added token must, apart from
//! spaces around it, be free of white space and "▁" and neither begin nor end with a letter. None can then overlap or touch a
//! cut "letter, space, letter" or "newline, letter", nor reach it with the white space it strips, so the same ones are found.
//!
//! *Spaces become "▁"* (Llama 2: `Prepend` and `Replace`; or `Replace` alone; or `Metaspace`, whatever its `prepend_scheme`).
//! The cut is before a space between two letters. `Prepend` puts "▁" before every stretch of text between added tokens, so the
//! piece after the cut begins behind the space and has it put back; in the other two the piece keeps its space, and since it
//! then begins with "▁", no scheme adds another. `Metaspace` that splits never lets a token reach over such a place. Where
//! the whole text is one word of byte-pair merges, a merge over the cut would make a token with "▁" directly behind another
//! character; all results of merges are in the vocabulary, so none does if the vocabulary has no such token. Merges within a
//! side go by rank, then position, and do not see the other side. Needed besides: "▁" is in the vocabulary itself (a run of
//! unknown characters ends there), no drop-out, no affixes for words' first and last parts, no `ignore_merges`.
//!
//! *Byte level with a known pattern* (GPT-2's, also as `use_regex`; Llama 3's). Every pre-token is encoded alone, so a cut is safe
//! where the pattern begins a match whatever surrounds it, and sees nothing beyond. Before a space behind a letter it does:
//! the alternatives that take letters end with their last letter. Behind a newline before a letter: in Llama 3's pattern every
//! match that takes the last newline of white space ends with it; in GPT-2's that holds for a newline that is the only white
//! space there. Both patterns look ahead by `\s+(?!\S)` alone, within white space that does not touch the former cut, and gives
//! the same match at the latter. `add_prefix_space` changes a piece that begins with a letter, so it rules out newlines.

use std::collections::HashMap;

use serde_json::{Value, json};
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;

/// The pre-tokenizing pattern of GPT-2, which `ByteLevel` applies by itself if `use_regex` is set.
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The pre-tokenizing pattern of Llama 3.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// What stands for a space in SentencePiece's vocabularies.
const SPACE: char = '▁';

/// Where texts may be cut for one tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CutRule {
    /// The normalizer puts a space before every piece: the one at the cut is left out.
    is_space_put_back: bool,
    newlines: Newlines,
}

/// Behind which newlines a text may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Newlines {
    None,
    /// Those with no white space before them.
    Lone,
    /// All, if a letter follows.
    All,
}

/// A place to cut, as bytes of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// The end of the piece before.
    pub(super) end: usize,
    /// The beginning of the piece behind.
    pub(super) next: usize,
}

impl CutRule {
    /// The rule for a tokenizer; none where no cut is proven safe.
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

    /// The first safe cut at byte `from` or later, `from` being at least 1. Sees one character on either side of a place, so
    /// that a text which goes on later can be searched again from its last byte.
    pub(super) fn find(self, text: &str, from: usize) -> Option<Cut> {
        let bytes = text.as_bytes();
        (from.max(1)..bytes.len().saturating_sub(1)).find_map(|at| {
            let is_before_letter = || text[at + 1..].chars().next().is_some_and(is_letter);
            let before = || text[..at].chars().next_back();
            match bytes[at] {
                b' ' if before().is_some_and(is_letter) && is_before_letter() => Some(Cut {
                    end: at,
                    next: at + usize::from(self.is_space_put_back),
                }),
                b'\n' if is_before_letter() => {
                    let is_safe = match self.newlines {
                        Newlines::None => false,
                        Newlines::Lone => before().is_some_and(|c| !c.is_whitespace()),
                        Newlines::All => true,
                    };
                    is_safe.then_some(Cut {
                        end: at + 1,
                        next: at + 1,
                    })
                }
                _ => None,
            }
        })
    }
}

/// The rule for byte-level tokenizers with one of the known patterns.
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
    // Behind a split, the prefix would be put before every pre-token: no tokenizer has that, and nothing here covers it.
    let adds_space = last["add_prefix_space"].as_bool()?;
    if adds_space && split.is_some() {
        return None;
    }
    Some(CutRule {
        is_space_put_back: false,
        newlines: if adds_space { Newlines::None } else { newlines },
    })
}

/// The rule for tokenizers that turn spaces into "▁".
fn spaces_replaced(
    normalizer: &Value,
    pre_tokenizer: &Value,
    model: &ModelWrapper,
) -> Option<CutRule> {
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let rule = |is_space_put_back| CutRule {
        is_space_put_back,
        newlines: Newlines::None,
    };
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

/// Whether byte-pair merges over a whole text keep to the sides of every place between a character and "▁".
fn no_merge_reaches_over_a_space(model: &BPE) -> bool {
    let is_set = |affix: &Option<String>| affix.as_deref().is_some_and(|affix| !affix.is_empty());
    let is_plain = model.dropout.is_none_or(|share| share == 0.0)
        && !is_set(&model.continuing_subword_prefix)
        && !is_set(&model.end_of_word_suffix)
        && !model.ignore_merges;
    // The stand-in for an unknown character would make "▁▁" out of an unknown character and a space.
    let is_unknown_a_space = model
        .unk_token
        .as_deref()
        .is_some_and(|token| token.ends_with(SPACE));
    if !is_plain || is_unknown_a_space {
        return false;
    }
    let vocabulary: HashMap<String, u32> = tokenizers::Model::get_vocab(model);
    vocabulary.contains_key("▁") && vocabulary.keys().all(|token| !has_space_inside(token))
}

/// Whether "▁" follows another character somewhere in a token.
fn has_space_inside(token: &str) -> bool {
    token.trim_start_matches(SPACE).contains(SPACE)
}

/// Whether an added token can neither touch nor overlap a cut, in the raw text or with its spaces replaced.
fn keeps_off_cuts(token: &str) -> bool {
    let core = token.trim_matches([' ', SPACE]);
    let is_letter_at = |c: Option<char>| c.is_none_or(is_letter);
    !core.contains(|c: char| c.is_whitespace() || c == SPACE)
        && !is_letter_at(core.chars().next())
        && !is_letter_at(core.chars().next_back())
}

/// Whether a character is surely a letter (`\p{L}`): the common ones of scripts that put spaces between words or newlines
/// between lines, in ranges without gaps in any version of Unicode since 3.0.
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
