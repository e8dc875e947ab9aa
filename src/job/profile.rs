//! The profile of a run: the time of its arithmetic, of choosing weights, of reading and of writing.

use super::settled_run::SettledRun;
use crate::linalg::peak;
use crate::linalg::product::Kernel;
use crate::linalg::profile::{Part, Watch};
use crate::linalg::{Products, StoredDtype};
use crate::run::profile::{PartReport, PeakReport, ProfileReport};
use crate::run::{Manifest, Phase};

/// Measures the peak of the CPU where `--profile` asks for it. Takes about a second.
pub(super) fn measure_peak(job: &SettledRun) -> Option<PeakReport> {
    let model = &job.model;
    let kernel = model.products.of_activations();
    let of = |kernel| peak::of(kernel, model.threads);
    job.settings.output.profile.then(|| PeakReport {
        f32: of(Kernel::Fused),
        bf16: (kernel != Kernel::Fused).then(|| of(kernel)),
    })
}

/// Puts the parts together.
///
/// # Arguments
/// * `products`: how they were made, and with weights of which dtype
/// * `run`: with its phases and threads
pub(super) fn report(
    peak: Option<PeakReport>,
    (products, dtype): (Products, StoredDtype),
    watch: &Watch,
    run: &Manifest,
) -> ProfileReport {
    let seconds = run.seconds;
    let phase = |phase: Phase| {
        let of = run.phases.iter().find(|report| report.phase == phase);
        of.map_or(0.0, |phase| phase.seconds)
    };
    let spent = |part: Part| watch.spent(part).time.as_secs_f64();
    // An f32 product that is a sum of bf16 products can be no faster than these.
    let peak_of = |kernel: Kernel| {
        peak.map(|peak| match peak.bf16 {
            Some(bf16) if kernel != Kernel::Fused => bf16 / kernel.terms() as f64,
            _ => peak.f32,
        })
    };
    let parts = [
        ("read", phase(Phase::Read) + spent(Part::Read), None),
        ("pack", spent(Part::Pack), None),
        ("qkv", spent(Part::Qkv), Some(Part::Qkv)),
        ("attention", spent(Part::Attention), Some(Part::Attention)),
        ("o", spent(Part::O), Some(Part::O)),
        ("mlp", spent(Part::Mlp), Some(Part::Mlp)),
        ("statistics", spent(Part::Statistics), None),
        ("score and select", phase(Phase::Score), None),
        ("output error", spent(Part::OutputError), None),
        ("write", phase(Phase::Allocate) + phase(Phase::Write) + phase(Phase::SaveAndVerify), None),
        ("head", spent(Part::Head), Some(Part::Head)),
    ];
    let took_time = parts.into_iter().filter(|(_, seconds, _)| *seconds > 0.0);
    let report = |(name, seconds, product): (&str, f64, Option<Part>)| {
        let gflops = product.map(|part| watch.spent(part).operations as f64 / seconds / 1e9);
        let peak = peak_of(match product {
            Some(Part::Attention) => products.of_activations(),
            _ => products.kernel(dtype),
        });
        PartReport {
            part: name.to_string(),
            seconds,
            gflops,
            share_of_peak: gflops.zip(peak).map(|(gflops, peak)| gflops / peak),
        }
    };
    let mut parts: Vec<PartReport> = took_time.map(report).collect();
    let known: f64 = parts.iter().map(|part| part.seconds).sum();
    parts.push(PartReport {
        part: "other".to_string(),
        seconds: (seconds - known).max(0.0),
        gflops: None,
        share_of_peak: None,
    });
    ProfileReport { peak, parts }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::manifest::PhaseReport;

    #[test]
    fn the_parts_are_the_whole_run() {
        let mut watch = Watch::default();
        watch.enter(Part::Mlp);
        watch.count(4_000_000);
        std::thread::sleep(std::time::Duration::from_millis(4));
        watch.enter(Part::Elsewhere);
        let mut run = crate::report::made_up::manifest("wanda", 0.5);
        run.seconds = 5.0;
        run.phases = [(Phase::Read, 1.0), (Phase::Score, 0.5)]
            .map(|(phase, seconds)| PhaseReport { phase, seconds, peak_anonymous: None })
            .to_vec();
        let peak = PeakReport { f32: 10.0, bf16: None };
        let report = report(Some(peak), (Products::F32, StoredDtype::F16), &watch, &run);
        let names: Vec<&str> = report.parts.iter().map(|part| part.part.as_str()).collect();
        assert_eq!(names, ["read", "mlp", "score and select", "other"]);
        let sum: f64 = report.parts.iter().map(|part| part.seconds).sum();
        assert!((sum - 5.0).abs() < 1e-9);
        let mlp = &report.parts[1];
        let gflops = mlp.gflops.unwrap();
        assert!(gflops > 0.0 && gflops <= 1.0, "{gflops}");
        assert_eq!(mlp.share_of_peak, Some(gflops / 10.0));
    }
}
