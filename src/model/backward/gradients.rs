//! The gradients of a layer's weights, added up in f32 over the samples of a step.
//!
//! A trained matrix has a gradient of its own size, 4 bytes per element. For a low-rank change ([`MaskedLowRank`]) only
//! the gradients of its factors are stored, not the gradient of the matrix.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::super::on_device::TrainedSizes;
use super::super::{DecoderLayer, LinearId, NormRole};
use crate::linalg::stored::zero_bits_of;
use crate::linalg::{Linear, MaskedLowRank, ProductContext, elementwise};

/// Gradients of some matrices of a layer, and of its norms if these are wanted.
#[derive(Debug, Clone, Default)]
pub struct LayerGradients {
    weights: BTreeMap<LinearId, MatrixGradient>,
    norms: Option<BTreeMap<NormRole, Vec<f32>>>,
}

/// The gradient of a matrix.
#[derive(Debug, Clone)]
enum MatrixGradient {
    /// `[out_features, in_features]`
    Whole(Vec<f32>),
    Factors {
        change: MaskedLowRank,
        /// `[rank, in_features]`
        a: Vec<f32>,
        /// `[out_features, rank]`
        b: Vec<f32>,
    },
}

impl MatrixGradient {
    fn arrays_mut(&mut self) -> Vec<&mut Vec<f32>> {
        match self {
            Self::Whole(values) => vec![values],
            Self::Factors { a, b, .. } => vec![a, b],
        }
    }
}

impl LayerGradients {
    /// Zeros for the trained matrices of a layer. Frozen matrices cost neither memory nor time.
    ///
    /// # Panics
    /// Panics when the layer has no such matrix.
    pub fn new(layer: &DecoderLayer, ids: impl IntoIterator<Item = LinearId>) -> Self {
        let zeros = |id| {
            let linear = layer.linear(id);
            MatrixGradient::Whole(vec![0.0; linear.out_features() * linear.in_features()])
        };
        Self { weights: ids.into_iter().map(|id| (id, zeros(id))).collect(), ..Self::default() }
    }

    /// Zeros for the factors of low-rank changes. The layer's weights contain these changes.
    pub fn of_factors(changes: BTreeMap<LinearId, MaskedLowRank>) -> Self {
        let zeros = |change: MaskedLowRank| MatrixGradient::Factors {
            a: vec![0.0; change.factors.a.len()],
            b: vec![0.0; change.factors.b.len()],
            change,
        };
        Self {
            weights: changes.into_iter().map(|(id, change)| (id, zeros(change))).collect(),
            ..Self::default()
        }
    }

    /// The same with zeros for the weights of all norms.
    #[must_use]
    pub fn with_norms(self, layer: &DecoderLayer) -> Self {
        let zeros = layer.norms().map(|(role, norm)| (role, vec![0.0; norm.stored().len()]));
        Self { norms: Some(zeros.collect()), ..self }
    }

    /// Sets all gradients to zero, for the next examples.
    pub fn clear(&mut self) {
        let matrices = self.weights.values_mut().flat_map(MatrixGradient::arrays_mut);
        let norms = self.norms.iter_mut().flat_map(BTreeMap::values_mut);
        matrices.chain(norms).for_each(|values| values.fill(0.0));
    }

    /// All gradients: of each matrix, or of its factors A and B; of each norm.
    #[allow(clippy::type_complexity)]
    pub fn arrays_mut(
        &mut self,
    ) -> (BTreeMap<LinearId, Vec<&mut Vec<f32>>>, BTreeMap<NormRole, &mut Vec<f32>>) {
        let matrices = self.weights.iter_mut().map(|(&id, gradient)| (id, gradient.arrays_mut()));
        let norms = self.norms.iter_mut().flatten().map(|(&role, norm)| (role, norm));
        (matrices.collect(), norms.collect())
    }

    /// The matrices that have a gradient.
    pub fn linear_ids(&self) -> impl Iterator<Item = LinearId> + use<'_> {
        self.weights.keys().copied()
    }

    /// The gradient of a matrix `[out_features, in_features]`; `None` if it is frozen, or only its factors are trained.
    pub fn weight(&self, id: LinearId) -> Option<&[f32]> {
        match self.weights.get(&id)? {
            MatrixGradient::Whole(values) => Some(values),
            MatrixGradient::Factors { .. } => None,
        }
    }

    /// The gradients of the factors of a matrix: of A `[rank, in_features]` and of B `[out_features, rank]`; `None` if it has none.
    pub fn factors(&self, id: LinearId) -> Option<[&[f32]; 2]> {
        match self.weights.get(&id)? {
            MatrixGradient::Whole(_) => None,
            MatrixGradient::Factors { a, b, .. } => Some([a, b]),
        }
    }

    /// The trained matrices, with their low-rank change if its factors are trained.
    pub fn changes(&self) -> impl Iterator<Item = (LinearId, Option<&MaskedLowRank>)> {
        self.weights.iter().map(|(&id, gradient)| match gradient {
            MatrixGradient::Whole(_) => (id, None),
            MatrixGradient::Factors { change, .. } => (id, Some(change)),
        })
    }

    /// The sizes of what is trained, for the memory of a device.
    pub fn sizes(&self) -> TrainedSizes {
        let mut sizes = TrainedSizes {
            parameters: self.norms.iter().flat_map(BTreeMap::values).map(Vec::len).sum(),
            ..TrainedSizes::default()
        };
        for (id, gradient) in &self.weights {
            let (parameters, weights, masked) = match gradient {
                MatrixGradient::Whole(values) => (values.len(), values.len(), 0),
                MatrixGradient::Factors { change, a, b } => {
                    let weights = change.factors.rows * change.factors.columns;
                    (a.len() + b.len(), weights, weights)
                }
            };
            sizes.parameters += parameters;
            sizes.of_mlp += if id.is_attention() { 0 } else { parameters };
            sizes.most_parameters = sizes.most_parameters.max(parameters);
            sizes.largest_matrix = sizes.largest_matrix.max(weights);
            sizes.masked += masked;
        }
        sizes
    }

    /// Adds sums of gradients that a device computed: of a matrix, or of its factors A and B.
    ///
    /// # Errors
    /// Fails for a frozen matrix and for sums of a wrong length, which would be a bug.
    pub fn add_sums(&mut self, id: LinearId, sums: &[Vec<f32>]) -> Result<()> {
        let own: Vec<&mut Vec<f32>> = match self.weights.get_mut(&id) {
            None => Vec::new(),
            Some(MatrixGradient::Whole(values)) => vec![values],
            Some(MatrixGradient::Factors { a, b, .. }) => vec![a, b],
        };
        let (expected, given): (Vec<_>, Vec<_>) =
            (own.iter().map(|values| values.len()).collect(), sums.iter().map(Vec::len).collect());
        ensure!(
            expected == given && !own.is_empty(),
            "gradients of {id:?} have {expected:?} elements, and {given:?} came from a device"
        );
        for (own, sums) in own.into_iter().zip(sums) {
            elementwise::add(own, sums);
        }
        Ok(())
    }

    /// Adds a sum of gradients of a norm, unless the norms are frozen.
    pub fn add_norm_sum(&mut self, norm: NormRole, sum: &[f32]) {
        if let Some(own) = self.norm_mut(norm) {
            elementwise::add(own, sum);
        }
    }

    /// Returns whether the norms have gradients.
    pub fn has_norms(&self) -> bool {
        self.norms.is_some()
    }

    /// The gradient of a norm; `None` if the norms are frozen, or the layer has no such norm.
    pub fn norm(&self, norm: NormRole) -> Option<&[f32]> {
        self.norms.as_ref()?.get(&norm).map(Vec::as_slice)
    }

    pub(in crate::model) fn norm_mut(&mut self, norm: NormRole) -> Option<&mut [f32]> {
        self.norms.as_mut()?.get_mut(&norm).map(Vec::as_mut_slice)
    }

    /// Adds dyᵀ·x to the gradient of a matrix, or what it is to its factors, unless the matrix is frozen.
    pub(in crate::model) fn add(
        &mut self,
        (id, linear): (LinearId, &Linear),
        dy: &[f32],
        x: &[f32],
        products: &mut ProductContext,
    ) {
        match self.weights.get_mut(&id) {
            None => {}
            Some(MatrixGradient::Whole(values)) => {
                linear.add_weight_gradient(dy, x, values, products);
            }
            Some(MatrixGradient::Factors { change, a, b }) => {
                linear.add_factor_gradients(dy, x, change, [a, b], products);
            }
        }
    }

    /// Writes +0 to the gradients of pruned weights. Their product with a mask could be −0, which an optimizer may not take for zero.
    /// Factors are masked already.
    ///
    /// # Arguments
    /// * `pruned`: one bit per element, 1 = pruned, row-major without padding, least significant bit first
    ///
    /// # Panics
    /// Panics when the number of bytes in `pruned` does not fit the number of elements.
    pub fn mask(&mut self, id: LinearId, pruned: &[u8]) {
        if let Some(MatrixGradient::Whole(values)) = self.weights.get_mut(&id) {
            zero_bits_of(values, pruned);
        }
    }
}
