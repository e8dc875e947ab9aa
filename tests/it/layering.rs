//! The rules the source tree keeps: which room may import which (the table of docs/architecture.md, here as data), who
//! prints, where `unsafe` stands, how files begin and what they may not be called.
//!
//! Imports are found as paths: `crate::room…`, the entries of `use crate::{…}`, and chains of `super` that leave a room.
//! Comments and strings do not count. Tests inside the source keep the same table.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What every room may use: the leaves.
const LEAVES: &[&str] = &["bytes", "disk", "failure"];

/// Room → what it may import besides itself and [`LEAVES`]. A room that is missing here is refused: a new one needs a line
/// here and in docs/architecture.md.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("failure", &[]),
    ("bytes", &[]),
    ("disk", &[]),
    ("run", &[]),
    ("linalg", &[]),
    ("hub", &["run"]),
    ("checkpoint", &["run"]),
    ("data", &["run"]),
    ("placement", &["run"]),
    ("model", &["checkpoint", "linalg", "run"]),
    ("pruning", &["linalg"]),
    (
        "runtime",
        &["model", "checkpoint", "placement", "run", "linalg"],
    ),
    (
        "pipeline",
        &[
            "run",
            "linalg",
            "checkpoint",
            "data",
            "placement",
            "model",
            "pruning",
            "runtime",
        ],
    ),
    (
        "eval",
        &[
            "run",
            "linalg",
            "checkpoint",
            "data",
            "placement",
            "model",
            "runtime",
        ],
    ),
    (
        "generation",
        &[
            "run",
            "linalg",
            "checkpoint",
            "data",
            "placement",
            "model",
            "runtime",
        ],
    ),
    (
        "demo",
        &[
            "run",
            "linalg",
            "checkpoint",
            "data",
            "placement",
            "model",
            "runtime",
        ],
    ),
    ("report", &["run"]),
    (
        "cli",
        &[
            "run",
            "hub",
            "linalg",
            "checkpoint",
            "data",
            "placement",
            "model",
            "pruning",
            "runtime",
            "pipeline",
            "eval",
            "generation",
            "demo",
            "report",
        ],
    ),
];

/// Files in which `unsafe` is allowed; each block there says why it is sound.
const MAY_BE_UNSAFE: &[&str] = &[
    "linalg/matmul.rs",
    "linalg/product/amx.rs",
    "linalg/product/avx512.rs",
    "linalg/rectangles.rs",
    "runtime/engine/cuda.rs",
    "runtime/memory.rs",
];

/// Names that say nothing about what is inside.
const SAYS_NOTHING: &[&str] = &["utils", "util", "helpers", "helper", "common", "misc"];

/// One source file.
struct Source {
    /// Below `src`, with `/`.
    path: String,
    text: String,
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut folders, mut sources) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).expect("the source tree can be listed");
        for path in entries.map(|entry| entry.expect("the source tree can be listed").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let below: PathBuf = path
                    .strip_prefix(&root)
                    .expect("found below the root")
                    .into();
                let parts: Vec<_> = below
                    .iter()
                    .map(|part| part.to_string_lossy().into_owned())
                    .collect();
                let text = fs::read_to_string(&path).expect("source is UTF-8");
                sources.push(Source {
                    path: parts.join("/"),
                    text,
                });
            }
        }
    }
    sources.sort_by(|one, other| one.path.cmp(&other.path));
    assert!(
        sources.len() > 50,
        "the tree was not found: {} files",
        sources.len()
    );
    sources
}

impl Source {
    /// The modules the file is: `["pruning", "wanda"]`; a folder's `mod.rs` is the folder. Empty for the crate's roots.
    fn modules(&self) -> Vec<&str> {
        let path = self.path.strip_suffix(".rs").unwrap_or(&self.path);
        if matches!(path, "main" | "lib") {
            return Vec::new();
        }
        path.strip_suffix("/mod")
            .unwrap_or(path)
            .split('/')
            .collect()
    }
}

/// Words, numbers, `::` and single marks of Rust source; comments, strings and characters are dropped.
fn tokens(text: &str) -> Vec<&str> {
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
            let length = rest
                .bytes()
                .position(|byte| !is_word(byte))
                .unwrap_or(rest.len());
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
    let prefix = rest
        .bytes()
        .take_while(|byte| matches!(byte, b'b' | b'c' | b'r'))
        .count();
    let hashes = rest[prefix..]
        .bytes()
        .take_while(|&byte| byte == b'#')
        .count();
    let body = &rest[prefix + hashes..];
    if body.starts_with('"') && prefix <= 2 {
        let is_raw = rest[..prefix].ends_with('r');
        if is_raw {
            let end = format!("\"{}", "#".repeat(hashes));
            return body[1..]
                .find(&end)
                .map(|found| prefix + hashes + 1 + found + end.len());
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

/// The rooms named by `text`, a file that is the module `modules`. A use of the crate's root itself is `(root)`.
fn imports(modules: &[&str], text: &str) -> BTreeSet<String> {
    let tokens = tokens(text);
    let mut found = BTreeSet::new();
    // Inline modules: braces open when each began.
    let (mut inline, mut braces) = (Vec::new(), 0usize);
    for (at, &token) in tokens.iter().enumerate() {
        match token {
            "{" => {
                braces += 1;
                if at >= 2 && tokens[at - 2] == "mod" {
                    inline.push(braces);
                }
            }
            "}" => {
                if inline.last() == Some(&braces) {
                    inline.pop();
                }
                braces = braces.saturating_sub(1);
            }
            _ => {}
        }
        let is_start = at == 0 || tokens[at - 1] != "::";
        // `pub(crate)` and `pub(in super::x)` name nobody's contents.
        let is_visibility = at >= 2 && tokens[at - 1] == "(" && tokens[at - 2] == "pub";
        let is_followed = matches!(tokens.get(at + 1), Some(&"::" | &"as"));
        if is_start && !is_visibility && is_followed {
            match token {
                "crate" => below(&tokens, at + 1, 0, &mut found),
                "super" => below(&tokens, at, modules.len() + inline.len(), &mut found),
                _ => {}
            }
        }
    }
    found
}

/// Follows a path from the module `depth` levels below the crate's root; records what it names in the root.
fn below(tokens: &[&str], mut at: usize, mut depth: usize, found: &mut BTreeSet<String>) {
    if tokens.get(at) == Some(&"::") {
        at += 1;
    }
    while tokens.get(at) == Some(&"super") && depth > 0 {
        depth -= 1;
        at += 1 + usize::from(tokens.get(at + 1) == Some(&"::"));
    }
    match tokens.get(at) {
        Some(&"{") => {
            let (mut level, mut inside) = (0usize, at);
            while let Some(&token) = tokens.get(inside) {
                let begins = (token == "{" && level == 0) || (token == "," && level == 1);
                match token {
                    "{" => level += 1,
                    "}" => level -= 1,
                    _ => {}
                }
                if begins && tokens.get(inside + 1) != Some(&"}") {
                    below(tokens, inside + 1, depth, found);
                }
                if level == 0 {
                    return;
                }
                inside += 1;
            }
        }
        Some(&name) if depth == 0 => {
            let is_module = name.starts_with(|first: char| first.is_ascii_lowercase())
                && name != "self"
                && name != "as";
            found.insert(if is_module {
                name.to_string()
            } else {
                "(root)".to_string()
            });
        }
        _ => {}
    }
}

/// What is wrong with the imports of one file.
fn forbidden(source: &Source) -> Vec<String> {
    let modules = source.modules();
    let Some(&room) = modules.first() else {
        return Vec::new();
    };
    let Some((_, may)) = MAY_IMPORT.iter().find(|(name, _)| *name == room) else {
        return vec![format!(
            "src/{}: the room `{room}` is not in the table",
            source.path
        )];
    };
    // A leaf may not use the other leaf unless said so: `bytes` returns failures, `failure` knows nobody.
    let leaves: &[&str] = if room == "failure" { &[] } else { LEAVES };
    imports(&modules, &source.text)
        .into_iter()
        .filter(|name| {
            name != room && !may.contains(&name.as_str()) && !leaves.contains(&name.as_str())
        })
        .map(|name| format!("src/{}: `{room}` may not import `{name}`", source.path))
        .collect()
}

#[test]
fn every_room_imports_only_what_the_table_allows() {
    let wrong: Vec<String> = sources().iter().flat_map(forbidden).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_table_names_the_rooms_that_exist() {
    let rooms: BTreeSet<String> = sources()
        .iter()
        .filter_map(|source| source.modules().first().map(ToString::to_string))
        .collect();
    let table: BTreeSet<String> = MAY_IMPORT
        .iter()
        .map(|(room, _)| room.to_string())
        .collect();
    assert_eq!(rooms, table);
    for (room, may) in MAY_IMPORT {
        for name in *may {
            assert!(
                table.contains(*name),
                "`{room}` may import `{name}`, which does not exist"
            );
            let (_, back) = MAY_IMPORT.iter().find(|(other, _)| other == name).unwrap();
            assert!(
                !back.contains(room),
                "`{room}` and `{name}` may import each other"
            );
        }
    }
}

#[test]
fn the_checker_sees_imports_in_every_form() {
    let seen = |modules: &[&str], text: &str| -> Vec<String> {
        imports(modules, text).into_iter().collect()
    };
    let file = ["pruning", "wanda"];
    assert_eq!(seen(&file, "use crate::model::Head;"), ["model"]);
    assert_eq!(seen(&file, "fn f() { crate::runtime::go() }"), ["runtime"]);
    assert_eq!(
        seen(
            &file,
            "use crate::{bytes::{ByteSize, x}, cli, data::{self, y::{z}},};"
        ),
        ["bytes", "cli", "data"]
    );
    assert_eq!(seen(&file, "use crate :: {\n  eval as e\n};"), ["eval"]);
    assert_eq!(
        seen(
            &file,
            "use super::mask::Mask; use super::super::model::Head;"
        ),
        ["model"]
    );
    assert_eq!(
        seen(
            &file,
            "mod tests { use super::super::target; use super::super::super::cli; }"
        ),
        ["cli"]
    );
    assert_eq!(
        seen(&file, "mod tests { mod deep {} } use super::super::cli;"),
        ["cli"]
    );
    assert_eq!(
        seen(&file, "use super::{mask, super::{report, x}};"),
        ["report", "x"]
    );
    assert_eq!(seen(&["pruning"], "use super::model;"), ["model"]);
    assert_eq!(seen(&file, "use crate::*; use crate as me;"), ["(root)"]);
    assert_eq!(
        seen(
            &file,
            r##"// crate::a
            /* crate::b */ pub(crate) fn f<'a>(x: &'a str) { g("crate::c \" crate::d", '"', b'\'', r#"crate::e " "#) }"##
        ),
        Vec::<String>::new()
    );
}

#[test]
fn a_forbidden_import_is_refused_and_an_allowed_one_is_not() {
    let source = |path: &str, text: &str| Source {
        path: path.into(),
        text: text.into(),
    };
    assert_eq!(
        forbidden(&source(
            "pruning/wanda.rs",
            "use crate::{linalg::x, model::Head};"
        )),
        ["src/pruning/wanda.rs: `pruning` may not import `model`"]
    );
    assert_eq!(
        forbidden(&source(
            "eval/mod.rs",
            "#[cfg(test)] mod tests { use crate::pruning::Mask; }"
        )),
        ["src/eval/mod.rs: `eval` may not import `pruning`"]
    );
    assert_eq!(
        forbidden(&source("cellar/mod.rs", "")),
        ["src/cellar/mod.rs: the room `cellar` is not in the table"]
    );
    assert_eq!(
        forbidden(&source("failure.rs", "use crate::bytes::ByteSize;")),
        ["src/failure.rs: `failure` may not import `bytes`"]
    );
    for (path, text) in [
        (
            "pipeline/prune.rs",
            "use crate::{pruning::Mask, runtime::Clock};",
        ),
        ("bytes.rs", "use crate::failure::Failure;"),
        ("main.rs", "use crate::anything;"),
    ] {
        assert_eq!(forbidden(&source(path, text)), Vec::<String>::new());
    }
}

/// Tokens outside modules for tests, and the modules for tests that are files of their own, below `modules`.
fn without_tests<'a>(modules: &[&str], text: &'a str) -> (Vec<&'a str>, Vec<String>) {
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

#[test]
fn only_the_command_line_prints() {
    let sources = sources();
    let test_files: Vec<String> = sources
        .iter()
        .flat_map(|source| without_tests(&source.modules(), &source.text).1)
        .collect();
    for source in &sources {
        let modules = source.modules();
        let module = modules.join("/");
        let is_test = test_files
            .iter()
            .any(|test| module == *test || module.starts_with(&format!("{test}/")));
        if is_test || modules.first() == Some(&"cli") || source.path == "main.rs" {
            continue;
        }
        for pair in without_tests(&modules, &source.text).0.windows(2) {
            let prints = matches!(pair[0], "print" | "println" | "eprint" | "eprintln" | "dbg")
                && pair[1] == "!";
            assert!(
                !prints,
                "src/{} uses {}!; emit an event instead",
                source.path, pair[0]
            );
        }
    }
}

#[test]
fn unsafe_stands_only_where_it_is_argued_for() {
    for source in sources() {
        let has_unsafe = tokens(&source.text).contains(&"unsafe");
        let is_listed = MAY_BE_UNSAFE.contains(&source.path.as_str());
        assert_eq!(has_unsafe, is_listed, "src/{}", source.path);
        if has_unsafe {
            assert!(
                source.text.contains("// SAFETY: "),
                "src/{} does not say why",
                source.path
            );
        }
    }
}

#[test]
fn every_file_says_first_what_it_is_for() {
    for source in sources() {
        assert!(
            source.text.starts_with("//! "),
            "src/{} does not begin with `//! `",
            source.path
        );
    }
}

#[test]
fn no_name_says_nothing() {
    for source in sources() {
        for module in source.modules() {
            assert!(!SAYS_NOTHING.contains(&module), "src/{}", source.path);
        }
    }
}
