//! Small parts of pages: escaped text, tables, and numbers as a person reads them.

use std::fmt::Write as _;

/// Text as it may stand in HTML, SVG and attribute values.
///
/// Characters XML 1.0 knows no way to write become the replacement character.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            '\t' | '\n' | '\r' => escaped.push(character),
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// A table of names and values, both plain text; rows without a value are left out.
pub(super) fn facts(rows: &[(&str, Option<String>)]) -> String {
    let mut html = String::from("<table class=\"facts\">\n");
    for (name, value) in rows {
        if let Some(value) = value {
            // Writing to a String cannot fail.
            let _ = writeln!(
                html,
                "<tr><th scope=\"row\">{}</th><td>{}</td></tr>",
                escape(name),
                escape(value)
            );
        }
    }
    html + "</table>\n"
}

/// A table with a header row; the first column is text, the others are numbers. All cells are plain text.
pub(super) fn table(columns: &[&str], rows: &[Vec<String>]) -> String {
    let mut html = String::from("<div class=\"wide\"><table>\n<thead><tr>");
    for column in columns {
        let _ = write!(html, "<th scope=\"col\">{}</th>", escape(column));
    }
    html += "</tr></thead>\n<tbody>\n";
    for row in rows {
        html += "<tr>";
        for (column, cell) in row.iter().enumerate() {
            let (open, close) = if column == 0 {
                ("<th scope=\"row\">", "</th>")
            } else {
                ("<td>", "</td>")
            };
            let _ = write!(html, "{open}{}{close}", escape(cell));
        }
        html += "</tr>\n";
    }
    html + "</tbody>\n</table></div>\n"
}

/// `35 ms`, `4.1 s`, `12 min 05 s`, `3 h 07 min`.
pub(super) fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0 if seconds < 0.1 => format!("{:.0} ms", seconds * 1e3),
        0..100 => format!("{seconds:.1} s"),
        100..6000 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(
            escape("<b a=\"1\" c='2'>&\u{1}"),
            "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;\u{fffd}"
        );
        let html = facts(&[("<i>", Some("</td>".into())), ("left out", None)]);
        assert!(html.contains("&lt;i&gt;") && html.contains("&lt;/td&gt;"));
        assert!(!html.contains("left out"));
        assert!(table(&["<u>"], &[vec!["<s>".into()]]).contains("&lt;s&gt;"));
    }

    #[test]
    fn durations_are_in_the_unit_a_person_would_choose() {
        let texts = [0.0, 0.0354, 0.3, 99.0, 725.0, 11_220.0].map(duration);
        assert_eq!(
            texts,
            [
                "0 ms",
                "35 ms",
                "0.3 s",
                "99.0 s",
                "12 min 05 s",
                "3 h 07 min"
            ]
        );
    }
}
