//! Heat maps: a row per layer, a column per matrix.

use anyhow::Result;
use plotters::style::RGBColor;

use super::Figure;
use super::canvas::{
    self, Anchor, Area, GRID, HEADER, INK, MUTED, SMALL, TEXT, WIDTH, letters, write,
};
use super::scale::{Axis, label};
use crate::report::format::short_name;
use crate::run::Manifest;
use crate::run::manifest::MatrixReport;

/// Room for the layers' numbers.
const NUMBERS: i32 = 52;
/// The scale under the header.
const SCALE: i32 = 34;
/// The columns' names.
const NAMES: i32 = 26;
/// Steps the scale is drawn in.
const STEPS: i32 = 64;

/// White to dark blue (ColorBrewer's Blues); the order holds in grey too.
const BLUES: [RGBColor; 5] = [
    RGBColor(0xf7, 0xfb, 0xff),
    RGBColor(0xc6, 0xdb, 0xef),
    RGBColor(0x6b, 0xae, 0xd6),
    RGBColor(0x21, 0x71, 0xb5),
    RGBColor(0x08, 0x30, 0x6b),
];

/// White to dark orange (ColorBrewer's Oranges).
const ORANGES: [RGBColor; 5] = [
    RGBColor(0xff, 0xf5, 0xeb),
    RGBColor(0xfd, 0xd0, 0xa2),
    RGBColor(0xfd, 0x8d, 0x3c),
    RGBColor(0xd9, 0x48, 0x01),
    RGBColor(0x7f, 0x27, 0x04),
];

/// Letters inside cells. Dark pages keep the colours of cells, and so of their letters.
const ON_LIGHT: RGBColor = RGBColor(0, 0, 0);
const ON_DARK: RGBColor = RGBColor(0xfe, 0xfe, 0xfe);

/// Draws the sparsity of every matrix; `None` for a run without layers.
pub fn sparsity(manifest: &Manifest) -> Result<Option<Figure>> {
    let Some(grid) = Grid::new(manifest, |matrix| {
        let [rows, columns] = matrix.shape.map(|size| size as f64);
        let weights = rows * columns;
        (weights > 0.0).then(|| matrix.zeros as f64 / weights)
    }) else {
        return Ok(None);
    };
    Ok(Some(Figure {
        name: "sparsity".into(),
        caption: "Sparsity of every matrix: zeros over weights after pruning. Rows are decoder layers from the first to the \
                  last, columns their matrices; darker is sparser, and the colours mean the same in every report."
            .into(),
        svg: grid.draw("Sparsity", "zeros / weights of each matrix", 1.0, &BLUES)?,
    }))
}

/// Draws the relative output error of every matrix; `None` where none was measured.
pub fn output_error(manifest: &Manifest) -> Result<Option<Figure>> {
    let Some(grid) = Grid::new(manifest, |matrix| matrix.relative_output_error) else {
        return Ok(None);
    };
    let largest = grid.cells().flatten().fold(0.0, f64::max);
    let to = Axis::up_to(0.0, largest.max(1e-6), 5).to;
    Ok(Some(Figure {
        name: "output-error".into(),
        caption: "How far each pruned matrix's output is from the dense one's, on a few hundred calibration tokens: \
                  ‖Wx − W′x‖ / ‖Wx‖, 0 for no change. Darker is worse; the colours end at this run's largest error, rounded up. \
                  An empty cell was not measured: the matrix was left alone."
            .into(),
        svg: grid.draw("Relative output error", "‖Wx − W′x‖ / ‖Wx‖ of each matrix", to, &ORANGES)?,
    }))
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

    fn cells(&self) -> impl Iterator<Item = Option<f64>> {
        self.rows.iter().flat_map(|(_, cells)| cells).copied()
    }

    fn draw(&self, title: &str, unit: &str, to: f64, ramp: &[RGBColor; 5]) -> Result<String> {
        let row_height: i32 = match self.rows.len() {
            0..=24 => 26,
            25..=48 => 18,
            _ => 9,
        };
        // Numbers on the left stand at least 18 pixels apart.
        let numbered = (18 / row_height).max(1) as usize;
        let top = HEADER as i32 + SCALE + NAMES;
        let width = (WIDTH as i32 - NUMBERS - 8) / self.columns.len() as i32;
        let height = top + row_height * self.rows.len() as i32 + 8;
        let description = self.describe();
        canvas::draw(height as u32, title, &description, |area| {
            canvas::header(area, title, unit)?;
            scale(area, to, ramp)?;
            let names = letters(TEXT, INK, Anchor::Middle);
            let numbers = letters(TEXT, INK, Anchor::End);
            let layer = letters(TEXT, MUTED, Anchor::End);
            write(area, "layer", &layer, (NUMBERS - 8, top - NAMES / 2))?;
            for (column, name) in self.columns.iter().enumerate() {
                let x = NUMBERS + width * column as i32 + width / 2;
                write(area, name, &names, (x, top - NAMES / 2))?;
            }
            for (row, (layer, cells)) in self.rows.iter().enumerate() {
                let y = top + row_height * row as i32;
                if row % numbered == 0 {
                    let at = (NUMBERS - 8, y + row_height / 2);
                    write(area, &layer.to_string(), &numbers, at)?;
                }
                for (column, value) in cells.iter().enumerate() {
                    let x = NUMBERS + width * column as i32;
                    cell(area, *value, to, ramp, (x, y), (width, row_height))?;
                }
            }
            Ok(())
        })
    }

    fn describe(&self) -> String {
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in self.cells().flatten() {
            least = least.min(value);
            most = most.max(value);
        }
        format!(
            "A heat map of {} layers and the matrices {}. Values lie between {least:.3} and {most:.3}.",
            self.rows.len(),
            self.columns.join(", ")
        )
    }
}

/// Draws the bar that relates colours to numbers.
fn scale(area: &Area<'_>, to: f64, ramp: &[RGBColor; 5]) -> Result<()> {
    let (top, left) = (HEADER as i32 + 2, NUMBERS);
    let length = 5 * STEPS;
    let bottom = top + 14;
    for step in 0..STEPS {
        let color = shade(ramp, (f64::from(step) + 0.5) / f64::from(STEPS));
        // Each step reaches to the end, so that no gaps show between steps.
        let corner = (left + 5 * step, top);
        canvas::fill(area, color, corner, (left + length, bottom))?;
    }
    canvas::frame(area, GRID, (left, top), (left + length, bottom))?;
    let middle = (top + bottom) / 2;
    let (before, behind) = ((left - 8, middle), (left + length + 8, middle));
    write(area, "0", &letters(TEXT, INK, Anchor::End), before)?;
    let end = letters(TEXT, INK, Anchor::Start);
    write(area, &label(to), &end, behind)
}

fn cell(
    area: &Area<'_>,
    value: Option<f64>,
    to: f64,
    ramp: &[RGBColor; 5],
    (x, y): (i32, i32),
    (width, height): (i32, i32),
) -> Result<()> {
    let (from, until) = ((x + 1, y + 1), (x + width - 1, y + height - 1));
    let middle = (x + width / 2, y + height / 2);
    let is_lettered = height >= 18;
    let Some(value) = value else {
        canvas::frame(area, GRID, from, until)?;
        if is_lettered {
            write(area, "–", &letters(SMALL, MUTED, Anchor::Middle), middle)?;
        }
        return Ok(());
    };
    let color = shade(ramp, value / to);
    canvas::fill(area, color, from, until)?;
    if is_lettered {
        let style = letters(SMALL, letters_on(color), Anchor::Middle);
        write(area, &number(value), &style, middle)?;
    }
    Ok(())
}

/// Writes a value in the few characters that fit a cell.
fn number(value: f64) -> String {
    if value != 0.0 && value < 0.0095 {
        return format!("{value:.0e}");
    }
    format!("{value:.2}")
}

/// The colour of a ramp at `share`, clamped to [0, 1].
fn shade(ramp: &[RGBColor; 5], share: f64) -> RGBColor {
    let place = share.clamp(0.0, 1.0) * (ramp.len() - 1) as f64;
    let index = (place as usize).min(ramp.len() - 2);
    let part = place - index as f64;
    let mix = |from: u8, to: u8| (f64::from(from) * (1.0 - part) + f64::from(to) * part) as u8;
    let (from, to) = (ramp[index], ramp[index + 1]);
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

/// Black or white, whichever is easier to read on a colour.
fn letters_on(color: RGBColor) -> RGBColor {
    if contrast(color, ON_LIGHT) >= contrast(color, ON_DARK) { ON_LIGHT } else { ON_DARK }
}

/// The contrast ratio of two colours, from 1 to 21 (WCAG 2).
fn contrast(one: RGBColor, other: RGBColor) -> f64 {
    let (one, other) = (luminance(one), luminance(other));
    (one.max(other) + 0.05) / (one.min(other) + 0.05)
}

/// Relative luminance in [0, 1] (WCAG 2).
fn luminance(RGBColor(red, green, blue): RGBColor) -> f64 {
    let linear = |channel: u8| {
        let value = f64::from(channel) / 255.0;
        if value <= 0.040_45 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)
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
        let svg = output_error(&manifest).unwrap().unwrap().svg;
        assert!(svg.contains(">\n0.25\n<"), "{svg}");
    }

    #[test]
    fn a_run_without_errors_or_layers_has_no_picture() {
        let mut manifest = made_up::manifest("magnitude", 0.5);
        assert_eq!(output_error(&manifest).unwrap(), None);
        assert!(sparsity(&manifest).unwrap().is_some());
        manifest.layers.clear();
        assert_eq!(sparsity(&manifest).unwrap(), None);
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
        let svg = sparsity(&manifest).unwrap().unwrap().svg;
        assert!(svg.contains(">\n78\n<") && !svg.contains(">\n79\n<"));
        assert!(!svg.contains(">\n0.50\n<"), "cells of nine pixels hold no letters");
    }

    #[test]
    fn shades_run_from_light_to_dark_and_letters_can_be_read_on_all() {
        for ramp in [BLUES, ORANGES] {
            let shades: Vec<RGBColor> =
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
