//! The command line: a file per command, groups of flags in `args`, the console that draws events.
//!
//! Only this room and `main.rs` print: results to standard output, everything else to standard error.
//!
//! | file | content |
//! | --- | --- |
//! | `advice` | advice that holds for every flag: a value to type, a flag to leave out, an example of the command |
//! | `bars` | the two bars of a terminal: the current phase and the run |
//! | `console` | the receiver of all output: results to standard output, everything else to standard error |
//! | `definition` | the definition of the command line for clap |
//! | `demo` | `prune demo`: flags, table and explanation |
//! | `ending` | state for the end of the process: the message about unfinished files, and the folders to release or remove |
//! | `eval` | `prune eval`: flags and table |
//! | `foreign` | command lines of foreign pruning programs, in the words of this program |
//! | `generate` | `prune generate`: flags, and the text as it comes |
//! | `inspect` | `prune inspect`: what a checkpoint holds, and whether it is a pruned copy of a dense checkpoint |
//! | `interrupt` | signals and panics |
//! | `lines` | lines on standard error: the texts of events, and their way out |
//! | `make_checkpoint` | `prune make-checkpoint` (hidden): a random model of any shape, for tests, benches and scale runs |
//! | `merge` | `prune merge`: flags and table |
//! | `mistake` | advice under a command line that is refused |
//! | `model` | the model of a command: `--model`, or a word of the command line |
//! | `pack` | `prune pack` and `prune unpack`: flags and results |
//! | `outcome` | exit codes of commands that did their work |
//! | `plain_text` | text without control characters, as a terminal may show it |
//! | `plan` | `prune plan`: flags, plan and table |
//! | `progress` | the counts of the phase and of the run, and their texts |
//! | `prune` | `prune`: flags of the main job, and its table |
//! | `quantize` | `prune quantize`: flags and result |
//! | `recover` | `prune recover`: flags, and the table of the run |
//! | `report` | `prune report`: pictures and a page from the run folders of finished runs |
//! | `selftest` | `prune selftest` (hidden): flags |
//! | `shell` | `prune completions` and `prune man` |
//! | `sweep` | `prune sweep`: flags, checks of the lists, and the table |
//! | `terminal` | the terminal as the bars see it |
//! | `wrap` | lines that a terminal shows without breaking words |

mod advice;
pub mod args;
mod bars;
pub mod console;
mod definition;
pub mod demo;
mod ending;
pub mod eval;
mod foreign;
pub mod generate;
pub mod inspect;
mod interrupt;
mod lines;
#[cfg(feature = "synthetic")]
pub mod make_checkpoint;
pub mod merge;
mod mistake;
pub mod model;
pub mod outcome;
pub mod pack;
mod plain_text;
pub mod plan;
mod progress;
pub mod prune;
pub mod quantize;
pub mod recover;
pub mod report;
#[cfg(feature = "selftest")]
pub mod selftest;
pub mod shell;
pub mod sweep;
mod terminal;
mod wrap;

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::FromArgMatches;

use crate::data::chat::process;
use crate::failure::{self, Failure};
use crate::ranks::launcher::{self, Launched};
use crate::ranks::{Left, Ranks};
use crate::run::{Event, Events, Stopped};
use crate::runtime::memory;
use console::Console;
pub use definition::{Cli, command};
use definition::{Command, newcomer};
use lines::print_line;
use outcome::Outcome;
use plain_text::{visible, with_bytes};

/// Runs the program with these arguments and returns its exit code.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().map(dashes).collect();
    if arguments.iter().skip(1).eq([process::ARGUMENT]) {
        return render_chat_templates();
    }
    // The file of the program may be replaced while it runs; Linux still finds it here.
    let itself = PathBuf::from("/proc/self/exe");
    match itself.exists() {
        true => process::use_program(itself),
        false => drop(std::env::current_exe().map(process::use_program)),
    }
    memory::return_large_blocks();
    if arguments.len() <= 1 {
        print_line(&newcomer());
        return ExitCode::from(2);
    }
    if let Some(other) = arguments.iter().find(|argument| argument.to_str().is_none()) {
        print_line(&failure::describe(&not_utf8(other).into()));
        return ExitCode::from(2);
    }
    let parsed = command().try_get_matches_from(&arguments).and_then(|matches| {
        Ok((Cli::from_arg_matches(&matches)?, matches.subcommand_name().map(str::to_string)))
    });
    let (cli, name) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            let error = mistake::explain(error, &arguments);
            // Help and version are printed this way too, with exit code 0.
            let text = error.render().to_string();
            match visible(&text) {
                Cow::Borrowed(_) => drop(error.print()),
                // A name that the shell found is no text for a terminal.
                Cow::Owned(text) => print_line(text.trim_end()),
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let arguments: Vec<String> =
        arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let console = Console::new(cli.messages(), interrupt::end_for_another);
    let ranks = match ranks_of(&cli, name.as_deref()) {
        Ok(ranks) => ranks,
        // The rank that left has told why.
        Err(error) if error.is::<Left>() => return ExitCode::FAILURE,
        Err(error) => return end(&console, Err(error)),
    };
    let console = Arc::new(if ranks.is_first() { console } else { console.silent() });
    interrupt::end_on_panic(&console);
    interrupt::watch(&console);
    console.keep_telling();
    let done = dispatch(cli, arguments, &console, &ranks);
    let code = end(&console, told(done, &ranks));
    ranks.close();
    code
}

/// Tells the other ranks of an error, unless it began at one of them.
fn told(done: anyhow::Result<Outcome>, ranks: &Ranks) -> anyhow::Result<Outcome> {
    let error = match done {
        // They know it already.
        Err(error) if ranks.departure().is_none() => error,
        done => return done,
    };
    let is_stopped = error.is::<Stopped>();
    let text = failure::describe(&error);
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    ranks.leave((!is_stopped).then(|| text.to_string()));
    Err(error)
}

/// The last words and the exit code of a command.
fn end(console: &Console, done: anyhow::Result<Outcome>) -> ExitCode {
    match done.and_then(|outcome| console.check_results().map(|()| outcome)) {
        Ok(outcome) => outcome.exit_code(),
        Err(error) if error.is::<Stopped>() => {
            console.stopped();
            ExitCode::from(interrupt::RESUMABLE)
        }
        Err(error) => {
            let failure = error.downcast_ref::<Failure>();
            if failure.is_some_and(|failure| failure.is_lasting) {
                console.emit(Event::IfInterrupted(None));
            }
            console.error(&failure::describe(&error));
            let is_usage = failure.is_some_and(|failure| failure.is_usage);
            ExitCode::from(if is_usage { 2 } else { 1 })
        }
    }
}

/// The refusal of an argument that no record could hold, and no printed command could repeat.
fn not_utf8(argument: &OsStr) -> Failure {
    Failure::usage(format!("`{}` is not UTF-8", with_bytes(argument)))
        .detail("records and the command that continues a run hold paths as text")
        .hint("rename the file or folder, or name it by a link: ln -s OLD NEW")
}

/// Serves the process that started this process: renders chat templates. Errors have no reader.
fn render_chat_templates() -> ExitCode {
    let served = process::serve(std::io::stdin(), std::io::stdout());
    ExitCode::from(u8::from(served.is_err()))
}

/// The ranks of a command: prune, eval, merge, recover and sweep share their work, commands that only print may run several times, and
/// every other command runs in a single process.
///
/// # Errors
/// Fails where a launcher has started several processes of a command that runs in one, and where MPI cannot be started.
fn ranks_of(cli: &Cli, name: Option<&str>) -> anyhow::Result<Ranks> {
    match &cli.command {
        Some(Command::Sweep(args)) if args.is_shard() => return Ok(Ranks::alone()),
        None
        | Some(Command::Eval(_) | Command::Merge(_) | Command::Recover(_) | Command::Sweep(_)) => {
            return launcher::join(print_line);
        }
        Some(Command::Inspect(_) | Command::Plan(_) | Command::Completions(_) | Command::Man) => {
            return Ok(Ranks::alone());
        }
        Some(_) => {}
    }
    match Launched::here() {
        Some(launched) => {
            let name = name.unwrap_or_default();
            Err(launched.refusal(&format!("prune {name}")).into())
        }
        None => Ok(Ranks::alone()),
    }
}

fn dispatch(
    cli: Cli,
    arguments: Vec<String>,
    console: &Console,
    ranks: &Ranks,
) -> anyhow::Result<Outcome> {
    let done = match &cli.command {
        None => return prune::command(&cli.prune, arguments, console, ranks),
        Some(Command::Eval(args)) => return eval::command(args, arguments, console, ranks),
        Some(Command::Merge(args)) => return merge::command(args, arguments, console, ranks),
        Some(Command::Recover(args)) => return recover::command(args, arguments, console, ranks),
        Some(Command::Sweep(args)) => return sweep::command(args, arguments, console, ranks),
        Some(Command::Demo(args)) => demo::command(args, console),
        Some(Command::Generate(args)) => generate::command(args, console),
        Some(Command::Inspect(args)) => inspect::command(args, console),
        Some(Command::Pack(args)) => pack::pack(args, arguments, console),
        Some(Command::Unpack(args)) => pack::unpack(args, arguments, console),
        Some(Command::Plan(args)) => plan::command(args, console),
        Some(Command::Quantize(args)) => quantize::command(args, arguments, console),
        Some(Command::Report(args)) => report::command(args, console),
        Some(Command::Completions(args)) => shell::completions(args, command(), console),
        Some(Command::Man) => shell::man(command(), console),
        #[cfg(feature = "synthetic")]
        Some(Command::MakeCheckpoint(args)) => make_checkpoint::command(args),
        #[cfg(feature = "selftest")]
        Some(Command::Selftest(args)) => selftest::command(args, console),
    };
    done.map(|()| Outcome::Done)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn underscores_in_flags_are_dashes_and_values_stay() {
        let dashed = |text: &str| dashes(text.into()).into_string().unwrap();
        assert_eq!(dashed("--sparsity_ratio=0.5_x"), "--sparsity-ratio=0.5_x");
        assert_eq!(dashed("my_model"), "my_model");
    }
}
