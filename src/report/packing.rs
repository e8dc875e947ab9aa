//! The results of `prune pack` and `prune unpack` in words.

use crate::bytes::ByteSize;
use crate::run::zeros_gain::speed_in_words;
use crate::run::{PackingReport, Plan, UnpackingReport, ZerosGain};

/// Matrices that stay dense, and files that are left out, that are shown.
const SHOWN: usize = 6;

/// The table of a finished packing.
pub fn packed(report: &PackingReport) -> String {
    let totals = &report.totals;
    let (before, after) = (totals.matrix_bytes_before, totals.matrix_bytes_after);
    let others = |all: ByteSize, matrices: ByteSize| ByteSize(all.0.saturating_sub(matrices.0));
    let row = |name: &str, before: ByteSize, after: ByteSize| {
        let ratio = after.0 as f64 / before.0.max(1) as f64;
        format!("{name:<12}{:>12}{:>12}{ratio:>8.3}\n", before.to_string(), after.to_string())
    };
    let mut text = format!("{:<12}{:>12}{:>12}{:>8}\n", "", "before", "packed", "ratio");
    text += &row("matrices", before, after);
    text += &row("others", others(report.bytes_before, before), others(report.bytes_after, after));
    text += &row("all", report.bytes_before, report.bytes_after);
    let lossy = match report.values.as_str() {
        "int8" => ", lossy: the weights are rounded to 8 bits",
        _ => "",
    };
    let share = 100.0 * totals.zeros as f64 / totals.weights.max(1) as f64;
    let mut rows = vec![
        ("format", format!("{}, {} values{lossy}", report.format, report.values)),
        ("packed", format!("{} matrices, {share:.2} % of their weights are zero", totals.matrices)),
    ];
    if !report.dense.is_empty() {
        let count = format!("{} matrices stay dense, packing does not help:", report.dense.len());
        rows.push(("dense", count));
        let lines = report.dense.iter().take(SHOWN);
        rows.extend(lines.map(|matrix| ("", format!("{}: {}", matrix.tensor, matrix.why))));
        if report.dense.len() > SHOWN {
            rows.push(("", format!("and {} more", report.dense.len() - SHOWN)));
        }
    }
    if !report.left_out.is_empty() {
        rows.push(("left out", report.left_out.join(", ")));
    }
    rows.push(("peak memory", memory(report.peak_anonymous, &report.plan)));
    rows.push(("model", report.output.clone()));
    text + &lines(rows)
}

/// The lines under a finished unpacking.
pub fn unpacked(report: &UnpackingReport) -> String {
    let files = match (report.files_equal, report.files_rounded) {
        (0, 0) => "restored; the packed folder has no hashes of original files".to_string(),
        (equal, 0) => format!("{equal} equal the original files, by SHA-256"),
        (equal, rounded) => format!(
            "{equal} equal the original files, by SHA-256; {rounded} of weights are not the original: their values are rounded to 8 bits"
        ),
    };
    lines(vec![
        ("files", files),
        ("weights", format!("{}, {} packed", report.bytes_after, report.bytes_before)),
        ("peak memory", memory(report.peak_anonymous, &report.plan)),
        ("model", report.output.clone()),
    ])
}

/// The gain of a model's zeros in memory and files, in speed on this machine, and in other programs.
pub(super) fn gain(gain: &ZerosGain, is_packed: bool) -> impl Iterator<Item = String> {
    let ZerosGain { dense_bytes, compact_bytes, times_as_fast } = *gain;
    let in_memory = format!("linears of {compact_bytes} in memory, not {dense_bytes}");
    let speed = times_as_fast.map(|times| {
        let limit = if times < 1.0 { ", as instructions limit it" } else { "" };
        format!("`prune generate`: {} here{limit}", speed_in_words(times))
    });
    let ratio = compact_bytes.0 as f64 / dense_bytes.0.max(1) as f64;
    let in_files = format!("`prune pack`: about {ratio:.2} times the bytes on disk");
    let rows = [
        Some(in_memory),
        speed,
        Some(in_files).filter(|_| !is_packed),
        Some("other programs: no gain".to_string()),
    ];
    rows.into_iter().flatten()
}

fn memory(peak: Option<ByteSize>, plan: &Plan) -> String {
    let peak = peak.map_or(String::new(), |peak| format!("{peak} of "));
    format!("{peak}{} planned", plan.cpu().map_or(ByteSize::ZERO, |device| device.peak))
}

fn lines(rows: Vec<(&str, String)>) -> String {
    rows.into_iter().map(|(name, value)| format!("{name:<12}{value}\n")).collect()
}
