//! Each phase allocates the bytes that `footprint` computes, by default and with every setting at its extreme.
//!
//! Each phase runs in a child process, so that scratch memory of an earlier phase does not hide anything.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use candle_core::DType;
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::eval::Perplexity;
use prune::linalg::product::Kernel;
use prune::linalg::{StoredDtype, Weight, tensor};
use prune::model::footprint::{HeadTokens, SamplePass};
use prune::model::{
    DecoderLayer, Dtypes, Head, InputId, LayerContext, LinearId, ModelConfig, Observer, footprint,
};
use prune::pruning::{self, ColumnSquares, Pattern, Request, Statistics, Target};
use prune::run::Silent;
use prune::run::memory_settings::{MemorySettings, WeightsHeld};
use prune::runtime::Side;
use prune::runtime::{Clock, Compute, HiddenStates, Passenger, Reporter};
use prune::synthetic::RandomCheckpoint;

use super::{ALIVE, PEAK};
use crate::support::Place;

const CASE: &str = "PRUNE_TEST_PHASE";
const SEQLEN: usize = 1024;
const WINDOWS: usize = 2;
const THREADS: usize = 2;
const PASSED: HeadTokens = HeadTokens { windows: WINDOWS, seqlen: SEQLEN, with_logits: SEQLEN };

/// The larger of 10 % and this may lie between prediction and count.
const TOLERANCE: u64 = 1 << 20;

fn shape(dtype: StoredDtype) -> RandomCheckpoint {
    RandomCheckpoint {
        hidden_size: 1024,
        intermediate_size: 2816,
        num_hidden_layers: 1,
        num_attention_heads: 16,
        num_key_value_heads: 4,
        vocab_size: 4003,
        max_position_embeddings: SEQLEN,
        dtype,
        ..RandomCheckpoint::default()
    }
}

struct Nobody;

impl Observer for Nobody {
    fn observe(&mut self, _: InputId, _: &[f32]) {}
}

/// The most that was allocated during `body` beyond what was before.
fn counted<R>(body: impl FnOnce() -> Result<R>) -> Result<(R, u64)> {
    let before = ALIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = body()?;
    let peak = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    Ok((result, peak as u64))
}

fn load(
    source: &Arc<dyn WeightSource>,
    config: &ModelConfig,
    settings: &MemorySettings,
) -> Result<DecoderLayer> {
    match settings.weights {
        WeightsHeld::Layer => DecoderLayer::load(&**source, config, 0),
        WeightsHeld::Matrix => DecoderLayer::at_rest(source, config, 0),
    }
}

/// Scores one matrix and forgets the mask.
fn score(layer: &mut DecoderLayer, method: &str, id: LinearId) -> Result<()> {
    let linear = layer.linear_mut(id);
    let at_rest = linear.weight_mut().hold()?;
    let statistics = ColumnSquares::from_mean(vec![1.0; linear.in_features()]);
    let statistics = Statistics::Merged(Box::new(statistics));
    let target = Target { ratio: 0.5, pattern: Pattern::Unstructured };
    let request = Request::new("w", Some(&statistics), target);
    let method = pruning::method(method).context("it is in the table")?;
    let weight = linear.weight_mut().held_mut().context("it is held")?;
    drop(pruning::prune(method, weight, &request)?);
    if let Some(at_rest) = at_rest {
        *linear.weight_mut() = Weight::AtRest(at_rest);
    }
    Ok(())
}

/// Runs one phase and returns what was predicted and what was counted.
fn phase(
    name: &str,
    config: &ModelConfig,
    dtype: StoredDtype,
    settings: &MemorySettings,
) -> Result<(ByteSize, u64)> {
    let source: Arc<dyn WeightSource> = Arc::new(Checkpoint::open("m".as_ref())?);
    let state = || {
        let values = (0..SEQLEN * config.hidden_size).map(|i| (i as f32 * 0.37).sin());
        tensor::from_vec(values.collect(), &[SEQLEN, config.hidden_size])
    };
    let context = || LayerContext::with_settings(config, SEQLEN, settings.clone());
    let kernel = Kernel::Fused;
    let pass = SamplePass { config, kernel, seqlen: SEQLEN, threads: THREADS, settings };
    let beside =
        footprint::context(config, SEQLEN) + pass.products((name == "head").then_some(kernel));
    let (mut layer, held) = counted(|| load(&source, config, settings))?;
    match name {
        "layer" => {
            // Masks come later.
            let masks = match settings.weights {
                WeightsHeld::Layer => 0,
                WeightsHeld::Matrix => config.layer_weights() / 8,
            };
            let layer = footprint::layer_weights(config, dtype, settings).0;
            Ok((ByteSize(layer - masks as u64), held))
        }
        "forward" => {
            let state = state()?;
            let predicted = pass.forward(dtype) + beside;
            let counted = counted(|| {
                let mut context = context();
                // A second sample meets a workspace that the first one's MLP grew.
                drop(layer.forward(&state, &mut context)?);
                drop(layer.forward(&state, &mut context)?);
                Ok(())
            })?;
            Ok((predicted, counted.1))
        }
        "capture" => {
            let state = state()?;
            let predicted = pass.forward(dtype) + beside;
            let counted = counted(|| {
                let mut context = context();
                layer.capture(&state, &mut context, &mut Nobody)?;
                layer.capture(&state, &mut context, &mut Nobody)
            })?;
            Ok((predicted, counted.1))
        }
        "score" => {
            let predicted = footprint::score(config, dtype, THREADS, settings);
            let counted = counted(|| {
                for method in ["wanda", "magnitude"] {
                    for id in config.linears() {
                        score(&mut layer, method, id)?;
                    }
                }
                Ok(())
            })?;
            Ok((predicted, counted.1))
        }
        "head" => {
            let vocabulary = config.vocab_size;
            let tokens: Vec<u32> =
                (0..WINDOWS * SEQLEN).map(|i| (i * 31 % vocabulary) as u32).collect();
            let width = config.hidden_size;
            let mut hidden = HiddenStates::new(None, WINDOWS, [SEQLEN, width], DType::F32)?;
            for window in 0..WINDOWS {
                hidden.put(window, state()?)?;
            }
            let (clock, state) = (Clock::new(), state()?);
            let predicted = footprint::head(config, Dtypes::all(dtype), PASSED, settings) + beside;
            let before = ALIVE.load(Ordering::Relaxed);
            let mut context = context();
            drop(layer.forward(&state, &mut context)?);
            let left = ALIVE.load(Ordering::Relaxed) - before;
            let reporter = Reporter { clock: &clock, events: &Silent };
            let mut perplexity = Perplexity::new(Side::Dense, hidden, &tokens, 1, reporter);
            let mut compute = Compute::on_cpu(context, &Silent);
            let counted = counted(|| {
                let head = match settings.head_rows {
                    None => Head::load(&*source, config)?,
                    Some(rows) => Head::at_rest(&source, config, rows)?,
                };
                perplexity.finish(&head, &mut compute)
            })?;
            Ok((predicted, counted.1 + left as u64))
        }
        _ => bail!("no phase {name}"),
    }
}

#[test]
#[ignore = "started by the other test of this module, in a process of its own"]
fn child() -> Result<()> {
    let Ok(case) = std::env::var(CASE) else {
        return Ok(());
    };
    let (name, settings) = case.split_once(' ').context("phase and settings")?;
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global()?;
    let config = ModelConfig::load("m".as_ref())?;
    let dtype = match &*std::fs::read_to_string("dtype")? {
        "f32" => StoredDtype::F32,
        _ => StoredDtype::Bf16,
    };
    let (predicted, counted) = phase(name, &config, dtype, &serde_json::from_str(settings)?)?;
    let dtype = dtype.name();
    eprintln!("{dtype} {name} {settings}: predicted {}, counted {counted}", predicted.0);
    assert!(
        predicted.0.abs_diff(counted) <= TOLERANCE.max(counted / 10),
        "predicted {predicted}, counted {counted}"
    );
    Ok(())
}

#[test]
fn every_phase_allocates_what_its_footprint_says() {
    let module = module_path!().split_once("::").expect("a module of a test binary").1;
    let settings = [
        "{}",
        r#"{"weights": "matrix", "mlp_tokens": 128, "attention_heads": 1, "logits_bytes": 2000000, "head_rows": 500}"#,
        r#"{"mlp_tokens": 128}"#,
        r#"{"attention_heads": 2, "mlp_tokens": 256, "head_rows": 2000}"#,
    ];
    let mut wrong = Vec::new();
    for dtype in [StoredDtype::Bf16, StoredDtype::F32] {
        let place = Place::with(&shape(dtype));
        std::fs::write(place.path("dtype"), dtype.name()).expect("a new file");
        for settings in settings {
            for phase in ["layer", "forward", "capture", "score", "head"] {
                let output = Command::new(std::env::current_exe().expect("it runs"))
                    .args(["--exact", &format!("{module}::child"), "--ignored", "--nocapture"])
                    .current_dir(place.path("."))
                    .env(CASE, format!("{phase} {settings}"))
                    .output()
                    .expect("this binary can be started");
                let said = String::from_utf8_lossy(&output.stderr);
                let said = said.lines().find(|line| line.contains("predicted"));
                let line = said.unwrap_or("the child died").to_string();
                eprintln!("{line}");
                if !output.status.success() {
                    wrong.push(format!("{phase} {settings}: {line}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
