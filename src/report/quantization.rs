//! The result of `prune quantize` in words.

use crate::bytes::ByteSize;
use crate::run::QuantizationReport;

/// The lines under a finished quantisation.
pub fn text(report: &QuantizationReport) -> String {
    let new_zeros = report.totals.zeros_after.saturating_sub(report.totals.zeros_before);
    let share = |count: u64| 100.0 * count as f64 / report.totals.weights.max(1) as f64;
    format!(
        "{} matrices in {}; the model takes {} on disk, not {}\n\
         zeros        {:.2} % before, {:.2} % now: {new_zeros} small weights became 0, and all zeros stayed\n\
         peak memory  {}{} planned\n\
         model        {}\n",
        report.totals.matrices,
        report.format,
        report.bytes_after,
        report.bytes_before,
        share(report.totals.zeros_before),
        share(report.totals.zeros_after),
        report.peak_anonymous.map_or(String::new(), |peak| format!("{peak} of ")),
        report.plan.cpu().map_or(ByteSize::ZERO, |device| device.peak),
        report.output
    )
}
