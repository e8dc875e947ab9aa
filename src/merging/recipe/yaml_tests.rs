//! Tests of the nodes of YAML files: scalars, aliases, and files that are refused.

use std::time::{Duration, Instant};

use super::testing::read;
use super::yaml::{Content, Node, Scalar, compose};

fn node(text: &str) -> Result<Node, String> {
    compose(text, &"x.yml".into()).map_err(|error| error.to_string())
}

fn scalar(text: &str) -> Scalar {
    match node(text).unwrap().content {
        Content::Scalar(scalar) => scalar,
        other => panic!("{other:?}"),
    }
}

#[test]
fn scalars_are_those_of_pyyaml() {
    // python3 -c 'import yaml; print([yaml.safe_load(x) for x in [...]])'
    for text in ["true", "True", "TRUE", "yes", "Yes", "on", "ON"] {
        assert_eq!(scalar(text).switch(), Some(true), "{text}");
    }
    for text in ["false", "No", "off", "OFF"] {
        assert_eq!(scalar(text).switch(), Some(false), "{text}");
    }
    for text in ["y", "n", "tRUE", "'true'", "\"no\"", "1"] {
        assert_eq!(scalar(text).switch(), None, "{text}");
    }
    for text in ["~", "null", "Null", "NULL", "--- # nothing"] {
        assert!(scalar(text).is_null(), "{text}");
    }
    assert!(!scalar("'null'").is_null() && !scalar("''").is_null());
    for (text, number) in [
        ("7", 7.0),
        ("-0.5", -0.5),
        ("+.25", 0.25),
        ("1e-3", 0.001),
        ("1.5E+2", 150.0),
        ("0", 0.0),
        ("0.5", 0.5),
        ("'0.5'", 0.5),
    ] {
        assert_eq!(scalar(text).number(), Some(number), "{text}");
    }
    for text in [
        "010", "0x1f", "1:30", "1_000", ".inf", "-.inf", ".nan", "nan", "inf", "1e999", "abc",
        "--1",
    ] {
        assert_eq!(scalar(text).number(), None, "{text}");
    }
    assert_eq!(scalar("31").count(), Some(31));
    for text in ["-1", "1.0", "1e2", "007", "18446744073709551616"] {
        assert_eq!(scalar(text).count(), None, "{text}");
    }
}

#[test]
fn aliases_and_merged_maps_are_unfolded() {
    let text = "a: &a {w: 1, d: 2}\nb: *a\nc:\n  <<: *a\n  w: 3\n";
    let Content::Map(entries) = node(text).unwrap().content else { panic!("a map") };
    let shown: Vec<Vec<(String, f64)>> = entries
        .iter()
        .map(|entry| match &entry.value.content {
            Content::Map(inner) => inner
                .iter()
                .map(|entry| (entry.key.clone(), entry.value.number("").unwrap()))
                .collect(),
            other => panic!("{other:?}"),
        })
        .collect();
    let pairs = |pairs: &[(&str, f64)]| -> Vec<(String, f64)> {
        pairs.iter().map(|(key, value)| (key.to_string(), *value)).collect()
    };
    assert_eq!(shown[1], pairs(&[("w", 1.0), ("d", 2.0)]));
    // A key of the map itself wins over a merged key.
    assert_eq!(shown[2], pairs(&[("w", 3.0), ("d", 2.0)]));
}

#[test]
fn hostile_files_give_one_error_with_the_line() {
    for (text, error) in [
        (String::new(), "`x.yml` is empty"),
        ("# only a comment\n".into(), "`x.yml` is empty"),
        ("a: 1\n---\nb: 2\n".into(), "`x.yml` line 2: a second document begins"),
        ("a: 1\na: 2\n".into(), "`x.yml` line 2: the key `a` stands here twice"),
        ("a:\n\tb: 1\n".into(), "`x.yml` line 2: this is not YAML: tabs disallowed"),
        ("a: [1, 2\nb: 3\n".into(), "`x.yml` line 2: this is not YAML"),
        ("a: 'x\n".into(), "`x.yml` line 1: this is not YAML"),
        (
            "a: *b\n".into(),
            "`x.yml` line 1: this is not YAML: while parsing node, found unknown anchor",
        ),
        (
            "a: 1\nb: &b [1, *b]\n".into(),
            "`x.yml` line 2: this alias stands inside the node it repeats",
        ),
        ("a: &a\n  b: &b\n    - *a\n".into(), "`x.yml` line 3: this alias stands inside"),
        ("a: !!python/object/apply:os.system [ls]\n".into(), "`x.yml` line 1: the tag"),
        ("a: !mine 1\n".into(), "`x.yml` line 1: the tag `!mine`"),
        ("? [1, 2]\n: 3\n".into(), "`x.yml` line 1: a key must be a word"),
        ("a: &a [1]\n*a : 2\n".into(), "`x.yml` line 2: a key must be a word"),
        ("a:\n  <<: 7\n".into(), "`x.yml` line 2: `<<` merges maps, found `7`"),
        ("[".repeat(100), "`x.yml` line 1: lists and maps stand in more than 32 others"),
        ("[".repeat(100_000), "`x.yml` line 1: this is not YAML: recursion limit exceeded"),
        ("- ".repeat(100_000), "`x.yml` line 1: lists and maps stand in more than 32 others"),
        ("? ".repeat(100_000), "`x.yml` line 1: a key must be a word"),
        (format!("a: {}", "x".repeat(1 << 20)), "`x.yml` is too large for a recipe: 1048579 bytes"),
        ("a: \u{0}b\n".into(), "`x.yml` line 1: this is not YAML"),
    ] {
        let found = node(&text).map(|_| ()).unwrap_err();
        assert!(found.contains(error), "{}: {found}", &text[..text.len().min(60)]);
    }
}

#[test]
fn aliases_that_unfold_without_end_are_refused() {
    let bomb = {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_string();
        for level in 1..9 {
            let before = format!("*a{}", level - 1);
            text += &format!("a{level}: &a{level} [{}]\n", vec![before; 10].join(", "));
        }
        text
    };
    let merge_bomb = {
        let mut text = "m0: &m0 {k0: 1}\n".to_string();
        for level in 1..30 {
            let before = format!("*m{0}, *m{0}", level - 1);
            text += &format!("m{level}: &m{level} {{k{level}: [{before}], <<: [{before}]}}\n");
        }
        text
    };
    for (text, error) in [
        (bomb, "`x.yml` line 6: the recipe is larger than 4194304 bytes once"),
        (merge_bomb, "once its aliases are unfolded"),
        (
            format!("a: &a {}\nb: [{}]\n", "x".repeat(100_000), vec!["*a"; 50].join(",")),
            "once its aliases are unfolded",
        ),
    ] {
        let found = node(&text).map(|_| ()).unwrap_err();
        assert!(found.contains(error), "{found}");
    }
}

#[test]
fn the_worst_files_are_read_or_refused_quickly() {
    for part in [
        "a",
        "a: ",
        "- ",
        "a\n",
        "- a\n",
        "a,",
        "{a: [",
        "&a ",
        "'",
        "\"\\",
        "# \n",
        "? a\n",
        "|\n",
        "!a ",
        "*a ",
        "%",
        ": ",
        "---\n",
        "a: &a b\n",
        "{}, ",
    ] {
        for begin in ["", "[", "{", "a: ", "- ["] {
            let count = ((1 << 20) - begin.len()) / part.len();
            let text = format!("{begin}{}", part.repeat(count));
            let start = Instant::now();
            let _ = read(&text);
            // A file of this size takes well below a second; the limit is for slow machines under load.
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{begin}{part}: {:?}",
                start.elapsed()
            );
        }
    }
}
