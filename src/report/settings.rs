//! The tables of a report: settings and protocol, runs side by side, every matrix, and memory samples.

use serde::Serialize;

use super::comparison::{NamedRun, method_label};
use super::format::{duration, minute};
use crate::bytes::ByteSize;
use crate::run::manifest::{MatrixReport, PerplexityReport};
use crate::run::{Manifest, TextProtocol};

/// A table with a header row. The first column holds names.
#[derive(Debug, Serialize)]
pub(super) struct Table {
    pub(super) columns: &'static [&'static str],
    pub(super) rows: Vec<Vec<String>>,
}

/// Names and values of a run's settings and protocol; settings without a value are left out.
pub(super) fn settings(manifest: &Manifest) -> Vec<(&'static str, String)> {
    let pruning = manifest.pruning.as_ref();
    let list = |globs: &[String]| (!globs.is_empty()).then(|| globs.join(", "));
    let (calibration, evaluation) = (manifest.calibration.as_ref(), manifest.evaluation.as_ref());
    let arithmetic = &manifest.arithmetic;
    let features = if arithmetic.cpu_features.is_empty() {
        "none".to_string()
    } else {
        arithmetic.cpu_features.join(" ")
    };
    let rows = [
        (
            "model",
            Some(format!(
                "{} ({:.1} M parameters, {})",
                manifest.model.path,
                manifest.model.parameters as f64 / 1e6,
                manifest.model.bytes
            )),
        ),
        ("method", pruning.map(|_| method_label(manifest))),
        (
            "ratio asked for",
            pruning.map(|pruning| format!("{} {}", pruning.sparsity_ratio, pruning.sparsity_type)),
        ),
        (
            "matrices included",
            pruning.and_then(|pruning| list(&pruning.include)),
        ),
        (
            "matrices excluded",
            pruning.and_then(|pruning| list(&pruning.exclude)),
        ),
        (
            "sparsity reached",
            manifest.sparsity.map(|sparsity| {
                format!(
                    "{:.6}: {} of {} weights",
                    sparsity.ratio, sparsity.zeros, sparsity.weights
                )
            }),
        ),
        (
            "dense perplexity",
            manifest.perplexity.dense.map(perplexity),
        ),
        (
            "pruned perplexity",
            manifest.perplexity.pruned.map(perplexity),
        ),
        ("calibration", calibration.map(protocol)),
        (
            "– SHA-256 of the text",
            calibration.map(|text| text.text_sha256.clone()),
        ),
        (
            "– SHA-256 of the tokens",
            calibration.map(|text| text.tokens_sha256.clone()),
        ),
        ("evaluation", evaluation.map(protocol)),
        (
            "– SHA-256 of the text",
            evaluation.map(|text| text.text_sha256.clone()),
        ),
        (
            "– SHA-256 of the tokens",
            evaluation.map(|text| text.tokens_sha256.clone()),
        ),
        (
            "SHA-256 of the tokenizer",
            evaluation
                .or(calibration)
                .map(|text| text.tokenizer_sha256.clone()),
        ),
        (
            "arithmetic",
            Some(format!(
                "{} on {}, kernel {}, CPU features {features}, {} threads",
                arithmetic.dtype, arithmetic.device, arithmetic.kernel, arithmetic.threads
            )),
        ),
        ("hidden states", Some(manifest.hidden_states.to_string())),
        ("started", Some(minute(manifest.started_unix_seconds))),
        ("time", Some(duration(manifest.seconds))),
        (
            "peak memory",
            manifest
                .peak_anonymous
                .map(|peak| format!("{peak} anonymous")),
        ),
        (
            "result",
            manifest
                .output
                .as_ref()
                .map(|output| format!("{} (read back and verified)", output.model)),
        ),
        ("program", Some(format!("prune {}", manifest.prune_version))),
        ("command", Some(manifest.arguments.join(" "))),
    ];
    let rows = rows.into_iter();
    rows.filter_map(|(name, value)| Some((name, value?)))
        .collect()
}

/// A text and its windows.
fn protocol(text: &TextProtocol) -> String {
    let seed = text.seed.map(|seed| format!("; seed {seed}"));
    format!(
        "{}: {}; {} windows of {} tokens{}",
        text.dataset,
        text.path,
        text.windows,
        text.seqlen,
        seed.unwrap_or_default()
    )
}

fn perplexity(report: PerplexityReport) -> String {
    if !report.perplexity.is_finite() {
        return "not finite".into();
    }
    format!(
        "{:.4} ± {:.2} over {} windows of {} tokens",
        report.perplexity,
        report.perplexity * report.standard_error,
        report.windows,
        report.seqlen
    )
}

/// Runs side by side, one row each.
pub(super) fn side_by_side(runs: &[NamedRun]) -> Table {
    let rows = runs
        .iter()
        .map(|run| {
            let manifest = &run.manifest;
            let (dense, pruned) = (
                manifest.perplexity.dense.map(|report| report.perplexity),
                manifest.perplexity.pruned.map(|report| report.perplexity),
            );
            vec![
                run.name.clone(),
                method_label(manifest),
                or_dash(manifest.pruning.as_ref(), |pruning| {
                    pruning.sparsity_ratio.to_string()
                }),
                or_dash(manifest.sparsity, |sparsity| {
                    format!("{:.4}", sparsity.ratio)
                }),
                or_dash(dense, finite),
                or_dash(pruned, finite),
                or_dash(pruned.zip(dense), |(pruned, dense)| finite(pruned / dense)),
                or_dash(mean_output_error(manifest), |error| format!("{error:.3}")),
                duration(manifest.seconds),
                or_dash(manifest.peak_anonymous, |peak| peak.to_string()),
                manifest.arithmetic.dtype.clone(),
            ]
        })
        .collect();
    Table {
        columns: &[
            "run",
            "method",
            "ratio",
            "sparsity",
            "dense perplexity",
            "pruned perplexity",
            "pruned / dense",
            "mean output error",
            "time",
            "peak memory",
            "dtype",
        ],
        rows,
    }
}

/// The mean over all matrices with a measured error, with equal weights.
fn mean_output_error(manifest: &Manifest) -> Option<f64> {
    let errors: Vec<f64> = matrices(manifest)
        .filter_map(|matrix| matrix.relative_output_error)
        .collect();
    (!errors.is_empty()).then(|| errors.iter().sum::<f64>() / errors.len() as f64)
}

fn matrices(manifest: &Manifest) -> impl Iterator<Item = &MatrixReport> {
    manifest.layers.iter().flat_map(|layer| &layer.matrices)
}

/// Every matrix of a run in numbers.
pub(super) fn every_matrix(manifest: &Manifest) -> Table {
    let rows = matrices(manifest)
        .map(|matrix| {
            let [rows, columns] = matrix.shape.map(|size| size as f64);
            let weights = rows * columns;
            vec![
                matrix.name.clone(),
                format!("{} × {}", matrix.shape[0], matrix.shape[1]),
                matrix.zeros_before.to_string(),
                matrix.zeros.to_string(),
                format!("{:.6}", matrix.zeros as f64 / weights.max(1.0)),
                or_dash(matrix.relative_output_error, |error| format!("{error:.6}")),
                or_dash(matrix.mask_sha256.as_ref(), |hash| {
                    hash.chars().take(12).collect()
                }),
            ]
        })
        .collect();
    Table {
        columns: &[
            "matrix",
            "out × in",
            "zeros before",
            "zeros",
            "sparsity",
            "output error",
            "mask SHA-256",
        ],
        rows,
    }
}

/// Memory samples in numbers.
pub(super) fn every_memory_sample(manifest: &Manifest) -> Table {
    let size = |bytes: ByteSize| bytes.to_string();
    let rows = manifest
        .memory
        .iter()
        .map(|sample| {
            vec![
                sample.checkpoint.clone(),
                format!("{:.2}", sample.seconds),
                size(sample.anonymous),
                size(sample.peak_anonymous),
            ]
        })
        .collect();
    Table {
        columns: &["checkpoint", "seconds", "memory", "most since the last"],
        rows,
    }
}

fn or_dash<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "–".to_string(), text)
}

fn finite(value: f64) -> String {
    if value.is_finite() {
        format!("{value:.4}")
    } else {
        "not finite".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::made_up;

    #[test]
    fn settings_name_hashes_and_arithmetic() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        made_up::evaluated(&mut manifest, 10.0, f64::NAN);
        let settings: Vec<String> = settings(&manifest)
            .into_iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect();
        let text = settings.join("\n");
        for expected in [
            "aaaabbbbccccdddd",
            "9999888877776666",
            "kernel gemm",
            "seed 0",
            "10.0000 ± 0.10 over 5 windows of 64 tokens",
            "not finite",
            "2026-03-01 12:34 UTC",
        ] {
            assert!(text.contains(expected), "no `{expected}` in {text}");
        }
        assert_eq!(text.matches("seed").count(), 1, "evaluation has none");
    }

    #[test]
    fn the_mean_output_error_is_over_measured_matrices_only() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        assert_eq!(mean_output_error(&manifest), None);
        manifest.layers[0].matrices[0].relative_output_error = Some(0.2);
        manifest.layers[1].matrices[3].relative_output_error = Some(0.4);
        assert!((mean_output_error(&manifest).unwrap() - 0.3).abs() < 1e-12);
    }
}
