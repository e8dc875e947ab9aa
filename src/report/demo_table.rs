//! The result of `prune demo`, as records and as a table of at most 80 columns.

use std::fmt::Write as _;

use serde::Serialize;

/// The most columns of a line.
const COLUMNS: usize = 80;
/// The space before a sentence.
const INDENT: &str = "    ";

/// The whole demo.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DemoTable {
    /// Weights of the model.
    pub parameters: u64,
    /// The beginning of the sentence that every model continues.
    pub prompt: String,
    /// The dense model first, then the pruned and the recovered models.
    pub rows: Vec<DemoRow>,
}

/// A model in the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DemoRow {
    /// `dense`, `wanda 60 %`, `wanda 60 %, recovered`, `magnitude 2:4`.
    pub name: String,
    /// The share of zeros in the decoder's matrices.
    pub sparsity: f64,
    /// Perplexity on the test stories.
    pub perplexity: f64,
    /// The model's words after the prompt, to the end of the sentence.
    pub continuation: String,
}

impl DemoTable {
    /// The table, ending in a newline.
    pub fn text(&self) -> String {
        let dense = self.rows.first().map_or(f64::NAN, |row| row.perplexity);
        let mut text = String::new();
        // Writing to a String cannot fail.
        for line in wrapped(&format!("Each model continues \"{}\"", self.prompt), COLUMNS) {
            let _ = writeln!(text, "{line}");
        }
        let _ = writeln!(
            text,
            "\n{:<22}{:>8}{:>13}{:>12}",
            "model", "zeros", "perplexity", "times dense"
        );
        for row in &self.rows {
            let (zeros, perplexity) = (100.0 * row.sparsity, row.perplexity);
            let ratio = perplexity / dense;
            let _ = writeln!(text, "{:<22}{zeros:>6.1} %{perplexity:>13.2}{ratio:>12.2}", row.name);
            let width = COLUMNS - INDENT.len();
            for line in wrapped(&format!("... {}", row.continuation), width) {
                let _ = writeln!(text, "{INDENT}{line}");
            }
        }
        text
    }
}

/// Breaks a sentence at spaces; longer words stay whole. Control characters become U+FFFD: a badly pruned model may write any text.
fn wrapped(sentence: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in sentence.split(' ') {
        let word: String =
            word.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        let line = lines.last_mut().expect("there is always a line");
        if line.is_empty() {
            *line = word;
        } else if line.chars().count() + 1 + word.chars().count() <= columns {
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
        let row = |name: &str, sparsity, perplexity, continuation: &str| DemoRow {
            name: name.into(),
            sparsity,
            perplexity,
            continuation: continuation.into(),
        };
        let table = DemoTable {
            parameters: 10,
            prompt: format!("One {}", "day ".repeat(20)),
            rows: vec![
                row("dense", 0.0, 2.0, "One day."),
                row("magnitude 60 %", 0.6, 12_345.678, &format!("One\nday {}", "word ".repeat(20))),
            ],
        };
        let expected = format!(
            "\
Each model continues \"One {}day
{}\"

model                    zeros   perplexity times dense
dense                    0.0 %         2.00        1.00
    ... One day.
magnitude 60 %          60.0 %     12345.68     6172.84
    ... One\u{fffd}day {}word
    {}
",
            "day ".repeat(12),
            "day ".repeat(7),
            "word ".repeat(12),
            "word ".repeat(7)
        );
        assert_eq!(table.text(), expected);
        assert!(expected.lines().all(|line| line.chars().count() <= COLUMNS));
    }
}
