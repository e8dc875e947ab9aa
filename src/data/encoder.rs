//! A text turned into ids as it comes in, piece by piece, in memory that does not grow with the text.
//!
//! Text is pushed in any portions. What is pending is cut by the tokenizer's [`CutRule`](super::cut::CutRule) into pieces,
//! which worker threads encode; their ids are put together in order. The result is that of one call over the whole text, on
//! any number of threads; where there is no rule, or no place to cut, it *is* one call over the whole text.

use anyhow::{Context, Result};
use rayon::ThreadPool;
use rayon::prelude::*;

use super::Tokenizer;
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// A piece ends at the first safe place behind this many bytes: 1.5 MiB for each worker, see [`footprint`](super::footprint).
pub(super) const PIECE_BYTES: usize = 16 << 10;
/// Pieces handed to each worker at once; their text waits in memory, only one of them is being encoded.
pub(super) const PIECES_PER_WORKER: usize = 4;
/// Each worker has tables of its own (see [`footprint`](super::footprint)), and eight are enough for any text of minutes.
pub(super) const MOST_WORKERS: usize = 8;

/// The longest text that is encoded in one call, which takes some hundred bytes per byte: 3.8 GiB. Nothing that is written in words
/// comes near it, with a tokenizer whose texts can be cut.
pub(super) const LONGEST_PIECE: usize = 32 << 20;

/// Takes a text, gives ids.
pub(super) struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    progress: &'a mut dyn FnMut(u64),
    piece_bytes: usize,
    /// Text that is not encoded yet.
    pending: String,
    /// No cut is to be found in `pending` before this byte.
    searched: usize,
    /// Bytes of text before `pending`.
    done: u64,
    ids: Vec<u32>,
    workers: Option<ThreadPool>,
}

impl<'a> Encoder<'a> {
    /// An encoder that has seen nothing; `progress` is told how many bytes of the text are through.
    pub(super) fn new(tokenizer: &'a Tokenizer, progress: &'a mut dyn FnMut(u64)) -> Self {
        Self::with_pieces(tokenizer, PIECE_BYTES, progress)
    }

    /// The same with pieces of another size.
    pub(super) fn with_pieces(
        tokenizer: &'a Tokenizer,
        piece_bytes: usize,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self {
            tokenizer,
            progress,
            piece_bytes,
            pending: String::new(),
            searched: 0,
            done: 0,
            ids: Vec::new(),
            workers: None,
        }
    }

    /// Takes the next portion of the text, and encodes what is enough for all workers.
    ///
    /// # Errors
    ///
    /// Fails when the tokenizer's model cannot express the text, and when [`LONGEST_PIECE`] is exceeded without a place to cut.
    pub(super) fn push(&mut self, mut text: &str) -> Result<()> {
        if self.tokenizer.cuts().is_none() {
            self.pending.push_str(text);
            return self.check_pending();
        }
        let batch = self.piece_bytes * PIECES_PER_WORKER * worker_count();
        while !text.is_empty() {
            let room = match batch.saturating_sub(self.pending.len()) {
                0 => batch,
                room => room,
            };
            let (portion, rest) = text.split_at(ceil_char_boundary(text, room));
            self.pending.push_str(portion);
            text = rest;
            if self.pending.len() >= batch {
                self.encode_pieces()?;
            }
            self.check_pending()?;
        }
        Ok(())
    }

    /// What is pending must fit one call.
    fn check_pending(&self) -> Result<()> {
        if self.pending.len() <= LONGEST_PIECE {
            return Ok(());
        }
        let begins = self.done;
        let failure = if self.tokenizer.cuts().is_some() {
            Failure::new(format!(
                "a text has more than {} without a place where it may be cut",
                ByteSize(LONGEST_PIECE as u64)
            ))
            .detail(format!("they begin at byte {begins}"))
            .hint("use a text with spaces between its words, or put the parts into documents (.jsonl)")
        } else {
            Failure::new(format!(
                "a text has more than {}, and texts of this tokenizer cannot be cut",
                ByteSize(LONGEST_PIECE as u64)
            ))
            .hint("use a shorter text, or put its parts into documents (.jsonl)")
        };
        let why = "one tokenizer call takes some hundred bytes of memory for each byte";
        Err(failure.detail(why).into())
    }

    /// The ids of the whole text, special tokens included.
    ///
    /// # Errors
    ///
    /// As [`Encoder::push`].
    pub(super) fn finish(mut self) -> Result<Vec<u32>> {
        self.encode_pieces()?;
        let tokenizer = self.tokenizer;
        let Some(cuts) = tokenizer.cuts().filter(|_| self.done > 0) else {
            let ids = tokenizer.encode_whole(&self.pending)?;
            (self.progress)(self.pending.len() as u64);
            return Ok(ids);
        };
        // Behind a cut there is always a letter: the last piece is never empty.
        let last = tokenizer.encode_bare(&self.pending)?;
        self.ids.extend(last);
        self.ids.extend(&cuts.after);
        (self.progress)(self.done + self.pending.len() as u64);
        Ok(self.ids)
    }

    /// Encodes what is pending up to the last cut in it.
    fn encode_pieces(&mut self) -> Result<()> {
        let tokenizer = self.tokenizer;
        let Some(cuts) = tokenizer.cuts() else {
            return Ok(());
        };
        let mut pieces = Vec::new();
        let mut begin = 0;
        while let Some(cut) = cuts.rule.find(
            &self.pending,
            self.searched.max(begin + self.piece_bytes.max(1)),
        ) {
            pieces.push((&self.pending[begin..cut.end], cut.next));
            begin = cut.next;
        }
        // A place at the very end is decided by the character to come.
        self.searched = (self.pending.len().saturating_sub(1)).saturating_sub(begin);
        let encoded: Vec<Result<Vec<u32>>> = match &pieces[..] {
            [] => return Ok(()),
            [(piece, _)] => vec![tokenizer.encode_bare(piece)],
            pieces => {
                let workers = match &mut self.workers {
                    Some(workers) => workers,
                    none => none.insert(new_workers()?),
                };
                workers.install(|| {
                    pieces
                        .par_iter()
                        .map(|(piece, _)| tokenizer.encode_bare(piece))
                        .collect()
                })
            }
        };
        if self.done == 0 {
            self.ids.extend(&cuts.before);
        }
        for (ids, (_, next)) in encoded.into_iter().zip(pieces) {
            self.ids.extend(ids?);
            (self.progress)(self.done + next as u64);
        }
        self.done += begin as u64;
        self.pending.drain(..begin);
        Ok(())
    }
}

/// How many pieces are encoded at once.
pub(super) fn worker_count() -> usize {
    rayon::current_num_threads().min(MOST_WORKERS)
}

/// Threads for one text. The library keeps tables per thread and never gives them back, so these threads end with the text.
fn new_workers() -> Result<ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(worker_count())
        .thread_name(|index| format!("tokenise-{index}"))
        .build()
        .context("cannot start the threads that tokenise")
}

/// The first place at byte `at` or behind it where a character begins, or the end.
fn ceil_char_boundary(text: &str, at: usize) -> usize {
    (at..text.len())
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(text.len())
}
