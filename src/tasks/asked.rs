//! Questions without their texts, and the samples that their requests become.

use serde::{Deserialize, Serialize};

use crate::model::Segment;

/// A token that is scored: the logits of a row, and the token that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prediction {
    /// The row of the pack.
    pub row: u32,
    /// The right token.
    pub token: u32,
    /// The request, among those of all tasks.
    pub request: u32,
}

/// A sample of the sweep.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskPack {
    /// Token ids of the rows.
    pub tokens: Vec<u32>,
    /// The sequences.
    pub segments: Vec<Segment>,
    /// The scored tokens; those of a request are in order.
    pub predictions: Vec<Prediction>,
}

impl TaskPack {
    /// The rows with scored tokens, ascending.
    pub fn scored_rows(&self) -> Vec<usize> {
        let mut rows: Vec<usize> = self.predictions.iter().map(|of| of.row as usize).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}

/// A question without its texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskedQuestion {
    /// Its first request; the requests of its choices follow.
    pub first_request: usize,
    /// The number of choices.
    pub choices: u32,
    /// The right choice.
    pub target: u32,
}

/// A task, or a subject of MMLU, without its texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskedTask {
    /// The task.
    pub task: String,
    /// The subject of MMLU, and its group.
    pub subject: Option<(String, String)>,
    /// Accuracy per character is reported, too.
    pub has_acc_norm: bool,
    /// The questions, in their order.
    pub questions: Vec<AskedQuestion>,
    /// Characters of every choice, question by question.
    pub characters: Vec<u32>,
}

impl AskedTask {
    /// Characters of the choices of a question.
    pub fn characters(&self, question: &AskedQuestion) -> &[u32] {
        let before = self.questions.first().map_or(0, |first| first.first_request);
        let from = question.first_request - before;
        &self.characters[from..from + question.choices as usize]
    }
}

/// The ids of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestIds {
    /// The ids that pass the model.
    pub input: Vec<u32>,
    /// The ids that are scored.
    pub continuation: Vec<u32>,
}

/// The shape of packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackShape {
    /// Rows of a pack, at most; a longer request has a pack of its own.
    pub rows: usize,
    /// Ids of an input, at most.
    pub max_length: usize,
    /// Equal beginnings pass once.
    pub shares: bool,
}
