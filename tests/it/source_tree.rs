//! The files of `src` as text and as tokens, for the tests of code rules.

use std::fs;
use std::path::{Path, PathBuf};

/// One source file.
pub(crate) struct Source {
    /// Below `src`, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Every file of `src`, sorted by path.
pub(crate) fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut folders, mut sources) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).expect("the source tree can be listed");
        for path in entries.map(|entry| entry.expect("the source tree can be listed").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let below: PathBuf = path.strip_prefix(&root).expect("found below the root").into();
                let parts: Vec<_> =
                    below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
                let text = fs::read_to_string(&path).expect("source is UTF-8");
                sources.push(Source { path: parts.join("/"), text });
            }
        }
    }
    sources.sort_by(|one, other| one.path.cmp(&other.path));
    assert!(sources.len() > 50, "the tree was not found: {} files", sources.len());
    sources
}

impl Source {
    /// The modules the file is: `["pruning", "wanda"]`; a folder's `mod.rs` is the folder. Empty for the crate's roots.
    pub(crate) fn modules(&self) -> Vec<&str> {
        let path = self.path.strip_suffix(".rs").unwrap_or(&self.path);
        if matches!(path, "main" | "lib") {
            return Vec::new();
        }
        path.strip_suffix("/mod").unwrap_or(path).split('/').collect()
    }
}

/// Words, numbers, `::` and single marks of Rust source; comments, strings and characters are dropped.
pub(crate) fn tokens(text: &str) -> Vec<&str> {
    let bytes = text.as_bytes();
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80;
    let (mut tokens, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let rest = &text[at..];
        if rest.starts_with("//") {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with("/*") {
            at += rest.find("*/").map_or(rest.len(), |end| end + 2);
        } else if let Some(length) = literal(rest) {
            at += length;
        } else if is_word(bytes[at]) {
            let length = rest.bytes().position(|byte| !is_word(byte)).unwrap_or(rest.len());
            tokens.push(&rest[..length]);
            at += length;
        } else {
            let length = if rest.starts_with("::") { 2 } else { 1 };
            if !bytes[at].is_ascii_whitespace() {
                tokens.push(&rest[..length]);
            }
            at += length;
        }
    }
    tokens
}

/// The length of the string or character that `rest` begins with; a lifetime's quote is none.
fn literal(rest: &str) -> Option<usize> {
    let prefix = rest.bytes().take_while(|byte| matches!(byte, b'b' | b'c' | b'r')).count();
    let hashes = rest[prefix..].bytes().take_while(|&byte| byte == b'#').count();
    let body = &rest[prefix + hashes..];
    if body.starts_with('"') && prefix <= 2 {
        let is_raw = rest[..prefix].ends_with('r');
        if is_raw {
            let end = format!("\"{}", "#".repeat(hashes));
            return body[1..].find(&end).map(|found| prefix + hashes + 1 + found + end.len());
        }
        if hashes == 0 {
            return quoted(body, '"').map(|length| prefix + length);
        }
    }
    let character = &rest[usize::from(rest.starts_with("b'"))..];
    if character.starts_with('\'') {
        let mut characters = character.chars().skip(1);
        let (first, second) = (characters.next()?, characters.next()?);
        if first == '\\' || second == '\'' {
            return quoted(character, '\'').map(|length| length + (rest.len() - character.len()));
        }
    }
    None
}

/// The length of a literal that begins and ends with `quote`.
fn quoted(text: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    text.char_indices().skip(1).find_map(|(at, character)| {
        let ends = character == quote && !is_escaped;
        is_escaped = character == '\\' && !is_escaped;
        ends.then_some(at + 1)
    })
}

/// Tokens outside modules for tests, and the modules for tests that are files of their own, below `modules`.
pub(crate) fn without_tests<'a>(modules: &[&str], text: &'a str) -> (Vec<&'a str>, Vec<String>) {
    let all = tokens(text);
    let (mut kept, mut files, mut at) = (Vec::new(), Vec::new(), 0);
    while at < all.len() {
        let is_cfg = all[at..].starts_with(&["#", "[", "cfg", "("]);
        let end = all[at..].iter().position(|token| *token == "]");
        if let (true, Some(end)) = (is_cfg, end)
            && all[at..at + end].contains(&"test")
            && all.get(at + end + 1) == Some(&"mod")
        {
            at += end + 3;
            if all.get(at) == Some(&";") {
                files.push([modules, &[all[at - 1]]].concat().join("/"));
            }
            let mut braces = 0usize;
            while let Some(&token) = all.get(at) {
                at += 1;
                braces = match token {
                    "{" => braces + 1,
                    "}" => braces - 1,
                    _ => braces,
                };
                if braces == 0 && matches!(token, "}" | ";") {
                    break;
                }
            }
        } else {
            kept.push(all[at]);
            at += 1;
        }
    }
    (kept, files)
}

#[test]
fn code_for_tests_is_told_apart() {
    let text = "#[cfg(test)] mod tests { fn f() { println!(); } } fn g() {} #[cfg(all(test, unix))] mod deep; mod h;";
    let (kept, files) = without_tests(&["data"], text);
    assert_eq!(kept.concat(), "fng(){}modh;");
    assert_eq!(files, ["data/deep"]);
}
