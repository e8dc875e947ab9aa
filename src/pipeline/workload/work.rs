//! Work of a run: floating-point operations of its products, bytes of its files and of its transfers to GPUs.

use super::shape::{RunShape, TrainingShape};
use crate::linalg::attention::Scoring;
use crate::linalg::product::Kernel;
use crate::linalg::{StoredDtype, gram};
use crate::model::{LinearId, LinearRole, footprint};
use crate::pipeline::{output_error, solve};
use crate::placement::{ExecutionOption, Processors, Work};
use crate::pruning::StatisticsKind;
use crate::run::HiddenStatesStorage;
use crate::run::memory_settings::{MemorySettings, WeightsHeld};

/// The cost of packing a product's weights, in tokens: packing costs as much as multiplying so many more tokens.
const PACKING_TOKENS: f64 = 64.0;

/// The bytes of a file of a checkpoint in several files.
const SHARD_BYTES: f64 = 5e9;

/// The cost of the score and the choice of a weight in f32 operations: 8 ns per thread (Sapphire Rapids, Wanda, 2026-11-29).
const CHOICE_OPERATIONS: f64 = 600.0;

/// The speed of bf16 products by AVX-512 relative to f32, in a whole run (Zen 4).
const AVX512_BF16_TIMES_F32: f64 = 1.8;
/// The speed of bf16 products on AMX tiles: 2.6 times the speed of f32 products by parts on these tiles, in a whole run (Sapphire Rapids).
const AMX_BF16_TIMES_F32: f64 = 2.6 * SPLIT_TIMES_F32;
/// The speed of a GPU's products in half precision relative to f32, in which Gram matrices are. A round figure: 4 for an A10, whose
/// speed the plan takes for a GPU's, up to 15 for an H100, whose products are faster in both dtypes.
const GPU_HALF_TIMES_F32: f64 = 4.0;
/// The speed of f32 products that are sums of bf16 products.
const SPLIT_TIMES_F32: f64 = 2.0;

/// Work of every phase but the head's.
pub(super) fn layers(run: &RunShape<'_>, option: &ExecutionOption) -> Work {
    let settings = &option.settings;
    let layers = run.config.num_hidden_layers.max(1) as f64;
    let windows = run.evaluated_windows() as f64;
    let (samples, propagated) = match run.statistics() {
        // Calibration samples end at the last layer's dense pass.
        Some(_) => (run.samples as f64, run.samples as f64 * (layers - 1.0) / layers),
        None => (0.0, run.samples as f64),
    };
    let seqlen = run.seqlen as f64;
    let per_token = Operations::per_token(run, settings);
    let passes = match run.passes_inputs_apart(settings.statistics) {
        true => 4.0,
        false => 1.0,
    };
    let flop = passes * samples * (per_token.all - per_token.down)
        + (propagated + windows) * per_token.all;
    // Forwards, activations again, and two products per matrix backwards.
    let of_rank = |trains: &TrainingShape| trains.passes as f64 / trains.ranks.max(1) as f64;
    let trained = run.trains.as_ref().map_or(0.0, of_rank);
    let flop = flop + 4.0 * trained * per_token.all;
    let grams = GramWork::of(run, option);
    let weights = layer_bytes(run);
    let states = state_bytes(run, option.processors);
    let written = run.runs() as f64 * weights;
    let saved = if run.saves { written } else { 0.0 };
    // All written files are read back: all but the last of them while later samples pass, where layers are written so.
    let read_back = layers * saved;
    let (beside, mut moved, mut once_moved) = match run.writes_beside(settings) {
        true => {
            (saved + (read_back - SHARD_BYTES).max(0.0) / layers, 0.0, read_back.min(SHARD_BYTES))
        }
        false => (0.0, saved, read_back),
    };
    if option.storage == HiddenStatesStorage::Disk {
        moved += states * (samples + 2.0 * propagated + 2.0 * windows);
        // The embedded samples.
        once_moved += states * (run.samples as f64 + windows);
    }
    let transferred = match option.storage {
        HiddenStatesStorage::Device => 0.0,
        _ => states * (samples + 2.0 * propagated + 2.0 * windows),
    };
    if settings.weights == WeightsHeld::Matrix {
        moved += weights * (samples + propagated + windows);
    }
    if run.saves {
        // Embedding and head are copied, and read back.
        let ends = if run.config.tie_word_embeddings { 1.0 } else { 2.0 } * head_bytes(run);
        once_moved += 3.0 * ends * run.runs() as f64;
    }
    Work {
        layer_flop: flop * seqlen / speed(run, option.processors) + grams.gpu_flop,
        layer_host_flop: grams.host_flop + solvers(run) + choices(run, option.processors),
        layer_beside: weights * run.of_all_ranks.map_or(1.0, |all| all.reading) + beside,
        layer_moved: moved,
        // Dense, and again after pruning.
        layer_uploaded: weights * (1 + run.techniques().count()) as f64 + grams.sums,
        layer_states: transferred + grams.rows,
        once_moved,
        ..Work::default()
    }
}

/// Work of the head's phase.
pub(super) fn head(run: &RunShape<'_>, option: &ExecutionOption) -> Work {
    let (config, settings) = (run.config, &option.settings);
    let windows = run.evaluated_windows() as f64;
    let rows = (settings.logits_bytes.0 as usize / 4 / config.vocab_size.max(1)).max(1);
    let packing = PACKING_TOKENS / rows.min(run.seqlen).max(1) as f64;
    let per_token = 2.0 * (config.vocab_size * config.hidden_size) as f64 * (1.0 + packing);
    let mut once_moved = head_bytes(run);
    if option.storage == HiddenStatesStorage::Disk {
        let parts = settings.head_rows.map_or(1, |rows| config.vocab_size.div_ceil(rows.max(1)));
        once_moved += state_bytes(run, option.processors) * windows * parts as f64;
    }
    Work {
        once_flop: windows * run.seqlen as f64 * per_token / speed(run, option.processors),
        once_moved,
        ..Work::default()
    }
}

/// Floating-point operations per token and layer.
struct Operations {
    all: f64,
    /// The operations of the down linear, which calibration does not compute.
    down: f64,
}

impl Operations {
    fn per_token(run: &RunShape<'_>, settings: &MemorySettings) -> Self {
        let (config, seqlen) = (run.config, run.seqlen);
        // 1, and the cost of packing a product's weights unless they stay packed.
        let packed = |tokens: usize| match footprint::keeps_packed(run.kernel(), settings) {
            true => 1.0,
            false => 1.0 + PACKING_TOKENS / tokens.min(seqlen).max(1) as f64,
        };
        let groups = settings
            .attention_heads
            .map_or(1, |heads| config.num_key_value_heads.div_ceil(heads.max(1)));
        // Each further group of heads packs the activations again.
        let repacking = 1.0 + 0.02 * (groups - 1) as f64;
        let product = |id: LinearId| {
            let operations = 2.0 * weights(run, id);
            match id.is_attention() {
                true => operations * packed(seqlen) * repacking,
                false => operations * packed(settings.mlp_tokens),
            }
        };
        // Scores and contexts of the keys that a query sees, on average over tokens and layers.
        let operations = config.layers.iter().map(|kind| {
            let scoring = Scoring { window: kind.window, ..config.widest_scoring() };
            config.heads().operations(scoring, 0, seqlen) as f64
        });
        let layers = config.layers.len().max(1) as f64;
        let scores = operations.sum::<f64>() / layers / seqlen.max(1) as f64;
        Self {
            all: config.linears().map(product).sum::<f64>() + scores,
            down: product(config.layer(0).part(LinearRole::Down).0),
        }
    }
}

/// Work of the statistics of a layer, on its GPUs or on the host.
#[derive(Default)]
struct GramWork {
    gpu_flop: f64,
    host_flop: f64,
    /// Bytes of sums that each GPU sends.
    sums: f64,
    /// Bytes of rows that GPUs send.
    rows: f64,
}

impl GramWork {
    fn of(run: &RunShape<'_>, option: &ExecutionOption) -> Self {
        let flop = statistics(run);
        let on_host =
            Self { host_flop: flop / of_kernel(gram::kernel_of(run.products)), ..Self::default() };
        let widths = run.config.input_widths().map(|_, width| width as f64);
        match option.processors {
            Processors::Gpus(_) if !run.grams_on_gpu(&option.settings).is_empty() => Self {
                gpu_flop: match run.gpu_dtype {
                    StoredDtype::F32 => flop,
                    StoredDtype::F16 | StoredDtype::Bf16 => GPU_HALF_TIMES_F32 * flop,
                },
                sums: widths.values().map(|width| 2.0 * width * width).sum(),
                ..Self::default()
            },
            Processors::Gpus(_) if flop > 0.0 => {
                let row = widths.values().sum::<f64>() * run.gpu_dtype.bytes() as f64;
                Self { rows: (run.samples * run.seqlen) as f64 * row, ..on_host }
            }
            _ => on_host,
        }
    }
}

/// Operations of the statistics of a layer.
fn statistics(run: &RunShape<'_>) -> f64 {
    let per_row = |kind: &dyn StatisticsKind| -> f64 {
        run.config.input_widths().values().map(|&width| kind.operations(width)).sum()
    };
    let rows = run.samples as f64 * run.seqlen as f64;
    run.statistics().map_or(0.0, per_row) * rows
}

/// Operations of the method in a layer on the host, in f32 operations.
fn solvers(run: &RunShape<'_>) -> f64 {
    let Some(technique) = &run.technique else {
        return 0.0;
    };
    let ids = run.config.linears();
    let solvers: f64 = ids
        .map(|id| {
            let (rows, columns) = id.shape(run.config);
            solve::operations(technique, [rows, columns], run.ranks())
        })
        .sum();
    solvers / of_kernel(gram::f32_kernel())
}

/// Operations that choose the weights of a layer and measure the error of its outputs, in f32 operations. Every rank does all of them.
/// GPUs take little time for them, which is not counted.
fn choices(run: &RunShape<'_>, processors: Processors) -> f64 {
    if run.technique.is_none() || processors != Processors::Cpu {
        return 0.0;
    }
    let rows = (run.samples * run.seqlen).min(output_error::TOKENS) as f64;
    // Two products, before and after pruning.
    let errors = 4.0 * rows / of_kernel(run.kernel());
    let weights: f64 = run.config.linears().map(|id| weights(run, id)).sum();
    (CHOICE_OPERATIONS + errors) * weights * run.runs() as f64
}

/// The speed of the CPU's products relative to f32; 1 on GPUs, whose rate is already given for their dtype.
fn speed(run: &RunShape<'_>, processors: Processors) -> f64 {
    match processors {
        Processors::Gpus(_) => 1.0,
        Processors::Cpu => of_kernel(run.kernel()),
    }
}

fn of_kernel(kernel: Kernel) -> f64 {
    match kernel {
        Kernel::Fused => 1.0,
        Kernel::Split(_) => SPLIT_TIMES_F32,
        Kernel::Amx => AMX_BF16_TIMES_F32,
        Kernel::Avx512 => AVX512_BF16_TIMES_F32,
    }
}

fn weights(run: &RunShape<'_>, id: LinearId) -> f64 {
    let (rows, columns) = id.shape(run.config);
    rows as f64 * columns as f64
}

/// Bytes of a layer's matrices as stored.
fn layer_bytes(run: &RunShape<'_>) -> f64 {
    let ids = run.config.linears();
    let weights = ids.map(|id| weights(run, id));
    weights.sum::<f64>() * run.dtypes.layers.bytes() as f64
}

/// Bytes of the head's matrix as stored.
fn head_bytes(run: &RunShape<'_>) -> f64 {
    (run.config.vocab_size * run.config.hidden_size) as f64 * run.dtypes.head.bytes() as f64
}

/// Bytes of a sample's hidden states.
fn state_bytes(run: &RunShape<'_>, processors: Processors) -> f64 {
    (run.seqlen * run.config.hidden_size) as f64 * run.element(processors) as f64
}
