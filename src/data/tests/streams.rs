//! Text from tokens as they come, for both families of tokenizers: bytes, and words with byte fallback.

use super::pieces::{byte_level, bytes, file, loaded, prepend_and_replace, sentence_piece};
use super::*;
use proptest::prelude::*;

/// A tokenizer with a token per byte: byte b has the id of its stand-in.
fn of_bytes() -> Tokenizer {
    let mut json = file(bytes(), json!(null), byte_level(true, false));
    json["decoder"] = byte_level(true, false);
    loaded(&json)
}

/// A tokenizer in the manner of Llama 2.
fn of_words() -> Tokenizer {
    let mut json = file(sentence_piece(), prepend_and_replace(), json!(null));
    json["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    loaded(&json)
}

/// The ids of bytes: the four special tokens come first.
fn ids(text: &[u8]) -> Vec<u32> {
    text.iter().map(|&byte| 4 + u32::from(byte)).collect()
}

fn pushed(stream: &mut TextStream<'_>, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|&id| stream.push(id).unwrap()).collect()
}

#[test]
fn a_character_in_several_tokens_comes_whole() {
    let tokenizer = of_bytes();
    let mut stream = TextStream::after(&tokenizer, &[]).unwrap();
    let parts = pushed(&mut stream, &ids("aé🦀b".as_bytes()));
    assert_eq!(parts, ["a", "", "é", "", "", "", "🦀", "b"]);
    assert_eq!(stream.finish().unwrap(), "");
}

#[test]
fn half_a_character_at_the_end_is_a_replacement_character() {
    let tokenizer = of_bytes();
    let mut stream = TextStream::after(&tokenizer, &[]).unwrap();
    let parts = pushed(&mut stream, &ids(b"a\xf0\x9f"));
    assert_eq!(parts, ["a", "", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
}

#[test]
fn the_space_between_prompt_and_text_is_kept() {
    let tokenizer = of_words();
    let id = |token: &str| tokenizer.id_of(token).unwrap();
    let (a, de) = (id("▁a"), id("▁de"));
    let mut stream = TextStream::after(&tokenizer, &[a, de]).unwrap();
    assert_eq!(pushed(&mut stream, &[a, de]), [" a", " de"]);
    let mut alone = TextStream::after(&tokenizer, &[]).unwrap();
    assert_eq!(pushed(&mut alone, &[a, de]), ["a", " de"]);
}

#[test]
fn a_prompt_that_ends_within_a_character_continues_with_the_character() {
    let tokenizer = of_bytes();
    let mut stream = TextStream::after(&tokenizer, &ids(b"x\xc3")).unwrap();
    assert_eq!(pushed(&mut stream, &ids(b"\xa9y")), ["é", "y"]);
}

#[test]
fn special_tokens_and_unknown_ids_have_no_text_and_do_not_separate_words() {
    let tokenizer = of_words();
    let id = |token: &str| tokenizer.id_of(token).unwrap();
    let (a, end, unknown) = (id("▁a"), id("</s>"), 100_000);
    let mut stream = TextStream::after(&tokenizer, &[]).unwrap();
    let parts = pushed(&mut stream, &[end, a, end, unknown, a]);
    assert_eq!(parts, ["", "a", "", "", " a"]);
    assert_eq!(pushed(&mut stream, &[end; 1000]).concat(), "");
    assert_eq!(stream.push(a).unwrap(), " a");
}

#[test]
fn bytes_that_spoil_a_character_already_shown_are_given_out_alone() {
    let tokenizer = of_words();
    let byte = |byte: u8| tokenizer.id_of(&format!("<0x{byte:02X}>")).unwrap();
    let a = tokenizer.id_of("▁a").unwrap();
    let mut stream = TextStream::after(&tokenizer, &[]).unwrap();
    // The decoder makes C3 A9 "é", but C3 A9 80 three replacement characters.
    let parts = pushed(&mut stream, &[byte(0xc3), byte(0xa9), byte(0x80), a, a]);
    assert_eq!(parts, ["", "é", "", "\u{fffd} a", " a"]);
}

#[test]
fn bytes_that_never_become_a_character_are_given_out() {
    let tokenizer = of_bytes();
    let mut stream = TextStream::after(&tokenizer, &[]).unwrap();
    let parts = pushed(&mut stream, &ids(&[0xff; 40]));
    assert_eq!(parts.concat(), "\u{fffd}".repeat(32));
    assert_eq!(stream.finish().unwrap(), "\u{fffd}".repeat(8));
}

proptest! {
    #[test]
    fn real_text_is_never_cut(text in "\\PC{0,60}") {
        let tokenizer = of_bytes();
        let mut stream = TextStream::after(&tokenizer, &[]).unwrap();
        let mut parts = pushed(&mut stream, &ids_of(&tokenizer, &text));
        parts.push(stream.finish().unwrap());
        prop_assert_eq!(parts.concat(), text);
    }
}

/// The ids of a text without `<s>`.
fn ids_of(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_plain(text).unwrap()
}
