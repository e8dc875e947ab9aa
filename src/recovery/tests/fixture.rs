//! Models to train: `stories260k` as the reference pruned it, and a small model with waves for weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;
use serde_json::json;

use crate::checkpoint::{Checkpoint, WeightSource};
use crate::linalg::Products;
use crate::linalg::golden_tests::golden_folder;
use crate::model::{LayerContext, LinearId, ModelConfig};
use crate::recovery::optimizers::adamw::AdamW;
use crate::recovery::optimizers::{Hyperparameters, Optimizer};
use crate::recovery::{
    BaseLayers, BaseReader, ClosingMasks, Distillation, Example, LayerParameters, MaskFile,
    ParameterStore, StorePlace, TrainedForm, TrainedPart, Trainer, TrainerParts,
};
use crate::run::{Events, MemorySettings};
use crate::runtime::{Clock, Compute};

/// A pruned model and the dense model.
pub(super) struct TestModel {
    folder: tempfile::TempDir,
    pub(super) dense: Arc<dyn WeightSource>,
    pub(super) pruned: Arc<dyn WeightSource>,
    pub(super) config: Arc<ModelConfig>,
}

/// The name of the only file.
const FILE: &str = "model.safetensors";

fn open(folder: &Path) -> Arc<dyn WeightSource> {
    Arc::new(Checkpoint::open(folder).unwrap())
}

/// Writes +0 to the elements of a stored matrix whose bit is 1.
fn zero_bits(bytes: &mut [u8], width: usize, pruned: &[u8]) {
    for (at, element) in bytes.chunks_mut(width).enumerate() {
        if pruned[at / 8] >> (at % 8) & 1 == 1 {
            element.fill(0);
        }
    }
}

impl TestModel {
    /// `stories260k` with 60 % of its weights pruned by the reference's Wanda; `None` where the reference files are absent.
    pub(super) fn stories() -> Option<Self> {
        let goldens = golden_folder()?;
        let shared = goldens.ancestors().nth(2).unwrap();
        let dense = shared.join("models/stories260k");
        let masks = std::fs::read(
            shared.join("goldens/stories260k-on-stories/wanda-0.6-unstructured.masks.safetensors"),
        );
        let masks = masks.unwrap();
        let masks = SafeTensors::deserialize(&masks).unwrap();
        let mut bytes = std::fs::read(dense.join(FILE)).unwrap();
        let places: Vec<_> = {
            let weights = SafeTensors::deserialize(&bytes).unwrap();
            let place = |name: &str| {
                let data = weights.tensor(&format!("{name}.weight")).unwrap().data();
                let start = data.as_ptr().addr() - bytes.as_ptr().addr();
                (name.to_owned(), start..start + data.len())
            };
            masks.names().into_iter().map(place).collect()
        };
        for (name, place) in places {
            zero_bits(&mut bytes[place], 4, masks.tensor(&name).unwrap().data());
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), bytes).unwrap();
        Some(Self {
            dense: open(&dense),
            pruned: open(folder.path()),
            config: Arc::new(ModelConfig::load(&dense).unwrap()),
            folder,
        })
    }

    /// The pruned model in `dtype`, which is also the dense model.
    pub(super) fn in_dtype(&self, dtype: DType) -> Self {
        let file = self.folder.path().join(FILE);
        let tensors = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        let narrow = |(name, tensor): (String, Tensor)| (name, tensor.to_dtype(dtype).unwrap());
        let tensors = tensors.into_iter().map(narrow).collect();
        let folder = tempfile::tempdir().unwrap();
        candle_core::safetensors::save(&tensors, folder.path().join(FILE)).unwrap();
        Self {
            dense: open(folder.path()),
            pruned: open(folder.path()),
            config: Arc::clone(&self.config),
            folder,
        }
    }

    /// Three layers of odd shapes with waves for weights, two thirds of which are pruned.
    pub(super) fn small(dtype: DType) -> Self {
        let config = json!({"model_type": "llama", "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 130, "max_position_embeddings": 64,
            "tie_word_embeddings": false});
        let config = ModelConfig::from_json(&config).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut count = 0;
        let mut tensor = |shape: &[usize], size: f32| -> Vec<f32> {
            count += 1;
            let pace = 0.1 + 0.37 * count as f32;
            let elements: usize = shape.iter().product();
            (0..elements).map(|at| size * (at as f32 * pace).sin()).collect()
        };
        let (mut dense, mut pruned) = (Vec::new(), Vec::new());
        let put = |to: &mut Vec<(String, Tensor)>, name: &str, shape: &[usize], values| {
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            to.push((name.to_owned(), tensor.to_dtype(dtype).unwrap()));
        };
        for layer in 0..config.num_hidden_layers {
            for id in config.linears() {
                let (rows, columns) = id.shape(&config);
                let (name, shape) = (id.tensor_name(layer), [rows, columns]);
                let mut values = tensor(&shape, 0.3);
                put(&mut dense, &name, &shape, values.clone());
                let gone = |at: &usize| at % 3 != layer % 3;
                (0..values.len()).filter(gone).for_each(|at| values[at] = 0.0);
                put(&mut pruned, &name, &shape, values);
            }
            for (_, name) in config.family.norm_names(layer) {
                let values = tensor(&[config.hidden_size], 0.1);
                let values: Vec<f32> = values.iter().map(|value| 1.0 + value).collect();
                for to in [&mut dense, &mut pruned] {
                    put(to, &name, &[config.hidden_size], values.clone());
                }
            }
        }
        for to in [&mut dense, &mut pruned] {
            let norm = vec![1.0; config.hidden_size];
            put(to, "model.norm.weight", &[config.hidden_size], norm);
        }
        for name in ["lm_head.weight", "model.embed_tokens.weight"] {
            let shape = [config.vocab_size, config.hidden_size];
            let values = tensor(&shape, 0.5);
            for to in [&mut dense, &mut pruned] {
                put(to, name, &shape, values.clone());
            }
        }
        let saved = |name: &str, tensors: Vec<(String, Tensor)>| {
            let folder = folder.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            let tensors = tensors.into_iter().collect();
            candle_core::safetensors::save(&tensors, folder.join(FILE)).unwrap();
            open(&folder)
        };
        Self {
            dense: saved("dense", dense),
            pruned: saved("pruned", pruned),
            config: Arc::new(config),
            folder,
        }
    }

    /// All matrices of a layer in a form.
    pub(super) fn part(&self, form: TrainedForm) -> TrainedPart {
        TrainedPart { ids: self.config.linears().collect(), form, norms: false }
    }
}

/// Low-rank factors as in the recorded curves.
pub(super) const FACTORS: TrainedForm = TrainedForm::Factors { rank: 8, alpha: 16.0 };

/// The settings of a training.
#[derive(Clone)]
pub(super) struct Training {
    pub(super) part: TrainedPart,
    pub(super) build: fn(Hyperparameters) -> Box<dyn Optimizer>,
    pub(super) place: StorePlace,
    pub(super) masks: Option<Arc<MaskFile>>,
    /// Layers that stay, and whether the next layer is read ahead.
    pub(super) reads: (usize, bool),
    pub(super) memory: MemorySettings,
    pub(super) products: Products,
    pub(super) spill_folder: Option<PathBuf>,
    pub(super) states: DType,
    pub(super) seqlen: usize,
    pub(super) kept_layers: usize,
    /// The teacher, with its share of the loss: the dense model, or for `false` the pruned model itself.
    pub(super) teacher: Option<(bool, f32)>,
    pub(super) closing: Option<ClosingMasks>,
}

/// AdamW with f32 states.
pub(super) fn adamw(settings: Hyperparameters) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(settings))
}

impl Training {
    /// AdamW in memory, in f32.
    pub(super) fn new(part: TrainedPart, seqlen: usize) -> Self {
        Self {
            part,
            build: adamw,
            place: StorePlace::Memory,
            masks: None,
            reads: (0, false),
            memory: MemorySettings::default(),
            products: Products::F32,
            spill_folder: None,
            states: DType::F32,
            seqlen,
            kept_layers: 0,
            teacher: None,
            closing: None,
        }
    }

    /// The trainer, without values of parameters.
    pub(super) fn trainer<'a>(
        &self,
        model: &TestModel,
        clock: &'a Clock,
        events: &'a dyn Events,
    ) -> Trainer<'a> {
        let optimizer = (self.build)(Hyperparameters::default());
        let layers = model.config.num_hidden_layers;
        let specs = self.part.parameters(&model.config);
        let context = LayerContext::with_settings(&model.config, self.seqlen, self.memory.clone());
        let parts = TrainerParts {
            source: Arc::clone(&model.pruned),
            config: Arc::clone(&model.config),
            base: self.base(model),
            part: self.part.clone(),
            store: ParameterStore::new(specs, &*optimizer, layers, &self.place)
                .unwrap()
                .closing(self.closing.is_some()),
            optimizer,
            closing: self.closing.clone(),
            max_grad_norm: Some(1.0),
            compute: Compute::on_cpu(context.with_products(self.products), events),
            spill_folder: self.spill_folder.clone(),
            states: self.states,
            distillation: self.teacher.map(|(is_dense, weight)| {
                let source = Arc::clone(if is_dense { &model.dense } else { &model.pruned });
                let rows = self.memory.head_rows;
                Distillation::open(source, [&model.config; 2], weight, rows).unwrap()
            }),
            kept_layers: self.kept_layers,
            seqlen: self.seqlen,
            clock,
            events,
        };
        Trainer::new(parts).unwrap()
    }

    /// The base of the pruned model.
    pub(super) fn base(&self, model: &TestModel) -> BaseLayers {
        let (resident, reads_ahead) = self.reads;
        let reader = BaseReader {
            source: Arc::clone(&model.pruned),
            config: Arc::clone(&model.config),
            part: self.part.clone(),
            masks: self.masks.clone(),
        };
        BaseLayers::new(reader, resident).reading_ahead(reads_ahead)
    }
}

/// Parameters as they are.
pub(super) fn unchanged(_: usize, parameters: LayerParameters) -> LayerParameters {
    parameters
}

/// Token ids with the targets of all but the last.
pub(super) struct Text {
    tokens: Vec<u32>,
    targets: Vec<Option<u32>>,
}

impl Text {
    pub(super) fn new(tokens: &[u32]) -> Self {
        let next = tokens[1..].iter().copied().map(Some);
        Self { tokens: tokens.to_vec(), targets: next.chain([None]).collect() }
    }

    pub(super) fn example(&self) -> Example<'_> {
        Example { tokens: &self.tokens, targets: &self.targets }
    }
}

/// The values of all layers, as bits.
pub(super) fn bits(store: &ParameterStore) -> Vec<Vec<Vec<u32>>> {
    let of_layer = |layer| {
        let values = store.values(layer).unwrap();
        let bits = values.iter().map(|values| values.iter().map(|value| value.to_bits()).collect());
        bits.collect()
    };
    (0..store.layers()).map(of_layer).collect()
}

/// The full name of a matrix in the reference files: `model.layers.3.self_attn.q_proj`.
pub(super) fn module(id: LinearId, layer: usize) -> String {
    id.full_name(layer)
}
