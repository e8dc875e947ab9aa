//! The calibration stream: samples that enter each layer as the pruned layers before it left them, and what is observed
//! of them inside it.

use anyhow::Result;

use super::output_error::{self, InputRows, SampleRows};
use crate::model::{
    DecoderLayer, Embedding, ModelConfig, Observation, Observer, Projection, observe::Need,
};
use crate::pruning::{ColumnSquares, SampleSquares};
use crate::run::{Event, Events, Phase};
use crate::runtime::{Compute, HiddenStates};

/// Fills a stream with the embeddings of its samples; `tokens` is `[samples, seqlen]`.
///
/// # Errors
/// Fails when the embedding or the spill file cannot be read or written.
pub fn embed(
    hidden: &mut HiddenStates,
    embedding: &Embedding<'_>,
    tokens: &[u32],
    seqlen: usize,
) -> Result<()> {
    for (sample, tokens) in tokens.chunks_exact(seqlen).enumerate() {
        hidden.put(sample, embedding.rows(tokens)?)?;
    }
    Ok(())
}

/// What is observed at the four observation points of one layer: mean sums of squares, and some rows as they are, for the output
/// error.
#[derive(Debug, Clone)]
pub struct LayerStatistics {
    points: [ColumnSquares; 4],
    rows: InputRows,
}

impl LayerStatistics {
    fn new(config: &ModelConfig, samples: usize, seqlen: usize) -> Self {
        let widths = output_error::widths(config);
        Self {
            points: widths.map(ColumnSquares::new),
            rows: InputRows::new(widths, samples, seqlen),
        }
    }

    /// s_j `[in_features]` of a projection's input.
    pub fn of(&self, projection: Projection) -> &[f32] {
        self.points[projection.observed_at() as usize].mean()
    }

    /// X `[tokens, in_features]` of a projection: a few of the rows behind [`LayerStatistics::of`].
    pub(super) fn rows(&self, projection: Projection) -> &[f32] {
        self.rows.of(projection)
    }

    /// Takes the next sample.
    fn add(&mut self, sample: SampleStatistics) {
        for (point, squares) in self.points.iter_mut().zip(&sample.points) {
            point.add_sample(squares);
        }
        self.rows.add_sample(sample.rows);
    }
}

/// What is observed of one sample. It counts only once it is whole: a pass that failed half-way leaves nothing behind.
struct SampleStatistics {
    points: [SampleSquares; 4],
    rows: SampleRows,
}

impl Observer for SampleStatistics {
    fn needs(&self, _point: Observation) -> Need {
        Need::Rows
    }

    fn observe(&mut self, point: Observation, rows: &[f32]) {
        self.points[point as usize].add_rows(rows);
        self.rows.add_rows(point, rows);
    }

    fn keeps(&self, _point: Observation) -> &[usize] {
        self.rows.chosen()
    }

    fn observe_sums(&mut self, point: Observation, squares: &[f32], kept: &[f32]) {
        self.points[point as usize].add_sums(squares);
        self.rows.add_chosen(point, kept);
    }
}

/// The samples on their way through the model.
pub struct CalibrationStream {
    hidden: HiddenStates,
    config: ModelConfig,
}

impl CalibrationStream {
    /// A stream whose states are embedded already.
    pub fn new(hidden: HiddenStates, config: ModelConfig) -> Self {
        Self { hidden, config }
    }

    /// Passes every sample through the dense layer, up to down's input, and returns what was observed. The samples stay
    /// where they are.
    ///
    /// # Errors
    /// Fails when a hidden state cannot be read, and when a device fails for another reason than lack of memory.
    pub fn capture(
        &mut self,
        layer: &DecoderLayer,
        compute: &mut Compute<'_>,
        events: &dyn Events,
    ) -> Result<LayerStatistics> {
        let (samples, seqlen) = (self.hidden.samples(), self.hidden.seqlen());
        let widths = output_error::widths(&self.config);
        let mut statistics = LayerStatistics::new(&self.config, samples, seqlen);
        compute.capture(
            layer,
            &mut self.hidden,
            &|sample| SampleStatistics {
                points: widths.map(SampleSquares::new),
                rows: SampleRows::new(widths, sample, samples, seqlen),
            },
            &mut |sample, observed| {
                statistics.add(observed);
                events.emit(Event::Progress {
                    done: sample as u64 + 1,
                });
            },
        )?;
        Ok(statistics)
    }

    /// Moves every sample through the pruned layer.
    ///
    /// # Errors
    /// As [`CalibrationStream::capture`], and when a hidden state cannot be written.
    pub fn propagate(
        &mut self,
        layer: &DecoderLayer,
        compute: &mut Compute<'_>,
        events: &dyn Events,
    ) -> Result<()> {
        compute.forward(Phase::Propagate, layer, &mut self.hidden, &|sample| {
            events.emit(Event::Progress {
                done: sample as u64 + 1,
            });
        })
    }

    /// Samples in the stream.
    pub fn samples(&self) -> usize {
        self.hidden.samples()
    }
}
