//! Horizontal bars, each with a name in front and a number after it: time and peak memory per phase.

use anyhow::Result;

use super::canvas::{self, Anchor, HEADER, INK, SERIES, TEXT, WIDTH, letters, write};

const ROW: u32 = 26;
/// Room for names before the bars.
const NAMES: i32 = 132;
/// Room for numbers after the longest bar: `59 min 59 s · 100 %`.
const NUMBERS: i32 = 152;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bar {
    /// The name in front of the bar.
    pub(super) name: String,
    /// Its length, at least 0.
    pub(super) value: f64,
    /// The number written after the bar.
    pub(super) label: String,
}

/// Draws the bars from top to bottom; the longest fills the width.
pub(super) fn draw(title: &str, unit: &str, color: usize, bars: &[Bar]) -> Result<String> {
    let described = bars.iter();
    let described = described.map(|bar| format!("{}: {}", bar.name, bar.label));
    let description = described.collect::<Vec<_>>().join("; ");
    let names = letters(TEXT, INK, Anchor::End);
    let numbers = letters(TEXT, INK, Anchor::Start);
    let longest = bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    let room = WIDTH as i32 - NAMES - NUMBERS;
    let height = HEADER + ROW * bars.len() as u32 + 8;
    canvas::draw(height, title, &description, |area| {
        canvas::header(area, title, unit)?;
        for (row, bar) in bars.iter().enumerate() {
            let top = (HEADER + ROW * row as u32) as i32;
            let middle = top + ROW as i32 / 2;
            let length = if longest > 0.0 {
                (bar.value / longest * f64::from(room)).round() as i32
            } else {
                0
            };
            // The smallest value still gets a line of 1 pixel.
            let end = NAMES + length.max(1);
            let (from, to) = ((NAMES, top + 4), (end, top + ROW as i32 - 4));
            write(area, &bar.name, &names, (NAMES - 8, middle))?;
            canvas::fill(area, SERIES[color], from, to)?;
            write(area, &bar.label, &numbers, (end + 6, middle))?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values_say() {
        let bar = |name: &str, value| Bar { name: name.into(), value, label: format!("{value} s") };
        let svg = draw("t", "s", 0, &[bar("a", 4.0), bar("b", 1.0), bar("c", 0.0)]).unwrap();
        let widths: Vec<&str> = svg
            .lines()
            .filter(|line| line.starts_with("<rect") && line.contains("#0072B2"))
            .filter_map(|line| line.split("width=\"").nth(1)?.split('"').next())
            .collect();
        // 480 − 132 − 152 pixels for the longest.
        assert_eq!(widths, ["196", "49", "1"], "{svg}");
    }
}
