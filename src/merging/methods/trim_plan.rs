//! The trim of an expert: from the settings of a method to the rule that keeps entries, and to the order statistics that decide it.
//!
//! `differences` asks for it before the first read. A trim with a [`SearchPlan`] knows its edges after a search in two reads;
//! without a search, a trim is known at once.

use anyhow::Result;

use super::group::Group;
use super::method::{Scope, Semantics, SourceTask, TensorTask};
use super::random::Stream;
use super::trim::{Edge, Trim};
use crate::failure::Failure;
use crate::linalg::order_statistics::OrderStatistic;
use crate::merging::recipe::Parameter;

/// The trimming of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trimming {
    /// Nothing is trimmed.
    None,
    /// The largest magnitudes are kept.
    Magnitude,
    /// The smallest and the very largest magnitudes are removed.
    Band,
    /// Entries are removed at random.
    Random,
    /// Entries are removed at random, small entries more often.
    Ramp,
}

/// Half the spread of probabilities where a recipe names none, as in mergekit.
pub(super) const EPSILON: f64 = 0.15;

/// The order statistics that an expert's trim needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SearchPlan {
    /// Ascending positions, lower first.
    pub(super) positions: Vec<u64>,
    /// Positions that are kept are `keep.0 .. keep.1`.
    keep: (u64, u64),
    /// True if equal values at the edges are kept by their order in the tensor; else all equal values are kept.
    is_exact: bool,
    /// True if the first of the values equal to the lower edge are kept, as by a stable descending sort.
    keeps_first: bool,
}

impl SearchPlan {
    /// The trim between the edges that were found; everything is kept until they are.
    pub(super) fn trim(&self, found: &[OrderStatistic]) -> Trim {
        let Some(&low) = found.first() else {
            return Trim::All;
        };
        let lower = match (self.is_exact, self.keeps_first) {
            (false, _) => Edge::all(low),
            (true, true) => Edge::first(low, low.below + low.equal - self.keep.0),
            (true, false) => Edge::after(low, self.keep.0 - low.below),
        };
        let upper = found.get(1).map(|&high| match self.is_exact {
            false => Edge::all(high),
            true => Edge::first(high, self.keep.1 - high.below),
        });
        Trim::Between { lower, upper }
    }
}

/// The trim of an expert, and the order statistics that decide it.
pub(super) fn trim_of(
    trimming: Trimming,
    scope: Scope,
    task: &TensorTask<'_>,
    source: &SourceTask<'_>,
    group: &Group,
) -> Result<(Trim, Option<SearchPlan>)> {
    let density = source.values.get(Parameter::Density).unwrap_or(1.0);
    if trimming == Trimming::None || density >= 1.0 {
        return Ok((Trim::All, None));
    }
    if density <= 0.0 {
        return Ok((Trim::Nothing, None));
    }
    let stream = || Stream::new(task.settings.seed, source.model, task.name);
    let roots = || -> Vec<f32> {
        let squares = source.squares.unwrap_or_default();
        squares.iter().map(|square| square.sqrt()).collect()
    };
    let is_paper = task.settings.semantics == Semantics::Paper;
    let trim = match trimming {
        Trimming::Magnitude if source.squares.is_some() => {
            Trim::Rows { count: ((density * task.columns as f64) as usize).max(1), roots: roots() }
        }
        Trimming::Magnitude | Trimming::Band => {
            let is_exact = scope == Scope::Tensor;
            let gamma = source.values.number(Parameter::Gamma);
            let is_band = trimming == Trimming::Band;
            return Ok(search(density, gamma, group.elements(), is_band, is_exact));
        }
        Trimming::Random if source.squares.is_none() => Trim::Random {
            stream: stream(),
            probability: density,
            factor: if is_paper { (1.0 / density) as f32 } else { 1.0 },
        },
        _ => {
            let epsilon = match source.values.get(Parameter::Epsilon) {
                Some(epsilon) => epsilon,
                // Random trimming has statistics and no parameter of its own for them.
                None => EPSILON.min(density / 2.0).min((1.0 - density) / 2.0),
            };
            check_ramp(task.name, density, epsilon)?;
            Trim::Ramp {
                stream: stream(),
                density,
                epsilon,
                roots: roots(),
                is_unbiased: is_paper || source.squares.is_some(),
            }
        }
    };
    Ok((trim, None))
}

/// Refuses a ramp whose probabilities leave the range from 0 to 1.
fn check_ramp(tensor: &str, density: f64, epsilon: f64) -> Result<()> {
    if density - epsilon > 0.0 && density + epsilon < 1.0 || epsilon == 0.0 {
        return Ok(());
    }
    Err(Failure::new(format!("the probabilities of tensor `{tensor}` leave the range from 0 to 1"))
        .detail(format!(
            "density {density} and epsilon {epsilon} span {} to {}",
            density - epsilon,
            density + epsilon
        ))
        .hint(format!("use an epsilon below {}", density.min(1.0 - density)))
        .into())
}

/// Positions of the edges among `elements` ascending magnitudes.
fn search(
    density: f64,
    gamma: f64,
    elements: u64,
    is_band: bool,
    is_exact: bool,
) -> (Trim, Option<SearchPlan>) {
    let kept = (density * elements as f64) as u64;
    let (from, to) = if is_band {
        let outliers = (gamma * elements as f64) as u64;
        let from = elements.saturating_sub(kept).saturating_sub(outliers);
        (from, from + kept)
    } else if is_exact {
        (elements - kept.max(1).min(elements), elements)
    } else {
        // The paper's code keeps all values not smaller than the (kept + 1)-th largest.
        (elements.saturating_sub(kept + 1), elements)
    };
    if from >= to {
        return (Trim::Nothing, None);
    }
    let mut positions = vec![from];
    if is_band {
        positions.push(to - 1);
    }
    let plan = SearchPlan { positions, keep: (from, to), is_exact, keeps_first: !is_band };
    (Trim::All, Some(plan))
}
