//! Serialisation of single fields: as text, and with the mark that a setting does not decide the result.
//!
//! The mark is a wrapper in the JSON, `{"not deciding": value}`. [`Settings::by_name`](super::Settings::by_name) takes it off, and
//! [`Settings::deciding`](super::Settings::deciding) leaves marked settings out.

use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::Value;

/// The key of the wrapper.
const MARK: &str = "not deciding";

/// A field as its text.
pub(super) fn as_text<T: fmt::Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// A field that does not decide the masks and the model: either it changes nothing in the result, or what it leads to is compared in
/// its place (the fingerprint of the checkpoint, the hashes of the tokens, the arithmetic).
pub(super) fn not_deciding<T: Serialize, S: Serializer>(
    value: &T,
    to: S,
) -> Result<S::Ok, S::Error> {
    to.serialize_newtype_variant("Setting", 0, MARK, value)
}

/// A field as its text that does not decide the result.
pub(super) fn text_not_deciding<T: fmt::Display, S: Serializer>(
    value: &T,
    to: S,
) -> Result<S::Ok, S::Error> {
    not_deciding(&value.to_string(), to)
}

/// A serialised field without its mark, and whether it had the mark.
pub(super) fn without_mark(mut value: Value) -> (Value, bool) {
    let inner = value.as_object_mut().and_then(|object| object.remove(MARK));
    match inner {
        Some(inner) => (inner, true),
        None => (value, false),
    }
}
