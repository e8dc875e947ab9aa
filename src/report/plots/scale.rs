//! Round ticks of an axis, 1, 2 or 5 times a power of ten, and their labels.

/// The parts of an axis.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    pub(super) from: f64,
    pub(super) to: f64,
    /// Ticks inside it, ascending.
    pub(super) ticks: Vec<f64>,
    is_logarithmic: bool,
}

impl Axis {
    /// An axis from `from` to the first tick at or above `to`, with about `count` steps.
    pub(super) fn up_to(from: f64, to: f64, count: usize) -> Self {
        let to = if to > from { to } else { from + 1.0 };
        let step = step(to - from, count);
        let end = (to / step - 1e-9).ceil() * step;
        Self { from, to: end, ticks: multiples(from, end, step), is_logarithmic: false }
    }

    /// An axis over a little more than `from..to`, with about `count` steps.
    pub(super) fn around(from: f64, to: f64, count: usize) -> Self {
        let margin = if to > from { (to - from) * 0.06 } else { from.abs().max(1e-3) * 0.05 };
        let (from, to) = (from - margin, to + margin);
        let ticks = multiples(from, to, step(to - from, count));
        Self { from, to, ticks, is_logarithmic: false }
    }

    /// An axis over a little more than `from..to`, both positive, on which equal ratios have equal lengths.
    pub(super) fn logarithmic(from: f64, to: f64) -> Self {
        let margin = ((to.log10() - from.log10()) * 0.06).max(0.01);
        let (low, high) = (from.log10() - margin, to.log10() + margin);
        let (from, to) = (10f64.powf(low), 10f64.powf(high));
        let candidates: [&[f64]; 4] =
            [&[1.0], &[1.0, 3.0], &[1.0, 2.0, 5.0], &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0]];
        let ticks_of = |mantissas: &[f64]| -> Vec<f64> {
            let decades = low.floor() as i32..=high.ceil() as i32;
            let ticks = decades.flat_map(|decade| {
                mantissas.iter().map(move |mantissa| mantissa * 10f64.powi(decade))
            });
            ticks.filter(|tick| (from..=to).contains(tick)).collect()
        };
        let mut ticks = candidates.into_iter().map(ticks_of);
        let ticks = ticks.find(|ticks| ticks.len() >= 4);
        let ticks = ticks.unwrap_or_else(|| multiples(from, to, step(to - from, 6)));
        Self { from, to, ticks, is_logarithmic: true }
    }

    /// The place of a value between the pixels of the axis' ends.
    pub(super) fn place(&self, value: f64, [low, high]: [i32; 2]) -> i32 {
        let length = |value: f64| if self.is_logarithmic { value.log10() } else { value };
        let [value, from, to] = [value, self.from, self.to].map(length);
        let share = (value - from) / (to - from);
        // A value far off the axis, as in a damaged record, must fit the integers.
        low + (share.clamp(-1.0, 2.0) * f64::from(high - low)).round() as i32
    }
}

/// The least and the largest number; `None` without numbers.
pub(super) fn range(numbers: impl Iterator<Item = f64> + Clone) -> Option<(f64, f64)> {
    Some((numbers.clone().reduce(f64::min)?, numbers.reduce(f64::max)?))
}

/// The smallest step of 1, 2 or 5 times a power of ten of which `span` has at most `count`.
fn step(span: f64, count: usize) -> f64 {
    let rough = span / count.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|factor| factor * power >= rough * (1.0 - 1e-9))
        .unwrap_or(10.0);
    factor * power
}

/// Multiples of `step`; empty where `step` is not representable, as with the extreme numbers of damaged records.
fn multiples(from: f64, to: f64, step: f64) -> Vec<f64> {
    if !(step.is_normal() && from.is_finite() && to.is_finite()) {
        return Vec::new();
    }
    let first = (from / step - 1e-9).ceil() as i64;
    let last = (to / step + 1e-9).floor() as i64;
    (first..=last).map(|number| number as f64 * step).collect()
}

/// Writes a tick with the decimals it needs, at most four.
pub(super) fn label(value: f64) -> String {
    if value != 0.0 && !(1e-3..1e6).contains(&value.abs()) {
        return format!("{value:.0e}");
    }
    let text = format!("{value:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<String> {
        axis.ticks.iter().map(|&tick| label(tick)).collect()
    }

    #[test]
    fn an_axis_ends_at_a_tick_a_person_would_choose() {
        assert_eq!(labels(&Axis::up_to(0.0, 0.37, 4)), ["0", "0.1", "0.2", "0.3", "0.4"]);
        assert_eq!(labels(&Axis::up_to(0.0, 96.0, 5)), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(Axis::up_to(0.0, 0.0, 4).to, 1.0, "an axis has a length");
    }

    #[test]
    fn an_axis_around_points_keeps_them_off_its_ends() {
        let axis = Axis::around(0.3, 0.7, 5);
        assert!(axis.from < 0.3 && axis.to > 0.7);
        assert_eq!(labels(&axis), ["0.3", "0.4", "0.5", "0.6", "0.7"]);
        let one = Axis::around(0.5, 0.5, 5);
        assert!(one.from < 0.5 && one.to > 0.5 && !one.ticks.is_empty());
    }

    #[test]
    fn logarithmic_ticks_are_round_numbers_however_long_the_axis_is() {
        let labels = |from, to| -> Vec<String> {
            let axis = Axis::logarithmic(from, to);
            assert!(axis.ticks.iter().all(|tick| (axis.from..=axis.to).contains(tick)));
            self::labels(&axis)
        };
        assert_eq!(labels(5.0, 20_000.0), ["10", "100", "1000", "10000"]);
        assert_eq!(labels(5.1, 230.0), ["5", "10", "20", "50", "100", "200"]);
        assert_eq!(labels(5.2, 6.1), ["5.2", "5.4", "5.6", "5.8", "6", "6.2"]);
    }

    #[test]
    fn the_smallest_and_largest_numbers_have_axes_too() {
        let (least, most) = (f64::from_bits(1), f64::MAX);
        for axis in [
            Axis::up_to(0.0, least, 5),
            Axis::up_to(0.0, most, 5),
            Axis::around(least, 3.0 * least, 5),
            Axis::around(-most, most, 5),
            Axis::around(most / 2.0, most, 5),
            Axis::logarithmic(least, most),
            Axis::logarithmic(least, 5.0 * least),
        ] {
            assert!(axis.ticks.len() < 1000, "{axis:?}");
            let _ = axis.ticks.iter().map(|&tick| axis.place(tick, [0, 400])).max();
        }
    }

    #[test]
    fn values_off_an_axis_are_drawn_near_it() {
        let axis = Axis::up_to(0.0, 1.0, 5);
        let at = |value: f64| axis.place(value, [64, 464]);
        assert_eq!([at(0.0), at(0.5), at(1.0)], [64, 264, 464]);
        assert_eq!([at(-1e308), at(1e308)], [64 - 400, 464 + 400]);
        assert_eq!([at(f64::NEG_INFINITY), at(f64::INFINITY)], [-336, 864]);
        assert_eq!(at(f64::NAN), 64);
        assert_eq!(Axis::logarithmic(1.0, 100.0).place(10.0, [0, 100]), 50);
    }

    #[test]
    fn labels_have_the_decimals_they_need() {
        assert_eq!(label(0.25), "0.25");
        assert_eq!(label(20.0), "20");
        assert_eq!(label(0.1 + 0.2), "0.3");
        assert_eq!(label(0.0), "0");
        assert_eq!(label(2e7), "2e7");
    }
}
