//! The passes of a sample through a decoder layer: forwards, with observed inputs, with kept activations, and backwards.
//!
//! The blocks (`attention`, `mlp`) work on slices, with memory that is cut here: scratch of the workspace, or activations that are kept
//! from the forward pass to the backward pass. A pass runs on a thread of the pool. A layer has dozens of loops; starting each of them
//! from outside the pool would cost a small model as much time as the loops take.

use anyhow::{Result, ensure};
use candle_core::Tensor;

use super::DecoderLayer;
use super::attention::{AttentionBuffers, AttentionTape};
use super::layout::AttentionLayout;
use super::mlp::{MlpBuffers, MlpTape};
use super::sizes::{KeptActivations, PassSizes, cut};
use super::stages::{BackwardPass, ForwardPass};
use crate::linalg::linear::SingleToken;
use crate::linalg::parts::{LEAST_ROWS, largest_part, parts};
use crate::linalg::profile::Part;
use crate::linalg::tensor;
use crate::model::backward::LayerGradients;
use crate::model::context::LayerContext;
use crate::model::kv_cache::LayerCache;
use crate::model::norms::NormRole;
use crate::model::observe::Observer;
use crate::model::segments::{self, Segment};
use crate::run::MemorySettings;

/// The parts of a pass beside the rows of a sample.
#[derive(Default)]
struct Sample<'a> {
    cache: Option<&'a mut LayerCache>,
    observer: Option<&'a mut dyn Observer>,
    /// The sequences of the sample; empty where it is a single one.
    segments: &'a [Segment],
}

/// The observer for a part of a pass.
fn again<'a>(observer: &'a mut Option<&mut dyn Observer>) -> Option<&'a mut dyn Observer> {
    match observer {
        Some(observer) => Some(&mut **observer),
        None => None,
    }
}

impl DecoderLayer {
    /// Passes a sample through the layer: `[seqlen, hidden_size]` in, the same shape out.
    ///
    /// # Errors
    /// Fails when `hidden` has a wrong width or more tokens than the context was created for, and when a weight at rest cannot be read.
    pub fn forward(&self, hidden: &Tensor, context: &mut LayerContext) -> Result<Tensor> {
        self.on_slices(hidden, |x, out| {
            rayon::scope(|_| self.scratch_pass(x, context, Sample::default(), out))
        })
    }

    /// Passes a sample of several sequences through the layer. A row has the output that it has in a sample of its sequence alone.
    ///
    /// # Errors
    /// Fails as [`DecoderLayer::forward`], and for sequences that are not the rows of the sample.
    pub fn forward_segments(
        &self,
        hidden: &Tensor,
        segments: &[Segment],
        context: &mut LayerContext,
    ) -> Result<Tensor> {
        let (tokens, _) = hidden.dims2()?;
        ensure!(
            segments::are_rows_of(segments, tokens),
            "the sequences of a sample are not its {tokens} rows"
        );
        self.on_slices(hidden, |x, out| {
            let sample = Sample { segments, ..Sample::default() };
            rayon::scope(|_| self.scratch_pass(x, context, sample, out))
        })
    }

    /// Passes the tokens after the cached tokens through the layer, and adds their keys and values to `cache`: `[tokens, hidden_size]` in,
    /// the same shape out. Except for rounding, the output equals the last rows of [`DecoderLayer::forward`] of the whole sequence.
    pub fn forward_cached(
        &self,
        hidden: &Tensor,
        cache: &mut LayerCache,
        context: &mut LayerContext,
    ) -> Result<Tensor> {
        let sample = Sample { cache: Some(cache), ..Sample::default() };
        self.on_slices(hidden, |x, out| self.scratch_pass(x, context, sample, out))
    }

    /// Shows the observed inputs of a sample to `observer`. The pass ends before down's product, because its output is not needed.
    pub fn capture(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let pass = |x: &[f32], out: &mut [f32]| {
            let sample = Sample { observer: Some(observer), ..Sample::default() };
            rayon::scope(|_| self.scratch_pass(x, context, sample, out))
        };
        self.on_slices(hidden, pass).map(|_| ())
    }

    /// Runs `pass` on the input and memory for the output. The output is allocated on the caller's thread, because it outlives the pass: a
    /// thread of the pool keeps the memory of its own heap.
    fn on_slices(
        &self,
        hidden: &Tensor,
        pass: impl FnOnce(&[f32], &mut [f32]) -> Result<()>,
    ) -> Result<Tensor> {
        let (_, width) = hidden.dims2()?;
        let hidden_size = self.spec.hidden_size;
        ensure!(
            width == hidden_size,
            "hidden states are {width} wide, the layer needs {hidden_size}"
        );
        let mut out = vec![0.0; hidden.elem_count()];
        tensor::with_slice(hidden, |x| pass(x, &mut out))??;
        tensor::from_vec(out, hidden.dims())
    }

    /// Passes a sample through the layer with scratch memory.
    fn scratch_pass(
        &self,
        x: &[f32],
        context: &mut LayerContext,
        sample: Sample<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let Sample { cache, mut observer, segments } = sample;
        let (spec, seqlen) = (&self.spec, x.len() / self.spec.hidden_size);
        let LayerContext { rotaries, workspace, settings } = context;
        let layout = match cache {
            // A cache holds the keys of all heads.
            Some(_) => AttentionLayout::new(spec, seqlen, &MemorySettings::default()),
            None => AttentionLayout::new(spec, seqlen, settings),
        };
        // Fast with a cache, else as for many tokens.
        let single = match cache {
            Some(_) => SingleToken::MatrixVector,
            None => SingleToken::AsMany,
        };
        let rotary = spec.rope.map(|rope| &rotaries[rope]);
        let ([normed, q, k, v, apart], products) = workspace.buffers(layout.buffers());
        let mut tape = AttentionTape {
            normed,
            q,
            k,
            v,
            context: apart,
            raw_q: &mut [],
            raw_k: &mut [],
            branch: &mut [],
        };
        let mut pass = ForwardPass {
            rotary,
            products,
            single,
            cache,
            observer: again(&mut observer),
            segments,
        };
        self.attend(x, &mut tape, &layout, &mut pass, out)?;
        for part in parts(seqlen, settings.mlp_tokens, LEAST_ROWS) {
            let wide = part.len() * spec.intermediate_size;
            let rows = part.start * spec.hidden_size..part.end * spec.hidden_size;
            let ([normed, gate, up], products) = workspace.buffers([rows.len(), wide, wide]);
            let (product, branch) = (&mut [][..], &mut [][..]);
            let tape = MlpTape { normed, gate, up, product, branch, is_kept: false };
            let observer = again(&mut observer);
            let mut pass =
                ForwardPass { single, observer, ..ForwardPass::of_sample(rotary, products) };
            self.mlp(&mut out[rows], tape, &mut pass)?;
        }
        Ok(())
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
        let mut kept = spare.unwrap_or(KeptActivations(Vec::new()));
        let out = self.on_slices(hidden, |x, out| {
            let elements = self.sizes(x).kept().iter().sum();
            if kept.0.len() != elements {
                kept = KeptActivations(vec![0.0; elements]);
            }
            rayon::scope(|_| self.keeping_pass(x, &mut kept.0, context, out))
        })?;
        Ok((out, kept))
    }

    fn keeping_pass(
        &self,
        x: &[f32],
        kept: &mut [f32],
        context: &mut LayerContext,
        out: &mut [f32],
    ) -> Result<()> {
        let sizes = self.sizes(x);
        let mlp_tokens = context.settings.mlp_tokens;
        let LayerContext { rotaries, workspace, .. } = context;
        let rotary = self.spec.rope.map(|rope| &rotaries[rope]);
        let [q, k, v, attended, raw_q, raw_k, branch, between, gate, up, of_mlp] =
            cut(kept, sizes.kept());
        let tokens = largest_part(sizes.seqlen, mlp_tokens, LEAST_ROWS);
        let wide = tokens * self.spec.intermediate_size;
        let ([normed, product], products) = workspace.buffers([x.len(), wide]);
        let mut tape = AttentionTape { normed, q, k, v, context: attended, raw_q, raw_k, branch };
        let layout = AttentionLayout::whole(&self.spec, sizes.seqlen);
        let mut pass = ForwardPass::of_sample(rotary, products);
        self.attend(x, &mut tape, &layout, &mut pass, between)?;
        let normed = tape.normed;
        out.copy_from_slice(between);
        for part in parts(sizes.seqlen, mlp_tokens, LEAST_ROWS) {
            let (rows, wide) = sizes.rows(&part);
            let branch = if of_mlp.is_empty() { 0..0 } else { rows.clone() };
            let tape = MlpTape {
                normed: &mut normed[..rows.len()],
                gate: &mut gate[wide.clone()],
                up: &mut up[wide.clone()],
                product: &mut product[..wide.len()],
                branch: &mut of_mlp[branch],
                is_kept: true,
            };
            self.mlp(&mut out[rows], tape, &mut pass)?;
        }
        Ok(())
    }

    /// Returns the gradient of a loss with respect to the layer's input, and adds the gradients of the layer's weights to
    /// `gradients`. The activations are computed again from the input.
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
        self.backward_of([hidden, output_gradient], None, gradients, context)
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
        self.backward_of([hidden, output_gradient], Some(kept), gradients, context)
    }

    fn backward_of(
        &self,
        [hidden, output_gradient]: [&Tensor; 2],
        kept: Option<&mut KeptActivations>,
        gradients: &mut LayerGradients,
        context: &mut LayerContext,
    ) -> Result<Tensor> {
        ensure!(
            hidden.dims() == output_gradient.dims(),
            "hidden states are {:?} and their gradient {:?}; both must have one shape",
            hidden.dims(),
            output_gradient.dims()
        );
        self.on_slices(hidden, |x, dx| {
            tensor::with_slice(output_gradient, |dy| {
                rayon::scope(|_| self.backward_pass([x, dy], dx, kept, gradients, context))
            })?
        })
    }

    fn backward_pass(
        &self,
        [x, dy]: [&[f32]; 2],
        dx: &mut [f32],
        kept: Option<&mut KeptActivations>,
        gradients: &mut LayerGradients,
        context: &mut LayerContext,
    ) -> Result<()> {
        let (sizes, is_kept) = (self.sizes(x), kept.is_some());
        let mlp_tokens = context.settings.mlp_tokens;
        let LayerContext { rotaries, workspace, .. } = context;
        let rotary = self.spec.rope.map(|rope| &rotaries[rope]);
        let ([normed, computed, shared], products) =
            workspace.buffers(sizes.backward(mlp_tokens, is_kept));
        let memory = match kept {
            Some(KeptActivations(kept)) => &mut kept[..],
            None => computed,
        };
        let of_memory = if is_kept { sizes.kept() } else { sizes.recomputed() };
        let [q, k, v, attended, raw_q, raw_k, branch, between, gate, up, of_mlp] =
            cut(memory, of_memory);
        let mut tape = AttentionTape { normed, q, k, v, context: attended, raw_q, raw_k, branch };
        match is_kept {
            true => self.norm(NormRole::BeforeAttention, x, tape.normed),
            false => {
                let layout = AttentionLayout::whole(&self.spec, sizes.seqlen);
                let mut pass = ForwardPass::of_sample(rotary, products);
                self.attend(x, &mut tape, &layout, &mut pass, between)?;
            }
        }
        dx.copy_from_slice(dy);
        let mut pass = BackwardPass { rotary, products, gradients };
        for part in parts(sizes.seqlen, mlp_tokens, LEAST_ROWS) {
            let (rows, wide) = sizes.rows(&part);
            let [normed, dnormed, g, u, product, branch, dbranch, joined] =
                cut(shared, sizes.mlp(part.len(), is_kept));
            let (gate, up) = match is_kept {
                true => (&mut gate[wide.clone()], &mut up[wide]),
                false => (g, u),
            };
            let branch = match of_mlp.is_empty() {
                true => branch,
                false => &mut of_mlp[rows.clone()],
            };
            let tape = MlpTape { normed, gate, up, product, branch, is_kept };
            let buffers = MlpBuffers {
                output: &dy[rows.clone()],
                states: &mut dx[rows.clone()],
                branch: dbranch,
                normed: dnormed,
                joined,
            };
            self.mlp_backward(&between[rows], tape, buffers, &mut pass)?;
        }
        let [context, q, k, v, partial, branch, joined] = cut(shared, sizes.attention());
        // The states between attention and MLP are not needed any more.
        let normed = between;
        let buffers =
            AttentionBuffers { states: dx, normed, branch, context, q, k, v, partial, joined };
        self.attention_backward(x, &mut tape, buffers, &mut pass)?;
        pass.products.watch.enter(Part::Elsewhere);
        Ok(())
    }

    fn sizes(&self, x: &[f32]) -> PassSizes {
        PassSizes::new(self.spec, x.len() / self.spec.hidden_size)
    }
}
