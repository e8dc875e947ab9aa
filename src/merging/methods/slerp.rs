//! Spherical interpolation of two models, each tensor as a vector.
//!
//! ```text
//! W = sin((1 − t) θ) / sin θ · W₀ + sin(t θ) / sin θ · W₁        θ = arccos(W₀·W₁ / (|W₀| |W₁|))
//! ```
//!
//! t = 0 is the base model, whatever the order of the models. Where |cos θ| > 0.9995, W = (1 − t) W₀ + t W₁. A norm up to 1e-8 counts as
//! 1. Products and norms are f64 sums over all elements.
//!
//! Source: K. Shoemake, "Animating rotation with quaternion curves" (SIGGRAPH 1985); mergekit 0.1.5, `merge_methods/slerp.py`.

use anyhow::Result;

use super::group::Group;
use super::linear::Average;
use super::method::{BoxedMerge, MergeMethod, RowBlock, TensorMerge, TensorTask};
use super::mixer::Mixer;
use super::sums::dot;
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// Above this |cos θ|, directions count as parallel.
const COLINEAR: f64 = 0.9995;
/// Norms up to this count as 1.
const SMALLEST_NORM: f64 = 1e-8;

/// `slerp`.
pub(super) struct Slerp;

impl MergeMethod for Slerp {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "slerp",
            base_model: BaseModel::Required,
            models: 2..=2,
            per_model: &[],
            shared: &[(Parameter::T, WhenMissing::Required)],
        }
    }

    fn summary(&self) -> &'static str {
        "interpolates between two models along an arc"
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let [base, other] = task.base_and_other("slerp")?;
        Ok(Box::new(Arc {
            t: task.shared.number(Parameter::T),
            columns: task.columns,
            models: [base, other],
            sums: [0.0; 3],
            average: Average {
                columns: task.columns,
                weights: vec![0.0; task.sources.len()],
                divisor: 1.0,
            },
        }))
    }
}

/// The merge of a tensor.
struct Arc {
    t: f64,
    columns: usize,
    /// The indices of the base and of the expert.
    models: [usize; 2],
    /// W₀·W₀, W₁·W₁, W₀·W₁.
    sums: [f64; 3],
    average: Average,
}

impl Arc {
    /// The factors of both tensors.
    fn factors(&self) -> [f64; 2] {
        let norm = |square: f64| match square.sqrt() {
            norm if norm > SMALLEST_NORM => norm,
            _ => 1.0,
        };
        let cosine = self.sums[2] / (norm(self.sums[0]) * norm(self.sums[1]));
        if cosine.abs() > COLINEAR {
            return [1.0 - self.t, self.t];
        }
        let angle = cosine.acos();
        [(angle - angle * self.t).sin() / angle.sin(), (angle * self.t).sin() / angle.sin()]
    }
}

impl TensorMerge for Arc {
    fn reads(&self) -> usize {
        1
    }

    fn measure(&mut self, _read: usize, rows: &RowBlock<'_>) {
        if rows.first_row == 0 {
            self.sums = [0.0; 3];
        }
        let [first, second] = self.models.map(|at| rows.sources[at]);
        let pairs = first.chunks(self.columns).zip(second.chunks(self.columns));
        for (first, second) in pairs {
            self.sums[0] += dot(first, first);
            self.sums[1] += dot(second, second);
            self.sums[2] += dot(first, second);
        }
    }

    fn measured(&mut self, _read: usize) {
        for (model, factor) in self.models.into_iter().zip(self.factors()) {
            self.average.weights[model] = factor as f32;
        }
    }

    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        self.average.merge(rows, mixer, merged)
    }
}
