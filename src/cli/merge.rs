//! `prune merge`: flags and table.

use std::path::PathBuf;

use anyhow::Result;
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, ValueEnum};

use super::args::{DeviceArgs, MessageArgs};
use super::console::Console;
use super::outcome::Outcome;
use super::values::{BF16, F16, F32};
use crate::bytes::ByteSize;
use crate::data::DatasetSpec;
use crate::failure::Failure;
use crate::job;
use crate::merging::methods::METHODS;
use crate::merging::recipe::{FlagRecipe, MergeDtype, OTHER_METHODS, TokenizerSource};
use crate::report;
use crate::settings::{
    CalibrationSettings, DATASET, EvaluationSettings, MajorityOf, MergeEval, MergeSemantics,
    MergeSettings, OutputSettings, RecipeSettings, SaliencySource, TrimScope,
};

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune merge ties.yml --save out/merged
  prune merge --base llama-2-7b --model chat --model math --method ties \\
        --density 0.5 --weight 0.6,0.4 --save out/merged
  prune merge --base llama-2-7b --model llama-2-7b+my-lora --method linear \\
        --save out/folded";

/// Flags of `prune merge`.
#[derive(Debug, Clone, Args)]
pub struct MergeArgs {
    /// Recipe in mergekit's YAML; without it the flags below are the recipe
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    semantics: SemanticsArgs,
    #[command(flatten)]
    saliency: SaliencyArgs,
    #[command(flatten)]
    evaluation: MergeEvaluationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    output: MergeOutputArgs,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Flags that are a recipe.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Recipe")]
struct RecipeArgs {
    /// Base model: a folder or a hub id, MODEL@REVISION or MODEL+ADAPTER
    #[arg(long, value_name = "MODEL", conflicts_with = "config")]
    base: Option<String>,

    /// Model to merge; repeated for every model
    ///
    /// A folder or a hub id. MODEL+ADAPTER is a model with a LoRA adapter of peft, which is added tensor by tensor.
    #[arg(long, value_name = "MODEL", conflicts_with = "config")]
    model: Vec<String>,

    #[arg(
        long,
        value_name = "METHOD",
        conflicts_with = "config",
        value_parser = PossibleValuesParser::new(method_names()),
        help = methods_help()
    )]
    method: Option<String>,

    /// Weights of the models: one for all, or one per model [default: 1]
    #[arg(
        long,
        value_name = "W,...",
        value_delimiter = ',',
        allow_negative_numbers = true,
        conflicts_with = "config"
    )]
    weight: Vec<f64>,

    /// Shares of the differences that are kept: one for all, or one per model [default: 1]
    #[arg(long, value_name = "D,...", value_delimiter = ',', conflicts_with = "config")]
    density: Vec<f64>,

    /// Factor of the merged difference from the base [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, conflicts_with = "config")]
    lambda: Option<f64>,

    /// Divide by the sum of the weights, or not [default: as mergekit does for the method]
    #[arg(long, value_name = "BOOL", conflicts_with = "config")]
    normalize: Option<bool>,

    /// Give trimmed differences their norm back, or not [default: as mergekit does for the method]
    #[arg(long, value_name = "BOOL", conflicts_with = "config")]
    rescale: Option<bool>,

    /// Position between the base (0) and the other model (1), for slerp
    #[arg(long, value_name = "T", conflicts_with = "config")]
    t: Option<f64>,

    /// Shares of the largest differences that breadcrumbs removes [default: 0.01]
    #[arg(long, value_name = "G,...", value_delimiter = ',', conflicts_with = "config")]
    gamma: Vec<f64>,

    /// Half the spread of della's probabilities [default: 0.15]
    #[arg(long, value_name = "E,...", value_delimiter = ',', conflicts_with = "config")]
    epsilon: Vec<f64>,

    /// Dtype of the output [default: that of the inputs; f32 where they differ]
    ///
    /// The arithmetic is f32 in any case, and rounded once.
    #[arg(long, value_name = "DTYPE", conflicts_with = "config")]
    out_dtype: Option<OutDtypeArg>,

    /// Vocabulary of the output where the models have different ones
    #[arg(long, value_name = "TOKENS")]
    vocab: Option<VocabularyArg>,

    /// Cut all embeddings to the smallest vocabulary, as mergekit's flag does
    ///
    /// Rows are cut by number, so tokens may change their meaning. `--vocab` keeps tokens and rows together.
    #[arg(long, conflicts_with = "vocab")]
    unsafe_truncate_embeddings: bool,

    /// Folder of the hub's files [default: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
}

/// Flags that choose among definitions.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Definition")]
struct SemanticsArgs {
    /// The definition of the method where mergekit, the paper and peft differ
    #[arg(long, value_name = "WHOSE", default_value = "mergekit")]
    semantics: MergeSemantics,

    /// Tensors that are trimmed together [default: tensor for mergekit, model for the paper]
    #[arg(long, value_name = "SCOPE")]
    trim_scope: Option<TrimScope>,

    /// Elections of signs in ties and dare_ties of peft [default: total]
    #[arg(long, value_name = "MEASURE")]
    majority_sign: Option<MajorityOf>,

    /// Seed of random masks, and of calibration samples
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,

    /// Weights that are zero in every model stay zero
    #[arg(long)]
    keep_zeros: bool,
}

/// Flags of activation statistics.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Saliency")]
struct SaliencyArgs {
    /// Weigh differences by the activations of these models
    ///
    /// Samples pass through each measured model, and the mean squares of every linear's inputs are kept.
    #[arg(long, value_name = "MODELS")]
    saliency: Option<SaliencySource>,

    /// Text of the samples: NAME, NAME:PATH or a path; once for all measured models, or once for each
    #[arg(long, value_name = "NAME[:PATH]", default_value = DATASET)]
    dataset: Vec<DatasetSpec>,

    /// Samples per measured model
    #[arg(long, value_name = "N", default_value_t = MERGE_NSAMPLES, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    nsamples: u32,

    /// Tokens per sample, and per evaluation window [default: 2048, or the model's limit]
    #[arg(long, value_name = "TOKENS")]
    seqlen: Option<usize>,

    /// File of the statistics; measured and written if it does not exist [default: SAVE/saliency.safetensors]
    #[arg(long, value_name = "FILE")]
    saliency_file: Option<PathBuf>,
}

/// Samples of the statistics unless a flag says otherwise, as in the tool that this command covers.
const MERGE_NSAMPLES: u32 = 64;

/// Evaluation flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Evaluation")]
struct MergeEvaluationArgs {
    /// Models that perplexity is measured of [default: all with --eval-dataset, else none]
    #[arg(long, value_name = "MODELS")]
    eval: Option<MergeEval>,

    /// Evaluation text: NAME, NAME:PATH or a path, as in prune eval
    #[arg(long, value_name = "NAME[:PATH]")]
    eval_dataset: Option<DatasetSpec>,

    /// Only the first N windows, for a quick look
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    eval_windows: Option<u64>,

    /// Folder of token ids and unpacked corpora [default: PRUNE_CACHE, else XDG_CACHE_HOME/prune, else ~/.cache/prune]
    #[arg(long, value_name = "DIR")]
    text_cache: Option<PathBuf>,
}

/// Output flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
struct MergeOutputArgs {
    /// Run folder: model/, run.json
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,

    /// Folder for the merged model [default: SAVE/model]
    #[arg(long, value_name = "DIR")]
    save_model: Option<PathBuf>,

    /// Largest file of the output, like 5GB or 2GiB
    #[arg(long, value_name = "SIZE", default_value = "5GB")]
    out_shard_size: ByteSize,

    /// Write no README.md for the hub into the model's folder
    #[arg(long)]
    no_model_card: bool,

    /// Replace a finished run and its model files, or an unfinished one of another recipe
    #[arg(long)]
    force: bool,

    /// Only continue an unfinished merge; fail if there is none
    #[arg(long)]
    resume: bool,

    /// Print memory at the steps of the run, and write SAVE/memory_log.csv
    #[arg(long)]
    log_memory: bool,

    /// Elements of a piece per model, for tests
    #[arg(long, value_name = "N", hide = true)]
    piece_elements: Option<usize>,
}

/// Dtypes of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OutDtypeArg(MergeDtype);

impl ValueEnum for OutDtypeArg {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self(MergeDtype::F32), Self(MergeDtype::F16), Self(MergeDtype::Bf16)]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, others) = match self.0 {
            MergeDtype::F32 => ("f32", F32),
            MergeDtype::F16 => ("f16", F16),
            MergeDtype::Bf16 => ("bf16", BF16),
        };
        Some(PossibleValue::new(name).aliases(others))
    }
}

/// Vocabularies of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum VocabularyArg {
    /// The tokens of the base model
    Base,
    /// The tokens of all models
    Union,
}

impl MergeArgs {
    /// The settings of this command line.
    ///
    /// # Errors
    /// Fails without a recipe, and without a folder for the result.
    fn settings(&self, arguments: Vec<String>) -> Result<MergeSettings> {
        let output = &self.output;
        if output.save.is_none() && output.save_model.is_none() {
            return Err(Failure::usage("a merge needs a folder for its result")
                .hint("add --save DIR; the model becomes DIR/model")
                .into());
        }
        let evaluation = &self.evaluation;
        let default =
            if evaluation.eval_dataset.is_some() { MergeEval::All } else { MergeEval::None };
        let defaults = EvaluationSettings::default();
        let first = self.saliency.dataset.first().cloned();
        Ok(MergeSettings {
            arguments,
            recipe: self.recipe()?,
            cache_dir: self.recipe.cache_dir.clone(),
            semantics: self.semantics.semantics,
            trim_scope: self.semantics.trim_scope,
            majority_sign: self.semantics.majority_sign,
            seed: self.semantics.seed,
            keep_zeros: self.semantics.keep_zeros,
            truncates_embeddings: self.recipe.unsafe_truncate_embeddings,
            saliency: self.saliency.saliency,
            saliency_file: self.saliency.saliency_file.clone(),
            datasets: self.saliency.dataset.clone(),
            calibration: CalibrationSettings {
                dataset: first.unwrap_or_else(|| CalibrationSettings::default().dataset),
                nsamples: self.saliency.nsamples,
                seed: self.semantics.seed,
            },
            seqlen: self.saliency.seqlen,
            eval: evaluation.eval.unwrap_or(default),
            evaluation: EvaluationSettings {
                eval_dataset: evaluation.eval_dataset.clone().unwrap_or(defaults.eval_dataset),
                eval_windows: evaluation.eval_windows,
                text_cache: evaluation.text_cache.clone(),
                ..EvaluationSettings::default()
            },
            device: self.device.settings(),
            shard_bytes: output.out_shard_size.0,
            piece_elements: output.piece_elements,
            output: OutputSettings {
                save: output.save.clone(),
                save_model: output.save_model.clone(),
                no_model_card: output.no_model_card,
                force: output.force,
                resume: output.resume,
                log_memory: output.log_memory,
                ..OutputSettings::default()
            },
        })
    }

    fn recipe(&self) -> Result<RecipeSettings> {
        let flags = &self.recipe;
        let tokenizer = flags.vocab.map(|vocab| match vocab {
            VocabularyArg::Base => TokenizerSource::Base,
            VocabularyArg::Union => TokenizerSource::Union,
        });
        if let Some(config) = &self.config {
            return Ok(RecipeSettings::File(config.clone(), tokenizer));
        }
        let Some(method) = flags.method.clone().filter(|_| !flags.model.is_empty()) else {
            return Err(Failure::usage("there is nothing to merge")
                .detail("a merge has a recipe: a file, or --model and --method")
                .hint("prune merge ties.yml --save out, or see prune merge --help")
                .into());
        };
        Ok(RecipeSettings::Flags(Box::new(FlagRecipe {
            base: flags.base.clone(),
            models: flags.model.clone(),
            method,
            density: flags.density.clone(),
            weight: flags.weight.clone(),
            gamma: flags.gamma.clone(),
            epsilon: flags.epsilon.clone(),
            lambda: flags.lambda,
            t: flags.t,
            normalize: flags.normalize,
            rescale: flags.rescale,
            dtype: None,
            out_dtype: flags.out_dtype.map(|dtype| dtype.0),
            tokenizer,
        })))
    }
}

/// Names of the methods, and hidden names that the recipe refuses with the reason.
fn method_names() -> Vec<PossibleValue> {
    let of_models = METHODS.iter().map(|method| method.declaration().name);
    let others = OTHER_METHODS.map(|name| PossibleValue::new(name).hide(true));
    let names = of_models.chain(job::peft_methods()).map(PossibleValue::new);
    names.chain(others).collect()
}

/// The table of methods, for the help text.
fn methods_help() -> String {
    let methods: Vec<String> = METHODS
        .iter()
        .map(|method| format!("{} ({})", method.declaration().name, method.summary()))
        .collect();
    let of_adapters: Vec<&str> = job::peft_methods().collect();
    format!(
        "How the models are merged: {}; with --semantics peft also {}",
        methods.join(", "),
        of_adapters.join(", ")
    )
}

/// Runs the command and prints its table.
pub fn command(args: &MergeArgs, arguments: Vec<String>, console: &Console) -> Result<Outcome> {
    let settings = args.settings(arguments)?;
    if settings.output.log_memory {
        console.log_memory();
    }
    let manifest = job::merge(settings, console)?;
    if let Some(summary) = console.memory_summary() {
        console.lines(summary.trim_end().to_string());
    }
    console.record(&manifest, &report::table::text(&manifest))?;
    Ok(Outcome::of(&manifest, console))
}
