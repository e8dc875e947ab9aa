//! `prune quantize`: flags and result.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValue;

use super::args::MessageArgs;
use super::console::Console;
use super::model::ModelPathArgs;
use crate::job;
use crate::placement::Budget;
use crate::quantized::FourBitFormat;
use crate::report;
use crate::settings::QuantizeSettings;

pub(super) const EXAMPLES: &str = "\
Examples:
  prune quantize --to nf4-double out/7b/model --save out/7b-4bit
  prune eval out/7b-4bit --eval-dataset wikitext2:wiki/";

/// Flags of `prune quantize`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("word", |word| word.help("Checkpoint folder in Hugging Face layout, or an id of the hub; not quantised")))]
pub struct QuantizeArgs {
    #[command(flatten)]
    model: ModelPathArgs,

    /// Format of the decoder linears
    ///
    /// `nf4` has f32 scales, 4.5 bits per weight; `nf4-double` has 8-bit scales, 4.13 bits per weight. Embedding, head, norms and biases
    /// stay as they are. Pruned weights stay exactly 0.
    #[arg(long, value_name = "FORMAT")]
    to: FourBitFormat,

    /// Folder for the quantised checkpoint; must not hold another model
    #[arg(long, value_name = "OUT")]
    save: PathBuf,

    /// Replace the model files in OUT
    #[arg(long)]
    force: bool,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Memory limit, like 2GiB [default: 80 % of what is available]
    ///
    /// The run is planned to stay below; what cannot fit is refused before it begins. Results do not depend on it.
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<Budget>,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

impl clap::ValueEnum for FourBitFormat {
    fn value_variants<'a>() -> &'a [Self] {
        &Self::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
    }
}

/// Runs the command and prints its result.
///
/// # Errors
/// Fails as [`job::quantize()`].
pub fn command(args: &QuantizeArgs, arguments: Vec<String>, console: &Console) -> Result<()> {
    let settings = QuantizeSettings {
        model: args.model.path("prune quantize --to nf4-double out/7b/model --save out/7b-4bit")?,
        to: args.to,
        save: args.save.clone(),
        force: args.force,
        threads: args.threads,
        max_memory: args.max_memory.clone().unwrap_or_default(),
        arguments,
    };
    let report = job::quantize(&settings, console)?;
    console.record(&report, &report::quantization::text(&report))
}
