//! Mistakes on the command line: clap's message, with advice that means the same as what was typed.
//!
//! clap proposes whatever is spelt alike: `bf16` for `f16`, `llama-30b` for `llama-4`, `--use-cpu` for `--use-gpu`. Here a word is
//! proposed only for a plain misspelling of it, and words of the field that this version does not know get a line of their own.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::advice::{self, advise, text};
use super::definition::command;
use super::foreign;
use crate::failure;
use crate::run::command_line::quoted;

/// Flags that people look for, each with the advice for it.
const FLAGS: [(&str, &str); 7] = [
    ("--aim", "version 0.2 removed it; --saliency base weighs by the activations of the base"),
    ("--block-target", "version 0.2 removed it: the target is always `dense`"),
    ("--dsnot-published", "version 0.2 removed it: rows stop where no weight of the sign is left"),
    ("--sparsity", RATIO_OR_PATTERN),
    ("--ratio", RATIO_OR_PATTERN),
    ("--use-gpu", GPU),
    ("--gpu", GPU),
];
const RATIO_OR_PATTERN: &str =
    "--sparsity-ratio takes a fraction like 0.5, --sparsity-type a pattern like 2:4";
const GPU: &str = "a build with CUDA uses all GPUs; --device cuda:0 chooses one";

/// Methods of the field that this version does not have.
const OTHER_METHODS: [&str; 9] =
    ["admm", "besa", "flap", "gblm", "llm-pruner", "obc", "obs", "pruner-zero", "slicegpt"];
const OTHER_METHOD: &str =
    "this method does not exist in this version; the possible values are all there are";

/// Methods that are flags of their own.
const FLAGS_FOR_METHODS: [(&str, &str); 3] = [
    ("shortgpt", "--drop-layers N drops layers by their block influence"),
    ("dsnot", "--refine dsnot swaps weights behind a method, like --prune-method wanda"),
    ("owl", "--allocate owl gives each layer its ratio, for any method"),
];

/// Flags of a single run, each with the flag of `prune sweep` for it.
const FLAGS_OF_ONE_RUN: [(&str, &str); 6] = [
    ("--sparsity-ratio", "use --ratios, like --ratios 0.4,0.5"),
    ("--sparsity-type", "use --types, like --types unstructured,2:4"),
    ("--use-variant", "name the method: --methods wanda-variant"),
    ("--seed", "use --seeds, like --seeds 0,1,2"),
    ("--save-model", "use --keep-models: each cell has its model in its own folder"),
    ("--resume", "leave it out: the same command continues a sweep"),
];

/// The error with its advice checked and completed.
pub(super) fn explain(error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let is_mistake = error.use_stderr();
    let mut error = explain_kind(error, arguments);
    let spelt = with_command_spelt(arguments);
    if is_mistake && let Some(line) = foreign::translated(&spelt) {
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::SuggestedSubcommand);
        let other = error.remove(ContextKind::Suggested);
        let mut advice = match (error.kind(), other) {
            // A word that is no command need not be a model.
            (ErrorKind::InvalidSubcommand, _) | (_, None) => Vec::new(),
            (_, Some(ContextValue::StyledStrs(advice))) => advice,
            (_, Some(_)) => Vec::new(),
        };
        advice.push(StyledStr::from(format!("type {}", quoted(&line))));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(advice));
    }
    error
}

fn explain_kind(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let program = command();
    let command = advice::command_of(&program, arguments);
    match error.kind() {
        ErrorKind::InvalidValue => explain_value(&mut error),
        ErrorKind::ValueValidation => advice::explain_unreadable(&mut error, command),
        ErrorKind::MissingRequiredArgument => advice::explain_missing(&mut error, command),
        ErrorKind::UnknownArgument => explain_flag(&mut error, arguments),
        ErrorKind::InvalidSubcommand | ErrorKind::ArgumentConflict => {
            if let Some(word) = text(&error, ContextKind::InvalidSubcommand) {
                return explain_word(error, &word, arguments);
            }
            explain_conflict(&mut error);
        }
        _ => {}
    }
    error
}

/// A value that its flag does not have.
fn explain_value(error: &mut clap::Error) {
    error.remove(ContextKind::SuggestedValue);
    let (Some(value), Some(flag)) =
        (text(error, ContextKind::InvalidValue), text(error, ContextKind::InvalidArg))
    else {
        return;
    };
    let flag = flag.split(' ').next().unwrap_or_default();
    let is_method = ["--prune-method", "--methods"].contains(&flag);
    let lower = value.to_lowercase();
    let as_flag = FLAGS_FOR_METHODS.iter().find(|(name, _)| *name == lower);
    if let Some((_, advice)) = as_flag.filter(|_| is_method) {
        advise(error, (*advice).to_string());
        return;
    }
    if is_method && OTHER_METHODS.contains(&lower.as_str()) {
        advise(error, OTHER_METHOD.to_string());
        return;
    }
    if let Some(ContextValue::Strings(values)) = error.get(ContextKind::ValidValue) {
        let meant = meant(&value, values.iter().map(String::as_str));
        if !meant.is_empty() {
            error.insert(ContextKind::SuggestedValue, ContextValue::Strings(meant));
        }
    }
}

/// Two flags that exclude each other, such as a flag of a single run and the lists of a sweep.
fn explain_conflict(error: &mut clap::Error) {
    let flag = |kind| text(error, kind)?.split(' ').next().map(ToString::to_string);
    let pair = [flag(ContextKind::InvalidArg), flag(ContextKind::PriorArg)];
    let known =
        FLAGS_OF_ONE_RUN.iter().find(|(name, _)| pair.iter().flatten().any(|flag| flag == name));
    match known.filter(|_| pair.contains(&Some("--methods".to_string()))) {
        Some((_, advice)) => advise(error, format!("a sweep has many runs: {advice}")),
        None => advice::explain_pair(error),
    }
}

/// A flag that its command does not have.
fn explain_flag(error: &mut clap::Error, arguments: &[OsString]) {
    // clap also advises to put `--` before the flag, which would make it the name of a model.
    error.remove(ContextKind::Suggested);
    let Some(flag) = text(error, ContextKind::InvalidArg) else {
        return;
    };
    if !flag.starts_with('-') {
        advise(error, format!("leave `{flag}` out"));
        return;
    }
    let known = FLAGS.iter().find(|(name, _)| *name == flag);
    let proposed = text(error, ContextKind::SuggestedArg);
    let is_meant = proposed.is_some_and(|proposed| {
        known.is_none() && !meant(&flag, std::iter::once(proposed.as_str())).is_empty()
    });
    if !is_meant && error.remove(ContextKind::SuggestedArg).is_some() {
        // It shows the use of the proposed flag.
        error.remove(ContextKind::Usage);
    }
    if let Some((_, advice)) = known {
        advise(error, (*advice).to_string());
    } else if !is_meant && is_plan(arguments) && is_of_a_run(&flag) {
        advise(error, format!("{flag} is a flag of a run, leave it out of a plan"));
    }
}

/// Returns whether the command is `prune plan`.
fn is_plan(arguments: &[OsString]) -> bool {
    arguments.get(1).is_some_and(|command| command == "plan")
}

/// Returns whether `prune` itself or a command that evaluates or trains has the flag.
fn is_of_a_run(flag: &str) -> bool {
    let command = command();
    let has = |command: &clap::Command| {
        let mut names = command.get_arguments().filter_map(|argument| argument.get_long());
        names.any(|name| flag.strip_prefix("--") == Some(name))
    };
    let of_runs = ["eval", "recover", "merge"];
    has(&command) || of_runs.iter().any(|name| command.find_subcommand(name).is_some_and(has))
}

/// A word where a command is expected: a misspelt command, or a model.
fn explain_word(mut error: clap::Error, word: &str, arguments: &[OsString]) -> clap::Error {
    let mut command = command();
    let commands = command.get_subcommands();
    let names: Vec<String> = commands
        .filter(|command| !command.is_hide_set())
        .map(|command| command.get_name().to_string())
        .chain(["help".to_string()])
        .collect();
    if names.iter().any(|name| name == word) {
        return error;
    }
    if error.kind() == ErrorKind::ArgumentConflict {
        // The word is no command that flags could conflict with.
        let usage = ContextValue::StyledStr(command.render_usage());
        error = clap::Error::new(ErrorKind::InvalidSubcommand).with_cmd(&command);
        let word = ContextValue::String(word.to_string());
        error.insert(ContextKind::InvalidSubcommand, word);
        error.insert(ContextKind::Usage, usage);
    }
    error.remove(ContextKind::SuggestedSubcommand);
    error.remove(ContextKind::Suggested);
    let meant = meant(word, names.iter().map(String::as_str));
    if !meant.is_empty() {
        let meant = ContextValue::Strings(meant);
        error.insert(ContextKind::SuggestedSubcommand, meant);
    } else if let Some(flagged) = with_flag(word, &names, arguments) {
        advise(&mut error, format!("a model is named by a flag: {flagged}"));
    }
    error
}

/// The command line with a misspelt `prune` corrected: people who type `prune prune MODEL` may misspell the second word.
fn with_command_spelt(arguments: &[OsString]) -> Vec<OsString> {
    let mut arguments = arguments.to_vec();
    if let Some(word) = arguments.get_mut(1)
        && word.to_str().is_some_and(|word| !meant(word, std::iter::once("prune")).is_empty())
    {
        *word = "prune".into();
    }
    arguments
}

/// The command line with `--model` before `word`, and a ratio where none is named; `None` where that flag or a command is given already, and
/// where the rest of the line is refused, too.
fn with_flag(word: &str, commands: &[String], arguments: &[OsString]) -> Option<String> {
    let mut flagged = vec!["prune".to_string()];
    for argument in arguments.iter().skip(1) {
        let argument = argument.to_string_lossy().into_owned();
        if argument.starts_with("--model") || commands.contains(&argument) {
            return None;
        }
        if argument == word {
            flagged.push("--model".to_string());
        }
        flagged.push(argument);
    }
    if !foreign::names_ratio(&flagged) {
        flagged.extend(["--sparsity-ratio", "0.5"].map(String::from));
    }
    command().try_get_matches_from(&flagged).is_ok().then(|| quoted(&flagged))
}

/// The nearest candidates that `given` may be a misspelling of. A quarter of its letters may be wrong.
fn meant<'a>(given: &str, candidates: impl Iterator<Item = &'a str>) -> Vec<String> {
    failure::meant(given, candidates, 4).into_iter().map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pruning::METHODS;

    #[test]
    fn a_word_is_proposed_for_its_misspelling_only() {
        let propose = |given: &str, candidates: &[&str]| meant(given, candidates.iter().copied());
        assert_eq!(propose("evl", &["eval", "help", "plan"]), ["eval"]);
        assert_eq!(propose("WANDA", &["wanda", "wanda-variant"]), ["wanda"]);
        assert_eq!(propose("rai", &["ria", "ria-per-row"]), ["ria"]);
        assert_eq!(propose("pan", &["plan", "man"]), ["plan", "man"]);
        assert_eq!(propose("--pruning-method", &["--prune-method"]), ["--prune-method"]);
        assert_eq!(propose("llama3.1-8b", &["llama-3.1-8b", "llama-3-8b"]), ["llama-3.1-8b"]);
        let nothing = Vec::<String>::new();
        assert_eq!(propose("llama-4", &["llama-30b", "llama-2-7b"]), nothing);
        assert_eq!(propose("fp8", &["f32", "bf16"]), nothing);
        assert_eq!(propose("sparsegpt", &["wanda", "magnitude"]), nothing);
        assert_eq!(propose("--sparsity", &["--sparsity-type"]), nothing);
    }

    #[test]
    fn no_method_of_this_version_is_called_absent() {
        assert!(METHODS.iter().all(|method| !OTHER_METHODS.contains(&method.name())));
    }
}
