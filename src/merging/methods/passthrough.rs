//! Passthrough: W = scale · W₁. With slices it stacks layers of several models.
//!
//! Source: mergekit 0.1.5, `merge_methods/passthrough.py`.

use anyhow::Result;

use super::group::Group;
use super::linear::Average;
use super::method::{BoxedMerge, MergeMethod, TensorTask};
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// `passthrough`.
pub(super) struct Passthrough;

impl MergeMethod for Passthrough {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "passthrough",
            base_model: BaseModel::Optional,
            models: 1..=1,
            per_model: &[(Parameter::Scale, WhenMissing::Absent)],
            shared: &[],
        }
    }

    fn summary(&self) -> &'static str {
        "copies tensors, to stack layers of several models"
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let scales = task.sources.iter();
        let scales = scales.map(|source| source.values.get(Parameter::Scale));
        Ok(Box::new(Average {
            columns: task.columns,
            weights: scales.map(|scale| scale.unwrap_or(1.0) as f32).collect(),
            divisor: 1.0,
        }))
    }
}
