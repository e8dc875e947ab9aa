//! docs/guide.md: every command runs in order, and prints what the page shows under it.
//!
//! A line of the page is found in the output where its words are equal and its numbers near. The plan is an exception: memory and time
//! depend on the machine, so its numbers may differ.

use std::fs;
use std::path::Path;

use crate::support::Place;

/// The largest relative difference of a number: bf16 products of CPUs differ in some near-ties.
const NEAR: f64 = 0.03;

/// A block of the page: its commands, and the lines that it shows under them.
#[derive(Default, Debug)]
struct Step {
    commands: Vec<String>,
    shown: Vec<String>,
}

/// The blocks of a page, in order. A `text` block belongs to the `sh` block before it.
fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut language = None;
    for line in page.lines() {
        if let Some(name) = line.strip_prefix("```") {
            language = language.is_none().then_some(name);
            if language == Some("sh") {
                steps.push(Step::default());
            }
            continue;
        }
        let Some(step) = steps.last_mut() else {
            continue;
        };
        match language {
            Some("sh") => step.commands.push(line.to_string()),
            Some("text") if !line.is_empty() => step.shown.push(line.to_string()),
            _ => {}
        }
    }
    steps
}

/// Returns true for lines with the same words and near numbers; with `free`, any numbers.
fn is_alike(shown: &str, printed: &str, free: bool) -> bool {
    let words = |line: &str| -> Vec<String> { line.split_whitespace().map(String::from).collect() };
    let (shown, printed) = (words(shown), words(printed));
    let number = |word: &str| {
        let digits = word.trim_matches(|c: char| !c.is_ascii_digit());
        digits.parse::<f64>().ok()
    };
    shown.len() == printed.len()
        && shown.iter().zip(&printed).all(|(shown, printed)| {
            match (number(shown), number(printed)) {
                (Some(one), Some(other)) => free || (one - other).abs() <= NEAR * one.abs(),
                _ => shown == printed,
            }
        })
}

#[test]
fn every_command_of_the_guide_prints_what_the_page_shows() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide.md");
    let page = fs::read_to_string(path).expect("the guide is there");
    let place = Place::empty();
    let mut commands = 0;
    for step in steps(&page) {
        let mut printed = String::new();
        for command in &step.commands {
            let arguments = command.strip_prefix("prune ").expect("a command of prune");
            let words = shell_words(arguments);
            let mut process = place.command("");
            let ran = crate::support::ran(process.args(&words));
            assert_eq!(ran.code, 0, "{command}\n{}", ran.stderr);
            printed += &ran.stdout;
            printed += &ran.stderr;
            commands += 1;
        }
        // `hf upload` at the end is a command of another program.
        for shown in step.shown.iter().filter(|line| !line.starts_with("hf ")) {
            let free = step.commands.iter().any(|command| command.starts_with("prune plan"));
            let is_printed = printed.lines().any(|line| is_alike(shown, line, free));
            assert!(is_printed, "{:?} do not print\n{shown}\nbut\n{printed}", step.commands);
        }
    }
    assert!(commands >= 10, "{commands} commands");
}

/// The words of a command line with double quotes.
fn shell_words(line: &str) -> Vec<String> {
    let parts = line.split('"').enumerate();
    parts
        .flat_map(|(at, part)| match at % 2 {
            0 => part.split_whitespace().map(String::from).collect(),
            _ => vec![part.to_string()],
        })
        .collect()
}

#[test]
fn lines_are_compared_by_words_and_numbers() {
    assert!(is_alike("perplexity  2.08 ± 0.02", "perplexity 2.09 ± 0.02", false));
    assert!(!is_alike("perplexity  2.08", "perplexity 2.30", false));
    assert!(is_alike("peak 186 MiB", "peak 99 MiB", true));
    assert!(!is_alike("verdict: a copy", "verdict: no copy", true));
    assert_eq!(shell_words("a --b \"c d\" e"), ["a", "--b", "c d", "e"]);
    let steps = steps("```sh\nprune a\n```\n\n```text\nx\n\ny\n```\n");
    assert_eq!(
        (&steps[0].commands[..], &steps[0].shown[..]),
        (&["prune a".to_string()][..], &["x".to_string(), "y".to_string()][..])
    );
}
