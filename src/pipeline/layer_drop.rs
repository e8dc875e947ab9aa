//! Scores of whole layers, and the choice of the layers to drop. A layer that hardly turns its input is missed the least.
//!
//! ```text
//! BI_i = 1 − (1/T) Σ_t cos(h_i,t , h_i+1,t)                       h_i [T, hidden_size], T the tokens of all samples
//! d_n(l) = (1/S) Σ_s arccos(cos(h_l , h_l+n)) / π                 h the last token of sample s, S the samples
//! ```
//!
//! h_i is the input of layer i, and h_L the output of the last layer, before the final norm. BI is the block influence of Men et al. 2024
//! ("ShortGPT", arXiv:2403.03853). d_n is the angular distance of Gromov et al. 2024 ("The Unreasonable Ineffectiveness of
//! the Deeper Layers", arXiv:2403.17887): the distance between the input and the output of a span of n layers.
//! Cosines and sums are f64. A sum has a fixed number of lanes, and samples are added in their order, so that scores depend neither on
//! threads nor on the place of hidden states.
//!
//! The rule `influence` drops the layers with the smallest BI, and `angle` the span of n layers with the smallest d_n. Ties go to the lower
//! index.
//!
//! `auto` drops layers only as long as their score is below three quarters of the median layer's, and at most a quarter of the layers. The
//! score is BI_i, or d_n of the span against the median of d_1. The two numbers are ours, chosen on two small models.
//! A relative bound leaves a model alone whose layers all do about the same work.

use clap::ValueEnum;
use serde::Serialize;

/// The largest score of a dropped layer, relative to the median.
const OF_MEDIAN: f64 = 0.75;

/// The largest part of the layers that is dropped automatically, as a divisor of their number.
const ONE_OF: usize = 4;

/// Independent sums of a product of two vectors.
const LANES: usize = 8;

/// The rule by which layers are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DropRule {
    /// The layers whose outputs are closest to their inputs, by the mean cosine of all tokens
    #[default]
    Influence,
    /// The span of consecutive layers that turns the last token of a sample least
    Angle,
}

impl DropRule {
    /// `influence` or `angle`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Influence => "influence",
            Self::Angle => "angle",
        }
    }
}

/// The scores of all layers of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerScores {
    /// BI of every layer.
    pub influence: Vec<f64>,
    /// d_n(l): an entry for each n from 1, each with a distance for every first layer l of a span.
    pub angles: Vec<Vec<f64>>,
}

/// The most layers that are dropped automatically of a model with `layers`.
pub fn most_dropped(layers: usize) -> usize {
    layers / ONE_OF
}

/// The bound of `auto`: layers with a larger or equal score stay.
pub fn bound(scores: &LayerScores, rule: DropRule) -> f64 {
    let of_layers = match rule {
        DropRule::Influence => &scores.influence,
        DropRule::Angle => scores.angles.first().unwrap_or(&scores.influence),
    };
    OF_MEDIAN * median(of_layers)
}

/// Chooses `count` layers, in ascending order. `scores.angles` has spans of `count`, and `count` is not 0.
pub fn choose(scores: &LayerScores, rule: DropRule, count: usize) -> Vec<usize> {
    match rule {
        DropRule::Influence => {
            let mut layers = by_score(&scores.influence);
            layers.truncate(count);
            layers.sort_unstable();
            layers
        }
        DropRule::Angle => {
            let distances = scores.angles.get(count.wrapping_sub(1));
            let spans = distances.map(|distances| by_score(distances));
            let first = spans.and_then(|spans| spans.first().copied());
            first.map_or_else(Vec::new, |first| (first..first + count).collect())
        }
    }
}

/// Chooses the layers that `auto` drops, in ascending order: perhaps none.
pub fn choose_automatically(scores: &LayerScores, rule: DropRule) -> Vec<usize> {
    let (bound, most) = (bound(scores, rule), most_dropped(scores.influence.len()));
    let is_below = |score: Option<&f64>| score.is_some_and(|score| *score < bound);
    match rule {
        DropRule::Influence => {
            let below = by_score(&scores.influence).into_iter();
            let below = below.take_while(|&layer| is_below(scores.influence.get(layer)));
            choose(scores, rule, below.take(most).count())
        }
        DropRule::Angle => {
            let longest = (1..=most).rev().find(|&count| {
                let distances = scores.angles.get(count - 1);
                distances.is_some_and(|all| is_below(all.iter().min_by(|a, b| a.total_cmp(b))))
            });
            longest.map_or_else(Vec::new, |count| choose(scores, rule, count))
        }
    }
}

/// The indices of the scores, in ascending order of the scores; ties in ascending order of the indices.
fn by_score(scores: &[f64]) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..scores.len()).collect();
    indices.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    indices
}

/// The median: of an even number of values the mean of the two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.as_slice() {
        [] => 0.0,
        all if all.len() % 2 == 1 => all[middle],
        all => (all[middle - 1] + all[middle]) / 2.0,
    }
}

/// The cosine of two vectors of equal length, in f64. The cosine with a vector of zeros is 0.
pub fn cosine(one: &[f32], other: &[f32]) -> f64 {
    let (mut product, mut squares, mut other_squares) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    let (ones, ones_rest) = one.as_chunks::<LANES>();
    let (others, others_rest) = other.as_chunks::<LANES>();
    let mut add = |lane: usize, a: f32, b: f32| {
        let (a, b) = (f64::from(a), f64::from(b));
        product[lane] += a * b;
        squares[lane] += a * a;
        other_squares[lane] += b * b;
    };
    for (ones, others) in ones.iter().zip(others) {
        for lane in 0..LANES {
            add(lane, ones[lane], others[lane]);
        }
    }
    for (lane, (&a, &b)) in ones_rest.iter().zip(others_rest).enumerate() {
        add(lane, a, b);
    }
    let sum = |lanes: [f64; LANES]| lanes.iter().sum::<f64>();
    let norms = sum(squares).sqrt() * sum(other_squares).sqrt();
    match norms == 0.0 {
        true => 0.0,
        false => sum(product) / norms,
    }
}

/// The angle of two vectors over π, from 0 to 1.
pub fn angular_distance(one: &[f32], other: &[f32]) -> f64 {
    cosine(one, other).clamp(-1.0, 1.0).acos() / std::f64::consts::PI
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(influence: &[f64], angles: &[&[f64]]) -> LayerScores {
        LayerScores {
            influence: influence.to_vec(),
            angles: angles.iter().map(|all| all.to_vec()).collect(),
        }
    }

    #[test]
    fn a_cosine_is_that_of_the_definition() {
        // (3, 4)·(4, 3) / (5·5) = 24/25; a vector of 11 fills a block and leaves three.
        assert_eq!(cosine(&[3.0, 4.0], &[4.0, 3.0]), 24.0 / 25.0);
        let one: Vec<f32> = (1..12).map(|value| value as f32).collect();
        let minus: Vec<f32> = one.iter().map(|value| -2.0 * value).collect();
        assert!((cosine(&one, &minus) + 1.0).abs() < 1e-15);
        assert_eq!(cosine(&one, &[0.0; 11]), 0.0);
        assert_eq!(angular_distance(&[1.0, 0.0], &[0.0, 2.0]), 0.5);
        assert!(cosine(&[f32::NAN], &[1.0]).is_nan());
    }

    #[test]
    fn the_smallest_influences_go_and_ties_go_to_the_lower_layer() {
        let scores = scores(&[0.9, 0.2, 0.1, 0.2, 0.3], &[]);
        let chosen = |count| choose(&scores, DropRule::Influence, count);
        assert_eq!(chosen(1), [2]);
        assert_eq!(chosen(2), [1, 2]);
        assert_eq!(chosen(3), [1, 2, 3]);
    }

    #[test]
    fn the_span_with_the_smallest_angle_goes() {
        let angles: [&[f64]; 2] = [&[0.5, 0.3, 0.3, 0.4], &[0.6, 0.5, 0.45]];
        let scores = scores(&[0.1; 4], &angles);
        assert_eq!(choose(&scores, DropRule::Angle, 1), [1]);
        assert_eq!(choose(&scores, DropRule::Angle, 2), [2, 3]);
        assert!(choose(&scores, DropRule::Angle, 3).is_empty());
    }

    #[test]
    fn auto_drops_what_is_below_three_quarters_of_the_median_and_a_quarter_at_most() {
        let auto =
            |influence: &[f64]| choose_automatically(&scores(influence, &[]), DropRule::Influence);
        // The median is 1, the bound 0.75.
        assert_eq!(auto(&[9.0, 1.0, 0.7, 1.0, 0.8, 1.0, 1.0, 2.0]), [2]);
        assert!(auto(&[9.0, 1.0, 0.75, 1.0, 0.8, 1.0, 1.0, 2.0]).is_empty());
        // Three are below, and two of eight may go.
        assert_eq!(auto(&[9.0, 1.0, 0.2, 1.0, 0.1, 1.0, 0.3, 2.0]), [2, 4]);
        assert!(auto(&[1.0, 0.0, 1.0]).is_empty());
        let angles: [&[f64]; 2] = [&[4.0, 4.0, 1.0, 4.0, 4.0, 4.0, 4.0, 4.0], &[2.0, 3.5]];
        let spans = scores(&[1.0; 8], &angles);
        // Both distances are below 3; the longer span goes.
        assert_eq!(choose_automatically(&spans, DropRule::Angle), [0, 1]);
        assert_eq!(median(&[3.0, 1.0, 2.0, 10.0]), 2.5);
    }
}
