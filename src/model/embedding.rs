//! Token embeddings, read row by row from the file. The table itself (up to 2 GiB) is never in memory. Some families multiply them by
//! √hidden_size.

use anyhow::{Result, anyhow};
use candle_core::Tensor;
use rayon::prelude::*;

use super::config::ModelConfig;
use super::reading::stored_dtype;
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::linalg::{StoredMatrix, tensor};

/// The embedding table `[vocab_size, hidden_size]` in a checkpoint.
pub struct Embedding<'a> {
    source: &'a dyn WeightSource,
    entry: &'a TensorEntry,
    hidden_size: usize,
    scale: Option<f32>,
}

/// The name of the embedding's tensor.
pub const EMBEDDING: &str = "model.embed_tokens.weight";

impl<'a> Embedding<'a> {
    /// Finds the table and checks its shape.
    ///
    /// # Errors
    /// Fails when the table is missing or has a wrong shape.
    pub fn open(source: &'a dyn WeightSource, config: &ModelConfig) -> Result<Self> {
        let entry = source.require(EMBEDDING, &[config.vocab_size, config.hidden_size])?;
        stored_dtype(entry)?;
        Ok(Self { source, entry, hidden_size: config.hidden_size, scale: config.embedding_scale })
    }

    /// Returns the hidden states that enter layer 0: `[tokens, hidden_size]`, widened to f32.
    ///
    /// # Errors
    /// Fails for an id beyond the table, and when reading fails.
    pub fn rows(&self, tokens: &[u32]) -> Result<Tensor> {
        let dtype = stored_dtype(self.entry)?;
        let mut hidden = vec![0.0; tokens.len() * self.hidden_size];
        hidden.par_chunks_mut(self.hidden_size).zip(tokens).try_for_each_init(
            || StoredMatrix::zeros(dtype, 1, self.hidden_size),
            |row, (wide, &token)| {
                let row = row.as_mut().map_err(|error| anyhow!("{error}"))?;
                self.read_row(token, row.as_bytes_mut())?;
                row.widen_rows(0, wide);
                if let Some(scale) = self.scale {
                    wide.iter_mut().for_each(|value| *value *= scale);
                }
                anyhow::Ok(())
            },
        )?;
        tensor::from_vec(hidden, &[tokens.len(), self.hidden_size])
    }

    /// Returns whether hidden states are the rows as they are stored, without a factor.
    pub fn is_as_stored(&self) -> bool {
        self.scale.is_none()
    }

    /// Room for the rows of some tokens in their stored dtype.
    pub fn room(&self, tokens: usize) -> Result<StoredMatrix> {
        StoredMatrix::zeros(stored_dtype(self.entry)?, tokens, self.hidden_size)
    }

    /// Reads the rows of tokens into a matrix from [`Embedding::room`]: the same memory for sample after sample.
    ///
    /// # Errors
    /// Fails for an id beyond the table, and when reading fails.
    pub fn read_rows(&self, tokens: &[u32], rows: &mut StoredMatrix) -> Result<()> {
        let row_bytes = self.hidden_size * rows.dtype().bytes();
        let rows = rows.as_bytes_mut().par_chunks_exact_mut(row_bytes.max(1));
        rows.zip(tokens).try_for_each(|(row, &token)| self.read_row(token, row))
    }

    fn read_row(&self, token: u32, row: &mut [u8]) -> Result<()> {
        let rows = self.entry.shape.first().copied().unwrap_or(0);
        if token as usize >= rows {
            return Err(anyhow!("token id {token} is beyond the embedding's {rows} rows"));
        }
        self.source.read(self.entry, u64::from(token) * row.len() as u64, row)
    }
}
