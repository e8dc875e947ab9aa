//! The texts of a run: found before anything else works, then turned into token ids.

use std::cell::RefCell;
use std::fs::File;

use anyhow::Result;

use super::located;
use super::opened::OpenedModel;
use crate::bytes::ByteSize;
use crate::data::footprint::{self, Encoding, TokenizerSize};
use crate::data::{
    self, Calibration, DatasetSpec, Draw, Evaluation, ExampleRequest, Examples, HeldOut,
    LineMemory, Packing, Role, Source, TextCache, Tokenizer,
};
use crate::eval::answers::{SCORED_AT_ONCE, SCORING_BYTES};
use crate::failure::Failure;
use crate::model::Embedding;
use crate::pipeline::TaskShape;
use crate::run::{Events, Phase};
use crate::runtime::spill_file;
use crate::settings::{EvalSides, EvaluationSettings, Settings, TaskSettings};
use crate::tasks::{
    self, HubSplit, PackShape, PackedTasks, Question, ScoredRequest, TaskFiles, TaskLayout,
    TaskQuestions, TaskRequest, TaskTokens,
};

/// The token ids of a run.
#[derive(Default)]
pub(super) struct Texts {
    pub(super) calibration: Option<Calibration>,
    /// The examples of a training of the whole model, and the held-out examples.
    pub(super) examples: Option<(Examples, Option<Examples>)>,
    pub(super) windows: Option<Evaluation>,
    /// The requests of tasks.
    pub(super) tasks: Option<PackedTasks>,
}

/// The texts of a run on the disk.
pub(super) struct TextSources {
    calibration: Option<Source>,
    evaluation: Option<Source>,
    /// The questions of tasks; `None` without tasks.
    questions: Option<Vec<TaskQuestions>>,
    cache: TextCache,
}

impl TextSources {
    /// Finds both texts, on the hub where a name has no path, and checks that embedding and head can be read.
    ///
    /// # Errors
    /// Fails when a text is missing or of a kind we do not read, and when the embedding, the last norm or the head is missing.
    pub(super) fn find(
        settings: &Settings,
        model: &OpenedModel,
        events: &dyn Events,
    ) -> Result<Self> {
        let find = |dataset: &DatasetSpec, role| -> Result<Source> {
            let cache_dir = settings.model.cache_dir.as_deref();
            let dataset = located::dataset(dataset, role, cache_dir, events)?;
            let source = Source::find(&dataset, role)?.with_template_of(&model.folder);
            source.check()?;
            Ok(source)
        };
        let calibration = settings.calibration.as_ref().map(|calibration| {
            Embedding::open(&*model.checkpoint, &model.config)?;
            find(&calibration.dataset, Role::Calibration)
        });
        let calibration = calibration.transpose()?;
        let EvaluationSettings { eval_dataset, text_cache, .. } = &settings.evaluation;
        let mut evaluation = None;
        if settings.evaluation.eval != EvalSides::None {
            model.check_ends(events)?;
        }
        if settings.evaluation.needs_text() {
            let found = find(eval_dataset, Role::Evaluation);
            evaluation = Some(found.map_err(|error| or_unmeasured(error, settings))?);
        }
        let questions = questions(settings, events)?;
        let sources = Self {
            calibration,
            evaluation,
            questions,
            cache: TextCache::open(text_cache.clone()).with_lines(lines(settings, model)),
        };
        sources.warn_of_one_text(settings, events);
        Ok(sources)
    }

    /// Warns where the model is calibrated on the text it is measured with.
    fn warn_of_one_text(&self, settings: &Settings, events: &dyn Events) {
        if let (Some(calibration), Some(evaluation), Some(of)) =
            (&self.calibration, &self.evaluation, &settings.calibration)
            && calibration.is_same_text(evaluation, &self.cache)
        {
            let given = &settings.evaluation.eval_dataset;
            let other = match given.to_string().starts_with("c4") {
                true => "wikitext2",
                false => "c4",
            };
            events.warn(format!(
                "calibration (--dataset {}) and evaluation (--eval-dataset {given}) read the same text: the perplexity will be \
                 better than on a text that the calibration did not see; calibrate on another one, like --dataset {other}",
                of.dataset
            ));
        }
    }

    /// Returns the memory of tokenizing these texts: the peak, and the bytes that stay until the run ends. Zero without texts.
    ///
    /// # Arguments
    /// * `encoding`: the encoding of texts without ids in the cache
    pub(super) fn memory(
        &self,
        model: &OpenedModel,
        encoding: Encoding,
    ) -> Result<(ByteSize, ByteSize)> {
        let mut memory = (ByteSize::ZERO, ByteSize::ZERO);
        if self.is_empty() {
            return Ok(memory);
        }
        let size = match TokenizerSize::of(&model.folder) {
            Err(error) if error.is::<Failure>() => return Err(error),
            // Loading it tells whether it is a tokenizer at all.
            Err(_) => return Ok(memory),
            Ok(size) => size,
        };
        if let Some(questions) = &self.questions {
            let texts = questions.iter().map(|of| of.text_bytes).max().unwrap_or_default();
            let texts = ByteSize::of(texts, 1);
            memory.0 = footprint::tokenize_questions(size, texts, model.threads);
            memory.1 = footprint::retained(size, model.threads);
        }
        for text in self.calibration.iter().chain(&self.evaluation) {
            let outlook = text.outlook(&model.folder, &self.cache)?;
            let encoding = match outlook.is_cached {
                true => Encoding::Cached,
                false => encoding,
            };
            let peak = footprint::tokenize(size, outlook.text, model.threads, encoding);
            memory.0 = memory.0.max(peak);
            if encoding != Encoding::Cached {
                memory.1 = footprint::retained(size, model.threads);
            }
        }
        Ok(memory)
    }

    /// Loads the tokenizer; `None` without texts.
    pub(super) fn tokenizer(
        &self,
        model: &OpenedModel,
        events: &dyn Events,
    ) -> Result<Option<Tokenizer>> {
        if self.is_empty() {
            return Ok(None);
        }
        let tokenizer = model.tokenizer(events)?;
        Ok(Some(tokenizer.with_lines(self.cache.lines())))
    }

    /// Bounds the lines of the texts for a tokenizer whose texts cannot be cut.
    pub(super) fn bound_lines_in_one_call(&mut self) {
        let lines = self.cache.lines().in_one_call();
        self.cache = self.cache.clone().with_lines(lines);
    }

    fn is_empty(&self) -> bool {
        self.calibration.is_none() && self.evaluation.is_none() && self.questions.is_none()
    }

    /// Tokenizes both texts.
    ///
    /// # Errors
    /// Fails for a text that is too short or cannot be read, and for ids that the embedding does not have.
    pub(super) fn tokenize(
        &self,
        settings: &Settings,
        model: &OpenedModel,
        tokenizer: &Tokenizer,
        events: &dyn Events,
    ) -> Result<Texts> {
        let mut texts = Texts::default();
        let (cache, seqlen) = (&self.cache, model.seqlen);
        if settings.trains_whole() {
            texts.examples = self.examples(settings, model, tokenizer, events)?;
        } else if let Some((dataset, settings)) =
            self.calibration.as_ref().zip(settings.calibration.as_ref())
        {
            let draw = Draw { nsamples: settings.nsamples as usize, seqlen, seed: settings.seed };
            let samples = model.clock.measure(Phase::Tokenize, || {
                data::calibration(dataset, tokenizer, draw, cache, events)
            })?;
            model.check_ids(&samples.tokens, tokenizer, "calibration")?;
            texts.calibration = Some(samples);
        }
        if let Some(dataset) = &self.evaluation {
            let windows = settings.evaluation.eval_windows;
            let windows = windows.map(|windows| usize::try_from(windows).unwrap_or(usize::MAX));
            let windows = model.clock.measure(Phase::Tokenize, || {
                dataset.evaluation(tokenizer, seqlen, windows, cache, events)
            });
            let windows = windows.map_err(|error| or_unmeasured(error, settings))?;
            model.check_ids(&windows.tokens, tokenizer, "evaluation")?;
            texts.windows = Some(windows);
        }
        if let Some(questions) = &self.questions {
            let tasks = &settings.evaluation.tasks;
            let packed = model.clock.measure(Phase::Tokenize, || -> Result<PackedTasks> {
                let max_length = model.config.max_position_embeddings;
                let tokens = TaskTokens { tokenizer, add_bos: tasks.add_bos, max_length };
                // GPUs have no attention to the rows of an earlier sequence.
                let shares = model.gpu_names.is_empty() && settings.device.simulate.is_none();
                let shape = PackShape { rows: seqlen, max_length, shares };
                let requests = |question: &Question| -> Result<Vec<ScoredRequest>> {
                    let requests = tokens.requests(question)?;
                    for ScoredRequest { context, continuation } in &requests {
                        model.check_ids(context, tokenizer, "tasks")?;
                        model.check_ids(continuation, tokenizer, "tasks")?;
                    }
                    Ok(requests)
                };
                PackedTasks::new(questions, &requests, shape, id_file(settings)?)
            })?;
            texts.tasks = Some(packed);
        }
        Ok(texts)
    }
}

impl TextSources {
    /// The examples of a training of the whole model, and the held-out examples.
    fn examples(
        &self,
        settings: &Settings,
        model: &OpenedModel,
        tokenizer: &Tokenizer,
        events: &dyn Events,
    ) -> Result<Option<(Examples, Option<Examples>)>> {
        let (Some(dataset), Some(recovery), Some(draw)) =
            (&self.calibration, &settings.recovery, &settings.calibration)
        else {
            return Ok(None);
        };
        let request = ExampleRequest {
            seqlen: model.seqlen,
            packing: match recovery.per_document {
                true => Packing::PerDocument,
                false => Packing::Packed,
            },
            at_least: recovery.per_step() + recovery.held_out,
            held_out: recovery.held_out,
            at_most: Some(draw.nsamples as usize),
        };
        let examples = model.clock.measure(Phase::Tokenize, || {
            dataset.examples(tokenizer, request, &self.cache, events)
        })?;
        for example in 0..examples.len() {
            model.check_ids(examples.tokens_of(example), tokenizer, "training")?;
        }
        Ok(Some(match recovery.held_out {
            0 => (examples, None),
            count => {
                let (trained, held) = examples.split(HeldOut::Count(count), draw.seed)?;
                (trained, Some(held))
            }
        }))
    }
}

/// Adds to the refusal of an evaluation text that a run which changes weights can do without.
fn or_unmeasured(error: anyhow::Error, settings: &Settings) -> anyhow::Error {
    let verb = match (&settings.sparsity, &settings.recovery) {
        (_, Some(_)) => "train",
        (Some(_), None) => "prune",
        (None, None) => return error,
    };
    match error.downcast::<Failure>() {
        Ok(failure) => {
            let hint = failure.hint.as_ref().map(|hint| format!("{hint}, or "));
            let hint = hint.unwrap_or_default();
            failure.hint(format!("{hint}{verb} with --eval none")).into()
        }
        Err(error) => error,
    }
}

/// The questions of the tasks that are asked for.
///
/// # Errors
/// Fails for files that are missing or damaged, and for rows that are no questions of their task.
fn questions(settings: &Settings, events: &dyn Events) -> Result<Option<Vec<TaskQuestions>>> {
    let evaluation = &settings.evaluation;
    if evaluation.eval == EvalSides::None || evaluation.tasks.is_empty() {
        return Ok(None);
    }
    let TaskSettings { tasks_from, num_fewshot, limit, .. } = &evaluation.tasks;
    let asked = evaluation.tasks.asked();
    let cache_dir = settings.model.cache_dir.as_deref();
    let listed = RefCell::default();
    let download = |split: &HubSplit<'_>| {
        located::task_split(split, &mut listed.borrow_mut(), cache_dir, events)
    };
    let request = TaskRequest {
        tasks: &asked,
        files: match tasks_from {
            Some(folder) => TaskFiles::Folder(folder),
            None => TaskFiles::Hub(&download),
        },
        num_fewshot: *num_fewshot,
        limit: *limit,
    };
    tasks::find(&request).map(Some)
}

/// The file of the token ids of tasks. It goes with the process.
///
/// # Errors
/// Fails when the file cannot be created.
pub(super) fn id_file(settings: &Settings) -> Result<File> {
    let folder = settings.device.offload_folder.clone().unwrap_or_else(std::env::temp_dir);
    spill_file(&folder)
}

/// The bound of a text's lines under `--max-memory`. A tokenizer that cannot be read is an error later.
fn lines(settings: &Settings, model: &OpenedModel) -> LineMemory {
    match (settings.device.budget().cpu(), TokenizerSize::of(&model.folder)) {
        (Some(budget), Ok(size)) => LineMemory::within(budget, size, model.threads),
        _ => LineMemory::UNBOUNDED,
    }
}

impl Texts {
    /// Evaluation windows.
    pub(super) fn windows(&self) -> usize {
        self.windows.as_ref().map_or(0, |windows| windows.windows)
    }

    /// The shape of the packs of tasks.
    pub(super) fn task_layout(&self) -> Option<&TaskLayout> {
        self.tasks.as_ref().map(|tasks| &tasks.layout)
    }

    /// Rows of the tasks' packs.
    pub(super) fn task_rows(&self) -> usize {
        self.task_layout().map_or(0, |tasks| tasks.rows)
    }

    /// The packs of tasks in numbers, of which `windows` are counted as windows.
    pub(super) fn task_shape(&self, windows: usize) -> TaskShape {
        self.task_layout().map_or_else(TaskShape::default, |tasks| TaskShape {
            windows,
            scored_rows: tasks.scored_rows,
            kept: ByteSize::of(tasks.bytes(), 1),
            scoring: ByteSize::of(tasks.predictions.min(SCORED_AT_ONCE), SCORING_BYTES),
        })
    }

    /// Packs of the tasks.
    pub(super) fn packs(&self) -> usize {
        self.task_layout().map_or(0, TaskLayout::packs)
    }

    /// Tokens of the longest sample of a sweep, at least `seqlen`.
    pub(super) fn longest(&self, seqlen: usize) -> usize {
        self.task_layout().map_or(seqlen, |tasks| tasks.largest.max(seqlen))
    }

    /// Calibration samples.
    pub(super) fn samples(&self) -> usize {
        let samples = self.calibration.as_ref();
        samples.map_or(0, |samples| samples.nsamples)
    }
}
