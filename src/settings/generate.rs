//! Settings of `prune generate`.

use super::device::DeviceSettings;
use super::model::ModelSettings;
use crate::generation::Sampling;

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
}
