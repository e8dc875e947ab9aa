//! Memory over time; the peak per phase where no samples were taken.

use super::Figure;
use super::chart::{Bar, Chart, ChartSeries, SeriesForm, bars};
use super::scale::Axis;
use crate::bytes::ByteSize;
use crate::run::Manifest;

/// Draws lines from samples, or bars from the peaks of phases; `None` for a run without either.
pub fn figure(manifest: &Manifest) -> Option<Figure> {
    if manifest.memory.len() > 1 { Some(over_time(manifest)) } else { per_phase(manifest) }
}

fn over_time(manifest: &Manifest) -> Figure {
    let samples = &manifest.memory;
    let last = samples.iter().map(|sample| sample.seconds).fold(0.0, f64::max);
    let most = samples
        .iter()
        .map(|sample| {
            let gpu = sample.gpu.map_or(ByteSize::ZERO, |gpu| gpu.allocated.max(gpu.peak));
            sample.peak_anonymous.max(sample.anonymous).max(gpu)
        })
        .max()
        .unwrap_or(ByteSize::ZERO);
    let (time, time_unit) = time_unit(last);
    let (bytes, bytes_unit) = byte_unit(most);
    let at = |seconds: f64, size: ByteSize| (seconds / time, size.0 as f64 / bytes);
    let now = samples.iter().map(|sample| at(sample.seconds, sample.anonymous));
    // The peak of a sample was reached at some moment after the sample before: a step over that time.
    let peak = samples.windows(2).flat_map(|pair| {
        [&pair[0], &pair[1]].map(|sample| at(sample.seconds, pair[1].peak_anonymous))
    });
    let gpus = samples.iter().filter_map(|sample| Some(at(sample.seconds, sample.gpu?.allocated)));
    let mut series = vec![
        ChartSeries::new("at the sample", SeriesForm::Line, now),
        ChartSeries::new("peak since the last sample", SeriesForm::Line, peak),
        ChartSeries::new("allocated on GPUs", SeriesForm::Line, gpus),
    ];
    series.retain(|series| !series.points.is_empty());
    let (right, top) = at(last, most);
    let svg = Chart {
        title: "Memory over time",
        y_name: &format!("resident anonymous memory, {bytes_unit}"),
        x_name: &format!("time since the run began, {time_unit}"),
        description: &format!(
            "{} samples over {last:.0} seconds; the largest is {most}.",
            samples.len()
        ),
        x: Axis::up_to(0.0, right, 6),
        y: Axis::up_to(0.0, top, 5),
        series,
    }
    .draw();
    Figure {
        name: "memory".into(),
        caption: format!(
            "The process's resident anonymous memory at the checkpoints of the run and after each layer, and the most there was \
             between two of them. The largest: {most}."
        ),
        svg,
    }
}

fn per_phase(manifest: &Manifest) -> Option<Figure> {
    let bar =
        |name: String, peak: ByteSize| Bar { name, value: peak.0 as f64, label: peak.to_string() };
    let phases = manifest.phases.iter();
    let peaks: Vec<Bar> = phases
        .filter_map(|phase| Some(bar(phase.phase.to_string(), phase.peak_anonymous?)))
        .collect();
    let unit = "resident anonymous memory of the process";
    Some(Figure {
        name: "memory".into(),
        caption: "The most resident anonymous memory the process had while each phase ran, the largest over the layers. This \
                  run took no samples over time."
            .into(),
        svg: bars("Peak memory per phase", unit, 2, &peaks)?,
    })
}

/// Seconds per unit, and its name.
fn time_unit(seconds: f64) -> (f64, &'static str) {
    match seconds {
        ..180.0 => (1.0, "seconds"),
        180.0..10_800.0 => (60.0, "minutes"),
        _ => (3600.0, "hours"),
    }
}

/// Bytes per unit, and its name.
fn byte_unit(most: ByteSize) -> (f64, &'static str) {
    if most.0 >= 2 << 30 { ((1u64 << 30) as f64, "GiB") } else { ((1u64 << 20) as f64, "MiB") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::made_up;
    use crate::run::manifest::{GpuMemory, MemorySample};

    fn sample(seconds: f64, mebibytes: u64) -> MemorySample {
        MemorySample {
            seconds,
            checkpoint: format!("layer {seconds}"),
            anonymous: ByteSize(mebibytes << 20),
            peak_anonymous: ByteSize((mebibytes + 10) << 20),
            gpu: None,
        }
    }

    #[test]
    fn samples_are_drawn_over_time_with_their_units() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        manifest.memory = vec![sample(0.0, 20), sample(100.0, 90), sample(400.0, 60)];
        let figure = figure(&manifest).unwrap();
        assert!(figure.svg.contains("time since the run began, minutes"));
        assert!(figure.svg.contains("memory, MiB"));
        assert!(figure.caption.contains("100.00 MiB"), "{}", figure.caption);
        assert!(figure.svg.contains(">peak since the last sample</text>"), "{}", figure.svg);
        // A line per measure; the axes add theirs.
        for color in ["#0072b2", "#d55e00"] {
            let line = format!("stroke=\"{color}\" stroke-width=\"2\" points=");
            assert!(figure.svg.contains(&line), "{}", figure.svg);
        }
    }

    #[test]
    fn samples_in_no_order_are_drawn_up_to_the_latest() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        for latest in [400.0, 1e308] {
            manifest.memory = vec![sample(0.0, 20), sample(latest, 90), sample(10.0, 60)];
            let figure = figure(&manifest).unwrap();
            let duration = format!("over {latest:.0} seconds");
            assert!(figure.svg.contains(&duration), "{}", figure.svg);
        }
    }

    #[test]
    fn memory_of_gpus_has_a_line_of_its_own() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        manifest.memory = vec![sample(0.0, 20), sample(100.0, 90)];
        assert!(!figure(&manifest).unwrap().svg.contains("on GPUs"));
        for sample in &mut manifest.memory {
            let [size, more] = [ByteSize(300 << 20), ByteSize(400 << 20)];
            sample.gpu = Some(GpuMemory {
                allocated: size,
                reserved: more,
                peak: more,
                free: more,
                total: more,
            });
        }
        let figure = figure(&manifest).unwrap();
        assert!(figure.svg.contains("allocated on GPUs"), "{}", figure.svg);
        assert!(figure.caption.contains("400.00 MiB"), "{}", figure.caption);
    }

    #[test]
    fn without_samples_the_phases_peaks_are_drawn_and_without_those_nothing() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        assert!(manifest.memory.is_empty());
        let drawn = figure(&manifest).unwrap();
        assert!(drawn.svg.contains("Peak memory per phase"));
        manifest.phases.iter_mut().for_each(|phase| phase.peak_anonymous = None);
        assert_eq!(figure(&manifest), None);
    }

    #[test]
    fn units_are_those_a_person_would_choose() {
        assert_eq!(time_unit(90.0).1, "seconds");
        assert_eq!(time_unit(7200.0).1, "minutes");
        assert_eq!(time_unit(86_400.0).1, "hours");
        assert_eq!(byte_unit(ByteSize(3 << 30)).1, "GiB");
        assert_eq!(byte_unit(ByteSize(900 << 20)).1, "MiB");
    }
}
