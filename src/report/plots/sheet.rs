//! The sheet of every picture: width, colours for light and dark pages, shapes, texts, and the description for screen readers.
//!
//! Colours are attributes, which every reader of SVG knows. Each document carries a style sheet that exchanges them for readers who
//! prefer dark pages. So a file serves light and dark pages, alone or inside a page.

use std::fmt::Write as _;

use crate::report::format::escape;

/// Width of every picture. On a phone, letters shrink to three quarters and stay readable.
pub(super) const WIDTH: i32 = 480;
/// Height of the two lines above a picture.
pub(super) const HEADER: i32 = 52;

/// The page.
pub(super) const PAPER: &str = "#ffffff";
/// Letters and axes.
pub(super) const INK: &str = "#1f2328";
/// Units and remarks.
pub(super) const MUTED: &str = "#57606a";
/// Grid lines, drawn under the data.
pub(super) const GRID: &str = "#d8dee4";
/// Colours that colour-blind readers can tell apart, after Okabe and Ito; markers differ too.
pub(super) const SERIES: [&str; 5] = ["#0072b2", "#d55e00", "#008a64", "#a53f8f", "#7a6700"];

/// The colours of light pages, and of dark pages.
const DARK: [(&str, &str); 9] = [
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

/// The style of a text: height of letters in pixels, colour, and `start`, `middle` or `end`: the part of it that its place names.
pub(super) struct Letters<'a> {
    pub(super) size: i32,
    pub(super) color: &'a str,
    pub(super) anchor: &'static str,
}

/// The letters of most texts.
pub(super) fn letters(anchor: &'static str) -> Letters<'static> {
    Letters { size: 14, color: INK, anchor }
}

/// A picture in the making: its elements as SVG.
pub(super) struct Sheet(String);

// Writing to a String cannot fail.
impl Sheet {
    /// Begins a picture with its title and its unit, which take [`HEADER`] pixels.
    pub(super) fn new(title: &str, unit: &str) -> Self {
        let mut sheet = Self(String::new());
        sheet.text(title, [8, 16], Letters { size: 16, ..letters("start") });
        sheet.text(unit, [8, 38], Letters { color: MUTED, ..letters("start") });
        sheet
    }

    /// Writes a text; `y` is at half its height.
    pub(super) fn text(&mut self, text: &str, [x, y]: [i32; 2], letters: Letters<'_>) {
        let Letters { size, color, anchor } = letters;
        let _ = writeln!(
            self.0,
            r#"<text x="{x}" y="{y}" dy="0.5ex" text-anchor="{anchor}" font-size="{size}" fill="{color}">{}</text>"#,
            escape(text)
        );
    }

    /// Draws a filled rectangle.
    pub(super) fn fill(&mut self, color: &str, [x, y]: [i32; 2], [width, height]: [i32; 2]) {
        let place = format!(r#"x="{x}" y="{y}" width="{width}" height="{height}""#);
        let _ = writeln!(self.0, r#"<rect {place} fill="{color}"/>"#);
    }

    /// Draws a line through points; `more` are further attributes.
    pub(super) fn line(&mut self, color: &str, more: &str, points: &[[i32; 2]]) {
        let points = listed(points);
        let _ =
            writeln!(self.0, r#"<polyline fill="none" stroke="{color}" {more}points="{points}"/>"#);
    }

    /// Draws a marker of the `index`-th series. Shapes and colours together make twenty different markers.
    pub(super) fn mark(&mut self, index: usize, [x, y]: [i32; 2]) {
        let color = SERIES[index % SERIES.len()];
        let corners: &[[i32; 2]] = match index % 4 {
            0 => &[],
            1 => &[[-5, -5], [5, -5], [5, 5], [-5, 5]],
            2 => &[[0, -7], [7, 5], [-7, 5]],
            _ => &[[0, -7], [7, 0], [0, 7], [-7, 0]],
        };
        let points: Vec<_> = corners.iter().map(|[dx, dy]| [x + dx, y + dy]).collect();
        let _ = match &points[..] {
            [] => writeln!(self.0, r#"<circle cx="{x}" cy="{y}" r="5" fill="{color}"/>"#),
            points => writeln!(self.0, r#"<polygon points="{}" fill="{color}"/>"#, listed(points)),
        };
    }

    /// The whole document; title and description are for screen readers.
    pub(super) fn finish(self, height: i32, title: &str, description: &str) -> String {
        let (title, description, style) = (escape(title), escape(description), style());
        format!(
            r#"<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" class="plot" role="img" aria-label="{title}" font-family="system-ui, sans-serif">
<title>{title}</title>
<desc>{description}</desc>
<style>{style}</style>
<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>
{}</svg>
"#,
            self.0
        )
    }
}

fn listed(points: &[[i32; 2]]) -> String {
    points.iter().map(|[x, y]| format!("{x},{y}")).collect::<Vec<_>>().join(" ")
}

fn style() -> String {
    let exchange = |(light, dark)| {
        format!(r#".plot [fill="{light}"]{{fill:{dark}}}.plot [stroke="{light}"]{{stroke:{dark}}}"#)
    };
    let exchanges: String = DARK.into_iter().map(exchange).collect();
    format!("@media screen and (prefers-color-scheme:dark){{{exchanges}}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_titles_and_descriptions_are_escaped() {
        let svg = Sheet::new("a < b", "ü\u{1b}").finish(20, "a < b", "\"x\" & y");
        assert!(svg.starts_with("<svg width=\"480\" height=\"20\""), "{svg}");
        assert!(svg.contains("aria-label=\"a &lt; b\""), "{svg}");
        assert!(svg.contains("<desc>&quot;x&quot; &amp; y</desc>"), "{svg}");
        assert!(svg.contains(">a &lt; b</text>") && svg.contains(">ü\\u{1b}</text>"), "{svg}");
        assert!(svg.trim_end().ends_with("</svg>"), "{svg}");
    }

    #[test]
    fn every_colour_has_one_for_dark_pages() {
        let sheet = style();
        for color in [PAPER, INK, MUTED, GRID].into_iter().chain(SERIES) {
            assert!(sheet.contains(&format!("[fill=\"{color}\"]")));
        }
    }
}
