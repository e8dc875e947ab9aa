//! Token embeddings, read row by row from the file. The table itself (up to 2 GiB) is never in memory.

use anyhow::{Result, anyhow};
use candle_core::Tensor;
use rayon::prelude::*;

use super::config::ModelConfig;
use super::stored_dtype;
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::linalg::{StoredMatrix, tensor};

/// The embedding table `[vocab_size, hidden_size]` in a checkpoint.
pub struct Embedding<'a> {
    source: &'a dyn WeightSource,
    entry: &'a TensorEntry,
    hidden_size: usize,
}

/// The name of the embedding's tensor.
pub const EMBEDDING: &str = "model.embed_tokens.weight";

impl<'a> Embedding<'a> {
    /// Finds the table and checks its shape.
    ///
    /// # Errors
    /// Fails when the table is missing or has another shape.
    pub fn open(source: &'a dyn WeightSource, config: &ModelConfig) -> Result<Self> {
        let entry = source.require(EMBEDDING, &[config.vocab_size, config.hidden_size])?;
        stored_dtype(entry)?;
        Ok(Self { source, entry, hidden_size: config.hidden_size })
    }

    /// Returns the hidden states that enter layer 0: `[tokens, hidden_size]`, widened to f32.
    ///
    /// # Errors
    /// Fails for an id beyond the table, and when reading fails.
    pub fn rows(&self, tokens: &[u32]) -> Result<Tensor> {
        let dtype = stored_dtype(self.entry)?;
        let row_bytes = self.hidden_size * dtype.bytes();
        let mut hidden = vec![0.0; tokens.len() * self.hidden_size];
        hidden.par_chunks_mut(self.hidden_size).zip(tokens).try_for_each_init(
            || StoredMatrix::zeros(dtype, 1, self.hidden_size),
            |row, (wide, &token)| {
                let row = row.as_mut().map_err(|error| anyhow!("{error}"))?;
                let rows = self.entry.shape.first().copied().unwrap_or(0);
                if token as usize >= rows {
                    return Err(anyhow!("token id {token} is beyond the embedding's {rows} rows"));
                }
                self.source.read(
                    self.entry,
                    u64::from(token) * row_bytes as u64,
                    row.as_bytes_mut(),
                )?;
                row.widen_rows(0, wide);
                Ok(())
            },
        )?;
        tensor::from_vec(hidden, &[tokens.len(), self.hidden_size])
    }
}
