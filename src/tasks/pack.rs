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
        let mut trees = TreePool::default();
        for task in tasks {
            let of_question = |question: usize| -> Result<(usize, Vec<RequestTree>)> {
                let requests = requests(task, question)?;
                let inputs = requests.iter().map(|request| request.input(shape.max_length).len());
                Ok((inputs.sum(), RequestTree::of(&requests, shape)))
            };
            let count = task.questions.len();
            let (mut questions, mut characters) = (Vec::with_capacity(count), Vec::new());
            for first in (0..count).step_by(AT_ONCE) {
                let block = first..(first + AT_ONCE).min(count);
                let asked = block.clone().into_par_iter().map(of_question);
                let asked: Vec<(usize, Vec<RequestTree>)> = asked.collect::<Result<_>>()?;
                for (question, (tokens, of_question)) in task.questions[block].iter().zip(asked) {
                    let (first_request, choices) = (packed.requests, question.choices());
                    packed.requests += choices;
                    packed.tokens += tokens;
                    for tree in of_question {
                        trees.add(tree, first_request);
                    }
                    characters.extend((0..choices).map(|at| question.characters(at) as u32));
                    let (choices, target) = (choices as u32, question.target as u32);
                    questions.push(AskedQuestion { first_request, choices, target });
                }
            }
            packed.tasks.push(AskedTask {
                task: task.task.clone(),
                subject: task.subject.clone().map(|(name, group)| (name, group.to_string())),
                has_acc_norm: task.has_acc_norm,
                questions,
                characters,
            });
        }
        // Stable: requests of equal length keep their order.
        trees.places.sort_by_key(|place| std::cmp::Reverse(place.rows));
        for &place in &trees.places {
            let rows = place.rows;
            let has_room = |pack: &TaskPack| pack.tokens.len() + rows <= shape.rows.max(rows);
            if !packed.packs.last().is_some_and(has_room) {
                packed.packs.push(TaskPack::default());
            }
            if let Some(pack) = packed.packs.last_mut() {
                trees.tree(place).join(pack);
            }
        }
        for pack in &mut packed.packs {
            pack.tokens.shrink_to_fit();
            pack.predictions.shrink_to_fit();
        }
        Ok(packed)
    }

    /// Scored tokens of all packs.
    pub fn predictions(&self) -> usize {
        self.packs.iter().map(|pack| pack.predictions.len()).sum()
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        let segments = self.packs.iter().map(|pack| pack.segments.len()).sum::<usize>();
        let questions = self.tasks.iter().map(|task| task.questions.len()).sum::<usize>();
        self.rows() * size_of::<u32>()
            + self.predictions() * size_of::<Prediction>()
            + segments * size_of::<Segment>()
            + questions * size_of::<AskedQuestion>()
            + self.requests * size_of::<u32>()
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

/// Questions whose requests are made before they join the pool.
const AT_ONCE: usize = 64;

/// The trees of all questions in a single list: small lists that stay would hold the memory of everything that was made between them.
///
/// A tree is several lists, each after its length: the shared beginning, the number of branches, and of each branch its ids, the numbers of its
/// requests, and the continuation of each.
#[derive(Default)]
struct TreePool {
    words: Vec<u32>,
    places: Vec<TreePlace>,
}

/// The place of a tree in the pool.
#[derive(Clone, Copy)]
struct TreePlace {
    at: usize,
    rows: usize,
    /// The number of the question's first request.
    first_request: usize,
}

impl TreePool {
    fn add(&mut self, tree: RequestTree, first_request: usize) {
        self.places.push(TreePlace { at: self.words.len(), rows: tree.rows(), first_request });
        let words = &mut self.words;
        let mut add = |ids: &[u32]| {
            words.push(ids.len() as u32);
            words.extend_from_slice(ids);
        };
        add(&tree.shared);
        add(&[tree.branches.len() as u32]);
        for Branch { rest, requests } in &tree.branches {
            add(rest);
            let numbers: Vec<u32> = requests.iter().map(|(at, _)| *at as u32).collect();
            add(&numbers);
            for (_, continuation) in requests {
                add(continuation);
            }
        }
    }

    fn tree(&self, place: TreePlace) -> RequestTree {
        let mut words = &self.words[place.at..];
        let mut next = || -> Vec<u32> {
            let (length, rest) = words.split_first().map_or((0, words), |(of, rest)| (*of, rest));
            let (ids, rest) = rest.split_at(length as usize);
            words = rest;
            ids.to_vec()
        };
        let shared = next();
        let branches = next().first().copied().unwrap_or(0);
        let branches = (0..branches).map(|_| {
            let (rest, numbers) = (next(), next());
            let number = |at: u32| place.first_request + at as usize;
            let requests = numbers.into_iter().map(|at| (number(at), next())).collect();
            Branch { rest, requests }
        });
        RequestTree { shared, branches: branches.collect() }
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
