//! `prune recover`: the training, and the sweep that writes what was trained.
//!
//! | file | story |
//! | --- | --- |
//! | `resolved` | trained parameters, teacher and optimizer, resolved against the model |
//! | `closing`, `closing_plan` | masks that close: the sparsity of every matrix before and after; their plan, and the flags that contradict it |
//! | `teacher` | the dense model that is learned from |
//! | `shape` | the training in numbers, for the memory plan |
//! | `steps` | `--how lora` and `full`: the steps of a training of the whole model |
//! | `saved` | such a training between two steps, on the disk |
//! | `base` | the frozen base of such a training, quantised where the flags ask for it |
//! | `layers` | the sweep that trains layer by layer, or merges what was trained |
//! | `published` | `recovery.json` and the model card |
//! | `given` | recorded data, for tests |

mod base;
pub(super) mod closing;
mod closing_plan;
mod given;
mod layers;
mod published;
mod resolved;
mod saved;
mod shape;
mod steps;
mod teacher;

use anyhow::Result;

use super::interruption;
use super::outputs::Outputs;
use super::record::RunResults;
use super::settled_run::SettledRun;
use super::streams::Streams;
use crate::run::Events;
use crate::settings::Settings;
pub use given::{GivenTraining, InitialParameters};
pub(in crate::job) use resolved::Recovery;
use steps::Trained;

/// Checks the settings of a training. Activations are kept by the CPU alone, so a training that keeps them uses no GPU; a flag that
/// names a GPU is refused then.
///
/// # Errors
/// Fails for contradictory settings.
pub(super) fn prepare(settings: &mut Settings) -> Result<()> {
    resolved::check(settings)?;
    let keeps = settings.recovery.as_ref().map_or(0, |of| of.keep_activations);
    settings.device.use_cpu |= keeps > 0;
    Ok(())
}

/// Trains, then merges what was trained, and measures the perplexities.
///
/// # Errors
/// Fails when the run is asked to stop, for a loss or gradients that are not finite, and where files cannot be read or written.
pub(super) fn train(
    job: &SettledRun,
    recovery: &Recovery,
    outputs: &mut Outputs<'_>,
    events: &dyn Events,
) -> Result<RunResults> {
    let trained = match recovery.is_whole() {
        true => {
            interruption::in_training(job, events);
            Some(steps::train(job, recovery, events)?)
        }
        false => None,
    };
    interruption::with_outputs(job, events);
    let divergence = trained.as_ref().and_then(Trained::divergence);
    if let Some((divergence, state)) = divergence.zip(outputs.state.as_mut()) {
        state.change(|run| run.divergence = Some(divergence.clone()))?;
    }
    let mut streams = Streams::embed(job, outputs, events)?;
    let swept = recovery.sweep_layers(job, (outputs, &mut streams), trained.as_ref(), events)?;
    drop(streams);
    let adapter = job.adapter_folder(recovery).filter(|_| job.ranks.is_first());
    if let Some((trained, folder)) = trained.as_ref().zip(adapter) {
        trained.write_adapter(job, recovery, &folder)?;
    }
    Ok(swept)
}
