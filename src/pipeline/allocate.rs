//! The editor that measures what an allocation needs (`allocation.rs`), and changes nothing.

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use rayon::prelude::*;

use super::allocation::{Allocation, CANDIDATES, TRIED};
use super::calibrate::{Calibrator, LayerStatistics};
use super::output_error::DenseOutput;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::{StoredMatrix, Weight, tensor};
use crate::model::{DecoderLayer, InputId, LinearId, ModelConfig};
use crate::pruning::methods::wanda::{self, Wanda};
use crate::pruning::statistics::column_squares::ColumnSquaresKind;
use crate::pruning::{self, Pattern, Request, Statistics, Target};
use crate::run::Phase;
use crate::runtime::{Compute, Editor, HiddenStates, Reporter};

/// Samples whose errors are followed to the last layer, and their tokens at most.
const FOLLOWED: (usize, usize) = (4, 256);

/// Bytes of samples, at their maximum. While errors are followed, these are a stream per layer, the undisturbed stream and the samples of
/// the trial. Later these are the samples of the trial and a copy of them per candidate.
pub fn followed_bytes(config: &ModelConfig, samples: usize, seqlen: usize) -> ByteSize {
    let tokens = |(most, tokens): (usize, usize)| samples.min(most) * seqlen.min(tokens);
    let followed = (config.num_hidden_layers + 1) * tokens(FOLLOWED) + tokens(TRIED);
    let tried = (1 + CANDIDATES) * tokens(TRIED);
    ByteSize::of(followed.max(tried) * config.hidden_size, size_of::<f32>())
}

/// The measurements of all layers.
pub struct MeasuredLayers {
    /// The curve of every layer; empty for `owl`.
    pub curves: Vec<Vec<f64>>,
    /// D of every layer.
    pub outliers: Vec<f64>,
    /// The first tokens of the first samples, embedded, for a trial; `None` for `owl`.
    pub embedded: Option<HiddenStates>,
}

/// The rule of an allocation, with its numbers.
pub struct AllocationSettings {
    /// The rule.
    pub allocation: Allocation,
    /// S, the ratio of the whole model.
    pub ratio: f64,
    /// M, above which a score is an outlier: a multiple of the layer's mean.
    pub outliers: f64,
    /// The ratios of the curves, with S in the middle.
    pub points: Vec<f64>,
}

/// An editor that measures what an allocation needs, and changes nothing.
pub struct AllocationMeter<'a> {
    calibrator: Calibrator<'a>,
    settings: AllocationSettings,
    measured: MeasuredLayers,
    /// The undisturbed stream, then for each layer the stream that is disturbed in it; empty for `owl`.
    followed: Vec<HiddenStates>,
}

impl<'a> AllocationMeter<'a> {
    /// Measures with `samples`, which are embedded already.
    pub fn new(
        settings: AllocationSettings,
        samples: HiddenStates,
        config: &'a ModelConfig,
        reporter: Reporter<'a>,
    ) -> Self {
        let stream = Some((samples, &ColumnSquaresKind as _));
        Self {
            calibrator: Calibrator::of(stream, config, reporter),
            settings,
            measured: MeasuredLayers { curves: Vec::new(), outliers: Vec::new(), embedded: None },
            followed: Vec::new(),
        }
    }

    /// The measurements of all layers, after the sweep.
    ///
    /// # Errors
    /// Fails where a followed hidden state is not finite.
    pub fn into_measured(mut self) -> Result<MeasuredLayers> {
        if self.followed.is_empty() {
            return Ok(self.measured);
        }
        let mut undisturbed = self.followed.remove(0);
        let middle = self.settings.points.len() / 2; // S.
        let curves = self.measured.curves.iter_mut();
        for (curve, disturbed) in curves.zip(&mut self.followed) {
            let error = relative_error(&mut undisturbed, disturbed)?;
            let scale = match curve[middle] {
                positive if positive > 0.0 => error / positive,
                _ => 1.0,
            };
            curve.iter_mut().for_each(|value| *value *= scale);
        }
        Ok(self.measured)
    }

    /// Passes the followed streams through a layer, and begins the stream that is disturbed in it.
    fn follow(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
    ) -> Result<()> {
        if self.followed.is_empty() {
            self.measured.embedded = Some(self.calibrator.first_tokens(TRIED)?);
            self.followed.push(self.calibrator.first_tokens(FOLLOWED)?);
        }
        let mut disturbed = copy_of(&mut self.followed[0])?;
        let nothing = |_| ();
        let of_input = |id| statistics.of(id);
        with_pruned(layer, self.settings.ratio, &of_input, |layer| {
            compute.forward(Phase::Propagate, layer, &mut disturbed, &nothing)
        })?;
        for stream in &mut self.followed {
            compute.forward(Phase::Propagate, layer, stream, &nothing)?;
        }
        self.followed.push(disturbed);
        Ok(())
    }

    /// D of a layer.
    fn outliers(&self, layer: &mut DecoderLayer, statistics: &LayerStatistics) -> Result<f64> {
        let mut sum = (0.0, 0);
        for id in layer.linear_ids().collect::<Vec<_>>() {
            with_held(layer, id, |layer| {
                sum.0 += sum_over_scores(layer, id, statistics, f64::from)?;
                sum.1 += held(layer, id)?.elements();
                Ok(())
            })?;
        }
        let limit = (self.settings.outliers * (sum.0 / sum.1 as f64)) as f32;
        let mut above = 0.0;
        for id in layer.linear_ids().collect::<Vec<_>>() {
            with_held(layer, id, |layer| {
                let is_above = |score: f32| f64::from(u8::from(score > limit));
                above += sum_over_scores(layer, id, statistics, is_above)?;
                Ok(())
            })?;
        }
        Ok(100.0 * above / sum.1 as f64)
    }

    /// E_l at every point.
    fn curve(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
    ) -> Result<Vec<f64>> {
        // Attention, and the MLP: the errors, and the mean square of what they add to the stream.
        let points = self.settings.points.len();
        let mut parts = [(vec![0.0; points], 0.0), (vec![0.0; points], 0.0)];
        for id in layer.linear_ids().collect::<Vec<_>>() {
            let (errors, added) = &mut parts[usize::from(!id.is_attention())];
            with_held(layer, id, |layer| {
                let square = self.add_errors(layer, id, statistics, compute, errors)?;
                if matches!(id.input(), InputId::O | InputId::Down) {
                    *added += square;
                }
                Ok(())
            })?;
        }
        let before = self.calibrator.median_square()?;
        let stream = before + parts.iter().map(|(_, added)| added).sum::<f64>();
        let of_point = |point: usize| -> f64 {
            parts.iter().map(|(errors, added)| errors[point] * added / stream).sum()
        };
        Ok((0..points).map(of_point).collect())
    }

    /// Adds e_m² of a matrix, which is in memory, at every point; returns the mean square of its output.
    fn add_errors(
        &self,
        layer: &mut DecoderLayer,
        id: LinearId,
        statistics: &LayerStatistics,
        compute: &mut Compute<'_>,
        errors: &mut [f64],
    ) -> Result<f64> {
        let rows = statistics.rows(id);
        let dense = DenseOutput::of(layer, id, rows, compute)?;
        let weight = held(layer, id)?.clone();
        for (error, &ratio) in errors.iter_mut().zip(&self.settings.points) {
            let name = id.full_name(layer.index());
            let pruned = pruned(&name, &weight, statistics.of(id), ratio)?;
            *layer.linear_mut(id).weight_mut() = Weight::Held(pruned);
            let relative = dense.error_of(layer, compute)?;
            *error += relative.unwrap_or_default().powi(2);
        }
        let mean_square = dense.mean_square(weight.columns())?;
        *layer.linear_mut(id).weight_mut() = Weight::Held(weight);
        Ok(mean_square)
    }
}

/// Runs `work` with a layer whose matrices are pruned by Wanda, in memory, and puts the dense matrices back.
pub(super) fn with_pruned<'s>(
    layer: &mut DecoderLayer,
    ratio: f64,
    of_input: &dyn Fn(LinearId) -> Option<&'s Statistics>,
    work: impl FnOnce(&DecoderLayer) -> Result<()>,
) -> Result<()> {
    let mut dense = Vec::new();
    for id in layer.linear_ids().collect::<Vec<_>>() {
        let weight = layer.linear_mut(id).weight_mut();
        let at_rest = match weight {
            Weight::Held(_) | Weight::Compact(_) => None,
            Weight::AtRest(_) => weight.hold()?,
        };
        let name = id.full_name(layer.index());
        let pruned = pruned(&name, held(layer, id)?, of_input(id), ratio)?;
        let weight = layer.linear_mut(id).weight_mut();
        let whole = std::mem::replace(weight, Weight::Held(pruned));
        dense.push((id, at_rest.map_or(whole, Weight::AtRest)));
    }
    work(layer)?;
    for (id, weight) in dense {
        *layer.linear_mut(id).weight_mut() = weight;
    }
    Ok(())
}

/// A matrix pruned by Wanda.
fn pruned(
    name: &str,
    weight: &StoredMatrix,
    statistics: Option<&Statistics>,
    ratio: f64,
) -> Result<StoredMatrix> {
    let pattern = Pattern::Unstructured;
    let request = Request::new(name, statistics, Target { ratio, pattern });
    let mut weight = weight.clone();
    let mask = pruning::prune(&Wanda, &mut weight, &request)?;
    weight.zero_bits(mask.bits());
    Ok(weight)
}

/// A copy of a stream.
pub(super) fn copy_of(stream: &mut HiddenStates) -> Result<HiddenStates> {
    let (samples, seqlen) = (stream.samples(), stream.seqlen());
    let width = stream.get(0)?.dims()[1];
    let mut copy = HiddenStates::new(None, samples, [seqlen, width], DType::F32)?;
    for sample in 0..samples {
        // States are replaced, never changed in place.
        copy.put(sample, stream.get(sample)?)?;
    }
    Ok(copy)
}

/// The median over all tokens of ‖h' − h‖² / ‖h‖².
fn relative_error(undisturbed: &mut HiddenStates, disturbed: &mut HiddenStates) -> Result<f64> {
    let mut errors = Vec::new();
    for sample in 0..undisturbed.samples() {
        let (whole, other) = (undisturbed.get(sample)?, disturbed.get(sample)?);
        let width = whole.dims()[1].max(1);
        tensor::with_slice(&whole, |whole| {
            tensor::with_slice(&other, |other| {
                for (whole, other) in whole.chunks_exact(width).zip(other.chunks_exact(width)) {
                    let square = |value: f64| value * value;
                    let norm: f64 = whole.iter().map(|&value| square(f64::from(value))).sum();
                    let pairs = whole.iter().zip(other);
                    let gap: f64 = pairs.map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
                    errors.push(gap / norm);
                }
            })
        })??;
    }
    let middle = errors.len() / 2;
    let (_, median, _) = errors.select_nth_unstable_by(middle, f64::total_cmp);
    ensure!(median.is_finite(), "hidden states behind a pruned layer are not finite");
    Ok(*median)
}

/// Runs `work` while a matrix is in memory.
fn with_held(
    layer: &mut DecoderLayer,
    id: LinearId,
    work: impl FnOnce(&mut DecoderLayer) -> Result<()>,
) -> Result<()> {
    let at_rest = match layer.linear(id).weight() {
        Weight::Held(_) | Weight::Compact(_) => None,
        Weight::AtRest(_) => layer.linear_mut(id).weight_mut().hold()?,
    };
    work(layer)?;
    if let Some(at_rest) = at_rest {
        *layer.linear_mut(id).weight_mut() = Weight::AtRest(at_rest);
    }
    Ok(())
}

fn held(layer: &DecoderLayer, id: LinearId) -> Result<&StoredMatrix> {
    let weight = layer.linear(id).weight().held();
    weight.with_context(|| format!("`{}` is measured in memory", id.full_name(layer.index())))
}

/// Σ of a function of Wanda's scores of a matrix. The order of the sum is fixed.
fn sum_over_scores(
    layer: &DecoderLayer,
    id: LinearId,
    statistics: &LayerStatistics,
    of: impl Fn(f32) -> f64 + Sync,
) -> Result<f64> {
    let name = id.full_name(layer.index());
    let pattern = Pattern::Unstructured;
    let request = Request::new(&name, statistics.of(id), Target { ratio: 0.0, pattern });
    let norms = wanda::input_norms(&request)?;
    let weight = held(layer, id)?;
    let rows: Vec<f64> = (0..weight.rows())
        .into_par_iter()
        .map_init(
            || vec![0.0f32; weight.columns()],
            |scores, row| {
                weight.widen_rows(row, scores);
                scores.iter_mut().for_each(|value| *value = value.abs());
                wanda::score(scores, &norms);
                scores.iter().map(|&score| of(score)).sum()
            },
        )
        .collect();
    Ok(rows.iter().sum())
}

impl Editor for AllocationMeter<'_> {
    fn edit(&mut self, mut layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let observed = self.calibrator.observe(&layer, &InputId::ALL, compute)?;
        let statistics = observed.context("every layer is measured with samples")?;
        let outliers = self.outliers(&mut layer, &statistics)?;
        let mut curve = Vec::new();
        if self.settings.allocation == Allocation::Error {
            curve = self.curve(&mut layer, &statistics, compute)?;
            self.follow(&mut layer, &statistics, compute)?;
        }
        drop(statistics);
        self.calibrator.pass(&layer, compute)?;
        if !curve.iter().chain([&outliers]).all(|value| value.is_finite()) {
            return Err(Failure::new(format!(
                "layer {} cannot be given a ratio: its outputs are not finite",
                layer.index()
            ))
            .hint("check the weights of this model with prune inspect")
            .into());
        }
        self.measured.outliers.push(outliers);
        if self.settings.allocation == Allocation::Error {
            self.measured.curves.push(curve);
        }
        self.calibrator.reporter.events.check()?;
        Ok(layer)
    }

    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        self.calibrator.pass(layer, compute)
    }

    fn has_samples(&self) -> bool {
        self.calibrator.has_samples()
    }
}
