//! [`SaliencyFile`]: activations of several models in one safetensors file, which later merges read again.
//!
//! ```text
//! 0.model.layers.3.attn_in   a_j² of the first model of the list, f32 [in_features]
//! ```
//!
//! The inputs are `attn_in` (q, k, v), `o_in`, `mlp_in` (gate, up) and `down_in`. The metadata entry `models` lists the models with
//! everything that decides their statistics, `data_sha256` is the hash of all vectors. A file is replaced as a whole after every layer,
//! so an interrupted measurement continues.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::bytes::{ByteSize, hex};
use crate::checkpoint::{
    Checkpoint, TensorEntry, WeightSource, encode_header, in_a_row, write_atomic,
};
use crate::failure::Failure;
use crate::job::same_run::with_differences;
use crate::model::{InputId, ModelConfig};
use crate::pipeline::activations::LayerSquares;

/// The names of the inputs of a layer, in the order of [`InputId::ALL`].
const INPUTS: [&str; InputId::ALL.len()] = ["attn_in", "o_in", "mlp_in", "down_in"];

/// The version of the layout.
const VERSION: &str = "2";

/// The largest file that is read: ten models of the size of Llama-3.1-405B have 1 GB of statistics.
const LARGEST: ByteSize = ByteSize(2 << 30);

/// Everything that decides the statistics of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Measurement {
    /// The model as the recipe names it.
    pub(super) model: String,
    /// The fingerprint of its weights, the adapter's after it.
    pub(super) fingerprint: String,
    pub(super) dataset: String,
    pub(super) nsamples: u32,
    pub(super) seqlen: u64,
    pub(super) seed: u64,
    /// The dtype of its matrices.
    pub(super) dtype: String,
    pub(super) num_hidden_layers: usize,
    /// SHA-256 of the token ids of the samples.
    pub(super) tokens_sha256: String,
    /// Dtype and kernel of the products.
    pub(super) arithmetic: String,
}

impl Measurement {
    /// The settings that differ: name, value here, value there.
    fn differences(&self, other: &Self) -> Vec<(String, String, String)> {
        let named = |of: &Self| {
            [
                ("--dataset", of.dataset.clone()),
                ("--nsamples", of.nsamples.to_string()),
                ("--seqlen", of.seqlen.to_string()),
                ("--seed", of.seed.to_string()),
                ("dtype", of.dtype.clone()),
                ("layers", of.num_hidden_layers.to_string()),
            ]
        };
        let pairs = named(self).into_iter().zip(named(other));
        pairs
            .filter(|((_, this), (_, that))| this != that)
            .map(|((name, this), (_, that))| (name.to_string(), this, that))
            .collect()
    }
}

/// The statistics of a model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MeasuredModel {
    pub(super) measurement: Measurement,
    /// The layers so far.
    pub(super) layers: Vec<LayerSquares>,
}

impl MeasuredModel {
    pub(super) fn is_complete(&self) -> bool {
        self.layers.len() == self.measurement.num_hidden_layers
    }
}

/// The models of a file.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct SaliencyFile {
    pub(super) models: Vec<MeasuredModel>,
}

impl SaliencyFile {
    /// Reads a file; `None` where there is none.
    ///
    /// # Errors
    /// Fails for a damaged file, and for a file that holds no activation statistics.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let name = path.file_name().with_context(|| format!("`{}` is no file", path.display()))?;
        let file = Checkpoint::open_file(folder, &name.to_string_lossy())?;
        if file.total_bytes() > LARGEST {
            let why = format!("it holds {}, at most {LARGEST} are read", file.total_bytes());
            return Err(is_other(path, why).into());
        }
        let metadata = metadata_of(&file).map_err(|why| is_other(path, why))?;
        let models = models_of(&metadata).map_err(|why| is_other(path, why))?;
        let written = metadata.get("data_sha256").map_or("", String::as_str);
        if hash_of_data(&file)? != written {
            let why = "its vectors are not the ones that were written: the hash differs";
            return Err(is_other(path, why.to_string()).into());
        }
        let read = |(at, measurement)| read_model(&file, path, at, measurement);
        let models: Result<Vec<MeasuredModel>> = models.into_iter().enumerate().map(read).collect();
        Ok(Some(Self { models: models? }))
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// Fails when it cannot be written; the old file stays then.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let (mut tensors, mut data) = (Vec::new(), Vec::new());
        for (at, model) in self.models.iter().enumerate() {
            for (layer, inputs) in model.layers.iter().enumerate() {
                for (input, means) in INPUTS.iter().zip(inputs.values()) {
                    tensors.push((name_of(at, layer, input), Dtype::F32, vec![means.len()]));
                    data.extend(means.iter().flat_map(|value| value.to_le_bytes()));
                }
            }
        }
        let measurements: Vec<&Measurement> =
            self.models.iter().map(|model| &model.measurement).collect();
        let metadata = BTreeMap::from(
            [
                ("format", "pt".to_string()),
                ("prune_saliency", VERSION.to_string()),
                ("models", serde_json::to_string(&measurements)?),
                ("data_sha256", hex(&Sha256::digest(&data))),
            ]
            .map(|(name, text)| (name.to_string(), text)),
        );
        let mut bytes = encode_header(&metadata, &in_a_row(tensors));
        bytes.extend(data);
        write_atomic(path, &bytes)
    }

    /// The model with this fingerprint, complete or not.
    pub(super) fn find(&self, fingerprint: &str) -> Option<&MeasuredModel> {
        let mut models = self.models.iter();
        models.find(|model| model.measurement.fingerprint == fingerprint)
    }

    /// The complete statistics of a model.
    pub(super) fn complete(&self, fingerprint: &str) -> Option<&MeasuredModel> {
        self.find(fingerprint).filter(|model| model.is_complete())
    }

    /// The complete statistics that a merge asks for; `None` where they are to be measured.
    ///
    /// # Errors
    /// Fails where the model was measured with different settings, naming the differences.
    pub(super) fn asked(&self, asked: &Measurement, path: &Path) -> Result<Option<&MeasuredModel>> {
        let Some(found) = self.find(&asked.fingerprint) else {
            return Ok(None);
        };
        let differences = found.measurement.differences(asked);
        if !differences.is_empty() {
            let failure = Failure::new(format!(
                "`{}` holds other statistics of `{}`",
                path.display(),
                asked.model
            ))
            .hint("use the same flags as then, or another --saliency-file");
            return Err(with_differences(failure, &differences).into());
        }
        Ok(Some(found).filter(|found| found.is_complete()))
    }

    /// Begins or continues the measurement of a model, and returns its index. Layers that were measured from different tokens, or with
    /// different arithmetic, are dropped.
    pub(super) fn begin(&mut self, measurement: &Measurement) -> usize {
        let known = self
            .models
            .iter()
            .position(|model| model.measurement.fingerprint == measurement.fingerprint);
        let begun = MeasuredModel { measurement: measurement.clone(), layers: Vec::new() };
        match known {
            None => {
                self.models.push(begun);
                self.models.len() - 1
            }
            Some(at) => {
                let found = &mut self.models[at];
                let name = measurement.model.clone();
                let is_same = found.measurement
                    == Measurement {
                        model: found.measurement.model.clone(),
                        ..measurement.clone()
                    };
                if is_same {
                    found.measurement.model = name;
                } else {
                    *found = begun;
                }
                at
            }
        }
    }
}

fn name_of(model: usize, layer: usize, input: &str) -> String {
    format!("{model}.model.layers.{layer}.{input}")
}

/// The metadata of a file.
fn metadata_of(file: &Checkpoint) -> std::result::Result<BTreeMap<String, String>, String> {
    #[derive(Deserialize)]
    struct MetadataHeader {
        #[serde(default, rename = "__metadata__")]
        metadata: BTreeMap<String, String>,
    }
    let header = file.shards().first().map(|shard| shard.header.as_slice());
    let head: MetadataHeader = serde_json::from_slice(header.unwrap_or_default())
        .map_err(|error| format!("its header is damaged: {error}"))?;
    Ok(head.metadata)
}

/// The hash of all vectors, in the order of the file.
fn hash_of_data(file: &Checkpoint) -> Result<String> {
    let mut entries: Vec<&TensorEntry> = file.tensors().collect();
    entries.sort_by_key(|entry| entry.offset);
    let mut hasher = Sha256::new();
    for entry in entries {
        let mut bytes = vec![0; entry.bytes as usize];
        file.read(entry, 0, &mut bytes)?;
        hasher.update(&bytes);
    }
    Ok(hex(&hasher.finalize()))
}

/// The list in the metadata.
fn models_of(metadata: &BTreeMap<String, String>) -> std::result::Result<Vec<Measurement>, String> {
    match metadata.get("prune_saliency").map(String::as_str) {
        Some(VERSION) => {}
        Some(other) => {
            return Err(format!("its layout has the version {other}, this is {VERSION}"));
        }
        None => return Err("its metadata has no entry `prune_saliency`".to_string()),
    }
    let models = metadata.get("models").map_or("[]", String::as_str);
    serde_json::from_str(models).map_err(|error| format!("its list of models is damaged: {error}"))
}

/// The refusal of a file that holds no activation statistics.
fn is_other(path: &Path, why: String) -> Failure {
    Failure::new(format!("`{}` is no file of activation statistics", path.display()))
        .detail(why)
        .hint("name another file with --saliency-file; a file that does not exist is written")
}

/// Reads the statistics of model number `at`, up to the first missing layer.
fn read_model(
    file: &Checkpoint,
    path: &Path,
    at: usize,
    measurement: Measurement,
) -> Result<MeasuredModel> {
    let mut layers = Vec::new();
    while layers.len() < measurement.num_hidden_layers {
        let layer = layers.len();
        let entries = INPUTS.iter().map(|input| file.entry(&name_of(at, layer, input)));
        let Some(entries) = entries.collect::<Option<Vec<_>>>() else {
            break;
        };
        let mut means = LayerSquares::default();
        for ((_, means), entry) in means.iter_mut().zip(entries) {
            *means = read_vector(file, path, entry)?;
        }
        layers.push(means);
    }
    Ok(MeasuredModel { measurement, layers })
}

fn read_vector(file: &Checkpoint, path: &Path, entry: &TensorEntry) -> Result<Vec<f32>> {
    if entry.dtype != Dtype::F32 || entry.shape.len() != 1 {
        return Err(is_other(path, format!("`{}` is no vector of f32", entry.name)).into());
    }
    let mut bytes = vec![0; entry.bytes as usize];
    file.read(entry, 0, &mut bytes)?;
    let values = bytes.as_chunks::<4>().0.iter();
    let values: Vec<f32> = values.map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let is_mean = |value: &&f32| value.is_finite() && **value >= 0.0;
    match values.iter().find(|value| !is_mean(value)) {
        None => Ok(values),
        Some(bad) => {
            let why = format!("`{}` holds {bad}, which is no mean of squares", entry.name);
            Err(is_other(path, why).into())
        }
    }
}

impl MeasuredModel {
    /// Checks the lengths of all vectors.
    ///
    /// # Errors
    /// Fails for statistics whose shape does not fit the model.
    pub(super) fn check(&self, config: &ModelConfig, path: &Path) -> Result<()> {
        let widths = config.input_widths();
        let fits =
            |inputs: &LayerSquares| inputs.iter().all(|(at, means)| means.len() == widths[at]);
        if self.layers.len() <= config.num_hidden_layers && self.layers.iter().all(fits) {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the statistics of `{}` in `{}` have another shape than the model",
            self.measurement.model,
            path.display()
        ))
        .detail(format!("expected vectors of {:?} elements", widths.values().collect::<Vec<_>>()))
        .hint("remove the file, or name another --saliency-file")
        .into())
    }
}

#[cfg(test)]
#[path = "saliency_file_tests.rs"]
mod tests;
