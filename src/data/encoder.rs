//! A text turned into ids piece by piece, in memory that does not grow with the text.
//!
//! The caller pushes the text in portions of any size. The tokenizer's [`CutRule`](super::text_cut::CutRule) cuts it into pieces,
//! worker threads encode the pieces, and their ids are joined in order. The ids equal the ids of one call over the whole
//! text, on any number of threads. Without a rule, or without a place to cut, it *is* one call over the whole text.

use anyhow::{Context, Result};
use rayon::ThreadPool;
use rayon::prelude::*;

use super::footprint::{MOST_WORKERS, PIECE_BYTES, PIECES_PER_WORKER};
use super::tokenizer::{LONGEST_PIECE, Tokenizer};
use crate::bytes::ByteSize;
use crate::failure::Failure;

pub(super) struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    progress: &'a mut dyn FnMut(u64),
    piece_bytes: usize,
    /// The text that is not encoded yet.
    pending: String,
    /// The first byte of `pending` that was not searched for a cut.
    searched: usize,
    /// Bytes of text before `pending`.
    done: u64,
    ids: Vec<u32>,
    workers: Option<ThreadPool>,
    /// The text contains its special tokens, and no token is added.
    is_plain: bool,
}

impl<'a> Encoder<'a> {
    /// An encoder before the first byte. `progress` receives the number of bytes encoded so far.
    pub(super) fn new(tokenizer: &'a Tokenizer, progress: &'a mut dyn FnMut(u64)) -> Self {
        Self::with_pieces(tokenizer, PIECE_BYTES, progress)
    }

    /// An encoder whose pieces end at the first safe place after `piece_bytes` bytes.
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
            is_plain: false,
        }
    }

    /// The same encoder for a text that contains its special tokens, as rendered conversations do.
    pub(super) fn plain(self, is_plain: bool) -> Self {
        Self { is_plain, ..self }
    }

    /// Takes the next portion of the text, and encodes it if there is enough text for all workers.
    /// Fails when the tokenizer's model cannot express the text, and when more than [`LONGEST_PIECE`] bytes have no place to cut.
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

    /// The ids of the pieces that are encoded so far: the first ids of the text.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The same ids, without the encoder.
    pub(super) fn into_ids(self) -> Vec<u32> {
        self.ids
    }

    fn check_pending(&self) -> Result<()> {
        // A text that cannot be cut at all is planned as a whole.
        let most = match self.tokenizer.cuts() {
            Some(_) => self.tokenizer.longest_uncut(),
            None => LONGEST_PIECE,
        };
        if self.pending.len() <= most {
            return Ok(());
        }
        let begins = self.done;
        let failure = if self.tokenizer.cuts().is_some() {
            let more = match most < LONGEST_PIECE {
                true => ", or a larger --max-memory",
                false => "",
            };
            Failure::new(format!(
                "a text has more than {} without a place where it may be cut",
                ByteSize(most as u64)
            ))
            .detail(format!("they begin at byte {begins}"))
            .hint(format!(
                "use a text with spaces between its words, or put the parts into documents (.jsonl){more}"
            ))
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

    /// The ids of the whole text, with special tokens. Fails when the tokenizer's model cannot express the text.
    pub(super) fn finish(mut self) -> Result<Vec<u32>> {
        self.encode_pieces()?;
        let tokenizer = self.tokenizer;
        let Some(cuts) = tokenizer.cuts().filter(|_| self.done > 0) else {
            let ids = match self.is_plain {
                true => tokenizer.encode_bare(&self.pending)?,
                false => tokenizer.encode_whole(&self.pending)?,
            };
            (self.progress)(self.pending.len() as u64);
            return Ok(ids);
        };
        // A letter follows each cut, so the last piece is not empty.
        let last = tokenizer.encode_bare(&self.pending)?;
        self.ids.extend(last);
        if !self.is_plain {
            self.ids.extend(&cuts.after);
        }
        (self.progress)(self.done + self.pending.len() as u64);
        Ok(self.ids)
    }

    /// Encodes the pending text up to its last cut.
    fn encode_pieces(&mut self) -> Result<()> {
        let tokenizer = self.tokenizer;
        let Some(cuts) = tokenizer.cuts() else {
            return Ok(());
        };
        let mut pieces = Vec::new();
        let mut begin = 0;
        while let Some(cut) =
            cuts.rule.find(&self.pending, self.searched.max(begin + self.piece_bytes.max(1)))
        {
            pieces.push((&self.pending[begin..cut.end], cut.next));
            begin = cut.next;
        }
        // The next character decides about a place at the very end.
        self.searched = (self.pending.len().saturating_sub(1)).saturating_sub(begin);
        let encoded: Vec<Result<Vec<u32>>> = match &pieces[..] {
            [] => return Ok(()),
            [(piece, _)] => vec![tokenizer.encode_bare(piece)],
            pieces => {
                let workers = match &mut self.workers {
                    Some(workers) => workers,
                    none => none.insert(tokenizing_threads()?),
                };
                workers.install(|| {
                    pieces.par_iter().map(|(piece, _)| tokenizer.encode_bare(piece)).collect()
                })
            }
        };
        if self.done == 0 && !self.is_plain {
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

impl Tokenizer {
    /// The ids of a text with special tokens, equal to the ids of one call over the whole text. If cuts are proven safe for
    /// this tokenizer, several threads encode a long text in pieces, and memory does not grow with the text.
    ///
    /// # Errors
    /// Fails when the tokenizer's model cannot express the text (no unknown token and no byte fallback).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut no_progress = |_| ();
        let mut encoder = Encoder::new(self, &mut no_progress);
        encoder.push(text)?;
        encoder.finish()
    }
}

pub(super) fn worker_count() -> usize {
    rayon::current_num_threads().min(MOST_WORKERS)
}

/// Threads that tokenize. The library keeps up to 10,000 words per thread and frees them only with the thread, so these threads end with
/// their work.
///
/// # Errors
/// Fails when the system starts no thread.
pub fn tokenizing_threads() -> Result<ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(worker_count())
        .thread_name(|index| format!("tokenize-{index}"))
        .build()
        .context("cannot start the tokenizer threads")
}

fn ceil_char_boundary(text: &str, at: usize) -> usize {
    (at..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len())
}
