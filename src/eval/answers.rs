//! Answers of multiple-choice tasks, layer by layer, within the sweep: the log-likelihood of every continuation.
//!
//! Samples are packs of sequences (`tasks/pack.rs`). At the head only the rows of continuations have logits:
//! ln p(t) = l_t − max − ln Σ_v e^(l_v − max), with logits in f32 and sums in f64. A continuation is greedy if each of its tokens is the first
//! with the largest logit.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};
use rayon::prelude::*;

use super::named::NamedModel;
use super::next_token::NextToken;
use crate::linalg::tensor;
use crate::model::{DecoderLayer, Head, Segment};
use crate::run::phase::in_layer;
use crate::run::{Event, Phase};
use crate::runtime::{Compute, HiddenStates, Passenger, Reporter, SampleShare, Side};
use crate::tasks::{PackedTasks, Prediction, RequestScore, TaskPack};

/// A stream of packs, passed through the model.
pub struct TaskAnswers<'a> {
    side: Side,
    named: NamedModel,
    hidden: HiddenStates,
    packed: &'a PackedTasks,
    num_hidden_layers: usize,
    reporter: Reporter<'a>,
    scores: Option<Vec<RequestScore>>,
}

/// The sequences of the packs that a rank has.
///
/// # Errors
/// Fails where the packs cannot be read.
pub fn own_segments(packed: &PackedTasks, share: &SampleShare) -> Result<Vec<Arc<[Segment]>>> {
    let own = share.own().iter();
    own.map(|&pack| Ok(Arc::from(packed.pack(pack)?.segments))).collect()
}

impl<'a> TaskAnswers<'a> {
    /// `hidden` are the embedded packs of `packed`.
    pub fn new(
        side: Side,
        hidden: HiddenStates,
        packed: &'a PackedTasks,
        num_hidden_layers: usize,
        reporter: Reporter<'a>,
    ) -> Self {
        let (named, scores) = (NamedModel::Only, None);
        Self { side, named, hidden, packed, num_hidden_layers, reporter, scores }
    }

    /// The same packs, with the name that the run has for their model.
    #[must_use]
    pub fn named(self, named: NamedModel) -> Self {
        Self { named, ..self }
    }

    /// The states of the packs, between two layers.
    pub fn states(&mut self) -> &mut HiddenStates {
        &mut self.hidden
    }

    /// The version of the layers that the packs pass.
    pub fn of_side(&self) -> Side {
        self.side
    }

    /// The scores of all requests, after the sweep.
    pub fn scores(&self) -> Option<&[RequestScore]> {
        self.scores.as_deref()
    }

    /// Passes the packs of this rank through the head. Returns the scores of the requests in them.
    fn predict(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<Vec<NumberedScore>> {
        let own = self.hidden.share().own().to_vec();
        let mut scores = Vec::new();
        let (mut first, mut seen, mut scored) = (0, Vec::new(), 0);
        for (at, &pack) in own.iter().enumerate() {
            let of_pack = PackPredictions::of(self.packed.pack(pack)?);
            if scored > 0 && scored + of_pack.seen.len() > SCORED_AT_ONCE {
                self.predict_together(
                    head,
                    compute,
                    first,
                    std::mem::take(&mut seen),
                    &mut scores,
                )?;
                (first, scored) = (at, 0);
            }
            scored += of_pack.seen.len();
            seen.push(of_pack);
        }
        self.predict_together(head, compute, first, seen, &mut scores)?;
        Ok(scores)
    }

    /// Passes packs from the place `first` on through the head, and adds their scores.
    fn predict_together(
        &mut self,
        head: &Head,
        compute: &mut Compute<'_>,
        first: usize,
        mut seen: Vec<PackPredictions>,
        scores: &mut Vec<NumberedScore>,
    ) -> Result<()> {
        let events = self.reporter.events;
        let parts = head.chunks().len();
        let packs = seen.len();
        for (part, rows) in head.chunks().enumerate() {
            let chunk = head.chunk(rows.clone())?;
            for (at, of_pack) in seen.iter_mut().enumerate() {
                events.check()?;
                let state = self.hidden.get(first + at)?;
                let hidden_size = state.dim(1)?;
                let scored = tensor::with_slice(&state, |state| -> Vec<f32> {
                    let rows = of_pack.rows.iter();
                    rows.flat_map(|row| &state[row * hidden_size..][..hidden_size])
                        .copied()
                        .collect()
                })?;
                let scored = tensor::from_vec(scored, &[of_pack.rows.len(), hidden_size])?;
                chunk.logits(&scored, compute.context(), |first, logits| {
                    of_pack.see(first, logits, &rows);
                    Ok(())
                })?;
                let passed = first + (part * packs + at + 1) / parts;
                events.emit(Event::Progress { done: passed as u64 });
            }
        }
        seen.iter().try_for_each(|of_pack| of_pack.add_scores(scores))
    }
}

impl Passenger for TaskAnswers<'_> {
    fn side(&self) -> Side {
        self.side
    }

    fn layer(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        let (Reporter { clock, events }, hidden) = (self.reporter, &mut self.hidden);
        let phase = self.named.of("tasks");
        events.emit(Event::PhaseStarted {
            phase: in_layer(layer.index(), self.num_hidden_layers, phase),
            unit: "packs",
            steps: hidden.samples() as u64,
        });
        clock.measure(self.side.phase(), || {
            compute.forward(self.side.phase(), layer, hidden, &|pack| {
                events.emit(Event::Progress { done: pack as u64 + 1 });
            })
        })
    }

    fn finish(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<()> {
        let Reporter { clock, events } = self.reporter;
        let steps = self.hidden.samples() as u64;
        let phase = format!("head: {}", self.named.of("tasks"));
        events.emit(Event::PhaseStarted { phase, unit: "packs", steps });
        let own = clock.measure(Phase::Head, || self.predict(head, compute))?;
        let by_rank = match compute.ranks().is_alone() {
            // As JSON they take several times the memory.
            true => vec![own],
            false => compute.ranks().all_gather_values(&own)?,
        };
        let none = RequestScore { log_likelihood: 0.0, is_greedy: true };
        let mut scores = vec![none; self.packed.layout.requests];
        for (request, score) in by_rank.into_iter().flatten() {
            scores[request as usize] = score;
        }
        self.scores = Some(scores);
        // No later layer needs the packs.
        self.hidden.clear();
        Ok(())
    }
}

/// A request's number and its score.
type NumberedScore = (u32, RequestScore);

/// Scored tokens that the head sees together. With more of them, a head that is read in parts is read again.
pub const SCORED_AT_ONCE: usize = 1 << 15;

/// Bytes of a scored token while logits come.
pub const SCORING_BYTES: usize = size_of::<SeenPrediction>()
    + size_of::<(usize, usize)>()
    + size_of::<usize>()
    + size_of::<Prediction>();

/// A scored token after some of the vocabulary.
#[derive(Debug, Clone, Copy, Default)]
struct SeenPrediction {
    next: NextToken,
    /// The right token has the largest logit so far, and no earlier token has the same.
    is_top: bool,
}

/// The scored tokens of a pack.
struct PackPredictions {
    /// The rows with logits, ascending.
    rows: Vec<usize>,
    /// The place of each prediction's row among them, and its token.
    places: Vec<(usize, usize)>,
    seen: Vec<SeenPrediction>,
    predictions: Vec<Prediction>,
}

impl PackPredictions {
    fn of(pack: TaskPack) -> Self {
        let rows = pack.scored_rows();
        let place = |row: u32| rows.partition_point(|&other| other < row as usize);
        let places = pack.predictions.iter().map(|of| (place(of.row), of.token as usize)).collect();
        let seen = vec![SeenPrediction::default(); pack.predictions.len()];
        Self { places, seen, rows, predictions: pack.predictions }
    }

    /// Takes logits `[tokens, rows.len()]` of the rows from place `first` on.
    fn see(&mut self, first: usize, logits: &[f32], rows: &Range<usize>) {
        let width = rows.len().max(1);
        self.seen.par_iter_mut().zip(&self.places).for_each(|(seen, &(place, token))| {
            let Some(logits) =
                place.checked_sub(first).and_then(|at| logits.chunks_exact(width).nth(at))
            else {
                return;
            };
            let before = seen.next.largest;
            seen.next.see(logits, rows, token);
            if seen.next.largest > before {
                let top = logits.iter().position(|&logit| logit == seen.next.largest);
                seen.is_top = top.is_some_and(|top| rows.start + top == token);
            }
        });
    }

    /// Adds the scores of the requests, whose tokens follow each other.
    fn add_scores(&self, scores: &mut Vec<NumberedScore>) -> Result<()> {
        let mut tokens = self.predictions.iter().zip(&self.seen).peekable();
        while let Some((first, _)) = tokens.peek() {
            let request = first.request;
            let mut score = RequestScore { log_likelihood: 0.0, is_greedy: true };
            while let Some((_, seen)) = tokens.next_if(|(of, _)| of.request == request) {
                // Ids were checked against the embedding, which has as many rows as there are logits.
                let loss = seen.next.loss().context("a token is beyond the head's vocabulary")?;
                score.log_likelihood -= loss;
                score.is_greedy &= seen.is_top;
            }
            scores.push((request, score));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_may_have_several_tokens_and_the_first_of_equal_logits_is_greedy() {
        let prediction = |row, token, request| Prediction { row, token, request };
        let predictions = vec![prediction(7, 1, 4), prediction(7, 2, 5), prediction(3, 0, 6)];
        let pack = TaskPack { predictions, ..TaskPack::default() };
        // Row 3: p = (1/4, 3/4 …); row 7: tokens 1 and 2 have the same logit.
        let logits = [0.0, 3f32.ln(), -1e9, -1e9, 0.0, 2.0, 2.0, 0.0];
        for at_once in [1, 2, 4] {
            let mut seen = PackPredictions::of(pack.clone());
            assert_eq!(seen.rows, [3, 7]);
            for start in (0..4).step_by(at_once) {
                let rows = start..start + at_once;
                let part: Vec<f32> =
                    logits.chunks(4).flat_map(|row| row[rows.clone()].to_vec()).collect();
                seen.see(0, &part, &rows);
            }
            let mut scores = Vec::new();
            seen.add_scores(&mut scores).unwrap();
            let [(4, one), (5, two), (6, three)] = scores[..] else { panic!("{scores:?}") };
            assert_eq!([one.is_greedy, two.is_greedy, three.is_greedy], [true, false, false]);
            assert!((three.log_likelihood - 0.25f64.ln()).abs() < 1e-6, "f32 logits: {three:?}");
            assert_eq!(one.log_likelihood, two.log_likelihood);
        }
    }
}
