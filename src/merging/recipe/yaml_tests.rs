//! Tests of the nodes of YAML files: scalars, aliases, and files that are refused.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::testing::read;
use super::yaml;

/// Anything that YAML can hold.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Node {
    Text(String),
    Number(f64),
    Switch(bool),
    List(Vec<Node>),
    Map(BTreeMap<String, Node>),
}

fn node(text: &str) -> Result<Node, String> {
    yaml::read(text, "x.yml").map_err(|failure| failure.to_string())
}

/// The scale of a recipe for `passthrough`, as `parameters: {scale: VALUE}` says it.
fn scale(value: &str) -> Result<f64, String> {
    let recipe = read(&format!(
        "merge_method: passthrough\nmodels: [{{model: a}}]\nparameters: {{scale: {value}}}\n"
    ))?;
    Ok(recipe.parameters.get(super::Parameter::Scale).unwrap().cases[0].points[0])
}

#[test]
fn words_and_numbers_are_those_of_pyyaml() {
    // python3 -c 'import yaml; print([yaml.safe_load(x) for x in [...]])'
    for (word, is_on) in [
        ("true", true),
        ("True", true),
        ("yes", true),
        ("Yes", true),
        ("ON", true),
        ("false", false),
        ("No", false),
        ("off", false),
        ("1", true),
        ("0", false),
    ] {
        let text = format!(
            "merge_method: linear\nmodels: [{{model: a}}]\nparameters: {{normalize: {word}}}\n"
        );
        let recipe = read(&text).unwrap();
        let normalize = recipe.parameters.get(super::Parameter::Normalize).unwrap();
        assert_eq!(normalize.cases[0].points, [f64::from(u8::from(is_on))], "{word}");
    }
    for (text, number) in [
        ("7", 7.0),
        ("-0.5", -0.5),
        ("+.25", 0.25),
        ("1e-3", 0.001),
        ("1.5E+2", 150.0),
        ("0", 0.0),
        ("0.5", 0.5),
        ("1_000", 1000.0),
        ("0x1f", 31.0),
    ] {
        assert_eq!(scale(text), Ok(number), "{text}");
    }
    for text in [
        "010", "1:30", "'0.5'", ".inf", "-.inf", ".nan", "nan", "inf", "1e999", "abc", "--1", "~",
        "''",
    ] {
        assert!(scale(text).unwrap_err().contains("`x.yml` line 3: "), "{text}");
    }
    let range = |end: &str| {
        read(&format!(
            "merge_method: passthrough\nslices: [{{sources: [{{model: a, layer_range: [0, {end}]}}]}}]\n"
        ))
    };
    assert!(range("31").is_ok());
    for text in ["-1", "1.0", "1e2", "007", "18446744073709551616"] {
        assert!(range(text).unwrap_err().contains("line 2: expected a whole number"), "{text}");
    }
}

#[test]
fn aliases_and_merged_maps_are_unfolded() {
    let Node::Map(maps) = node("a: &a {w: 1, d: 2}\nb: *a\nc:\n  <<: *a\n  w: 3\n").unwrap() else {
        panic!("a map");
    };
    let pairs =
        |w: f64| Node::Map([("w".into(), Node::Number(w)), ("d".into(), Node::Number(2.0))].into());
    assert_eq!(maps["b"], pairs(1.0));
    // A key of the map itself wins over a merged key.
    assert_eq!(maps["c"], pairs(3.0));
}

#[test]
fn hostile_files_give_one_error_with_the_line() {
    for (text, error) in [
        (String::new(), "`x.yml` is empty"),
        ("# only a comment\n".into(), "`x.yml` is empty"),
        ("a: 1\n---\nb: 2\n".into(), "`x.yml` line 3: a second document begins"),
        ("a: 1\na: 2\n".into(), "`x.yml` line 2: the key `a` stands here twice"),
        ("a:\n\tb: 1\n".into(), "`x.yml` line 2: tabs disallowed"),
        ("a: [1, 2\nb: 3\n".into(), "`x.yml` line 2: illegal placement of ':'"),
        ("a: 'x\n".into(), "`x.yml` line 1: unclosed quote"),
        ("a: *b\n".into(), "`x.yml` line 1: alias references unknown anchor"),
        ("a: 1\nb: &b [1, *b]\n".into(), "`x.yml` line 2: recursive references"),
        ("a: &a\n  b: &b\n    - *a\n".into(), "`x.yml` line 3: recursive references"),
        (
            "a: !!python/object/apply:os.system [ls]\n".into(),
            "`x.yml` line 1: unsupported tag `!!python/object/apply:os.system`",
        ),
        ("a: !mine 1\n".into(), "`x.yml` line 1: unsupported tag `!mine`"),
        ("? [1, 2]\n: 3\n".into(), "`x.yml` line 1: "),
        ("a: &a [1]\n*a : 2\n".into(), "`x.yml` line 1: "),
        ("a:\n  <<: 7\n".into(), "`x.yml` line 2: YAML merge value must be mapping"),
        ("[".repeat(32), "`x.yml` line 1: unclosed bracket"),
        (
            format!("{}{}", "[".repeat(100), "]".repeat(100)),
            "`x.yml` line 1: the recipe is too large or too deep",
        ),
        ("[".repeat(100_000), "`x.yml` line 1: recursion limit exceeded"),
        ("- ".repeat(100_000), "`x.yml` line 1: the recipe is too large or too deep"),
        ("? ".repeat(100_000), "`x.yml` line 1: the recipe is too large or too deep"),
        (format!("a: {}", "x".repeat(1 << 20)), "`x.yml` is too large for a recipe: 1048579 bytes"),
        ("a: \u{0}b\n".into(), "`x.yml` line 1: unexpected character"),
    ] {
        let Err(found) = node(&text) else { panic!("{text:?}") };
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
        (bomb, "`x.yml` line 5: the recipe is too large or too deep once its aliases are unfolded"),
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
