//! Python's methods of texts, where they differ from Rust's.

/// Returns whether Python calls a character a space: Unicode's white space, and four separators of ASCII.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// `str.strip()`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `str.rstrip()`.
pub(super) fn rstrip(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// `str.capitalize()`: the first character in title case, all others in lower case.
pub(super) fn capitalize(text: &str) -> String {
    let Some(first) = text.chars().next() else {
        return String::new();
    };
    // The lower case of the whole text decides the form of a final sigma.
    let lower = text.to_lowercase();
    let rest: String = lower.chars().skip(first.to_lowercase().count()).collect();
    title(first) + &rest
}

/// The title case of a character (Unicode's SpecialCasing.txt and UnicodeData.txt): the first letter of a digraph is a capital.
fn title(first: char) -> String {
    let code = u32::from(first);
    let single = match code {
        // DŽ, LJ, NJ and DZ in their three cases.
        0x01C4..=0x01CC => Some(0x01C5 + (code - 0x01C4) / 3 * 3),
        0x01F1..=0x01F3 => Some(0x01F2),
        // Greek letters with iota subscript.
        0x1F80..=0x1FAF => Some(code | 8),
        0x1FB3 | 0x1FC3 | 0x1FF3 => Some(code + 9),
        // Georgian has no title case.
        0x10D0..=0x10FF => Some(code),
        _ => None,
    };
    if let Some(single) = single.and_then(char::from_u32) {
        return single.to_string();
    }
    // Of several capitals, only the first is one in title case: ß is Ss.
    let upper = first.to_uppercase().enumerate();
    let cased = upper.map(|(at, capital)| match at {
        0 => capital.to_string(),
        _ => capital.to_lowercase().collect(),
    });
    cased.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // python3.11 -c 'print(["".capitalize() for …])'
    #[test]
    fn capitalize_and_strip_are_pythons() {
        for (text, expected) in [
            ("the NASA", "The nasa"),
            ("ßa", "Ssa"),
            ("ǆa", "ǅa"),
            ("ΟΔΟΣ", "Οδος"),
            ("ΟΔΟΣ Σ", "Οδος σ"),
            ("", ""),
            (" a", " a"),
            ("ﬁn", "Fin"),
            ("ა", "ა"),
        ] {
            assert_eq!(capitalize(text), expected, "{text:?}");
        }
        assert_eq!(strip("\x1c\u{a0} a b\t\n"), "a b");
        assert_eq!(rstrip(" a\n\t "), " a");
    }
}
