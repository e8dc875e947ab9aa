//! From settings to a plan, or to a refusal with flags that were tried and work.

use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::pipeline::RunShape;
use crate::placement::{self, Inventory, PlanFailure, Policy, Shortage};
use crate::run::{HiddenStatesStorage, Plan};

/// Plans a job.
///
/// # Errors
/// Where it does not fit: the devices that are too small, by how much, and the nearest settings that fit; as `placement::plan`
/// for devices that are not there.
pub(super) fn plan(
    job: &RunShape<'_>,
    inventory: &Inventory,
    policy: &Policy,
) -> Result<Plan, Failure> {
    placement::plan(job, inventory, policy).map_err(|failure| match failure {
        PlanFailure::DoesNotFit(shortages) => refusal(&shortages, job, inventory, policy),
        PlanFailure::Unusable(failure) => failure,
    })
}

fn refusal(
    shortages: &[Shortage],
    job: &RunShape<'_>,
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
    let advice = advice(shortages, job, inventory, policy);
    if advice.is_empty() {
        failure
    } else {
        failure.hint(format!("use {}", advice.join(", or ")))
    }
}

fn describe(shortage: &Shortage) -> String {
    let mut parts: Vec<_> = shortage
        .parts
        .iter()
        .filter(|part| part.bytes > ByteSize::ZERO)
        .collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let parts: Vec<String> = parts
        .iter()
        .map(|part| format!("{} {}", part.kind, part.bytes))
        .collect();
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

/// Changes of one setting that make the plan fit, each tried.
fn advice(
    shortages: &[Shortage],
    job: &RunShape<'_>,
    inventory: &Inventory,
    policy: &Policy,
) -> Vec<String> {
    let fits =
        |job: &RunShape<'_>, policy: &Policy| placement::plan(job, inventory, policy).is_ok();
    let mut advice = Vec::new();
    if let [only] = shortages
        && only.device == "cpu"
    {
        let mut larger = policy.clone();
        larger.budget = policy.budget.with_cpu(only.needed);
        // What is printed is rounded up to whole MiB.
        if fits(job, &larger) {
            advice.push(format!("--max-memory {}", larger.budget));
        }
    }
    if policy.storage == Some(HiddenStatesStorage::Ram) {
        let free = Policy {
            storage: None,
            ..policy.clone()
        };
        if fits(job, &free) {
            advice.push("--hidden-states auto".to_string());
        }
    }
    let mut shorter = job.clone();
    while shorter.seqlen >= 256 {
        shorter.seqlen /= 2;
        if fits(&shorter, policy) {
            advice.push(format!("--seqlen {}", shorter.seqlen));
            break;
        }
    }
    if job.windows > 0 && job.prunes {
        let unmeasured = RunShape {
            windows: 0,
            ..job.clone()
        };
        if fits(&unmeasured, policy) {
            advice.push("--eval none".to_string());
        }
    }
    if !policy.cpu_only && policy.map != placement::DeviceMap::Auto {
        let free = Policy {
            map: placement::DeviceMap::Auto,
            ..policy.clone()
        };
        if fits(job, &free) {
            advice.push("--device-map auto".to_string());
        }
    }
    advice
}
