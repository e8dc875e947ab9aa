//! The table at the end of a run: result, cost, and place.

use std::fmt::Write as _;

use super::format::duration;
use super::{merges, recoveries};
use crate::bytes::ByteSize;
use crate::run::fallback::{FallbackOutcome, FallbackReport};
use crate::run::manifest::PerplexityReport;
use crate::run::{LayerDropReport, Manifest, TextProtocol, WidthDropReport};

/// Scores of layers that are shown, the lowest first.
const SCORES_SHOWN: usize = 6;

/// Rows of the table: names and values.
#[derive(Default)]
struct TableRows(Vec<(String, String)>);

/// Returns the final table, ending in a newline.
pub fn text(manifest: &Manifest) -> String {
    let mut rows = TableRows::default();
    rows.model(manifest);
    rows.perplexities(manifest);
    let arithmetic = &manifest.arithmetic;
    rows.add(
        "arithmetic",
        format!(
            "{} on {} ({}), {} threads",
            arithmetic.dtype, arithmetic.device, arithmetic.kernel, arithmetic.threads
        ),
    );
    rows.phases(manifest);
    let states = match manifest.merge {
        Some(_) => String::new(),
        None => format!(", hidden states in {}", manifest.hidden_states),
    };
    let peak = peak(manifest.peak_anonymous);
    rows.add("peak memory", format!("{peak} anonymous{states}"));
    rows.devices(manifest);
    if let Some(output) = &manifest.output {
        rows.add("result", format!("{} (read back and verified)", output.model));
    }
    let rows = rows.0;
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |mut text, (name, value)| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<width$}  {value}");
        text
    })
}

impl TableRows {
    fn add(&mut self, name: &str, value: String) {
        self.0.push((name.to_string(), value));
    }

    fn model(&mut self, manifest: &Manifest) {
        let model = &manifest.model;
        let millions = model.parameters as f64 / 1e6;
        self.add("model", format!("{} ({millions:.1} M parameters)", model.path));
        if let Some(merge) = &manifest.merge {
            for (name, value) in merges::rows(merge) {
                self.add(&name, value);
            }
        }
        if let Some(drop) = &manifest.layer_drop {
            self.layer_drop(drop);
        }
        if let Some(drop) = &manifest.width_drop {
            self.width_drop(drop);
        }
        let is_dropped = manifest.layer_drop.is_some() || manifest.width_drop.is_some();
        let pruning = manifest.pruning.as_ref();
        if let Some(pruning) = pruning.filter(|of| !(is_dropped && of.prunes_nothing())) {
            self.add(
                "pruning",
                format!(
                    "{} {:.4} {}, {} of {} matrices",
                    pruning.method,
                    pruning.sparsity_ratio,
                    pruning.sparsity_type,
                    pruning.matrices,
                    pruning.matrices_in_model
                ),
            );
        }
        if let Some(recovery) = &manifest.recovery {
            for (name, value) in recoveries::rows(recovery, &manifest.layers) {
                self.add(&name, value);
            }
        }
        let Some(sparsity) = manifest.sparsity else {
            return;
        };
        self.add(
            "sparsity reached",
            format!("{:.6} ({} of {} weights)", sparsity.ratio, sparsity.zeros, sparsity.weights),
        );
        if sparsity.zeros_before > 0 && manifest.recovery.is_none() {
            self.add(
                "zeros before",
                format!("{} weights were zero already", sparsity.zeros_before),
            );
        }
    }

    /// Dropped width, and the sizes before and after.
    fn width_drop(&mut self, drop: &WidthDropReport) {
        self.add("width dropped", drop.in_words());
        let [before, after] = drop.parameters.map(|weights| weights as f64 / 1e6);
        self.add(
            "  size",
            format!(
                "{before:.1} M parameters, {} before; {after:.1} M, {} after",
                drop.bytes[0], drop.bytes[1]
            ),
        );
    }

    /// Dropped layers, their scores, and the sizes before and after.
    fn layer_drop(&mut self, drop: &LayerDropReport) {
        self.add("layers dropped", drop.in_words());
        let mut scores: Vec<(usize, f64)> =
            drop.deciding_scores().iter().copied().enumerate().collect();
        scores.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let shown = scores.iter().take(SCORES_SHOWN);
        let shown: Vec<String> =
            shown.map(|(layer, score)| format!("{layer}: {score:.4}")).collect();
        let rest = if scores.len() > SCORES_SHOWN { ", ..." } else { "" };
        self.add("  lowest scores", format!("{}{rest}", shown.join(", ")));
        let [before, after] = drop.parameters.map(|weights| weights as f64 / 1e6);
        self.add(
            "  size",
            format!(
                "{before:.1} M parameters, {} before; {after:.1} M, {} after",
                drop.bytes[0], drop.bytes[1]
            ),
        );
    }

    /// Perplexities, and the texts of calibration and evaluation.
    fn perplexities(&mut self, manifest: &Manifest) {
        let evaluation = manifest.evaluation.as_ref();
        let dataset = evaluation.map_or("evaluation text", |text| &text.dataset);
        let [first, second] = manifest.perplexity_names();
        for (name, report) in
            [(first, manifest.perplexity.dense), (second, manifest.perplexity.pruned)]
        {
            if let Some(report) = report {
                self.add(name, perplexity(&report, dataset));
            }
        }
        for (name, text) in
            [("calibration text", &manifest.calibration), ("evaluation text", &manifest.evaluation)]
        {
            if let Some(text) = text {
                self.add(name, protocol_of(text));
            }
        }
    }

    /// The time of the run and of each phase with at least a two-hundredth of it.
    fn phases(&mut self, manifest: &Manifest) {
        self.add("time", duration(manifest.seconds));
        let least = 0.005 * manifest.seconds;
        for phase in manifest.phases.iter().filter(|phase| phase.seconds >= least) {
            let (time, peak) = (duration(phase.seconds), peak(phase.peak_anonymous));
            self.add(&format!("  {}", phase.phase), format!("{time:>9}  peak {peak}"));
        }
    }

    /// The memory of each GPU, and the units of work it had too little memory for.
    fn devices(&mut self, manifest: &Manifest) {
        for device in &manifest.devices {
            let measured = match device.peak_allocated {
                Some(peak) => format!("peak {peak}"),
                None => format!("peak {} by our account", device.reserved_by_plan),
            };
            self.add(&device.device, format!("{}, {measured}", device.name));
            let of = |outcome: FallbackOutcome| {
                let fell = |fall: &&FallbackReport| {
                    fall.device == device.device && fall.outcome == outcome
                };
                manifest.fallbacks.iter().filter(fell).count()
            };
            let falls: Vec<String> =
                [FallbackOutcome::Cpu, FallbackOutcome::Smaller, FallbackOutcome::Retried]
                    .into_iter()
                    .filter(|&outcome| of(outcome) > 0)
                    .map(|outcome| format!("{} {}", of(outcome), outcome.name()))
                    .collect();
            if !falls.is_empty() {
                self.add(
                    "  out of memory",
                    format!("{} of {} units", falls.join(", "), device.units),
                );
            }
        }
    }
}

/// The text of calibration or evaluation, with hashes short enough to compare by eye; run.json has the whole hashes.
fn protocol_of(text: &TextProtocol) -> String {
    format!(
        "{}, sha256 {:.12}; {} tokens, sha256 {:.12}; tokenizer {:.12}",
        text.dataset, text.text_sha256, text.tokens_used, text.tokens_sha256, text.tokenizer_sha256
    )
}

fn perplexity(report: &PerplexityReport, dataset: &str) -> String {
    let spread = report.perplexity * report.standard_error;
    format!(
        "{:.4} ± {:.2} over windows ({dataset}, {} windows of {} tokens)",
        report.perplexity, spread, report.windows, report.seqlen
    )
}

fn peak(bytes: Option<ByteSize>) -> String {
    bytes.map_or_else(|| "unknown".to_string(), |bytes| bytes.to_string())
}
