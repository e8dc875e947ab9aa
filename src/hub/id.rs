//! Names on the hub: `owner/name` at a revision.

use hf_hub::{Repo, RepoType};

use crate::failure::Failure;

/// The longest name on the hub.
const MAX_NAME: usize = 96;

/// The kind of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// Weights.
    Model,
    /// Text.
    Dataset,
}

/// A repository at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRepo {
    kind: RepoKind,
    id: String,
    revision: String,
}

impl HubRepo {
    /// A model's repository; `None` if `id` has another form, such as a path.
    pub fn model(id: &str) -> Option<Self> {
        is_id(id).then(|| Self::new(RepoKind::Model, id))
    }

    /// A dataset's repository.
    pub(super) fn dataset(id: &str) -> Self {
        Self::new(RepoKind::Dataset, id)
    }

    fn new(kind: RepoKind, id: &str) -> Self {
        Self {
            kind,
            id: id.to_string(),
            revision: "main".to_string(),
        }
    }

    /// The repository at another revision than `main`.
    ///
    /// # Errors
    /// Fails for a text that cannot name a branch, a tag or a commit.
    pub fn at(mut self, revision: &str) -> Result<Self, Failure> {
        let is_plain = |part: &str| {
            !part.is_empty()
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
                && part
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte))
        };
        if !revision.split('/').all(is_plain) {
            return Err(Failure::usage(format!(
                "`--revision {revision}` is not a branch, tag or commit"
            ))
            .hint("use a name like main, v1.0 or refs/pr/1, or a commit's hash"));
        }
        self.revision = revision.to_string();
        Ok(self)
    }

    /// `owner/name`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Model or dataset.
    pub fn kind(&self) -> RepoKind {
        self.kind
    }

    /// `model` or `dataset`, for messages.
    pub(super) fn noun(&self) -> &'static str {
        match self.kind {
            RepoKind::Model => "model",
            RepoKind::Dataset => "dataset",
        }
    }

    /// The type of the `hf-hub` library, which builds folder names and addresses.
    pub(super) fn repo(&self) -> Repo {
        let kind = match self.kind {
            RepoKind::Model => RepoType::Model,
            RepoKind::Dataset => RepoType::Dataset,
        };
        Repo::with_revision(self.id.clone(), kind, self.revision.clone())
    }

    /// The path of a file's address at a commit or revision.
    pub(super) fn file_path(&self, revision: &str, file: &str) -> String {
        let revision = revision.replace('/', "%2F");
        format!("/{}/resolve/{revision}/{}", self.repo().url(), escape(file))
    }

    /// The path of the repository's page.
    pub(super) fn page_path(&self) -> String {
        format!("/{}", self.repo().url())
    }
}

/// Returns whether a text is a valid `owner/name`.
fn is_id(text: &str) -> bool {
    let is_name = |name: &str| {
        let edge = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
        // A name may also begin or end with an underscore.
        let edge = |byte: Option<&u8>| edge(byte) || byte == Some(&b'_');
        let bytes = name.as_bytes();
        name.len() <= MAX_NAME
            && edge(bytes.first())
            && edge(bytes.last())
            && bytes
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(byte))
            && !name.contains("--")
            && !name.contains("..")
            && !name.ends_with(".git")
    };
    let mut parts = text.split('/');
    let pair = (parts.next(), parts.next(), parts.next());
    matches!(pair, (Some(owner), Some(name), None) if is_name(owner) && is_name(name))
}

/// Writes a file's path for an address: characters other than letters, digits, `-._~` and `/` become %XX.
fn escape(path: &str) -> String {
    path.bytes()
        .map(|byte| match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_two_plain_names_and_paths_are_none() {
        for id in [
            "meta-llama/Llama-2-7b-hf",
            "HuggingFaceTB/SmolLM2-135M",
            "a/b",
            "o_/n.1_",
        ] {
            assert!(HubRepo::model(id).is_some(), "{id}");
        }
        for path in [
            "", "gpt2", "./a", "a/", "/a", "../a", "a/..", "a/b/c", "a b/c", "a/b.git", "a--b/c",
            "~/a", "a/.b", "c:\\a", "a/b-",
        ] {
            assert!(HubRepo::model(path).is_none(), "{path}");
        }
    }

    #[test]
    fn a_revision_cannot_leave_its_place_in_the_address_or_the_cache() {
        let repo = || HubRepo::model("a/b").expect("an id");
        for revision in ["main", "v1.0", "refs/pr/1", "0123abc"] {
            assert!(repo().at(revision).is_ok(), "{revision}");
        }
        for revision in ["", "..", "a/../b", "/a", "a?b", "a#b", "a%2Fb", "a b", "-x"] {
            assert!(
                repo().at(revision).is_err_and(|failure| failure.is_usage),
                "{revision}"
            );
        }
    }

    #[test]
    fn addresses_escape_what_is_no_plain_letter() {
        let repo = HubRepo::dataset("a/b");
        assert_eq!(
            repo.file_path("refs/pr/1", "en/a b%.gz"),
            "/datasets/a/b/resolve/refs%2Fpr%2F1/en/a%20b%25.gz"
        );
    }
}
