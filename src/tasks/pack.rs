//! Requests as samples of a sweep: sequences of any length side by side, without padding.
//!
//! The requests of a question that begin with the same tokens become a tree: the shared beginning passes once, and each continuation
//! attends to it. Requests with the same input are one. Questions are packed from the longest to the shortest.

use std::ops::Range;

use anyhow::Result;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::request::ScoredRequest;
use super::source::TaskQuestions;
use crate::data::sha256_of_ids;
use crate::model::Segment;

/// A shared beginning of fewer tokens does not pay for the copies of its keys and values.
const LEAST_SHARED: usize = 16;

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

/// A question without its texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskedQuestion {
    /// Its first request; the requests of its choices follow.
    pub first_request: usize,
    /// Characters of each choice.
    pub characters: Vec<usize>,
    /// The right choice.
    pub target: usize,
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
}

/// The requests of all tasks, packed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedTasks {
    /// The tasks.
    pub tasks: Vec<AskedTask>,
    /// The samples.
    pub packs: Vec<TaskPack>,
    /// The number of requests.
    pub requests: usize,
    /// Tokens of all requests, before equal beginnings are shared.
    pub tokens: usize,
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

impl PackedTasks {
    /// Packs the requests of tasks. `requests` makes the requests of a question, one per choice; they are packed at once, so that the ids of
    /// a context that choices share exist once.
    ///
    /// # Errors
    /// Fails with the first error of `requests`.
    pub fn new(
        tasks: &[TaskQuestions],
        requests: &(dyn Fn(&TaskQuestions, usize) -> Result<Vec<ScoredRequest>> + Sync),
        shape: PackShape,
    ) -> Result<Self> {
        let mut packed = Self::default();
        let mut trees = Vec::new();
        for task in tasks {
            let of_question = |question: usize| -> Result<(usize, Vec<RequestTree>)> {
                let requests = requests(task, question)?;
                let inputs = requests.iter().map(|request| request.input(shape.max_length).len());
                Ok((inputs.sum(), RequestTree::of(&requests, shape)))
            };
            let asked = (0..task.questions.len()).into_par_iter().map(of_question);
            let asked: Vec<(usize, Vec<RequestTree>)> = asked.collect::<Result<_>>()?;
            let mut questions = Vec::new();
            for (question, (tokens, of_question)) in task.questions.iter().zip(asked) {
                let (first_request, choices) = (packed.requests, question.choices());
                packed.requests += choices;
                packed.tokens += tokens;
                trees.extend(of_question.into_iter().map(|tree| tree.numbered_from(first_request)));
                questions.push(AskedQuestion {
                    first_request,
                    characters: (0..choices).map(|at| question.characters(at)).collect(),
                    target: question.target,
                });
            }
            packed.tasks.push(AskedTask {
                task: task.task.clone(),
                subject: task.subject.clone().map(|(name, group)| (name, group.to_string())),
                has_acc_norm: task.has_acc_norm,
                questions,
            });
        }
        // Stable: requests of equal length keep their order.
        trees.sort_by_key(|tree| std::cmp::Reverse(tree.rows()));
        for tree in trees {
            let has_room =
                |pack: &TaskPack| pack.tokens.len() + tree.rows() <= shape.rows.max(tree.rows());
            if !packed.packs.last().is_some_and(has_room) {
                packed.packs.push(TaskPack::default());
            }
            if let Some(pack) = packed.packs.last_mut() {
                tree.join(pack);
            }
        }
        Ok(packed)
    }

    /// Rows of all packs.
    pub fn rows(&self) -> usize {
        self.packs.iter().map(|pack| pack.tokens.len()).sum()
    }

    /// Rows of the largest pack.
    pub fn largest(&self) -> usize {
        self.packs.iter().map(|pack| pack.tokens.len()).max().unwrap_or(0)
    }

    /// Positions of the longest sequence.
    pub fn longest(&self) -> usize {
        let segments = self.packs.iter().flat_map(|pack| &pack.segments);
        segments.map(Segment::positions).max().unwrap_or(0)
    }

    /// Input and continuation of every request, read back from the packs.
    pub fn request_ids(&self) -> Vec<RequestIds> {
        let mut all = vec![RequestIds::default(); self.requests];
        for pack in &self.packs {
            for prediction in &pack.predictions {
                let RequestIds { input, continuation } = &mut all[prediction.request as usize];
                let row = prediction.row as usize;
                let of_row = |of: &&Segment| of.rows.contains(&row);
                if let Some(segment) = pack.segments.iter().find(of_row) {
                    // The last row of a request has all rows before it.
                    let rows = segment.after.clone().chain(segment.rows.start..row + 1);
                    *input = rows.map(|row| pack.tokens[row]).collect();
                }
                continuation.push(prediction.token);
            }
        }
        all
    }

    /// SHA-256 in hex of all token ids as int32, little endian.
    pub fn sha256(&self) -> String {
        sha256_of_ids(&self.ids().collect::<Vec<_>>())
    }

    /// All token ids.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        let of = |pack: &'_ TaskPack| -> Vec<u32> {
            let scored = pack.predictions.iter().map(|prediction| prediction.token);
            pack.tokens.iter().copied().chain(scored).collect()
        };
        self.packs.iter().flat_map(of)
    }
}

/// Requests that pass together: a shared beginning, which may be empty, and the rest of each different input.
struct RequestTree {
    shared: Vec<u32>,
    branches: Vec<Branch>,
}

/// The rest of an input, and the requests that have this input.
struct Branch {
    rest: Vec<u32>,
    requests: Vec<(usize, Vec<u32>)>,
}

impl RequestTree {
    /// The trees of a question's requests: a single tree where the beginnings are equal and long enough, else a tree per input.
    fn of(requests: &[ScoredRequest], shape: PackShape) -> Vec<Self> {
        let mut branches: Vec<Branch> = Vec::new();
        for (at, request) in requests.iter().enumerate() {
            let input = request.input(shape.max_length);
            let asked = (at, request.continuation.clone());
            match branches.iter_mut().find(|branch| branch.rest == input) {
                Some(branch) => branch.requests.push(asked),
                None => branches.push(Branch { rest: input, requests: vec![asked] }),
            }
        }
        let shared = branches.iter().map(|branch| &branch.rest[..]).reduce(common_beginning);
        let shared = shared.map_or(0, <[u32]>::len);
        let rests: usize = branches.iter().map(|branch| branch.rest.len() - shared).sum();
        let is_tree = shape.shares
            && branches.len() > 1
            && shared >= LEAST_SHARED
            && shared + rests <= shape.rows;
        if is_tree {
            let beginning = branches[0].rest[..shared].to_vec();
            for branch in &mut branches {
                branch.rest.drain(..shared);
            }
            return vec![Self { shared: beginning, branches }];
        }
        let alone = |branch| Self { shared: Vec::new(), branches: vec![branch] };
        branches.into_iter().map(alone).collect()
    }

    /// The same with the numbers of its requests among those of all tasks.
    fn numbered_from(mut self, first: usize) -> Self {
        for (request, _) in self.branches.iter_mut().flat_map(|branch| &mut branch.requests) {
            *request += first;
        }
        self
    }

    fn rows(&self) -> usize {
        self.shared.len() + self.branches.iter().map(|branch| branch.rest.len()).sum::<usize>()
    }

    /// Adds the rows of the tree to a pack.
    fn join(self, pack: &mut TaskPack) {
        let begin = |pack: &mut TaskPack, ids: &[u32]| -> Range<usize> {
            let start = pack.tokens.len();
            pack.tokens.extend_from_slice(ids);
            start..pack.tokens.len()
        };
        let shared = begin(pack, &self.shared);
        if !shared.is_empty() {
            pack.segments.push(Segment::alone(shared.clone()));
        }
        for branch in self.branches {
            let rows = begin(pack, &branch.rest);
            if !rows.is_empty() {
                let after = if shared.is_empty() { rows.start..rows.start } else { shared.clone() };
                pack.segments.push(Segment { after, rows: rows.clone() });
            }
            let positions: Vec<usize> = shared.clone().chain(rows).collect();
            for (request, continuation) in branch.requests {
                let first = positions.len() - continuation.len();
                let scored = positions[first..].iter().zip(continuation);
                pack.predictions.extend(scored.map(|(&row, token)| Prediction {
                    row: row as u32,
                    token,
                    request: request as u32,
                }));
            }
        }
    }
}

fn common_beginning<'a>(one: &'a [u32], two: &'a [u32]) -> &'a [u32] {
    let equal = one.iter().zip(two).take_while(|(one, two)| one == two).count();
    &one[..equal]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::Question;

    fn request(context: &[u32], continuation: &[u32]) -> ScoredRequest {
        ScoredRequest { context: context.to_vec(), continuation: continuation.to_vec() }
    }

    fn packed(requests: Vec<Vec<ScoredRequest>>, shape: PackShape) -> PackedTasks {
        let questions = requests.iter().map(|of| Question {
            contexts: vec![String::new()],
            answers: vec!["x".to_string(); of.len()],
            target: 0,
        });
        let task = TaskQuestions {
            task: "t".to_string(),
            subject: None,
            has_acc_norm: false,
            questions: questions.collect(),
        };
        PackedTasks::new(&[task], &|_, question| Ok(requests[question].clone()), shape).unwrap()
    }

    #[test]
    fn every_request_is_read_back_from_its_pack() {
        let long: Vec<u32> = (100..120).collect();
        let questions = vec![
            vec![request(&[1, 2, 3], &[4, 5]), request(&[1, 2, 3], &[6])],
            vec![
                request(&long, &[1, 2, 3]),
                request(&long, &[1, 7]),
                request(&long, &[9]),
                request(&long, &[8]),
            ],
            vec![request(&long, &[5]), request(&[1; 70], &[2, 3])],
        ];
        for shares in [true, false] {
            for rows in [16, 40, 1000] {
                let shape = PackShape { rows, max_length: 64, shares };
                let packed = packed(questions.clone(), shape);
                let ids = packed.request_ids();
                for (request, ids) in questions.iter().flatten().zip(ids) {
                    assert_eq!(ids.input, request.input(64), "{shape:?}");
                    assert_eq!(ids.continuation, request.continuation);
                }
                assert_eq!((packed.requests, packed.longest()), (8, 64));
                assert!(packed.largest() <= rows.max(64));
                assert_eq!(packed.tokens, 4 + 3 + 22 + 21 + 20 + 20 + 20 + 64);
                let shared = shares && rows >= 40;
                // 9 and 8 after the same input, and the input is the beginning of the others.
                let of_second = if shared { 20 + 2 + 1 } else { 22 + 21 + 20 };
                assert_eq!(packed.rows(), 4 + 3 + of_second + 20 + 64, "{shape:?}");
            }
        }
    }

    #[test]
    fn inputs_lose_their_beginning_and_their_last_token() {
        let request = request(&[1, 2, 3], &[4, 5]);
        assert_eq!(request.input(4), [1, 2, 3, 4]);
        assert_eq!(request.input(2), [3, 4]);
    }
}
