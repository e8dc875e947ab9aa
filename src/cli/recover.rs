//! `prune recover`: flags, and the table of the run.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::args::{DeviceArgs, EvaluationArgs, MessageArgs, OutputArgs};
use super::console::Console;
use super::model::ModelArgs;
use super::outcome::Outcome;
use crate::data::DatasetSpec;
use crate::failure::Failure;
use crate::job;
use crate::quantized::FourBitFormat;
use crate::recovery::optimizers::{ScheduleShape, find};
use crate::report;
use crate::settings::{
    ALL_LINEAR, CalibrationSettings, DATASET, EvalSides, NSAMPLES, RecoverySettings, RecoveryWay,
    Settings, TrainedKind,
};

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune recover --model out/7b/model --teacher llama-2-7b --save out/7b-blocks
  prune recover --model out/7b/model --how lora --dataset c4 --save out/7b-lora
  prune recover --model out/7b/model --how lora --base-quant nf4-double \\
        --optim paged-adamw8bit --max-memory cpu=4GiB --save out/7b-qlora";

/// Flags of `prune recover`.
#[derive(Debug, Clone, Args)]
pub struct RecoverArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    optimizer: OptimizerArgs,
    #[command(flatten)]
    text: TrainingTextArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Models that perplexity is measured of; `both` adds the model before the training
    #[arg(long, value_name = "SIDE", default_value = "both", help_heading = "Evaluation")]
    eval: EvalSides,
    #[command(flatten)]
    evaluation: EvaluationArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Flags of what is trained.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Training")]
struct TrainingArgs {
    /// Way of the training
    #[arg(long, value_name = "WAY", default_value = "blocks")]
    how: RecoveryWay,

    /// Dense model that is learned from; needed by `blocks`
    ///
    /// The checkpoint that was pruned: a folder, or an id on the hub. It has the shape of the model. `blocks` learns the outputs of its
    /// layers, `lora` and `full` its logits together with the text.
    #[arg(long, value_name = "DIR|ID")]
    teacher: Option<PathBuf>,

    /// Share of the teacher's logits in the loss of `lora` and `full` [default: 0.5 with --teacher]
    ///
    /// The loss of a token is (1 - W) times its own, and W times the divergence (KL) of the probabilities from the teacher's. A step also
    /// passes its examples through the teacher.
    #[arg(long, value_name = "W", value_parser = share)]
    distill_weight: Option<f64>,

    /// Trained parameters of `blocks` [default: weights]
    #[arg(long, value_name = "KIND")]
    train: Option<TrainedKind>,

    /// Rank of the factors
    #[arg(long, value_name = "R", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=65536))]
    rank: u32,

    /// Scale of the factors' product, times the rank
    #[arg(long, value_name = "A", default_value = "32")]
    alpha: f64,

    /// Linear layers that are trained, separated by commas
    #[arg(long, value_name = "NAMES", default_value = ALL_LINEAR, value_delimiter = ',')]
    target_modules: Vec<String>,

    /// Dropout of the factors' input; only 0 is possible
    #[arg(long, value_name = "P", default_value = "0")]
    lora_dropout: f64,

    /// Also train the weights of the norms
    #[arg(long)]
    train_norms: bool,

    /// Format of the frozen base while factors are trained: nf4 or nf4-double
    ///
    /// The matrices are quantised once, as bitsandbytes does it, into a file in the offload folder. Masks are taken before. The
    /// result is merged into the quantised base.
    #[arg(long, value_name = "FORMAT")]
    base_quant: Option<FourBitFormat>,

    /// Round bf16 weights up or down by chance, in proportion to the distances
    #[arg(long)]
    stochastic_rounding: bool,
}

/// Flags of the optimizer.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Optimizer")]
struct OptimizerArgs {
    /// Optimizer: adamw, adamw8bit, paged-adamw8bit, paged-adamw32bit or sgd
    ///
    /// The 8-bit states are those of bitsandbytes. `paged` keeps parameters, gradients and states in a file in the offload folder,
    /// so memory does not grow with the depth of the model. Names of transformers' Trainer for the same rules are accepted, like
    /// `paged_adamw_8bit` and `adamw_torch`.
    #[arg(long, value_name = "NAME", default_value = "adamw")]
    optim: String,

    /// Learning rate [default: 0.064 / hidden_size for weights, in blocks 0.256 / hidden_size; 0.016 / sqrt(hidden_size) for factors]
    #[arg(long, value_name = "RATE", value_parser = positive)]
    lr: Option<f64>,

    /// Shape of the learning rate after the warm-up
    #[arg(long, value_name = "SHAPE", default_value = "cosine")]
    schedule: ScheduleShape,

    /// Steps in which the rate rises from 0 [default: a twentieth of the steps; none for blocks]
    #[arg(long, value_name = "STEPS")]
    warmup: Option<u64>,

    /// Steps; for blocks, of each layer [default: 200]
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    steps: Option<u64>,

    /// Passes over the examples instead of a number of steps [default for blocks: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    epochs: Option<u64>,

    /// Decoupled weight decay
    #[arg(long, value_name = "DECAY", default_value = "0", value_parser = not_negative)]
    weight_decay: f64,

    /// Momentum of sgd
    #[arg(long, value_name = "M", default_value = "0", value_parser = not_negative)]
    momentum: f64,

    /// Examples of a step [default: 4; 8 for blocks]
    ///
    /// They pass each layer one after the other, so memory grows with their hidden states only.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch_size: Option<u32>,

    /// Factor of the batch size, for scripts that accumulate gradients
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    accumulate: u32,

    /// Keep the activations of the last N layers for the backward pass in place of computing them again
    ///
    /// Each layer takes 4 bytes per token for 2 queries, 2 keys, 1 hidden_size and 2 intermediate_size, for all examples of a step, and
    /// its weights stay in memory, too. A step is faster, and its result has the same bits.
    #[arg(long, value_name = "N", default_value = "0")]
    keep_activations: usize,

    /// Limit of the gradients' norm; 0 for none [default: 0.3; none for blocks]
    #[arg(long, value_name = "NORM", value_parser = not_negative)]
    max_grad_norm: Option<f64>,

    /// Also write an adapter of the factors for peft: SAVE/adapter
    #[arg(long)]
    save_adapter: bool,

    /// Steps between two saved states of the training [default: those of ten minutes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    save_every: Option<u64>,
}

/// Flags of the training's text.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Text")]
struct TrainingTextArgs {
    /// Text to train on: NAME, NAME:PATH or a path
    ///
    /// As for calibration, and `jsonl:PATH` with `text`, `messages`, or `prompt` and `completion` on each line. Conversations go
    /// through the model's chat template, and loss counts on answers only. docs/training-data.md has all forms.
    #[arg(long, value_name = "NAME[:PATH]", default_value = DATASET)]
    dataset: DatasetSpec,

    /// Samples of `blocks`, else the most examples that are read [default: 128; as many as the steps need]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    nsamples: Option<u32>,

    /// Tokens per example, and per evaluation window [default: 2048, or the model's limit]
    #[arg(long, value_name = "TOKENS")]
    seqlen: Option<usize>,

    /// Seed of samples, their order, and the first factors
    #[arg(long, value_name = "SEED", default_value = "0")]
    seed: u64,

    /// Make an example of each document instead of packing all into rows
    #[arg(long)]
    per_document: bool,

    /// Examples that are not trained on, for a loss at intervals; the best state is kept [default: 8; none for blocks]
    #[arg(long, value_name = "N")]
    held_out: Option<usize>,

    /// Steps between two measurements of the held-out loss [default: a tenth of the steps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    eval_every: Option<u64>,

    /// Stop after N measurements without a better one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    patience: Option<u64>,
}

impl RecoverArgs {
    /// The settings of this command line.
    fn settings(&self, arguments: Vec<String>) -> Result<Settings> {
        let recovery = self.recovery()?;
        let whole = recovery.steps.map(|steps| {
            steps
                .saturating_mul(recovery.per_step() as u64)
                .saturating_add(recovery.held_out as u64)
        });
        let nsamples = match (self.text.nsamples, recovery.how, whole) {
            (Some(nsamples), ..) => nsamples,
            (None, RecoveryWay::Blocks, _) => NSAMPLES,
            (None, _, whole) => whole.map_or(u32::MAX, |whole| whole.min(u32::MAX.into()) as u32),
        };
        Ok(Settings {
            arguments,
            model: self.model.settings()?,
            sparsity: None,
            layer_drop: None,
            width_drop: None,
            recovery: Some(recovery),
            calibration: Some(CalibrationSettings {
                dataset: self.text.dataset.clone(),
                nsamples,
                seed: self.text.seed,
            }),
            seqlen: self.text.seqlen,
            evaluation: self.evaluation.settings(self.eval),
            device: self.device.settings(),
            output: self.output.settings(),
        })
    }

    fn recovery(&self) -> Result<RecoverySettings> {
        let (training, optimizer, text) = (&self.training, &self.optimizer, &self.text);
        if training.lora_dropout != 0.0 {
            return Err(Failure::usage(format!(
                "--lora-dropout {} is not possible",
                training.lora_dropout
            ))
            .detail("the factors are trained through the merged weight M∘(W + s·B·A), which has no input of its own to drop")
            .hint("leave --lora-dropout out; --weight-decay and --patience limit overfitting, too")
            .into());
        }
        if !(training.alpha.is_finite() && training.alpha > 0.0) {
            return Err(Failure::usage(format!("--alpha {} is not above 0", training.alpha))
                .hint("use twice the rank, like --rank 16 --alpha 32")
                .into());
        }
        let own = RecoverySettings::of(training.how);
        let (steps, epochs) = match (optimizer.steps, optimizer.epochs) {
            (None, None) => (own.steps, own.epochs),
            asked => asked,
        };
        if let (Some(train), true) = (training.train, training.how != RecoveryWay::Blocks)
            && train != own.trains
        {
            return Err(Failure::usage(format!(
                "--train is a choice of --how blocks; --how {} decides it",
                training.how.name()
            ))
            .hint("leave --train out")
            .into());
        }
        Ok(RecoverySettings {
            teacher: training.teacher.clone(),
            distill_weight: training.distill_weight,
            trains: training.train.unwrap_or(own.trains),
            rank: training.rank as usize,
            alpha: training.alpha,
            target_modules: training.target_modules.clone(),
            train_norms: training.train_norms,
            // An alias of an optimizer means the same run. An unknown name is refused later, when the model is at hand.
            optim: find(&optimizer.optim)
                .map_or(optimizer.optim.as_str(), |kind| kind.name)
                .to_string(),
            lr: optimizer.lr,
            schedule: optimizer.schedule,
            warmup: optimizer.warmup,
            weight_decay: optimizer.weight_decay,
            momentum: optimizer.momentum,
            steps,
            epochs,
            batch_size: optimizer.batch_size.map_or(own.batch_size, |size| size as usize),
            accumulate: optimizer.accumulate as usize,
            keep_activations: optimizer.keep_activations,
            max_grad_norm: match optimizer.max_grad_norm {
                None => own.max_grad_norm,
                Some(limit) => Some(limit).filter(|limit| *limit > 0.0),
            },
            base_quant: training.base_quant,
            per_document: text.per_document,
            held_out: text.held_out.unwrap_or(own.held_out),
            eval_every: text.eval_every,
            patience: text.patience,
            save_adapter: optimizer.save_adapter,
            save_every: optimizer.save_every,
            stochastic_rounding: training.stochastic_rounding,
            ..own
        })
    }
}

/// Runs the command and prints its table.
pub fn command(args: &RecoverArgs, arguments: Vec<String>, console: &Console) -> Result<Outcome> {
    let settings = args.settings(arguments)?;
    if settings.output.log_memory {
        console.log_memory();
    }
    let manifest = job::recover(settings, console)?;
    if let Some(summary) = console.memory_summary() {
        console.lines(summary.trim_end().to_string());
    }
    console.record(&manifest, &report::table::text(&manifest))?;
    console.profile(&manifest);
    Ok(Outcome::of(&manifest, console))
}

/// A number from 0 to 1.
fn share(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("it is no number from 0 to 1".to_string()),
    }
}

/// A number above 0.
fn positive(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("it is no number above 0".to_string()),
    }
}

/// A number of at least 0.
fn not_negative(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("it is no number of at least 0".to_string()),
    }
}
