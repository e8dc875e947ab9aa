//! The comparison of a run with the unfinished one in its folder: two processes may work on one run only where everything that
//! decides the outcome is equal.

use std::collections::BTreeMap;

use anyhow::Result;
use sha2::{Digest, Sha256};

use super::folder::RunFolder;
use super::opened::OpenedModel;
use super::record;
use super::texts::Texts;
use crate::bytes::hex;
use crate::failure::Failure;
use crate::linalg::product::Kernel;
use crate::run::command_line::quoted;
use crate::run::{Plan, RunState};
use crate::settings::{DeviceSettings, OutputSettings, Settings};

/// Name of the setting for the kind of products.
const ARITHMETIC: &str = "arithmetic";

/// The settings that come from the checkpoint, not from a flag.
const OF_THE_SOURCE: [&str; 2] = ["source", "config"];

/// Returns what decides the outcome and is known before texts are tokenized.
///
/// # Errors
/// Fails when the source cannot be read.
pub(super) fn early(
    settings: &Settings,
    model: &OpenedModel,
    folder: &RunFolder,
) -> Result<BTreeMap<String, String>> {
    let model_folder = match (&folder.run, &folder.model) {
        (Some(run), Some(model)) => match model.strip_prefix(run) {
            Ok(inside) => inside.display().to_string(),
            Err(_) => std::path::absolute(model)?.display().to_string(),
        },
        _ => "in the run's folder".to_string(),
    };
    let mut deciding = settings.deciding()?;
    deciding.extend(
        [
            ("program", format!("prune {}", env!("CARGO_PKG_VERSION"))),
            ("source", model.checkpoint.fingerprint()?),
            ("config", serde_json::to_string(&*model.config)?),
            ("model folder", model_folder),
        ]
        .map(|(name, value)| (name.to_string(), value)),
    );
    Ok(deciding)
}

/// Returns what decides the outcome and is known once texts are tokenized and the work is planned.
pub(super) fn late(
    texts: &Texts,
    model: &OpenedModel,
    device: &DeviceSettings,
    plan: &Plan,
) -> BTreeMap<String, String> {
    let arithmetic = record::arithmetic(model, device, plan);
    let tokens = |tokens: Option<&[u32]>| match tokens {
        Some(tokens) => {
            let bytes: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
            hex(&Sha256::digest(&bytes))
        }
        None => "none".to_string(),
    };
    let calibration = texts.calibration.as_ref();
    let windows = texts.windows.as_ref();
    let late = [
        (
            "calibration tokens",
            tokens(calibration.map(|samples| &samples.tokens[..])),
        ),
        (
            "evaluation tokens",
            tokens(windows.map(|windows| &windows.tokens[..])),
        ),
        (
            ARITHMETIC,
            format!("{} by {}", arithmetic.dtype, arithmetic.kernel),
        ),
    ];
    let mut late = BTreeMap::from(late.map(|(name, value)| (name.to_string(), value)));
    if arithmetic.device != "cpu" {
        // GPUs round otherwise than the CPU, and than other GPUs may.
        let layers = plan.layers.iter().map(|run| {
            format!(
                "layers {} to {} on {}",
                run.first,
                run.last,
                run.devices.join(" and ")
            )
        });
        let devices = layers
            .chain(model.gpu_names.iter().cloned())
            .collect::<Vec<_>>();
        late.insert("devices".to_string(), devices.join(", "));
    }
    late
}

/// Refuses to resume a run whose deciding settings differ from `settings`. With `--force` a new run begins instead (`None`).
///
/// # Errors
/// Fails with the differences and the command that resumes the run.
pub(super) fn check(
    state: RunState,
    settings: &BTreeMap<String, String>,
    folder: &RunFolder,
    output: &OutputSettings,
) -> Result<Option<RunState>> {
    let differences = state.differences(settings);
    if differences.is_empty() {
        return Ok(Some(state));
    }
    if output.force && !output.resume {
        return Ok(None);
    }
    let place = folder
        .state()
        .map_or(String::new(), |folder| folder.display().to_string());
    let only_arithmetic = differences.iter().all(|(name, _, _)| name == ARITHMETIC);
    let mut failure = Failure::new(if only_arithmetic {
        format!(
            "the run in `{place}` was begun with another arithmetic, and masks would differ between its layers"
        )
    } else {
        format!("`{place}` holds an unfinished run with other settings")
    });
    for (name, then, now) in &differences {
        let (then, now) = where_they_differ(then, now);
        let name = name.replace('_', "-");
        failure = failure.detail(format!("{name}: {then} there, {now} now"));
    }
    let then = differences.iter().find(|(name, _, _)| name == ARITHMETIC);
    let hint = match then.filter(|_| only_arithmetic) {
        Some((_, then, _)) => match flag_for(then) {
            Some(flag) => format!("add --dtype {flag} --use-cpu"),
            None => format!(
                "go on where there is {then}; or start over with --force --dtype f32 --use-cpu, which every CPU with fused multiply-adds computes alike"
            ),
        },
        None if differences
            .iter()
            .any(|(name, ..)| OF_THE_SOURCE.contains(&name.as_str())) =>
        {
            format!(
                "bring the checkpoint back to what it was and go on with `{}`, choose another --save folder, or start over with --force",
                quoted(&state.arguments)
            )
        }
        None => format!(
            "go on with `{}`, choose another --save folder, or start over with --force",
            quoted(&state.arguments)
        ),
    };
    Err(failure.hint(hint).into())
}

/// Two values; long ones begin shortly before their first difference.
fn where_they_differ(then: &str, now: &str) -> (String, String) {
    /// Characters that are shown, and those of them before the difference.
    const SHOWN: usize = 60;
    const BEFORE: usize = 30;
    let alike = then.chars().zip(now.chars());
    let alike = alike.take_while(|(then, now)| then == now).count();
    let is_long = |value: &str| value.chars().nth(SHOWN).is_some();
    let skipped = if is_long(then) || is_long(now) {
        alike.saturating_sub(BEFORE)
    } else {
        0
    };
    let shown = |value: &str| {
        let some: String = value.chars().skip(skipped).take(SHOWN).collect();
        let is_cut = value.chars().nth(skipped + SHOWN).is_some();
        let (before, behind) = (
            if skipped > 0 { "..." } else { "" },
            if is_cut { "..." } else { "" },
        );
        format!("{before}{some}{behind}")
    };
    (shown(then), shown(now))
}

/// Returns the value of `--dtype` for this arithmetic, if the CPU has it.
fn flag_for(arithmetic: &str) -> Option<&'static str> {
    let split = Kernel::has_split().then_some(("bf16x3", "f32", Kernel::Split(1)));
    let bf16 = Kernel::best_bf16().map(|kernel| ("bf16", "bf16", kernel));
    let here = [Some(("f32", "f32", Kernel::Fused)), split, bf16];
    let is_it = |(_, dtype, kernel): &(_, &str, Kernel)| {
        arithmetic == format!("{dtype} by {}", kernel.name())
    };
    here.into_iter()
        .flatten()
        .find(is_it)
        .map(|(flag, ..)| flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_shown_where_they_differ() {
        let config = |epsilon: &str| format!("{{{}\"rms_norm_eps\":{epsilon}}}", "x".repeat(500));
        let (then, now) = where_they_differ(&config("1e-5"), &config("1e-6"));
        assert!(then.ends_with("\"rms_norm_eps\":1e-5}"), "{then}");
        assert!(now.ends_with("\"rms_norm_eps\":1e-6}"), "{now}");
        assert!(then.starts_with("...x") && then.len() < 80, "{then}");
        let (then, now) = where_they_differ("0.5", "0.6");
        assert_eq!((then.as_str(), now.as_str()), ("0.5", "0.6"));
    }
}
