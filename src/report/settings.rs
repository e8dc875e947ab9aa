//! The tables of a report: settings and protocol, runs side by side, every matrix, and memory samples.

use super::comparison::{NamedRun, method_label};
use super::format::{Table, duration, finite, minute};
use super::merges;
use crate::bytes::ByteSize;
use crate::run::manifest::{MatrixReport, PerplexityReport};
use crate::run::{Manifest, TextProtocol};

/// Names and values of a run's settings and protocol; settings without a value are left out.
pub(super) fn settings(manifest: &Manifest) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    let mut row = |name, value| rows.push((name, value));
    let model = &manifest.model;
    let millions = model.parameters as f64 / 1e6;
    row("model", format!("{} ({millions:.1} M parameters, {})", model.path, model.bytes));
    if let Some(merge) = &manifest.merge {
        merges::settings(merge, &mut row);
    }
    if let Some(drop) = &manifest.layer_drop {
        row("layers dropped", drop.in_words());
        row("parameters", before_and_after(drop.parameters));
        let scores = drop.deciding_scores().iter();
        let scores: Vec<String> = scores.map(|score| format!("{score:.4}")).collect();
        row("scores of layers", scores.join(", "));
    }
    if let Some(drop) = &manifest.width_drop {
        row("width dropped", drop.in_words());
        row("parameters", before_and_after(drop.parameters));
    }
    if let Some(pruning) = &manifest.pruning {
        let (ratio, pattern) = (pruning.sparsity_ratio, &pruning.sparsity_type);
        row("method", method_label(manifest));
        row("ratio asked for", format!("{ratio} {pattern}"));
        for (name, globs) in
            [("matrices included", &pruning.include), ("matrices excluded", &pruning.exclude)]
        {
            if !globs.is_empty() {
                row(name, globs.join(", "));
            }
        }
    }
    if let Some(sparsity) = manifest.sparsity {
        let (ratio, zeros, weights) = (sparsity.ratio, sparsity.zeros, sparsity.weights);
        row("sparsity reached", format!("{ratio:.6}: {zeros} of {weights} weights"));
    }
    let [first, second] = manifest.perplexity_names();
    for (name, report) in [(first, manifest.perplexity.dense), (second, manifest.perplexity.pruned)]
    {
        if let Some(report) = report {
            row(name, perplexity(report));
        }
    }
    let (calibration, evaluation) = (manifest.calibration.as_ref(), manifest.evaluation.as_ref());
    for (name, text) in [("calibration", calibration), ("evaluation", evaluation)] {
        if let Some(text) = text {
            row(name, protocol(text));
            row("– SHA-256 of the text", text.text_sha256.clone());
            row("– SHA-256 of the tokens", text.tokens_sha256.clone());
        }
    }
    if let Some(text) = evaluation.or(calibration) {
        row("SHA-256 of the tokenizer", text.tokenizer_sha256.clone());
    }
    let arithmetic = &manifest.arithmetic;
    let features = match &arithmetic.cpu_features[..] {
        [] => "none".to_string(),
        features => features.join(" "),
    };
    row(
        "arithmetic",
        format!(
            "{} on {}, kernel {}, CPU features {features}, {} threads",
            arithmetic.dtype, arithmetic.device, arithmetic.kernel, arithmetic.threads
        ),
    );
    row("hidden states", manifest.hidden_states.to_string());
    row("started", minute(manifest.started_unix_seconds));
    row("time", duration(manifest.seconds));
    if let Some(peak) = manifest.peak_anonymous {
        row("peak memory", format!("{peak} anonymous"));
    }
    if let Some(output) = &manifest.output {
        row("result", format!("{} (read back and verified)", output.model));
    }
    row("program", format!("prune {}", manifest.prune_version));
    row("command", manifest.arguments.join(" "));
    rows
}

fn before_and_after(parameters: [u64; 2]) -> String {
    let [before, after] = parameters.map(|weights| weights as f64 / 1e6);
    format!("{before:.1} M before, {after:.1} M after")
}

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

/// Runs side by side, a row each. The perplexity comes first: a narrow screen shows the first columns.
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
                or_dash(manifest.perplexity_of_result(), finite),
                run.name.clone(),
                method_label(manifest),
                or_dash(manifest.pruning.as_ref(), |pruning| pruning.sparsity_ratio.to_string()),
                or_dash(manifest.sparsity, |sparsity| format!("{:.4}", sparsity.ratio)),
                or_dash(dense, finite),
                or_dash(pruned.zip(dense), |(pruned, dense)| finite(pruned / dense)),
                or_dash(mean_output_error(manifest), |error| format!("{error:.3}")),
                duration(manifest.seconds),
                or_dash(manifest.peak_anonymous, |peak| peak.to_string()),
                manifest.arithmetic.dtype.clone(),
            ]
        })
        .collect();
    Table {
        columns: [
            "perplexity",
            "run",
            "method",
            "ratio",
            "sparsity",
            "dense perplexity",
            "pruned / dense",
            "mean output error",
            "time",
            "peak memory",
            "dtype",
        ]
        .map(String::from)
        .to_vec(),
        rows,
    }
}

/// The mean over all matrices with a measured error, with equal weights.
fn mean_output_error(manifest: &Manifest) -> Option<f64> {
    let errors: Vec<f64> =
        matrices(manifest).filter_map(|matrix| matrix.relative_output_error).collect();
    (!errors.is_empty()).then(|| errors.iter().sum::<f64>() / errors.len() as f64)
}

fn matrices(manifest: &Manifest) -> impl Iterator<Item = &MatrixReport> {
    manifest.layers.iter().flat_map(|layer| &layer.matrices)
}

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
                or_dash(matrix.mask_sha256.as_ref(), |hash| hash.chars().take(12).collect()),
            ]
        })
        .collect();
    Table {
        columns: [
            "matrix",
            "out × in",
            "zeros before",
            "zeros",
            "sparsity",
            "output error",
            "mask SHA-256",
        ]
        .map(String::from)
        .to_vec(),
        rows,
    }
}

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
    let columns = ["checkpoint", "seconds", "memory", "most since the last"];
    Table { columns: columns.map(String::from).to_vec(), rows }
}

fn or_dash<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "–".to_string(), text)
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
