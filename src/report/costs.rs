//! Costs of the models of several runs: their bytes and their speed, and the quality that each cost buys.
//!
//! Models of different layouts may share these charts: bytes and tokens per second are theirs, and a value is comparable if it was
//! measured on the same tokens. The speed is measured by the user, on a machine of their choice: `speed.json` in the run's folder holds
//! the object of `prune generate --bench --json`.

use super::comparison::{MeasuredOn, NamedRun, SAME_DENSE, is_drawable};
use crate::bytes::ByteSize;
use crate::run::manifest::ModelReport;
use crate::run::metric::Metric;
use crate::run::{GenerationReport, Manifest};

/// Models of which a metric was measured on the same tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct ComparableCosts {
    conditions: MeasuredOn,
    /// The conditions for captions.
    pub description: String,
    /// A model per run in the order given, then the dense models.
    pub models: Vec<ModelCost>,
}

/// A model with its costs, as far as they are known.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCost {
    /// The name of its run, or `dense`.
    pub name: String,
    /// Its value of the metric, which can be drawn.
    pub value: f64,
    /// The bytes of its tensors, zeros included.
    pub bytes: Option<ByteSize>,
    /// The bytes of its tensors without the zeros of the decoder's matrices; absent where that is not less.
    pub without_zeros: Option<ByteSize>,
    /// Tokens per second of decoding.
    pub tokens_per_second: Option<f64>,
    /// The hash of the headers of the model that was read.
    identity: String,
}

impl ComparableCosts {
    /// Sorts the models of runs into groups by a metric, in the order given. Merges and runs without a value are in none.
    pub fn of(runs: &[NamedRun], metric: &Metric) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for run in runs {
            let Some((mut group, model)) = Self::begin(run, metric) else {
                continue;
            };
            match groups.iter_mut().find(|other| other.conditions == group.conditions) {
                Some(other) => other.models.push(model),
                None => {
                    group.models.push(model);
                    groups.push(group);
                }
            }
        }
        for run in runs {
            let Some((group, _)) = Self::begin(run, metric) else {
                continue;
            };
            let mut groups = groups.iter_mut();
            if let Some(group) = groups.find(|other| other.conditions == group.conditions) {
                group.add_dense(run, metric);
            }
        }
        groups
    }

    /// The conditions of a run without models, and the model of the run.
    fn begin(run: &NamedRun, metric: &Metric) -> Option<(Self, ModelCost)> {
        let manifest = Some(&run.manifest).filter(|of| of.merge.is_none())?;
        let (conditions, description) = MeasuredOn::of(metric, manifest)?;
        let value = metric.of_result(manifest)?;
        let model = ModelCost {
            name: run.name.clone(),
            value,
            bytes: bytes_of_result(manifest),
            without_zeros: without_zeros(manifest),
            tokens_per_second: run.speed.as_ref().and_then(|speed| speed.tokens_per_second),
            identity: manifest.model.identity.clone(),
        };
        let group = Self { conditions, description, models: Vec::new() };
        is_drawable(metric, &value).then_some((group, model))
    }

    /// Adds the dense model of a run that prunes, unless it is there already.
    fn add_dense(&mut self, run: &NamedRun, metric: &Metric) {
        let model = &run.manifest.model;
        let dense = metric.of_dense(&run.manifest).filter(|dense| is_drawable(metric, dense));
        // The dense model of `--against` is described nowhere.
        let Some(value) = dense.filter(|_| run.manifest.against.is_none()) else {
            return;
        };
        let speed = run.speed.as_ref().and_then(|speed| dense_speed(speed, model));
        let is_same = |other: &&mut ModelCost| {
            other.identity == model.identity && (other.value - value).abs() <= SAME_DENSE * value
        };
        if let Some(dense) = self.models.iter_mut().find(is_same) {
            dense.tokens_per_second = dense.tokens_per_second.or(speed);
            return;
        }
        let is_first = self.models.iter().all(|model| model.name != "dense");
        let name = if is_first { "dense".to_string() } else { format!("dense {}", model.name()) };
        self.models.push(ModelCost {
            name,
            value,
            bytes: Some(model.bytes).filter(|bytes| bytes.0 > 0),
            without_zeros: None,
            tokens_per_second: speed,
            identity: model.identity.clone(),
        });
    }
}

/// The speed of the dense model, where `--compare` named it.
fn dense_speed(speed: &GenerationReport, dense: &ModelReport) -> Option<f64> {
    let compared = speed.compare.as_ref()?;
    let absolute = |path: &str| std::path::absolute(path).ok();
    let is_dense = absolute(&compared.model)? == absolute(&dense.path)?;
    compared.tokens_per_second.filter(|_| is_dense)
}

/// Weights and bytes of the tensors of the model that a run made or measured, zeros included; `None` where the record does not tell.
fn size_of_result(manifest: &Manifest) -> Option<(u64, ByteSize)> {
    let model = &manifest.model;
    let is_dequantized = manifest.recovery.is_some() && model.quantization.is_some();
    if manifest.merge.is_some() || is_dequantized {
        return None;
    }
    let layers = manifest.layer_drop.as_ref().map(|of| (of.parameters[1], of.bytes[1]));
    let width = manifest.width_drop.as_ref().map(|of| (of.parameters[1], of.bytes[1]));
    let dropped = layers.into_iter().chain(width).min_by_key(|(_, bytes)| *bytes);
    Some(dropped.unwrap_or((model.parameters, model.bytes))).filter(|(_, bytes)| bytes.0 > 0)
}

/// The bytes of the tensors of the model that a run made or measured, zeros included.
pub(super) fn bytes_of_result(manifest: &Manifest) -> Option<ByteSize> {
    size_of_result(manifest).map(|(_, bytes)| bytes)
}

/// The bytes of the tensors with a bit per weight in place of the zeros of the decoder's matrices; `None` where that is not less.
pub(super) fn without_zeros(manifest: &Manifest) -> Option<ByteSize> {
    let (weights, bytes) = size_of_result(manifest)?;
    let element = bytes.0 as f64 / weights.max(1) as f64;
    let saved = |zeros: u64, [rows, columns]: [usize; 2]| {
        zeros as f64 * element - rows as f64 * columns as f64 / 8.0
    };
    let matrices = manifest.layers.iter().flat_map(|layer| &layer.matrices);
    let saved: f64 = matrices.map(|matrix| saved(matrix.zeros, matrix.shape).max(0.0)).sum();
    (saved >= 1.0).then(|| ByteSize(bytes.0.saturating_sub(saved as u64)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::made_up;

    fn run(name: &str, ratio: f64, perplexity: f64) -> NamedRun {
        let mut manifest = made_up::manifest("wanda", ratio);
        made_up::evaluated(&mut manifest, 10.0, perplexity);
        NamedRun { name: name.into(), manifest, speed: None }
    }

    #[test]
    fn bytes_without_zeros_have_a_bit_per_weight() {
        let [few, half] = [0.02, 0.5].map(|ratio| run("a", ratio, 12.0).manifest);
        assert_eq!(bytes_of_result(&half), Some(ByteSize(5600)));
        // 14 matrices of 100 weights of 4 bytes: 50 zeros are 200 bytes, the mask is 12.5.
        assert_eq!(without_zeros(&half), Some(ByteSize(5600 - 2625)));
        // Two zeros are 8 bytes.
        assert_eq!(without_zeros(&few), None);
    }

    #[test]
    fn the_dense_model_is_there_once_and_has_the_speed_of_compare() {
        let mut runs = [run("a", 0.5, 12.0), run("b", 0.6, 14.0)];
        runs[0].speed = Some(made_up::speed("out/a/model", 20.0, Some(("elsewhere", 7.0))));
        runs[1].speed = Some(made_up::speed("out/b/model", 30.0, Some(("./m", 9.0))));
        let groups = ComparableCosts::of(&runs, &Metric::Perplexity);
        assert_eq!(groups.len(), 1);
        let models = groups[0].models.iter();
        let models: Vec<_> = models.map(|of| (of.name.as_str(), of.tokens_per_second)).collect();
        assert_eq!(models, [("a", Some(20.0)), ("b", Some(30.0)), ("dense", Some(9.0))]);
    }

    #[test]
    fn an_evaluation_of_the_dense_model_is_its_point() {
        let mut dense = run("d", 0.5, 12.0);
        dense.manifest.command = "eval".into();
        dense.manifest.pruning = None;
        dense.manifest.layers.clear();
        let groups = ComparableCosts::of(&[run("a", 0.5, 12.0), dense], &Metric::Perplexity);
        let names: Vec<&str> = groups[0].models.iter().map(|of| of.name.as_str()).collect();
        assert_eq!(names, ["a", "d"]);
    }

    #[test]
    fn models_measured_on_other_tokens_are_a_group_of_their_own() {
        let mut other = run("b", 0.5, 12.0);
        other.manifest.evaluation.as_mut().unwrap().text_sha256 = "ffff".into();
        let mut unmeasured = run("c", 0.5, 12.0);
        unmeasured.manifest.perplexity = Default::default();
        let groups =
            ComparableCosts::of(&[run("a", 0.5, 12.0), other, unmeasured], &Metric::Perplexity);
        assert_eq!(groups.len(), 2);
    }
}
