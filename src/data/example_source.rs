//! Training examples from a text: windows of a stream of tokens, or an example per document.
//!
//! Texts that are tokenized as a whole (WikiText-2, PTB, plain files, the demo's stories) give windows as for evaluation. Documents and
//! lines of JSON become marked tokens line by line ([`answers`](super::answers)). Reading ends with the last example that is asked for.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Result;

use super::answers::{MarkedTokens, marked_tokens};
use super::cache::TextCache;
use super::calibration::SHORTEST_PROPOSED;
use super::document::Document;
use super::documents::Documents;
use super::examples::{ExampleBuilder, Examples, check_seqlen};
use super::joined::tokenize_beginning;
use super::role::Role;
use super::source::{Files, Source};
use super::{Tokenizer, demo_text, digest};
use crate::failure::Failure;
use crate::run::{Event, Events, TextProtocol};

/// Documents between two reports of progress.
const REPORTED: u64 = 64;

/// The way in which documents become examples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// All tokens form a stream, cut into windows of `seqlen`. A window may hold several documents, and attention reaches across their
    /// borders. The rest of the stream is dropped.
    Packed,
    /// A document is an example: cut at `seqlen`, or padded.
    PerDocument,
}

/// Length and number of the examples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExampleRequest {
    /// Tokens per example, at least 2.
    pub seqlen: usize,
    /// The way in which documents become examples.
    pub packing: Packing,
    /// Examples that are needed, such as the examples of a step.
    pub at_least: usize,
    /// Examples of them that are held out from the training.
    pub held_out: usize,
    /// Examples that are enough; all of the text if `None`.
    pub at_most: Option<usize>,
}

impl Source {
    /// Makes the training examples of a text, in its order.
    ///
    /// A source of [`Role::Calibration`] gives the training split. Examples without a token that loss counts on are left out, and documents
    /// of more than `seqlen` tokens are cut if each is an example; a warning states their number.
    ///
    /// # Errors
    /// Fails when the text cannot be read or tokenized, when a line is not a document (the message names it), when the template
    /// refuses a conversation or is missing, when a joined text shall be divided into documents, and when there are fewer examples than
    /// `at_least`.
    pub fn examples(
        &self,
        tokenizer: &Tokenizer,
        request: ExampleRequest,
        cache: &TextCache,
        events: &dyn Events,
    ) -> Result<Examples> {
        check_seqlen(request.seqlen)?;
        if let Some(at_most) = request.at_most
            && at_most < request.at_least.max(1)
        {
            return Err(Failure::usage(format!(
                "at most {at_most} examples are to be used, but {} are needed",
                request.at_least.max(1)
            ))
            .hint("use more examples, or fewer in a step")
            .into());
        }
        match (&self.files, request.packing) {
            (Files::Documents(_, format), _) => {
                let documents = Documents::open(self, *format, cache, events)?;
                Lines::OfFile(documents).examples(self, tokenizer, request, events)
            }
            (Files::Demo, Packing::PerDocument) => {
                let lines = Lines::Stories(demo_text::text(self.role)?);
                lines.examples(self, tokenizer, request, events)
            }
            (Files::Rows(_) | Files::Sentences(_) | Files::Plain(_), Packing::PerDocument) => {
                Err(Failure::new(format!(
                    "`{}` is one text, and has no documents to make an example of each",
                    self.path()
                ))
                .hint(format!(
                    "pack it into windows, or name a file of JSON lines with {} jsonl:PATH",
                    Role::Calibration.flag()
                ))
                .into())
            }
            (_, Packing::Packed) => of_joined(self, tokenizer, request, cache, events),
        }
    }
}

/// Cuts a text that is tokenized as a whole.
fn of_joined(
    source: &Source,
    tokenizer: &Tokenizer,
    request: ExampleRequest,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<Examples> {
    let seqlen = request.seqlen;
    let enough = request.at_most.map_or(usize::MAX, |examples| examples.saturating_mul(seqlen));
    let text = tokenize_beginning(source, enough, tokenizer, cache, events)?;
    let (mut tokens, mut protocol) = (text.ids, text.protocol);
    protocol.convention += ", windows one behind the other";
    if tokens.len() > enough {
        tokens.truncate(enough);
        // The number of ids of the whole text is known only if the cache has them, and the record must not depend on that.
        protocol.total_tokens = enough as u64;
        protocol.convention += ", from the beginning of the text";
    }
    let examples = tokens.len() / seqlen;
    if examples < request.at_least.max(1) {
        return Err(too_few(source, request, examples, tokens.len(), 0).into());
    }
    tokens.truncate(examples * seqlen);
    tokens.shrink_to_fit();
    Ok(Examples::from_tokens(tokens, examples, seqlen)?.recorded_as(protocol))
}

/// Lines by number, counted from 0.
enum Lines {
    /// Files of documents.
    OfFile(Documents),
    /// The demo text, a story per line.
    Stories(String),
}

impl Lines {
    fn count(&self) -> u64 {
        match self {
            Self::OfFile(documents) => documents.count(),
            Self::Stories(text) => text.lines().count() as u64,
        }
    }

    fn sha256(&self) -> String {
        match self {
            Self::OfFile(documents) => documents.sha256(),
            Self::Stories(text) => digest::of_bytes(text.as_bytes()),
        }
    }

    /// Gives every document to `take`, until that returns false. Documents whose fields are null are skipped.
    /// Fails when a line cannot be read or is not a document, and when `take` fails. The message names the line.
    fn for_each(&self, take: &mut dyn FnMut(Document) -> Result<bool>) -> Result<()> {
        match self {
            Self::Stories(text) => {
                for story in text.lines() {
                    if !take(Document::Text(story.to_owned()))? {
                        break;
                    }
                }
            }
            Self::OfFile(documents) => {
                for number in 0..documents.count() {
                    let Some(document) = documents.document(number)? else {
                        continue;
                    };
                    let taken = take(document);
                    if !taken.map_err(|error| documents.at_document(error, number))? {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Numbers of lines and tokens, for messages and the record.
#[derive(Default)]
struct Tally {
    texts: u64,
    conversations: u64,
    completions: u64,
    tokens: usize,
    unmatched: usize,
    /// Roles of conversations without an answer.
    roles: BTreeSet<String>,
}

impl Lines {
    /// Makes examples of lines, line by line.
    fn examples(
        &self,
        source: &Source,
        tokenizer: &Tokenizer,
        request: ExampleRequest,
        events: &dyn Events,
    ) -> Result<Examples> {
        let started = Instant::now();
        let phase = format!("tokenize {}", source.label);
        let (unit, steps) = match request.at_most {
            Some(examples) => ("examples", examples as u64),
            None => ("documents", self.count()),
        };
        events.emit(Event::PhaseStarted { phase: phase.clone(), unit, steps });
        let mut builder = ExampleBuilder::new(request.seqlen, request.at_most);
        let mut stream = MarkedTokens::default();
        let mut tally = Tally::default();
        let mut done = 0;
        self.for_each(&mut |document| {
            events.check()?;
            match &document {
                Document::Text(_) => tally.texts += 1,
                Document::Conversation(conversation) => {
                    tally.conversations += 1;
                    if conversation.answers().next().is_none() {
                        tally.roles.extend(conversation.roles());
                    }
                }
                Document::Completion { .. } => tally.completions += 1,
            }
            let chat = source.template_for(&document)?;
            let marked = marked_tokens(&document, tokenizer, chat)?;
            tally.tokens += marked.tokens.len();
            tally.unmatched += marked.unmatched;
            match request.packing {
                Packing::PerDocument => builder.push(&marked.tokens, &marked.is_target)?,
                Packing::Packed => pack(&mut stream, &marked, request.seqlen, &mut builder)?,
            }
            done += 1;
            if done % REPORTED == 0 {
                let done = request.at_most.map_or(done, |_| builder.len() as u64);
                events.emit(Event::Progress { done });
            }
            Ok(!builder.is_full())
        })?;
        events.emit(Event::PhaseDone { phase, elapsed: started.elapsed() });
        warn_of_losses(&builder, &tally, request, tokenizer, events);
        if builder.len() < request.at_least.max(1) {
            let (found, left_out) = (builder.len(), builder.left_out);
            let failure = too_few(source, request, found, tally.tokens, left_out);
            return Err(tally.with_roles(failure).into());
        }
        let protocol = TextProtocol {
            dataset: source.dataset.to_owned(),
            path: source.path(),
            convention: convention(source, &tally, request, tokenizer),
            text_sha256: self.sha256(),
            tokenizer_sha256: tokenizer.sha256().to_owned(),
            total_tokens: tally.tokens as u64,
            ..TextProtocol::default()
        };
        Ok(builder.finish().recorded_as(protocol))
    }
}

impl Tally {
    /// Adds to a failure the roles of conversations in which no message is an answer.
    fn with_roles(&self, failure: Failure) -> Failure {
        if self.roles.is_empty() {
            return failure;
        }
        let roles: Vec<&str> = self.roles.iter().map(String::as_str).take(10).collect();
        failure
            .detail(format!(
                "loss counts on messages of the role `assistant`; conversations without one have the roles {}",
                roles.join(", ")
            ))
            .hint("name the role of the answers `assistant`")
    }
}

/// Adds tokens to the stream, and moves its complete windows to the examples.
fn pack(
    stream: &mut MarkedTokens,
    marked: &MarkedTokens,
    seqlen: usize,
    builder: &mut ExampleBuilder,
) -> Result<()> {
    stream.tokens.extend_from_slice(&marked.tokens);
    stream.is_target.extend_from_slice(&marked.is_target);
    let windows = stream.tokens.chunks_exact(seqlen);
    let flags = stream.is_target.chunks_exact(seqlen);
    let taken = windows.len() * seqlen;
    for (window, flags) in windows.zip(flags) {
        builder.push(window, flags)?;
    }
    stream.tokens.drain(..taken);
    stream.is_target.drain(..taken);
    Ok(())
}

/// Warns of documents and answers that training does not see.
fn warn_of_losses(
    builder: &ExampleBuilder,
    tally: &Tally,
    request: ExampleRequest,
    tokenizer: &Tokenizer,
    events: &dyn Events,
) {
    let ExampleBuilder { left_out, cut, .. } = *builder;
    let all = builder.len() + left_out;
    if left_out > 0 {
        events.warn(format!(
            "{left_out} of {all} examples are left out: loss counts on none of their tokens"
        ));
    }
    if cut > 0 {
        events.warn(format!(
            "{cut} of {all} documents have more than {} tokens; the rest of each is cut off",
            request.seqlen
        ));
    }
    if tally.unmatched > 0 {
        events.warn(format!(
            "no loss counts on {} answers: the chat template leaves them out of the conversation",
            tally.unmatched
        ));
    }
    if tokenizer.eos().is_none() && tally.texts + tally.completions > 0 {
        events.note(
            "the tokenizer names no `eos_token` in `tokenizer_config.json`, so no token ends a document"
                .to_owned(),
        );
    }
}

/// The way in which the lines became examples, in words.
fn convention(
    source: &Source,
    tally: &Tally,
    request: ExampleRequest,
    tokenizer: &Tokenizer,
) -> String {
    let mut words = format!(
        "{}: {} texts, {} conversations and {} completions from the beginning, ",
        source.label, tally.texts, tally.conversations, tally.completions
    );
    let has_chat = tally.conversations + tally.completions > 0;
    if let (Ok(Some(chat)), true) = (&source.chat, has_chat) {
        let sha256 = digest::of_bytes(chat.text().as_bytes());
        words += &format!("chat template {sha256}, ");
    }
    words += &match tokenizer.eos() {
        Some(end) => format!("texts ended by token {end}, "),
        None => "texts without a token at their end, ".to_owned(),
    };
    words += match request.packing {
        Packing::Packed => "one stream cut into windows",
        Packing::PerDocument => "each cut or padded",
    };
    words
}

/// The failure for a text of fewer examples than are needed.
fn too_few(
    source: &Source,
    request: ExampleRequest,
    found: usize,
    tokens: usize,
    left_out: usize,
) -> Failure {
    let needed = request.at_least.max(1);
    let mut failure = Failure::new(format!(
        "`{}` gives {found} examples of {} tokens, and {needed} are needed",
        source.path(),
        request.seqlen
    ))
    .detail(format!("the text has {tokens} tokens"));
    if left_out > 0 {
        failure =
            failure.detail(format!("{left_out} more examples have no token that loss counts on"));
    }
    let mut fixes = Vec::new();
    if found > request.held_out {
        fixes.push(format!("use --batch-size {} --accumulate 1", found - request.held_out));
    }
    let length = (tokens / needed).checked_ilog2().map_or(0, |log| 1 << log);
    if request.packing == Packing::Packed && (SHORTEST_PROPOSED..request.seqlen).contains(&length) {
        fixes.push(format!("use --seqlen {length}"));
    }
    let flag = source.role.flag();
    fixes.push(format!("name a longer text with {flag}"));
    failure.hint(fixes.join(", or "))
}
