//! `--refine weights`: least squares on the weights that any method kept (`least_squares.rs`).
//!
//! Ten steps of conjugate gradients from the method's own weights towards the smallest error of the linear's output. The mask stays, and
//! with it the zeros of the source.

use anyhow::Result;

use crate::bytes::ByteSize;
use crate::linalg::product::Packed;
use crate::pruning::mask::Mask;
use crate::pruning::method::Request;
use crate::pruning::refinement::{AsPruned, Refinement};
use crate::pruning::solvers::dense::{kept_of, mask_of, unmark, widened, zeros_of};
use crate::pruning::solvers::least_squares::{STEPS, ScaledGram, operations, refit, refit_bytes};
use crate::pruning::statistics::StatisticsKind;
use crate::pruning::statistics::input_gram::{InputGram, InputGramKind};

/// Least squares on the kept weights.
#[derive(Debug, Clone, Copy)]
pub struct RefitWeights;

impl Refinement for RefitWeights {
    fn name(&self) -> &'static str {
        "weights"
    }

    fn summary(&self) -> &'static str {
        "fits the kept weights to the dense outputs by least squares"
    }

    fn statistics(
        &self,
        _of_method: Option<&'static dyn StatisticsKind>,
    ) -> &'static dyn StatisticsKind {
        &InputGramKind
    }

    fn changes_weights(&self) -> bool {
        true
    }

    fn working_bytes(&self, out_features: usize, in_features: usize) -> ByteSize {
        let weights = out_features.saturating_mul(in_features);
        ScaledGram::bytes(in_features)
            + refit_bytes(out_features, in_features)
            // The source, the target, the solution; the support and the zeros of the source.
            + ByteSize::of(weights, 3 * size_of::<f32>() + 2)
    }

    fn operations(&self, out_features: usize, in_features: usize) -> f64 {
        operations(out_features, in_features, STEPS + 2, 0)
    }

    fn can_share_rows(&self) -> bool {
        true
    }

    fn refine(&self, pruned: AsPruned<'_>, request: &Request<'_>) -> Result<Mask> {
        let AsPruned { dense, weight, mask } = pruned;
        let gram = request.statistics_as::<InputGram>()?.prepared(ScaledGram::of)?;
        let mut is_kept = kept_of(&mask);
        let scaled = gram.scaled(widened(dense, request)?);
        unmark(&mut is_kept, &zeros_of(&scaled));
        let mut target = vec![0.0; scaled.len()];
        gram.product(&scaled, &mut target, &mut Packed::default());
        drop(scaled);
        let mut x = gram.scaled(widened(weight, request)?);
        refit(&gram, &target, &mut x, &is_kept, STEPS);
        weight.set_f32(&gram.unscaled(x));
        mask_of(&is_kept, mask.rows(), mask.columns())
    }
}
