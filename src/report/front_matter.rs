//! The front matter of a model card: the block of YAML between two lines `---` at its beginning.
//!
//! Only texts and lists of texts at the top level are read. Everything else is passed over: cards come from strangers. Values are
//! written as JSON strings, which are YAML for every text.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_saphyr::options::DuplicateKeyPolicy;

use crate::failure::{Failure, blaming, printable};

/// Bytes of a card that are read; front matters have a few hundred.
pub const LONGEST: usize = 64 << 10;

/// Characters of a value, and values of a list. What is longer is passed over.
const LONGEST_VALUE: usize = 300;
const LONGEST_LIST: usize = 100;

/// The understood entries, by key. A single value is a list of length 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FrontMatter(BTreeMap<String, Vec<String>>);

#[derive(Deserialize)]
#[serde(untagged)]
enum CardValue {
    One(String),
    List(Vec<String>),
    Other(IgnoredAny),
}

impl FrontMatter {
    /// Reads the beginning of a card; empty for a card without front matter.
    pub fn of(card: &[u8]) -> Self {
        let start = &card[..card.len().min(LONGEST)];
        let text = String::from_utf8_lossy(start);
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        match &lines[..] {
            ["---", rest @ ..] => match rest.iter().position(|line| *line == "---") {
                Some(end) => Self::of_yaml(&rest[..end].join("\n")),
                None => Self::default(),
            },
            _ => Self::default(),
        }
    }

    fn of_yaml(text: &str) -> Self {
        let options = serde_saphyr::options! {
            duplicate_keys: DuplicateKeyPolicy::LastWins,
            leading_zero_numbers_as_strings: true,
            // `no` is a language.
            strict_booleans: true,
            with_snippet: false,
        };
        let unreadable = Failure::new("the front matter of a model card cannot be read");
        let read = blaming(unreadable, || serde_saphyr::from_str_with_options(text, options));
        let entries: BTreeMap<String, CardValue> = match read {
            Ok(Ok(entries)) => entries,
            _ => return Self::default(),
        };
        let understood = entries.into_iter().filter_map(|(key, value)| {
            let values = match value {
                CardValue::One(value) => vec![value],
                CardValue::List(values) => values,
                CardValue::Other(_) => return None,
            };
            let fits = |value: &String| (1..=LONGEST_VALUE).contains(&value.chars().count());
            let fit = (1..=LONGEST_LIST).contains(&values.len()) && values.iter().all(fits);
            fit.then_some((key, values))
        });
        Self(understood.collect())
    }

    /// The entries that both cards have, with equal values.
    #[must_use]
    pub fn shared_with(self, other: &Self) -> Self {
        let shared = self.0.into_iter().filter(|(key, values)| other.get(key) == values);
        Self(shared.collect())
    }

    /// The values of a key; empty without it.
    pub fn get(&self, key: &str) -> &[String] {
        self.0.get(key).map_or(&[], Vec::as_slice)
    }
}

/// An entry as it is written; empty without values.
pub(super) fn entry_of(key: &str, values: &[String]) -> String {
    match values {
        [] => String::new(),
        [one] => format!("{key}: {}\n", quoted(one)),
        several => list_of(key, several),
    }
}

/// An entry as a list, also of a single value; empty without values.
pub(super) fn list_of(key: &str, values: &[String]) -> String {
    if values.is_empty() {
        return String::new();
    }
    let items = values.iter().map(|value| format!("- {}\n", quoted(value)));
    format!("{key}:\n{}", items.collect::<String>())
}

/// A text as a value of YAML on a single line: a JSON string that also escapes the characters that YAML does not take or takes as the
/// end of a line.
pub(super) fn quoted(text: &str) -> String {
    let json = serde_json::Value::from(text).to_string();
    let is_plain = |c: char| {
        !matches!(
            c,
            '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}'
        )
    };
    let mut quoted = String::with_capacity(json.len());
    for c in json.chars() {
        if is_plain(c) {
            quoted.push(c);
        } else {
            quoted += &format!("\\u{:04x}", u32::from(c));
        }
    }
    quoted
}

/// A text as code in Markdown, also within a table: on a single line, without characters that end the code or the cell.
pub(super) fn code(text: &str) -> String {
    let text = printable(text).replace('`', "'").replace('|', "\\|");
    format!("`{text}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(card: &str, key: &str) -> Vec<String> {
        FrontMatter::of(card.as_bytes()).get(key).to_vec()
    }

    #[test]
    fn values_lists_quotes_and_comments_are_read() {
        let card = "\u{feff}---\r\n# about\r\nlicense: llama2 # of Meta\r\nlanguage:\r\n- en\r\n- 'n''o'\r\n\
            tags: [a, \"b\\u0041\"]\r\nlicense_link: \"https://x/y#z\"\r\nmodel-index:\r\n- name: x\r\n  results: []\r\n\
            base_model:\r\n  - a/b\r\n---\r\nlicense: mit\r\n";
        assert_eq!(get(card, "license"), ["llama2"]);
        assert_eq!(get(card, "language"), ["en", "n'o"]);
        assert_eq!(get(card, "tags"), ["a", "bA"]);
        assert_eq!(get(card, "license_link"), ["https://x/y#z"]);
        assert_eq!(get(card, "base_model"), ["a/b"]);
        assert_eq!(get(card, "model-index"), Vec::<String>::new());
    }

    #[test]
    fn other_forms_are_passed_over_and_what_is_no_yaml_is_no_front_matter() {
        let long = "x".repeat(LONGEST_VALUE + 1);
        let many = "- a\n".repeat(LONGEST_LIST + 1);
        for value in [
            "",
            "null",
            "~",
            "true",
            "{a: b}",
            "[a, {b: c}]",
            "[]",
            "\n  sub: mit",
            "\n- a: b",
            "\n- - a",
            "''",
            long.as_str(),
            &format!("\n{many}"),
        ] {
            let card = format!("---\nlanguage: en\nlicense: {value}\nlicense_name: x\n---\n");
            assert_eq!(get(&card, "license"), Vec::<String>::new(), "{value}");
            assert_eq!(get(&card, "language"), ["en"], "{value}");
            assert_eq!(get(&card, "license_name"), ["x"], "{value}");
        }
        for (value, text) in [
            ("!!str mit", "mit"),
            ("mit\n  and more", "mit and more"),
            (">-\n  mit\n  or apache", "mit or apache"),
            ("no", "no"),
        ] {
            assert_eq!(get(&format!("---\nlicense: {value}\n---\n"), "license"), [text]);
        }
        for value in ["*a", "[a", "\"open", "'open", "\"a\" b", "\"\\q\"", "a: b"] {
            let card = format!("---\nlanguage: en\nlicense: {value}\n---\n");
            assert_eq!(FrontMatter::of(card.as_bytes()), FrontMatter::default(), "{value}");
        }
        // The last value counts, and a form that is not understood is no reason to trust the first.
        assert_eq!(get("---\nlicense: a\nlicense: b\n---\n", "license"), ["b"]);
        assert!(get("---\nlicense: a\nlicense: {}\n---\n", "license").is_empty());
    }

    #[test]
    fn a_block_without_its_end_or_its_beginning_is_none() {
        let far = format!("---\nlicense: mit\n{}---\n", "# filler\n".repeat(LONGEST / 9));
        for card in [
            "",
            "---",
            "---\nlicense: mit",
            "license: mit\n---\n",
            "--- \u{0}\nlicense: mit\n---\n",
            &far,
        ] {
            assert_eq!(FrontMatter::of(card.as_bytes()), FrontMatter::default());
        }
    }

    #[test]
    fn bytes_that_are_no_text_do_not_matter() {
        let card = b"---\nlicense: m\xffit\nlanguage: en\n---\n\xfe";
        assert_eq!(FrontMatter::of(card).get("language"), ["en"]);
        // Every cut of a card, and every byte in each place, is read without a panic.
        let card =
            b"---\nlicense: \"a\xc3\xa9\\\"\" # x\nlanguage: ['e', \xe2\x80\xa8]\n- z\n---\n";
        for at in 0..card.len() {
            FrontMatter::of(&card[..at]);
            for byte in 0..=u8::MAX {
                let mut changed = card.to_vec();
                changed[at] = byte;
                FrontMatter::of(&changed);
            }
        }
    }

    #[test]
    fn a_quoted_value_is_one_line_of_json() {
        let hostile = "a\"b\\\n---\nlicense: mit\u{85}\u{2028}\u{7f}\u{feff}é: #";
        let yaml = quoted(hostile);
        assert_eq!(serde_json::from_str::<String>(&yaml).unwrap(), hostile);
        assert!(yaml.chars().all(|c| c == 'é' || (' '..='~').contains(&c)), "{yaml}");
        assert_eq!(quoted("2:4"), "\"2:4\"");
        let card = format!("---\nlicense: {yaml}\n---\n");
        assert_eq!(get(&card, "license"), [hostile]);
    }

    #[test]
    fn code_cannot_leave_its_cell() {
        assert_eq!(code("a`b|c\nd\u{1b}"), "`a'b\\|c\\nd\\u{1b}`");
    }
}
