//! Messages for a run that ends early: the files it leaves, and the command that continues it.

use super::settled_run::SettledRun;
use crate::run::command_line::quoted;
use crate::run::{Event, Events, Unfinished};
use crate::settings::Settings;

/// Nothing is written yet: a run that will write a model may as well begin again.
pub(super) fn before_outputs(settings: &Settings, events: &dyn Events) {
    let output = &settings.output;
    let changes_weights = settings.sparsity.is_some() || settings.recovery.is_some();
    let writes_model = changes_weights
        && !output.no_save_model
        && (output.save.is_some() || output.save_model.is_some());
    let evaluates = !changes_weights && output.save.is_some();
    let unfinished = (writes_model || evaluates).then(|| Unfinished {
        text: format!(
            "nothing was changed; this command begins the run, or continues an earlier one:\n  {}",
            quoted(&settings.arguments)
        ),
        is_resumable: true,
        has_begun: false,
    });
    events.emit(Event::IfInterrupted(unfinished));
}

/// An evaluation has saved nothing yet. What it saves between two layers it announces itself.
pub(super) fn in_evaluation(job: &SettledRun, events: &dyn Events) {
    let command = quoted(&job.settings.arguments);
    let run = job.folder.run.as_ref();
    events.emit(Event::IfInterrupted(run.map(|_| Unfinished {
        text: format!(
            "nothing is saved yet; this command begins the evaluation again:\n  {command}"
        ),
        is_resumable: true,
        has_begun: true,
    })));
}

/// Files exist from now on; finished layers are kept.
pub(super) fn with_outputs(job: &SettledRun, events: &dyn Events) {
    while_kept("layers", job, events);
}

/// The whole model is trained; finished steps are kept.
pub(super) fn in_training(job: &SettledRun, events: &dyn Events) {
    while_kept("steps", job, events);
}

/// Finished parts of the work are kept where a model is written.
fn while_kept(parts: &str, job: &SettledRun, events: &dyn Events) {
    let run = job.folder.run.as_ref();
    let unfinished = match (job.folder.state(), run) {
        (Some(folder), _) => {
            Some(Unfinished::resumable(parts, folder, "run", &job.settings.arguments))
        }
        (None, Some(run)) => Some(Unfinished {
            text: format!(
                "a run without a model cannot be continued: the one in `{}` begins again",
                run.display()
            ),
            is_resumable: false,
            has_begun: true,
        }),
        (None, None) => None,
    };
    events.emit(Event::IfInterrupted(unfinished));
}

/// The run is over.
pub(super) fn is_over(events: &dyn Events) {
    events.emit(Event::IfInterrupted(None));
}
