//! Gradients of the trained parameters of a layer on a device, and what the parts of a backward pass share.
//!
//! ```text
//! product    z = x·Wᵀ   →   dW = dzᵀ·x;  of factors  dB = s·(dW ∘ M)·Aᵀ,  dA = s·Bᵀ·(dW ∘ M)
//! piece      out = f(in): a norm, or the activation   →   candle's autograd
//! ```
//!
//! A piece computes its output again with a graph, and frees the graph before the next piece. Operators without a backward pass would cut
//! such a graph without a word, so every input of a piece must have a gradient. Sums over samples are f32, everything else has the dtype of
//! the arithmetic.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};

use super::tables::DeviceTables;
use super::{CandleResult, Tiling};
use crate::linalg::{LowRank, MaskedLowRank};
use crate::model::backward::LayerGradients;
use crate::model::{LinearId, NormRole};

/// The factors of a low-rank change on a device, and its mask.
#[derive(Debug)]
struct DeviceChange {
    /// 1 = kept, in u8, `[out_features, in_features]`.
    kept: Tensor,
    /// `[rank, in_features]`
    a: Tensor,
    /// `[out_features, rank]`
    b: Tensor,
    scale: f64,
}

impl DeviceChange {
    fn new(change: &MaskedLowRank, dtype: DType, device: &Device) -> Result<Self> {
        let LowRank { rows, columns, rank, scale, a, b } = &change.factors;
        let upload = |values: &[f32], shape: (usize, usize)| -> Result<Tensor> {
            Ok(Tensor::from_slice(values, shape, device)?.to_dtype(dtype)?)
        };
        Ok(Self {
            kept: Tensor::from_vec(change.kept(), (*rows, *columns), device)?,
            a: upload(a, (*rank, *columns))?,
            b: upload(b, (*rows, *rank))?,
            scale: f64::from(*scale),
        })
    }
}

/// Gradients of a layer's trained parameters: of a matrix in f32, or of its factors A and B.
type MatrixGradients = BTreeMap<LinearId, Vec<Tensor>>;

/// The gradients of a sample.
#[derive(Debug, Default)]
pub(super) struct SampleGradients {
    matrices: MatrixGradients,
    norms: BTreeMap<NormRole, Tensor>,
}

/// The trained part of a layer on a device, and the sums of its gradients.
#[derive(Debug)]
pub struct DeviceTraining {
    /// The trained matrices, with their low-rank change if its factors are trained.
    trained: BTreeMap<LinearId, Option<DeviceChange>>,
    pub(super) has_norms: bool,
    /// Sums over samples. Where the device had no memory for a sum, its terms.
    sums: Vec<SampleGradients>,
}

impl DeviceTraining {
    /// Copies masks and factors onto a device.
    ///
    /// # Errors
    /// Fails when the device has too little memory.
    pub fn new(gradients: &LayerGradients, dtype: DType, device: &Device) -> Result<Self> {
        let trained = gradients.changes().map(|(id, change)| {
            let change = change.map(|change| DeviceChange::new(change, dtype, device));
            Ok((id, change.transpose()?))
        });
        Ok(Self {
            trained: trained.collect::<Result<_>>()?,
            has_norms: gradients.has_norms(),
            sums: Vec::new(),
        })
    }

    /// Adds the sums to gradients on the host.
    ///
    /// # Errors
    /// Fails when the device fails.
    pub fn add_to(self, gradients: &mut LayerGradients) -> Result<()> {
        let host = |tensor: &Tensor| -> Result<Vec<f32>> {
            let tensor = tensor.to_device(&Device::Cpu)?;
            Ok(tensor.flatten_all()?.to_vec1()?)
        };
        for terms in &self.sums {
            for (&id, tensors) in &terms.matrices {
                let sums = tensors.iter().map(host).collect::<Result<Vec<_>>>()?;
                gradients.add_sums(id, &sums)?;
            }
            for (norm, tensor) in &terms.norms {
                gradients.add_norm_sum(*norm, &host(tensor)?);
            }
        }
        Ok(())
    }

    /// Adds the gradients of a sample to the sums. This cannot fail, since a sample counts once or not at all.
    pub(super) fn commit(&mut self, sample: SampleGradients) {
        let Some(sums) = self.sums.first_mut() else {
            return self.sums.push(sample);
        };
        let mut left = SampleGradients::default();
        for (id, terms) in sample.matrices {
            let added = sums.matrices.get(&id).map(|sums| {
                let both = sums.iter().zip(&terms).map(|(sum, term)| sum + term);
                both.collect::<candle_core::Result<Vec<_>>>()
            });
            match added {
                Some(Ok(added)) => {
                    sums.matrices.insert(id, added);
                }
                _ => {
                    left.matrices.insert(id, terms);
                }
            }
        }
        for (norm, term) in sample.norms {
            match sums.norms.get(&norm).map(|sum| sum + &term) {
                Some(Ok(added)) => sums.norms.insert(norm, added),
                _ => left.norms.insert(norm, term),
            };
        }
        if !left.matrices.is_empty() || !left.norms.is_empty() {
            self.sums.push(left);
        }
    }
}

/// Inputs that the parts of a backward pass share.
pub(super) struct DeviceBackward<'a> {
    pub(super) training: &'a DeviceTraining,
    pub(super) tables: &'a DeviceTables,
    pub(super) cut: &'a Tiling,
    /// The gradients so far.
    pub(super) sample: SampleGradients,
}

impl DeviceBackward<'_> {
    /// Adds the gradients of a matrix for some tokens, with dz `[tokens, out]` and x `[tokens, in]`. Adds nothing for a frozen matrix.
    pub(super) fn add(&mut self, id: LinearId, dz: &Tensor, x: &Tensor) -> Result<()> {
        let Some(change) = self.training.trained.get(&id) else {
            return Ok(());
        };
        let whole = dz.t()?.matmul(x)?;
        let terms = match change {
            None => vec![whole.to_dtype(DType::F32)?],
            Some(change) => {
                let masked = {
                    let whole = whole;
                    (whole * change.kept.to_dtype(x.dtype())?)?
                };
                let a = (change.b.t()?.matmul(&masked)?.to_dtype(DType::F32)? * change.scale)?;
                let b = (masked.matmul(&change.a.t()?)?.to_dtype(DType::F32)? * change.scale)?;
                vec![a, b]
            }
        };
        let sums = match self.sample.matrices.remove(&id) {
            None => terms,
            Some(sums) => {
                let both = sums.iter().zip(&terms);
                let both = both.map(|(sum, term)| sum + term);
                both.collect::<candle_core::Result<_>>()?
            }
        };
        self.sample.matrices.insert(id, sums);
        Ok(())
    }

    /// Adds the gradient of a norm for some tokens.
    pub(super) fn add_norm(&mut self, norm: NormRole, term: &Tensor) -> Result<()> {
        let sum = match self.sample.norms.get(&norm) {
            None => term.clone(),
            Some(sum) => (sum + term)?,
        };
        self.sample.norms.insert(norm, sum);
        Ok(())
    }
}

/// Returns the gradients of Σ body(inputs) ∘ gradient with respect to the inputs, and the output.
pub(super) fn piece(
    inputs: &[&Tensor],
    gradient: &Tensor,
    body: impl Fn(&[Var]) -> Result<Tensor>,
) -> Result<(Vec<Tensor>, Tensor)> {
    let inputs = inputs.iter().map(|input| Var::from_tensor(input));
    let inputs: Vec<Var> = inputs.collect::<candle_core::Result<_>>()?;
    let out = body(&inputs)?;
    let found = (&out * gradient)?.sum_all()?.backward()?;
    let gradients = inputs.iter().map(|input| {
        let gradient = found.get(input);
        let gradient = gradient.context("an operator without a backward pass cut the graph")?;
        // Its own graph would keep the tensors of the piece.
        Ok(gradient.detach())
    });
    Ok((gradients.collect::<Result<_>>()?, out.detach()))
}

/// The gradient of the only input of a piece.
pub(super) fn only(gradients: Vec<Tensor>) -> Result<Tensor> {
    gradients.into_iter().next().context("a piece has an input")
}

/// The gradient through `operators::bounded` from its value y, dy ∘ (1 − (y / c)²). Each step frees its input.
pub(super) fn bounded_backward(y: Tensor, dy: Tensor, c: f32) -> CandleResult<Tensor> {
    let square = y.sqr()?;
    drop(y);
    let slope = square.affine(-1.0 / f64::from(c).powi(2), 1.0)?;
    drop(square);
    dy * slope
}
