//! The table of `prune plan --recover`.

use std::fmt::Write as _;

use serde::Serialize;

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
    /// Bytes of files in the offload folder, but for hidden states.
    pub files: ByteSize,
}

/// The table in Markdown; ends in a newline.
pub fn table(rows: &[TrainingRow]) -> String {
    let mut text = String::from(
        "| model | --how | --optim | --base-quant | trained parameters | memory | in | least memory | files |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for row in rows {
        let phase = row.peak_phase.map_or_else(String::new, |phase| phase.to_string());
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {:.1} million | {} | {phase} | {} | {} |",
            row.model,
            row.how,
            row.optimizer,
            row.base_quant.unwrap_or("-"),
            row.trained as f64 / 1e6,
            row.peak,
            row.least,
            row.files,
        );
    }
    text
}
