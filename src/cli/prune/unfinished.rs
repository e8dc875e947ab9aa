//! Going on with an unfinished run: whether it is this one, and its files taken up again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::Result;
use sha2::{Digest, Sha256};

use super::PruneArgs;
use super::job::Job;
use super::texts::Texts;
use crate::bytes::hex;
use crate::checkpoint::{CheckpointWriter, Reopened};
use crate::cli::console::Console;
use crate::cli::run_folder::RunFolder;
use crate::cli::session::Session;
use crate::cli::shell;
use crate::failure::Failure;
use crate::linalg::product::Kernel;
use crate::pipeline::{SaveMasks, StateFile, TargetPlan, resume};
use crate::run::state::SCHEMA;
use crate::run::{Events, Phase, Plan, RunState};
use crate::runtime::Finished;

/// How the setting is called that says how products are computed.
const ARITHMETIC: &str = "arithmetic";

/// The settings that are the checkpoint's, not a flag's.
const OF_THE_SOURCE: [&str; 2] = ["source", "config"];

/// What decides the outcome and is known before texts are tokenised.
///
/// # Errors
/// Fails when the source cannot be read.
pub(super) fn settings(
    args: &PruneArgs,
    session: &Session,
    targets: &TargetPlan,
    folder: &RunFolder,
    has_masks: bool,
) -> Result<BTreeMap<String, String>> {
    let layer_ratios = targets
        .uneven_ratios()
        .map_or("all alike".to_string(), |ratios| format!("{ratios:?}"));
    let chosen = |globs: &[String]| match globs {
        [] => "none given".to_string(),
        globs => globs.join(" "),
    };
    let model = match (&folder.run, &folder.model) {
        (Some(run), Some(model)) => match model.strip_prefix(run) {
            Ok(inside) => inside.display().to_string(),
            Err(_) => std::path::absolute(model)?.display().to_string(),
        },
        _ => "in the run's folder".to_string(),
    };
    let sides: Vec<&str> = args.eval.sides().iter().map(|side| side.name()).collect();
    let settings = [
        ("program", format!("prune {}", env!("CARGO_PKG_VERSION"))),
        ("source", session.checkpoint.fingerprint()?),
        ("config", serde_json::to_string(&*session.config)?),
        ("prune-method", args.sparsity.prune_method.clone()),
        ("sparsity-ratio", targets.sparsity_ratio.to_string()),
        ("sparsity-type", targets.pattern.to_string()),
        ("use-variant", targets.use_variant.to_string()),
        ("include", chosen(&args.sparsity.include)),
        ("exclude", chosen(&args.sparsity.exclude)),
        ("layer-ratios", layer_ratios),
        ("seqlen", session.seqlen.to_string()),
        (
            "eval",
            if sides.is_empty() {
                "none".to_string()
            } else {
                sides.join(" and ")
            },
        ),
        ("model folder", model),
        ("save-masks", has_masks.to_string()),
    ];
    Ok(settings
        .map(|(name, value)| (name.to_string(), value))
        .into())
}

/// Adds what is known once texts are tokenised and the work is planned.
pub(super) fn add_late_settings(
    settings: &mut BTreeMap<String, String>,
    texts: &Texts,
    session: &Session,
    plan: &Plan,
) {
    let arithmetic = session.arithmetic(plan);
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
    settings.extend(late.map(|(name, value)| (name.to_string(), value)));
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
        let devices = layers.chain(session.gpu_names()).collect::<Vec<_>>();
        settings.insert("devices".to_string(), devices.join(", "));
    }
}

/// Refuses to go on where `settings` are not those of the run; with `--force`, says that a new one begins instead (`None`).
///
/// # Errors
/// Fails with the differences, and with what would go on.
pub(super) fn same_run(
    state: RunState,
    settings: &BTreeMap<String, String>,
    folder: &RunFolder,
    args: &PruneArgs,
) -> Result<Option<RunState>> {
    let differences = state.differences(settings);
    if differences.is_empty() {
        return Ok(Some(state));
    }
    if args.output.force && !args.output.resume {
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
                shell::quoted(&state.arguments)
            )
        }
        None => format!(
            "go on with `{}`, choose another --save folder, or start over with --force",
            shell::quoted(&state.arguments)
        ),
    };
    Err(failure.hint(hint).into())
}

/// Two values, long ones from shortly before the place where they part.
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

/// What to give `--dtype` for this arithmetic, where the CPU has it.
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

/// The files of a run, and the state it is in.
pub(super) struct Outputs {
    pub(super) writer: Option<CheckpointWriter>,
    pub(super) masks: Option<SaveMasks>,
    /// To be begun; no layer is finished where the run is new.
    pub(super) state: RunState,
}

/// Takes up the files of an unfinished run, or makes those of a new one.
///
/// # Errors
/// Fails when a file cannot be read or written.
pub(super) fn outputs(job: &Job<'_>, arguments: Vec<String>, console: &Console) -> Result<Outputs> {
    let mut outputs = match taken_up(job, console)? {
        Some(outputs) => outputs,
        None => made(job, arguments, console)?,
    };
    if let Some(writer) = &mut outputs.writer {
        let names = job.targets.tensors();
        writer.will_write(names.iter().map(String::as_str));
    }
    Ok(outputs)
}

/// Makes the files of a new run.
fn made(job: &Job<'_>, arguments: Vec<String>, console: &Console) -> Result<Outputs> {
    job.folder.prepare()?;
    let session = &job.session;
    let state = RunState {
        schema: SCHEMA,
        arguments,
        started_unix_seconds: session.started_unix_seconds(),
        settings: job.settings.clone(),
        layers: Vec::new(),
        tensors: BTreeMap::new(),
        perplexity: None,
        warnings: Vec::new(),
        sessions: Vec::new(),
        phases: Vec::new(),
        memory: Vec::new(),
    };
    if let Some(folder) = job.folder.state() {
        // Before the files: those without a state are another run's.
        StateFile::announce(folder, &state)?;
    }
    let writer = job.folder.model.as_ref().map(|model| {
        session.clock.measure(Phase::Allocate, || {
            CheckpointWriter::create(&session.checkpoint, model, console)
        })
    });
    let writer = writer.transpose()?;
    let masks = job.masks.as_ref().map(|path| {
        session.clock.measure(Phase::Allocate, || {
            SaveMasks::create(path, job.method, &job.targets, &session.config, console)
        })
    });
    Ok(Outputs {
        writer,
        masks: masks.transpose()?,
        state,
    })
}

/// The files of the unfinished run, where there is one and they are all there.
fn taken_up(job: &Job<'_>, console: &Console) -> Result<Option<Outputs>> {
    let (Some(state), Some(model)) = (&job.unfinished, &job.folder.model) else {
        return Ok(None);
    };
    if state.layers.is_empty() {
        // Its files may not have been made yet; making them again loses nothing.
        job.folder.refuse_files(false)?;
        return Ok(None);
    }
    job.folder.tidy()?;
    let (session, mut state) = (&job.session, state.clone());
    let gone = |what: &str| {
        console.warn(format!(
            "{what} of the unfinished run are not there any more, or are others: starting over"
        ));
    };
    let (tensors, masks) = (&state.tensors, resume::masks_of(&state.layers));
    let reopened = session.clock.measure(Phase::Check, || {
        CheckpointWriter::reopen(&session.checkpoint, model, tensors, console)
    })?;
    let Some(Reopened {
        mut writer,
        damaged,
    }) = reopened
    else {
        job.folder.refuse_files(false)?;
        gone("the model files");
        return Ok(None);
    };
    let mut damaged: BTreeSet<String> = damaged
        .iter()
        .map(|tensor| resume::matrix_of(tensor).to_string())
        .collect();
    let mut saved = None;
    if let Some(path) = &job.masks {
        let reopened = SaveMasks::reopen(path, job.method, &job.targets, &session.config, &masks)?;
        let Some((masks, not_written)) = reopened else {
            gone("the masks");
            return Ok(None);
        };
        damaged.extend(not_written);
        saved = Some(masks);
    }
    let again = state.keep_whole_layers(&damaged);
    if let Some(first) = again.first() {
        let layers = state.layers.len();
        let bad = damaged.first().unwrap_or(first);
        console.warn(format!(
            "`{bad}` is not on the disk as it was written: layer {layers} and all after it are done again"
        ));
        let names: Vec<String> = again.iter().map(|name| resume::tensor_of(name)).collect();
        writer.forget(names.iter().map(String::as_str));
        if let Some(masks) = &mut saved {
            masks.forget(again.iter().map(String::as_str));
        }
    }
    resume::announce(&state, session.config.num_hidden_layers, console);
    Ok(Some(Outputs {
        writer: Some(writer),
        masks: saved,
        state,
    }))
}

/// The weights of the finished layers as they were written.
///
/// # Errors
/// Fails when the system has no more open files.
pub(super) fn finished(outputs: &Outputs) -> Result<Option<Finished>> {
    let layers = outputs.state.layers.len();
    let Some(writer) = outputs.writer.as_ref().filter(|_| layers > 0) else {
        return Ok(None);
    };
    Ok(Some(Finished {
        layers,
        written: Arc::new(writer.written()?),
    }))
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
