//! The checkpoint of a run, opened and checked: every tensor that a sweep reads is there and has its shape.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use serde_json::{Map, Value};

use super::located::{self, HubModel, OpenedWeights};
use super::machine;
use crate::bytes::{ByteSize, json_file};
use crate::checkpoint::{CONFIG_FILE, Checkpoint, WeightSource};
use crate::data::Tokenizer;
use crate::failure::Failure;
use crate::linalg::{Products, StoredDtype};
use crate::model::{DecoderLayer, Dtypes, Embedding, Head, ModelConfig, WeightForms};
use crate::packed::PackedSource;
use crate::pipeline::{Flow, RunShape, TaskShape};
use crate::quantized::QuantizedSource;
use crate::run::manifest::PerplexityReport;
use crate::run::{Events, LayerDropReport, Moment, Phase, Plan, WidthDropReport};
use crate::runtime::{Clock, LayerSource, Reporter, SweepReport};
use crate::settings::{ComputeDtype, DeviceSettings, ModelSettings, SEQLEN, check_device};

/// The plan and the devices of a pass that measured the model.
pub(super) struct ScoringPass {
    pub(super) plan: Plan,
    pub(super) swept: SweepReport,
}

/// A checkpoint opened for a run.
pub(super) struct OpenedModel {
    /// The files of the weights.
    pub(super) checkpoint: Arc<Checkpoint>,
    /// The weights that a sweep reads: the checkpoint, alone or with an adapter, or a 4-bit or packed checkpoint as if it were dense.
    pub(super) source: Arc<dyn WeightSource>,
    /// The view of a 4-bit checkpoint; `None` for a checkpoint that is not quantised.
    pub(super) quantized: Option<Arc<QuantizedSource>>,
    /// The parts of a packed checkpoint; `None` for a checkpoint that is not packed.
    pub(super) packed: Option<Arc<PackedSource>>,
    /// The form of its matrices in memory.
    pub(super) forms: Arc<WeightForms>,
    /// The shape.
    pub(super) config: Arc<ModelConfig>,
    /// The model that this model is a part of; `None` for a checkpoint as it is.
    pub(super) part_of: Option<WholeModel>,
    /// The folder as given, or a model's snapshot in the hub's cache.
    pub(super) folder: PathBuf,
    /// Origin of the snapshot.
    pub(super) hub_model: Option<HubModel>,
    /// Tokens per sample and window.
    pub(super) seqlen: usize,
    /// Worker threads.
    pub(super) threads: usize,
    /// Kind of products on the CPU.
    pub(super) products: Products,
    /// The dtype GPUs compute in.
    pub(super) gpu_dtype: StoredDtype,
    /// GPUs of this machine that may be used, by name; none where they are simulated.
    pub(super) gpu_names: Vec<String>,
    /// Time and memory of the run.
    pub(super) clock: Clock,
    /// Start of the run, in seconds since 1970 (UTC).
    pub(super) started_unix_seconds: u64,
}

/// A checkpoint of which a smaller model is a part.
pub(super) struct WholeModel {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) config: Arc<ModelConfig>,
    /// The layers that are left out.
    pub(super) layer_drop: Option<LayerDropReport>,
    /// The width that is left out.
    pub(super) width_drop: Option<WidthDropReport>,
    /// `config.json` of the smaller model.
    pub(super) config_json: Map<String, Value>,
    /// The passes that made the model smaller; none where an earlier process did so.
    pub(super) passes: Vec<ScoringPass>,
}

impl WholeModel {
    /// The perplexity of the source, where a pass measured it.
    pub(super) fn dense(&self) -> Option<PerplexityReport> {
        let of_layers = self.layer_drop.as_ref().and_then(|drop| drop.dense);
        of_layers.or(self.width_drop.as_ref().and_then(|drop| drop.dense))
    }
}

impl OpenedModel {
    /// The clock of the run, with the receiver of its events.
    pub(super) fn reporter<'a>(&'a self, events: &'a dyn Events) -> Reporter<'a> {
        Reporter { clock: &self.clock, events }
    }

    /// The checkpoint that a smaller model becomes a part of: this model, or the checkpoint that it is a part of itself.
    ///
    /// # Errors
    /// Fails when `config.json` cannot be read.
    pub(super) fn whole(&mut self) -> Result<WholeModel> {
        if let Some(whole) = self.part_of.take() {
            return Ok(whole);
        }
        Ok(WholeModel {
            checkpoint: Arc::clone(&self.checkpoint),
            config: Arc::clone(&self.config),
            layer_drop: None,
            width_drop: None,
            config_json: serde_json::from_value(ModelConfig::read_json(&self.folder)?)?,
            passes: Vec::new(),
        })
    }

    /// A part of `whole`, in place of this model.
    pub(super) fn with_part(
        self,
        whole: WholeModel,
        checkpoint: Arc<Checkpoint>,
        config: Arc<ModelConfig>,
    ) -> Self {
        Self { source: checkpoint.clone(), checkpoint, config, part_of: Some(whole), ..self }
    }

    /// Opens the checkpoint, checks every tensor a sweep reads, and starts the worker threads.
    ///
    /// # Errors
    /// Fails for anything missing, truncated, of the wrong shape or unsupported, naming file and tensor; for an id of the hub
    /// also when the download fails.
    pub(super) fn open(
        model: &ModelSettings,
        device: &DeviceSettings,
        seqlen: Option<usize>,
        events: &dyn Events,
    ) -> Result<Self> {
        check_device(device)?;
        let clock = Clock::new();
        clock.mark(Moment::Start, events);
        let started_unix_seconds = machine::unix_seconds();
        let (folder, hub_model) = located::model(model, events)?;
        let config = Arc::new(located::config(&folder)?);
        let weights = OpenedWeights::open(&folder, events)?;
        let source = weights.source();
        let OpenedWeights { checkpoint, quantized, packed } = weights;
        for layer in 0..config.num_hidden_layers {
            DecoderLayer::check(&*source, &config, layer)?;
        }
        warn_of_unused(&checkpoint, &config, events);
        let seqlen = check_seqlen(seqlen, &config)?;
        let threads = machine::start_workers(device.threads)?;
        let stored = crate::model::stored_dtypes(&*source, &config).layers;
        located::warn_of_config(&folder, stored, events)?;
        Ok(Self {
            source,
            quantized,
            packed,
            forms: Arc::new(WeightForms::dense()),
            checkpoint,
            config,
            part_of: None,
            folder,
            hub_model,
            seqlen,
            threads,
            products: machine::products(model.dtype, stored)?,
            gpu_dtype: gpu_dtype(model.dtype, stored, device, events),
            gpu_names: match (&device.simulate, device.names_the_cpu()) {
                (None, false) => machine::gpus().into_iter().map(|gpu| gpu.name).collect(),
                _ => Vec::new(),
            },
            clock,
            started_unix_seconds,
        })
    }

    /// The dtypes of the weights, for memory estimates.
    pub(super) fn dtypes(&self) -> Dtypes {
        crate::model::stored_dtypes(&*self.source, &self.config)
    }

    /// Refuses a 4-bit checkpoint where its weights are to be changed.
    ///
    /// # Errors
    /// Fails for a checkpoint that is quantised.
    pub(super) fn refuse_quantized(&self) -> Result<()> {
        match &self.quantized {
            None => Ok(()),
            Some(quantized) => Err(Failure::new(format!(
                "`{}` is quantised to 4 bits, and its weights cannot be pruned",
                self.folder.display()
            ))
            .detail(format!("{} of its matrices are NF4", quantized.matrices()))
            .hint(
                "prune the unquantised checkpoint, then quantise the result: prune quantize --to nf4-double OUT/model --save OUT-4bit",
            )
            .into()),
        }
    }

    /// Refuses a packed checkpoint where its weights are to be changed.
    ///
    /// # Errors
    /// Fails for a checkpoint that is packed.
    pub(super) fn refuse_packed(&self) -> Result<()> {
        match &self.packed {
            None => Ok(()),
            Some(packed) => Err(Failure::new(format!(
                "`{}` is packed, and its weights cannot be pruned",
                self.folder.display()
            ))
            .detail(format!(
                "{} of its matrices are a mask and kept values",
                packed.matrices().len()
            ))
            .hint(format!(
                "restore the dense checkpoint, and prune that: prune unpack {} --save OUT",
                self.folder.display()
            ))
            .into()),
        }
    }

    /// The `config.json` that a model made from a packed checkpoint gets; `None` where the folder's own serves.
    pub(super) fn own_config(&self) -> Result<Option<Vec<u8>>> {
        let Some(packed) = self.packed.as_ref() else {
            return Ok(None);
        };
        let text = packed.record().and_then(|record| record.texts.get(CONFIG_FILE));
        match text {
            Some(text) => Ok(Some(text.clone().into_bytes())),
            None => Ok(Some(json_file(&located::dense_json(&self.folder)?)?)),
        }
    }

    /// The dtype of the decoder's matrices; the widest where they differ.
    pub(super) fn dtype(&self) -> StoredDtype {
        self.dtypes().layers
    }

    /// Loads the tokenizer, as part of the tokenize phase, and warns where its two files disagree.
    pub(super) fn tokenizer(&self, events: &dyn Events) -> Result<Tokenizer> {
        let loaded = self.clock.measure(Phase::Tokenize, || Tokenizer::load(&self.folder))?;
        for warning in loaded.warnings() {
            events.warn(warning.clone());
        }
        Ok(loaded)
    }

    /// Checks that the embedding, the last norm and the head can be read, and warns where a stored head is passed over.
    pub(super) fn check_ends(&self, events: &dyn Events) -> Result<()> {
        Embedding::open(&*self.source, &self.config)?;
        Head::check(&*self.source, &self.config)?;
        if Head::is_passed_over(&*self.source, &self.config)? {
            events.warn(
                "config.json says that the embedding is the head (`tie_word_embeddings`), and this checkpoint has another `lm_head.weight`: \
                 the embedding is used. Other programs may use the head (transformers 5 does); `\"tie_word_embeddings\": false` in \
                 config.json makes all of them do so"
                    .to_string(),
            );
        }
        Ok(())
    }

    /// Token ids must lie inside the embedding.
    ///
    /// # Errors
    /// Fails for the largest id that does not, with the numbers.
    pub(super) fn check_ids(
        &self,
        tokens: &[u32],
        tokenizer: &Tokenizer,
        text: &str,
    ) -> Result<()> {
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

    /// The decoder layers, in the form that their matrices have in memory.
    pub(super) fn layers(&self) -> LayerSource {
        LayerSource {
            source: Arc::clone(&self.source),
            config: Arc::clone(&self.config),
            forms: Arc::clone(&self.forms),
        }
    }

    /// A run of this checkpoint in numbers, before its texts are known: nothing is calibrated or evaluated yet.
    pub(super) fn run_shape(&self, device: &DeviceSettings) -> RunShape<'_> {
        RunShape {
            config: &self.config,
            dtypes: self.dtypes(),
            forms: &self.forms,
            gpu_dtype: self.gpu_dtype,
            seqlen: self.seqlen,
            samples: 0,
            windows: 0,
            sides: &[],
            tasks: TaskShape::default(),
            against: None,
            technique: None,
            of_all_ranks: None,
            shared_with: Vec::new(),
            flow: Flow::default(),
            observes: None,
            trains: None,
            saves: false,
            threads: self.threads,
            products: self.products,
            tokenizing: ByteSize::ZERO,
            retained: ByteSize::ZERO,
            settings: device.memory_settings.clone(),
        }
    }
}

/// Returns the dtype GPUs compute in.
fn gpu_dtype(
    dtype: ComputeDtype,
    stored: StoredDtype,
    device: &DeviceSettings,
    events: &dyn Events,
) -> StoredDtype {
    match dtype {
        // Simulated GPUs use the arithmetic of the host.
        _ if device.simulate.is_some() => StoredDtype::F32,
        ComputeDtype::F32 | ComputeDtype::Bf16x3 => StoredDtype::F32,
        ComputeDtype::Auto if stored == StoredDtype::Bf16 && !machine::gpus_have_bf16(device) => {
            events.note("a GPU here has no bf16: layers are computed in f32".to_string());
            StoredDtype::F32
        }
        ComputeDtype::Bf16 => StoredDtype::Bf16,
        ComputeDtype::Auto | ComputeDtype::F16 => stored,
    }
}

/// Says which tensors of the decoder the configuration knows nothing of: they are copied as they are and computed with by nobody.
fn warn_of_unused(checkpoint: &Checkpoint, config: &ModelConfig, events: &dyn Events) {
    let is_unused = |name: &&str| {
        let Some((layer, rest)) =
            name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))
        else {
            return false;
        };
        let is_beyond = layer.parse::<usize>().is_ok_and(|layer| layer >= config.num_hidden_layers);
        let mut without_bias = config.linears().filter(|&id| !config.has_bias(id));
        is_beyond || without_bias.any(|id| rest == format!("{}.bias", id.name()))
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
    let seqlen = seqlen.unwrap_or(SEQLEN.min(config.max_position_embeddings));
    if seqlen < 2 {
        return Err(Failure::usage(format!(
            "--seqlen is {seqlen}; at least 2 tokens are needed to predict one"
        ))
        .hint(format!("use --seqlen {}, or leave it out", SEQLEN.min(limit)))
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
