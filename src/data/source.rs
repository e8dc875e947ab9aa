//! The files of a dataset for a role, found once and handed on.
//!
//! [`Source::find`] turns the value of `--dataset` into paths. [`Source::check`] reads the beginning of each file, before any work
//! starts. [`calibration()`](super::calibration()) and [`Source::evaluation`] read the whole text.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::ChatTemplate;
use super::answers::no_template;
use super::dataset::{DatasetSpec, Name};
use super::document::Document;
use super::document_text::DocumentText;
use super::role::Role;
use super::stored_form::Format;
use super::unpacking::first_line;
use super::{dataset_folder, splits, text_file};
use crate::failure::Failure;
use crate::input::{self, Expected};

/// The files of a dataset for a role.
#[derive(Debug, Clone)]
pub struct Source {
    pub(super) role: Role,
    pub(super) files: Files,
    /// The name of the dataset in run records: "wikitext2", "text", "documents".
    pub(super) dataset: &'static str,
    /// The dataset and its split, for phases and conventions: "wikitext2 train", "c4 validation", "text".
    pub(super) label: String,
    /// The model's chat template, which renders conversations; the failure to read it counts once there is a conversation.
    pub(super) chat: Result<Option<ChatTemplate>, Failure>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Files {
    /// WikiText-2: raw files or parquet parts, in order. Their rows are joined into one text.
    Rows(Vec<PathBuf>),
    /// Penn Treebank: a file with a sentence per line. The sentences are joined into one text.
    Sentences(PathBuf),
    /// Files of documents of one form (C4, JSON, parquet, Arrow), in order. Each document is drawn separately.
    Documents(Vec<PathBuf>, Format),
    /// A file that is one text.
    Plain(PathBuf),
    /// The stories of `--dataset demo`, which are part of the program.
    Demo,
}

impl Source {
    /// Finds the files of a dataset: the train split for calibration, the test (C4: validation) split for evaluation.
    ///
    /// # Errors
    /// Fails when the dataset has no path, when no file or several files match, and for a kind of file that is not supported.
    pub fn find(spec: &DatasetSpec, role: Role) -> Result<Self> {
        let files = find_files(spec, role)?;
        let dataset = match (&files, spec.name) {
            (_, Some(Name::Jsonl)) => "documents",
            (Files::Plain(_), None | Some(Name::Hub)) => "text",
            (_, None | Some(Name::Hub)) => "documents",
            (_, Some(name)) => name.as_str(),
        };
        let label = match spec.name {
            Some(name) if !matches!(name, Name::Jsonl | Name::Hub) => {
                format!("{dataset} {}", name.split(role))
            }
            _ => dataset.to_owned(),
        };
        Ok(Self { role, files, dataset, label, chat: Ok(None) })
    }

    /// The same text for a model: the chat template in its folder renders conversations.
    #[must_use]
    pub fn with_template_of(self, model_folder: &Path) -> Self {
        if !matches!(self.files, Files::Documents(..)) {
            return self;
        }
        let chat = ChatTemplate::find(model_folder).map_err(|error| {
            error.downcast().unwrap_or_else(|error| Failure::new(error.to_string()))
        });
        Self { chat, ..self }
    }

    /// The template for a document; `None` if the document is a text or the model has no template. Fails when it cannot be read.
    pub(super) fn template_for(
        &self,
        document: &Document,
    ) -> Result<Option<&ChatTemplate>, Failure> {
        match document {
            Document::Text(_) => Ok(None),
            _ => self.chat.as_ref().map(Option::as_ref).map_err(Clone::clone),
        }
    }

    /// The text of a document. Fails when the template is missing or refuses the document.
    pub(super) fn text_of(&self, document: &Document) -> Result<DocumentText> {
        DocumentText::of(document, self.template_for(document)?)
    }

    /// The purpose of the text.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Checks that the files can be read and are of the expected kind. Reads their names and beginnings only.
    ///
    /// # Errors
    /// Fails when a file is empty, or when its beginning is not UTF-8 text, a document, or parquet with a column `text`, whichever is
    /// expected, and when it is a conversation and the model has no template.
    pub fn check(&self) -> Result<()> {
        match &self.files {
            Files::Documents(paths, format) => {
                paths.iter().try_for_each(|path| self.check_documents(path, *format))
            }
            Files::Plain(path) | Files::Sentences(path) => {
                text_file::check_beginning(path, Expected::Text, self.role)
            }
            Files::Demo => Ok(()),
            Files::Rows(parts) => {
                parts.iter().try_for_each(|part| match Format::of(part, Expected::Rows)? {
                    format if format.is_columnar() => first_line(part, format).map(drop),
                    _ => text_file::check_beginning(part, Expected::Rows, self.role),
                })
            }
        }
    }

    /// Checks the first document of a file.
    fn check_documents(&self, path: &Path, format: Format) -> Result<()> {
        let shown = path.display();
        let Some(first) = first_line(path, format)? else {
            return Err(Failure::new(format!("no documents in `{shown}`"))
                .detail("it is empty, or has blank lines or an empty list alone")
                .hint("name a file that has documents")
                .into());
        };
        if !first.is_whole {
            return Ok(());
        }
        let place = format!("{} of `{shown}`", format.place(first.number));
        let document = Document::parse(&first.bytes).map_err(|mut failure| {
            failure.message = format!("{place} is {}", failure.message);
            failure
        })?;
        match document {
            Some(document @ Document::Conversation(_))
                if self.template_for(&document)?.is_none() =>
            {
                let mut failure = no_template();
                failure.message = format!("{place}: {}", failure.message);
                Err(failure.into())
            }
            _ => Ok(()),
        }
    }

    /// The paths of the files, for messages and run records.
    pub(super) fn path(&self) -> String {
        if self.files == Files::Demo {
            return "built in".to_owned();
        }
        let paths = self.paths().iter().map(|path| path.display().to_string());
        paths.collect::<Vec<_>>().join(", ")
    }

    /// The files; none for the demo text.
    pub(super) fn paths(&self) -> &[PathBuf] {
        match &self.files {
            Files::Rows(parts) | Files::Documents(parts, _) => parts,
            Files::Sentences(path) | Files::Plain(path) => std::slice::from_ref(path),
            Files::Demo => &[],
        }
    }
}

fn find_files(spec: &DatasetSpec, role: Role) -> Result<Files> {
    if spec.name == Some(Name::Demo) {
        return Ok(Files::Demo);
    }
    let given = spec.path.as_ref().filter(|_| spec.name != Some(Name::Hub));
    let Some(path) = given.or(spec.downloaded.as_ref()) else {
        return Err(no_local_text(spec, role).into());
    };
    let path = expand_home(path);
    let Ok(metadata) = fs::metadata(&path) else {
        return Err(not_found(spec, &path, role).into());
    };
    // A text is read more than once, so it cannot be a pipe. A device may have no end.
    if !metadata.is_dir() && !metadata.is_file() {
        return Err(Failure::new(format!("`{}` is not a regular file", path.display()))
            .hint(format!("write the text to a file first, and name that with {}", role.flag()))
            .into());
    }
    if metadata.is_dir() {
        return find_in_folder(spec.name, &path, role);
    }
    file(spec.name, path, role)
}

fn find_in_folder(name: Option<Name>, folder: &Path, role: Role) -> Result<Files> {
    match name {
        Some(Name::Wikitext2) => splits::wikitext2(folder, role).map(Files::Rows),
        Some(name @ Name::Ptb) => file(Some(name), splits::ptb(folder, role)?, role),
        Some(name @ Name::C4) => file(Some(name), splits::c4(folder, role)?, role),
        Some(Name::Demo | Name::Jsonl | Name::Hub) | None => {
            documents(dataset_folder::find(folder, role)?)
        }
    }
}

/// Files of documents; all must have one form.
fn documents(paths: Vec<PathBuf>) -> Result<Files> {
    let mut forms = paths.iter().map(|path| Format::of(path, Expected::Documents));
    let first = forms.next().transpose()?.unwrap_or(Format::Lines);
    for (form, path) in forms.zip(&paths[1..]) {
        if form? != first {
            return Err(Failure::new(format!(
                "`{}` and `{}` are not stored alike",
                paths[0].display(),
                path.display()
            ))
            .hint("name one file, or a folder of files of one kind")
            .into());
        }
    }
    Ok(Files::Documents(paths, first))
}

/// The kind of a file, by the dataset's name, the file's extension and its first bytes.
fn file(name: Option<Name>, path: PathBuf, role: Role) -> Result<Files> {
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    refuse_unsupported(&path, &extension)?;
    match (name, extension.as_str()) {
        (Some(Name::Wikitext2), "json" | "jsonl" | "gz") => {
            Err(Failure::new(format!("`{}` does not look like WikiText-2", path.display()))
                .detail(
                    "expected raw text (wiki.*.raw, wiki.*.tokens) or parquet with a column `text`",
                )
                .hint(format!("for a file of documents use {} {}", role.flag(), path.display()))
                .into())
        }
        (Some(Name::Wikitext2), _) => Ok(Files::Rows(vec![path])),
        (Some(Name::Ptb), _) => Ok(Files::Sentences(path)),
        (Some(Name::C4 | Name::Jsonl), _) | (_, "jsonl" | "json" | "gz" | "parquet" | "arrow") => {
            documents(vec![path])
        }
        _ => Ok(Files::Plain(path)),
    }
}

/// Refuses archives, which would otherwise be read as text.
fn refuse_unsupported(path: &Path, extension: &str) -> Result<()> {
    if matches!(extension, "zst" | "bz2" | "xz" | "zip" | "tar" | "tgz" | "7z") {
        // Its content may name a command that unpacks or converts it.
        input::open(path, Expected::Text).map_err(|error| input::cannot_read(path, &error))?;
        return Err(Failure::new(format!(
            "cannot read a `.{extension}` file: `{}`",
            path.display()
        ))
        .hint("unpack it first; text, .jsonl, .json, .gz of these, .parquet and .arrow are read")
        .into());
    }
    Ok(())
}

/// Resolves a leading `~/`. The shell does not resolve it after `wikitext2:`.
fn expand_home(path: &Path) -> PathBuf {
    match (path.strip_prefix("~"), std::env::var_os("HOME")) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.to_path_buf(),
    }
}

fn no_local_text(spec: &DatasetSpec, role: Role) -> Failure {
    let split = spec.name.unwrap_or(Name::Wikitext2).split(role);
    Failure::new(format!("no local text for `{} {spec}`", role.flag())).hint(format!(
        "use {} {spec}:PATH (a file, or a folder with its {split} split)",
        role.flag()
    ))
}

fn not_found(spec: &DatasetSpec, path: &Path, role: Role) -> Failure {
    let failure =
        Failure::new(format!("no such file or folder for {}: `{}`", role.flag(), path.display()));
    let hint = match spec.name {
        Some(_) => "check the path after the colon",
        None => {
            "use wikitext2:PATH, c4:PATH, hub:OWNER/NAME, or the path of a folder or file (text, .jsonl, .json, .gz, .parquet, .arrow)"
        }
    };
    failure.hint(hint)
}
