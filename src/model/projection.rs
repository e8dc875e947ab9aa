//! The linears of a decoder layer: names, shapes and the inputs they share.
//!
//! A family's record (`family`) lists the linears its layers have. This file gives each of them its tensor name and its shape.

use serde::Serialize;

use super::observe::Observation;

/// A linear of a decoder layer. The order of the variants is the order in which the reference prunes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are those of the tensors")]
pub enum Projection {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

impl Projection {
    /// The name inside the layer: `self_attn.q_proj`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// The name of the module alone: `q_proj`.
    pub fn module(self) -> &'static str {
        let name = self.name();
        name.rsplit_once('.').map_or(name, |(_, module)| module)
    }

    /// The module's full name: `model.layers.3.self_attn.q_proj`.
    pub fn full_name(self, layer: usize) -> String {
        format!("model.layers.{layer}.{}", self.name())
    }

    /// The name of its weight's tensor: `model.layers.3.self_attn.q_proj.weight`.
    pub fn tensor_name(self, layer: usize) -> String {
        format!("{}.weight", self.full_name(layer))
    }

    /// The name of its bias' tensor: `model.layers.3.self_attn.q_proj.bias`.
    pub fn bias_name(self, layer: usize) -> String {
        format!("{}.bias", self.full_name(layer))
    }

    /// Returns true for a linear of the attention block, false for a linear of the MLP.
    pub fn is_attention(self) -> bool {
        matches!(self, Self::Q | Self::K | Self::V | Self::O)
    }

    /// The point at which its input is observed. Linears with the same point share their input.
    pub fn observed_at(self) -> Observation {
        match self {
            Self::Q | Self::K | Self::V => Observation::AttentionInput,
            Self::O => Observation::OInput,
            Self::Gate | Self::Up => Observation::MlpInput,
            Self::Down => Observation::DownInput,
        }
    }
}
