//! Gram matrices of the observed inputs of a layer, on a device.
//!
//! ```text
//! G ← G + XᵀX   for each piece X [tokens, in_features] of a sample, in f32
//! ```
//!
//! G is kept as its upper triangle, in panels of rows that reach from the diagonal to the last column. Candle's products cannot add to
//! what is there, so each piece makes new panels. The panels of earlier samples stay until the sample is whole: a sample that fails
//! half-way changes nothing.

use anyhow::Result;
use candle_core::{Device, Tensor};

use crate::bytes::ByteSize;
use crate::linalg::{gram, tensor};
use crate::model::{InputId, InputMap};

/// Rows of a panel: a multiple of the panels of the host, to which they are added.
const PANEL: usize = 4 * gram::PANEL;

/// The panels of a Gram matrix, `[rows, in_features - first row]` each; none before the first rows.
type GramPanels = Vec<Tensor>;

/// A function that gets some rows of the upper triangle of a Gram matrix: the input, the first row, and the sums from this column on.
pub type TakeGram<'a> = dyn FnMut(InputId, usize, &[f32]) + 'a;

/// Gram matrices of the four inputs of a layer.
#[derive(Debug, Default)]
pub struct DeviceGrams {
    /// Sums over the samples before the current sample.
    before: InputMap<GramPanels>,
    /// The same, with the current sample.
    sums: InputMap<GramPanels>,
}

impl DeviceGrams {
    /// Memory of the sums for inputs with these numbers of columns, with and without the current sample.
    pub fn bytes(widths: &[usize]) -> ByteSize {
        let panels = widths.iter().map(|&width| elements(width));
        ByteSize::of(2 * panels.sum::<usize>(), size_of::<f32>())
    }

    /// Memory beside the sums while this many rows are added: two panels, and the rows once more.
    pub fn adding_bytes(widths: &[usize], tokens: usize) -> ByteSize {
        let adding = widths.iter().map(|&width| 2 * PANEL.min(width) * width + tokens * width);
        ByteSize::of(adding.max().unwrap_or(0), size_of::<f32>())
    }

    /// Begins the next sample, and forgets a sample that has failed.
    pub fn begin_sample(&mut self) {
        self.sums.clone_from(&self.before);
    }

    /// Ends the current sample: it counts from now on.
    pub fn end_sample(&mut self) {
        self.before = std::mem::take(&mut self.sums);
    }

    /// Memory of the sums over the samples so far.
    pub fn held(&self) -> ByteSize {
        let panels = self.before.values().flatten();
        ByteSize::of(panels.map(Tensor::elem_count).sum(), size_of::<f32>())
    }

    /// Frees the memory of a sample that has failed.
    pub fn drop_sample(&mut self) {
        self.sums = Default::default();
    }

    /// Adds the next rows `[tokens, in_features]` of the current sample, in f32.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    pub fn add(&mut self, point: InputId, rows: &Tensor) -> Result<()> {
        let width = rows.dim(1)?;
        let sums = &mut self.sums[point];
        // Both factors of every panel are rows of it.
        let turned = rows.t()?.contiguous()?;
        for (at, first) in (0..width).step_by(PANEL).enumerate() {
            let product = {
                let left = turned.narrow(0, first, PANEL.min(width - first))?;
                let right = turned.narrow(0, first, width - first)?;
                left.matmul(&right.t()?)?
            };
            match sums.get_mut(at) {
                Some(sum) => *sum = (&*sum + product)?,
                None => sums.push(product),
            }
        }
        Ok(())
    }

    /// Hands the sums of all samples on and forgets them.
    ///
    /// # Errors
    /// Fails when the device has failed in the meantime.
    pub fn take(&mut self, take: &mut TakeGram<'_>) -> Result<()> {
        for point in InputId::ALL {
            let panels = std::mem::take(&mut self.before[point]);
            for (at, panel) in panels.into_iter().enumerate() {
                let sums = panel.to_device(&Device::Cpu)?;
                tensor::with_slice(&sums, |sums| take(point, at * PANEL, sums))?;
            }
        }
        Ok(())
    }
}

/// Elements of the panels of a Gram matrix.
fn elements(width: usize) -> usize {
    let firsts = (0..width).step_by(PANEL);
    firsts.map(|first| PANEL.min(width - first) * (width - first)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Products;
    use crate::linalg::gram::GramMatrix;

    const WIDTH: usize = 900;

    fn rows(sample: usize, tokens: usize) -> Vec<f32> {
        let at = (0..tokens * WIDTH).map(|at| ((at + sample * 17) * 7919 % 1013) as f32);
        at.map(|value| (value - 500.0) / 300.0).collect()
    }

    #[test]
    fn a_sample_that_fails_half_way_does_not_count() -> Result<()> {
        let point = InputId::Down;
        let mut grams = DeviceGrams::default();
        let add = |grams: &mut DeviceGrams, rows: &[f32]| {
            let tokens = rows.len() / WIDTH;
            grams.add(point, &Tensor::from_slice(rows, (tokens, WIDTH), &Device::Cpu)?)
        };
        let mut expected = GramMatrix::new(WIDTH, Products::F32);
        for sample in 0..4 {
            let rows = rows(sample, 9);
            grams.begin_sample();
            add(&mut grams, &rows[..4 * WIDTH])?;
            match sample {
                1 => grams.drop_sample(),
                // The next sample begins without `drop_sample`.
                2 => {}
                _ => {
                    add(&mut grams, &rows[4 * WIDTH..])?;
                    grams.end_sample();
                    expected.add_rows(&rows);
                }
            }
        }
        expected.finish();
        let mut summed = GramMatrix::new(WIDTH, Products::F32);
        for _ in 0..2 {
            // The second time nothing is left.
            grams.take(&mut |at, first, sums| {
                assert_eq!(at, point);
                summed.add_upper(first, sums);
            })?;
        }
        let (ours, theirs) = (summed.square(), expected.square());
        let largest = theirs.iter().fold(0.0f32, |max, sum| max.max(sum.abs()));
        let apart = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs());
        assert!(apart.fold(0.0, f32::max) <= 1e-6 * largest);
        Ok(())
    }

    #[test]
    fn memory_is_counted_in_panels() {
        assert_eq!(PANEL, 768);
        let triangle = 768 * 900 + 132 * 132;
        assert_eq!(DeviceGrams::bytes(&[900, 10]), ByteSize(8 * (triangle + 100)));
        let adding = 2 * 768 * 900 + 64 * 900;
        assert_eq!(DeviceGrams::adding_bytes(&[900, 10], 64), ByteSize(4 * adding));
        assert_eq!(DeviceGrams::adding_bytes(&[], 64), ByteSize::ZERO);
    }
}
