//! The card of a recovered model: `README.md` beside its weights, as the hub shows it.

use std::fmt::Write as _;

use super::card::{INHERITED, MARK};
use super::front_matter::{FrontMatter, code, entry_of};
use crate::run::RecoveryReport;
use crate::run::manifest::Perplexities;

/// Returns the card as Markdown.
///
/// # Arguments
/// * `model`: the name of the pruned model
/// * `source`: the front matter of its card, whose licence and base model stay
pub fn text(
    model: &str,
    (recovery, perplexity): (&RecoveryReport, &Perplexities),
    source: &FrontMatter,
) -> String {
    let mut card = "---\n".to_string();
    for key in INHERITED.into_iter().chain(["base_model"]) {
        card += &entry_of(key, source.get(key));
    }
    card += &entry_of("library_name", &["transformers".to_string()]);
    card += &entry_of("pipeline_tag", &["text-generation".to_string()]);
    let tags = ["prune", "pruned", "recovered", "sparse"].map(String::from);
    card += &entry_of("tags", &tags);
    // Writing to a String cannot fail.
    let _ = write!(
        card,
        "---\n\n{MARK} {}. -->\n\n# {}, recovered\n\nPruned weights of this model are zero. The others were trained after the pruning, \
         with `--how {}`.\n\n| | |\n| --- | --- |\n",
        env!("CARGO_PKG_VERSION"),
        code(model),
        recovery.how
    );
    for (name, value) in rows(recovery, perplexity) {
        let _ = writeln!(card, "| {name} | {value} |");
    }
    card += "\n`recovery.json` has the losses. `pruning.json`, if it is here, tells how the model was pruned; its perplexity is that before the training.\n";
    card
}

fn rows(recovery: &RecoveryReport, perplexity: &Perplexities) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("trained parameters", recovery.parameters.to_string()),
        ("matrices", recovery.target_modules.join(", ")),
    ];
    rows.extend(recovery.rank.map(|rank| ("rank", rank.to_string())));
    rows.push(("optimizer", format!("{}, rate {:.3e}", recovery.optim, recovery.rate)));
    rows.push(match recovery.steps.len() {
        0 => ("steps per layer", recovery.steps_of.to_string()),
        steps => ("steps", steps.to_string()),
    });
    rows.push(("text", format!("{}, {} tokens", recovery.text.dataset, recovery.text.tokens_used)));
    let of =
        |measured: crate::run::manifest::PerplexityReport| format!("{:.4}", measured.perplexity);
    rows.extend(perplexity.dense.map(|before| ("perplexity before", of(before))));
    rows.extend(perplexity.pruned.map(|after| ("perplexity after", of(after))));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_keeps_licence_and_base_and_names_the_training() {
        let source = FrontMatter::of(b"---\nlicense: llama2\nbase_model: a/b\ntags:\n- x\n---\n");
        let recovery =
            RecoveryReport { how: "lora".to_string(), rank: Some(8), ..RecoveryReport::default() };
        let card = text("pruned", (&recovery, &Perplexities::default()), &source);
        let head = FrontMatter::of(card.as_bytes());
        assert_eq!(head.get("license"), ["llama2"]);
        assert_eq!(head.get("base_model"), ["a/b"]);
        assert!(head.get("tags").contains(&"recovered".to_string()));
        assert!(card.contains("| rank | 8 |") && card.contains("`--how lora`"));
        assert!(super::super::card::is_written_by_us(card.as_bytes()));
    }
}
