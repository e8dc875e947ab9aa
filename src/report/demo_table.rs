//! What `prune demo` found, as plain records and as a table of at most 80 columns.

use std::fmt::Write as _;

use serde::Serialize;

/// The columns a line may have.
const COLUMNS: usize = 80;
/// What stands before a sentence.
const INDENT: &str = "    ";

/// The whole demo.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DemoTable {
    /// Weights of the model.
    pub parameters: u64,
    /// What every sentence begins with.
    pub prompt: String,
    /// The dense model first, then the pruned ones.
    pub rows: Vec<DemoRow>,
}

/// One model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DemoRow {
    /// `dense`, `wanda 60 %`, `magnitude 2:4`.
    pub name: String,
    /// The share of zeros in the decoder's matrices.
    pub sparsity: f64,
    /// On the test stories.
    pub perplexity: f64,
    /// The sentence the model writes, prompt included.
    pub sentence: String,
}

impl DemoTable {
    /// The table, ending in a newline.
    pub fn text(&self) -> String {
        let dense = self.rows.first().map_or(f64::NAN, |row| row.perplexity);
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<16}{:>8}{:>13}{:>12}",
            "model", "zeros", "perplexity", "times dense"
        );
        for row in &self.rows {
            let _ = writeln!(
                text,
                "{:<16}{:>6.1} %{:>13.2}{:>12.2}",
                row.name,
                100.0 * row.sparsity,
                row.perplexity,
                row.perplexity / dense
            );
            for line in wrapped(&row.sentence) {
                let _ = writeln!(text, "{INDENT}{line}");
            }
        }
        text
    }
}

/// Breaks a sentence at spaces. A word longer than a line keeps its length; what would move the cursor is shown as
/// U+FFFD, since a badly pruned model may write anything.
fn wrapped(sentence: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in sentence.split(' ') {
        let word: String = word
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect();
        let line = lines.last_mut().expect("there is always a line");
        if line.is_empty() {
            *line = word;
        } else if INDENT.len() + line.chars().count() + 1 + word.chars().count() <= COLUMNS {
            line.push(' ');
            line.push_str(&word);
        } else {
            lines.push(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_sentences_stand_in_at_most_eighty_columns() {
        let row = |name: &str, sparsity, perplexity, sentence: &str| DemoRow {
            name: name.into(),
            sparsity,
            perplexity,
            sentence: sentence.into(),
        };
        let table = DemoTable {
            parameters: 10,
            prompt: "One".into(),
            rows: vec![
                row("dense", 0.0, 2.0, "One day."),
                row(
                    "magnitude 60 %",
                    0.6,
                    12_345.678,
                    &format!("One\nday {}", "word ".repeat(20)),
                ),
            ],
        };
        let expected = format!(
            "\
model              zeros   perplexity times dense
dense              0.0 %         2.00        1.00
    One day.
magnitude 60 %    60.0 %     12345.68     6172.84
    One\u{fffd}day {}word
    {}
",
            "word ".repeat(12),
            "word ".repeat(7)
        );
        assert_eq!(table.text(), expected);
        assert!(expected.lines().all(|line| line.chars().count() <= COLUMNS));
    }
}
