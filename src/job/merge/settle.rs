//! A merge that is settled and has not begun: everything that can be wrong is checked, and nothing is written.

use std::collections::BTreeMap;

use anyhow::Result;

use super::job::MergeJob;
use super::memory::{MergeShape, PassSize, PassWork};
use super::resolved::ResolvedMerge;
use super::saliency::Saliency;
use crate::checkpoint::{Layout, PlannedTensor, TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::job::device_records::joined;
use crate::job::folder::RunFolder;
use crate::job::machine;
use crate::job::same_run::{self, RunIdentity};
use crate::job::settled_run::RunStart;
use crate::merging::methods::{MethodSettings, Scope};
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::{Parameter, Recipe, without_folders};
use crate::placement::cpu_budget;
use crate::ranks::Ranks;
use crate::run::{Events, Moment};
use crate::runtime::Clock;
use crate::settings::{
    EvaluationSettings, MergeEval, MergeSettings, PIECE_ELEMENTS, SaliencySource, check_device,
};

/// Workers per thread: while the first waits for the disk, the second computes.
const WORKERS_PER_THREAD: usize = 2;

impl MergeJob {
    /// Opens all models of a recipe, and resolves every tensor, the output's files, folders and memory.
    ///
    /// # Errors
    /// Fails for everything that can be wrong with recipe, models, flags and folders.
    pub(super) fn settle(
        settings: MergeSettings,
        recipe: Recipe,
        ranks: &Ranks,
        events: &dyn Events,
    ) -> Result<RunStart<Self>> {
        check_device(&settings.device)?;
        let clock = Clock::new();
        clock.mark(Moment::Start, events);
        let started_unix_seconds = machine::unix_seconds();
        let merge = ResolvedMerge::of(&settings, recipe, events)?;
        let layout = layout_of(&merge, settings.out_shard_size.0)?;
        let method_settings = method_settings(&settings);
        let scope = merge.method.scope(&method_settings);
        check_groups(&merge.tensors, scope)?;
        let work = check_values(&merge, &method_settings)?;
        let threads = machine::start_workers(settings.device.threads)?;
        let inventory = machine::inventory(&settings.device, threads)?;
        let inventory = inventory.divided(ranks.neighbors().ranks);
        let budget = cpu_budget(&inventory, &settings.device.budget());
        let wanted = PassSize {
            workers: threads * WORKERS_PER_THREAD,
            piece_elements: settings.piece_elements.unwrap_or(PIECE_ELEMENTS),
        };
        let mut shape = MergeShape::of(&merge, &settings, scope);
        // A pass that does not fit fails before statistics are read and texts are found.
        let early = shape.fit(wanted, budget);
        if settings.saliency.is_none() {
            early.clone()?;
        }
        let mut folder = RunFolder::at(&merge.inputs.folders(), &settings.output(), true)?;
        folder.lock(events)?;
        let mut unfinished = folder.look()?;
        if unfinished.is_none() && settings.resume {
            return Err(folder.nothing_to_resume().into());
        }
        let measured_within = match early {
            Ok(_) => settings.clone(),
            Err(_) => with_enough_for(&shape, &settings),
        };
        let saliency = Saliency::settle(&measured_within, &merge, &folder, events);
        let saliency = match (saliency, early) {
            (Err(measuring), Err(pass)) => return Err(with_advice_of(pass, measuring)),
            (saliency, _) => saliency?,
        };
        let mut deciding = BTreeMap::new();
        if folder.state().is_some() {
            deciding = decide(&settings, &merge, &folder)?;
            deciding.extend(Saliency::deciding(saliency.as_ref()));
            deciding.extend(merge.vocabulary.deciding());
        }
        if let Some(combined) = &merge.combined {
            deciding.extend(combined.deciding());
            combined.check_folder(unfinished.is_some() || settings.force)?;
        }
        if let Some(state) = unfinished.take() {
            unfinished = same_run::check(state, &deciding, &folder, &settings.output())?;
            if let Some(manifest) = folder.record_of_the_last_step(&EvaluationSettings::default())?
            {
                events.note("this run is finished; only a file of its state was left".to_string());
                return Ok(RunStart::Finished(Box::new(manifest)));
            }
        }
        shape.statistics_bytes = saliency.as_ref().map_or(0, |of| of.bytes().0);
        let size = shape.fit(wanted, budget)?;
        let time = work.time(layout.bytes(), threads, &inventory.rates);
        let mut plan = shape.plan(size, budget, time);
        super::devices::add(&mut plan, &settings.device, &inventory)?;
        for job in saliency.iter().flat_map(Saliency::jobs) {
            plan = joined(job.plan.clone(), plan);
        }
        let job = Self {
            plan,
            settings,
            merge,
            method_settings,
            layout,
            folder,
            size,
            threads,
            saliency,
            identity: RunIdentity { deciding, unfinished },
            clock,
            started_unix_seconds,
            ranks: ranks.clone(),
        };
        if job.identity.unfinished.is_none() {
            job.folder.check_disk(job.layout.bytes())?;
        }
        Ok(RunStart::Run(Box::new(job)))
    }

    /// Tells the models, the method and the plan.
    pub(super) fn announce(&self, events: &dyn Events) {
        let merge = &self.merge;
        for model in &merge.inputs.models {
            let is_base = merge.recipe.base_model.as_ref() == Some(&model.spec);
            events.note(format!(
                "{:<12} {}: {}",
                if is_base { "base" } else { "model" },
                model.spec,
                model.checkpoint.total_bytes()
            ));
        }
        let tensors = merge.tensors.len();
        events.note(format!(
            "merge        {}: {} layers, {tensors} tensors, {}",
            merge.recipe.merge_method,
            merge.num_hidden_layers,
            self.layout.bytes()
        ));
        if let Some(first) = merge.beside.first() {
            events.note(format!(
                "unchanged    {} tensors beside the text model of `{}`, `{first}` among them",
                merge.beside.len(),
                merge.donor().spec
            ));
        }
        if let Some(first) = merge.left_out.first() {
            events.note(format!(
                "left out     {} tensors that are no part of a decoder, `{first}` among them",
                merge.left_out.len()
            ));
        }
        // What cannot be read ends the pass, with its reason.
        if let (false, Ok(Some((model, tensor, share)))) =
            (self.settings.keep_zeros, merge.inputs.filled_zeros())
        {
            events.warn(format!(
                "the base of `{model}` is pruned ({:.1} % of the first rows of `{tensor}` are zero), and the adapter fills its zeros: \
                 --keep-zeros keeps them",
                100.0 * share
            ));
        }
        merge.vocabulary.announce(events);
        if let Some(saliency) = &self.saliency {
            saliency.announce(events);
        }
        crate::report::plan::announce(&self.plan, events);
        match &self.folder.model {
            Some(model) => events.note(format!("output       {}", model.display())),
            None => events.warn("nothing will be saved; name a run folder with --save".to_string()),
        }
    }
}

/// The settings with memory that is enough for the pass. A measurement that does not fit into it, either, names a number that is enough for
/// both.
fn with_enough_for(shape: &MergeShape, settings: &MergeSettings) -> MergeSettings {
    let mut enough = settings.clone();
    enough.device.max_memory = Some(enough.device.budget().with_cpu(shape.least()));
    enough
}

/// The refusal of a pass, with the memory that a refused measurement needs. A measurement that fails for a different reason
/// keeps its error.
fn with_advice_of(pass: Failure, measuring: anyhow::Error) -> anyhow::Error {
    let failure = measuring.downcast_ref::<Failure>();
    let hint = failure.and_then(|failure| failure.hint.clone());
    match hint.filter(|hint| hint.contains("--max-memory")) {
        Some(hint) => pass.detail("measuring the activations needs more").hint(hint).into(),
        None => measuring,
    }
}

/// The files of the output, with the names of the donor's files.
pub(super) fn layout_of(merge: &ResolvedMerge, shard_bytes: u64) -> Result<Layout> {
    let donor = &merge.donor().checkpoint;
    let merged = merge.tensors.iter().map(|tensor| PlannedTensor {
        name: tensor.recipe.name.clone(),
        dtype: tensor.dtype.in_file(),
        shape: tensor.shape.clone(),
    });
    let beside = merge.beside.iter().filter_map(|name| donor.entry(name));
    let beside = beside.map(|TensorEntry { name, dtype, shape, .. }| PlannedTensor {
        name: name.clone(),
        dtype: *dtype,
        shape: shape.clone(),
    });
    Layout::named_as(donor, merged.chain(beside).collect(), shard_bytes)
}

/// The settings of the method.
pub(super) fn method_settings(settings: &MergeSettings) -> MethodSettings {
    MethodSettings {
        semantics: settings.semantics,
        scope: settings.trim_scope,
        squares_vote: settings.saliency == Some(SaliencySource::Experts),
        seed: settings.seed,
    }
}

/// Refuses densities that differ among tensors that are trimmed together.
fn check_groups(tensors: &[MergeTensor], scope: Scope) -> Result<()> {
    let mut first: BTreeMap<Option<usize>, &MergeTensor> = BTreeMap::new();
    for tensor in tensors {
        let group = match scope {
            Scope::Tensor => return Ok(()),
            Scope::Layer => tensor.recipe.layer,
            Scope::Model => None,
        };
        let known = *first.entry(group).or_insert(tensor);
        let values = |of: &MergeTensor| -> Vec<_> {
            let sources = of.recipe.sources.iter();
            sources
                .map(|source| {
                    [Parameter::Density, Parameter::Gamma].map(|name| source.values.get(name))
                })
                .collect()
        };
        if values(known) != values(tensor) {
            return Err(Failure::new(format!(
                "`{}` and `{}` are trimmed together and have different densities",
                known.recipe.name, tensor.recipe.name
            ))
            .detail("their largest differences are chosen from all of them at once")
            .hint("give each model one density, or use --trim-scope tensor")
            .into());
        }
    }
    Ok(())
}

/// Begins every tensor once, so that values without a result are refused before the pass, and adds up what will be read.
fn check_values(merge: &ResolvedMerge, settings: &MethodSettings) -> Result<PassWork> {
    let mut work = PassWork::default();
    for tensor in &merge.tensors {
        let reads = tensor.check(merge.method, settings)? as u64;
        work.bytes += reads * merge.read_bytes(tensor);
        work.elements += reads * tensor.recipe.sources.len() as u64 * tensor.elements();
    }
    Ok(work)
}

/// The measurements of perplexity; the state of a run keeps their results.
fn evaluation_of(settings: &MergeSettings) -> String {
    if settings.eval == MergeEval::None {
        return "none".to_string();
    }
    let windows = settings.eval_windows.map_or("all".to_string(), |windows| windows.to_string());
    let dataset = settings.evaluation_text();
    let seqlen = settings.seqlen.map_or("default".to_string(), |seqlen| seqlen.to_string());
    format!("{:?}, {}, windows: {windows}, seqlen: {seqlen}", settings.eval, dataset)
}

/// Everything that decides the outcome, by name.
fn decide(
    settings: &MergeSettings,
    merge: &ResolvedMerge,
    folder: &RunFolder,
) -> Result<BTreeMap<String, String>> {
    let fingerprints: Result<Vec<String>> =
        merge.inputs.models.iter().map(|model| model.fingerprint()).collect();
    let as_json = |value: serde_json::Value| match value {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    let named = [
        ("command", "merge".to_string()),
        ("program", format!("prune {}", env!("CARGO_PKG_VERSION"))),
        ("recipe", merge.recipe.to_yaml(without_folders)),
        ("models", fingerprints?.join(" ")),
        ("semantics", as_json(serde_json::to_value(settings.semantics)?)),
        ("trim_scope", as_json(serde_json::to_value(settings.trim_scope)?)),
        ("seed", settings.seed.to_string()),
        ("keep_zeros", settings.keep_zeros.to_string()),
        ("evaluation", evaluation_of(settings)),
        ("out_shard_size", settings.out_shard_size.0.to_string()),
        ("model folder", same_run::model_folder(folder)?),
    ];
    Ok(named.map(|(name, value)| (name.to_string(), value)).into())
}
