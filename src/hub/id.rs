//! Names on the hub: `owner/name` at a revision.

use hf_hub::{Repo, RepoType};

use crate::failure::Failure;

/// The longest name on the hub.
const MAX_NAME: usize = 96;

/// The repository of a model or of a dataset, at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRepo {
    is_model: bool,
    id: String,
    revision: String,
}

impl HubRepo {
    /// A model's repository; `None` if `id` does not have the form of an id, like a path.
    pub fn model(id: &str) -> Option<Self> {
        is_id(id).then(|| Self { is_model: true, ..Self::dataset(id) })
    }

    /// A dataset's repository.
    pub(super) fn dataset(id: &str) -> Self {
        Self { is_model: false, id: id.to_string(), revision: "main".to_string() }
    }

    /// A dataset's repository, by the name of a user. Fails for a text that is no id.
    pub(super) fn dataset_named(id: &str) -> Result<Self, Failure> {
        match is_id(id) {
            true => Ok(Self::dataset(id)),
            false => Err(Failure::usage(format!("`{id}` is not an id of the hub"))
                .hint("an id is like owner/name: letters, digits, `.`, `-` and `_`")),
        }
    }

    /// The repository at `revision` instead of `main`.
    ///
    /// # Errors
    /// Fails for a text that cannot name a branch, a tag or a commit.
    pub fn at(mut self, revision: &str) -> Result<Self, Failure> {
        let is_plain = |part: &str| {
            let is_letter = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
            !part.is_empty()
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
                && part.chars().all(is_letter)
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

    /// `model` or `dataset`, for messages.
    pub(super) fn noun(&self) -> &'static str {
        if self.is_model { "model" } else { "dataset" }
    }

    /// "`config.json` of the model `a/b`", or "the model `a/b`", for messages.
    pub(super) fn named(&self, file: Option<&str>) -> String {
        let repo = format!("the {} `{}`", self.noun(), self.id);
        file.map_or(repo.clone(), |file| format!("`{file}` of {repo}"))
    }

    /// Adds to a failure the reason why a model was sought on the hub: a mistyped path of a folder has the form of an id.
    pub(super) fn taken_for_id(&self, failure: Failure) -> Failure {
        if !self.is_model {
            return failure;
        }
        failure.detail(format!(
            "there is no folder `{}`, so it was taken for an id of the hub",
            self.id
        ))
    }

    /// The type of the `hf-hub` library, which builds folder names and addresses.
    pub(super) fn repo(&self) -> Repo {
        let kind = if self.is_model { RepoType::Model } else { RepoType::Dataset };
        Repo::with_revision(self.id.clone(), kind, self.revision.clone())
    }

    /// The path of a file's address at a commit or revision.
    pub(super) fn file_path(&self, revision: &str, file: &str) -> String {
        let revision = revision.replace('/', "%2F");
        format!("/{}/resolve/{revision}/{}", self.repo().url(), escape(file))
    }
}

/// Returns whether a text is a valid `owner/name`.
fn is_id(text: &str) -> bool {
    let is_edge = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name = |name: &str| {
        name.len() <= MAX_NAME
            && name.starts_with(is_edge)
            && name.ends_with(is_edge)
            && name.chars().all(|c| is_edge(c) || ".-".contains(c))
            && !name.contains("--")
            && !name.contains("..")
            && !name.ends_with(".git")
    };
    // A second slash would be in the name, which refuses it.
    text.split_once('/').is_some_and(|(owner, name)| is_name(owner) && is_name(name))
}

/// Writes a file's path for an address: letters, digits, `-._~` and `/` stay, and all further bytes become %XX.
fn escape(path: &str) -> String {
    let escaped = |byte: u8| match char::from(byte) {
        c if c.is_ascii_alphanumeric() || "/-._~".contains(c) => c.to_string(),
        _ => format!("%{byte:02X}"),
    };
    path.bytes().map(escaped).collect()
}
