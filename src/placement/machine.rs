//! The devices that may compute, and the ways to spread the layers over them.

use super::device_map::{Device, DeviceMap};
use super::inventory::{Inventory, Rates};
use super::policy::{Policy, cpu_budget};
use super::workload::{Processors, Workload, least_gpu};
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// A machine under a policy.
pub(super) struct Machine<'a> {
    pub policy: &'a Policy,
    pub rates: Rates,
    pub threads: usize,
    /// Usable bytes of the process; `None` where they are unknown.
    pub cpu: Option<ByteSize>,
    /// GPUs that may compute, with the usable bytes of each.
    pub gpus: Vec<(usize, ByteSize)>,
    pub notes: Vec<String>,
    layers: usize,
    layer_weights: ByteSize,
}

/// The devices of each layer.
#[derive(Clone)]
pub(super) struct LayerPlacement {
    /// By layer, its devices, which share the samples.
    pub layers: Vec<Vec<Device>>,
    /// The GPUs it may use; empty where the CPU computes all layers.
    pub gpus: Vec<usize>,
    /// The usable bytes of the smallest of them.
    pub allowed: ByteSize,
}

impl LayerPlacement {
    pub(super) fn processors(&self) -> Processors {
        match self.gpus.is_empty() {
            true => Processors::Cpu,
            false => Processors::Gpus(self.layers.iter().map(Vec::len).max().unwrap_or(1)),
        }
    }

    pub(super) fn uses(&self, device: Device) -> bool {
        self.layers.iter().flatten().any(|of| *of == device)
    }

    pub(super) fn uses_gpu(&self) -> bool {
        self.layers.iter().flatten().any(|of| *of != Device::Cpu)
    }

    /// Returns whether the same GPUs compute every layer, so that hidden states can stay on them.
    pub(super) fn is_uniform(&self) -> bool {
        self.uses_gpu() && !self.is_mixed() && self.layers.windows(2).all(|two| two[0] == two[1])
    }

    /// Returns whether a map with GPUs leaves layers to the CPU.
    pub(super) fn is_mixed(&self) -> bool {
        !self.gpus.is_empty() && self.uses(Device::Cpu)
    }
}

/// Returns the usable bytes of a GPU: the smaller of budget and free memory. Without a budget 5 % stay free, at least 256 MiB, for
/// the driver and for other programs. Zero for an absent GPU.
fn gpu_budget(inventory: &Inventory, policy: &Policy, index: usize) -> ByteSize {
    let Some(gpu) = inventory.gpus.get(index) else {
        return ByteSize::ZERO;
    };
    match policy.budget.gpu(index) {
        Some(budget) => budget.min(gpu.memory),
        None => {
            let reserve = (gpu.memory.0 / 20).max(256 << 20);
            ByteSize(gpu.memory.0.saturating_sub(reserve))
        }
    }
}

/// The GPUs that a policy lets compute, with the usable bytes of each.
///
/// # Errors
/// Fails for an absent GPU that the policy names.
pub fn usable_gpus(
    inventory: &Inventory,
    policy: &Policy,
) -> Result<Vec<(usize, ByteSize)>, Failure> {
    let present = inventory.gpus.len();
    check_present(present, policy)?;
    let may_use = |index: &usize| policy.only_gpu.is_none_or(|only| only == *index);
    let gpus = (0..present).filter(may_use);
    Ok(gpus.map(|index| (index, gpu_budget(inventory, policy, index))).collect())
}

impl<'a> Machine<'a> {
    /// Fails for an absent device, and for a map that leaves a layer without a device.
    pub(super) fn new(
        workload: &dyn Workload,
        inventory: &Inventory,
        policy: &'a Policy,
    ) -> Result<Self, Failure> {
        let present = inventory.gpus.len();
        check(workload, present, policy)?;
        let mut notes = Vec::new();
        let mut gpus = Vec::new();
        let may_use = |index: &usize| policy.only_gpu.is_none_or(|only| only == *index);
        if !policy.cpu_only && present > 0 {
            let least = least_gpu(workload);
            if least == ByteSize::ZERO {
                let why = "the method has no work for them, a sample is too long for their kernels, or the given memory settings need the CPU";
                notes.push(format!("no GPU is used: {why}"));
            }
            for index in (0..present).filter(may_use) {
                let allowed = gpu_budget(inventory, policy, index);
                if allowed < least && allowed > ByteSize::ZERO {
                    notes.push(format!(
                        "cuda:{index} is not used: a layer needs {least} there, {allowed} may be used"
                    ));
                }
                gpus.push((index, allowed));
            }
        }
        Ok(Self {
            policy,
            rates: inventory.rates,
            threads: inventory.cpu.threads.max(1),
            cpu: cpu_budget(inventory, &policy.budget),
            gpus,
            notes,
            layers: workload.num_hidden_layers(),
            layer_weights: workload.layer_weights(),
        })
    }

    /// Returns whether the plan fails without a GPU: `--device cuda`, or a map that names a GPU.
    pub(super) fn needs_gpu(&self) -> bool {
        match &self.policy.map {
            DeviceMap::Manual(map) => self.policy.must_use_gpu || map.gpus().next().is_some(),
            _ => self.policy.must_use_gpu,
        }
    }

    /// The placements to try: the CPU, then all GPUs, then all GPUs but the smallest, and so on.
    pub(super) fn placements(&self) -> impl Iterator<Item = LayerPlacement> + '_ {
        let on_cpu = (!self.needs_gpu()).then(|| LayerPlacement {
            layers: vec![vec![Device::Cpu]; self.layers],
            gpus: Vec::new(),
            allowed: ByteSize::ZERO,
        });
        let mut budgets: Vec<ByteSize> = self.gpus.iter().map(|(_, allowed)| *allowed).collect();
        budgets.sort();
        budgets.dedup();
        let on_gpus = budgets.into_iter().filter_map(|least| {
            let large = self.gpus.iter().filter(|(_, allowed)| *allowed >= least);
            let gpus: Vec<usize> = large.map(|(index, _)| *index).collect();
            Some(LayerPlacement { layers: self.spread(&gpus)?, gpus, allowed: least })
        });
        on_cpu.into_iter().chain(on_gpus)
    }

    /// Returns the devices of each layer; `None` where a manual map names a GPU that is not among `gpus`.
    fn spread(&self, gpus: &[usize]) -> Option<Vec<Vec<Device>>> {
        let count = self.layers;
        let cuda = |index: &usize| Device::Cuda(*index);
        Some(match &self.policy.map {
            DeviceMap::Auto => vec![gpus.iter().map(cuda).collect(); count],
            DeviceMap::Balanced => {
                (0..count).map(|layer| vec![cuda(&gpus[layer * gpus.len() / count])]).collect()
            }
            DeviceMap::Sequential => {
                let mut layers = Vec::with_capacity(count);
                for (position, index) in gpus.iter().enumerate() {
                    let allowed = self.gpus.iter().find(|(of, _)| of == index)?.1;
                    let left = count - layers.len();
                    let fitting = (allowed.0 / self.layer_weights.0.max(1)) as usize;
                    let is_last = position + 1 == gpus.len();
                    let here = if is_last { left } else { left.min(fitting) };
                    layers.extend(std::iter::repeat_n(vec![cuda(index)], here));
                }
                layers
            }
            DeviceMap::Manual(map) => {
                let main = Device::Cuda(*gpus.first()?);
                let device = |layer| match map.layer(layer, main).ok()? {
                    Device::Cuda(index) if !gpus.contains(&index) => None,
                    device => Some(vec![device]),
                };
                (0..count).map(device).collect::<Option<_>>()?
            }
        })
    }
}

/// Refuses a policy that names an absent GPU, or leaves a layer without a device.
fn check(workload: &dyn Workload, present: usize, policy: &Policy) -> Result<(), Failure> {
    check_present(present, policy)?;
    if let DeviceMap::Manual(map) = &policy.map {
        // A layer without a device is an error, whatever fits.
        for layer in 0..workload.num_hidden_layers() {
            map.layer(layer, Device::Cpu)?;
        }
    }
    Ok(())
}

/// Fails for an absent device that is named.
fn check_present(present: usize, policy: &Policy) -> Result<(), Failure> {
    let of_map = match &policy.map {
        DeviceMap::Manual(map) => map.gpus().collect(),
        _ => Vec::new(),
    };
    let named = policy.budget.gpus().chain(policy.only_gpu).chain(of_map);
    if let Some(missing) = named.filter(|&index| index >= present).max() {
        let there = match present {
            0 => "no GPU can be used".to_string(),
            1 => "the one GPU is cuda:0".to_string(),
            _ => format!("the last GPU is cuda:{}", present - 1),
        };
        return Err(Failure::usage(format!("cuda:{missing} is not there: {there}"))
            .hint("name devices that are there, or --use-cpu"));
    }
    if policy.must_use_gpu && present == 0 {
        return Err(Failure::new("no GPU can be used: the driver names none")
            .hint("look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --use-cpu"));
    }
    Ok(())
}
