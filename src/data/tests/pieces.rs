//! Texts encoded in pieces have the ids of the whole: small tokenizers of every known kind, and the real tokenizers that are there.

use std::sync::OnceLock;

use proptest::prelude::*;

use super::*;
use crate::data::encoder::Encoder;
use crate::data::testing::RecordedEvents;
use crate::data::text_cut::CutRule;

/// A byte-pair model: its base tokens, then what its merges make.
fn byte_pairs(base: impl Iterator<Item = String>, merges: &[(&str, &str)]) -> Value {
    let mut vocab = serde_json::Map::new();
    let merged = merges.iter().map(|(left, right)| format!("{left}{right}"));
    for token in base.chain(merged) {
        let id = vocab.len();
        vocab.entry(token).or_insert(json!(id));
    }
    let merges: Vec<[&str; 2]> = merges.iter().map(|(left, right)| [*left, *right]).collect();
    json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges})
}

/// A whole `tokenizer.json` that puts `<s>` first.
pub(super) fn file(model: Value, normalizer: Value, pre_tokenizer: Value) -> Value {
    let added: Vec<Value> = ["<unk>", "<s>", "</s>", "<|eot_id|>"]
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "model": model, "decoder": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}})
}

const SPECIALS: [&str; 4] = ["<unk>", "<s>", "</s>", "<|eot_id|>"];

/// In the manner of Llama 2, with merges on both sides of a space; capitals and all else fall back to bytes.
pub(super) fn sentence_piece() -> Value {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let letters = "▁abcde<>s/|".chars().map(String::from);
    let base = SPECIALS.map(String::from).into_iter();
    let mut model = byte_pairs(
        base.chain(bytes).chain(letters),
        &[
            ("a", "b"),
            ("▁", "▁"),
            ("▁", "a"),
            ("▁", "ab"),
            ("▁▁", "▁▁"),
            ("b", "a"),
            ("c", "c"),
            ("ab", "ab"),
            ("▁a", "ba"),
            ("▁▁", "a"),
            ("d", "e"),
            ("▁", "de"),
        ],
    );
    model["unk_token"] = json!("<unk>");
    model["fuse_unk"] = json!(true);
    model["byte_fallback"] = json!(true);
    model
}

pub(super) fn prepend_and_replace() -> Value {
    json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace()]})
}

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
}

/// Bytes, and merges of letters, spaces and newlines.
pub(super) fn bytes() -> Value {
    // GPT-2's stand-ins for bytes: the visible characters of Latin-1 are themselves, the rest follows from U+0100.
    let mut others = 0x100..;
    let alphabet = (0..=255u8).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
        _ => {
            let other = others.next().and_then(char::from_u32);
            other.expect("a character").to_string()
        }
    });
    let base = SPECIALS.map(String::from).into_iter().chain(alphabet);
    byte_pairs(
        base,
        &[
            ("Ġ", "a"),
            ("Ċ", "Ċ"),
            ("Ġ", "Ġ"),
            ("ĠĠ", "ĠĠ"),
            ("a", "b"),
            ("Ġa", "b"),
            (".", "Ċ"),
            ("ĊĊ", "Ċ"),
            ("Ġ", "Ċ"),
            ("1", "2"),
            ("'", "s"),
            ("c", "c"),
        ],
    )
}

pub(super) fn byte_level(use_regex: bool, add_prefix_space: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
}

fn split_at(pattern: &str) -> Value {
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    json!({"type": "Sequence", "pretokenizers": [split, byte_level(false, false)]})
}

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

pub(super) fn loaded(file: &Value) -> Tokenizer {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("tokenizer.json"), file.to_string()).expect("write");
    Tokenizer::load(folder.path()).expect("load")
}

/// Every kind whose texts can be cut.
fn kinds() -> Vec<(String, Value)> {
    let mut kinds = vec![
        ("Llama 2".to_owned(), file(sentence_piece(), prepend_and_replace(), json!(null))),
        ("spaces replaced".to_owned(), file(sentence_piece(), replace(), json!(null))),
        ("GPT-2".to_owned(), file(bytes(), json!(null), byte_level(true, false))),
        ("GPT-2 with a space first".to_owned(), file(bytes(), json!(null), byte_level(true, true))),
        ("GPT-2, spelt out".to_owned(), file(bytes(), json!(null), split_at(GPT_2))),
        ("Llama 3".to_owned(), file(bytes(), json!(null), split_at(LLAMA_3))),
    ];
    for scheme in ["first", "always", "never"] {
        for split in [false, true] {
            kinds.push((
                format!("Metaspace {scheme} {split}"),
                file(sentence_piece(), json!(null), metaspace(scheme, split)),
            ));
        }
    }
    kinds
}

/// Small tokenizers of all kinds, and the real tokenizers that are there.
fn tokenizers() -> &'static [(String, Tokenizer)] {
    static TOKENIZERS: OnceLock<Vec<(String, Tokenizer)>> = OnceLock::new();
    TOKENIZERS.get_or_init(|| {
        let built = kinds().into_iter().map(|(name, file)| (name, loaded(&file)));
        let real = [
            "data/tokenizers/llama2",
            "data/tokenizers/llama3",
            "models/stories260k",
            "models/wikitext-llama-8m",
        ];
        let real = real.iter().filter_map(|name| {
            let folder = shared(name)?;
            Some(((*name).to_owned(), Tokenizer::load(&folder).expect("load")))
        });
        built.chain(real).collect()
    })
}

/// Ids of a text pushed in portions of `portion` bytes or a little more, in pieces of `piece` bytes or more.
fn in_pieces(tokenizer: &Tokenizer, text: &str, portion: usize, piece: usize) -> Vec<u32> {
    let mut told = vec![0];
    let mut progress = |done| told.push(done);
    let mut encoder = Encoder::with_pieces(tokenizer, piece, &mut progress);
    let mut rest = text;
    while !rest.is_empty() {
        let mut end = portion.min(rest.len());
        while !rest.is_char_boundary(end) {
            end += 1;
        }
        let (next, behind) = rest.split_at(end);
        encoder.push(next).expect("push");
        rest = behind;
    }
    let ids = encoder.finish().expect("finish");
    assert!(told.is_sorted(), "{told:?}");
    assert_eq!(told.last(), Some(&(text.len() as u64)));
    ids
}

/// Texts that are all corners: what tokenizers treat in special ways, close together.
fn corners() -> impl Strategy<Value = String> {
    let bits = prop::sample::select(vec![
        "a",
        "b",
        "ab",
        "ba",
        "c",
        "cc",
        "de",
        "Q",
        "a b",
        "b a",
        "ab ab",
        " ",
        " ",
        "  ",
        "    ",
        "\n",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "▁",
        "▁▁",
        "é",
        "ſ",
        "ж",
        "字",
        "。",
        "か",
        "🦀",
        "\u{301}",
        "\u{a0}",
        "\u{2028}",
        "\u{85}",
        "0",
        "12",
        "3456",
        "'s",
        "'S",
        "'ſ",
        "'ll",
        "'",
        ".",
        ",",
        "…",
        ". ",
        "<s>",
        " <s>",
        "<s> ",
        "</s>",
        " </s> ",
        "<|eot_id|>",
        "<unk>",
        "<0x0A>",
        "<",
        ">",
        "|",
        "s",
        "S t",
        "e \n",
        " \n ",
        "x\ny",
        "字\n字",
        "。\n字",
        "a\n\nb",
        "a \n\n b",
    ]);
    prop::collection::vec(bits, 0..120).prop_map(|bits| bits.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_have_the_ids_of_the_whole(text in corners(), piece in 1usize..40, portion in 1usize..400) {
        for (name, tokenizer) in tokenizers() {
            let whole = tokenizer.encode_whole(&text).expect("encode");
            prop_assert_eq!(in_pieces(tokenizer, &text, portion, piece), whole, "{}: {:?}", name, text);
        }
    }
}

#[test]
fn every_known_kind_is_cut_and_gives_special_tokens_once() {
    let text = "ab a \n\nba ab<s> de de\nc cc 12 ".repeat(20);
    for (name, tokenizer) in tokenizers() {
        assert!(tokenizer.is_bounded(), "{name}");
        let rule = tokenizer.cuts().expect("cuts").rule;
        let cuts = (1..text.len()).filter_map(|from| rule.find(&text, from));
        assert!(cuts.count() > 20, "{name}");
    }
    let llama_2 = loaded(&file(sentence_piece(), prepend_and_replace(), json!(null)));
    let ids = in_pieces(&llama_2, &"ab de ".repeat(1000), 100, 10);
    assert_eq!(ids[0], 1);
    assert_eq!(ids.iter().filter(|id| **id == 1).count(), 1);
}

#[test]
fn special_tokens_of_the_configuration_stand_around_all_pieces() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = file(sentence_piece(), prepend_and_replace(), json!(null));
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("write");
    let config =
        r#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false, "add_eos_token": true}"#;
    fs::write(folder.path().join("tokenizer_config.json"), config).expect("write");
    let tokenizer = Tokenizer::load(folder.path()).expect("load");
    let text = "ab de ".repeat(100);
    let ids = in_pieces(&tokenizer, &text, 1000, 10);
    assert_eq!(ids, tokenizer.encode_whole(&text).expect("encode"));
    assert!(!ids.contains(&1) && ids.last() == Some(&2), "{ids:?}");
}

/// A change to a `tokenizer.json`.
type Change = Box<dyn Fn(&mut Value)>;

#[test]
fn a_tokenizer_that_is_not_proven_to_be_safe_is_not_cut() {
    let rule = |file: &Value| {
        let read = tokenizers::Tokenizer::from_bytes(file.to_string()).expect("a tokenizer");
        CutRule::of(&read)
    };
    let added = |content: &'static str| -> Change {
        Box::new(move |file: &mut Value| file["added_tokens"][3]["content"] = json!(content))
    };
    let word = |token: &'static str| -> Change {
        Box::new(move |file: &mut Value| file["model"]["vocab"][token] = json!(999))
    };
    let set = |key: &'static str, value: Value| -> Change {
        Box::new(move |file: &mut Value| file["model"][key] = value.clone())
    };
    let llama_2 = file(sentence_piece(), prepend_and_replace(), json!(null));
    let without_space: Change = Box::new(|file| {
        let mut vocab = json!({});
        vocab["<unk>"] = json!(0);
        file["model"]["vocab"] = vocab;
        file["model"]["merges"] = json!([]);
    });
    for (what, change) in [
        ("a token reaches over a space", word("b▁a")),
        ("words that are tokens are not merged", set("ignore_merges", json!(true))),
        ("merges are left out by chance", set("dropout", json!(0.1))),
        ("the first part of a word is another", set("continuing_subword_prefix", json!("##"))),
        ("the last part of a word is another", set("end_of_word_suffix", json!("</w>"))),
        ("an unknown character is a space", set("unk_token", json!("▁"))),
        ("a space is unknown", without_space),
        ("an added token has a space inside", added("<a b>")),
        ("an added token ends with a letter", added("|a")),
        ("an added token begins with a letter", added("a|")),
        ("an added token is a space", added("▁")),
        ("an added token is white space", added("|\n")),
    ] {
        let mut changed = llama_2.clone();
        change(&mut changed);
        // Affixes are part of the merged tokens' names, which these small models do not have.
        if changed["model"]["continuing_subword_prefix"].is_string()
            || changed["model"]["end_of_word_suffix"].is_string()
        {
            changed["model"]["merges"] = json!([]);
        }
        assert_eq!(rule(&changed), None, "{what}");
    }
    assert!(rule(&llama_2).is_some());
    for (what, normalizer, pre_tokenizer) in [
        (
            "the order is another",
            json!({"type": "Sequence", "normalizers": [replace(), {"type": "Prepend", "prepend": "▁"}]}),
            json!(null),
        ),
        ("another normalizer", json!({"type": "NFC"}), byte_level(true, false)),
        ("no pattern", json!(null), byte_level(false, false)),
        ("an unknown pattern", json!(null), split_at(r"\s+")),
        ("nothing at all", json!(null), json!(null)),
    ] {
        assert_eq!(rule(&file(bytes(), normalizer, pre_tokenizer)), None, "{what}");
    }
}

#[test]
fn a_tokenizer_without_a_rule_encodes_the_whole() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    assert!(!tokenizer.is_bounded());
    let text = "ab cd ".repeat(50);
    assert_eq!(in_pieces(&tokenizer, &text, 7, 3), tokenizer.encode_whole(&text).expect("encode"));
    // A rule, but no place: one word.
    let tokenizer = loaded(&file(bytes(), json!(null), split_at(LLAMA_3)));
    let text = "ab".repeat(500);
    assert_eq!(in_pieces(&tokenizer, &text, 7, 3), tokenizer.encode_whole(&text).expect("encode"));
}

#[test]
fn letters_at_cuts_are_letters_to_the_patterns() {
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};
    // `Lone` cuts before a letter after "." and a newline: what is cut there tells which characters count.
    let rule = loaded(&file(bytes(), json!(null), split_at(LLAMA_3))).cuts().expect("cuts").rule;
    let letters: String =
        ('\u{21}'..='\u{2ffff}').filter(|c| rule.find(&format!(".\n{c}"), 1).is_some()).collect();
    assert!(letters.chars().count() > 32_000);
    let pattern = SplitPattern::Regex(r"\p{L}+".to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Removed, false).expect("a pattern");
    let mut text = PreTokenizedString::from(letters.as_str());
    split.pre_tokenize(&mut text).expect("split");
    // All of it is one match, which was removed.
    let left =
        text.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::Byte);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn real_texts_in_pieces_have_the_ids_of_the_whole() {
    for name in ["llama2", "llama3"] {
        let Some(folder) = shared(&format!("data/tokenizers/{name}")) else {
            return;
        };
        let tokenizer = Tokenizer::load(&folder).expect("load");
        for file in ["wiki.test.raw", "wiki.valid.raw", "wiki.train.head1m.raw"] {
            let Some(path) = shared(&format!("data/wikitext2/{file}")) else {
                return;
            };
            let text = fs::read_to_string(path).expect("read");
            let whole = digest::of_ids(&tokenizer.encode_whole(&text).expect("encode"));
            for piece in [4 << 10, 64 << 10, 1 << 20] {
                let ids = in_pieces(&tokenizer, &text, 1 << 20, piece);
                assert_eq!(digest::of_ids(&ids), whole, "{name}, {file}, {piece}");
            }
        }
    }
}

#[test]
fn progress_counts_kib_of_text() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = loaded(&file(bytes(), json!(null), split_at(LLAMA_3)));
    let path = folder.path().join("a.txt");
    // 300,000 bytes are 292.97 KiB.
    fs::write(&path, "ab c\n".repeat(60_000)).expect("write");
    let events = RecordedEvents::default();
    let dataset = spec(&path.display().to_string());
    let none = TextCache::disabled();
    evaluation(&dataset, &tokenizer, 8, None, &none, &events).expect("evaluation");
    let (steps, done) = events.progress("tokenize text", "KiB");
    assert_eq!(steps, 293);
    assert!(done.len() > 10 && done.is_sorted(), "{done:?}");
    assert_eq!(done.last(), Some(&293));
}
