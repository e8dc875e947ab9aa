//! Which text a run reads: the value of `--dataset` and `--eval-dataset`, and the files it stands for.
//!
//! Five kinds of text there are. *Rows* (WikiText-2) and *sentences* (PTB) are joined into one text; *documents* (C4, JSON lines,
//! parquet) are drawn one by one; a *plain* file is one text as it stands; the *stories* of `demo` need no file. Nothing is
//! downloaded here: a name without a path says which file of the hub it stands for ([`DatasetSpec::on_hub`]), and is told where
//! that lies ([`DatasetSpec::downloaded_to`]). The names looked for are those of the published archives and of the hub's
//! repositories.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Result;

use super::Role;
use super::documents::Format;
use super::stories::Part;
use crate::failure::Failure;

/// The value of `--dataset` or `--eval-dataset`: `wikitext2:PATH`, `c4:PATH`, `ptb:PATH`, the bare names of the first two, `demo`,
/// or the path of a file.
///
/// Printing one gives back what was parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetSpec {
    name: Option<Name>,
    path: Option<PathBuf>,
    /// Where the hub's files lie, for a name without a path.
    downloaded: Option<PathBuf>,
}

/// A file of a dataset's repository on the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HubFile {
    /// `owner/name`.
    pub repo: &'static str,
    /// The file's path in it.
    pub file: &'static str,
}

/// The datasets whose layout and conventions we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    Wikitext2,
    C4,
    Ptb,
    Demo,
}

impl Name {
    const ALL: [Self; 4] = [Self::Wikitext2, Self::C4, Self::Ptb, Self::Demo];

    fn as_str(self) -> &'static str {
        match self {
            Self::Wikitext2 => "wikitext2",
            Self::C4 => "c4",
            Self::Ptb => "ptb",
            Self::Demo => "demo",
        }
    }

    /// The file that the reference reads for a role; none of the Penn Treebank, which may not be passed on, nor of the demo text.
    fn on_hub(self, role: Role) -> Option<HubFile> {
        let (repo, file) = match (self, role) {
            (Self::Wikitext2, Role::Calibration) => (
                "Salesforce/wikitext",
                "wikitext-2-raw-v1/train-00000-of-00001.parquet",
            ),
            (Self::Wikitext2, Role::Evaluation) => (
                "Salesforce/wikitext",
                "wikitext-2-raw-v1/test-00000-of-00001.parquet",
            ),
            (Self::C4, Role::Calibration) => ("allenai/c4", "en/c4-train.00000-of-01024.json.gz"),
            (Self::C4, Role::Evaluation) => {
                ("allenai/c4", "en/c4-validation.00000-of-00008.json.gz")
            }
            (Self::Ptb | Self::Demo, _) => return None,
        };
        Some(HubFile { repo, file })
    }

    /// The split read for a role, by its published name: C4 has no test split, the demo text one of its own to calibrate.
    fn split(self, role: Role) -> &'static str {
        match (role, self) {
            (Role::Calibration, Self::Demo) => "calibration",
            (Role::Calibration, _) => "train",
            (Role::Evaluation, Self::Wikitext2 | Self::Ptb | Self::Demo) => "test",
            (Role::Evaluation, Self::C4) => "validation",
        }
    }
}

impl FromStr for DatasetSpec {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let empty = |what: &str| {
            Failure::usage(what)
                .hint("write it like wikitext2:PATH, c4:PATH, demo or the path of a text file")
        };
        if text.is_empty() {
            return Err(empty("the dataset is empty"));
        }
        for name in Name::ALL {
            let Some(rest) = text.strip_prefix(name.as_str()) else {
                continue;
            };
            match rest.strip_prefix(':') {
                Some(_) if name == Name::Demo => {
                    return Err(Failure::usage(format!(
                        "`{text}` names a path, but the demo text is part of the program"
                    ))
                    .hint("write it without the colon: demo"));
                }
                Some("") => return Err(empty(&format!("`{text}` has no path after the colon"))),
                Some(path) => {
                    return Ok(Self {
                        name: Some(name),
                        path: Some(path.into()),
                        downloaded: None,
                    });
                }
                None if rest.is_empty() && name == Name::Ptb => {
                    return Err(Failure::usage(
                        "the Penn Treebank (`ptb`) is not downloaded: its licence does not allow to pass it on",
                    )
                    .hint("name your own copy, like ptb:data/ptb.train.txt or the folder that holds it"));
                }
                None if rest.is_empty() => {
                    return Ok(Self {
                        name: Some(name),
                        path: None,
                        downloaded: None,
                    });
                }
                // A file whose name only begins like a dataset's.
                None => {}
            }
        }
        Ok(Self {
            name: None,
            path: Some(text.into()),
            downloaded: None,
        })
    }
}

impl DatasetSpec {
    /// The file of the hub that is wanted for a role; `None` where a path was given.
    pub fn on_hub(&self, role: Role) -> Option<HubFile> {
        let name = self.name.filter(|_| self.path.is_none())?;
        name.on_hub(role)
    }

    /// The same dataset with the repository's files in `folder`. It is printed as before.
    #[must_use]
    pub fn downloaded_to(self, folder: PathBuf) -> Self {
        Self {
            downloaded: Some(folder),
            ..self
        }
    }
}

impl fmt::Display for DatasetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name, &self.path) {
            (Some(name), Some(path)) => write!(f, "{}:{}", name.as_str(), path.display()),
            (Some(name), None) => f.write_str(name.as_str()),
            (None, Some(path)) => write!(f, "{}", path.display()),
            (None, None) => Ok(()),
        }
    }
}

/// Files found for a dataset, and how they are to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// WikiText-2: raw files or parquet parts, in order.
    Rows(Vec<PathBuf>),
    /// Penn Treebank: one file of a sentence per line.
    Sentences(PathBuf),
    /// One file of documents.
    Documents(PathBuf, Format),
    /// One file, one text.
    Plain(PathBuf),
    /// The stories the program tells itself.
    Stories(Part),
}

impl Source {
    /// The dataset's name in run records.
    pub(super) fn dataset(&self, spec: &DatasetSpec) -> &'static str {
        match (self, spec.name) {
            (_, Some(name)) => name.as_str(),
            (Self::Plain(_), None) => "text",
            (_, None) => "documents",
        }
    }

    /// The dataset and its split, as phases and conventions name them: "wikitext2 train", "c4 validation", "text".
    pub(super) fn label(&self, spec: &DatasetSpec, role: Role) -> String {
        match spec.name {
            Some(name) => format!("{} {}", name.as_str(), name.split(role)),
            None => self.dataset(spec).to_owned(),
        }
    }

    /// The files read, for run records.
    pub(super) fn path(&self) -> String {
        match self {
            Self::Rows(parts) => parts
                .iter()
                .map(|part| part.display().to_string())
                .collect::<Vec<_>>()
                .join(", "),
            Self::Documents(path, _) | Self::Sentences(path) | Self::Plain(path) => {
                path.display().to_string()
            }
            Self::Stories(_) => "built in".to_owned(),
        }
    }
}

/// Finds the files of a dataset for a role: the train split to calibrate, the test (C4: validation) split to evaluate.
///
/// # Errors
///
/// Fails when no path was given, nothing is there, several files would do, or the file is of a kind we do not read.
pub(super) fn locate(spec: &DatasetSpec, role: Role) -> Result<Source> {
    if spec.name == Some(Name::Demo) {
        return Ok(stories(role));
    }
    let Some(path) = spec.path.as_ref().or(spec.downloaded.as_ref()) else {
        return Err(no_local_text(spec, role).into());
    };
    let path = expand_home(path);
    let Ok(metadata) = fs::metadata(&path) else {
        return Err(not_found(spec, &path, role).into());
    };
    // Texts are read more than once, and from any place: not from a pipe. A device may never end.
    if !metadata.is_dir() && !metadata.is_file() {
        return Err(
            Failure::new(format!("`{}` is not a regular file", path.display()))
                .hint(format!(
                    "write the text to a file first, and name that with {}",
                    role.flag()
                ))
                .into(),
        );
    }
    match spec.name {
        Some(Name::Wikitext2) if metadata.is_dir() => {
            Ok(Source::Rows(wikitext_split(&path, role)?))
        }
        Some(Name::Wikitext2) => wikitext_file(path, role),
        Some(Name::Ptb) => {
            let file = if metadata.is_dir() {
                ptb_split(&path, role)?
            } else {
                path
            };
            refuse_unreadable_archives(&file)?;
            Ok(Source::Sentences(file))
        }
        Some(Name::C4) => {
            let file = if metadata.is_dir() {
                c4_split(&path, role)?
            } else {
                path
            };
            refuse_unreadable_archives(&file)?;
            let format = Format::of(&file)?;
            Ok(Source::Documents(file, format))
        }
        Some(Name::Demo) => Ok(stories(role)),
        None if metadata.is_dir() => Err(Failure::new(format!(
            "`{}` is a folder, not a text",
            path.display()
        ))
        .hint(format!(
            "use {0} wikitext2:{1} or {0} c4:{1} if it holds one of these, or name a file",
            role.flag(),
            path.display()
        ))
        .into()),
        None => {
            refuse_unreadable_archives(&path)?;
            let holds_documents = matches!(
                extension(&path).as_str(),
                "jsonl" | "json" | "gz" | "parquet"
            );
            if holds_documents {
                let format = Format::of(&path)?;
                return Ok(Source::Documents(path, format));
            }
            Ok(Source::Plain(path))
        }
    }
}

/// The part of the stories for a role.
fn stories(role: Role) -> Source {
    Source::Stories(match role {
        Role::Calibration => Part::Calibration,
        Role::Evaluation => Part::Test,
    })
}

/// A file given as WikiText-2: raw text or parquet.
fn wikitext_file(path: PathBuf, role: Role) -> Result<Source> {
    refuse_unreadable_archives(&path)?;
    if matches!(extension(&path).as_str(), "json" | "jsonl" | "gz") {
        return Err(Failure::new(format!(
            "`{}` does not look like WikiText-2",
            path.display()
        ))
        .detail("expected raw text (wiki.*.raw, wiki.*.tokens) or parquet with a column `text`")
        .hint(format!(
            "for a file of documents use {} {}",
            role.flag(),
            path.display()
        ))
        .into());
    }
    Ok(Source::Rows(vec![path]))
}

/// Finds a split in a folder of WikiText-2. Tried in this order, `train` standing for the split: `wiki.train.raw`,
/// `wiki.train.tokens`, `wiki.train*.raw` if there is exactly one, `train-*.parquet`, and the same in
/// `wikitext-2-raw-v1/`.
fn wikitext_split(folder: &Path, role: Role) -> Result<Vec<PathBuf>> {
    let split = Name::Wikitext2.split(role);
    for folder in [folder.to_path_buf(), folder.join("wikitext-2-raw-v1")] {
        for name in [format!("wiki.{split}.raw"), format!("wiki.{split}.tokens")] {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(vec![path]);
            }
        }
        let cut = matching(&folder, &format!("wiki.{split}"), ".raw");
        if cut.len() > 1 {
            return Err(ambiguous(&folder, &cut, split, role, "wikitext2").into());
        }
        if !cut.is_empty() {
            return Ok(cut);
        }
        let parts = matching(&folder, &format!("{split}-"), ".parquet");
        if !parts.is_empty() {
            all_parts_present(&folder, &parts)?;
            return Ok(parts);
        }
    }
    let tried = format!(
        "looked for wiki.{split}.raw, wiki.{split}.tokens, wiki.{split}*.raw and {split}-*.parquet, there and in wikitext-2-raw-v1/"
    );
    Err(Failure::new(format!(
        "no {split} split of WikiText-2 in `{}`",
        folder.display()
    ))
    .detail(tried)
    .hint(format!(
        "name the file: {} wikitext2:PATH{}",
        role.flag(),
        role.or_not_at_all()
    ))
    .into())
}

/// Finds the shard of C4 in a folder (of the hub's repository, or its `en/`): the one the reference reads, else the only one
/// of the split.
fn c4_split(folder: &Path, role: Role) -> Result<PathBuf> {
    let (split, reference) = match role {
        Role::Calibration => ("c4-train", "c4-train.00000-of-01024.json.gz"),
        Role::Evaluation => ("c4-validation", "c4-validation.00000-of-00008.json.gz"),
    };
    let folders = [folder.to_path_buf(), folder.join("en")];
    for folder in &folders {
        for name in [reference, reference.trim_end_matches(".gz")] {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(path);
            }
        }
    }
    for folder in &folders {
        let mut shards = Vec::new();
        for suffix in [".json.gz", ".jsonl.gz", ".json", ".jsonl", ".parquet"] {
            shards.extend(matching(folder, split, suffix));
        }
        match shards.len() {
            0 => {}
            1 => return Ok(shards.remove(0)),
            _ => return Err(ambiguous(folder, &shards, split, role, "c4").into()),
        }
    }
    Err(Failure::new(format!(
        "no `{split}` shard of C4 in `{}`",
        folder.display()
    ))
    .detail(format!(
        "looked for {reference}, unpacked or not, or a single {split}* file, there and in en/"
    ))
    .hint(format!(
        "name the file: {} c4:PATH{}",
        role.flag(),
        role.or_not_at_all()
    ))
    .into())
}

/// The Penn Treebank's file of a split in a folder, by its published name.
fn ptb_split(folder: &Path, role: Role) -> Result<PathBuf> {
    let split = Name::Ptb.split(role);
    let path = folder.join(format!("ptb.{split}.txt"));
    if path.is_file() {
        return Ok(path);
    }
    Err(Failure::new(format!(
        "no {split} split of the Penn Treebank in `{}`",
        folder.display()
    ))
    .detail(format!("looked for ptb.{split}.txt"))
    .hint(format!(
        "name the file: {} ptb:PATH{}",
        role.flag(),
        role.or_not_at_all()
    ))
    .into())
}

/// The files of a folder with such a name, in order of their names.
fn matching(folder: &Path, prefix: &str, suffix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.starts_with(prefix) && name.ends_with(suffix))
        })
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    found.sort();
    found
}

/// The hub names parts `train-00000-of-00002.parquet`: a missing one would silently give another text.
fn all_parts_present(folder: &Path, parts: &[PathBuf]) -> Result<()> {
    let announced = parts.iter().filter_map(|path| {
        let (_, count) = path.file_stem()?.to_str()?.rsplit_once("-of-")?;
        count.parse::<usize>().ok()
    });
    match announced.max() {
        Some(count) if count != parts.len() => Err(Failure::new(format!(
            "parquet parts are missing in `{}`",
            folder.display()
        ))
        .detail(format!(
            "the names announce {count} parts, {} are there",
            parts.len()
        ))
        .hint("copy all parts of one version into the folder, and no others")
        .into()),
        _ => Ok(()),
    }
}

/// Kinds of files that would otherwise be taken for text.
fn refuse_unreadable_archives(path: &Path) -> Result<()> {
    let extension = extension(path);
    if matches!(
        extension.as_str(),
        "zst" | "bz2" | "xz" | "zip" | "tar" | "tgz" | "7z" | "arrow"
    ) {
        return Err(Failure::new(format!(
            "cannot read a `.{extension}` file: `{}`",
            path.display()
        ))
        .hint("unpack it first; text, .jsonl, .json, .gz of these and .parquet are read")
        .into());
    }
    Ok(())
}

/// The extension in lower case, empty where there is none.
fn extension(path: &Path) -> String {
    path.extension()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase()
}

/// Resolves a leading `~/`: the shell does not, behind `wikitext2:`.
fn expand_home(path: &Path) -> PathBuf {
    match (path.strip_prefix("~"), std::env::var_os("HOME")) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.to_path_buf(),
    }
}

/// The failure for a dataset named without a path.
fn no_local_text(spec: &DatasetSpec, role: Role) -> Failure {
    let split = spec.name.unwrap_or(Name::Wikitext2).split(role);
    Failure::new(format!("no local text for `{} {spec}`", role.flag())).hint(format!(
        "use {} {spec}:PATH (a file, or a folder with its {split} split){}",
        role.flag(),
        role.or_not_at_all()
    ))
}

/// The failure for a path that does not exist.
fn not_found(spec: &DatasetSpec, path: &Path, role: Role) -> Failure {
    let failure = Failure::new(format!(
        "no such file or folder for {}: `{}`",
        role.flag(),
        path.display()
    ));
    let hint =
        "use wikitext2:PATH, c4:PATH, or the path of a file (text, .jsonl, .jsonl.gz, .parquet)";
    match spec.name {
        Some(_) => failure.hint(format!(
            "check the path after the colon{}",
            role.or_not_at_all()
        )),
        None => failure.hint(format!("{hint}{}", role.or_not_at_all())),
    }
}

/// The failure for several files where one was expected.
fn ambiguous(folder: &Path, found: &[PathBuf], split: &str, role: Role, name: &str) -> Failure {
    let names = found
        .iter()
        .filter_map(|path| path.file_name())
        .map(|name| name.to_string_lossy().into_owned());
    Failure::new(format!("several {split} files in `{}`", folder.display()))
        .detail(format!("found {}", names.collect::<Vec<_>>().join(", ")))
        .hint(format!("name one of them: {} {name}:PATH", role.flag()))
}
