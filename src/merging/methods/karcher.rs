//! The Karcher mean: the point on the unit sphere with the least sum of squared angles to all models, times their mean norm.
//!
//! ```text
//! u_t = W_t / |W_t|                  of the n models whose norm exceeds tol; α = 1 / n
//! m   = Σ α u_t, of length 1         u₁ where the sum is shorter than tol
//! v   = Σ α θ_t / sin θ_t (u_t − cos θ_t m)         θ_t = arccos(u_t·m), without angles below tol
//! m   ← cos |v| m + sin |v| v / |v|                 at most max_iter times, and until |v| < tol
//! W   = mean of all norms · m
//! ```
//!
//! m and v are combinations of the models, so their lengths and angles follow from the products of the models. Products are f64 sums over
//! all elements; the steps are f64, where mergekit's are f32, but a cosine is rounded to f32 as there. A base model in the recipe
//! counts as a model.
//!
//! Source: H. Karcher, "Riemannian center of mass and mollifier smoothing" (1977); mergekit 0.1.5, `merge_methods/karcher.py`.

use anyhow::Result;

use super::group::Group;
use super::method::{BoxedMerge, MergeMethod, TensorTask};
use super::products::{ProductMerge, ScalarProducts};
use crate::failure::Failure;
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// `karcher`.
pub(super) struct Karcher;

impl MergeMethod for Karcher {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "karcher",
            base_model: BaseModel::Optional,
            models: 1..=usize::MAX,
            per_model: &[],
            shared: &[
                (Parameter::MaxIter, WhenMissing::Is(10.0)),
                (Parameter::Tol, WhenMissing::Is(1e-5)),
            ],
        }
    }

    fn summary(&self) -> &'static str {
        "finds the mean of the models on a sphere"
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let steps = task.shared.number(Parameter::MaxIter);
        let tolerance = task.shared.number(Parameter::Tol);
        if steps.fract() != 0.0 {
            return Err(Failure::new(format!(
                "`max_iter` is {steps} for tensor `{}`; it is a number of steps",
                task.name
            ))
            .hint("use a whole number, such as `max_iter: 10`")
            .into());
        }
        let models = (0..task.sources.len()).collect();
        let products = ScalarProducts::new(task.columns, None, models);
        let rule = move |of: &ScalarProducts| Ok(factors(of, steps as usize, tolerance));
        Ok(Box::new(ProductMerge::new(products, false, Box::new(rule))))
    }
}

/// The factors of the models.
fn factors(products: &ScalarProducts, steps: usize, tolerance: f64) -> Vec<f64> {
    let count = products.count();
    if count == 1 {
        return vec![1.0];
    }
    let norms: Vec<f64> = (0..count).map(|of| products.norm(of)).collect();
    let valid: Vec<usize> = (0..count).filter(|&of| norms[of] > tolerance).collect();
    let mut factors = vec![0.0; count];
    if valid.is_empty() {
        return factors;
    }
    let sphere = Sphere {
        cosines: valid
            .iter()
            .map(|&one| {
                let others = valid.iter();
                others.map(|&other| products.of(one, other) / (norms[one] * norms[other])).collect()
            })
            .collect(),
    };
    let mean = sphere.mean(steps, tolerance);
    let scale = norms.iter().sum::<f64>() / count as f64;
    for (&of, part) in valid.iter().zip(mean) {
        factors[of] = scale * part / norms[of];
    }
    factors
}

/// Unit vectors u_t. A combination of them is a list of coefficients.
struct Sphere {
    /// u_s·u_t.
    cosines: Vec<Vec<f64>>,
}

impl Sphere {
    /// The product of u_t and a combination.
    fn product(&self, of: usize, combination: &[f64]) -> f64 {
        self.cosines[of].iter().zip(combination).map(|(cosine, part)| cosine * part).sum()
    }

    /// The length of a combination.
    fn length(&self, combination: &[f64]) -> f64 {
        let parts = combination.iter().enumerate();
        parts.map(|(of, part)| part * self.product(of, combination)).sum::<f64>().max(0.0).sqrt()
    }

    /// m, as a combination.
    fn mean(&self, steps: usize, tolerance: f64) -> Vec<f64> {
        let count = self.cosines.len();
        let share = 1.0 / count as f64;
        let mut mean = vec![share; count];
        let length = self.length(&mean);
        if length < tolerance {
            mean.fill(0.0);
            mean[0] = 1.0;
        } else {
            mean.iter_mut().for_each(|part| *part /= length);
        }
        for _ in 0..steps {
            let tangent = self.tangent(&mean, share, tolerance);
            let length = self.length(&tangent);
            if length < tolerance || length == 0.0 {
                break;
            }
            for (part, tangent) in mean.iter_mut().zip(&tangent) {
                *part = length.cos() * *part + length.sin() * tangent / length;
            }
            let length = self.length(&mean);
            if length > tolerance {
                mean.iter_mut().for_each(|part| *part /= length);
            }
        }
        mean
    }

    /// v, as a combination.
    fn tangent(&self, mean: &[f64], share: f64, tolerance: f64) -> Vec<f64> {
        let mut tangent = vec![0.0; mean.len()];
        for of in 0..mean.len() {
            // mergekit has f32 here: angles below 2.4e-4 are zero.
            let cosine = f64::from(self.product(of, mean) as f32).clamp(-1.0, 1.0);
            let angle = cosine.acos();
            if angle < tolerance || angle == 0.0 {
                continue;
            }
            let factor = share * angle / angle.sin();
            tangent[of] += factor;
            for (tangent, part) in tangent.iter_mut().zip(mean) {
                *tangent -= factor * cosine * part;
            }
        }
        tangent
    }
}

#[cfg(test)]
mod tests {
    use super::super::method::RowBlock;
    use super::*;

    fn of(vectors: &[&[f32]], steps: usize) -> Vec<f64> {
        let mut products =
            ScalarProducts::new(vectors[0].len(), None, (0..vectors.len()).collect());
        products.measure(&RowBlock { first_row: 0, sources: vectors });
        factors(&products, steps, 1e-5)
    }

    #[test]
    fn the_mean_of_two_directions_is_half_way_and_has_the_mean_norm() {
        // Directions x and y, norms 1 and 3: norm 2 at 45°.
        let factors = of(&[&[1.0, 0.0], &[0.0, 3.0]], 10);
        let half = 0.5f64.sqrt();
        assert!((factors[0] - 2.0 * half).abs() < 1e-7);
        assert!((factors[1] * 3.0 - 2.0 * half).abs() < 1e-7);
    }

    #[test]
    fn the_mean_of_an_arc_is_the_mean_of_its_angles() {
        // Angles 0°, 0° and 90°: the mean is at 30°, while the sum of the vectors points to 26.6°.
        let at = |factors: &[f64]| factors[2].atan2(factors[0] + factors[1]).to_degrees();
        let vectors: [&[f32]; 3] = [&[1.0, 0.0], &[1.0, 0.0], &[0.0, 1.0]];
        assert!((at(&of(&vectors, 0)) - 26.565).abs() < 1e-3);
        assert!((at(&of(&vectors, 10)) - 30.0).abs() < 1e-3);
    }

    #[test]
    fn vectors_without_length_and_opposite_vectors_have_a_mean() {
        assert_eq!(of(&[&[0.0, 0.0], &[0.0, 0.0]], 10), [0.0, 0.0]);
        // Only the second has a direction; the norm is the mean of both.
        let factors = of(&[&[0.0, 0.0], &[2.0, 0.0]], 10);
        assert_eq!(factors[0], 0.0);
        assert!((factors[1] - 0.5).abs() < 1e-12);
        // Opposite vectors: the search begins at the first.
        assert!(of(&[&[1.0, 0.0], &[-1.0, 0.0]], 0)[0] > 0.99);
    }
}
