//! The gradients of a layer's weights, added up in f32 over the samples of a step.
//!
//! Memory: 4 bytes per element of each wanted matrix, so four times the elements of a layer for all weights. A caller that trains
//! low-rank changes needs the same matrices, of one layer at a time ([`MaskedLowRank`](crate::linalg::MaskedLowRank)).

use std::collections::BTreeMap;

use super::super::{DecoderLayer, Projection};
use crate::linalg::stored::zero_bits_of;

/// Gradients of some matrices of a layer, and of its norms if these are wanted.
#[derive(Debug, Clone, Default)]
pub struct LayerGradients {
    /// `[out_features, in_features]` each.
    weights: BTreeMap<Projection, Vec<f32>>,
    /// Of the norms before attention and before the MLP, `[hidden_size]` each.
    norms: Option<[Vec<f32>; 2]>,
}

impl LayerGradients {
    /// Zeros for some matrices of a layer. Other matrices are frozen: they cost neither memory nor time.
    ///
    /// # Panics
    /// Panics when the layer has no such matrix.
    pub fn new(layer: &DecoderLayer, projections: impl IntoIterator<Item = Projection>) -> Self {
        let zeros = |projection| {
            let linear = layer.linear(projection);
            vec![0.0; linear.out_features() * linear.in_features()]
        };
        Self {
            weights: projections
                .into_iter()
                .map(|projection| (projection, zeros(projection)))
                .collect(),
            norms: None,
        }
    }

    /// The same with zeros for the weights of both norms.
    #[must_use]
    pub fn with_norms(self, layer: &DecoderLayer) -> Self {
        Self {
            norms: Some(layer.norms().map(|norm| vec![0.0; norm.len()])),
            ..self
        }
    }

    /// Sets all gradients to zero, for the next step.
    pub fn clear(&mut self) {
        let norms = self.norms.iter_mut().flatten();
        for values in self.weights.values_mut().chain(norms) {
            values.fill(0.0);
        }
    }

    /// The matrices that have a gradient.
    pub fn projections(&self) -> impl Iterator<Item = Projection> + use<'_> {
        self.weights.keys().copied()
    }

    /// The gradient of a matrix `[out_features, in_features]`; `None` if it is frozen.
    pub fn weight(&self, projection: Projection) -> Option<&[f32]> {
        self.weights.get(&projection).map(Vec::as_slice)
    }

    /// The gradient of a matrix, for a change.
    pub fn weight_mut(&mut self, projection: Projection) -> Option<&mut [f32]> {
        self.weights.get_mut(&projection).map(Vec::as_mut_slice)
    }

    /// Gradients of the norms before attention and before the MLP; `None` if they are frozen.
    pub fn norms(&self) -> Option<[&[f32]; 2]> {
        self.norms
            .as_ref()
            .map(|norms| norms.each_ref().map(Vec::as_slice))
    }

    pub(super) fn norm_mut(&mut self, norm: usize) -> Option<&mut [f32]> {
        self.norms.as_mut().map(|norms| norms[norm].as_mut_slice())
    }

    /// Writes +0 to the gradients of pruned weights. Their product with a mask could be −0, which an optimizer may not take for zero.
    ///
    /// # Arguments
    /// * `pruned`: one bit per element, 1 = pruned, row-major without padding, least significant bit first
    ///
    /// # Panics
    /// Panics when `pruned` does not have one bit per element, rounded up to bytes.
    pub fn mask(&mut self, projection: Projection, pruned: &[u8]) {
        if let Some(values) = self.weights.get_mut(&projection) {
            zero_bits_of(values, pruned);
        }
    }
}
