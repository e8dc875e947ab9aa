//! Spherical interpolation of two models, or of their differences from a base model.
//!
//! ```text
//! W = W₀ + (sin((1 − t) θ) X₁ + sin(t θ) X₂) / sin θ        θ = arccos(X₁·X₂ / (|X₁| |X₂|)),  t = w₂ / (w₁ + w₂)
//! X_t = W_t − W₀ with a base model; without one, X_t = W_t and W₀ = 0
//! ```
//!
//! A vector is a whole tensor (`nuslerp_flatten`, the default), else a row, or a column with `nuslerp_row_wise`: the name is mergekit's. A
//! tensor of one row is a single vector in both cases. Norms up to 1e-7 count as 1e-7. Where cos θ is 1 or −1 in f32,
//! W = W₀ + (1 − t) X₁ + t X₂. A sum of the weights below 1e-6 gives t = ½. Products are f64 sums.
//!
//! Source: mergekit 0.1.5, `merge_methods/nuslerp.py`.

use anyhow::Result;

use super::differences::subtract;
use super::group::Group;
use super::method::{BoxedMerge, MergeMethod, RowBlock, TensorMerge, TensorTask};
use super::mixer::Mixer;
use super::products::{ProductMerge, ScalarProducts};
use crate::failure::Failure;
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// Smaller norms count as this.
const SMALLEST_NORM: f64 = 1e-7;
/// Smaller sums of weights leave t at one half.
const SMALLEST_SUM: f64 = 1e-6;

/// `nuslerp`.
pub(super) struct Nuslerp;

impl MergeMethod for Nuslerp {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "nuslerp",
            base_model: BaseModel::Origin,
            models: 2..=2,
            per_model: &[(Parameter::Weight, WhenMissing::Required)],
            shared: &[
                (Parameter::NuslerpRowWise, WhenMissing::Is(0.0)),
                (Parameter::NuslerpFlatten, WhenMissing::Is(1.0)),
            ],
        }
    }

    fn summary(&self) -> &'static str {
        "interpolates along an arc by weights, from a base or from zero"
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let experts: Vec<_> = task.experts().collect();
        let &[(first, one), (second, other)] = experts.as_slice() else {
            return Err(Failure::new(format!(
                "nuslerp of tensor `{}` needs two models beside the base",
                task.name
            ))
            .detail(format!("{} models are given", experts.len()))
            .into());
        };
        let [one, other] = [one, other].map(|source| source.values.number(Parameter::Weight));
        let sum = one + other;
        let t = if sum.abs() < SMALLEST_SUM { 0.5 } else { other / sum };
        let is_flat = task.shared.is_on(Parameter::NuslerpFlatten) || task.rows == 1;
        let (columns, origin, models) = (task.columns, task.base, [first, second]);
        if !is_flat && task.shared.is_on(Parameter::NuslerpRowWise) {
            let sums = vec![[0.0; 3]; columns];
            return Ok(Box::new(ColumnArcs {
                t,
                columns,
                origin,
                models,
                sums,
                rows: [vec![], vec![]],
            }));
        }
        let products = ScalarProducts::new(columns, origin, models.into());
        let rule = move |of: &ScalarProducts| {
            Ok(factors(t, [of.of(0, 0), of.of(1, 1), of.of(0, 1)]).into())
        };
        Ok(Box::new(ProductMerge::new(products, !is_flat, Box::new(rule))))
    }
}

/// The factors of X₁ and X₂, from X₁·X₁, X₂·X₂ and X₁·X₂.
fn factors(t: f64, [one, other, both]: [f64; 3]) -> [f64; 2] {
    let norm = |square: f64| square.sqrt().max(SMALLEST_NORM);
    let cosine = (both / (norm(one) * norm(other))).clamp(-1.0, 1.0);
    if (cosine as f32).abs() == 1.0 {
        return [1.0 - t, t];
    }
    let angle = cosine.acos();
    [((1.0 - t) * angle).sin() / angle.sin(), (t * angle).sin() / angle.sin()]
}

/// The merge of a tensor whose columns are vectors.
struct ColumnArcs {
    t: f64,
    columns: usize,
    origin: Option<usize>,
    models: [usize; 2],
    /// X₁·X₁, X₂·X₂ and X₁·X₂ per column, then the factors of X₁ and X₂.
    sums: Vec<[f64; 3]>,
    /// X₁ and X₂ of the current rows, with an origin.
    rows: [Vec<f32>; 2],
}

impl ColumnArcs {
    /// X₁ and X₂ of some rows.
    fn vectors<'v>(&'v mut self, rows: &RowBlock<'v>) -> [&'v [f32]; 2] {
        let models = self.models.map(|model| rows.sources[model]);
        let Some(origin) = self.origin else {
            return models;
        };
        for (model, difference) in models.into_iter().zip(&mut self.rows) {
            subtract(model, rows.sources[origin], difference);
        }
        [&self.rows[0], &self.rows[1]]
    }
}

impl TensorMerge for ColumnArcs {
    fn reads(&self) -> usize {
        1
    }

    fn measure(&mut self, _read: usize, rows: &RowBlock<'_>) {
        let columns = self.columns;
        let mut sums = std::mem::take(&mut self.sums);
        if rows.first_row == 0 {
            sums.fill([0.0; 3]);
        }
        let [one, other] = self.vectors(rows);
        for (one, other) in one.chunks(columns).zip(other.chunks(columns)) {
            for (sums, (one, other)) in sums.iter_mut().zip(one.iter().zip(other)) {
                let [one, other] = [*one, *other].map(f64::from);
                sums[0] += one * one;
                sums[1] += other * other;
                sums[2] += one * other;
            }
        }
        self.sums = sums;
    }

    fn measured(&mut self, _read: usize) {
        for sums in &mut self.sums {
            let [one, other] = factors(self.t, *sums);
            *sums = [one, other, 0.0];
        }
    }

    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        _mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        let columns = self.columns;
        match self.origin {
            Some(origin) => merged.copy_from_slice(rows.sources[origin]),
            None => merged.fill(0.0),
        }
        let factors = std::mem::take(&mut self.sums);
        let [one, other] = self.vectors(rows);
        for (at, merged) in merged.iter_mut().enumerate() {
            let [first, second, _] = factors[at % columns];
            *merged += first as f32 * one[at] + second as f32 * other[at];
        }
        self.sums = factors;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_follow_the_angle_and_its_edges() {
        // A right angle: sin(45°) for both.
        let [one, other] = factors(0.5, [4.0, 9.0, 0.0]);
        assert!((one - 0.5f64.sqrt()).abs() < 1e-15 && (other - 0.5f64.sqrt()).abs() < 1e-15);
        // 60°, a quarter of the way: sin 45° / sin 60° and sin 15° / sin 60°.
        let [one, other] = factors(0.25, [1.0, 4.0, 1.0]);
        let degrees = |angle: f64| angle.to_radians().sin() / 60f64.to_radians().sin();
        assert!((one - degrees(45.0)).abs() < 1e-12 && (other - degrees(15.0)).abs() < 1e-12);
        // Parallel and opposite vectors are mixed along a line.
        assert_eq!(factors(0.25, [1.0, 4.0, 2.0]), [0.75, 0.25]);
        assert_eq!(factors(0.25, [1.0, 4.0, -2.0]), [0.75, 0.25]);
        // A vector of zeros is at a right angle to every vector, as in mergekit.
        let [one, other] = factors(0.5, [0.0, 1.0, 0.0]);
        assert!((one - other).abs() < 1e-15 && (one - 0.5f64.sqrt()).abs() < 1e-15);
    }
}
