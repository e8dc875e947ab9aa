//! The vector-Jacobian product of a decoder layer on a device: products and attention by hand, norms and the activation by candle's
//! autograd.
//!
//! ```text
//! forward    a = norm(x);  q, k, v;  c = attention(q, k, v);  h = x + c·Woᵀ;  m = norm(h);  y = h + (silu(g) ∘ u)·Wdownᵀ
//! product    z = x·Wᵀ   →   dx = dz·W,  dW = dzᵀ·x;  of factors  dB = s·(dW ∘ M)·Aᵀ,  dA = s·Bᵀ·(dW ∘ M)
//! attention  c = P·v, P = softmax(S)   →   dv = Pᵀ·dc,  dP = dc·vᵀ,  dS = P ∘ (dP − Σ dP ∘ P),  dq = dS·k/√d,  dk = dSᵀ·q/√d
//! piece      out = f(in): a norm, or the activation   →   candle
//! ```
//!
//! candle's own backward pass of a product makes the gradient of a frozen weight, too, and its backward pass of attention keeps nine times
//! the scores. A piece computes its output again with a graph, and frees the graph before the next piece. Operators without a backward pass
//! would cut such a graph without a word, so every input of a piece must have a gradient. Weights of attention and sums over samples are
//! f32, everything else has the dtype of the arithmetic.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::ops;

use super::layer::DeviceTables;
use super::{DeviceLayer, Tiling};
use crate::linalg::attention::Heads;
use crate::linalg::{LowRank, MaskedLowRank};
use crate::model::backward::LayerGradients;
use crate::model::family::Activation;
use crate::model::{LinearId, NormRole, Role};

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
struct SampleGradients {
    matrices: MatrixGradients,
    norms: BTreeMap<NormRole, Tensor>,
}

/// The trained part of a layer on a device, and the sums of its gradients.
#[derive(Debug)]
pub struct DeviceTraining {
    /// The trained matrices, with their low-rank change if its factors are trained.
    trained: BTreeMap<LinearId, Option<DeviceChange>>,
    has_norms: bool,
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

    /// Adds the gradients of a matrix for some tokens, with dz `[tokens, out]` and x `[tokens, in]`. Adds nothing for a frozen matrix.
    fn add(
        &self,
        sample: &mut SampleGradients,
        id: LinearId,
        dz: &Tensor,
        x: &Tensor,
    ) -> Result<()> {
        let Some(change) = self.trained.get(&id) else {
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
        let sums = match sample.matrices.remove(&id) {
            None => terms,
            Some(sums) => {
                let both = sums.iter().zip(&terms);
                let both = both.map(|(sum, term)| sum + term);
                both.collect::<candle_core::Result<_>>()?
            }
        };
        sample.matrices.insert(id, sums);
        Ok(())
    }

    fn add_norm(&self, sample: &mut SampleGradients, norm: NormRole, term: &Tensor) -> Result<()> {
        let sum = match sample.norms.get(&norm) {
            None => term.clone(),
            Some(sum) => (sum + term)?,
        };
        sample.norms.insert(norm, sum);
        Ok(())
    }

    /// Adds the gradients of a sample to the sums. This cannot fail, since a sample counts once or not at all.
    fn commit(&mut self, sample: SampleGradients) {
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
fn only(gradients: Vec<Tensor>) -> Result<Tensor> {
    gradients.into_iter().next().context("a piece has an input")
}

impl DeviceLayer {
    /// Returns the gradient of a loss with respect to the layer's input, and adds the gradients of the layer's trained
    /// parameters to `training`.
    ///
    /// # Arguments
    /// * `hidden`: the layer's input, `[seqlen, hidden_size]` on the device
    /// * `output_gradient`: the gradient with respect to the layer's output, in the same shape
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory; `training` is unchanged then.
    pub fn backward(
        &self,
        [hidden, output_gradient]: [&Tensor; 2],
        training: &mut DeviceTraining,
        tables: &DeviceTables,
        cut: &Tiling,
    ) -> Result<Tensor> {
        let mut sample = SampleGradients::default();
        let normed = self.normed(NormRole::BeforeAttention, hidden)?;
        let context = self.context(&normed, tables, cut)?;
        let between = (self.product(Role::O, &context)? + hidden)?;
        let dbetween =
            self.mlp_backward(&between, output_gradient, training, &mut sample, cut.mlp_tokens)?;
        drop(between);
        training.add(&mut sample, LinearId::O, &dbetween, &context)?;
        drop(context);
        let dcontext = dbetween.matmul(&self.linear(LinearId::O)?.weight)?;
        let projected = self.attention_backward(&normed, &dcontext, tables, cut)?;
        drop(dcontext);
        let mut dx = Vec::new();
        for first in (0..hidden.dim(0)?).step_by(cut.mlp_tokens) {
            let tokens = cut.mlp_tokens.min(hidden.dim(0)? - first);
            let rows = |tensor: &Tensor| tensor.narrow(0, first, tokens);
            let mut dnormed = None;
            let x = rows(&normed)?;
            for (id, dz) in &projected {
                let dz = rows(dz)?;
                training.add(&mut sample, *id, &dz, &x)?;
                let part = dz.matmul(&self.linear(*id)?.weight)?;
                dnormed = Some(match dnormed {
                    None => part,
                    Some(sum) => (sum + part)?,
                });
            }
            let dnormed = dnormed.context("q, k and v")?;
            let part = self.norm_backward(
                NormRole::BeforeAttention,
                &rows(hidden)?,
                &dnormed,
                training,
                &mut sample,
            )?;
            dx.push((part + rows(&dbetween)?)?);
        }
        let dx = Tensor::cat(&dx, 0)?;
        training.commit(sample);
        Ok(dx)
    }

    /// The gradient through a norm with respect to its input.
    fn norm_backward(
        &self,
        norm: NormRole,
        x: &Tensor,
        gradient: &Tensor,
        training: &DeviceTraining,
        sample: &mut SampleGradients,
    ) -> Result<Tensor> {
        let weight = self.norm(norm).context("the layer has the norm")?;
        let eps = self.spec.rms_norm_eps;
        if !training.has_norms {
            let (gradients, _) =
                piece(&[x], gradient, |inputs| Ok(ops::rms_norm_slow(&inputs[0], weight, eps)?))?;
            return only(gradients);
        }
        let (mut gradients, _) = piece(&[x, weight], gradient, |inputs| {
            Ok(ops::rms_norm_slow(&inputs[0], &inputs[1], eps)?)
        })?;
        let of_weight = gradients.pop().context("a norm has a weight")?;
        training.add_norm(sample, norm, &of_weight.to_dtype(DType::F32)?)?;
        only(gradients)
    }

    /// The gradient with respect to the MLP's input before its norm, `dy` included.
    fn mlp_backward(
        &self,
        between: &Tensor,
        dy: &Tensor,
        training: &DeviceTraining,
        sample: &mut SampleGradients,
        mlp_tokens: usize,
    ) -> Result<Tensor> {
        let [gate, up, down] = [LinearId::GATE, LinearId::UP, LinearId::DOWN];
        let mut parts = Vec::new();
        for first in (0..between.dim(0)?).step_by(mlp_tokens) {
            let tokens = mlp_tokens.min(between.dim(0)? - first);
            let (x, dy) = (between.narrow(0, first, tokens)?, dy.narrow(0, first, tokens)?);
            let normed = self.normed(NormRole::BeforeMlp, &x)?;
            let (g, u) = (self.product(Role::Gate, &normed)?, self.product(Role::Up, &normed)?);
            let dinner = dy.matmul(&self.linear(down)?.weight)?;
            let (gradients, inner) = piece(&[&g, &u], &dinner, |inputs| {
                let [gate, up] = [inputs[0].as_tensor(), inputs[1].as_tensor()];
                Ok(match self.spec.activation {
                    Activation::Silu => (gate.silu()? * up)?,
                    Activation::GeluTanh => (gate.gelu()? * up)?,
                })
            })?;
            drop((g, u, dinner));
            training.add(sample, down, &dy, &inner)?;
            drop(inner);
            let mut dnormed: Option<Tensor> = None;
            for (id, dz) in [gate, up].into_iter().zip(gradients) {
                training.add(sample, id, &dz, &normed)?;
                let part = dz.matmul(&self.linear(id)?.weight)?;
                dnormed = Some(match dnormed {
                    None => part,
                    Some(sum) => (sum + part)?,
                });
            }
            let dnormed = dnormed.context("gate and up")?;
            let part = self.norm_backward(NormRole::BeforeMlp, &x, &dnormed, training, sample)?;
            parts.push((part + dy)?);
        }
        Ok(Tensor::cat(&parts, 0)?)
    }

    /// The gradients with respect to the products of q, k and v, `[seqlen, heads · head_dim]` each, from the gradient of attention's
    /// output.
    fn attention_backward(
        &self,
        normed: &Tensor,
        dcontext: &Tensor,
        tables: &DeviceTables,
        cut: &Tiling,
    ) -> Result<[(LinearId, Tensor); 3]> {
        let Heads { num_heads, num_key_value_heads, head_dim } = self.spec.heads;
        let seqlen = normed.dim(0)?;
        let per_key = num_heads / num_key_value_heads.max(1);
        let zeros =
            |heads: usize| Tensor::zeros((seqlen, heads * head_dim), self.dtype, &self.device);
        let (dq, dk, dv) =
            (zeros(num_heads)?, zeros(num_key_value_heads)?, zeros(num_key_value_heads)?);
        let mut first = 0;
        while first < num_key_value_heads {
            let keys = cut.key_value_heads.min(num_key_value_heads - first);
            let [q, k, v] = self.group(normed, tables, first, keys)?;
            let columns = first * per_key * head_dim;
            let width = keys * per_key * head_dim;
            let dcontext = dcontext.narrow(1, columns, width)?;
            let [q, k, v] = self.group_backward([&q, &k, &v], &dcontext, cut.queries)?;
            dq.slice_set(&flat(&tables.rotate_back(&q)?)?, 1, columns)?;
            dk.slice_set(&flat(&tables.rotate_back(&k)?)?, 1, first * head_dim)?;
            dv.slice_set(&flat(&v)?, 1, first * head_dim)?;
            first += keys;
        }
        Ok([(LinearId::Q, dq), (LinearId::K, dk), (LinearId::V, dv)])
    }

    /// The softmax of the scores of some queries from `first` on, in f32: `[keys, queries, keys before them]`. Each step frees its input.
    fn attention_weights(
        &self,
        q: &Tensor,
        k: &Tensor,
        (per_key, first, scale): (usize, usize, f64),
    ) -> Result<Tensor> {
        let (keys, queries, _) = q.dims3()?;
        let end = k.dim(1)?;
        let scores = {
            let scores = q.matmul(&k.transpose(1, 2)?)?;
            (scores.to_dtype(DType::F32)? * scale)?
        };
        let rows = queries / per_key;
        let masked = {
            let scores = scores.reshape((keys, per_key, rows, end))?;
            scores.broadcast_add(&self.mask(first, rows)?)?
        };
        Ok(ops::softmax_last_dim(&masked)?.reshape((keys, queries, end))?)
    }

    /// The gradients with respect to rotated q `[heads, seqlen, head_dim]`, rotated k and v `[keys, seqlen, head_dim]` of some heads,
    /// from the gradient of their output `[seqlen, heads · head_dim]`. Some queries pass at once.
    fn group_backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        dcontext: &Tensor,
        queries: usize,
    ) -> Result<[Tensor; 3]> {
        let (keys, seqlen, head_dim) = k.dims3()?;
        let per_key = q.dim(0)? / keys.max(1);
        let q = q.reshape((keys, per_key, seqlen, head_dim))?;
        let dq = Tensor::zeros(q.shape(), self.dtype, &self.device)?;
        let sums = [k, v].map(|of| Tensor::zeros(of.shape(), DType::F32, &self.device));
        let [dk, dv] = sums;
        let (dk, dv) = (dk?, dv?);
        let scale = 1.0 / (head_dim as f64).sqrt();
        let mut first = 0;
        while first < seqlen {
            let rows = queries.clamp(1, seqlen - first);
            let end = first + rows;
            let joined = (keys, per_key * rows, head_dim);
            let of_block = q.narrow(2, first, rows)?.contiguous()?.reshape(joined)?;
            let (k, v) = (k.narrow(1, 0, end)?.contiguous()?, v.narrow(1, 0, end)?.contiguous()?);
            let gradient = dcontext
                .narrow(0, first, rows)?
                .contiguous()?
                .reshape((rows, keys, per_key, head_dim))?
                .permute((1, 2, 0, 3))?
                .contiguous()?
                .reshape(joined)?;
            let weights = self.attention_weights(&of_block, &k, (per_key, first, scale))?;
            let rounded = weights.to_dtype(self.dtype)?;
            let of_values = rounded.transpose(1, 2)?.matmul(&gradient)?;
            drop(rounded);
            let scores = {
                let dweights = gradient.matmul(&v.transpose(1, 2)?)?;
                softmax_backward(&weights, dweights.to_dtype(DType::F32)?)?
            };
            drop(weights);
            let scores = (scores * scale)?.to_dtype(self.dtype)?;
            let of_queries = scores.matmul(&k)?.reshape((keys, per_key, rows, head_dim))?;
            dq.slice_set(&of_queries.contiguous()?, 2, first)?;
            let of_keys = scores.transpose(1, 2)?.matmul(&of_block)?;
            drop(scores);
            for (sum, term) in [(&dk, of_keys), (&dv, of_values)] {
                let added = (sum.narrow(1, 0, end)? + term.to_dtype(DType::F32)?)?;
                sum.slice_set(&added.contiguous()?, 1, 0)?;
            }
            first = end;
        }
        Ok([
            dq.reshape((keys * per_key, seqlen, head_dim))?,
            dk.to_dtype(self.dtype)?,
            dv.to_dtype(self.dtype)?,
        ])
    }
}

/// The gradient with respect to scores, P ∘ (dP − Σ dP ∘ P), from the gradient dP of their softmax P. Sums go over the last dimension.
fn softmax_backward(weights: &Tensor, gradient: Tensor) -> Result<Tensor> {
    let sums = (&gradient * weights)?.sum_keepdim(D::Minus1)?;
    let centred = {
        let gradient = gradient;
        gradient.broadcast_sub(&sums)?
    };
    Ok((centred * weights)?)
}

/// `[heads, seqlen, head_dim]` as `[seqlen, heads · head_dim]`.
fn flat(x: &Tensor) -> Result<Tensor> {
    let (heads, seqlen, head_dim) = x.dims3()?;
    Ok(x.transpose(0, 1)?.contiguous()?.reshape((seqlen, heads * head_dim))?)
}
