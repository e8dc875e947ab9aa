//! `run.json`: everything needed to trust, repeat or compare a run. docs/run-json.md documents the schema.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::allocation::AllocationReport;
use super::divergence::DivergenceReport;
use super::fallback::{DeviceMemoryReport, FallbackReport};
use super::layer_drop::LayerDropReport;
use super::merging::{MERGED, MergeReport};
use super::plan::{DevicePlan, HiddenStatesStorage, Plan, exceeded};
use super::profile::ProfileReport;
use super::rank_report::RankReport;
use super::recovery::{BlockLoss, RecoveryReport};
use super::tasks::TaskResults;
use super::verification::Verification;
use super::width_drop::WidthDropReport;
use super::zeros_gain::ZerosGain;
use crate::bytes::ByteSize;

pub use super::gate::{GateReport, LimitReport};
pub use super::measured::{PerplexityReport, PhaseReport, SessionReport, TextProtocol};

/// The version of the schema. It rises when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// A finished run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Manifest {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The program's version.
    pub prune_version: String,
    /// `prune`, `eval`, `recover` or `merge`.
    pub command: String,
    /// The command line.
    pub arguments: Vec<String>,
    /// Every setting by name, defaults included; empty in older records.
    #[serde(default)]
    pub settings: BTreeMap<String, Value>,
    /// The beginning of the run, in seconds since 1970 (UTC).
    pub started_unix_seconds: u64,
    /// The duration of the run, all sessions together.
    pub seconds: f64,
    /// The number of sweep cells that shared a pass over the layers; the seconds and the memory of this record cover these cells
    /// together. Absent for a run of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cells_at_once: Option<usize>,
    /// The processes that worked on the run, in order. An interrupted run has several. Empty for `eval` and in older records.
    #[serde(default)]
    pub sessions: Vec<SessionReport>,
    /// The checkpoint that was pruned or measured.
    pub model: ModelReport,
    /// The dense model that the checkpoint was compared with; absent without `--against`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<AgainstReport>,
    /// The arithmetic of the forward pass.
    pub arithmetic: Arithmetic,
    /// The layers that were dropped, with their scores; absent without `--drop-layers`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_drop: Option<LayerDropReport>,
    /// The width that was dropped; absent without `--drop-width`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width_drop: Option<WidthDropReport>,
    /// The pruning settings, as resolved; absent for `eval`.
    pub pruning: Option<PruningReport>,
    /// The merge; present only for `merge`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeReport>,
    /// The recovery training; present only for `recover`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<RecoveryReport>,
    /// The calibration text and samples; absent for a method without calibration.
    pub calibration: Option<TextProtocol>,
    /// Sparsity over all decoder linears, counted from the weights.
    pub sparsity: Option<SparsityReport>,
    /// Per layer and matrix, in order.
    pub layers: Vec<LayerReport>,
    /// The perplexities measured.
    pub perplexity: Perplexities,
    /// The accuracies of multiple-choice tasks; absent without tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskResults>,
    /// The evaluation text and windows; absent without evaluation.
    pub evaluation: Option<TextProtocol>,
    /// The outcome of `--max-perplexity`; absent without the flag.
    #[serde(default)]
    pub gate: Option<GateReport>,
    /// The outcomes of the other gates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<LimitReport>,
    /// The plan; absent in older records.
    #[serde(default)]
    pub plan: Option<Plan>,
    /// The place of hidden states between two layers.
    pub hidden_states: HiddenStatesStorage,
    /// Time and peak anonymous memory per phase.
    pub phases: Vec<PhaseReport>,
    /// The largest of the phases' peaks; absent on systems that do not report memory.
    pub peak_anonymous: Option<ByteSize>,
    /// The process's memory at the checkpoints of the run and after each layer, in order of time.
    #[serde(default)]
    pub memory: Vec<MemorySample>,
    /// The written model and its verification; absent without a written model.
    pub output: Option<OutputReport>,
    /// Units of work that a device had no memory for at first, in order; empty in older records.
    #[serde(default)]
    pub fallbacks: Vec<FallbackReport>,
    /// The ranks of a run over several processes; empty for a run of a single process.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankReport>,
    /// The peak memory of each GPU.
    #[serde(default)]
    pub devices: Vec<DeviceMemoryReport>,
    /// The profile of the CPU; absent in older records.
    #[serde(default)]
    pub profile: Option<ProfileReport>,
    /// The gain of the zeros of the written model; absent where they gain nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros_gain: Option<ZerosGain>,
    /// The file of masks; absent without `--save-masks`.
    #[serde(default)]
    pub masks: Option<String>,
    /// All warnings.
    pub warnings: Vec<String>,
}

impl Manifest {
    /// The perplexities that were measured, before and after what the run did, with their names.
    pub fn perplexities(&self) -> impl Iterator<Item = (&'static str, PerplexityReport)> {
        let [before, after] = if self.recovery.is_some() {
            ["perplexity before", "perplexity after"]
        } else if self.command == "eval" {
            ["perplexity", "pruned perplexity"]
        } else {
            ["dense perplexity", "pruned perplexity"]
        };
        let measured = [(before, self.perplexity.dense), (after, self.perplexity.pruned)];
        measured.into_iter().filter_map(|(name, report)| Some((name, report?)))
    }

    /// The perplexity of the dense model of a run that prunes; `None` where it was not measured, and for every other run: `dense` is
    /// the perplexity before the training of a recovery, and the result of an evaluation.
    pub fn dense_perplexity(&self) -> Option<f64> {
        let dense = self.pruning.as_ref().and(self.perplexity.dense);
        dense.filter(|_| self.recovery.is_none()).map(|report| report.perplexity)
    }

    /// The perplexity of the model that the run made, or of the model that it measured; `None` where it was not measured.
    pub fn perplexity_of_result(&self) -> Option<f64> {
        let report = match &self.merge {
            Some(merge) => {
                let mut rows = merge.perplexities.iter();
                rows.find(|row| row.model == MERGED).map(|row| row.report)
            }
            None if self.command == "eval" => self.perplexity.dense,
            None => self.perplexity.pruned,
        };
        report.map(|report| report.perplexity)
    }

    /// Returns a line per device that used more memory than it may, by any amount, or else more than planned: by more than a tenth, and by
    /// more than 32 MiB.
    pub fn exceeded_plan(&self) -> Vec<String> {
        let Some(plan) = &self.plan else {
            return Vec::new();
        };
        let measured = |device: &str| match device {
            "cpu" => self.peak_anonymous,
            _ => self
                .devices
                .iter()
                .find(|of| of.device == device)
                .and_then(|of| Some(of.peak_allocated? + of.context)),
        };
        let of_device = |device: &DevicePlan| {
            let (planned, measured) = (device.peak, measured(&device.device)?);
            let of = match device.device.as_str() {
                "cpu" => "memory",
                gpu => gpu,
            };
            let warning = exceeded(of, measured, (device.budget, planned))?;
            Some(format!("{warning}; run.json has the peaks per phase"))
        };
        plan.devices.iter().filter_map(of_device).collect()
    }
}

/// The checkpoint.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ModelReport {
    /// The folder, as given; for a model of the hub its snapshot in the cache.
    pub path: String,
    /// `owner/name` on the hub; absent for a local folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `--revision`; absent for a local folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The commit of the revision; absent for a local folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Hash of the headers of all shards. Equal hashes mean equal names, shapes, dtypes and layout.
    pub identity: String,
    /// `config.json` as understood.
    pub config: Value,
    /// The format of a 4-bit checkpoint: `nf4`; absent for a checkpoint that is not quantised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    /// Weights in all tensors.
    pub parameters: u64,
    /// Bytes in all tensors.
    pub bytes: ByteSize,
}

impl ModelReport {
    /// The name of the model without its owner or its folder.
    pub fn name(&self) -> String {
        name_of(self.id.as_deref().unwrap_or(&self.path))
    }
}

/// Returns the last component of a path, which says nothing about the machine. For `.` it returns the name of that folder, and for the
/// folder `model` of a run the name of the run.
pub fn name_of(path: &str) -> String {
    let mut absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    if absolute.file_name().is_none() {
        // The path ends in `..`.
        absolute = absolute.canonicalize().unwrap_or_default();
    }
    let run = absolute.parent().filter(|run| run.join(MANIFEST_FILE).is_file());
    let named = run.filter(|_| absolute.ends_with(RESULT_FOLDER)).unwrap_or(&absolute);
    named.file_name().map_or(RESULT_FOLDER.to_string(), |name| name.to_string_lossy().into_owned())
}

/// The record in the folder of a run.
pub const MANIFEST_FILE: &str = "run.json";

/// The folder of the result in the folder of a run.
pub const RESULT_FOLDER: &str = "model";

/// The arithmetic of a run. Mask hashes are comparable only between equal arithmetic.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arithmetic {
    /// `cpu`, or the GPUs that are used: `cuda:0+cuda:1`.
    pub device: String,
    /// The dtype of the forward pass.
    pub dtype: String,
    /// The kernel of the products.
    pub kernel: String,
    /// The CPU features the kernel may use here.
    pub cpu_features: Vec<String>,
    /// Worker threads. They do not change results.
    pub threads: usize,
}

/// The pruning settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PruningReport {
    /// `--prune-method`.
    pub method: String,
    /// `--sparsity-ratio`, or N/M.
    pub sparsity_ratio: f64,
    /// `unstructured` or N:M.
    pub sparsity_type: String,
    /// True if the method changes the weights it keeps.
    #[serde(default)]
    pub changes_weights: bool,
    /// True if the channels of every pruned MLP have an order of their own, which is not the source's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub permutes_channels: bool,
    /// The allocation of the ratios, where they were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<AllocationReport>,
    /// `--include`, as given.
    pub include: Vec<String>,
    /// `--exclude`, as given.
    pub exclude: Vec<String>,
    /// Matrices that are pruned.
    pub matrices: usize,
    /// Decoder linears in the model.
    pub matrices_in_model: usize,
    /// Per layer where `--layer-ratios` was given.
    pub layer_ratios: Option<Vec<f64>>,
}

impl PruningReport {
    /// Returns whether no weight was to be removed.
    pub fn prunes_nothing(&self) -> bool {
        self.sparsity_ratio == 0.0 && self.layer_ratios.is_none()
    }
}

/// Zeros over the decoder's linears.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SparsityReport {
    /// Zeros after pruning.
    pub zeros: u64,
    /// Zeros before pruning.
    pub zeros_before: u64,
    /// Weights.
    pub weights: u64,
    /// `zeros / weights`, the original's "sparsity sanity check".
    pub ratio: f64,
}

/// A decoder layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Its index, from 0.
    pub layer: usize,
    /// Seconds spent in this layer for calibration and pruning.
    pub seconds: f64,
    /// Zeros over weights of its linears.
    pub sparsity: f64,
    /// The new order of its MLP's channels; absent without a new order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permutation: Option<PermutationReport>,
    /// The losses of its training; absent where it was not trained alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<BlockLoss>,
    /// Its matrices, in the order of the reference.
    pub matrices: Vec<MatrixReport>,
}

/// The worth of a new order of the channels between an MLP's matrices: sums of the scores that the pattern keeps in down_proj.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PermutationReport {
    /// In the order of the source.
    pub kept_before: f64,
    /// In the order that is written.
    pub kept_after: f64,
}

/// A matrix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MatrixReport {
    /// The module's name: `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// [out_features, in_features].
    pub shape: [usize; 2],
    /// Zeros before.
    pub zeros_before: u64,
    /// Zeros after.
    pub zeros: u64,
    /// Weights chosen by the mask; absent for a matrix that was not pruned.
    pub pruned: Option<u64>,
    /// SHA-256 of the packed mask; absent for a matrix that was not pruned.
    pub mask_sha256: Option<String>,
    /// ‖Wx − W'x‖ / ‖Wx‖ (Frobenius) over some calibration tokens; absent for a matrix that was not pruned, and without calibration.
    #[serde(default)]
    pub relative_output_error: Option<f64>,
}

impl MatrixReport {
    /// Zeros over weights; `None` for a matrix without weights, which only a damaged record has.
    pub fn sparsity(&self) -> Option<f64> {
        let [rows, columns] = self.shape.map(|size| size as f64);
        let weights = rows * columns;
        (weights > 0.0).then(|| self.zeros as f64 / weights)
    }
}

/// The measured perplexities, dense and pruned.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Perplexities {
    /// Perplexity of the source's weights.
    pub dense: Option<PerplexityReport>,
    /// Perplexity of the pruned weights.
    pub pruned: Option<PerplexityReport>,
    /// The divergence of the model from the dense model; absent where they were not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub divergence: Option<DivergenceReport>,
}

/// The dense model of `prune eval --against`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AgainstReport {
    /// The checkpoint.
    pub model: ModelReport,
    /// Its perplexity over the same windows.
    pub perplexity: Option<PerplexityReport>,
}

/// Everything that a sweep measures of models.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SweepMeasurements {
    /// Perplexities, and the divergence.
    pub perplexity: Perplexities,
    /// Accuracies of tasks; `None` without tasks.
    pub tasks: Option<TaskResults>,
}

/// The process's memory at a moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemorySample {
    /// Seconds since the run began.
    pub seconds: f64,
    /// The moment: `01_start`, `layer_3`, …
    pub checkpoint: String,
    /// Resident anonymous memory at the moment.
    pub anonymous: ByteSize,
    /// The peak since the sample before.
    pub peak_anonymous: ByteSize,
    /// The memory of all GPUs, added up; absent without GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuMemory>,
}

/// GPU memory at a moment, as the driver's pool counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    /// Bytes in allocations.
    pub allocated: ByteSize,
    /// Bytes that the pool has reserved from the devices.
    pub reserved: ByteSize,
    /// The peak of allocations since the run began.
    pub peak: ByteSize,
    /// Free bytes of the devices.
    pub free: ByteSize,
    /// All bytes of the devices.
    pub total: ByteSize,
}

/// The written model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OutputReport {
    /// The model folder.
    pub model: String,
    /// The tensors that were read back and compared.
    pub verification: Verification,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_last_component_of_a_path() {
        for (path, name) in [
            ("/home/me/a.b", "a.b"),
            ("x/m/", "m"),
            ("m", "m"),
            ("owner/name", "name"),
            ("built in", "built in"),
            ("/", "model"),
        ] {
            assert_eq!(name_of(path), name);
        }
        let here = std::env::current_dir().unwrap();
        let last = here.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(name_of("."), last);
        assert_eq!(name_of("src/.."), last);
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("7b-60/model");
        std::fs::create_dir_all(&model).unwrap();
        let path = model.display().to_string();
        assert_eq!(name_of(&path), "model", "of no run");
        std::fs::write(folder.path().join("7b-60/run.json"), "").unwrap();
        assert_eq!(name_of(&path), "7b-60");
    }

    #[test]
    fn a_perplexity_that_is_not_finite_survives_json() {
        let report = PerplexityReport {
            perplexity: f64::INFINITY,
            mean_loss: f64::NAN,
            standard_error: 0.5,
            windows: 1,
            seqlen: 8,
        };
        let json = serde_json::to_string(&report).unwrap();
        let read: PerplexityReport = serde_json::from_str(&json).unwrap();
        assert!(read.perplexity.is_nan() && read.mean_loss.is_nan(), "{json}");
        assert_eq!((read.standard_error, read.windows), (0.5, 1));
    }
}
