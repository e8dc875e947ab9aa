//! Memory of a GPU that computes decoder layers: `model/on_device/tiling.rs` has what a piece of work takes.
//!
//! ```text
//! calibrate, propagate, evaluate   context + tables + this layer's weights, and the next layer's where it is read ahead + a
//!                                  sample on its way + all hidden states where they stay here; in calibrate with Gram matrices
//! output error                     the same without the sample, with some rows and their products before and after pruning
//! forward, backward                context + tables + this layer's weights + a sample on its way; backwards with gradients
//! head                             context + tables + the head's rows + a window's logits + all hidden states
//! ```
//!
//! Methods other than Wanda score weights on the host, where they are stored.

use super::super::output_error;
use super::shape::{RunShape, evaluation_phases, part};
use crate::bytes::ByteSize;
use crate::model::Rotary;
use crate::model::on_device::{CONTEXT, DeviceGrams, Tiling};
use crate::placement::{ExecutionOption, PhaseMemory, Processors};
use crate::run::plan::{MemoryPart, PartKind};
use crate::run::{HiddenStatesStorage, MemorySettings, Phase};
use crate::runtime::blocks::SampleBlocks;

/// Hidden states that stay on a GPU; none where they are elsewhere. GPUs get the blocks of samples of each stream in turn.
fn states(run: &RunShape<'_>, option: &ExecutionOption) -> Vec<MemoryPart> {
    let (HiddenStatesStorage::Device, Processors::Gpus(gpus)) = (option.storage, option.processors)
    else {
        return Vec::new();
    };
    let streams = run.sides.len() * run.runs();
    let most = |samples: usize| SampleBlocks::new(samples).most_of(gpus);
    let states = most(run.samples) + streams * most(run.windows);
    let state = run.state(run.gpu_dtype.bytes());
    vec![part(PartKind::HiddenStates, ByteSize(state.0.saturating_mul(states as u64)))]
}

/// Rows of a sample that are kept for output errors: in the dtype of the arithmetic and joined, in f64 and joined with the sums, and in the
/// tensor of the sample before.
fn chosen_rows(run: &RunShape<'_>) -> ByteSize {
    let rows = output_error::tokens(run.samples, run.seqlen).div_ceil(run.samples.max(1));
    let columns: usize = run.config.input_widths().values().sum();
    ByteSize::of(rows * columns, 2 * run.gpu_dtype.bytes() + 3 * size_of::<f64>())
}

/// Memory of every phase but the head's.
pub(super) fn layers(run: &RunShape<'_>, option: &ExecutionOption) -> Vec<PhaseMemory> {
    let settings = &option.settings;
    let (config, element) = (run.config, run.gpu_dtype.bytes());
    let cut = Tiling::of(settings, config).with_indices_of_32_bits(config, run.seqlen);
    let layer = Tiling::layer_bytes(config, element);
    let next = match settings.prefetch {
        true => layer,
        false => ByteSize::ZERO,
    };
    let cast = Tiling::cast_bytes(config, run.dtypes.layers.bytes(), element);
    let parts = |sample: ByteSize, grams: &[usize]| {
        let mut parts = vec![
            part(PartKind::Layer, layer),
            part(PartKind::NextLayer, next),
            part(PartKind::StoredMatrix, cast),
            part(PartKind::Sample, sample),
        ];
        parts.extend(states(run, option));
        if !grams.is_empty() {
            parts.push(part(PartKind::Statistics, DeviceGrams::bytes(grams)));
        }
        parts
    };
    let calibration = [Phase::Calibrate, Phase::Propagate];
    let has_statistics = run.statistics().is_some();
    let calibration = calibration
        .into_iter()
        .filter(|phase| run.samples > 0 && (has_statistics || *phase == Phase::Propagate));
    let grams = run.grams_on_gpu(settings);
    let observed = cut.capture_bytes(config, run.seqlen, element, &grams);
    let passing = cut.pass_bytes(config, run.seqlen, element);
    // Outputs of a matrix before and after it is pruned.
    let tokens = output_error::tokens(run.samples, run.seqlen);
    let outputs = config.linears().map(|of| Tiling::product_bytes(config, of, tokens)).max();
    let errors = calibration
        .clone()
        .next()
        .filter(|_| has_statistics && (run.technique.is_some() || run.observes.is_some()))
        .map(|_| {
            let mut parts = parts(ByteSize::ZERO, &[]);
            parts.retain(|part| part.kind != PartKind::Sample);
            parts.push(part(PartKind::CalibrationRows, outputs.unwrap_or_default()));
            with_context(run, Phase::OutputError, parts)
        });
    calibration
        .chain(evaluation_phases(run))
        .map(|phase| match phase {
            Phase::Calibrate => {
                let mut parts = parts(observed, &grams);
                parts.push(part(PartKind::CalibrationRows, chosen_rows(run)));
                if !grams.is_empty() {
                    // The sums of a block's samples are taken when the block is whole.
                    let samples = SampleBlocks::new(run.samples).samples_of(0).len();
                    let columns: usize = config.input_widths().values().sum();
                    let each = ByteSize::of(4 * columns, size_of::<f64>()) + chosen_rows(run);
                    let waiting = each.0.saturating_mul(samples.saturating_sub(1) as u64);
                    parts.push(part(PartKind::SamplesInFlight, ByteSize(waiting)));
                }
                with_context(run, phase, parts)
            }
            _ => with_context(run, phase, parts(passing, &[])),
        })
        .chain(errors)
        .chain(training(run, &cut, next))
        .collect()
}

/// Memory of a training. A training of the whole model makes the layers of a step in turn and copies none ahead. The sweep of a training by
/// layers copies the next layer ahead.
fn training(run: &RunShape<'_>, cut: &Tiling, next: ByteSize) -> Vec<PhaseMemory> {
    let (config, element) = (run.config, run.gpu_dtype.bytes());
    let Some(trains) = &run.trains else {
        return Vec::new();
    };
    let forward = cut.pass_bytes(config, run.seqlen, element);
    let backward = cut.backward_bytes(config, run.seqlen, element, trains.sizes);
    let next = if trains.is_by_layer { next } else { ByteSize::ZERO };
    let phases = [(Phase::Forward, forward), (Phase::Backward, backward)];
    let phases = phases.map(|(phase, sample)| {
        let cast = Tiling::cast_bytes(config, run.dtypes.layers.bytes(), element);
        let parts = vec![
            part(PartKind::Layer, Tiling::layer_bytes(config, element)),
            part(PartKind::NextLayer, next),
            part(PartKind::StoredMatrix, cast),
            part(PartKind::Sample, sample),
        ];
        with_context(run, phase, parts)
    });
    phases.into()
}

/// Memory while logits are computed.
pub(super) fn head(run: &RunShape<'_>, option: &ExecutionOption) -> PhaseMemory {
    let settings = &option.settings;
    let (config, element) = (run.config, run.gpu_dtype.bytes());
    let cut = Tiling::of(settings, config).with_indices_of_32_bits(config, run.seqlen);
    let rows = settings.head_rows.unwrap_or(usize::MAX).min(config.vocab_size);
    let stored = match run.dtypes.head.bytes() {
        stored if stored == element => 0,
        stored => stored,
    };
    let head = ByteSize::of((rows + 1) * config.hidden_size, element + stored);
    let window = cut.head_bytes(config, run.seqlen, rows, element);
    let mut parts = vec![part(PartKind::Head, head), part(PartKind::Window, window)];
    // The account of a device keeps room for the samples, too, which end with the last layer.
    parts.extend(states(run, option));
    with_context(run, Phase::Head, parts)
}

/// Memory while loss and gradients of a training are computed; `None` where the CPU does so.
pub(super) fn training_head(run: &RunShape<'_>, settings: &MemorySettings) -> Option<PhaseMemory> {
    let (config, element) = (run.config, run.gpu_dtype.bytes());
    let trains = run.trains.as_ref().filter(|trains| !trains.is_by_layer)?;
    if trains.teacher.is_some() || settings.head_rows.is_some() {
        return None;
    }
    let cut = Tiling::of(settings, config).with_indices_of_32_bits(config, run.seqlen);
    let stored = match run.dtypes.head.bytes() {
        stored if stored == element => 0,
        stored => stored,
    };
    let head = ByteSize::of((config.vocab_size + 1) * config.hidden_size, element + stored);
    let window = cut.head_backward_bytes(config, run.seqlen, element);
    let parts = vec![part(PartKind::Head, head), part(PartKind::Window, window)];
    Some(with_context(run, Phase::Head, parts))
}

fn with_context(run: &RunShape<'_>, phase: Phase, parts: Vec<MemoryPart>) -> PhaseMemory {
    let tables = ByteSize::of(Rotary::bytes(&run.config.ropes, run.seqlen), 1);
    let context =
        vec![part(PartKind::DeviceContext, CONTEXT), part(PartKind::RotaryTables, tables)];
    PhaseMemory { phase, parts: [context, parts].concat() }
}
