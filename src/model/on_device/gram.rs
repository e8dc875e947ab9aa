//! Gram matrices of the observed inputs of a layer, on a device.
//!
//! ```text
//! block ← block + XᵀX   for each piece X [tokens, in_features] of the samples of a block, in f32
//! G ← G + block         block by block; a device that does not have all blocks hands each block on instead
//! ```
//!
//! Sums are kept as their upper triangle, in panels of rows that reach from the diagonal to the last column. Candle's products cannot add
//! to what is there, so each piece makes new panels. A block that fails half-way changes nothing: it begins again, or goes elsewhere.

use anyhow::Result;
use candle_core::Tensor;

use super::operators;
use crate::bytes::ByteSize;
use crate::linalg::{gram, tensor};
use crate::model::{InputId, InputMap};

/// Rows of a panel: a multiple of the panels of the host, to which they are added.
const PANEL: usize = 4 * gram::PANEL;

/// The panels of a Gram matrix, `[rows, in_features - first row]` each; none before the first rows.
type GramPanels = Vec<Tensor>;

/// A function that gets some rows of the upper triangle of a Gram matrix: the input, the first row, and the sums from this column on.
pub type TakeGram<'a> = dyn FnMut(InputId, usize, &[f32]) + Send + 'a;

/// Gram matrices of the four inputs of a layer.
#[derive(Debug, Default)]
pub struct DeviceGrams {
    /// Sums over blocks that are whole.
    total: GramSums,
    /// Sums over the samples of the current block so far.
    block: GramSums,
}

impl DeviceGrams {
    /// Memory of G and of a block for inputs with these numbers of columns.
    pub fn bytes(widths: &[usize]) -> ByteSize {
        let panels = widths.iter().map(|&width| elements(width));
        ByteSize::of(2 * panels.sum::<usize>(), size_of::<f32>())
    }

    /// Memory beside the sums while this many rows are added: two panels, and the rows once more.
    pub fn adding_bytes(widths: &[usize], tokens: usize) -> ByteSize {
        let adding = widths.iter().map(|&width| 2 * PANEL.min(width) * width + tokens * width);
        ByteSize::of(adding.max().unwrap_or(0), size_of::<f32>())
    }

    /// Begins a block, and forgets a block that has failed.
    pub fn begin_block(&mut self) {
        self.block = GramSums::default();
    }

    /// Memory of the sums over whole blocks.
    pub fn held(&self) -> ByteSize {
        let panels = self.total.panels.values().flatten();
        ByteSize::of(panels.map(Tensor::elem_count).sum(), size_of::<f32>())
    }

    /// Adds the next rows `[tokens, in_features]` of the current block, in f32.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    pub fn add(&mut self, point: InputId, rows: &Tensor) -> Result<()> {
        let width = rows.dim(1)?;
        let sums = &mut self.block.panels[point];
        // Both factors of every panel are rows of it.
        let turned = operators::contiguous(&rows.t()?)?;
        for (at, first) in (0..width).step_by(PANEL).enumerate() {
            let product = {
                let left = turned.narrow(0, first, PANEL.min(width - first))?;
                let right = turned.narrow(0, first, width - first)?;
                operators::matmul(&left, &right.t()?)?
            };
            match sums.get_mut(at) {
                Some(sum) => *sum = operators::plus(sum, &product)?,
                None => sums.push(product),
            }
        }
        Ok(())
    }

    /// Adds the current block, which is whole, to G. After a failure, the block keeps the panels that are not in G, and the next call
    /// adds them.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    pub fn keep_block(&mut self) -> Result<()> {
        for point in InputId::ALL {
            let (total, block) = (&mut self.total.panels[point], &mut self.block.panels[point]);
            if total.is_empty() {
                *total = std::mem::take(block);
            }
            while let Some(more) = block.last() {
                let sum = &mut total[block.len() - 1];
                *sum = operators::plus(sum, more)?;
                block.pop();
            }
        }
        Ok(())
    }

    /// The sums of the current block that are not in G.
    pub fn take_block(&mut self) -> GramSums {
        std::mem::take(&mut self.block)
    }

    /// The sums of the blocks that were kept.
    pub fn take(&mut self) -> GramSums {
        std::mem::take(&mut self.total)
    }
}

/// Sums for Gram matrices of the four inputs of a layer, on their device.
#[derive(Debug, Default)]
pub struct GramSums {
    panels: InputMap<GramPanels>,
}

impl GramSums {
    /// Hands the sums on, and frees the memory of each panel.
    ///
    /// # Errors
    /// Fails when the device has failed in the meantime.
    pub fn hand_on(self, take: &mut TakeGram<'_>) -> Result<()> {
        for (point, panels) in self.panels {
            for (at, panel) in panels.into_iter().enumerate() {
                let sums = operators::to_host(&panel)?;
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
    use candle_core::Device;

    use super::*;
    use crate::linalg::Products;
    use crate::linalg::gram::GramMatrix;

    const WIDTH: usize = 900;

    fn rows(sample: usize, tokens: usize) -> Vec<f32> {
        let at = (0..tokens * WIDTH).map(|at| ((at + sample * 17) * 7919 % 1013) as f32);
        at.map(|value| (value - 500.0) / 300.0).collect()
    }

    #[test]
    fn blocks_are_kept_or_handed_on_and_a_block_that_fails_does_not_count() -> Result<()> {
        let point = InputId::Down;
        let mut grams = DeviceGrams::default();
        let add = |grams: &mut DeviceGrams, rows: &[f32]| {
            let tokens = rows.len() / WIDTH;
            grams.add(point, &Tensor::from_slice(rows, (tokens, WIDTH), &Device::Cpu)?)
        };
        let mut expected = GramMatrix::new(WIDTH, Products::F32);
        let mut summed = GramMatrix::new(WIDTH, Products::F32);
        let hand_on = |sums: GramSums, summed: &mut GramMatrix| {
            sums.hand_on(&mut |at, first, sums| {
                assert_eq!(at, point);
                summed.add_upper(first, sums);
            })
        };
        for block in 0..5 {
            let rows = rows(block, 9);
            grams.begin_block();
            add(&mut grams, &rows[..4 * WIDTH])?;
            // The next block begins.
            if block == 1 {
                continue;
            }
            add(&mut grams, &rows[4 * WIDTH..])?;
            expected.add_rows(&rows);
            expected.end_block();
            match block {
                4 => {
                    // A failure after the last panel: it is in G, and the others are not.
                    let (total, block) =
                        (&mut grams.total.panels[point], &mut grams.block.panels[point]);
                    let more = block.pop().unwrap();
                    let last = total.last_mut().unwrap();
                    *last = operators::plus(last, &more)?;
                    hand_on(grams.take(), &mut summed)?;
                    hand_on(grams.take_block(), &mut summed)?;
                }
                _ => grams.keep_block()?,
            }
        }
        expected.finish();
        assert_eq!(grams.held(), ByteSize::ZERO);
        // Nothing is left.
        hand_on(grams.take(), &mut summed)?;
        hand_on(grams.take_block(), &mut summed)?;
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
