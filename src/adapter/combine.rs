//! [`Combination`]: several adapters into one, factor by factor, as `add_weighted_adapter` of peft 0.21.2 does.
//!
//! ```text
//! w_A = sign(w·s) · √|w·s|,  w_B = √|w·s|                for each adapter, w its weight and s its scale
//! linear           A' = Σ w_A · A
//! magnitude_prune  A' = Σ w_A · top(A)                   top: the int(density · elements) largest |a|, others 0
//! dare_linear      A' = Σ w_A · drop(A) / density        drop: an element stays with probability density
//! ties, dare_ties  A' = Σ agree ∘ w_A · top(A) / max(1, Σ agree)
//!                  agree: the element has the elected sign, + where Σ top(A) ≥ 0 (total) or Σ sign(top(A)) ≥ 0 (frequency)
//!                  dare_ties: drop(A) / density for top(A)
//! cat              A' = [w·s·A; …] stacked,  B' = [B, …] side by side
//! ```
//!
//! B likewise with w_B. The combined adapter has scale 1. A and B are combined **separately**, so all kinds but `cat` are no merge of the
//! deltas B A. Elections do not see weights. A single adapter is always combined as `linear`.
//!
//! Differences from peft: of equal magnitudes the earlier element stays (peft: not defined). The draws are the caller's. Weights and
//! densities may differ by adapter and tensor. If the first adapter uses rsLoRA, peft scales the combined factors by √r once more; here
//! the scale is 1. The factors of an embedding are transposed here, and indices of elements count in that form: A of [`LowRank`] is the
//! file's Bᵀ, and B the file's Aᵀ.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;

use super::config::MAX_RANK;
use super::opened::Adapter;
use super::parts::FactorShape;
use super::stored::Stored;
use crate::failure::Failure;
use crate::linalg::LowRank;
use crate::linalg::select::{first_not_finite, lowest};

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

impl CombinationKind {
    /// Returns true for kinds that elect a sign for every element.
    pub fn elects(self) -> bool {
        matches!(self, Self::Ties | Self::DareTies)
    }
}

/// The measure by which a combination of adapters elects signs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum MajoritySign {
    /// The sum of the elements
    #[default]
    Total,
    /// The number of adapters with the sign
    Frequency,
}

impl MajoritySign {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Total => "total",
            Self::Frequency => "frequency",
        }
    }
}

/// The part of an adapter in the combination of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdapterShare {
    /// The weight.
    pub weight: f64,
    /// The fraction of the elements of a factor that stays; 1 and more: all. `Linear` and `Cat` do not use it.
    pub density: f64,
}

/// A source of uniform random numbers of 32 bits. It gets the place of an adapter in the list and the name of a factor
/// (`<module>.lora_A` or `<module>.lora_B`), and fills in a number for each element of the factor. An element stays if its number is
/// less than density · 2³².
pub type Draws<'a> = dyn Fn(usize, &str, &mut [u32]) + 'a;

/// Adapters that can be combined.
#[derive(Debug)]
pub struct Combination {
    pub(super) adapters: Vec<Arc<Adapter>>,
    kind: CombinationKind,
    majority_sign: MajoritySign,
    /// By tensor of the base: the adapters that change it.
    tensors: BTreeMap<String, Vec<(usize, AdapterShare)>>,
}

impl Combination {
    /// Checks that adapters can be combined.
    ///
    /// # Arguments
    /// * `majority_sign`: the election of `Ties` and `DareTies`
    /// * `share`: the part of an adapter, by its index, in a tensor of the base; `None` leaves the adapter's tensor out
    ///
    /// # Errors
    /// Fails without adapters, for a weight that is not finite, for a density that is negative (or zero with random drops), for an
    /// adapter that changes a tensor by more than factors, and for factors of unequal shape or rank (`Cat` allows unequal ranks).
    pub fn new(
        adapters: Vec<Arc<Adapter>>,
        kind: CombinationKind,
        majority_sign: MajoritySign,
        share: &dyn Fn(usize, &str) -> Option<AdapterShare>,
    ) -> Result<Self, Failure> {
        let mut tensors: BTreeMap<String, Vec<(usize, AdapterShare)>> = BTreeMap::new();
        for (index, adapter) in adapters.iter().enumerate() {
            for tensor in adapter.changed() {
                let Some(share) = share(index, tensor) else {
                    continue;
                };
                check_share(adapter, tensor, share, kind)?;
                let shares = tensors.entry(tensor.to_owned()).or_default();
                shares.push((index, share));
            }
        }
        if tensors.is_empty() {
            return Err(Failure::new("there are no adapters to combine"));
        }
        let combination = Self {
            kind: match adapters.len() {
                1 => CombinationKind::Linear,
                _ => kind,
            },
            adapters,
            majority_sign,
            tensors,
        };
        combination.tensors().try_for_each(|tensor| combination.check_shapes(tensor))?;
        Ok(combination)
    }

    /// Names of the base's tensors that the combined adapter changes, sorted.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of the combined factors of a tensor.
    pub(super) fn shape(&self, tensor: &str) -> FactorShape {
        let mut shapes = self.shapes(tensor).map(|(_, shape)| shape);
        let first = shapes.next().expect("every tensor has an adapter");
        match self.kind {
            CombinationKind::Cat => FactorShape {
                rank: first.rank + shapes.map(|shape| shape.rank).sum::<usize>(),
                ..first
            },
            _ => first,
        }
    }

    /// The copy of the base's tensor that comes with the factors. peft loads the adapters' copies in order, so the last copy counts.
    pub(super) fn copy(&self, tensor: &str) -> Option<&Stored> {
        let mut adapters = self.adapters.iter().rev();
        adapters.find_map(|adapter| adapter.parts().get(tensor)?.whole.as_ref())
    }

    /// Reads and combines the factors of a tensor.
    ///
    /// # Errors
    /// Fails when an adapter cannot be read, and for a combined element that is not finite.
    pub fn factors(&self, tensor: &str, draws: &Draws<'_>) -> Result<LowRank> {
        let mut inputs = Vec::new();
        for (index, share) in self.tensors.get(tensor).into_iter().flatten() {
            if let Some(factors) = self.adapters[*index].factors(tensor)? {
                inputs.push(AdapterFactors { index: *index, share: *share, factors });
            }
        }
        let factors = match self.kind {
            CombinationKind::Cat => side_by_side(&inputs, self.shape(tensor).is_embedding),
            _ => self.factor_by_factor(tensor, &inputs, draws),
        };
        for values in [&factors.a, &factors.b] {
            if let Some(at) = first_not_finite(values) {
                return Err(Failure::new(format!(
                    "an element of the combined factors of `{tensor}` is {}",
                    values[at]
                ))
                .hint("use smaller weights")
                .into());
            }
        }
        Ok(factors)
    }

    fn shapes(&self, tensor: &str) -> impl Iterator<Item = (&Adapter, FactorShape)> {
        let shares = self.tensors.get(tensor).into_iter().flatten();
        let adapters = shares.map(|(index, _)| &*self.adapters[*index]);
        let tensor = tensor.to_owned();
        adapters.filter_map(move |of| Some((of, of.parts().get(&tensor)?.factor_shape()?)))
    }

    /// Checks that the factors of a tensor can be combined.
    fn check_shapes(&self, tensor: &str) -> Result<(), Failure> {
        let shapes: Vec<_> = self.shapes(tensor).collect();
        let compared = |shape: FactorShape| match self.kind {
            CombinationKind::Cat => FactorShape { rank: 0, ..shape },
            _ => shape,
        };
        let (first, first_shape) = shapes[0];
        let other = shapes.iter().find(|(_, shape)| compared(*shape) != compared(first_shape));
        let Some((other, shape)) = other else {
            let rank = self.shape(tensor).rank;
            return match rank <= MAX_RANK {
                true => Ok(()),
                false => Err(Failure::new(format!(
                    "the combined factors of `{tensor}` have rank {rank}"
                ))
                .detail(format!("ranks of 1 to {MAX_RANK} are written and read"))),
            };
        };
        let shown = |adapter: &Adapter, shape: FactorShape| {
            let FactorShape { rank, rows, columns, .. } = shape;
            let place = adapter.place().display();
            format!("`{place}`: rank {rank} of [{rows}, {columns}]")
        };
        Err(Failure::new(format!(
            "the adapters' factors of `{tensor}` differ in rank or shape"
        ))
        .detail(shown(first, first_shape))
        .detail(shown(other, *shape))
        .hint("combine adapters of unequal ranks by `cat`, or merge them as models: --semantics mergekit"))
    }

    /// All kinds but `cat`.
    fn factor_by_factor(
        &self,
        tensor: &str,
        inputs: &[AdapterFactors],
        draws: &Draws<'_>,
    ) -> LowRank {
        let module = super::keys::module_of(tensor);
        let is_embedding = self.shape(tensor).is_embedding;
        let combined = |is_b: bool| {
            // An embedding's B here is the A of the file.
            let is_a = is_b == is_embedding;
            let name = format!("{module}.lora_{}", if is_a { "A" } else { "B" });
            let tasks: Vec<WeightedFactor> = inputs
                .iter()
                .map(|input| {
                    let scaled = input.share.weight * f64::from(input.factors.scale);
                    let sign = if is_a && scaled < 0.0 { -1.0 } else { 1.0 };
                    let LowRank { a, b, .. } = &input.factors;
                    let values = if is_b { b } else { a };
                    let draw = |numbers: &mut [u32]| draws(input.index, &name, numbers);
                    WeightedFactor {
                        weight: (sign * scaled.abs().sqrt()) as f32,
                        values: sparse(values, self.kind, input.share.density, &draw),
                    }
                })
                .collect();
            match self.kind {
                CombinationKind::Ties | CombinationKind::DareTies => {
                    disjoint_mean(&tasks, self.majority_sign)
                }
                _ => weighted_sum(&tasks),
            }
        };
        LowRank { scale: 1.0, a: combined(false), b: combined(true), ..inputs[0].factors }
    }
}

/// The factors of an adapter.
struct AdapterFactors {
    index: usize,
    share: AdapterShare,
    factors: LowRank,
}

/// Checks that an adapter changes a tensor by factors alone, and that its share makes sense.
fn check_share(
    adapter: &Adapter,
    tensor: &str,
    share: AdapterShare,
    kind: CombinationKind,
) -> Result<(), Failure> {
    let place = adapter.place().display();
    let AdapterShare { weight, density } = share;
    let is_random = matches!(kind, CombinationKind::DareLinear | CombinationKind::DareTies);
    if density.is_nan() || density < 0.0 || (is_random && density == 0.0) {
        return Err(Failure::new(format!(
            "the adapter `{place}` cannot be combined with density {density}"
        ))
        .hint("use a density in (0, 1]"));
    }
    if !weight.is_finite() {
        return Err(Failure::new(format!("the weight of `{place}` is {weight}")));
    }
    let shape = adapter.parts().get(tensor).and_then(|of| of.factor_shape());
    if shape.is_none() {
        return Err(Failure::new(format!(
            "the adapter `{place}` cannot be combined with others: it changes `{tensor}` by more than factors"
        ))
        .detail("saved modules, biases, trained tokens and DoRA have no combination")
        .hint("merge it as a model: --semantics mergekit"));
    }
    Ok(())
}

/// A factor of an adapter, after drops.
struct WeightedFactor {
    weight: f32,
    values: Vec<f32>,
}

/// The elements that stay.
fn sparse(
    values: &[f32],
    kind: CombinationKind,
    density: f64,
    draw: &dyn Fn(&mut [u32]),
) -> Vec<f32> {
    let mut values = values.to_vec();
    if density >= 1.0 {
        return values;
    }
    match kind {
        CombinationKind::Linear | CombinationKind::Cat => {}
        CombinationKind::Ties | CombinationKind::MagnitudePrune => {
            let kept = (density * values.len() as f64) as usize;
            keep_largest(&mut values, kept);
        }
        CombinationKind::DareLinear | CombinationKind::DareTies => {
            let mut numbers = vec![0; values.len()];
            draw(&mut numbers);
            let limit = density * NUMBERS;
            for (value, number) in values.iter_mut().zip(numbers) {
                *value = if f64::from(number) < limit { *value / density as f32 } else { 0.0 };
            }
        }
    }
    values
}

/// 2³²: the numbers that can be drawn.
const NUMBERS: f64 = 4_294_967_296.0;

/// Writes zeros over all but the `kept` largest magnitudes. On ties, earlier elements are kept.
fn keep_largest(values: &mut [f32], kept: usize) {
    let length = values.len();
    // Of equal magnitudes, the lowest index is removed first, so the order is reversed.
    let magnitudes: Vec<f32> = values.iter().rev().map(|value| value.abs()).collect();
    lowest(&magnitudes, length - kept, &mut Vec::new(), |at| values[length - 1 - at] = 0.0);
}

/// Σ w · values
fn weighted_sum(tasks: &[WeightedFactor]) -> Vec<f32> {
    let mut sums = vec![0.0; tasks[0].values.len()];
    for task in tasks {
        for (sum, value) in sums.iter_mut().zip(&task.values) {
            *sum += value * task.weight;
        }
    }
    sums
}

/// Σ agree · w · values / max(1, Σ agree)
fn disjoint_mean(tasks: &[WeightedFactor], majority: MajoritySign) -> Vec<f32> {
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

/// `cat`: ranks side by side, the file's A with weight and scale.
fn side_by_side(inputs: &[AdapterFactors], is_embedding: bool) -> LowRank {
    let LowRank { rows, columns, .. } = inputs[0].factors;
    let rank = inputs.iter().map(|input| input.factors.rank).sum();
    let mut a = Vec::with_capacity(rank * columns);
    let mut b = vec![0.0; rows * rank];
    let mut place = 0;
    for AdapterFactors { share, factors, .. } in inputs {
        let (weight, scale) = (share.weight as f32, factors.scale);
        // The order of the two products is peft's.
        let scaled = |values: &[f32]| values.iter().map(|value| value * weight * scale).collect();
        let (from_a, from_b) = match is_embedding {
            true => (factors.a.clone(), scaled(&factors.b)),
            false => (scaled(&factors.a), factors.b.clone()),
        };
        a.extend(from_a);
        for (to, from) in b.chunks_mut(rank).zip(from_b.chunks(factors.rank)) {
            to[place..place + factors.rank].copy_from_slice(from);
        }
        place += factors.rank;
    }
    LowRank { rows, columns, rank, scale: 1.0, a, b }
}
