//! Texts that are tokenized as one: WikiText-2's rows joined, the first documents of C4's validation, or a plain file.
//!
//! The conventions are those that published perplexities rest on (SparseGPT's and Wanda's loaders over the hub's
//! `wikitext-2-raw-v1` and `allenai/c4`): training rows are joined with one space, test rows with two newlines, and the
//! first 1100 validation documents with one space, the Penn Treebank's sentences with one space in either role; each joined text is one tokenizer call, so at most one
//! beginning-of-text token stands in it, at its start.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::cache::TextCache;
use super::dataset::{DatasetSpec, Source};
use super::documents::{Documents, Format};
use super::parquet_text::TextColumn;
use super::{Role, TextProtocol, Tokenizer, digest};
use crate::failure::Failure;
use crate::run::{Event, Events};

/// Documents joined for evaluation, as the reference slices C4's validation shard.
const EVALUATION_DOCUMENTS: u64 = 1100;
/// Windows kept of joined documents: the reference truncates to 256 · seqlen tokens.
pub(super) const DOCUMENT_WINDOWS: usize = 256;

/// A tokenized text and what is known about it.
pub(super) struct TokenizedText {
    /// All ids of the text.
    pub(super) ids: Vec<u32>,
    /// The record so far: windows and tokens used are still zero.
    pub(super) protocol: TextProtocol,
    /// True where the text is made of documents, so that only the first windows count.
    pub(super) is_of_documents: bool,
}

/// Reads a text and tokenizes it in one call, or finds its ids in the cache.
///
/// # Errors
///
/// Fails when a file cannot be read, is not UTF-8 or holds nothing, and when tokenizing fails.
pub(super) fn tokenized(
    spec: &DatasetSpec,
    source: &Source,
    role: Role,
    tokenizer: &Tokenizer,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<TokenizedText> {
    let (text, convention) = read(source, role, cache, events)?;
    if text.is_empty() {
        return Err(Failure::new(format!(
            "the text of {} is empty: `{}`",
            role.flag(),
            source.path()
        ))
        .into());
    }
    let label = source.label(spec, role);
    let text_sha256 = digest::of_bytes(text.as_bytes());
    let ids = cache.token_ids(tokenizer.sha256(), &text_sha256, events, || {
        let started = Instant::now();
        let phase = format!("tokenize {label}");
        events.emit(Event::PhaseStarted {
            phase: phase.clone(),
            unit: "texts",
            steps: 1,
        });
        let ids = tokenizer.encode(&text)?;
        events.emit(Event::Progress { done: 1 });
        events.emit(Event::PhaseDone {
            phase,
            elapsed: started.elapsed(),
        });
        Ok(ids)
    })?;
    let protocol = TextProtocol {
        dataset: source.dataset(spec).to_owned(),
        path: source.path(),
        convention: format!("{label}: {convention}, one tokenizer call"),
        text_sha256,
        tokenizer_sha256: tokenizer.sha256().to_owned(),
        total_tokens: ids.len() as u64,
        ..TextProtocol::default()
    };
    Ok(TokenizedText {
        ids,
        protocol,
        is_of_documents: matches!(source, Source::Documents(..)),
    })
}

/// The text of a source in its role, and how it was put together.
fn read(
    source: &Source,
    role: Role,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<(String, String)> {
    match source {
        Source::Plain(path) => Ok((read_text(path)?, "the file as it stands".to_owned())),
        Source::Stories(part) => Ok((
            part.text(),
            format!(
                "{} generated stories, each ended by a newline",
                part.stories()
            ),
        )),
        Source::Rows(parts) => {
            let (separator, name) = match role {
                Role::Calibration => (" ", "one space"),
                Role::Evaluation => ("\n\n", "two newlines"),
            };
            let mut joined = Joiner {
                text: String::new(),
                separator,
                pieces: 0,
            };
            for part in parts {
                read_rows(part, &mut joined)?;
            }
            Ok((
                joined.text,
                format!("{} rows joined with {name}", joined.pieces),
            ))
        }
        Source::Sentences(path) => {
            let mut joined = Joiner {
                text: String::new(),
                separator: " ",
                pieces: 0,
            };
            // As the hub's loader `ptb_text_only` has it: every line is a sentence, without the white space around it.
            for line in read_text(path)?.lines() {
                joined.push(line.trim_matches(is_white));
            }
            Ok((
                joined.text,
                format!("{} sentences joined with one space", joined.pieces),
            ))
        }
        Source::Documents(path, format) => {
            let mut documents = Documents::open(path, *format, cache, events)?;
            let mut joined = Joiner {
                text: String::new(),
                separator: " ",
                pieces: 0,
            };
            for number in 0..documents.count().min(EVALUATION_DOCUMENTS) {
                joined.push(&documents.text(number)?);
            }
            Ok((
                joined.text,
                format!(
                    "the first {} documents joined with one space, at most {DOCUMENT_WINDOWS} windows",
                    joined.pieces
                ),
            ))
        }
    }
}

/// Joins pieces as Python's `separator.join(pieces)` does: empty pieces count.
struct Joiner {
    text: String,
    separator: &'static str,
    pieces: usize,
}

impl Joiner {
    fn push(&mut self, piece: &str) {
        if self.pieces > 0 {
            self.text.push_str(self.separator);
        }
        self.text.push_str(piece);
        self.pieces += 1;
    }
}

/// Adds the rows of one WikiText-2 file: parquet rows as they are, lines of a raw file by the hub's rule.
fn read_rows(path: &Path, joined: &mut Joiner) -> Result<()> {
    if Format::of(path)? == Format::Parquet {
        return TextColumn::open(path)?.for_each(&mut |row| {
            joined.push(row);
            Ok(())
        });
    }
    let text = read_text(path)?;
    // Python opens the file in text mode, which turns every line end into "\n".
    let text = if text.contains('\r') {
        text.replace("\r\n", "\n").replace('\r', "\n")
    } else {
        text
    };
    joined.text.reserve(text.len() + text.len() / 16);
    for line in text.split_inclusive('\n') {
        // The hub's loader: a line of nothing but white space becomes the empty row, any other keeps its newline.
        joined.push(if is_blank(line) { "" } else { line });
    }
    Ok(())
}

/// Whether `str.strip()` of Python leaves nothing: Unicode's white space and the four information separators.
fn is_blank(line: &str) -> bool {
    line.chars().all(is_white)
}

/// What `str.strip()` of Python takes away.
fn is_white(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// A whole file as text.
fn read_text(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    String::from_utf8(bytes)
        .map_err(|error| not_utf8(path, error.utf8_error().valid_up_to() as u64).into())
}

/// The failure for a file in another encoding.
pub(super) fn not_utf8(path: &Path, offset: u64) -> Failure {
    Failure::new(format!("`{}` is not UTF-8 text", path.display()))
        .detail(format!("the first invalid byte is at offset {offset}"))
        .hint(format!("convert it (iconv -f latin1 -t utf-8 '{}' > text.txt), or check that it is text at all", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::write_parquet;
    use crate::run::Silent;

    fn text_of(source: &Source, role: Role) -> String {
        read(source, role, &TextCache::disabled(), &Silent)
            .expect("read")
            .0
    }

    #[test]
    fn sentences_lose_the_white_space_around_them_and_are_joined_with_one_space() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("ptb.test.txt");
        // " ".join(line.strip() for line in file): the empty line counts.
        fs::write(&path, " no it was n't \n\n but <unk> was \n").expect("write");
        for role in [Role::Calibration, Role::Evaluation] {
            assert_eq!(
                text_of(&Source::Sentences(path.clone()), role),
                "no it was n't  but <unk> was"
            );
        }
    }

    #[test]
    fn raw_lines_and_hub_rows_give_the_same_text() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (raw, windows, parquet) = (
            folder.path().join("a.raw"),
            folder.path().join("b.raw"),
            folder.path().join("c.parquet"),
        );
        let lines = " \n = Title = \n \n First . \n Second . ";
        fs::write(&raw, lines).expect("write");
        fs::write(&windows, lines.replace('\n', "\r\n")).expect("write");
        // The hub's rows of that file, by the rule of datasets' wikitext loader.
        let rows = ["", " = Title = \n", "", " First . \n", " Second . "].map(str::to_owned);
        write_parquet(&parquet, "text", &[&rows]);
        for path in [raw, windows, parquet] {
            let source = Source::Rows(vec![path]);
            assert_eq!(
                text_of(&source, Role::Calibration),
                "  = Title = \n   First . \n  Second . "
            );
            assert_eq!(
                text_of(&source, Role::Evaluation),
                "\n\n = Title = \n\n\n\n\n First . \n\n\n Second . "
            );
        }
    }

    #[test]
    fn a_plain_file_is_taken_as_it_stands() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.txt");
        fs::write(&path, " \nx\r\n").expect("write");
        assert_eq!(
            text_of(&Source::Plain(path.clone()), Role::Calibration),
            " \nx\r\n"
        );
        fs::write(&path, b"abc\xff").expect("write");
        let error = read(
            &Source::Plain(path),
            Role::Calibration,
            &TextCache::disabled(),
            &Silent,
        )
        .expect_err("must fail");
        assert!(error.to_string().contains("offset 3"), "{error}");
    }
}
