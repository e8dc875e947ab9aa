//! AdamW with 8-bit states, in blocks of 256 elements.
//!
//! ```text
//! m, v  ← map[code] · absmax of the block                       signed map for m, unsigned for v
//! v     ← β₂ v + (1 - β₂) g²,  m ← β₁ m + (1 - β₁) g
//! p     ← p - rate · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + √(1 - β₂ᵗ) ε)
//! p     ← p · (1 - rate · decay)                                 after the update
//! codes ← nearest to m / max |m| and v / max v of the block
//! ```
//!
//! All is f32. The update uses the new moments before they are rounded. If the sign of m's code differs from the sign of m, the
//! code moves by 1. An element with a gradient that is not finite keeps its parameter, and its moments become 0. Parameters with fewer
//! than 4096 elements have f32 states, and the same formulas.
//!
//! **State**: codes of m, 1 byte per element; codes of v; the scales of m, f32 per block; the scales of v. Together 2.03 bytes per
//! element. With f32 states: m, then v, f32.
//!
//! **Safeguards** are ours ([`Hyperparameters::safeguards`]). Without them the arithmetic follows the reference:
//! - The reference's rule of signs moves the code of -0 to the smallest negative number, and a masked gradient is -0 where it was
//!   negative. With safeguards the rule does not apply to 0.
//! - A second moment below 1.6e-7 of the largest in its block has the code of 0. The next update then divides by ε, and blocks whose
//!   gradients span more than 11 octaves diverge. With safeguards such a moment gets the smallest code above 0, 3.25e-7 of the
//!   largest, unless it is 0. So v is never rounded to 0, and the error makes steps smaller.
//!
//! Sources: T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit optimizers via block-wise quantization" (2021, arXiv 2110.02861);
//! the reference is the CUDA kernel of bitsandbytes 0.50. Its CPU path differs: decay comes first, there is no rule of signs, and
//! codes of exact zeros are not zero.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::kept::{F32, KeptMask, TASK, is_kept, parts};
use super::optimizer::{Hyperparameters, Optimizer, TrainingStep, check, roots_of};
use crate::linalg::dynamic_map::DynamicMap;

/// Elements per scale.
pub const BLOCK: usize = 256;

/// The least elements of a parameter with 8-bit states.
pub const LEAST_ELEMENTS: usize = 4096;

/// Blocks of a task.
const TASK_BLOCKS: usize = TASK / BLOCK;

/// AdamW with 8-bit states; see the module's first lines.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW8bit {
    settings: Hyperparameters,
}

impl AdamW8bit {
    /// The optimizer with these settings.
    pub fn new(settings: Hyperparameters) -> Self {
        Self { settings }
    }
}

impl Optimizer for AdamW8bit {
    fn state_bytes(&self, elements: usize) -> usize {
        if elements < LEAST_ELEMENTS {
            2 * F32 * elements
        } else {
            2 * elements + 2 * F32 * elements.div_ceil(BLOCK)
        }
    }

    fn update(
        &self,
        step: TrainingStep,
        parameter: &mut [f32],
        gradient: &[f32],
        kept: Option<&KeptMask>,
        state: &mut [u8],
    ) {
        check(self, parameter, gradient, kept, state);
        let rule = Rule::new(&self.settings, step);
        let elements = parameter.len();
        let kept = parts(kept, TASK, elements.div_ceil(TASK));
        let tasks = parameter.par_chunks_mut(TASK).zip(gradient.par_chunks(TASK)).zip(kept);
        if elements < LEAST_ELEMENTS {
            let (first, second) = state.split_at_mut(F32 * elements);
            tasks
                .zip(first.par_chunks_mut(F32 * TASK))
                .zip(second.par_chunks_mut(F32 * TASK))
                .for_each(|((((parameter, gradient), kept), first), second)| {
                    let moments = WideMoments {
                        first: first.as_chunks_mut().0,
                        second: second.as_chunks_mut().0,
                    };
                    run(rule, parameter, gradient, kept, moments);
                });
            return;
        }
        let (codes, scales) = state.split_at_mut(2 * elements);
        let (first, second) = codes.split_at_mut(elements);
        let (first_scales, second_scales) = scales.split_at_mut(scales.len() / 2);
        tasks
            .zip(first.par_chunks_mut(TASK))
            .zip(second.par_chunks_mut(TASK))
            .zip(first_scales.par_chunks_mut(F32 * TASK_BLOCKS))
            .zip(second_scales.par_chunks_mut(F32 * TASK_BLOCKS))
            .for_each(|(((((of, kept), first), second), scales), second_scales)| {
                let moments = CodedMoments {
                    first,
                    second,
                    first_scales: scales.as_chunks_mut().0,
                    second_scales: second_scales.as_chunks_mut().0,
                    has_safeguards: rule.has_safeguards,
                };
                run(rule, of.0, of.1, kept, moments);
            });
    }

    fn root_second_moments(&self, state: &[u8], elements: usize, first: usize, roots: &mut [f32]) {
        if !self.has_coded_moments(elements) {
            return roots_of(&state[F32 * elements..], first, roots);
        }
        let (codes, scales) = state[elements..].split_at(elements);
        let scales = &scales[scales.len() / 2..].as_chunks().0;
        let values = DynamicMap::unsigned().values();
        for (at, root) in roots.iter_mut().enumerate() {
            let scale = f32::from_le_bytes(scales[(first + at) / BLOCK]);
            *root = (values[usize::from(codes[first + at])] * scale).sqrt();
        }
    }

    fn has_coded_moments(&self, elements: usize) -> bool {
        elements >= LEAST_ELEMENTS
    }

    fn clear_first_moments(&self, state: &mut [u8], kept: &KeptMask) {
        let elements = kept.elements();
        if self.has_coded_moments(elements) {
            kept.fill_pruned(&mut state[..elements], DynamicMap::signed().code(0.0));
        } else {
            let first = &mut state[..F32 * elements];
            kept.fill_pruned(first.as_chunks_mut().0, [0; F32]);
        }
    }
}

/// The numbers of a step that all elements share, in f32 as in the reference.
#[derive(Debug, Clone, Copy)]
struct Rule {
    beta1: f32,
    beta2: f32,
    size: f32,
    epsilon: f32,
    decay: f32,
    has_safeguards: bool,
}

impl Rule {
    fn new(settings: &Hyperparameters, step: TrainingStep) -> Self {
        let (beta1, beta2) = (settings.beta1 as f32, settings.beta2 as f32);
        let rate = step.rate as f32;
        // The power is rounded to f32, then subtracted.
        let correction = |beta: f32| 1.0 - f64::from(beta).powf(step.number as f64) as f32;
        let root = correction(beta2).sqrt();
        let weight_decay = settings.weight_decay as f32;
        Self {
            beta1,
            beta2,
            size: -rate * root / correction(beta1),
            epsilon: root * settings.epsilon as f32,
            decay: if weight_decay > 0.0 { 1.0 - rate * weight_decay } else { 1.0 },
            has_safeguards: settings.safeguards,
        }
    }
}

/// The moments of a block while it is updated.
#[derive(Debug)]
struct BlockMoments {
    first: [f32; BLOCK],
    second: [f32; BLOCK],
}

/// Storage of the moments of a task.
trait MomentStore {
    /// Reads the moments of a block; they are 0 beyond the last element.
    fn load(&self, block: usize) -> BlockMoments;
    /// Stores the moments of a block.
    fn store(&mut self, block: usize, moments: &BlockMoments);
}

struct WideMoments<'a> {
    first: &'a mut [[u8; F32]],
    second: &'a mut [[u8; F32]],
}

/// The elements of a block.
fn span(block: usize, elements: usize) -> std::ops::Range<usize> {
    block * BLOCK..(block * BLOCK + BLOCK).min(elements)
}

impl MomentStore for WideMoments<'_> {
    #[inline(always)]
    fn load(&self, block: usize) -> BlockMoments {
        let span = span(block, self.first.len());
        let read = |stored: &[[u8; F32]]| {
            let mut values = [0.0; BLOCK];
            for (value, &bytes) in values.iter_mut().zip(stored) {
                *value = f32::from_le_bytes(bytes);
            }
            values
        };
        BlockMoments { first: read(&self.first[span.clone()]), second: read(&self.second[span]) }
    }

    #[inline(always)]
    fn store(&mut self, block: usize, moments: &BlockMoments) {
        let span = span(block, self.first.len());
        for (stored, values) in [
            (&mut self.first[span.clone()], &moments.first),
            (&mut self.second[span], &moments.second),
        ] {
            for (bytes, value) in stored.iter_mut().zip(values) {
                *bytes = value.to_le_bytes();
            }
        }
    }
}

struct CodedMoments<'a> {
    first: &'a mut [u8],
    second: &'a mut [u8],
    first_scales: &'a mut [[u8; F32]],
    second_scales: &'a mut [[u8; F32]],
    has_safeguards: bool,
}

impl MomentStore for CodedMoments<'_> {
    #[inline(always)]
    fn load(&self, block: usize) -> BlockMoments {
        let span = span(block, self.first.len());
        let read = |map: &DynamicMap, codes: &[u8], scale: [u8; F32]| {
            let (mut values, scale) = ([0.0; BLOCK], f32::from_le_bytes(scale));
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = map.values()[usize::from(code)] * scale;
            }
            values
        };
        let (signed, unsigned) = (DynamicMap::signed(), DynamicMap::unsigned());
        BlockMoments {
            first: read(signed, &self.first[span.clone()], self.first_scales[block]),
            second: read(unsigned, &self.second[span], self.second_scales[block]),
        }
    }

    #[inline(always)]
    fn store(&mut self, block: usize, moments: &BlockMoments) {
        let span = span(block, self.first.len());
        let (signed, unsigned) = (DynamicMap::signed(), DynamicMap::unsigned());
        let top = largest(&moments.first);
        self.first_scales[block] = top.to_le_bytes();
        for (code, &moment) in self.first[span.clone()].iter_mut().zip(&moments.first) {
            *code = signed.code(moment / top);
            let value = signed.values()[usize::from(*code)];
            let is_exempt = self.has_safeguards && moment == 0.0;
            if value.is_sign_negative() != moment.is_sign_negative() && !is_exempt {
                *code = if moment > 0.0 { *code + 1 } else { *code - 1 };
            }
        }
        let top = largest(&moments.second);
        self.second_scales[block] = top.to_le_bytes();
        for (code, &moment) in self.second[span].iter_mut().zip(&moments.second) {
            let least = u8::from(self.has_safeguards && moment > 0.0);
            *code = unsigned.code(moment / top).max(least);
        }
    }
}

#[inline(always)]
fn largest(values: &[f32; BLOCK]) -> f32 {
    let mut tops = [0.0f32; 16];
    for part in values.as_chunks::<16>().0 {
        for (top, value) in tops.iter_mut().zip(part) {
            *top = top.max(value.abs());
        }
    }
    tops.into_iter().fold(0.0, f32::max)
}

fn run<M: MomentStore>(
    rule: Rule,
    parameter: &mut [f32],
    gradient: &[f32],
    kept: Option<&[u8]>,
    moments: M,
) {
    Arch::new().dispatch(BlockUpdate { rule, parameter, gradient, kept, moments });
}

struct BlockUpdate<'a, M> {
    rule: Rule,
    parameter: &'a mut [f32],
    gradient: &'a [f32],
    kept: Option<&'a [u8]>,
    moments: M,
}

impl<M: MomentStore> WithSimd for BlockUpdate<'_, M> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let by = self.rule;
        let (first_weight, second_weight) = (1.0 - by.beta1, 1.0 - by.beta2);
        let blocks = self.parameter.chunks_mut(BLOCK).zip(self.gradient.chunks(BLOCK));
        for (block, (parameter, gradient)) in blocks.enumerate() {
            let mut moments = self.moments.load(block);
            let pairs = moments.first.iter_mut().zip(&mut moments.second);
            for ((parameter, &gradient), (m, v)) in parameter.iter_mut().zip(gradient).zip(pairs) {
                let is_good = gradient.is_finite();
                let g = if is_good { gradient } else { 0.0 };
                let new_v = *v * by.beta2 + second_weight * g * g;
                let new_m = *m * by.beta1 + first_weight * g;
                let moved = *parameter + by.size * (new_m / (new_v.sqrt() + by.epsilon));
                let moved = moved * by.decay;
                *v = if is_good { new_v } else { 0.0 };
                *m = if is_good { new_m } else { 0.0 };
                *parameter = if is_good { moved } else { *parameter };
            }
            if let Some(kept) = self.kept {
                for (at, parameter) in parameter.iter_mut().enumerate() {
                    if !is_kept(kept, block * BLOCK + at) {
                        *parameter = 0.0;
                        (moments.first[at], moments.second[at]) = (0.0, 0.0);
                    }
                }
            }
            self.moments.store(block, &moments);
        }
    }
}
