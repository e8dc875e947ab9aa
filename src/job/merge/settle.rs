//! A merge that is settled and has not begun: everything that can be wrong is checked, and nothing is written.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::deciding::decide;
use super::job::{MergeJob, SettledMerge};
use super::memory::{MergeShape, PassSize, PassWork};
use super::models::InputModels;
use super::resolved::ResolvedMerge;
use super::saliency::Saliency;
use crate::bytes::ByteSize;
use crate::checkpoint::{Layout, PlannedTensor};
use crate::disk;
use crate::failure::Failure;
use crate::job::device_records::joined;
use crate::job::folder::RunFolder;
use crate::job::{machine, same_run};
use crate::linalg::StoredDtype;
use crate::merging::methods::{MergeMethod, MethodSettings, Scope};
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::Parameter;
use crate::placement::cpu_budget;
use crate::run::{Events, Moment};
use crate::runtime::Clock;
use crate::settings::{MergeSettings, PIECE_ELEMENTS, SaliencySource, check_device};

/// Workers per thread: while the first waits for the disk, the second computes.
const WORKERS_PER_THREAD: usize = 2;

impl MergeJob {
    /// Reads the recipe, opens all models, and resolves every tensor, the output's files, folders and memory.
    ///
    /// # Errors
    /// Fails for everything that can be wrong with recipe, models, flags and folders.
    pub(super) fn settle(settings: MergeSettings, events: &dyn Events) -> Result<SettledMerge> {
        check_device(&settings.device)?;
        let clock = Clock::new();
        clock.mark(Moment::Start, events);
        let started_unix_seconds = machine::unix_seconds();
        let ResolvedMerge {
            recipe,
            method,
            inputs,
            combined,
            tensors,
            left_out,
            num_hidden_layers,
            vocabulary,
            donor,
        } = ResolvedMerge::of(&settings, events)?;
        let layout = layout_of(&tensors, settings.out_shard_size.0)?;
        let method_settings = method_settings(&settings);
        check_groups(&tensors, method.scope(&method_settings))?;
        let work = check_values(&tensors, method, &method_settings, &inputs)?;
        let threads = machine::start_workers(settings.device.threads)?;
        let inventory = machine::inventory(&settings.device, threads)?;
        let budget = cpu_budget(&inventory, &settings.device.budget());
        let wanted = wanted_size(&settings, threads);
        let mut shape = shape_of(&settings, &tensors, method, &inputs);
        shape.tokenizer_bytes = vocabulary.tokenizer_bytes();
        shape.vocabulary_bytes = vocabulary.bytes();
        shape.published_bytes = vocabulary.published_bytes();
        // A pass that does not fit fails before statistics are read and texts are found.
        let early = shape.fit(wanted, budget);
        if !Saliency::is_measured(&settings) {
            early.clone()?;
        }
        let folders: Vec<&Path> = inputs.folders();
        let mut folder = RunFolder::at(&folders, &settings.output(), true)?;
        folder.lock(events)?;
        let mut unfinished = folder.look()?;
        if unfinished.is_none() && settings.resume {
            return Err(folder.nothing_to_resume().into());
        }
        let measured_within = match early {
            Ok(_) => settings.clone(),
            Err(_) => with_enough_for(&shape, &settings),
        };
        let saliency = Saliency::settle(&measured_within, &recipe, &inputs, &folder, events);
        let saliency = match (saliency, early) {
            (Err(measuring), Err(pass)) => return Err(with_advice_of(pass, measuring)),
            (saliency, _) => saliency?,
        };
        let mut deciding = BTreeMap::new();
        if folder.state().is_some() {
            deciding = decide(&settings, &recipe, &inputs, &folder)?;
            deciding.extend(Saliency::deciding(saliency.as_ref()));
            deciding.extend(vocabulary.deciding());
        }
        if let Some(combined) = &combined {
            deciding.extend(combined.deciding());
            combined.check_folder(unfinished.is_some() || settings.force)?;
        }
        if let Some(state) = unfinished.take() {
            unfinished = same_run::check(state, &deciding, &folder, &settings.output())?;
            if let Some(manifest) = folder.record_of_the_last_step(None)? {
                events.note("this run is finished; only a file of its state was left".to_string());
                return Ok(SettledMerge::Finished(Box::new(manifest)));
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
            recipe,
            method,
            method_settings,
            inputs,
            combined,
            tensors,
            left_out,
            num_hidden_layers,
            layout,
            vocabulary,
            donor,
            folder,
            size,
            threads,
            saliency,
            deciding,
            unfinished,
            clock,
            started_unix_seconds,
        };
        job.check_disk()?;
        Ok(SettledMerge::Job(Box::new(job)))
    }

    /// Bytes of all weight files of the output.
    pub(super) fn output_bytes(&self) -> ByteSize {
        self.layout.bytes()
    }

    /// Checks that the disk has room for the model.
    fn check_disk(&self) -> Result<()> {
        let (Some(model), None) = (&self.folder.model, &self.unfinished) else {
            return Ok(());
        };
        let Some(room) = disk::room(model) else {
            return Ok(());
        };
        let replaced = self.folder.replaced_bytes();
        let needed = ByteSize(self.output_bytes().0.saturating_sub(replaced.0));
        if needed <= room.free {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the disk of `{}` has too little room: {needed} are needed, {} are free",
            model.display(),
            room.free
        ))
        .hint("free some space, or choose a folder on another disk with --save")
        .into())
    }

    /// Tells the models, the method and the plan.
    pub(super) fn announce(&self, events: &dyn Events) {
        for model in &self.inputs.models {
            let is_base = self.recipe.base_model.as_ref() == Some(&model.spec);
            events.note(format!(
                "{:<12} {}: {}",
                if is_base { "base" } else { "model" },
                model.spec,
                model.checkpoint.total_bytes()
            ));
        }
        let tensors = self.tensors.len();
        events.note(format!(
            "merge        {}: {} layers, {tensors} tensors, {}",
            self.recipe.merge_method,
            self.num_hidden_layers,
            self.output_bytes()
        ));
        if let Some(first) = self.left_out.first() {
            events.note(format!(
                "left out     {} tensors that are no part of a decoder, `{first}` among them",
                self.left_out.len()
            ));
        }
        // What cannot be read ends the pass, with its reason.
        if let (false, Ok(Some((model, tensor, share)))) =
            (self.settings.keep_zeros, self.inputs.filled_zeros())
        {
            events.warn(format!(
                "the base of `{model}` is pruned ({:.1} % of the first rows of `{tensor}` are zero), and the adapter fills its zeros: \
                 --keep-zeros keeps them",
                100.0 * share
            ));
        }
        self.vocabulary.announce(events);
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

/// The pass with all workers and the largest pieces.
fn wanted_size(settings: &MergeSettings, threads: usize) -> PassSize {
    PassSize {
        workers: threads * WORKERS_PER_THREAD,
        piece_elements: settings.piece_elements.unwrap_or(PIECE_ELEMENTS),
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

/// The numbers of the pass as far as the tensors, the settings and a file of statistics decide them.
fn shape_of(
    settings: &MergeSettings,
    tensors: &[MergeTensor],
    method: &dyn MergeMethod,
    inputs: &InputModels,
) -> MergeShape {
    let scope = method.scope(&method_settings(settings));
    let keeps_zeros = settings.keep_zeros;
    let mut shape = MergeShape::of(tensors, &method.declaration(), scope, inputs, keeps_zeros);
    let statistics = settings.saliency_file.as_ref();
    let statistics = statistics.and_then(|file| file.metadata().ok());
    shape.statistics_bytes = statistics.map_or(0, |file| file.len());
    shape
}

/// The files of the output.
fn layout_of(tensors: &[MergeTensor], shard_bytes: u64) -> Result<Layout> {
    let planned = tensors.iter().map(|tensor| PlannedTensor {
        name: tensor.recipe.name.clone(),
        dtype: dtype_on_disk(tensor.dtype),
        shape: tensor.shape.clone(),
    });
    Layout::new(planned.collect(), shard_bytes)
}

/// The settings of the method.
fn method_settings(settings: &MergeSettings) -> MethodSettings {
    MethodSettings {
        semantics: settings.semantics,
        scope: settings.trim_scope,
        squares_vote: settings.saliency == Some(SaliencySource::Experts),
        seed: settings.seed,
    }
}

/// The dtype in a file's header.
pub(super) fn dtype_on_disk(dtype: StoredDtype) -> safetensors::Dtype {
    match dtype {
        StoredDtype::F32 => safetensors::Dtype::F32,
        StoredDtype::F16 => safetensors::Dtype::F16,
        StoredDtype::Bf16 => safetensors::Dtype::BF16,
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
fn check_values(
    tensors: &[MergeTensor],
    method: &dyn MergeMethod,
    settings: &MethodSettings,
    inputs: &InputModels,
) -> Result<PassWork> {
    let mut work = PassWork::default();
    for tensor in tensors {
        let reads = tensor.check(method, settings)? as u64;
        let sources = &tensor.recipe.sources;
        let bytes = sources.iter().map(|source| inputs.stored_bytes(source));
        work.bytes += reads * bytes.sum::<u64>();
        work.elements += reads * sources.len() as u64 * tensor.elements();
    }
    Ok(work)
}
