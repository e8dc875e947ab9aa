//! Groups of runs that may share a chart, and the lines of each chart.
//!
//! Values are comparable only when they were measured on the same tokens of the same model: [`ComparableRuns`] holds runs with equal
//! text or tasks, tokenizer, windows, window length and model layout. Inside it, runs that differ only in their ratio form a [`Series`].

use super::format::text_name;
use super::task_table::questions_in_words;
use crate::run::divergence::KlPositions;
use crate::run::metric::Metric;
use crate::run::{GenerationReport, Manifest};

/// The largest relative difference of dense perplexities that are of the same weights and arithmetic.
pub(super) const SAME_DENSE: f64 = 1e-3;

/// A finished run and its name on the page.
#[derive(Debug, Clone)]
pub struct NamedRun {
    /// A short name, different for every run of a page.
    pub name: String,
    /// Its `run.json`.
    pub manifest: Manifest,
    /// Its `speed.json`; `None` where the folder has none.
    pub speed: Option<GenerationReport>,
}

/// The runs of a page in groups that can be compared.
#[derive(Debug, Clone, PartialEq)]
pub struct RunComparison<'a> {
    /// Charts, in the order their first runs were given.
    pub groups: Vec<ComparableRuns>,
    /// Runs on no chart, and the reason.
    pub left_out: Vec<(&'a str, String)>,
}

/// Runs measured in the same way.
#[derive(Debug, Clone, PartialEq)]
pub struct ComparableRuns {
    conditions: Conditions,
    /// The conditions for captions. The names in it are not compared: the same text may have several.
    pub description: String,
    /// A series per method and settings, in the order given.
    pub series: Vec<Series>,
    /// The different values of dense models. Several values mean that weights or arithmetic differ.
    pub dense: Vec<f64>,
}

/// Everything that runs share whose values can be compared.
#[derive(Debug, Clone, PartialEq)]
struct Conditions {
    /// The hash of the headers of the model that was read.
    model: String,
    measured: MeasuredOn,
}

/// The tokens that a metric was measured on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MeasuredOn {
    /// The hashes of the text and the tokenizer; of the token ids of tasks, and nothing.
    hashes: [String; 2],
    /// Number and length of windows; of tasks, questions and examples before each.
    sizes: [usize; 2],
    /// The positions of a divergence that were compared.
    positions: Option<KlPositions>,
}

impl MeasuredOn {
    /// The tokens on which a run has measured a metric, also in words; `None` where it has not. Words are not compared: the same text may
    /// have several names.
    pub(super) fn of(metric: &Metric, manifest: &Manifest) -> Option<(Self, String)> {
        metric.of_result(manifest)?;
        if let Metric::Accuracy | Metric::Task(_) = metric {
            let tasks = manifest.tasks.as_ref()?;
            let names: Vec<&str> = tasks.of_result().iter().map(|of| of.task.as_str()).collect();
            let questions = tasks.of_result().iter().map(|of| of.questions).sum();
            let asked = questions_in_words(questions);
            let words = format!("{}: {asked}, {}-shot", names.join(", "), tasks.num_fewshot);
            let measured = Self {
                hashes: [tasks.tokens_sha256.clone(), String::new()],
                sizes: [questions, tasks.num_fewshot],
                positions: None,
            };
            return Some((measured, words));
        }
        let text = manifest.evaluation.as_ref()?;
        let report = manifest.perplexity.pruned.or(manifest.perplexity.dense)?;
        let (windows, seqlen) = (report.windows, report.seqlen);
        let hash = &text.text_sha256;
        let words = format!(
            "{} (SHA-256 {hash:.12}…), {windows} windows of {seqlen} tokens",
            text_name(text)
        );
        let divergence = manifest.perplexity.divergence.filter(|_| *metric != Metric::Perplexity);
        let measured = Self {
            hashes: [hash.clone(), text.tokenizer_sha256.clone()],
            sizes: [windows, seqlen],
            positions: divergence.map(|of| of.which),
        };
        Some((measured, words))
    }
}

/// Runs that differ only in their ratio.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// `wanda`, `magnitude 2:4`, ...
    pub label: String,
    calibration: CalibrationLabel,
    /// Sparsity (zeros over weights) and value of each run, ascending in sparsity.
    pub points: Vec<(f64, f64)>,
}

/// The calibration of a run in a few words; empty where there was none.
#[derive(Debug, Clone, PartialEq)]
struct CalibrationLabel {
    /// Text, size and seed.
    parts: Vec<String>,
    /// The beginning of the hash of the tokens.
    hash: String,
}

impl CalibrationLabel {
    fn of(manifest: &Manifest) -> Self {
        let Some(text) = &manifest.calibration else {
            return Self { parts: Vec::new(), hash: String::new() };
        };
        let size = format!("{} × {}", text.windows, text.seqlen);
        let seed = format!("seed {}", text.seed.unwrap_or_default());
        let hash = format!("{:.6}", text.tokens_sha256);
        Self { parts: vec![text.dataset.clone(), size, seed], hash }
    }

    /// The parts that are not the same in all calibrations, and the hash where the parts do not tell them apart.
    fn differing(&self, all: &[&Self]) -> Vec<&str> {
        let parts = self.parts.iter().enumerate();
        let parts = parts.filter(|(at, part)| all.iter().any(|of| of.parts.get(*at) != Some(part)));
        let alike = all.iter().filter(|of| of.parts == self.parts).count();
        let hash = (alike > 1).then_some(self.hash.as_str());
        parts.map(|(_, part)| part.as_str()).chain(hash).collect()
    }
}

impl<'a> RunComparison<'a> {
    /// Sorts runs into groups and series by their values of a metric.
    pub fn of(runs: &'a [NamedRun], metric: &Metric) -> Self {
        let mut comparison = Self { groups: Vec::new(), left_out: Vec::new() };
        for run in runs {
            if let Err(why) = comparison.add(run, metric) {
                comparison.left_out.push((&run.name, why.to_string()));
            }
        }
        for group in &mut comparison.groups {
            group.finish();
        }
        comparison
    }

    fn add(&mut self, run: &'a NamedRun, metric: &Metric) -> Result<(), String> {
        let manifest = &run.manifest;
        if manifest.merge.is_some() {
            return Err("a merge has no sparsity to draw it over".to_string());
        }
        let sparsity = manifest.sparsity;
        let sparsity = sparsity.ok_or("a run of `prune eval` knows no sparsity")?;
        let title = metric.title();
        let measured = ComparableRuns::of(metric, manifest).zip(metric.of_result(manifest));
        let (group, value) =
            measured.ok_or_else(|| format!("it measured no {title} of the pruned model"))?;
        if !is_drawable(metric, &value) {
            return Err(format!("its {title} is not finite"));
        }
        let at = self.groups.iter().position(|other| other.conditions == group.conditions);
        let at = at.unwrap_or(self.groups.len());
        if at == self.groups.len() {
            self.groups.push(group);
        }
        let dense = metric.of_dense(manifest).filter(|dense| is_drawable(metric, dense));
        self.groups[at].add(manifest, dense, (sparsity.ratio, value));
        Ok(())
    }
}

impl ComparableRuns {
    /// A group without series for runs that were measured like this run; `None` for a run that measured nothing.
    fn of(metric: &Metric, manifest: &Manifest) -> Option<Self> {
        let (measured, words) = MeasuredOn::of(metric, manifest)?;
        let model = &manifest.model;
        let description = format!("{words}, model {}", model.path);
        let conditions = Conditions { model: model.identity.clone(), measured };
        Some(Self { conditions, description, series: Vec::new(), dense: Vec::new() })
    }

    fn add(&mut self, manifest: &Manifest, dense: Option<f64>, point: (f64, f64)) {
        if let Some(dense) = dense {
            let is_same = |other: &f64| (other - dense).abs() <= SAME_DENSE * dense;
            if !self.dense.iter().any(is_same) {
                self.dense.push(dense);
            }
        }
        let (label, calibration) = (method_label(manifest), CalibrationLabel::of(manifest));
        let mut series = self.series.iter_mut();
        match series.find(|series| series.label == label && series.calibration == calibration) {
            Some(series) => series.points.push(point),
            None => self.series.push(Series { label, calibration, points: vec![point] }),
        }
    }

    /// Sorts points. If a method was run with several calibrations, adds to the labels the parts in which they differ.
    fn finish(&mut self) {
        let all = self.series.clone();
        for Series { label, calibration, points } in &mut self.series {
            let same = all.iter().filter(|other| other.label == *label);
            let same: Vec<&CalibrationLabel> = same.map(|other| &other.calibration).collect();
            for part in calibration.differing(&same) {
                *label += &format!(", {part}");
            }
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
        }
    }
}

/// Returns whether a value can be drawn; of a loss, also over a logarithmic axis.
pub(super) fn is_drawable(metric: &Metric, value: &f64) -> bool {
    value.is_finite() && (*value > 0.0 || !metric.is_loss())
}

/// The method and every setting except the ratio that decides the removed weights.
pub(super) fn method_label(manifest: &Manifest) -> String {
    let Some(pruning) = &manifest.pruning else {
        return label_without_pruning(manifest);
    };
    let layers = manifest.layer_drop.as_ref();
    let layers = layers.map(|drop| match drop.dropped.len() {
        1 => "1 layer dropped".to_string(),
        several => format!("{several} layers dropped"),
    });
    let width = manifest.width_drop.as_ref();
    let width = width.map(|drop| format!("{} of the width dropped", drop.asked));
    let dropped: Vec<String> = layers.into_iter().chain(width).collect();
    let mut label = dropped.join(", ");
    if !dropped.is_empty() && pruning.prunes_nothing() {
        return label;
    }
    label += if dropped.is_empty() { "" } else { ", " };
    label += &pruning.method;
    if pruning.sparsity_type != "unstructured" {
        label += &format!(" {}", pruning.sparsity_type);
    }
    if pruning.layer_ratios.is_some() {
        label += ", ratios per layer";
    }
    if pruning.matrices < pruning.matrices_in_model {
        label += &format!(", {} of {} matrices", pruning.matrices, pruning.matrices_in_model);
    }
    label
}

/// The way to the weights of a run that prunes nothing.
fn label_without_pruning(manifest: &Manifest) -> String {
    if let Some(merge) = &manifest.merge {
        return format!("merged by {}", merge.method);
    }
    if let Some(recovery) = &manifest.recovery {
        return format!("recovered by {}", recovery.how);
    }
    match &manifest.model.quantization {
        Some(format) => format!("4 bits, {format}"),
        None => "–".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::report::made_up;

    fn run(name: &str, method: &str, ratio: f64, perplexity: f64) -> NamedRun {
        let mut manifest = made_up::manifest(method, ratio);
        made_up::evaluated(&mut manifest, 10.0, perplexity);
        NamedRun { name: name.into(), manifest, speed: None }
    }

    #[test]
    fn runs_of_one_method_are_one_line_in_order_of_sparsity() {
        let runs = [
            run("a", "wanda", 0.7, 30.0),
            run("b", "magnitude", 0.5, 50.0),
            run("c", "wanda", 0.3, 11.0),
        ];
        let comparison = RunComparison::of(&runs, &Metric::Perplexity);
        assert_eq!(comparison.groups.len(), 1);
        let group = &comparison.groups[0];
        let labels: Vec<&str> = group.series.iter().map(|one| one.label.as_str()).collect();
        assert_eq!(labels, ["wanda", "magnitude"]);
        assert_eq!(group.series[0].points, [(0.3, 11.0), (0.7, 30.0)]);
        assert_eq!(group.dense, [10.0]);
    }

    #[test]
    fn runs_measured_differently_share_no_chart() {
        let mut other_text = run("b", "wanda", 0.5, 12.0);
        other_text.manifest.evaluation.as_mut().unwrap().text_sha256 = "ffff".into();
        let mut fewer_windows = run("c", "wanda", 0.5, 12.0);
        fewer_windows.manifest.perplexity.pruned.as_mut().unwrap().windows = 3;
        let mut other_model = run("d", "wanda", 0.5, 12.0);
        other_model.manifest.model.identity = "another".into();
        let mut other_name = run("e", "wanda", 0.6, 13.0);
        other_name.manifest.model.path = "./same/model".into();
        let runs =
            [run("a", "wanda", 0.5, 12.0), other_text, fewer_windows, other_model, other_name];
        let comparison = RunComparison::of(&runs, &Metric::Perplexity);
        assert_eq!(comparison.groups.len(), 4);
        assert_eq!(comparison.groups[0].series[0].points.len(), 2);
    }

    #[test]
    fn what_cannot_be_drawn_is_left_out_with_its_reason() {
        let mut evaluation = run("e", "wanda", 0.5, 12.0);
        evaluation.manifest.sparsity = None;
        let mut unmeasured = run("u", "wanda", 0.5, 12.0);
        unmeasured.manifest.perplexity = Default::default();
        let overflowed = run("o", "wanda", 0.9, f64::INFINITY);
        let runs = [evaluation, unmeasured, overflowed];
        let comparison = RunComparison::of(&runs, &Metric::Perplexity);
        assert!(comparison.groups.is_empty());
        let names: Vec<&str> = comparison.left_out.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["e", "u", "o"]);
        assert!(comparison.left_out[2].1.contains("not finite"));
    }

    #[test]
    fn one_method_with_two_calibrations_is_two_lines_that_say_so() {
        let mut more = run("b", "wanda", 0.6, 12.0);
        more.manifest.calibration.as_mut().unwrap().windows = 128;
        let runs = [run("a", "wanda", 0.5, 12.0), more];
        let comparison = RunComparison::of(&runs, &Metric::Perplexity);
        let series = &comparison.groups[0].series;
        let labels: Vec<&str> = series.iter().map(|one| one.label.as_str()).collect();
        assert_eq!(labels, ["wanda, 4 × 64", "wanda, 128 × 64"]);
    }

    #[test]
    fn calibrations_with_equal_settings_are_told_apart_by_their_tokens() {
        let mut other_tokens = run("b", "wanda", 0.6, 12.0);
        other_tokens.manifest.calibration.as_mut().unwrap().tokens_sha256 = "abcdefghi".into();
        let mut other_seed = other_tokens.clone();
        other_seed.manifest.calibration.as_mut().unwrap().seed = Some(7);
        let runs = [run("a", "wanda", 0.5, 12.0), other_tokens, other_seed];
        let comparison = RunComparison::of(&runs, &Metric::Perplexity);
        let series = comparison.groups[0].series.iter();
        let labels: Vec<&str> = series.map(|one| one.label.as_str()).collect();
        assert_eq!(labels, ["wanda, seed 0, 123456", "wanda, seed 0, abcdef", "wanda, seed 7"]);
    }

    #[test]
    fn dense_perplexities_that_differ_are_both_kept() {
        let mut other = run("b", "wanda", 0.6, 12.0);
        other.manifest.perplexity.dense.as_mut().unwrap().perplexity = 10.2;
        let mut rounded = run("c", "wanda", 0.7, 12.0);
        rounded.manifest.perplexity.dense.as_mut().unwrap().perplexity = 10.000_01;
        let runs = [run("a", "wanda", 0.5, 12.0), other, rounded];
        assert_eq!(RunComparison::of(&runs, &Metric::Perplexity).groups[0].dense, [10.0, 10.2]);
    }

    #[test]
    fn the_perplexity_before_a_recovery_is_not_the_dense_models() {
        let mut recovered = run("r", "wanda", 0.5, 12.0);
        made_up::recovered(&mut recovered.manifest);
        recovered.manifest.perplexity.dense.as_mut().unwrap().perplexity = 219.8;
        let runs = [run("a", "wanda", 0.5, 30.0), recovered.clone()];
        let group = &RunComparison::of(&runs, &Metric::Perplexity).groups[0];
        assert_eq!(group.dense, [10.0]);
        assert_eq!(group.series[1].label, "recovered by lora");
        assert_eq!(group.series[1].points, [(0.5, 12.0)]);
        assert!(RunComparison::of(&[recovered], &Metric::Perplexity).groups[0].dense.is_empty());
    }

    #[test]
    fn labels_name_every_setting_that_decides_the_removed_weights() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        let pruning = manifest.pruning.as_mut().unwrap();
        pruning.sparsity_type = "2:4".into();
        pruning.matrices = 3;
        assert_eq!(method_label(&manifest), "wanda 2:4, 3 of 14 matrices");
        for (dropped, label) in [(vec![1], "1 layer dropped"), (vec![1, 2], "2 layers dropped")] {
            let drop = json!({"asked": "auto", "rule": "influence", "dropped": dropped, "kept": [0],
                "block_influence": [], "angular_distance": [], "parameters": [2, 1], "bytes": [2, 1]});
            manifest.layer_drop = serde_json::from_value(drop).unwrap();
            assert_eq!(method_label(&manifest), format!("{label}, wanda 2:4, 3 of 14 matrices"));
        }
        manifest.pruning = None;
        assert_eq!(method_label(&manifest), "–", "an evaluation");
    }
}
