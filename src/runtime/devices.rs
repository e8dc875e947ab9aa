//! The devices of a run's plan, opened: GPUs, or simulated GPUs for tests.

use std::sync::Arc;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::clock::DeviceGauge;
use super::compute::Compute;
use super::device_worker::{DeviceWorker, WorkingDevice};
use super::engine::{Engine, Simulated};
use super::ledger::{Ledger, Refusals};
use crate::bytes::ByteSize;
use crate::linalg::{Products, StoredDtype};
use crate::model::on_device::{CONTEXT, Tiling};
use crate::model::{LayerContext, ModelConfig, Rotary};
use crate::run::fallback::{DeviceMemoryReport, DeviceWork};
use crate::run::plan::PartKind;
use crate::run::{Events, HiddenStatesStorage, MemorySettings, Plan};

/// Simulated GPUs, for tests of placement and fallback.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Simulation {
    /// The free memory that each GPU reports.
    pub gpus: Vec<String>,
    /// The memory that each GPU really has; the plan's budget if absent.
    #[serde(default)]
    pub capacity: Option<String>,
    /// Refused units: see [`Refusals`].
    #[serde(default)]
    pub refuse: String,
}

#[derive(Debug, Clone)]
struct Opened {
    name: String,
    budget: ByteSize,
    #[cfg(feature = "cuda")]
    device: Option<candle_core::Device>,
    #[cfg(feature = "cuda")]
    driver_name: String,
}

/// A device with the account of its memory.
#[derive(Debug)]
pub struct DeviceAccount {
    /// `cuda:0`.
    pub name: String,
    /// The account.
    pub ledger: Ledger,
    driver_name: String,
    #[cfg(feature = "cuda")]
    device: Option<candle_core::Device>,
}

impl DeviceAccount {
    /// The opened device; `None` for a simulated device.
    pub fn candle_device(&self) -> Option<candle_core::Device> {
        #[cfg(feature = "cuda")]
        return self.device.clone();
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// Waits for all work and gives unused memory back.
    ///
    /// # Errors
    /// Fails when the device has failed in the meantime.
    pub fn release(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            super::engine::cuda::release(device)?;
        }
        Ok(())
    }

    /// The peaks of the device's memory, and its units of work.
    pub fn memory_report(&self) -> DeviceMemoryReport {
        #[cfg(feature = "cuda")]
        let memory = self.device.as_ref().and_then(super::engine::cuda::memory);
        #[cfg(not(feature = "cuda"))]
        let memory = None::<super::engine::DeviceMemory>;
        DeviceMemoryReport {
            device: self.name.clone(),
            name: self.driver_name.clone(),
            units: self.ledger.units(),
            work: DeviceWork::default(),
            reserved_by_plan: self.ledger.peak(),
            context: CONTEXT,
            peak_allocated: memory.map(|memory| memory.peak_allocated),
            peak_reserved: memory.map(|memory| memory.peak_reserved),
        }
    }
}

/// The devices that compute in addition to the CPU, and their layers.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    opened: Vec<Opened>,
    by_layer: Vec<Vec<String>>,
    simulation: Option<Simulation>,
    /// Bytes of hidden states that stay on each device; `None` where they are elsewhere.
    states: Option<ByteSize>,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for GPUs only"))]
    dtype: Option<StoredDtype>,
}

impl Devices {
    /// Opens the devices of a plan. GPUs compute in `dtype`.
    pub fn open(plan: &Plan, dtype: StoredDtype, simulation: Option<&Simulation>) -> Result<Self> {
        let mut opened = Vec::new();
        for device in plan.devices.iter().filter(|device| device.device != "cpu") {
            opened.push(Opened {
                name: device.device.clone(),
                budget: device.budget.unwrap_or(device.peak),
                #[cfg(feature = "cuda")]
                device: match (simulation, gpu_index(&device.device)) {
                    (None, Some(index)) => Some(super::engine::cuda::open(index)?),
                    _ => None,
                },
                #[cfg(feature = "cuda")]
                driver_name: gpu_index(&device.device)
                    .and_then(|index| super::engine::cuda::gpus().get(index).cloned())
                    .map_or_else(String::new, |gpu| gpu.name),
            });
        }
        let mut by_layer = Vec::new();
        for layers in &plan.layers {
            by_layer.extend(vec![layers.devices.clone(); layers.last + 1 - layers.first]);
        }
        let stay = plan.hidden_states.storage == HiddenStatesStorage::Device && !opened.is_empty();
        let on_devices = plan.phases.iter().filter(|phase| phase.device != "cpu");
        let states = on_devices.flat_map(|phase| &phase.parts);
        let states = states.filter(|part| part.kind == PartKind::HiddenStates);
        let states = states.map(|part| part.bytes).max().filter(|_| stay);
        Ok(Self { opened, by_layer, simulation: simulation.cloned(), states, dtype: Some(dtype) })
    }

    /// The devices on which hidden states stay between layers; none where they are elsewhere, and for simulated devices.
    pub fn homes(&self) -> Vec<candle_core::Device> {
        #[cfg(feature = "cuda")]
        if self.states.is_some() {
            return self.opened.iter().filter_map(|opened| opened.device.clone()).collect();
        }
        Vec::new()
    }

    /// Returns whether the CPU is the only device.
    pub fn is_empty(&self) -> bool {
        self.opened.is_empty()
    }

    /// Returns a function that adds up the counters of all devices; `None` without devices that have counters.
    pub fn gauge(&self) -> Option<DeviceGauge> {
        #[cfg(feature = "cuda")]
        {
            let devices: Vec<candle_core::Device> =
                self.opened.iter().filter_map(|opened| opened.device.clone()).collect();
            if devices.is_empty() {
                return None;
            }
            Some(Arc::new(move || {
                let mut sum = super::engine::DeviceMemory::default();
                for memory in devices.iter().filter_map(super::engine::cuda::memory) {
                    sum = sum.plus(&memory);
                }
                sum
            }))
        }
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// The CPU and these devices, for layers of a model.
    ///
    /// # Arguments
    /// * `seqlen`: tokens per sample, at most
    ///
    /// # Errors
    /// Fails when a device has no memory for the rotary tables.
    pub fn compute<'a>(
        &self,
        config: &Arc<ModelConfig>,
        seqlen: usize,
        (settings, products): (&MemorySettings, Products),
        events: &'a dyn Events,
    ) -> Result<Compute<'a>> {
        let context = || -> Result<LayerContext> {
            let context = LayerContext::with_settings(config, seqlen, settings.clone());
            Ok(context.with_products(products))
        };
        let workers = self.workers(config, seqlen, settings, events, &context)?;
        let compute = Compute::new(context()?, workers, self.by_layer.clone(), events);
        Ok(compute.dealing_samples(self.states.is_some()))
    }

    /// Creates a worker for each device. Fails when a device has no memory for the rotary tables.
    fn workers<'a>(
        &self,
        config: &Arc<ModelConfig>,
        seqlen: usize,
        settings: &MemorySettings,
        events: &'a dyn Events,
        context: &dyn Fn() -> Result<LayerContext>,
    ) -> Result<Vec<DeviceWorker<'a>>> {
        let mut workers = Vec::with_capacity(self.opened.len());
        for opened in &self.opened {
            let engine = self.engine(opened, context)?;
            let ahead = match settings.prefetch {
                true => Tiling::layer_bytes(config, engine.element()),
                false => ByteSize::ZERO,
            };
            let tables = ByteSize::of(Rotary::bytes(&config.ropes, seqlen), 1);
            let used = CONTEXT + tables + self.states.unwrap_or_default();
            let (name, ledger) = (opened.name.clone(), self.ledger(opened, used)?);
            let worker = DeviceWorker::new(
                WorkingDevice { name, engine, ledger },
                Tiling::of(settings, config).with_indices_of_32_bits(config, seqlen),
                Arc::clone(config),
                seqlen,
                events,
            );
            workers.push(worker.with_prefetch(ahead));
        }
        Ok(workers)
    }

    /// The devices with the accounts of their memory, for work outside the layers.
    ///
    /// # Errors
    /// Fails for a simulation that cannot be read.
    pub fn accounts(&self) -> Result<Vec<DeviceAccount>> {
        let accounts = self.opened.iter().map(|opened| {
            Ok(DeviceAccount {
                name: opened.name.clone(),
                ledger: self.ledger(opened, CONTEXT)?,
                #[cfg(feature = "cuda")]
                device: opened.device.clone(),
                #[cfg(feature = "cuda")]
                driver_name: opened.driver_name.clone(),
                #[cfg(not(feature = "cuda"))]
                driver_name: "simulated".to_string(),
            })
        });
        accounts.collect()
    }

    /// The account of a device, of which `held` stays reserved.
    fn ledger(&self, opened: &Opened, held: ByteSize) -> Result<Ledger> {
        let Some(simulation) = &self.simulation else {
            return Ok(Ledger::new(opened.budget, held, Refusals::default()));
        };
        let capacity = match &simulation.capacity {
            Some(capacity) => capacity.parse::<ByteSize>()?,
            None => opened.budget,
        };
        let refusals = simulation.refuse.parse();
        let refusals = refusals.map_err(|error: String| anyhow::anyhow!(error))?;
        Ok(Ledger::new(capacity, held, refusals))
    }

    #[cfg(not(feature = "cuda"))]
    fn engine(
        &self,
        _opened: &Opened,
        context: &dyn Fn() -> Result<LayerContext>,
    ) -> Result<Box<dyn Engine>> {
        Ok(Box::new(Simulated::new(context()?)))
    }

    #[cfg(feature = "cuda")]
    fn engine(
        &self,
        opened: &Opened,
        context: &dyn Fn() -> Result<LayerContext>,
    ) -> Result<Box<dyn Engine>> {
        use super::engine::OnCandle;
        use crate::model::on_device::candle_dtype;
        let Some(device) = &opened.device else {
            return Ok(Box::new(Simulated::new(context()?)));
        };
        let dtype = candle_dtype(self.dtype.unwrap_or(StoredDtype::F32));
        let name = opened.driver_name.clone();
        let engine = OnCandle::new(device.clone(), dtype, name, &context()?)?;
        Ok(Box::new(engine.keeping_states(self.states.is_some())))
    }
}

#[cfg(feature = "cuda")]
fn gpu_index(device: &str) -> Option<usize> {
    device.strip_prefix("cuda:")?.parse().ok()
}
