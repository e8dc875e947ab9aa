//! `--log-samples`: the log-likelihood of every choice, a JSON line per question and model.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::failure::Failure;
use crate::tasks::{AskedTask, PackedTasks, RequestIds, RequestScore};

/// A question with its scores.
#[derive(Serialize)]
struct AnsweredQuestion<'a> {
    /// `dense`, or `pruned` for the changed model.
    model: &'a str,
    task: &'a str,
    subject: Option<&'a str>,
    question: usize,
    choices: Vec<ScoredChoice>,
    target: usize,
    acc_index: usize,
    acc_norm_index: usize,
}

/// A choice: the ids that passed the model, the ids that were scored, and their score.
#[derive(Serialize)]
struct ScoredChoice {
    input: Vec<u32>,
    continuation: Vec<u32>,
    log_likelihood: f32,
    is_greedy: bool,
}

/// Writes the lines of several models, by name, in place of an earlier file.
///
/// # Errors
/// Fails when the file cannot be written.
pub(super) fn write(
    path: &Path,
    packed: &PackedTasks,
    models: &BTreeMap<&str, &[RequestScore]>,
) -> Result<()> {
    let refused = |error: std::io::Error| {
        Failure::new(format!("cannot write `{}`: {error}", path.display()))
            .hint("name a file in a folder that can be written to with --log-samples")
    };
    let ids = packed.request_ids();
    let mut text = Vec::new();
    for (model, scores) in models {
        for task in &packed.tasks {
            for line in lines(model, task, (&ids, scores)) {
                serde_json::to_writer(&mut text, &line).context("a line of scores")?;
                text.push(b'\n');
            }
        }
    }
    let mut file = std::fs::File::create(path).map_err(refused)?;
    file.write_all(&text).map_err(refused)?;
    Ok(())
}

fn lines<'a>(
    model: &'a str,
    task: &'a AskedTask,
    (ids, scores): (&'a [RequestIds], &'a [RequestScore]),
) -> impl Iterator<Item = AnsweredQuestion<'a>> {
    task.questions.iter().enumerate().map(move |(number, question)| {
        let first = question.first_request;
        let requests = first..first + question.choices as usize;
        let choices = requests.map(|request| ScoredChoice {
            input: ids[request].input.clone(),
            continuation: ids[request].continuation.clone(),
            log_likelihood: scores[request].log_likelihood as f32,
            is_greedy: scores[request].is_greedy,
        });
        AnsweredQuestion {
            model,
            task: &task.task,
            subject: task.subject.as_ref().map(|(subject, _)| subject.as_str()),
            question: number,
            choices: choices.collect(),
            target: question.target as usize,
            acc_index: question.chosen(scores),
            acc_norm_index: question.chosen_per_character(scores, task.characters(question)),
        }
    })
}
