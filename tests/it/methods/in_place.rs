//! The wide door: a method of tests whose statistics XᵀX accumulate in place, which changes weights and prunes blocks of columns.
//!
//! Sums are f32, so their bits tell whether rows came in the order of the samples. The run is done by the parts of the program that
//! a run is made of, since the table of methods does not have this one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use candle_core::DType;
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::failure::Failure;
use prune::linalg::{CodedActivations, Products, StoredDtype, StoredMatrix};
use prune::model::{Embedding, ModelConfig};
use prune::pipeline::{
    Calibrator, MaskObserver, Output, PrunedMatrix, Pruner, Selection, TargetPlan, embed,
};
use prune::pruning::mask::RowBits;
use prune::pruning::{
    InPlaceStatistics, Mask, MethodOptions, PruningMethod, Request, SparsityRule, Statistics,
    StatisticsKind, Technique, select,
};
use prune::ranks::Ranks;
use prune::run::verification::VerifyLevel;
use prune::run::{MemorySettings, Silent};
use prune::runtime::{Clock, Devices, HiddenStates, LayerSource, Reporter, Simulation, Sweep};

use crate::support::Place;

/// Accumulators begun by this process for inputs as wide as the hidden states; only the run below has such.
static BEGUN: AtomicUsize = AtomicUsize::new(0);

const HIDDEN: usize = 64;

/// Columns of a block; does not divide the widths of the test models.
const BLOCK: usize = 48;

/// XᵀX `[in_features, in_features]`, and the ends of samples.
struct Gram {
    width: usize,
    sums: Vec<f32>,
    samples: usize,
}

impl InPlaceStatistics for Gram {
    fn add_rows(&mut self, rows: &[f32]) {
        for row in rows.chunks_exact(self.width) {
            for (sums, x) in self.sums.chunks_exact_mut(self.width).zip(row) {
                for (sum, y) in sums.iter_mut().zip(row) {
                    *sum += x * y;
                }
            }
        }
    }

    fn end_sample(&mut self) {
        self.samples += 1;
    }

    fn permute(&mut self, order: &[usize]) {
        let old = self.sums.clone();
        for (at, sum) in self.sums.iter_mut().enumerate() {
            let (row, column) = (order[at / self.width], order[at % self.width]);
            *sum = old[row * self.width + column];
        }
    }
}

#[derive(Debug)]
struct GramKind;

impl StatisticsKind for GramKind {
    fn bytes(&self, in_features: usize) -> ByteSize {
        ByteSize::of(in_features * in_features, size_of::<f32>())
    }

    fn begin(&self, width: usize, _products: Products) -> Statistics {
        BEGUN.fetch_add(usize::from(width == HIDDEN), Ordering::Relaxed);
        Statistics::InPlace(Box::new(Gram { width, sums: vec![0.0; width * width], samples: 0 }))
    }
}

/// Removes the lowest W_ij² · G_jj of each block, and doubles the other weights, which every dtype can hold.
#[derive(Debug)]
pub(super) struct GramBlocks;

impl PruningMethod for GramBlocks {
    fn name(&self) -> &'static str {
        "gram-blocks"
    }

    fn summary(&self) -> &'static str {
        "of tests"
    }

    fn removes(&self, _options: &MethodOptions) -> SparsityRule {
        SparsityRule::FromBlocks { columns: BLOCK }
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        Some(&GramKind)
    }

    fn changes_weights(&self) -> bool {
        true
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        let gram = request.statistics_as::<Gram>()?;
        let diagonal: Vec<f32> = gram.sums.iter().step_by(gram.width + 1).copied().collect();
        if !diagonal.iter().all(|value| value.is_finite()) {
            return Err(
                Failure::new(format!("the input of `{}` is not finite", request.name)).into()
            );
        }
        let score = |row: &mut [f32]| {
            for (weight, square) in row.iter_mut().zip(&diagonal) {
                *weight = *weight * *weight * square;
            }
        };
        let (rows, columns) = (weight.rows(), weight.columns());
        // Checks the weights and prunes groups where a pattern says so.
        let of_rows = select::lowest_of_rows(weight, request, &score)?;
        let mut wide = vec![0.0; rows * columns];
        weight.widen_rows(0, &mut wide);
        let doubled: Vec<f32> = wide.iter().map(|value| 2.0 * value).collect();
        *weight = StoredMatrix::from_f32(weight.dtype(), rows, columns, &doubled);
        if request.target.pattern != prune::pruning::Pattern::Unstructured {
            return Ok(of_rows);
        }
        wide.chunks_exact_mut(columns).for_each(|row| {
            row.iter_mut().for_each(|value| *value = value.abs());
            score(row);
        });
        let thresholds: Vec<f32> = (0..columns)
            .step_by(BLOCK)
            .map(|first| {
                let block = first..columns.min(first + BLOCK);
                let mut scores: Vec<f32> = wide
                    .chunks_exact(columns)
                    .flat_map(|row| row[block.clone()].to_vec())
                    .collect();
                scores.sort_by(f32::total_cmp);
                scores[request.target.count_of(scores.len())]
            })
            .collect();
        let fill = |(): &mut (), row: usize, bits: &mut RowBits<'_>| {
            let scores = &wide[row * columns..];
            bits.set_where(|column| scores[column] <= thresholds[column / BLOCK]);
            Ok(())
        };
        Mask::by_rows(rows, columns, || (), fill)
    }
}

/// The results of a run: bits of the statistics, masks, changed weights.
#[derive(Default, PartialEq)]
struct Seen {
    grams: Vec<(Vec<u32>, usize)>,
    masks: Vec<Mask>,
    weights: Vec<Vec<u8>>,
}

impl MaskObserver for Seen {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        let gram: &Gram = matrix.statistics.and_then(Statistics::downcast).expect("its own");
        let bits = gram.sums.iter().map(|sum| sum.to_bits()).collect();
        self.grams.push((bits, gram.samples));
        self.masks.push(matrix.mask.clone());
        self.weights.push(matrix.weight.as_bytes().to_vec());
        Ok(())
    }
}

const SAMPLES: usize = 5;
const SEQLEN: usize = 40;

/// A run over `m`, on the CPU or on the devices of a plan.
fn run(place: &Place, devices: &Devices, settings: &str) -> Result<Seen> {
    let settings: MemorySettings = serde_json::from_str(settings)?;
    let config = Arc::new(ModelConfig::load(&place.path("m"))?);
    let source: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(&place.path("m"))?);
    let tokens: Vec<u32> = (0..SAMPLES * SEQLEN).map(|at| (at * at * 31 % 307) as u32).collect();
    let mut hidden = HiddenStates::new(None, SAMPLES, [SEQLEN, config.hidden_size], DType::F32)?;
    embed(&mut hidden, &Embedding::open(&*source, &config)?, &tokens, SEQLEN)?;
    let selection = Selection { sparsity_ratio: Some(0.5), ..Selection::default() };
    let technique = Technique::of(&GramBlocks);
    let targets = TargetPlan::resolve(&selection, &GramBlocks, &config)?;
    let (clock, mut seen) = (Clock::new(), Seen::default());
    let reporter = Reporter { clock: &clock, events: &Silent };
    let calibrator = Calibrator::new(&technique, Some(hidden), &config, reporter);
    let output = Output { observers: vec![&mut seen], ..Output::default() };
    let mut pruner = Pruner::new(&technique, &targets, calibrator, output, Vec::new());
    let sweep = Sweep {
        passed: 0,
        source: LayerSource::as_stored(source, Arc::clone(&config)),
        finished: None,
        seqlen: SEQLEN,
        settings,
        products: Products::F32,
        activations: CodedActivations::default(),
        devices,
        ranks: Ranks::alone(),
        reporter,
    };
    sweep.run(Some(&mut pruner), &mut [])?;
    assert_eq!(pruner.into_layers().len(), 2);
    Ok(seen)
}

#[test]
fn large_statistics_accumulate_in_place_and_in_the_order_of_the_samples() -> Result<()> {
    let place = Place::new();
    let cpu = run(&place, &Devices::default(), "{}")?;
    assert_eq!(cpu.grams.len(), 14);
    assert!(cpu.grams.iter().all(|(_, samples)| *samples == SAMPLES));
    let (q, k) = (&cpu.grams[0], &cpu.grams[1]);
    assert!(q == k && q != &cpu.grams[3], "q and k share their input, o has another");
    // The method is not in the table, so a plan for two GPUs comes from a run of another one.
    let ran = place.prune(
        r#"--model m --eval none --sparsity-ratio 0.5 --save out --device cuda --simulate {"gpus":["2GiB","2GiB"]}"#,
    );
    assert_eq!(ran.code, 0);
    let plan = place.manifest("out").plan.expect("runs are planned");
    // Units 8 to 10 come after the eight uploads of a layer: samples that fall to the CPU between those of the devices.
    for refuse in ["", "8", "9x1,10", "all"] {
        let simulation = Simulation {
            gpus: vec!["2GiB".into(), "2GiB".into()],
            refuse: refuse.into(),
            ..Simulation::default()
        };
        let devices = Devices::open(&plan, StoredDtype::F32, Some(&simulation))?;
        assert!(!devices.is_empty());
        assert!(run(&place, &devices, "{}")? == cpu, "refused: {refuse}");
    }
    let matrix = run(&place, &Devices::default(), r#"{"weights": "matrix", "mlp_tokens": 7}"#)?;
    assert!(matrix == cpu, "changed weights do not return to disk");
    // Six runs of two layers with three such inputs: none per sample.
    assert_eq!(BEGUN.load(Ordering::Relaxed), 6 * 2 * 3);
    Ok(())
}

#[test]
fn a_full_verification_is_refused_for_a_method_that_changes_weights() {
    use prune::pipeline::check_verification;
    let wanda = Technique::of(prune::pruning::method("wanda").expect("in the table"));
    for level in [VerifyLevel::Quick, VerifyLevel::Full] {
        assert!(check_verification(&wanda, level).is_ok());
    }
    assert!(check_verification(&Technique::of(&GramBlocks), VerifyLevel::Quick).is_ok());
    let error = check_verification(&Technique::of(&GramBlocks), VerifyLevel::Full).unwrap_err();
    let failure = error.downcast_ref::<Failure>().expect("a refusal");
    assert!(failure.is_usage && failure.message.contains("gram-blocks"), "{failure}");
}
