//! Settings of devices and memory.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use serde::Serialize;

use super::as_text;
use crate::failure::Failure;
use crate::placement::device_map::Prefixes;
use crate::placement::{Budget, DeviceMap};
use crate::run::{HiddenStatesStorage, MemorySettings};
use crate::runtime::Simulation;

/// Device and memory flags.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DeviceSettings {
    /// `--use-cpu`.
    pub use_cpu: bool,
    /// `--device`.
    #[serde(serialize_with = "as_text")]
    pub device: DeviceChoice,
    /// `--device-map`.
    #[serde(serialize_with = "as_text")]
    pub device_map: DeviceMapChoice,
    /// `--threads`; `None` for the processors of the batch job, else of this process.
    pub threads: Option<u16>,
    /// `--max-memory`; empty for 80 % of the available memory.
    #[serde(serialize_with = "as_text")]
    pub max_memory: Budget,
    /// `--hidden-states`; `None` leaves the choice to the plan.
    pub hidden_states: Option<HiddenStatesStorage>,
    /// `--offload-folder`: folder of the spill file; `None` for the run folder, else the system's temporary folder.
    pub offload_folder: Option<PathBuf>,
    /// `--memory-settings`, for tests.
    pub memory_settings: Option<MemorySettings>,
    /// `--simulate`, for tests.
    pub simulate: Option<Simulation>,
}

impl DeviceSettings {
    /// Returns true if a flag names the CPU. Without such a flag the CPU may still be the only device.
    pub fn names_the_cpu(&self) -> bool {
        self.use_cpu || self.device == DeviceChoice::Cpu
    }

    /// Returns true if a flag names GPUs.
    pub fn names_a_gpu(&self) -> bool {
        matches!(self.device, DeviceChoice::Cuda(_))
    }
}

/// `--device`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// All GPUs of a build with CUDA, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// `cuda`, or `cuda:N`.
    Cuda(Option<usize>),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(formatter, "auto"),
            Self::Cpu => write!(formatter, "cpu"),
            Self::Cuda(None) => write!(formatter, "cuda"),
            Self::Cuda(Some(index)) => write!(formatter, "cuda:{index}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            _ => name
                .strip_prefix("cuda:")
                .and_then(|index| index.parse().ok())
                .map(|index| Self::Cuda(Some(index)))
                .ok_or_else(|| "devices are auto, cpu, cuda and cuda:N".to_string()),
        }
    }
}

/// `--device-map`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceMapChoice {
    /// `auto`, `balanced` or `sequential`.
    Named(DeviceMap),
    /// A JSON file of modules and devices.
    File(PathBuf),
}

impl Default for DeviceMapChoice {
    fn default() -> Self {
        Self::Named(DeviceMap::Auto)
    }
}

/// Names of the device maps.
const DEVICE_MAPS: [(&str, DeviceMap); 3] = [
    ("auto", DeviceMap::Auto),
    ("balanced", DeviceMap::Balanced),
    ("sequential", DeviceMap::Sequential),
];

impl fmt::Display for DeviceMapChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file) => write!(formatter, "{}", file.display()),
            Self::Named(map) => {
                let name = DEVICE_MAPS.iter().find(|(_, named)| named == map);
                formatter.write_str(name.map_or("auto", |(name, _)| name))
            }
        }
    }
}

impl FromStr for DeviceMapChoice {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let named = DEVICE_MAPS.into_iter().find(|(name, _)| *name == text);
        Ok(named.map_or_else(|| Self::File(text.into()), |(_, map)| Self::Named(map)))
    }
}

impl DeviceMapChoice {
    /// Returns the map; reads it if a file is named.
    pub fn load(&self) -> Result<DeviceMap> {
        Ok(match self {
            Self::Named(map) => map.clone(),
            Self::File(file) => DeviceMap::Manual(Prefixes::load(file)?),
        })
    }
}

/// Refuses devices this build lacks, and contradictory flags.
///
/// # Errors
/// Fails with exit code 2, naming the flags.
pub fn check_device(device: &DeviceSettings) -> Result<()> {
    let DeviceChoice::Cuda(_) = device.device else {
        return Ok(());
    };
    let name = &device.device;
    if device.use_cpu {
        return Err(Failure::usage(format!("--use-cpu and --device {name} contradict each other"))
            .hint("leave one of them out")
            .into());
    }
    if !cfg!(feature = "cuda") && device.simulate.is_none() {
        return Err(Failure::usage(format!("--device {name}: this build has no CUDA"))
            .hint("use --use-cpu, or leave --device out; docs/building.md says how to build with CUDA")
            .into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_maps_read_as_they_are_shown() {
        for text in ["auto", "cpu", "cuda", "cuda:3"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert!("gpu".parse::<DeviceChoice>().is_err());
        for text in ["auto", "balanced", "sequential", "map.json"] {
            let Ok(map) = text.parse::<DeviceMapChoice>();
            assert_eq!(map.to_string(), text);
        }
    }
}
