//! The parts of table and page that only merges have: models, method, perplexities, counts of every tensor.

use std::fmt::Write as _;

use super::format::{Table, finite, three_digits};
use crate::run::Manifest;
use crate::run::merging::{MergeReport, MergedLayer, MergedTensor};

/// Rows of the table at the end of a run.
pub(super) fn rows(merge: &MergeReport) -> Vec<(String, String)> {
    let mut rows = vec![(
        "merge".to_string(),
        format!(
            "{} of {} models, {} layers, {}",
            method(merge),
            merge.models.len(),
            merge.num_hidden_layers,
            merge.dtype
        ),
    )];
    if let Some(tokens) = vocabulary(merge) {
        rows.push(("vocabulary".to_string(), tokens));
    }
    for (at, row) in merge.perplexities.iter().enumerate() {
        let name = if at == 0 { "perplexity" } else { "" };
        let value = format!("{:.4}  {}", row.report.perplexity, row.model);
        rows.push((name.to_string(), value));
    }
    if let Some(errors) = output_errors(merge) {
        rows.push(("output error".to_string(), errors));
    }
    if let Some(zeros) = kept_zeros(merge) {
        rows.push(("zeros kept".to_string(), zeros));
    }
    rows.extend(by_layer(merge).into_iter().map(|(name, value)| (name.to_string(), value)));
    rows
}

/// Rows of the settings on the page.
pub(super) fn settings(merge: &MergeReport, row: &mut impl FnMut(&'static str, String)) {
    facts(merge).into_iter().for_each(|(name, value)| row(name, value));
    for measured in &merge.perplexities {
        row("perplexity", format!("{}, of {}", finite(measured.report.perplexity), measured.model));
    }
    row("recipe", merge.recipe.clone());
}

/// Rows of page and card.
pub(super) fn facts(merge: &MergeReport) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    let mut row = |name, value| rows.push((name, value));
    row("method", method(merge));
    if let Some(scope) = &merge.trim_scope {
        row("trimmed together", format!("the entries of a {scope}"));
    }
    for model in &merge.models {
        let role = if model.is_base { "base model" } else { "model" };
        row(role, model.name.clone());
    }
    if let Some(tokens) = vocabulary(merge) {
        row("vocabulary", tokens);
    }
    if let Some(errors) = output_errors(merge) {
        row("output error", errors);
    }
    if let Some(zeros) = kept_zeros(merge) {
        row("zeros kept", zeros);
    }
    for (name, value) in by_layer(merge) {
        row(name, value);
    }
    row("seed of random masks", merge.seed.to_string());
    rows
}

/// A merge in one or two sentences.
pub(super) fn summary(merge: &MergeReport, model: &str) -> String {
    let mut text = format!(
        "{} of {} models into one of {} layers, with the configuration of {model}.",
        method(merge),
        merge.models.len(),
        merge.num_hidden_layers
    );
    let perplexities = merge.perplexities.iter();
    let perplexities: Vec<String> = perplexities
        .map(|row| format!("{} of {}", finite(row.report.perplexity), row.model))
        .collect();
    if !perplexities.is_empty() {
        // Writing to a String cannot fail.
        let _ = write!(text, " Perplexity: {}.", perplexities.join(", "));
    }
    text
}

/// Distances from each model, and conflicts of signs, in percent by layer; empty for a merge whose layers have one source.
fn by_layer(merge: &MergeReport) -> Vec<(&'static str, String)> {
    let percents = |of: &dyn Fn(&MergedLayer) -> Option<f64>| {
        let values = merge.layers.iter().map(of);
        let text =
            |value: Option<f64>| value.map_or("–".to_string(), |of| three_digits(100.0 * of));
        values.map(text).collect::<Vec<_>>().join(", ")
    };
    if merge.layers.is_empty() {
        return Vec::new();
    }
    let mut rows = Vec::new();
    for (at, model) in merge.models.iter().enumerate() {
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
    let columns = models.map(|model| format!("distance from {}", model.name));
    let number =
        |value: Option<f64>| value.map_or_else(|| "–".to_string(), |value| format!("{value:.6}"));
    let row = |layer: &MergedLayer| {
        let numbers = layer.distances.iter().copied().chain([layer.sign_conflicts]).map(number);
        std::iter::once(layer.layer.to_string()).chain(numbers).collect()
    };
    Table {
        columns: std::iter::once("layer".to_string())
            .chain(columns)
            .chain(["sign conflicts".to_string()])
            .collect(),
        rows: merge.flat_map(|merge| &merge.layers).map(row).collect(),
    }
}

/// What was counted in every tensor; empty for a run that did not merge.
pub(super) fn every_tensor(manifest: &Manifest) -> Table {
    let tensors = manifest.merge.iter().flat_map(|merge| &merge.tensors);
    Table {
        columns: [
            "tensor",
            "shape",
            "zeros",
            "kept entries per model",
            "output error before",
            "output error after",
        ]
        .map(String::from)
        .to_vec(),
        rows: tensors.map(tensor).collect(),
    }
}

fn tensor(of: &MergedTensor) -> Vec<String> {
    let numbers = |numbers: Vec<String>, between: &str| numbers.join(between);
    let errors = |value: fn(&MergedTensor) -> Option<f64>| {
        value(of).map_or_else(|| "–".to_string(), |error| format!("{error:.6}"))
    };
    let shape = of.shape.iter().map(usize::to_string).collect();
    let kept: Vec<String> = of.kept.iter().map(u64::to_string).collect();
    vec![
        of.name.clone(),
        numbers(shape, " × "),
        of.zeros.to_string(),
        if kept.is_empty() { "all".to_string() } else { numbers(kept, ", ") },
        errors(|of| of.output_errors?.before),
        errors(|of| Some(of.output_errors?.after)),
    ]
}

/// The method as it was defined.
fn method(merge: &MergeReport) -> String {
    format!("{} ({} semantics)", merge.method, merge.semantics)
}

fn vocabulary(merge: &MergeReport) -> Option<String> {
    let of = merge.vocabulary.as_ref()?;
    Some(format!(
        "{} tokens ({}), {} added, {} dropped",
        of.tokens, of.source, of.added, of.dropped
    ))
}

fn output_errors(merge: &MergeReport) -> Option<String> {
    let errors = merge.output_errors()?;
    let after = format!("{:.6} summed over models and linears", errors.after);
    Some(match errors.before {
        Some(before) => format!("base {before:.6}, merged {after}"),
        None => after,
    })
}

fn kept_zeros(merge: &MergeReport) -> Option<String> {
    let tensors = merge.tensors.iter().filter_map(|tensor| tensor.kept_zeros);
    let zeros = tensors.reduce(|sum, zeros| sum + zeros)?;
    Some(format!("{zeros} weights that are zero in every model"))
}
