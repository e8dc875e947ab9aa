//! Interpolation of several models on a sphere, around their mean, or of their differences from a base model.
//!
//! ```text
//! u_t = X_t / (|X_t| + eps)                                 X_t = W_t − W₀ with a base model; without one X_t = W_t, W₀ = 0
//! m   = Σ w_t u_t / |Σ w_t u_t|
//! v   = Σ w_t (u_t − (u_t·m) m),   n = |v| + eps
//! W   = W₀ + (Σ w_t |X_t|) · (cos n m + sin n v / n)
//! ```
//!
//! w_t are divided by their sum with `normalize_weights`. Where |Σ w_t u_t| < eps, two models are averaged: W = W₀ + Σ w_t X_t. More
//! than two have no result there, unless all X_t are zero: then the base stays, which mergekit refuses. A single model
//! is copied. m and v are combinations of the models, so their lengths follow from the products of the models, which are f64 sums.
//!
//! Source: mergekit 0.1.5, `merge_methods/multislerp.py`.

use anyhow::Result;

use super::group::Group;
use super::linear::Average;
use super::method::{BoxedMerge, MergeMethod, TensorTask};
use super::products::{ProductMerge, ScalarProducts};
use crate::failure::Failure;
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// `multislerp`.
pub(super) struct Multislerp;

impl MergeMethod for Multislerp {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "multislerp",
            base_model: BaseModel::Origin,
            models: 1..=usize::MAX,
            per_model: &[(Parameter::Weight, WhenMissing::Required)],
            shared: &[
                (Parameter::NormalizeWeights, WhenMissing::Is(1.0)),
                (Parameter::Eps, WhenMissing::Is(1e-8)),
            ],
        }
    }

    fn summary(&self) -> &'static str {
        "interpolates several models on a sphere, by weights"
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let (models, mut weights): (Vec<usize>, Vec<f64>) =
            task.experts().map(|(at, of)| (at, of.values.number(Parameter::Weight))).unzip();
        if let &[only] = models.as_slice() {
            let mut weights = vec![0.0f32; task.sources.len()];
            weights[only] = 1.0;
            return Ok(Box::new(Average { columns: task.columns, weights, divisor: 1.0 }));
        }
        if task.shared.is_on(Parameter::NormalizeWeights) {
            let sum: f64 = weights.iter().sum();
            if sum as f32 == 0.0 {
                return Err(Failure::new(format!(
                    "the weights of tensor `{}` add up to 0",
                    task.name
                ))
                .detail(format!("their sum is the divisor: {weights:?}"))
                .hint("use other weights, or `normalize_weights: false`")
                .into());
            }
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        let eps = task.shared.number(Parameter::Eps);
        let name = task.name.to_string();
        let products = ScalarProducts::new(task.columns, task.base, models);
        let rule = move |of: &ScalarProducts| match factors(of, &weights, eps) {
            Some(factors) => Ok(factors),
            None => Err(opposite(&name, &weights).into()),
        };
        Ok(Box::new(ProductMerge::new(products, false, Box::new(rule))))
    }
}

fn opposite(tensor: &str, weights: &[f64]) -> Failure {
    Failure::new(format!("multislerp has no result for tensor `{tensor}`"))
        .detail(format!("the weighted sum of the directions is zero; weights: {weights:?}"))
        .hint("use other weights")
}

/// The factors of X_t; `None` if their weighted directions cancel out.
fn factors(products: &ScalarProducts, weights: &[f64], eps: f64) -> Option<Vec<f64>> {
    let count = products.count();
    let norms: Vec<f64> = (0..count).map(|of| products.norm(of)).collect();
    if norms.iter().all(|norm| *norm == 0.0) {
        return Some(vec![0.0; count]);
    }
    // Combinations are lists of the coefficients of X_t; `units` has the coefficient of X_t in u_t.
    let product = |of: usize, combination: &[f64]| -> f64 {
        combination.iter().enumerate().map(|(at, part)| part * products.of(of, at)).sum()
    };
    let length = |combination: &[f64]| -> f64 {
        let parts = combination.iter().enumerate();
        parts.map(|(of, part)| part * product(of, combination)).sum::<f64>().max(0.0).sqrt()
    };
    // Without eps, a vector of zeros has no direction.
    let unit = |norm: &f64| if norm + eps == 0.0 { 0.0 } else { 1.0 / (norm + eps) };
    let units: Vec<f64> = norms.iter().map(unit).collect();
    let mut mean: Vec<f64> =
        weights.iter().zip(&units).map(|(weight, unit)| weight * unit).collect();
    let mean_length = length(&mean);
    if mean_length < eps || mean_length == 0.0 {
        return (count == 2).then(|| weights.to_vec());
    }
    mean.iter_mut().for_each(|part| *part /= mean_length);
    let mut tangent = vec![0.0; count];
    for of in 0..count {
        let cosine = units[of] * product(of, &mean);
        tangent[of] += weights[of] * units[of];
        for (tangent, part) in tangent.iter_mut().zip(&mean) {
            *tangent -= weights[of] * cosine * part;
        }
    }
    let angle = length(&tangent) + eps;
    let slope = if angle == 0.0 { 1.0 } else { angle.sin() / angle };
    let scale: f64 = weights.iter().zip(&norms).map(|(weight, norm)| weight * norm).sum();
    let parts = mean.iter().zip(&tangent);
    Some(parts.map(|(mean, tangent)| scale * (angle.cos() * mean + slope * tangent)).collect())
}

#[cfg(test)]
mod tests {
    use super::super::method::RowBlock;
    use super::*;

    fn of(vectors: &[&[f32]], weights: &[f64], eps: f64) -> Option<Vec<f64>> {
        let mut products =
            ScalarProducts::new(vectors[0].len(), None, (0..vectors.len()).collect());
        products.measure(&RowBlock { first_row: 0, sources: vectors });
        factors(&products, weights, eps)
    }

    #[test]
    fn directions_are_averaged_and_norms_too() {
        // Directions x and y with equal weights: 45°, norm (1 + 3) / 2.
        let factors = of(&[&[1.0, 0.0], &[0.0, 3.0]], &[0.5, 0.5], 1e-8).unwrap();
        let expected = 2.0 * 0.5f64.sqrt();
        assert!((factors[0] - expected).abs() < 1e-7 && (3.0 * factors[1] - expected).abs() < 1e-7);
        // Weights that are not divided by their sum scale the norm.
        let twice = of(&[&[1.0, 0.0], &[0.0, 3.0]], &[1.0, 1.0], 1e-8).unwrap();
        assert!((twice[0] - 2.0 * factors[0]).abs() < 1e-7);
        // A large eps shortens the arc: u = 1 / 1.5, cos 0.5.
        let bent = of(&[&[1.0, 0.0], &[1.0, 0.0]], &[0.5, 0.5], 0.5).unwrap();
        // m has length 1; v = Σ w (u − (u·m) m) = 0, so n = eps.
        assert!((bent[0] + bent[1] - 0.5f64.cos()).abs() < 1e-9, "{bent:?}");
    }

    #[test]
    fn opposite_models_are_averaged_if_they_are_two() {
        assert_eq!(of(&[&[1.0], &[-2.0]], &[0.5, 0.5], 1e-8), Some(vec![0.5, 0.5]));
        assert_eq!(of(&[&[1.0], &[-2.0], &[0.0]], &[0.5, 0.5, 1.0], 1e-8), None);
        assert_eq!(of(&[&[0.0], &[0.0], &[0.0]], &[0.5, 0.5, 1.0], 1e-8), Some(vec![0.0; 3]));
    }
}
