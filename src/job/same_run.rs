//! The comparison of a run with the unfinished run in its folder: two processes may work on the same run only where everything that
//! decides the outcome is equal.

use std::collections::BTreeMap;

use anyhow::Result;

use super::folder::RunFolder;
use super::model_report::arithmetic;
use super::opened::OpenedModel;
use super::texts::Texts;
use crate::data::Examples;
use crate::failure::Failure;
use crate::linalg::product::Kernel;
use crate::run::command_line::quoted;
use crate::run::manifest::PerplexityReport;
use crate::run::state::{KNOWN_LATER, OF_THE_RATE};
use crate::run::{Manifest, Plan, RunState, TextProtocol};
use crate::settings::{DeviceSettings, OutputSettings, Settings};

/// Name of the setting for the kind of products.
const ARITHMETIC: &str = "arithmetic";

/// The settings that come from the checkpoint, not from a flag.
const OF_THE_SOURCE: [&str; 2] = ["source", "config"];

/// The identity of a run: a process with the same command line continues what an earlier process left.
#[derive(Default)]
pub(super) struct RunIdentity {
    /// Everything that decides the outcome, by name.
    pub(super) deciding: BTreeMap<String, String>,
    /// The state that an earlier process left of this run.
    pub(super) unfinished: Option<RunState>,
}

impl RunIdentity {
    /// A new state of this run.
    pub(super) fn begin(&self, arguments: &[String], started_unix_seconds: u64) -> RunState {
        RunState::begin(arguments, started_unix_seconds, &self.deciding)
    }

    /// The state that an earlier process left, or a new state.
    pub(super) fn state(&self, arguments: &[String], started_unix_seconds: u64) -> RunState {
        let begun = || self.begin(arguments, started_unix_seconds);
        self.unfinished.clone().unwrap_or_else(begun)
    }
}

/// Returns what decides the outcome and is known before texts are tokenized.
pub(super) fn early(
    settings: &Settings,
    model: &OpenedModel,
    folder: &RunFolder,
) -> Result<BTreeMap<String, String>> {
    let mut deciding = settings.deciding()?;
    deciding.extend(
        [
            ("program", format!("prune {}", env!("CARGO_PKG_VERSION"))),
            ("source", model.checkpoint.fingerprint()?),
            ("config", serde_json::to_string(&*model.config)?),
            ("model folder", model_folder(folder)?),
        ]
        .map(|(name, value)| (name.to_string(), value)),
    );
    Ok(deciding)
}

/// The model's folder, seen from the run folder where it lies inside.
pub(super) fn model_folder(folder: &RunFolder) -> Result<String> {
    Ok(match (&folder.run, &folder.model) {
        (Some(run), Some(model)) => match model.strip_prefix(run) {
            Ok(inside) => inside.display().to_string(),
            Err(_) => std::path::absolute(model)?.display().to_string(),
        },
        _ => "in the run's folder".to_string(),
    })
}

/// Returns what decides the outcome and is known once texts are tokenized and the work is planned.
pub(super) fn late(
    texts: &Texts,
    model: &OpenedModel,
    device: &DeviceSettings,
    plan: &Plan,
) -> BTreeMap<String, String> {
    let arithmetic = arithmetic(model, device, plan);
    let tokens = |text: Option<&TextProtocol>| {
        text.map_or("none".to_string(), |text| text.tokens_sha256.clone())
    };
    let calibration = texts.calibration.as_ref().map(|samples| &samples.protocol);
    let windows = texts.windows.as_ref().map(|windows| &windows.protocol);
    let examples = texts.examples.as_ref();
    let of_examples = |examples: &Examples| {
        let (text, predicted) = (examples.protocol(), examples.total_predicted());
        format!("{}, {predicted} of them predicted", text.tokens_sha256)
    };
    let trained = examples.map(|(trained, _)| of_examples(trained));
    let held = examples.and_then(|(_, held)| Some(of_examples(held.as_ref()?)));
    let none = || "none".to_string();
    let late = [
        ("calibration tokens", tokens(calibration)),
        ("training tokens", trained.unwrap_or_else(none)),
        ("held-out tokens", held.unwrap_or_else(none)),
        ("evaluation tokens", tokens(windows)),
        ("task tokens", texts.task_layout().map_or_else(none, |tasks| tasks.sha256.clone())),
        (ARITHMETIC, format!("{} by {}", arithmetic.dtype, arithmetic.kernel)),
    ];
    let mut late = BTreeMap::from(late.map(|(name, value)| (name.to_string(), value)));
    if arithmetic.device != "cpu" {
        // GPUs round differently from the CPU, and rounding may differ from GPU to GPU.
        let layers = plan.layers.iter().map(|run| {
            format!("layers {} to {} on {}", run.first, run.last, run.devices.join(" and "))
        });
        let devices = layers.chain(model.gpu_names.iter().cloned()).collect::<Vec<_>>();
        late.insert("devices".to_string(), devices.join(", "));
    }
    debug_assert!(late.keys().all(|name| KNOWN_LATER.contains(&name.as_str())));
    late
}

/// The dense perplexity in the record `dense`, where this run would measure the same: equal model, tokens and arithmetic.
pub(super) fn dense_of(
    dense: &Manifest,
    texts: &Texts,
    model: &OpenedModel,
    device: &DeviceSettings,
    plan: &Plan,
) -> Option<PerplexityReport> {
    let (text, other) = (texts.windows.as_ref()?, dense.evaluation.as_ref()?);
    let here = arithmetic(model, device, plan);
    let there = &dense.arithmetic;
    let is_same = text.protocol.tokens_sha256 == other.tokens_sha256
        && text.protocol.seqlen == other.seqlen
        && model.checkpoint.identity() == dense.model.identity
        && (&here.device, &here.dtype, &here.kernel)
            == (&there.device, &there.dtype, &there.kernel);
    dense.perplexity.dense.filter(|_| is_same)
}

/// Refuses to resume a run whose deciding settings differ from `settings`; a training that diverged may change the settings
/// `OF_THE_RATE`. With `--force` a new run begins instead (`None`).
///
/// # Errors
/// Fails with the differences and the command that resumes the run.
pub(super) fn check(
    state: RunState,
    settings: &BTreeMap<String, String>,
    folder: &RunFolder,
    output: &OutputSettings,
) -> Result<Option<RunState>> {
    let mut differences = state.differences(settings);
    if state.divergence.is_some() {
        differences.retain(|(name, ..)| !OF_THE_RATE.contains(&name.as_str()));
    }
    if differences.is_empty() {
        return Ok(Some(state));
    }
    if output.force && !output.resume {
        return Ok(None);
    }
    let place = folder.state().map(|folder| folder.display().to_string());
    let place = place.unwrap_or_default();
    let (refusal, hint) = match &differences[..] {
        [(name, then, _)] if name == ARITHMETIC => (
            format!(
                "the run in `{place}` was begun with another arithmetic, and masks would differ between its layers"
            ),
            match flag_for(then) {
                Some(flag) => format!("add --dtype {flag} --use-cpu"),
                None => format!(
                    "continue where there is {then}; or start over with --force --dtype f32 --use-cpu, which every CPU with fused multiply-adds computes alike"
                ),
            },
        ),
        _ => {
            let mut names = differences.iter().map(|(name, ..)| name.as_str());
            let first = match names.any(|name| OF_THE_SOURCE.contains(&name)) {
                true => "bring the checkpoint back to what it was and ",
                false => "",
            };
            (
                format!("`{place}` holds an unfinished run with other settings"),
                format!(
                    "{first}continue with `{}`, choose another --save folder, or start over with --force",
                    quoted(&state.arguments)
                ),
            )
        }
    };
    Err(with_differences(Failure::new(refusal).hint(hint), &differences).into())
}

/// Adds differing settings to a failure: name, value there, value here.
pub(super) fn with_differences(
    failure: Failure,
    differences: &[(String, String, String)],
) -> Failure {
    differences.iter().fold(failure, |failure, (name, then, now)| {
        let (name, (then, now)) = (name.replace('_', "-"), where_they_differ(then, now));
        failure.detail(format!("{name}: {then} there, {now} now"))
    })
}

/// Two values; long values begin shortly before their first difference.
fn where_they_differ(then: &str, now: &str) -> (String, String) {
    /// Characters that are shown, and how many of them come before the difference.
    const SHOWN: usize = 60;
    const BEFORE: usize = 30;
    let alike = then.chars().zip(now.chars());
    let alike = alike.take_while(|(then, now)| then == now).count();
    let longest = then.chars().count().max(now.chars().count());
    let skipped = match longest > SHOWN {
        true => alike.saturating_sub(BEFORE),
        false => 0,
    };
    let shown = |value: &str| {
        let part: String = value.chars().skip(skipped).take(SHOWN).collect();
        let before = if skipped > 0 { "..." } else { "" };
        let is_cut = value.chars().count() > skipped + SHOWN;
        format!("{before}{part}{}", if is_cut { "..." } else { "" })
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
    here.into_iter().flatten().find(is_it).map(|(flag, ..)| flag)
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
