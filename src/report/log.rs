//! `log_<method>.txt`: the two tab-separated lines of the Python original, for scripts that read them.

use crate::run::Manifest;

/// The file's name for a method: `log_wanda.txt`.
pub fn file_name(method: &str) -> String {
    format!("log_{method}.txt")
}

/// Returns header and values with four decimals; `nan` without a measured perplexity.
pub fn text(manifest: &Manifest) -> Option<String> {
    let method = &manifest.pruning.as_ref()?.method;
    let sparsity = manifest.sparsity?.ratio;
    let perplexity = manifest
        .perplexity
        .pruned
        .map_or_else(|| "nan".to_string(), |report| format!("{:.4}", report.perplexity));
    Some(format!("method\tactual_sparsity\tppl_test\n{method}\t{sparsity:.4}\t{perplexity}\n"))
}
