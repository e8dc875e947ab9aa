//! The rows of a divergence in the table at the end of a run, and in the pages of reports.

use super::format::finite;
use crate::run::Manifest;
use crate::run::divergence::{DivergenceReport, Estimate, KlPositions};

/// Names and values of the rows.
pub(super) fn rows(manifest: &Manifest) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    if let Some(against) = &manifest.against {
        let perplexity = against.perplexity.map(|of| finite(of.perplexity));
        let perplexity = perplexity.map_or(String::new(), |of| format!(", perplexity {of}"));
        rows.push(("against", format!("{}{perplexity}", against.model.path)));
    }
    let Some(of) = &manifest.perplexity.divergence else {
        return rows;
    };
    let positions = match of.which {
        KlPositions::All => format!("{} positions", of.positions),
        KlPositions::SecondHalf => format!("{} positions, second halves", of.positions),
    };
    rows.push(("KL from dense", format!("{} nat on average ({positions})", mean(of))));
    let quantiles =
        [("median", of.kl_median), ("90 %", of.kl_90), ("95 %", of.kl_95), ("99 %", of.kl_99)];
    let quantiles = quantiles.map(|(name, value)| format!("{name} {value:.6}"));
    rows.push(("", format!("{}, max {:.6}", quantiles.join(", "), of.kl_max)));
    let percent = |of: Estimate| format!("{:.3} ± {:.3} %", 100.0 * of.value, 100.0 * of.error);
    rows.push(("same top token", percent(of.same_top)));
    let rms = percent(of.probability_difference_rms);
    let difference = percent(of.probability_difference);
    rows.push(("right token", format!("probability off by {rms} (RMS), {difference} on average")));
    let Estimate { value, error } = of.perplexity_ratio;
    let correlation = of.correlation;
    rows.push((
        "perplexity ratio",
        format!("{value:.6} ± {error:.6} (correlation {:.2} %)", 100.0 * correlation),
    ));
    rows
}

/// The mean and its error.
fn mean(of: &DivergenceReport) -> String {
    format!("{:.6} ± {:.6}", of.kl_mean.value, of.kl_mean.error)
}
