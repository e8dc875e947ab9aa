//! The model card of a pruned model: `README.md` beside its weights, as the hub shows it.

use std::fmt::Write as _;

use super::front_matter::{self, FrontMatter, code, quoted};
use crate::failure::printable;
use crate::run::command_line;
use crate::run::manifest::{PerplexityReport, PruningReport};
use crate::run::{LayerDropReport, PruningRecord, TextProtocol, WidthDropReport};

/// The beginning of the line by which a card of this program is known.
pub(super) const MARK: &str = "<!-- This card was written by prune";

/// Keys that are taken over from the source's card, as they are.
pub(super) const INHERITED: [&str; 4] = ["license", "license_name", "license_link", "language"];

/// Facts for a card that the record does not have.
#[derive(Debug, Clone, Default)]
pub struct CardSource {
    /// The front matter of the source's card.
    pub front_matter: FrontMatter,
    /// The name of the source's card beside this card; `None` if the source has no card.
    pub kept_as: Option<String>,
    /// The record of the source, where this program pruned it before.
    pub pruned_before: Option<PruningReport>,
    /// The repository on the hub of the calibration text.
    pub dataset: Option<String>,
}

/// Returns whether this program wrote a card, from its beginning.
pub fn is_written_by_us(card: &[u8]) -> bool {
    card.windows(MARK.len()).any(|part| part == MARK.as_bytes())
}

/// A name for a pruned model, of the characters that names on the hub have.
pub fn model_name(
    source: &str,
    pruning: &PruningReport,
    (layer_drop, width_drop): (Option<&LayerDropReport>, Option<&WidthDropReport>),
) -> String {
    let amount = match pruning.sparsity_type.split_once(':') {
        Some((n, m)) => format!("{n}of{m}"),
        None => pruning.sparsity_ratio.to_string(),
    };
    let mut full: String = source.chars().take(50).collect();
    if let Some(drop) = layer_drop {
        full += &format!("-{}-layers", drop.kept.len());
    }
    if let Some(drop) = width_drop {
        full += &format!("-width-{}", drop.asked);
    }
    let is_smaller = layer_drop.is_some() || width_drop.is_some();
    if !is_smaller || !pruning.prunes_nothing() {
        full += &format!("-{}-{amount}", pruning.method);
    }
    let mut name = String::new();
    for c in full.chars() {
        let c = if c.is_ascii_alphanumeric() || "._".contains(c) { c } else { '-' };
        // The hub refuses `--` and `..`.
        if c.is_ascii_alphanumeric() || !name.ends_with(c) {
            name.push(c);
        }
    }
    let name: String = name.trim_matches(['-', '.']).chars().take(90).collect();
    name.trim_end_matches(['-', '.']).to_string()
}

/// The card as Markdown.
pub fn text(record: &PruningRecord, source: &CardSource) -> String {
    let mut card = front_matter(record, source);
    let drop = (record.layer_drop.as_ref(), record.width_drop.as_ref());
    let name = model_name(&record.source.name, &record.pruning, drop);
    // Writing to a String cannot fail.
    let _ = write!(
        card,
        "\n{MARK} {}. -->\n\n# {name}\n\n{}, {}.\n\n",
        record.prune_version,
        source_link(record),
        changes(record)
    );
    card += "| | |\n| --- | --- |\n";
    for (name, value) in rows(record, source) {
        let _ = writeln!(card, "| {name} | {value} |");
    }
    card += "\n`pruning.json` has these facts for programs, and the zeros and the hash of the mask of every matrix.\n";
    if !is_smaller(record) || !record.pruning.prunes_nothing() {
        card += "\nZeros do not make the files smaller: the weights are stored as in the source, zeros included.\n";
    }
    let _ = write!(
        card,
        "\n## Reproduce\n\n```sh\n{}\n```\n\nPaths are reduced to their last component.",
        printable(&command_line::quoted(&record.command))
    );
    if record.pruning.layer_ratios.is_some() {
        card += " `layer_ratios.json` is the list `pruning.layer_ratios` of `pruning.json`.";
    }
    let path = code(&name);
    let path = path.trim_matches('`');
    let _ = write!(
        card,
        "\n\n## Load\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\
         model = AutoModelForCausalLM.from_pretrained(\"YOUR_NAME/{path}\")\n\
         tokenizer = AutoTokenizer.from_pretrained(\"YOUR_NAME/{path}\")\n```\n"
    );
    card += "\n## Licence\n\n";
    card += match source.front_matter.get("license") {
        [] => {
            "The licence of the source is not known to this card. The terms of the source apply all the same."
        }
        _ => "The licence is that of the source.",
    };
    if let Some(kept) = &source.kept_as {
        let _ = write!(card, " The source's card is {}.", code(kept));
    }
    card.push('\n');
    card
}

/// The changes of the source in words.
fn changes(record: &PruningRecord) -> String {
    let (pruning, sparsity) = (&record.pruning, &record.sparsity);
    let zeros = format!(
        "pruned with the method {}: {} of the weights of its decoder linears are zero",
        code(&pruning.method),
        percent(sparsity.ratio)
    );
    let layers = record.layer_drop.as_ref().map(|drop| {
        format!("with {} of its {} layers", drop.kept.len(), drop.kept.len() + drop.dropped.len())
    });
    let width = record.width_drop.as_ref().map(|drop| {
        let refit = match drop.is_refitted {
            true => "; the weights behind the dropped ones were refitted",
            false => "",
        };
        format!("made narrower: {}{refit}", drop.in_words())
    });
    let smaller: Vec<String> = layers.into_iter().chain(width).collect();
    match (smaller.is_empty(), pruning.prunes_nothing()) {
        (true, _) => zeros,
        (false, true) => format!("{}; no other weight was changed", smaller.join(", ")),
        (false, false) => format!("{}, {zeros}", smaller.join(", ")),
    }
}

/// Returns whether layers or width were dropped.
fn is_smaller(record: &PruningRecord) -> bool {
    record.layer_drop.is_some() || record.width_drop.is_some()
}

fn front_matter(record: &PruningRecord, source: &CardSource) -> String {
    let pruning = &record.pruning;
    let mut text = "---\n".to_string();
    let mut entry = |key: &str, values: &[String]| text += &front_matter::entry_of(key, values);
    for key in INHERITED {
        entry(key, source.front_matter.get(key));
    }
    entry("base_model", &record.base_model().map(String::from).into_iter().collect::<Vec<_>>());
    entry("library_name", &["transformers".to_string()]);
    entry("pipeline_tag", &["text-generation".to_string()]);
    let mut tags = vec!["prune", "pruned"];
    let drop = record.layer_drop.as_ref();
    tags.extend(drop.map(|_| "layer-drop"));
    tags.extend(record.width_drop.as_ref().map(|_| "width-drop"));
    if !is_smaller(record) || !pruning.prunes_nothing() {
        tags.extend(["sparse", &pruning.method, &pruning.sparsity_type]);
    }
    let tags: Vec<String> = tags.into_iter().map(String::from).collect();
    entry("tags", &tags);
    if let Some(dataset) = &source.dataset {
        text += &format!("datasets:\n- {}\n", quoted(dataset));
    }
    text + "---\n"
}

/// The rows of the table, with values in Markdown.
fn rows(record: &PruningRecord, source: &CardSource) -> Vec<(&'static str, String)> {
    let (pruning, sparsity) = (&record.pruning, &record.sparsity);
    let mut rows = vec![("Source", source_row(record))];
    if let Some(before) = &source.pruned_before {
        rows.push(("Pruned before", asked_for(before)));
    }
    if let Some(drop) = &record.layer_drop {
        rows.push(("Layers dropped", format!("{}; counted from 0 in the source", drop.in_words())));
        let [before, after] = drop.parameters;
        rows.push(("Parameters", format!("{after}, {before} in the source")));
    }
    if let Some(drop) = &record.width_drop {
        rows.push(("Width dropped", drop.in_words()));
        let [before, after] = drop.parameters;
        rows.push(("Parameters", format!("{after}, {before} before")));
    }
    let globs =
        |globs: &[String]| globs.iter().map(|glob| code(glob)).collect::<Vec<_>>().join(", ");
    let mut matrices = format!("{} of {}", pruning.matrices, pruning.matrices_in_model);
    for (word, texts) in [("included", &pruning.include), ("excluded", &pruning.exclude)] {
        if !texts.is_empty() {
            matrices += &format!("; {word}: {}", globs(texts));
        }
    }
    if !is_smaller(record) || !pruning.prunes_nothing() {
        rows.push(("Method", asked_for(pruning)));
        rows.push(("Matrices pruned", matrices));
    }
    rows.push((
        "Zeros",
        format!("{} of {} weights ({})", sparsity.zeros, sparsity.weights, percent(sparsity.ratio)),
    ));
    if sparsity.zeros_before > 0 {
        rows.push(("Zeros in the source", sparsity.zeros_before.to_string()));
    }
    let calibration = match &record.calibration {
        None => "none".to_string(),
        Some(text) => {
            let seed = text.seed.map_or(String::new(), |seed| format!(", seed {seed}"));
            format!("{}: {} samples of {} tokens{seed}", text_name(text), text.windows, text.seqlen)
        }
    };
    rows.push(("Calibration", calibration));
    let measured = &record.perplexity;
    rows.push(("Perplexity, source", perplexity(measured.dense)));
    rows.push(("Perplexity, this model", perplexity(measured.pruned)));
    if let Some(text) = &record.evaluation {
        rows.push((
            "Perplexity measured on",
            format!(
                "{}: {} windows of {} tokens, {} tokens in all; {}",
                text_name(text),
                text.windows,
                text.seqlen,
                text.tokens_used,
                code(&text.convention)
            ),
        ));
    }
    let arithmetic = &record.arithmetic;
    rows.push((
        "Arithmetic",
        format!("{} ({}), weights in {}", arithmetic.dtype, arithmetic.kernel, record.dtype),
    ));
    rows.push(("Program", format!("prune {}", record.prune_version)));
    rows
}

/// Method, and ratio or pattern.
fn asked_for(pruning: &PruningReport) -> String {
    let (method, pattern) = (code(&pruning.method), code(&pruning.sparsity_type));
    let layers = match pruning.layer_ratios {
        Some(_) => ", a ratio per layer",
        None => "",
    };
    format!("{method}, {} {pattern}{layers}", percent(pruning.sparsity_ratio))
}

fn source_row(record: &PruningRecord) -> String {
    match &record.source.commit {
        Some(commit) => format!("{}, commit {}", source_link(record), code(commit)),
        None => source_link(record),
    }
}

fn source_link(record: &PruningRecord) -> String {
    match &record.source.id {
        Some(id) => format!("[{id}](https://huggingface.co/{id})"),
        None => code(&record.source.name),
    }
}

fn text_name(text: &TextProtocol) -> String {
    format!("{} ({})", code(&text.dataset), code(&text.path))
}

fn perplexity(report: Option<PerplexityReport>) -> String {
    match report {
        None => "not measured".to_string(),
        Some(report) => super::format::finite(report.perplexity),
    }
}

/// A share in percent, with as many digits as it has, at most four.
fn percent(ratio: f64) -> String {
    let percent = format!("{:.4}", 100.0 * ratio);
    format!("{} %", percent.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pruning(sparsity_type: &str) -> PruningReport {
        PruningReport {
            allocation: None,
            method: "wanda".to_string(),
            sparsity_ratio: 0.5,
            sparsity_type: sparsity_type.to_string(),
            changes_weights: false,
            permutes_channels: false,
            include: Vec::new(),
            exclude: Vec::new(),
            matrices: 14,
            matrices_in_model: 14,
            layer_ratios: None,
        }
    }

    #[test]
    fn names_are_those_that_the_hub_takes() {
        let name = |source: &str| model_name(source, &pruning("unstructured"), (None, None));
        assert_eq!(name("Llama-2-7b-hf"), "Llama-2-7b-hf-wanda-0.5");
        assert_eq!(name("..my model--é|`"), "my-model-wanda-0.5");
        assert_eq!(name("\u{1b}"), "wanda-0.5");
        assert!(name(&"x".repeat(300)).len() <= 96);
        assert_eq!(model_name("m", &pruning("2:4"), (None, None)), "m-wanda-2of4");
    }

    #[test]
    fn a_percentage_has_no_more_digits_than_it_needs() {
        let shown = [0.5, 1.0 / 3.0, 0.0, 1.0].map(percent);
        assert_eq!(shown, ["50 %", "33.3333 %", "0 %", "100 %"]);
    }
}
