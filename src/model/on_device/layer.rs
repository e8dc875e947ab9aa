//! A decoder layer on a device: the formulas of `model/layer.rs` with candle's operators.
//!
//! ```text
//! a = norm(x);  q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ;  q, k = rotate(norm(q)), rotate(norm(k))
//! h = x + norm(attention(q, k, v)·Woᵀ);  m = norm(h);  y = h + norm((act(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ)
//! ```
//!
//! A family has some of these norms; the identity stands for the others. Observed inputs leave the device as column sums and a few rows,
//! or as all rows where an observer needs them; Gram matrices are summed on the device (`gram.rs`).

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};

use super::gram::DeviceGrams;
use super::observing::{Observing, SampleSums};
use super::operators::rms_norm;
use super::tables::DeviceTables;
use super::tiling::PRODUCT_FEATURES;
use super::{CopyMatrix, Tiling, kernels, operators, upload_factor, upload_vector};
use crate::linalg::select::Quota;
use crate::model::norms::NormRole;
use crate::model::observe::Observer;
use crate::model::{DecoderLayer, LayerSpec, LinearId, LinearRole};

/// Σ a² and Σ (a − b)² of two products `[tokens, out_features]` on a device.
///
/// # Errors
/// Fails when the device fails.
pub fn squares_of_difference(a: &Tensor, b: &Tensor) -> Result<[f64; 2]> {
    let sum = |x: &Tensor| -> Result<f64> {
        let squares = kernels::column_sums(x)?.narrow(0, 0, 1)?;
        Ok(operators::download::<f64>(&squares)?.iter().sum())
    };
    Ok([sum(a)?, sum(&operators::minus(a, b)?)?])
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
    pub(super) fn forward_rows(&self, x: &Tensor, first: usize, count: usize) -> Result<Tensor> {
        let out = operators::matmul(x, &self.weight.narrow(0, first, count)?.t()?)?;
        Ok(match &self.bias {
            Some(bias) => operators::plus_row(&out, &bias.narrow(0, first, count)?)?,
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
            let factor = upload_factor(norm, dtype, device)?;
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
            weight: operators::cast(&weight, self.dtype)?,
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

    /// norm(x) over parts of rows that are as wide as the factor: hidden states, heads, or all heads. Without the norm, x.
    pub(super) fn normed(&self, role: NormRole, x: Tensor) -> Result<Tensor> {
        let Some(factor) = self.norm(role) else {
            return Ok(x);
        };
        let parts = operators::contiguous(&x)?.reshape(((), factor.elem_count()))?;
        let normed = rms_norm(&parts, factor, self.spec.rms_norm_eps)?;
        Ok(normed.reshape(x.shape())?)
    }

    /// x·Wᵀ + b of the rows of a role.
    pub(super) fn product(&self, role: LinearRole, x: &Tensor) -> Result<Tensor> {
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
        let shape = (rows.len() / columns.max(1), columns);
        let rows = operators::upload(rows, shape, &self.device)?;
        let pieces = (0..features).step_by(PRODUCT_FEATURES).map(|first| {
            let weight = weight.narrow(0, first, PRODUCT_FEATURES.min(features - first))?;
            operators::matmul(&rows, &operators::cast(&weight, DType::F32)?.t()?)
        });
        let out = operators::cat(&pieces.collect::<candle_core::Result<Vec<_>>>()?, 1)?;
        // The cast must be over before the matrix may be freed: see `copy_on_separate_stream`.
        operators::wait(&self.device)?;
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
        let norms = operators::upload(norms, norms.len(), &self.device)?;
        let bits = kernels::lowest(&linear.weight, &norms, quota)?;
        let mut words: Vec<u32> = operators::download(&bits)?;
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
        operators::wait(&self.device)?;
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
}
