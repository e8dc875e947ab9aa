//! The RMS norms of a decoder layer, by their role.
//!
//! norm(x) = x / √(mean(x²) + ε) ∘ w, or ∘ (1 + w) in families whose norms add one. Zhang and Sennrich 2019, arXiv:1910.07467.

use serde::Serialize;

/// Place of a norm in a layer. The order of the variants is the order of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormRole {
    /// The hidden states that enter attention.
    BeforeAttention,
    /// Queries, before their rotation.
    Query,
    /// Keys, before their rotation.
    Key,
    /// The output of attention, before it is added to the hidden states.
    AfterAttention,
    /// The hidden states that enter the MLP.
    BeforeMlp,
    /// The output of the MLP, before it is added to the hidden states.
    AfterMlp,
}

/// The weight of a norm, widened to f32.
#[derive(Debug, Clone, PartialEq)]
pub struct NormWeight {
    stored: Vec<f32>,
    /// w + 1, where norms add one.
    factor: Option<Vec<f32>>,
}

impl NormWeight {
    /// The weight as it is stored.
    pub fn new(stored: Vec<f32>, adds_one: bool) -> Self {
        let factor = adds_one.then(|| plus_one(&stored));
        Self { stored, factor }
    }

    /// w, as it is stored.
    pub fn stored(&self) -> &[f32] {
        &self.stored
    }

    /// The factor of the normed values: w or 1 + w.
    pub fn factor(&self) -> &[f32] {
        self.factor.as_ref().unwrap_or(&self.stored)
    }

    /// Returns whether the factor is 1 + w.
    pub fn adds_one(&self) -> bool {
        self.factor.is_some()
    }

    /// Replaces w.
    ///
    /// # Panics
    /// Panics when there are not as many values as before.
    pub fn set(&mut self, stored: &[f32]) {
        self.stored.copy_from_slice(stored);
        self.factor = self.factor.is_some().then(|| plus_one(stored));
    }
}

fn plus_one(weight: &[f32]) -> Vec<f32> {
    weight.iter().map(|weight| 1.0 + weight).collect()
}
