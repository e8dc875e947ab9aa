//! Requests as samples of a sweep: sequences of any length side by side, without padding.
//!
//! The requests of a question that begin with the same tokens become a tree ([`super::tree`]). Requests with the same input are one. Trees
//! are packed from the longest to the shortest.
//!
//! Token ids are in a file: a pack is read each time it is needed. In memory are places and lengths.

use std::fs::File;

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::asked::{AskedQuestion, AskedTask, PackShape, RequestIds, TaskPack};
use super::kind::Question;
use super::request::ScoredRequest;
use super::score::RequestScore;
use super::source::TaskQuestions;
use super::tree::{RequestTree, TreeFile, TreePlace};
use crate::data::IdHasher;
use crate::model::Segment;

/// The shape of all packs and questions, without texts and token ids.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskLayout {
    /// The tasks.
    pub tasks: Vec<AskedTask>,
    /// The number of requests.
    pub requests: usize,
    /// Tokens of all requests, before equal beginnings are shared.
    pub tokens: usize,
    /// Rows of all packs.
    pub rows: usize,
    /// Scored tokens of all packs.
    pub predictions: usize,
    /// Rows of the largest pack.
    pub largest: usize,
    /// Rows of a pack that have scored tokens, at most.
    pub scored_rows: usize,
    /// Positions of the longest sequence.
    pub longest: usize,
    /// SHA-256 in hex of the token ids of all packs, and of the tokens that each scores, as int32, little endian.
    pub sha256: String,
    /// Sequences of all packs.
    segments: usize,
    /// All trees, in the order of the packs.
    trees: Vec<TreePlace>,
    /// The end of each pack among the trees.
    ends: Vec<usize>,
    /// Words of the file.
    words: u64,
}

impl TaskLayout {
    /// Packs.
    pub fn packs(&self) -> usize {
        self.ends.len()
    }

    /// Bytes in memory, until the run ends: places, sequences, and the scores of two models.
    pub fn bytes(&self) -> usize {
        let questions = self.tasks.iter().map(|task| task.questions.len()).sum::<usize>();
        self.trees.len() * size_of::<TreePlace>()
            + self.ends.len() * size_of::<usize>()
            + self.segments * size_of::<Segment>()
            + questions * size_of::<AskedQuestion>()
            + self.requests * (size_of::<u32>() + 2 * size_of::<RequestScore>())
    }
}

/// The requests of all tasks, packed.
#[derive(Debug)]
pub struct PackedTasks {
    /// Their shape.
    pub layout: TaskLayout,
    trees: TreeFile,
}

/// A way from a question to its requests, one per choice.
pub(super) type RequestMaker<'a> = dyn Fn(&Question) -> Result<Vec<ScoredRequest>> + Sync + 'a;

/// The trees of a question and the tokens of its requests.
type QuestionTrees = (Vec<RequestTree>, usize);

impl PackedTasks {
    /// Packs the requests of tasks. `requests` makes the requests of a question; they are packed at once, so that the ids of a context that
    /// choices share exist once. The ids are in `file`, which is empty.
    ///
    /// # Errors
    /// Fails with the first error of `requests`, and where files cannot be read or written.
    pub fn new(
        tasks: &[TaskQuestions],
        requests: &RequestMaker<'_>,
        shape: PackShape,
        file: File,
    ) -> Result<Self> {
        let mut packed = Self { layout: TaskLayout::default(), trees: TreeFile::new(file) };
        for task in tasks {
            packed.layout.tasks.push(AskedTask {
                task: task.task.clone(),
                subject: task.subject.clone().map(|(name, group)| (name, group.to_string())),
                has_acc_norm: task.has_acc_norm,
                questions: Vec::with_capacity(task.count),
                characters: Vec::new(),
            });
            let of_question = |number: usize, question: &Question| -> Result<QuestionTrees> {
                let requests = requests(question)
                    .with_context(|| format!("question {number} of `{}`", task.task))?;
                let inputs = requests.iter().map(|request| request.input(shape.max_length).len());
                Ok((RequestTree::of(&requests, shape), inputs.sum()))
            };
            let mut seen = 0;
            task.for_each_block(&mut |block| {
                let trees = block.par_iter().enumerate();
                let trees = trees.map(|(at, question)| of_question(seen + at, question));
                let trees: Vec<QuestionTrees> = trees.collect::<Result<_>>()?;
                seen += block.len();
                packed.add(&block, trees)
            })?;
        }
        packed.arrange(shape.rows)?;
        Ok(packed)
    }

    /// Adds questions to the last task.
    fn add(&mut self, block: &[Question], trees: Vec<QuestionTrees>) -> Result<()> {
        let Self { layout, trees: file } = self;
        let Some(task) = layout.tasks.last_mut() else { return Ok(()) };
        let mut of_block = Vec::new();
        for (question, (trees, tokens)) in block.iter().zip(trees) {
            let (first_request, choices) = (layout.requests, question.choices());
            layout.requests += choices;
            layout.tokens += tokens;
            of_block.extend(trees.into_iter().map(|tree| (first_request, tree)));
            task.characters.extend((0..choices).map(|at| question.characters(at) as u32));
            let (choices, target) = (choices as u32, question.target as u32);
            task.questions.push(AskedQuestion { first_request, choices, target });
        }
        layout.trees.extend(file.add(&of_block)?);
        layout.words = file.words();
        Ok(())
    }

    /// Deals the trees to packs of `rows`, from the longest to the shortest, and measures the packs.
    fn arrange(&mut self, rows: usize) -> Result<()> {
        let layout = &mut self.layout;
        // Stable: requests of equal length keep their order.
        layout.trees.sort_by_key(|place| std::cmp::Reverse(place.rows));
        let mut taken = 0;
        for (at, place) in layout.trees.iter().enumerate() {
            let own = place.rows as usize;
            match layout.ends.last_mut().filter(|_| taken + own <= rows.max(own)) {
                Some(end) => {
                    *end = at + 1;
                    taken += own;
                }
                None => {
                    layout.ends.push(at + 1);
                    taken = own;
                }
            }
        }
        let mut ids = IdHasher::default();
        for pack in 0..self.layout.packs() {
            let pack = self.pack(pack)?;
            ids.add(&pack.tokens);
            ids.add(&pack.predictions.iter().map(|of| of.token).collect::<Vec<u32>>());
            let layout = &mut self.layout;
            layout.rows += pack.tokens.len();
            layout.predictions += pack.predictions.len();
            layout.segments += pack.segments.len();
            layout.largest = layout.largest.max(pack.tokens.len());
            layout.scored_rows = layout.scored_rows.max(pack.scored_rows().len());
            let longest = pack.segments.iter().map(Segment::positions).max();
            layout.longest = layout.longest.max(longest.unwrap_or(0));
        }
        self.layout.sha256 = ids.hex();
        Ok(())
    }

    /// Reads a pack.
    ///
    /// # Errors
    /// Fails where the file cannot be read.
    pub fn pack(&self, pack: usize) -> Result<TaskPack> {
        let mut joined = TaskPack::default();
        let start = pack.checked_sub(1).map_or(0, |before| self.layout.ends[before]);
        for &place in &self.layout.trees[start..self.layout.ends[pack]] {
            self.trees.tree(place)?.join(&mut joined, place.first_request as usize);
        }
        Ok(joined)
    }

    /// Gives the ids of each question's requests to `take`, question by question.
    ///
    /// # Errors
    /// Fails where the file cannot be read, and when `take` fails.
    pub fn for_each_question(
        &self,
        mut take: impl FnMut(&AskedTask, usize, &[RequestIds]) -> Result<()>,
    ) -> Result<()> {
        let mut trees = self.layout.trees.clone();
        trees.sort_by_key(|place| place.first_request);
        let mut trees = trees.into_iter().peekable();
        for task in &self.layout.tasks {
            for (number, question) in task.questions.iter().enumerate() {
                let mut ids = vec![RequestIds::default(); question.choices as usize];
                let is_own =
                    |place: &TreePlace| place.first_request as usize == question.first_request;
                while let Some(place) = trees.next_if(is_own) {
                    self.trees.tree(place)?.ids(&mut ids);
                }
                take(task, number, &ids)?;
            }
        }
        Ok(())
    }

    /// The content of the file, in parts. Another rank makes the same packs of them with [`PackedTasks::of_parts`].
    pub fn parts(&self) -> impl Iterator<Item = Result<Vec<u32>>> + '_ {
        let (words, part) = (self.layout.words, PART as u64);
        (0..words).step_by(PART).map(move |at| self.trees.read(at..(at + part).min(words)))
    }

    /// Makes the packs of another rank here.
    ///
    /// # Arguments
    /// * `next`: gives the next part of the content
    ///
    /// # Errors
    /// Fails where `next` fails or the file cannot be written.
    pub fn of_parts(
        layout: TaskLayout,
        file: File,
        mut next: impl FnMut() -> Result<Vec<u32>>,
    ) -> Result<Self> {
        let mut trees = TreeFile::new(file);
        while trees.words() < layout.words {
            trees.write(&next()?)?;
        }
        Ok(Self { layout, trees })
    }
}

/// Words that are sent to another rank together.
const PART: usize = 1 << 18;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::tasks::{TaskFiles, TaskRequest, TaskSpec, find};

    fn request(context: &[u32], continuation: &[u32]) -> ScoredRequest {
        ScoredRequest { context: context.to_vec(), continuation: continuation.to_vec() }
    }

    /// Packs questions with these requests; the context of a question is its number.
    fn packed(requests: &[Vec<ScoredRequest>], shape: PackShape) -> PackedTasks {
        let mut file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
        for (number, of_question) in requests.iter().enumerate() {
            let choices = vec!["x"; of_question.len()];
            let context = number.to_string();
            let row = serde_json::json!({"context": context, "choices": choices, "label": 0});
            writeln!(file, "{row}").unwrap();
        }
        let request = TaskRequest {
            tasks: &[TaskSpec { name: "t".to_string(), file: Some(file.path().to_path_buf()) }],
            files: TaskFiles::Folder(file.path()),
            num_fewshot: 0,
            limit: None,
        };
        let tasks = find(&request).unwrap();
        let of_number = |question: &Question| -> Result<Vec<ScoredRequest>> {
            Ok(requests[question.contexts[0].parse::<usize>()?].clone())
        };
        PackedTasks::new(&tasks, &of_number, shape, tempfile::tempfile().unwrap()).unwrap()
    }

    /// Input and continuation of every request, as the packs have them.
    fn ids_in_packs(packed: &PackedTasks) -> Vec<RequestIds> {
        let mut all = vec![RequestIds::default(); packed.layout.requests];
        for pack in (0..packed.layout.packs()).map(|pack| packed.pack(pack).unwrap()) {
            for prediction in &pack.predictions {
                let RequestIds { input, continuation } = &mut all[prediction.request as usize];
                let row = prediction.row as usize;
                let segment = pack.segments.iter().find(|of| of.rows.contains(&row)).unwrap();
                // The last row of a request has all rows before it.
                let rows = segment.after.clone().chain(segment.rows.start..row + 1);
                *input = rows.map(|row| pack.tokens[row]).collect();
                continuation.push(prediction.token);
            }
        }
        all
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
                let packed = packed(&questions, shape);
                let ids = ids_in_packs(&packed);
                let mut by_question = Vec::new();
                let take = |_: &AskedTask, _: usize, of_question: &[RequestIds]| {
                    by_question.extend_from_slice(of_question);
                    Ok(())
                };
                packed.for_each_question(take).unwrap();
                assert_eq!(by_question, ids);
                let mut parts = packed.parts();
                let file = tempfile::tempfile().unwrap();
                let next = || parts.next().unwrap();
                let there = PackedTasks::of_parts(packed.layout.clone(), file, next).unwrap();
                assert_eq!(ids_in_packs(&there), ids);
                let packed = &packed.layout;
                for (request, ids) in questions.iter().flatten().zip(ids) {
                    assert_eq!(ids.input, request.input(64), "{shape:?}");
                    assert_eq!(ids.continuation, request.continuation);
                }
                assert_eq!((packed.requests, packed.longest), (8, 64));
                assert!(packed.largest <= rows.max(64));
                assert_eq!(packed.tokens, 4 + 3 + 22 + 21 + 20 + 20 + 20 + 64);
                let shared = shares && rows >= 40;
                // 9 and 8 after the same input, and the input is the beginning of the others.
                let of_second = if shared { 20 + 2 + 1 } else { 22 + 21 + 20 };
                assert_eq!(packed.rows, 4 + 3 + of_second + 20 + 64, "{shape:?}");
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
