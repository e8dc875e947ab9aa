//! [`Mismatches`]: the tensors that the sources of a recipe do not share, collected for one refusal.

use std::collections::BTreeMap;

use super::model_spec::ModelSpec;
use crate::failure::Failure;
use crate::model::{EMBEDDING, HEAD};

/// Differences that an error lists.
const LISTED: usize = 10;

/// Tensors that models do not share.
#[derive(Default)]
pub(super) struct Mismatches {
    /// Tensors that only some models have.
    pub(super) lacking: Vec<String>,
    pub(super) shapes: Vec<String>,
    /// The first shape seen of each tensor of a layer, by the end of its name, and its place.
    pub(super) expected: BTreeMap<String, (Vec<usize>, String)>,
    /// The shapes of the tensors of all layers, by the end of their names.
    pub(super) forms: BTreeMap<String, Forms>,
}

/// The shapes of a tensor: the layers of the output that have it in this shape, and its first place.
pub(super) type Forms = BTreeMap<Vec<usize>, (usize, String)>;

impl Mismatches {
    pub(super) fn lacks(&mut self, tensor: &str, model: &ModelSpec) {
        self.lacking.push(format!("`{model}` has no `{tensor}`"));
    }

    /// Compares a shape with the first shape seen of the tensor in this layer, and records a difference: all sources must be alike.
    pub(super) fn compare(&mut self, suffix: &str, name: &str, model: &ModelSpec, shape: &[usize]) {
        let Some((expected, at)) = self.expected.get(suffix) else {
            let at = format!("`{name}` of `{model}`");
            self.expected.insert(suffix.to_string(), (shape.to_vec(), at));
            return;
        };
        // Vocabularies may differ; the merge decides on that.
        let has_tokens = [EMBEDDING, HEAD].contains(&name);
        let skip = usize::from(has_tokens);
        if expected.len() != shape.len() || expected.iter().skip(skip).ne(shape.iter().skip(skip)) {
            self.shapes.push(format!("`{name}` of `{model}` is {shape:?}, {at} is {expected:?}"));
        }
    }

    /// Fails where tensors differ, with the widths of the models where these differ.
    ///
    /// # Arguments
    /// * `widths`: the models with their `hidden_size`
    pub(super) fn refuse(self, widths: &[(&ModelSpec, usize)]) -> Result<(), Failure> {
        let hint = "merge models with the shape of one base, such as its fine-tuned copies";
        if widths.windows(2).any(|pair| pair[0].1 != pair[1].1) {
            let failure = Failure::new("the models have different widths");
            let failure = widths.iter().fold(failure, |failure, (model, width)| {
                failure.detail(format!("`{model}`: hidden_size {width}"))
            });
            return Err(failure.hint(hint));
        }
        for (mismatches, message) in [
            (self.lacking, "some models have tensors that others lack"),
            (self.shapes, "the models have tensors of different shapes"),
        ] {
            if mismatches.is_empty() {
                continue;
            }
            let shown = mismatches.iter().take(LISTED);
            let failure = shown.fold(Failure::new(message), Failure::detail).hint(hint);
            return Err(match mismatches.len() {
                ..=LISTED => failure,
                more => failure.detail(format!("and {} more", more - LISTED)),
            });
        }
        Ok(())
    }
}
