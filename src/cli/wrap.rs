//! Lines that a terminal shows without breaking words.
//!
//! A terminal breaks a long line after any character, and the rest begins at the left like a line of its own. Here a line breaks between
//! words, and the rest is indented to the column of its value. Files and pipes get whole lines, which can be searched.

use std::borrow::Cow;

use console::measure_text_width;

/// The least width for which lines are broken here.
const LEAST_COLUMNS: usize = 30;
/// Columns of the rest of a line, at least.
const LEAST_VALUE: usize = 24;

/// The text with lines of at most `columns`, where words permit it.
pub(super) fn wrapped(text: &str, columns: usize) -> Cow<'_, str> {
    let is_long = |line: &str| measure_text_width(line) > columns;
    if columns < LEAST_COLUMNS || !text.lines().any(is_long) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 64);
    for line in text.split_inclusive('\n') {
        let (line, end) = match line.strip_suffix('\n') {
            Some(line) => (line, "\n"),
            None => (line, ""),
        };
        if is_long(line) && !is_command(line) {
            shown += &broken(line, columns);
        } else {
            shown += line;
        }
        shown += end;
    }
    Cow::Owned(shown)
}

/// Returns true for a line to copy.
fn is_command(line: &str) -> bool {
    line.trim_start().starts_with("prune ")
}

/// The line with line feeds between words.
fn broken(line: &str, columns: usize) -> String {
    let hang = hang(line, columns);
    let mut text = String::new();
    let mut used = 0;
    for piece in pieces(line) {
        let width = measure_text_width(piece);
        if used > hang && used + measure_text_width(piece.trim_end()) > columns {
            text.truncate(text.trim_end().len());
            text.push('\n');
            text.push_str(&" ".repeat(hang));
            used = hang;
        }
        text.push_str(piece);
        used += width;
    }
    text.truncate(text.trim_end().len());
    text
}

/// The column at which the rest of a line begins: below the last column of its table that leaves room, else two more than its own
/// indentation.
fn hang(line: &str, columns: usize) -> usize {
    let own = line.len() - line.trim_start().len();
    let most = columns.saturating_sub(LEAST_VALUE);
    let mut hang = own + 2;
    let mut spaces = 0;
    for (column, character) in line.chars().enumerate() {
        if character == ' ' {
            spaces += 1;
            continue;
        }
        if spaces >= 2 && column > own && column <= most {
            hang = column;
        }
        spaces = 0;
    }
    hang
}

/// Words with the spaces after them. What stands between backticks is a single word, for it is typed or looked for as it is.
fn pieces(line: &str) -> Vec<&str> {
    let indented = line.len() - line.trim_start().len();
    let mut pieces = Vec::new();
    let (mut start, mut is_code, mut was_space) = (0, false, false);
    for (at, character) in line.char_indices().skip_while(|(at, _)| *at < indented) {
        if was_space && character != ' ' && !is_code {
            pieces.push(&line[start..at]);
            start = at;
        }
        if character == '`' {
            is_code = !is_code;
        }
        was_space = character == ' ';
    }
    pieces.push(&line[start..]);
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_breaks_between_words_below_its_value() {
        let line = "calibration  c4: 128 samples of 2048 tokens, seed 0, in `a folder with spaces`";
        let expected = "\
calibration  c4: 128 samples of 2048
             tokens, seed 0, in
             `a folder with spaces`";
        assert_eq!(wrapped(line, 40), expected);
        assert_eq!(wrapped(line, 80), line);
        let row = "  read            1.2 s  peak 45.00 MiB anonymous of everything";
        assert_eq!(
            wrapped(row, 50),
            "  read            1.2 s  peak 45.00 MiB anonymous\n                         of everything"
        );
    }

    #[test]
    fn a_sentence_breaks_with_an_indentation_and_other_lines_stay() {
        let text = "short\n\nwarning: nothing will be saved; name a folder\n  prune eval a-very-long-folder --json --quiet\n";
        let expected = "short\n\nwarning: nothing will be saved;\n  name a folder\n  prune eval a-very-long-folder --json --quiet\n";
        assert_eq!(wrapped(text, 34), expected);
        let word = "w".repeat(50);
        assert_eq!(wrapped(&word, 40), word, "a word is never broken");
    }
}
