//! A merge of several ranks: the first rank settles it, measures, records and publishes; all ranks merge their share of the tensors into
//! its files.
//!
//! ```text
//! rank 0      settle → outputs → weigh → share ─┬→ pass → finish → evaluate → record ─┬→ record
//! rank 1 …    wait ─────────────────────────────┴→ settle → pass → wait ──────────────┴→ record
//! ```

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::job::MergeJob;
use super::memory::PassSize;
use super::outputs::MergeOutputs;
use super::resolved::ResolvedMerge;
use super::saliency::Saliency;
use super::settle::{layout_of, method_settings};
use crate::checkpoint::LayoutWriter;
use crate::failure::Failure;
use crate::job::folder::RunFolder;
use crate::job::recorder::Recorder;
use crate::job::{machine, rank_reports};
use crate::merging::pass::MergePass;
use crate::merging::recipe::Recipe;
use crate::ranks::Ranks;
use crate::run::{Event, Events, Manifest, Phase, Unfinished};
use crate::runtime::Clock;
use crate::settings::MergeSettings;

/// The message of the first rank before the pass.
#[derive(Serialize, Deserialize)]
enum MergeStart {
    /// The pass begins.
    Run {
        /// By name, the SHA-256 of the tensors that an earlier process finished.
        finished: BTreeMap<String, String>,
        size: PassSize,
    },
    /// The merge had finished already.
    Finished(Box<Manifest>),
}

/// Refuses a settled merge that several ranks cannot share, before anything is written.
///
/// # Errors
/// Fails for combined adapters, and for a plan with GPUs.
pub(super) fn check(job: &MergeJob) -> Result<(), Failure> {
    let refused = |why: &str, hint: &str| Err(Failure::usage(why).hint(hint));
    match job.ranks.is_alone() {
        true => Ok(()),
        false if job.merge.combined.is_some() => refused(
            "--semantics peft combines adapters in a single process",
            "start one rank with `srun -n 1` or `mpirun -n 1`",
        ),
        false if job.plan.devices.len() > 1 => refused(
            "several ranks compute on their CPUs only, and this plan has a GPU",
            "add --device cpu, or start one rank with `srun -n 1`",
        ),
        false => Ok(()),
    }
}

/// Begins the pass on the other ranks.
///
/// # Errors
/// Fails when the disk refuses, and when a rank has left.
pub(super) fn share(job: &MergeJob, outputs: &MergeOutputs<'_>) -> Result<()> {
    match job.ranks.is_alone() {
        true => Ok(()),
        false => {
            let finished = outputs.writer.sync()?;
            job.ranks.tell_others(&MergeStart::Run { finished, size: job.size })
        }
    }
}

/// Tells the other ranks that the merge had finished already.
///
/// # Errors
/// Fails when a rank has left.
pub(super) fn share_finished(manifest: &Manifest, ranks: &Ranks) -> Result<()> {
    ranks.tell_others(&MergeStart::Finished(Box::new(manifest.clone())))
}

/// Merges the share of a rank that is not the first, and returns the record of the first rank.
///
/// # Errors
/// Fails when the models or the files of the output cannot be read, for weights that are not finite, and when a rank has left.
pub(super) fn take_part(
    settings: &MergeSettings,
    recipe: Recipe,
    ranks: &Ranks,
    recorder: &Recorder<'_>,
) -> Result<Manifest> {
    // A signal stops this rank between two pieces, so that it can tell the other ranks.
    recorder.emit(Event::IfInterrupted(Some(Unfinished {
        text: String::new(),
        is_resumable: true,
        has_begun: true,
    })));
    let (finished, size) = match ranks.hear_first()? {
        MergeStart::Run { finished, size } => (finished, size),
        MergeStart::Finished(manifest) => return Ok(*manifest),
    };
    let clock = Clock::new();
    let merge = ResolvedMerge::of(settings, recipe, recorder)?;
    let layout = layout_of(&merge, settings.out_shard_size.0)?;
    let threads = machine::start_workers(settings.device.threads)?;
    let folder = RunFolder::at(&merge.inputs.folders(), &settings.output(), true)?;
    let mut tensors = merge.tensors.clone();
    // The first rank has measured what was missing.
    if let Some(saliency) = Saliency::settle(settings, &merge, &folder, recorder)? {
        saliency.weigh(&mut tensors, &saliency.found, &merge)?;
    }
    let (target, sources) = (folder.model_folder()?, merge.inputs.folders());
    let none = BTreeMap::new();
    let opened = LayoutWriter::reopen(layout, target, &sources, &none, recorder)?;
    let (writer, _) = opened.with_context(|| {
        Failure::new(format!("{ranks:?} does not see the files in `{}`", target.display()))
            .detail("every rank writes its tensors into the files of the first rank")
            .hint("name a folder with --save that all machines share")
    })?;
    writer.know(&finished)?;
    let pass = MergePass {
        method: merge.method,
        settings: method_settings(settings),
        tensors: &tensors,
        inputs: &merge.inputs,
        writer: &writer,
        devices: &[],
        ranks,
        workers: size.workers,
        piece_elements: size.piece_elements,
        keep_zeros: settings.keep_zeros,
        events: recorder,
    };
    clock.measure(Phase::Merge, || pass.run_for_first_rank())?;
    rank_reports::gather(ranks, &clock, threads)?;
    ranks.hear_first()
}
