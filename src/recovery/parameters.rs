//! The trained parameters of a layer, and the layer that they make.
//!
//! ```text
//! weights   W' = M ∘ master            master [out, in] in f32, rounded to the dtype of the checkpoint
//! factors   W' = M ∘ (W + s·B·A)       A [rank, in], B [out, rank], s = alpha / rank
//! ```
//!
//! M is the mask of the weights that were not zero before the training. Factors begin as in peft: A uniform in ±1/√in, B zero, so the
//! first W' is W (Hu et al. 2021, arXiv:2106.09685, §4.1). All layers of a model have the same shapes, so a single list describes every
//! layer.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use super::reuse::BufferReuse;
use crate::data::PythonRandom;
use crate::linalg::{LowRank, MaskedLowRank, StoredDtype, StoredMatrix, Weight, convert};
use crate::model::{DecoderLayer, LayerGradients, LinearId, ModelConfig, NormRole};
use crate::recovery::optimizers::KeptMask;
use crate::recovery::optimizers::rounding::{Bf16Rounding, round_to_bf16};

/// A layer's frozen weights.
#[derive(Debug, Clone)]
pub struct BaseLayer {
    /// The layer.
    pub layer: DecoderLayer,
    /// Masks of the matrices with trained factors: one bit per element, 1 = pruned, least significant bit first.
    pub pruned: BTreeMap<LinearId, Arc<[u8]>>,
}

/// The form of a trained matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrainedForm {
    /// All kept weights.
    Weights,
    /// Low-rank factors under the mask.
    Factors {
        /// Rows of A.
        rank: usize,
        /// s·rank.
        alpha: f64,
    },
}

/// The part of each layer that is trained.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainedPart {
    /// The matrices, in the order of a layer.
    pub ids: Vec<LinearId>,
    /// Their form.
    pub form: TrainedForm,
    /// The weights of both norms, too.
    pub norms: bool,
}

/// The name of a parameter inside a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterName {
    /// The kept weights of a matrix.
    Weight(LinearId),
    /// A of a matrix.
    A(LinearId),
    /// B of a matrix.
    B(LinearId),
    /// A norm.
    Norm(NormRole),
}

/// A parameter of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterSpec {
    /// Its name.
    pub name: ParameterName,
    /// Rows and columns; a norm is a single row.
    pub shape: [usize; 2],
}

impl ParameterSpec {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// Returns whether a mask belongs to it.
    pub fn has_mask(&self) -> bool {
        matches!(self.name, ParameterName::Weight(_))
    }
}

/// The values and masks of a layer's parameters, in the order of their specs. Only weights have a mask.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerParameters {
    /// f32 values, row-major.
    pub values: Vec<Vec<f32>>,
    /// Masks of kept weights.
    pub kept: Vec<Option<KeptMask>>,
}

impl TrainedPart {
    /// The parameters of a layer, in their order.
    pub fn parameters(&self, config: &ModelConfig) -> Vec<ParameterSpec> {
        let of_matrix = |&id: &LinearId| {
            let (out, inner) = id.shape(config);
            let spec = |name, shape| ParameterSpec { name, shape };
            match self.form {
                TrainedForm::Weights => {
                    vec![spec(ParameterName::Weight(id), [out, inner])]
                }
                TrainedForm::Factors { rank, .. } => vec![
                    spec(ParameterName::A(id), [rank, inner]),
                    spec(ParameterName::B(id), [out, rank]),
                ],
            }
        };
        let layer = config.layer(0);
        let norms = config.family.norms.iter().map(move |&(role, _)| ParameterSpec {
            name: ParameterName::Norm(role),
            shape: [1, layer.norm_width(role)],
        });
        let matrices = self.ids.iter().flat_map(of_matrix);
        matrices.chain(norms.filter(|_| self.norms)).collect()
    }

    /// The parameters of a layer before the training.
    ///
    /// # Arguments
    /// * `base`: the layer, with its matrices in memory or at rest
    /// * `seed`: the seed of the factors; the factors of every matrix have their own stream of random numbers
    ///
    /// # Errors
    /// Fails when a matrix at rest cannot be read.
    pub fn initial(
        &self,
        config: &ModelConfig,
        base: &BaseLayer,
        seed: u64,
    ) -> Result<LayerParameters> {
        let mut all = LayerParameters { values: Vec::new(), kept: Vec::new() };
        for spec in self.parameters(config) {
            let (values, kept) = match spec.name {
                ParameterName::Weight(id) => {
                    let mut weight = base.layer.linear(id).weight().clone();
                    weight.hold()?;
                    let weight = weight.held().context("a weight that was read")?;
                    let mut values = vec![0.0; weight.elements()];
                    weight.widen_rows(0, &mut values);
                    let kept = KeptMask::of_nonzero(&values);
                    // −0 of the checkpoint becomes +0.
                    kept.apply(&mut values);
                    (values, Some(kept))
                }
                ParameterName::A(id) => {
                    let stream = (base.layer.index() * 16 + id.roles()[0] as usize) as u64;
                    let mut random = PythonRandom::new(seed ^ (stream + 1) << 20);
                    let bound = 1.0 / (spec.shape[1] as f64).sqrt();
                    let value = |_| ((2.0 * random.random() - 1.0) * bound) as f32;
                    ((0..spec.elements()).map(value).collect(), None)
                }
                ParameterName::B(_) => (vec![0.0; spec.elements()], None),
                ParameterName::Norm(norm) => (stored_norm(&base.layer, norm)?.to_vec(), None),
            };
            all.values.push(values);
            all.kept.push(kept);
        }
        Ok(all)
    }

    /// Turns the base of a layer into the layer that these values make; the masks stay. Matrices are rounded to their stored dtype.
    ///
    /// # Arguments
    /// * `rounding`: the rounding to bf16; every matrix has random bits of its own
    /// * `spare`: memory for the matrices
    ///
    /// # Errors
    /// Fails when a matrix at rest cannot be read, and when there is too little memory.
    pub fn applied(
        &self,
        config: &ModelConfig,
        base: BaseLayer,
        values: &[Cow<'_, [f32]>],
        rounding: Bf16Rounding,
        spare: &mut BufferReuse,
    ) -> Result<BaseLayer> {
        let BaseLayer { mut layer, pruned } = base;
        let specs = self.parameters(config);
        for (at, (spec, of)) in specs.iter().zip(values).enumerate() {
            let number = layer.index() * specs.len() + at;
            let rounding = rounding.of_parameter(number as u64);
            match spec.name {
                ParameterName::Weight(id) => {
                    let weight = layer.linear_mut(id).weight_mut();
                    let matrix = spare.matrix(weight.dtype(), spec.shape)?;
                    *weight = stored(of, rounding, matrix).into();
                }
                ParameterName::A(id) => {
                    let pruned = mask_of(&pruned, id)?;
                    // B follows A.
                    let b = values.get(at + 1).context("A has a B")?;
                    let change = self.change(config, id, pruned, [of, b]);
                    let weight = layer.linear_mut(id).weight_mut();
                    let dtype = weight.dtype();
                    let held = weight.held().context("a base of factors is in memory")?;
                    *weight = match (dtype, rounding) {
                        (StoredDtype::Bf16, Bf16Rounding::Stochastic { .. }) => {
                            let shape = [held.rows(), held.columns()];
                            let wide = spare.matrix(StoredDtype::F32, shape)?;
                            let wide = change.applied_to(held, wide);
                            let mut values = vec![0.0; wide.elements()];
                            wide.widen_rows(0, &mut values);
                            let matrix = spare.matrix(dtype, [wide.rows(), wide.columns()])?;
                            stored(&values, rounding, matrix).into()
                        }
                        _ => {
                            let shape = [held.rows(), held.columns()];
                            Weight::from(change.applied_to(held, spare.matrix(dtype, shape)?))
                        }
                    };
                }
                ParameterName::B(_) => {}
                ParameterName::Norm(norm) => layer.set_norm(norm, of),
            }
        }
        let layer = spare.as_new_version(layer);
        Ok(BaseLayer { layer, pruned })
    }

    /// The low-rank change of a matrix.
    fn change(
        &self,
        config: &ModelConfig,
        id: LinearId,
        pruned: Arc<[u8]>,
        [a, b]: [&[f32]; 2],
    ) -> MaskedLowRank {
        let scale = match self.form {
            TrainedForm::Factors { rank, alpha } => (alpha / rank as f64) as f32,
            TrainedForm::Weights => 1.0,
        };
        let factors = [a.to_vec(), b.to_vec()];
        MaskedLowRank::with_mask(LowRank::new(id.shape(config), factors, scale), pruned)
    }

    /// Zero gradients of a layer's parameters.
    ///
    /// # Errors
    /// Fails when a trained matrix has no mask, which would be a bug.
    pub fn gradients(
        &self,
        config: &ModelConfig,
        base: &BaseLayer,
        values: &[Cow<'_, [f32]>],
    ) -> Result<LayerGradients> {
        let BaseLayer { layer, pruned } = base;
        let gradients = match self.form {
            TrainedForm::Weights => LayerGradients::new(layer, self.ids.iter().copied()),
            TrainedForm::Factors { .. } => {
                let pairs = self.ids.iter().zip(values.chunks(2));
                let changes = pairs.map(|(&id, factors)| {
                    let pruned = mask_of(pruned, id)?;
                    let factors = [&*factors[0], &*factors[1]];
                    let change = self.change(config, id, pruned, factors);
                    Ok((id, change))
                });
                LayerGradients::of_factors(changes.collect::<Result<_>>()?)
            }
        };
        Ok(match self.norms {
            true => gradients.with_norms(layer),
            false => gradients,
        })
    }

    /// The gradients of the parameters in their order.
    ///
    /// # Errors
    /// Fails when a parameter has no gradient, which would be a bug.
    pub fn collected<'g>(
        &self,
        config: &ModelConfig,
        gradients: &'g mut LayerGradients,
    ) -> Result<Vec<&'g mut Vec<f32>>> {
        let (mut matrices, mut norms) = gradients.arrays_mut();
        let of_matrices = self.ids.iter().filter_map(|id| matrices.remove(id)).flatten();
        let of_norms = config.family.norms.iter().filter_map(|(role, _)| norms.remove(role));
        let collected: Vec<_> = of_matrices.chain(of_norms).collect();
        let parameters = self.parameters(config).len();
        let found = collected.len();
        ensure!(found == parameters, "{found} of {parameters} parameters have gradients");
        Ok(collected)
    }
}

/// Gradients whose pruned weights have the gradient +0.
pub(super) fn masked(mut gradients: Vec<Vec<f32>>, kept: &[Option<KeptMask>]) -> Vec<Vec<f32>> {
    for (gradient, kept) in gradients.iter_mut().zip(kept) {
        if let Some(kept) = kept {
            kept.apply(gradient);
        }
    }
    gradients
}

/// The weight of a norm as it is stored.
fn stored_norm(layer: &DecoderLayer, role: NormRole) -> Result<&[f32]> {
    let norm = layer.norms().find(|(of, _)| *of == role);
    norm.map(|(_, norm)| norm.stored()).context("a layer has the norms of its family")
}

/// The mask of a matrix whose factors are trained.
fn mask_of(pruned: &BTreeMap<LinearId, Arc<[u8]>>, id: LinearId) -> Result<Arc<[u8]>> {
    let mask = pruned.get(&id).map(Arc::clone);
    mask.context("a base of factors has masks")
}

/// Rounds f32 values to a matrix, whose old content is lost.
fn stored(values: &[f32], rounding: Bf16Rounding, mut matrix: StoredMatrix) -> StoredMatrix {
    let dtype = matrix.dtype();
    match dtype {
        StoredDtype::Bf16 => round_to_bf16(values, rounding, matrix.as_bytes_mut()),
        StoredDtype::F32 => matrix.as_bytes_mut().copy_from_slice(bytemuck::cast_slice(values)),
        StoredDtype::F16 => {
            let mut narrow = Vec::new();
            convert::narrow(dtype, values, &mut narrow);
            matrix.as_bytes_mut().copy_from_slice(&narrow);
        }
    }
    matrix
}
