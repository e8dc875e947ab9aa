//! The verification of a written model, as the record has it.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The extent of the checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum VerifyLevel {
    /// Hashes, zeros, N:M groups
    #[default]
    Quick,
    /// Also every kept weight against the source
    // Only for methods that do not change the weights they keep. Reads the rewritten tensors of the source once more.
    Full,
}

/// A finished file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifiedFile {
    /// Its name in the output folder.
    pub file: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// SHA-256 of the whole file, in hex.
    pub sha256: String,
}

/// The zeros counted in a matrix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatrixZeros {
    /// The tensor's name.
    pub name: String,
    /// Elements equal to 0.
    pub zeros: u64,
    /// All its elements.
    pub elements: u64,
}

/// The report for the manifest; it exists only after every check passed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// The extent of the checks.
    pub level: VerifyLevel,
    /// The weight files, in the order of the source's.
    pub files: Vec<VerifiedFile>,
    /// Tensors whose hash was compared, which are all tensors.
    pub tensors_checked: usize,
    /// Tensors that the run wrote.
    pub tensors_rewritten: usize,
    /// Tensors copied from the source.
    pub tensors_copied: usize,
    /// A row per expected matrix, in the order of the expected matrices.
    pub zeros: Vec<MatrixZeros>,
    /// Checked N:M groups of all matrices.
    pub groups_checked: u64,
}
