//! Memory and rates of a machine: this machine, under the limits of its control group, or a machine that is described in a file.
//!
//! ```json
//! {"cpu": {"memory": "60GiB", "threads": 16}, "gpus": [{"name": "A100", "memory": "80GiB"}], "rates": {"disk_gb_s": 2.0}}
//! ```

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Deserializer, Serialize};

use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::input::{Expected, read_given, with_remedy};

/// The properties of a machine that a plan needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// Processors and their memory.
    pub cpu: Cpu,
    /// GPUs by index; none on a machine without GPUs or in a build without CUDA.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// Rates for the estimate of time.
    #[serde(default)]
    pub rates: Rates,
}

/// Processors and their memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    /// Available memory; absent on systems that do not report it.
    #[serde(default, deserialize_with = "size_or_nothing")]
    pub memory: Option<ByteSize>,
    /// Worker threads.
    pub threads: usize,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// The name reported by the driver.
    #[serde(default)]
    pub name: String,
    /// Available memory, before this process creates its context.
    #[serde(deserialize_with = "size")]
    pub memory: ByteSize,
}

/// The most threads of a machine; a plan has scratch memory for each.
const MOST_THREADS: usize = 1 << 16;
/// The most GPUs of a machine; a plan has a line for each.
const MOST_GPUS: usize = 1 << 10;

/// Rates for the estimate of time. The defaults give the order of magnitude only.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rates {
    /// f32 products of a CPU thread, in 10⁹ floating-point operations per second.
    pub cpu_thread_gflops: f64,
    /// Half-precision products of a GPU, in 10¹² operations per second.
    pub gpu_tflops: f64,
    /// The disk: 10⁹ bytes of files per second, read or written.
    pub disk_gb_s: f64,
    /// The link between memory and a GPU, in 10⁹ bytes per second.
    pub pcie_gb_s: f64,
}

impl Default for Rates {
    /// Low round figures: a core with 8-wide multiply-add, a GPU like an A10, a SATA-class disk
    /// with the page cache, PCIe 4 at half its peak.
    fn default() -> Self {
        Self { cpu_thread_gflops: 75.0, gpu_tflops: 40.0, disk_gb_s: 1.0, pcie_gb_s: 12.0 }
    }
}

impl Inventory {
    /// Reads this machine's available memory under all limits. It has no GPUs yet.
    pub fn here(threads: usize) -> Self {
        Self {
            cpu: Cpu { memory: available_memory(), threads },
            gpus: Vec::new(),
            rates: Rates::default(),
        }
    }

    /// The share of one of several processes that divide the memory of the machine.
    #[must_use]
    pub fn divided(mut self, processes: usize) -> Self {
        if let Some(memory) = &mut self.cpu.memory {
            memory.0 /= processes as u64;
        }
        self
    }

    /// Reads the description of a machine.
    ///
    /// # Errors
    /// Fails when the file cannot be read or does not describe a machine, and for rates that are not above zero.
    pub fn load(path: &Path) -> Result<Self> {
        let example = "write it like {\"cpu\": {\"memory\": \"64GiB\", \"threads\": 16}, \"gpus\": [{\"memory\": \"24GiB\"}]}";
        let text = read_given(path, Expected::Settings).map_err(|error| {
            let failure =
                Failure::new(format!("cannot read the inventory `{}`: {error}", path.display()));
            with_remedy(failure, &error).or_hint(example)
        })?;
        let unusable = |why: String| {
            Failure::new(format!("`{}` does not describe a machine: {why}", path.display()))
                .hint(example)
        };
        let inventory: Self =
            serde_json::from_str(&text).map_err(|error| unusable(error.to_string()))?;
        let rates = inventory.rates;
        for (name, rate) in [
            ("cpu_thread_gflops", rates.cpu_thread_gflops),
            ("gpu_tflops", rates.gpu_tflops),
            ("disk_gb_s", rates.disk_gb_s),
            ("pcie_gb_s", rates.pcie_gb_s),
        ] {
            if !(rate > 0.0 && rate.is_finite()) {
                return Err(unusable(format!("the rate {name} is {rate}")).into());
            }
        }
        let (threads, gpus) = (inventory.cpu.threads, inventory.gpus.len());
        if !(1..=MOST_THREADS).contains(&threads) {
            return Err(
                unusable(format!("it has {threads} CPU threads, not 1 to {MOST_THREADS}")).into()
            );
        }
        if gpus > MOST_GPUS {
            return Err(unusable(format!("it has {gpus} GPUs, more than {MOST_GPUS}")).into());
        }
        Ok(inventory)
    }
}

/// A size in a file: "24GiB", or a number of bytes.
#[derive(Deserialize)]
#[serde(untagged)]
enum GivenSize {
    Text(String),
    Bytes(u64),
}

impl GivenSize {
    fn bytes(self) -> Result<ByteSize, String> {
        match self {
            Self::Bytes(bytes) => Ok(ByteSize(bytes)),
            Self::Text(text) => text.parse().map_err(|failure: Failure| failure.message),
        }
    }
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
    GivenSize::deserialize(deserializer)?.bytes().map_err(serde::de::Error::custom)
}

fn size_or_nothing<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<ByteSize>, D::Error> {
    match Option::<GivenSize>::deserialize(deserializer)? {
        None => Ok(None),
        Some(given) => given.bytes().map(Some).map_err(serde::de::Error::custom),
    }
}

/// Returns the available memory: the smaller of the system's and the control group's (v1 or v2). `None` where it is not reported.
pub fn available_memory() -> Option<ByteSize> {
    let system =
        std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    #[cfg(not(target_os = "linux"))]
    let system = system.or_else(|| Some(super::system_memory::read()?.available));
    let group = std::fs::read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| groups(&text).iter().filter_map(|folder| group_leaves(folder)).min());
    match (system, group) {
        (Some(system), Some(group)) => Some(system.min(group)),
        (system, group) => system.or(group),
    }
}

/// Returns all memory of the machine, without limits. `None` on systems that do not report it.
pub fn total_memory() -> Option<ByteSize> {
    let total =
        std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemTotal:"));
    #[cfg(not(target_os = "linux"))]
    let total = total.or_else(|| Some(super::system_memory::read()?.total));
    total
}

/// Returns the size of the processor's largest cache for data. `None` where the system does not report it.
pub fn largest_cache() -> Option<ByteSize> {
    caches_in(Path::new("/sys/devices/system/cpu/cpu0/cache"))
}

fn caches_in(folder: &Path) -> Option<ByteSize> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let sizes = entries.filter_map(|entry| {
        let read = |name: &str| std::fs::read_to_string(entry.path().join(name)).ok();
        let holds_data = read("type")?.trim() != "Instruction";
        let size = read("size")?;
        let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
        holds_data.then_some(ByteSize(kib.saturating_mul(1024)))
    });
    sizes.max()
}

fn meminfo_available(text: &str) -> Option<ByteSize> {
    meminfo(text, "MemAvailable:")
}

fn meminfo(text: &str, field: &str) -> Option<ByteSize> {
    let line = text.lines().find(|line| line.starts_with(field))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(ByteSize(kib.saturating_mul(1024)))
}

/// Returns the folders with limits for this process: the folders of its own group and of every group above it, v2 and v1.
fn groups(cgroup: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup"),
            names if names.split(',').any(|name| name == "memory") => {
                Path::new("/sys/fs/cgroup/memory")
            }
            _ => continue,
        };
        let mut folder = root.join(path.trim_start_matches('/'));
        // Inside a container the path may be absent below the mount; the root always exists.
        while folder.starts_with(root) {
            folders.push(folder.clone());
            if !folder.pop() {
                break;
            }
        }
    }
    folders
}

/// Returns the available memory of a group: limit − usage + reclaimable file pages. Above `memory.high` the kernel reclaims and
/// slows the group's processes down, so it is a limit like `memory.max`, and the lower of the two counts.
fn group_leaves(folder: &Path) -> Option<ByteSize> {
    let number =
        |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let limits = ["memory.max", "memory.high", "memory.limit_in_bytes"];
    let limit = limits.into_iter().filter_map(number).min()?;
    let usage = number("memory.current").or_else(|| number("memory.usage_in_bytes")).unwrap_or(0);
    let cached = std::fs::read_to_string(folder.join("memory.stat"))
        .ok()
        .and_then(|text| inactive_file(&text))
        .unwrap_or(0);
    Some(ByteSize(limit.saturating_sub(usage.saturating_sub(cached))))
}

fn inactive_file(stat: &str) -> Option<u64> {
    let value = |name: &str| {
        stat.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
    };
    value("total_inactive_file").or_else(|| value("inactive_file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_read_from_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.json");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Inventory::load(&path)
        };
        let machine = read(
            r#"{"cpu": {"memory": "8GiB", "threads": 4}, "gpus": [{"name": "x", "memory": 12000}],
            "rates": {"disk_gb_s": 2.5}}"#,
        )
        .unwrap();
        assert_eq!(machine.cpu.memory, Some(ByteSize(8 << 30)));
        assert_eq!(machine.gpus[0].memory, ByteSize(12000));
        assert_eq!(machine.rates, Rates { disk_gb_s: 2.5, ..Rates::default() });
        let again = read(&serde_json::to_string(&machine).unwrap()).unwrap();
        assert_eq!(again, machine, "what is written can be read");
        for (text, why) in [
            ("{", "EOF"),
            (r#"{"cpu": {"threads": 0}}"#, "it has 0 CPU threads"),
            (r#"{"cpu": {"threads": 18446744073709551615}}"#, "not 1 to 65536"),
            (r#"{"cpu": {"threads": 1, "memory": "3 apples"}}"#, "apples"),
            (r#"{"cpu": {"threads": 1}, "rates": {"disk_gb_s": 0}}"#, "disk_gb_s is 0"),
            (r#"{"cpu": {"threads": 1}, "gpu": []}"#, "unknown field"),
        ] {
            let error = read(text).unwrap_err();
            assert!(format!("{error}").contains(why), "{error}");
        }
    }

    #[test]
    fn available_memory_is_read_from_meminfo() {
        assert_eq!(
            meminfo_available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"),
            Some(ByteSize(2 << 20))
        );
    }

    #[test]
    fn the_largest_cache_that_holds_data_counts() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(caches_in(folder.path()), None);
        assert_eq!(caches_in(&folder.path().join("none")), None);
        for (name, kind, size) in [
            ("index0", "Data\n", "32K\n"),
            ("index1", "Instruction\n", "65536K\n"),
            ("index2", "Unified\n", "2048K\n"),
        ] {
            let index = folder.path().join(name);
            std::fs::create_dir(&index).unwrap();
            std::fs::write(index.join("type"), kind).unwrap();
            std::fs::write(index.join("size"), size).unwrap();
        }
        assert_eq!(caches_in(folder.path()), Some(ByteSize(2 << 20)));
    }

    #[test]
    fn groups_of_both_versions_are_found_up_to_the_root() {
        let v2 = groups("0::/user.slice/job\n");
        assert_eq!(
            v2,
            ["/sys/fs/cgroup/user.slice/job", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"]
                .map(PathBuf::from)
        );
        let v1 = groups("4:cpu:/x\n7:hugetlb,memory:/slurm/job_1\n");
        assert_eq!(v1.first(), Some(&PathBuf::from("/sys/fs/cgroup/memory/slurm/job_1")));
        assert_eq!(v1.last(), Some(&PathBuf::from("/sys/fs/cgroup/memory")));
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_cannot_be_reclaimed() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(group_leaves(folder.path()), None, "no limit");
        write("memory.max", "1000\n");
        write("memory.current", "900\n");
        write("memory.stat", "anon 500\ninactive_file 300\n");
        assert_eq!(group_leaves(folder.path()), Some(ByteSize(400)));
    }

    #[test]
    fn the_lower_of_the_two_limits_of_a_group_counts() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.current", "100\n");
        for (max, high, left) in [
            ("max", "max", None),
            ("max", "700", Some(600)),
            ("1000", "700", Some(600)),
            ("500", "700", Some(400)),
            ("1000", "max", Some(900)),
        ] {
            write("memory.max", max);
            write("memory.high", high);
            let found = group_leaves(folder.path());
            assert_eq!(found, left.map(ByteSize), "{max}, {high}");
        }
    }
}
