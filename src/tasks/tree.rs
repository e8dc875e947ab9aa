//! Requests that pass together: the beginning that they share passes once, and each continuation attends to it.
//!
//! A tree is kept in a file as words of 32 bits. It is several lists, each after its length: the shared beginning, the number of branches, and
//! of each branch its ids, the numbers of its requests within the question, and the continuation of each.

use std::fs::File;
use std::ops::Range;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::asked::{PackShape, Prediction, RequestIds, TaskPack};
use super::request::ScoredRequest;
use crate::disk::positioned;
use crate::failure::Failure;
use crate::model::Segment;

/// A shared beginning of fewer tokens does not pay for the copies of its keys and values.
const LEAST_SHARED: usize = 16;

/// Requests of a question: a shared beginning, which may be empty, and the rest of each different input.
pub(super) struct RequestTree {
    shared: Vec<u32>,
    branches: Vec<Branch>,
}

/// The rest of an input, and the requests that have this input, by their number within the question.
struct Branch {
    rest: Vec<u32>,
    requests: Vec<(usize, Vec<u32>)>,
}

impl RequestTree {
    /// The trees of a question's requests: a single tree where the beginnings are equal and long enough, else a tree per input.
    pub(super) fn of(requests: &[ScoredRequest], shape: PackShape) -> Vec<Self> {
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
    ///
    /// # Arguments
    /// * `first_request`: the number of the question's first request
    pub(super) fn join(&self, pack: &mut TaskPack, first_request: usize) {
        let begin = |pack: &mut TaskPack, ids: &[u32]| -> Range<usize> {
            let start = pack.tokens.len();
            pack.tokens.extend_from_slice(ids);
            start..pack.tokens.len()
        };
        let shared = begin(pack, &self.shared);
        if !shared.is_empty() {
            pack.segments.push(Segment::alone(shared.clone()));
        }
        for branch in &self.branches {
            let rows = begin(pack, &branch.rest);
            if !rows.is_empty() {
                let after = if shared.is_empty() { rows.start..rows.start } else { shared.clone() };
                pack.segments.push(Segment { after, rows: rows.clone() });
            }
            let positions: Vec<usize> = shared.clone().chain(rows).collect();
            for (request, continuation) in &branch.requests {
                let first = positions.len() - continuation.len();
                let scored = positions[first..].iter().zip(continuation);
                pack.predictions.extend(scored.map(|(&row, &token)| Prediction {
                    row: row as u32,
                    token,
                    request: (first_request + request) as u32,
                }));
            }
        }
    }

    /// Adds the ids of its requests to the ids of the question's requests.
    pub(super) fn ids(&self, question: &mut [RequestIds]) {
        for Branch { rest, requests } in &self.branches {
            for (request, continuation) in requests {
                question[*request] = RequestIds {
                    input: [&self.shared[..], rest].concat(),
                    continuation: continuation.clone(),
                };
            }
        }
    }

    fn words(&self) -> Vec<u32> {
        let mut words = Vec::new();
        let mut add = |ids: &[u32]| {
            words.push(ids.len() as u32);
            words.extend_from_slice(ids);
        };
        add(&self.shared);
        add(&[self.branches.len() as u32]);
        for Branch { rest, requests } in &self.branches {
            add(rest);
            let numbers: Vec<u32> = requests.iter().map(|(at, _)| *at as u32).collect();
            add(&numbers);
            for (_, continuation) in requests {
                add(continuation);
            }
        }
        words
    }

    fn of_words(words: &[u32]) -> Option<Self> {
        let mut words = words;
        let mut next = || -> Option<Vec<u32>> {
            let (length, rest) = words.split_first()?;
            let (ids, rest) = rest.split_at_checked(*length as usize)?;
            words = rest;
            Some(ids.to_vec())
        };
        let shared = next()?;
        let count = *next()?.first()?;
        let branches = (0..count).map(|_| {
            let (rest, numbers) = (next()?, next()?);
            let requests = numbers.into_iter().map(|at| Some((at as usize, next()?)));
            Some(Branch { rest, requests: requests.collect::<Option<_>>()? })
        });
        Some(Self { shared, branches: branches.collect::<Option<_>>()? })
    }
}

fn common_beginning<'a>(one: &'a [u32], two: &'a [u32]) -> &'a [u32] {
    let equal = one.iter().zip(two).take_while(|(one, two)| one == two).count();
    &one[..equal]
}

/// The place of a tree in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TreePlace {
    /// The first of its words.
    pub(super) at: u64,
    pub(super) words: u32,
    /// Rows of a pack that it takes.
    pub(super) rows: u32,
    /// The number of the question's first request.
    pub(super) first_request: u32,
}

/// Trees in a file without a name.
#[derive(Debug)]
pub(super) struct TreeFile {
    file: File,
    words: u64,
}

impl TreeFile {
    /// Writes into an empty file.
    pub(super) fn new(file: File) -> Self {
        Self { file, words: 0 }
    }

    /// Words of all trees.
    pub(super) fn words(&self) -> u64 {
        self.words
    }

    /// Adds trees of questions, each with the number of the question's first request. They are written together.
    ///
    /// # Errors
    /// Fails where the file cannot be written.
    pub(super) fn add(&mut self, trees: &[(usize, RequestTree)]) -> Result<Vec<TreePlace>> {
        let (mut all, mut places) = (Vec::new(), Vec::with_capacity(trees.len()));
        for (first_request, tree) in trees {
            let words = tree.words();
            places.push(TreePlace {
                at: self.words + all.len() as u64,
                words: words.len() as u32,
                rows: tree.rows() as u32,
                first_request: *first_request as u32,
            });
            all.extend(words);
        }
        self.write(&all)?;
        Ok(places)
    }

    /// Writes words after the last word.
    ///
    /// # Errors
    /// Fails where the file cannot be written.
    pub(super) fn write(&mut self, words: &[u32]) -> Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        positioned::write_all_at(&self.file, &bytes, self.words * size_of::<u32>() as u64)
            .map_err(|error| {
                Failure::new(format!("cannot write the token ids of tasks: {error}"))
                    .hint("name a folder with more room with --offload-folder")
            })?;
        self.words += words.len() as u64;
        Ok(())
    }

    /// Reads some words.
    ///
    /// # Errors
    /// Fails where the file cannot be read.
    pub(super) fn read(&self, words: Range<u64>) -> Result<Vec<u32>> {
        let size = size_of::<u32>() as u64;
        let mut bytes = vec![0; ((words.end - words.start) * size) as usize];
        positioned::read_exact_at(&self.file, &mut bytes, words.start * size)
            .context("reading the token ids of tasks from a temporary file")?;
        let (words, _) = bytes.as_chunks::<4>();
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    /// Reads a tree.
    ///
    /// # Errors
    /// Fails where the file cannot be read.
    pub(super) fn tree(&self, place: TreePlace) -> Result<RequestTree> {
        let words = self.read(place.at..place.at + u64::from(place.words))?;
        RequestTree::of_words(&words).context("the token ids of tasks have changed in their file")
    }
}
