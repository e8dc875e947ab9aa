//! `prune selftest` (hidden, feature `selftest`): compares the results of a device with the CPU's results on the same machine.
//!
//! The binary is all a GPU machine needs: models are made on the spot. On the CPU, candle's operators are compared with our own, and
//! the checks that need a GPU (its counters, a real out-of-memory) are reported as skipped.

mod models;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};

use models::{
    Grams, Masks, Model, Sums, difference, families, losses, several_panels, values, wide,
};

use crate::bytes::ByteSize;
use crate::data::DatasetSpec;
use crate::demo::embedded;
use crate::failure::Failure;
use crate::job;
use crate::job::demo::TemporaryFolder;
use crate::model::on_device::{LogSumExpPart, Tiling};
use crate::model::{Head, InputId, LayerContext, LayerGradients};
use crate::run::fallback::FallbackOutcome;
use crate::run::{Events, MemorySettings, Phase, Silent};
use crate::runtime::device_worker::{DeviceWorker, WorkingDevice};
use crate::runtime::engine::{Engine, OnCandle};
use crate::runtime::ledger::{Ledger, Refusals};
use crate::runtime::{Compute, HiddenStates};
use crate::settings::{CalibrationSettings, DeviceChoice, Settings};

/// A check of a device; models are written to the folder.
type Check = fn(&Bench, &Path) -> Result<CheckOutcome>;

/// The outcome of a check.
enum CheckOutcome {
    /// As it should be, with the figures.
    Held(String),
    /// This device cannot show it, for the given reason.
    Skipped(&'static str),
}

/// Runs every check and emits a line for each.
pub fn selftest(device: &DeviceChoice, events: &dyn Events) -> Result<()> {
    let bench = Bench::new(device)?;
    let folder = TemporaryFolder::new("prune-selftest")?;
    let checks: [(&str, Check); 9] = [
        ("a layer, its observations and the head", Bench::layers),
        ("Gram matrices of a layer's inputs", Bench::grams),
        ("gradients of a layer", Bench::gradients),
        ("layers of other families", Bench::families),
        ("rows wider than 8192 columns", Bench::wide_rows),
        ("a sample in smaller pieces", Bench::smaller_pieces),
        ("masks and perplexity of the demo model", Bench::masks),
        ("predicted and counted memory", Bench::memory),
        ("a real out-of-memory", Bench::out_of_memory),
    ];
    events.note(format!("self-test of {} ({})", bench.name, bench.driver_name));
    let mut failed = 0;
    for (name, check) in checks {
        let (mark, detail) = match check(&bench, &folder.path) {
            Ok(CheckOutcome::Held(detail)) => ("ok", detail),
            Ok(CheckOutcome::Skipped(why)) => ("skipped", why.to_string()),
            Err(error) => {
                failed += 1;
                ("FAILED", format!("{error:#}"))
            }
        };
        events.note(format!("{mark:<8} {name}: {detail}"));
    }
    if failed > 0 {
        return Err(Failure::new(format!(
            "{failed} of {} checks failed on {}",
            checks.len(),
            bench.name
        ))
        .into());
    }
    Ok(())
}

/// The folder of the demo model, which is written once.
fn demo_model(folder: &Path) -> Result<PathBuf> {
    let demo = folder.join("demo");
    if !demo.exists() {
        embedded::write_model(&demo)?;
    }
    Ok(demo)
}

/// The device under test.
struct Bench {
    name: String,
    driver_name: String,
    device: Device,
}

/// Largest relative difference of a layer by the dtype of the arithmetic. f32 differs by the order of its sums; f16 and bf16 round at
/// every operator. Measured with candle on the CPU: at most 7e-7, 2e-3, 1e-2.
const TOLERANCES: [(DType, f32); 3] = [(DType::F32, 2e-5), (DType::F16, 5e-3), (DType::BF16, 4e-2)];

impl Bench {
    fn new(device: &DeviceChoice) -> Result<Self> {
        match device {
            DeviceChoice::Auto | DeviceChoice::Cpu => Ok(Self {
                name: "cpu".to_string(),
                driver_name: "candle's operators".to_string(),
                device: Device::Cpu,
            }),
            DeviceChoice::Cuda(index) => Self::cuda(index.unwrap_or(0)),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda(index: usize) -> Result<Self> {
        use crate::runtime::engine::cuda;
        let gpus = cuda::gpus();
        let gpu = gpus.get(index).ok_or_else(|| {
            Failure::new(format!("cuda:{index} is not there: {} GPUs", gpus.len()))
        })?;
        Ok(Self {
            name: format!("cuda:{index}"),
            driver_name: format!("{}, {} free", gpu.name, gpu.free),
            device: cuda::open(index)?,
        })
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(_index: usize) -> Result<Self> {
        Err(Failure::usage("this build has no CUDA")
            .hint("docs/install.md says how to build with CUDA")
            .into())
    }

    fn engine(&self, model: &Model, dtype: DType) -> Result<OnCandle> {
        OnCandle::new(self.device.clone(), dtype, self.driver_name.clone(), &model.context)
    }

    fn loaded(&self, model: &Model, dtype: DType) -> Result<OnCandle> {
        let mut engine = self.engine(model, dtype)?;
        engine.begin(&model.layer)?;
        for id in model.layer.linear_ids() {
            engine.take_up(&model.layer, id)?;
        }
        Ok(engine)
    }

    /// Forward, capture and head in every dtype, against the host.
    fn compare(&self, model: &mut Model, cut: &Tiling) -> Result<Vec<String>> {
        let Model { layer, context, state, tokens, source, config, .. } = &mut *model;
        let ours = values(&layer.forward(state, context)?)?;
        let mut observed = Sums::new(config);
        layer.capture(state, context, &mut observed)?;
        let head = Head::load(&**source, config)?;
        let chunk = head.chunk(0..config.vocab_size)?;
        let ours_lost = losses(&LogSumExpPart::on_host(&chunk, state, tokens, context)?);
        let mut figures = Vec::new();
        for (dtype, tolerance) in TOLERANCES {
            let mut engine = self.loaded(model, dtype)?;
            let Model { layer, state, tokens, .. } = &*model;
            let apart = difference(&ours, &values(&engine.forward(layer, state, cut)?)?);
            let mut theirs = Sums::new(&model.config);
            engine.capture(layer, state, cut, &mut theirs)?.show(&mut theirs)?;
            let sums = InputId::ALL
                .into_iter()
                .map(|point| difference(&observed.0[point], &theirs.0[point]))
                .fold(0.0, f32::max);
            // Once more, with weights copied by a second thread while this thread computes, as in a sweep.
            let copies = engine.copies_ahead().context("candle copies")?;
            let again = std::thread::scope(|scope| {
                let copied = scope.spawn(|| copies(layer));
                let out = engine.forward(layer, state, cut);
                copied.join().map_err(|_| anyhow::anyhow!("the copy panicked"))?;
                out
            })?;
            engine.drop_weights();
            engine.adopt();
            engine.begin(layer)?;
            for id in layer.linear_ids() {
                engine.take_up(layer, id)?;
            }
            let ahead = engine.forward(layer, state, cut)?;
            let apart = apart
                .max(difference(&ours, &values(&again)?))
                .max(difference(&ours, &values(&ahead)?));
            engine.begin_head(&chunk)?;
            let seen = engine.head_window(&chunk, state, tokens, cut)?;
            let loss = difference(&ours_lost, &losses(&seen));
            let worst = apart.max(sums / 2.0).max(loss);
            figures.push(format!("{} {apart:.1e} / {sums:.1e} / {loss:.1e}", dtype.as_str()));
            ensure!(
                worst <= tolerance,
                "{}: off by {apart:.1e} (layer), {sums:.1e} (sums of squares), {loss:.1e} (head); {tolerance:.0e} is allowed",
                dtype.as_str()
            );
        }
        Ok(figures)
    }

    fn layers(&self, folder: &Path) -> Result<CheckOutcome> {
        let demo = demo_model(folder)?;
        let mut model = Model::open(&demo, 256)?;
        let cut = Tiling::of(&MemorySettings::default(), &model.config);
        Ok(CheckOutcome::Held(self.compare(&mut model, &cut)?.join(", ")))
    }

    /// The Gram matrices and column sums of two samples, each a block, with several panels.
    fn grams(&self, folder: &Path) -> Result<CheckOutcome> {
        let mut model = Model::random(folder, "several-panels", &several_panels(), 256)?;
        let mut cut = Tiling::of(&MemorySettings::default(), &model.config);
        cut.mlp_tokens = 100;
        let mut ours = Grams::new(&model.config);
        for _ in 0..2 {
            let Model { layer, context, state, .. } = &mut model;
            layer.capture(state, context, &mut ours)?;
        }
        let (ours, mut figures) = (ours.all(), Vec::new());
        for (dtype, tolerance) in TOLERANCES {
            let mut engine = self.loaded(&model, dtype)?;
            let mut theirs = Grams::new(&model.config);
            for _ in 0..2 {
                engine.begin_block();
                let sums = engine.capture(&model.layer, &model.state, &cut, &mut theirs)?;
                sums.show(&mut theirs)?;
                engine.keep_block()?;
            }
            let kept = engine.take_kept();
            kept.hand_on(&mut |point, first, sums| theirs.add(point, first, sums))?;
            let pairs = ours.iter().zip(theirs.all());
            let apart = pairs.map(|(ours, theirs)| difference(ours, &theirs)).fold(0.0, f32::max);
            ensure!(apart <= 2.0 * tolerance, "{dtype:?}: off by {apart:.1e}");
            figures.push(format!("{} {apart:.1e}", dtype.as_str()));
        }
        Ok(CheckOutcome::Held(figures.join(", ")))
    }

    fn gradients(&self, folder: &Path) -> Result<CheckOutcome> {
        let mut model = Model::open(&demo_model(folder)?, 256)?;
        let cut = Tiling::of(&MemorySettings::default(), &model.config);
        let apart = self.compare_gradients(&mut model, &cut)?;
        Ok(CheckOutcome::Held(format!("off by {apart:.1e}")))
    }

    /// The gradients of all weights, norms and the input, in f32: the distance from the host's.
    fn compare_gradients(&self, model: &mut Model, cut: &Tiling) -> Result<f32> {
        let mut engine = self.loaded(model, DType::F32)?;
        let Model { layer, context, state, .. } = model;
        let zeros = || LayerGradients::new(layer, layer.linear_ids()).with_norms(layer);
        let (mut ours, mut theirs) = (zeros(), zeros());
        let sample = [&*state, &*state];
        let dx = engine.backward(layer, sample, &mut theirs, cut)?;
        engine.collect_gradients(&mut theirs)?;
        let expected = layer.backward(state, state, &mut ours, context)?;
        let mut apart = difference(&values(&expected)?, &values(&dx)?);
        for id in layer.linear_ids() {
            let of = ours.weight(id).zip(theirs.weight(id));
            let (ours, theirs) = of.context("a gradient")?;
            apart = apart.max(difference(ours, theirs));
        }
        for (role, _) in layer.norms() {
            let norms = ours.norm(role).zip(theirs.norm(role)).context("norms")?;
            apart = apart.max(difference(norms.0, norms.1));
        }
        ensure!(apart <= TOLERANCES[0].1, "gradients off by {apart:.1e}");
        Ok(apart)
    }

    /// A layer, the head and the gradients of every family that differs from Llama.
    fn families(&self, folder: &Path) -> Result<CheckOutcome> {
        let mut figures = Vec::new();
        for shape in families()? {
            let name = shape.family.model_type;
            let mut model = Model::random(folder, name, &shape, 256)?;
            let whole = Tiling::of(&MemorySettings::default(), &model.config);
            let cut = Tiling { key_value_heads: 1, queries: 100, mlp_tokens: 100, ..whole };
            let layer = self.compare(&mut model, &cut).context(name)?.join(", ");
            let gradients = self.compare_gradients(&mut model, &cut).context(name)?;
            figures.push(format!("{name} {layer}, gradients {gradients:.1e}"));
        }
        Ok(CheckOutcome::Held(figures.join("; ")))
    }

    fn wide_rows(&self, folder: &Path) -> Result<CheckOutcome> {
        let mut model = Model::random(folder, "wide", &wide(), 512)?;
        let cut = Tiling::of(&MemorySettings::default(), &model.config);
        Ok(CheckOutcome::Held(self.compare(&mut model, &cut)?.join(", ")))
    }

    /// A device whose account refuses the first attempts of every sample.
    fn smaller_pieces(&self, folder: &Path) -> Result<CheckOutcome> {
        let mut model = Model::random(folder, "wide", &wide(), 512)?;
        // 8 uploads come first; then the sample, refused whole twice and halved once.
        let capacity = ByteSize(1 << 40);
        let refusals = "8x3".parse::<Refusals>().map_err(anyhow::Error::msg)?;
        let ledger = Ledger::new(capacity, ByteSize::ZERO, refusals);
        let (apart, outcomes) = self.pass(&mut model, ledger)?;
        ensure!(outcomes == [FallbackOutcome::Smaller], "the ladder went {outcomes:?}");
        ensure!(apart <= TOLERANCES[0].1, "off by {apart:.1e}");
        Ok(CheckOutcome::Held(format!("off by {apart:.1e}")))
    }

    /// A sample through a layer on a device, in f32: the distance from the host's result, and the outcomes of the ladder.
    fn pass(&self, model: &mut Model, ledger: Ledger) -> Result<(f32, Vec<FallbackOutcome>)> {
        let ours = values(&model.layer.forward(&model.state, &mut model.context)?)?;
        let seqlen = model.tokens.len();
        let worker = DeviceWorker::new(
            WorkingDevice {
                name: self.name.clone(),
                engine: Box::new(self.engine(model, DType::F32)?),
                ledger,
            },
            Tiling::of(&MemorySettings::default(), &model.config),
            Arc::new(model.config.clone()),
            seqlen,
            &Silent,
        );
        let mut hidden =
            HiddenStates::new(None, 1, [seqlen, model.config.hidden_size], DType::F32)?;
        hidden.put(0, model.state.clone())?;
        let context = LayerContext::new(&model.config, seqlen);
        let by_layer = vec![vec![self.name.clone()]];
        let mut compute = Compute::new(context, vec![worker], by_layer, &Silent);
        compute.forward(Phase::Propagate, &model.layer, &mut hidden, &|_| ())?;
        let fallbacks = compute.finish().fallbacks;
        let apart = difference(&ours, &values(&hidden.get(0)?)?);
        Ok((apart, fallbacks.iter().map(|fallback| fallback.outcome).collect()))
    }

    /// The whole job on the demo model, here and on the CPU.
    fn masks(&self, folder: &Path) -> Result<CheckOutcome> {
        let demo = demo_model(folder)?;
        let run = |device: &str| -> Result<(Masks, f64)> {
            let text: DatasetSpec = "demo".parse()?;
            let mut settings = Settings::pruning(&demo);
            settings.calibration =
                Some(CalibrationSettings { dataset: text.clone(), nsamples: 8, seed: 0 });
            settings.evaluation.eval_dataset = text;
            settings.evaluation.eval_windows = Some(4);
            if let Some(sparsity) = &mut settings.sparsity {
                sparsity.selection.sparsity_ratio = Some(0.5);
            }
            settings.device.device = device.parse().map_err(anyhow::Error::msg)?;
            let mut masks = Masks::default();
            let manifest = job::prune(settings, &Silent, Some(&mut masks))?;
            ensure!(manifest.fallbacks.is_empty(), "{} units fell", manifest.fallbacks.len());
            let pruned = manifest.perplexity.pruned.context("it was measured")?;
            Ok((masks, pruned.perplexity))
        };
        let (ours, theirs) = (run("cpu")?, run(&self.name)?);
        let agreement = ours.0.agreement(&theirs.0)?;
        let figures = format!(
            "{:.4} % of the masks' bits agree; perplexity {:.4} here, {:.4} on the CPU",
            100.0 * agreement,
            theirs.1,
            ours.1
        );
        ensure!(agreement >= 0.999 && (theirs.1 / ours.1 - 1.0).abs() < 0.01, "{figures}");
        Ok(CheckOutcome::Held(figures))
    }

    #[cfg(not(feature = "cuda"))]
    fn memory(&self, _folder: &Path) -> Result<CheckOutcome> {
        Ok(CheckOutcome::Skipped("the CPU has no memory pool that counts"))
    }

    #[cfg(not(feature = "cuda"))]
    fn out_of_memory(&self, _folder: &Path) -> Result<CheckOutcome> {
        Ok(CheckOutcome::Skipped("the CPU's memory is not to be used up"))
    }

    /// Compares the predicted memory of a layer and a sample with the pool's count.
    #[cfg(feature = "cuda")]
    fn memory(&self, folder: &Path) -> Result<CheckOutcome> {
        use crate::runtime::engine::cuda;
        if cuda::memory(&self.device).is_none() {
            return Ok(CheckOutcome::Skipped("this device has no memory pool that counts"));
        }
        let seqlen = 1024;
        let model = Model::random(folder, "wide", &wide(), seqlen)?;
        let cut = Tiling::of(&MemorySettings::default(), &model.config);
        cuda::reset_peaks(&self.device);
        let before = cuda::memory(&self.device).unwrap_or_default();
        let mut engine = self.loaded(&model, DType::BF16)?;
        let mut sums = Sums::new(&model.config);
        engine.capture(&model.layer, &model.state, &cut, &mut sums)?.show(&mut sums)?;
        engine.forward(&model.layer, &model.state, &cut)?;
        let after = cuda::memory(&self.device).unwrap_or_default();
        let counted = ByteSize(after.peak_allocated.0.saturating_sub(before.allocated.0));
        let predicted =
            Tiling::layer_bytes(&model.config, 2) + cut.pass_bytes(&model.config, seqlen, 2);
        let figures = format!("{predicted} predicted, {counted} counted");
        ensure!(predicted.0.abs_diff(counted.0) <= (counted.0 / 10).max(32 << 20), "{figures}");
        Ok(CheckOutcome::Held(figures))
    }

    /// Fills the device but for a little, and lets a sample pass all the same.
    #[cfg(feature = "cuda")]
    fn out_of_memory(&self, folder: &Path) -> Result<CheckOutcome> {
        use crate::linalg::StoredDtype;
        use crate::runtime::engine::{OutOfMemory, cuda};
        use crate::synthetic::RandomCheckpoint;
        use candle_core::Tensor;
        if matches!(self.device, Device::Cpu) {
            return Ok(CheckOutcome::Skipped("the CPU's memory is not to be used up"));
        }
        // In f32, so that no cast takes memory beside the weights.
        let shape = RandomCheckpoint { dtype: StoredDtype::F32, ..wide() };
        let mut model = Model::random(folder, "wide-f32", &shape, 1024)?;
        let layer = Tiling::layer_bytes(&model.config, 4);
        let mut ballast = Vec::new();
        // Ever smaller pieces, until what is left is the layer and some 48 MiB: less than a whole sample takes.
        let mut piece = 4usize << 30;
        let wanted_free = layer.0 as usize + (48 << 20);
        while piece >= 8 << 20 {
            let free = cuda::memory(&self.device).unwrap_or_default().free.0 as usize;
            if free < wanted_free + piece {
                piece /= 2;
                continue;
            }
            match Tensor::zeros(piece, DType::U8, &self.device) {
                Ok(tensor) => ballast.push(tensor),
                Err(error) => {
                    let error = anyhow::Error::new(error);
                    ensure!(
                        OutOfMemory::of(&error).is_some(),
                        "not taken for an out-of-memory: {error:#}"
                    );
                    piece /= 2;
                }
            }
        }
        let ledger = Ledger::new(ByteSize(1 << 40), ByteSize::ZERO, Refusals::default());
        let (apart, outcomes) = self.pass(&mut model, ledger)?;
        let figures = format!("the ladder went {outcomes:?}, off by {apart:.1e}");
        drop(ballast);
        // What is left is the driver's choice: it may be too little for the smallest pieces, too.
        let has_fallen = matches!(outcomes[..], [FallbackOutcome::Smaller | FallbackOutcome::Cpu]);
        ensure!(has_fallen && apart <= TOLERANCES[0].1, "{figures}");
        let ledger = Ledger::new(ByteSize(1 << 40), ByteSize::ZERO, Refusals::default());
        let (apart, outcomes) = self.pass(&mut model, ledger)?;
        ensure!(
            outcomes.is_empty() && apart <= TOLERANCES[0].1,
            "afterwards, with all memory free, the ladder went {outcomes:?}"
        );
        Ok(CheckOutcome::Held(figures))
    }
}
