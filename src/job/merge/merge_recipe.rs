//! The merge of a recipe: settle → outputs → pass → finish → record.

use anyhow::Result;

use super::combined::CombinedJob;
use super::job::MergeJob;
use super::outputs::MergeOutputs;
use super::{devices, members};
use crate::job::machine;
use crate::job::recorder::Recorder;
use crate::job::settled_run::RunStart;
use crate::merging::pass::{MergePass, MergeSources};
use crate::merging::recipe::Recipe;
use crate::ranks::Ranks;
use crate::run::{Event, Events, Manifest, Moment, Phase, Unfinished};
use crate::runtime::Reporter;
use crate::settings::MergeSettings;

/// Merges the models of a recipe as the settings say, writes the result, and returns the record.
///
/// # Errors
/// Everything that can be wrong with recipe, models, flags and folders fails before the first tensor; after that, reading, writing,
/// and weights that are not finite.
pub(super) fn merge_recipe(
    mut settings: MergeSettings,
    recipe: Recipe,
    ranks: &Ranks,
    events: &dyn Events,
) -> Result<Manifest> {
    let recorder = Recorder::new(events).among(ranks);
    settings.device.threads = machine::threads_beside(settings.device.threads, ranks);
    if !ranks.is_first() {
        return members::take_part(&settings, recipe, ranks, &recorder);
    }
    if settings.log_memory {
        recorder.log_memory();
    }
    let job = match MergeJob::settle(settings, recipe, ranks, &recorder)? {
        RunStart::Run(job) => job,
        RunStart::Finished(manifest) => {
            members::share_finished(&manifest, ranks)?;
            return Ok(*manifest);
        }
    };
    members::check(&job)?;
    job.announce(&recorder);
    let unfinished = job
        .folder
        .state()
        .map(|folder| Unfinished::resumable("tensors", folder, "merge", &job.settings.arguments));
    recorder.emit(Event::IfInterrupted(unfinished));
    let mut outputs = MergeOutputs::open(&job, &recorder)?;
    let mut weighed = job.weigh(&recorder)?;
    job.evaluate_inputs(&mut outputs.state, &mut weighed.devices, &recorder)?;
    job.clock.mark(Moment::BeforePruning, &recorder);
    let devices = devices::open(&job.plan, &job.settings.device, job.size)?;
    let reporter = Reporter { clock: &job.clock, events: &recorder };
    let combine = |of: &CombinedJob| of.combine(&job.merge.inputs, job.settings.seed, reporter);
    let combined = job.merge.combined.as_ref().map(combine).transpose()?;
    let inputs: &dyn MergeSources = match &combined {
        Some(combined) => combined,
        None => &job.merge.inputs,
    };
    members::share(&job, &outputs)?;
    let pass = MergePass {
        method: job.merge.method,
        settings: job.method_settings,
        tensors: &weighed.tensors,
        inputs,
        writer: &outputs.writer,
        devices: &devices,
        ranks,
        workers: job.size.workers,
        piece_elements: job.size.piece_elements,
        keep_zeros: job.settings.keep_zeros,
        events: &recorder,
    };
    job.clock.measure(Phase::Merge, || {
        pass.run(&mut outputs.state)?;
        let source = &job.merge.donor().checkpoint;
        job.merge.beside.iter().try_for_each(|name| {
            recorder.check()?;
            outputs.writer.copy(source, name)
        })
    })?;
    job.clock.mark(Moment::AfterPruning, &recorder);
    for device in devices {
        let (fallbacks, memory) = device.report();
        weighed.devices.add(fallbacks, vec![memory]);
    }
    let mut report = job.report(&outputs, &weighed)?;
    report.combined_adapter = combined.map(|combined| combined.report);
    let (mut state, output) = outputs.finish(&job, &report, &recorder)?;
    job.evaluate_merged(&mut state, &mut weighed.devices, &recorder)?;
    report.perplexities.clone_from(&state.run().perplexities_of_models);
    job.publish_perplexities(&report)?;
    let manifest = job.record(report, weighed.devices, (state, output), &recorder)?;
    ranks.tell_others(&manifest)?;
    events.emit(Event::IfInterrupted(None));
    Ok(manifest)
}
