//! The planner: of all ways to do a job, the fastest that fits.
//!
//! A pure function of numbers. A way fits where no device is asked for more than its budget in any phase; of those that fit the
//! one with the least estimated time is taken, of equals the first. More memory lets more ways fit and forbids none, so it never
//! makes a plan slower. Time, by the rates of the inventory (docs/memory-model.md has the model and its limits):
//!
//! ```text
//! compute   = flop / (threads · thread rate)      on the CPU, or flop / (GPUs · rate): they share the samples
//! transfers = (weights + states / GPUs) / link
//! layer     = max(compute + transfers, read) + moved with reading ahead, compute + transfers + read + moved without
//! total     = Σ layers + before and after
//! ```

use super::budget::Budget;
use super::device_map::{Device, DeviceMap};
use super::inventory::{Inventory, Rates};
use super::workload::{Need, Way, Workload, peak};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::HiddenStatesStorage;
use crate::run::plan::{DevicePlan, HiddenStatesPlan, LayersPlan, PhasePlan, Plan, TimeEstimate};

/// Which devices may be used, and what is decided already.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// `--max-memory`.
    pub budget: Budget,
    /// `--device-map`.
    pub map: DeviceMap,
    /// Computes on the CPU alone, whatever else there is.
    pub cpu_only: bool,
    /// Computes on this GPU alone.
    pub only_gpu: Option<usize>,
    /// Fails rather than computing everything on the CPU.
    pub must_use_gpu: bool,
    /// The place of hidden states between layers; `None` leaves it to the plan.
    pub storage: Option<HiddenStatesStorage>,
}

/// The part of a host's need that every GPU has for itself.
pub const ON_THEIR_WAY: &str = "samples on their way";

/// How much of the memory that is free a plan uses where no budget was given; the rest is for everyone else.
pub const USABLE: f64 = 0.8;

/// What a GPU keeps free where no budget was given: 5 %, at least 256 MiB, for the driver and for what others take meanwhile.
fn gpu_default(free: ByteSize) -> ByteSize {
    let reserve = (free.0 / 20).max(256 << 20);
    ByteSize(free.0.saturating_sub(reserve))
}

/// A workload without a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanFailure {
    /// The devices that are too small, even with the settings that need least memory.
    DoesNotFit(Vec<Shortage>),
    /// A policy or a map names a device that is absent, or leaves a layer without a device.
    Unusable(Failure),
}

impl From<Failure> for PlanFailure {
    fn from(failure: Failure) -> Self {
        Self::Unusable(failure)
    }
}

/// A device that is too small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortage {
    /// `cpu` or `cuda:0`.
    pub device: String,
    /// What may be used.
    pub allowed: ByteSize,
    /// The least that would do.
    pub needed: ByteSize,
    /// The phase that needs it.
    pub phase: &'static str,
    /// Its parts.
    pub parts: Vec<(String, ByteSize)>,
}

impl Shortage {
    /// What is missing.
    pub fn short_by(&self) -> ByteSize {
        ByteSize(self.needed.0.saturating_sub(self.allowed.0))
    }
}

/// What the process may use: as given, else a part of what is available; `None` where nobody knows.
pub fn cpu_budget(inventory: &Inventory, budget: &Budget) -> Option<ByteSize> {
    budget.cpu().or_else(|| {
        let available = inventory.cpu.memory?;
        Some(ByteSize((available.0 as f64 * USABLE) as u64))
    })
}

/// What may be used of a GPU: as given, but no more than is free; else that less a reserve; nothing of one that is not there.
fn gpu_budget(inventory: &Inventory, budget: &Budget, index: usize) -> ByteSize {
    let Some(gpu) = inventory.gpus.get(index) else {
        return ByteSize::ZERO;
    };
    match budget.gpu(index) {
        // What others hold cannot be had.
        Some(budget) => budget.min(gpu.memory),
        None => gpu_default(gpu.memory),
    }
}

/// Plans `workload` on a machine.
///
/// # Errors
/// Fails when no way fits, and when the policy names an absent device.
pub fn plan(
    workload: &Workload,
    inventory: &Inventory,
    policy: &Policy,
) -> Result<Plan, PlanFailure> {
    let machine = Machine::new(workload, inventory, policy)?;
    let mut best: Option<Candidate<'_>> = None;
    for candidate in machine.candidates() {
        if best
            .as_ref()
            .is_none_or(|best| candidate.time.seconds < best.time.seconds)
        {
            best = Some(candidate);
        }
    }
    match best {
        Some(best) => Ok(machine.plan(&best)),
        None => Err(PlanFailure::DoesNotFit(machine.shortages())),
    }
}

/// The least memory a job works with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Least {
    /// Of the process, computing on the CPU.
    pub cpu: ByteSize,
    /// Of one GPU.
    pub gpu: ByteSize,
    /// Of the process beside such a GPU.
    pub beside_gpu: ByteSize,
}

/// The least memory a job works with, on the CPU and with a GPU.
pub fn least_that_works(workload: &Workload) -> Least {
    let (gpu, _) = least(&workload.on_gpu, |way| peak(&way.device));
    let smallest: Vec<Way> = workload
        .on_gpu
        .iter()
        .filter(|way| peak(&way.device).0 == gpu)
        .cloned()
        .collect();
    Least {
        cpu: least(&workload.on_cpu, |way| peak(&way.host)).0,
        gpu,
        beside_gpu: least(&smallest, |way| peak(&way.host)).0,
    }
}

/// A way together with the GPUs it runs on.
struct Candidate<'a> {
    way: &'a Way,
    gpus: Vec<usize>,
    layers: Vec<Vec<Device>>,
    time: TimeEstimate,
}

struct Machine<'a> {
    workload: &'a Workload,
    rates: Rates,
    threads: usize,
    cpu: Option<ByteSize>,
    /// GPUs that may be used, with what may be used of them.
    gpus: Vec<(usize, ByteSize)>,
    map: &'a DeviceMap,
    must_use_gpu: bool,
    storage: Option<HiddenStatesStorage>,
    notes: Vec<String>,
}

impl<'a> Machine<'a> {
    fn new(
        workload: &'a Workload,
        inventory: &Inventory,
        policy: &'a Policy,
    ) -> Result<Self, Failure> {
        let there = inventory.gpus.len();
        let named = policy
            .budget
            .gpus()
            .chain(policy.only_gpu)
            .chain(match &policy.map {
                DeviceMap::Manual(map) => map.gpus().collect(),
                _ => Vec::new(),
            });
        if let Some(missing) = named.filter(|&index| index >= there).max() {
            return Err(Failure::usage(format!(
                "cuda:{missing} is not there: {}",
                match there {
                    0 => "no GPU can be used".to_string(),
                    1 => "the one GPU is cuda:0".to_string(),
                    _ => format!("the last GPU is cuda:{}", there - 1),
                }
            ))
            .hint("name devices that are there, or --use-cpu"));
        }
        if policy.must_use_gpu && there == 0 {
            return Err(Failure::new("no GPU can be used: the driver names none")
                .hint("look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --use-cpu"));
        }
        if let DeviceMap::Manual(map) = &policy.map {
            // A layer that is not covered is an error, whatever fits.
            for layer in 0..workload.num_hidden_layers {
                map.layer(layer, Device::Cpu)?;
            }
        }
        let mut notes = Vec::new();
        let mut gpus = Vec::new();
        if !policy.cpu_only {
            let (least, _) = least(&workload.on_gpu, |way| peak(&way.device));
            for index in
                (0..there).filter(|&index| policy.only_gpu.is_none_or(|only| only == index))
            {
                let allowed = gpu_budget(inventory, &policy.budget, index);
                if !workload.on_gpu.is_empty() && allowed < least && allowed > ByteSize::ZERO {
                    notes.push(format!(
                        "cuda:{index} is not used: a layer needs {least} there, {allowed} may be used"
                    ));
                }
                gpus.push((index, allowed));
            }
        }
        Ok(Self {
            workload,
            rates: inventory.rates,
            threads: inventory.cpu.threads.max(1),
            cpu: cpu_budget(inventory, &policy.budget),
            gpus,
            map: &policy.map,
            must_use_gpu: policy.must_use_gpu,
            storage: policy.storage,
            notes,
        })
    }

    fn host_allows(&self, way: &Way, layers: &[Vec<Device>]) -> bool {
        self.storage.is_none_or(|storage| storage == way.storage)
            && self
                .cpu
                .is_none_or(|cpu| peak(&self.host(way, layers)).0 <= cpu)
    }

    /// All ways that fit, those of the CPU first.
    fn candidates(&self) -> impl Iterator<Item = Candidate<'_>> {
        let on_cpu = self.workload.on_cpu.iter().filter_map(|way| {
            let layers = vec![vec![Device::Cpu]; self.workload.num_hidden_layers];
            let is_allowed = match self.map {
                // A map that names a GPU is kept, or the plan fails.
                DeviceMap::Manual(map) => map.gpus().next().is_none(),
                _ => !self.must_use_gpu,
            };
            (is_allowed && self.host_allows(way, &layers))
                .then(|| self.candidate(way, Vec::new(), layers))
        });
        let on_gpu = self.workload.on_gpu.iter().filter_map(|way| {
            let needed = peak(&way.device).0;
            let gpus: Vec<usize> = self
                .gpus
                .iter()
                .filter(|(_, allowed)| needed <= *allowed)
                .map(|(index, _)| *index)
                .collect();
            let main = Device::Cuda(*gpus.first()?);
            let layers = self.spread(&gpus, main)?;
            self.host_allows(way, &layers)
                .then(|| self.candidate(way, gpus, layers))
        });
        on_cpu.chain(on_gpu)
    }

    /// What the process holds: also what computing on the CPU takes where a map leaves some layers there.
    fn host(&self, way: &Way, layers: &[Vec<Device>]) -> Vec<Need> {
        let mut needs = way.host.clone();
        // Every GPU has samples of its own on their way.
        let gpus = layers.iter().map(Vec::len).max().unwrap_or(1) as u64;
        let of_gpus = needs.iter_mut().flat_map(|need| &mut need.parts);
        for part in of_gpus.filter(|part| !way.device.is_empty() && part.what == ON_THEIR_WAY) {
            part.bytes = ByteSize(part.bytes.0.saturating_mul(gpus));
        }
        let is_mixed =
            !way.device.is_empty() && layers.iter().flatten().any(|device| *device == Device::Cpu);
        let twin = self.workload.on_cpu.iter().find(|other| {
            is_mixed && other.settings == way.settings && other.storage == way.storage
        });
        for need in twin.map(|twin| twin.host.as_slice()).unwrap_or_default() {
            match needs.iter_mut().find(|own| own.phase == need.phase) {
                Some(own) if own.bytes() < need.bytes() => *own = need.clone(),
                Some(_) => {}
                None => needs.push(need.clone()),
            }
        }
        needs
    }

    /// The devices of each layer; `None` where a manual map names a GPU that is too small.
    fn spread(&self, gpus: &[usize], main: Device) -> Option<Vec<Vec<Device>>> {
        let count = self.workload.num_hidden_layers;
        let cuda = |index: &usize| Device::Cuda(*index);
        let layers = match self.map {
            DeviceMap::Auto => vec![gpus.iter().map(cuda).collect(); count],
            DeviceMap::Balanced => (0..count)
                .map(|layer| vec![cuda(&gpus[layer * gpus.len() / count])])
                .collect(),
            DeviceMap::Sequential => {
                let layer_bytes = self.workload.layer.0.max(1);
                let mut layers = Vec::with_capacity(count);
                for (place, index) in gpus.iter().enumerate() {
                    let allowed = self.gpus.iter().find(|(of, _)| of == index)?.1;
                    let left = count - layers.len();
                    let is_last = place + 1 == gpus.len();
                    let here = if is_last {
                        left
                    } else {
                        left.min((allowed.0 / layer_bytes) as usize)
                    };
                    layers.extend(std::iter::repeat_n(vec![cuda(index)], here));
                }
                layers
            }
            DeviceMap::Manual(map) => (0..count)
                .map(|layer| match map.layer(layer, main) {
                    Ok(Device::Cuda(index)) if !gpus.contains(&index) => None,
                    Ok(device) => Some(vec![device]),
                    Err(_) => None,
                })
                .collect::<Option<_>>()?,
        };
        Some(layers)
    }

    fn candidate<'w>(
        &self,
        way: &'w Way,
        gpus: Vec<usize>,
        layers: Vec<Vec<Device>>,
    ) -> Candidate<'w> {
        let time = self.time(way, &layers);
        Candidate {
            way,
            gpus,
            layers,
            time,
        }
    }

    /// The time model of the file's first lines.
    fn time(&self, way: &Way, layers: &[Vec<Device>]) -> TimeEstimate {
        let Rates {
            cpu_thread_gflops,
            gpu_tflops,
            disk_gb_s,
            pcie_gb_s,
        } = self.rates;
        let (cpu, gpu) = (
            cpu_thread_gflops * 1e9 * self.threads as f64,
            gpu_tflops * 1e12,
        );
        let (disk, link) = (disk_gb_s * 1e9, pcie_gb_s * 1e9);
        let work = &way.work;
        let mut total = TimeEstimate::default();
        for devices in layers {
            let gpus = devices
                .iter()
                .filter(|device| **device != Device::Cpu)
                .count();
            let (compute, transfers) = if gpus == 0 {
                (work.layer_flop / cpu, 0.0)
            } else {
                let gpus = gpus as f64;
                (
                    work.layer_flop / (gpu * gpus),
                    (work.layer_uploaded + work.layer_states / gpus) / link,
                )
            };
            let (read, moved) = (work.layer_read / disk, work.layer_moved / disk);
            let busy = compute + transfers;
            total.seconds += moved
                + if way.settings.prefetch {
                    busy.max(read)
                } else {
                    busy + read
                };
            total.compute += compute;
            total.transfers += transfers;
            total.disk += read + moved;
        }
        let uses_gpu = layers.iter().flatten().any(|device| *device != Device::Cpu);
        let once = work.once_flop / if uses_gpu { gpu } else { cpu };
        total.compute += once;
        total.disk += work.once_moved / disk;
        total.seconds += once + work.once_moved / disk;
        total
    }

    fn plan(&self, best: &Candidate<'_>) -> Plan {
        let way = best.way;
        let (gpu_peak, gpu_phase) = peak(&way.device);
        let host = self.host(way, &best.layers);
        let (host_peak, host_phase) = peak(&host);
        let used = |index: usize| {
            best.layers
                .iter()
                .flatten()
                .any(|device| *device == Device::Cuda(index))
        };
        let mut devices: Vec<DevicePlan> = self
            .gpus
            .iter()
            .filter(|(index, _)| best.gpus.contains(index) && used(*index))
            .map(|&(index, allowed)| DevicePlan {
                device: Device::Cuda(index).to_string(),
                budget: Some(allowed),
                peak: gpu_peak,
                peak_phase: gpu_phase.to_string(),
            })
            .collect();
        devices.push(DevicePlan {
            device: "cpu".to_string(),
            budget: self.cpu,
            peak: host_peak,
            peak_phase: host_phase.to_string(),
        });
        let phases = [("cuda", &way.device), ("cpu", &host)];
        Plan {
            devices,
            layers: runs(&best.layers, way),
            hidden_states: HiddenStatesPlan {
                storage: way.storage,
                bytes: way.hidden_states,
            },
            memory_settings: way.settings.clone(),
            phases: phases
                .into_iter()
                .flat_map(|(device, needs)| {
                    needs.iter().map(move |need| PhasePlan {
                        phase: need.phase.to_string(),
                        device: device.to_string(),
                        bytes: need.bytes(),
                        parts: need.parts.clone(),
                    })
                })
                .collect(),
            time: best.time,
            notes: self.notes.clone(),
        }
    }

    /// What is missing for the ways that ask least.
    fn shortages(&self) -> Vec<Shortage> {
        let mut shortages = Vec::new();
        let must_use_gpu = self.must_use_gpu
            || matches!(self.map, DeviceMap::Manual(map) if map.gpus().next().is_some());
        let ways = if must_use_gpu {
            &self.workload.on_gpu
        } else {
            &self.workload.on_cpu
        };
        let possible: Vec<Way> = ways
            .iter()
            .filter(|way| self.storage.is_none_or(|storage| storage == way.storage))
            .cloned()
            .collect();
        let mut short = |device: String, allowed: ByteSize, needs: &dyn Fn(&Way) -> Vec<Need>| {
            let (needed, way) = least(&possible, |way| peak(&needs(way)));
            let Some(way) = way.filter(|_| needed > allowed) else {
                return;
            };
            let needs = needs(way);
            let (_, phase) = peak(&needs);
            let parts = needs
                .iter()
                .find(|need| need.phase == phase)
                .map(|need| {
                    need.parts
                        .iter()
                        .map(|part| (part.what.to_string(), part.bytes))
                        .collect()
                })
                .unwrap_or_default();
            shortages.push(Shortage {
                device,
                allowed,
                needed,
                phase,
                parts,
            });
        };
        if must_use_gpu {
            for (index, allowed) in &self.gpus {
                short(Device::Cuda(*index).to_string(), *allowed, &|way| {
                    way.device.clone()
                });
            }
        }
        if let Some(cpu) = self.cpu {
            short("cpu".to_string(), cpu, &|way| way.host.clone());
        }
        shortages
    }
}

/// The way with the smallest peak, and that peak; zero without ways.
fn least(
    ways: &[Way],
    peak_of: impl Fn(&Way) -> (ByteSize, &'static str),
) -> (ByteSize, Option<&Way>) {
    ways.iter()
        .map(|way| (peak_of(way).0, Some(way)))
        .min_by_key(|(bytes, _)| *bytes)
        .unwrap_or((ByteSize::ZERO, None))
}

/// Consecutive layers on the same devices.
fn runs(layers: &[Vec<Device>], way: &Way) -> Vec<LayersPlan> {
    let mut runs: Vec<LayersPlan> = Vec::new();
    for (index, devices) in layers.iter().enumerate() {
        let devices: Vec<String> = devices.iter().map(ToString::to_string).collect();
        match runs.last_mut() {
            Some(run) if run.devices == devices => run.last = index,
            _ => runs.push(LayersPlan {
                first: index,
                last: index,
                devices,
                weights: way.settings.weights_come_from().to_string(),
            }),
        }
    }
    runs
}

#[cfg(test)]
#[path = "planner_tests.rs"]
mod tests;
