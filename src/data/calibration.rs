//! Calibration samples: the parts of the text that statistics are computed from.
//!
//! The rules come from SparseGPT's and Wanda's loaders. From a joined text of T tokens, each sample has a start uniform in
//! [0, T − seqlen − 1]. From documents, each sample draws documents until a document has more than seqlen tokens, then a start uniform in
//! [0, len − seqlen − 1]. All draws are from one CPython stream after `random.seed(seed)`, with replacement. Two rules differ.
//! The reference draws forever if no document is long enough; this program stops and proposes a length. The reference has no conversations:
//! here a sample is conversations, drawn and joined until they have seqlen tokens, so that it begins as a conversation begins.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::Result;

use serde::{Deserialize, Serialize};

use super::cache::TextCache;
use super::document::Document;
use super::documents::Documents;
use super::joined::tokenize_joined;
use super::python_random::PythonRandom;
use super::source::{Files, Source};
use super::{Tokenizer, digest};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::{Event, Events, TextProtocol};

/// Draws in a row without a fitting document after which the draw fails. In C4, about 1 document in 200 has more than 4096
/// tokens, and 1 in 1000 more than 8192. So many failed draws take seconds to a minute, and mean that no document fits.
const PATIENCE: usize = 20_000;
/// Ids kept of fitting documents: 64 MiB. They help if there are few, long documents, which are drawn many times.
const KEPT_IDS: usize = 16 << 20;

/// Number and length of the samples, and the seed that selects them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// Number of samples.
    pub nsamples: usize,
    /// Tokens per sample.
    pub seqlen: usize,
    /// The seed of CPython's `random`.
    pub seed: u64,
}

/// The samples, and the record of their origin.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Calibration {
    /// Token ids, [nsamples, seqlen] row-major.
    pub tokens: Vec<u32>,
    /// Number of samples.
    pub nsamples: usize,
    /// Tokens per sample.
    pub seqlen: usize,
    /// The record of text and ids.
    pub protocol: TextProtocol,
}

/// Draws the calibration samples.
///
/// # Errors
/// Fails when the text cannot be read (see [`Source::check`]), has too few tokens for a sample, cannot be tokenized,
/// or when 20,000 documents drawn in a row are too short.
pub fn calibration(
    source: &Source,
    tokenizer: &Tokenizer,
    draw: Draw,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<Calibration> {
    let Draw { nsamples, seqlen, seed } = draw;
    if nsamples == 0 || seqlen == 0 {
        return Err(Failure::usage(format!(
            "{nsamples} samples of {seqlen} tokens are no calibration"
        ))
        .hint("use --nsamples 128 --seqlen 2048, or smaller numbers above zero")
        .into());
    }
    let tokens = allocate(nsamples, seqlen)?;
    let mut samples = Samples {
        tokens,
        starts: Vec::new(),
        documents: Vec::new(),
        conversations: 0,
        nsamples,
        seqlen,
    };
    let mut random = PythonRandom::new(seed);
    let protocol = match &source.files {
        Files::Documents(_, format) => {
            let documents = Documents::open(source, *format, cache, events)?;
            let drawn = DocumentDraw { documents: &documents, source, tokenizer };
            let total_tokens = samples.draw_documents(&drawn, &mut random, events)?;
            TextProtocol {
                dataset: source.dataset.to_owned(),
                path: source.path(),
                convention: drawn.convention(samples.conversations),
                text_sha256: documents.sha256(),
                tokenizer_sha256: tokenizer.sha256().to_owned(),
                total_tokens,
                ..TextProtocol::default()
            }
        }
        Files::Rows(_) | Files::Sentences(_) | Files::Plain(_) | Files::Demo => {
            let mut text = tokenize_joined(source, tokenizer, cache, events)?;
            samples.draw_windows(&text.ids, source, &mut random)?;
            text.protocol.convention += ", windows at uniform starts";
            text.protocol
        }
    };
    let Samples { tokens, starts, documents, .. } = samples;
    let protocol = TextProtocol {
        tokens_used: tokens.len() as u64,
        windows: nsamples as u64,
        seqlen: seqlen as u64,
        tokens_sha256: digest::of_ids(&tokens),
        seed: Some(seed),
        starts,
        documents: matches!(source.files, Files::Documents(..)).then_some(documents),
        ..protocol
    };
    Ok(Calibration { tokens, nsamples, seqlen, protocol })
}

/// Allocates the memory of all samples, before any work is done.
fn allocate(nsamples: usize, seqlen: usize) -> Result<Vec<u32>> {
    let too_many = || {
        let bytes = ByteSize::of(nsamples.saturating_mul(seqlen), 4);
        Failure::new(format!("no memory for {nsamples} samples of {seqlen} tokens: {bytes}"))
            .hint("use fewer --nsamples or a shorter --seqlen")
    };
    let mut tokens = Vec::new();
    let count = nsamples.checked_mul(seqlen).ok_or_else(too_many)?;
    tokens.try_reserve_exact(count).map_err(|_| too_many())?;
    Ok(tokens)
}

/// A sample that is being joined of conversations.
#[derive(Default)]
struct Joined {
    ids: Vec<u32>,
    /// The first conversation of the sample.
    first: Option<u64>,
    /// Tokens of all conversations so far.
    tokens: u64,
}

struct Samples {
    tokens: Vec<u32>,
    starts: Vec<u64>,
    documents: Vec<u64>,
    /// Conversations and completions that samples were joined of.
    conversations: u64,
    nsamples: usize,
    seqlen: usize,
}

/// The documents that samples are drawn from.
struct DocumentDraw<'a> {
    documents: &'a Documents,
    source: &'a Source,
    tokenizer: &'a Tokenizer,
}

impl DocumentDraw<'_> {
    /// The document of a number; `None` if its fields are null.
    fn read(&self, number: u64) -> Result<Option<Drawn>> {
        let Some(document) = self.documents.document(number)? else {
            return Ok(None);
        };
        let text = self.source.text_of(&document);
        let ids = text.and_then(|text| text.ids(self.tokenizer));
        let ids = ids.map_err(|error| self.documents.at_document(error, number))?;
        Ok(Some(match document {
            Document::Text(_) => Drawn::Text(ids),
            _ => Drawn::Conversation(ids),
        }))
    }

    /// The way in which samples were drawn, in words.
    fn convention(&self, conversations: u64) -> String {
        let (label, count) = (&self.source.label, self.documents.count());
        if conversations == 0 {
            return format!(
                "{label}: {count} documents, drawn until one is longer than seqlen, tokenized alone, a window at a uniform start"
            );
        }
        let template = match &self.source.chat {
            Ok(Some(chat)) => {
                format!("chat template {}", digest::of_bytes(chat.text().as_bytes()))
            }
            _ => "no chat template".to_owned(),
        };
        format!(
            "{label}: {count} documents, {conversations} conversations drawn and joined until they have seqlen tokens, {template}"
        )
    }
}

/// The ids of a document.
enum Drawn {
    Text(Vec<u32>),
    /// Of a conversation, or of a prompt with its completion.
    Conversation(Vec<u32>),
}

impl Samples {
    fn draw_windows(
        &mut self,
        ids: &[u32],
        source: &Source,
        random: &mut PythonRandom,
    ) -> Result<()> {
        if ids.len() <= self.seqlen {
            return Err(Failure::new(format!(
                "the calibration text is too short for one sample of {} tokens",
                self.seqlen
            ))
            .detail(format!(
                "`{}` has {} tokens, one more than a sample is needed",
                source.path(),
                ids.len()
            ))
            .hint(shorter(ids.len(), "name a longer text with --dataset"))
            .into());
        }
        while self.starts.len() < self.nsamples {
            self.take(ids, random);
        }
        Ok(())
    }

    /// Draws a start in a text of more than seqlen ids and takes the sample there.
    fn take(&mut self, ids: &[u32], random: &mut PythonRandom) {
        // The reference's bound is inclusive, and lies 1 below the last possible start.
        let start = random.randint(0, (ids.len() - self.seqlen - 1) as u64) as usize;
        self.tokens.extend_from_slice(&ids[start..start + self.seqlen]);
        self.starts.push(start as u64);
    }

    /// Draws all samples from documents. Returns the number of tokens of the different documents that were tokenized.
    fn draw_documents(
        &mut self,
        drawn: &DocumentDraw<'_>,
        random: &mut PythonRandom,
        events: &dyn Events,
    ) -> Result<u64> {
        let started = Instant::now();
        let phase = "draw documents".to_owned();
        let available = drawn.documents.count();
        events.emit(Event::PhaseStarted {
            phase: phase.clone(),
            unit: "samples",
            steps: self.nsamples as u64,
        });
        // Token counts of tokenized documents, so that a short document is tokenized once.
        let mut counts: HashMap<u64, usize> = HashMap::new();
        let mut kept: HashMap<u64, Vec<u32>> = HashMap::new();
        let mut kept_ids = 0;
        let mut has_fitting = false;
        let mut drawn_in_a_row = 0;
        let mut joined = Joined::default();
        while self.starts.len() < self.nsamples {
            // Fails if all documents are known to be too short, or after a long run of misses.
            let all_seen = counts.len() as u64 == available;
            if drawn_in_a_row >= PATIENCE || (all_seen && !has_fitting) {
                return Err(self.none_fits(&counts, available, drawn.source).into());
            }
            drawn_in_a_row += 1;
            let number = random.randint(0, available - 1);
            if counts.get(&number).is_some_and(|count| *count <= self.seqlen) {
                continue;
            }
            if let Some(ids) = kept.get(&number) {
                self.take(ids, random);
            } else {
                let ids = match drawn.read(number)? {
                    Some(Drawn::Conversation(ids)) if !ids.is_empty() => {
                        self.conversations += 1;
                        (has_fitting, drawn_in_a_row) = (true, 0);
                        self.join(&mut joined, number, &ids);
                        events.emit(Event::Progress { done: self.starts.len() as u64 });
                        continue;
                    }
                    Some(Drawn::Text(ids) | Drawn::Conversation(ids)) => ids,
                    None => Vec::new(),
                };
                counts.insert(number, ids.len());
                if ids.len() <= self.seqlen {
                    continue;
                }
                self.take(&ids, random);
                if kept_ids + ids.len() <= KEPT_IDS {
                    kept_ids += ids.len();
                    kept.insert(number, ids);
                }
            }
            has_fitting = true;
            drawn_in_a_row = 0;
            self.documents.push(number);
            events.emit(Event::Progress { done: self.starts.len() as u64 });
        }
        events.emit(Event::PhaseDone { phase, elapsed: started.elapsed() });
        Ok(counts.into_values().map(|count| count as u64).sum::<u64>() + joined.tokens)
    }

    /// Adds a conversation to the sample that is being joined, and takes the sample once it is long enough.
    fn join(&mut self, joined: &mut Joined, number: u64, ids: &[u32]) {
        joined.tokens += ids.len() as u64;
        joined.first.get_or_insert(number);
        joined.ids.extend_from_slice(ids);
        if joined.ids.len() >= self.seqlen {
            self.tokens.extend_from_slice(&joined.ids[..self.seqlen]);
            self.starts.push(0);
            self.documents.extend(joined.first.take());
            joined.ids.clear();
        }
    }

    fn none_fits(&self, counts: &HashMap<u64, usize>, available: u64, source: &Source) -> Failure {
        let mut lengths: Vec<usize> = counts.values().copied().collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        let longest = lengths.first().copied().unwrap_or(0);
        // One document in a hundred is longer than the proposed length, so drawing is quick.
        let common = lengths.get(lengths.len() / 100).copied().unwrap_or(0);
        Failure::new(format!(
            "found {} of {} documents with more than --seqlen {} tokens",
            self.starts.len(),
            self.nsamples,
            self.seqlen
        ))
        .detail(format!(
            "{} different documents of {available} tried in `{}`",
            counts.len(),
            source.path()
        ))
        .detail(format!("the longest had {longest} tokens"))
        .hint(shorter(
            common.min(self.seqlen),
            "use a text of long documents, such as --dataset wikitext2:PATH",
        ))
    }
}

/// The shortest sequences that a hint proposes: shorter ones hold hardly any context, so their statistics and losses mean little.
pub(super) const SHORTEST_PROPOSED: usize = 32;

/// The hint for a text of `available` tokens: the largest power of two below it, or `otherwise` alone.
pub(super) fn shorter(available: usize, otherwise: &str) -> String {
    let log = available.saturating_sub(1).checked_ilog2();
    match log.map(|log| 1usize << log).filter(|length| *length >= SHORTEST_PROPOSED) {
        Some(length) => format!("use --seqlen {length}, or {otherwise}"),
        None => otherwise.to_owned(),
    }
}
