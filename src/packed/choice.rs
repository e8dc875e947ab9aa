//! The form of each matrix, from its counts: a matrix stays dense where packing does not make it smaller.
//!
//! A folder has one form, as in compressed-tensors. It is 2:4 where every packed matrix has at most two kept columns of each four, unless the
//! mask of any columns is smaller by more than `WORTH`: 2:4 stores two values for each four columns, also where fewer are kept.

use std::collections::BTreeMap;

use super::matrix::{MatrixSize, OWN_METHOD, PackForm, PackedValues, bytes_of};
use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, PlannedTensor, WeightSource};
use crate::linalg::int8;
use crate::run::packing::{DenseMatrix, PackedTotals, ScannedMatrix};

/// The share of the bytes of all packed matrices that the layout of 2:4 may cost. Its rows begin at known places.
const WORTH: f64 = 0.1;

/// The forms of all matrices.
#[derive(Debug, Clone, PartialEq)]
pub struct PackChoice {
    /// The form of every packed matrix.
    pub form: PackForm,
    /// The kept values.
    pub values: PackedValues,
    /// Kept elements of each packed matrix, by tensor name.
    pub packed: BTreeMap<String, u64>,
    /// Matrices that stay dense.
    pub dense: Vec<DenseMatrix>,
    /// All packed matrices together.
    pub totals: PackedTotals,
    /// Kept elements of all decoder linears, and all their elements.
    pub kept: [u64; 2],
}

/// A matrix that may be packed.
struct PackCandidate {
    name: String,
    size: MatrixSize,
    kept: u64,
    is_two_of_four: bool,
    dense_bytes: u64,
}

impl PackCandidate {
    fn bytes(&self, form: PackForm, values: PackedValues) -> u64 {
        bytes_of(&self.size.parts(&self.name, form, values, self.kept))
    }

    fn weights(&self) -> u64 {
        (self.size.rows * self.size.columns) as u64
    }
}

impl PackChoice {
    /// Chooses the forms.
    ///
    /// # Arguments
    /// * `scanned`: the counts of all decoder linears, by tensor name
    pub fn new(
        source: &Checkpoint,
        values: PackedValues,
        scanned: &BTreeMap<String, ScannedMatrix>,
    ) -> Self {
        let (mut candidates, mut dense) = (Vec::new(), Vec::new());
        let mut kept = [0; 2];
        for (name, counts) in scanned {
            let Some((entry, size)) =
                source.entry(name).and_then(|entry| Some((entry, MatrixSize::of(entry)?)))
            else {
                continue;
            };
            let candidate = PackCandidate {
                name: name.clone(),
                size,
                kept: counts.kept,
                is_two_of_four: size.columns % 4 == 0 && counts.most_of_four <= 2,
                dense_bytes: entry.bytes,
            };
            kept = [kept[0] + counts.kept, kept[1] + candidate.weights()];
            let packed = candidate.bytes(PackForm::Bitmask, values);
            let why = if values == PackedValues::Int8 && !int8::fits(counts.largest) {
                format!("its largest weight {:e} is out of reach of f16 scales", counts.largest)
            } else if packed >= entry.bytes {
                let zeros = candidate.weights() - counts.kept;
                let share = 100.0 * zeros as f64 / candidate.weights().max(1) as f64;
                format!("{share:.2} % zeros: {packed} bytes packed, {} dense", entry.bytes)
            } else {
                candidates.push(candidate);
                continue;
            };
            dense.push(DenseMatrix { tensor: name.clone(), why });
        }
        let form = form_of(&candidates, values);
        let sum = |of: &dyn Fn(&PackCandidate) -> u64| candidates.iter().map(of).sum::<u64>();
        let weights = sum(&PackCandidate::weights);
        let totals = PackedTotals {
            matrices: candidates.len(),
            weights,
            zeros: weights - sum(&|of| of.kept),
            matrix_bytes_before: ByteSize(sum(&|of| of.dense_bytes)),
            matrix_bytes_after: ByteSize(sum(&|of| of.bytes(form, values))),
        };
        let packed = candidates.into_iter().map(|of| (of.name, of.kept)).collect();
        Self { form, values, packed, dense, totals, kept }
    }

    /// The name of the format: compressed-tensors' for exact values.
    pub fn format(&self) -> &'static str {
        match self.values {
            PackedValues::Exact => self.form.name(),
            PackedValues::Int8 => OWN_METHOD,
        }
    }

    /// The share of zeros in all decoder linears.
    pub fn sparsity(&self) -> f64 {
        let [kept, all] = self.kept;
        (all - kept) as f64 / all.max(1) as f64
    }

    /// The parts of a packed matrix; `None` for a tensor that stays as it is.
    pub(super) fn parts(&self, source: &Checkpoint, name: &str) -> Option<Vec<PlannedTensor>> {
        let &kept = self.packed.get(name)?;
        let size = MatrixSize::of(source.entry(name)?)?;
        Some(size.parts(name, self.form, self.values, kept))
    }
}

/// The form of a folder with these packed matrices. Codes of 8 bits have a mask of any columns.
fn form_of(candidates: &[PackCandidate], values: PackedValues) -> PackForm {
    let is_two_of_four = values == PackedValues::Exact
        && !candidates.is_empty()
        && candidates.iter().all(|of| of.is_two_of_four);
    let bytes = |form| candidates.iter().map(|of| of.bytes(form, values)).sum::<u64>() as f64;
    let most = (1.0 + WORTH) * bytes(PackForm::Bitmask);
    let fits = |of: &PackCandidate| of.bytes(PackForm::TwoOfFour, values) < of.dense_bytes;
    match is_two_of_four && bytes(PackForm::TwoOfFour) <= most && candidates.iter().all(fits) {
        true => PackForm::TwoOfFour,
        false => PackForm::Bitmask,
    }
}
