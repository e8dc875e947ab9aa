//! docs/cli.md equals the help texts of the program.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::support::Place;

/// The help of `prune` itself has the environment variables and exit codes.
const HEAD: &str = "\
# Command line

The output of `prune --help` and of `--help` of each command. Flags that mean the same as in an earlier command are only named.
`UPDATE_SNAPSHOTS=1 cargo test --test it cli_page` writes this page, and a test compares it with the program.
";

/// Columns of a line of names.
const COLUMNS: usize = 100;

/// A line that begins the description of a flag.
fn begins_flag(line: &str) -> bool {
    let words = line.trim_start();
    words.starts_with('-') && (1..=6).contains(&(line.len() - words.len()))
}

/// The name of a flag from the first line of its description.
fn name_of(block: &str) -> String {
    let words = block.split_whitespace().map(|word| word.trim_end_matches(','));
    let names: Vec<&str> = words.take_while(|word| word.starts_with('-')).collect();
    names.last().unwrap_or(&"").to_string()
}

/// The help of the command `name`. Flags that an earlier command describes with the same words, as `seen` knows, are only named.
fn without_repeats(help: &str, name: &str, seen: &mut BTreeMap<String, String>) -> String {
    let mut text = String::new();
    let mut named: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut lines = help.lines().peekable();
    while let Some(line) = lines.next() {
        if !begins_flag(line) {
            if !line.is_empty() && !line.starts_with(' ') {
                text += &names(&mut named);
            }
            text += &format!("{line}\n");
            continue;
        }
        let mut block = format!("{line}\n");
        while let Some(more) = lines
            .next_if(|more| more.is_empty() || more.starts_with("       ") && !begins_flag(more))
        {
            block += &format!("{more}\n");
        }
        match seen.get(block.trim_end()) {
            Some(earlier) => named.entry(earlier.clone()).or_default().push(name_of(&block)),
            None => {
                seen.insert(block.trim_end().to_string(), name.to_string());
                text += &block;
            }
        }
    }
    text + &names(&mut named)
}

/// The lines for flags that earlier commands describe.
fn names(named: &mut BTreeMap<String, Vec<String>>) -> String {
    let mut text = String::new();
    for (earlier, flags) in std::mem::take(named) {
        let mut line = format!("      As for `{earlier}`:");
        for flag in flags {
            if line.len() + flag.len() + 1 > COLUMNS {
                text += &format!("{line}\n");
                line = "       ".to_string();
            }
            line += &format!(" {flag}");
        }
        text += &format!("{line}\n\n");
    }
    text
}

/// The page, from the binary.
fn page(place: &Place) -> String {
    let mut page = HEAD.to_string();
    let mut seen = BTreeMap::new();
    let mut section = |arguments: &str| {
        let ran = place.run(&format!("{arguments} --help"));
        assert_eq!(ran.code, 0, "{arguments}: {}", ran.stderr);
        let line = format!("prune {arguments}");
        let name = line.trim_end();
        let help: String =
            ran.stdout.lines().map(|line| format!("{}\n", line.trim_end())).collect();
        let help = without_repeats(&help, name, &mut seen);
        // Writing to a String cannot fail.
        let _ = write!(page, "\n## {name}\n\n```text\n{}\n```\n", help.trim_end());
    };
    section("");
    let command = prune::cli::command();
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        section(command.get_name());
    }
    page
}

#[test]
fn cli_page_shows_the_help_of_every_command() {
    let place = Place::empty();
    let page = page(&place);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/cli.md");
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, &page).expect("docs/ can be written");
    }
    let found = fs::read_to_string(&path).expect("docs/cli.md is there");
    assert!(
        found == page,
        "docs/cli.md differs from the program; UPDATE_SNAPSHOTS=1 cargo test --test it cli_page"
    );
}

#[test]
fn short_help_fits_a_screen() {
    let place = Place::empty();
    let command = prune::cli::command();
    let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
    for name in std::iter::once("").chain(visible.map(clap::Command::get_name)) {
        let shown = place.command(&format!("{name} -h")).env("COLUMNS", "80").output();
        let shown = String::from_utf8(shown.expect("the binary").stdout).expect("a text");
        let lines = shown.lines().count();
        assert!((5..=60).contains(&lines), "{lines} lines of `prune {name} -h`:\n{shown}");
    }
}

#[test]
fn every_command_has_an_example_and_every_flag_a_word_of_help() {
    let command = prune::cli::command();
    for command in std::iter::once(&command).chain(command.get_subcommands()) {
        if command.is_hide_set() || command.get_name() == "help" {
            continue;
        }
        let texts = [command.get_after_help(), command.get_about(), command.get_long_about()];
        let has_example =
            texts.into_iter().flatten().any(|text| text.to_string().contains("prune "));
        assert!(has_example, "no example in `{}`", command.get_name());
        for argument in command.get_arguments() {
            assert!(
                argument.get_help().is_some(),
                "`{}` of `{}` has no help",
                argument.get_id(),
                command.get_name()
            );
        }
    }
}

#[test]
fn completions_and_the_man_page_know_the_flags() {
    let place = Place::empty();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = place.run(&format!("completions {shell}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert!(ran.stdout.contains("sparsity-ratio"), "{shell}");
    }
    let man = place.run("man").stdout;
    assert!(man.contains(".TH prune 1"), "{man}");
    assert!(man.contains(r"\-\-sparsity\-ratio") && man.contains("prune eval"), "{man}");
    assert!(!man.contains("make\\-checkpoint"), "{man}");
}

#[test]
fn version_tells_what_this_build_can_do() {
    let place = Place::empty();
    let short = place.run("-V").stdout;
    assert_eq!(short, format!("prune {}\n", env!("CARGO_PKG_VERSION")));
    let long = place.run("--version").stdout;
    for line in ["devices: cpu", "products: ", "cpu: "] {
        assert!(long.contains(line), "{long}");
    }
}
