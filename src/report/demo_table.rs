//! The result of `prune demo`, as records and as a table of at most 80 columns.

use std::fmt::Write as _;

use serde::Serialize;

use super::format::three_digits;
use crate::bytes::ByteSize;

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
    /// A pruned model with and without its zeros.
    pub packing: DemoPacking,
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

/// A pruned model with and without its zeros: its files, and decoding.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DemoPacking {
    /// The name of its row.
    pub name: String,
    /// The bytes of its safetensors.
    pub dense_bytes: ByteSize,
    /// The bytes of its safetensors after `prune pack`.
    pub packed_bytes: ByteSize,
    /// The bytes of weights that a token reads, zeros included.
    pub dense_bytes_per_token: ByteSize,
    /// The bytes of weights that a token reads where they are compact in memory.
    pub compact_bytes_per_token: ByteSize,
    /// Tokens per second of decoding with dense weights.
    pub dense_tokens_per_second: f64,
    /// Tokens per second of decoding with compact weights.
    pub compact_tokens_per_second: f64,
    /// The processor's largest cache; absent where the system does not report it.
    pub processor_cache: Option<ByteSize>,
}

impl DemoPacking {
    /// The block under the table, ending in a newline.
    fn text(&self) -> String {
        let row = |name: &str, [dense, packed]: [String; 2], ratio: f64| {
            format!("{name:<32}{dense:>12}{packed:>12}{ratio:>13.2}\n")
        };
        let bytes = |name: &str, dense: ByteSize, packed: ByteSize| {
            row(name, [dense, packed].map(|bytes| bytes.to_string()), quotient(packed, dense))
        };
        let speeds = [self.dense_tokens_per_second, self.compact_tokens_per_second];
        let mut text = format!(
            "{:<32}{:>12}{:>12}{:>13}\n",
            format!("{} without zeros", self.name),
            "dense",
            "packed",
            "times dense"
        );
        text += &bytes("safetensors", self.dense_bytes, self.packed_bytes);
        text += &bytes(
            "weights that a token reads",
            self.dense_bytes_per_token,
            self.compact_bytes_per_token,
        );
        text += &row("tokens/s of decoding", speeds.map(three_digits), self.gain());
        for line in wrapped(&format!("{} {}", self.verdict(), self.place()), COLUMNS) {
            text += &format!("{line}\n");
        }
        text
    }

    /// The speed without zeros over the speed with zeros.
    fn gain(&self) -> f64 {
        self.compact_tokens_per_second / self.dense_tokens_per_second
    }

    /// The measured gain compared with the bytes.
    fn verdict(&self) -> &'static str {
        let gain = self.gain();
        if gain < 1.0 {
            "Fewer bytes make no faster decoding of this model here."
        } else if gain < quotient(self.dense_bytes_per_token, self.compact_bytes_per_token) {
            "Decoding is faster here, by less than the bytes say."
        } else {
            "Decoding is faster here, by what the bytes say."
        }
    }

    /// The place of the weights between two tokens.
    fn place(&self) -> String {
        let weights = self.dense_bytes_per_token;
        match self.processor_cache {
            Some(cache) if weights <= cache => format!(
                "The processor's cache of {cache} holds all weights, so few bytes come from memory."
            ),
            Some(cache) => {
                format!("The weights come from memory: the processor's cache has {cache}.")
            }
            None => {
                format!("{weights} of weights may stay in the processor's cache.")
            }
        }
    }
}

/// Bytes over bytes.
fn quotient(bytes: ByteSize, of: ByteSize) -> f64 {
    bytes.0 as f64 / of.0.max(1) as f64
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
        text + "\n" + &self.packing.text()
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

    /// A model of 3 MiB of weights that decodes 1000 tokens per second with them.
    fn packing(compact_tokens_per_second: f64, cache_mib: Option<u64>) -> DemoPacking {
        DemoPacking {
            name: "wanda 60 %".into(),
            dense_bytes: ByteSize(4 << 20),
            packed_bytes: ByteSize(2 << 20),
            dense_bytes_per_token: ByteSize(3 << 20),
            compact_bytes_per_token: ByteSize(3 << 19),
            dense_tokens_per_second: 1000.0,
            compact_tokens_per_second,
            processor_cache: cache_mib.map(|mib| ByteSize(mib << 20)),
        }
    }

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
            packing: packing(1234.0, Some(32)),
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
        let expected = format!("{expected}\n{}", table.packing.text());
        assert_eq!(table.text(), expected);
        assert!(expected.lines().all(|line| line.chars().count() <= COLUMNS));
    }

    #[test]
    fn the_words_about_speed_follow_from_the_measured_numbers() {
        assert_eq!(
            packing(1234.0, Some(32)).text(),
            "\
wanda 60 % without zeros               dense      packed  times dense
safetensors                         4.00 MiB    2.00 MiB         0.50
weights that a token reads          3.00 MiB    1.50 MiB         0.50
tokens/s of decoding                    1000        1234         1.23
Decoding is faster here, by less than the bytes say. The processor's cache of
32.00 MiB holds all weights, so few bytes come from memory.
"
        );
        let slow = packing(990.0, Some(2)).text();
        assert!(
            slow.contains("no faster decoding of this model here. The weights come from\nmemory"),
            "{slow}"
        );
        let fast = packing(2000.0, None).text();
        assert!(fast.contains("by what the bytes say. 3.00 MiB of weights may stay"), "{fast}");
        for text in [slow, fast] {
            assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        }
    }
}
