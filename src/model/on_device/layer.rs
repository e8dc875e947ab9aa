//! A decoder layer on a device: the formulas of `model/layer.rs` with candle's operators.
//!
//! ```text
//! x ← hidden;  a = norm(x);  q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ;  q, k rotated
//! x ← x + attention(q, k, v)·Woᵀ;  m = norm(x);  x ← x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! ```
//!
//! Attention takes some key/value heads with their queries at a time, and some of these queries. Scores `[heads, queries, keys]` exist for
//! a single block, with the keys up to its last query; `kernels::soften` turns them into weights in place. The MLP takes some tokens at a
//! time. Observed inputs leave the device as column sums and a few rows, or as all rows where an observer needs them; Gram matrices are
//! summed on the device (`gram.rs`).

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::ops;

use super::gram::DeviceGrams;
use super::observing::{Observing, SampleSums};
use super::tiling::PRODUCT_FEATURES;
use super::{CopyMatrix, Tiling, kernels, upload_vector};
use crate::linalg::attention::Heads;
use crate::linalg::select::Quota;
use crate::model::family::Activation;
use crate::model::norms::NormRole;
use crate::model::observe::Observer;
use crate::model::{DecoderLayer, InputId, LayerContext, LayerSpec, LinearId, ModelConfig, Role};

/// Σ a² and Σ (a − b)² of two products `[tokens, out_features]` on a device.
///
/// # Errors
/// Fails when the device fails.
pub fn squares_of_difference(a: &Tensor, b: &Tensor) -> Result<[f64; 2]> {
    let sum = |x: &Tensor| -> Result<f64> {
        let squares = kernels::column_sums(x)?.narrow(0, 0, 1)?.to_device(&Device::Cpu)?;
        Ok(squares.flatten_all()?.to_vec1::<f64>()?.iter().sum())
    };
    Ok([sum(a)?, sum(&(a - b)?)?])
}

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
        let (cos, sin) = context.rotaries()[0].tables();
        Ok(Self { cos: table(cos)?, sin: table(sin)? })
    }

    /// Rotates heads `[seqlen, heads · head_dim]`, and puts them before the tokens: `[heads, seqlen, head_dim]`.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let seqlen = x.dim(0)?;
        kernels::rotate_heads(x, &self.cos.narrow(0, 0, seqlen)?, &self.sin.narrow(0, 0, seqlen)?)
    }

    /// Rotates heads `[heads, seqlen, head_dim]` back: by the negative angle, which is also the gradient of a rotation.
    pub(super) fn rotate_back(&self, x: &Tensor) -> Result<Tensor> {
        let seqlen = x.dim(1)?;
        let (cos, sin) = (self.cos.narrow(0, 0, seqlen)?, self.sin.narrow(0, 0, seqlen)?.neg()?);
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
    revision: u64,
    /// The weight has the stored values, not rounded values.
    is_as_stored: bool,
}

impl DeviceLinear {
    /// The output features from `first` on.
    fn forward_rows(&self, x: &Tensor, first: usize, count: usize) -> Result<Tensor> {
        let out = x.matmul(&self.weight.narrow(0, first, count)?.t()?)?;
        Ok(match &self.bias {
            Some(bias) => out.broadcast_add(&bias.narrow(0, first, count)?)?,
            None => out,
        })
    }
}

/// A decoder layer on a device. Each matrix is copied by itself, so that a copy can fail alone.
#[derive(Debug)]
pub struct DeviceLayer {
    index: usize,
    /// The revision of the norms.
    base: u64,
    pub(super) spec: LayerSpec,
    pub(super) device: Device,
    pub(super) dtype: DType,
    /// The factors of the norms.
    norms: BTreeMap<NormRole, Tensor>,
    linears: BTreeMap<LinearId, DeviceLinear>,
    /// The matrix that weights were chosen from last, and their bits.
    chosen: Option<(LinearId, Tensor)>,
}

impl DeviceLayer {
    /// Copies a layer's norms. The matrices follow with [`DeviceLayer::take_up`].
    pub fn begin(layer: &DecoderLayer, dtype: DType, device: &Device) -> Result<Self> {
        let norms = layer.norms().map(|(role, norm)| {
            let factor = upload_vector(norm.factor(), dtype, device)?;
            Ok((role, factor))
        });
        Ok(Self {
            index: layer.index(),
            base: layer.base_revision(),
            spec: *layer.spec(),
            device: device.clone(),
            dtype,
            norms: norms.collect::<Result<_>>()?,
            linears: BTreeMap::new(),
            chosen: None,
        })
    }

    /// Returns whether this is a copy of the layer. Its matrices may be of an earlier revision.
    pub fn is_of(&self, layer: &DecoderLayer) -> bool {
        (self.index, self.base) == (layer.index(), layer.base_revision())
    }

    /// Copies a matrix onto the device, unless the device has its current revision.
    ///
    /// # Errors
    /// Fails when the device has too little memory, and for a weight that is not in memory.
    pub fn take_up(
        &mut self,
        layer: &DecoderLayer,
        id: LinearId,
        copy: CopyMatrix<'_>,
    ) -> Result<()> {
        let revision = layer.linear_revision(id);
        if self.linears.get(&id).is_some_and(|copied| copied.revision == revision) {
            return Ok(());
        }
        // Its memory is room for the copy.
        self.linears.remove(&id);
        let linear = layer.linear(id);
        let weight = linear.weight().held();
        let weight = copy(weight.context("a device copies weights that are in memory")?)?;
        let is_as_stored = weight.dtype() == self.dtype;
        let bias = linear.bias();
        let linear = DeviceLinear {
            weight: weight.to_dtype(self.dtype)?,
            bias: bias.map(|bias| upload_vector(bias, self.dtype, &self.device)).transpose()?,
            revision,
            is_as_stored,
        };
        self.linears.insert(id, linear);
        Ok(())
    }

    /// The factor of a norm; `None` if the layer has no such norm.
    pub(super) fn norm(&self, role: NormRole) -> Option<&Tensor> {
        self.norms.get(&role)
    }

    /// norm(x), or x without the norm.
    pub(super) fn normed(&self, role: NormRole, x: &Tensor) -> Result<Tensor> {
        Ok(match self.norm(role) {
            Some(factor) => ops::rms_norm(&x.contiguous()?, factor, self.spec.rms_norm_eps)?,
            None => x.clone(),
        })
    }

    /// x·Wᵀ + b of the rows of a role.
    pub(super) fn product(&self, role: Role, x: &Tensor) -> Result<Tensor> {
        let (id, rows) = self.spec.part(role);
        self.linear(id)?.forward_rows(x, rows.start, rows.len())
    }

    pub(super) fn linear(&self, id: LinearId) -> Result<&DeviceLinear> {
        self.linears
            .get(&id)
            .with_context(|| format!("{} is not on the device", id.full_name(self.index)))
    }

    /// X·Wᵀ of a matrix without its bias, in f32: X `[tokens, in_features]` from the host, `[tokens, out_features]` on the device. Some
    /// output features are computed at a time, since the weights are widened.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    pub fn multiply(&self, id: LinearId, rows: &[f32]) -> Result<Tensor> {
        let weight = &self.linear(id)?.weight;
        let (features, columns) = weight.dims2()?;
        let rows = Tensor::from_slice(rows, (rows.len() / columns.max(1), columns), &self.device)?;
        let pieces = (0..features).step_by(PRODUCT_FEATURES).map(|first| {
            let weight = weight.narrow(0, first, PRODUCT_FEATURES.min(features - first))?;
            rows.matmul(&weight.to_dtype(DType::F32)?.t()?)
        });
        let out = Tensor::cat(&pieces.collect::<candle_core::Result<Vec<_>>>()?, 1)?;
        // The cast must be over before the matrix may be freed: see `copy_on_separate_stream`.
        self.device.synchronize()?;
        Ok(out)
    }

    /// Chooses the lowest scores |w_ij| · norm_j of a matrix whose stored values the device has, and returns their bits as a mask has them.
    /// [`DeviceLayer::zero_chosen`] removes these weights. `None` leaves the choice to the host: a shape without kernels, rounded
    /// weights, or scores that are not finite.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    pub fn choose_lowest(
        &mut self,
        id: LinearId,
        norms: &[f32],
        quota: Quota,
    ) -> Result<Option<Vec<u8>>> {
        self.chosen = None;
        let linear = self.linear(id)?;
        if !linear.is_as_stored || !kernels::can_choose(norms.len(), quota) {
            return Ok(None);
        }
        let norms = Tensor::from_slice(norms, norms.len(), &self.device)?;
        let bits = kernels::lowest(&linear.weight, &norms, quota)?;
        let mut words: Vec<u32> = bits.to_device(&Device::Cpu)?.to_vec1()?;
        if words.pop() != Some(0) {
            return Ok(None);
        }
        self.chosen = Some((id, bits));
        words.iter_mut().for_each(|word| *word = word.to_le());
        Ok(Some(bytemuck::cast_slice(&words).to_vec()))
    }

    /// Writes zeros for the weights that [`DeviceLayer::choose_lowest`] chose last. From now on the device has the matrix of `layer`,
    /// which must have the same zeros. Returns whether it does.
    ///
    /// # Errors
    /// Fails when the device fails.
    pub fn zero_chosen(&mut self, layer: &DecoderLayer, id: LinearId) -> Result<bool> {
        let Some((_, bits)) = self.chosen.take().filter(|(chosen, _)| *chosen == id) else {
            return Ok(false);
        };
        let linear = self.linears.get_mut(&id).context("a matrix was chosen from")?;
        kernels::zero(&linear.weight, &bits)?;
        // Operators of ours must be over before the matrix may be freed: see `copy_on_separate_stream`.
        self.device.synchronize()?;
        linear.revision = layer.linear_revision(id);
        Ok(true)
    }

    /// Passes a sample through the layer: `[seqlen, hidden_size]` on the device in, the same shape out.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    pub fn forward(&self, hidden: &Tensor, tables: &DeviceTables, cut: &Tiling) -> Result<Tensor> {
        let out = self.attend(hidden, tables, cut, None)?;
        self.mlp(&out, cut, None)?;
        Ok(out)
    }

    /// Observes the inputs of a sample: rows reach `observer` at once, and sums with [`SampleSums::show`]. Adds to `grams` what it asks
    /// for. The pass ends before down's product.
    pub fn capture(
        &self,
        hidden: &Tensor,
        tables: &DeviceTables,
        cut: &Tiling,
        observer: &mut dyn Observer,
        grams: &mut DeviceGrams,
    ) -> Result<SampleSums> {
        let mut observing = Observing::new(observer, grams);
        let out = self.attend(hidden, tables, cut, Some(&mut observing))?;
        self.mlp(&out, cut, Some(&mut observing))?;
        observing.finish()
    }

    /// Returns hidden + attention(norm(hidden))·Woᵀ in a tensor of its own.
    fn attend(
        &self,
        hidden: &Tensor,
        tables: &DeviceTables,
        cut: &Tiling,
        mut observing: Option<&mut Observing<'_>>,
    ) -> Result<Tensor> {
        let normed = self.normed(NormRole::BeforeAttention, hidden)?;
        if let Some(observing) = &mut observing {
            observing.add(InputId::Attention, 0, &normed, cut)?;
        }
        let context = self.context(&normed, tables, cut)?;
        drop(normed);
        if let Some(observing) = &mut observing {
            observing.add(InputId::O, 0, &context, cut)?;
        }
        let out = self.product(Role::O, &context)?;
        kernels::add(&out, hidden)?;
        Ok(out)
    }

    /// Attention's output before o, `[seqlen, heads · head_dim]`, from the normed input.
    pub(super) fn context(
        &self,
        normed: &Tensor,
        tables: &DeviceTables,
        cut: &Tiling,
    ) -> Result<Tensor> {
        let Heads { num_heads, num_key_value_heads, head_dim } = self.spec.heads;
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
                let rows = context.narrow(0, position, attended.dim(1)?)?;
                kernels::place(&attended, &rows, columns)
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
        let head_dim = self.spec.heads.head_dim;
        let per_key = self.spec.heads.num_heads / self.spec.heads.num_key_value_heads.max(1);
        let project = |role: Role, first: usize, heads: usize| {
            let (id, rows) = self.spec.part(role);
            let first = rows.start + first * head_dim;
            self.linear(id)?.forward_rows(normed, first, heads * head_dim)
        };
        let v = project(Role::V, first, keys)?;
        Ok([
            tables.rotate(&project(Role::Q, first * per_key, keys * per_key)?)?,
            tables.rotate(&project(Role::K, first, keys)?)?,
            kernels::heads_first(&v, head_dim)?,
        ])
    }

    /// Calls `body(first query, context [heads, queries, head_dim])` block by block, with `q` `[keys, queries per key, seqlen, head_dim]`
    /// and `k`, `v` `[keys, seqlen, head_dim]`.
    fn attend_blocks(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        queries: usize,
        mut body: impl FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let (keys, per_key, seqlen, head_dim) = q.dims4()?;
        let mut first = 0;
        while first < seqlen {
            let rows = queries.clamp(1, seqlen - first);
            let end = first + rows;
            let joined = (keys, per_key * rows, head_dim);
            // Views of heads are operands of a product as they are. Only queries that share keys are moved together.
            let q = match per_key {
                1 => q.squeeze(1)?.narrow(1, first, rows)?,
                _ => q.narrow(2, first, rows)?.contiguous()?.reshape(joined)?,
            };
            let scores = q.matmul(&k.narrow(1, 0, end)?.transpose(1, 2)?)?;
            drop(q);
            let weights = {
                let scores = scores.reshape((keys * per_key, rows, end))?;
                kernels::soften(&scores, first, self.spec.scoring.scale)?;
                scores.reshape((keys, per_key * rows, end))?
            };
            let attended = weights.matmul(&v.narrow(1, 0, end)?)?;
            drop(weights);
            body(first, attended.reshape((keys * per_key, rows, head_dim))?)?;
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
        cut: &Tiling,
        mut observing: Option<&mut Observing<'_>>,
    ) -> Result<()> {
        let seqlen = hidden.dim(0)?;
        let mut first = 0;
        while first < seqlen {
            let tokens = cut.mlp_tokens.min(seqlen - first);
            let rows = hidden.narrow(0, first, tokens)?;
            let normed = self.normed(NormRole::BeforeMlp, &rows)?;
            if let Some(observing) = &mut observing {
                observing.add(InputId::Mlp, first, &normed, cut)?;
            }
            let inner = self.product(Role::Gate, &normed)?;
            let up = self.product(Role::Up, &normed)?;
            drop(normed);
            match self.spec.activation {
                Activation::Silu => kernels::silu_times(&inner, &up)?,
                Activation::GeluTanh => kernels::gelu_tanh_times(&inner, &up)?,
            }
            drop(up);
            if let Some(observing) = &mut observing {
                observing.add(InputId::Down, first, &inner, cut)?;
            }
            if observing.is_none() {
                let out = self.product(Role::Down, &inner)?;
                kernels::add(&rows, &out)?;
            }
            first += tokens;
        }
        Ok(())
    }
}
