//! The devices of a run, opened as its plan says: GPUs, or simulated ones for tests.

use anyhow::Result;
use serde::Deserialize;

use super::clock::DeviceGauge;
use super::engine::{Engine, Simulated};
use super::ledger::{Ledger, Refusals};
use super::seat::Seat;
use crate::bytes::ByteSize;
use crate::linalg::StoredDtype;
use crate::model::on_device::{CONTEXT, Cut};
use crate::model::{LayerContext, ModelConfig, Rotary};
use crate::run::{MemorySettings, Plan};

/// GPUs that are none, for tests of placement and fallback.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Simulation {
    /// What each of them says is free.
    pub gpus: Vec<String>,
    /// What each of them has in truth; the plan's budget where absent.
    #[serde(default)]
    pub capacity: Option<String>,
    /// Units that are refused: see [`Refusals`].
    #[serde(default)]
    pub refuse: String,
}

/// One device, opened.
#[derive(Debug, Clone)]
struct Opened {
    name: String,
    budget: ByteSize,
    #[cfg(feature = "cuda")]
    device: Option<candle_core::Device>,
    #[cfg(feature = "cuda")]
    driver_name: String,
}

/// Who computes which layer beside the CPU.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    opened: Vec<Opened>,
    by_layer: Vec<Vec<String>>,
    simulation: Option<Simulation>,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for GPUs only"))]
    dtype: Option<StoredDtype>,
}

impl Devices {
    /// Opens the devices a plan names.
    ///
    /// # Arguments
    /// * `dtype`: that of the arithmetic on GPUs
    ///
    /// # Errors
    /// Fails when a GPU cannot be opened.
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
        Ok(Self {
            opened,
            by_layer,
            simulation: simulation.cloned(),
            dtype: Some(dtype),
        })
    }

    /// Whether there is any beside the CPU.
    pub fn is_empty(&self) -> bool {
        self.opened.is_empty()
    }

    /// Reads the counters of all devices, added up; `None` where none has any.
    pub fn gauge(&self) -> Option<DeviceGauge> {
        #[cfg(feature = "cuda")]
        {
            let devices: Vec<candle_core::Device> = self
                .opened
                .iter()
                .filter_map(|opened| opened.device.clone())
                .collect();
            if devices.is_empty() {
                return None;
            }
            Some(std::sync::Arc::new(move || {
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

    /// Puts each device to work, and says who computes each layer.
    ///
    /// # Errors
    /// Fails when a device has no memory for the rotary tables.
    pub(super) fn seats(
        &self,
        config: &ModelConfig,
        seqlen: usize,
        settings: &MemorySettings,
        context: &dyn Fn() -> Result<LayerContext>,
    ) -> Result<(Vec<Seat>, Vec<Vec<String>>)> {
        let mut seats = Vec::with_capacity(self.opened.len());
        for opened in &self.opened {
            let (capacity, refusals) = match &self.simulation {
                None => (opened.budget, Refusals::default()),
                Some(simulation) => (
                    match &simulation.capacity {
                        Some(capacity) => capacity.parse::<ByteSize>()?,
                        None => opened.budget,
                    },
                    simulation
                        .refuse
                        .parse()
                        .map_err(|error: String| anyhow::anyhow!(error))?,
                ),
            };
            let engine = self.engine(opened, config, context)?;
            let ahead = match settings.prefetch {
                true => Cut::layer_bytes(config, engine.element()),
                false => ByteSize::ZERO,
            };
            let tables = ByteSize::of(Rotary::bytes(config.head_dim, seqlen), 1);
            seats.push(Seat::new(
                opened.name.clone(),
                engine,
                Ledger::new(capacity, CONTEXT + tables, refusals),
                Cut::of(settings, config),
                seqlen,
                ahead,
            ));
        }
        Ok((seats, self.by_layer.clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn engine(
        &self,
        _opened: &Opened,
        _config: &ModelConfig,
        context: &dyn Fn() -> Result<LayerContext>,
    ) -> Result<Box<dyn Engine>> {
        Ok(Box::new(Simulated::new(context()?)))
    }

    #[cfg(feature = "cuda")]
    fn engine(
        &self,
        opened: &Opened,
        config: &ModelConfig,
        context: &dyn Fn() -> Result<LayerContext>,
    ) -> Result<Box<dyn Engine>> {
        use super::engine::OnCandle;
        use crate::model::on_device::candle_dtype;
        let Some(device) = &opened.device else {
            return Ok(Box::new(Simulated::new(context()?)));
        };
        let dtype = candle_dtype(self.dtype.unwrap_or(StoredDtype::F32));
        Ok(Box::new(OnCandle::new(
            device.clone(),
            dtype,
            opened.driver_name.clone(),
            config,
            &context()?,
        )?))
    }
}

#[cfg(feature = "cuda")]
fn gpu_index(device: &str) -> Option<usize> {
    device.strip_prefix("cuda:")?.parse().ok()
}
