//! [`SaliencyFile`]: activations of several models in one safetensors file, which later merges read again.
//!
//! ```text
//! 0.model.layers.3.attn_in              a_j² of the first model of the list, f32 [in_features]
//! 0.model.layers.3.attn_in.magnitudes   m_j, where it was measured
//! ```
//!
//! The inputs are `attn_in` (q, k, v), `o_in`, `mlp_in` (gate, up) and `down_in`. The metadata entry `models` lists the models with
//! everything that decides their statistics. A file is replaced as a whole after every layer, so an interrupted measurement continues.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, TensorEntry, WeightSource, encode_header, write_atomic};
use crate::failure::Failure;
use crate::model::ModelConfig;
use crate::pipeline::activations::{ColumnMeans, widths};

/// The names of the inputs of a layer, in the order of [`crate::model::Observation::ALL`].
const INPUTS: [&str; 4] = ["attn_in", "o_in", "mlp_in", "down_in"];

/// The version of the layout.
const VERSION: &str = "1";

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
    /// m_j was measured, too.
    pub(super) has_magnitudes: bool,
    /// SHA-256 of the token ids of the samples.
    pub(super) tokens_sha256: String,
    /// Dtype and kernel of the products.
    pub(super) arithmetic: String,
}

impl Measurement {
    /// The settings that differ: name, value of this measurement, value of the other.
    fn differences(&self, other: &Self) -> Vec<(&'static str, String, String)> {
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
            .map(|((name, this), (_, that))| (name, this, that))
            .collect()
    }
}

/// The statistics of one model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MeasuredModel {
    pub(super) measurement: Measurement,
    /// The layers so far.
    pub(super) layers: Vec<[ColumnMeans; 4]>,
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
    /// Fails for a file that is damaged or of another kind.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let name = path
            .file_name()
            .with_context(|| format!("`{}` is no file", path.display()))?;
        let file = Checkpoint::open_file(folder, &name.to_string_lossy())?;
        if file.total_bytes() > LARGEST {
            let why = format!(
                "it holds {}, at most {LARGEST} are read",
                file.total_bytes()
            );
            return Err(is_other(path, why).into());
        }
        let models = models_of(&file).map_err(|why| is_other(path, why))?;
        let read = |(at, measurement)| {
            StatisticsReader {
                file: &file,
                path,
                at,
            }
            .model(measurement)
        };
        let models: Result<Vec<MeasuredModel>> = models.into_iter().enumerate().map(read).collect();
        Ok(Some(Self { models: models? }))
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// Fails when it cannot be written; the old one stays then.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let mut tensors: Vec<(String, TensorInfo)> = Vec::new();
        let mut data: Vec<u8> = Vec::new();
        let mut add = |name: String, values: &[f32]| {
            let start = data.len();
            data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            let info = TensorInfo {
                dtype: Dtype::F32,
                shape: vec![values.len()],
                data_offsets: (start, data.len()),
            };
            tensors.push((name, info));
        };
        for (at, model) in self.models.iter().enumerate() {
            for (layer, inputs) in model.layers.iter().enumerate() {
                for (input, means) in INPUTS.iter().zip(inputs) {
                    add(name_of(at, layer, input), &means.squares);
                    if let Some(magnitudes) = &means.magnitudes {
                        add(magnitudes_of(at, layer, input), magnitudes);
                    }
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
            ]
            .map(|(name, text)| (name.to_string(), text)),
        );
        let mut bytes = encode_header(&metadata, &tensors);
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
    /// Fails where the model was measured in another way, with the differences.
    pub(super) fn asked(&self, asked: &Measurement, path: &Path) -> Result<Option<&MeasuredModel>> {
        let Some(found) = self.find(&asked.fingerprint) else {
            return Ok(None);
        };
        let differences = found.measurement.differences(asked);
        if !differences.is_empty() {
            let mut failure = Failure::new(format!(
                "`{}` holds other statistics of `{}`",
                path.display(),
                asked.model
            ))
            .hint("use the same flags as then, or another --saliency-file");
            for (name, then, now) in differences {
                failure = failure.detail(format!("{name}: {then} there, {now} now"));
            }
            return Err(failure.into());
        }
        let has_magnitudes = found.measurement.has_magnitudes || !asked.has_magnitudes;
        Ok(Some(found).filter(|found| found.is_complete() && has_magnitudes))
    }

    /// Begins or continues the measurement of a model, and returns its index. Layers that were measured from other tokens, or with another
    /// arithmetic, are dropped.
    pub(super) fn begin(&mut self, measurement: &Measurement) -> usize {
        let known = self
            .models
            .iter()
            .position(|model| model.measurement.fingerprint == measurement.fingerprint);
        let begun = MeasuredModel {
            measurement: measurement.clone(),
            layers: Vec::new(),
        };
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

fn magnitudes_of(model: usize, layer: usize, input: &str) -> String {
    format!("{}.magnitudes", name_of(model, layer, input))
}

/// The list in the metadata.
fn models_of(file: &Checkpoint) -> std::result::Result<Vec<Measurement>, String> {
    #[derive(Deserialize)]
    struct MetadataHeader {
        #[serde(default, rename = "__metadata__")]
        metadata: BTreeMap<String, String>,
    }
    let header = file.shards().first().map(|shard| shard.header.as_slice());
    let head: MetadataHeader = serde_json::from_slice(header.unwrap_or_default())
        .map_err(|error| format!("its header is damaged: {error}"))?;
    match head.metadata.get("prune_saliency").map(String::as_str) {
        Some(VERSION) => {}
        Some(other) => {
            return Err(format!(
                "its layout has the version {other}, this is {VERSION}"
            ));
        }
        None => return Err("its metadata has no entry `prune_saliency`".to_string()),
    }
    let models = head.metadata.get("models").map_or("[]", String::as_str);
    serde_json::from_str(models).map_err(|error| format!("its list of models is damaged: {error}"))
}

/// The refusal of a file of another kind.
fn is_other(path: &Path, why: String) -> Failure {
    Failure::new(format!(
        "`{}` is no file of activation statistics",
        path.display()
    ))
    .detail(why)
    .hint("name another file with --saliency-file; a file that does not exist is written")
}

/// Reads the statistics of one model.
struct StatisticsReader<'a> {
    file: &'a Checkpoint,
    path: &'a Path,
    at: usize,
}

impl StatisticsReader<'_> {
    /// Reads the layers up to the first one that is missing.
    fn model(&self, measurement: Measurement) -> Result<MeasuredModel> {
        let mut layers = Vec::new();
        while layers.len() < measurement.num_hidden_layers {
            let layer = layers.len();
            let means = INPUTS.iter().map_while(|input| {
                let squares = self.file.entry(&name_of(self.at, layer, input))?;
                let magnitudes = magnitudes_of(self.at, layer, input);
                Some(self.means(squares, measurement.has_magnitudes.then_some(magnitudes)))
            });
            let means: Result<Vec<ColumnMeans>> = means.collect();
            match <[ColumnMeans; 4]>::try_from(means?) {
                Ok(means) => layers.push(means),
                Err(_) => break,
            }
        }
        Ok(MeasuredModel {
            measurement,
            layers,
        })
    }

    fn means(&self, squares: &TensorEntry, magnitudes: Option<String>) -> Result<ColumnMeans> {
        let magnitudes = magnitudes.map(|name| {
            let entry = self.file.entry(&name);
            let missing = || is_other(self.path, format!("`{name}` is missing"));
            self.vector(entry.ok_or_else(missing)?)
        });
        Ok(ColumnMeans {
            squares: self.vector(squares)?,
            magnitudes: magnitudes.transpose()?,
        })
    }

    fn vector(&self, entry: &TensorEntry) -> Result<Vec<f32>> {
        if entry.dtype != Dtype::F32 || entry.shape.len() != 1 {
            let why = format!("`{}` is no vector of f32", entry.name);
            return Err(is_other(self.path, why).into());
        }
        let mut bytes = vec![0; entry.bytes as usize];
        self.file.read(entry, 0, &mut bytes)?;
        let values = bytes.as_chunks::<4>().0.iter();
        let values: Vec<f32> = values.map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let is_mean = |value: &&f32| value.is_finite() && **value >= 0.0;
        match values.iter().find(|value| !is_mean(value)) {
            None => Ok(values),
            Some(bad) => {
                let why = format!(
                    "`{}` holds {bad}, which is no mean of squares or magnitudes",
                    entry.name
                );
                Err(is_other(self.path, why).into())
            }
        }
    }
}

impl MeasuredModel {
    /// Checks the lengths of all vectors.
    ///
    /// # Errors
    /// Fails for statistics of another shape than the model's.
    pub(super) fn check(&self, config: &ModelConfig, path: &Path) -> Result<()> {
        let widths = widths(config);
        let fits = |inputs: &[ColumnMeans; 4]| {
            let mut inputs = inputs.iter().zip(widths);
            inputs.all(|(means, width)| {
                let magnitudes = means.magnitudes.as_ref();
                means.squares.len() == width && magnitudes.is_none_or(|of| of.len() == width)
            })
        };
        if self.layers.len() <= config.num_hidden_layers && self.layers.iter().all(fits) {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the statistics of `{}` in `{}` have another shape than the model",
            self.measurement.model,
            path.display()
        ))
        .detail(format!("expected vectors of {widths:?} elements"))
        .hint("remove the file, or name another --saliency-file")
        .into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(fingerprint: &str) -> Measurement {
        Measurement {
            model: "m".to_string(),
            fingerprint: fingerprint.to_string(),
            dataset: "wikitext2".to_string(),
            nsamples: 64,
            seqlen: 512,
            seed: 0,
            dtype: "f32".to_string(),
            num_hidden_layers: 2,
            has_magnitudes: true,
            tokens_sha256: "t".to_string(),
            arithmetic: "f32 by fused".to_string(),
        }
    }

    fn layer(value: f32) -> [ColumnMeans; 4] {
        [2, 3, 2, 4].map(|width| ColumnMeans {
            squares: vec![value; width],
            magnitudes: Some(vec![value / 2.0; width]),
        })
    }

    fn model(fingerprint: &str, layers: usize) -> MeasuredModel {
        MeasuredModel {
            measurement: measurement(fingerprint),
            layers: (0..layers).map(|at| layer(at as f32 + 1.0)).collect(),
        }
    }

    #[test]
    fn a_file_is_read_as_it_was_written_begun_models_included() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.safetensors");
        assert_eq!(SaliencyFile::read(&path).unwrap(), None);
        let file = SaliencyFile {
            models: vec![model("a", 2), model("b", 1), model("c", 0)],
        };
        file.write(&path).unwrap();
        assert_eq!(SaliencyFile::read(&path).unwrap().unwrap(), file);
        assert!(file.complete("a").is_some() && file.complete("b").is_none());
    }

    #[test]
    fn statistics_of_other_settings_are_refused_with_the_differences() {
        let file = SaliencyFile {
            models: vec![model("a", 2), model("b", 1)],
        };
        let path = Path::new("s.safetensors");
        let asked = measurement("a");
        assert!(file.asked(&asked, path).unwrap().is_some());
        let other = Measurement {
            seqlen: 256,
            seed: 7,
            ..asked
        };
        let error = file.asked(&other, path).unwrap_err();
        let failure = error.downcast_ref::<Failure>().unwrap();
        let expected = ["--seqlen: 512 there, 256 now", "--seed: 0 there, 7 now"];
        assert_eq!(failure.details, expected);
        assert!(file.asked(&measurement("b"), path).unwrap().is_none());
        assert!(file.asked(&measurement("c"), path).unwrap().is_none());
    }

    #[test]
    fn a_measurement_continues_only_with_the_same_tokens_and_arithmetic() {
        let mut file = SaliencyFile {
            models: vec![model("a", 1)],
        };
        let same = Measurement {
            model: "elsewhere/m".to_string(),
            ..measurement("a")
        };
        assert_eq!((file.begin(&same), file.models[0].layers.len()), (0, 1));
        let other = Measurement {
            arithmetic: "bf16 by amx".to_string(),
            ..same
        };
        assert_eq!((file.begin(&other), file.models[0].layers.len()), (0, 0));
        assert_eq!(file.begin(&measurement("b")), 1);
    }

    #[test]
    fn damaged_files_and_files_of_another_kind_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.safetensors");
        let says = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let error = SaliencyFile::read(&path).unwrap_err();
            let failure = error.downcast_ref::<Failure>().unwrap();
            format!("{} {:?}", failure.message, failure.details)
        };
        let mut file = SaliencyFile {
            models: vec![model("a", 2)],
        };
        file.models[0].layers[1][2].squares[0] = f32::NAN;
        file.write(&path).unwrap();
        let found = says(&std::fs::read(&path).unwrap());
        assert!(
            found.contains("0.model.layers.1.mlp_in") && found.contains("NaN"),
            "{found}"
        );
        let plain = encode_header(&BTreeMap::new(), &[]);
        assert!(says(&plain).contains("no entry `prune_saliency`"));
        let metadata = |version: &str, models: &str| {
            let pairs = [("prune_saliency", version), ("models", models)];
            let pairs = pairs.map(|(name, text)| (name.to_string(), text.to_string()));
            encode_header(&BTreeMap::from(pairs), &[])
        };
        assert!(says(&metadata("2", "[]")).contains("version 2"));
        assert!(says(&metadata("1", "[{}]")).contains("list of models is damaged"));
        assert!(says(b"x").contains("too few"));
    }
}
