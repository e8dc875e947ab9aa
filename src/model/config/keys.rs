//! The keys of a `config.json`: typed reads with bounds, and errors that name the key and the value found.

use std::ops::RangeInclusive;

use anyhow::Result;
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::model::family::identify;

/// Upper bound of sizes. Products of two of them, and of a byte count, fit a u64 with room for the layers.
pub(super) const LARGEST_SIZE: u64 = 1 << 24;

/// Hint for a config whose arithmetic is not computed here.
pub(super) const ANOTHER_MODEL: &str =
    "choose another model; a changed config.json would give wrong results";

/// The settings of the text model inside the `config.json` of a model of several media; `None` for a text model by itself.
pub fn text_settings(json: &Value) -> Option<&Value> {
    json.get("text_config").filter(|text| text.is_object())
}

/// [`text_settings`] with the default sizes of the family where they are left out.
pub fn completed_settings(json: &Value) -> Option<Value> {
    let mut settings = text_settings(json)?.clone();
    if let (Ok(family), Some(settings)) = (identify(json), settings.as_object_mut())
        && let Ok(Value::Object(sizes)) = serde_json::to_value(family.sizes)
    {
        for (key, size) in sizes {
            settings.entry(key).or_insert(size);
        }
    }
    Some(settings)
}

/// [`text_settings`] for a change; the whole object for a text model by itself.
pub fn text_settings_mut(json: &mut Map<String, Value>) -> &mut Map<String, Value> {
    match json.get("text_config").is_some_and(Value::is_object) {
        true => json["text_config"].as_object_mut().expect("it is an object"),
        false => json,
    }
}

pub(super) struct Keys<'a>(pub(super) &'a Value);

impl Keys<'_> {
    /// The value of a key that exists and is not null.
    pub(super) fn given(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// The value of a key in a message.
    pub(super) fn shown(&self, key: &str) -> String {
        self.0.get(key).map_or("absent".to_owned(), Value::to_string)
    }

    /// A whole number from 1 to [`LARGEST_SIZE`].
    pub(super) fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        self.whole(1..=LARGEST_SIZE, key, default)
    }

    /// A whole number within bounds.
    pub(super) fn whole(
        &self,
        bounds: RangeInclusive<u64>,
        key: &str,
        default: Option<usize>,
    ) -> Result<usize> {
        let value = match (self.given(key), default) {
            (None, Some(default)) => return Ok(default),
            (None, None) => return Err(Failure::new(format!("`{key}` is missing")).into()),
            (Some(value), _) => value,
        };
        match value.as_u64() {
            Some(size) if bounds.contains(&size) => Ok(size as usize),
            _ => Err(Failure::new(format!(
                "`{key}` is {value}; it must be a whole number from {} to {}",
                bounds.start(),
                bounds.end()
            ))
            .into()),
        }
    }

    /// A number within bounds. The error is the value found instead.
    pub(super) fn number(
        &self,
        key: &str,
        default: Option<f64>,
        is_within: impl Fn(f64) -> bool,
    ) -> Result<f64, &Value> {
        let Some(value) = self.given(key) else {
            return default.ok_or(&Value::Null);
        };
        value.as_f64().filter(|&number| is_within(number)).ok_or(value)
    }

    /// A truth value.
    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.given(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => {
                Err(Failure::new(format!("`{key}` is {value}; it must be true or false")).into())
            }
        }
    }
}
