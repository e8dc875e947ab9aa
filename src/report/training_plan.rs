//! The table of `prune plan --recover`.

use serde::Serialize;

use super::format::{Table, millions};
use super::plan;
use crate::bytes::ByteSize;
use crate::run::Phase;

/// A training of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainingRow {
    /// The model's name.
    pub model: String,
    /// The way of `--how`.
    pub how: &'static str,
    /// The name of `--optim`.
    pub optimizer: &'static str,
    /// The format of `--base-quant`; `None` for the stored weights.
    pub base_quant: Option<&'static str>,
    /// Trained parameters.
    pub trained: u64,
    /// The peak with enough memory for all hidden states, and no layer that stays in memory.
    pub peak: ByteSize,
    /// The phase of this peak.
    pub peak_phase: Option<Phase>,
    /// The least memory that works.
    pub least: ByteSize,
    /// The estimated time of the default steps.
    pub seconds: f64,
    /// Bytes of files in the offload folder, but for hidden states.
    pub files: ByteSize,
}

/// The table, in lines of `columns` or in Markdown; ends in a newline.
pub fn table(rows: &[TrainingRow], columns: Option<usize>) -> String {
    let records = rows.iter().map(|row| {
        [
            ("model", row.model.clone()),
            ("--how", row.how.to_string()),
            ("--optim", row.optimizer.to_string()),
            ("--base-quant", row.base_quant.unwrap_or("-").to_string()),
            ("trained parameters", millions(row.trained)),
            ("memory", row.peak.to_string()),
            ("peak in", row.peak_phase.map_or_else(String::new, |phase| phase.to_string())),
            ("least memory", row.least.to_string()),
            ("files", row.files.to_string()),
            ("time", plan::duration(row.seconds)),
        ]
    });
    Table::of(records).shown(columns)
}
