//! [`combine`]: several adapters into one, factor by factor, as `add_weighted_adapter` of peft 0.21.2 does.
//!
//! ```text
//! w_A = sign(w·s) · √|w·s|,  w_B = √|w·s|                for each adapter, w its weight and s its scale
//! linear           A' = Σ w_A · A
//! magnitude_prune  A' = Σ w_A · top(A)                   top: the int(density · elements) largest |a|, others 0
//! dare_linear      A' = Σ w_A · drop(A) / density        drop: an element stays with probability density
//! ties, dare_ties  A' = Σ agree ∘ w_A · top(A) / max(1, Σ agree)
//!                  agree: the sign of an element is the elected one, + where Σ top(A) ≥ 0 (total) or Σ sign(top(A)) ≥ 0 (frequency)
//! cat              A' = [w·s·A; …] stacked,  B' = [B, …] side by side
//! ```
//!
//! B likewise with w_B. The combined adapter has scale 1. A and B are combined **separately**, so all kinds but `cat` are no merge of the
//! deltas B A. Elections do not see weights. One adapter alone is always combined as `linear`.
//!
//! Differences from peft: of equal magnitudes the earlier element stays (peft: not defined). The draws are the caller's. If the first
//! adapter uses rsLoRA, peft scales the combined factors by √r once more; here the scale is 1.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::Result;

use super::low_rank::LowRank;
use super::opened::Adapter;
use super::parts::Parts;
use crate::failure::Failure;

/// Rules for the combination of factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CombinationKind {
    /// Weighted sums.
    Linear,
    /// Trimmed, elected, averaged.
    Ties,
    /// Ranks side by side: exactly the sum of the deltas.
    Cat,
    /// Weighted sums after random drops.
    DareLinear,
    /// Random drops, elected, averaged.
    DareTies,
    /// Weighted sums after a trim.
    MagnitudePrune,
}

/// Elections of a sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MajoritySign {
    /// The sign of the sum.
    Total,
    /// The sign of the sum of signs.
    Frequency,
}

/// A combination of adapters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Combination {
    /// Its rule.
    pub kind: CombinationKind,
    /// The fraction of the elements of a factor that stays; 1 and more: all. `Linear` and `Cat` do not use it.
    pub density: f64,
    /// The election of `Ties` and `DareTies`.
    pub majority_sign: MajoritySign,
}

/// Uniform numbers in [0, 1): of an adapter by its place in the list, of a factor by its name (`<module>.lora_A` or `<module>.lora_B`),
/// of an element by its index.
pub type Draws<'a> = dyn Fn(usize, &str, u64) -> f32 + 'a;

/// Combines adapters with their weights. The result holds its factors in memory.
///
/// # Errors
/// Fails for a weight or a density that is no number, for a density that is negative, or zero with random drops, for adapters with
/// other changes than factors, for ranks that differ (except `Cat`), and when an adapter cannot be read.
pub fn combine(
    adapters: &[(&Adapter, f64)],
    how: Combination,
    draws: &Draws<'_>,
) -> Result<Adapter> {
    check(adapters, how)?;
    let mut tensors = BTreeSet::new();
    for (adapter, _) in adapters {
        tensors.extend(adapter.changed());
    }
    let mut parts = BTreeMap::new();
    for tensor in tensors {
        let mut inputs = Vec::new();
        let mut whole = None;
        for (index, (adapter, weight)) in adapters.iter().enumerate() {
            if let Some(factors) = adapter.factors(tensor)? {
                inputs.push(Input {
                    index,
                    weight: *weight,
                    factors,
                });
            }
            // peft loads every copy over the one before.
            let of = adapter.parts().get(tensor);
            whole = of.and_then(|parts| parts.whole.clone()).or(whole);
        }
        let combined = match how.kind {
            CombinationKind::Cat if adapters.len() > 1 => side_by_side(&inputs),
            _ => {
                check_shapes(tensor, adapters, &inputs)?;
                let alone = adapters.len() == 1;
                let kind = if alone {
                    CombinationKind::Linear
                } else {
                    how.kind
                };
                factor_by_factor(tensor, &inputs, Combination { kind, ..how }, draws)
            }
        };
        parts.insert(tensor.to_owned(), Parts::held(combined, whole));
    }
    let places: Vec<_> = adapters
        .iter()
        .map(|(of, _)| of.place().to_string_lossy())
        .collect();
    Ok(Adapter::held(PathBuf::from(places.join(" + ")), parts))
}

/// The factors of one adapter.
struct Input {
    index: usize,
    weight: f64,
    factors: LowRank,
}

fn check(adapters: &[(&Adapter, f64)], how: Combination) -> Result<(), Failure> {
    if adapters.is_empty() {
        return Err(Failure::new("no adapters to combine"));
    }
    let is_random = matches!(
        how.kind,
        CombinationKind::DareLinear | CombinationKind::DareTies
    );
    if !(how.density >= 0.0) || (is_random && how.density == 0.0) {
        return Err(Failure::new(format!(
            "adapters cannot be combined with density {}",
            how.density
        ))
        .hint("use a density in (0, 1]"));
    }
    for (adapter, weight) in adapters {
        let place = adapter.place().display();
        if !weight.is_finite() {
            return Err(Failure::new(format!("the weight of `{place}` is {weight}")));
        }
        if let Some((tensor, _)) = adapter.parts().iter().find(|(_, of)| !of.is_plain()) {
            return Err(Failure::new(format!(
                "the adapter `{place}` cannot be combined with others: it changes `{tensor}` by more than factors"
            ))
            .detail("saved modules, biases, trained tokens and DoRA have no combination")
            .hint("merge it as a model: `--semantics mergekit`"));
        }
    }
    Ok(())
}

/// Checks that the factors of one tensor can be added.
fn check_shapes(
    tensor: &str,
    adapters: &[(&Adapter, f64)],
    inputs: &[Input],
) -> Result<(), Failure> {
    let shape = |input: &Input| {
        let LowRank {
            rows,
            columns,
            rank,
            ..
        } = input.factors;
        (rows, columns, rank)
    };
    let Some(other) = inputs
        .iter()
        .find(|input| shape(input) != shape(&inputs[0]))
    else {
        return Ok(());
    };
    let failure = [&inputs[0], other].iter().fold(
        Failure::new(format!(
            "the adapters' factors of `{tensor}` differ in rank or shape"
        )),
        |failure, input| {
            let (rows, columns, rank) = shape(input);
            let place = adapters[input.index].0.place().display();
            failure.detail(format!("`{place}`: rank {rank} of [{rows}, {columns}]"))
        },
    );
    Err(failure.hint("combine adapters of unequal ranks by `cat`, or merge them as models"))
}

/// All kinds but `cat`.
fn factor_by_factor(
    tensor: &str,
    inputs: &[Input],
    how: Combination,
    draws: &Draws<'_>,
) -> LowRank {
    let first = &inputs[0].factors;
    let module = super::keys::module_of(tensor);
    let combined = |is_up: bool| {
        // An embedding's `up` is its A.
        let is_a = is_up == first.is_embedding;
        let name = format!("{module}.lora_{}", if is_a { "A" } else { "B" });
        let tasks: Vec<Task> = inputs
            .iter()
            .map(|input| {
                let scaled = input.weight * f64::from(input.factors.scale);
                let sign = if is_a && scaled < 0.0 { -1.0 } else { 1.0 };
                let values = match is_up {
                    true => &input.factors.up,
                    false => &input.factors.down,
                };
                Task {
                    weight: (sign * scaled.abs().sqrt()) as f32,
                    values: sparse(values, how, &|at| draws(input.index, &name, at)),
                }
            })
            .collect();
        match how.kind {
            CombinationKind::Ties | CombinationKind::DareTies => {
                disjoint_mean(&tasks, how.majority_sign)
            }
            _ => weighted_sum(&tasks),
        }
    };
    LowRank {
        scale: 1.0,
        up: combined(true),
        down: combined(false),
        ..*first
    }
}

/// One factor of one adapter, after drops.
struct Task {
    weight: f32,
    values: Vec<f32>,
}

/// The elements that stay.
fn sparse(values: &[f32], how: Combination, draw: &dyn Fn(u64) -> f32) -> Vec<f32> {
    let mut values = values.to_vec();
    if how.density >= 1.0 {
        return values;
    }
    match how.kind {
        CombinationKind::Linear | CombinationKind::Cat => {}
        CombinationKind::Ties | CombinationKind::MagnitudePrune => {
            let kept = (how.density * values.len() as f64) as usize;
            keep_largest(&mut values, kept);
        }
        CombinationKind::DareLinear | CombinationKind::DareTies => {
            for (value, at) in values.iter_mut().zip(0..) {
                let stays = f64::from(draw(at)) < how.density;
                *value = if stays {
                    *value / how.density as f32
                } else {
                    0.0
                };
            }
        }
    }
    values
}

/// Writes zeros over all but the `kept` largest magnitudes; of equal ones, the earlier stay.
fn keep_largest(values: &mut [f32], kept: usize) {
    let mut order: Vec<usize> = (0..values.len()).collect();
    if kept > 0 && kept < values.len() {
        order.select_nth_unstable_by(kept - 1, |&one, &two| {
            let by_magnitude = values[two].abs().total_cmp(&values[one].abs());
            by_magnitude.then(one.cmp(&two))
        });
    }
    for &at in order.get(kept..).unwrap_or_default() {
        values[at] = 0.0;
    }
}

/// Σ w · values
fn weighted_sum(tasks: &[Task]) -> Vec<f32> {
    let mut sums = vec![0.0; tasks[0].values.len()];
    for task in tasks {
        for (sum, value) in sums.iter_mut().zip(&task.values) {
            *sum += value * task.weight;
        }
    }
    sums
}

/// Σ agree · w · values / max(1, Σ agree)
fn disjoint_mean(tasks: &[Task], majority: MajoritySign) -> Vec<f32> {
    let sign = |value: f32| if value == 0.0 { 0.0 } else { value.signum() };
    let one = |at: usize| {
        let values = tasks.iter().map(|task| task.values[at]);
        let mass: f32 = match majority {
            MajoritySign::Total => values.sum(),
            MajoritySign::Frequency => values.map(sign).sum(),
        };
        let elected = if mass >= 0.0 { 1.0 } else { -1.0 };
        let agreeing = tasks.iter().filter(|task| sign(task.values[at]) == elected);
        let (sum, count) = agreeing.fold((0.0, 0.0), |(sum, count), task| {
            (sum + task.values[at] * task.weight, count + 1.0)
        });
        sum / f32::max(count, 1.0)
    };
    (0..tasks[0].values.len()).map(one).collect()
}

/// `cat`: ranks side by side, A with weight and scale.
fn side_by_side(inputs: &[Input]) -> LowRank {
    let first = &inputs[0].factors;
    let rank = inputs.iter().map(|input| input.factors.rank).sum();
    let mut down = Vec::with_capacity(rank * first.columns);
    let mut up = vec![0.0; first.rows * rank];
    let mut place = 0;
    for Input {
        weight, factors, ..
    } in inputs
    {
        let (weight, scale) = (*weight as f32, factors.scale);
        // The order of the two products is peft's.
        let of_a = |value: &f32| value * weight * scale;
        let (for_up, for_down): (&dyn Fn(&f32) -> f32, &dyn Fn(&f32) -> f32) =
            match first.is_embedding {
                true => (&of_a, &|value| *value),
                false => (&|value| *value, &of_a),
            };
        down.extend(factors.down.iter().map(for_down));
        let rows = up.chunks_mut(rank).zip(factors.up.chunks(factors.rank));
        for (to, from) in rows {
            for (to, value) in to[place..].iter_mut().zip(from) {
                *to = for_up(value);
            }
        }
        place += factors.rank;
    }
    LowRank {
        rank,
        scale: 1.0,
        up,
        down,
        ..*first
    }
}
