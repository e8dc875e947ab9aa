//! The editor that makes layers narrower: observe the dense layer → choose channels → gather, refit and write → pass the samples on.
//!
//! The inputs of o and down are observed in the dense layer, and the samples enter it as the narrower layers before it left them.
//! `pruning/width.rs` has the formulas. At most a single narrower layer is in memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use anyhow::{Context, Result};

use super::calibrate::{Calibrator, LayerStatistics};
use crate::bytes::ByteSize;
use crate::checkpoint::LayoutWriter;
use crate::linalg::{Linear, StoredDtype, StoredMatrix, Weight};
use crate::model::{DecoderLayer, InputId, LinearId, LinearRole, ModelConfig};
use crate::pruning::statistics::input_gram::InputGramKind;
use crate::pruning::width::{
    channel_scores, channels_of, gather_columns, gather_rows, highest, refit_bytes, refit_columns,
    sums_of_groups,
};
use crate::pruning::{InputGram, Statistics, StatisticsKind};
use crate::run::Phase;
use crate::run::memory_settings::StatisticsHeld;
use crate::runtime::{Compute, Editor, HiddenStates, Reporter};

/// The largest number that the MLP channels of a narrower model are a multiple of: what GPUs multiply fast.
const MULTIPLE: usize = 64;

/// The number that the MLP channels of a narrower model are a multiple of: the largest power of two up to 64 that divides the source's
/// and is at most a sixteenth of it, so that small models have steps, too.
pub fn multiple_of(intermediate_size: usize) -> usize {
    let dividing = 1 << intermediate_size.trailing_zeros().min(usize::BITS - 2);
    let sixteenth = 1 << (intermediate_size / 16).max(1).ilog2();
    MULTIPLE.min(dividing).min(sixteenth)
}

/// The number of `units` that stay when `share` of them goes: the nearest multiple of `multiple`, and at least `multiple`.
pub fn units_left(units: usize, share: f64, multiple: usize) -> usize {
    let steps = units / multiple.max(1);
    let left = (steps as f64 * (1.0 - share)).round() as usize;
    left.clamp(1, steps.max(1)) * multiple
}

/// The kind of statistics of this pass.
pub const STATISTICS: &dyn StatisticsKind = &InputGramKind;

/// Bytes of the pass beside the statistics: a narrower layer, and the refit of its largest matrix.
pub fn working_bytes(of: &ModelConfig, to: &ModelConfig, dtype: StoredDtype) -> ByteSize {
    let layer = ByteSize::of(to.layer_weights(), dtype.bytes());
    let refits = [InputId::O, InputId::Down]
        .map(|input| refit_bytes(of.input_widths()[input], to.input_widths()[input]));
    layer + refits[0].max(refits[1])
}

/// The channels that stay in a layer.
struct Channels {
    /// The key/value heads that stay.
    heads: Vec<usize>,
    /// The channels of o's input that stay.
    of_o: Vec<usize>,
    /// The channels of down's input that stay.
    of_down: Vec<usize>,
}

/// Facts of the narrower layers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Narrowed {
    /// The key/value heads that stay, by layer.
    pub heads: Vec<Vec<usize>>,
    /// The part of the scores that was dropped, by layer: of o's input, and of down's.
    pub lost: Vec<[f64; 2]>,
}

/// Makes layers narrower.
pub struct Narrower<'a> {
    calibrator: Calibrator<'a>,
    /// The shapes before and after.
    of: &'a ModelConfig,
    to: &'a ModelConfig,
    refits: bool,
    /// The writer of the matrices whose shapes change; `None` where only scores are wanted.
    writer: Option<&'a LayoutWriter>,
    narrowed: Narrowed,
}

impl<'a> Narrower<'a> {
    /// Makes layers narrower, from the shape `of` to the shape `to`, with `samples`, which are embedded already.
    pub fn new(
        samples: HiddenStates,
        (of, to): (&'a ModelConfig, &'a ModelConfig),
        writer: Option<&'a LayoutWriter>,
        reporter: Reporter<'a>,
    ) -> Self {
        Self {
            calibrator: Calibrator::of(Some((samples, STATISTICS)), of, reporter),
            of,
            to,
            refits: true,
            writer,
            narrowed: Narrowed::default(),
        }
    }

    /// Gathers the kept columns as they are, in place of a refit.
    #[must_use]
    pub fn without_refit(self) -> Self {
        Self { refits: false, ..self }
    }

    /// The facts, after the sweep.
    pub fn into_narrowed(self) -> Narrowed {
        self.narrowed
    }

    /// Chooses the channels of an input, and narrows the linear that reads it. Returns the linear, its channels and its groups.
    fn narrow_input(
        &self,
        layer: &mut DecoderLayer,
        id: LinearId,
        statistics: &LayerStatistics,
    ) -> Result<InputOf> {
        let statistics = statistics.of(id).context("its input was observed")?;
        let gram = Statistics::downcast::<InputGram>(statistics);
        let gram = gram.context("these statistics are Gram matrices")?;
        let name = id.full_name(layer.index());
        let variance = gram.columns().variance_of_all();
        let heads = self.of.heads();
        let (group, left) = match id.input() {
            InputId::O => {
                let queries = heads.num_heads / heads.num_key_value_heads;
                (queries * heads.head_dim, self.to.num_key_value_heads)
            }
            _ => (1, self.to.intermediate_size),
        };
        with_held(layer, id, |linear, weight| {
            let scores = channel_scores(weight, &variance, &name)?;
            let groups = highest(&sums_of_groups(&scores, group), left);
            let channels = channels_of(&groups, group);
            let total: f64 = scores.iter().sum();
            let kept: f64 = channels.iter().map(|&channel| scores[channel]).sum();
            let narrower = match channels.len() == weight.columns() {
                true => weight.clone(),
                false if self.refits => refit_columns(weight, gram, &channels, &name)?,
                false => gather_columns(weight, &channels)?,
            };
            Ok(InputOf {
                linear: Linear::new(narrower, linear.bias().map(<[f32]>::to_vec)).reused(),
                groups,
                channels,
                lost: if total > 0.0 { 1.0 - kept / total } else { 0.0 },
            })
        })
    }

    /// Keeps the outputs of a linear that the kept channels read.
    fn narrow_outputs(
        &self,
        layer: &mut DecoderLayer,
        id: LinearId,
        channels: &Channels,
    ) -> Result<Linear> {
        let of_keys = channels_of(&channels.heads, self.of.head_dim);
        let mut rows = Vec::new();
        for &role in id.roles() {
            let kept = match role {
                LinearRole::Q => &channels.of_o,
                LinearRole::K | LinearRole::V => &of_keys,
                _ => &channels.of_down,
            };
            let (_, own) = layer.spec().part(role);
            rows.extend(kept.iter().map(|row| own.start + row));
        }
        with_held(layer, id, |linear, weight| {
            let bias = linear.bias();
            let bias = bias.map(|bias| rows.iter().map(|&row| bias[row]).collect());
            Ok(Linear::new(gather_rows(weight, &rows)?, bias).reused())
        })
    }

    /// Observes the layer and makes it narrower.
    fn narrow(
        &mut self,
        layer: &mut DecoderLayer,
        compute: &mut Compute<'_>,
    ) -> Result<DecoderLayer> {
        let [down, o] = [LinearRole::Down, LinearRole::O].map(|role| layer.spec().part(role).0);
        let inputs = [down, o];
        let passes: Vec<Vec<LinearId>> = match compute.settings().statistics {
            StatisticsHeld::Input => inputs.map(|one| vec![one]).into(),
            StatisticsHeld::Layer => vec![inputs.into()],
        };
        let mut found = BTreeMap::new();
        for ids in passes {
            let points: Vec<InputId> = ids.iter().map(|one| one.input()).collect();
            let statistics = self.calibrator.observe(layer, &points, compute)?;
            let mut statistics = statistics.context("a model is made narrower with samples")?;
            for id in ids {
                let clock = self.calibrator.reporter.clock;
                let input =
                    clock.measure(Phase::Score, || self.narrow_input(layer, id, &statistics))?;
                found.insert(id, input);
                statistics.release(id.input());
            }
        }
        let mut take = |id| found.remove(&id).context("both were observed");
        let (of_o, of_down) = (take(o)?, take(down)?);
        let channels =
            Channels { heads: of_o.groups, of_o: of_o.channels, of_down: of_down.channels };
        let mut linears = BTreeMap::from([(o, of_o.linear), (down, of_down.linear)]);
        for id in layer.linear_ids().collect::<Vec<_>>() {
            if let Entry::Vacant(missing) = linears.entry(id) {
                missing.insert(self.narrow_outputs(layer, id, &channels)?);
            }
        }
        self.narrowed.heads.push(channels.heads);
        self.narrowed.lost.push([of_o.lost, of_down.lost]);
        Ok(layer.with_linears(self.to, linears))
    }

    /// Writes the tensors whose shapes changed.
    fn write(&self, layer: &DecoderLayer) -> Result<()> {
        let Some(writer) = self.writer else {
            return Ok(());
        };
        let write = |name: &str, bytes: &[u8]| -> Result<()> {
            let mut stream = writer.begin(name)?;
            stream.write(bytes)?;
            stream.finish()
        };
        for id in layer.linear_ids() {
            let linear = layer.linear(id);
            let name = id.tensor_name(layer.index());
            if writer.layout().entry(&name).is_some() {
                let weight = linear.weight().held();
                let weight = weight.with_context(|| format!("`{name}` is written from memory"))?;
                write(&name, weight.as_bytes())?;
            }
            let name = id.bias_name(layer.index());
            if let Some((bias, entry)) = linear.bias().zip(writer.layout().entry(&name)) {
                let dtype = crate::model::stored_dtype(entry)?;
                let stored = StoredMatrix::from_f32(dtype, 1, bias.len(), bias);
                write(&name, stored.as_bytes())?;
            }
        }
        writer.sync().map(drop)
    }
}

/// A linear whose input became narrower.
struct InputOf {
    linear: Linear,
    groups: Vec<usize>,
    channels: Vec<usize>,
    lost: f64,
}

impl Editor for Narrower<'_> {
    fn edit(&mut self, mut layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let narrower = self.narrow(&mut layer, compute)?;
        drop(layer);
        let Reporter { clock, events } = self.calibrator.reporter;
        clock.measure(Phase::Write, || self.write(&narrower))?;
        events.check()?;
        self.calibrator.pass(&narrower, compute)?;
        Ok(narrower)
    }

    fn pass(&mut self, _layer: &DecoderLayer, _compute: &mut Compute<'_>) -> Result<()> {
        Err(anyhow::anyhow!("layers are made narrower in one sweep"))
    }

    fn has_samples(&self) -> bool {
        true
    }
}

/// Calls `body` with a linear and its weight in memory. A weight at rest returns to rest.
fn with_held<T>(
    layer: &mut DecoderLayer,
    id: LinearId,
    body: impl FnOnce(&Linear, &StoredMatrix) -> Result<T>,
) -> Result<T> {
    let at_rest = match layer.linear(id).weight() {
        Weight::Held(_) | Weight::Compact(_) => None,
        Weight::AtRest(_) => layer.linear_mut(id).weight_mut().hold()?,
    };
    let linear = layer.linear(id);
    let weight = linear.weight().held().context("it is in memory")?;
    let value = body(linear, weight);
    if let Some(at_rest) = at_rest {
        *layer.linear_mut(id).weight_mut() = Weight::AtRest(at_rest);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_stay_a_multiple() {
        assert_eq!([14336, 172, 96, 7].map(multiple_of), [64, 4, 4, 1]);
        assert_eq!(units_left(172, 0.2, 4), 136); // 34.4 of 43 fours
        assert_eq!(units_left(14336, 0.2, 64), 11456); // 179.2 of 224
        assert_eq!(units_left(4, 0.2, 1), 3);
        assert_eq!(units_left(4, 0.99, 1), 1);
        assert_eq!(units_left(8, 0.01, 1), 8);
    }
}
