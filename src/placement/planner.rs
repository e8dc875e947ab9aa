//! The planner: it finds the fastest way to execute a run that fits the memory.
//!
//! It is a pure function of numbers. An option fits where no phase needs more memory than a device's budget. Of the options that fit,
//! the planner takes the option with the least estimated time; on a tie, the first. More memory lets more options fit and forbids
//! none, so it never makes a plan slower.
//!
//! The planner first chooses the fastest settings of the layers' phases that fit, then the settings of the head. It tries the next slower
//! settings of the layers only where no settings of the head fit, or where they could still be faster. Time, by the rates of the
//! inventory (docs/dev/memory-formulas.md has the model and its limits):
//!
//! ```text
//! compute   = flop / (threads · thread rate)      on the CPU, or flop / (GPUs · rate): they share the samples. Solvers and their like
//!             are always on the CPU
//! transfers = (weights + states / GPUs) / link
//! layer     = max(compute + transfers, beside) + moved with reading ahead, compute + transfers + beside + moved without
//! total     = Σ layers + before and after
//! ```

use super::device_map::Device;
use super::inventory::{Inventory, Rates};
use super::machine::{LayerPlacement, Machine};
use super::policy::Policy;
use super::workload::{
    Demand, ExecutionOption, PhaseMemory, Processors, Work, Workload, demands, least_gpu, peak,
};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::plan::{
    DevicePlan, HiddenStatesPlan, LayersPlan, MemoryPart, PhasePlan, Plan, TimeEstimate,
};
use crate::run::{HiddenStatesStorage, Phase};

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
    /// The bytes that may be used.
    pub allowed: ByteSize,
    /// The least bytes that fit.
    pub needed: ByteSize,
    /// The phase that needs them.
    pub phase: Phase,
    /// Its parts.
    pub parts: Vec<MemoryPart>,
}

impl Shortage {
    /// The missing bytes.
    pub fn short_by(&self) -> ByteSize {
        ByteSize(self.needed.0.saturating_sub(self.allowed.0))
    }
}

/// Plans `workload` on a machine.
///
/// # Errors
/// Fails when no option fits, and when the policy names an absent device.
pub fn plan(
    workload: &dyn Workload,
    inventory: &Inventory,
    policy: &Policy,
) -> Result<Plan, PlanFailure> {
    let machine = Machine::new(workload, inventory, policy)?;
    let mut planner = Planner { workload, machine: &machine, best: None };
    for placement in machine.placements() {
        for storage in planner.storages(&placement) {
            planner.search(&placement, storage);
        }
    }
    match &planner.best {
        Some(best) => Ok(planner.plan(best)),
        None => Err(PlanFailure::DoesNotFit(planner.shortages())),
    }
}

/// The least memory a run works with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Least {
    /// Memory of the process, computing on the CPU.
    pub cpu: ByteSize,
    /// Memory of a GPU.
    pub gpu: ByteSize,
    /// Memory of the process with a GPU of this size.
    pub with_gpu: ByteSize,
}

/// Returns the least memory a run works with, on the CPU and with a GPU.
pub fn least_that_works(workload: &dyn Workload) -> Least {
    let host = |demand: &Demand| peak(&demand.host).0;
    let on_cpu = demands(workload, Processors::Cpu, None);
    let on_gpu = || demands(workload, Processors::Gpus(1), None);
    let gpu = least_gpu(workload);
    let smallest = on_gpu().filter(|demand| peak(&demand.device).0 == gpu);
    Least {
        cpu: on_cpu.map(|demand| host(&demand)).min().unwrap_or_default(),
        gpu,
        with_gpu: smallest.map(|demand| host(&demand)).min().unwrap_or_default(),
    }
}

/// An option that fits, the devices of its layers, and its demand.
struct Candidate {
    option: ExecutionOption,
    placement: LayerPlacement,
    demand: Demand,
    time: TimeEstimate,
}

/// The search for the fastest option that fits.
struct Planner<'a> {
    workload: &'a dyn Workload,
    machine: &'a Machine<'a>,
    best: Option<Candidate>,
}

impl Planner<'_> {
    /// The places for hidden states that the policy allows. States stay on GPUs only where the next layer finds them there.
    fn storages(&self, placement: &LayerPlacement) -> Vec<HiddenStatesStorage> {
        let allowed = self.machine.policy.storage;
        let mut storages = self.workload.storages(placement.processors());
        storages.retain(|&storage| {
            let has_states = storage != HiddenStatesStorage::Device || placement.is_uniform();
            has_states && allowed.is_none_or(|only| only == storage)
        });
        storages
    }

    /// Keeps the fastest option with this placement and storage that fits, if it is faster than the best option so far.
    fn search(&mut self, placement: &LayerPlacement, storage: HiddenStatesStorage) {
        let processors = placement.processors();
        let option = |settings| ExecutionOption { settings, storage, processors };
        let is_faster = |best: &Option<Candidate>, seconds: f64| {
            best.as_ref().is_none_or(|best| seconds < best.time.seconds)
        };
        let mut fitting = Vec::new();
        for settings in self.workload.layer_settings(processors) {
            let option = option(settings);
            let demand =
                self.demand(placement, &option, |workload, option| workload.layers(option));
            if self.fits(placement, &demand) {
                let time = self.time(placement, &option, &demand.work);
                fitting.push((option, demand, time));
            }
        }
        fitting.sort_by(|(_, _, a), (_, _, b)| a.seconds.total_cmp(&b.seconds));
        for (layers, demand, time) in fitting {
            if !is_faster(&self.best, time.seconds) {
                return;
            }
            for settings in self.workload.head_settings(&layers.settings) {
                let option = option(settings);
                let head =
                    self.demand(placement, &option, |workload, option| workload.head(option));
                let time = time.plus(&self.time(placement, &option, &head.work));
                if self.fits(placement, &head) && is_faster(&self.best, time.seconds) {
                    self.best = Some(Candidate {
                        option,
                        placement: placement.clone(),
                        demand: demand.clone().and(head),
                        time,
                    });
                }
            }
        }
    }

    /// The demand of an option. Where a map leaves layers to the CPU, the process has memory for both kinds of layers.
    fn demand(
        &self,
        placement: &LayerPlacement,
        option: &ExecutionOption,
        of: fn(&dyn Workload, &ExecutionOption) -> Demand,
    ) -> Demand {
        let mut demand = of(self.workload, option);
        if placement.is_mixed() {
            let on_cpu = ExecutionOption { processors: Processors::Cpu, ..option.clone() };
            for memory in of(self.workload, &on_cpu).host {
                let mut own = demand.host.iter_mut();
                match own.find(|own| own.phase == memory.phase) {
                    Some(own) if own.bytes() < memory.bytes() => *own = memory,
                    Some(_) => {}
                    None => demand.host.push(memory),
                }
            }
        }
        demand
    }

    fn fits(&self, placement: &LayerPlacement, demand: &Demand) -> bool {
        let fits_host = |cpu| peak(&demand.host).0 <= cpu;
        self.machine.cpu.is_none_or(fits_host)
            && (placement.gpus.is_empty() || peak(&demand.device).0 <= placement.allowed)
    }

    /// The time model of the file's first lines.
    fn time(
        &self,
        placement: &LayerPlacement,
        option: &ExecutionOption,
        work: &Work,
    ) -> TimeEstimate {
        let Rates { cpu_thread_gflops, gpu_tflops, disk_gb_s, pcie_gb_s } = self.machine.rates;
        let cpu = cpu_thread_gflops * 1e9 * self.machine.threads as f64;
        let gpu = gpu_tflops * 1e12;
        let (disk, link) = (disk_gb_s * 1e9, pcie_gb_s * 1e9);
        let mut total = TimeEstimate::default();
        for devices in &placement.layers {
            let gpus = devices.iter().filter(|device| **device != Device::Cpu);
            let (compute, transfers) = match gpus.count() as f64 {
                0.0 => (work.layer_flop / cpu, 0.0),
                gpus => (
                    work.layer_flop / (gpu * gpus),
                    (work.layer_uploaded + work.layer_states / gpus) / link,
                ),
            };
            let compute = compute + work.layer_host_flop / cpu;
            let (beside, moved) = (work.layer_beside / disk, work.layer_moved / disk);
            let busy = compute + transfers;
            total.seconds += moved
                + match option.settings.prefetch {
                    true => busy.max(beside),
                    false => busy + beside,
                };
            total.compute += compute;
            total.transfers += transfers;
            total.disk += beside + moved;
        }
        let once = work.once_flop / if placement.uses_gpu() { gpu } else { cpu };
        total.compute += once;
        total.disk += work.once_moved / disk;
        total.seconds += once + work.once_moved / disk;
        total
    }

    fn plan(&self, best: &Candidate) -> Plan {
        let Candidate { option, placement, demand, time } = best;
        let device = |device: Device, budget, phases: &[PhaseMemory]| {
            let (peak, peak_phase) = peak(phases);
            DevicePlan { device: device.to_string(), budget, peak, peak_phase }
        };
        let gpus = self.machine.gpus.iter();
        let used = gpus.filter(|(index, _)| placement.uses(Device::Cuda(*index)));
        let mut devices: Vec<DevicePlan> = used
            .map(|&(index, allowed)| device(Device::Cuda(index), Some(allowed), &demand.device))
            .collect();
        devices.push(device(Device::Cpu, self.machine.cpu, &demand.host));
        let phases = |device: &'static str, phases: &[PhaseMemory]| -> Vec<PhasePlan> {
            let planned = phases.iter().map(|memory| PhasePlan {
                phase: memory.phase,
                device: device.to_string(),
                bytes: memory.bytes(),
                parts: memory.parts.clone(),
            });
            planned.collect()
        };
        Plan {
            devices,
            layers: runs(&placement.layers, option.settings.weights_come_from()),
            hidden_states: HiddenStatesPlan {
                storage: option.storage,
                bytes: self.workload.hidden_states(option.processors),
            },
            memory_settings: option.settings.clone(),
            phases: [phases("cuda", &demand.device), phases("cpu", &demand.host)].concat(),
            time: *time,
            notes: self.machine.notes.clone(),
        }
    }

    /// The missing memory of the options that need least.
    fn shortages(&self) -> Vec<Shortage> {
        let needs_gpu = self.machine.needs_gpu();
        let processors = match needs_gpu {
            true => Processors::Gpus(1),
            false => Processors::Cpu,
        };
        let mut shortages = Vec::new();
        let mut short = |device: Device, allowed, of: fn(Demand) -> Vec<PhaseMemory>| {
            let demands = demands(self.workload, processors, self.machine.policy.storage);
            let least = demands.map(of).min_by_key(|phases| peak(phases).0);
            let phases = least.unwrap_or_default();
            let (needed, phase) = peak(&phases);
            let largest = phases.iter().find(|memory| Some(memory.phase) == phase);
            if let Some(memory) = largest.filter(|_| needed > allowed) {
                shortages.push(Shortage {
                    device: device.to_string(),
                    allowed,
                    needed,
                    phase: memory.phase,
                    parts: memory.parts.clone(),
                });
            }
        };
        if needs_gpu {
            for (index, allowed) in &self.machine.gpus {
                short(Device::Cuda(*index), *allowed, |demand| demand.device);
            }
        }
        if let Some(cpu) = self.machine.cpu {
            short(Device::Cpu, cpu, |demand| demand.host);
        }
        shortages
    }
}

/// Joins consecutive layers on the same devices.
fn runs(layers: &[Vec<Device>], weights: &str) -> Vec<LayersPlan> {
    let mut runs: Vec<LayersPlan> = Vec::new();
    for (index, devices) in layers.iter().enumerate() {
        let devices: Vec<String> = devices.iter().map(ToString::to_string).collect();
        match runs.last_mut() {
            Some(run) if run.devices == devices => run.last = index,
            _ => runs.push(LayersPlan {
                first: index,
                last: index,
                devices,
                weights: weights.to_string(),
            }),
        }
    }
    runs
}

#[cfg(test)]
#[path = "planner_tests.rs"]
mod tests;
