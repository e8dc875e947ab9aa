//! `--device-map`: the device that computes each decoder layer.
//!
//! The map is accelerate's JSON from module prefixes to devices, `{"model.layers.0": 0, "model.layers.1": "cpu", "": "cuda:1"}`:
//! the longest prefix wins, `""` is the whole model, a bare number is a GPU. In accelerate, `disk` means weights that are read
//! at each use. Here every layer is read so, and a layer on `disk` is computed by the main device. In a
//! sweep each layer is used once, so a map names the device that *computes* a layer, not the place of its weights.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::Result;
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::input::{Expected, read_given, with_remedy};

/// A device that computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// A GPU by its index.
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// The spread of layers over devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DeviceMap {
    /// Every layer on all usable GPUs, which share the samples; on the CPU without a GPU.
    #[default]
    Auto,
    /// A run of consecutive layers on each GPU, all runs about equally long.
    Balanced,
    /// As many layers on each GPU as fit its memory, in order.
    Sequential,
    /// The map of a file.
    Manual(Prefixes),
}

/// Module prefixes and their devices; `None` is accelerate's `disk`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefixes {
    devices: BTreeMap<String, Option<Device>>,
}

const HINT: &str = "write it like {\"model.layers.0\": 0, \"model.layers.1\": \"cpu\", \"\": \"cuda:1\"}; prune plan --json prints one";

impl Prefixes {
    /// Reads a map from a JSON file.
    ///
    /// # Errors
    /// Fails when the file cannot be read, and as [`Prefixes::from_json`].
    pub fn load(path: &Path) -> Result<Self> {
        let text = read_given(path, Expected::Settings).map_err(|error| {
            let failure =
                Failure::new(format!("cannot read the device map `{}`: {error}", path.display()));
            with_remedy(failure, &error).or_hint(HINT)
        })?;
        let json = serde_json::from_str(&text).map_err(|error| {
            Failure::new(format!("the device map `{}` is not JSON: {error}", path.display()))
                .hint(HINT)
        })?;
        Ok(Self::from_json(&json)?)
    }

    /// Reads a map.
    ///
    /// # Errors
    /// Fails for anything but an object of devices, and for keys inside a decoder layer, which is never split.
    pub fn from_json(json: &Value) -> Result<Self, Failure> {
        let bad =
            |why: String| Failure::new(format!("the device map is not usable: {why}")).hint(HINT);
        let Value::Object(entries) = json else {
            return Err(bad("it is not an object of modules and devices".to_string()));
        };
        let mut devices = BTreeMap::new();
        for (module, device) in entries {
            if let Some(rest) = module.strip_prefix("model.layers.")
                && rest.contains('.')
            {
                return Err(bad(format!(
                    "`{module}` is inside a layer, and a layer is computed in one place"
                )));
            }
            devices.insert(
                module.clone(),
                device_of(device).map_err(|why| bad(format!("`{module}`: {why}")))?,
            );
        }
        Ok(Self { devices })
    }

    /// The device of a decoder layer; `main` for `disk`.
    ///
    /// # Errors
    /// Fails for a layer without a prefix.
    pub fn layer(&self, index: usize, main: Device) -> Result<Device, Failure> {
        self.module(&format!("model.layers.{index}"), main)
    }

    /// The device of a module by its longest prefix.
    fn module(&self, name: &str, main: Device) -> Result<Device, Failure> {
        let mut prefix = name;
        loop {
            if let Some(device) = self.devices.get(prefix) {
                return Ok(device.unwrap_or(main));
            }
            if prefix.is_empty() {
                return Err(Failure::new(format!(
                    "the device map does not say where `{name}` is computed"
                ))
                .hint(format!("add \"{name}\", or \"\" for all that is not named")));
            }
            prefix = prefix.rsplit_once('.').map_or("", |(parent, _)| parent);
        }
    }

    /// The named GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = usize> {
        self.devices.values().filter_map(|device| match device {
            Some(Device::Cuda(index)) => Some(*index),
            _ => None,
        })
    }
}

fn device_of(value: &Value) -> Result<Option<Device>, String> {
    let unknown =
        || format!("{value} is not a device; they are \"cpu\", \"disk\", 0 or \"cuda:0\"");
    match value {
        Value::Number(number) => {
            let index = number.as_u64().and_then(|index| usize::try_from(index).ok());
            index.map(|index| Some(Device::Cuda(index))).ok_or_else(unknown)
        }
        Value::String(name) => match name.as_str() {
            "cpu" => Ok(Some(Device::Cpu)),
            "disk" => Ok(None),
            _ => {
                let index = name.strip_prefix("cuda:").unwrap_or(name).parse();
                index.map(|index| Some(Device::Cuda(index))).map_err(|_| unknown())
            }
        },
        _ => Err(unknown()),
    }
}

/// Returns the map that puts each layer on its device in `layers`. [`Prefixes::from_json`] and accelerate read it.
pub fn to_json(layers: &[Device]) -> Value {
    let mut map = Map::new();
    let device = |device: &Device| match device {
        Device::Cpu => Value::from("cpu"),
        Device::Cuda(index) => Value::from(*index),
    };
    map.insert("model.embed_tokens".to_string(), Value::from("cpu"));
    for (index, of) in layers.iter().enumerate() {
        map.insert(format!("model.layers.{index}"), device(of));
    }
    let last = layers.last().map_or(Value::from("cpu"), device);
    map.insert("model.norm".to_string(), last.clone());
    map.insert("model.rotary_emb".to_string(), last.clone());
    map.insert("lm_head".to_string(), last);
    Value::Object(map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_longest_prefix_wins() {
        let map = Prefixes::from_json(&json!({"": "cuda:1", "model.layers": 0, "model.layers.3": "cpu", "model.layers.4": "disk"})).unwrap();
        let main = Device::Cuda(7);
        let of = |index| map.layer(index, main).unwrap();
        assert_eq!(
            [of(0), of(3), of(4), of(30)],
            [Device::Cuda(0), Device::Cpu, main, Device::Cuda(0)]
        );
        assert_eq!(map.module("lm_head", main), Ok(Device::Cuda(1)));
        assert_eq!(map.gpus().collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn a_layer_that_is_not_covered_is_an_error_with_its_name() {
        let map = Prefixes::from_json(&json!({"model.layers.1": 0})).unwrap();
        // `model.layers.1` is no prefix of `model.layers.10`.
        let failure = map.layer(10, Device::Cpu).unwrap_err();
        assert!(failure.message.contains("model.layers.10"), "{failure}");
    }

    #[test]
    fn what_is_no_map_is_refused() {
        for (json, why) in [
            (json!([1]), "not an object"),
            (json!({"": "tpu"}), "tpu"),
            (json!({"": -1}), "-1"),
            (json!({"model.layers.0.mlp": 0}), "inside a layer"),
        ] {
            let failure = Prefixes::from_json(&json).unwrap_err();
            assert!(failure.message.contains(why), "{failure}");
        }
    }

    #[test]
    fn a_written_map_can_be_read() {
        let layers = [Device::Cuda(0), Device::Cuda(1), Device::Cpu];
        let map = Prefixes::from_json(&to_json(&layers)).unwrap();
        for (index, device) in layers.iter().enumerate() {
            assert_eq!(map.layer(index, Device::Cpu), Ok(*device));
        }
        assert!(
            map.module("lm_head", Device::Cpu).is_ok()
                && map.module("model.embed_tokens", Device::Cpu).is_ok()
        );
    }
}
