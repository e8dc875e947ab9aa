//! `pruning.json`: the record of a pruning run that is published with its model. docs/publishing.md documents the schema.
//!
//! It holds facts about the result. Times, memory, devices and places stay in `run.json`.

use serde::{Deserialize, Serialize};

use super::layer_drop::LayerDropReport;
use super::manifest::{
    MatrixReport, Perplexities, PruningReport, SparsityReport, TextProtocol, name_of,
};
use super::tasks::TaskResults;
use super::width_drop::WidthDropReport;
use crate::bytes::ByteSize;

/// The name of the file in the model's folder. Every kind of change to a model has a file of its own.
pub const PRUNING_FILE: &str = "pruning.json";

/// The version of the schema. It rises when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// The record. A path in it is reduced to its last component.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PruningRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The program's version.
    pub prune_version: String,
    /// The command that repeats the run, made from the settings that decide the result.
    pub command: Vec<String>,
    /// The checkpoint that was pruned.
    pub source: PrunedSource,
    /// The dtype of the decoder's matrices, in the source and in this model.
    pub dtype: String,
    /// The arithmetic of the forward pass. Mask hashes are comparable only between equal arithmetic.
    pub arithmetic: ForwardArithmetic,
    /// The layers that were dropped, with their scores; absent without `--drop-layers`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_drop: Option<LayerDropReport>,
    /// The width that was dropped; absent without `--drop-width`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width_drop: Option<WidthDropReport>,
    /// The pruning settings, as resolved.
    pub pruning: PruningReport,
    /// The calibration text and samples; absent for a method without calibration.
    pub calibration: Option<TextProtocol>,
    /// Sparsity over all decoder linears, counted from the weights.
    pub sparsity: SparsityReport,
    /// The perplexities measured.
    pub perplexity: Perplexities,
    /// The accuracies of tasks; absent without tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskResults>,
    /// The evaluation text and windows; absent without evaluation.
    pub evaluation: Option<TextProtocol>,
    /// Every decoder linear, in order.
    pub matrices: Vec<MatrixReport>,
}

/// The checkpoint that was pruned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrunedSource {
    /// The name of its folder, or of its repository on the hub.
    pub name: String,
    /// `owner/name` on the hub; absent for a local folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The commit of the revision; absent for a local folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The model on the hub that the source was made from, by the source's own `pruning.json`; absent without that file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_from: Option<String>,
    /// Hash of the headers of all shards.
    pub identity: String,
    /// Weights in all tensors.
    pub parameters: u64,
    /// Bytes in all tensors.
    pub bytes: ByteSize,
}

/// The part of the arithmetic that changes results.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardArithmetic {
    /// The dtype of the forward pass.
    pub dtype: String,
    /// The kernel of the products.
    pub kernel: String,
}

impl PruningRecord {
    /// Reads a record from a file's bytes.
    ///
    /// # Errors
    /// Fails with a short sentence for bytes that are no record, and for a record of a later version.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        /// Characters of the reason, which may quote the file.
        const LONGEST: usize = 200;
        /// The part that all versions have.
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        if let Ok(Version { schema }) = serde_json::from_slice(bytes)
            && schema > SCHEMA
        {
            return Err(format!("it has schema {schema}, and this program reads up to {SCHEMA}"));
        }
        serde_json::from_slice(bytes)
            .map_err(|error| error.to_string().chars().take(LONGEST).collect())
    }

    /// Returns whether the run removed weights, and did not only drop layers or width.
    pub fn removes_weights(&self) -> bool {
        let is_smaller = self.layer_drop.is_some() || self.width_drop.is_some();
        !is_smaller || !self.pruning.prunes_nothing()
    }

    /// The nearest model on the hub that this model was made from.
    pub fn base_model(&self) -> Option<&str> {
        self.source.id.as_deref().or(self.source.made_from.as_deref())
    }
}

impl TextProtocol {
    /// The protocol without folders and without the place of every sample; the hash of the tokens stands for these.
    #[must_use]
    pub fn published(&self) -> Self {
        Self { path: name_of(&self.path), starts: Vec::new(), documents: None, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_versions_and_other_files_are_refused_with_a_sentence() {
        let refused = |text: &str| PruningRecord::parse(text.as_bytes()).unwrap_err();
        assert_eq!(refused(r#"{"schema": 2}"#), "it has schema 2, and this program reads up to 1");
        for other in ["", "[]", r#"{"schema": 1}"#, "\u{0}", r#"{"schema": -1}"#] {
            assert!(!refused(other).is_empty());
        }
        let long = format!("{{\"schema\": \"{}\"}}", "x".repeat(1000));
        assert_eq!(refused(&long).len(), 200);
        let deep = format!("{{\"schema\": 1, \"matrices\": {}", "[".repeat(100_000));
        assert!(!refused(&deep).is_empty());
    }

    #[test]
    fn a_published_protocol_has_no_folders() {
        let protocol = TextProtocol {
            path: "/home/me/data, old/a.txt".to_string(),
            starts: vec![1],
            documents: Some(vec![2]),
            seqlen: 8,
            ..TextProtocol::default()
        };
        let published = protocol.published();
        assert_eq!((published.path.as_str(), published.seqlen), ("a.txt", 8));
        assert!(published.starts.is_empty() && published.documents.is_none());
    }
}
