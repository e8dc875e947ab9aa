//! Flags of the sparsity: method, refinement, ratios and patterns.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::failure::Failure;
use crate::pipeline::allocation::Allocation;
use crate::pipeline::{LayerRatios, Propagation, Selection};
use crate::pruning::{METHODS, MethodOptions, Pattern, REFINEMENTS};
use crate::settings::{PRUNE_METHOD, SparsitySettings};

/// Sparsity flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sparsity")]
pub(super) struct SparsityArgs {
    #[arg(
        long,
        value_name = "METHOD",
        default_value = PRUNE_METHOD,
        value_parser = PossibleValuesParser::new(METHODS.iter().map(|method| method.name())),
        help = methods_help()
    )]
    pub(super) prune_method: String,

    /// Damping of sparsegpt, as a fraction of the mean square of the inputs [default: 0.01]
    #[arg(long, value_name = "FRACTION", allow_negative_numbers = true)]
    percdamp: Option<f64>,

    /// Columns that sparsegpt prunes together [default: 128]
    #[arg(long, value_name = "COLUMNS")]
    blocksize: Option<usize>,

    #[arg(
        long,
        value_name = "STEP",
        value_parser = PossibleValuesParser::new(REFINEMENTS.iter().map(|step| step.name())),
        help = refinements_help()
    )]
    refine: Option<String>,

    /// Swaps per row of `--refine dsnot` at most [default: 50]
    #[arg(long, value_name = "N")]
    dsnot_cycles: Option<usize>,

    /// `--refine dsnot` refines the matrices of the MLP, too
    #[arg(long)]
    dsnot_mlp: bool,

    /// Permute the intermediate channels of each MLP, so that N:M groups of down_proj keep more importance
    ///
    /// The rows of gate_proj and up_proj and the columns of down_proj are written in another order, which does not change the function
    /// of the MLP. Needs an N:M pattern, and all three matrices among those that are pruned.
    #[arg(long)]
    permute_channels: bool,

    /// Layers that the samples have passed before they reach the next one
    #[arg(long, value_name = "LAYERS", value_enum, default_value_t)]
    propagate: PropagateArg,

    /// Observe the input of every matrix behind the pruned matrices before it: four passes of the samples per layer
    #[arg(long)]
    true_sequential: bool,

    /// The ratio of each layer: the same for all, by its outliers, or by the smallest sum of output errors
    #[arg(long, value_name = "RULE", value_enum, default_value_t)]
    allocate: AllocateArg,

    /// Ratios of layers lie this far around --sparsity-ratio [default: 0.08 for owl, 0.15 for error]
    #[arg(long, value_name = "BAND", allow_negative_numbers = true)]
    ratio_band: Option<f64>,

    /// Scores above this multiple of the mean are outliers for --allocate owl [default: 5]
    #[arg(long, value_name = "M", allow_negative_numbers = true)]
    owl_outliers: Option<f64>,

    /// Fraction removed, from 0 up to but not including 1
    ///
    /// May be left out with an N:M pattern, where it must equal N/M. 0 prunes nothing: a dense evaluation.
    #[arg(long, value_name = "RATIO", allow_negative_numbers = true)]
    pub(super) sparsity_ratio: Option<f64>,

    /// `unstructured`, or N:M with N pruned of each M neighbours [default: unstructured]
    #[arg(long, value_name = "TYPE")]
    pub(super) sparsity_type: Option<Pattern>,

    /// `--prune-method wanda` means `wanda-variant`
    #[arg(long, hide = true)]
    pub(super) use_variant: bool,

    /// Prune only matrices that match a glob; may be repeated
    ///
    /// Matched against model.layers.0.self_attn.q_proj, self_attn.q_proj and q_proj. What is chosen is printed.
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,

    /// Leave matrices alone that match a glob; may be repeated
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,

    /// JSON file with a ratio per layer: [0.5, 0.6, ...], or {"0": 0.3} for some
    #[arg(long, value_name = "FILE")]
    layer_ratios: Option<PathBuf>,
}

/// The choices of `--allocate`.
#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum AllocateArg {
    /// The same ratio for all layers
    #[default]
    Uniform,
    /// OWL: layers with many outliers keep more
    Owl,
    /// Curves of output error against the ratio
    Error,
}

/// The choices of `--propagate`.
#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum PropagateArg {
    /// Pruned layers
    #[default]
    Pruned,
    /// Dense layers
    Dense,
}

impl SparsityArgs {
    /// # Errors
    /// Fails when the file of `--layer-ratios` cannot be read, and for `--use-variant` with a method that is not Wanda.
    pub(super) fn settings(&self) -> Result<SparsitySettings> {
        let layer_ratios = self.layer_ratios.as_deref().map(LayerRatios::load);
        Ok(SparsitySettings {
            prune_method: self.method()?,
            options: MethodOptions {
                percdamp: self.percdamp,
                blocksize: self.blocksize,
                dsnot_cycles: self.dsnot_cycles,
                dsnot_mlp: self.dsnot_mlp,
            },
            refine: self.refine.clone(),
            permute_channels: self.permute_channels,
            propagate: match self.propagate {
                PropagateArg::Pruned => Propagation::Pruned,
                PropagateArg::Dense => Propagation::Dense,
            },
            true_sequential: self.true_sequential,
            allocate: match self.allocate {
                AllocateArg::Uniform => Allocation::Uniform,
                AllocateArg::Owl => Allocation::Owl,
                AllocateArg::Error => Allocation::Error,
            },
            ratio_band: self.ratio_band,
            owl_outliers: self.owl_outliers,
            selection: Selection {
                sparsity_ratio: self.sparsity_ratio,
                sparsity_type: self.sparsity_type.unwrap_or_default(),
                include: self.include.clone(),
                exclude: self.exclude.clone(),
                layer_ratios: layer_ratios.transpose()?,
            },
        })
    }

    /// The name of the method; `--use-variant` makes `wanda` `wanda-variant`.
    fn method(&self) -> Result<String> {
        match (self.prune_method.as_str(), self.use_variant) {
            ("wanda" | "wanda-variant", true) => Ok("wanda-variant".to_string()),
            (name, true) => Err(Failure::usage(format!(
                "--use-variant belongs to --prune-method wanda, and {name} was given"
            ))
            .hint("leave --use-variant out")
            .into()),
            (name, false) => Ok(name.to_string()),
        }
    }
}

/// The table of refinements, for the help text.
fn refinements_help() -> String {
    let steps = REFINEMENTS.iter();
    let steps: Vec<String> =
        steps.map(|step| format!("{} ({})", step.name(), step.summary())).collect();
    format!("A step behind the method: {}", steps.join(" or "))
}

/// The table of methods, for the help text.
fn methods_help() -> String {
    let methods: Vec<String> =
        METHODS.iter().map(|method| format!("{} ({})", method.name(), method.summary())).collect();
    format!("How weights are chosen: {}", methods.join(" or "))
}
