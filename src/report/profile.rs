//! The table of `--profile`: parts of a run, their speed, and their share of what the CPU can do.

use std::fmt::Write as _;

use crate::run::profile::ProfileReport;

/// Returns the table, ending in a newline; empty without `--profile`, since no peak was measured.
pub fn text(profile: &ProfileReport) -> String {
    let Some(peak) = profile.peak else {
        return String::new();
    };
    let all: f64 = profile.parts.iter().map(|part| part.seconds).sum();
    let mut text = format!(
        "{:<14}{:>10}{:>9}{:>10}{:>10}\n",
        "part", "seconds", "of all", "GFLOP/s", "of peak"
    );
    for part in &profile.parts {
        let gflops = part.gflops.map_or(String::new(), |gflops| format!("{gflops:.0}"));
        let share = part.share_of_peak.map_or(String::new(), percent);
        let _ = writeln!(
            text,
            "{:<14}{:>10.2}{:>9}{gflops:>10}{share:>10}",
            part.part,
            part.seconds,
            percent(part.seconds / all.max(f64::MIN_POSITIVE)),
        );
    }
    let _ = write!(text, "peak of multiply-adds alone: {:.0} GFLOP/s in f32", peak.f32);
    if let Some(bf16) = peak.bf16 {
        let _ = write!(text, ", {bf16:.0} in bf16");
    }
    text.push('\n');
    text
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::profile::{PartReport, PeakReport};

    #[test]
    fn a_part_shows_what_it_has() {
        let part = |part: &str, seconds, gflops: Option<f64>| PartReport {
            part: part.to_string(),
            seconds,
            gflops,
            share_of_peak: gflops.map(|gflops| gflops / 200.0),
        };
        let mut profile = ProfileReport {
            peak: None,
            parts: vec![part("read", 1.0, None), part("mlp", 3.0, Some(150.0))],
        };
        assert_eq!(text(&profile), "");
        profile.peak = Some(PeakReport { f32: 200.0, bf16: None });
        assert_eq!(
            text(&profile),
            "part             seconds   of all   GFLOP/s   of peak\n\
             read                1.00   25.0 %                    \n\
             mlp                 3.00   75.0 %       150    75.0 %\n\
             peak of multiply-adds alone: 200 GFLOP/s in f32\n"
        );
    }
}
