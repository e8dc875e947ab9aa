//! The GPU's part of a run, computed by candle on the CPU: layers, observations and the head agree with our own, for every division of
//! the work. `prune selftest --device cuda:0` checks the same on a GPU.

mod backward;
mod gram;
mod kernels;
mod shapes;
mod work;

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::linalg::columns::{self, ColumnSums};
use prune::linalg::{StoredDtype, tensor};
use prune::model::observe::FromDevice;
use prune::model::on_device::{LogSumExpPart, Tiling};
use prune::model::{DecoderLayer, Head, InputId, LayerContext, ModelConfig, Observer};
use prune::model::{Embedding, LinearId};
use prune::run::MemorySettings;
use prune::runtime::engine::{Engine, OnCandle};

use crate::oracle::sharp;
use shapes::{HIDDEN, SEQLEN, VOCABULARY, families, llama};

/// Largest difference of a layer of any family, relative. Weights are large there, so that every part of a layer matters.
const FAMILIES: f32 = 1e-5;

/// Sums of squares and of values, and the kept rows, at the four points.
#[derive(Debug, Clone, Default)]
struct Observed {
    widths: [usize; 4],
    keeps: Vec<usize>,
    /// True if a device must send all rows instead of sums.
    needs_rows: bool,
    squares: [Vec<f64>; 4],
    values: [Vec<f64>; 4],
    kept: [Vec<f32>; 4],
    seen: [usize; 4],
}

impl Observed {
    fn new(config: &ModelConfig, needs_rows: bool) -> Self {
        let widths = config.input_widths();
        let widths = InputId::ALL.map(|point| widths[point]);
        Self { widths, keeps: vec![0, 40, 74], needs_rows, ..Self::default() }
    }
}

impl Observer for Observed {
    fn observe(&mut self, point: InputId, rows: &[f32]) {
        let point = point as usize;
        let width = self.widths[point];
        for row in rows.chunks_exact(width) {
            self.squares[point].resize(width, 0.0);
            self.values[point].resize(width, 0.0);
            for (sum, &value) in self.values[point].iter_mut().zip(row) {
                *sum += f64::from(value);
            }
            for (sum, &value) in self.squares[point].iter_mut().zip(row) {
                *sum += f64::from(value).powi(2);
            }
            if self.keeps.contains(&self.seen[point]) {
                self.kept[point].extend_from_slice(row);
            }
            self.seen[point] += 1;
        }
    }

    fn wants(&mut self, _: InputId) -> FromDevice<'_> {
        match self.needs_rows {
            true => FromDevice::Rows,
            false => FromDevice::Sums(&self.keeps),
        }
    }

    fn observe_sums(&mut self, point: InputId, sums: &ColumnSums<'_>, kept: &[f32]) {
        let point = point as usize;
        self.squares[point].resize(sums.squares.len(), 0.0);
        self.values[point].resize(sums.values.len(), 0.0);
        columns::add_sums(&mut self.squares[point], sums.squares);
        columns::add_sums(&mut self.values[point], sums.values);
        self.seen[point] += sums.tokens;
        self.kept[point].extend_from_slice(kept);
    }
}

fn model(folder: &Path, dtype: StoredDtype) -> Result<()> {
    llama(dtype).write(folder, &prune::run::Silent)
}

/// Tilings of a sample: the largest, and a small one in which every tile is cut.
fn tilings(config: &ModelConfig) -> [Tiling; 2] {
    let logits_bytes = ByteSize(5 * 4 * VOCABULARY as u64);
    let small = Tiling { key_value_heads: 1, queries: 7, mlp_tokens: 19, logits_bytes };
    [Tiling::of(&MemorySettings::default(), config), small]
}

/// The largest difference, relative to the largest element.
fn difference(ours: &[f32], theirs: &[f32]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let largest = ours.iter().fold(0f32, |max, value| max.max(value.abs()));
    let apart = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
    apart.fold(0.0, f32::max) / largest
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    let tensor = tensor.to_dtype(DType::F32)?;
    Ok(tensor.flatten_all()?.to_vec1()?)
}

/// Compares a layer, its observed inputs and the head with ours. `tolerance` is the largest difference of a layer, relative.
fn compare(folder: &Path, index: usize, arithmetic: DType, tolerance: f32) -> Result<()> {
    let config = ModelConfig::load(folder)?;
    let name = format!("{}, layer {index}, {arithmetic:?}", config.family.model_type);
    let checkpoint: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(folder)?);
    let mut context = LayerContext::new(&config, SEQLEN);
    let tokens: Vec<u32> = (0..SEQLEN as u32).map(|t| t * 31 % VOCABULARY as u32).collect();
    let state = Embedding::open(&*checkpoint, &config)?.rows(&tokens)?;
    let layer = DecoderLayer::load(&*checkpoint, &config, index)?;
    let mut engine = OnCandle::new(Device::Cpu, arithmetic, "cpu".to_string(), &context)?;
    let ours = values(&layer.forward(&state, &mut context)?)?;
    let mut expected = Observed::new(&config, false);
    layer.capture(&state, &mut context, &mut expected)?;
    engine.begin(&layer)?;
    for id in layer.linear_ids() {
        engine.take_up(&layer, id)?;
    }
    let [whole, small] = tilings(&config);
    for (cut, needs_rows) in [(whole, false), (small, false), (whole, true), (small, true)] {
        let theirs = values(&engine.forward(&layer, &state, &cut)?)?;
        let apart = difference(&ours, &theirs);
        assert!(apart < tolerance, "{name}, {cut:?}: {apart}");
        let mut observed = Observed::new(&config, needs_rows);
        engine.capture(&layer, &state, &cut, &mut observed)?.show(&mut observed)?;
        assert_eq!(observed.seen, [SEQLEN; 4]);
        for point in 0..4 {
            let narrow = |sums: &[f64]| sums.iter().map(|&sum| sum as f32).collect::<Vec<_>>();
            let (ours, theirs) = (&expected.squares[point], &observed.squares[point]);
            let apart = difference(&narrow(ours), &narrow(theirs));
            assert!(apart < 2.0 * tolerance, "{name}, squares of {point}: {apart}");
            let (ours, theirs) = (&expected.values[point], &observed.values[point]);
            let apart = difference(&narrow(ours), &narrow(theirs));
            assert!(apart < 4.0 * tolerance, "{name}, values of {point}: {apart}");
            let apart = difference(&expected.kept[point], &observed.kept[point]);
            assert!(apart < tolerance, "{name}, rows of {point}: {apart}");
        }
    }
    let head = Head::load(&*checkpoint, &config)?;
    let chunk = head.chunk(0..VOCABULARY)?;
    let mut expected = Vec::new();
    chunk.logits(&state, &mut context, |first, logits| {
        expected.extend(LogSumExpPart::of_logits(logits, &(0..VOCABULARY), &tokens[first + 1..]));
        Ok(())
    })?;
    engine.begin_head(&chunk)?;
    for cut in [whole, small] {
        let seen = engine.head_window(&chunk, &state, &tokens, &cut)?;
        assert_eq!(seen.len(), expected.len());
        for (ours, theirs) in expected.iter().zip(&seen) {
            let loss = |seen: &LogSumExpPart| {
                seen.sum.ln() + f64::from(seen.largest)
                    - f64::from(seen.logit.expect("the head is whole"))
            };
            let apart = (loss(ours) - loss(theirs)).abs();
            assert!(apart < 10.0 * f64::from(tolerance), "{name}: {apart}");
        }
    }
    Ok(())
}

#[test]
fn candles_operators_compute_what_our_layer_does() -> Result<()> {
    // f32 sums in another order; bf16 is rounded at every operator.
    for (stored, arithmetic, tolerance) in [
        (StoredDtype::F32, DType::F32, 2e-6),
        (StoredDtype::Bf16, DType::F32, 2e-6),
        (StoredDtype::Bf16, DType::BF16, 2e-2),
        (StoredDtype::F16, DType::F16, 3e-3),
    ] {
        let folder = tempfile::tempdir()?;
        model(folder.path(), stored)?;
        compare(folder.path(), 1, arithmetic, tolerance)?;
    }
    Ok(())
}

#[test]
fn candles_operators_compute_the_layers_of_every_family() -> Result<()> {
    for shape in families() {
        let folder = sharp(&shape)?;
        for index in 0..shape.num_hidden_layers {
            compare(folder.path(), index, DType::F32, FAMILIES)?;
        }
    }
    Ok(())
}

#[test]
fn the_selftest_passes_with_candle_on_the_cpu() {
    let place = crate::support::Place::empty();
    let ran = place.run("selftest");
    if cfg!(not(debug_assertions)) {
        assert!(ran.stderr.contains("--features cuda"), "{}", ran.stderr);
        eprintln!("skipped: a release build has no candle on the CPU to hold against ours");
        return;
    }
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let count = |mark: &str| ran.stderr.lines().filter(|line| line.starts_with(mark)).count();
    assert_eq!((count("ok "), count("skipped ")), (7, 2), "{}", ran.stderr);
    assert_eq!(place.run("selftest --device tpu").code, 2);
}

#[test]
fn a_panic_ends_the_process_with_one_error() {
    let ran = crate::support::Place::empty().run("selftest --panic");
    assert_eq!(ran.code, 101, "{}", ran.stderr);
    let lines: Vec<&str> = ran.stderr.lines().collect();
    assert_eq!(lines[0], "error: this is a bug in prune");
    assert!(ran.stderr.contains("asked to panic") && ran.stderr.contains("selftest.rs"));
    assert!(lines.iter().any(|line| line.starts_with("hint: report it")));
}

#[test]
fn a_layer_that_was_copied_ahead_is_not_copied_again() -> Result<()> {
    let folder = tempfile::tempdir()?;
    model(folder.path(), StoredDtype::F32)?;
    let config = ModelConfig::load(folder.path())?;
    let checkpoint: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(folder.path())?);
    let mut context = LayerContext::new(&config, SEQLEN);
    let tokens: Vec<u32> = (0..SEQLEN as u32).collect();
    let state = Embedding::open(&*checkpoint, &config)?.rows(&tokens)?;
    let layer = DecoderLayer::load(&*checkpoint, &config, 1)?;
    let mut engine = OnCandle::new(Device::Cpu, DType::F32, String::new(), &context)?;
    let copies = engine.copies_ahead().expect("candle copies");
    copies(&layer);
    engine.adopt();
    // From here on nothing can be copied: the weights are not in memory.
    let elsewhere = DecoderLayer::at_rest(&checkpoint, &config, 1)?;
    engine.begin(&elsewhere)?;
    for id in elsewhere.linear_ids() {
        engine.take_up(&elsewhere, id)?;
    }
    let cut = Tiling::of(&MemorySettings::default(), &config);
    let theirs = values(&engine.forward(&elsewhere, &state, &cut)?)?;
    let ours = values(&layer.forward(&state, &mut context)?)?;
    assert!(difference(&ours, &theirs) < 2e-6);
    // A matrix is out of date once it was changed, and the others are not.
    let mut changed = elsewhere.clone();
    changed.linear_mut(LinearId::Q);
    copies(&layer);
    engine.adopt();
    engine.begin(&changed)?;
    assert!(engine.take_up(&changed, LinearId::Q).is_err());
    assert!(engine.take_up(&changed, LinearId::K).is_ok());
    // A copy of other weights is not taken, and a copy is gone where memory is needed.
    for (layer, releases) in [(elsewhere.clone().as_version(1), false), (elsewhere, true)] {
        copies(&DecoderLayer::load(&*checkpoint, &config, 1)?);
        if releases {
            engine.release()?;
        }
        engine.adopt();
        engine.begin(&layer)?;
        assert!(engine.take_up(&layer, LinearId::Q).is_err());
    }
    Ok(())
}

#[test]
fn a_weight_that_is_not_in_memory_is_an_error() -> Result<()> {
    let folder = tempfile::tempdir()?;
    model(folder.path(), StoredDtype::F32)?;
    let config = ModelConfig::load(folder.path())?;
    let checkpoint: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(folder.path())?);
    let context = LayerContext::new(&config, SEQLEN);
    let layer = DecoderLayer::at_rest(&checkpoint, &config, 0)?;
    let mut engine = OnCandle::new(Device::Cpu, DType::F32, String::new(), &context)?;
    engine.begin(&layer)?;
    assert!(engine.take_up(&layer, LinearId::Q).is_err());
    let state = tensor::from_vec(vec![0.0; SEQLEN * HIDDEN], &[SEQLEN, HIDDEN])?;
    let cut = Tiling::of(&MemorySettings::default(), &config);
    let error = engine.forward(&layer, &state, &cut).unwrap_err();
    assert!(error.to_string().contains("v_proj is not on the device"), "{error}");
    Ok(())
}
