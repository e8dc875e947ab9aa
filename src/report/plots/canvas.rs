//! The sheet of every picture: width, colours for light and dark pages, texts, and the description for screen readers.
//!
//! plotters writes colours as attributes. Each document carries a style sheet that exchanges them for readers who prefer
//! dark pages. So a file serves light and dark pages, alone or inside a page.

use std::fmt::Display;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::failure::printable;
use crate::report::format::escape;

/// Width of every picture. On a phone, letters shrink to three quarters and stay readable.
pub(super) const WIDTH: u32 = 480;

/// Height of letters, in pixels of the picture.
pub(super) const TEXT: f64 = 14.0;

/// Smaller letters, for numbers in cells.
pub(super) const SMALL: f64 = 12.0;

/// The page.
pub(super) const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
/// Letters and axes.
pub(super) const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
/// Units and remarks.
pub(super) const MUTED: RGBColor = RGBColor(0x57, 0x60, 0x6a);
/// Grid lines, drawn under the data.
pub(super) const GRID: RGBColor = RGBColor(0xd8, 0xde, 0xe4);

/// Colours that colour-blind readers can tell apart, after Okabe and Ito; markers differ too.
pub(super) const SERIES: [RGBColor; 5] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x8a, 0x64),
    RGBColor(0xa5, 0x3f, 0x8f),
    RGBColor(0x7a, 0x67, 0x00),
];

/// Light → dark, for [`STYLE`].
const DARK: [(RGBColor, &str); 9] = [
    (PAPER, "#0f1419"),
    (INK, "#e6eaf0"),
    (MUTED, "#a3adb8"),
    (GRID, "#353c45"),
    (SERIES[0], "#58b4f0"),
    (SERIES[1], "#ff8f45"),
    (SERIES[2], "#35c99b"),
    (SERIES[3], "#dc8fcd"),
    (SERIES[4], "#d1bd4f"),
];

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws a picture of [`WIDTH`] × `height`; `title` and `description` are for screen readers.
pub(super) fn draw(
    height: u32,
    title: &str,
    description: &str,
    body: impl FnOnce(&Area<'_>) -> Result<()>,
) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&PAPER).map_err(broken)?;
        body(&area)?;
        area.present().map_err(broken)?;
    }
    let words = format!(
        "class=\"plot\" role=\"img\" aria-label=\"{}\">\n<title>{}</title>\n<desc>{}</desc>\n<style>{}</style>",
        escape(title),
        escape(title),
        escape(description),
        style()
    );
    Ok(svg.replacen('>', &format!(" {words}"), 1))
}

/// Converts a drawing error. Drawing into memory does not fail, so there is no hint.
pub(super) fn broken(error: impl Display) -> anyhow::Error {
    anyhow!("cannot draw a picture: {error}")
}

fn style() -> String {
    let exchanges: String = DARK
        .iter()
        .map(|(light, dark)| {
            let light = hex(*light);
            format!(
                ".plot [fill=\"{light}\"]{{fill:{dark}}}.plot [stroke=\"{light}\"]{{stroke:{dark}}}"
            )
        })
        .collect();
    format!(
        ".plot text{{font-family:system-ui,sans-serif}}\
         @media screen and (prefers-color-scheme:dark){{{exchanges}}}"
    )
}

/// A colour in the notation of plotters.
pub(super) fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// The point of a text that its coordinates name, always at half its height.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// plotters divides a font size by this number before it writes it.
const SIZE_FACTOR: f64 = 1.24;

/// A text style: letters `size` pixels high.
pub(super) fn letters(size: f64, color: RGBColor, anchor: Anchor) -> TextStyle<'static> {
    let horizontal = match anchor {
        Anchor::Start => HPos::Left,
        Anchor::Middle => HPos::Center,
        Anchor::End => HPos::Right,
    };
    TextStyle {
        font: ("sans-serif", size * SIZE_FACTOR).into_font(),
        color: color.to_backend_color(),
        pos: Pos::new(horizontal, VPos::Center),
    }
}

/// Writes a text. plotters escapes markup; control characters are shown as escape sequences.
pub(super) fn write(
    area: &Area<'_>,
    text: &str,
    style: &TextStyle<'_>,
    at: (i32, i32),
) -> Result<()> {
    area.draw_text(&printable(text), style, at).map_err(broken)
}

/// Writes the two lines above a picture, title and unit. They take [`HEADER`] pixels.
pub(super) fn header(area: &Area<'_>, title: &str, unit: &str) -> Result<()> {
    write(area, title, &letters(16.0, INK, Anchor::Start), (8, 16))?;
    write(area, unit, &letters(TEXT, MUTED, Anchor::Start), (8, 38))
}

/// Height of [`header`].
pub(super) const HEADER: u32 = 52;

pub(super) fn fill(
    area: &Area<'_>,
    color: RGBColor,
    from: (i32, i32),
    to: (i32, i32),
) -> Result<()> {
    area.draw(&Rectangle::new([from, to], color.filled())).map_err(broken)
}

pub(super) fn frame(
    area: &Area<'_>,
    color: RGBColor,
    from: (i32, i32),
    to: (i32, i32),
) -> Result<()> {
    area.draw(&Rectangle::new([from, to], color.stroke_width(1))).map_err(broken)
}

/// Draws a marker of the `index`-th series. Shapes and colours together make twenty different markers.
pub(super) fn mark(area: &Area<'_>, index: usize, at: (i32, i32)) -> Result<()> {
    let style = SERIES[index % SERIES.len()].filled();
    let (x, y) = at;
    let polygon = |points: &[(i32, i32)]| {
        let points: Vec<_> = points.iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
        area.draw(&Polygon::new(points, style)).map_err(broken)
    };
    match index % 4 {
        0 => area.draw(&Circle::new(at, 5, style)).map_err(broken),
        1 => polygon(&[(-5, -5), (5, -5), (5, 5), (-5, 5)]),
        2 => polygon(&[(0, -7), (7, 5), (-7, 5)]),
        _ => polygon(&[(0, -7), (7, 0), (0, 7), (-7, 0)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_title_and_description_of_a_picture_are_escaped() {
        let svg = draw(20, "a < b", "\"x\" & y", |_| Ok(())).unwrap();
        assert!(svg.starts_with("<svg width=\"480\" height=\"20\""), "{svg}");
        assert!(svg.contains("aria-label=\"a &lt; b\">"), "{svg}");
        assert!(svg.contains("<desc>&quot;x&quot; &amp; y</desc>"), "{svg}");
        assert!(svg.trim_end().ends_with("</svg>"), "{svg}");
    }

    #[test]
    fn every_colour_has_one_for_dark_pages() {
        let sheet = style();
        for color in [PAPER, INK, MUTED, GRID].into_iter().chain(SERIES) {
            assert!(sheet.contains(&format!("[fill=\"{}\"]", hex(color))));
        }
    }

    #[test]
    fn letters_have_the_height_that_was_asked_for() {
        let svg =
            draw(20, "", "", |area| write(area, "x", &letters(14.0, INK, Anchor::Start), (0, 9)))
                .unwrap();
        assert!(svg.contains("font-size=\"14\""), "{svg}");
    }
}
