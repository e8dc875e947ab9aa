//! Calibration: samples that enter each layer as the pruned layers before it left them, and the observations made of them inside it.

use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use candle_core::DType;

use super::joined::{OwnSamples, Points, lock};
use super::output_error::{InputRows, SampleRows};
use crate::linalg::columns::ColumnSums;
use crate::linalg::tensor;
use crate::model::observe::{FromDevice, Observer};
use crate::model::{DecoderLayer, Embedding, InputId, InputMap, LinearId, ModelConfig};
use crate::pruning::{SamplePart, Statistics, StatisticsKind, Technique};
use crate::run::memory_settings::GramsHeld;
use crate::run::phase::in_layer;
use crate::run::{Event, Events, Phase};
use crate::runtime::blocks::SampleBlocks;
use crate::runtime::memory;
use crate::runtime::{Accumulation, Compute, GramsOnDevices, HiddenStates, Reporter, ResultOrder};

/// Fills a stream with the embeddings of its samples; `tokens` is `[samples, seqlen]`, the samples of all ranks.
///
/// # Errors
/// Fails when the embedding or the spill file cannot be read or written.
pub fn embed(
    hidden: &mut HiddenStates,
    embedding: &Embedding<'_>,
    tokens: &[u32],
    seqlen: usize,
) -> Result<()> {
    let mut rows = match hidden.is_on_device() && embedding.is_as_stored() {
        true => Some(embedding.room(seqlen)?),
        false => None,
    };
    let own = hidden.share().own().to_vec();
    for (at, sample) in own.into_iter().enumerate() {
        let tokens = &tokens[sample * seqlen..(sample + 1) * seqlen];
        let Some(rows) = &mut rows else {
            hidden.put(at, embedding.rows(tokens)?)?;
            continue;
        };
        embedding.read_rows(tokens, rows)?;
        hidden.put_stored(at, rows)?;
    }
    Ok(())
}

/// Observations of the inputs of a layer: the method's statistics, and some rows for the output error.
pub struct LayerStatistics {
    /// `None` where the input was not observed, or its statistics were released.
    points: InputMap<Option<Statistics>>,
    rows: InputRows,
}

impl LayerStatistics {
    /// The statistics of a linear's input, where it was observed.
    pub fn of(&self, id: LinearId) -> Option<&Statistics> {
        self.at(id.input())
    }

    /// The statistics of an input, where it was observed.
    pub(super) fn at(&self, point: InputId) -> Option<&Statistics> {
        self.points[point].as_ref()
    }

    /// Frees the statistics of an input.
    pub(super) fn release(&mut self, point: InputId) {
        let is_large = matches!(self.points[point], Some(Statistics::InPlace(_)));
        self.points[point] = None;
        if is_large {
            // Matrices of narrow inputs are blocks that glibc would keep while wider inputs are scored.
            memory::release_freed();
        }
    }

    /// Frees what methods have derived from the statistics of an input.
    pub(super) fn forget_derived(&self, point: InputId) {
        if let Some(statistics) = self.at(point) {
            statistics.forget_derived();
        }
    }

    /// Puts the columns of an observed input into a new order: `order[new] = old`.
    pub(super) fn permute(&mut self, point: InputId, order: &[usize]) {
        if let Some(statistics) = &mut self.points[point] {
            statistics.permute(order);
        }
        self.rows.permute(point, order);
    }

    /// X `[tokens, in_features]` of a linear: a few of the rows from which the statistics of [`LayerStatistics::of`] are made.
    pub(super) fn rows(&self, id: LinearId) -> &[f32] {
        self.rows.of(id)
    }
}

/// The share of a sample in the statistics of an input.
enum PointOfSample<'a> {
    /// Merged when the sample is whole.
    Part(Box<dyn SamplePart>),
    /// Added to statistics in place while the sample passes.
    InPlace(&'a Mutex<Statistics>),
    /// Added to statistics in place when the sample is whole: until then its rows wait. With `beside_gram`, a device keeps the rows.
    Rows { rows: Vec<f32>, beside_gram: Option<Box<dyn SamplePart>> },
    /// XᵀX stays on the device; the rest is merged when the sample is whole.
    BesideGram(Box<dyn SamplePart>),
    /// Not observed in this pass.
    Ignored,
}

/// The observations of a sample. A sample that passed half-way on a device is dropped, and counts for nothing.
struct SampleStatistics<'a> {
    points: InputMap<PointOfSample<'a>>,
    rows: SampleRows,
}

impl<'a> SampleStatistics<'a> {
    fn merged(points: &Points, rows: SampleRows) -> Self {
        let points = InputMap::new(|input| match &points[input] {
            None => PointOfSample::Ignored,
            Some(point) => match &*lock(point) {
                Statistics::Merged(statistics) => PointOfSample::Part(statistics.part()),
                Statistics::InPlace(_) => unreachable!("its samples are collected in place"),
            },
        });
        Self { points, rows }
    }

    /// Does not lock the statistics: an earlier sample may be adding its rows.
    fn in_place(
        points: &'a Points,
        turn: Accumulation,
        rows: SampleRows,
        beside_gram: &dyn Fn(InputId) -> Option<Box<dyn SamplePart>>,
    ) -> Self {
        let points = InputMap::new(|at| match (&points[at], turn) {
            (None, _) => PointOfSample::Ignored,
            (Some(point), Accumulation::Now) => PointOfSample::InPlace(point),
            (Some(_), Accumulation::Later) => {
                PointOfSample::Rows { rows: Vec::new(), beside_gram: beside_gram(at) }
            }
        });
        Self { points, rows }
    }

    /// Adds the sample to the statistics of all samples before it.
    fn finish(self, points: &Points) -> SampleRows {
        for (input, sample) in self.points {
            let Some(point) = &points[input] else {
                continue;
            };
            match (sample, &mut *lock(point)) {
                (PointOfSample::Part(part), Statistics::Merged(statistics)) => {
                    statistics.merge(part.numbers());
                }
                (PointOfSample::InPlace(_), Statistics::InPlace(statistics)) => {
                    statistics.end_sample();
                }
                (PointOfSample::Rows { rows, .. }, Statistics::InPlace(statistics)) => {
                    statistics.add_rows(&rows);
                    statistics.end_sample();
                }
                (PointOfSample::BesideGram(part), Statistics::InPlace(statistics)) => {
                    statistics.merge_beside_gram(part.numbers());
                }
                _ => unreachable!("a sample enters the way its statistics ask for"),
            }
        }
        self.rows
    }

    /// Keeps the sample for [`OwnSamples::join`].
    fn keep(self, points: &Points, own: &mut OwnSamples<'_>) {
        for (input, sample) in self.points {
            match (sample, &points[input]) {
                (PointOfSample::Part(part), _) => own.keep(input, part.numbers().to_vec()),
                (PointOfSample::InPlace(_), Some(point)) => {
                    if let Statistics::InPlace(statistics) = &mut *lock(point) {
                        own.keep(input, statistics.take_sample());
                    }
                }
                _ => {}
            }
        }
        own.keep_rows(self.rows);
    }
}

impl Observer for SampleStatistics<'_> {
    fn observe(&mut self, point: InputId, rows: &[f32]) {
        match &mut self.points[point] {
            PointOfSample::Part(part) => part.add_rows(rows),
            PointOfSample::InPlace(statistics) => {
                if let Statistics::InPlace(statistics) = &mut *lock(statistics) {
                    statistics.add_rows(rows);
                }
            }
            PointOfSample::Rows { rows: waiting, .. } => waiting.extend_from_slice(rows),
            PointOfSample::BesideGram(_) | PointOfSample::Ignored => {}
        }
        self.rows.add_rows(point, rows);
    }

    fn wants(&mut self, point: InputId) -> FromDevice<'_> {
        let chosen = self.rows.chosen();
        match &self.points[point] {
            PointOfSample::Part(part) if !part.takes_sums() => FromDevice::Rows,
            PointOfSample::InPlace(_) => FromDevice::Rows,
            PointOfSample::Rows { beside_gram, .. } if beside_gram.is_none() => FromDevice::Rows,
            PointOfSample::Rows { .. } | PointOfSample::BesideGram(_) => FromDevice::Gram(chosen),
            PointOfSample::Part(_) | PointOfSample::Ignored => FromDevice::Sums(chosen),
        }
    }

    fn observe_sums(&mut self, point: InputId, sums: &ColumnSums<'_>, kept: &[f32]) {
        let own = &mut self.points[point];
        if let PointOfSample::Rows { beside_gram, .. } = own
            && let Some(part) = beside_gram.take()
        {
            *own = PointOfSample::BesideGram(part);
        }
        if let PointOfSample::Part(part) | PointOfSample::BesideGram(part) = own {
            part.add_sums(sums);
        }
        self.rows.add_chosen(point, kept);
    }
}

/// The calibration samples: they are observed in each dense layer, and pass on through the pruned layer.
pub struct Calibrator<'a> {
    /// The samples and the kind of statistics made of them; `None` for methods without statistics, and after the last layer.
    stream: Option<(HiddenStates, &'static dyn StatisticsKind)>,
    config: &'a ModelConfig,
    pub(super) reporter: Reporter<'a>,
}

impl<'a> Calibrator<'a> {
    /// `samples` are the embedded samples; `None` where all layers with samples are finished, or the method needs no statistics.
    pub fn new(
        technique: &Technique,
        samples: Option<HiddenStates>,
        config: &'a ModelConfig,
        reporter: Reporter<'a>,
    ) -> Self {
        Self::of(samples.zip(technique.statistics()), config, reporter)
    }

    /// Collects statistics of this kind from these samples.
    pub fn of(
        stream: Option<(HiddenStates, &'static dyn StatisticsKind)>,
        config: &'a ModelConfig,
        reporter: Reporter<'a>,
    ) -> Self {
        Self { stream, config, reporter }
    }

    pub(super) fn config(&self) -> &'a ModelConfig {
        self.config
    }

    pub(super) fn has_samples(&self) -> bool {
        self.stream.is_some()
    }

    /// Returns whether a later layer needs the samples.
    pub(super) fn continues_after(&self, layer: &DecoderLayer) -> bool {
        self.has_samples() && layer.index() + 1 < self.config.num_hidden_layers
    }

    /// Passes every sample through the layer, up to down's input, and returns the observations of these inputs. The samples stay where
    /// they are.
    /// Fails when a hidden state cannot be read, and on a device error that is not lack of memory.
    pub(super) fn observe(
        &mut self,
        layer: &DecoderLayer,
        points: &[InputId],
        compute: &mut Compute<'_>,
    ) -> Result<Option<LayerStatistics>> {
        self.announce(layer, Phase::Calibrate);
        if !self.has_samples() {
            return Ok(None);
        }
        let clock = self.reporter.clock;
        clock.measure(Phase::Calibrate, || self.collect(layer, points, compute).map(Some))
    }

    /// Collects the statistics and the rows of all samples in a layer.
    fn collect(
        &mut self,
        layer: &DecoderLayer,
        observed: &[InputId],
        compute: &mut Compute<'_>,
    ) -> Result<LayerStatistics> {
        let (hidden, kind) = self.stream.as_mut().context("there are samples")?;
        let events = self.reporter.events;
        let (share, seqlen) = (hidden.share().clone(), hidden.seqlen());
        let samples = share.all();
        let ranks = compute.ranks().clone();
        let mut own = (!ranks.is_alone()).then(|| OwnSamples::new(&ranks, &share));
        let mut joining = Ok(());
        let widths = self.config.input_widths();
        let products = compute.workspace().product_context().products;
        let points = InputMap::new(|point| {
            let is_observed = observed.contains(&point);
            is_observed.then(|| Mutex::new(kind.begin(widths[point], products)))
        });
        let mut rows = InputRows::new(&widths, samples, seqlen);
        let blocks = SampleBlocks::new(samples);
        let order = match kind.is_in_place() {
            true => ResultOrder::Blocking,
            false => ResultOrder::OfSamples,
        };
        // Devices sum up the Gram matrices of the observed inputs where the plan has room for them there.
        let on_devices = compute.settings().grams == GramsHeld::Device;
        let beside_gram = |point: InputId| {
            let part = kind.part_beside_gram(widths[point]);
            part.filter(|_| on_devices)
        };
        let summed = observed.iter().filter(|point| beside_gram(**point).is_some());
        let summed: Vec<usize> = summed.map(|point| widths[*point]).collect();
        let mut take = |point: InputId, first: usize, sums: &[f32]| {
            if let Some(point) = &points[point]
                && let Statistics::InPlace(statistics) = &mut *lock(point)
            {
                statistics.add_gram(first, sums);
            }
        };
        compute.capture(
            layer,
            hidden,
            order,
            GramsOnDevices { widths: &summed, take: &mut take },
            &|sample, turn| {
                let rows = SampleRows::new(&widths, share.own()[sample], samples, seqlen);
                match order {
                    ResultOrder::Blocking => {
                        SampleStatistics::in_place(&points, turn, rows, &beside_gram)
                    }
                    _ => SampleStatistics::merged(&points, rows),
                }
            },
            &mut |sample, observed| {
                if let Some(own) = &mut own {
                    observed.keep(&points, own);
                    if blocks.ends_with(share.own()[sample]) && joining.is_ok() {
                        joining = own.end_block(&points);
                    }
                    return progress(events, sample);
                }
                rows.add_sample(observed.finish(&points));
                if blocks.ends_with(sample) {
                    points.values().flatten().for_each(|point| lock(point).end_block());
                }
                progress(events, sample);
            },
        )?;
        joining?;
        if let Some(own) = own {
            let new = |sample| SampleRows::new(&widths, sample, samples, seqlen);
            let all = own.join(&points, &new)?;
            all.into_iter().for_each(|sample| rows.add_sample(sample));
        }
        let points = points.map(|_, point| {
            let mut statistics = point?.into_inner().unwrap_or_else(PoisonError::into_inner);
            if let Statistics::InPlace(statistics) = &mut statistics {
                statistics.finish();
            }
            Some(statistics)
        });
        if kind.is_in_place() {
            // Sums of blocks and waiting rows of narrow inputs are blocks that glibc would keep while matrices are scored.
            memory::release_freed();
        }
        Ok(LayerStatistics { points, rows })
    }

    /// The median over all tokens of the squared length of the hidden state that enters the next pass.
    ///
    /// # Errors
    /// Fails without samples, and when a hidden state cannot be read.
    pub(super) fn median_square(&mut self) -> Result<f64> {
        let (hidden, _) = self.stream.as_mut().context("there are samples")?;
        let mut squares = Vec::with_capacity(hidden.samples() * hidden.seqlen());
        let width = self.config.hidden_size;
        for sample in 0..hidden.samples() {
            let state = hidden.get(sample)?;
            tensor::with_slice(&state, |values| {
                let tokens = values.chunks_exact(width.max(1));
                squares.extend(tokens.map(|token| {
                    let squares = token.iter().map(|&value| f64::from(value).powi(2));
                    squares.sum::<f64>()
                }));
            })?;
        }
        let middle = squares.len() / 2;
        let (_, median, _) = squares.select_nth_unstable_by(middle, f64::total_cmp);
        Ok(*median)
    }

    /// The first tokens of the first samples, at most as many as given, in f32: a stream of its own.
    ///
    /// # Errors
    /// Fails without samples, and when a hidden state cannot be read.
    pub(super) fn first_tokens(
        &mut self,
        (samples, tokens): (usize, usize),
    ) -> Result<HiddenStates> {
        let (hidden, _) = self.stream.as_mut().context("there are samples")?;
        let (samples, tokens) = (samples.min(hidden.samples()), tokens.min(hidden.seqlen()));
        let width = self.config.hidden_size;
        let mut first = HiddenStates::new(None, samples, [tokens, width], DType::F32)?;
        for sample in 0..samples {
            first.put(sample, hidden.get(sample)?.narrow(0, 0, tokens)?.contiguous()?)?;
        }
        Ok(first)
    }

    /// Moves every sample through the pruned layer. The samples end with the last layer.
    pub(super) fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        if !self.continues_after(layer) {
            self.stream = None;
        }
        self.announce(layer, Phase::Propagate);
        let Reporter { clock, events } = self.reporter;
        let Some((hidden, _)) = &mut self.stream else {
            return Ok(());
        };
        clock.measure(Phase::Propagate, || {
            compute.forward(Phase::Propagate, layer, hidden, &|sample| progress(events, sample))
        })
    }

    /// Moves every sample through a layer. The samples stay after the last layer, for [`Calibrator::into_samples`].
    pub(super) fn forward(
        &mut self,
        layer: &DecoderLayer,
        compute: &mut Compute<'_>,
    ) -> Result<()> {
        let (hidden, _) = self.stream.as_mut().context("there are samples")?;
        compute.forward(Phase::Propagate, layer, hidden, &|_| ())
    }

    /// The samples after the layers so far.
    pub(super) fn into_samples(self) -> Option<HiddenStates> {
        self.stream.map(|(samples, _)| samples)
    }

    fn announce(&self, layer: &DecoderLayer, phase: Phase) {
        if let Some((hidden, _)) = &self.stream {
            self.reporter.events.emit(Event::PhaseStarted {
                phase: in_layer(layer.index(), self.config.num_hidden_layers, phase),
                unit: "samples",
                steps: hidden.samples() as u64,
            });
        }
    }
}

fn progress(events: &dyn Events, sample: usize) {
    let done = sample as u64 + 1;
    events.emit(Event::Progress { done });
}
