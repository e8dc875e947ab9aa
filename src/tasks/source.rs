//! The files of tasks: rows read, examples drawn, questions made.
//!
//! Files are read twice: to check and count their questions, and to make requests of them. So the memory of their texts does not grow
//! with their number.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::examples::FewShotExamples;
use super::kind::{ExampleDraws, Question, TaskKind};
use super::kinds::mmlu;
use super::row::{StoredRow, TaskRow};
use super::table::{QuestionLimit, TaskSpec};
use crate::data::rows::for_each_row;
use crate::failure::Failure;

/// Questions that are in memory together.
const AT_ONCE: usize = 64;

/// The places of the files of tasks.
#[derive(Clone, Copy)]
pub enum TaskFiles<'a> {
    /// A folder with a folder per task.
    Folder(&'a Path),
    /// A function that downloads the files of a split, unless they are there.
    Hub(&'a dyn Fn(&HubSplit<'_>) -> Result<Vec<PathBuf>>),
}

/// A split of a data set on the hub.
#[derive(Debug, Clone, Copy)]
pub struct HubSplit<'a> {
    /// The repository.
    pub repository: &'static str,
    /// The configuration; `None` for the only configuration.
    pub config: Option<&'a str>,
    /// The split.
    pub split: &'static str,
}

/// Tasks as asked for.
#[derive(Clone, Copy)]
pub struct TaskRequest<'a> {
    /// The tasks, in the order of the table.
    pub tasks: &'a [TaskSpec],
    /// The files of tasks of the table.
    pub files: TaskFiles<'a>,
    /// Examples before each question.
    pub num_fewshot: usize,
    /// A limit of the questions of each task, and of each subject.
    pub limit: Option<QuestionLimit>,
}

/// A task whose files have questions, or a subject of MMLU.
#[derive(Debug, Clone)]
pub struct TaskQuestions {
    /// The task.
    pub task: String,
    /// The subject of MMLU, and its group.
    pub subject: Option<(String, &'static str)>,
    /// Accuracy per character is reported, too.
    pub has_acc_norm: bool,
    /// The number of questions.
    pub count: usize,
    /// Bytes of the texts that are in memory together.
    pub text_bytes: usize,
    kind: &'static TaskKind,
    split: TaskSplit,
    num_fewshot: usize,
}

/// The files of a task.
#[derive(Debug, Clone)]
struct TaskSplit {
    evaluated: Vec<PathBuf>,
    /// The files that examples are drawn from; none where no examples are asked for.
    examples: Vec<PathBuf>,
}

/// Finds the files of the tasks, and checks and counts their questions.
///
/// # Errors
/// Fails for files that are missing or damaged, and for rows that are no questions of their task; messages name file and row.
pub fn find(request: &TaskRequest<'_>) -> Result<Vec<TaskQuestions>> {
    let mut all = Vec::new();
    for (at, spec) in request.tasks.iter().enumerate() {
        if request.tasks[..at].iter().any(|before| before.name == spec.name) {
            return Err(Failure::usage(format!("--tasks names `{}` twice", spec.name))
                .hint(format!(
                    "leave one out, or give your file another name: {0}-2=FILE",
                    spec.name
                ))
                .into());
        }
        let kind = spec.kind();
        if let Some(file) = &spec.file {
            let file = std::slice::from_ref(file);
            let examples = examples(request, || Ok(file.to_vec()))?;
            let split = TaskSplit { evaluated: file.to_vec(), examples };
            all.push(TaskQuestions::counted(request, kind, (&spec.name, None), split)?);
            continue;
        }
        if kind.draws != ExampleDraws::First {
            let split = split(request, kind, None)?;
            all.push(TaskQuestions::counted(request, kind, (kind.name, None), split)?);
            continue;
        }
        let subjects = match request.files {
            TaskFiles::Folder(from) => subjects_in(&from.join(kind.name), kind)?,
            TaskFiles::Hub(_) => mmlu::subjects(),
        };
        for (subject, group) in subjects {
            let split = split(request, kind, Some(&subject))?;
            let subject = Some((subject, group));
            all.push(TaskQuestions::counted(request, kind, (kind.name, subject), split)?);
        }
    }
    Ok(all)
}

/// The subjects of MMLU that have a folder, in the order of their names.
fn subjects_in(folder: &Path, kind: &TaskKind) -> Result<Vec<(String, &'static str)>> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut found: Vec<(String, &'static str)> =
        names.filter_map(|name| mmlu::group(&name).map(|group| (name, group))).collect();
    found.sort();
    if found.is_empty() {
        return Err(Failure::new(format!(
            "no subject of `{}` in `{}`",
            kind.name,
            folder.display()
        ))
        .detail("looked for a folder per subject, like `anatomy`")
        .hint(format!("copy {} there, or leave --tasks-from out to download it", kind.repository))
        .into());
    }
    Ok(found)
}

/// The files that examples are drawn from; none where no examples are asked for.
fn examples(
    request: &TaskRequest<'_>,
    files: impl FnOnce() -> Result<Vec<PathBuf>>,
) -> Result<Vec<PathBuf>> {
    if request.num_fewshot == 0 { Ok(Vec::new()) } else { files() }
}

/// The splits of a task, or of a subject.
fn split(request: &TaskRequest<'_>, kind: &TaskKind, subject: Option<&str>) -> Result<TaskSplit> {
    let of = |split: &'static str| -> Result<Vec<PathBuf>> {
        match request.files {
            TaskFiles::Folder(from) => {
                let folder = from.join(kind.name);
                files(&subject.map_or(folder.clone(), |subject| folder.join(subject)), kind, split)
            }
            TaskFiles::Hub(download) => {
                let config = subject.or(kind.config);
                download(&HubSplit { repository: kind.repository, config, split })
            }
        }
    };
    let examples = examples(request, || of(kind.examples))?;
    Ok(TaskSplit { evaluated: of(kind.evaluated)?, examples })
}

/// The files of a split: `validation.parquet`, `validation.jsonl`, or parts as the hub names them (`validation-00000-of-00001.parquet`), in
/// the folder or in a folder of it.
fn files(folder: &Path, kind: &TaskKind, split: &str) -> Result<Vec<PathBuf>> {
    let listed = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let mut folders = vec![folder.to_path_buf()];
    folders.extend(listed(folder).into_iter().filter(|path| path.is_dir()));
    for folder in &folders {
        for name in [format!("{split}.parquet"), format!("{split}.jsonl")] {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(vec![path]);
            }
        }
        let is_part = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(&format!("{split}-")) && name.ends_with(".parquet")
        };
        let parts: Vec<PathBuf> = listed(folder).into_iter().filter(is_part).collect();
        if !parts.is_empty() {
            return Ok(parts);
        }
    }
    Err(Failure::new(format!("no {split} split of `{}` in `{}`", kind.name, folder.display()))
        .detail(format!("looked for {split}.parquet, {split}.jsonl and {split}-*.parquet"))
        .hint(format!(
            "copy the files of {} there, or leave --tasks-from out to download them",
            kind.repository
        ))
        .into())
}

/// Gives every row of some files to `take`, and returns their number.
fn for_each(files: &[PathBuf], take: &mut dyn FnMut(TaskRow) -> Result<()>) -> Result<usize> {
    let mut rows = 0;
    for file in files {
        for_each_row(file, &mut |place, columns| {
            rows += 1;
            take(TaskRow::new(place, columns))
        })?;
    }
    match files.first().filter(|_| rows == 0) {
        Some(file) => Err(Failure::new(format!("`{}` has no rows", file.display()))
            .hint("name a file with a question per line")
            .into()),
        None => Ok(rows),
    }
}

impl TaskQuestions {
    /// Checks and counts the questions of a task with a name, and a subject of MMLU with its group.
    fn counted(
        request: &TaskRequest<'_>,
        kind: &'static TaskKind,
        (name, subject): (&str, Option<(String, &'static str)>),
        split: TaskSplit,
    ) -> Result<Self> {
        let count = match request.limit {
            None => usize::MAX,
            Some(limit) if limit.is_share() => {
                limit.of(for_each(&split.evaluated, &mut |_| Ok(()))?)
            }
            Some(limit) => limit.of(usize::MAX),
        };
        let all = Self {
            task: name.to_string(),
            subject,
            has_acc_norm: kind.has_acc_norm,
            count,
            text_bytes: 0,
            kind,
            split,
            num_fewshot: request.num_fewshot,
        };
        let (mut count, mut largest) = (0, 0);
        let examples = all.for_each_block(&mut |block| {
            count += block.len();
            largest = largest.max(block.iter().map(Question::text_bytes).sum());
            Ok(())
        })?;
        Ok(Self { count, text_bytes: examples + largest, ..all })
    }

    /// Gives all questions to `take`, each after its examples, some at a time. Returns the bytes of the rows that examples are drawn from.
    ///
    /// # Errors
    /// Fails as [`find`], and where `take` fails.
    pub fn for_each_block(
        &self,
        take: &mut dyn FnMut(Vec<Question>) -> Result<()>,
    ) -> Result<usize> {
        let subject = self.subject.as_ref();
        let before = subject.map(|(subject, _)| mmlu::description(subject)).unwrap_or_default();
        let kept = match self.kind.draws {
            ExampleDraws::First => self.num_fewshot,
            ExampleDraws::Exactly | ExampleDraws::OneMore => usize::MAX,
        };
        // Rows become texts one at a time: as JSON in memory they take several times the bytes.
        let mut rows: Vec<StoredRow> = Vec::new();
        if !self.split.examples.is_empty() {
            for_each(&self.split.examples, &mut |row| {
                if rows.len() < kept {
                    rows.push(row.stored());
                }
                Ok(())
            })?;
        }
        let mut examples = FewShotExamples::new(self.kind, &self.task, &rows, self.num_fewshot)?;
        let (mut block, mut seen) = (Vec::with_capacity(AT_ONCE), 0);
        for_each(&self.split.evaluated, &mut |row| {
            if seen == self.count {
                return Ok(());
            }
            seen += 1;
            let question = (self.kind.question)(&row)?;
            let few_shot = examples.before(&row).context("drawing examples")?;
            block.push(question.after(&format!("{before}{few_shot}")));
            match block.len() == AT_ONCE {
                true => take(std::mem::replace(&mut block, Vec::with_capacity(AT_ONCE))),
                false => Ok(()),
            }
        })?;
        if !block.is_empty() {
            take(block)?;
        }
        Ok(rows.iter().map(StoredRow::bytes).sum())
    }
}
