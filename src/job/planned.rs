//! From settings to a plan, or to a refusal with flags that were tried and work.
//!
//! A run is planned in three stages, so that it fails as early as possible: before its texts are found, with a single window; with the
//! memory of tokenizing, before the tokenizer is loaded and, if texts cannot be cut, again after; and with the counted windows.

use std::path::Path;

use anyhow::Result;

use super::machine;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::Products;
use crate::linalg::product::Kernel;
use crate::pipeline::RunShape;
use crate::placement::{self, Inventory, PlanFailure, Policy, Shortage};
use crate::ranks::Ranks;
use crate::report::plan::duration;
use crate::run::{Events, HiddenStatesStorage, Plan};
use crate::runtime::check_spill_folder;
use crate::settings::{ComputeDtype, DeviceSettings, HiddenStatesChoice};

/// The planner of a run on this machine.
pub(super) struct Planning<'a> {
    device: &'a DeviceSettings,
    policy: Policy,
    threads: usize,
    /// The ranks of this machine, which divide its memory among them.
    neighbors: usize,
}

impl<'a> Planning<'a> {
    /// Reads the device map, if the flags name it.
    pub(super) fn new(device: &'a DeviceSettings, threads: usize) -> Result<Self> {
        Ok(Self { device, policy: machine::policy(device)?, threads, neighbors: 1 })
    }

    /// The same for a rank: the ranks of a machine divide its memory among them.
    #[must_use]
    pub(super) fn beside(self, ranks: &Ranks) -> Self {
        Self { neighbors: ranks.neighbors().ranks, ..self }
    }

    /// Plans a run with the memory that is free now.
    ///
    /// # Errors
    /// Fails where it does not fit, with the shortage and flags that do.
    pub(super) fn plan(&self, shape: &RunShape<'_>) -> Result<Plan> {
        Ok(plan(shape, &self.inventory()?, &self.policy)?)
    }

    /// Names a much faster `--dtype` in the notes of a plan, if there is one.
    ///
    /// # Errors
    /// Fails where the memory of this machine is unknown.
    pub(super) fn name_faster_dtype(
        &self,
        dtype: ComputeDtype,
        plan: &mut Plan,
        shape: &RunShape<'_>,
    ) -> Result<()> {
        let machine = (&self.inventory()?, &self.policy);
        plan.notes.extend(faster_dtype(dtype, plan, shape, machine));
        Ok(())
    }

    fn inventory(&self) -> Result<Inventory> {
        Ok(machine::inventory(self.device, self.threads)?.divided(self.neighbors))
    }

    /// Returns whether a run has room on the devices that it names.
    ///
    /// # Errors
    /// Fails where the memory of this machine is unknown.
    pub(super) fn has_room(&self, shape: &RunShape<'_>) -> Result<bool> {
        let planned = placement::plan(shape, &self.inventory()?, &self.policy);
        Ok(!matches!(planned, Err(PlanFailure::DoesNotFit(_))))
    }

    /// Checks the folder of the spill file where the plan keeps hidden states on disk. Warns unless a flag asks for the disk.
    pub(super) fn check_spill(
        &self,
        plan: &Plan,
        folder: &Path,
        events: &dyn Events,
    ) -> Result<()> {
        if plan.hidden_states.storage != HiddenStatesStorage::Disk {
            return Ok(());
        }
        if self.device.hidden_states == HiddenStatesChoice::Auto {
            let budget = plan.cpu().and_then(|cpu| cpu.budget).unwrap_or_default();
            events.warn(format!(
                "hidden states ({}) do not fit next to the rest into {budget}: they spill to `{}`",
                plan.hidden_states.bytes,
                folder.display()
            ));
        }
        check_spill_folder(folder)
    }
}

/// Plans a run.
///
/// # Errors
/// Fails where it does not fit, with the devices that are too small, the shortage, and the nearest settings that fit; and as
/// `placement::plan` for devices that are missing.
pub(super) fn plan(
    shape: &RunShape<'_>,
    inventory: &Inventory,
    policy: &Policy,
) -> Result<Plan, Failure> {
    placement::plan(shape, inventory, policy).map_err(|failure| match failure {
        PlanFailure::DoesNotFit(shortages) => refusal(&shortages, shape, inventory, policy),
        PlanFailure::Unusable(failure) => failure,
    })
}

/// Runs that take less are not worth another dtype, in seconds.
const WORTH_ANOTHER_DTYPE: f64 = 60.0;
/// The least gain of a dtype that is named, as a ratio of times.
const NAMED_GAIN: f64 = 1.5;

/// Names the `--dtype` that computes a planned run much faster on this CPU than `auto`, with its time. `None` where there is none.
pub(super) fn faster_dtype(
    dtype: ComputeDtype,
    plan: &Plan,
    shape: &RunShape<'_>,
    (inventory, policy): (&Inventory, &Policy),
) -> Option<String> {
    let is_chosen = dtype == ComputeDtype::Auto && !shape.products.are_bf16();
    let kernel = Kernel::best_bf16().filter(|_| is_chosen && plan.computing() == "cpu")?;
    let in_bf16 = RunShape { products: Products::AllBf16(kernel), ..shape.clone() };
    let other = placement::plan(&in_bf16, inventory, policy).ok()?;
    let (now, then) = (plan.time.seconds, other.time.seconds);
    (now >= WORTH_ANOTHER_DTYPE && now >= NAMED_GAIN * then).then(|| {
        format!(
            "--dtype bf16 takes about {} instead: it rounds the factors of products to bf16",
            duration(then)
        )
    })
}

fn refusal(
    shortages: &[Shortage],
    shape: &RunShape<'_>,
    inventory: &Inventory,
    policy: &Policy,
) -> Failure {
    let Some(shortage) = shortages.first() else {
        return Failure::new("no device may be used for this job")
            .hint("allow a device in --max-memory, or leave --device-map out");
    };
    let mut failure = Failure::new(format!(
        "this run does not fit into {} of {}",
        shortage.allowed, shortage.device
    ));
    for shortage in shortages {
        failure = failure.detail(describe(shortage));
    }
    let advice = advice(shortages, shape, inventory, policy);
    if advice.is_empty() { failure } else { failure.hint(format!("use {}", advice.join(", or "))) }
}

fn describe(shortage: &Shortage) -> String {
    let mut parts: Vec<_> =
        shortage.parts.iter().filter(|part| part.bytes > ByteSize::ZERO).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let parts: Vec<String> =
        parts.iter().map(|part| format!("{} {}", part.kind, part.bytes)).collect();
    format!(
        "{}: \"{}\" needs at least {} ({}), {} allowed, {} ({} bytes) short",
        shortage.device,
        shortage.phase,
        shortage.needed,
        parts.join(", "),
        shortage.allowed,
        shortage.short_by(),
        shortage.short_by().0
    )
}

/// Changes of a single setting that make the plan fit, each tried.
fn advice(
    shortages: &[Shortage],
    shape: &RunShape<'_>,
    inventory: &Inventory,
    policy: &Policy,
) -> Vec<String> {
    let mut advice = Vec::new();
    let mut try_out = |flag: &str, shape: &RunShape<'_>, policy: &Policy| {
        let fits = placement::plan(shape, inventory, policy).is_ok();
        if fits {
            advice.push(flag.to_string());
        }
        fits
    };
    if let [only] = shortages
        && only.device == "cpu"
    {
        let mut larger = policy.clone();
        larger.budget = policy.budget.with_cpu(only.needed);
        // The printed budget is rounded up to whole MiB.
        let flag = format!("--max-memory {}", larger.budget);
        try_out(&flag, shape, &larger);
    }
    if policy.storage == Some(HiddenStatesStorage::Ram) {
        let mut free = policy.clone();
        free.storage = None;
        try_out("--hidden-states auto", shape, &free);
    }
    let mut shorter = shape.clone();
    while shorter.seqlen >= 256 {
        shorter.seqlen /= 2;
        if try_out(&format!("--seqlen {}", shorter.seqlen), &shorter, policy) {
            break;
        }
    }
    if shape.windows > 0 && shape.technique.is_some() {
        let mut unmeasured = shape.clone();
        unmeasured.windows = 0;
        try_out("--eval none", &unmeasured, policy);
    }
    if !policy.cpu_only && policy.map != placement::DeviceMap::Auto {
        let mut free = policy.clone();
        free.map = placement::DeviceMap::Auto;
        try_out("--device-map auto", shape, &free);
    }
    advice
}
