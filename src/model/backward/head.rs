//! The loss of a language model and its gradient with respect to the last hidden states, for some tokens at a time.
//!
//! loss = scale · Σ_t −ln softmax(norm(h_t)·headᵀ)\[target_t\]. Norm and head are frozen. Logits of a part of the tokens exist at once,
//! as many as `logits_bytes` of the memory settings allows. A head at rest is read twice for every part.

use anyhow::{Result, ensure};
use candle_core::Tensor;

use super::super::LayerContext;
use super::super::head::{Head, logit_rows};
use crate::linalg::derivatives::{cross_entropy_backward, rms_norm_backward};
use crate::linalg::linear::SingleToken;
use crate::linalg::parts::{LEAST_ROWS, parts};
use crate::linalg::profile::Part;
use crate::linalg::{elementwise, tensor};

impl Head {
    /// Returns Σ −ln p of the targets, in nat, and the gradient of `scale` times this sum with respect to `hidden`.
    ///
    /// # Arguments
    /// * `hidden`: `[seqlen, hidden_size]`, the output of the last layer
    /// * `targets`: `[seqlen]`, the token that follows each; `None` where no loss counts, as behind the last token
    /// * `scale`: 1 / (batch · (seqlen − 1)) for the mean over all predicted tokens
    ///
    /// # Errors
    /// Fails when `hidden` has another shape, when a target is not in the vocabulary, and when a head at rest cannot be read.
    pub fn loss_gradient(
        &self,
        hidden: &Tensor,
        targets: &[Option<u32>],
        scale: f32,
        context: &mut LayerContext,
    ) -> Result<(f64, Tensor)> {
        let mut gradient = vec![0.0; hidden.elem_count()];
        let loss = self.pass(hidden, targets, scale, Some(&mut gradient), context)?;
        Ok((loss, tensor::from_vec(gradient, hidden.dims())?))
    }

    /// Returns Σ −ln p of the targets, in nat.
    ///
    /// # Errors
    /// Fails as [`Head::loss_gradient`].
    pub fn loss(
        &self,
        hidden: &Tensor,
        targets: &[Option<u32>],
        context: &mut LayerContext,
    ) -> Result<f64> {
        self.pass(hidden, targets, 1.0, None, context)
    }

    fn pass(
        &self,
        hidden: &Tensor,
        targets: &[Option<u32>],
        scale: f32,
        mut gradient: Option<&mut [f32]>,
        context: &mut LayerContext,
    ) -> Result<f64> {
        let (seqlen, width) = hidden.dims2()?;
        let (norm, epsilon) = self.norm();
        ensure!(
            width == norm.len() && targets.len() == seqlen,
            "hidden states are {seqlen} x {width} with {} targets, the head needs {} columns and a target per row",
            targets.len(),
            norm.len()
        );
        let vocab_size = self.vocab_size();
        if let Some(target) = targets
            .iter()
            .flatten()
            .find(|id| **id as usize >= vocab_size)
        {
            anyhow::bail!("token {target} is not in the vocabulary of {vocab_size}");
        }
        let at_most = logit_rows(context.settings().logits_bytes, vocab_size);
        let mut pass = |hidden: &[f32]| -> Result<f64> {
            let mut loss = 0.0;
            for part in parts(seqlen, at_most, LEAST_ROWS) {
                let rows = part.start * width..part.end * width;
                let ([normed, logits], products) = context
                    .workspace()
                    .buffers([rows.len(), part.len() * vocab_size]);
                products.watch.enter(Part::Head);
                elementwise::rms_norm(&hidden[rows.clone()], norm, epsilon, normed);
                let lm_head = self.lm_head();
                lm_head.forward(normed, logits, SingleToken::AsMany, products)?;
                loss += cross_entropy_backward(logits, &targets[part], vocab_size, scale);
                if let Some(gradient) = &mut gradient {
                    // The normed rows are free from here on.
                    lm_head.backward(logits, normed, false, products)?;
                    let out = &mut gradient[rows.clone()];
                    rms_norm_backward(&hidden[rows], norm, epsilon, normed, out, None);
                }
                products.watch.enter(Part::Elsewhere);
            }
            Ok(loss)
        };
        tensor::with_slice(hidden, |hidden| rayon::scope(|_| pass(hidden)))?
    }
}
