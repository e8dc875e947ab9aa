//! The work that a layer gives to a device: launches, waits and copies, counted without a GPU.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device};
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::linalg::StoredDtype;
use prune::model::on_device::{Tiling, take_work};
use prune::model::{DecoderLayer, Embedding, LayerContext, ModelConfig};
use prune::pipeline::{Calibrator, Output, Pruner, Selection, TargetPlan, embed};
use prune::pruning::{Technique, method};
use prune::run::fallback::DeviceWork;
use prune::run::{MemorySettings, Silent};
use prune::runtime::clock::Reporter;
use prune::runtime::device_worker::{DeviceWorker, WorkingDevice};
use prune::runtime::engine::OnCandle;
use prune::runtime::ledger::{Ledger, Refusals};
use prune::runtime::{Clock, Compute, Editor, HiddenStates};
use prune::synthetic::RandomCheckpoint;

use crate::source_tree::{sources, without_tests};

/// The number of tokens that the goal for a 7B model is stated for. The number of kernels depends on no other size: all heads pass at once.
const SEQLEN: usize = 2048;

fn model() -> RandomCheckpoint {
    RandomCheckpoint {
        hidden_size: 32,
        intermediate_size: 96,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        vocab_size: 307,
        max_position_embeddings: SEQLEN,
        dtype: StoredDtype::F32,
        ..RandomCheckpoint::default()
    }
}

/// Prunes the first layer with Wanda on a device that has room for hidden states.
fn work(folder: &std::path::Path, samples: usize) -> Result<DeviceWork> {
    let config = Arc::new(ModelConfig::load(folder)?);
    let source: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(folder)?);
    let settings = MemorySettings::default();
    let context = || LayerContext::with_settings(&config, SEQLEN, settings.clone());
    let engine = OnCandle::new(Device::Cpu, DType::F32, String::new(), &context())?;
    let worker = DeviceWorker::new(
        WorkingDevice {
            name: "cuda:0".into(),
            engine: Box::new(engine.keeping_states(true)),
            ledger: Ledger::new(ByteSize(1 << 40), ByteSize::ZERO, Refusals::default()),
        },
        Tiling::of(&settings, &config),
        Arc::clone(&config),
        SEQLEN,
        &Silent,
    );
    let devices = vec![vec!["cuda:0".to_string()]; config.num_hidden_layers];
    let mut compute = Compute::new(context(), vec![worker], devices, &Silent);
    let tokens: Vec<u32> = (0..samples * SEQLEN).map(|at| (at * at * 31 % 307) as u32).collect();
    let shape = [SEQLEN, config.hidden_size];
    let hidden = HiddenStates::new(None, samples, shape, DType::F32)?;
    let mut hidden = hidden.on_devices(vec![Device::Cpu]);
    // Rotary tables.
    take_work();
    embed(&mut hidden, &Embedding::open(&*source, &config)?, &tokens, SEQLEN)?;
    // The embedded samples went up, once for all layers.
    let states = ByteSize::of(samples * SEQLEN * config.hidden_size, size_of::<f32>());
    assert_eq!(take_work(), DeviceWork { uploaded: states, ..DeviceWork::default() });
    let wanda = method("wanda").expect("in the table");
    let technique = Technique::of(wanda);
    let selection = Selection { sparsity_ratio: Some(0.5), ..Selection::default() };
    let targets = TargetPlan::resolve(&selection, wanda, &config)?;
    let clock = Clock::new();
    let reporter = Reporter { clock: &clock, events: &Silent };
    let calibrator = Calibrator::new(&technique, Some(hidden), &config, reporter);
    let mut pruner = Pruner::new(&technique, &targets, calibrator, Output::default(), Vec::new());
    pruner.edit(DecoderLayer::load(&*source, &config, 0)?, &mut compute)?;
    Ok(compute.finish().devices[0].work)
}

#[test]
fn a_pass_launches_few_kernels_and_hidden_states_do_not_travel() -> Result<()> {
    let folder = tempfile::tempdir()?;
    model().write(folder.path(), &Silent)?;
    let config = ModelConfig::load(folder.path())?;
    let [few, many] = [2, 5].map(|samples| work(folder.path(), samples));
    let (few, many) = (few?, many?);
    let per_sample = |of: &dyn Fn(&DeviceWork) -> u64| (of(&many) - of(&few)) as f64 / 3.0;
    // A sample is observed in the dense layer and passes the pruned layer: 60 and 38 kernels, and a copy of its sums.
    let launches = per_sample(&|work| work.launches);
    crate::golden::show(&format!("{launches} launches per sample, {many:?} for five samples"));
    assert!(launches <= 98.0, "{launches} launches per sample");
    // The sums of a sample are one copy. A GPU sends it without a wait.
    assert_eq!(per_sample(&|work| work.waits), 1.0);
    let widths: usize = config.input_widths().values().sum();
    let sums = ByteSize::of(2 * 2 * widths, size_of::<f64>()).0 as f64;
    let downloaded = per_sample(&|work| work.downloaded.0);
    assert!(downloaded <= sums, "{downloaded} of {sums} bytes per sample");
    let uploaded = per_sample(&|work| work.uploaded.0);
    assert!(uploaded <= 16.0, "{uploaded} bytes per sample");

    // A layer: its weights go up once; masks, column sums and the rows for output errors come down, and the rows go up for products of the
    // dense and of the pruned matrix.
    let elements = |of: &dyn Fn((usize, usize)) -> usize| -> usize {
        config.linears().map(|id| of(id.shape(&config))).sum()
    };
    let weights = ByteSize::of(elements(&|(out, inner)| out * inner), 4).0;
    let norms = ByteSize::of(2 * config.hidden_size + elements(&|(_, inner)| inner), 4).0;
    let rows = ByteSize::of(256 * elements(&|(_, inner)| inner), 4).0;
    let uploaded = many.uploaded.0;
    assert!(uploaded >= weights, "{uploaded} of {weights}");
    assert!(uploaded <= weights + norms + 2 * rows + (4 << 10), "{uploaded}, {weights}, {rows}");
    let chosen = ByteSize::of(256 * widths, size_of::<f64>()).0;
    let masks = ByteSize::of(elements(&|(out, inner)| out * inner), 1).0.div_ceil(8) + 7 * 4;
    let most = masks + chosen + 5 * sums as u64 + (8 << 10);
    assert!(many.downloaded.0 <= most, "{} of {most}", many.downloaded);
    Ok(())
}

/// Files of the room that may use candle's operators themselves: the counted operators, and trainings, whose autograd launches on its own.
const UNCOUNTED: [&str; 5] =
    ["operators.rs", "training.rs", "backward.rs", "attention_backward.rs", "head_backward.rs"];

/// Functions of a tensor that do no work.
const VIEWS: [&str; 2] = ["elem_count", "flatten_all"];

/// Methods that compute or copy.
const OPERATORS: &[&str] = &[
    "matmul",
    "to_dtype",
    "to_device",
    "contiguous",
    "force_contiguous",
    "copy",
    "broadcast_add",
    "broadcast_sub",
    "broadcast_mul",
    "broadcast_div",
    "exp",
    "sum",
    "sum_keepdim",
    "max_keepdim",
    "gather",
    "index_select",
    "slice_set",
    "synchronize",
    "to_vec0",
    "to_vec1",
    "to_vec2",
    "affine",
    "sqr",
    "tanh",
];

#[test]
fn passes_use_counted_operators_only() {
    let mut found = Vec::new();
    let mut read = 0;
    for source in sources() {
        let Some(name) = source.path.strip_prefix("model/on_device/") else {
            continue;
        };
        // Kernels of ours are operators themselves.
        if UNCOUNTED.contains(&name) || name.starts_with("kernels/") {
            continue;
        }
        read += 1;
        let (tokens, _) = without_tests(&source.modules(), &source.text);
        for four in tokens.windows(4) {
            let three = &four[..3];
            // Without an argument, a sum is of the host's numbers.
            let is_of_host = four[1..] == ["sum", "(", ")"];
            let is_method = three[0] == "." && OPERATORS.contains(&three[1]) && three[2] == "(";
            let is_method = is_method && !is_of_host;
            let is_made = three[..2] == ["Tensor", "::"] && !VIEWS.contains(&three[2]);
            let is_of_candle_nn = three[0] == "candle_nn";
            if is_method || is_made || is_of_candle_nn {
                found.push(format!("{name}: {}", three.concat()));
            }
        }
    }
    assert!(read >= 9, "{read} files");
    assert!(found.is_empty(), "{found:#?}");
}
