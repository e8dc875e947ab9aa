//! The GPUs of a merge, named by `--device cuda`. Without the flag the CPU merges, since disks are slower than both.

use anyhow::Result;

use super::memory::PassSize;
use crate::job::machine;
use crate::linalg::StoredDtype;
use crate::merging::methods::{Mixer, OnCpu};
use crate::merging::pass::{CandleMixer, MergeDevice};
use crate::model::on_device::CONTEXT;
use crate::placement::{Inventory, usable_gpus};
use crate::run::Plan;
use crate::run::plan::DevicePlan;
use crate::runtime::Devices;
use crate::settings::DeviceSettings;

/// Adds the GPUs of a merge to its plan.
///
/// # Errors
/// Fails for an absent GPU that the flags name.
pub(super) fn add(plan: &mut Plan, device: &DeviceSettings, inventory: &Inventory) -> Result<()> {
    let policy = machine::policy(device)?;
    if !policy.must_use_gpu {
        return Ok(());
    }
    for (index, budget) in usable_gpus(inventory, &policy)? {
        plan.devices.push(DevicePlan {
            device: format!("cuda:{index}"),
            budget: Some(budget),
            peak: budget.min(CONTEXT),
            peak_phase: None,
        });
    }
    Ok(())
}

/// Opens the GPUs of a plan.
///
/// # Errors
/// Fails where the driver cannot open a GPU.
pub(super) fn open(
    plan: &Plan,
    device: &DeviceSettings,
    size: PassSize,
) -> Result<Vec<MergeDevice>> {
    let devices = Devices::open(plan, StoredDtype::F32, device.simulate.as_ref())?;
    let accounts = devices.accounts()?.into_iter();
    Ok(accounts
        .map(|account| {
            let mixer: Box<dyn Mixer + Send> = match account.candle_device() {
                Some(device) => Box::new(CandleMixer(device)),
                None => Box::new(OnCpu),
            };
            MergeDevice::new(account, mixer, size.piece_elements)
        })
        .collect())
}
