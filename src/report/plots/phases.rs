//! Bars of the time of each phase of a run.

use super::Figure;
use super::chart::{self, Bar};
use crate::report::format::duration;
use crate::run::Manifest;

/// The share of the run from which time outside all phases gets a bar.
const WORTH_A_BAR: f64 = 0.005;

/// Draws a bar per phase, in the order of their first run; `None` without phases.
pub fn figure(manifest: &Manifest) -> Option<Figure> {
    let bars = bars(manifest);
    Some(Figure {
        name: "phases".into(),
        caption: "Where the time went, phase by phase, added over the layers, in the order they first ran. “read” is the time \
                  spent waiting for a layer: reading continues during the other phases."
            .into(),
        svg: chart::bars("Time per phase", "wall time, and its share of the run", 0, &bars)?,
    })
}

fn bars(manifest: &Manifest) -> Vec<Bar> {
    let bar = |name: &str, seconds: f64| Bar {
        name: name.to_string(),
        value: seconds.max(0.0),
        label: format!("{} · {}", duration(seconds), share(seconds, manifest.seconds)),
    };
    let mut bars: Vec<Bar> =
        manifest.phases.iter().map(|phase| bar(&phase.phase.to_string(), phase.seconds)).collect();
    let rest = manifest.seconds - manifest.phases.iter().map(|phase| phase.seconds).sum::<f64>();
    if !bars.is_empty() && rest > WORTH_A_BAR * manifest.seconds {
        bars.push(bar("everything else", rest));
    }
    bars
}

fn share(part: f64, whole: f64) -> String {
    let percent = if whole > 0.0 { part / whole * 100.0 } else { 0.0 };
    if percent > 0.0 && percent < 0.95 { "< 1 %".into() } else { format!("{percent:.0} %") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::made_up;
    use crate::run::Phase;
    use crate::run::manifest::PhaseReport;

    #[test]
    fn phases_keep_their_order_and_what_is_left_has_a_bar() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        let phase = |phase, seconds| PhaseReport { phase, seconds, peak_anonymous: None };
        manifest.seconds = 100.0;
        manifest.phases = vec![phase(Phase::Read, 0.2), phase(Phase::Calibrate, 79.8)];
        let bars = bars(&manifest);
        let labels: Vec<_> =
            bars.iter().map(|bar| format!("{}: {}", bar.name, bar.label)).collect();
        assert_eq!(
            labels,
            ["read: 0.2 s · < 1 %", "calibrate: 79.8 s · 80 %", "everything else: 20.0 s · 20 %"]
        );
    }

    #[test]
    fn without_phases_there_is_no_picture() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        manifest.phases.clear();
        assert_eq!(figure(&manifest), None);
    }
}
