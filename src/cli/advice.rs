//! Advice under a refused command line that holds for every flag: a value to type, a flag to leave out, an example of the command.
//!
//! clap says what is wrong and leaves the fix to the reader. The definition of a flag has its default, and [`EXAMPLES`] has values of
//! flags without a default, so that the advice can be typed.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};

/// Values to type for flags that have no default, or whose default is only a part of the truth.
const EXAMPLES: &[(&str, &str)] = &[
    ("--against", "DENSE"),
    ("--batch-size", "4"),
    ("--blocksize", "128"),
    ("--close-by", "0.5"),
    ("--close-to", "0.8"),
    ("--density", "0.5"),
    ("--distill-weight", "0.5"),
    ("--drop-layers", "4"),
    ("--drop-width", "0.2"),
    ("--dsnot-cycles", "50"),
    ("--epochs", "4"),
    ("--epsilon", "0.15"),
    ("--eval-every", "20"),
    ("--eval-windows", "100"),
    ("--gamma", "0.01"),
    ("--held-out", "8"),
    ("--lambda", "1"),
    ("--layers-dropped", "1,2"),
    ("--limit", "100"),
    ("--lr", "1e-3"),
    ("--mask-every", "10"),
    ("--max-grad-norm", "0.3"),
    ("--max-kl", "0.1"),
    ("--max-memory", "20GiB"),
    ("--max-perplexity", "12"),
    ("--min-accuracy", "0.5"),
    ("--nsamples", "128"),
    ("--num-fewshot", "5"),
    ("--owl-outliers", "5"),
    ("--patience", "3"),
    ("--percdamp", "0.01"),
    ("--rank", "16"),
    ("--ranks", "8"),
    ("--ratio-band", "0.1"),
    ("--save-every", "100"),
    ("--seed", "0"),
    ("--seqlen", "128"),
    ("--sparsity-ratio", "0.5"),
    ("--steps", "200"),
    ("--t", "0.5"),
    ("--target-params", "800M"),
    ("--target-size", "2GiB"),
    ("--temperature", "0.8"),
    ("--threads", "4"),
    ("--top-k", "40"),
    ("--top-p", "0.95"),
    ("--warmup", "10"),
    ("--weight", "0.6"),
];

/// Adds a line of advice.
pub(super) fn advise(error: &mut clap::Error, advice: String) {
    let advice = ContextValue::StyledStrs(vec![StyledStr::from(advice)]);
    error.insert(ContextKind::Suggested, advice);
}

/// The text of a kind in the context of an error.
pub(super) fn text(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    }
}

/// The command of a command line: a subcommand, or the program itself.
pub(super) fn command_of<'c>(program: &'c Command, arguments: &[OsString]) -> &'c Command {
    let first = arguments.get(1).and_then(|word| word.to_str());
    first.and_then(|word| program.find_subcommand(word)).unwrap_or(program)
}

/// A value that its flag cannot read.
pub(super) fn explain_unreadable(error: &mut clap::Error, command: &Command) {
    let (Some(value), Some(flag)) =
        (text(error, ContextKind::InvalidValue), text(error, ContextKind::InvalidArg))
    else {
        return;
    };
    let flag = flag.split(' ').next().unwrap_or_default();
    let with_point = value.replacen(',', ".", 1);
    if value.contains(',') && with_point.parse::<f64>().is_ok() {
        advise(error, format!("write the number with a point: {flag} {with_point}"));
        return;
    }
    if let Some(example) = example_of(flag, command) {
        advise(error, format!("use a value like {flag} {example}"));
    }
}

fn flag_of<'c>(flag: &str, command: &'c Command) -> Option<&'c Arg> {
    let name = flag.strip_prefix("--")?;
    command.get_arguments().find(|arg| arg.get_long() == Some(name))
}

/// A value to type for a flag.
fn example_of(flag: &str, command: &Command) -> Option<String> {
    if let Some((_, example)) = EXAMPLES.iter().find(|(name, _)| *name == flag) {
        return Some((*example).to_string());
    }
    let default = flag_of(flag, command)?.get_default_values().first()?.to_str()?;
    // A default that is a name may mean something else than the word that was given.
    default.parse::<f64>().is_ok().then(|| default.to_string())
}

/// Two flags that exclude each other.
pub(super) fn explain_pair(error: &mut clap::Error) {
    let flags = |kind| match error.get(kind) {
        Some(ContextValue::String(one)) => vec![one.clone()],
        Some(ContextValue::Strings(several)) => several.clone(),
        _ => Vec::new(),
    };
    let mut all = flags(ContextKind::InvalidArg);
    all.extend(flags(ContextKind::PriorArg));
    let mut names: Vec<&str> = all.iter().filter_map(|flag| flag.split(' ').next()).collect();
    names.dedup();
    match names[..] {
        [one] => advise(error, format!("give {one} once")),
        [one, other] => advise(error, format!("leave {one} or {other} out")),
        _ => {}
    }
}

/// A command without a flag or a word that it needs.
pub(super) fn explain_missing(error: &mut clap::Error, command: &Command) {
    let missing = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::Strings(missing)) => missing.as_slice(),
        _ => &[],
    };
    let with_value = |missing: &String| {
        let flag = missing.split(' ').next().unwrap_or_default();
        let is_required = flag_of(flag, command).is_none_or(Arg::is_required_set);
        // A flag that a given flag requires.
        let example = example_of(flag, command).filter(|_| !is_required)?;
        Some(format!("{flag} {example}"))
    };
    let added: Option<Vec<String>> = missing.iter().map(with_value).collect();
    match (added.filter(|added| !added.is_empty()), example(command)) {
        (Some(added), _) => advise(error, format!("add {}", added.join(" "))),
        (None, Some(example)) => advise(error, format!("type the command like this: {example}")),
        (None, None) => {}
    }
}

/// The first example of a command's help, in a single line.
fn example(command: &Command) -> Option<String> {
    let help = command.get_after_help()?.to_string();
    let mut lines = help.lines().skip(1).map(str::trim);
    let mut example = lines.next()?.to_string();
    while let Some(begun) = example.strip_suffix('\\') {
        example = format!("{}{}", begun, lines.next()?);
    }
    Some(example).filter(|example| example.starts_with("prune "))
}

/// A flag with a number as its value takes a number below zero as its value, too, so that the message names the flag.
pub(super) fn with_numbers_below_zero(command: Command) -> Command {
    let with_flags = |command: Command| command.mut_args(with_number_below_zero);
    with_flags(command).mut_subcommands(with_flags)
}

fn with_number_below_zero(arg: Arg) -> Arg {
    let value = arg.get_value_parser().type_id();
    let is_number = [
        std::any::TypeId::of::<f64>(),
        std::any::TypeId::of::<u16>(),
        std::any::TypeId::of::<u32>(),
        std::any::TypeId::of::<u64>(),
        std::any::TypeId::of::<usize>(),
    ];
    let is_number = is_number.iter().any(|number| value == *number);
    match is_number && arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cli::definition::command;

    /// The program and its commands.
    fn commands() -> Vec<Command> {
        let program = command();
        let commands = program.get_subcommands().cloned();
        let mut commands: Vec<Command> = commands.collect();
        commands.push(program);
        commands
    }

    #[test]
    fn every_number_has_a_value_to_type_and_every_example_is_of_a_flag() {
        let mut used = BTreeSet::new();
        for command in commands() {
            for arg in command.get_arguments() {
                let Some(flag) = arg.get_long().map(|long| format!("--{long}")) else { continue };
                let is_shown = !arg.is_hide_set() && !command.is_hide_set();
                if is_shown && arg.is_allow_negative_numbers_set() {
                    assert!(example_of(&flag, &command).is_some(), "{flag}: add an example");
                }
                used.insert(flag);
            }
        }
        for (flag, _) in EXAMPLES {
            assert!(used.contains(*flag), "no command has {flag}");
        }
    }

    #[test]
    fn commands_that_need_something_have_an_example() {
        for command in commands() {
            let mut arguments = command.get_arguments();
            if arguments.any(Arg::is_required_set) && !command.is_hide_set() {
                assert!(example(&command).is_some(), "{}", command.get_name());
            }
        }
    }
}
