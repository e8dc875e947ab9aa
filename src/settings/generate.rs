//! Settings of `prune generate`.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::device::DeviceSettings;
use super::model::ModelSettings;
use crate::generation::{CacheDtype, CodedActivations, HeadForm, Sampling, WeightForm};

/// Settings of `prune generate`.
#[derive(Debug, Clone)]
pub struct GenerateSettings {
    /// The checkpoints that write, in this order.
    pub models: Vec<ModelSettings>,
    /// Threads and memory.
    pub device: DeviceSettings,
    /// The text to continue, or with `chat` the user's message.
    pub prompt: String,
    /// `--chat`: the prompt goes through the model's chat template.
    pub chat: bool,
    /// `--system`: the system's message of the chat.
    pub system: Option<String>,
    /// Choice of tokens.
    pub sampling: Sampling,
    /// `--max-tokens`.
    pub max_tokens: usize,
    /// `--ignore-eos`.
    pub ignore_eos: bool,
    /// The form of the weights in memory.
    pub weights: WeightSettings,
    /// Head, keys and values in memory.
    pub decoding: DecodingSettings,
    /// `--bench`: the speed is compared with the memory's.
    pub bench: bool,
}

/// The form of the decoder's matrices in memory.
#[derive(Debug, Clone, Copy, Default, Args, Serialize)]
pub struct WeightSettings {
    /// Form of the decoder's matrices in memory
    #[arg(long, value_name = "FORM", default_value = "auto")]
    pub weights: WeightChoice,

    /// Activations that 8-bit weights are multiplied with
    #[arg(long, value_name = "DTYPE", default_value = "int8")]
    pub activations: CodedActivations,
}

/// The memory that every token reads beside the decoder's matrices.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct DecodingSettings {
    /// Form of the head's matrix in memory
    #[arg(long, value_name = "FORM", default_value = "stored")]
    pub head: HeadForm,

    /// Element type of the cached keys and values
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub kv_cache: CacheDtype,
}

/// A choice of `--weights`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum WeightChoice {
    /// Compact where that is smaller and not slower here, or where dense does not fit into memory; the 8-bit values of a packed folder as they are
    #[default]
    Auto,
    /// As stored, zeros included
    Dense,
    /// Without zeros, a bit per weight: the same text
    Compact,
    /// Without zeros, the rest rounded to 8 bits: another text
    Int8,
}

impl WeightChoice {
    /// The form, unless the program chooses.
    pub fn form(self) -> Option<WeightForm> {
        match self {
            Self::Auto => None,
            Self::Dense => Some(WeightForm::Dense),
            Self::Compact => Some(WeightForm::Compact),
            Self::Int8 => Some(WeightForm::Int8),
        }
    }
}
