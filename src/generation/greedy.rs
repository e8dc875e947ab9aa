//! Greedy writing with a small checkpoint: the likeliest token, again and again.
//!
//! All layers are held in memory, in their stored dtype. There is no cache of keys and values: every token passes the
//! whole prefix through the model again, T tokens cost T² / 2. That is a second for a sentence of the demo model and
//! wrong for anything large.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};

use crate::checkpoint::WeightSource;
use crate::data::Tokenizer;
use crate::model::{DecoderLayer, Embedding, Head, LayerContext, LlamaConfig};

/// A whole model in memory.
pub struct SmallModel {
    source: Arc<dyn WeightSource>,
    config: Arc<LlamaConfig>,
    layers: Vec<DecoderLayer>,
    head: Head,
}

impl SmallModel {
    /// Reads every layer and the head.
    ///
    /// # Errors
    /// Fails when a tensor is missing, of another shape, or cannot be read.
    pub fn load(source: Arc<dyn WeightSource>, config: Arc<LlamaConfig>) -> Result<Self> {
        let layers = (0..config.num_hidden_layers)
            .map(|index| DecoderLayer::load(&*source, &config, index))
            .collect::<Result<Vec<_>>>()?;
        let head = Head::load(&*source, &config)?;
        Ok(Self {
            source,
            config,
            layers,
            head,
        })
    }

    /// Logits `[ids.len(), vocab_size]` of a whole sequence, row-major.
    ///
    /// # Errors
    /// Fails for an id beyond the embedding, and for no ids or more than the model has positions.
    pub fn logits(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut all = Vec::with_capacity(ids.len() * self.head.vocab_size());
        self.forward(ids, 0, |rows| all.extend_from_slice(rows))?;
        Ok(all)
    }

    /// Goes on after `prompt` with the likeliest token each time, the lower id where two are as likely, until `is_done`
    /// says so of the new ids, there are `max_new_tokens`, or the model has no positions left. Returns the new ids.
    ///
    /// # Errors
    /// Fails as [`SmallModel::logits`], and where logits are not finite.
    pub fn greedy(
        &self,
        prompt: &[u32],
        max_new_tokens: usize,
        mut is_done: impl FnMut(&[u32]) -> Result<bool>,
    ) -> Result<Vec<u32>> {
        let mut ids = prompt.to_vec();
        let longest = self
            .config
            .max_position_embeddings
            .min(prompt.len() + max_new_tokens);
        while ids.len() < longest {
            let mut next = None;
            self.forward(&ids, ids.len() - 1, |row| next = likeliest(row))?;
            let Some(next) = next else {
                bail!("the logits after {} tokens are not finite", ids.len());
            };
            ids.push(next);
            if is_done(&ids[prompt.len()..])? {
                break;
            }
        }
        ids.drain(..prompt.len());
        Ok(ids)
    }

    /// Goes on after `prompt` to the end of its sentence, or of the line: `.`, `!`, `?` or a newline. Returns what was
    /// added.
    ///
    /// # Errors
    /// Fails as [`SmallModel::greedy`], and when the tokenizer cannot express the prompt.
    pub fn sentence(
        &self,
        tokenizer: &Tokenizer,
        prompt: &str,
        max_new_tokens: usize,
    ) -> Result<String> {
        let prompt = tokenizer.encode(prompt)?;
        let new = self.greedy(&prompt, max_new_tokens, |new| {
            Ok(tokenizer.decode(new)?.contains(['.', '!', '?', '\n']))
        })?;
        Ok(tokenizer.decode(&new)?.trim().to_owned())
    }

    /// Passes a sequence through all layers and shows the logits of the tokens from `first` on, some rows at a time.
    fn forward(&self, ids: &[u32], first: usize, mut show: impl FnMut(&[f32])) -> Result<()> {
        let limit = self.config.max_position_embeddings;
        ensure!(
            !ids.is_empty() && ids.len() <= limit,
            "{} tokens are given to a model of {limit} positions",
            ids.len()
        );
        let mut context = LayerContext::new(&self.config, ids.len())?;
        let mut hidden = Embedding::open(&*self.source, &self.config)?.rows(ids)?;
        for layer in &self.layers {
            hidden = layer.forward(&hidden, &mut context)?;
        }
        let hidden = hidden.narrow(0, first, ids.len() - first)?;
        let mut logits = Vec::new();
        self.head.logits(
            &hidden,
            &mut logits,
            context.workspace().panel(),
            |_, rows| {
                show(rows);
                Ok(())
            },
        )
    }
}

/// The place of the largest logit, the first of several; none where one is NaN.
fn likeliest(logits: &[f32]) -> Option<u32> {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return None;
        }
        if logit > best.1 {
            best = (id as u32, logit);
        }
    }
    best.1.is_finite().then_some(best.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_token_is_the_first_of_the_largest() {
        assert_eq!(likeliest(&[-3.0, 2.0, 2.0, -1.0]), Some(1));
        assert_eq!(likeliest(&[f32::NEG_INFINITY, -5.0]), Some(1));
        assert_eq!(likeliest(&[1.0, f32::NAN]), None);
        assert_eq!(likeliest(&[1.0, f32::INFINITY]), None);
    }
}
