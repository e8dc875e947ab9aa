//! The value of `--dataset` and `--eval-dataset`.
//!
//! Nothing is downloaded here. A name without a path has a file on the hub ([`DatasetSpec::on_hub`]); the caller downloads it
//! and states its folder ([`DatasetSpec::downloaded_to`]). [`Source`](super::Source) finds the files on disk.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::Role;
use crate::failure::Failure;

/// The value of `--dataset` or `--eval-dataset`: `wikitext2[:PATH]`, `c4[:PATH]`, `ptb:PATH`, `jsonl:PATH`, `demo`, or the path of
/// a file.
///
/// `Display` gives back the parsed text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetSpec {
    pub(super) name: Option<Name>,
    pub(super) path: Option<PathBuf>,
    /// The folder of the hub's files, for a name without a path.
    pub(super) downloaded: Option<PathBuf>,
}

/// A file of a dataset's repository on the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HubFile {
    /// `owner/name`.
    pub repo: &'static str,
    /// The path of the file in the repository.
    pub file: &'static str,
}

/// The datasets whose layout and conventions are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Name {
    Wikitext2,
    C4,
    Ptb,
    /// A file of JSON lines under any name.
    Jsonl,
    Demo,
}

impl Name {
    const ALL: [Self; 5] = [Self::Wikitext2, Self::C4, Self::Ptb, Self::Jsonl, Self::Demo];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Wikitext2 => "wikitext2",
            Self::C4 => "c4",
            Self::Ptb => "ptb",
            Self::Jsonl => "jsonl",
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
            (Self::Ptb | Self::Jsonl | Self::Demo, _) => return None,
        };
        Some(HubFile { repo, file })
    }

    /// The published name of a role's split. C4 has no test split; the demo text has a split for calibration alone; a file of JSON
    /// lines has none, and is named as a whole.
    pub(super) fn split(self, role: Role) -> &'static str {
        match (role, self) {
            (_, Self::Jsonl) => "lines",
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
                Some("") => return Err(empty(&format!("`{text}` has no path after the colon"))),
                Some(path) => return Ok(spec(Some(name), Some(path))),
                None if rest.is_empty() && name == Name::Ptb => {
                    return Err(Failure::usage(
                        "the Penn Treebank (`ptb`) is not downloaded: its licence forbids copies",
                    )
                    .hint("name your own copy, like ptb:data/ptb.train.txt or the folder that holds it"));
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
        let name = self.name.filter(|_| self.path.is_none())?;
        name.on_hub(role)
    }

    /// The repository on the hub of a dataset with a name, also where a copy of it is read.
    pub fn hub_repository(&self) -> Option<&'static str> {
        let file = self.name?.on_hub(Role::Calibration)?;
        Some(file.repo)
    }

    /// The value without the folders of its path, for records that leave this machine.
    pub fn without_folders(&self) -> String {
        let path = self.path.as_deref().map(|path| match path.file_name() {
            Some(name) => PathBuf::from(name),
            None => PathBuf::from("text"),
        });
        Self { path, ..self.clone() }.to_string()
    }

    /// The same dataset with the repository's files in `folder`. `Display` does not change.
    #[must_use]
    pub fn downloaded_to(self, folder: PathBuf) -> Self {
        Self { downloaded: Some(folder), ..self }
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
        ] {
            let spec: DatasetSpec = given.parse().expect("a dataset");
            assert_eq!(spec.hub_repository(), expected);
        }
    }
}
