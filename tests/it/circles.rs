//! Circles of imports between the files of `src`: groups of files that reach each other through `use` and through paths.
//!
//! `pub use` hands a name on, and is an import of its file only if the file uses the name: a path is followed to the file that has the item.
//! Tests are left out.

use std::collections::{BTreeMap, BTreeSet};

use crate::source_tree::{Source, sources, without_tests};

/// The number of circles, and the files of the largest circle, at most. Both may only fall.
const CIRCLES: usize = 3;
const LARGEST: usize = 3;

/// The modules of a file, and the names below them: `["job", "settle"]`.
type ModulePath = Vec<String>;

/// Paths that a file names.
#[derive(Debug, Default)]
struct Names {
    /// Paths it imports, or uses in place.
    imported: Vec<ModulePath>,
    /// Names it hands on, with their paths.
    handed_on: Vec<(String, ModulePath)>,
}

impl Names {
    /// Counts names that the file hands on and uses itself: they occur more often than in `pub use`.
    fn use_own(&mut self, tokens: &[&str]) {
        for (name, path) in &self.handed_on {
            let handed = self.handed_on.iter().filter(|(other, _)| other == name).count();
            if tokens.iter().filter(|token| *token == name).count() > handed {
                self.imported.push(path.clone());
            }
        }
    }

    /// The path of an imported name.
    fn path_of(&self, name: &str) -> Option<&ModulePath> {
        let is_it =
            |path: &&ModulePath| path.len() > 1 && path.last().is_some_and(|last| last == name);
        self.imported.iter().find(is_it)
    }
}

fn is_name(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// Adds the paths of a `use` tree that begins at `at`, with the name each has in the file. Returns the position after the tree.
fn tree(
    tokens: &[&str],
    mut at: usize,
    before: &[String],
    found: &mut Vec<(String, ModulePath)>,
) -> usize {
    let mut path = before.to_vec();
    loop {
        match tokens.get(at) {
            Some(&"::") => at += 1,
            Some(&"{") => {
                at += 1;
                while tokens.get(at).is_some_and(|token| *token != "}") {
                    at = match tokens[at] {
                        "," => at + 1,
                        _ => tree(tokens, at, &path, found),
                    };
                }
                return at + 1;
            }
            Some(&"self") if !path.is_empty() => at += 1,
            Some(&token) if is_name(token) && token != "as" => {
                path.push(token.to_string());
                at += 1;
            }
            Some(&"*") => at += 1,
            end => {
                let mut name = path.last().cloned().unwrap_or_default();
                if end == Some(&"as") {
                    name = tokens.get(at + 1).unwrap_or(&"").to_string();
                    at += 2;
                }
                found.push((name, path));
                return at;
            }
        }
    }
}

/// The paths of a file, as they are written.
fn names(tokens: &[&str]) -> Names {
    let mut names = Names::default();
    let mut at = 0;
    while at < tokens.len() {
        let before = if at == 0 { "" } else { tokens[at - 1] };
        match tokens[at] {
            "use" if before != "::" => {
                let mut found = Vec::new();
                at = tree(tokens, at + 1, &[], &mut found);
                match matches!(before, "pub" | ")") {
                    true => names.handed_on.extend(found),
                    false => names.imported.extend(found.into_iter().map(|(_, path)| path)),
                }
            }
            first if is_name(first) && before != "::" && tokens.get(at + 1) == Some(&"::") => {
                let mut path = vec![first.to_string()];
                // `pub(in crate::x)` is no import, and `for x in crate::x` is.
                let is_visibility = before == "in" && at >= 2 && tokens[at - 2] == "(";
                while tokens.get(at + 1) == Some(&"::")
                    && tokens.get(at + 2).is_some_and(|name| is_name(name))
                {
                    path.push(tokens[at + 2].to_string());
                    at += 2;
                }
                if !is_visibility {
                    names.imported.push(path);
                }
                at += 1;
            }
            _ => at += 1,
        }
    }
    names.use_own(tokens);
    names
}

/// All files by their modules.
struct Files(BTreeMap<ModulePath, Names>);

impl Files {
    fn new(sources: &[Source]) -> Self {
        let tests: BTreeSet<String> = sources
            .iter()
            .flat_map(|source| without_tests(&source.modules(), &source.text).1)
            .collect();
        let files = sources.iter().filter(|source| source.path != "main.rs").filter_map(|source| {
            let modules = source.modules();
            let is_test = (1..=modules.len()).any(|end| tests.contains(&modules[..end].join("/")));
            let (tokens, _) = without_tests(&modules, &source.text);
            let path = modules.iter().map(ToString::to_string).collect();
            (!is_test).then(|| (path, names(&tokens)))
        });
        Self(files.collect())
    }

    /// A path as seen from a file, from the root on; `None` for other crates and for names of the file itself.
    fn full_path(&self, file: &[String], path: &[String]) -> Option<ModulePath> {
        let levels = path.iter().take_while(|part| *part == "super").count();
        let (base, rest) = match path.first()?.as_str() {
            "crate" => (&[][..], &path[1..]),
            "self" => (file, &path[1..]),
            "super" => (file.get(..file.len().checked_sub(levels)?)?, &path[levels..]),
            first => {
                let module = [file, &[first.to_string()]].concat();
                if self.0.contains_key(&module) {
                    (file, path)
                } else {
                    // The first name may be an imported module.
                    let imported = self.0.get(file)?.path_of(first)?;
                    // `use glob::glob` names a crate.
                    if path.len() < 2 || imported[0] == first {
                        return None;
                    }
                    let imported = self.full_path(file, imported)?;
                    return Some([imported.as_slice(), &path[1..]].concat());
                }
            }
        };
        Some([base, rest].concat())
    }

    /// The file that has the item of a path.
    fn target(&self, mut path: ModulePath) -> Option<ModulePath> {
        for _ in 0..8 {
            let depth = (0..=path.len()).rev().find(|end| self.0.contains_key(&path[..*end]))?;
            let (file, rest) = path.split_at(depth);
            let handed = rest.first().and_then(|name| {
                let handed_on = self.0[file].handed_on.iter();
                handed_on
                    .filter(|(known, _)| known == name)
                    .find_map(|(_, path)| self.full_path(file, path))
            });
            match handed {
                Some(handed) => path = [handed.as_slice(), &rest[1..]].concat(),
                None => return Some(file.to_vec()),
            }
        }
        None
    }

    fn imports(&self) -> BTreeMap<&ModulePath, BTreeSet<ModulePath>> {
        let files = self.0.iter().map(|(file, names)| {
            let paths = names.imported.iter().filter_map(|path| self.full_path(file, path));
            let targets = paths.filter_map(|path| self.target(path));
            (file, targets.filter(|target| target != file).collect())
        });
        files.collect()
    }

    /// The groups of two files and more that reach each other, the largest first.
    fn circles(&self) -> Vec<Vec<&ModulePath>> {
        let imports = self.imports();
        let reached = |start| {
            let (mut seen, mut left) = (BTreeSet::new(), vec![start]);
            while let Some(file) = left.pop() {
                for next in &imports[file] {
                    let (next, _) = self.0.get_key_value(next).expect("targets are files");
                    if seen.insert(next) {
                        left.push(next);
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<_, BTreeSet<&ModulePath>> =
            self.0.keys().map(|file| (file, reached(file))).collect();
        let mut circles: BTreeSet<Vec<&ModulePath>> = BTreeSet::new();
        for (file, from_here) in reached.iter().filter(|(file, seen)| seen.contains(*file)) {
            let back = from_here.iter().filter(|other| reached[*other].contains(file));
            circles.insert(back.copied().collect());
        }
        let mut circles: Vec<_> = circles.into_iter().collect();
        circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
        circles
    }
}

#[test]
fn few_files_import_each_other_in_circles() {
    let sources = sources();
    let files = Files::new(&sources);
    let (imports, circles) = (files.imports(), files.circles());
    let mut shown = String::new();
    for circle in &circles {
        shown += &format!("\n{} files", circle.len());
        for file in circle {
            let inside = imports[file].iter().filter(|target| circle.contains(target));
            let inside: Vec<String> = inside.map(|target| target.join("::")).collect();
            shown += &format!("\n    {} imports {}", file.join("::"), inside.join(", "));
        }
    }
    let (count, largest) = (circles.len(), circles.first().map_or(0, Vec::len));
    assert!(count <= CIRCLES && largest <= LARGEST, "{count} circles of files:{shown}");
}

#[test]
fn a_circle_is_seen_through_names_that_are_handed_on() {
    let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
    let sources = [
        source("lib.rs", "pub mod a; pub mod b;"),
        source("a/mod.rs", "mod deep; pub use deep::{Thing as Known};"),
        source("a/deep.rs", "use crate::b; fn f() { b::go(); } pub struct Thing;"),
        source("b.rs", "use crate::a::Known; #[cfg(test)] mod tests { use crate::c::X; }"),
        source("c.rs", "use super::b::go;"),
    ];
    let files = Files::new(&sources);
    let circles = files.circles();
    let names: Vec<String> = circles[0].iter().map(|file| file.join("::")).collect();
    assert_eq!((circles.len(), names), (1, vec!["a::deep".to_string(), "b".to_string()]));
}
