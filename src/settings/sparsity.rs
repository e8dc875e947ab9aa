//! Settings of the sparsity: method, refinement, ratios and patterns.
//!
//! The flags of a method's options come from the tables of methods and refinements.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use serde::Serialize;

use super::defaults::PRUNE_METHOD;
use crate::pipeline::allocation::Allocation;
use crate::pipeline::{Flow, ObservationOrder, Propagation, Selection};
use crate::pruning::{
    self, METHODS, MethodOption, MethodOptions, OptionValue, Pattern, REFINEMENTS, Technique,
};

/// Sparsity flags.
#[derive(Debug, Clone, Args, Serialize)]
#[command(next_help_heading = "Sparsity")]
pub struct SparsitySettings {
    /// `--prune-method`.
    #[arg(
        long,
        value_name = "METHOD",
        default_value = PRUNE_METHOD,
        value_parser = PossibleValuesParser::new(METHODS.iter().map(|method| method.name())),
        help = "Method",
        long_help = methods_help()
    )]
    pub prune_method: String,

    /// Options of method and refinement.
    #[command(flatten)]
    #[serde(flatten)]
    pub options: MethodOptions,

    /// `--refine`.
    #[arg(
        hide_short_help = true,
        long,
        value_name = "STEP",
        value_parser = PossibleValuesParser::new(REFINEMENTS.iter().map(|step| step.name())),
        help = refinement_names(),
        hide_possible_values = true,
        long_help = refinements_help()
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refine: Option<String>,

    /// Permute the intermediate channels of each MLP, so that N:M groups of down_proj keep more importance
    ///
    /// The rows of gate_proj and up_proj and the columns of down_proj are written in another order, which does not change the function
    /// of the MLP. Needs an N:M pattern, and all three matrices among those that are pruned.
    #[arg(hide_short_help = true, long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub permute_channels: bool,

    /// Layers that the samples have passed before they reach the next one
    #[arg(hide_short_help = true, long, value_name = "LAYERS", default_value = "pruned")]
    pub propagate: Propagation,

    /// Observe the input of every matrix behind the pruned matrices before it: four passes of the samples per layer
    #[arg(hide_short_help = true, long)]
    pub true_sequential: bool,

    /// Rule for the ratio of each layer
    #[arg(hide_short_help = true, long, value_name = "RULE", default_value = "uniform")]
    pub allocate: Allocation,

    /// Ratios of layers lie this far around --sparsity-ratio [default: 0.08 for owl, 0.15 for error]
    #[arg(hide_short_help = true, long, value_name = "BAND", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_band: Option<f64>,

    /// Scores above this multiple of the mean are outliers for --allocate owl [default: 5]
    #[arg(hide_short_help = true, long, value_name = "M", allow_negative_numbers = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owl_outliers: Option<f64>,

    /// Ratio, pattern and matrices.
    #[command(flatten)]
    #[serde(flatten)]
    pub selection: Selection,

    /// JSON file with a ratio per layer: [0.5, 0.6, ...], or {"0": 0.3} for some
    #[arg(hide_short_help = true, long, value_name = "FILE")]
    #[serde(skip)]
    pub layer_ratios: Option<PathBuf>,
}

impl SparsitySettings {
    /// The technique that the settings name.
    ///
    /// # Errors
    /// Fails for a method or a refinement that does not exist, and for options that do not fit.
    pub fn technique(&self) -> Result<Technique> {
        let technique = self.unchecked_technique()?;
        technique.check()?;
        Ok(technique)
    }

    /// The technique that the settings name, whose parts may not go together.
    ///
    /// # Errors
    /// Fails for a method or a refinement that does not exist.
    pub fn unchecked_technique(&self) -> Result<Technique> {
        let method = pruning::method(&self.prune_method)
            .with_context(|| format!("there is no method `{}`", self.prune_method))?;
        let refinement = self.refine.as_ref().map(|name| {
            pruning::refinement(name).with_context(|| format!("there is no refinement `{name}`"))
        });
        Ok(Technique {
            method,
            options: self.options.clone(),
            refinement: refinement.transpose()?,
            permutes: match self.selection.sparsity_type {
                Pattern::NOfM { m, .. } if self.permute_channels => Some(m),
                _ => None,
            },
        })
    }

    /// The way of the calibration samples.
    pub fn flow(&self) -> Flow {
        Flow {
            propagation: self.propagate,
            sequence: if self.true_sequential {
                ObservationOrder::Inputs
            } else {
                ObservationOrder::Layer
            },
        }
    }

    /// Takes a ratio of 0 where no flag names a ratio or a pattern.
    pub fn prune_nothing_unless_asked(&mut self) {
        let selection = &mut self.selection;
        let is_free = selection.sparsity_type == Default::default();
        if is_free && selection.layer_ratios.is_none() && selection.sparsity_ratio.is_none() {
            selection.sparsity_ratio = Some(0.0);
        }
    }
}

impl Default for SparsitySettings {
    fn default() -> Self {
        super::defaults::without_flags()
    }
}

/// The options of all methods and refinements.
fn all_options() -> impl Iterator<Item = &'static MethodOption> {
    let of_methods = METHODS.iter().flat_map(|method| method.options());
    of_methods.chain(REFINEMENTS.iter().flat_map(|step| step.options()))
}

/// The flag of an option.
fn flag(option: &MethodOption) -> Arg {
    let flag = Arg::new(option.name).long(option.flag().split_off(2)).hide_short_help(true);
    let help = |default: &dyn std::fmt::Display| format!("{} [default: {default}]", option.help);
    match &option.default {
        OptionValue::Switch(_) => flag.help(option.help).action(ArgAction::SetTrue),
        OptionValue::Number(default) => flag
            .help(help(default))
            .value_name(option.value_name)
            .value_parser(value_parser!(f64))
            .allow_negative_numbers(true),
        OptionValue::Count(default) => flag
            .help(help(default))
            .value_name(option.value_name)
            .value_parser(value_parser!(usize)),
    }
}

impl Args for MethodOptions {
    fn augment_args(command: Command) -> Command {
        command.args(all_options().map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for MethodOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut options = Self::DEFAULT;
        for option in all_options() {
            let name = option.name;
            let value = match option.default {
                OptionValue::Switch(_) => {
                    matches.get_flag(name).then_some(OptionValue::Switch(true))
                }
                OptionValue::Number(_) => matches.get_one(name).copied().map(OptionValue::Number),
                OptionValue::Count(_) => matches.get_one(name).copied().map(OptionValue::Count),
            };
            if let Some(value) = value {
                options = options.with(option, value);
            }
        }
        Ok(options)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The names of refinements, for the short help text.
fn refinement_names() -> String {
    let names: Vec<&str> = REFINEMENTS.iter().map(|step| step.name()).collect();
    format!("A step after the method: {}", names.join(" or "))
}

/// The table of refinements, for the help text.
fn refinements_help() -> String {
    let steps = REFINEMENTS.iter();
    let steps: Vec<String> =
        steps.map(|step| format!("{} ({})", step.name(), step.summary())).collect();
    format!("A step after the method: {}", steps.join(" or "))
}

/// The table of methods, for the help text.
fn methods_help() -> String {
    let methods: Vec<String> =
        METHODS.iter().map(|method| format!("{} ({})", method.name(), method.summary())).collect();
    format!("How weights are chosen: {}", methods.join(" or "))
}
