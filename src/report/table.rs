//! The table at the end of a run: result, cost, and place.

use super::format::{duration, finite, millions, text_name};
use super::{divergences, merges, packing, recoveries, task_table};
use crate::bytes::ByteSize;
use crate::run::fallback::FallbackOutcome;
use crate::run::manifest::{PerplexityReport, SparsityReport};
use crate::run::{LayerDropReport, Manifest, Phase, TextProtocol};

/// Scores of layers that are shown, the lowest first.
const SCORES_SHOWN: usize = 6;

/// Rows of the table: names and values.
#[derive(Default)]
struct TableRows(Vec<(String, String)>);

/// Returns the final table, ending in a newline.
pub fn text(manifest: &Manifest) -> String {
    let rows = rows(manifest);
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:<width$}  {value}\n")).collect()
}

/// Names and values of the final table.
pub(super) fn rows(manifest: &Manifest) -> Vec<(String, String)> {
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
    for (number, line) in
        manifest.zeros_gain.iter().flat_map(|gain| packing::gain(gain, false)).enumerate()
    {
        rows.add(if number == 0 { "without zeros" } else { "" }, line);
    }
    if let Some(output) = &manifest.output {
        rows.add("result", format!("{} (read back and verified)", output.model));
    }
    rows.0
}

impl TableRows {
    fn add(&mut self, name: &str, value: String) {
        self.0.push((name.to_string(), value));
    }

    fn extend(&mut self, rows: impl IntoIterator<Item = (&'static str, String)>) {
        rows.into_iter().for_each(|(name, value)| self.add(name, value));
    }

    fn model(&mut self, manifest: &Manifest) {
        let model = &manifest.model;
        let parameters = millions(model.parameters);
        self.add("model", format!("{} ({parameters} parameters)", model.path));
        self.extend(manifest.merge.iter().flat_map(merges::rows));
        if let Some(drop) = &manifest.layer_drop {
            self.layer_drop(drop);
        }
        if let Some(drop) = &manifest.width_drop {
            self.add("width dropped", drop.in_words());
            self.sizes(drop.parameters, drop.bytes);
        }
        let is_dropped = manifest.layer_drop.is_some() || manifest.width_drop.is_some();
        let pruning = manifest.pruning.as_ref();
        self.extend(pruning.filter(|of| !(is_dropped && of.prunes_nothing())).map(|of| {
            let (ratio, pattern) = (of.sparsity_ratio, &of.sparsity_type);
            let (pruned, all) = (of.matrices, of.matrices_in_model);
            ("pruning", format!("{} {ratio:.4} {pattern}, {pruned} of {all} matrices", of.method))
        }));
        let layers = &manifest.layers;
        self.extend(manifest.recovery.iter().flat_map(|of| recoveries::rows(of, layers)));
        if let Some(SparsityReport { ratio, zeros, weights, zeros_before }) = manifest.sparsity {
            self.add("sparsity reached", format!("{ratio:.6} ({zeros} of {weights} weights)"));
            if zeros_before > 0 && manifest.recovery.is_none() {
                self.add("zeros before", format!("{zeros_before} weights were zero already"));
            }
        }
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
        self.sizes(drop.parameters, drop.bytes);
    }

    /// The sizes before and after a drop.
    fn sizes(&mut self, parameters: [u64; 2], bytes: [ByteSize; 2]) {
        let [before, after] = parameters.map(millions);
        let sizes =
            format!("{before} parameters, {} before; {after}, {} after", bytes[0], bytes[1]);
        self.add("  size", sizes);
    }

    /// Perplexities, and the texts of calibration and evaluation.
    fn perplexities(&mut self, manifest: &Manifest) {
        let evaluation = manifest.evaluation.as_ref();
        let dataset = evaluation.map_or_else(|| "evaluation text".to_string(), text_name);
        self.extend(manifest.perplexities().map(|(name, of)| (name, perplexity(&of, &dataset))));
        self.extend(divergences::rows(manifest));
        self.0.extend(task_table::rows(manifest));
        let texts = [
            ("calibration text", &manifest.calibration),
            ("evaluation text", &manifest.evaluation),
        ];
        self.extend(
            texts.into_iter().filter_map(|(name, of)| Some((name, protocol(of.as_ref()?)))),
        );
    }

    /// The time of the run and of each phase with at least a two-hundredth of it.
    fn phases(&mut self, manifest: &Manifest) {
        self.add("time", duration(manifest.seconds));
        let least = 0.005 * manifest.seconds;
        for phase in manifest.phases.iter().filter(|phase| phase.seconds >= least) {
            let (time, peak) = (duration(phase.seconds), peak(phase.peak_anonymous));
            let name = phase_name(manifest, phase.phase);
            self.add(&format!("  {name}"), format!("{time:>9}  peak {peak}"));
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
            let falls = manifest.fallbacks.iter().filter(|fall| fall.device == device.device);
            let counts = [FallbackOutcome::Cpu, FallbackOutcome::Smaller, FallbackOutcome::Retried]
                .map(|outcome| (outcome, falls.clone().filter(|of| of.outcome == outcome).count()));
            let counts = counts.into_iter().filter(|(_, count)| *count > 0);
            let counts: Vec<String> =
                counts.map(|(outcome, count)| format!("{count} {}", outcome.name())).collect();
            if !counts.is_empty() {
                let units = format!("{} of {} units", counts.join(", "), device.units);
                self.add("  out of memory", units);
            }
        }
    }
}

/// The name of a phase, as the run has it: only a run that prunes has a dense and a pruned model.
fn phase_name(manifest: &Manifest, phase: Phase) -> String {
    let trains = manifest.recovery.is_some();
    let name = match phase {
        Phase::EvaluateDense if trains => "evaluate before",
        Phase::EvaluatePruned if trains => "evaluate after",
        Phase::EvaluateDense | Phase::EvaluatePruned if manifest.command == "eval" => "evaluate",
        // `--allocate` is about ratios.
        Phase::Allocate => "create files",
        _ => return phase.to_string(),
    };
    name.to_string()
}

/// The text of calibration or evaluation, with hashes short enough to compare by eye; run.json has the whole hashes.
fn protocol(text: &TextProtocol) -> String {
    format!(
        "{} ({:.8}), {} tokens ({:.8}), tokenizer {:.8}",
        text_name(text),
        text.text_sha256,
        text.tokens_used,
        text.tokens_sha256,
        text.tokenizer_sha256
    )
}

fn perplexity(report: &PerplexityReport, dataset: &str) -> String {
    let PerplexityReport { perplexity, windows, seqlen, standard_error, .. } = report;
    let spread = match perplexity.is_finite() {
        true => format!(" ± {:.2} over windows", perplexity * standard_error),
        false => String::new(),
    };
    format!("{}{spread} ({dataset}, {windows} windows of {seqlen} tokens)", finite(*perplexity))
}

fn peak(bytes: Option<ByteSize>) -> String {
    bytes.map_or_else(|| "unknown".to_string(), |bytes| bytes.to_string())
}
