//! The command line: one file per command, groups of flags in `args`, the console that draws events.
//!
//! Only this room and `main.rs` print: results to standard output, everything else to standard error.

pub mod args;
pub mod console;
pub mod demo;
pub mod eval;
pub mod make_checkpoint;
pub mod prune;
mod run_folder;
pub mod session;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::failure::Failure;
use console::Console;

/// Prune Llama-family language models layer by layer, and measure what it cost.
///
/// Zeros alone change neither the size of the files nor the speed of inference; N:M patterns need a runtime that uses them.
#[derive(Debug, Parser)]
#[command(name = "prune", version, max_term_width = 120, args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    prune: prune::PruneArgs,
}

const EXAMPLES: &str = "\
Examples:
  prune --model llama-2-7b --sparsity-ratio 0.5 --dataset wikitext2:wiki/ \\
        --eval-dataset wikitext2:wiki/ --eval both --save out/llama2-7b
  prune --model llama-2-7b --prune-method magnitude --sparsity-type 2:4 \\
        --eval none --save out/2of4
  prune eval --model out/llama2-7b/model --eval-dataset wikitext2:wiki/

Exit codes: 0 done, 1 failed, 2 wrong usage.
Environment: PRUNE_CACHE, XDG_CACHE_HOME, SLURM_CPUS_PER_TASK.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure the perplexity of a checkpoint, layer by layer
    Eval(eval::EvalArgs),
    /// Prune a small model that is inside the program, and see what becomes of it
    Demo(demo::DemoArgs),
    /// Write a random Llama of any shape, for tests, benches and scale runs
    #[command(hide = true)]
    MakeCheckpoint(make_checkpoint::MakeCheckpointArgs),
}

/// Runs the program with these arguments and returns its exit code.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().map(dashes).collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are printed this way too, with exit code 0.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let arguments: Vec<String> = arguments
        .iter()
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let result = match &cli.command {
        None => prune::command(&cli.prune, arguments),
        Some(Command::Eval(args)) => eval::command(args, arguments),
        Some(Command::Demo(args)) => demo::command(args),
        Some(Command::MakeCheckpoint(args)) => make_checkpoint::command(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let is_usage = error
                .downcast_ref::<Failure>()
                .is_some_and(|failure| failure.is_usage);
            Console::print_error(&describe(&error));
            ExitCode::from(if is_usage { 2 } else { 1 })
        }
    }
}

/// `--sparsity_ratio` is `--sparsity-ratio`: scripts of the Python original use underscores.
fn dashes(argument: OsString) -> OsString {
    match argument.to_str() {
        Some(text) if text.starts_with("--") => {
            let (flag, value) = text.split_at(text.find('=').unwrap_or(text.len()));
            (flag.replace('_', "-") + value).into()
        }
        _ => argument,
    }
}

/// An error as a person reads it: the failure's own message first, where it happened below, the hint last.
pub fn describe(error: &anyhow::Error) -> String {
    let places: Vec<String> = error.chain().map(ToString::to_string).collect();
    let Some(failure) = error.downcast_ref::<Failure>() else {
        let mut text = format!("error: {}", places[0]);
        for cause in places.iter().skip(1) {
            text += &format!("\n  because: {cause}");
        }
        return text;
    };
    let mut text = format!("error: {}", failure.message);
    for detail in &failure.details {
        text += &format!("\n  {detail}");
    }
    let own = failure.to_string();
    for place in places.iter().filter(|place| **place != own) {
        text += &format!("\n  {place}");
    }
    if let Some(hint) = &failure.hint {
        text += &format!("\nhint: {hint}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn underscores_in_flags_are_dashes_and_values_stay() {
        let dashed = |text: &str| dashes(text.into()).into_string().unwrap();
        assert_eq!(dashed("--sparsity_ratio=0.5_x"), "--sparsity-ratio=0.5_x");
        assert_eq!(dashed("my_model"), "my_model");
    }

    #[test]
    fn an_error_reads_message_place_hint() {
        let error = anyhow::Error::from(Failure::new("a is 3").detail("b is 4").hint("say --c"))
            .context("in `config.json`");
        assert_eq!(
            describe(&error),
            "error: a is 3\n  b is 4\n  in `config.json`\nhint: say --c"
        );
        assert_eq!(
            describe(&anyhow::anyhow!("x").context("y")),
            "error: y\n  because: x"
        );
    }
}
