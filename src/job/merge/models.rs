//! The input models of a merge: opened once each, with their adapters.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::adapter::{AdaptedSource, Adapter, TensorChange};
use crate::checkpoint::{CONFIG_FILE, Checkpoint, TensorEntry, WeightSource, is_of_text_model};
use crate::data::ChatTemplate;
use crate::failure::Failure;
use crate::job::located::{self, HubModel, OpenedWeights};
use crate::job::opened::OpenedModel;
use crate::linalg::StoredDtype;
use crate::merging::pass::{
    AdaptedRows, MappedRows, MergeSources, ReplacedRows, SourceRows, StoredRows,
};
use crate::merging::recipe::{ModelShape, ModelSpec, Recipe};
use crate::merging::vocabulary::{RowMap, TOKENIZER_FILE};
use crate::model::{EMBEDDING, HEAD, ModelConfig, completed_settings};
use crate::run::Events;
use crate::settings::ModelSettings;

/// Rows of a matrix that show that a base is pruned.
const LOOKED_AT: usize = 16;

/// The share of zeros from which on a base counts as pruned. Matrices of dense models have none.
const SPARSE: f64 = 0.1;

/// An input of a merge.
#[derive(Clone)]
pub(super) struct InputModelFiles {
    /// The model as the recipe names it.
    pub(super) spec: ModelSpec,
    /// The folder of the model, or of the base of its adapter.
    pub(super) folder: PathBuf,
    pub(super) hub_model: Option<HubModel>,
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) config: Value,
    /// The settings of the text model, if they are inside the configuration.
    inside: Option<Value>,
    /// The head of the folder's model is its embedding. An adapter can end this.
    pub(super) is_tied: bool,
    pub(super) adapter: Option<Arc<Adapter>>,
    /// Embedding and head with more rows than the base's, by name: the adapter adds tokens.
    grown: BTreeMap<String, TensorEntry>,
}

/// All inputs, in the order of [`crate::merging::recipe::Recipe::models`].
pub(super) struct InputModels {
    pub(super) models: Vec<InputModelFiles>,
    /// The rows of embedding and head in the output's order, by tensor; empty where the models' rows stay as they are.
    pub(super) row_maps: BTreeMap<String, Arc<RowMap>>,
    /// `dtype` of the recipe: elements are rounded to it when they are read, as in mergekit.
    pub(super) dtype: Option<StoredDtype>,
}

impl InputModels {
    /// Opens every model and adapter; a model that several adapters share is opened once.
    ///
    /// # Errors
    /// Fails for a folder that is missing or damaged, for a download that fails, and for an adapter that does not fit its base.
    pub(super) fn open(
        specs: Vec<ModelSpec>,
        dtype: Option<StoredDtype>,
        cache_dir: Option<&Path>,
        events: &dyn Events,
    ) -> Result<Self> {
        let mut models: Vec<InputModelFiles> = Vec::with_capacity(specs.len());
        for spec in specs {
            let is_its = |of: &&InputModelFiles| {
                (&of.spec.model, &of.spec.revision) == (&spec.model, &spec.revision)
            };
            let mut input = match models.iter().find(is_its) {
                Some(known) => {
                    InputModelFiles { spec, adapter: None, grown: BTreeMap::new(), ..known.clone() }
                }
                None => {
                    let reading = format!("in the model `{spec}` of the recipe");
                    open_model(spec, cache_dir, events).context(reading)?
                }
            };
            if let Some((path, revision)) = &input.spec.adapter {
                let folder = located::adapter(path, revision.as_deref(), cache_dir, events)?;
                let adapter = open_adapter(&folder, input.is_tied)?;
                adapter.check(&*input.checkpoint)?;
                if adapter.says_transposed() {
                    events.warn(format!(
                        "the adapter `{path}` sets `fan_in_fan_out`, which has no meaning for linears; it is ignored, as in peft"
                    ));
                }
                input.grown = adapter.grown(&*input.checkpoint);
                input.adapter = Some(Arc::new(adapter));
            }
            models.push(input);
        }
        Ok(Self { models, row_maps: BTreeMap::new(), dtype })
    }

    /// The index of the model whose configuration and tokenizer the output gets: the base, else the first.
    pub(super) fn donor(&self, recipe: &Recipe) -> usize {
        let base = recipe.base_model.as_ref();
        self.models.iter().position(|model| Some(&model.spec) == base).unwrap_or(0)
    }

    /// The folders that are read.
    pub(super) fn folders(&self) -> Vec<&Path> {
        let adapters = self.models.iter().filter_map(|model| model.adapter.as_ref());
        let models = self.models.iter().map(|model| model.folder.as_path());
        models.chain(adapters.map(|adapter| adapter.folder())).collect()
    }

    /// Bytes of the factors of the largest change of a tensor, in f32; several adapters of a tensor are held together.
    pub(super) fn factor_bytes(&self) -> u64 {
        let adapters = self.models.iter().filter_map(|model| model.adapter.as_ref());
        adapters.map(|adapter| adapter.largest_change_bytes()).sum()
    }

    /// A model whose adapter fills zeros of its base: the model, a matrix, and the share of zeros in the first rows of the matrix.
    ///
    /// # Errors
    /// Fails when the rows cannot be read.
    pub(super) fn filled_zeros(&self) -> Result<Option<(&ModelSpec, &str, f64)>> {
        for model in &self.models {
            let adapter = model.adapter.as_ref();
            let linear = adapter.and_then(|adapter| adapter.linears().next());
            let Some((tensor, entry)) = linear.and_then(|of| Some((of, model.entry(of)?))) else {
                continue;
            };
            let rows = entry.shape.first().map_or(1, |&rows| rows.min(LOOKED_AT));
            let columns = entry.shape.last().copied().unwrap_or(1);
            let mut values = vec![1.0; rows * columns];
            StoredRows::new(&*model.checkpoint, entry, None)?.read(
                0..rows,
                &mut values,
                &mut Vec::new(),
            )?;
            let zeros = values.iter().filter(|value| **value == 0.0).count();
            let share = zeros as f64 / values.len().max(1) as f64;
            if share >= SPARSE {
                return Ok(Some((&model.spec, tensor, share)));
            }
        }
        Ok(None)
    }

    /// The shapes of all models.
    ///
    /// # Errors
    /// Fails for a configuration without a number of layers.
    pub(super) fn shapes(&self) -> Result<Vec<ModelShape>> {
        self.models.iter().map(InputModelFiles::shape).collect()
    }
}

impl InputModelFiles {
    /// The settings of the language model, which a model of several media has inside its configuration.
    pub(super) fn settings(&self) -> &Value {
        self.inside.as_ref().unwrap_or(&self.config)
    }

    /// Returns whether the model has a tensor beside its text model, in a part for another medium.
    pub(super) fn has_beside(&self, tensor: &str) -> bool {
        self.inside.is_some()
            && self.checkpoint.entry(tensor).is_some()
            && !is_of_text_model(tensor)
    }

    fn shape(&self) -> Result<ModelShape> {
        let layers = self.settings().get("num_hidden_layers").and_then(Value::as_u64);
        let layers = layers.filter(|&layers| layers > 0).ok_or_else(|| {
            Failure::new(format!(
                "`{}` has no number of layers",
                self.folder.join(CONFIG_FILE).display()
            ))
            .detail("expected `num_hidden_layers`, a positive integer")
        })?;
        let tensors = self.checkpoint.tensors();
        let mut tensors: BTreeMap<String, Vec<usize>> =
            tensors.map(|entry| (entry.name.clone(), entry.shape.clone())).collect();
        let grown = self.grown.iter().map(|(name, entry)| (name.clone(), entry.shape.clone()));
        tensors.extend(grown);
        let unties = self.adapter.as_ref().is_some_and(|adapter| adapter.unties());
        if unties && let Some(entry) = self.entry(HEAD) {
            tensors.insert(HEAD.to_string(), entry.shape.clone());
        }
        Ok(ModelShape {
            num_hidden_layers: layers as usize,
            tie_word_embeddings: self.is_tied && !unties,
            tensors,
        })
    }

    /// The stored tensor that `tensor` of the model is, or that its adapter changes. The head of a tied model is its embedding.
    pub(super) fn entry(&self, tensor: &str) -> Option<&TensorEntry> {
        let unties = self.adapter.as_ref().is_some_and(|adapter| adapter.unties());
        let grown = self.grown.get(match tensor {
            HEAD if self.is_tied && !unties => EMBEDDING,
            tensor => tensor,
        });
        grown.or_else(|| {
            self.checkpoint.entry(match tensor {
                HEAD if self.is_tied => EMBEDDING,
                tensor => tensor,
            })
        })
    }

    /// The folder of the tokenizer: the adapter's, if a tokenizer was saved with it, else the model's.
    pub(super) fn tokenizer_folder(&self) -> &Path {
        let own = self.adapter.as_ref().map(|adapter| adapter.folder());
        own.filter(|own| own.join(TOKENIZER_FILE).is_file()).unwrap_or(&self.folder)
    }

    /// The number of tokens, if the adapter adds some.
    pub(super) fn grown_rows(&self) -> Option<usize> {
        self.grown.get(EMBEDDING)?.shape.first().copied()
    }

    /// The folder of the chat template: the adapter's, if it has one, else the model's.
    ///
    /// # Errors
    /// Fails for a damaged template of the adapter.
    pub(super) fn template_folder(&self) -> Result<&Path> {
        let own = self.adapter.as_ref().map(|adapter| adapter.folder());
        Ok(match own {
            Some(own) if ChatTemplate::find(own)?.is_some() => own,
            _ => &self.folder,
        })
    }

    /// The adapter's change of `tensor`.
    fn change(&self, tensor: &str) -> Result<Option<TensorChange>> {
        let Some(adapter) = &self.adapter else {
            return Ok(None);
        };
        adapter.change(match tensor {
            HEAD if self.is_tied && !adapter.unties() => EMBEDDING,
            tensor => tensor,
        })
    }

    /// The fingerprint of the weights, followed by the adapter's fingerprint.
    pub(super) fn fingerprint(&self) -> Result<String> {
        let base = self.checkpoint.fingerprint()?;
        Ok(match &self.adapter {
            None => base,
            Some(adapter) => format!("{base}+{}", adapter.fingerprint()?),
        })
    }
}

impl InputModels {
    /// Opens a tensor with the rows of its model.
    fn open_own(&self, model: usize, tensor: &str) -> Result<Box<dyn SourceRows + '_>> {
        let model = &self.models[model];
        let entry = model
            .entry(tensor)
            .with_context(|| format!("tensor `{tensor}` is not in `{}`", model.folder.display()))?;
        let base: Box<dyn SourceRows + '_> = match model.grown.values().any(|own| own == entry) {
            true => Box::new(ReplacedRows),
            false => Box::new(StoredRows::new(&*model.checkpoint, entry, self.dtype)?),
        };
        Ok(match model.change(tensor)? {
            None => base,
            Some(change) => Box::new(AdaptedRows { base, change }),
        })
    }
}

impl MergeSources for InputModels {
    fn open(&self, model: usize, tensor: &str) -> Result<Box<dyn SourceRows + '_>> {
        let Some(map) = self.row_maps.get(tensor) else {
            return self.open_own(model, tensor);
        };
        let sources = map.rules.keys();
        let sources = sources.map(|&of| Ok((of, self.open_own(of, tensor)?)));
        let entry = self.models[model].entry(tensor);
        let columns = entry.and_then(|entry| entry.shape.last().copied());
        Ok(Box::new(MappedRows::new(
            Arc::clone(map),
            model,
            sources.collect::<Result<_>>()?,
            columns.with_context(|| format!("`{tensor}` has no columns"))?,
        )))
    }
}

/// Opens an adapter of a base, which may be tied.
///
/// # Errors
/// Fails as [`Adapter::open`].
pub(super) fn open_adapter(folder: &Path, base_is_tied: bool) -> Result<Adapter> {
    let adapter = Adapter::open(folder)?;
    match base_is_tied {
        true => adapter.on_tied_base(EMBEDDING, HEAD),
        false => Ok(adapter),
    }
}

/// Puts an adapter on an opened model. The adapter may untie the head from the embedding.
///
/// # Errors
/// Fails when the adapter does not fit.
pub(super) fn put_on(model: &mut OpenedModel, adapter: Adapter) -> Result<()> {
    if adapter.unties() {
        model.config =
            Arc::new(ModelConfig { tie_word_embeddings: false, ..(*model.config).clone() });
    }
    let source = AdaptedSource::new(Arc::clone(&model.source), adapter)?;
    if let Some(vocab_size) = source.added_rows() {
        model.config = Arc::new(ModelConfig { vocab_size, ..(*model.config).clone() });
    }
    model.source = Arc::new(source);
    Ok(())
}

/// Opens the files of a model, without its adapter.
fn open_model(
    spec: ModelSpec,
    cache_dir: Option<&Path>,
    events: &dyn Events,
) -> Result<InputModelFiles> {
    let settings = ModelSettings {
        revision: spec.revision.clone(),
        cache_dir: cache_dir.map(Path::to_path_buf),
        ..ModelSettings::of(Path::new(&spec.model))
    };
    let (folder, hub_model) = located::model(&settings, events)?;
    let config = located::dense_json(&folder)?;
    let checkpoint = OpenedWeights::open(&folder, events)?.checkpoint;
    let mut model = InputModelFiles {
        spec,
        folder,
        hub_model,
        checkpoint,
        inside: completed_settings(&config),
        config,
        is_tied: true,
        adapter: None,
        grown: BTreeMap::new(),
    };
    let is_set = |settings: &Value| settings.get("tie_word_embeddings").and_then(Value::as_bool);
    let is_set = is_set(&model.config).or_else(|| is_set(model.settings()));
    model.is_tied = is_set == Some(true) || model.checkpoint.entry(HEAD).is_none();
    Ok(model)
}
