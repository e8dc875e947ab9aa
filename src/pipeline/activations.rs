//! Means of activations: how strongly each input column of a linear is driven. A merge weighs differences of weights with them.
//!
//! ```text
//! a_j² = (1/T) Σ_t x_tj²        x [T, in_features], T the tokens of all samples
//! ```
//!
//! a_j² is the diagonal of the Hessian of ‖x·ΔWᵀ‖² per token, up to a factor 2 (LeCun et al. 1989, "Optimal brain damage"). Sums are f64,
//! sample after sample in their order, and are rounded to f32 once. So the means depend neither on threads nor on the device of a sample,
//! and a sample that fails half-way counts for nothing.
//!
//! [`ActivationMeter`] is an editor that changes no layer. It keeps the means of four inputs per layer: q, k and v have
//! the same input, and so do gate and up.

use anyhow::{Context, Result};

use super::calibrate::Calibrator;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::{Products, columns, permute};
use crate::model::{DecoderLayer, InputId, InputMap, ModelConfig};
use crate::pruning::statistics::column_squares::SampleSquares;
use crate::pruning::{MergedStatistics, SamplePart, Statistics, StatisticsKind};
use crate::runtime::{Compute, Editor, HiddenStates, Reporter};

/// Sums of x². GPUs send column sums instead of rows.
#[derive(Debug)]
pub struct SquareSumsKind;

impl StatisticsKind for SquareSumsKind {
    fn bytes(&self, in_features: usize) -> ByteSize {
        // The sums of all samples, and the sums of the current sample.
        ByteSize::of(in_features * 2, size_of::<f64>())
    }

    fn begin(&self, in_features: usize, _products: Products) -> Statistics {
        Statistics::Merged(Box::new(SquareSums(vec![0.0; in_features])))
    }
}

/// Σ x² of every column, over the samples so far.
struct SquareSums(Vec<f64>);

impl MergedStatistics for SquareSums {
    fn part(&self) -> Box<dyn SamplePart> {
        Box::new(SampleSquares::new(self.0.len()))
    }

    fn merge(&mut self, numbers: &[f64]) {
        columns::add_sums(&mut self.0, numbers);
    }

    fn permute(&mut self, order: &[usize]) {
        permute::permute(&mut self.0, order);
    }
}

impl SquareSums {
    fn means(&self, tokens: u64) -> Vec<f32> {
        self.0.iter().map(|sum| (sum / tokens as f64) as f32).collect()
    }
}

/// a_j² of the inputs of a layer, each `[in_features]`.
pub type LayerSquares = InputMap<Vec<f32>>;

/// The receiver of measured layers.
pub trait ActivationJournal {
    /// Takes the means of the next layer.
    ///
    /// # Errors
    /// Fails when the means cannot be stored.
    fn layer_measured(&mut self, means: LayerSquares) -> Result<()>;
}

/// Measures the inputs of every layer. It takes the editor's place in the sweep, but leaves the layers as they are.
pub struct ActivationMeter<'a> {
    calibrator: Calibrator<'a>,
    journal: &'a mut dyn ActivationJournal,
    tokens: u64,
}

impl<'a> ActivationMeter<'a> {
    /// Measures with `samples`, which are embedded already.
    pub fn new(
        samples: HiddenStates,
        journal: &'a mut dyn ActivationJournal,
        config: &'a ModelConfig,
        reporter: Reporter<'a>,
    ) -> Self {
        let tokens = samples.samples() as u64 * samples.seqlen() as u64;
        Self {
            calibrator: Calibrator::of(Some((samples, &SquareSumsKind)), config, reporter),
            journal,
            tokens,
        }
    }
}

impl Editor for ActivationMeter<'_> {
    fn edit(&mut self, layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let statistics = self.calibrator.observe(&layer, &InputId::ALL, compute)?;
        let statistics = statistics.context("every layer is measured with samples")?;
        let mut means = LayerSquares::default();
        for point in InputId::ALL {
            let sums = statistics.at(point).and_then(Statistics::downcast::<SquareSums>);
            let of_point = sums.context("the kind is its own")?.means(self.tokens);
            check(&of_point, point, layer.index())?;
            means[point] = of_point;
        }
        drop(statistics);
        self.journal.layer_measured(means)?;
        self.calibrator.reporter.events.check()?;
        self.calibrator.pass(&layer, compute)?;
        Ok(layer)
    }

    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        self.calibrator.pass(layer, compute)
    }

    fn has_samples(&self) -> bool {
        self.calibrator.has_samples()
    }
}

/// Refuses means that are not finite.
fn check(means: &[f32], point: InputId, layer: usize) -> Result<()> {
    match means.iter().find(|mean| !mean.is_finite()) {
        None => Ok(()),
        Some(mean) => Err(Failure::new(format!("the activations of layer {layer} are not finite"))
            .detail(format!("a mean at {point:?} is {mean}"))
            .hint("check the weights of this model with prune inspect")
            .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::columns::ColumnSums;

    fn begun() -> Box<dyn MergedStatistics> {
        match SquareSumsKind.begin(2, Products::F32) {
            Statistics::Merged(statistics) => statistics,
            Statistics::InPlace(_) => unreachable!(),
        }
    }

    fn means(statistics: Box<dyn MergedStatistics>, tokens: u64) -> Vec<f32> {
        let statistics = Statistics::Merged(statistics);
        statistics.downcast::<SquareSums>().unwrap().means(tokens)
    }

    #[test]
    fn means_are_over_tokens_of_all_samples() {
        let mut statistics = begun();
        for rows in [[1.0, 0.0, -2.0, 0.5], [0.0, -0.5, 1.0, 1.0]] {
            let mut sample = statistics.part();
            sample.add_rows(&rows);
            statistics.merge(sample.numbers());
        }
        // Columns 1, -2, 0, 1 and 0, 0.5, -0.5, 1.
        assert_eq!(means(statistics, 4), [6.0 / 4.0, 1.5 / 4.0]);
    }

    #[test]
    fn a_gpu_sends_sums() {
        let mut statistics = begun();
        let mut sample = statistics.part();
        assert!(sample.takes_sums());
        sample.add_sums(&ColumnSums { tokens: 2, squares: &[4.0, 8.0], values: &[2.0, 4.0] });
        statistics.merge(sample.numbers());
        assert_eq!(means(statistics, 2), [2.0, 4.0]);
    }

    #[test]
    fn activations_that_are_not_finite_are_refused_with_their_layer() {
        let error = check(&[1.0, f32::INFINITY], InputId::O, 3).unwrap_err();
        assert!(error.to_string().contains("layer 3"), "{error}");
    }
}
