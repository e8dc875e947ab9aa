//! Warnings of flags that a run was given and does not read, as `prune merge` warns of an unused `--base`.
//!
//! Settings hold a value for every flag, so the command line says which were given.

use super::resolved::{Pruning, prunes_nothing};
use crate::run::Events;
use crate::settings::Settings;

/// Warns of every flag that was given and is not read.
///
/// # Arguments
/// * `settings`: with `calibration` taken out where the run reads no samples
pub(super) fn warn(settings: &Settings, pruning: Option<&Pruning>, events: &dyn Events) {
    let arguments = &settings.arguments;
    // The cells of a sweep share their flags, and a flag may be for some cells only.
    if arguments.get(1).is_some_and(|command| command == "sweep") {
        return;
    }
    let is_given = |flag: &str| {
        arguments.iter().any(|word| word.split('=').next().is_some_and(|name| name == flag))
    };
    for (flag, reason) in unused(settings, pruning) {
        if is_given(&flag) {
            events.warn(format!("{flag} is not used: {reason}"));
        }
    }
}

/// The flags that the run does not read, with the reasons.
fn unused(settings: &Settings, pruning: Option<&Pruning>) -> Vec<(String, String)> {
    let of_recovery = settings.recovery.iter().flat_map(|recovery| recovery.unread());
    let mut unused: Vec<(String, String)> = of_recovery
        .map(|(name, reason)| (format!("--{}", name.replace('_', "-")), reason))
        .collect();
    let Some(pruning) = pruning else { return unused };
    if prunes_nothing(&pruning.targets) {
        let reason = "no weights are removed; name their share, like --sparsity-ratio 0.5";
        unused.push(("--prune-method".to_string(), reason.to_string()));
    }
    if settings.calibration.is_none() {
        let method = pruning.technique.method.name();
        let reason = match prunes_nothing(&pruning.targets) {
            true => "no weights are removed".to_string(),
            false => format!("the method `{method}` reads no samples"),
        };
        unused.extend(["--dataset", "--nsamples"].map(|flag| (flag.to_string(), reason.clone())));
    }
    unused
}
