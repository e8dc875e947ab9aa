//! The vector-Jacobian product of a decoder layer: its activations are computed again from its input.
//!
//! ```text
//! a = norm(x);  q, k, v;  c = attention(q, k, v);  h = x + c·Woᵀ;  m = norm(h);  y = h + (silu(g) ∘ u)·Wdownᵀ   (`layer`)
//! dh = dy + norm'(h, dg·Wgate + du·Wup)        with dg, du from dy·Wdown, for some tokens at a time
//! dx = dh + norm'(x, dq·Wq + dk·Wk + dv·Wv)    with dq, dk, dv from dc = dh·Wo, rotated back
//! ```
//!
//! Attention takes all heads at once, whatever the memory settings say of heads; the MLP takes `mlp_tokens` tokens at once. The gradient
//! of a rotation is the rotation by the negative angle. Products have the kernels of the forward pass (`linalg/gradient.rs`).

use anyhow::{Result, ensure};
use candle_core::Tensor;

use super::super::family::Activation;
use super::super::{DecoderLayer, LayerContext, Projection};
use super::LayerGradients;
use super::sizes::{KeptActivations, PassSizes, cut};
use crate::linalg::attention;
use crate::linalg::attention::backward::{AttentionGradients, AttentionInputs, causal_backward};
use crate::linalg::derivatives::{rms_norm_backward, silu_times_backward};
use crate::linalg::linear::{LinearOutput, SingleToken, forward_all};
use crate::linalg::parts::{LEAST_ROWS, largest_part, parts};
use crate::linalg::profile::Part;
use crate::linalg::{ProductContext, elementwise, tensor};

/// The activations that the backward pass needs, computed again or kept by the forward pass.
struct Recomputed<'a> {
    /// `[seqlen, hidden_size]`
    normed: &'a mut [f32],
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    context: &'a mut [f32],
    /// The states between attention and MLP, `[seqlen, hidden_size]`.
    between: &'a mut [f32],
}

impl DecoderLayer {
    /// Returns the gradient of a loss with respect to the layer's input, and adds the gradients of the layer's weights to
    /// `gradients`.
    ///
    /// # Arguments
    /// * `hidden`: the layer's input, `[seqlen, hidden_size]`
    /// * `output_gradient`: the gradient with respect to the layer's output, in the same shape
    ///
    /// # Errors
    /// Fails when a tensor has a wrong shape or more tokens than the context was created for, and when a weight at rest cannot be read.
    pub fn backward(
        &self,
        hidden: &Tensor,
        output_gradient: &Tensor,
        gradients: &mut LayerGradients,
        context: &mut LayerContext,
    ) -> Result<Tensor> {
        self.backward_of(hidden, output_gradient, None, gradients, context)
    }

    /// [`DecoderLayer::backward`] with the activations that [`DecoderLayer::forward_keeping`] kept; they are lost. The bits are the same.
    ///
    /// # Errors
    /// Fails as [`DecoderLayer::backward`].
    pub fn backward_kept(
        &self,
        hidden: &Tensor,
        output_gradient: &Tensor,
        kept: &mut KeptActivations,
        gradients: &mut LayerGradients,
        context: &mut LayerContext,
    ) -> Result<Tensor> {
        self.backward_of(hidden, output_gradient, Some(kept), gradients, context)
    }

    fn backward_of(
        &self,
        hidden: &Tensor,
        output_gradient: &Tensor,
        kept: Option<&mut KeptActivations>,
        gradients: &mut LayerGradients,
        context: &mut LayerContext,
    ) -> Result<Tensor> {
        let (_, width) = hidden.dims2()?;
        let hidden_size = self.norms()[0].len();
        ensure!(
            width == hidden_size && hidden.dims() == output_gradient.dims(),
            "hidden states are {:?} and their gradient {:?}; the layer needs both {hidden_size} wide",
            hidden.dims(),
            output_gradient.dims()
        );
        // Allocated here, because it outlives the pass.
        let mut out = vec![0.0; hidden.elem_count()];
        tensor::with_slice(hidden, |x| {
            tensor::with_slice(output_gradient, |dy| {
                // The pass runs on a thread of the pool, as in `forward`.
                rayon::scope(|_| self.backward_rows([x, dy], &mut out, kept, gradients, context))
            })
        })???;
        tensor::from_vec(out, hidden.dims())
    }

    fn backward_rows(
        &self,
        [x, dy]: [&[f32]; 2],
        dx: &mut [f32],
        kept: Option<&mut KeptActivations>,
        gradients: &mut LayerGradients,
        context: &mut LayerContext,
    ) -> Result<()> {
        let sizes = self.sizes(x);
        let (heads, hidden_size) = (self.heads(), sizes.hidden_size);
        let mlp_tokens = context.settings.mlp_tokens;
        let LayerContext { rotary, workspace, .. } = context;
        let ([normed, q, k, v, attended, between, shared], products) =
            workspace.buffers(sizes.buffers(heads, mlp_tokens, kept.is_some()));
        let mut activations = Recomputed { normed, q, k, v, context: attended, between };
        let (is_kept, mut kept_mlp) = (kept.is_some(), None);
        if let Some(KeptActivations(kept)) = kept {
            let [q, k, v, attended, between, gate, up] = cut(kept, sizes.kept());
            (activations.q, activations.k, activations.v) = (q, k, v);
            (activations.context, activations.between) = (attended, between);
            kept_mlp = Some([gate, up]);
            elementwise::rms_norm(x, self.norms()[0], self.rms_norm_eps(), activations.normed);
        } else {
            self.recompute(x, &mut activations, rotary, products)?;
        }
        dx.copy_from_slice(dy);
        for part in parts(sizes.seqlen, mlp_tokens, LEAST_ROWS) {
            let rows = part.start * hidden_size..part.end * hidden_size;
            let wide = part.start * sizes.intermediate_size..part.end * sizes.intermediate_size;
            let mut buffers = cut(shared, sizes.mlp(part.len(), is_kept));
            if let Some([gate, up]) = &mut kept_mlp {
                (buffers[2], buffers[3]) = (&mut gate[wide.clone()], &mut up[wide]);
            }
            let between = &activations.between[rows.clone()];
            self.backward_mlp(
                between,
                &dy[rows.clone()],
                &mut dx[rows],
                (buffers, is_kept),
                gradients,
                products,
            )?;
        }
        let buffers = cut(shared, sizes.attention(heads));
        self.backward_attention(x, dx, &mut activations, buffers, gradients, rotary, products)?;
        products.watch.enter(Part::Elsewhere);
        Ok(())
    }

    fn sizes(&self, x: &[f32]) -> PassSizes {
        let hidden_size = self.norms()[0].len();
        let intermediate_size = self.linear(Projection::Gate).out_features();
        let seqlen = x.len() / hidden_size;
        PassSizes::new(self.heads(), hidden_size, intermediate_size, seqlen)
    }

    /// Passes a sample through the layer as [`DecoderLayer::forward`] does, and keeps the activations that the backward pass needs.
    ///
    /// # Arguments
    /// * `spare`: activations that are not needed any more, whose memory is used again
    ///
    /// # Errors
    /// Fails as [`DecoderLayer::forward`].
    pub fn forward_keeping(
        &self,
        hidden: &Tensor,
        spare: Option<KeptActivations>,
        context: &mut LayerContext,
    ) -> Result<(Tensor, KeptActivations)> {
        let (_, width) = hidden.dims2()?;
        let hidden_size = self.norms()[0].len();
        ensure!(
            width == hidden_size,
            "hidden states are {width} wide, the layer needs {hidden_size}"
        );
        let mut out = vec![0.0; hidden.elem_count()];
        let kept = tensor::with_slice(hidden, |x| {
            let mut kept = spare.unwrap_or(KeptActivations(Vec::new()));
            let elements = self.sizes(x).kept().iter().sum();
            if kept.0.len() != elements {
                kept = KeptActivations(vec![0.0; elements]);
            }
            rayon::scope(|_| self.keep(x, &mut out, &mut kept.0, context))?;
            anyhow::Ok(kept)
        })??;
        Ok((tensor::from_vec(out, hidden.dims())?, kept))
    }

    fn keep(
        &self,
        x: &[f32],
        out: &mut [f32],
        kept: &mut [f32],
        context: &mut LayerContext,
    ) -> Result<()> {
        let sizes = self.sizes(x);
        let [q, k, v, attended, between, gate, up] = cut(kept, sizes.kept());
        let mlp_tokens = context.settings.mlp_tokens;
        let LayerContext { rotary, workspace, .. } = context;
        let tokens = largest_part(sizes.seqlen, mlp_tokens, LEAST_ROWS);
        let ([normed, wide], products) =
            workspace.buffers([x.len(), tokens * sizes.intermediate_size]);
        let mut activations = Recomputed { normed, q, k, v, context: attended, between };
        self.recompute(x, &mut activations, rotary, products)?;
        let Recomputed { normed, between, .. } = activations;
        out.copy_from_slice(between);
        for part in parts(sizes.seqlen, mlp_tokens, LEAST_ROWS) {
            products.watch.enter(Part::Mlp);
            let rows = part.start * sizes.hidden_size..part.end * sizes.hidden_size;
            let of_part = part.start * sizes.intermediate_size..part.end * sizes.intermediate_size;
            let (gate, up) = (&mut gate[of_part.clone()], &mut up[of_part]);
            let (normed, wide) = (&mut normed[..rows.len()], &mut wide[..gate.len()]);
            self.gate_and_up(&between[rows.clone()], normed, gate, up, products)?;
            wide.copy_from_slice(gate);
            match self.activation() {
                Activation::Silu => elementwise::silu_times(wide, up),
            }
            self.linear(Projection::Down).forward(wide, normed, SingleToken::AsMany, products)?;
            elementwise::add(&mut out[rows], normed);
        }
        products.watch.enter(Part::Elsewhere);
        Ok(())
    }

    /// Writes norm(x) to `normed`, and its products with the weights of gate and up.
    fn gate_and_up(
        &self,
        x: &[f32],
        normed: &mut [f32],
        gate: &mut [f32],
        up: &mut [f32],
        products: &mut ProductContext,
    ) -> Result<()> {
        elementwise::rms_norm(x, self.norms()[1], self.rms_norm_eps(), normed);
        let mut outputs =
            [(Projection::Gate, gate), (Projection::Up, up)].map(|(projection, out)| {
                LinearOutput {
                    linear: self.linear(projection),
                    features: 0..self.linear(projection).out_features(),
                    out,
                }
            });
        forward_all(&mut outputs, normed, SingleToken::AsMany, products)
    }

    /// Computes attention as the forward pass does, and keeps its activations.
    fn recompute(
        &self,
        x: &[f32],
        activations: &mut Recomputed<'_>,
        rotary: &super::super::Rotary,
        products: &mut ProductContext,
    ) -> Result<()> {
        let Recomputed { normed, q, k, v, context, between } = activations;
        let heads = self.heads();
        products.watch.enter(Part::Qkv);
        elementwise::rms_norm(x, self.norms()[0], self.rms_norm_eps(), normed);
        let mut outputs =
            [(Projection::Q, &mut **q), (Projection::K, &mut **k), (Projection::V, &mut **v)].map(
                |(projection, out)| LinearOutput {
                    linear: self.linear(projection),
                    features: 0..self.linear(projection).out_features(),
                    out,
                },
            );
        forward_all(&mut outputs, normed, SingleToken::AsMany, products)?;
        products.watch.enter(Part::Attention);
        rotary.apply(q, 0, heads.num_heads, heads.head_dim)?;
        rotary.apply(k, 0, heads.num_key_value_heads, heads.head_dim)?;
        let columns = attention::Columns { width: heads.num_heads * heads.head_dim, first: 0 };
        let kernel = products.products.of_activations();
        attention::Causal { kernel, heads, past: 0, q, k, v }.context_columns(context, columns);
        products.watch.enter(Part::O);
        let o = self.linear(Projection::O);
        o.forward(context, between, SingleToken::AsMany, products)?;
        elementwise::add(between, x);
        Ok(())
    }

    /// Adds the MLP's part of the gradient with respect to `x`, its input before the norm, to `dx`. With `is_kept`, gate and up are there.
    fn backward_mlp(
        &self,
        x: &[f32],
        dy: &[f32],
        dx: &mut [f32],
        ([normed, dnormed, gate, up, product], is_kept): ([&mut [f32]; 5], bool),
        gradients: &mut LayerGradients,
        products: &mut ProductContext,
    ) -> Result<()> {
        products.watch.enter(Part::Mlp);
        let norm = self.norms()[1];
        if is_kept {
            elementwise::rms_norm(x, norm, self.rms_norm_eps(), normed);
        } else {
            self.gate_and_up(x, normed, gate, up, products)?;
        }
        self.linear(Projection::Down).backward(dy, product, false, products)?;
        match self.activation() {
            Activation::Silu => silu_times_backward(gate, up, product),
        }
        gradients.add((Projection::Down, self.linear(Projection::Down)), dy, product, products);
        gradients.add((Projection::Gate, self.linear(Projection::Gate)), gate, normed, products);
        gradients.add((Projection::Up, self.linear(Projection::Up)), up, normed, products);
        self.linear(Projection::Gate).backward(gate, dnormed, false, products)?;
        self.linear(Projection::Up).backward(up, dnormed, true, products)?;
        let weight = gradients.norm_mut(1);
        rms_norm_backward(x, norm, self.rms_norm_eps(), dnormed, dx, weight);
        Ok(())
    }

    /// Adds attention's part to `dx`: the gradient with respect to the states after attention becomes the gradient with respect to `x`, the
    /// layer's input.
    #[expect(
        clippy::too_many_arguments,
        reason = "an input, its gradient, activations, buffers, and the parts of two contexts"
    )]
    fn backward_attention(
        &self,
        x: &[f32],
        dx: &mut [f32],
        activations: &mut Recomputed<'_>,
        [dcontext, dq, dk, dv, partial]: [&mut [f32]; 5],
        gradients: &mut LayerGradients,
        rotary: &super::super::Rotary,
        products: &mut ProductContext,
    ) -> Result<()> {
        let Recomputed { normed, q, k, v, context, between: dnormed } = activations;
        let heads = self.heads();
        products.watch.enter(Part::O);
        gradients.add((Projection::O, self.linear(Projection::O)), dx, context, products);
        self.linear(Projection::O).backward(dx, dcontext, false, products)?;
        products.watch.enter(Part::Attention);
        let inputs = AttentionInputs { q, k, v, context, context_gradient: dcontext };
        let out = AttentionGradients { q: &mut *dq, k: &mut *dk, v: &mut *dv };
        let kernel = products.products.of_activations();
        causal_backward(kernel, heads, inputs, out, partial);
        rotary.apply_back(dq, heads.num_heads, heads.head_dim)?;
        rotary.apply_back(dk, heads.num_key_value_heads, heads.head_dim)?;
        products.watch.enter(Part::Qkv);
        let of = [(Projection::Q, &*dq), (Projection::K, &*dk), (Projection::V, &*dv)];
        for (at, (projection, gradient)) in of.into_iter().enumerate() {
            gradients.add((projection, self.linear(projection)), gradient, normed, products);
            self.linear(projection).backward(gradient, dnormed, at > 0, products)?;
        }
        let (norm, weight) = (self.norms()[0], gradients.norm_mut(0));
        rms_norm_backward(x, norm, self.rms_norm_eps(), dnormed, dx, weight);
        Ok(())
    }
}
