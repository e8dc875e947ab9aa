//! [`Card`]: the model card, `README.md` beside the weights of every model that this program writes, as the hub shows it.

use std::fmt::Write as _;

use super::card_tasks;
use super::format::finite;
use super::front_matter::{FrontMatter, code, entry_of, list_of};
use crate::failure::printable;
use crate::run::TextProtocol;
use crate::run::command_line::quoted;
use crate::run::manifest::PerplexityReport;
use crate::run::tasks::TaskResults;

/// The beginning of the line by which a card of this program is known.
const MARK: &str = "<!-- This card was written by prune";

/// Keys that are taken over from the source's card, as they are.
const INHERITED: [&str; 4] = ["license", "license_name", "license_link", "language"];

/// A card, not yet written. Texts are Markdown except where plain text is named.
#[derive(Debug, Clone, Default)]
pub struct Card {
    /// A name for the model, from [`hub_name`].
    pub name: String,
    /// The change in a sentence.
    pub lead: String,
    /// The models on the hub that it was made from, as plain text.
    pub base_models: Vec<String>,
    /// The hub's word for the change: `merge`, `quantized` or `finetune`.
    pub relation: Option<&'static str>,
    /// Tags, as plain text.
    pub tags: Vec<String>,
    /// The source.
    pub source: CardSource,
    /// Names and values of a table.
    pub facts: Vec<(&'static str, String)>,
    /// Names of models, and their perplexities.
    pub perplexities: Vec<(String, PerplexityReport)>,
    /// The text of the perplexities.
    pub measured_on: Option<TextProtocol>,
    /// The accuracies of tasks.
    pub tasks: TaskResults,
    /// Paragraphs after the table.
    pub notes: Vec<String>,
    /// The command that repeats the run, as plain text.
    pub command: Vec<String>,
}

/// Facts about the source of a model that the record of the run does not have, as plain text.
#[derive(Debug, Clone, Default)]
pub struct CardSource {
    /// The front matter of the source's card.
    pub front_matter: FrontMatter,
    /// The name of the source's card beside this card; `None` if the source has no card.
    pub kept_as: Option<String>,
    /// The repositories on the hub of the texts that the weights depend on.
    pub datasets: Vec<String>,
    /// The class of transformers that loads the model, where it is not `AutoModelForCausalLM`.
    pub class: Option<String>,
}

impl CardSource {
    /// The nearest model on the hub: the source's id, else the base model that its card names.
    pub fn base_models(&self, id: Option<&str>) -> Vec<String> {
        match id {
            Some(id) => vec![id.to_string()],
            None => self.front_matter.get("base_model").to_vec(),
        }
    }
}

/// Returns whether this program wrote a card, from its beginning.
pub fn is_written_by_us(card: &[u8]) -> bool {
    card.windows(MARK.len()).any(|part| part == MARK.as_bytes())
}

/// Returns a name of at most 90 of the characters that names on the hub have.
pub fn hub_name(text: &str) -> String {
    let mut name = String::new();
    for c in text.chars() {
        let c = if c.is_ascii_alphanumeric() || "._".contains(c) { c } else { '-' };
        // The hub refuses `--` and `..`.
        if c.is_ascii_alphanumeric() || !name.ends_with(c) {
            name.push(c);
        }
    }
    let name: String = name.trim_matches(['-', '.']).chars().take(90).collect();
    name.trim_end_matches(['-', '.']).to_string()
}

impl Card {
    /// The card as Markdown.
    pub fn text(&self) -> String {
        let mut text = self.front_matter();
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\n{MARK} {}. -->\n\n# {}\n\n{}\n\n| | |\n| --- | --- |\n",
            env!("CARGO_PKG_VERSION"),
            self.name,
            self.lead
        );
        for (name, value) in &self.facts {
            let _ = writeln!(text, "| {name} | {value} |");
        }
        let _ = writeln!(text, "| Program | prune {} |", env!("CARGO_PKG_VERSION"));
        for note in &self.notes {
            let _ = write!(text, "\n{note}\n");
        }
        text += "\n## Perplexity\n\n";
        text += &self.perplexity();
        text += &card_tasks::section(&self.tasks);
        let _ = write!(
            text,
            "\n## Reproduce\n\n```sh\n{}\n```\n\nPaths are reduced to their last component.\n\n\
             ## Load\n\n```python\nfrom transformers import {class}, AutoTokenizer\n\
             model = {class}.from_pretrained(\"YOUR_NAME/{name}\")\n\
             tokenizer = AutoTokenizer.from_pretrained(\"YOUR_NAME/{name}\")\n```\n\n## Licence\n\n",
            printable(&quoted(&self.command)),
            name = self.name,
            class = self.source.class.as_deref().unwrap_or("AutoModelForCausalLM"),
        );
        text += match self.source.front_matter.get("license") {
            [] => {
                "The licence of the source is not known to this card. The terms of the source apply all the same."
            }
            _ => "The licence is that of the source.",
        };
        if let Some(kept) = &self.source.kept_as {
            let _ = write!(text, " The source's card is {}.", code(kept));
        }
        text + "\n"
    }

    fn front_matter(&self) -> String {
        let mut text = "---\n".to_string();
        for key in INHERITED {
            text += &entry_of(key, self.source.front_matter.get(key));
        }
        text += &entry_of("base_model", &self.base_models);
        if let Some(relation) = self.relation.filter(|_| !self.base_models.is_empty()) {
            text += &entry_of("base_model_relation", &[relation.to_string()]);
        }
        text += &entry_of("library_name", &["transformers".to_string()]);
        text += &entry_of("pipeline_tag", &["text-generation".to_string()]);
        text += &list_of("tags", &self.tags);
        text += &list_of("datasets", &self.source.datasets);
        text += &card_tasks::model_index(&self.name, &self.tasks);
        text + "---\n"
    }

    fn perplexity(&self) -> String {
        if self.perplexities.is_empty() {
            return "Not measured.\n".to_string();
        }
        let mut text = "| Model | Perplexity |\n| --- | --- |\n".to_string();
        for (model, report) in &self.perplexities {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "| {model} | {} |", finite(report.perplexity));
        }
        if let Some(of) = &self.measured_on {
            let (name, convention) = (text_name(of), code(&of.convention));
            let TextProtocol { windows, seqlen, tokens_used, .. } = of;
            text += &format!(
                "\nMeasured on {name}: {windows} windows of {seqlen} tokens, {tokens_used} tokens in all; {convention}.\n"
            );
        }
        text
    }
}

/// A text's kind and file.
pub(super) fn text_name(text: &TextProtocol) -> String {
    format!("{} ({})", code(&text.dataset), code(&text.path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_the_hub_takes() {
        assert_eq!(hub_name("Llama-2-7b-hf-wanda-0.5"), "Llama-2-7b-hf-wanda-0.5");
        assert_eq!(hub_name("..my model--é|`-2:4"), "my-model-2-4");
        assert_eq!(hub_name(&"x".repeat(300)).len(), 90);
    }

    #[test]
    fn hostile_names_stay_values_of_the_front_matter() {
        let hostile = "a\"b'\n---\nlicense: mit\n# \u{2028}: [x]";
        let report = PerplexityReport {
            perplexity: f64::NAN,
            mean_loss: f64::NAN,
            standard_error: 0.0,
            windows: 1,
            seqlen: 8,
        };
        let card = Card {
            name: hub_name(hostile),
            lead: code(hostile),
            base_models: vec![hostile.to_string(), "o/m".to_string()],
            relation: Some("merge"),
            tags: vec![hostile.to_string()],
            source: CardSource {
                front_matter: FrontMatter::of(b"---\nlanguage: \"a\\nb\"\n---\n"),
                kept_as: Some(hostile.to_string()),
                datasets: vec![hostile.to_string()],
                class: None,
            },
            facts: vec![("Model", code(hostile))],
            perplexities: vec![(code(hostile), report)],
            measured_on: None,
            notes: Vec::new(),
            command: vec!["prune".to_string(), hostile.to_string()],
            tasks: TaskResults::default(),
        };
        let text = card.text();
        assert_eq!(text.lines().filter(|line| *line == "---").count(), 2, "{text}");
        assert!(!text.contains("\nlicense: mit"), "{text}");
        let head = FrontMatter::of(text.as_bytes());
        assert_eq!(head.get("base_model"), [hostile, "o/m"]);
        assert_eq!(head.get("base_model_relation"), ["merge"]);
        assert_eq!(
            (head.get("tags"), head.get("datasets")),
            (&[hostile.to_string()][..], &[hostile.to_string()][..])
        );
        assert_eq!(head.get("language"), ["a\nb"]);
        assert!(head.get("license").is_empty() && text.contains("is not known"));
        assert!(text.contains("| not finite |") && is_written_by_us(text.as_bytes()));
    }
}
