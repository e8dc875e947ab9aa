//! The cards of pruned, merged, recovered and quantised models.

use super::card::{Card, CardSource, hub_name, text_name};
use super::format::{percent, trimmed, with_seed};
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
    layer_drop: Option<&LayerDropReport>,
    width_drop: Option<&WidthDropReport>,
) -> String {
    let amount = match pruning.sparsity_type.split_once(':') {
        Some((n, m)) => format!("{n}of{m}"),
        None => pruning.sparsity_ratio.to_string(),
    };
    let layers = layer_drop.map(|drop| format!("-{}-layers", drop.kept.len()));
    let width = width_drop.map(|drop| format!("-width-{}", drop.asked));
    let is_sparse = (layers.is_none() && width.is_none()) || !pruning.prunes_nothing();
    let method = is_sparse.then(|| format!("-{}-{amount}", pruning.method));
    let changes: String = [layers, width, method].into_iter().flatten().collect();
    hub_name(&format!("{source:.50}{changes}"))
}

/// The card of a pruned model; `before` is the pruning of the source, where this program pruned it.
pub fn pruned(record: &PruningRecord, before: Option<&PruningReport>, source: CardSource) -> Card {
    let pruning = &record.pruning;
    let (layer_drop, width_drop) = (record.layer_drop.as_ref(), record.width_drop.as_ref());
    let mut tags = vec!["prune", "pruned"];
    tags.extend(layer_drop.map(|_| "layer-drop"));
    tags.extend(width_drop.map(|_| "width-drop"));
    let mut notes = vec![
        "`pruning.json` has these facts for programs, and the zeros and the hash of the mask of every matrix.",
    ];
    if record.removes_weights() {
        tags.extend(["sparse", &pruning.method, &pruning.sparsity_type]);
        notes.push("Zeros do not make the files smaller: the weights are stored as in the source, zeros included.");
    }
    if pruning.layer_ratios.is_some() {
        notes.push(
            "`layer_ratios.json` of the command is the list `pruning.layer_ratios` of `pruning.json`.",
        );
    }
    Card {
        name: pruned_name(&record.source.name, pruning, layer_drop, width_drop),
        lead: format!("{}, {}.", source_link(record), changes(record)),
        base_models: record.base_model().map(String::from).into_iter().collect(),
        tags: tags.into_iter().map(String::from).collect(),
        source,
        facts: pruning_facts(record, before),
        notes: notes.into_iter().map(String::from).collect(),
        command: record.command.clone(),
        tasks: record.tasks.clone().unwrap_or_default(),
        ..measured(CardMeasures { perplexity: &record.perplexity, on: record.evaluation.as_ref() })
    }
}

/// The card of a merged model, from a record without paths.
pub fn merged(report: &MergeReport, source: CardSource, command: Vec<String>) -> Card {
    // A name with a slash is on the hub: the record has no paths.
    let names = report.models.iter().map(|model| model.name.split('+'));
    let names = names.filter(|parts| parts.clone().all(|part| part.contains('/'))).flatten();
    let mut bases: Vec<String> = Vec::new();
    for name in names {
        if !bases.iter().any(|base| base == name) {
            bases.push(name.to_string());
        }
    }
    let donor = report.models.iter().find(|model| model.is_base).or(report.models.first());
    // A name without owner and folders.
    let donor = donor.and_then(|donor| donor.name.rsplit('/').next()).unwrap_or("model");
    let (method, semantics) = (code(&report.method), &report.semantics);
    let (layers, dtype) = (report.num_hidden_layers, &report.dtype);
    let perplexities = report.perplexities.iter();
    let facts = merges::facts(report).into_iter();
    let last = report.perplexities.last();
    Card {
        name: hub_name(&format!("{donor:.50}-{}", report.method)),
        lead: format!(
            "Merged by `prune merge` with the method {method} ({semantics} semantics), {layers} layers, {dtype}."
        ),
        base_models: bases,
        relation: Some("merge"),
        tags: vec!["merge".to_string(), report.method.clone()],
        source,
        facts: facts.map(|(name, value)| (name, code(&value))).collect(),
        perplexities: perplexities.map(|row| (code(&row.model), row.report)).collect(),
        measured_on: last.map(|row| row.text.clone()),
        notes: vec![format!(
            "`merge_config.yml` has the recipe, and `merging.json` has counts and distances of every tensor.\n\n```yaml\n{}\n```",
            report.recipe.trim_end()
        )],
        command,
        ..Card::default()
    }
}

/// A model that a run read.
#[derive(Debug, Clone, Copy)]
pub struct CardModel<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its id on the hub.
    pub id: Option<&'a str>,
}

impl CardModel<'_> {
    fn code(self) -> String {
        code(self.id.unwrap_or(self.name))
    }
}

/// The perplexities before and after a run.
#[derive(Debug, Clone, Copy)]
pub struct CardMeasures<'a> {
    /// The perplexities.
    pub perplexity: &'a Perplexities,
    /// Their text.
    pub on: Option<&'a TextProtocol>,
}

/// The card of a recovered model, from its pruned model.
pub fn recovered(
    model: CardModel<'_>,
    recovery: &RecoveryReport,
    measures: CardMeasures<'_>,
    source: CardSource,
    command: Vec<String>,
) -> Card {
    let text = &recovery.text;
    let steps = match recovery.steps.len() {
        0 => ("Steps per layer", recovery.steps_of.to_string()),
        steps => ("Steps", steps.to_string()),
    };
    let mut facts = vec![
        ("Source", model.code()),
        ("Trained parameters", recovery.parameters.to_string()),
        ("Matrices", recovery.target_modules.join(", ")),
    ];
    facts.extend(recovery.rank.map(|rank| ("Rank", rank.to_string())));
    facts.push(("Optimizer", format!("{}, rate {:.3e}", recovery.optim, recovery.rate)));
    facts.push(steps);
    let closing = recovery.closing.as_ref();
    facts.extend(closing.map(|closing| {
        let (before, end) = (trimmed(closing.before), closing.end());
        ("Sparsity", format!("from {before} to {end}, while it trained"))
    }));
    facts.extend(recovery.teacher.as_deref().map(|teacher| ("Teacher", code(teacher))));
    facts.push(("Text", format!("{}, {} tokens", text_name(text), text.tokens_used)));
    let (name, how) = (code(model.name), &recovery.how);
    let lead = match closing {
        Some(_) => format!("{name}, trained with `--how {how}` while weights were removed."),
        None => format!(
            "{name}, trained after its pruning with `--how {how}`. Pruned weights are still zero."
        ),
    };
    let mut notes = vec!["`recovery.json` has the losses.".to_string()];
    notes.extend(match closing {
        None => Some("`pruning.json`, if it is here, tells how the model was pruned; its perplexity is from before the training.".to_string()),
        Some(_) if command.iter().any(|word| word == "layer_ratios.json") => Some("`layer_ratios.json` of the command is the list `recovery.closing.layer_ratios` of `recovery.json`.".to_string()),
        Some(_) => None,
    });
    Card {
        name: hub_name(&format!("{:.70}-recovered", model.name)),
        lead,
        base_models: source.base_models(model.id),
        relation: Some("finetune"),
        tags: ["prune", "pruned", "recovered", "sparse"].map(String::from).to_vec(),
        source,
        facts,
        notes,
        command,
        ..measured(measures)
    }
}

/// The card of a quantised model, whose command names the source without its folder.
pub fn quantized(report: &QuantizationReport, model: CardModel<'_>, source: CardSource) -> Card {
    let format = &report.format;
    let share = |count: u64| {
        let weights = report.totals.weights;
        let share = percent(count as f64 / weights.max(1) as f64);
        format!("{count} of {weights} weights ({share})")
    };
    let shown = model.id.unwrap_or(model.name);
    let command = ["prune", "quantize", "--to", format, shown, "--save", "out"];
    Card {
        name: hub_name(&format!("{:.70}-{format}", model.name)),
        lead: format!("{}, its decoder linears quantised to 4 bits.", model.code()),
        base_models: source.base_models(model.id),
        relation: Some("quantized"),
        tags: ["quantized", "4-bit", "bitsandbytes", format].map(String::from).to_vec(),
        source,
        facts: vec![
            ("Source", model.code()),
            ("Format", code(format)),
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

/// A card with perplexities.
fn measured(CardMeasures { perplexity, on }: CardMeasures<'_>) -> Card {
    let named = [("Source", perplexity.dense), ("This model", perplexity.pruned)];
    let rows = named.into_iter().filter_map(|(name, report)| Some((name.to_string(), report?)));
    Card {
        perplexities: rows.collect(),
        measured_on: on.map(TextProtocol::published),
        ..Card::default()
    }
}

/// The changes of the source in words.
fn changes(record: &PruningRecord) -> String {
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
    let zeros = record.removes_weights().then(|| {
        let (method, share) = (code(&record.pruning.method), percent(record.sparsity.ratio));
        format!("pruned with the method {method}: {share} of the weights of its decoder linears are zero")
    });
    let rest = if zeros.is_none() { "; no other weight was changed" } else { "" };
    let parts: Vec<String> = [layers, width, zeros].into_iter().flatten().collect();
    format!("{}{rest}", parts.join(", "))
}

/// The facts of a pruning.
fn pruning_facts(
    record: &PruningRecord,
    before: Option<&PruningReport>,
) -> Vec<(&'static str, String)> {
    let (pruning, sparsity) = (&record.pruning, &record.sparsity);
    let mut rows = vec![("Source", source_row(record))];
    rows.extend(before.map(|before| ("Pruned before", asked_for(before))));
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
    if record.removes_weights() {
        let mut matrices = format!("{} of {}", pruning.matrices, pruning.matrices_in_model);
        for (word, globs) in [("included", &pruning.include), ("excluded", &pruning.exclude)] {
            if !globs.is_empty() {
                let globs: Vec<String> = globs.iter().map(|glob| code(glob)).collect();
                matrices += &format!("; {word}: {}", globs.join(", "));
            }
        }
        rows.extend([("Method", asked_for(pruning)), ("Matrices pruned", matrices)]);
    }
    let (zeros, weights, share) = (sparsity.zeros, sparsity.weights, percent(sparsity.ratio));
    rows.push(("Zeros", format!("{zeros} of {weights} weights ({share})")));
    if sparsity.zeros_before > 0 {
        rows.push(("Zeros in the source", sparsity.zeros_before.to_string()));
    }
    let calibration = match &record.calibration {
        None => "none".to_string(),
        Some(text) => {
            let (samples, seqlen) = (text.windows, text.seqlen);
            let seed = with_seed(text);
            format!("{}: {samples} samples of {seqlen} tokens{seed}", text_name(text))
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
    use crate::report::made_up;

    #[test]
    fn a_pruned_model_is_named_by_its_method_and_amount() {
        let name = |source: &str, sparsity_type: &str| {
            let pruning = made_up::manifest("wanda", 0.5).pruning.expect("a run that prunes");
            let pruning = PruningReport { sparsity_type: sparsity_type.to_string(), ..pruning };
            pruned_name(source, &pruning, None, None)
        };
        assert_eq!(name("Llama-2-7b-hf", "unstructured"), "Llama-2-7b-hf-wanda-0.5");
        assert_eq!(name("\u{1b}", "unstructured"), "wanda-0.5");
        assert!(name(&"x".repeat(300), "unstructured").len() <= 96);
        assert_eq!(name("m", "2:4"), "m-wanda-2of4");
    }

    #[test]
    fn a_recovered_model_keeps_licence_and_base_and_names_the_training() {
        let front_matter =
            FrontMatter::of(b"---\nlicense: llama2\nbase_model: a/b\ntags:\n- x\n---\n");
        let source = CardSource { front_matter, ..CardSource::default() };
        let recovery =
            RecoveryReport { how: "lora".to_string(), rank: Some(8), ..RecoveryReport::default() };
        let model = CardModel { name: "pruned", id: None };
        let measures = CardMeasures { perplexity: &Perplexities::default(), on: None };
        let card = recovered(model, &recovery, measures, source, Vec::new()).text();
        let head = FrontMatter::of(card.as_bytes());
        assert_eq!(head.get("license"), ["llama2"]);
        assert_eq!(head.get("base_model"), ["a/b"]);
        assert_eq!(head.get("base_model_relation"), ["finetune"]);
        assert!(head.get("tags").contains(&"recovered".to_string()));
        assert!(card.contains("| Rank | 8 |") && card.contains("`--how lora`"));
    }
}
