//! The form of a generating model's matrices in memory: with their zeros, or without them; the head as stored, or in 8-bit codes.
//!
//! A matrix is held without its zeros only where that takes fewer bytes. The share of kept weights is estimated from some rows of every
//! matrix, spread over it, so a plan needs no pass over the checkpoint.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;

use super::config::ModelConfig;
use super::linears::LinearId;
use super::reading::stored_dtype;
use crate::bytes::ByteSize;
use crate::checkpoint::WeightSource;
use crate::linalg::{CompactMatrix, KeptForm, Linear, StoredDtype, StoredMatrix, bitmask};

/// Rows of a matrix that are read for the estimate.
const SAMPLED_ROWS: usize = 32;

/// The form of matrices in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightForm {
    /// As stored, zeros included
    Dense,
    /// Without zeros, a bit per weight; the same results
    Compact,
    /// Without zeros, the rest rounded to 8 bits; other results
    Int8,
}

impl WeightForm {
    /// The name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Compact => "compact",
            Self::Int8 => "int8",
        }
    }

    fn kept_form(self, dtype: StoredDtype) -> Option<KeptForm> {
        match self {
            Self::Dense => None,
            Self::Compact => Some(KeptForm::Stored(dtype)),
            Self::Int8 => Some(KeptForm::Codes),
        }
    }
}

/// The form of the head's matrix in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum HeadForm {
    /// As stored
    #[default]
    Stored,
    /// Rounded to 8 bits, a scale per row and 128 columns: another text
    Int8,
}

impl HeadForm {
    /// The name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Int8 => "int8",
        }
    }

    /// The memory of a head that is stored in this dtype.
    pub fn bytes(self, config: &ModelConfig, dtype: StoredDtype) -> ByteSize {
        let (rows, columns) = (config.vocab_size, config.hidden_size);
        match self {
            Self::Stored => ByteSize::of(rows * columns, dtype.bytes()),
            Self::Int8 => CompactMatrix::bytes(rows, columns, rows * columns, KeptForm::AllCodes),
        }
    }

    /// The memory of rows that are rounded while the head is read: as stored, and their codes twice.
    fn rounded_bytes(self, config: &ModelConfig, dtype: StoredDtype) -> ByteSize {
        let (rows, columns) = (config.vocab_size, config.hidden_size);
        match self {
            Self::Stored => ByteSize::ZERO,
            Self::Int8 => {
                let rows = CompactMatrix::rows_of_part(rows, columns);
                ByteSize::of(rows * columns, dtype.bytes() + 2)
            }
        }
    }
}

/// The estimated share of kept weights of every matrix of the decoder.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KeptShares(Vec<BTreeMap<LinearId, f64>>);

impl KeptShares {
    /// Reads some rows of every matrix.
    ///
    /// # Errors
    /// Fails when a matrix is missing or cannot be read.
    pub fn sampled(source: &dyn WeightSource, config: &ModelConfig) -> Result<Self> {
        let layers = (0..config.num_hidden_layers).map(|layer| {
            let of_linear = |id: LinearId| Ok((id, kept_share(source, config, layer, id)?));
            config.linears().map(of_linear).collect::<Result<_>>()
        });
        Ok(Self(layers.collect::<Result<_>>()?))
    }

    /// The same share for every matrix.
    pub fn uniform(config: &ModelConfig, share: f64) -> Self {
        let layer = || config.linears().map(|id| (id, share)).collect();
        Self((0..config.num_hidden_layers).map(|_| layer()).collect())
    }

    /// The share of zeros in all matrices.
    pub fn zeros(&self, config: &ModelConfig) -> f64 {
        let (mut kept, mut all) = (0.0, 0.0);
        for (id, share) in self.0.iter().flatten() {
            let (rows, columns) = id.shape(config);
            kept += share * (rows * columns) as f64;
            all += (rows * columns) as f64;
        }
        1.0 - kept / f64::max(all, 1.0)
    }
}

/// The form of every matrix of a model in memory, and of the head.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightForms {
    form: WeightForm,
    shares: KeptShares,
    head: HeadForm,
}

impl WeightForms {
    /// All matrices as stored.
    pub const fn dense() -> Self {
        Self::new(WeightForm::Dense, KeptShares(Vec::new()))
    }

    /// Matrices in this form where it takes fewer bytes.
    pub const fn new(form: WeightForm, shares: KeptShares) -> Self {
        Self { form, shares, head: HeadForm::Stored }
    }

    /// The same forms with the head in this form.
    #[must_use]
    pub fn with_head(self, head: HeadForm) -> Self {
        Self { head, ..self }
    }

    /// The form of the head.
    pub fn head(&self) -> HeadForm {
        self.head
    }

    /// The form that was asked for.
    pub fn form(&self) -> WeightForm {
        self.form
    }

    /// The form of a matrix without its zeros; `None` for a matrix that is held as stored.
    pub fn of(
        &self,
        config: &ModelConfig,
        layer: usize,
        id: LinearId,
        dtype: StoredDtype,
    ) -> Option<KeptForm> {
        let form = self.form.kept_form(dtype)?;
        let (compact, dense) = self.bytes(config, layer, id, dtype)?;
        (compact < dense).then_some(form)
    }

    /// The mean memory of the matrices of a layer.
    pub fn layer_bytes(&self, config: &ModelConfig, dtype: StoredDtype) -> ByteSize {
        let total: ByteSize = self.of_layers(config, dtype).sum();
        ByteSize(total.0.div_ceil(config.num_hidden_layers.max(1) as u64))
    }

    /// The memory of the matrices of the largest layer.
    pub fn largest_layer_bytes(&self, config: &ModelConfig, dtype: StoredDtype) -> ByteSize {
        self.of_layers(config, dtype).max().unwrap_or_default()
    }

    /// The memory of the matrices of every layer.
    fn of_layers(
        &self,
        config: &ModelConfig,
        dtype: StoredDtype,
    ) -> impl Iterator<Item = ByteSize> {
        let of_matrix = move |layer: usize, id: LinearId| {
            let (rows, columns) = id.shape(config);
            let dense = ByteSize::of(rows * columns, dtype.bytes());
            let both = self.bytes(config, layer, id, dtype);
            both.map_or(dense, |(compact, dense)| compact.min(dense))
        };
        let layers = 0..config.num_hidden_layers;
        layers.map(move |layer| config.linears().map(|id| of_matrix(layer, id)).sum())
    }

    /// The memory of a product of many tokens beside the matrices: the input rounded to 8-bit codes.
    ///
    /// # Arguments
    /// * `attention`, `mlp`: tokens at once
    pub fn rounded_bytes(&self, config: &ModelConfig, attention: usize, mlp: usize) -> ByteSize {
        if self.form != WeightForm::Int8 {
            return ByteSize::ZERO;
        }
        let inputs = config.linears().map(|id| {
            let tokens = if id.is_attention() { attention } else { mlp };
            ByteSize::of(tokens * id.shape(config).1, size_of::<f32>())
        });
        inputs.max().unwrap_or_default()
    }

    /// The memory of the head, and of its rows while it is read.
    pub fn head_bytes(&self, config: &ModelConfig, dtype: StoredDtype) -> [ByteSize; 2] {
        [self.head.bytes(config, dtype), self.head.rounded_bytes(config, dtype)]
    }

    /// The memory of rows that are restored for products of many tokens.
    pub fn restored_bytes(&self, threads: usize) -> ByteSize {
        match self.form {
            WeightForm::Dense => ByteSize::ZERO,
            WeightForm::Compact | WeightForm::Int8 => ByteSize::of(threads, RESTORED),
        }
    }

    /// The memory of rows that are made compact while a matrix is read.
    pub fn made_bytes(&self, config: &ModelConfig, dtype: StoredDtype) -> ByteSize {
        rows_bytes(
            config,
            match self.form {
                WeightForm::Dense => 0,
                // The rows as stored, and what is kept of them.
                WeightForm::Compact => 2 * dtype.bytes(),
                // The rows as stored with their codes and masks, or restored in f32.
                WeightForm::Int8 => (dtype.bytes() + 2).max(size_of::<f32>()),
            },
        )
    }

    /// The bytes of a matrix without its zeros, and as stored.
    fn bytes(
        &self,
        config: &ModelConfig,
        layer: usize,
        id: LinearId,
        dtype: StoredDtype,
    ) -> Option<(ByteSize, ByteSize)> {
        let form = self.form.kept_form(dtype)?;
        let share = self.shares.0.get(layer)?.get(&id)?;
        let (rows, columns) = id.shape(config);
        let kept = (share * (rows * columns) as f64).ceil() as usize;
        let compact = CompactMatrix::bytes(rows, columns, kept, form);
        Some((compact, ByteSize::of(rows * columns, dtype.bytes())))
    }
}

/// The memory of the rows of a matrix that are read at once, with elements of this size.
fn rows_bytes(config: &ModelConfig, element: usize) -> ByteSize {
    let rows = config.linears().map(|id| {
        let (rows, columns) = id.shape(config);
        Linear::rows_at_once(columns, rows) * columns
    });
    ByteSize::of(rows.max().unwrap_or(0), element)
}

/// Bytes of the columns that a thread restores at once, at most: a unit of packed columns times a slab, in f32.
const RESTORED: usize = 128 << 10;

/// The share of weights of some rows whose bits are not all 0.
fn kept_share(
    source: &dyn WeightSource,
    config: &ModelConfig,
    layer: usize,
    id: LinearId,
) -> Result<f64> {
    let (rows, columns) = id.shape(config);
    let entry = source.require(&id.tensor_name(layer), &[rows, columns])?;
    let dtype = stored_dtype(entry)?;
    let row_bytes = columns * dtype.bytes();
    let sampled = SAMPLED_ROWS.min(rows);
    let mut matrix = StoredMatrix::zeros(dtype, sampled, columns)?;
    for (number, row) in matrix.as_bytes_mut().chunks_mut(row_bytes.max(1)).enumerate() {
        let at = number * rows / sampled;
        source.read(entry, (at * row_bytes) as u64, row)?;
    }
    let kept = bitmask::count(dtype.bytes(), matrix.as_bytes()).kept;
    Ok(kept as f64 / matrix.elements().max(1) as f64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_matrix_without_many_zeros_stays_as_stored() {
        let config = ModelConfig::from_json(&json!({"model_type": "llama", "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 10}))
        .unwrap();
        let layer = |share: f64| config.linears().map(|id| (id, share)).collect();
        let shares = KeptShares(vec![layer(0.5), layer(0.97)]);
        let forms = |form| WeightForms::new(form, shares.clone());
        let id = LinearId::UP;
        let dtype = StoredDtype::Bf16;
        let compact = forms(WeightForm::Compact);
        assert_eq!(compact.of(&config, 0, id, dtype), Some(KeptForm::Stored(dtype)));
        assert_eq!(compact.of(&config, 1, id, dtype), None);
        assert_eq!(forms(WeightForm::Int8).of(&config, 1, id, dtype), Some(KeptForm::Codes));
        assert_eq!(WeightForms::dense().of(&config, 0, id, dtype), None);
        assert!((shares.zeros(&config) - 0.265).abs() < 1e-9);
    }
}
