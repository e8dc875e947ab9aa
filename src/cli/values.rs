//! Values of flags with their help, for enums defined outside this room.

use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::recovery::optimizers::ScheduleShape;
use crate::run::verification::VerifyLevel;
use crate::settings::{
    ComputeDtype, EvalSides, MajorityOf, MergeEval, MergeSemantics, RecoveryWay, SaliencySource,
    TrainedKind, TrimScope,
};

/// Aliases of f32.
pub(super) const F32: &[&str] = &["float32", "fp32", "torch.float32"];

/// Aliases of f16.
pub(super) const F16: &[&str] = &["float16", "fp16", "half", "torch.float16"];

/// Aliases of bf16.
pub(super) const BF16: &[&str] = &["bfloat16", "torch.bfloat16"];

impl ValueEnum for ComputeDtype {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Auto, Self::F32, Self::Bf16x3, Self::Bf16, Self::F16]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::Auto => (
                "auto",
                "bf16 for bf16 checkpoints where the CPU has it; for all others bf16x3 where it has tiles, else f32",
            ),
            Self::F32 => {
                ("f32", "Single precision, the same bits on every CPU with fused multiply-adds")
            }
            Self::Bf16x3 => (
                "bf16x3",
                "Single precision as sums of products of bf16 parts, three of an activation, on AMX tiles",
            ),
            Self::Bf16 => ("bf16", "bf16 products with f32 accumulation, for bf16 checkpoints"),
            Self::F16 => (
                "f16",
                "For f16 checkpoints: f16 on GPUs; the CPU computes them in single precision",
            ),
        };
        let others = match self {
            Self::F32 => F32,
            Self::Bf16 => BF16,
            Self::F16 => F16,
            Self::Auto | Self::Bf16x3 => &[],
        };
        Some(PossibleValue::new(name).aliases(others).help(help))
    }
}

impl ValueEnum for EvalSides {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Pruned, Self::Both, Self::None]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::Pruned => ("pruned", "The pruned model"),
            Self::Both => ("both", "The dense and the pruned model, in one sweep"),
            Self::None => ("none", "Nothing; needs no evaluation text"),
            // `prune eval` has no such flag.
            Self::Dense => return None,
        };
        Some(PossibleValue::new(name).help(help))
    }
}

impl ValueEnum for RecoveryWay {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Blocks, Self::Lora, Self::Full]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Blocks => "Each layer learns to reproduce the dense layer's output",
            Self::Lora => "Low-rank factors under the mask learn from the next token",
            Self::Full => "All kept weights learn from the next token",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}

impl ValueEnum for TrainedKind {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Weights, Self::Factors]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Weights => "All kept weights",
            Self::Factors => "Low-rank factors under the mask",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}

impl ValueEnum for ScheduleShape {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Constant, Self::Linear, Self::Cosine]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Constant => "The same rate",
            Self::Linear => "A line down to 0",
            Self::Cosine => "Half a cosine down to 0",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}

impl ValueEnum for VerifyLevel {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Quick, Self::Full]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::Quick => ("quick", "Hashes, zeros, N:M groups"),
            Self::Full => ("full", "Also every kept weight against the source"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

impl ValueEnum for MergeSemantics {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Mergekit, Self::Paper, Self::Peft]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::Mergekit => ("mergekit", "mergekit 0.1.5"),
            Self::Paper => (
                "paper",
                "The method's paper: ties trims over the whole model, dare divides by the density",
            ),
            Self::Peft => (
                "peft",
                "Adapters of one base are combined factor by factor, as add_weighted_adapter does",
            ),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

impl ValueEnum for MajorityOf {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Total, Self::Frequency]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Total => "The sum of the elements",
            Self::Frequency => "The number of adapters with the sign",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}

impl ValueEnum for TrimScope {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Tensor, Self::Layer, Self::Model]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::Tensor => ("tensor", "Each tensor alone"),
            Self::Layer => ("layer", "The tensors of one layer"),
            Self::Model => ("model", "All tensors"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

impl ValueEnum for SaliencySource {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Base, Self::Experts]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::Base => ("base", "The base model: they decide trimming"),
            Self::Experts => ("experts", "Each expert: they also weigh signs and averages"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

impl ValueEnum for MergeEval {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::None, Self::Merged, Self::All]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::None => ("none", "Nothing; needs no evaluation text"),
            Self::Merged => ("merged", "The merged model"),
            Self::All => ("all", "The base, the experts and the merged model"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}
