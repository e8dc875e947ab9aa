//! A JSON value whose objects keep the order of the file: chat templates print tools and arguments in that order, as Python does.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Number;

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum OrderedJson {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<OrderedJson>),
    Object(Vec<(String, OrderedJson)>),
}

impl OrderedJson {
    /// Parses a value. The numbers `NaN`, `Infinity` and `-Infinity`, which Python writes and JSON does not have, are null.
    pub(super) fn parse(text: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(text)
            .or_else(|error| serde_json::from_slice(&without_nan(text)).map_err(|_| error))
    }

    /// The value of a field; `None` for null, for an absent field, and if this is no object. The last of several counts, as in Python.
    pub(super) fn get(&self, name: &str) -> Option<&Self> {
        let Self::Object(fields) = self else {
            return None;
        };
        let found = fields.iter().rev().find(|(other, _)| other == name);
        found.map(|(_, value)| value).filter(|value| **value != Self::Null)
    }

    /// The text; `None` if this is no string.
    pub(super) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The type, in words.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// Bytes of text in the value, about.
    pub(super) fn length(&self) -> u64 {
        match self {
            Self::Null | Self::Bool(_) | Self::Number(_) => 8,
            Self::Text(text) => text.len() as u64,
            Self::List(list) => list.iter().map(Self::length).sum(),
            Self::Object(fields) => {
                fields.iter().map(|(name, value)| name.len() as u64 + value.length()).sum()
            }
        }
    }
}

impl From<&str> for OrderedJson {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// Replaces the numbers that JSON does not have by null. Strings stay as they are.
fn without_nan(text: &[u8]) -> Vec<u8> {
    let mut clean = Vec::with_capacity(text.len());
    let (mut is_string, mut at) = (false, 0);
    while let Some(&byte) = text.get(at) {
        let number = [&b"-Infinity"[..], b"Infinity", b"NaN"];
        let number = number.into_iter().find(|number| text[at..].starts_with(number));
        if let Some(number) = number.filter(|_| !is_string) {
            clean.extend_from_slice(b"null");
            at += number.len();
            continue;
        }
        is_string ^= byte == b'"';
        clean.push(byte);
        at += 1;
        if is_string && byte == b'\\' {
            clean.extend(text.get(at));
            at += 1;
        }
    }
    clean
}

impl<'de> Deserialize<'de> for OrderedJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JsonVisitor;
        impl<'de> Visitor<'de> for JsonVisitor {
            type Value = OrderedJson;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<OrderedJson, E> {
                Ok(OrderedJson::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<OrderedJson, E> {
                Ok(OrderedJson::Bool(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<OrderedJson, E> {
                Ok(OrderedJson::Number(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<OrderedJson, E> {
                Ok(OrderedJson::Number(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<OrderedJson, E> {
                Ok(Number::from_f64(value).map_or(OrderedJson::Null, OrderedJson::Number))
            }

            fn visit_str<E>(self, value: &str) -> Result<OrderedJson, E> {
                Ok(OrderedJson::Text(value.to_owned()))
            }

            fn visit_string<E>(self, value: String) -> Result<OrderedJson, E> {
                Ok(OrderedJson::Text(value))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<OrderedJson, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = list.next_element()? {
                    entries.push(entry);
                }
                Ok(OrderedJson::List(entries))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<OrderedJson, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(OrderedJson::Object(fields))
            }
        }
        deserializer.deserialize_any(JsonVisitor)
    }
}

impl Serialize for OrderedJson {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(value) => value.serialize(serializer),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(list) => list.serialize(serializer),
            Self::Object(fields) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                for (name, value) in fields {
                    map.serialize_entry(name, value)?;
                }
                map.end()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_keep_their_order_and_python_numbers_are_null() {
        let text = r#"{"b":1,"a":{"z":[true,null,-2.5],"y":"NaN \" NaN"}}"#;
        let value = OrderedJson::parse(text.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string(&value).unwrap(), text);
        let python = r#"{"x": NaN, "y": [-Infinity, Infinity], "t": "NaN\\"}"#;
        let value = OrderedJson::parse(python.as_bytes()).unwrap();
        let expected = r#"{"x":null,"y":[null,null],"t":"NaN\\"}"#;
        assert_eq!(serde_json::to_string(&value).unwrap(), expected);
        assert_eq!(value.get("x"), None);
        assert!(OrderedJson::parse(b"{\"x\": Nan}").is_err());
    }
}
