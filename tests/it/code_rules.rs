//! Rules that the source code keeps: the places of printing and of `unsafe`, the first line of a file, names, sizes of files
//! and functions, and the first words of comments.

use std::collections::{BTreeMap, BTreeSet};

use crate::source_tree::{Source, sources, tokens, without_tests};

/// Files in which `unsafe` is allowed; each block there says why it is sound.
const MAY_BE_UNSAFE: &[&str] = &[
    "linalg/expand.rs",
    "linalg/large_pages.rs",
    "linalg/matmul.rs",
    "linalg/one_token/avx2.rs",
    "linalg/one_token/avx512.rs",
    "linalg/one_token/ahead.rs",
    "linalg/one_token/kept.rs",
    "linalg/one_token/rows.rs",
    "linalg/product/amx.rs",
    "linalg/product/avx512.rs",
    "linalg/rectangles.rs",
    "model/on_device/kernels/launch.rs",
    "runtime/engine/cuda.rs",
    "runtime/memory.rs",
];

/// Names that say nothing about what is inside.
const SAYS_NOTHING: &[&str] = &["utils", "util", "helpers", "helper", "common", "misc"];

/// Words that do not begin a comment: a comment begins with a noun or a verb.
const QUESTION_WORDS: &[&str] =
    &["What", "Who", "Whose", "Whom", "Where", "How", "Whether", "Which", "When", "Why"];

/// The largest share of comments that may begin with one of [`QUESTION_WORDS`].
const QUESTIONS_AT_MOST: f64 = 0.02;

/// Words that make a reader look back for their noun.
const LOOKS_BACK: &[&str] =
    &["those", "another", "one", "ones", "other", "others", "behind", "that of"];

/// The most of these words in a thousand words of comment. Some are numbers or part of a name.
const LOOKING_BACK_AT_MOST: f64 = 4.0;

/// The largest number of lines of a file.
const FILE_LINES: usize = 500;

/// The largest number of lines of a function, and the functions that may have more because they are tables.
const FUNCTION_LINES: usize = 100;
const TABLES: &[&str] = &[];

/// The arguments of a function at most, and the functions that may have more. Their number may only fall.
const ARGUMENTS: usize = 5;
const WITH_MORE_ARGUMENTS: usize = 11;

/// Modules that only tests compile and that are files of their own.
fn test_modules(sources: &[Source]) -> BTreeSet<String> {
    sources.iter().flat_map(|source| without_tests(&source.modules(), &source.text).1).collect()
}

fn is_test(source: &Source, test_modules: &BTreeSet<String>) -> bool {
    let module = source.modules().join("/");
    let is_named_so = source.path.ends_with("_tests.rs");
    is_named_so
        || test_modules
            .iter()
            .any(|test| module == *test || module.starts_with(&format!("{test}/")))
}

/// The modules that a `mod.rs` declares for the program, not for tests.
fn declared(text: &str) -> Vec<&str> {
    let mut modules = Vec::new();
    let mut before = "";
    for line in text.lines() {
        let is_for_tests = before.contains("cfg(test)") || line.ends_with("_tests;");
        let declaration = line.split_once("mod ").filter(|(visibility, _)| {
            visibility.is_empty() || (visibility.starts_with("pub") && visibility.ends_with(' '))
        });
        if let Some((_, name)) = declaration.filter(|_| !is_for_tests) {
            modules.extend(name.strip_suffix(';'));
        }
        before = line;
    }
    modules
}

#[test]
fn every_room_begins_with_a_table_of_its_files() {
    let mut missing = Vec::new();
    for source in sources().iter().filter(|source| source.path.ends_with("/mod.rs")) {
        let head = source.text.lines().filter(|line| line.starts_with("//!"));
        let head = head.collect::<Vec<_>>().join("\n");
        let modules = declared(&source.text);
        // A room with one file has nothing to choose from.
        let is_room = modules.len() > 1 && !source.path.ends_with("/tests/mod.rs");
        for module in modules.iter().filter(|_| is_room) {
            if !head.contains(&format!("`{module}`")) {
                missing.push(format!("{}: `{module}`", source.path));
            }
        }
    }
    assert!(missing.is_empty(), "files without a row: {missing:#?}");
    let text =
        "pub mod a;\nmod b;\n#[cfg(test)]\nmod tests;\npub(crate) mod c;\nmod d {\n// mod e;\n";
    assert_eq!(declared(text), ["a", "b", "c"]);
}

#[test]
fn only_the_command_line_prints() {
    let sources = sources();
    let test_modules = test_modules(&sources);
    for source in &sources {
        let modules = source.modules();
        let may_print = modules.first() == Some(&"cli") || source.path == "main.rs";
        if may_print || is_test(source, &test_modules) {
            continue;
        }
        for pair in without_tests(&modules, &source.text).0.windows(2) {
            let prints = matches!(pair[0], "print" | "println" | "eprint" | "eprintln" | "dbg")
                && pair[1] == "!";
            assert!(!prints, "src/{} uses {}!; emit an event instead", source.path, pair[0]);
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
            assert!(source.text.contains("// SAFETY: "), "src/{} does not say why", source.path);
        }
    }
}

#[test]
fn every_file_says_first_what_it_is_for() {
    for source in sources() {
        assert!(source.text.starts_with("//! "), "src/{} does not begin with `//! `", source.path);
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

/// The first words of the comments of a file. A comment ends at code and at an empty comment line.
fn first_words(text: &str) -> Vec<&str> {
    let (mut words, mut kind_before) = (Vec::new(), "");
    for line in text.lines().map(str::trim_start) {
        let kind =
            ["///", "//!", "//"].into_iter().find(|kind| line.starts_with(kind)).unwrap_or("");
        let comment = line[kind.len()..].trim();
        if !kind.is_empty() && !comment.is_empty() && kind != kind_before {
            let word = comment.trim_start_matches(|first: char| !first.is_alphanumeric());
            words.extend(word.split(|other: char| !other.is_alphanumeric()).next());
        }
        kind_before = if comment.is_empty() { "" } else { kind };
    }
    words
}

#[test]
fn comments_begin_with_a_noun_or_a_verb() {
    let text =
        "//! What\n//! Where\n//!\n//! The end\nfn f() {} // How\n  /// A\n  // Why\n  // b\n";
    assert_eq!(first_words(text), ["What", "The", "A", "Why"]);
    let (mut all, mut files) = (0, Vec::new());
    for source in sources() {
        let words = first_words(&source.text);
        let questions = words.iter().filter(|word| QUESTION_WORDS.contains(word));
        all += words.len();
        files.push((questions.count(), source.path));
    }
    let questions: usize = files.iter().map(|(count, _)| count).sum();
    let share = questions as f64 / all as f64;
    files.sort_by(|one, other| other.cmp(one));
    let worst: String =
        files.iter().take(20).map(|(count, path)| format!("\n{count:3} src/{path}")).collect();
    assert!(
        share <= QUESTIONS_AT_MOST,
        "{questions} of {all} comments begin with a question word ({:.1} %):{worst}",
        100.0 * share
    );
}

/// The words of a comment's line, in lower case; none for a line of code.
fn words_of_comment(line: &str) -> Vec<String> {
    let Some(comment) = line.trim_start().strip_prefix("//") else {
        return Vec::new();
    };
    let words = comment.split(|letter: char| !letter.is_alphabetic() && letter != '\'');
    words.filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
}

/// The words of [`LOOKS_BACK`] among some words.
fn words_that_look_back(words: &[String]) -> usize {
    let pairs = words.windows(2).filter(|two| LOOKS_BACK.contains(&two.join(" ").as_str()));
    words.iter().filter(|word| LOOKS_BACK.contains(&word.as_str())).count() + pairs.count()
}

#[test]
fn comments_name_their_nouns() {
    let example = words_of_comment("  /// That of the others: one's own, behind it");
    assert_eq!(words_that_look_back(&example), 3, "{example:?}");
    let (mut all, mut files) = (0, Vec::new());
    for source in sources() {
        let words: Vec<String> = source.text.lines().flat_map(words_of_comment).collect();
        all += words.len();
        files.push((words_that_look_back(&words), source.path));
    }
    let found: usize = files.iter().map(|(count, _)| count).sum();
    files.sort_by(|one, other| other.cmp(one));
    let worst: String =
        files.iter().take(20).map(|(count, path)| format!("\n{count:3} src/{path}")).collect();
    let share = 1000.0 * found as f64 / all as f64;
    assert!(share <= LOOKING_BACK_AT_MOST, "{share:.1} of 1000 words of comment:{worst}");
}

#[test]
fn no_file_is_longer_than_a_reader_bears() {
    let long: Vec<String> = sources()
        .iter()
        .map(|source| (source.text.lines().count(), &source.path))
        .filter(|(lines, _)| *lines > FILE_LINES)
        .map(|(lines, path)| format!("src/{path}: {lines} lines"))
        .collect();
    assert!(long.is_empty(), "{}", long.join("\n"));
}

/// Name, first line and number of lines of every function with a body.
fn functions(text: &str) -> Vec<(&str, usize, usize)> {
    let tokens = tokens(text);
    let offset = |token: &str| token.as_ptr() as usize - text.as_ptr() as usize;
    let line = |token: &str| 1 + text[..offset(token)].matches('\n').count();
    let mut found = Vec::new();
    // `fn(` begins the type of a function pointer.
    let named =
        |at: &usize| tokens[*at] == "fn" && tokens.get(at + 1).is_some_and(|name| *name != "(");
    for at in (0..tokens.len()).filter(named) {
        let (mut nested, mut braces) = (0usize, 0usize);
        for token in &tokens[at + 1..] {
            match *token {
                "(" | "[" => nested += 1,
                ")" | "]" => nested -= 1,
                "{" => braces += 1,
                "}" => braces -= 1,
                _ => {}
            }
            if *token == ";" && nested == 0 && braces == 0 {
                break;
            }
            if *token == "}" && braces == 0 {
                let first = line(tokens[at]);
                found.push((tokens[at + 1], first, 1 + line(token) - first));
                break;
            }
        }
    }
    found
}

#[test]
fn no_function_is_longer_than_a_screen_or_two() {
    let text =
        "fn a() {\n}\ntrait T { fn b(&self) -> u8; fn c(f: fn(u8) -> u8) -> [u8; 2] {\n x \n} }";
    assert_eq!(functions(text), [("a", 1, 2), ("c", 3, 3)]);
    let mut long = Vec::new();
    for source in sources() {
        for (name, first, lines) in functions(&source.text) {
            if lines > FUNCTION_LINES && !TABLES.contains(&name) {
                long.push(format!("src/{}:{first}: `{name}` has {lines} lines", source.path));
            }
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

/// The positions of the tokens after `at` up to the bracket that closes the bracket at `at`.
fn inside(tokens: &[&str], at: usize) -> std::ops::Range<usize> {
    let mut depth = 0usize;
    for (place, token) in tokens.iter().enumerate().skip(at) {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1..place;
        }
    }
    at + 1..tokens.len()
}

/// The parts of a list, which end at commas outside brackets.
fn parts<'t, 'a>(tokens: &'t [&'a str]) -> Vec<&'t [&'a str]> {
    let (mut parts, mut depth, mut first) = (Vec::new(), 0usize, 0);
    for (at, token) in tokens.iter().enumerate() {
        match *token {
            "(" | "[" | "{" | "<" => depth += 1,
            // `->` ends nothing.
            ">" if at > 0 && tokens[at - 1] == "-" => {}
            ")" | "]" | "}" | ">" => depth -= 1,
            "," if depth == 0 => {
                parts.push(&tokens[first..at]);
                first = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&tokens[first..]);
    parts.into_iter().filter(|part| !part.is_empty()).collect()
}

/// The values of a type: a tuple has the values of its members.
fn values_of(of: &[&str]) -> usize {
    match of {
        ["(", inner @ .., ")"] => parts(inner).into_iter().map(values_of).sum(),
        _ => 1,
    }
}

/// Every function of a file outside tests with its number of arguments. The members of a tuple count, `self` does not.
fn arguments(source: &Source) -> Vec<(String, usize)> {
    let (tokens, _) = without_tests(&source.modules(), &source.text);
    let mut found = Vec::new();
    let named = |at: &usize| tokens[*at] == "fn" && tokens[at + 1] != "(";
    for at in (0..tokens.len() - 1).filter(named) {
        // The first bracket after the name and the parameters of the type, which may hold `Fn(…)`.
        let (mut open, mut angles) = (at + 2, 0usize);
        while tokens[open] != "(" || angles > 0 {
            match tokens[open] {
                "<" => angles += 1,
                ">" if tokens[open - 1] != "-" => angles -= 1,
                _ => {}
            }
            open += 1;
        }
        let list = parts(&tokens[inside(&tokens, open)]);
        let values = list.into_iter().filter_map(|one| {
            // A pattern in brackets has no colon of the argument inside.
            let pattern = match one[0] {
                "(" | "[" => inside(one, 0).end,
                _ => 0,
            };
            let colon = one[pattern..].iter().position(|token| *token == ":")?;
            Some(values_of(&one[pattern + colon + 1..]))
        });
        found.push((tokens[at + 1].to_string(), values.sum()));
    }
    found
}

#[test]
fn few_functions_have_many_arguments() {
    let text = "fn a(&self, b: u8, (c, d): (u8, [u8; 2]), e: &dyn Fn(u8, u8) -> Vec<(u8, u8)>) {} fn f<T: Fn(u8)>() {}";
    let example = Source { path: "a.rs".into(), text: text.into() };
    assert_eq!(arguments(&example), [("a".to_string(), 4), ("f".to_string(), 0)]);
    let sources = sources();
    let test_modules = test_modules(&sources);
    let mut many = Vec::new();
    for source in sources.iter().filter(|source| !is_test(source, &test_modules)) {
        let functions = arguments(source).into_iter().filter(|(_, count)| *count > ARGUMENTS);
        many.extend(functions.map(|(name, count)| (count, name, &source.path)));
    }
    many.sort_by(|one, other| other.cmp(one));
    let shown = many.iter().map(|(count, name, path)| format!("\n{count} src/{path}: {name}"));
    let shown: String = shown.collect();
    assert!(many.len() <= WITH_MORE_ARGUMENTS, "{} functions:{shown}", many.len());
}

/// The types that a file defines outside tests.
fn types(source: &Source) -> Vec<String> {
    let (tokens, _) = without_tests(&source.modules(), &source.text);
    let (mut names, mut braces) = (Vec::new(), 0usize);
    for pair in tokens.windows(2) {
        // In a block, `type` names an associated type.
        let defines =
            matches!(pair[0], "struct" | "enum" | "trait") || (pair[0] == "type" && braces == 0);
        if defines && pair[1].starts_with(|first: char| first.is_ascii_uppercase()) {
            names.push(pair[1].to_string());
        }
        match pair[0] {
            "{" => braces += 1,
            "}" => braces -= 1,
            _ => {}
        }
    }
    names
}

#[test]
fn a_type_name_has_one_meaning() {
    let sources = sources();
    let test_modules = test_modules(&sources);
    let mut places: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !is_test(source, &test_modules)) {
        for name in types(source) {
            places.entry(name).or_default().push(&source.path);
        }
    }
    let shared: Vec<String> = places
        .iter()
        .filter(|(_, places)| places.len() > 1)
        .map(|(name, places)| format!("{name}: {}", places.join(", ")))
        .collect();
    assert!(shared.is_empty(), "{}", shared.join("\n"));
}
