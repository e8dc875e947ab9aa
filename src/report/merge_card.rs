//! The card of a merged model: the page that the hub shows of its folder.

use std::fmt::Write as _;

use crate::run::merging::MergeReport;

/// Returns `README.md` of a merged model, from a record without paths.
pub fn text(report: &MergeReport) -> String {
    let names: Vec<&str> = report.models.iter().map(|model| model.name.as_str()).collect();
    let mut card = String::from("---\n");
    let on_hub = |name: &&&str| name.split('+').all(|part| part.contains('/'));
    let linked: Vec<&&str> = names.iter().filter(on_hub).collect();
    if !linked.is_empty() {
        card += "base_model:\n";
        for name in linked {
            for part in name.split('+') {
                // Writing to a String cannot fail.
                let _ = writeln!(card, "- {part}");
            }
        }
        card += "base_model_relation: merge\n";
    }
    card += "tags:\n- merge\n---\n\n# Merged model\n\n";
    let _ = writeln!(
        card,
        "Merged by `prune merge` {} with the method `{}` ({} semantics), {} layers, {}.\n",
        env!("CARGO_PKG_VERSION"),
        report.method,
        report.semantics,
        report.num_hidden_layers,
        report.dtype
    );
    card += "## Models\n\n";
    for model in &report.models {
        let role = if model.is_base { " (base)" } else { "" };
        let _ = writeln!(card, "- `{}`{role}", model.name);
    }
    let _ = write!(
        card,
        "\n## Recipe\n\nThe same recipe is in `merge_config.yml`, and per-tensor counts are in `merging.json`.\n\n```yaml\n{}\n```\n",
        report.recipe.trim_end()
    );
    card
}
