//! The pass that decides the ratios of layers: samples through the dense model, before anything is pruned.

use anyhow::{Context, Result};

use super::opened::OpenedModel;
use super::outputs::Outputs;
use super::pass::{before_run, note_by_layer, settle_pass};
use super::resolved::Pruning;
use super::settled_run::SettledRun;
use super::streams::Streams;
use crate::bytes::ByteSize;
use crate::model::LinearId;
use crate::pipeline::Observed;
use crate::pipeline::allocate::{
    AllocationMeter, AllocationSettings, MeasuredLayers, followed_bytes,
};
use crate::pipeline::allocation::{
    Allocation, CANDIDATES, OUTLIERS, error_ratios, grid, owl_ratios,
};
use crate::pipeline::trial::Trial;
use crate::pruning::statistics::column_squares::ColumnSquaresKind;
use crate::run::Events;
use crate::run::allocation::{AllocationReport, TriedRatios};
use crate::runtime::HiddenStates;
use crate::settings::{Settings, SparsitySettings};

/// Gives the pruning part of a run its ratios: the ratios that an earlier process measured, or new ratios.
///
/// # Errors
/// Fails as [`ratios`].
pub(super) fn resolved(
    settings: &Settings,
    model: OpenedModel,
    pruning: Option<Pruning>,
    known: Option<AllocationReport>,
    events: &dyn Events,
) -> Result<(OpenedModel, Option<Pruning>)> {
    let (Some(sparsity), Some(of_run)) = (&settings.sparsity, &pruning) else {
        return Ok((model, pruning));
    };
    let (model, report) = match known {
        Some(report) => (model, report),
        None => ratios((settings, sparsity), model, of_run.targets.sparsity_ratio, events)?,
    };
    announce(&report, events);
    let measured = of_run.with_ratios(report, &sparsity.selection, &model.config)?;
    Ok((model, Some(measured)))
}

/// Measures the dense model, and returns it with the ratio of every layer.
///
/// # Errors
/// Fails where the pass does not fit, for layers that cannot be read, and for activations that are not finite.
pub(super) fn ratios(
    (settings, sparsity): (&Settings, &SparsitySettings),
    model: OpenedModel,
    ratio: f64,
    events: &dyn Events,
) -> Result<(OpenedModel, AllocationReport)> {
    let measuring = before_run(settings, false);
    let calibration = measuring.calibration.as_ref();
    let calibration = calibration.context("layers are measured with samples")?;
    let kept = kept_bytes(sparsity.allocate, &model, calibration.nsamples as usize);
    let observes = Observed { kind: Some(&ColumnSquaresKind), kept };
    let job = settle_pass(measuring, model, Some(observes), events)?;
    let allocation = sparsity.allocate;
    events.note(format!("measuring the layers for --allocate {}", allocation.name()));
    let mut streams = Streams::embed(&job, &Outputs::default(), events)?;
    let samples = streams.samples()?;
    let band = allocation.band(sparsity.ratio_band);
    let outliers = sparsity.owl_outliers.unwrap_or(OUTLIERS);
    let points = grid(ratio, band);
    let model = &job.model;
    let rule = AllocationSettings { allocation, ratio, outliers, points: points.clone() };
    let mut meter = AllocationMeter::new(rule, samples, &model.config, model.reporter(events));
    streams.sweep(&job, None, Some(&mut meter), events)?;
    let MeasuredLayers { curves, outliers, embedded } = meter.into_measured()?;
    let by_outliers = |band| owl_ratios(&outliers, ratio, band);
    let uniform = || vec![ratio; outliers.len()];
    let (ratios, tried) = match allocation {
        Allocation::Uniform => (uniform(), Vec::new()),
        Allocation::Owl => (by_outliers(band), Vec::new()),
        Allocation::Error => {
            let candidates = [
                (Allocation::Error, error_ratios(&curves, ratio, band)),
                (Allocation::Owl, by_outliers(Allocation::Owl.band(None))),
                (Allocation::Uniform, uniform()),
            ];
            let embedded = embedded.context("the tokens of the trial")?;
            try_out(&job, &mut streams, candidates, embedded, events)?
        }
    };
    let (points, measured) = match allocation {
        Allocation::Error => (points, curves),
        _ => (Vec::new(), outliers.iter().map(|&one| vec![one]).collect()),
    };
    let report =
        AllocationReport { rule: allocation.name().to_string(), points, measured, tried, ratios };
    drop(streams);
    let SettledRun { model, .. } = *job;
    Ok((model, report))
}

/// Bytes on top of a plain pass: a matrix and its pruned copy, and with `error` also the followed samples and a pruned copy of the layer.
fn kept_bytes(allocation: Allocation, model: &OpenedModel, samples: usize) -> ByteSize {
    let size = |id: LinearId| {
        let (rows, columns) = id.shape(&model.config);
        rows * columns
    };
    let sizes = || model.config.linears().map(size);
    let largest = sizes().max().unwrap_or_default();
    let matrices = ByteSize::of(2 * largest, model.dtype().bytes());
    match allocation {
        Allocation::Error => {
            let layer = ByteSize::of(sizes().sum(), model.dtype().bytes());
            matrices + followed_bytes(&model.config, samples, model.seqlen) + layer
        }
        Allocation::Uniform | Allocation::Owl => matrices,
    }
}

/// Tries the ratios of every candidate, and returns the ratios with the least loss; the first candidate's if no loss is finite.
///
/// # Errors
/// Fails when a layer, the head or a hidden state cannot be read.
fn try_out(
    job: &SettledRun,
    streams: &mut Streams<'_>,
    candidates: [(Allocation, Vec<f64>); CANDIDATES],
    embedded: HiddenStates,
    events: &dyn Events,
) -> Result<(Vec<f64>, Vec<TriedRatios>)> {
    let model = &job.model;
    let ratios = candidates.each_ref().map(|(_, ratios)| ratios.clone());
    let mut trial = Trial::new(ratios, embedded, &model.config, model.reporter(events))?;
    streams.sweep(job, None, Some(&mut trial), events)?;
    let samples = job.samples().context("samples to try")?;
    let tokens = (&samples.tokens[..], model.seqlen);
    let losses = trial.losses(&model.source, &model.config, tokens)?;
    let tried = candidates.iter().zip(&losses).map(|((rule, _), loss)| TriedRatios {
        rule: rule.name().to_string(),
        loss: loss.is_finite().then_some(*loss),
    });
    let tried = tried.collect();
    let rank = |loss: f64| {
        if loss.is_finite() { loss } else { f64::INFINITY }
    };
    let best = candidates.into_iter().zip(losses);
    let best = best.min_by(|(_, one), (_, other)| rank(*one).total_cmp(&rank(*other)));
    let ((_, ratios), _) = best.context("a candidate")?;
    Ok((ratios, tried))
}

/// Tells the ratios.
pub(super) fn announce(report: &AllocationReport, events: &dyn Events) {
    for tried in &report.tried {
        let loss = match tried.loss {
            Some(loss) => format!("{loss:.4} nat per token"),
            None => "no finite loss".to_string(),
        };
        events.note(format!("tried        {:<13}{loss}", tried.rule));
    }
    note_by_layer("ratios", &report.ratios, events);
}
