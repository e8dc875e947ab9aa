//! The files of tasks: rows read, examples drawn, questions made.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::examples::FewShotExamples;
use super::kind::{ExampleDraws, Question, TaskKind};
use super::kinds::mmlu;
use super::row::TaskRow;
use super::table::{QuestionLimit, TaskSpec};
use crate::data::rows::for_each_row;
use crate::failure::Failure;

/// Bytes of the texts of questions.
pub fn bytes(tasks: &[TaskQuestions]) -> usize {
    let questions = tasks.iter().flat_map(|task| &task.questions);
    questions.flat_map(|of| of.contexts.iter().chain(&of.answers)).map(String::len).sum()
}

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

/// A task with its questions, or a subject of MMLU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskQuestions {
    /// The task.
    pub task: String,
    /// The subject of MMLU, and its group.
    pub subject: Option<(String, &'static str)>,
    /// Accuracy per character is reported, too.
    pub has_acc_norm: bool,
    /// The questions, after their examples.
    pub questions: Vec<Question>,
}

/// Reads the tasks.
///
/// # Errors
/// Fails for files that are missing or damaged, and for rows that are no questions of their task; messages name file and row.
pub fn read(request: &TaskRequest<'_>) -> Result<Vec<TaskQuestions>> {
    let mut all = Vec::new();
    for spec in request.tasks {
        let kind = spec.kind();
        if let Some(file) = &spec.file {
            let file = std::slice::from_ref(file);
            let split = TaskSplit {
                evaluated: file.to_vec(),
                examples: examples(request, || Ok(file.to_vec()))?,
            };
            all.push(questions(request, kind, &spec.name, None, split)?);
            continue;
        }
        if kind.draws != ExampleDraws::First {
            let split = split(request, kind, None)?;
            all.push(questions(request, kind, kind.name, None, split)?);
            continue;
        }
        let subjects = match request.files {
            TaskFiles::Folder(from) => subjects_in(&from.join(kind.name), kind)?,
            TaskFiles::Hub(_) => mmlu::subjects(),
        };
        for (subject, group) in subjects {
            let split = split(request, kind, Some(&subject))?;
            all.push(questions(request, kind, kind.name, Some((subject, group)), split)?);
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

/// The files of the evaluated split, and the rows of the split of examples.
struct TaskSplit {
    evaluated: Vec<PathBuf>,
    examples: Vec<TaskRow>,
}

/// The rows that examples are drawn from; none where no examples are asked for.
fn examples(
    request: &TaskRequest<'_>,
    files: impl FnOnce() -> Result<Vec<PathBuf>>,
) -> Result<Vec<TaskRow>> {
    let mut rows = Vec::new();
    if request.num_fewshot > 0 {
        for_each(&files()?, &mut |row| {
            rows.push(row);
            Ok(())
        })?;
    }
    Ok(rows)
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

/// The questions of a task, each after its examples.
fn questions(
    request: &TaskRequest<'_>,
    kind: &TaskKind,
    name: &str,
    subject: Option<(String, &'static str)>,
    TaskSplit { evaluated, examples }: TaskSplit,
) -> Result<TaskQuestions> {
    let limit = match request.limit {
        None => usize::MAX,
        Some(limit) if limit.is_share() => limit.of(for_each(&evaluated, &mut |_| Ok(()))?),
        Some(limit) => limit.of(usize::MAX),
    };
    let before = subject.as_ref().map(|(subject, _)| mmlu::description(subject));
    let before = before.unwrap_or_default();
    let mut examples = FewShotExamples::new(kind, name, &examples, request.num_fewshot)?;
    // Rows become questions one at a time: as JSON they take several times the memory.
    let mut questions: Vec<Question> = Vec::new();
    for_each(&evaluated, &mut |row| {
        if questions.len() < limit {
            let question = (kind.question)(&row)?;
            let few_shot = examples.before(&row).context("drawing examples")?;
            questions.push(question.after(&format!("{before}{few_shot}")));
        }
        Ok(())
    })?;
    Ok(TaskQuestions {
        task: name.to_string(),
        subject,
        has_acc_norm: kind.has_acc_norm,
        questions,
    })
}
