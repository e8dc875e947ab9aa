//! Typed reading of a recipe's nodes: maps with known keys, text, numbers, counts and switches.
//!
//! Nothing is ignored: an unknown key and a value of the wrong kind are refused with their line.

use std::fmt;

use super::place::{Place, listed, meant};
use super::yaml::{Content, Entry, Node, Scalar};
use crate::failure::Failure;

/// A map whose keys are known.
pub(super) struct Fields {
    pub(super) place: Place,
    entries: Vec<Entry>,
}

impl Fields {
    /// The entries of a map; `what` names it in errors.
    pub(super) fn open(node: Node, what: &str, known: &[&str]) -> Result<Self, Failure> {
        let place = node.place.clone();
        let entries = entries(node, what)?;
        for entry in &entries {
            if !known.contains(&entry.key.as_str()) {
                return Err(unknown(
                    &entry.place,
                    &format!("{what} has no key `{}`", entry.key),
                    &entry.key,
                    known,
                ));
            }
        }
        Ok(Self { place, entries })
    }

    /// Removes and returns the value of a key. A value of nothing counts as absent.
    pub(super) fn take(&mut self, key: &str) -> Option<Node> {
        let at = self.entries.iter().position(|entry| entry.key == key)?;
        let value = self.entries.swap_remove(at).value;
        (!value.is_null()).then_some(value)
    }

    /// Removes and returns the value of a key that must be there.
    pub(super) fn require(&mut self, key: &str, what: &str) -> Result<Node, Failure> {
        self.take(key).ok_or_else(|| self.place.failure(format!("{what} needs `{key}`")))
    }
}

/// The entries of a map.
pub(super) fn entries(node: Node, what: &str) -> Result<Vec<Entry>, Failure> {
    match node.content {
        Content::Map(entries) => Ok(entries),
        _ => Err(node.wrong(what, "a map of keys and values")),
    }
}

/// The refusal of a name, with a proposal and the list of known names.
pub(super) fn unknown(place: &Place, message: &str, given: &str, known: &[&str]) -> Failure {
    let failure =
        place.failure(message).detail(format!("known here: {}", listed(known.iter().copied())));
    match meant(given, known.iter().copied()) {
        Some(name) => failure.hint(format!("write `{name}`")),
        None => failure,
    }
}

impl Node {
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.content, Content::Scalar(scalar) if scalar.is_null())
    }

    /// The refusal of a value of the wrong kind.
    pub(super) fn wrong(&self, what: impl fmt::Display, expected: &str) -> Failure {
        self.place.failure(format!("{what} must be {expected}, found {}", self.shown()))
    }

    pub(super) fn scalar(&self) -> Option<&Scalar> {
        match &self.content {
            Content::Scalar(scalar) => Some(scalar),
            _ => None,
        }
    }

    /// Text. A number or a switch without quotes is not text, as in mergekit.
    pub(super) fn text(&self, what: &str) -> Result<String, Failure> {
        let scalar = self.scalar().filter(|scalar| !scalar.is_null());
        let Some(scalar) = scalar else {
            return Err(self.wrong(what, "text"));
        };
        if scalar.is_plain && (scalar.number().is_some() || scalar.switch().is_some()) {
            return Err(self
                .wrong(what, "text")
                .hint(format!("write it in quotes: \"{}\"", scalar.text)));
        }
        Ok(scalar.text.clone())
    }

    pub(super) fn list(self, what: &str) -> Result<Vec<Self>, Failure> {
        match self.content {
            Content::List(items) => Ok(items),
            _ => Err(self.wrong(what, "a list")),
        }
    }

    pub(super) fn number(&self, what: &str) -> Result<f64, Failure> {
        let number = self.scalar().and_then(Scalar::number);
        number.ok_or_else(|| self.wrong(what, "a finite decimal number"))
    }

    pub(super) fn count(&self, what: &str) -> Result<usize, Failure> {
        let count = self.scalar().and_then(Scalar::count);
        count.ok_or_else(|| self.wrong(what, "a whole number from 0 on"))
    }

    pub(super) fn switch(&self, what: &str) -> Result<bool, Failure> {
        let switch = self.scalar().and_then(Scalar::switch);
        switch.ok_or_else(|| self.wrong(what, "true or false"))
    }
}
