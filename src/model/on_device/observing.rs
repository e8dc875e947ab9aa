//! Observed inputs of a sample on their way from a device to the observer.
//!
//! Rows reach the observer at once. Column sums and chosen rows are one tensor per sample, which the host takes while the device computes
//! the next sample.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use super::gram::DeviceGrams;
use super::{CandleResult, Tiling, kernels, operators};
use crate::linalg::columns::ColumnSums;
use crate::model::InputId;
use crate::model::observe::{FromDevice, Observer};

/// An observer of a sample, the Gram matrices of all samples, and what the observer gets after the sample.
pub(super) struct Observing<'a> {
    observer: &'a mut dyn Observer,
    grams: &'a mut DeviceGrams,
    parts: Vec<SumsOfPart>,
    /// Positions of chosen rows on the device, by first position and number of the tokens.
    chosen: Vec<((usize, usize), Tensor)>,
}

/// Sums and chosen rows of some tokens at a point.
#[derive(Debug)]
struct SumsOfPart {
    point: InputId,
    tokens: usize,
    /// Σ x² and Σ x, `[2, in_features]` in f64.
    sums: Tensor,
    /// `[chosen, in_features]`
    kept: Option<Tensor>,
}

impl<'a> Observing<'a> {
    pub(super) fn new(observer: &'a mut dyn Observer, grams: &'a mut DeviceGrams) -> Self {
        Self { observer, grams, parts: Vec::new(), chosen: Vec::new() }
    }

    /// Takes from these rows what the observer wants: all rows, or sums and chosen rows, with or without XᵀX. Only the observation of all
    /// rows waits for the device.
    pub(super) fn add(
        &mut self,
        point: InputId,
        first: usize,
        rows: &Tensor,
        cut: &Tiling,
    ) -> Result<()> {
        let tokens = rows.dim(0)?;
        let pieces = (0..tokens).step_by(cut.mlp_tokens.max(1));
        let pieces = pieces.map(|at| rows.narrow(0, at, cut.mlp_tokens.clamp(1, tokens - at)));
        let (kept, has_gram) = match self.observer.wants(point) {
            FromDevice::Rows => {
                for piece in pieces {
                    self.observer.observe(point, &to_host(&piece?)?);
                }
                return Ok(());
            }
            FromDevice::Sums(kept) => (kept, false),
            FromDevice::Gram(kept) => (kept, true),
        };
        let kept = kept.iter().filter(|position| (first..first + tokens).contains(position));
        let kept: Vec<u32> = kept.map(|position| (position - first) as u32).collect();
        let kept = match kept.is_empty() {
            true => None,
            false => {
                let index = self.positions((first, tokens), kept, rows.device())?;
                Some(operators::rows_at(rows, &index)?)
            }
        };
        self.parts.push(SumsOfPart { point, tokens, sums: kernels::column_sums(rows)?, kept });
        if has_gram {
            for piece in pieces {
                self.grams.add(point, &operators::cast(&piece?, DType::F32)?)?;
            }
        }
        Ok(())
    }

    /// Positions of chosen rows on the device: the points share them.
    fn positions(
        &mut self,
        tokens: (usize, usize),
        positions: Vec<u32>,
        device: &Device,
    ) -> Result<Tensor> {
        if let Some((_, index)) = self.chosen.iter().find(|(of, _)| *of == tokens) {
            return Ok(index.clone());
        }
        let index = operators::upload(&positions, positions.len(), device)?;
        self.chosen.push((tokens, index.clone()));
        Ok(index)
    }

    pub(super) fn finish(self) -> Result<SampleSums> {
        let parts = self.parts.iter().map(|part| {
            let rows = part.kept.as_ref().map_or(0, Tensor::elem_count);
            (part.point, part.tokens, part.sums.elem_count() / 2, rows)
        });
        let sums = self.parts.iter().map(|part| part.sums.flatten_all());
        let kept = self.parts.iter().flat_map(|part| &part.kept).map(Tensor::flatten_all);
        let mut values = sums.collect::<CandleResult<Vec<_>>>()?;
        let kept = kept.collect::<CandleResult<Vec<_>>>()?;
        if !kept.is_empty() {
            values.push(operators::cast(&operators::cat(&kept, 0)?, DType::F64)?);
        }
        let values = if values.is_empty() { None } else { Some(operators::cat(&values, 0)?) };
        Ok(SampleSums { parts: parts.collect(), values, arriving: None })
    }
}

/// Values on their way from a device to the host: calls a function with them once they are there.
pub type ArrivingValues = Box<dyn FnOnce(&mut dyn FnMut(&[f64])) -> Result<()> + Send>;

/// Column sums and chosen rows of a sample, on their way from the device: meanwhile the device begins the next sample.
#[derive(Default)]
pub struct SampleSums {
    /// Point, tokens, in_features, and elements of chosen rows, in the order of the pass.
    parts: Vec<(InputId, usize, usize, usize)>,
    /// Σ x² and Σ x of each part, and then the chosen rows of each part, in f64.
    values: Option<Tensor>,
    arriving: Option<ArrivingValues>,
}

impl SampleSums {
    /// Lets a device send the values now, before it begins the next sample.
    ///
    /// # Errors
    /// Fails with the error of `send`, which may return `None` to leave the values where they are.
    pub fn sent_by(
        mut self,
        send: impl FnOnce(&Tensor) -> Result<Option<ArrivingValues>>,
    ) -> Result<Self> {
        if let Some(values) = &self.values {
            self.arriving = send(values)?;
            if self.arriving.is_some() {
                operators::sent(values);
            }
        }
        if self.arriving.is_some() {
            self.values = None;
        }
        Ok(self)
    }

    /// Waits for the values and hands sums and rows to the observer of the sample, in the order of the pass.
    ///
    /// # Errors
    /// Fails when the device has failed.
    pub fn show(self, observer: &mut dyn Observer) -> Result<()> {
        let mut show = |values: &[f64]| {
            let sums = self.parts.iter().map(|(_, _, width, _)| 2 * width).sum();
            let (mut values, mut kept) = values.split_at(sums);
            for &(point, tokens, width, chosen) in &self.parts {
                let (squares, rest) = values.split_at(width);
                let (sums, rest) = rest.split_at(width);
                let (rows, later) = kept.split_at(chosen);
                let rows: Vec<f32> = rows.iter().map(|&value| value as f32).collect();
                let sums = ColumnSums { tokens, squares, values: sums };
                observer.observe_sums(point, &sums, &rows);
                (values, kept) = (rest, later);
            }
        };
        if let Some(arriving) = self.arriving {
            return arriving(&mut show);
        }
        if let Some(values) = self.values {
            show(&operators::download::<f64>(&values)?);
        }
        Ok(())
    }
}

/// Some rows as f32 in host memory, converted there.
fn to_host(rows: &Tensor) -> Result<Vec<f32>> {
    // A copy of its own: a view would take the whole tensor along.
    Ok(operators::download(&operators::copy(rows)?)?)
}
