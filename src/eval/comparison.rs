//! Comparison of a checkpoint with the dense checkpoint it may have been made from: kept, changed and missing weights.

use crate::checkpoint::{Checkpoint, Scan, TensorEntry, WeightSource};
use crate::run::inspection::{ChangedWeight, DenseComparison, StoredAs, UnlikeTensor};

/// Collects the comparison while the tensors are read.
pub(super) struct Against<'a> {
    dense: &'a Checkpoint,
    found: DenseComparison,
}

impl<'a> Against<'a> {
    pub(super) fn new(dense: &'a Checkpoint) -> Self {
        let found = DenseComparison {
            dense: dense.folder().display().to_string(),
            dense_parameters: dense.tensors().map(|entry| entry.elements() as u64).sum(),
            dense_bytes: dense.total_bytes(),
            layers_dropped: Vec::new(),
            width_dropped: None,
            is_pruned_copy: false,
            changed_by: None,
            permuted: false,
            merged_by: None,
            kept_identical: true,
            kept: 0,
            changed: 0,
            first_changed: None,
            zeros_before: 0,
            untouched: 0,
            untouched_differing: Vec::new(),
            missing: Vec::new(),
            added: Vec::new(),
            unlike: Vec::new(),
        };
        Self { dense, found }
    }

    /// Returns the dense tensor to compare `entry` with. Records `entry` if no dense tensor has its name, dtype and shape.
    pub(super) fn partner(
        &mut self,
        entry: &TensorEntry,
    ) -> Option<(&'a Checkpoint, &'a TensorEntry)> {
        let Some(other) = self.dense.entry(&entry.name) else {
            self.found.added.push(entry.name.clone());
            return None;
        };
        if (other.dtype, &other.shape) != (entry.dtype, &entry.shape) {
            self.found.unlike.push(UnlikeTensor {
                tensor: entry.name.clone(),
                dense: stored_as(other),
                found: stored_as(entry),
            });
            return None;
        }
        Some((self.dense, other))
    }

    /// Adds the scan of a tensor that has a partner. If its weights `may_be_pruned`, zeros are allowed; else it must equal the partner.
    pub(super) fn add(&mut self, entry: &TensorEntry, may_be_pruned: bool, scan: &Scan) {
        let Some(compared) = scan.compared else {
            return;
        };
        let found = &mut self.found;
        if !may_be_pruned {
            found.untouched += 1;
            if !compared.is_identical {
                found.untouched_differing.push(entry.name.clone());
            }
            return;
        }
        found.kept += entry.elements() as u64 - scan.zeros;
        found.changed += compared.changed;
        found.zeros_before += compared.zeros_before;
        found.kept_identical &= compared.changed == 0;
        if let (None, Some(first)) = (&found.first_changed, compared.first_changed) {
            found.first_changed = Some(ChangedWeight {
                tensor: entry.name.clone(),
                row: first.row,
                column: first.column,
                dense: Some(first.before).filter(|value| value.is_finite()),
                found: Some(first.now).filter(|value| value.is_finite()),
            });
        }
    }

    /// The comparison with `model`, after all its tensors.
    pub(super) fn finish(self, model: &Checkpoint) -> DenseComparison {
        let mut found = self.found;
        let missing = self.dense.tensors().filter(|entry| model.entry(&entry.name).is_none());
        found.missing = missing.map(|entry| entry.name.clone()).collect();
        found.is_pruned_copy = found.kept_identical
            && found.untouched_differing.is_empty()
            && found.missing.is_empty()
            && found.added.is_empty()
            && found.unlike.is_empty();
        found
    }
}

fn stored_as(entry: &TensorEntry) -> StoredAs {
    StoredAs { dtype: entry.dtype.to_string(), shape: entry.shape.clone() }
}
