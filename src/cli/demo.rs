//! `prune demo`: flags, table and explanation.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Args;

use super::args::MessageArgs;
use super::console::Console;
use crate::job::demo::{DemoSettings, demo};
use crate::run::Events;

const EXAMPLES: &str = "\
Examples:
  prune demo
  prune demo --save out/demo && prune report out/demo/*-*";

/// Flags of `prune demo`.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES)]
pub struct DemoArgs {
    /// Folder to keep the dense model and every run in; must not exist or be empty
    ///
    /// The dense model goes to DIR/dense, every run to a folder of its own with model/ and run.json. Without it, a
    /// temporary folder is used and removed.
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,

    /// Seed of the calibration samples
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Runs the command and prints its table.
pub fn command(args: &DemoArgs, console: &Console) -> Result<()> {
    let started = Instant::now();
    let settings = DemoSettings { save: args.save.clone(), seed: args.seed, threads: args.threads };
    let table = demo(&settings, console)?;
    console.note(String::new());
    console.record(&table, &table.text())?;
    console.lines(format!("\n{}", explanation(args)));
    console.note(format!("({:.0} s)", started.elapsed().as_secs_f64()));
    Ok(())
}

/// Explains the table and names the next commands.
fn explanation(args: &DemoArgs) -> String {
    let kept = match &args.save {
        Some(save) => {
            let save = save.display().to_string();
            let save = save.trim_end_matches('/');
            format!(
                "The models are in `{save}`. Look closer:\n  \
                 prune recover --model {save}/wanda-60/model --how full --dataset demo \\\n        \
                 --eval-dataset demo --save {save}-full\n  \
                 prune --model {save}/dense --sparsity-ratio 0.7 --dataset demo \\\n        \
                 --eval-dataset demo --save {save}-70"
            )
        }
        None => "Keep the models with `prune demo --save DIR`. Then, on a model of your own:\n  \
                 prune --model DIR --sparsity-ratio 0.5 --eval both --save OUT"
            .to_owned(),
    };
    format!(
        "Perplexity says how many tokens the model hesitates between; less is better.\n\
         Magnitude drops the smallest weights, Wanda those that matter least to the\n\
         activations they meet. Ladder adjusts the weights that stay, and a recovery\n\
         trains them, with the dense model as the teacher. Zeros take room and time\n\
         until `prune pack` and `prune generate` leave them out; other programs keep\n\
         them. `prune generate DIR --prompt Hello --bench` measures a model of your own.\n{kept}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::definition::command;

    #[test]
    fn the_commands_of_the_explanation_parse_and_save_their_results() {
        let line = ["prune", "demo", "--save", "out/demo/"];
        let matches = command().try_get_matches_from(line).unwrap();
        let (_, demo) = matches.subcommand().unwrap();
        let args = <DemoArgs as clap::FromArgMatches>::from_arg_matches(demo).unwrap();
        let text = explanation(&args).replace("\\\n", " ");
        let commands: Vec<&str> =
            text.lines().map(str::trim).filter(|line| line.starts_with("prune ")).collect();
        assert_eq!(commands.len(), 2, "{text}");
        for line in commands {
            assert!(line.contains(" --save out/demo-"), "{line}");
            assert!(command().try_get_matches_from(line.split_whitespace()).is_ok(), "{line}");
        }
    }
}
