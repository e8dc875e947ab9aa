//! Ratios per layer, from a JSON file.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use crate::failure::Failure;
use crate::input::{Expected, read_given, with_remedy};

/// Per-layer ratios as read: a list for all layers, or some layers by index.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum LayerRatios {
    /// A ratio for every layer.
    All(Vec<f64>),
    /// Ratios of some layers, by index; a layer without a ratio here takes `--sparsity-ratio`.
    Some(Vec<(usize, f64)>),
}

impl LayerRatios {
    /// Reads a JSON file: `[0.5, 0.6, …]` with a ratio for every layer, or `{"0": 0.3, "31": 0.7}` for some layers.
    ///
    /// # Errors
    /// Fails when the file cannot be read or holds something else.
    pub fn load(path: &Path) -> Result<Self> {
        const HINT: &str = "write [0.5, 0.6, ...] with one ratio per layer, or {\"0\": 0.3, \"31\": 0.7} for some of them";
        let text = read_given(path, Expected::Settings).map_err(|error| {
            let failure = Failure::new(format!(
                "cannot read layer ratios from `{}`: {error}",
                path.display()
            ));
            with_remedy(failure, &error).or_hint(HINT)
        })?;
        let bad = |why: String| {
            Failure::new(format!("`{}` does not hold layer ratios: {why}", path.display()))
                .hint(HINT)
        };
        let json: Json = serde_json::from_str(&text)
            .map_err(|error| bad(format!("it is not JSON ({error})")))?;
        let ratio =
            |value: &Value| value.as_f64().ok_or_else(|| bad(format!("{value} is not a number")));
        match json {
            Json::List(values) => {
                Ok(Self::All(values.iter().map(ratio).collect::<Result<_, _>>()?))
            }
            Json::Object(Entries(entries)) => {
                let mut seen = BTreeSet::new();
                let layer = |key: &str| {
                    // "00" and "+0" would name layer 0 once more.
                    let index = key.parse::<usize>().ok();
                    let index = index
                        .filter(|index| index.to_string() == key)
                        .ok_or_else(|| bad(format!("`{key}` is not a layer's index")))?;
                    if seen.insert(index) {
                        Ok(index)
                    } else {
                        Err(bad(format!("layer {index} has two ratios")))
                    }
                };
                let keys = entries.iter().map(|(key, _)| key.as_str());
                let layers: Vec<usize> = keys.map(layer).collect::<Result<_, _>>()?;
                let ratios = entries.iter().map(|(_, value)| ratio(value));
                let ratios: Vec<f64> = ratios.collect::<Result<_, _>>()?;
                Ok(Self::Some(layers.into_iter().zip(ratios).collect()))
            }
            Json::Other(value) => {
                let failure = bad("it is neither a list nor an object".into());
                Err(failure.detail(format!("found `{value}`")).into())
            }
        }
    }
}

#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Json {
    List(Vec<Value>),
    Object(Entries),
    Other(Value),
}

/// The entries of an object in order, including repeated keys, which a map would drop.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Entries;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_one_ratio() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let load = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            LayerRatios::load(file.path())
        };
        assert_eq!(
            load("{\"1\": 0.5, \"0\": 0.25}").unwrap(),
            LayerRatios::Some(vec![(1, 0.5), (0, 0.25)])
        );
        let error = load("{\"0\": 0.5, \"1\": 0.5, \"0\": 0.6}").unwrap_err();
        assert!(error.to_string().contains("layer 0 has two ratios"), "{error}");
    }
}
