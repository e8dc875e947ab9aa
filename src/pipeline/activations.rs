//! Means of activations: how strongly each input column of a linear is driven. A merge weighs differences of weights with them.
//!
//! ```text
//! a_j² = (1/T) Σ_t x_tj²        m_j = (1/T) Σ_t |x_tj|        x [T, in_features], T the tokens of all samples
//! ```
//!
//! a_j² is the diagonal of the Hessian of ‖x·ΔWᵀ‖² per token, up to a factor 2 (LeCun et al. 1989, "Optimal brain damage"). m_j is what
//! AIM measures (Nobari et al. 2025, arXiv:2502.02421). Sums are f64, sample after sample in their order, and are rounded to f32 once. So
//! the means depend neither on threads nor on the device of a sample, and a sample that fails half-way counts for nothing.
//!
//! [`ActivationMeter`] is an editor that changes no layer. It keeps four inputs per layer: q, k and v share one, and so do gate and up.

use anyhow::{Context, Result};

use super::calibrate::Calibrator;
use super::output_error;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::columns::ColumnSums;
use crate::linalg::{Products, columns, permute};
use crate::model::{DecoderLayer, ModelConfig, Observation};
use crate::pruning::{MergedStatistics, SamplePart, Statistics, StatisticsKind};
use crate::run::Events;
use crate::runtime::{Clock, Compute, Editor, HiddenStates};

/// The kind that measures a_j² alone. GPUs send column sums instead of rows.
pub static MEANS_OF_SQUARES: ActivationSumsKind = ActivationSumsKind { has_magnitudes: false };

/// The kind that measures a_j² and m_j.
pub static MEANS_OF_SQUARES_AND_MAGNITUDES: ActivationSumsKind =
    ActivationSumsKind { has_magnitudes: true };

/// Sums of x², and of |x| if asked for.
#[derive(Debug)]
pub struct ActivationSumsKind {
    has_magnitudes: bool,
}

impl ActivationSumsKind {
    fn sums(&self) -> usize {
        1 + usize::from(self.has_magnitudes)
    }
}

impl StatisticsKind for ActivationSumsKind {
    fn bytes(&self, in_features: usize) -> ByteSize {
        // The sums of all samples, and those of one.
        ByteSize::of(in_features * 2 * self.sums(), size_of::<f64>())
    }

    fn begin(&self, in_features: usize, _products: Products) -> Statistics {
        Statistics::Merged(Box::new(ActivationSums {
            in_features,
            sums: vec![0.0; in_features * self.sums()],
        }))
    }
}

/// Sums over the samples so far: x² of every column, then |x| of every column if asked for.
struct ActivationSums {
    in_features: usize,
    sums: Vec<f64>,
}

impl MergedStatistics for ActivationSums {
    fn part(&self) -> Box<dyn SamplePart> {
        Box::new(SampleSums { in_features: self.in_features, sums: vec![0.0; self.sums.len()] })
    }

    fn merge(&mut self, numbers: &[f64]) {
        for (sum, number) in self.sums.iter_mut().zip(numbers) {
            *sum += number;
        }
    }

    fn permute(&mut self, order: &[usize]) {
        for sums in self.sums.chunks_exact_mut(self.in_features.max(1)) {
            permute::permute(sums, order);
        }
    }
}

impl ActivationSums {
    fn means(&self, tokens: u64) -> ColumnMeans {
        let mean = |sums: &[f64]| -> Vec<f32> {
            let means = sums.iter().map(|sum| (sum / tokens as f64) as f32);
            means.collect()
        };
        let (squares, magnitudes) = self.sums.split_at(self.in_features);
        ColumnMeans {
            squares: mean(squares),
            magnitudes: (!magnitudes.is_empty()).then(|| mean(magnitudes)),
        }
    }
}

/// The sums of one sample.
struct SampleSums {
    in_features: usize,
    sums: Vec<f64>,
}

impl SamplePart for SampleSums {
    fn add_rows(&mut self, rows: &[f32]) {
        let (squares, magnitudes) = self.sums.split_at_mut(self.in_features);
        columns::add_squares(rows, squares);
        if !magnitudes.is_empty() {
            columns::add_magnitudes(rows, magnitudes);
        }
    }

    fn takes_sums(&self) -> bool {
        // Sums of magnitudes are made of rows.
        self.sums.len() == self.in_features
    }

    fn add_sums(&mut self, sums: &ColumnSums<'_>) {
        columns::add_sums(&mut self.sums, sums.squares);
    }

    fn numbers(&self) -> &[f64] {
        &self.sums
    }
}

/// Means over all tokens, per input column.
#[derive(Debug, Clone, PartialEq)]
pub struct ColumnMeans {
    /// a_j², `[in_features]`.
    pub squares: Vec<f32>,
    /// m_j, `[in_features]`; `None` where it is not measured.
    pub magnitudes: Option<Vec<f32>>,
}

/// The receiver of measured layers.
pub trait ActivationJournal {
    /// Takes the means of the next layer, in the order of [`Observation::ALL`].
    ///
    /// # Errors
    /// Fails when the means cannot be stored.
    fn layer_measured(&mut self, means: [ColumnMeans; 4]) -> Result<()>;
}

/// Elements per row at the four observation points, in the order of [`Observation::ALL`].
pub fn widths(config: &ModelConfig) -> [usize; 4] {
    output_error::widths(config)
}

/// Measures the inputs of every layer. An editor by its place in the sweep; the layers stay as they are.
pub struct ActivationMeter<'a> {
    calibrator: Calibrator<'a>,
    journal: &'a mut dyn ActivationJournal,
    tokens: u64,
}

impl<'a> ActivationMeter<'a> {
    /// Measures with `samples`, the embedded ones.
    pub fn new(
        kind: &'static ActivationSumsKind,
        samples: HiddenStates,
        journal: &'a mut dyn ActivationJournal,
        config: &'a ModelConfig,
        clock: &'a Clock,
        events: &'a dyn Events,
    ) -> Self {
        let tokens = samples.samples() as u64 * samples.seqlen() as u64;
        Self {
            calibrator: Calibrator::of(Some((samples, kind)), config, clock, events),
            journal,
            tokens,
        }
    }
}

impl Editor for ActivationMeter<'_> {
    fn edit(&mut self, layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let statistics = self.calibrator.observe(&layer, &Observation::ALL, compute)?;
        let statistics = statistics.context("every layer is measured with samples")?;
        let mut means = Vec::with_capacity(Observation::ALL.len());
        for point in Observation::ALL {
            let sums = statistics.at(point).and_then(Statistics::downcast::<ActivationSums>);
            let of_point = sums.context("the kind is its own")?.means(self.tokens);
            check(&of_point, point, layer.index())?;
            means.push(of_point);
        }
        drop(statistics);
        let means = <[ColumnMeans; 4]>::try_from(means).expect("there are four points");
        self.journal.layer_measured(means)?;
        self.calibrator.events.check()?;
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
fn check(means: &ColumnMeans, point: Observation, layer: usize) -> Result<()> {
    let all = means.squares.iter().chain(means.magnitudes.iter().flatten());
    match all.clone().find(|mean| !mean.is_finite()) {
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

    fn merged(kind: &ActivationSumsKind) -> Box<dyn MergedStatistics> {
        match kind.begin(2, Products::F32) {
            Statistics::Merged(statistics) => statistics,
            Statistics::InPlace(_) => unreachable!(),
        }
    }

    #[test]
    fn means_are_over_tokens_of_all_samples() {
        let mut statistics = merged(&MEANS_OF_SQUARES_AND_MAGNITUDES);
        let mut sample = statistics.part();
        sample.add_rows(&[1.0, 0.0, -2.0, 0.5]);
        assert!(!sample.takes_sums(), "|x| needs rows");
        statistics.merge(sample.numbers());
        let mut sample = statistics.part();
        sample.add_rows(&[0.0, -0.5, 1.0, 1.0]);
        statistics.merge(sample.numbers());
        let statistics = Statistics::Merged(statistics);
        let sums = statistics.downcast::<ActivationSums>().unwrap();
        // Columns 1, -2, 0, 1 and 0, 0.5, -0.5, 1.
        let expected =
            ColumnMeans { squares: vec![6.0 / 4.0, 1.5 / 4.0], magnitudes: Some(vec![1.0, 0.5]) };
        assert_eq!(sums.means(4), expected);
    }

    #[test]
    fn a_gpu_sends_sums_where_squares_are_enough() {
        let mut statistics = merged(&MEANS_OF_SQUARES);
        let mut sample = statistics.part();
        assert!(sample.takes_sums());
        sample.add_sums(&ColumnSums { tokens: 2, squares: &[4.0, 8.0], values: &[2.0, 4.0] });
        statistics.merge(sample.numbers());
        let statistics = Statistics::Merged(statistics);
        let sums = statistics.downcast::<ActivationSums>().unwrap();
        let expected = ColumnMeans { squares: vec![2.0, 4.0], magnitudes: None };
        assert_eq!(sums.means(2), expected);
    }

    #[test]
    fn activations_that_are_not_finite_are_refused_with_their_layer() {
        let means = ColumnMeans { squares: vec![1.0], magnitudes: Some(vec![f32::INFINITY]) };
        let error = check(&means, Observation::OInput, 3).unwrap_err();
        assert!(error.to_string().contains("layer 3"), "{error}");
    }
}
