//! Documents by number, from files larger than memory, in any stored form.
//!
//! One pass over a file of JSON lines finds its lines and its hash; then a document costs one positioned read. Files in any other form, and
//! several files, become JSON lines on the way ([`unpacking`](super::unpacking)). The unpacked text is kept in the [`TextCache`], or in a
//! temporary file if there is no cache. A copy in the cache is used only if its name holds the hashes of the source and of the copy.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cache::{TextCache, short};
use super::document::{Document, found_in};
use super::line_index::{self, LineIndex, LineIndexer, WriteFailed};
use super::shape_count::ShapeCount;
use super::source::Source;
use super::staged::{self, Staged};
use super::stored_form::{BYTE_ORDER_MARK, DocumentFiles, Format};
use super::text_file::open;
use super::unpacking::{index, unpack};
use crate::bytes::hex;
use crate::failure::Failure;
use crate::input::Expected;
use crate::run::Events;

#[derive(Debug)]
pub(super) struct Documents {
    source: PathBuf,
    /// The unpacked copy, for messages; `None` if the source itself is read or the copy has no name.
    copy: Option<PathBuf>,
    text: File,
    index: LineIndex,
}

impl Documents {
    /// Opens the files of a source. Reads all of them once, and unpacks them if they are not one file of lines and the cache has no copy.
    /// Notes the form of the documents. Fails when a file cannot be read or is damaged, when there is no document of a known form,
    /// when a line has more than 64 MiB or more than the memory budget allows, and when neither the cache nor the folder for temporary files
    /// can hold the unpacked text.
    pub(super) fn open(
        source: &Source,
        format: Format,
        cache: &TextCache,
        events: &dyn Events,
    ) -> Result<Self> {
        let parts = DocumentFiles { paths: source.paths(), format };
        let documents = Self::indexed(parts, cache, events)?;
        cache.lines().check(&parts.name(), documents.index.longest)?;
        if source.dataset != "c4" {
            documents.note_shape(events)?;
        }
        Ok(documents)
    }

    /// Notes the form of the documents. Fails when no document has a known form.
    fn note_shape(&self, events: &dyn Events) -> Result<()> {
        let reading = || format!("cannot read `{}`", self.source.display());
        let shapes = ShapeCount::of(&self.text).with_context(reading)?;
        if shapes.is_empty() {
            let (_, line) = self.line(0)?;
            // The reason why the first line is refused, if it is.
            let refused = Document::parse(&line).err();
            let failure = refused.unwrap_or_else(|| {
                Failure::new("not a document: its fields are null or empty lists")
                    .detail(found_in(&line))
                    .hint("name a file that has documents: no line of this one has any content")
            });
            return Err(self.of_copy(self.at_line(failure, 0)).into());
        }
        let name = self.source.file_name().unwrap_or_default().display();
        events.note(format!("documents    {shapes} of `{name}`"));
        Ok(())
    }

    fn indexed(parts: DocumentFiles<'_>, cache: &TextCache, events: &dyn Events) -> Result<Self> {
        let path = &parts.name();
        if let (Format::Lines, [path]) = (parts.format, parts.paths) {
            let text = open(path, Expected::Documents)?;
            let indexer = LineIndexer::new(path, events);
            let index = index(path, indexer, events, |indexer| indexer.feed_all(&text))?;
            return Ok(Self::new(path, None, text, index));
        }
        let Some(folder) = cache.folder() else {
            return Self::unpack_temporary(parts, events);
        };
        let source = parts.sha256()?;
        // The name of a copy holds the hashes of its source and of its text.
        let prefix = format!("documents-{}-", short(&source));
        if let Some(found) = Self::from_cache(path, cache, &prefix, events) {
            return Ok(found);
        }
        match Self::unpack_into(folder, &prefix, parts, events) {
            // A temporary file may help against a failing write, but not against a damaged source.
            Err(error) if error.is::<WriteFailed>() => {
                events.warn(format!(
                    "cannot keep documents in the cache: {error}; using a temporary file instead"
                ));
                Self::unpack_temporary(parts, events)
            }
            unpacked => unpacked,
        }
    }

    fn new(source: &Path, copy: Option<PathBuf>, text: File, index: LineIndex) -> Self {
        Self { source: source.to_path_buf(), copy, text, index }
    }

    /// Number of documents, at least 1.
    pub(super) fn count(&self) -> u64 {
        self.index.count()
    }

    /// SHA-256 of the JSON-lines text: of the file itself, or of its unpacked text.
    pub(super) fn sha256(&self) -> String {
        hex(&self.index.sha256)
    }

    /// Document `number`, counted from 0; `None` if its fields are null.
    /// Fails when its line is no document (the message names file and line), or cannot be read.
    pub(super) fn document(&self, number: u64) -> Result<Option<Document>> {
        let (start, line) = self.line(number)?;
        // A line may hold a mark of UTF-8 alone.
        if line.trim_ascii().is_empty() {
            return Ok(None);
        }
        let parsed = Document::parse(&line);
        Ok(parsed.map_err(|failure| self.of_copy(self.at_line(failure, start)))?)
    }

    /// Adds the place of a document to its failure.
    pub(super) fn at_document(&self, error: anyhow::Error, number: u64) -> anyhow::Error {
        match (error.downcast::<Failure>(), self.line(number)) {
            (Ok(mut failure), Ok((start, _))) => {
                let place = self.place(start);
                failure.message =
                    format!("{place} of `{}`: {}", self.source.display(), failure.message);
                self.of_copy(failure).into()
            }
            (Ok(failure), Err(_)) => failure.into(),
            (Err(error), _) => error,
        }
    }

    /// Adds the place of the line at byte `start` to the failure of its parser.
    fn at_line(&self, mut failure: Failure, start: u64) -> Failure {
        let (place, source) = (self.place(start), self.source.display());
        failure.message = format!("{place} of `{source}` is {}", failure.message);
        failure
    }

    /// The first byte of line `number`, counted from 0, and the bytes of the line, without the mark of UTF-8 at the beginning of a file.
    /// Fails when it cannot be read.
    fn line(&self, number: u64) -> Result<(u64, Vec<u8>)> {
        let (start, mut line) = self
            .index
            .read(&self.text, number)
            .with_context(|| format!("cannot read `{}`", self.source.display()))?;
        if start == 0 && line.starts_with(BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        Ok((start, line))
    }

    /// The place of the line at a byte, for a message. Its number is counted only now, because blank lines are not indexed.
    fn place(&self, start: u64) -> String {
        let number = line_index::line_number(&self.text, start);
        number.map_or_else(|_| format!("byte {start}"), |number| format!("line {number}"))
    }

    /// Adds the name of the unpacked copy to the failure of a line, if the copy has a name.
    fn of_copy(&self, failure: Failure) -> Failure {
        match &self.copy {
            Some(copy) => {
                failure.detail(format!("read from the unpacked copy `{}`", copy.display()))
            }
            None => failure,
        }
    }

    /// The copy of an earlier run, if its text still has the hash in its name. A damaged copy is removed.
    fn from_cache(
        path: &Path,
        cache: &TextCache,
        prefix: &str,
        events: &dyn Events,
    ) -> Option<Self> {
        let copy = cache.find(prefix)?;
        let text = File::open(&copy).ok()?;
        let indexer = LineIndexer::new(&copy, events);
        let index = index(path, indexer, events, |indexer| indexer.feed_all(&text));
        let is_intact = |index: &LineIndex| copy.ends_with(copy_name(prefix, index));
        let Some(index) = index.ok().filter(is_intact) else {
            events.warn(format!(
                "the unpacked text `{}` is damaged; it is unpacked again",
                copy.display()
            ));
            let _ = fs::remove_file(&copy);
            return None;
        };
        events.note(format!("documents from the cache: {} in `{}`", index.count(), copy.display()));
        Some(Self::new(path, Some(copy), text, index))
    }

    fn unpack_into(
        folder: &Path,
        prefix: &str,
        parts: DocumentFiles<'_>,
        events: &dyn Events,
    ) -> Result<Self> {
        let mut staged = Staged::in_folder(folder, prefix).map_err(WriteFailed)?;
        let index = unpack(parts, staged.file(), events)?;
        let copy = folder.join(copy_name(prefix, &index));
        let text = staged.commit(&copy).map_err(WriteFailed)?;
        Ok(Self::new(&parts.name(), Some(copy), text, index))
    }

    fn unpack_temporary(parts: DocumentFiles<'_>, events: &dyn Events) -> Result<Self> {
        const PLACE: &str =
            "set TMPDIR to a folder with free space, or PRUNE_CACHE to keep what is unpacked";
        let text = staged::temporary().map_err(|error| {
            Failure::new(format!("cannot write to the folder for temporary files: {error}"))
                .hint(PLACE)
        })?;
        let path = &parts.name();
        let index = unpack(parts, &text, events).map_err(|error| {
            match error.downcast::<WriteFailed>() {
                Ok(failed) => Failure::new(format!(
                    "cannot unpack `{}` into a temporary file: {failed}",
                    path.display()
                ))
                .hint(PLACE)
                .into(),
                Err(other) => other,
            }
        })?;
        Ok(Self::new(path, None, text, index))
    }
}

fn copy_name(prefix: &str, index: &LineIndex) -> String {
    format!("{prefix}{}.jsonl", short(&hex(&index.sha256)))
}
