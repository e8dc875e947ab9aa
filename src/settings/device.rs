//! Settings of devices and memory.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::{Serialize, Serializer};

use super::deciding::{not_deciding, text_not_deciding};
use super::values::from_json;
use crate::failure::Failure;
use crate::placement::device_map::Prefixes;
use crate::placement::{Budget, DeviceMap};
use crate::run::{HiddenStatesStorage, MemorySettings};
use crate::runtime::Simulation;

/// Device and memory flags.
#[derive(Debug, Clone, Args, Serialize)]
#[command(next_help_heading = "Devices")]
pub struct DeviceSettings {
    /// Compute on the CPU alone; no GPU is touched
    #[arg(long)]
    #[serde(serialize_with = "not_deciding")]
    pub use_cpu: bool,

    /// Device that computes: `auto`, `cpu`, or in a build with CUDA `cuda` or `cuda:N`
    ///
    /// `auto` uses all GPUs there are where the build has CUDA, and the CPU else.
    #[arg(hide_short_help = true, long, value_name = "DEVICE", default_value = "auto")]
    #[serde(serialize_with = "text_not_deciding")]
    pub device: DeviceChoice,

    /// Placement of layers on GPUs: auto, balanced, sequential, or a JSON file of modules and devices
    ///
    /// `auto` lets all GPUs share the samples of every layer; `balanced` gives each an equal run of layers; `sequential` fills one
    /// after the other. `prune plan --json` prints a map that can be edited.
    #[arg(hide_short_help = true, long, value_name = "MAP", default_value = "auto")]
    #[serde(serialize_with = "text_not_deciding")]
    pub device_map: DeviceMapChoice,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    ///
    /// Results do not depend on it.
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    #[serde(serialize_with = "not_deciding")]
    pub threads: Option<u16>,

    /// Memory limits [default: 80 % of what is available]
    ///
    /// An amount like 24GiB. Limits of several devices are separated by commas, like cuda:0=10GiB,cpu=24GiB. The default of a GPU is less a reserve. An amount without a device, like 8GB, is the CPU's. A GPU's context counts as part of its budget. GiB and MiB are powers of 1024, GB and MB of 1000. Available is the smaller of what the system has left and what the
    /// control group (of a batch job, a container) allows. The run is planned to stay below; what cannot fit is refused before it
    /// begins. Results do not depend on it.
    #[arg(long, value_name = "SIZE")]
    #[serde(serialize_with = "budget_not_deciding")]
    pub max_memory: Option<Budget>,

    /// Place of hidden states between layers
    ///
    /// `auto` leaves it to the plan: RAM where they fit beside the rest, else the disk, and says so. Results do not depend on it.
    #[arg(hide_short_help = true, long, value_name = "WHERE", default_value = "auto")]
    #[serde(serialize_with = "not_deciding")]
    pub hidden_states: HiddenStatesChoice,

    /// Folder for hidden states on disk [default: the run folder, else the system's temporary folder]
    #[arg(hide_short_help = true, long, value_name = "DIR")]
    #[serde(serialize_with = "not_deciding")]
    pub offload_folder: Option<PathBuf>,

    /// Settings that trade memory for time, as JSON; for tests
    #[arg(long, alias = "knobs", value_name = "JSON", hide = true, value_parser = from_json::<MemorySettings>)]
    #[serde(serialize_with = "not_deciding")]
    pub memory_settings: Option<MemorySettings>,

    /// Simulated GPUs, as JSON; for tests
    #[arg(long, value_name = "JSON", hide = true, value_parser = from_json::<Simulation>)]
    #[serde(serialize_with = "not_deciding")]
    pub simulate: Option<Simulation>,
}

/// The limits as text, empty without limits.
fn budget_not_deciding<S: Serializer>(budget: &Option<Budget>, to: S) -> Result<S::Ok, S::Error> {
    text_not_deciding(&budget.clone().unwrap_or_default(), to)
}

impl Default for DeviceSettings {
    fn default() -> Self {
        super::defaults::without_flags()
    }
}

impl DeviceSettings {
    /// The limits of `--max-memory`; none without the flag.
    pub fn budget(&self) -> Budget {
        self.max_memory.clone().unwrap_or_default()
    }

    /// Returns true if a flag names the CPU. Without such a flag the CPU may still be the only device.
    pub fn names_the_cpu(&self) -> bool {
        self.use_cpu || self.device == DeviceChoice::Cpu
    }

    /// Returns true if a flag names GPUs.
    pub fn names_a_gpu(&self) -> bool {
        matches!(self.device, DeviceChoice::Cuda(_))
    }
}

/// `--hidden-states`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(into = "Option<HiddenStatesStorage>")]
pub enum HiddenStatesChoice {
    /// The GPUs that compute where they fit, else RAM, else disk
    #[default]
    Auto,
    /// Memory
    Ram,
    /// A spill file in the offload folder
    Disk,
}

impl From<HiddenStatesChoice> for Option<HiddenStatesStorage> {
    /// Returns the place; `None` leaves the choice to the plan.
    fn from(choice: HiddenStatesChoice) -> Self {
        match choice {
            HiddenStatesChoice::Auto => None,
            HiddenStatesChoice::Ram => Some(HiddenStatesStorage::Ram),
            HiddenStatesChoice::Disk => Some(HiddenStatesStorage::Disk),
        }
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
            .hint(
                "use --use-cpu, or leave --device out; docs/install.md says how to build with CUDA",
            )
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
