//! One decoder layer on a device: the formulas of `model/layer.rs` with candle's operators.
//!
//! ```text
//! x ← hidden;  a = norm(x);  q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ;  q, k rotated
//! x ← x + attention(q, k, v)·Woᵀ;  m = norm(x);  x ← x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! ```
//!
//! Attention takes some key/value heads with their queries at a time, and some of these queries. Scores `[heads, queries, keys]` exist in
//! f32 for one block, with the keys up to its last query. The MLP takes some tokens at a time. Observed inputs leave the device as column
//! sums and a few rows, or as all rows where an observer needs them; Gram matrices are summed on the device (`gram.rs`).

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::ops;

use super::gram::DeviceGrams;
use super::{CopyMatrix, Cut, upload_vector};
use crate::linalg::attention::Heads;
use crate::linalg::columns::{self, ColumnSums};
use crate::linalg::tensor;
use crate::model::family::Activation;
use crate::model::observe::{FromDevice, Observation, Observer};
use crate::model::{DecoderLayer, LayerContext, ModelConfig, Projection};

/// Rotary tables on a device, `[seqlen, head_dim / 2]` each.
#[derive(Debug, Clone)]
pub struct DeviceTables {
    cos: Tensor,
    sin: Tensor,
}

impl DeviceTables {
    /// Copies the tables of a context onto a device.
    pub fn new(
        context: &LayerContext,
        config: &ModelConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let half = config.head_dim / 2;
        let table = |values: &[f32]| -> Result<Tensor> {
            let shape = (values.len() / half.max(1), half);
            Ok(Tensor::from_slice(values, shape, device)?.to_dtype(dtype)?)
        };
        let (cos, sin) = context.rotary().tables();
        Ok(Self { cos: table(cos)?, sin: table(sin)? })
    }

    /// Rotates heads `[heads, seqlen, head_dim]`, or rotates them back: by the negative angle, which is also the gradient of a rotation.
    pub(super) fn rotate(&self, x: &Tensor, is_back: bool) -> Result<Tensor> {
        let seqlen = x.dim(1)?;
        let (cos, sin) = (self.cos.narrow(0, 0, seqlen)?, self.sin.narrow(0, 0, seqlen)?);
        let sin = if is_back { sin.neg()? } else { sin };
        let rotated = candle_nn::rotary_emb::rope(&x.unsqueeze(0)?, &cos, &sin)?;
        Ok(rotated.squeeze(0)?)
    }
}

/// x·Wᵀ + b
#[derive(Debug)]
pub(super) struct DeviceLinear {
    /// `[out_features, in_features]`
    pub(super) weight: Tensor,
    bias: Option<Tensor>,
}

impl DeviceLinear {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_rows(x, 0, self.weight.dim(0)?)
    }

    /// The output features from `first` on.
    fn forward_rows(&self, x: &Tensor, first: usize, count: usize) -> Result<Tensor> {
        let out = x.matmul(&self.weight.narrow(0, first, count)?.t()?)?;
        Ok(match &self.bias {
            Some(bias) => out.broadcast_add(&bias.narrow(0, first, count)?)?,
            None => out,
        })
    }
}

/// A decoder layer on a device. Matrices are copied one by one, so that each copy can fail by itself.
#[derive(Debug)]
pub struct DeviceLayer {
    index: usize,
    revision: u64,
    pub(super) heads: Heads,
    pub(super) rms_norm_eps: f32,
    pub(super) device: Device,
    pub(super) dtype: DType,
    pub(super) activation: Activation,
    input_layernorm: Tensor,
    post_attention_layernorm: Tensor,
    linears: BTreeMap<Projection, DeviceLinear>,
}

impl DeviceLayer {
    /// Copies a layer's norms. The matrices follow with [`DeviceLayer::take_up`].
    pub fn begin(layer: &DecoderLayer, dtype: DType, device: &Device) -> Result<Self> {
        let [input_layernorm, post_attention_layernorm] =
            layer.norms().map(|norm| upload_vector(norm, dtype, device));
        Ok(Self {
            index: layer.index(),
            revision: layer.revision(),
            heads: layer.heads(),
            rms_norm_eps: layer.rms_norm_eps(),
            device: device.clone(),
            dtype,
            input_layernorm: input_layernorm?,
            post_attention_layernorm: post_attention_layernorm?,
            activation: layer.activation(),
            linears: BTreeMap::new(),
        })
    }

    /// Returns whether this is a copy of the layer's current revision.
    pub fn is_of(&self, layer: &DecoderLayer) -> bool {
        (self.index, self.revision) == (layer.index(), layer.revision())
    }

    /// Copies one matrix onto the device, unless the device has it.
    ///
    /// # Errors
    /// Fails when the device has too little memory, and for a weight that is not in memory.
    pub fn take_up(
        &mut self,
        layer: &DecoderLayer,
        projection: Projection,
        copy: CopyMatrix<'_>,
    ) -> Result<()> {
        if self.linears.contains_key(&projection) {
            return Ok(());
        }
        let linear = layer.linear(projection);
        let weight = linear.weight().held();
        let weight = copy(weight.context("a device copies weights that are in memory")?)?;
        let bias = linear.bias();
        let linear = DeviceLinear {
            weight: weight.to_dtype(self.dtype)?,
            bias: bias.map(|bias| upload_vector(bias, self.dtype, &self.device)).transpose()?,
        };
        self.linears.insert(projection, linear);
        Ok(())
    }

    /// The norm before attention (0) or before the MLP (1).
    pub(super) fn norm(&self, norm: usize) -> &Tensor {
        match norm {
            0 => &self.input_layernorm,
            _ => &self.post_attention_layernorm,
        }
    }

    pub(super) fn linear(&self, projection: Projection) -> Result<&DeviceLinear> {
        self.linears
            .get(&projection)
            .with_context(|| format!("{} is not on the device", projection.full_name(self.index)))
    }

    /// Passes one sample through the layer: `[seqlen, hidden_size]` on the device in, the same shape out.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    pub fn forward(&self, hidden: &Tensor, tables: &DeviceTables, cut: &Cut) -> Result<Tensor> {
        let out = self.attend(hidden, tables, cut, None)?;
        self.mlp(&out, cut, None)?;
        Ok(out)
    }

    /// Shows the observed inputs of one sample to `observer`, and adds to `grams` what it asks for. The pass ends before down's product.
    pub fn capture(
        &self,
        hidden: &Tensor,
        tables: &DeviceTables,
        cut: &Cut,
        observer: &mut dyn Observer,
        grams: &mut DeviceGrams,
    ) -> Result<()> {
        let mut observing = Observing { observer, grams };
        let out = self.attend(hidden, tables, cut, Some(&mut observing))?;
        self.mlp(&out, cut, Some(&mut observing))
    }

    /// Returns hidden + attention(norm(hidden))·Woᵀ in a tensor of its own.
    fn attend(
        &self,
        hidden: &Tensor,
        tables: &DeviceTables,
        cut: &Cut,
        mut observing: Option<&mut Observing<'_>>,
    ) -> Result<Tensor> {
        let normed = ops::rms_norm(hidden, &self.input_layernorm, self.rms_norm_eps)?;
        show(&mut observing, Observation::AttentionInput, 0, &normed, cut)?;
        let context = self.context(&normed, tables, cut)?;
        drop(normed);
        show(&mut observing, Observation::OInput, 0, &context, cut)?;
        let out = self.linear(Projection::O)?.forward(&context)?;
        Ok((out + hidden)?)
    }

    /// Attention's output before o, `[seqlen, heads · head_dim]`, for its input behind the norm.
    pub(super) fn context(
        &self,
        normed: &Tensor,
        tables: &DeviceTables,
        cut: &Cut,
    ) -> Result<Tensor> {
        let Heads { num_heads, num_key_value_heads, head_dim } = self.heads;
        let seqlen = normed.dim(0)?;
        let per_key = num_heads / num_key_value_heads.max(1);
        let width = num_heads * head_dim;
        let context = Tensor::zeros((seqlen, width), self.dtype, &self.device)?;
        let mut first = 0;
        while first < num_key_value_heads {
            let keys = cut.key_value_heads.min(num_key_value_heads - first);
            let [q, k, v] = self.group(normed, tables, first, keys)?;
            let q = q.reshape((keys, per_key, seqlen, head_dim))?;
            self.attend_blocks(&q, &k, &v, cut.queries, |position, attended| {
                // The heads of this group are neighbouring columns.
                let columns = first * per_key * head_dim;
                let rows = context.narrow(0, position, attended.dim(0)?)?;
                Ok(rows.slice_set(&attended, 1, columns)?)
            })?;
            first += keys;
        }
        Ok(context)
    }

    /// Rotated q `[heads, seqlen, head_dim]`, rotated k and v `[keys, seqlen, head_dim]` of `keys` key/value heads from `first` on.
    pub(super) fn group(
        &self,
        normed: &Tensor,
        tables: &DeviceTables,
        first: usize,
        keys: usize,
    ) -> Result<[Tensor; 3]> {
        let head_dim = self.heads.head_dim;
        let per_key = self.heads.num_heads / self.heads.num_key_value_heads.max(1);
        let project = |projection, first: usize, heads: usize| -> Result<Tensor> {
            let out = self.linear(projection)?.forward_rows(
                normed,
                first * head_dim,
                heads * head_dim,
            )?;
            Ok(out.reshape((normed.dim(0)?, heads, head_dim))?.transpose(0, 1)?.contiguous()?)
        };
        Ok([
            tables.rotate(&project(Projection::Q, first * per_key, keys * per_key)?, false)?,
            tables.rotate(&project(Projection::K, first, keys)?, false)?,
            project(Projection::V, first, keys)?,
        ])
    }

    /// Calls `body(first query, context [queries, heads · head_dim])` block by block, with `q`
    /// `[keys, queries per key, seqlen, head_dim]` and `k`, `v` `[keys, seqlen, head_dim]`.
    fn attend_blocks(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        queries: usize,
        mut body: impl FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let (heads, per_key, seqlen, head_dim) = q.dims4()?;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let mut first = 0;
        while first < seqlen {
            let rows = queries.clamp(1, seqlen - first);
            let end = first + rows;
            let q = q.narrow(2, first, rows)?.contiguous()?.reshape((
                heads,
                per_key * rows,
                head_dim,
            ))?;
            // Each block frees its tensor after use, so that two tensors of the size of the scores exist at a time.
            let scores = {
                let keys = k.narrow(1, 0, end)?.contiguous()?;
                let scores = q.matmul(&keys.transpose(1, 2)?)?;
                scores.to_dtype(DType::F32)?
            };
            drop(q);
            let scores = (scores * scale)?.reshape((heads, per_key, rows, end))?;
            let masked = {
                let scores = scores;
                scores.broadcast_add(&self.mask(first, rows)?)?
            };
            let probabilities = {
                let masked = masked;
                ops::softmax_last_dim(&masked)?
            };
            let attended = {
                let probabilities = {
                    let wide = probabilities;
                    wide.to_dtype(self.dtype)?
                };
                let probabilities = probabilities.reshape((heads, per_key * rows, end))?;
                probabilities.matmul(&v.narrow(1, 0, end)?.contiguous()?)?
            };
            let attended = attended
                .reshape((heads * per_key, rows, head_dim))?
                .transpose(0, 1)?
                .contiguous()?
                .reshape((rows, heads * per_key * head_dim))?;
            body(first, attended)?;
            first = end;
        }
        Ok(())
    }

    /// 0 where a query sees a key and −∞ where it does not, `[rows, first + rows]` in f32.
    pub(super) fn mask(&self, first: usize, rows: usize) -> Result<Tensor> {
        let end = first + rows;
        let mut mask = vec![0.0f32; rows * end];
        for (row, mask) in mask.chunks_exact_mut(end).enumerate() {
            mask[first + row + 1..].fill(f32::NEG_INFINITY);
        }
        Ok(Tensor::from_vec(mask, (rows, end), &self.device)?)
    }

    /// hidden ← hidden + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ with m = norm(hidden). Writes into the memory of `hidden`, although the
    /// reference is shared. With an observer the pass ends at down's input.
    fn mlp(
        &self,
        hidden: &Tensor,
        cut: &Cut,
        mut observing: Option<&mut Observing<'_>>,
    ) -> Result<()> {
        let seqlen = hidden.dim(0)?;
        let mut first = 0;
        while first < seqlen {
            let tokens = cut.mlp_tokens.min(seqlen - first);
            let rows = hidden.narrow(0, first, tokens)?;
            let normed = ops::rms_norm(
                &rows.contiguous()?,
                &self.post_attention_layernorm,
                self.rms_norm_eps,
            )?;
            show(&mut observing, Observation::MlpInput, first, &normed, cut)?;
            let gate = {
                let gate = self.linear(Projection::Gate)?.forward(&normed)?;
                match self.activation {
                    Activation::Silu => ops::silu(&gate)?,
                }
            };
            let up = self.linear(Projection::Up)?.forward(&normed)?;
            drop(normed);
            let inner = (gate * up)?;
            show(&mut observing, Observation::DownInput, first, &inner, cut)?;
            if observing.is_none() {
                let out = self.linear(Projection::Down)?.forward(&inner)?;
                drop(inner);
                hidden.slice_set(&(out + rows)?, 0, first)?;
            }
            first += tokens;
        }
        Ok(())
    }
}

/// An observer of a sample, and the Gram matrices of all samples.
struct Observing<'a> {
    observer: &'a mut dyn Observer,
    grams: &'a mut DeviceGrams,
}

/// Shows an observer a sample's next rows, the first at position `first`: all of them, or their column sums and a few rows.
fn show(
    observing: &mut Option<&mut Observing<'_>>,
    point: Observation,
    first: usize,
    rows: &Tensor,
    cut: &Cut,
) -> Result<()> {
    let Some(Observing { observer, grams }) = observing else {
        return Ok(());
    };
    let tokens = rows.dim(0)?;
    let pieces = (0..tokens).step_by(cut.mlp_tokens.max(1));
    let pieces = pieces.map(|at| rows.narrow(0, at, cut.mlp_tokens.clamp(1, tokens - at)));
    let (kept, has_gram) = match observer.wants(point) {
        FromDevice::Rows => {
            for piece in pieces {
                observer.observe(point, &to_host(&piece?)?);
            }
            return Ok(());
        }
        FromDevice::Sums(kept) => (kept, false),
        FromDevice::Gram(kept) => (kept, true),
    };
    let kept = kept
        .iter()
        .filter(|position| (first..first + tokens).contains(position))
        .map(|position| to_host(&rows.narrow(0, position - first, 1)?))
        .collect::<Result<Vec<_>>>()?
        .concat();
    let width = rows.dim(D::Minus1)?;
    // Σ x², then Σ x.
    let mut sums = vec![0.0f64; 2 * width];
    for piece in pieces {
        let wide = piece?.to_dtype(DType::F32)?;
        let of_piece = Tensor::cat(&[wide.sqr()?.sum(0)?, wide.sum(0)?], 0)?;
        let of_piece = of_piece.to_device(&Device::Cpu)?;
        tensor::with_slice(&of_piece, |piece| columns::add_sums(&mut sums, piece))?;
        if has_gram {
            grams.add(point, &wide)?;
        }
    }
    let (squares, values) = sums.split_at(width);
    let sums = ColumnSums { tokens, squares, values };
    observer.observe_sums(point, &sums, &kept);
    Ok(())
}

/// Some rows as f32 in host memory, converted there.
fn to_host(rows: &Tensor) -> Result<Vec<f32>> {
    // A copy of its own: a view would take the whole tensor along.
    let rows = rows.force_contiguous()?.to_device(&Device::Cpu)?;
    Ok(rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}
