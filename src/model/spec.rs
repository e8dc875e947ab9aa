//! A decoder layer as data: its sizes, the linears and norms it has, and the numbers of its arithmetic.

use std::ops::Range;

use super::config::{LayerKind, ModelConfig};
use super::family::{Activation, Family};
use super::linears::{InputId, InputMap, LinearId, LinearRole};
use super::norms::NormRole;
use crate::linalg::attention::{Heads, Scoring};

/// A decoder layer as data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    /// The family's record, which lists linears and norms.
    pub family: &'static Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Heads of attention.
    pub heads: Heads,
    /// How scores of attention become weights.
    pub scoring: Scoring,
    /// Index of the rotary tables; `None` for a layer without rotation.
    pub rope: Option<usize>,
    /// Activation of the MLP's gate.
    pub activation: Activation,
    /// ε of the norms.
    pub rms_norm_eps: f32,
}

impl ModelConfig {
    /// A decoder layer as data.
    pub fn layer(&self, index: usize) -> LayerSpec {
        let LayerKind { window, rope } = self.layers.get(index).copied().unwrap_or_default();
        LayerSpec {
            family: self.family,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            heads: Heads {
                num_heads: self.num_attention_heads,
                num_key_value_heads: self.num_key_value_heads,
                head_dim: self.head_dim,
            },
            scoring: Scoring { scale: self.score_scale, soft_cap: self.score_cap, window },
            rope,
            activation: self.activation,
            rms_norm_eps: self.rms_norm_eps as f32,
        }
    }
}

impl ModelConfig {
    /// Elements of a row of each input of a layer.
    pub fn input_widths(&self) -> InputMap<usize> {
        let spec = self.layer(0);
        InputMap::new(|input| spec.input_width(input))
    }

    /// The scoring of the layers with the largest window: of a layer without a window, if there is one.
    pub fn widest_scoring(&self) -> Scoring {
        let windows = self.layers.iter().map(|kind| kind.window.unwrap_or(usize::MAX));
        let window = windows.max().filter(|&window| window < usize::MAX);
        Scoring { window, ..self.layer(0).scoring }
    }
}

impl LayerSpec {
    /// The linears, in the order of the reference.
    pub fn linears(&self) -> impl ExactSizeIterator<Item = LinearId> + Clone + use<> {
        self.family.linears.iter().map(|&(id, _)| id)
    }

    /// The number of rows of a role.
    pub fn rows(&self, role: LinearRole) -> usize {
        let Heads { num_heads, num_key_value_heads, head_dim } = self.heads;
        match role {
            LinearRole::Q => num_heads * head_dim,
            LinearRole::K | LinearRole::V => num_key_value_heads * head_dim,
            LinearRole::O | LinearRole::Down => self.hidden_size,
            LinearRole::Gate | LinearRole::Up => self.intermediate_size,
        }
    }

    /// The linear that has the rows of a role, and the place of these rows in it.
    ///
    /// # Panics
    /// Panics when the family's record has no linear for the role, which a test excludes.
    pub fn part(&self, role: LinearRole) -> (LinearId, Range<usize>) {
        let id = self.linears().find(|id| id.roles().contains(&role));
        let id = id.expect("a family's record has a linear for every role");
        let before = id.roles().iter().take_while(|&&other| other != role);
        let first: usize = before.map(|&other| self.rows(other)).sum();
        (id, first..first + self.rows(role))
    }

    /// Returns whether a linear holds the rows of several roles that share this input.
    pub fn is_fused(&self, input: InputId) -> bool {
        self.linears().any(|id| id.input() == input && id.roles().len() > 1)
    }

    /// Elements of a row of an input.
    pub fn input_width(&self, input: InputId) -> usize {
        match input {
            InputId::Attention | InputId::Mlp => self.hidden_size,
            InputId::O => self.rows(LinearRole::Q),
            InputId::Down => self.intermediate_size,
        }
    }

    /// (out_features, in_features) of a linear.
    pub fn shape(&self, id: LinearId) -> (usize, usize) {
        (id.roles().iter().map(|&role| self.rows(role)).sum(), self.input_width(id.input()))
    }

    /// Returns whether the layer has a norm.
    pub fn has_norm(&self, role: NormRole) -> bool {
        self.family.norms.iter().any(|&(of, _)| of == role)
    }

    /// The number of elements of a norm's weight.
    pub fn norm_width(&self, role: NormRole) -> usize {
        let of_heads = |rows: LinearRole| match self.family.head_norms_are_wide {
            true => self.rows(rows),
            false => self.heads.head_dim,
        };
        match role {
            NormRole::Query => of_heads(LinearRole::Q),
            NormRole::Key => of_heads(LinearRole::K),
            _ => self.hidden_size,
        }
    }
}
