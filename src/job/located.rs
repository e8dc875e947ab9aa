//! The place of a model and of a text: the given folder or path, else the hub's cache.
//!
//! A local folder always comes first; `owner/name` is asked of the hub only where no such folder exists.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use serde_json::Value;

use super::folder::MODEL;
use super::folder::state_file::StateFile;
use crate::checkpoint::{
    CONFIG_FILE, Checkpoint, HeadersOnly, WeightSource, is_model_file, not_a_model,
};
use crate::data::{DatasetSpec, Role};
use crate::failure::{self, Failure};
use crate::hub::{Hub, HubRepo, HubSettings, ModelFiles};
use crate::linalg::StoredDtype;
use crate::model::config::disagreements;
use crate::model::{
    DecoderLayer, Dtypes, Embedding, Head, ModelConfig, is_stored_dense, stored_dtypes,
};
use crate::packed::{self, PackedSource, PackedValues};
use crate::quantized::{self, QuantizedSource};
use crate::run::Events;
use crate::run::command_line::quoted;
use crate::settings::ModelSettings;
use crate::tasks::HubSplit;

/// A model that came from the hub, for the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubModel {
    pub(super) id: String,
    pub(super) revision: String,
    pub(super) commit: String,
}

/// The files of a checkpoint as we copy them; a config we cannot read ends the download.
struct CheckpointFiles;

impl ModelFiles for CheckpointFiles {
    fn wants(&self, name: &str) -> bool {
        is_model_file(name)
    }

    fn check_config(&self, folder: &Path) -> Result<()> {
        config(folder).map(drop)
    }
}

/// Returns the folder to read a model from.
///
/// # Errors
/// Fails when `--model` is neither a folder nor an id, and when the download fails.
pub(super) fn model(
    model: &ModelSettings,
    events: &dyn Events,
) -> Result<(PathBuf, Option<HubModel>)> {
    let Some(repo) = repository(model)? else {
        return Ok((model.model.clone(), None));
    };
    let hub = hub(model.cache_dir.as_deref())?;
    let snapshot = hub.model(&repo, &CheckpointFiles, events)?;
    let model = HubModel {
        id: repo.id().to_string(),
        revision: repo.revision().to_string(),
        commit: snapshot.commit,
    };
    Ok((snapshot.folder, Some(model)))
}

/// The files of a LoRA adapter.
const ADAPTER_FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// Returns the folder of a LoRA adapter: a local folder, or a repository of the hub.
///
/// # Errors
/// Fails when it is neither, and when the download fails.
pub(super) fn adapter(
    adapter: &str,
    revision: Option<&str>,
    cache_dir: Option<&Path>,
    events: &dyn Events,
) -> Result<PathBuf> {
    let folder = PathBuf::from(adapter);
    if folder.exists() {
        return match revision {
            None => Ok(folder),
            Some(revision) => Err(Failure::new(format!(
                "the adapter `{adapter}` is a local folder and has no revision `{revision}`"
            ))
            .hint("leave the revision out")
            .into()),
        };
    }
    let repo = HubRepo::model(adapter).ok_or_else(|| {
        Failure::new(format!("the adapter folder `{adapter}` does not exist"))
            .detail("neither is it an id on the hub, which is like owner/name")
            .hint("name a folder with adapter_config.json and adapter_model.safetensors")
    })?;
    let repo = repo.at(revision.unwrap_or("main"))?;
    hub(cache_dir)?.model_files(&repo, &ADAPTER_FILES, events)
}

/// The files of a tokenizer whose model is not merged.
const TOKENIZER_FILES: [&str; 3] = ["config.json", "tokenizer.json", "tokenizer_config.json"];

/// Returns the folder of a model whose tokenizer is wanted, not its weights: a local folder, or a repository of the hub.
///
/// # Errors
/// Fails when it is neither, and when the download fails.
pub(super) fn tokenizer(
    model: &str,
    revision: Option<&str>,
    cache_dir: Option<&Path>,
    events: &dyn Events,
) -> Result<PathBuf> {
    let settings = ModelSettings {
        revision: revision.map(str::to_string),
        ..ModelSettings::of(Path::new(model))
    };
    match repository(&settings)? {
        None => Ok(settings.model),
        Some(repo) => hub(cache_dir)?.model_files(&repo, &TOKENIZER_FILES, events),
    }
}

/// Shape and dtype of a checkpoint from `config.json` and headers alone; where it will be evaluated, its ends are looked at, too.
///
/// # Errors
/// Fails when the model is neither a folder nor an id, or its headers cannot be read, and for tensors a run would refuse.
pub(super) fn headers(
    settings: &ModelSettings,
    is_evaluated: bool,
    events: &dyn Events,
) -> Result<(ModelConfig, Dtypes)> {
    let (mut folder, mut source) = (settings.model.clone(), None);
    if let Some(repo) = repository(settings)? {
        let hub = hub(settings.cache_dir.as_deref())?;
        let headers = hub.model_headers(&repo, &CheckpointFiles, events)?;
        folder = headers.snapshot.folder;
        if let Some(shards) = headers.shards {
            source = Some(HeadersOnly::new(repo.id(), shards)?);
        }
    }
    let (config, source): (_, Arc<dyn WeightSource>) = match source {
        Some(source) => (ModelConfig::load(&folder)?, Arc::new(source)),
        None => {
            let config = ModelConfig::of_json(&folder, &dense_json(&folder)?)?;
            (config, OpenedWeights::open(&folder, events)?.checkpoint)
        }
    };
    for layer in 0..config.num_hidden_layers {
        DecoderLayer::check(&*source, &config, layer)?;
    }
    if is_evaluated {
        Embedding::open(&*source, &config)?;
        Head::check(&*source, &config)?;
    }
    let dtypes = stored_dtypes(&*source, &config);
    warn_of_config(&folder, dtypes.layers, events)?;
    Ok((config, dtypes))
}

/// Warns of every fact that the `config.json` of a folder states in two ways.
///
/// # Errors
/// Fails when the file cannot be read.
pub(super) fn warn_of_config(
    folder: &Path,
    stored: StoredDtype,
    events: &dyn Events,
) -> Result<()> {
    for warning in disagreements(&ModelConfig::read_json(folder)?, stored) {
        events.warn(warning);
    }
    Ok(())
}

/// The shape of the model in a folder. A 4-bit checkpoint that [`crate::quantized`] reads and a packed checkpoint count as dense.
///
/// # Errors
/// Fails as [`ModelConfig::load`], so also for a quantisation that [`crate::quantized`] does not read.
pub(super) fn config(folder: &Path) -> Result<ModelConfig> {
    let mut json = dense_json(folder)?;
    if quantized::config::is_four_bit(&json)
        && let Some(keys) = json.as_object_mut()
    {
        keys.remove(quantized::config::KEY);
    }
    ModelConfig::of_json(folder, &json)
}

/// The `config.json` of a folder, as the dense model of a packed checkpoint has it. A description of weights that are stored dense is
/// left out.
///
/// # Errors
/// Fails as [`ModelConfig::read_json`].
pub(super) fn dense_json(folder: &Path) -> Result<Value> {
    let mut json = ModelConfig::read_json(folder)?;
    let is_dense = json.get(packed::config::KEY).is_some_and(is_stored_dense);
    if (is_dense || packed::config::is_packed(&json))
        && let Some(keys) = json.as_object_mut()
    {
        keys.remove(packed::config::KEY);
    }
    Ok(json)
}

/// The weights of a folder, opened in the form in which they are stored.
pub(super) struct OpenedWeights {
    /// The files; of a packed checkpoint, a view as if its matrices were dense.
    pub(super) checkpoint: Arc<Checkpoint>,
    /// The view of a 4-bit checkpoint.
    pub(super) quantized: Option<Arc<QuantizedSource>>,
    /// The packed checkpoint.
    pub(super) packed: Option<Arc<PackedSource>>,
}

impl OpenedWeights {
    /// Opens the weights of a folder.
    ///
    /// # Errors
    /// Fails for a folder that is no checkpoint, and for a matrix whose parts do not agree.
    pub(super) fn open(folder: &Path, events: &dyn Events) -> Result<Self> {
        let files = Arc::new(Checkpoint::open(folder)?);
        // Weights alone may be compared; a model without its configuration is refused elsewhere.
        let json = match folder.join(CONFIG_FILE).is_file() {
            true => ModelConfig::read_json(folder)?,
            false => Value::Null,
        };
        let opened = Self { checkpoint: Arc::clone(&files), quantized: None, packed: None };
        if quantized::config::is_four_bit(&json) {
            let quantized = Some(Arc::new(QuantizedSource::open(files)?));
            return Ok(Self { quantized, ..opened });
        }
        if !packed::config::is_packed(&json) {
            return Ok(opened);
        }
        let packed = Arc::new(PackedSource::open(files)?);
        if packed.values() == PackedValues::Int8 {
            events.note(format!(
                "the weights of `{}` are rounded to 8 bits: results are those of the rounded model",
                folder.display()
            ));
        }
        let checkpoint = Arc::new(packed.checkpoint()?);
        Ok(Self { checkpoint, packed: Some(packed), ..opened })
    }

    /// The weights as a sweep reads them: dense.
    pub(super) fn source(&self) -> Arc<dyn WeightSource> {
        match &self.quantized {
            Some(quantized) => quantized.clone(),
            None => self.checkpoint.clone(),
        }
    }
}

/// The repository of a model on the hub; `None` for a local folder.
fn repository(settings: &ModelSettings) -> Result<Option<HubRepo>, Failure> {
    let (model, revision) = (&settings.model, settings.revision.as_deref());
    if let Some(failure) = run_folder(model).or_else(|| not_a_model(model)) {
        return Err(failure);
    }
    if !model.exists() {
        let repo = model.to_str().and_then(HubRepo::model);
        let repo = repo.ok_or_else(|| missing_folder(model))?;
        return repo.at(revision.unwrap_or("main")).map(Some);
    }
    match revision {
        None => Ok(None),
        Some(revision) => Err(Failure::usage(format!(
            "--revision {revision} is for a model on the hub, and `{}` is a local folder",
            model.display()
        ))
        .hint("leave --revision out, or start where no such folder is")),
    }
}

/// The refusal of a run folder where its model is wanted, and of a run that is not finished; `None` for other folders.
pub(super) fn run_folder(folder: &Path) -> Option<Failure> {
    let model = folder.join(MODEL);
    let has_config = |folder: &Path| folder.join(CONFIG_FILE).is_file();
    if has_config(folder) {
        return None;
    }
    if has_config(&model) {
        return Some(
            Failure::new(format!("`{}` is a run folder", folder.display()))
                .hint(format!("name its checkpoint: {}", model.display())),
        );
    }
    let states = [folder, &model].into_iter().map(StateFile::read);
    let state = states.filter_map(Result::ok).flatten().next()?;
    Some(
        Failure::new(format!("the run in `{}` is not finished", folder.display()))
            .hint(format!("its command continues it: {}", quoted(&state.arguments))),
    )
}

/// The dataset with the hub's file at hand, where it was named without a path.
pub(super) fn dataset(
    dataset: &DatasetSpec,
    role: Role,
    cache_dir: Option<&Path>,
    events: &dyn Events,
) -> Result<DatasetSpec> {
    let Some(wanted) = dataset.on_hub(role) else {
        return Ok(dataset.clone());
    };
    let found = hub(cache_dir).and_then(|hub| {
        let file = match &wanted.file {
            Some(file) => file.clone(),
            None => dataset.choose_file(&hub.dataset_files(&wanted.repo, events)?, role)?,
        };
        let folder = hub.dataset_file(&wanted.repo, &file, events)?;
        Ok(dataset.clone().downloaded_to(folder, &file))
    });
    // A file of any repository has no place on the disk that a flag names.
    found.map_err(|error| match dataset.to_string().starts_with("hub:") {
        true => error,
        false => with_path(error, dataset, role),
    })
}

/// The names of the parquet files of data sets, by repository. The hub is asked once for each: MMLU has 57 subjects.
pub(super) type ListedFiles = BTreeMap<&'static str, Vec<String>>;

/// Downloads the files of a split of a task, unless they are in the cache.
///
/// # Errors
/// Fails when the hub cannot be reached or refuses, and where the data set has no such split.
pub(super) fn task_split(
    split: &HubSplit<'_>,
    listed: &mut ListedFiles,
    cache_dir: Option<&Path>,
    events: &dyn Events,
) -> Result<Vec<PathBuf>> {
    let HubSplit { repository, config, split } = *split;
    let found = hub(cache_dir).and_then(|hub| {
        if !listed.contains_key(repository) {
            listed.insert(repository, hub.parquet_files(repository, events)?);
        }
        let all = listed.get(repository).map_or(&[][..], Vec::as_slice);
        hub.parquet_split((repository, all), config, split, events)
    });
    found.map_err(|error| match error.downcast::<Failure>() {
        Ok(failure) => {
            let own = "name a folder with the files: --tasks-from DIR";
            let hint = match &failure.hint {
                Some(hint) => format!("{hint}; or {own}"),
                None => own.to_string(),
            };
            failure.hint(hint).into()
        }
        Err(error) => error,
    })
}

/// Adds to a failed download that a text on disk would do, and the flag that says so.
fn with_path(error: anyhow::Error, dataset: &DatasetSpec, role: Role) -> anyhow::Error {
    match error.downcast::<Failure>() {
        Ok(failure) => {
            let own = format!("{} {dataset}:PATH for a text on disk", role.flag());
            let hint = match &failure.hint {
                Some(hint) => format!("{hint}; or use {own}"),
                None => format!("use {own}"),
            };
            failure.hint(hint).into()
        }
        Err(error) => error,
    }
}

fn hub(cache_dir: Option<&Path>) -> Result<Hub> {
    let settings = HubSettings::resolve(cache_dir, &|name| std::env::var_os(name))?;
    Ok(Hub::new(settings))
}

fn missing_folder(folder: &Path) -> Failure {
    let layout = "in Hugging Face layout: config.json, *.safetensors, tokenizer.json";
    let hint = match neighbour(folder) {
        Some(near) => format!("did you mean {}? name a folder {layout}", near.display()),
        None => format!("name a folder {layout}"),
    };
    Failure::new(format!("the model folder `{}` does not exist", folder.display()))
        .detail("neither is it an id on the hub, which is like meta-llama/Llama-2-7b-hf")
        .hint(hint)
}

/// The folder that a path to no folder is a misspelling of. A third of the letters may be wrong.
pub(super) fn neighbour(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    let entries = std::fs::read_dir(parent.unwrap_or(Path::new("."))).ok()?;
    let folders = entries.flatten().filter(|entry| entry.path().is_dir());
    let names: Vec<String> =
        folders.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let near = failure::meant(name, names.iter().map(String::as_str), 3);
    near.into_iter().min().map(|name| path.with_file_name(name))
}
