//! The parts of table and page that only merges have: models, method, perplexities, counts of every tensor.

use super::format::{Table, count, finite, or_dash, six_digits, three_digits};
use crate::run::Manifest;
use crate::run::merging::{MergeReport, MergedLayer};

/// A row of a table: name and value.
type Row = (&'static str, String);

/// Rows of the table at the end of a run.
pub(super) fn rows(merge: &MergeReport) -> Vec<Row> {
    let (models, layers) = (models(merge), merge.num_hidden_layers);
    let made = format!("{} of {models}, {layers} layers, {}", method(merge), merge.dtype);
    let mut rows = vec![("merge", made)];
    rows.extend(vocabulary(merge));
    for (at, row) in merge.perplexities.iter().enumerate() {
        let name = if at == 0 { "perplexity" } else { "" };
        rows.push((name, format!("{:.4}  {}", row.report.perplexity, row.model)));
    }
    rows.extend(outcome(merge));
    rows
}

/// Rows of the page that the table at the end of a run lacks.
pub(super) fn inputs(merge: &MergeReport) -> Vec<Row> {
    let scope = merge.trim_scope.as_ref();
    let scope = scope.map(|scope| ("trimmed together", format!("the entries of a {scope}")));
    let models = merge.models.iter();
    let models =
        models.map(|of| (if of.is_base { "base model" } else { "model" }, of.name.clone()));
    let seed = ("seed of random masks", merge.seed.to_string());
    scope.into_iter().chain(models).chain([seed]).collect()
}

/// Rows of the card.
pub(super) fn facts(merge: &MergeReport) -> Vec<Row> {
    let mut rows = vec![("method", method(merge))];
    rows.extend(inputs(merge));
    rows.extend(vocabulary(merge));
    rows.extend(outcome(merge));
    rows
}

/// A merge in one or two sentences.
pub(super) fn summary(merge: &MergeReport, model: &str) -> String {
    let (models, layers) = (models(merge), merge.num_hidden_layers);
    let perplexities = merge.perplexities.iter();
    let perplexities: Vec<String> = perplexities
        .map(|row| format!("{} of {}", finite(row.report.perplexity), row.model))
        .collect();
    let measured = match perplexities.is_empty() {
        true => String::new(),
        false => format!(" Perplexity: {}.", perplexities.join(", ")),
    };
    format!(
        "{} of {models} into one of {layers} layers, with the configuration of {model}.{measured}",
        method(merge)
    )
}

/// What was measured on the result. Distances and conflicts of signs are in percent by layer; a merge whose layers have one source
/// has none.
fn outcome(merge: &MergeReport) -> Vec<Row> {
    let percents = |of: &dyn Fn(&MergedLayer) -> Option<f64>| {
        let values = merge.layers.iter().map(of);
        let texts = values.map(|value| or_dash(value, |share| three_digits(100.0 * share)));
        texts.collect::<Vec<_>>().join(", ")
    };
    let mut rows = Vec::new();
    if let Some(errors) = merge.output_errors() {
        let base =
            errors.before.map_or(String::new(), |before| format!("base {before:.6}, merged "));
        let after = errors.after;
        rows.push(("output error", format!("{base}{after:.6} summed over models and linears")));
    }
    let zeros = merge.tensors.iter().filter_map(|tensor| tensor.kept_zeros);
    if let Some(zeros) = zeros.reduce(|sum, zeros| sum + zeros) {
        rows.push(("zeros kept", format!("{zeros} weights that are zero in every model")));
    }
    for (at, model) in merge.models.iter().enumerate().filter(|_| !merge.layers.is_empty()) {
        let distances = percents(&|layer| *layer.distances.get(at)?);
        rows.push(("distance", format!("{distances} % from {}, by layer", model.name)));
    }
    if merge.layers.iter().any(|layer| layer.sign_conflicts.is_some()) {
        let conflicts = percents(&|layer| layer.sign_conflicts);
        rows.push(("sign conflicts", format!("{conflicts} % of the elements, by layer")));
    }
    rows
}

/// The distances of every layer from the models; without rows for a run that did not merge.
pub(super) fn every_layer(manifest: &Manifest) -> Table {
    let merge = manifest.merge.iter();
    let models = merge.clone().flat_map(|merge| &merge.models);
    let distances = models.map(|model| format!("distance from {}", model.name));
    let columns = ["layer".to_string()].into_iter().chain(distances);
    let rows = merge.flat_map(|merge| &merge.layers).map(|layer| {
        let numbers = layer.distances.iter().copied().chain([layer.sign_conflicts]);
        let numbers = numbers.map(|number| or_dash(number, six_digits));
        [layer.layer.to_string()].into_iter().chain(numbers).collect()
    });
    Table { columns: columns.chain(["sign conflicts".to_string()]).collect(), rows: rows.collect() }
}

/// What was counted in every tensor; empty for a run that did not merge.
pub(super) fn every_tensor(manifest: &Manifest) -> Table {
    let tensors = manifest.merge.iter().flat_map(|merge| &merge.tensors);
    Table::of(tensors.map(|tensor| {
        let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
        let kept: Vec<String> = tensor.kept.iter().map(u64::to_string).collect();
        let kept = if kept.is_empty() { "all".to_string() } else { kept.join(", ") };
        let errors = tensor.output_errors;
        [
            ("tensor", tensor.name.clone()),
            ("shape", shape.join(" × ")),
            ("zeros", tensor.zeros.to_string()),
            ("kept entries per model", kept),
            ("output error before", or_dash(errors.and_then(|of| of.before), six_digits)),
            ("output error after", or_dash(errors.map(|of| of.after), six_digits)),
        ]
    }))
}

/// The number of models, and the base.
fn models(merge: &MergeReport) -> String {
    let (bases, models): (Vec<_>, Vec<_>) = merge.models.iter().partition(|of| of.is_base);
    let base = if bases.is_empty() { "" } else { " and a base" };
    format!("{}{base}", count(models.len(), "model"))
}

/// The method as it was defined.
fn method(merge: &MergeReport) -> String {
    format!("{} ({} semantics)", merge.method, merge.semantics)
}

fn vocabulary(merge: &MergeReport) -> Option<Row> {
    let of = merge.vocabulary.as_ref()?;
    let (tokens, source, added, dropped) = (of.tokens, &of.source, of.added, of.dropped);
    Some(("vocabulary", format!("{tokens} tokens ({source}), {added} added, {dropped} dropped")))
}
