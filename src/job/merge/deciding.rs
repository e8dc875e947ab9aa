//! Everything that decides the outcome of a merge, by name. An unfinished run is continued by the same settings only.

use std::collections::BTreeMap;

use anyhow::Result;

use super::resolved::ResolvedMerge;
use crate::job::folder::RunFolder;
use crate::job::same_run;
use crate::merging::recipe::without_folders;
use crate::settings::{MergeEval, MergeSettings};

/// The measurements of perplexity; the state of a run keeps their results.
fn evaluation_of(settings: &MergeSettings) -> String {
    if settings.eval == MergeEval::None {
        return "none".to_string();
    }
    let windows = settings.eval_windows.map_or("all".to_string(), |windows| windows.to_string());
    let dataset = settings.evaluation_text();
    let seqlen = settings.seqlen.map_or("default".to_string(), |seqlen| seqlen.to_string());
    format!("{:?}, {}, windows: {windows}, seqlen: {seqlen}", settings.eval, dataset)
}

/// Everything that decides the outcome, by name.
pub(super) fn decide(
    settings: &MergeSettings,
    merge: &ResolvedMerge,
    folder: &RunFolder,
) -> Result<BTreeMap<String, String>> {
    let fingerprints: Result<Vec<String>> =
        merge.inputs.models.iter().map(|model| model.fingerprint()).collect();
    let as_json = |value: serde_json::Value| match value {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    let named = [
        ("command", "merge".to_string()),
        ("program", format!("prune {}", env!("CARGO_PKG_VERSION"))),
        ("recipe", merge.recipe.to_yaml(without_folders)),
        ("models", fingerprints?.join(" ")),
        ("semantics", as_json(serde_json::to_value(settings.semantics)?)),
        ("trim_scope", as_json(serde_json::to_value(settings.trim_scope)?)),
        ("seed", settings.seed.to_string()),
        ("keep_zeros", settings.keep_zeros.to_string()),
        ("evaluation", evaluation_of(settings)),
        ("out_shard_size", settings.out_shard_size.0.to_string()),
        ("model folder", same_run::model_folder(folder)?),
    ];
    Ok(named.map(|(name, value)| (name.to_string(), value)).into())
}
