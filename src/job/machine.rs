//! The machine of a run: its worker threads, its GPUs, its memory, and the products its CPU has.

use std::error::Error;
use std::ops::RangeInclusive;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;

#[cfg(feature = "cuda")]
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, StoredDtype, kernel};
use crate::placement::inventory::Gpu;
use crate::placement::{Inventory, Policy};
use crate::ranks::Ranks;
use crate::settings::{ComputeDtype, DeviceChoice, DeviceSettings};

/// Worker threads that may be asked for.
const MOST_THREADS: RangeInclusive<usize> = 1..=1024;

/// Returns the number of worker threads: as asked, else the threads that the batch system or the machine gives this process.
pub(super) fn threads(asked: Option<u16>) -> usize {
    let slurm = || {
        let threads = std::env::var("SLURM_CPUS_PER_TASK").ok()?;
        let threads = threads.trim().parse::<usize>().ok();
        threads.filter(|threads| MOST_THREADS.contains(threads))
    };
    let affinity = || std::thread::available_parallelism().map_or(1, usize::from);
    asked.map(usize::from).or_else(slurm).unwrap_or_else(affinity)
}

/// Returns the number of worker threads of a rank: as asked, else its share where ranks of this machine may use the same processors. `None`
/// for a process that has its processors alone, or whose batch system says the number.
pub(super) fn threads_beside(asked: Option<u16>, ranks: &Ranks) -> Option<u16> {
    let sharing = ranks.neighbors().sharing_processors;
    if asked.is_some() || sharing == 1 || std::env::var_os("SLURM_CPUS_PER_TASK").is_some() {
        return asked;
    }
    u16::try_from((threads(None) / sharing).max(1)).ok()
}

/// Seconds since 1970 (UTC).
pub(super) fn unix_seconds() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.map_or(0, |elapsed| elapsed.as_secs())
}

/// Starts the global pool, once per process, and returns its number of threads.
pub(super) fn start_workers(asked: Option<u16>) -> Result<usize> {
    let threads = threads(asked);
    let built = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("worker-{index}"))
        .build_global();
    match built.as_ref().map_err(|error| error.source()) {
        Err(Some(error)) => {
            Err(Failure::new(format!("the system refuses {threads} worker threads"))
                .detail(error.to_string())
                .hint("use fewer with --threads, or raise the limit of processes (`ulimit -u`)")
                .into())
        }
        // A pool exists already: in tests several runs share a process and its first pool.
        Ok(()) | Err(None) => Ok(rayon::current_num_threads()),
    }
}

/// Limits and choices that the flags give the planner.
pub(super) fn policy(device: &DeviceSettings) -> Result<Policy> {
    Ok(Policy {
        budget: device.budget(),
        map: device.device_map.load()?,
        cpu_only: device.names_the_cpu(),
        only_gpu: match device.device {
            DeviceChoice::Cuda(Some(index)) => Some(index),
            _ => None,
        },
        must_use_gpu: matches!(device.device, DeviceChoice::Cuda(_)),
        storage: device.hidden_states.into(),
    })
}

/// The free memory of this machine and its GPUs, unless the flags exclude GPUs.
pub(super) fn inventory(device: &DeviceSettings, threads: usize) -> Result<Inventory> {
    let mut inventory = Inventory::here(threads);
    if let Some(simulation) = &device.simulate {
        for size in &simulation.gpus {
            inventory.gpus.push(Gpu { name: "simulated".to_string(), memory: size.parse()? });
        }
    } else if !device.names_the_cpu() {
        inventory.gpus = gpus();
    }
    Ok(inventory)
}

/// Returns true if all GPUs that may be used compute in bf16, and without GPUs.
pub(super) fn gpus_have_bf16(device: &DeviceSettings) -> bool {
    #[cfg(feature = "cuda")]
    if !device.names_the_cpu() && device.simulate.is_none() {
        let gpus = crate::runtime::engine::cuda::gpus();
        return gpus.iter().all(|gpu| gpu.has_bf16 || gpu.free == ByteSize::ZERO);
    }
    let _ = device;
    true
}

/// The GPUs of this machine.
#[cfg(feature = "cuda")]
pub(super) fn gpus() -> Vec<Gpu> {
    let as_planned = |gpu: crate::runtime::engine::cuda::FoundGpu| Gpu {
        name: gpu.name,
        // The plan counts a context; this process has made its own already.
        memory: match gpu.free {
            ByteSize::ZERO => ByteSize::ZERO,
            free => free + crate::model::on_device::CONTEXT,
        },
    };
    let found = crate::runtime::engine::cuda::gpus();
    found.into_iter().map(as_planned).collect()
}

/// Without the `cuda` feature there are no usable GPUs.
#[cfg(not(feature = "cuda"))]
pub(super) fn gpus() -> Vec<Gpu> {
    Vec::new()
}

/// Returns the kind of products on the CPU for weights of dtype `stored`. `auto` takes bf16 products for bf16 weights where the CPU
/// computes them fast, else f32 products, by bf16 parts where the CPU has tiles.
///
/// # Errors
/// Fails when the CPU or the checkpoint lacks what the dtype asks for.
pub(super) fn products(dtype: ComputeDtype, stored: StoredDtype) -> Result<Products> {
    let bf16 = || Kernel::best_bf16().map(|kernel| bf16_products(kernel, stored));
    match (dtype, stored) {
        (ComputeDtype::F32, _) => Ok(Products::F32),
        (ComputeDtype::Auto, StoredDtype::Bf16) => Ok(bf16().unwrap_or_default()),
        (ComputeDtype::Auto, _) | (ComputeDtype::F16, StoredDtype::F16) if Kernel::has_split() => Ok(Products::Split),
        (ComputeDtype::Auto, _) | (ComputeDtype::F16, StoredDtype::F16) => Ok(Products::F32),
        (ComputeDtype::Bf16x3, _) if Kernel::has_split() => Ok(Products::Split),
        (ComputeDtype::Bf16x3, _) => Err(Failure::new("--dtype bf16x3: this CPU has no AMX tiles")
            .detail("Intel's have them from Sapphire Rapids on, and Linux grants them from 5.16 on")
            .hint("use --dtype f32, or leave --dtype out")
            .into()),
        (ComputeDtype::Bf16, _) => bf16().ok_or_else(|| {
            Failure::new("--dtype bf16: this CPU has no bf16 products that are faster than f32's")
                .detail("they need AMX tiles (Intel from Sapphire Rapids on, Linux from 5.16 on) or AVX-512 of AMD from Zen 4 on")
                .hint("use --dtype f32, or leave --dtype out")
                .into()
        }),
        (ComputeDtype::F16, _) => Err(Failure::usage(format!(
            "--dtype f16 is for f16 checkpoints, and this one is {}",
            stored.name()
        ))
        .hint("use --dtype f32, or leave --dtype out")
        .into()),
    }
}

/// The bf16 products of a kernel for a checkpoint whose widest matrices are `stored`. Of a bf16 checkpoint, a matrix in another dtype keeps
/// its own.
pub(super) fn bf16_products(kernel: Kernel, stored: StoredDtype) -> Products {
    match stored {
        StoredDtype::Bf16 => Products::Bf16(kernel),
        StoredDtype::F32 | StoredDtype::F16 => Products::AllBf16(kernel),
    }
}

/// The devices of this build, the products and the vector features of this CPU, as three lines for `--version`.
pub fn describe() -> String {
    let split = Kernel::has_split().then_some(Kernel::Split(1));
    let kernels = [Some(Kernel::Fused), split, Kernel::best_bf16()];
    let kernels: Vec<&str> = kernels.iter().flatten().map(|kernel| kernel.name()).collect();
    let devices = if cfg!(feature = "cuda") { "cpu, cuda" } else { "cpu (built without CUDA)" };
    let features = match kernel::cpu_features() {
        features if features.is_empty() => "no vector features".to_string(),
        features => features.join(" "),
    };
    format!("devices: {devices}\nproducts: {}\ncpu: {features}\n", kernels.join("; "))
}
