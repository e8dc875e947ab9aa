//! The definition of the command line for clap: commands, and the texts around their flags.

use clap::{CommandFactory, Parser, Subcommand};

use super::advice;
use super::args::MessageArgs;
#[cfg(feature = "synthetic")]
use super::make_checkpoint;
#[cfg(feature = "selftest")]
use super::selftest;
use super::{
    demo, eval, generate, inspect, merge, pack, plan, prune, quantize, recover, report, shell,
    sweep,
};
use crate::job::machine;

/// Prune language models layer by layer, and measure what it cost.
///
/// Zeros alone change neither the size of the files nor the speed of inference; N:M patterns need a runtime that uses them.
#[derive(Debug, Parser)]
#[command(name = "prune", version, max_term_width = 120, args_conflicts_with_subcommands = true, after_help = "Example:\n  prune --model meta-llama/Llama-2-7b-hf --sparsity-ratio 0.6 --save out/7b", after_long_help = format!("{EXAMPLES}\n\n{CODES}"))]
pub struct Cli {
    #[command(subcommand)]
    pub(super) command: Option<Command>,
    #[command(flatten)]
    pub(super) prune: prune::PruneArgs,
}

/// Template of [`newcomer`].
const NEWCOMER: &str = "\
{about}

Try it:         prune demo
Prune a model:  prune --model models/llama-2-7b --sparsity-ratio 0.5 --save out

Commands:
{subcommands}

All flags: prune --help. Flags of a command: prune eval --help";

const EXAMPLES: &str = "\
Examples:
  prune --model meta-llama/Llama-2-7b-hf --sparsity-ratio 0.6 --save out/7b
  prune --model llama-2-7b --sparsity-ratio 0.5 --dataset wikitext2:wiki/ \\
        --eval-dataset wikitext2:wiki/ --eval both --save out/7b-half
  prune --model llama-2-7b --prune-method magnitude --sparsity-type 2:4 \\
        --eval none --save out/2of4
  prune eval out/7b/model --eval-dataset wikitext2:wiki/";

/// Shown below the examples of the long help.
const CODES: &str = "\
Exit codes:
  0 done, 1 failed, 2 wrong usage, 4 --max-perplexity is not met, 101 a bug
  3 interrupted: the same command continues
  128 + signal (130 after Ctrl-C): interrupted, nothing to continue

Environment:
  SLURM_CPUS_PER_TASK            threads, unless --threads says so
  PRUNE_CACHE, XDG_CACHE_HOME    token ids and unpacked corpora
  HF_TOKEN, HF_TOKEN_PATH        the token for the hub
  HF_HOME, HF_HUB_CACHE          the folder of the hub's files
  HF_ENDPOINT, HF_HUB_OFFLINE    another hub, or none
  HF_HUB_DOWNLOAD_TIMEOUT        seconds of silence before a retry
  SSL_CERT_FILE, SSL_CERT_DIR    certificates to trust instead of the system's";

/// The commands.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Prune a small model inside the program, and show the effect
    Demo(demo::DemoArgs),
    /// Measure the perplexity of a checkpoint, layer by layer
    #[command(after_help = eval::EXAMPLES)]
    Eval(Box<eval::EvalArgs>),
    /// Continue a prompt with one checkpoint, or compare two
    #[command(after_help = generate::EXAMPLES, mut_arg("device_map", |map| map.hide(true)))]
    Generate(generate::GenerateArgs),
    /// Show a checkpoint's sparsity, and compare it with a dense one
    Inspect(inspect::InspectArgs),
    /// Merge models, tensor by tensor, by a recipe or flags
    #[command(after_help = merge::EXAMPLES)]
    Merge(Box<merge::MergeArgs>),
    /// Store a pruned checkpoint as bit masks and the kept weights
    #[command(after_help = pack::EXAMPLES)]
    Pack(pack::PackArgs),
    /// Show what a run would take: memory per phase and device, and time
    #[command(after_help = plan::EXAMPLES)]
    Plan(plan::PlanArgs),
    /// Quantise a checkpoint to 4 bits, in the layout of bitsandbytes
    #[command(after_help = quantize::EXAMPLES)]
    Quantize(quantize::QuantizeArgs),
    /// Train back what a pruned checkpoint lost; its zeros stay zero
    #[command(after_help = recover::EXAMPLES)]
    Recover(Box<recover::RecoverArgs>),
    /// Draw finished runs: pictures and one page
    Report(report::ReportArgs),
    /// Run a grid of methods, ratios and seeds, and tabulate it
    #[command(after_help = sweep::EXAMPLES)]
    Sweep(Box<sweep::SweepArgs>),
    /// Restore the checkpoint that was packed, byte for byte
    #[command(after_help = pack::UNPACK_EXAMPLES)]
    Unpack(pack::UnpackArgs),
    /// Print a completion script for a shell
    #[command(after_help = shell::COMPLETIONS_EXAMPLES)]
    Completions(shell::CompletionsArgs),
    /// Print the man page
    #[command(after_help = shell::MAN_EXAMPLES)]
    Man,
    /// Write a random model of any shape, for tests, benches and scale runs
    #[cfg(feature = "synthetic")]
    #[command(hide = true)]
    MakeCheckpoint(make_checkpoint::MakeCheckpointArgs),
    /// Compare a device with the CPU
    #[cfg(feature = "selftest")]
    #[command(hide = true)]
    Selftest(selftest::SelftestArgs),
}

impl Cli {
    pub(super) fn messages(&self) -> MessageArgs {
        match &self.command {
            None => self.prune.messages,
            Some(Command::Eval(args)) => args.messages,
            Some(Command::Demo(args)) => args.messages,
            Some(Command::Generate(args)) => args.messages,
            Some(Command::Inspect(args)) => args.messages,
            Some(Command::Merge(args)) => args.messages,
            Some(Command::Pack(args)) => args.messages,
            Some(Command::Unpack(args)) => args.messages,
            Some(Command::Plan(args)) => args.messages,
            Some(Command::Quantize(args)) => args.messages,
            Some(Command::Recover(args)) => args.messages,
            Some(Command::Report(args)) => args.messages,
            Some(Command::Sweep(args)) => args.run.messages,
            Some(_) => MessageArgs::default(),
        }
    }
}

/// The whole command line as clap knows it. `--version` also prints what this build and this machine can do.
pub fn command() -> clap::Command {
    let version = env!("CARGO_PKG_VERSION");
    let command = advice::with_numbers_below_zero(Cli::command());
    command.long_version(format!("{version}\n{}", machine::describe()))
}

/// The text for a command line without arguments. It fits on a terminal of 80 columns and 24 lines.
pub(super) fn newcomer() -> String {
    let mut command = command().help_template(NEWCOMER);
    command.render_help().to_string().trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }
}
