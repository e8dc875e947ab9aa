//! The forms of the documents of a file, counted in one pass that keeps no text.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::document::DocumentShape;
use super::line_memory::LONGEST_LINE;
use super::ordered_json::OrderedJson;
use super::stored_form::BYTE_ORDER_MARK;
use crate::input::InOrder;

/// Numbers of documents by form.
#[derive(Debug, Default)]
pub(super) struct ShapeCount {
    all: u64,
    of_shape: [u64; DocumentShape::ALL.len()],
}

impl ShapeCount {
    /// Counts the lines of a text. A line of no form, or whose fields are null or empty lists, counts as a line alone.
    pub(super) fn of(mut text: &File) -> io::Result<Self> {
        text.rewind()?;
        let mut reader = BufReader::with_capacity(1 << 20, text);
        let (mut count, mut line, mut is_first) = (Self::default(), Vec::new(), true);
        while (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line)? > 0 {
            let mark = if is_first { BYTE_ORDER_MARK } else { b"" };
            count.add(line.strip_prefix(mark).unwrap_or(&line));
            is_first = false;
            line.clear();
        }
        Ok(count)
    }

    fn add(&mut self, line: &[u8]) {
        if line.trim_ascii().is_empty() {
            return;
        }
        self.all += 1;
        let shape = match serde_json::from_slice::<InOrder<Presence>>(line) {
            Ok(InOrder(fields)) => {
                DocumentShape::of(|name| fields.iter().any(|(other, there)| other == name && there.0))
            }
            // It may have a number that Python alone writes.
            Err(_) => OrderedJson::parse(line).ok().and_then(|line| {
                let is_empty = |value: &OrderedJson| matches!(value, OrderedJson::List(list) if list.is_empty());
                DocumentShape::of(|name| line.get(name).is_some_and(|value| !is_empty(value)))
            }),
        };
        if let Some(shape) = shape {
            self.of_shape[shape as usize] += 1;
        }
    }

    /// Returns whether no document has a known form.
    pub(super) fn is_empty(&self) -> bool {
        self.of_shape.iter().all(|count| *count == 0)
    }
}

impl fmt::Display for ShapeCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts =
            DocumentShape::ALL.into_iter().zip(self.of_shape).filter(|(_, count)| *count > 0);
        for (index, (shape, count)) in counts.enumerate() {
            let gap = if index > 0 { "; " } else { "" };
            let (count, all) = (grouped(count), grouped(self.all));
            write!(f, "{gap}{}, {count} of {all} examples", shape.name())?;
        }
        Ok(())
    }
}

/// A number with a comma before every three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups: Vec<String> =
        groups.map(|group| String::from_utf8_lossy(group).into_owned()).collect();
    groups.join(",")
}

/// The presence of a value: neither null nor an empty list.
struct Presence(bool);

impl<'de> Deserialize<'de> for Presence {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PresenceVisitor;
        impl<'de> Visitor<'de> for PresenceVisitor {
            type Value = Presence;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Presence, E> {
                Ok(Presence(false))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Presence, E> {
                Ok(Presence(true))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Presence, E> {
                Ok(Presence(true))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Presence, E> {
                Ok(Presence(true))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Presence, E> {
                Ok(Presence(true))
            }

            fn visit_str<E>(self, _: &str) -> Result<Presence, E> {
                Ok(Presence(true))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Presence, A::Error> {
                let mut is_there = false;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    is_there = true;
                }
                Ok(Presence(is_there))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Presence, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Presence(true))
            }
        }
        deserializer.deserialize_any(PresenceVisitor)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn forms_are_counted_and_null_columns_are_no_form() {
        let mut file = tempfile::tempfile().unwrap();
        let chat = r#"{"text": null, "messages": [{"role": "user"}]}"#;
        let text = "\u{feff}{\"text\": \"a\", \"score\": NaN}\n\n{\"messages\": []}\n";
        write!(file, "{text}{}", format!("{chat}\n").repeat(1204)).unwrap();
        let count = ShapeCount::of(&file).unwrap();
        assert_eq!(
            count.to_string(),
            "messages, 1,204 of 1,206 examples; text, 1 of 1,206 examples"
        );
        assert_eq!(grouped(1_000_000), "1,000,000");
        let mut none = tempfile::tempfile().unwrap();
        writeln!(none, "{{\"question\": 1}}").unwrap();
        assert!(ShapeCount::of(&none).unwrap().is_empty());
    }
}
