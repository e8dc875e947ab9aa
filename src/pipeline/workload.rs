//! A job in numbers: model, texts and settings → the ways it can be done, for the planner.
//!
//! Every way is a setting of the settings and a place for hidden states. What a phase holds is put together from
//! `model/footprint.rs` and, for GPUs, from `on_gpu`; docs/memory-model.md has the formulas and holds them against measurements.

use super::{on_gpu, output_error};
use crate::bytes::ByteSize;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, StoredDtype};
use crate::model::{Dtypes, ModelConfig, Projection, footprint};
use crate::placement::planner::ON_THEIR_WAY;
use crate::placement::{Need, Way, Work, Workload};
use crate::pruning::ColumnSquares;
use crate::run::HiddenStatesStorage;
use crate::run::memory_settings::{MemorySettings, WeightsHeld};
use crate::run::plan::Part;

/// The program itself: what it has allocated before it opens a model, thread stacks, lists of tensors. Measured: 4 to 6 MiB.
const PROGRAM: ByteSize = ByteSize(6 << 20);

/// What CUDA's libraries hold in the process. A guess of order, not measured; gpu-check shows the truth.
const CUDA_ON_HOST: ByteSize = ByteSize(256 << 20);

/// Files are copied, hashed and compared in pieces, two at a time, that take this together; less where the model is smaller.
const FILE_PIECES: ByteSize = ByteSize(16 << 20);

/// Packing its weights costs a product about as much as this many more tokens.
const PACKING_TOKENS: f64 = 64.0;

/// Bytes per element of hidden states on the CPU.
const F32: usize = size_of::<f32>();

/// What a run is going to do, as far as memory and time go.
#[derive(Debug, Clone)]
pub struct Job<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// The dtypes of its weights.
    pub dtypes: Dtypes,
    /// Tokens per sample and window.
    pub seqlen: usize,
    /// The dtype GPUs compute in.
    pub gpu_dtype: StoredDtype,
    /// Calibration samples; 0 where the method needs none.
    pub samples: usize,
    /// Evaluation windows of one side.
    pub windows: usize,
    /// Sides that are evaluated: dense, pruned or both.
    pub sides: usize,
    /// Whether matrices are pruned.
    pub prunes: bool,
    /// Whether the model is written.
    pub saves: bool,
    /// Worker threads.
    pub threads: usize,
    /// How products are computed on the CPU.
    pub products: Products,
    /// What tokenising takes at its peak, tokenizer included.
    pub tokenise: ByteSize,
    /// The one setting of the settings that may be chosen; `None` leaves it to the plan.
    pub settings: Option<MemorySettings>,
}

/// How many times as many operations a second bf16 products do as f32's: a round figure, between AVX-512's twice and AMX's six times.
const BF16_TIMES_F32: f64 = 4.0;
/// The same of f32 products that are sums of those of parts.
const SPLIT_TIMES_F32: f64 = 2.0;

/// Whose hidden states there are: those of calibration go after the last layer, those of windows after the head.
#[derive(Debug, Clone, Copy)]
enum Alive {
    All,
    Windows,
    None,
}

impl Job<'_> {
    /// The ways, today's default first.
    pub fn workload(&self) -> Workload {
        let mut workload = Workload {
            num_hidden_layers: self.config.num_hidden_layers,
            layer: footprint::layer_weights(
                self.config,
                self.dtypes.layers,
                &MemorySettings::default(),
            ),
            ..Workload::default()
        };
        for storage in [HiddenStatesStorage::Ram, HiddenStatesStorage::Disk] {
            if storage == HiddenStatesStorage::Disk && !self.passes_samples() {
                continue;
            }
            for settings in self.settings() {
                workload.on_cpu.push(self.on_cpu(&settings, storage));
                if settings.weights == WeightsHeld::Layer {
                    workload.on_gpu.push(self.on_gpu(&settings, storage));
                }
            }
        }
        workload
    }

    /// One sample's hidden states in elements of this size.
    fn state(&self, element: usize) -> ByteSize {
        ByteSize::of(self.seqlen.saturating_mul(self.config.hidden_size), element)
    }

    /// The hidden states of all streams.
    fn hidden_states(&self, element: usize) -> ByteSize {
        let samples = self.samples + self.windows * self.sides;
        ByteSize(self.state(element).0.saturating_mul(samples as u64))
    }

    fn passes_samples(&self) -> bool {
        self.samples + self.windows * self.sides > 0
    }

    /// All settings of the settings a plan chooses from, the default first.
    fn settings(&self) -> Vec<MemorySettings> {
        if let Some(settings) = &self.settings {
            return vec![settings.clone()];
        }
        let default = MemorySettings::default();
        let groups = self.config.num_key_value_heads;
        let mut heads = vec![None];
        heads.extend(
            [2, 4, 8]
                .iter()
                .filter(|&&parts| groups > 1 && parts <= groups)
                .map(|parts| Some(groups.div_ceil(*parts))),
        );
        let vocabulary = self.config.vocab_size;
        let mut all = Vec::new();
        for weights in [WeightsHeld::Layer, WeightsHeld::Matrix] {
            for prefetch in [true, false] {
                if weights == WeightsHeld::Matrix && prefetch {
                    continue;
                }
                for mlp_tokens in [default.mlp_tokens, 512, 256, 128, 64] {
                    for attention_heads in heads.iter().copied() {
                        for logits_bytes in
                            [default.logits_bytes, ByteSize(32 << 20), ByteSize(8 << 20)]
                        {
                            for head_rows in [
                                None,
                                Some(vocabulary.div_ceil(4)),
                                Some(vocabulary.div_ceil(16)),
                            ] {
                                let settings = MemorySettings {
                                    prefetch,
                                    weights,
                                    mlp_tokens,
                                    attention_heads,
                                    logits_bytes,
                                    head_rows,
                                    keep_packed: true,
                                };
                                if self.keeps_packed(&settings) {
                                    let keep_packed = false;
                                    all.push(settings.clone());
                                    all.push(MemorySettings {
                                        keep_packed,
                                        ..settings
                                    });
                                } else {
                                    all.push(settings);
                                }
                            }
                        }
                    }
                }
            }
        }
        all
    }

    /// What the process holds beside a phase: itself, token ids, the states that rest in RAM or one per stream on its way to disk.
    fn standing(&self, storage: HiddenStatesStorage, element: usize, alive: Alive) -> Vec<Part> {
        let ids = ByteSize::of(
            (self.samples + self.windows) * self.seqlen,
            size_of::<u32>(),
        );
        let samples = match alive {
            Alive::All => self.samples,
            Alive::Windows | Alive::None => 0,
        };
        let windows = match alive {
            Alive::All | Alive::Windows => self.windows * self.sides,
            Alive::None => 0,
        };
        let (what, states) = match storage {
            HiddenStatesStorage::Ram => (
                "hidden states",
                ByteSize(
                    self.state(element)
                        .0
                        .saturating_mul((samples + windows) as u64),
                ),
            ),
            HiddenStatesStorage::Disk => {
                let streams = usize::from(samples > 0) + if windows > 0 { self.sides } else { 0 };
                let state = footprint::hidden_states(self.config, self.seqlen);
                (
                    "hidden states on their way",
                    ByteSize(state.0 * streams as u64),
                )
            }
        };
        vec![
            part("program", PROGRAM),
            part("token ids", ids),
            part(what, states),
        ]
    }

    /// Whether a layer's weights stay packed while it is in use.
    fn keeps_packed(&self, settings: &MemorySettings) -> bool {
        footprint::keeps_packed(self.kernel(), settings)
    }

    /// What multiplies.
    fn kernel(&self) -> Kernel {
        self.products.kernel(self.dtypes.layers)
    }

    /// Factors of products, kept from the first on.
    fn packed(&self, settings: &MemorySettings) -> ByteSize {
        let head = (self.windows > 0).then(|| self.products.kernel(self.dtypes.head));
        footprint::products(
            self.config,
            self.kernel(),
            self.seqlen,
            self.threads,
            settings,
            head,
        )
    }

    /// Statistics of the four observation points, and the calibration rows output errors are measured on.
    fn statistics(&self) -> Vec<Part> {
        if self.samples == 0 {
            return Vec::new();
        }
        let columns = output_error::widths(self.config)
            .iter()
            .map(|&width| ByteSize::of(ColumnSquares::bytes(width), 1))
            .sum();
        vec![
            part("statistics", columns),
            part(
                "calibration rows",
                output_error::bytes(self.config, self.samples, self.seqlen),
            ),
        ]
    }

    fn on_cpu(&self, settings: &MemorySettings, storage: HiddenStatesStorage) -> Way {
        let mut way = self.on_host(settings, storage, F32);
        let times_f32 = match self.kernel() {
            Kernel::Fused => 1.0,
            Kernel::Split(_) => SPLIT_TIMES_F32,
            Kernel::Amx | Kernel::Avx512 => BF16_TIMES_F32,
        };
        way.work.layer_flop /= times_f32;
        way.work.once_flop /= times_f32;
        way
    }

    /// What the process holds, with hidden states in elements of this size.
    fn on_host(
        &self,
        settings: &MemorySettings,
        storage: HiddenStatesStorage,
        element: usize,
    ) -> Way {
        let Self {
            config,
            dtypes,
            seqlen,
            threads,
            ..
        } = *self;
        let dtype = dtypes.layers;
        let kernel = self.products.of_activations();
        let layer = footprint::layer_weights(config, dtype, settings);
        let mut layers = match settings.weights {
            WeightsHeld::Layer => vec![part("this layer", layer)],
            WeightsHeld::Matrix => vec![part("masks of this layer", layer)],
        };
        if self.keeps_packed(settings) {
            layers.push(part(
                "this layer, packed",
                footprint::layer_packed(config, self.kernel()),
            ));
        }
        if settings.prefetch {
            layers.push(part("the next layer", layer));
        }
        let context = part(
            "rotary tables and packing",
            footprint::context(config, seqlen) + self.packed(settings),
        );
        layers.push(context.clone());
        let need = |phase, alive, more: Vec<Part>| Need {
            phase,
            parts: [self.standing(storage, element, alive), more].concat(),
        };
        let with_layers =
            |phase, more: Vec<Part>| need(phase, Alive::All, [layers.clone(), more].concat());
        let mut host = vec![Need {
            phase: "tokenise",
            parts: vec![
                part("program", PROGRAM),
                part("tokenizer and texts", self.tokenise),
            ],
        }];
        let forward = footprint::forward(config, dtype, seqlen, threads, settings, kernel);
        let capture = footprint::capture(config, dtype, seqlen, threads, settings, kernel);
        let kept = if self.passes_samples() {
            footprint::workspace(config, dtype, seqlen, settings)
        } else {
            ByteSize::ZERO
        };
        let workspace = part("workspace", forward);
        if self.passes_samples() {
            host.push(need("embed", Alive::All, Vec::new()));
        }
        host.push(with_layers("read", Vec::new()));
        if self.samples > 0 {
            host.push(with_layers(
                "calibrate",
                [vec![part("workspace", capture)], self.statistics()].concat(),
            ));
        }
        if self.prunes {
            let score = footprint::score(config, dtype, threads, settings);
            let scratch = vec![part("workspace", kept), part("scores and masks", score)];
            host.push(with_layers(
                "score and mask",
                [scratch, self.statistics()].concat(),
            ));
        }
        if self.samples > 0 {
            host.push(with_layers("propagate", vec![workspace.clone()]));
        }
        if self.windows > 0 {
            host.push(with_layers("evaluate", vec![workspace]));
            host.push(need(
                "head",
                Alive::Windows,
                vec![
                    part(
                        "head and logits",
                        footprint::head(config, dtypes, seqlen, self.windows, settings),
                    ),
                    context,
                ],
            ));
        }
        if self.saves {
            let model = footprint::parameters(config).saturating_mul(dtype.bytes() as u64);
            host.push(need(
                "save and verify",
                Alive::None,
                vec![part(
                    "pieces of files",
                    FILE_PIECES.min(ByteSize(model.saturating_mul(2))),
                )],
            ));
        }
        Way {
            settings: settings.clone(),
            storage,
            hidden_states: self.hidden_states(element),
            host,
            device: Vec::new(),
            work: self.work(settings, storage, element),
        }
    }

    /// Layers computed on GPUs: the process reads ahead, keeps hidden states and scores, the GPU has the layer and one sample.
    fn on_gpu(&self, settings: &MemorySettings, storage: HiddenStatesStorage) -> Way {
        let element = self.gpu_dtype.bytes();
        let mut way = self.on_host(settings, storage, element);
        // The CPU's workspace stays: what a GPU has no memory for is done there.
        let on_their_way = ByteSize(self.state(element).0.saturating_mul(2))
            + ByteSize(self.state(F32).0.saturating_mul(2));
        for need in &mut way.host {
            need.parts.push(part("CUDA's own", CUDA_ON_HOST));
            if need
                .parts
                .iter()
                .any(|part| part.what == "workspace" || part.what == "head and logits")
            {
                need.parts.push(part(ON_THEIR_WAY, on_their_way));
            }
        }
        way.device = on_gpu::needs(self, settings);
        way
    }

    /// Operations and bytes; `element` is that of the arithmetic.
    fn work(
        &self,
        settings: &MemorySettings,
        storage: HiddenStatesStorage,
        element: usize,
    ) -> Work {
        let Self {
            config,
            dtypes,
            seqlen,
            ..
        } = *self;
        let weights = |projection: Projection| {
            let (rows, columns) = projection.shape(config);
            rows as f64 * columns as f64
        };
        let (attention, mlp): (Vec<Projection>, Vec<Projection>) = Projection::ALL
            .iter()
            .partition(|projection| projection.name().starts_with("self_attn"));
        let sum = |projections: &[Projection]| {
            projections
                .iter()
                .map(|projection| weights(*projection))
                .sum::<f64>()
        };
        let (attention, mlp) = (sum(&attention), sum(&mlp));
        // Weights are packed for every product, or for the first one of each pass and as good as never for the others.
        let once_more = |tokens: usize| {
            let share = if self.keeps_packed(settings) {
                0.0
            } else {
                PACKING_TOKENS / tokens.min(seqlen).max(1) as f64
            };
            1.0 + share
        };
        let groups = settings
            .attention_heads
            .map_or(1, |heads| config.num_key_value_heads.div_ceil(heads.max(1)));
        // Two products of half the keys on average, for every query head; a group of heads more packs the activations again.
        let scores = 2.0 * seqlen as f64 * (config.num_attention_heads * config.head_dim) as f64;
        let per_token = 2.0 * attention * once_more(seqlen) * (1.0 + 0.02 * (groups - 1) as f64)
            + 2.0 * mlp * once_more(settings.mlp_tokens)
            + scores;
        let down = 2.0 * weights(Projection::Down) * once_more(settings.mlp_tokens);
        let layers = config.num_hidden_layers.max(1) as f64;
        let (samples, windows) = (self.samples as f64, (self.windows * self.sides) as f64);
        let tokens = |count: f64| count * seqlen as f64;
        // Calibration samples go no further than the last layer's dense pass.
        let propagated = samples * (layers - 1.0) / layers;
        let layer_bytes = (attention + mlp) * dtypes.layers.bytes() as f64;
        let states = tokens(1.0) * config.hidden_size as f64 * element as f64;
        let mut moved = if self.saves { layer_bytes } else { 0.0 };
        if storage == HiddenStatesStorage::Disk {
            moved += states * (samples + 2.0 * propagated + 2.0 * windows);
        }
        if settings.weights == WeightsHeld::Matrix {
            moved += layer_bytes * (samples + propagated + windows);
        }
        let ends = (config.vocab_size * config.hidden_size) as f64 * dtypes.head.bytes() as f64;
        let model =
            layers * layer_bytes + if config.tie_word_embeddings { 1.0 } else { 2.0 } * ends;
        let mut once_moved = if self.windows > 0 { ends } else { 0.0 };
        if self.saves {
            // Untouched tensors are copied, and everything is read back.
            once_moved += model + 2.0 * (model - layers * layer_bytes);
        }
        if storage == HiddenStatesStorage::Disk {
            let head_parts = settings
                .head_rows
                .map_or(1, |rows| config.vocab_size.div_ceil(rows.max(1)));
            once_moved += states * (samples + windows * (1.0 + head_parts as f64));
        }
        let rows = (settings.logits_bytes.0 as usize / 4 / config.vocab_size.max(1)).max(1);
        let head = 2.0
            * (config.vocab_size * config.hidden_size) as f64
            * (1.0 + PACKING_TOKENS / rows.min(seqlen).max(1) as f64);
        Work {
            layer_flop: tokens(samples) * (per_token - down)
                + tokens(propagated + windows) * per_token,
            layer_read: layer_bytes,
            layer_moved: moved,
            // Dense, and again once it is pruned.
            layer_uploaded: layer_bytes * if self.prunes { 2.0 } else { 1.0 },
            layer_states: tokens(samples + 2.0 * propagated + 2.0 * windows)
                * config.hidden_size as f64
                * element as f64,
            once_flop: tokens(windows) * head,
            once_moved,
        }
    }
}

pub(super) fn part(what: &'static str, bytes: ByteSize) -> Part {
    Part {
        what: what.into(),
        bytes,
    }
}
