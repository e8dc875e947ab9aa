//! Records of devices, and plans, that several passes of a run add to.

use crate::run::Plan;
use crate::run::fallback::{DeviceMemoryReport, FallbackReport};

/// The work that GPUs had no memory for, and the memory that they had in use, over all parts of a run.
#[derive(Debug, Default)]
pub(super) struct DeviceRecords {
    pub(super) fallbacks: Vec<FallbackReport>,
    pub(super) devices: Vec<DeviceMemoryReport>,
}

impl DeviceRecords {
    /// Adds the records of a part. Units of a device add up, and the larger peak counts.
    pub(super) fn add(&mut self, fallbacks: Vec<FallbackReport>, devices: Vec<DeviceMemoryReport>) {
        self.fallbacks.extend(fallbacks);
        for report in devices {
            let mut devices = self.devices.iter_mut();
            match devices.find(|known| known.device == report.device) {
                None => self.devices.push(report),
                Some(known) => {
                    known.units += report.units;
                    known.reserved_by_plan = known.reserved_by_plan.max(report.reserved_by_plan);
                    known.peak_allocated = known.peak_allocated.max(report.peak_allocated);
                    known.peak_reserved = known.peak_reserved.max(report.peak_reserved);
                }
            }
        }
    }
}

/// The plan of the whole run: the plan of the measurement, then the plan of the merge. The larger peak counts, times add up.
pub(super) fn joined(measuring: Plan, merging: Plan) -> Plan {
    let mut devices = measuring.devices;
    for device in merging.devices {
        match devices.iter_mut().find(|known| known.device == device.device) {
            Some(known) if known.peak >= device.peak => {}
            Some(known) => *known = device,
            None => devices.push(device),
        }
    }
    let mut phases = measuring.phases;
    for phase in merging.phases {
        let is_it = |known: &&mut crate::run::plan::PhasePlan| {
            known.phase == phase.phase && known.device == phase.device
        };
        match phases.iter_mut().find(is_it) {
            Some(known) if known.bytes >= phase.bytes => {}
            Some(known) => *known = phase,
            None => phases.push(phase),
        }
    }
    let mut notes = measuring.notes;
    notes.extend(merging.notes);
    Plan {
        devices,
        layers: measuring.layers,
        hidden_states: measuring.hidden_states,
        memory_settings: measuring.memory_settings,
        phases,
        time: measuring.time.plus(&merging.time),
        notes,
    }
}
