//! The table of `prune plan --generate`.

use serde::Serialize;

use super::format::Table;
use crate::bytes::ByteSize;

/// A model whose weights are in memory in a form.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GenerationRow {
    /// The model's name.
    pub model: String,
    /// The value of `--weights`.
    pub form: &'static str,
    /// The share of zeros in the decoder's matrices.
    pub zeros: f64,
    /// Layers and head, which every token reads.
    pub weights: ByteSize,
    /// Keys and values of all tokens.
    pub kv_cache: ByteSize,
    /// The memory with all layers in it.
    pub peak: ByteSize,
    /// Layers that do not fit and are read from disk for every token; `None` where not even a single layer fits.
    pub streamed: Option<usize>,
}

/// The table, in lines of `columns` or in Markdown; ends in a newline.
pub fn table(rows: &[GenerationRow], columns: Option<usize>) -> String {
    let records = rows.iter().map(|row| {
        [
            ("model", row.model.clone()),
            ("--weights", row.form.to_string()),
            ("zeros", format!("{:.0} %", 100.0 * row.zeros)),
            ("read per token", row.weights.to_string()),
            ("keys and values", row.kv_cache.to_string()),
            ("memory", row.peak.to_string()),
            (
                "here",
                match row.streamed {
                    Some(0) => "fits".to_string(),
                    Some(layers) => format!("{layers} layers from disk"),
                    None => "does not fit".to_string(),
                },
            ),
        ]
    });
    Table::of(records).shown(columns)
}
