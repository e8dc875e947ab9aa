//! The cards of pruned, merged, recovered and quantised models.

use super::card::{Card, CardSource, hub_name, text_name};
use super::format::percent;
use super::front_matter::code;
use super::merges;
use crate::run::manifest::{Perplexities, PruningReport};
use crate::run::merging::MergeReport;
use crate::run::{
    LayerDropReport, PruningRecord, QuantizationReport, RecoveryReport, TextProtocol,
    WidthDropReport,
};

/// A name for a pruned model, of the characters that names on the hub have.
pub fn pruned_name(
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
    hub_name(&full)
}

/// The card of a pruned model; `before` is the pruning of the source, where this program pruned it.
pub fn pruned(record: &PruningRecord, before: Option<&PruningReport>, source: CardSource) -> Card {
    let pruning = &record.pruning;
    let drop = (record.layer_drop.as_ref(), record.width_drop.as_ref());
    let is_sparse = !is_smaller(record) || !pruning.prunes_nothing();
    let mut tags = vec!["prune", "pruned"];
    tags.extend(drop.0.map(|_| "layer-drop"));
    tags.extend(drop.1.map(|_| "width-drop"));
    let mut notes = vec![
        "`pruning.json` has these facts for programs, and the zeros and the hash of the mask of every matrix.",
    ];
    if is_sparse {
        tags.extend(["sparse", &pruning.method, &pruning.sparsity_type]);
        notes.push("Zeros do not make the files smaller: the weights are stored as in the source, zeros included.");
    }
    if pruning.layer_ratios.is_some() {
        notes.push(
            "`layer_ratios.json` of the command is the list `pruning.layer_ratios` of `pruning.json`.",
        );
    }
    Card {
        name: pruned_name(&record.source.name, pruning, drop),
        lead: format!("{}, {}.", source_link(record), changes(record)),
        base_models: record.base_model().map(String::from).into_iter().collect(),
        tags: tags.into_iter().map(String::from).collect(),
        source,
        facts: pruning_facts(record, before),
        notes: notes.into_iter().map(String::from).collect(),
        command: record.command.clone(),
        ..measured(&record.perplexity, record.evaluation.as_ref())
    }
}

/// The card of a merged model, from a record without paths.
pub fn merged(report: &MergeReport, source: CardSource, command: Vec<String>) -> Card {
    let mut bases: Vec<String> = Vec::new();
    for model in &report.models {
        // A name with a slash is on the hub: the record has no paths.
        if model.name.split('+').all(|part| part.contains('/')) {
            bases.extend(model.name.split('+').map(String::from));
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    bases.retain(|name| seen.insert(name.clone()));
    let donor = report.models.iter().find(|model| model.is_base).or(report.models.first());
    let donor = donor.map_or("model", |donor| last_of(&donor.name));
    let facts = merges::facts(report).into_iter();
    let last = report.perplexities.last();
    Card {
        name: hub_name(&format!("{:.50}-{}", donor, report.method)),
        lead: format!(
            "Merged by `prune merge` with the method {} ({} semantics), {} layers, {}.",
            code(&report.method),
            report.semantics,
            report.num_hidden_layers,
            report.dtype
        ),
        base_models: bases,
        relation: Some("merge"),
        tags: vec!["merge".to_string(), report.method.clone()],
        source,
        facts: facts.map(|(name, value)| (name, code(&value))).collect(),
        perplexities: report
            .perplexities
            .iter()
            .map(|row| (code(&row.model), row.report))
            .collect(),
        measured_on: last.map(|row| row.text.clone()),
        notes: vec![format!(
            "`merge_config.yml` has the recipe, and `merging.json` has counts and distances of every tensor.\n\n```yaml\n{}\n```",
            report.recipe.trim_end()
        )],
        command,
    }
}

/// The card of a recovered model; `model` is the name of the pruned model, and its id on the hub.
pub fn recovered(
    model: (&str, Option<&str>),
    (recovery, perplexity): (&RecoveryReport, &Perplexities),
    evaluation: Option<&TextProtocol>,
    source: CardSource,
    command: Vec<String>,
) -> Card {
    let mut facts = vec![
        ("Source", code(model.1.unwrap_or(model.0))),
        ("Trained parameters", recovery.parameters.to_string()),
        ("Matrices", recovery.target_modules.join(", ")),
    ];
    facts.extend(recovery.rank.map(|rank| ("Rank", rank.to_string())));
    facts.push(("Optimizer", format!("{}, rate {:.3e}", recovery.optim, recovery.rate)));
    facts.push(match recovery.steps.len() {
        0 => ("Steps per layer", recovery.steps_of.to_string()),
        steps => ("Steps", steps.to_string()),
    });
    facts.extend(recovery.teacher.as_deref().map(|teacher| ("Teacher", code(teacher))));
    facts.push((
        "Text",
        format!("{}, {} tokens", text_name(&recovery.text), recovery.text.tokens_used),
    ));
    Card {
        name: hub_name(&format!("{:.70}-recovered", model.0)),
        lead: format!(
            "{}, trained after its pruning with `--how {}`. Pruned weights are still zero.",
            code(model.0),
            recovery.how
        ),
        base_models: source.base_models(model.1),
        relation: Some("finetune"),
        tags: ["prune", "pruned", "recovered", "sparse"].map(String::from).to_vec(),
        source,
        facts,
        notes: vec!["`recovery.json` has the losses. `pruning.json`, if it is here, tells how the model was pruned; its perplexity is from before the training.".to_string()],
        command,
        ..measured(perplexity, evaluation)
    }
}

/// The card of a quantised model, whose command names the source without its folder.
pub fn quantized(
    report: &QuantizationReport,
    (name, id): (&str, Option<&str>),
    source: CardSource,
) -> Card {
    let share = |count: u64| {
        format!(
            "{count} of {} weights ({})",
            report.totals.weights,
            percent(count as f64 / report.totals.weights.max(1) as f64)
        )
    };
    let command =
        ["prune", "quantize", "--to", &report.format, id.unwrap_or(name), "--save", "out"];
    Card {
        name: hub_name(&format!("{name:.70}-{}", report.format)),
        lead: format!("{}, its decoder linears quantised to 4 bits.", code(id.unwrap_or(name))),
        base_models: source.base_models(id),
        relation: Some("quantized"),
        tags: ["quantized", "4-bit", "bitsandbytes", &report.format].map(String::from).to_vec(),
        source,
        facts: vec![
            ("Source", code(id.unwrap_or(name))),
            ("Format", code(&report.format)),
            ("Matrices", report.totals.matrices.to_string()),
            ("Zeros in the source", share(report.totals.zeros_before)),
            ("Zeros", share(report.totals.zeros_after)),
            ("Size", format!("{}, {} in the source", report.bytes_after, report.bytes_before)),
        ],
        notes: vec!["transformers loads the folder with bitsandbytes. All zeros of the source are zero here, too.".to_string()],
        command: command.map(String::from).to_vec(),
        ..Card::default()
    }
}

/// A card with the perplexities before and after a run.
fn measured(perplexity: &Perplexities, evaluation: Option<&TextProtocol>) -> Card {
    let named = [("Source", perplexity.dense), ("This model", perplexity.pruned)];
    let rows = named.into_iter().filter_map(|(name, report)| Some((name.to_string(), report?)));
    Card {
        perplexities: rows.collect(),
        measured_on: evaluation.map(TextProtocol::published),
        ..Card::default()
    }
}

/// A name without owner and folders.
fn last_of(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
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

/// The facts of a pruning.
fn pruning_facts(
    record: &PruningRecord,
    before: Option<&PruningReport>,
) -> Vec<(&'static str, String)> {
    let (pruning, sparsity) = (&record.pruning, &record.sparsity);
    let mut rows = vec![("Source", source_row(record))];
    if let Some(before) = before {
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
    let arithmetic = &record.arithmetic;
    rows.push((
        "Arithmetic",
        format!("{} ({}), weights in {}", arithmetic.dtype, arithmetic.kernel, record.dtype),
    ));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::front_matter::FrontMatter;

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
    fn a_pruned_model_is_named_by_its_method_and_amount() {
        let name = |source: &str| pruned_name(source, &pruning("unstructured"), (None, None));
        assert_eq!(name("Llama-2-7b-hf"), "Llama-2-7b-hf-wanda-0.5");
        assert_eq!(name("\u{1b}"), "wanda-0.5");
        assert!(name(&"x".repeat(300)).len() <= 96);
        assert_eq!(pruned_name("m", &pruning("2:4"), (None, None)), "m-wanda-2of4");
    }

    #[test]
    fn a_recovered_model_keeps_licence_and_base_and_names_the_training() {
        let front_matter =
            FrontMatter::of(b"---\nlicense: llama2\nbase_model: a/b\ntags:\n- x\n---\n");
        let source = CardSource { front_matter, ..CardSource::default() };
        let recovery =
            RecoveryReport { how: "lora".to_string(), rank: Some(8), ..RecoveryReport::default() };
        let facts = (&recovery, &Perplexities::default());
        let card = recovered(("pruned", None), facts, None, source, Vec::new()).text();
        let head = FrontMatter::of(card.as_bytes());
        assert_eq!(head.get("license"), ["llama2"]);
        assert_eq!(head.get("base_model"), ["a/b"]);
        assert_eq!(head.get("base_model_relation"), ["finetune"]);
        assert!(head.get("tags").contains(&"recovered".to_string()));
        assert!(card.contains("| Rank | 8 |") && card.contains("`--how lora`"));
    }
}
