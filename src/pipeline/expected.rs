//! Pruned matrices as they must be on the disk: names, masks and zeros, from the reports of layers.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::checkpoint::ExpectedMatrix;
use crate::failure::Failure;
use crate::pruning::{Pattern, Technique};
use crate::run::manifest::{LayerReport, MatrixReport};
use crate::run::verification::VerifyLevel;

/// The masks of these layers, by matrix: SHA-256 of their bits, in hex.
pub fn masks_of(layers: &[LayerReport]) -> BTreeMap<String, String> {
    pruned(layers)
        .filter_map(|matrix| Some((matrix.name.clone(), matrix.mask_sha256.clone()?)))
        .collect()
}

/// The tensor of a matrix.
pub fn tensor_of(matrix: &str) -> String {
    format!("{matrix}.weight")
}

/// The bias of a matrix, which may not exist.
pub fn bias_of(matrix: &str) -> String {
    format!("{matrix}.bias")
}

/// The matrix of a tensor.
pub fn matrix_of(tensor: &str) -> &str {
    let matrix = tensor.strip_suffix(".weight");
    let matrix = matrix.or_else(|| tensor.strip_suffix(".bias"));
    matrix.unwrap_or(tensor)
}

/// The content of these layers that verification must find in the output.
pub fn expected_of(layers: &[LayerReport], pattern: Pattern) -> Vec<ExpectedMatrix> {
    pruned(layers).map(|matrix| expected(matrix, pattern)).collect()
}

fn expected(matrix: &MatrixReport, pattern: Pattern) -> ExpectedMatrix {
    ExpectedMatrix {
        name: tensor_of(&matrix.name),
        zeros: Some(matrix.zeros),
        group: match pattern {
            Pattern::Unstructured => None,
            Pattern::NOfM { n, m } => Some((n, m)),
        },
    }
}

/// The matrices of these layers that were pruned.
pub fn pruned(layers: &[LayerReport]) -> impl Iterator<Item = &MatrixReport> {
    let matrices = layers.iter().flat_map(|layer| &layer.matrices);
    matrices.filter(|matrix| matrix.pruned.is_some())
}

/// Checks that the output of a method can be verified at a level.
///
/// # Errors
/// Fails for a full verification, which holds kept weights against the source, of a method that changes them.
pub fn check_verification(technique: &Technique, level: VerifyLevel) -> Result<()> {
    if level == VerifyLevel::Full && technique.changes_weights() {
        let name = technique.name();
        return Err(Failure::usage(format!("--verify full does not fit {name}"))
            .detail(match technique.permutes {
                Some(_) => "it compares kept weights with the source at their place, and --permute-channels moves them",
                None => "it compares kept weights with the source, and this method changes them",
            })
            .hint("use --verify quick")
            .into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(index: usize) -> LayerReport {
        let matrix = |name: &str, pruned| MatrixReport {
            name: format!("model.layers.{index}.{name}"),
            shape: [2, 2],
            zeros_before: 0,
            zeros: 2,
            pruned,
            mask_sha256: pruned.map(|_| format!("mask {index}")),
            relative_output_error: None,
        };
        LayerReport {
            layer: index,
            seconds: 1.0,
            sparsity: 0.5,
            permutation: None,
            training: None,
            matrices: vec![matrix("q", Some(2)), matrix("k", None)],
        }
    }

    #[test]
    fn masks_and_expectations_are_of_pruned_matrices() {
        let layers = [layer(0)];
        assert_eq!(
            masks_of(&layers),
            [("model.layers.0.q".to_string(), "mask 0".to_string())].into()
        );
        let expected = expected_of(&layers, Pattern::NOfM { n: 2, m: 4 });
        assert_eq!(expected.len(), 1);
        assert_eq!(expected[0].name, "model.layers.0.q.weight");
        assert_eq!((expected[0].zeros, expected[0].group), (Some(2), Some((2, 4))));
    }
}
