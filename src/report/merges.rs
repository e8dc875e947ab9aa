//! The parts of table and page that only merges have: models, method, perplexities, counts of every tensor.

use std::fmt::Write as _;

use super::format::{Table, finite};
use crate::run::Manifest;
use crate::run::merging::{MergeReport, MergedTensor};

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
    rows
}

/// Rows of the settings on the page.
pub(super) fn settings(merge: &MergeReport, row: &mut impl FnMut(&'static str, String)) {
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
    for measured in &merge.perplexities {
        row("perplexity", format!("{}, of {}", finite(measured.report.perplexity), measured.model));
    }
    if let Some(errors) = output_errors(merge) {
        row("output error", errors);
    }
    if let Some(zeros) = kept_zeros(merge) {
        row("zeros kept", zeros);
    }
    row("seed of random masks", merge.seed.to_string());
    row("recipe", merge.recipe.clone());
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

/// What was counted in every tensor; empty for a run that did not merge.
pub(super) fn every_tensor(manifest: &Manifest) -> Table {
    let tensors = manifest.merge.iter().flat_map(|merge| &merge.tensors);
    Table {
        columns: &[
            "tensor",
            "shape",
            "zeros",
            "kept entries per model",
            "output error before",
            "output error after",
        ],
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
