//! A run that is settled and has not begun: everything that can be wrong was looked at, and nothing was written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::texts::{Located, Texts};
use super::{PruneArgs, unfinished};
use crate::bytes::ByteSize;
use crate::checkpoint::{check_sidecars, output_bytes};
use crate::cli::args::EvalSides;
use crate::cli::console::Console;
use crate::cli::run_folder::RunFolder;
use crate::cli::session::Session;
use crate::disk::{self, Room};
use crate::failure::Failure;
use crate::model::Projection;
use crate::pipeline::{self, TargetPlan};
use crate::pruning::{self, Needs, Pattern, PruningMethod};
use crate::report;
use crate::run::{Events, Manifest, Moment, Plan, RunState};
use crate::runtime::memory;

/// What is going to happen.
pub(super) struct Job<'a> {
    pub(super) args: &'a PruneArgs,
    pub(super) method: &'static dyn PruningMethod,
    pub(super) session: Session,
    pub(super) folder: RunFolder,
    /// `--save-masks`.
    pub(super) masks: Option<PathBuf>,
    pub(super) targets: TargetPlan,
    pub(super) texts: Texts,
    pub(super) plan: Plan,
    pub(super) spill_folder: Option<PathBuf>,
    /// Everything that decides the outcome, in words.
    pub(super) settings: BTreeMap<String, String>,
    /// What an earlier process left of this very run.
    pub(super) unfinished: Option<RunState>,
}

/// What is to be done.
pub(super) enum Settled<'a> {
    /// This.
    Job(Box<Job<'a>>),
    /// Nothing: this is the record of what was done.
    Finished(Box<Manifest>),
}

impl<'a> Job<'a> {
    /// Opens the checkpoint, resolves targets, folders and memory, and tokenises the texts.
    ///
    /// # Errors
    /// Fails for everything that can be wrong with settings, checkpoint, texts and folders.
    pub(super) fn settle(args: &'a PruneArgs, console: &Console) -> Result<Settled<'a>> {
        let method =
            pruning::method(&args.sparsity.prune_method).context("the method is in the table")?;
        if args.evaluation.max_perplexity.is_some() && args.eval == EvalSides::None {
            return Err(Failure::usage(
                "--max-perplexity needs a perplexity, and --eval none measures none",
            )
            .hint("use --eval pruned, or leave --max-perplexity out")
            .into());
        }
        let session = Session::open(&args.model, &args.device, args.calibration.seqlen, console)?;
        let mut folder = RunFolder::at(
            &session.folder,
            args.output.save.as_deref(),
            args.output.save_model.as_deref(),
            !args.output.no_save_model,
            args.output.force,
        )?;
        if folder.model.is_some() {
            check_sidecars(&session.folder)?;
        }
        let masks = args.output.save_masks.then(|| folder.masks()).transpose()?;
        let targets = TargetPlan::resolve(&args.sparsity.selection()?, method, &session.config)?;
        folder.lock(console)?;
        let mut unfinished = folder.look()?;
        if unfinished.is_none() && args.output.resume {
            return Err(nothing_to_go_on_with(&folder).into());
        }
        let mut settings = BTreeMap::new();
        if folder.state().is_some() {
            settings = unfinished::settings(args, &session, &targets, &folder, masks.is_some())?;
        }
        if let Some(state) = unfinished.take() {
            unfinished = unfinished::same_run(state, &settings, &folder, args)?;
            if let Some(manifest) = folder.record_of_the_last_step()? {
                console.note("this run is finished; only a file of its state was left".to_string());
                return Ok(Settled::Finished(Box::new(manifest)));
            }
        }
        let calibrates = calibrates(method, &targets);
        // Before texts are tokenised the number of windows is not known; what one window does not fit into no number does.
        let expected = pipeline::RunShape {
            samples: if calibrates {
                args.calibration.nsamples as usize
            } else {
                0
            },
            windows: usize::from(args.eval != EvalSides::None),
            sides: args.eval.sides(),
            prunes: true,
            saves: folder.model.is_some(),
            ..session.job()
        };
        session.plan(&expected, &args.device)?;
        let located = Located::find(args, &session, calibrates, console)?;
        let expected = pipeline::RunShape {
            tokenising: located.tokenising(&session)?,
            ..expected
        };
        session.plan(&expected, &args.device)?;
        let texts = Texts::tokenise(args, &session, &located, console)?;
        memory::release_freed();
        session.clock.mark(Moment::ModelLoaded, console);
        let job = pipeline::RunShape {
            samples: texts.samples(),
            windows: texts.windows(),
            sides: texts.sides,
            ..expected
        };
        let plan = session.plan(&job, &args.device)?;
        let spill_folder =
            session.spill_folder(&plan, &args.device, args.output.save.as_deref(), console)?;
        if folder.state().is_some() {
            unfinished::add_late_settings(&mut settings, &texts, &session, &plan);
        }
        if let Some(state) = unfinished.take() {
            unfinished = unfinished::same_run(state, &settings, &folder, args)?;
        }
        let job = Self {
            args,
            method,
            session,
            folder,
            masks,
            targets,
            texts,
            plan,
            spill_folder,
            settings,
            unfinished,
        };
        job.check_disk()?;
        Ok(Settled::Job(Box::new(job)))
    }

    /// Whether what will be written has room.
    ///
    /// # Errors
    /// Fails where it has not, with the numbers.
    fn check_disk(&self) -> Result<()> {
        let mut needs: Vec<(&Path, ByteSize, &str)> = Vec::new();
        // The files of a run that is gone on with have their sizes already.
        if self.unfinished.is_none() {
            if let Some(model) = &self.folder.model {
                let bytes = output_bytes(&self.session.checkpoint);
                let replaced = self.folder.replaced_bytes();
                let more = ByteSize(bytes.0.saturating_sub(replaced.0));
                needs.push((model, more, "the model"));
            }
            if let Some(masks) = &self.masks {
                needs.push((masks, self.mask_bytes(), "the masks"));
            }
        }
        if let Some(folder) = &self.spill_folder {
            needs.push((folder, self.plan.hidden_states.bytes, "hidden states"));
        }
        let rooms: Vec<(Room, &Path, ByteSize, &str)> = needs
            .into_iter()
            .filter_map(|(folder, bytes, what)| Some((disk::room(folder)?, folder, bytes, what)))
            .collect();
        for (room, folder, _, _) in &rooms {
            let here = || {
                rooms
                    .iter()
                    .filter(|(other, ..)| other.device == room.device)
            };
            let needed: ByteSize = here().map(|(_, _, bytes, _)| *bytes).sum();
            if needed <= room.free {
                continue;
            }
            let parts: Vec<String> = here()
                .map(|(_, _, bytes, what)| format!("{what} {bytes}"))
                .collect();
            return Err(Failure::new(format!(
                "the disk of `{}` has not enough room: {needed} are needed, {} are free",
                folder.display(),
                room.free
            ))
            .detail(parts.join(", "))
            .hint("free some space, or choose a folder on another disk with --save or --offload-folder")
            .into());
        }
        Ok(())
    }

    fn mask_bytes(&self) -> ByteSize {
        let config = &self.session.config;
        let layers = 0..config.num_hidden_layers;
        let matrices =
            layers.flat_map(|layer| Projection::ALL.map(|projection| (layer, projection)));
        let bytes = matrices
            .filter(|(layer, projection)| self.targets.of(*layer, *projection).is_some())
            .map(|(_, projection)| {
                let (rows, columns) = projection.shape(config);
                ByteSize((rows * columns).div_ceil(8) as u64)
            });
        bytes.sum()
    }

    /// Tells what was settled.
    pub(super) fn announce(&self, console: &Console) {
        let Self {
            args,
            session,
            targets,
            texts,
            plan,
            folder,
            ..
        } = self;
        let config = &session.config;
        console.line(&format!(
            "model        {}: {} layers of {}, {}, {}",
            session.folder.display(),
            config.num_hidden_layers,
            config.hidden_size,
            session.dtype().name(),
            session.checkpoint.total_bytes()
        ));
        let variant = if targets.use_variant { ", variant" } else { "" };
        console.line(&format!(
            "pruning      {} {:.4} {}{variant}",
            args.sparsity.prune_method, targets.sparsity_ratio, targets.pattern
        ));
        for line in targets.describe() {
            console.line(&format!("             {line}"));
        }
        if let Some(samples) = &texts.calibration {
            console.line(&format!(
                "calibration  {}: {} samples of {} tokens, seed {}",
                args.calibration.dataset, samples.nsamples, samples.seqlen, args.calibration.seed
            ));
        }
        if let Some(windows) = &texts.windows {
            let sides: Vec<_> = args.eval.sides().iter().map(|side| side.name()).collect();
            console.line(&format!(
                "evaluation   {}: {} windows of {} tokens, {}",
                args.evaluation.eval_dataset,
                windows.windows,
                windows.seqlen,
                sides.join(" and ")
            ));
        }
        for line in report::plan::text(plan).lines() {
            console.line(line);
        }
        if plan.devices.len() == 1 && !args.device.names_the_cpu() {
            let why = if cfg!(feature = "cuda") {
                "no GPU computes in this plan"
            } else {
                "this build has no CUDA"
            };
            console.line(&format!(
                "device       cpu; {why} (--use-cpu says that this is meant)"
            ));
        }
        match &folder.model {
            Some(model) => console.line(&format!("output       {}", model.display())),
            None if folder.run.is_some() => console.line("output       no model (--no-save-model)"),
            None => {
                console.warn("nothing will be saved; name a run folder with --save".to_string())
            }
        }
        if let Some(masks) = &self.masks {
            console.line(&format!("masks        {}", masks.display()));
        }
    }
}

fn nothing_to_go_on_with(folder: &RunFolder) -> Failure {
    match folder.state() {
        Some(folder) => Failure::new(format!(
            "--resume: there is no unfinished run in `{}`",
            folder.display()
        ))
        .hint("leave --resume out to begin one"),
        None => Failure::usage("--resume needs the folder of the model that is unfinished")
            .hint("add --save DIR, and leave --no-save-model out"),
    }
}

/// Whether any matrix is scored with statistics.
fn calibrates(method: &dyn PruningMethod, targets: &TargetPlan) -> bool {
    let prunes_nothing = targets.pattern == Pattern::Unstructured
        && targets.sparsity_ratio == 0.0
        && targets.uneven_ratios().is_none();
    method.needs() != Needs::Nothing && !prunes_nothing
}
