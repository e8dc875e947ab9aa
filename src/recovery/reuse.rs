//! Memory that a training uses again: the system maps and clears new memory, which takes a tenth of a step.

use anyhow::Result;

use crate::linalg::{StoredDtype, StoredMatrix};
use crate::model::{DecoderLayer, KeptActivations, LinearId};

/// Matrices and activations of layers that are not in use.
#[derive(Debug, Default)]
pub struct BufferReuse {
    matrices: Vec<StoredMatrix>,
    /// Activations of samples.
    pub activations: Vec<KeptActivations>,
    versions: u32,
}

impl BufferReuse {
    /// A matrix with unspecified content.
    ///
    /// # Errors
    /// Fails when there is too little memory.
    pub fn matrix(
        &mut self,
        dtype: StoredDtype,
        [rows, columns]: [usize; 2],
    ) -> Result<StoredMatrix> {
        let fits = |matrix: &StoredMatrix| {
            (matrix.dtype(), matrix.rows(), matrix.columns()) == (dtype, rows, columns)
        };
        match self.matrices.iter().position(fits) {
            Some(at) => Ok(self.matrices.swap_remove(at)),
            None => StoredMatrix::zeros(dtype, rows, columns),
        }
    }

    /// Marks a layer as a new version, so that a device does not take an earlier copy for it.
    pub fn as_new_version(&mut self, layer: DecoderLayer) -> DecoderLayer {
        self.versions += 1;
        layer.as_version(self.versions)
    }

    /// Takes the trained matrices of a layer that is not needed any more.
    pub fn take(&mut self, mut layer: DecoderLayer, trained: &[LinearId]) {
        for &id in trained {
            self.matrices.extend(layer.take_weight(id));
        }
    }
}
