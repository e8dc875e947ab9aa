//! The import table: the rooms that each room may import. docs/dev/architecture.md shows the same table.
//!
//! Imports are found as paths: `crate::room…`, the entries of `use crate::{…}`, and chains of `super` that leave a room.
//! Comments and strings do not count. Tests inside the source keep the same table.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::source_tree::{Source, sources, tokens};

/// The leaves: rooms that every room may import.
const LEAVES: &[&str] = &["bytes", "disk", "failure", "input"];

/// Room → what it may import besides itself and [`LEAVES`]. A room that is missing here is refused: a new one needs a line
/// here and in docs/dev/architecture.md.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("failure", &[]),
    ("bytes", &[]),
    ("input", &[]),
    ("disk", &[]),
    ("run", &[]),
    ("linalg", &[]),
    ("hub", &["run"]),
    ("checkpoint", &["run"]),
    ("data", &["run"]),
    ("placement", &["run"]),
    ("model", &["checkpoint", "linalg", "run"]),
    ("pruning", &["linalg"]),
    ("quantized", &["checkpoint", "linalg", "run"]),
    ("packed", &["checkpoint", "linalg", "run"]),
    ("adapter", &["checkpoint", "linalg", "run"]),
    ("ranks", &["run"]),
    ("runtime", &["model", "checkpoint", "placement", "run", "linalg", "ranks"]),
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
            "ranks",
            "runtime",
        ],
    ),
    (
        "recovery",
        &["run", "linalg", "checkpoint", "data", "model", "pruning", "runtime", "pipeline"],
    ),
    ("tasks", &["run", "data", "model"]),
    ("eval", &["run", "linalg", "checkpoint", "data", "placement", "model", "runtime", "tasks"]),
    ("generation", &["run", "linalg", "checkpoint", "data", "placement", "model", "runtime"]),
    (
        "merging",
        &[
            "run",
            "linalg",
            "checkpoint",
            "data",
            "placement",
            "model",
            "pruning",
            "ranks",
            "runtime",
            "pipeline",
            "adapter",
        ],
    ),
    ("demo", &[]),
    ("synthetic", &["run", "linalg", "checkpoint", "model"]),
    ("report", &["run"]),
    (
        "settings",
        &[
            "run",
            "checkpoint",
            "data",
            "placement",
            "pruning",
            "runtime",
            "pipeline",
            "merging",
            "generation",
            "quantized",
            "packed",
            "recovery",
            // Types of flags.
            "adapter",
            "tasks",
        ],
    ),
    (
        "job",
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
            "merging",
            "adapter",
            "quantized",
            "packed",
            "ranks",
            "recovery",
            "demo",
            "report",
            "settings",
            "tasks",
        ],
    ),
    (
        "selftest",
        &[
            "run",
            "linalg",
            "checkpoint",
            "data",
            "demo",
            "synthetic",
            "model",
            "pruning",
            "runtime",
            "pipeline",
            "settings",
            "job",
        ],
    ),
    (
        "cli",
        &[
            "run",
            "report",
            "settings",
            "job",
            "selftest",
            // Types that flags are parsed into.
            "checkpoint",
            "data",
            "placement",
            "pruning",
            "pipeline",
            "ranks",
            "runtime",
            "generation",
            "merging",
            "hub",
            "quantized",
            "recovery",
            // Hidden commands.
            "demo",
            "synthetic",
            "linalg",
        ],
    ),
];

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
        // `pub(crate)` and `pub(in super::x)` are no imports.
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
            found.insert(if is_module { name.to_string() } else { "(root)".to_string() });
        }
        _ => {}
    }
}

/// The forbidden imports of one file.
fn forbidden(source: &Source) -> Vec<String> {
    let modules = source.modules();
    let Some(&room) = modules.first() else {
        return Vec::new();
    };
    let Some((_, may)) = MAY_IMPORT.iter().find(|(name, _)| *name == room) else {
        return vec![format!("src/{}: the room `{room}` is not in the table", source.path)];
    };
    // `bytes` and `disk` return failures; `failure` imports nothing.
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
    let table: BTreeSet<String> = MAY_IMPORT.iter().map(|(room, _)| room.to_string()).collect();
    assert_eq!(rooms, table);
    for (room, may) in MAY_IMPORT {
        for name in *may {
            assert!(table.contains(*name), "`{room}` may import `{name}`, which does not exist");
            let (_, back) = MAY_IMPORT.iter().find(|(other, _)| other == name).unwrap();
            assert!(!back.contains(room), "`{room}` and `{name}` may import each other");
        }
    }
}

#[test]
fn the_documentation_shows_the_same_table() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/dev/architecture.md");
    let page = fs::read_to_string(page).expect("the page is in the repository");
    let shown: Vec<(String, Vec<String>)> = page
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
            let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(String::from).collect();
            let room: Vec<String> = names(cells[0]);
            (room[0].clone(), names(cells[2]))
        })
        .collect();
    let table: Vec<(String, Vec<String>)> = MAY_IMPORT
        .iter()
        .map(|(room, may)| (room.to_string(), may.iter().map(ToString::to_string).collect()))
        .collect();
    assert_eq!(shown, table);
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
        seen(&file, "use crate::{bytes::{ByteSize, x}, cli, data::{self, y::{z}},};"),
        ["bytes", "cli", "data"]
    );
    assert_eq!(seen(&file, "use crate :: {\n  eval as e\n};"), ["eval"]);
    assert_eq!(seen(&file, "use super::mask::Mask; use super::super::model::Head;"), ["model"]);
    assert_eq!(
        seen(&file, "mod tests { use super::super::target; use super::super::super::cli; }"),
        ["cli"]
    );
    assert_eq!(seen(&file, "mod tests { mod deep {} } use super::super::cli;"), ["cli"]);
    assert_eq!(seen(&file, "use super::{mask, super::{report, x}};"), ["report", "x"]);
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
    let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
    assert_eq!(
        forbidden(&source("pruning/wanda.rs", "use crate::{linalg::x, model::Head};")),
        ["src/pruning/wanda.rs: `pruning` may not import `model`"]
    );
    assert_eq!(
        forbidden(&source("eval/mod.rs", "#[cfg(test)] mod tests { use crate::pruning::Mask; }")),
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
        ("pipeline/prune.rs", "use crate::{pruning::Mask, runtime::Clock};"),
        ("bytes.rs", "use crate::failure::Failure;"),
        ("main.rs", "use crate::anything;"),
    ] {
        assert_eq!(forbidden(&source(path, text)), Vec::<String>::new());
    }
}
