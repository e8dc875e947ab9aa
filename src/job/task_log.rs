//! `--log-samples`: the log-likelihood of every choice, a JSON line per question and model.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
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
    let file = std::fs::File::create(path).map_err(refused)?;
    let mut file = BufWriter::new(file);
    for (model, scores) in models {
        packed.for_each_question(|task, question, ids| {
            let line = line((model, scores), (task, question), ids);
            let line = serde_json::to_string(&line).context("a line of scores")?;
            Ok(writeln!(file, "{line}").map_err(refused)?)
        })?;
    }
    Ok(file.flush().map_err(refused)?)
}

fn line<'a>(
    (model, scores): (&'a str, &[RequestScore]),
    (task, number): (&'a AskedTask, usize),
    ids: &[RequestIds],
) -> AnsweredQuestion<'a> {
    let question = &task.questions[number];
    let of_question = &scores[question.first_request..];
    let choices = ids.iter().zip(of_question).map(|(ids, score)| ScoredChoice {
        input: ids.input.clone(),
        continuation: ids.continuation.clone(),
        log_likelihood: score.log_likelihood as f32,
        is_greedy: score.is_greedy,
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
}
