//! The front matter of a model card: the block of YAML between two lines `---` at its beginning.
//!
//! Only keys at the top level are read, with a value on their line or a list below. Everything else is passed over: cards
//! come from strangers. Values are written as JSON strings, which are YAML for every text.

use std::collections::BTreeMap;

use crate::failure::printable;

/// Bytes of a card that are read; front matters have a few hundred.
pub const LONGEST: usize = 64 << 10;

/// Characters of a value, and values of a list. What is longer is passed over.
const LONGEST_VALUE: usize = 300;
const LONGEST_LIST: usize = 100;

/// The understood entries, by key. A single value is a list of length 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FrontMatter(BTreeMap<String, Vec<String>>);

impl FrontMatter {
    /// Reads the beginning of a card; empty for a card without front matter.
    pub fn of(card: &[u8]) -> Self {
        let start = &card[..card.len().min(LONGEST)];
        let text = String::from_utf8_lossy(start);
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        match &lines[..] {
            ["---", rest @ ..] => match rest.iter().position(|line| *line == "---") {
                Some(end) => Self::of_lines(&rest[..end]),
                None => Self::default(),
            },
            _ => Self::default(),
        }
    }

    fn of_lines(lines: &[&str]) -> Self {
        let mut entries = BTreeMap::new();
        let is_content = |line: &&str| !line.is_empty() && !line.trim_start().starts_with('#');
        let mut lines = lines.iter().copied().filter(is_content).peekable();
        while let Some(line) = lines.next() {
            let mut below = Vec::new();
            // A list may stand at the same depth as its key.
            while let Some(next) = lines.next_if(|next| next.starts_with([' ', '\t', '-'])) {
                below.push(next);
            }
            let Some((key, value)) = entry(line) else {
                continue;
            };
            let values = match (value, &below[..]) {
                ("", below) => below.iter().map(|item| item_of(item)).collect(),
                (value, []) => values_of(value),
                // The value continues on the next lines.
                _ => None,
            };
            entries.remove(key);
            if let Some(values) = values.filter(|v| (1..=LONGEST_LIST).contains(&v.len())) {
                entries.insert(key.to_string(), values);
            }
        }
        Self(entries)
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

/// Key and rest of a line `key: value`.
fn entry(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once(':')?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    let is_key = !key.is_empty() && key.chars().all(is_plain);
    (is_key && (value.is_empty() || value.starts_with([' ', '\t']))).then(|| (key, value.trim()))
}

/// A line `- value` of a list.
fn item_of(line: &str) -> Option<String> {
    let item = line.trim_start().strip_prefix('-')?;
    item.starts_with([' ', '\t']).then(|| scalar(item)).flatten()
}

/// A value, or a list in brackets.
fn values_of(value: &str) -> Option<Vec<String>> {
    match value.strip_prefix('[') {
        None => scalar(value).map(|value| vec![value]),
        Some(list) => {
            let list = list.strip_suffix(']')?.trim().trim_end_matches(',');
            list.split(',').map(scalar).collect()
        }
    }
}

/// A plain or quoted value; `None` for everything else, also for nothing and null.
fn scalar(text: &str) -> Option<String> {
    let text = text.trim();
    let (value, rest) = match text.chars().next()? {
        '"' => {
            let mut strings = serde_json::Deserializer::from_str(text).into_iter::<String>();
            let value = strings.next()?.ok()?;
            (value, &text[strings.byte_offset()..])
        }
        '\'' => single_quoted(&text[1..])?,
        _ => (plain(text)?.to_string(), ""),
    };
    let rest = rest.trim_start();
    let is_whole = rest.is_empty() || rest.starts_with('#');
    let fits = (1..=LONGEST_VALUE).contains(&value.chars().count());
    (is_whole && fits).then_some(value)
}

/// The value of `a ''b'''` without its first quote, and the text after its last quote.
fn single_quoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut rest) = (String::new(), text);
    loop {
        let (part, after) = rest.split_once('\'')?;
        value.push_str(part);
        match after.strip_prefix('\'') {
            Some(more) => {
                value.push('\'');
                rest = more;
            }
            None => return Some((value, after)),
        }
    }
}

/// A value without quotes, and without the comment after it.
fn plain(text: &str) -> Option<&str> {
    let end = text.find(" #").unwrap_or(text.len());
    let value = text[..end].trim_end();
    let is_other = value.starts_with([
        '[', ']', '{', '}', '&', '*', '!', '|', '>', '@', '`', '%', '#', ',', '?', '"', '\'',
    ]) || value.starts_with("- ")
        || value.contains(": ")
        || value.ends_with(':')
        || matches!(value, "~" | "null" | "Null" | "NULL" | "-");
    (!is_other).then_some(value)
}

/// A text as a value of YAML on a single line: a JSON string that also escapes the characters that YAML does not take or takes as the
/// end of a line.
fn quoted(text: &str) -> String {
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
    fn unknown_forms_are_passed_over() {
        let long = "x".repeat(LONGEST_VALUE + 1);
        let many = "- a\n".repeat(LONGEST_LIST + 1);
        for value in [
            "",
            "null",
            "~",
            "|\n  mit",
            ">-\n  mit",
            "&a mit",
            "*a",
            "!!str mit",
            "{a: b}",
            "[a",
            "[a, {b: c}]",
            "[]",
            "\"open",
            "'open",
            "\"a\" b",
            "\"\\q\"",
            "a: b",
            "mit\n  and more",
            "\n  sub: mit",
            "\n- a: b",
            "\n- - a",
            "\n-a",
            "''",
            long.as_str(),
            &format!("\n{many}"),
        ] {
            let card = format!("---\nlanguage: en\nlicense: {value}\nlicense_name: x\n---\n");
            assert_eq!(get(&card, "license"), Vec::<String>::new(), "{value}");
            assert_eq!(get(&card, "language"), ["en"], "{value}");
            assert_eq!(get(&card, "license_name"), ["x"], "{value}");
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
