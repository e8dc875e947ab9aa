//! The value of `--dataset` and `--eval-dataset`.
//!
//! Nothing is downloaded here. A name without a path has a file on the hub ([`DatasetSpec::on_hub`]); the caller downloads it
//! and states its folder ([`DatasetSpec::downloaded_to`]). [`Source`](super::Source) finds the files on disk.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::{Role, dataset_folder};
use crate::failure::Failure;

/// The value of `--dataset` or `--eval-dataset`: `wikitext2[:PATH]`, `c4[:PATH]`, `ptb:PATH`, `jsonl:PATH`, `hub:OWNER/NAME[:FILE]`,
/// `demo`, or the path of a file or of a data set's folder.
///
/// `Display` gives back the parsed text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetSpec {
    pub(super) name: Option<Name>,
    /// The path after the name; after `hub` it is the repository and its file.
    pub(super) path: Option<PathBuf>,
    /// The folder of the hub's files, for a name without a path; the file, for `hub`.
    pub(super) downloaded: Option<PathBuf>,
}

/// A file of a dataset's repository on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    /// `owner/name`.
    pub repo: String,
    /// The path of the file in the repository; `None` for the only file of a split.
    pub file: Option<String>,
}

/// The datasets whose layout and conventions are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Name {
    Wikitext2,
    C4,
    Ptb,
    /// A file of JSON lines under any name.
    Jsonl,
    /// A file of any repository of the hub.
    Hub,
    Demo,
}

impl Name {
    const ALL: [Self; 6] =
        [Self::Wikitext2, Self::C4, Self::Ptb, Self::Jsonl, Self::Hub, Self::Demo];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Wikitext2 => "wikitext2",
            Self::C4 => "c4",
            Self::Ptb => "ptb",
            Self::Jsonl => "jsonl",
            Self::Hub => "hub",
            Self::Demo => "demo",
        }
    }

    /// The file that the reference reads for a role. The licence of the Penn Treebank forbids copies, and the demo text is built in.
    fn on_hub(self, role: Role) -> Option<HubFile> {
        let (repo, file) = match (self, role) {
            (Self::Wikitext2, Role::Calibration) => {
                ("Salesforce/wikitext", "wikitext-2-raw-v1/train-00000-of-00001.parquet")
            }
            (Self::Wikitext2, Role::Evaluation) => {
                ("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet")
            }
            (Self::C4, Role::Calibration) => ("allenai/c4", "en/c4-train.00000-of-01024.json.gz"),
            (Self::C4, Role::Evaluation) => {
                ("allenai/c4", "en/c4-validation.00000-of-00008.json.gz")
            }
            (Self::Ptb | Self::Jsonl | Self::Hub | Self::Demo, _) => return None,
        };
        Some(HubFile { repo: repo.to_owned(), file: Some(file.to_owned()) })
    }

    /// The published name of a role's split. C4 has no test split; the demo text has a split for calibration alone; a file of JSON
    /// lines has none, and is named as a whole.
    pub(super) fn split(self, role: Role) -> &'static str {
        match (role, self) {
            (_, Self::Jsonl | Self::Hub) => "lines",
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
        let spec = |name, path: Option<&str>| Self {
            name,
            path: path.map(PathBuf::from),
            downloaded: None,
        };
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
                Some(file) if name == Name::Hub && !is_hub_file(file) => {
                    return Err(Failure::usage(format!("`{text}` names no file of the hub"))
                        .hint("write it like hub:OWNER/NAME or hub:OWNER/NAME:data/train.jsonl"));
                }
                Some("") => return Err(empty(&format!("`{text}` has no path after the colon"))),
                Some(path) => return Ok(spec(Some(name), Some(path))),
                None if rest.is_empty() && name == Name::Ptb => {
                    return Err(Failure::usage(
                        "the Penn Treebank (`ptb`) is not downloaded: its licence forbids copies",
                    )
                    .hint("name your own copy, like ptb:data/ptb.train.txt or the folder that holds it"));
                }
                None if rest.is_empty() && name == Name::Hub => {
                    return Err(Failure::usage("`hub` names no repository").hint(
                        "name the data set and its file, like hub:OWNER/NAME:data/train.jsonl",
                    ));
                }
                None if rest.is_empty() && name == Name::Jsonl => {
                    return Err(Failure::usage("`jsonl` names no file")
                        .hint("name the file of JSON lines, like jsonl:data/train.jsonl"));
                }
                None if rest.is_empty() => return Ok(spec(Some(name), None)),
                // The path of a file, which begins like the name of a dataset.
                None => {}
            }
        }
        Ok(spec(None, Some(text)))
    }
}

impl DatasetSpec {
    /// The file of the hub for a role; `None` if a path was given.
    pub fn on_hub(&self, role: Role) -> Option<HubFile> {
        match (self.name?, self.path.as_deref().and_then(Path::to_str)) {
            (Name::Hub, Some(path)) => {
                let (repo, file) = match path.split_once(':') {
                    Some((repo, file)) => (repo, Some(file.to_owned())),
                    None => (path, None),
                };
                Some(HubFile { repo: repo.to_owned(), file })
            }
            (name, None) if self.path.is_none() => name.on_hub(role),
            _ => None,
        }
    }

    /// The repository on the hub of a dataset with a name, also where a copy of it is read.
    pub fn hub_repository(&self) -> Option<String> {
        let of_name = || self.name?.on_hub(Role::Calibration);
        let file = self.on_hub(Role::Calibration).or_else(of_name)?;
        Some(file.repo)
    }

    /// The value without the folders of its path, for records that leave this machine.
    pub fn without_folders(&self) -> String {
        if self.name == Some(Name::Hub) {
            return self.to_string();
        }
        let path = self.path.as_deref().map(|path| match path.file_name() {
            Some(name) => PathBuf::from(name),
            None => PathBuf::from("text"),
        });
        Self { path, ..self.clone() }.to_string()
    }

    /// The same dataset with the repository's files in `folder`, of which `file` was downloaded. `Display` does not change.
    #[must_use]
    pub fn downloaded_to(self, folder: PathBuf, file: &str) -> Self {
        let downloaded = match self.name {
            Some(Name::Hub) => folder.join(file),
            _ => folder,
        };
        Self { downloaded: Some(downloaded), ..self }
    }

    /// Chooses the file of a role among the files of a repository.
    ///
    /// # Errors
    /// Fails unless exactly one file of documents has the role's split. The message names the files.
    pub fn choose_file(&self, files: &[String], role: Role) -> Result<String, Failure> {
        let data: Vec<String> =
            files.iter().filter(|name| dataset_folder::is_data(name)).cloned().collect();
        let mut found = dataset_folder::of_split(&data, role).unwrap_or_default();
        match found.len() {
            1 => Ok(found.remove(0)),
            count => Err(Failure::new(format!(
                "`{self}` has {count} files for {}, and one is read",
                role.flag()
            ))
            .detail(format!("files of documents: {}", dataset_folder::shown(&data)))
            .hint(format!("name the file: {} {self}:FILE", role.flag()))),
        }
    }
}

/// Returns whether a text is `OWNER/NAME`, perhaps with `:FILE`.
fn is_hub_file(text: &str) -> bool {
    let (repo, file) = text.split_once(':').unwrap_or((text, "x"));
    let is_path = |path: &str| path.split('/').all(|part| !matches!(part, "" | "." | ".."));
    is_path(repo) && repo.split('/').count() == 2 && is_path(file)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dataset_without_folders_keeps_its_name_and_its_file() {
        for (given, expected) in [
            ("wikitext2:/home/me/data/", "wikitext2:data"),
            ("c4:a/b.json.gz", "c4:b.json.gz"),
            ("../x/train.txt", "train.txt"),
            ("ptb:..", "ptb:text"),
            ("wikitext2", "wikitext2"),
            ("demo", "demo"),
            ("jsonl:/home/me/chats.json", "jsonl:chats.json"),
            ("hub:acme/chats:data/train.jsonl", "hub:acme/chats:data/train.jsonl"),
        ] {
            let spec: DatasetSpec = given.parse().expect("a dataset");
            assert_eq!(spec.without_folders(), expected);
        }
    }

    #[test]
    fn only_published_datasets_have_a_repository() {
        for (given, expected) in [
            ("c4", Some("allenai/c4")),
            ("wikitext2:x", Some("Salesforce/wikitext")),
            ("train.txt", None),
            ("demo", None),
            ("ptb:x", None),
            ("hub:acme/chats:a.jsonl", Some("acme/chats")),
        ] {
            let spec: DatasetSpec = given.parse().expect("a dataset");
            assert_eq!(spec.hub_repository().as_deref(), expected);
        }
    }

    #[test]
    fn a_file_of_any_repository_is_named_or_is_the_only_one_of_its_split() {
        let spec: DatasetSpec = "hub:acme/chats:data/a.jsonl".parse().expect("a dataset");
        let wanted = spec.on_hub(Role::Evaluation).expect("on the hub");
        assert_eq!(
            (wanted.repo.as_str(), wanted.file.as_deref()),
            ("acme/chats", Some("data/a.jsonl"))
        );
        let spec: DatasetSpec = "hub:acme/chats".parse().expect("a dataset");
        assert_eq!(spec.on_hub(Role::Calibration).expect("on the hub").file, None);
        let files = ["README.md", "train.jsonl", "test-1.parquet", "test-2.parquet"];
        let files = files.map(str::to_owned);
        assert_eq!(spec.choose_file(&files, Role::Calibration).as_deref(), Ok("train.jsonl"));
        let failure = spec.choose_file(&files, Role::Evaluation).expect_err("two files");
        assert!(failure.hint.is_some_and(|hint| hint.ends_with("hub:acme/chats:FILE")));
        for wrong in ["hub", "hub:", "hub:x", "hub:a/b/c", "hub:a/b:", "hub:a/b:../c"] {
            assert!(wrong.parse::<DatasetSpec>().is_err_and(|failure| failure.is_usage), "{wrong}");
        }
    }
}
