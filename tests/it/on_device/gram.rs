//! Gram matrices that devices sum up: candle's operators on the CPU, in a pass of two devices, give those of the CPU but for rounding.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device};
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::linalg::StoredDtype;
use prune::model::on_device::Tiling;
use prune::model::{DecoderLayer, Embedding, LayerContext, ModelConfig};
use prune::pipeline::{
    Calibrator, MaskObserver, Output, PrunedMatrix, Pruner, Selection, TargetPlan, embed,
};
use prune::pruning::{InputGram, Mask, Statistics, Technique, method};
use prune::run::fallback::FallbackOutcome;
use prune::run::memory_settings::GramsHeld;
use prune::run::{MemorySettings, Silent};
use prune::runtime::device_worker::{DeviceWorker, WorkingDevice};
use prune::runtime::engine::OnCandle;
use prune::runtime::ledger::{Ledger, Refusals};
use prune::runtime::{Clock, Compute, Editor, HiddenStates, Reporter};

use super::shapes::SEQLEN;
use super::{difference, model};

/// Blocks of three samples, and of two.
const SAMPLES: usize = 70;

/// G, Σx² and the variances of the input of every matrix, and its mask.
#[derive(Default, PartialEq)]
struct Seen {
    inputs: Vec<[Vec<f32>; 3]>,
    masks: Vec<Mask>,
}

impl MaskObserver for Seen {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        let input: &InputGram =
            matrix.statistics.and_then(Statistics::downcast).expect("SparseGPT asks for it");
        assert_eq!(input.samples(), SAMPLES);
        self.inputs.push([
            input.gram().square(),
            input.columns().squares().mean().to_vec(),
            input.columns().variance(),
        ]);
        self.masks.push(matrix.mask.clone());
        Ok(())
    }
}

/// Prunes the first layer with SparseGPT, on this many devices that refuse these units, else on the CPU. Returns the bytes reserved on
/// the first device, too.
fn run(
    folder: &std::path::Path,
    devices: usize,
    refuse: &str,
    grams: GramsHeld,
) -> Result<(Seen, ByteSize, Vec<FallbackOutcome>)> {
    let config = Arc::new(ModelConfig::load(folder)?);
    let source: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(folder)?);
    let settings = MemorySettings { grams, mlp_tokens: 32, ..MemorySettings::default() };
    let context = || LayerContext::with_settings(&config, SEQLEN, settings.clone());
    let mut workers = Vec::new();
    for number in 0..devices {
        let engine = OnCandle::new(Device::Cpu, DType::F32, String::new(), &context())?;
        let refusals: Refusals = refuse.parse().expect("units");
        workers.push(DeviceWorker::new(
            WorkingDevice {
                name: format!("cuda:{number}"),
                engine: Box::new(engine),
                ledger: Ledger::new(ByteSize(1 << 40), ByteSize::ZERO, refusals),
            },
            Tiling::of(&settings, &config),
            Arc::clone(&config),
            SEQLEN,
            &Silent,
        ));
    }
    let names: Vec<String> =
        workers.iter().enumerate().map(|(at, _)| format!("cuda:{at}")).collect();
    let mut compute =
        Compute::new(context(), workers, vec![names; config.num_hidden_layers], &Silent);

    let tokens: Vec<u32> = (0..SAMPLES * SEQLEN).map(|at| (at * at * 31 % 307) as u32).collect();
    let width = config.hidden_size;
    let mut hidden = HiddenStates::new(None, SAMPLES, [SEQLEN, width], DType::F32)?;
    embed(&mut hidden, &Embedding::open(&*source, &config)?, &tokens, SEQLEN)?;
    let sparsegpt = method("sparsegpt").expect("in the table");
    let technique = Technique::of(sparsegpt);
    let selection = Selection { sparsity_ratio: Some(0.5), ..Selection::default() };
    let targets = TargetPlan::resolve(&selection, sparsegpt, &config)?;
    let (clock, mut seen) = (Clock::new(), Seen::default());
    let reporter = Reporter { clock: &clock, events: &Silent };
    let calibrator = Calibrator::new(&technique, Some(hidden), &config, reporter);
    let output = Output { observers: vec![&mut seen], ..Output::default() };
    let mut pruner = Pruner::new(&technique, &targets, calibrator, output, Vec::new());
    let layer = DecoderLayer::load(&*source, &config, 0)?;
    pruner.edit(layer, &mut compute)?;
    let report = compute.finish();
    let reserved = report.devices.first().map(|device| device.reserved_by_plan);
    let outcomes = report.fallbacks.iter().map(|unit| unit.outcome).collect();
    Ok((seen, reserved.unwrap_or_default(), outcomes))
}

#[test]
fn devices_sum_up_the_gram_matrices_of_their_blocks() -> Result<()> {
    let folder = tempfile::tempdir()?;
    model(folder.path(), StoredDtype::F32)?;
    let run = |devices, refuse, grams| run(folder.path(), devices, refuse, grams);
    let (ours, ..) = run(0, "", GramsHeld::Device)?;
    assert_eq!(ours.inputs.len(), 7);
    let (smaller, cpu) = (FallbackOutcome::Smaller, FallbackOutcome::Cpu);
    let mut reserved = Vec::new();
    for (grams, partly) in [(GramsHeld::Device, "10x2,12"), (GramsHeld::Host, "9x2,11")] {
        let (whole, bytes, outcomes) = run(1, "", grams)?;
        assert_eq!(outcomes, []);
        reserved.push(bytes);
        // Eight uploads come first. Then a single device observes a block, and adds it to the sums before it where it has sums.
        for (devices, refuse, fallbacks) in [
            (2, "", &[][..]),
            (3, "", &[]),
            (1, partly, &[smaller, cpu]),
            (2, "8", &[cpu, cpu]),
            (1, "9", &[cpu]),
            (1, "11", &[cpu]),
            (1, "8,9x2", &[cpu, smaller]),
            (1, "7", &[cpu]),
            (2, "7", &[cpu, cpu]),
        ] {
            let (theirs, _, outcomes) = run(devices, refuse, grams)?;
            assert_eq!(outcomes, fallbacks, "{grams:?} {devices} {refuse}");
            for (ours, theirs) in ours.inputs.iter().zip(&theirs.inputs) {
                for (ours, theirs) in ours.iter().zip(theirs) {
                    let apart = difference(ours, theirs);
                    assert!(apart < 1e-5, "{grams:?} {devices} {refuse}: {apart}");
                }
            }
            // The order of the sums is the order of the blocks, on however many devices, and also where a block could not be added on the
            // device and the host went on.
            let only_moved = ["9", "11"].contains(&refuse) && grams == GramsHeld::Device;
            if refuse.is_empty() || only_moved {
                assert!(theirs == whole, "{grams:?} {devices} {refuse}");
            }
            if refuse == "7" {
                assert!(
                    theirs == ours,
                    "{grams:?} {devices}: the CPU computes a layer that is not there"
                );
            }
        }
    }
    assert!(reserved[0] > reserved[1], "{reserved:?}: sums are reserved");
    Ok(())
}
