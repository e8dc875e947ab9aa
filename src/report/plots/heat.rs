//! Heat maps: a row per layer, a column per matrix.

use super::Figure;
use super::scale::{Axis, label, range};
use super::sheet::{GRID, HEADER, Letters, MUTED, PAPER, Sheet, WIDTH, letters};
use crate::report::format::short_name;
use crate::run::Manifest;
use crate::run::manifest::MatrixReport;

/// Room for the layers' numbers.
const NUMBERS: i32 = 52;
/// The scale under the header.
const SCALE: i32 = 34;
/// The columns' names.
const NAMES: i32 = 26;
/// Steps the scale is drawn in, and the width of a step.
const STEPS: i32 = 64;
const STEP: i32 = 5;

/// Red, green and blue.
type Rgb = [u8; 3];

/// White to dark blue (ColorBrewer's Blues); the order holds in grey too.
const BLUES: [Rgb; 5] =
    [[247, 251, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]];

/// White to dark orange (ColorBrewer's Oranges).
const ORANGES: [Rgb; 5] =
    [[255, 245, 235], [253, 208, 162], [253, 141, 60], [217, 72, 1], [127, 39, 4]];

/// Letters inside cells. Dark pages keep the colours of cells, and so of their letters.
const ON_LIGHT: Rgb = [0, 0, 0];
const ON_DARK: Rgb = [254, 254, 254];

/// Draws the sparsity of every matrix; `None` for a run without layers.
pub fn sparsity(manifest: &Manifest) -> Option<Figure> {
    let grid = Grid::new(manifest, MatrixReport::sparsity)?;
    Some(Figure {
        name: "sparsity".into(),
        caption: "Sparsity of every matrix: zeros over weights after pruning. Rows are decoder layers from the first to the \
                  last, columns their matrices; darker is sparser, and the colours mean the same in every report."
            .into(),
        svg: grid.draw("Sparsity", "zeros / weights of each matrix", 1.0, &BLUES),
    })
}

/// Draws the relative output error of every matrix; `None` where none was measured.
pub fn output_error(manifest: &Manifest) -> Option<Figure> {
    let grid = Grid::new(manifest, |matrix| matrix.relative_output_error)?;
    let largest = grid.cells().flatten().fold(1e-6, f64::max);
    let to = Axis::up_to(0.0, largest, 5).to;
    Some(Figure {
        name: "output-error".into(),
        caption: "How far each pruned matrix's output is from the dense one's, on a few hundred calibration tokens: \
                  ‖Wx − W′x‖ / ‖Wx‖, 0 for no change. Darker is worse; the colours end at this run's largest error, rounded up. \
                  An empty cell was not measured: the matrix was left alone."
            .into(),
        svg: grid.draw("Relative output error", "‖Wx − W′x‖ / ‖Wx‖ of each matrix", to, &ORANGES),
    })
}

/// Values by layer and matrix.
#[derive(Debug, Clone, PartialEq)]
struct Grid {
    columns: Vec<String>,
    rows: Vec<(usize, Vec<Option<f64>>)>,
}

impl Grid {
    /// Collects the values; `None` where there are none.
    fn new(manifest: &Manifest, value: impl Fn(&MatrixReport) -> Option<f64>) -> Option<Self> {
        let mut columns: Vec<String> = Vec::new();
        for matrix in manifest.layers.iter().flat_map(|layer| &layer.matrices) {
            let name = short_name(&matrix.name);
            if !columns.iter().any(|column| column == name) {
                columns.push(name.to_string());
            }
        }
        let rows = manifest.layers.iter().map(|layer| {
            let cells = columns.iter().map(|column| {
                let mut matrices = layer.matrices.iter();
                let matrix = matrices.find(|matrix| short_name(&matrix.name) == column)?;
                value(matrix).filter(|value| value.is_finite())
            });
            (layer.layer, cells.collect())
        });
        let grid = Self { rows: rows.collect(), columns };
        let is_measured = grid.cells().any(|cell| cell.is_some());
        is_measured.then_some(grid)
    }

    fn cells(&self) -> impl Iterator<Item = Option<f64>> + Clone {
        self.rows.iter().flat_map(|(_, cells)| cells).copied()
    }

    fn draw(&self, title: &str, unit: &str, to: f64, ramp: &[Rgb; 5]) -> String {
        let height: i32 = match self.rows.len() {
            0..=24 => 26,
            25..=48 => 18,
            _ => 9,
        };
        // Numbers on the left stand at least 18 pixels apart.
        let numbered = (18 / height).max(1) as usize;
        let width = (WIDTH - NUMBERS - 8) / self.columns.len() as i32;
        let mut sheet = Sheet::new(title, unit);
        draw_scale(&mut sheet, to, ramp);
        let mut top = HEADER + SCALE + NAMES;
        let layer = Letters { color: MUTED, ..letters("end") };
        sheet.text("layer", [NUMBERS - 8, top - NAMES / 2], layer);
        for (column, name) in (0..).zip(&self.columns) {
            let x = NUMBERS + width * column + width / 2;
            sheet.text(name, [x, top - NAMES / 2], letters("middle"));
        }
        for (row, (layer, cells)) in self.rows.iter().enumerate() {
            let middle = top + height / 2;
            if row % numbered == 0 {
                sheet.text(&layer.to_string(), [NUMBERS - 8, middle], letters("end"));
            }
            for (column, value) in (0..).zip(cells) {
                let x = NUMBERS + width * column;
                let (at, size) = ([x + 1, top + 1], [width - 2, height - 2]);
                let (text, ink) = match value {
                    Some(value) => {
                        let color = shade(ramp, value / to);
                        sheet.fill(&hex(color), at, size);
                        (number(*value), hex(letters_on(color)))
                    }
                    None => {
                        sheet.fill(GRID, at, size);
                        sheet.fill(PAPER, at.map(|from| from + 1), size.map(|length| length - 2));
                        ("–".to_string(), MUTED.to_string())
                    }
                };
                if height >= 18 {
                    let style = Letters { size: 12, color: &ink, anchor: "middle" };
                    sheet.text(&text, [x + width / 2, middle], style);
                }
            }
            top += height;
        }
        sheet.finish(top + 8, title, &self.describe())
    }

    fn describe(&self) -> String {
        let (least, most) = range(self.cells().flatten()).unwrap_or_default();
        format!(
            "A heat map of {} layers and the matrices {}. Values lie between {least:.3} and {most:.3}.",
            self.rows.len(),
            self.columns.join(", ")
        )
    }
}

/// Draws the bar that relates colours to numbers.
fn draw_scale(sheet: &mut Sheet, to: f64, ramp: &[Rgb; 5]) {
    let (top, height, end) = (HEADER + 2, 14, NUMBERS + STEPS * STEP);
    sheet.fill(GRID, [NUMBERS - 1, top - 1], [STEPS * STEP + 2, height + 2]);
    for step in 0..STEPS {
        let color = shade(ramp, (f64::from(step) + 0.5) / f64::from(STEPS));
        let x = NUMBERS + STEP * step;
        // Each step reaches to the end, so that no gaps show between steps.
        sheet.fill(&hex(color), [x, top], [end - x, height]);
    }
    sheet.text("0", [NUMBERS - 8, top + height / 2], letters("end"));
    sheet.text(&label(to), [end + 8, top + height / 2], letters("start"));
}

/// Writes a value in the few characters that fit a cell.
fn number(value: f64) -> String {
    if value != 0.0 && value < 0.0095 {
        return format!("{value:.0e}");
    }
    format!("{value:.2}")
}

/// A colour in the notation of SVG.
fn hex([red, green, blue]: Rgb) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// The colour of a ramp at `share`, clamped to [0, 1].
fn shade(ramp: &[Rgb; 5], share: f64) -> Rgb {
    let place = share.clamp(0.0, 1.0) * (ramp.len() - 1) as f64;
    let index = (place as usize).min(ramp.len() - 2);
    let part = place - index as f64;
    let mix = |from: u8, to: u8| (f64::from(from) * (1.0 - part) + f64::from(to) * part) as u8;
    std::array::from_fn(|channel| mix(ramp[index][channel], ramp[index + 1][channel]))
}

/// Black or white, whichever has more contrast to a colour (WCAG 2): beyond √(0.05 · 1.05) − 0.05, black.
fn letters_on(color: Rgb) -> Rgb {
    if luminance(color) > 0.179 { ON_LIGHT } else { ON_DARK }
}

/// Relative luminance in [0, 1] (WCAG 2).
fn luminance(color: Rgb) -> f64 {
    let [red, green, blue] = color.map(|channel| {
        let value = f64::from(channel) / 255.0;
        if value <= 0.040_45 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    });
    0.2126 * red + 0.7152 * green + 0.0722 * blue
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::made_up;

    #[test]
    fn cells_hold_what_the_manifest_says() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        manifest.layers[1].matrices[6].relative_output_error = Some(0.25);
        let grid = Grid::new(&manifest, |matrix| matrix.relative_output_error).unwrap();
        assert_eq!(grid.columns, ["q", "k", "v", "o", "gate", "up", "down"]);
        assert_eq!(grid.rows[1].0, 1);
        assert_eq!(grid.rows[1].1[6], Some(0.25));
        assert_eq!(grid.rows[0].1[6], None);
        let svg = output_error(&manifest).unwrap().svg;
        assert!(svg.contains(">0.25<"), "{svg}");
    }

    #[test]
    fn a_run_without_errors_or_layers_has_no_picture() {
        let mut manifest = made_up::manifest("magnitude", 0.5);
        assert_eq!(output_error(&manifest), None);
        assert!(sparsity(&manifest).is_some());
        manifest.layers.clear();
        assert_eq!(sparsity(&manifest), None);
    }

    #[test]
    fn numbers_of_many_layers_keep_their_distance() {
        let mut manifest = made_up::manifest("wanda", 0.5);
        let layer = manifest.layers[0].clone();
        manifest.layers = (0..80)
            .map(|index| {
                let mut layer = layer.clone();
                layer.layer = index;
                layer
            })
            .collect();
        let svg = sparsity(&manifest).unwrap().svg;
        assert!(svg.contains(">78<") && !svg.contains(">79<"));
        assert!(!svg.contains(">0.50<"), "cells of nine pixels hold no letters");
    }

    /// The contrast ratio of two colours, from 1 to 21 (WCAG 2).
    fn contrast(one: Rgb, other: Rgb) -> f64 {
        let (one, other) = (luminance(one), luminance(other));
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    #[test]
    fn shades_run_from_light_to_dark_and_letters_can_be_read_on_all() {
        for ramp in [BLUES, ORANGES] {
            let shades: Vec<Rgb> =
                (0..=20).map(|step| shade(&ramp, f64::from(step) / 20.0)).collect();
            assert!(shades.windows(2).all(|pair| luminance(pair[0]) > luminance(pair[1])));
            for color in shades {
                // The least contrast of small letters in WCAG 2.
                assert!(contrast(color, letters_on(color)) > 4.5, "{color:?}");
            }
            assert_eq!(shade(&ramp, 2.0), ramp[4]);
            assert_eq!(shade(&ramp, -1.0), ramp[0]);
        }
    }

    #[test]
    fn numbers_fit_their_cells() {
        assert_eq!(number(0.5), "0.50");
        assert_eq!(number(0.0), "0.00");
        assert_eq!(number(0.0012), "1e-3");
    }
}
