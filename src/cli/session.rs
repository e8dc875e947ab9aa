//! What `prune` and `prune eval` begin with: the checkpoint opened and checked, texts turned into tokens, threads and hidden
//! states settled. Everything that can be wrong is found here, before the sweep.

use std::error::Error;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use candle_core::DType;

use super::args::{ComputeDtype, DeviceArgs, EvaluationArgs, HiddenStatesArg, ModelArgs, gpus};
use super::located::{self, HubModel};
use super::planned;
use crate::bytes::ByteSize;
use crate::checkpoint::Checkpoint;
use crate::data::footprint::{self, TokenizerSize};
use crate::data::{self, DatasetSpec, Evaluation, Role, Source, TextCache, Tokenizer};
use crate::eval::Perplexity;
use crate::failure::Failure;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, StoredDtype, kernel};
use crate::model::on_device::candle_dtype;
use crate::model::{DecoderLayer, Dtypes, Embedding, Head, ModelConfig, Projection};
use crate::pipeline::{RunShape, embed};
use crate::run::manifest::{Arithmetic, Manifest, ModelReport, Perplexities, SCHEMA};
use crate::run::{Event, Events, HiddenStatesStorage, MemorySettings, Moment, Phase, Plan};
use crate::runtime::{
    Clock, Devices, HiddenStates, Side, Simulation, SweepReport, check_spill_folder,
};

/// Worker threads that may be asked for.
const MOST_THREADS: RangeInclusive<usize> = 1..=1024;

/// Tokens per sample unless said otherwise: what the literature after the original compares at.
const DEFAULT_SEQLEN: usize = 2048;

/// A checkpoint opened for a run.
pub struct Session {
    /// The weights.
    pub checkpoint: Arc<Checkpoint>,
    /// The shape.
    pub config: Arc<ModelConfig>,
    /// The folder as given, or a model's snapshot in the hub's cache.
    pub folder: PathBuf,
    /// Whose snapshot that is.
    hub_model: Option<HubModel>,
    cache_dir: Option<PathBuf>,
    /// Tokens per sample and window.
    pub seqlen: usize,
    /// Worker threads.
    pub threads: usize,
    /// `--memory-settings`: the one setting that may be planned.
    memory_settings: Option<MemorySettings>,
    /// How products with bf16 weights are computed on the CPU.
    pub products: Products,
    /// The dtype GPUs compute in.
    gpu_dtype: StoredDtype,
    simulation: Option<Simulation>,
    gpu_names: Vec<String>,
    /// Where time goes.
    pub clock: Clock,
    started: (Instant, u64),
}

impl Session {
    /// Opens the checkpoint, checks every tensor a sweep will read, and starts the worker threads.
    ///
    /// # Errors
    /// Fails for anything missing, truncated, of another shape or unsupported, naming file and tensor; for an id of the hub
    /// also when it cannot be downloaded.
    pub fn open(
        model: &ModelArgs,
        device: &DeviceArgs,
        seqlen: Option<usize>,
        events: &dyn Events,
    ) -> Result<Self> {
        device.check()?;
        let clock = Clock::new();
        clock.mark(Moment::Start, events);
        let unix_seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_secs());
        let started = (Instant::now(), unix_seconds);
        let (folder, hub_model) = located::model(model, events)?;
        let config = Arc::new(ModelConfig::load(&folder)?);
        let checkpoint = Arc::new(Checkpoint::open(&folder)?);
        for layer in 0..config.num_hidden_layers {
            DecoderLayer::check(&*checkpoint, &config, layer)?;
        }
        warn_of_unused(&checkpoint, &config, events);
        let seqlen = check_seqlen(seqlen, &config)?;
        let threads = worker_threads(device)?;
        let mut session = Self {
            checkpoint,
            config,
            folder,
            hub_model,
            cache_dir: model.cache_dir.clone(),
            seqlen,
            threads,
            memory_settings: device.memory_settings.clone(),
            products: Products::F32,
            gpu_dtype: StoredDtype::F32,
            simulation: device.simulate.clone(),
            gpu_names: match (&device.simulate, device.names_the_cpu()) {
                (None, false) => gpus().into_iter().map(|gpu| gpu.name).collect(),
                _ => Vec::new(),
            },
            clock,
            started,
        };
        session.products = products(model.dtype, session.dtype())?;
        session.gpu_dtype = match model.dtype {
            // What is simulated is the host's own arithmetic.
            _ if session.simulation.is_some() => StoredDtype::F32,
            ComputeDtype::F32 | ComputeDtype::Bf16x3 => StoredDtype::F32,
            ComputeDtype::Auto
                if session.dtype() == StoredDtype::Bf16 && !device.gpus_have_bf16() =>
            {
                events.note("a GPU here has no bf16: layers are computed in f32".to_string());
                StoredDtype::F32
            }
            ComputeDtype::Auto | ComputeDtype::Bf16 => session.dtype(),
        };
        Ok(session)
    }

    /// The dtypes of the weights: what memory estimates are made with.
    pub fn dtypes(&self) -> Dtypes {
        crate::model::stored_dtypes(&*self.checkpoint, &self.config)
    }

    /// The dtype of the decoder's matrices, of different ones the widest.
    pub fn dtype(&self) -> StoredDtype {
        self.dtypes().layers
    }

    /// The tokenizer, loaded as part of the tokenise phase.
    ///
    /// # Errors
    /// Fails when there is none.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        self.clock
            .measure(Phase::Tokenise, || Tokenizer::load(&self.folder))
    }

    /// Turns the evaluation text into windows.
    ///
    /// # Errors
    /// Fails when the text is missing or too short, and for ids the embedding does not have.
    pub fn evaluation(
        &self,
        args: &EvaluationArgs,
        source: &Source,
        tokenizer: &Tokenizer,
        cache: &TextCache,
        events: &dyn Events,
    ) -> Result<Evaluation> {
        let windows = args
            .eval_windows
            .map(|windows| usize::try_from(windows).unwrap_or(usize::MAX));
        let evaluation = self.clock.measure(Phase::Tokenise, || {
            data::evaluation(source, tokenizer, self.seqlen, windows, cache, events)
        })?;
        self.check_ids(&evaluation.tokens, tokenizer, "evaluation")?;
        Ok(evaluation)
    }

    /// Checks that the head and the embedding can be read and the evaluation text is there, and gives back where. Cheap, but
    /// for a download.
    ///
    /// # Errors
    /// Fails when one is not.
    pub fn check_evaluation(&self, args: &EvaluationArgs, events: &dyn Events) -> Result<Source> {
        self.check_ends(events)?;
        self.check_text(&args.eval_dataset, Role::Evaluation, events)
    }

    /// Checks that the embedding, the last norm and the head can be read, and says where another head is passed over.
    ///
    /// # Errors
    /// Fails when one is missing or of another shape.
    pub fn check_ends(&self, events: &dyn Events) -> Result<()> {
        Embedding::open(&*self.checkpoint, &self.config)?;
        Head::check(&*self.checkpoint, &self.config)?;
        if Head::is_passed_over(&*self.checkpoint, &self.config)? {
            events.warn(
                "config.json says that the embedding is the head (`tie_word_embeddings`), and this checkpoint has another `lm_head.weight`: \
                 the embedding is used. Other programs may use the head (transformers 5 does); `\"tie_word_embeddings\": false` in \
                 config.json makes all of them do so"
                    .to_string(),
            );
        }
        Ok(())
    }

    /// Checks that a text is there, from the hub where it was named without a path, and gives back where.
    ///
    /// # Errors
    /// Fails when it is not.
    pub fn check_text(
        &self,
        dataset: &DatasetSpec,
        role: Role,
        events: &dyn Events,
    ) -> Result<Source> {
        let dataset = located::dataset(dataset, role, self.cache_dir.as_deref(), events)?;
        let source = Source::find(&dataset, role)?;
        source.check()?;
        Ok(source)
    }

    /// Token ids must lie inside the embedding.
    ///
    /// # Errors
    /// Fails for the largest id that does not, with the numbers.
    pub fn check_ids(&self, tokens: &[u32], tokenizer: &Tokenizer, text: &str) -> Result<()> {
        match tokens.iter().max() {
            Some(&largest) if largest as usize >= self.config.vocab_size => {
                Err(Failure::new(format!("the tokenizer of `{}` is larger than its embedding", self.folder.display()))
                    .detail(format!(
                        "the {text} text has token id {largest} (the tokenizer goes up to {}), the embedding has {} rows",
                        tokenizer.largest_id(),
                        self.config.vocab_size
                    ))
                    .hint("use the tokenizer.json this checkpoint was published with")
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// A run of this checkpoint in numbers, before its texts are known: nothing is calibrated or evaluated yet.
    pub fn job(&self) -> RunShape<'_> {
        RunShape {
            config: &self.config,
            dtypes: self.dtypes(),
            gpu_dtype: self.gpu_dtype,
            seqlen: self.seqlen,
            samples: 0,
            windows: 0,
            sides: &[],
            prunes: false,
            saves: false,
            threads: self.threads,
            products: self.products,
            tokenising: ByteSize::ZERO,
            settings: self.memory_settings.clone(),
        }
    }

    /// What tokenising these texts takes at its peak; nothing without texts.
    ///
    /// # Errors
    /// Fails when a text or the tokenizer is missing or cannot be read.
    pub fn tokenising<'t>(
        &self,
        texts: impl IntoIterator<Item = &'t Source>,
        cache: &TextCache,
    ) -> Result<ByteSize> {
        let mut peak = ByteSize::ZERO;
        let mut tokenizer = None;
        for text in texts {
            let size = match (tokenizer, || TokenizerSize::of(&self.folder)) {
                (Some(size), _) => size,
                (None, of) => match of() {
                    Ok(size) => *tokenizer.insert(size),
                    Err(error) if error.is::<Failure>() => return Err(error),
                    // Of another kind than we count in; loading it says whether it is one at all.
                    Err(_) => return Ok(peak),
                },
            };
            let outlook = text.outlook(&self.folder, cache)?;
            // Documents are tokenised one by one, or some of them joined: they are small beside the tokenizer.
            let bytes = outlook.text.unwrap_or(footprint::DOCUMENTS);
            let needed = footprint::tokenize(size, bytes, self.threads, outlook.is_cached);
            peak = peak.max(needed);
        }
        Ok(peak)
    }

    /// Plans a job on this machine.
    ///
    /// # Errors
    /// Fails where it does not fit, with the shortage and flags that do.
    pub fn plan(&self, job: &RunShape<'_>, device: &DeviceArgs) -> Result<Plan> {
        Ok(planned::plan(
            job,
            &device.inventory(self.threads)?,
            &device.policy()?,
        )?)
    }

    /// Opens the devices of a plan, and lets the clock read their memory.
    ///
    /// # Errors
    /// Fails when one cannot be opened.
    pub fn devices(&self, plan: &Plan) -> Result<Devices> {
        let devices = Devices::open(plan, self.gpu_dtype, self.simulation.as_ref())?;
        if let Some(gauge) = devices.gauge() {
            self.clock.read_devices(gauge);
        }
        Ok(devices)
    }

    /// The dtype hidden states rest in: that of the devices that compute.
    fn resting_dtype(&self, devices: &Devices) -> DType {
        candle_dtype(if devices.is_empty() {
            StoredDtype::F32
        } else {
            self.gpu_dtype
        })
    }

    /// Returns the folder of the spill file where the plan keeps hidden states on disk. Warns unless the user chose the disk.
    ///
    /// # Errors
    /// Fails when no file can be created in the folder.
    pub fn spill_folder(
        &self,
        plan: &Plan,
        device: &DeviceArgs,
        run_folder: Option<&Path>,
        events: &dyn Events,
    ) -> Result<Option<PathBuf>> {
        if plan.hidden_states.storage == HiddenStatesStorage::Ram {
            return Ok(None);
        }
        let folder = device
            .offload_folder
            .clone()
            .unwrap_or_else(|| run_folder.map_or_else(std::env::temp_dir, Path::to_path_buf));
        if device.hidden_states == HiddenStatesArg::Auto {
            let budget = plan.cpu().and_then(|cpu| cpu.budget).unwrap_or_default();
            events.warn(format!(
                "hidden states ({}) do not fit beside the rest into {budget}: they spill to `{}`",
                plan.hidden_states.bytes,
                folder.display()
            ));
        }
        check_spill_folder(&folder)?;
        Ok(Some(folder))
    }

    /// A stream of embedded samples, `tokens` `[samples, seqlen]`.
    ///
    /// # Errors
    /// Fails when the embedding cannot be read or the spill file not be written.
    pub fn embedded(
        &self,
        spill_folder: Option<&Path>,
        devices: &Devices,
        stream: &str,
        tokens: &[u32],
        events: &dyn Events,
    ) -> Result<HiddenStates> {
        let samples = tokens.len() / self.seqlen;
        events.emit(Event::PhaseStarted {
            phase: format!("embed {stream} samples"),
            unit: "samples",
            steps: samples as u64,
        });
        let embedding = Embedding::open(&*self.checkpoint, &self.config)?;
        let mut hidden = HiddenStates::new(
            spill_folder,
            stream,
            samples,
            self.seqlen,
            self.config.hidden_size,
            self.resting_dtype(devices),
        )?;
        self.clock
            .measure(Phase::Embed, || {
                embed(&mut hidden, &embedding, tokens, self.seqlen)
            })
            .context("embedding the samples")?;
        Ok(hidden)
    }

    /// A perplexity passenger over these windows.
    ///
    /// # Errors
    /// As [`Session::embedded`].
    pub fn perplexity<'a>(
        &'a self,
        side: Side,
        spill_folder: Option<&Path>,
        devices: &Devices,
        windows: &'a Evaluation,
        events: &'a dyn Events,
    ) -> Result<Perplexity<'a>> {
        let hidden = self.embedded(spill_folder, devices, side.name(), &windows.tokens, events)?;
        Ok(Perplexity::new(
            side,
            hidden,
            &windows.tokens,
            self.seqlen,
            self.config.num_hidden_layers,
            &self.clock,
            events,
        ))
    }

    /// The passes of a sweep: one sample through one layer, or through the head. `finished` layers are passed by all once.
    pub fn passes(
        &self,
        calibration_samples: usize,
        windows: usize,
        sides: usize,
        finished: usize,
    ) -> u64 {
        let layers = self.config.num_hidden_layers;
        let left = layers - finished.min(layers);
        // Calibration samples go through each layer twice, once dense and once pruned, and no further than the last one.
        let calibration = match left {
            0 => 0,
            left => calibration_samples * (finished + 2 * left - 1),
        };
        (calibration + windows * sides * (layers + 1)) as u64
    }

    /// The GPUs of this machine that may be used, by name; none where they are simulated.
    pub fn gpu_names(&self) -> Vec<String> {
        self.gpu_names.clone()
    }

    /// When the run began, in seconds since 1970 (UTC).
    pub fn started_unix_seconds(&self) -> u64 {
        self.started.1
    }

    /// The manifest of a run that ends now, with everything the session knows; results are filled in by the command.
    ///
    /// # Errors
    /// Fails only when the config cannot be turned into JSON.
    pub fn manifest(
        &self,
        command: &str,
        arguments: Vec<String>,
        plan: &Plan,
        swept: SweepReport,
    ) -> Result<Manifest> {
        let phases = self.clock.report();
        let seconds = self.started.0.elapsed().as_secs_f64();
        let parameters = self
            .checkpoint
            .tensors()
            .map(|tensor| {
                tensor
                    .shape
                    .iter()
                    .map(|&size| size as u64)
                    .product::<u64>()
            })
            .sum();
        Ok(Manifest {
            schema: SCHEMA,
            prune_version: env!("CARGO_PKG_VERSION").to_string(),
            command: command.to_string(),
            arguments,
            started_unix_seconds: self.started.1,
            seconds,
            sessions: Vec::new(),
            model: ModelReport {
                path: self.folder.display().to_string(),
                id: self.hub_model.as_ref().map(|model| model.id.clone()),
                revision: self.hub_model.as_ref().map(|model| model.revision.clone()),
                commit: self.hub_model.as_ref().map(|model| model.commit.clone()),
                identity: self.checkpoint.identity(),
                config: serde_json::to_value(&*self.config)?,
                parameters,
                bytes: self.checkpoint.total_bytes(),
            },
            arithmetic: self.arithmetic(plan),
            pruning: None,
            calibration: None,
            sparsity: None,
            layers: Vec::new(),
            perplexity: Perplexities::default(),
            evaluation: None,
            gate: None,
            hidden_states: plan.hidden_states.storage,
            plan: Some(plan.clone()),
            fallbacks: swept.fallbacks,
            devices: swept.devices,
            peak_anonymous: phases.iter().filter_map(|phase| phase.peak_anonymous).max(),
            phases,
            memory: self.clock.samples(),
            profile: None,
            output: None,
            masks: None,
            warnings: Vec::new(),
        })
    }

    /// The path arithmetic took: that of the devices that compute layers.
    pub fn arithmetic(&self, plan: &Plan) -> Arithmetic {
        let gpus: Vec<&str> = plan
            .devices
            .iter()
            .map(|device| device.device.as_str())
            .filter(|&device| device != "cpu")
            .collect();
        let on_gpus = !gpus.is_empty() && self.simulation.is_none();
        let (dtype, kernel) = match self.products {
            _ if on_gpus => (self.gpu_dtype.name(), "cuBLAS".to_string()),
            Products::F32 => ("f32", Kernel::Fused.name().to_string()),
            Products::Split => ("f32", Kernel::split(self.dtype()).name().to_string()),
            Products::Bf16(kernel) => ("bf16", kernel.name().to_string()),
        };
        Arithmetic {
            device: if gpus.is_empty() {
                "cpu".to_string()
            } else {
                gpus.join("+")
            },
            dtype: dtype.to_string(),
            kernel,
            cpu_features: kernel::cpu_features()
                .into_iter()
                .map(str::to_string)
                .collect(),
            threads: self.threads,
        }
    }
}

/// How products on the CPU are computed in this arithmetic with weights of this dtype, unless one is asked for: bf16 weights by bf16
/// products where the CPU has them faster than f32's; all others in f32, by parts where the CPU has tiles.
pub fn products(dtype: ComputeDtype, stored: StoredDtype) -> Result<Products> {
    let bf16 = || Kernel::best_bf16().map(Products::Bf16);
    match (dtype, stored) {
        (ComputeDtype::F32, _) => Ok(Products::F32),
        (ComputeDtype::Auto, StoredDtype::Bf16) => Ok(bf16().unwrap_or_default()),
        (ComputeDtype::Auto, _) if Kernel::has_split() => Ok(Products::Split),
        (ComputeDtype::Auto, _) => Ok(Products::F32),
        (ComputeDtype::Bf16x3, _) if Kernel::has_split() => Ok(Products::Split),
        (ComputeDtype::Bf16x3, _) => Err(Failure::new("--dtype bf16x3: this CPU has no AMX tiles")
            .detail("Intel's have them from Sapphire Rapids on, and Linux grants them from 5.16 on")
            .hint("use --dtype f32, or leave --dtype out")
            .into()),
        (ComputeDtype::Bf16, StoredDtype::Bf16) => bf16().ok_or_else(|| {
            Failure::new("--dtype bf16: this CPU has no bf16 products that are faster than f32's")
                .detail("they need AMX tiles (Intel from Sapphire Rapids on, Linux from 5.16 on) or AVX-512 of AMD from Zen 4 on")
                .hint("use --dtype f32, or leave --dtype out")
                .into()
        }),
        (ComputeDtype::Bf16, _) => Err(Failure::usage(format!(
            "--dtype bf16 is for bf16 checkpoints, and this one is {}",
            stored.name()
        ))
        .hint("use --dtype f32, or leave --dtype out")
        .into()),
    }
}

/// Says which tensors of the decoder the configuration knows nothing of: they are copied as they are and computed with by nobody.
fn warn_of_unused(checkpoint: &Checkpoint, config: &ModelConfig, events: &dyn Events) {
    let is_unused = |name: &&str| {
        let Some((layer, rest)) = name
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split_once('.'))
        else {
            return false;
        };
        let is_beyond = layer
            .parse::<usize>()
            .is_ok_and(|layer| layer >= config.num_hidden_layers);
        let biases = Projection::ALL
            .iter()
            .filter(|projection| !projection.has_bias(config));
        let is_bias = |projection: &Projection| rest == format!("{}.bias", projection.name());
        is_beyond || biases.into_iter().any(is_bias)
    };
    let names = checkpoint.tensors().map(|entry| entry.name.as_str());
    let unused: Vec<&str> = names.filter(is_unused).collect();
    if let Some(first) = unused.first() {
        events.warn(format!(
            "config.json ({} layers) has no place for {} tensors of this checkpoint, `{first}` among them: they are left as they are, and nothing is computed with them",
            config.num_hidden_layers,
            unused.len()
        ));
    }
}

/// Tokens per sample: as asked, else the default.
pub(super) fn check_seqlen(seqlen: Option<usize>, config: &ModelConfig) -> Result<usize> {
    let limit = config.longest_sequence();
    let seqlen = seqlen.unwrap_or(DEFAULT_SEQLEN.min(config.max_position_embeddings));
    if seqlen < 2 {
        return Err(Failure::usage(format!(
            "--seqlen is {seqlen}; at least 2 tokens are needed to predict one"
        ))
        .into());
    }
    if seqlen > limit {
        return Err(Failure::usage(format!(
            "--seqlen {seqlen} is longer than the model's {limit} positions"
        ))
        .hint(format!("use --seqlen {limit} or less"))
        .into());
    }
    Ok(seqlen)
}

/// Worker threads: as asked, else what the batch system or the machine gives this process.
pub(super) fn threads(asked: Option<u16>) -> usize {
    let slurm = || {
        std::env::var("SLURM_CPUS_PER_TASK")
            .ok()?
            .trim()
            .parse::<usize>()
            .ok()
            .filter(|threads| MOST_THREADS.contains(threads))
    };
    let affinity = || std::thread::available_parallelism().map_or(1, usize::from);
    asked
        .map(usize::from)
        .or_else(slurm)
        .unwrap_or_else(affinity)
}

/// Starts the global pool, once per process.
fn worker_threads(device: &DeviceArgs) -> Result<usize> {
    let threads = threads(device.threads);
    let built = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("worker-{index}"))
        .build_global();
    match built.as_ref().map_err(|error| error.source()) {
        Err(Some(error)) => Err(
            Failure::new(format!("{threads} worker threads cannot be had"))
                .detail(error.to_string())
                .hint("use fewer with --threads, or raise the limit of processes (`ulimit -u`)")
                .into(),
        ),
        // A pool exists already: in tests, where several runs share a process and keep its first pool.
        Ok(()) | Err(None) => Ok(rayon::current_num_threads()),
    }
}
