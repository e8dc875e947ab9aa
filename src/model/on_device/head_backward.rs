//! Loss and gradient of the head on a device, for trainings.

use anyhow::{Result, ensure};
use candle_core::{D, Device, Tensor};
use candle_nn::ops;

use super::training::{bounded_backward, piece};
use super::{DeviceHead, Tiling};

impl DeviceHead {
    /// Returns Σ −ln p of the targets, in nat, and the gradient of `scale` times this sum with respect to `hidden`, in the dtype of the
    /// arithmetic. The gradient with respect to logits l is softmax(l), less 1 for the target, and passes their bound. The head must be whole.
    ///
    /// # Arguments
    /// * `hidden`: `[seqlen, hidden_size]` on the device, the output of the last layer
    /// * `targets`: `[seqlen]`; `None` where no loss counts
    ///
    /// # Errors
    /// Fails for a target that is not in the vocabulary, and when the device fails, mostly for lack of memory.
    pub fn loss_gradient(
        &self,
        hidden: &Tensor,
        targets: &[Option<u32>],
        scale: f32,
        cut: &Tiling,
    ) -> Result<(f64, Tensor)> {
        let (device, dtype) = (hidden.device(), hidden.dtype());
        let mut rows = targets.iter().flatten().map(|&target| target as usize);
        ensure!(
            rows.all(|target| self.rows.contains(&target)),
            "a target is not in the vocabulary of {}",
            self.rows.len()
        );
        let (mut loss, mut gradients) = (0.0, Vec::new());
        let at_once = cut.logit_tokens(self.rows.len()).max(1);
        for (part, targets) in targets.chunks(at_once).enumerate() {
            let some = targets.len();
            let column = |of: &dyn Fn(&Option<u32>) -> f32| -> Result<Tensor> {
                let values: Vec<f32> = targets.iter().map(of).collect();
                Ok(Tensor::from_vec(values, (some, 1), device)?)
            };
            let index: Vec<u32> = targets.iter().map(|one| one.unwrap_or(0)).collect();
            let index = Tensor::from_vec(index, (some, 1), device)?;
            let hidden = hidden.narrow(0, part * at_once, some)?.contiguous()?;
            let logits = self.logits(&hidden)?;
            let kept = self.logit_cap.map(|cap| (cap, logits.clone()));
            let chosen = logits.gather(&index, 1)?;
            let largest = logits.max_keepdim(D::Minus1)?;
            let exponentials = {
                let logits = logits;
                let lower = logits.broadcast_sub(&largest)?;
                drop(logits);
                lower.exp()?
            };
            let sums = exponentials.sum_keepdim(D::Minus1)?;
            let of_tokens = ((sums.log()? + largest)? - chosen)?;
            let of_tokens = of_tokens.flatten_all()?.to_device(&Device::Cpu)?;
            let of_tokens: Vec<f32> = of_tokens.to_vec1()?;
            let counted = of_tokens.iter().zip(targets).filter(|(_, to)| to.is_some());
            loss += counted.map(|(loss, _)| f64::from(*loss)).sum::<f64>();
            let weights = column(&|to| if to.is_some() { scale } else { 0.0 })?;
            let dlogits = {
                let exponentials = exponentials;
                exponentials.broadcast_mul(&weights.div(&sums)?)?
            };
            let mut dlogits = dlogits.scatter_add(&index, &weights.neg()?, 1)?;
            if let Some((cap, logits)) = kept {
                dlogits = bounded_backward(logits, dlogits, cap)?;
            }
            let dnormed = dlogits.to_dtype(dtype)?.matmul(&self.weight)?;
            drop(dlogits);
            let factor = self.norm.to_dtype(dtype)?;
            let (of_hidden, _) = piece(&[&hidden], &dnormed, |inputs| {
                Ok(ops::rms_norm_slow(&inputs[0], &factor, self.rms_norm_eps)?)
            })?;
            gradients.extend(of_hidden);
        }
        Ok((loss, Tensor::cat(&gradients, 0)?))
    }
}
