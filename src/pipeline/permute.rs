//! `--permute-channels`: the intermediate channels of an MLP in an order in which the N:M groups of down keep more importance.
//!
//! down's input channels are the outputs of gate and up, so their order is free: the rows of gate and up, their biases and the columns
//! of down take it together, and the checkpoint computes the same function (`DecoderLayer::permute_intermediate`). The groups of gate and
//! up lie along their columns and stay as they are. Every matrix but down reads the residual stream, which all layers share, or heads, so
//! the order of its inputs is not free. `pruning/permutation.rs` chooses the order.

use anyhow::{Context, Result};

use super::calibrate::LayerStatistics;
use super::flow::{Flow, ObservationOrder};
use super::targets::TargetPlan;
use crate::failure::Failure;
use crate::model::family::Family;
use crate::model::{DecoderLayer, InputId, LinearId, LinearRole, ModelConfig};
use crate::pruning::{Pattern, Request, Technique, permutation};
use crate::run::Events;
use crate::run::manifest::PermutationReport;

/// The matrices that take a new order together: of the MLP.
fn matrices(family: &Family) -> Vec<LinearId> {
    family.linears.iter().map(|&(id, _)| id).filter(|id| !id.is_attention()).collect()
}

/// The matrix whose input takes the order.
fn down(config: &ModelConfig) -> LinearId {
    config.layer(0).part(LinearRole::Down).0
}

/// Checks that the channels of every layer whose down is pruned can be permuted; nothing is to check without `--permute-channels`.
///
/// # Errors
/// Fails with exit code 2 without an N:M pattern, with `--true-sequential`, where a layer prunes only some of the three matrices, and where
/// no layer prunes all three.
pub fn check(
    is_asked: bool,
    pattern: Pattern,
    flow: Flow,
    targets: &TargetPlan,
    config: &ModelConfig,
) -> Result<(), Failure> {
    if !is_asked {
        return Ok(());
    }
    if pattern == Pattern::Unstructured {
        return Err(Failure::usage(
            "--permute-channels needs an N:M pattern, and the sparsity type is unstructured",
        )
        .detail("without groups the order of the channels changes no mask")
        .hint("add --sparsity-type 2:4, or leave --permute-channels out"));
    }
    if flow.sequence == ObservationOrder::Inputs {
        return Err(
            Failure::usage("--permute-channels contradicts --true-sequential")
                .detail("the order is chosen from the inputs of down_proj, and gate_proj and up_proj would be pruned before these are observed")
                .hint("leave one of them out"),
        );
    }
    let mut permuted = 0;
    for layer in 0..config.num_hidden_layers {
        let is_chosen = |&id: &LinearId| targets.of(layer, id).is_some();
        let matrices = matrices(config.family);
        let chosen = matrices.iter().filter(|one| is_chosen(one)).count();
        permuted += usize::from(chosen == matrices.len());
        let left = matrices.iter().find(|one| !is_chosen(one));
        if let Some(left) = left.filter(|_| chosen > 0) {
            let name = left.full_name(layer);
            let short = left.name().rsplit('.').next().unwrap_or_default();
            return Err(Failure::usage(format!(
                "--permute-channels needs `{name}`, which is not among the pruned matrices"
            ))
            .detail("gate_proj, up_proj and down_proj of a layer take a new order of their channels together")
            .hint(format!("prune '*{short}' too, or leave --permute-channels out")));
        }
    }
    if permuted == 0 {
        return Err(Failure::usage(
            "--permute-channels has nothing to permute: no MLP is among the pruned matrices",
        )
        .detail("the input channels of q_proj, k_proj, v_proj and o_proj have no order of their own that a checkpoint can hold")
        .hint("prune '*mlp*' too, or leave --permute-channels out"));
    }
    Ok(())
}

/// The biases that a run with these targets writes in a new order.
pub fn biases(technique: &Technique, targets: &TargetPlan, config: &ModelConfig) -> Vec<String> {
    if technique.permutes.is_none() {
        return Vec::new();
    }
    let layers = 0..config.num_hidden_layers;
    let permuted = layers.filter(|&layer| targets.of(layer, down(config)).is_some());
    let has_bias = |id| config.has_bias(id);
    permuted.flat_map(|layer| biases_of(config.family, layer, &has_bias)).collect()
}

/// The biases of a layer that follow the order of its channels.
fn biases_of(family: &Family, layer: usize, has_bias: &dyn Fn(LinearId) -> bool) -> Vec<String> {
    let permuted = matrices(family).into_iter().filter(|id| id.input() == InputId::Mlp);
    permuted.filter(|&id| has_bias(id)).map(|id| id.bias_name(layer)).collect()
}

/// A layer whose channels have a new order.
pub(super) struct Permuted {
    /// `[intermediate_size]`: the old channel at every new place.
    pub(super) order: Vec<usize>,
    /// The biases that are to be written in this order.
    pub(super) biases: Vec<String>,
    /// The importance that down keeps.
    pub(super) report: PermutationReport,
}

/// Chooses the order of a layer's channels for its dense weights, and brings weights and statistics into it. The three matrices are in
/// memory afterwards. `None` where down is not pruned, or the technique does not permute.
///
/// # Errors
/// Fails when a weight at rest cannot be read, and on weights or statistics that are not finite.
pub(super) fn permute(
    layer: &mut DecoderLayer,
    technique: &Technique,
    targets: &TargetPlan,
    mut statistics: Option<&mut LayerStatistics>,
    events: &dyn Events,
) -> Result<Option<Permuted>> {
    let (index, family) = (layer.index(), layer.spec().family);
    let (down, _) = layer.spec().part(LinearRole::Down);
    let target = targets.of(index, down);
    let Some((target, Pattern::NOfM { n, m })) =
        target.filter(|_| technique.permutes.is_some()).map(|target| (target, target.pattern))
    else {
        return Ok(None);
    };
    for id in matrices(family) {
        layer.linear_mut(id).weight_mut().hold()?;
    }
    let name = down.full_name(index);
    let weight = layer.linear(down).weight().held();
    let weight = weight.with_context(|| format!("`{name}` is scored in memory"))?;
    let of_down = (statistics.as_deref()).and_then(|all| all.of(down));
    let request = Request {
        options: &technique.options,
        warn: &|text| events.warn(text),
        ..Request::new(&name, of_down, target)
    };
    let score = technique.method.importance(weight, &request)?;
    let chosen = permutation::choose(weight, &request, &*score, (n, m))?;
    layer.permute_intermediate(&chosen.order);
    if let Some(statistics) = &mut statistics {
        statistics.permute(InputId::Down, &chosen.order);
    }
    Ok(Some(Permuted {
        biases: biases_of(family, index, &|id| layer.linear(id).bias().is_some()),
        report: PermutationReport {
            kept_before: chosen.kept_before,
            kept_after: chosen.kept_after,
        },
        order: chosen.order,
    }))
}
