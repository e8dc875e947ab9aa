//! The tables of a report: settings and protocol, runs side by side, every matrix, and memory samples.

use super::comparison::{NamedRun, method_label};
use minijinja::Value;

use super::format::{
    Table, duration, escape, finite, minute, or_dash, preformatted, six_digits, three_digits,
    with_seed,
};
use super::{costs, merges, table};
use crate::run::command_line::quoted;
use crate::run::manifest::MatrixReport;
use crate::run::{GenerationReport, Manifest, TextProtocol};

/// Names and values of a run's settings and protocol: the table at the end of the run, and the facts that it has no room for. A
/// value that is markup is marked as safe.
pub(super) fn settings(manifest: &Manifest) -> Vec<(String, Value)> {
    let mut rows: Vec<(String, Value)> =
        table::rows(manifest).into_iter().map(|(name, value)| (name, value.into())).collect();
    let mut row = |name: &str, value: String| rows.push((name.to_string(), value.into()));
    row("bytes of the model", manifest.model.bytes.to_string());
    if let Some(merge) = &manifest.merge {
        merges::inputs(merge).into_iter().for_each(|(name, value)| row(name, value));
    }
    if let Some(drop) = &manifest.layer_drop {
        let scores = drop.deciding_scores().iter();
        let scores: Vec<String> = scores.map(|score| format!("{score:.4}")).collect();
        row("scores of layers", scores.join(", "));
    }
    if let Some(pruning) = &manifest.pruning {
        row("ratio asked for", format!("{} {}", pruning.sparsity_ratio, pruning.sparsity_type));
        for (name, globs) in
            [("matrices included", &pruning.include), ("matrices excluded", &pruning.exclude)]
        {
            if !globs.is_empty() {
                row(name, globs.join(", "));
            }
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
    let features = &manifest.arithmetic.cpu_features;
    row("CPU features", if features.is_empty() { "none".into() } else { features.join(" ") });
    row("started", minute(manifest.started_unix_seconds));
    row("program", format!("prune {}", manifest.prune_version));
    rows.push(("command".to_string(), Value::from_safe_string(command_line(&manifest.arguments))));
    if let Some(merge) = &manifest.merge {
        let recipe = Value::from_safe_string(preformatted(&merge.recipe));
        rows.push(("recipe".to_string(), recipe));
    }
    rows
}

/// A command line as HTML, quoted for a shell. A browser may break a line after the dashes of a flag, so a short argument is an
/// element that has no line break.
fn command_line(arguments: &[String]) -> String {
    /// Characters of an argument that fit the table on a narrow screen.
    const SHORT: usize = 24;
    let arguments = arguments.iter().map(|argument| {
        let quoted = quoted(std::slice::from_ref(argument));
        let text = escape(&quoted);
        match quoted.chars().count() {
            ..=SHORT => format!("<span>{text}</span>"),
            _ => text,
        }
    });
    arguments.collect::<Vec<_>>().join(" ")
}

fn protocol(text: &TextProtocol) -> String {
    let TextProtocol { dataset, path, windows, seqlen, .. } = text;
    format!("{dataset}: {path}; {windows} windows of {seqlen} tokens{}", with_seed(text))
}

/// Columns that a table without these values lacks.
const COST_COLUMNS: [&str; 3] = ["bytes", "without zeros", "tokens/s"];

/// Runs side by side, a row each. The perplexity comes first: a narrow screen shows the first columns.
pub(super) fn side_by_side(runs: &[NamedRun]) -> Table {
    let table = Table::of(runs.iter().map(|NamedRun { name, manifest, speed }| {
        let dense = manifest.dense_perplexity();
        let pruned = manifest.perplexity.pruned.map(|report| report.perplexity);
        let (pruning, error) = (manifest.pruning.as_ref(), mean_output_error(manifest));
        [
            ("perplexity", or_dash(manifest.perplexity_of_result(), finite)),
            ("run", name.clone()),
            ("method", method_label(manifest)),
            ("ratio", or_dash(pruning, |pruning| pruning.sparsity_ratio.to_string())),
            ("sparsity", or_dash(manifest.sparsity, |of| format!("{:.4}", of.ratio))),
            ("dense perplexity", or_dash(dense, finite)),
            ("pruned / dense", or_dash(pruned.zip(dense), |(one, other)| finite(one / other))),
            ("mean output error", or_dash(error, |error| format!("{error:.3}"))),
            ("bytes", or_dash(costs::bytes_of_result(manifest), |bytes| bytes.to_string())),
            ("without zeros", or_dash(costs::without_zeros(manifest), |bytes| bytes.to_string())),
            ("tokens/s", or_dash(speed.as_ref(), decoding_speed)),
            ("time", duration(manifest.seconds)),
            ("peak memory", or_dash(manifest.peak_anonymous, |peak| peak.to_string())),
            ("dtype", manifest.arithmetic.dtype.clone()),
        ]
    }));
    table.without_empty(&COST_COLUMNS)
}

/// The speed of decoding, with the form of the weights.
fn decoding_speed(speed: &GenerationReport) -> String {
    let rate = or_dash(speed.tokens_per_second, three_digits);
    format!("{rate} ({})", speed.weights)
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
    Table::of(matrices(manifest).map(|matrix| {
        [
            ("matrix", matrix.name.clone()),
            ("out × in", format!("{} × {}", matrix.shape[0], matrix.shape[1])),
            ("zeros before", matrix.zeros_before.to_string()),
            ("zeros", matrix.zeros.to_string()),
            ("sparsity", or_dash(matrix.sparsity(), six_digits)),
            ("output error", or_dash(matrix.relative_output_error, six_digits)),
            ("mask SHA-256", or_dash(matrix.mask_sha256.as_ref(), |hash| format!("{hash:.12}"))),
        ]
    }))
}

pub(super) fn every_memory_sample(manifest: &Manifest) -> Table {
    Table::of(manifest.memory.iter().map(|sample| {
        [
            ("checkpoint", sample.checkpoint.clone()),
            ("seconds", format!("{:.2}", sample.seconds)),
            ("memory", sample.anonymous.to_string()),
            ("peak since the last sample", sample.peak_anonymous.to_string()),
        ]
    }))
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
            "f32 on cpu (gemm)",
            "seed 0",
            "10.0000 ± 0.10 over windows (test.txt, 5 windows of 64 tokens)",
            "not finite",
            "2026-03-01 12:34 UTC",
        ] {
            assert!(text.contains(expected), "no `{expected}` in {text}");
        }
        assert_eq!(text.matches("seed").count(), 1, "evaluation has none");
    }

    #[test]
    fn the_columns_of_texts_are_those_that_the_style_sheet_aligns_left() {
        let manifest = made_up::manifest("wanda", 0.5);
        let columns = side_by_side(&[NamedRun { name: "a".into(), manifest, speed: None }]).columns;
        let style = include_str!("page.css");
        let left = style.lines().find(|line| line.contains("nth-child(2)")).unwrap();
        assert!(left.ends_with("{ text-align: left; }"), "{left}");
        let is_left = |at: usize| {
            let is_last = at + 1 == columns.len() && left.contains(":last-child");
            is_last || left.contains(&format!(":nth-child({})", at + 1))
        };
        let texts = columns.iter().enumerate().filter(|(at, _)| is_left(*at));
        let texts: Vec<&str> = texts.map(|(_, column)| column.as_str()).collect();
        assert_eq!(texts, ["run", "method", "dtype"]);
    }

    #[test]
    fn the_table_has_no_dense_perplexity_of_a_recovery() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        made_up::evaluated(&mut manifest, 10.0, 15.0);
        let pruned = NamedRun { name: "pruned".into(), manifest: manifest.clone(), speed: None };
        made_up::recovered(&mut manifest);
        let speed = Some(made_up::speed("out/a/model", 12.34, None));
        let recovered = NamedRun { name: "recovered".into(), manifest, speed };
        let table = side_by_side(&[pruned, recovered]);
        let cells = |column: &str| -> Vec<&str> {
            let at = table.columns.iter().position(|of| of == column).unwrap();
            table.rows.iter().map(|row| row[at].as_str()).collect()
        };
        assert_eq!(cells("perplexity"), ["15.0000", "15.0000"]);
        assert_eq!(cells("dense perplexity"), ["10.0000", "–"]);
        assert_eq!(cells("pruned / dense"), ["1.5000", "–"]);
        assert_eq!(cells("bytes"), ["5.47 KiB", "5.47 KiB"]);
        assert_eq!(cells("without zeros"), ["2.91 KiB", "2.91 KiB"]);
        assert_eq!(cells("tokens/s"), ["–", "12.3 (compact)"]);
    }

    #[test]
    fn the_command_is_quoted_for_a_shell_and_short_arguments_are_not_broken() {
        let long = "out/".repeat(10);
        let arguments = ["prune", "--include", "*.q_proj", "a b<c>", "it's", &long];
        assert_eq!(
            command_line(&arguments.map(str::to_string)),
            format!(
                "<span>prune</span> <span>--include</span> <span>&#x27;*.q_proj&#x27;</span> \
                 <span>&#x27;a b&lt;c&gt;&#x27;</span> <span>&#x27;it&#x27;\\&#x27;&#x27;s&#x27;</span> {}",
                escape(&long)
            )
        );
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
