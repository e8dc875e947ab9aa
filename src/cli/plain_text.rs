//! Text that a terminal may show: no control characters of models, recipes, texts and file names reach it.
//!
//! An escape sequence in the name of a tensor could change the title of a window or hide lines; a bidirectional override reorders
//! letters. So everything that the console prints passes [`visible`]: messages, tables, and JSON, where the escapes mean the same
//! characters. Text that `prune generate` writes is data where standard output is a file or a pipe, and stays as it is there. On a
//! terminal it passes [`visible`].

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt::Write as _;

/// The text with `\u001b` in place of such a character; line feeds and tabs stay.
pub(super) fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match is_hidden(character) {
            // Writing to a String cannot fail.
            true => drop(write!(shown, "\\u{:04x}", u32::from(character))),
            false => shown.push(character),
        }
    }
    Cow::Owned(shown)
}

/// Controls of ASCII and ISO 6429, separators of lines, and controls of the direction of text (Unicode's UAX 9).
fn is_hidden(character: char) -> bool {
    match character {
        '\n' | '\t' => false,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            true
        }
        _ => character.is_control(),
    }
}

/// An argument that is not UTF-8, with `\xff` in place of its wrong bytes.
pub(super) fn with_bytes(argument: &OsStr) -> String {
    let mut shown = String::new();
    for chunk in argument.as_encoded_bytes().utf8_chunks() {
        shown += chunk.valid();
        for byte in chunk.invalid() {
            // Writing to a String cannot fail.
            let _ = write!(shown, "\\x{byte:02x}");
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_text_stays() {
        for (text, expected) in [
            ("a\tb\nc", "a\tb\nc"),
            ("Grüße, 世界 – 😀", "Grüße, 世界 – 😀"),
            ("\x1b]0;pwn\x07/x", "\\u001b]0;pwn\\u0007/x"),
            ("\r\x7f\u{9b}31m", "\\u000d\\u007f\\u009b31m"),
            ("a\u{202e}b\u{2066}c", "a\\u202eb\\u2066c"),
            ("one\u{2028}line", "one\\u2028line"),
        ] {
            assert_eq!(visible(text), expected);
        }
    }

    #[test]
    fn json_means_the_same_characters() {
        let text = "\u{9b}31m \u{202e} \x7f \x1b";
        let json = serde_json::to_string(text).unwrap();
        let shown = visible(&json);
        assert!(!shown.contains(is_hidden), "{shown}");
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text);
    }

    #[cfg(unix)]
    #[test]
    fn wrong_bytes_are_shown() {
        use std::os::unix::ffi::OsStrExt;
        let argument = OsStr::from_bytes(b"out/\xff\xc3\xa4/x");
        assert_eq!(with_bytes(argument), "out/\\xff\u{e4}/x");
    }
}
