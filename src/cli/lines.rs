//! Lines on standard error: the texts of events, and their way out.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use super::plain_text::visible;
use super::terminal;
use super::wrap::wrapped;
use crate::run::manifest::MatrixReport;

/// Linears between two lines of a merge.
const MERGED_LINES: usize = 10;
/// Seconds from which on a time is worth a line.
const LEAST_SECONDS: f64 = 1.0;

/// Writes a line to standard error. Its reader may have left (`2> >(head -1)`), which must not end a run of hours.
pub(super) fn print_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", visible(text));
}

/// Writes words to standard error. A terminal gets them broken between words.
pub(super) fn print_words(text: &str) {
    match std::io::stderr().is_terminal() {
        true => print_line(&wrapped(text, terminal::columns().into())),
        false => print_line(text),
    }
}

/// A layer that is done; `None` for a layer without zeros that took no time.
pub(super) fn layer(
    layer: usize,
    sparsity: f64,
    elapsed: Duration,
    cell: Option<&str>,
) -> Option<String> {
    let seconds = elapsed.as_secs_f64();
    let sparsity = (sparsity > 0.0).then(|| format!(" sparsity {sparsity:.6}"));
    let is_told = sparsity.is_some() || seconds >= LEAST_SECONDS;
    let cell = cell.map_or_else(String::new, |name| format!(", {name}"));
    let sparsity = sparsity.unwrap_or_default();
    is_told.then(|| format!("layer {layer}{sparsity} ({seconds:.1} s){cell}"))
}

/// The place of a merge among its linears; `None` between two lines.
pub(super) fn merged(name: &str, [done, of]: [usize; 2], seconds_left: f64) -> Option<String> {
    let left = match seconds_left >= LEAST_SECONDS {
        true => format!(" | ETA {seconds_left:.0}s"),
        false => String::new(),
    };
    let is_told = done % MERGED_LINES == 0 || done == of;
    is_told.then(|| format!("[{done}/{of}] {name}{left}"))
}

/// A matrix that is pruned.
pub(super) fn pruned(matrix: &MatrixReport) -> String {
    let weights = matrix.shape[0] * matrix.shape[1];
    let mut text = format!(
        "  {} sparsity {:.6} ({} of {weights})",
        matrix.name,
        matrix.zeros as f64 / weights as f64,
        matrix.zeros
    );
    if let Some(error) = matrix.relative_output_error {
        text += &format!(", output error {error:.4}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_without_content_are_left_out() {
        let short = Duration::from_millis(40);
        assert_eq!(
            layer(3, 0.5, short, None).as_deref(),
            Some("layer 3 sparsity 0.500000 (0.0 s)")
        );
        assert_eq!(layer(3, 0.0, short, None), None);
        let long = layer(3, 0.0, Duration::from_secs(9), None);
        assert_eq!(long.as_deref(), Some("layer 3 (9.0 s)"), "a dense layer in training");
        let of_cell = layer(3, 0.5, short, Some("wanda-50-seed0"));
        assert_eq!(of_cell.as_deref(), Some("layer 3 sparsity 0.500000 (0.0 s), wanda-50-seed0"));
        assert_eq!(merged("q", [10, 35], 0.3).as_deref(), Some("[10/35] q"));
        assert_eq!(merged("q", [10, 35], 3.2).as_deref(), Some("[10/35] q | ETA 3s"));
        assert_eq!(merged("q", [35, 35], 0.0).as_deref(), Some("[35/35] q"));
        assert_eq!(merged("q", [11, 35], 3.2), None);
    }
}
