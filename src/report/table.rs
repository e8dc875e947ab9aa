//! The table at the end of a run: what came out, what it cost, where it is.

use std::fmt::Write as _;

use crate::bytes::ByteSize;
use crate::run::Manifest;
use crate::run::fallback::{FallOutcome, FallReport};
use crate::run::manifest::PerplexityReport;

/// The final table, ending in a newline.
pub fn text(manifest: &Manifest) -> String {
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut row = |name: &str, value: String| rows.push((name.to_string(), value));
    row(
        "model",
        format!(
            "{} ({:.1} M parameters)",
            manifest.model.path,
            manifest.model.parameters as f64 / 1e6
        ),
    );
    if let Some(pruning) = &manifest.pruning {
        let variant = if pruning.use_variant { ", variant" } else { "" };
        row(
            "pruning",
            format!(
                "{} {:.4} {}{variant}, {} of {} matrices",
                pruning.method,
                pruning.sparsity_ratio,
                pruning.sparsity_type,
                pruning.matrices,
                pruning.matrices_in_model
            ),
        );
    }
    if let Some(sparsity) = manifest.sparsity {
        row(
            "sparsity reached",
            format!(
                "{:.6} ({} of {} weights)",
                sparsity.ratio, sparsity.zeros, sparsity.weights
            ),
        );
        if sparsity.zeros_before > 0 {
            row(
                "zeros before",
                format!("{} weights were zero already", sparsity.zeros_before),
            );
        }
    }
    let protocol = manifest
        .evaluation
        .as_ref()
        .and_then(|text| text.get("dataset")?.as_str())
        .unwrap_or("evaluation text");
    for (side, report) in [
        ("dense", manifest.perplexity.dense),
        ("pruned", manifest.perplexity.pruned),
    ] {
        if let Some(report) = report {
            row(&format!("{side} perplexity"), perplexity(&report, protocol));
        }
    }
    for (what, text) in [
        ("calibration text", &manifest.calibration),
        ("evaluation text", &manifest.evaluation),
    ] {
        if let Some(text) = text {
            row(what, protocol_of(text));
        }
    }
    let arithmetic = &manifest.arithmetic;
    row(
        "arithmetic",
        format!(
            "{} on {} ({}), {} threads",
            arithmetic.dtype, arithmetic.device, arithmetic.kernel, arithmetic.threads
        ),
    );
    row("time", seconds(manifest.seconds));
    for phase in manifest
        .phases
        .iter()
        .filter(|phase| phase.seconds >= 0.005 * manifest.seconds)
    {
        row(
            &format!("  {}", phase.phase),
            format!(
                "{:>9}  peak {}",
                seconds(phase.seconds),
                peak(phase.peak_anonymous)
            ),
        );
    }
    row(
        "peak memory",
        format!(
            "{} anonymous, hidden states in {}",
            peak(manifest.peak_anonymous),
            manifest.hidden_states
        ),
    );
    for device in &manifest.devices {
        let measured = match device.peak_allocated {
            Some(peak) => format!("peak {peak}"),
            None => format!("peak {} by our account", device.reserved_by_plan),
        };
        row(&device.device, format!("{}, {measured}", device.name));
        let of = |outcome: FallOutcome| {
            let fell = |fall: &&FallReport| fall.device == device.device && fall.outcome == outcome;
            manifest.fallbacks.iter().filter(fell).count()
        };
        let falls = [FallOutcome::Cpu, FallOutcome::Smaller, FallOutcome::Retried];
        let falls: Vec<String> = falls
            .into_iter()
            .filter(|&outcome| of(outcome) > 0)
            .map(|outcome| format!("{} {}", of(outcome), outcome.name()))
            .collect();
        if !falls.is_empty() {
            row(
                "  out of memory",
                format!("{} of {} units", falls.join(", "), device.units),
            );
        }
    }
    if let Some(output) = &manifest.output {
        row(
            "result",
            format!("{} (read back and verified)", output.model),
        );
    }
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |mut text, (name, value)| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<width$}  {value}");
        text
    })
}

/// What a number was measured over, as hashes short enough to compare by eye; the whole ones are in run.json.
fn protocol_of(text: &serde_json::Value) -> String {
    let field = |name: &str| {
        text.get(name)
            .and_then(serde_json::Value::as_str)
            .unwrap_or("?")
    };
    let short = |name: &str| field(name).chars().take(12).collect::<String>();
    let tokens = text
        .get("tokens_used")
        .and_then(serde_json::Value::as_u64)
        .unwrap_or(0);
    format!(
        "{}, sha256 {}; {tokens} tokens, sha256 {}; tokenizer {}",
        field("dataset"),
        short("text_sha256"),
        short("tokens_sha256"),
        short("tokenizer_sha256")
    )
}

fn perplexity(report: &PerplexityReport, dataset: &str) -> String {
    let spread = report.perplexity * report.standard_error;
    format!(
        "{:.4} ± {:.2} over windows ({dataset}, {} windows of {} tokens)",
        report.perplexity, spread, report.windows, report.seqlen
    )
}

fn seconds(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..100 => format!("{seconds:.1} s"),
        100..6000 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

fn peak(bytes: Option<ByteSize>) -> String {
    bytes.map_or_else(|| "unknown".to_string(), |bytes| bytes.to_string())
}
