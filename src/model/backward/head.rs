//! The loss of a language model and its gradient with respect to the last hidden states, for some tokens at a time.
//!
//! loss = scale · Σ_t −ln softmax(norm(h_t)·headᵀ)\[target_t\]. Norm and head are frozen. Logits of a part of the tokens exist at once,
//! as many as `logits_bytes` of the memory settings allows. A head at rest is read twice for every part.

use anyhow::{Result, ensure};
use candle_core::Tensor;

use super::super::LayerContext;
use super::super::head::{Head, logit_rows};
use crate::bytes::ByteSize;
use crate::linalg::ProductContext;
use crate::linalg::derivatives::{cross_entropy_backward, rms_norm_backward, soft_cap_backward};
use crate::linalg::distillation::{DistillationTerms, distillation_backward};
use crate::linalg::linear::SingleToken;
use crate::linalg::parts::{LEAST_ROWS, parts};
use crate::linalg::profile::Part;
use crate::linalg::{elementwise, tensor};

/// The last hidden states of a teacher, whose logits a student learns.
#[derive(Debug, Clone, Copy)]
pub struct TeacherStates<'a> {
    /// The teacher's norm and head.
    pub head: &'a Head,
    /// `[seqlen, hidden_size]`, with the teacher's own hidden_size.
    pub hidden: &'a Tensor,
    /// w, the share of the divergence in the loss.
    pub weight: f32,
}

/// The place of a gradient with respect to the hidden states.
struct GradientOfStates<'a> {
    /// `[seqlen, hidden_size]`
    values: &'a mut [f32],
    /// The factor of the loss whose gradient is taken.
    scale: f32,
}

impl Head {
    /// Returns Σ −ln p of the targets, in nat, and the gradient of `scale` times this sum with respect to `hidden`.
    ///
    /// # Arguments
    /// * `hidden`: `[seqlen, hidden_size]`, the output of the last layer
    /// * `targets`: `[seqlen]`, the token that follows each; `None` where no loss counts, as after the last token
    /// * `scale`: 1 / (batch · (seqlen − 1)) for the mean over all predicted tokens
    ///
    /// # Errors
    /// Fails when `hidden` or `targets` has a wrong shape, when a target is not in the vocabulary, and when a head at rest cannot be read.
    pub fn loss_gradient(
        &self,
        hidden: &Tensor,
        targets: &[Option<u32>],
        scale: f32,
        context: &mut LayerContext,
    ) -> Result<(f64, Tensor)> {
        let mut gradient = vec![0.0; hidden.elem_count()];
        let out = Some(GradientOfStates { values: &mut gradient, scale });
        let loss = self.pass(hidden, targets, out, None, context)?;
        Ok((loss, tensor::from_vec(gradient, hidden.dims())?))
    }

    /// Returns Σ (1 − w)·(−ln p) + w·KL(teacher‖student) over the tokens with a target, in nat, and the gradient of `scale` times this sum
    /// with respect to `hidden`. The rest is as of [`Head::loss_gradient`].
    ///
    /// # Errors
    /// Fails as [`Head::loss_gradient`], and when the teacher's states have a wrong shape.
    pub fn distillation_gradient(
        &self,
        hidden: &Tensor,
        teacher: TeacherStates<'_>,
        targets: &[Option<u32>],
        scale: f32,
        context: &mut LayerContext,
    ) -> Result<(f64, Tensor)> {
        teacher.head.check_rows(teacher.hidden, &vec![None; targets.len()])?;
        let mut gradient = vec![0.0; hidden.elem_count()];
        let out = Some(GradientOfStates { values: &mut gradient, scale });
        let loss = self.pass(hidden, targets, out, Some(teacher), context)?;
        Ok((loss, tensor::from_vec(gradient, hidden.dims())?))
    }

    /// Writes the logits of some rows; the normed rows are in `normed` afterwards.
    fn logits_of(
        &self,
        hidden: &[f32],
        normed: &mut [f32],
        logits: &mut [f32],
        products: &mut ProductContext,
    ) -> Result<()> {
        let (norm, epsilon) = self.norm();
        elementwise::rms_norm(hidden, norm, epsilon, normed);
        self.lm_head().forward(normed, logits, SingleToken::AsMany, products)?;
        self.bound(logits);
        Ok(())
    }

    /// Refuses states whose width does not fit the head, and targets whose number is not the number of states.
    fn check_rows(&self, hidden: &Tensor, targets: &[Option<u32>]) -> Result<()> {
        let (seqlen, width) = hidden.dims2()?;
        let columns = self.norm().0.len();
        ensure!(
            width == columns && targets.len() == seqlen,
            "hidden states are {seqlen} x {width} with {} targets, the head needs {columns} columns and a target per row",
            targets.len(),
        );
        let vocab_size = self.vocab_size();
        let mut targets = targets.iter().flatten();
        match targets.find(|id| **id as usize >= vocab_size) {
            Some(target) => {
                anyhow::bail!("token {target} is not in the vocabulary of {vocab_size}")
            }
            None => Ok(()),
        }
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
        self.pass(hidden, targets, None, None, context)
    }

    fn pass(
        &self,
        hidden: &Tensor,
        targets: &[Option<u32>],
        mut gradient: Option<GradientOfStates<'_>>,
        teacher: Option<TeacherStates<'_>>,
        context: &mut LayerContext,
    ) -> Result<f64> {
        self.check_rows(hidden, targets)?;
        let (vocab_size, width) = (self.vocab_size(), self.norm().0.len());
        let scale = gradient.as_ref().map_or(1.0, |gradient| gradient.scale);
        // A teacher has logits, too, and the gradient of bounded logits needs a copy of them.
        let is_copied = self.logit_cap().is_some() && gradient.is_some();
        let copies = 1 + u64::from(teacher.is_some()) + u64::from(is_copied);
        let at_most = ByteSize(context.settings().logits_bytes.0 / copies);
        // The width and the vocabulary of a teacher.
        let [taught_width, taught] = match teacher {
            Some(teacher) => [teacher.head.norm().0.len(), teacher.head.vocab_size()],
            None => [0, 0],
        };
        let most = logit_rows(at_most, vocab_size.max(taught));
        let mut pass = |hidden: &[f32], states: &[f32]| -> Result<f64> {
            let mut loss = 0.0;
            for part in parts(targets.len(), most, LEAST_ROWS) {
                let rows = part.start * width..part.end * width;
                let all = part.len() * vocab_size;
                let of_teacher = part.len() * taught;
                let copied = if is_copied { all } else { 0 };
                let widest = part.len() * width.max(taught_width);
                let ([normed, logits, of_teacher, bounded], products) =
                    context.workspace().buffers([widest, all, of_teacher, copied]);
                products.watch.enter(Part::Head);
                if let Some(teacher) = teacher {
                    let states = &states[part.start * taught_width..part.end * taught_width];
                    let normed = &mut normed[..states.len()];
                    teacher.head.logits_of(states, normed, of_teacher, products)?;
                }
                let normed = &mut normed[..rows.len()];
                self.logits_of(&hidden[rows.clone()], normed, logits, products)?;
                if is_copied {
                    bounded.copy_from_slice(logits);
                }
                let targets = &targets[part];
                loss += match teacher {
                    Some(teacher) => {
                        let (vocab_sizes, weight) = ([vocab_size, taught], teacher.weight);
                        let terms = DistillationTerms { vocab_sizes, weight, scale };
                        distillation_backward(logits, of_teacher, targets, terms)
                    }
                    None => cross_entropy_backward(logits, targets, vocab_size, scale),
                };
                if let Some(gradient) = &mut gradient {
                    if let Some(cap) = self.logit_cap() {
                        soft_cap_backward(bounded, cap, logits);
                    }
                    // The normed rows are free from here on.
                    self.lm_head().backward(logits, normed, false, products)?;
                    let (norm, epsilon) = self.norm();
                    let out = &mut gradient.values[rows.clone()];
                    rms_norm_backward(&hidden[rows], norm, epsilon, normed, out, None);
                }
                products.watch.enter(Part::Elsewhere);
            }
            Ok(loss)
        };
        let mut run = |states: &[f32]| {
            tensor::with_slice(hidden, |hidden| rayon::scope(|_| pass(hidden, states)))?
        };
        match teacher {
            Some(teacher) => tensor::with_slice(teacher.hidden, run)?,
            None => run(&[]),
        }
    }
}
