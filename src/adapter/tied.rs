//! Adapters of a base whose head is its embedding: the tensors that embedding and head had in training.
//!
//! peft 0.21 wraps the modules that it trains. If it trains only the embedding or only the head, the untrained module keeps the base's
//! tensor. So the output is tied only if
//!
//! | embedding | head | |
//! | --- | --- | --- |
//! | – | – | nothing changes |
//! | trained tokens | – | peft gives the head the same tokens |
//! | changed | – | with `ensure_weight_tying` |
//! | – | changed | with `ensure_weight_tying` |
//! | a tensor or tokens | the same bytes | |
//! | factors | factors | with `ensure_weight_tying` |
//!
//! If no row of the table applies, embedding and head differ, and the output has a head of its own. An example is an adapter with
//! factors of the embedding alone and without `ensure_weight_tying`. There, `merge_and_unload` of peft adds the factors to the storage
//! that embedding and head share, which is not the model that was trained.

use anyhow::Result;

use super::opened::{Adapter, OwnHead};
use super::parts::Parts;

impl Adapter {
    /// Decides whether the adapted model is tied, for a base whose head is its embedding. `embedding` and `head` are names of tensors.
    ///
    /// # Errors
    /// Fails when the adapter's file cannot be read.
    pub fn on_tied_base(mut self, embedding: &str, head: &str) -> Result<Self> {
        let stays_tied = match (self.parts.get(embedding), self.parts.get(head)) {
            (None, None) => true,
            (Some(changed), None) => self.keeps_tie || changed.tokens.is_some(),
            (None, Some(_)) => self.keeps_tie,
            (Some(of_embedding), Some(of_head)) => {
                let are_factors = of_embedding.product.is_some() && of_head.product.is_some();
                (self.keeps_tie && are_factors) || is_same(of_embedding, of_head)?
            }
        };
        if !stays_tied {
            self.own_head =
                Some(OwnHead { head: head.to_owned(), embedding: embedding.to_owned() });
        } else if let Some(parts) = self.parts.remove(head) {
            self.parts.entry(embedding.to_owned()).or_insert(parts);
        }
        Ok(self)
    }

    /// Returns whether the adapted model has a head of its own although its base is tied.
    pub fn unties(&self) -> bool {
        self.own_head.is_some()
    }

    /// Names of the linears that the adapter changes by factors.
    pub fn linears(&self) -> impl Iterator<Item = &str> {
        let parts = self.parts.iter();
        let linears = parts.filter(|(_, parts)| {
            let shape = parts.factor_shape();
            parts.whole.is_none() && shape.is_some_and(|shape| !shape.is_embedding)
        });
        linears.map(|(tensor, _)| tensor.as_str())
    }

    /// The name of the base's tensor that `tensor` of the adapted model is a change of.
    pub(super) fn stored_in_base<'a>(&'a self, tensor: &'a str) -> &'a str {
        match &self.own_head {
            Some(own) if own.head == tensor => &own.embedding,
            _ => tensor,
        }
    }
}

/// Returns whether two changes replace the same rows by the same bytes.
fn is_same(one: &Parts, other: &Parts) -> Result<bool> {
    if one.product.is_some() || other.product.is_some() {
        return Ok(false);
    }
    let whole = match (&one.whole, &other.whole) {
        (None, None) => true,
        (Some(one), Some(other)) => one.has_bytes_of(other)?,
        _ => false,
    };
    let tokens = match (&one.tokens, &other.tokens) {
        (None, None) => true,
        (Some((one, rows)), Some((other, same))) => rows == same && one.has_bytes_of(other)?,
        _ => false,
    };
    Ok(whole && tokens)
}
