//! A decoder layer: its weights as stored, and the passes of a sample through it.
//!
//! ```text
//! a = norm(x);  q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ;  q, k = rotate(norm(q)), rotate(norm(k))
//! h = x + norm(attention(q, k, v)·Woᵀ);  m = norm(h);  y = h + norm((act(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ)
//! ```
//!
//! norm(x) = x / √(mean(x²) + ε) ∘ w. A family has some of these norms; the identity stands for the others. [`LayerSpec`] says which, and
//! holds the numbers of the arithmetic. Touvron et al. 2023, arXiv:2302.13971 §2.2; the arithmetic follows transformers' decoder layers in
//! f32 with eager attention. All steps work on slices, with scratch memory from the workspace. The MLP runs over some tokens at a time, so
//! its two wide activations never exist for a whole sequence. Attention can run over some key/value heads at a time, with their queries.
//! The memory settings set both numbers; they change no bit of the result.
//!
//! Memory that exists at once, in f32 elements, with L tokens, H hidden_size, I intermediate_size, Q and K the widths of all queries
//! and of all keys:
//!
//! ```text
//! always      L·H input (its owner counts it), L·H output
//! attention   L·max(H, Q) normed, then context; L·Q q; 2·L·K k and v; a block of scores per thread
//!   in parts  L·H normed; L·Q context; (L·Q + 2·L·K) / parts q, k and v; blocks of scores
//! MLP         t·H normed, then down's output; 2·t·I gate and up, for t tokens at once
//! ```
//!
//! Attention and MLP share the workspace. The rows of a weight at rest ([`Linear::rows_at_once`]) and the packed factors of products
//! (`footprint`) come in addition.
//!
//! | file | content |
//! | --- | --- |
//! | `attention` | the attention block, forwards and backwards |
//! | `layout` | groups of heads, and their place in the workspace |
//! | `mlp` | the MLP, forwards and backwards |
//! | `pass` | passes of a sample: what they keep, observe, and where their memory is |
//! | `sizes` | sizes of the memory of passes |
//! | `stages` | what a pass needs, and norms as its stages |

mod attention;
pub(super) mod layout;
mod mlp;
mod pass;
pub mod sizes;
mod stages;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::config::ModelConfig;
use super::linears::{InputId, LinearId, LinearRole};
use super::norms::{NormRole, NormWeight};
use super::reading::{matrix_at_rest, read_compact, read_matrix, read_vector, stored_dtype};
use super::spec::LayerSpec;
use super::weight_form::WeightForms;
use crate::checkpoint::WeightSource;
use crate::linalg::{Linear, StoredMatrix, Weight};

/// A decoder layer in its stored dtype.
#[derive(Debug, Clone)]
pub struct DecoderLayer {
    index: usize,
    revision: u64,
    /// The revision of the norms, and of linears that are not in `changed`.
    base: u64,
    /// The revision of linears that were changed since.
    changed: BTreeMap<LinearId, u64>,
    spec: LayerSpec,
    norms: BTreeMap<NormRole, NormWeight>,
    linears: BTreeMap<LinearId, Linear>,
}

impl DecoderLayer {
    /// Checks that all tensors of a layer exist with the right shapes and dtypes. Reads headers only.
    ///
    /// # Errors
    /// Fails for the first tensor that is missing or has a wrong shape, and names it.
    pub fn check(source: &dyn WeightSource, config: &ModelConfig, index: usize) -> Result<()> {
        for tensor in config.layer_tensors(index) {
            super::stored_dtype(source.require(&tensor.name, &tensor.shape)?)?;
        }
        Ok(())
    }

    /// Reads a layer.
    pub fn load(source: &dyn WeightSource, config: &ModelConfig, index: usize) -> Result<Self> {
        Self::with_weights(source, config, index, |id, rows, columns| {
            Ok(read_matrix(source, &id.tensor_name(index), rows, columns)?.into())
        })
    }

    /// Reads a layer whose matrices are in memory in these forms, for text generation.
    ///
    /// # Errors
    /// Fails when a tensor is missing or cannot be read, and where a weight has no 8-bit code.
    pub fn load_in(
        source: &dyn WeightSource,
        config: &ModelConfig,
        index: usize,
        forms: &WeightForms,
    ) -> Result<Self> {
        Self::with_weights(source, config, index, |id, rows, columns| {
            let name = id.tensor_name(index);
            let dtype = stored_dtype(source.require(&name, &[rows, columns])?)?;
            match forms.of(config, index, id, dtype) {
                Some(form) => {
                    let matrix = read_compact(source, &name, [rows, columns], form);
                    Ok(Weight::Compact(matrix.with_context(|| format!("in `{name}`"))?))
                }
                None => Ok(read_matrix(source, &name, rows, columns)?.into()),
            }
        })
    }

    /// Opens a layer whose matrices stay in the checkpoint and are read for every product. Norms and biases are in memory.
    pub fn at_rest(
        source: &Arc<dyn WeightSource>,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self> {
        Self::with_weights(&**source, config, index, |id, rows, columns| {
            Ok(Weight::AtRest(matrix_at_rest(source, &id.tensor_name(index), rows, columns)?))
        })
    }

    fn with_weights(
        source: &dyn WeightSource,
        config: &ModelConfig,
        index: usize,
        weight: impl Fn(LinearId, usize, usize) -> Result<Weight>,
    ) -> Result<Self> {
        let mut linears = BTreeMap::new();
        for id in config.linears() {
            let (rows, columns) = id.shape(config);
            let weight = weight(id, rows, columns)?;
            let bias = config
                .has_bias(id)
                .then(|| read_vector(source, &id.bias_name(index), rows))
                .transpose()?;
            linears.insert(id, Linear::new(weight, bias).reused());
        }
        let spec = config.layer(index);
        let norms = spec.family.norm_names(index).map(|(role, name)| {
            let weight = read_vector(source, &name, spec.norm_width(role))?;
            Ok((role, NormWeight::new(weight, spec.family.norms_add_one)))
        });
        Ok(Self {
            index,
            revision: 0,
            base: 0,
            changed: BTreeMap::new(),
            spec,
            norms: norms.collect::<Result<_>>()?,
            linears,
        })
    }

    /// The same layer with new linears, of the sizes of `config`. The norms stay.
    #[must_use]
    pub fn with_linears(&self, config: &ModelConfig, linears: BTreeMap<LinearId, Linear>) -> Self {
        Self {
            revision: self.revision + 1,
            base: self.revision + 1,
            changed: BTreeMap::new(),
            spec: config.layer(self.index),
            norms: self.norms.clone(),
            linears,
            ..*self
        }
    }

    /// The layer's index in the model, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The layer's linears, in the order of the reference.
    pub fn linear_ids(&self) -> impl Iterator<Item = LinearId> + use<'_> {
        self.linears.keys().copied()
    }

    /// A linear of the layer.
    ///
    /// # Panics
    /// Panics when the family has no such linear.
    pub fn linear(&self, id: LinearId) -> &Linear {
        &self.linears[&id]
    }

    /// The revision of the weights, which counts accesses for a change. A copy is up to date only if its revision is the same.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The revision of the norms, and of the linears that were not changed since.
    pub fn base_revision(&self) -> u64 {
        self.base
    }

    /// The revision of a linear's weights.
    pub fn linear_revision(&self, id: LinearId) -> u64 {
        self.changed.get(&id).copied().unwrap_or(self.base)
    }

    /// The same layer as version `number`, from 1. No two versions share a revision, so a copy of an earlier version on a device is never
    /// taken for this layer.
    #[must_use]
    pub fn as_version(self, number: u32) -> Self {
        let revision = u64::from(number) << 32;
        Self { revision, base: revision, changed: BTreeMap::new(), ..self }
    }

    /// The layer as data.
    pub fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    /// The norms, in the order of a forward pass.
    pub fn norms(&self) -> impl Iterator<Item = (NormRole, &NormWeight)> {
        self.norms.iter().map(|(role, weight)| (*role, weight))
    }

    /// Replaces the weight of a norm.
    ///
    /// # Panics
    /// Panics when the layer has no such norm, or there are not as many values as before.
    pub fn set_norm(&mut self, role: NormRole, values: &[f32]) {
        self.revision += 1;
        (self.base, self.changed) = (self.revision, BTreeMap::new());
        self.norms.get_mut(&role).expect("callers name norms of the layer").set(values);
    }

    /// The linear that has the rows of a role, and the place of these rows in it.
    fn part(&self, role: LinearRole) -> (LinearId, Range<usize>) {
        self.spec.part(role)
    }

    /// A linear of the layer, for a change.
    ///
    /// # Panics
    /// Panics when the family has no such linear.
    pub fn linear_mut(&mut self, id: LinearId) -> &mut Linear {
        self.revision += 1;
        self.changed.insert(id, self.revision);
        self.linears.get_mut(&id).expect("callers name linears of the layer's family")
    }

    /// Frees packed weights.
    pub fn drop_packed(&mut self) {
        self.linears.values_mut().for_each(Linear::drop_packed);
    }

    /// Takes the weight of a linear out, if it is in memory. The layer cannot be used afterwards.
    pub fn take_weight(&mut self, id: LinearId) -> Option<StoredMatrix> {
        let linear = self.linears.remove(&id)?;
        linear.into_weight()
    }

    /// Puts the intermediate channels of the MLP into a new order, `order[new] = old`: the rows of gate and up with their biases, and
    /// the columns of down. The function stays the same but for the order of down's sums. The weights must be in memory.
    ///
    /// # Panics
    /// Panics when `order` does not name every channel once.
    pub fn permute_intermediate(&mut self, order: &[usize]) {
        for id in self.spec.linears().filter(|id| id.input() == InputId::Mlp) {
            // A matrix with the rows of both has each part in the new order.
            let parts = 0..id.roles().len();
            let order =
                parts.flat_map(|part| order.iter().map(move |old| part * order.len() + old));
            self.linear_mut(id).permute_outputs(&order.collect::<Vec<_>>());
        }
        let (down, _) = self.part(LinearRole::Down);
        self.linear_mut(down).permute_inputs(order);
    }
}
