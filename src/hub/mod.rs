//! The Hugging Face hub: turns ids into folders of files, downloaded once into the cache that all its clients share.
//!
//! The flow is `settings` (flags and environment) → `model` (its files) or `headers` (for a plan) → `transfer` (a file, resumed and
//! verified) → `cache` (its folder) → a snapshot folder, which is read like any folder.
//!
//! The names of folders and addresses come from `hf-hub`. Its transfer does not: in 0.5 it sends the token to whichever host the
//! first redirect names, panics at a redirect without a location, appends to a partial file without asking whether the server
//! honoured the range, gives up on a lock after five seconds, retries refusals like 404, verifies no hash, and never times out.
//! `http` and `transfer` replace it, with the same HTTP client.
//!
//! | file | content |
//! | --- | --- |
//! | `certificates` | the certificates that https trusts |
//! | `id` | names on the hub |
//! | `lock` | a lock per file: the first process downloads the file, and processes that come later wait for it |
//! | `partial` | the partial file of a download: it grows by what arrives, and knows the SHA-256 of its bytes |
//! | `refusal` | refusals of the hub: each status and each network error becomes a message with a remedy here, and nowhere else |

mod cache;
mod certificates;
mod headers;
mod http;
mod id;
mod lock;
mod model;
mod partial;
mod refusal;
mod settings;
mod transfer;

use std::path::{Path, PathBuf};

use anyhow::Result;

pub use headers::{ModelHeaders, ShardHeader};
pub use id::HubRepo;
pub use settings::HubSettings;

use crate::run::{Events, Meter};
use transfer::Transfer;

/// The hub, or its cache when offline.
pub struct Hub {
    agent: ureq::Agent,
    settings: HubSettings,
}

/// The files of a repository in the cache, at a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder that holds them, as links to the cache's blobs.
    pub folder: PathBuf,
    /// Their commit.
    pub commit: String,
}

/// The caller's choice among a model's files.
pub trait ModelFiles {
    /// Returns whether a small file belongs to the model: config, tokenizer, licence.
    fn wants(&self, name: &str) -> bool;

    /// Checks `config.json` before the weights are downloaded.
    ///
    /// # Errors
    /// Fails for a model that this program cannot read.
    fn check_config(&self, folder: &Path) -> Result<()>;
}

impl Hub {
    /// Downloads a file of a dataset into the cache, unless it is there. Returns the folder in which its path begins.
    ///
    /// The file is requested without a list of files: C4 has tens of thousands.
    ///
    /// # Errors
    /// Fails when the hub cannot be reached or refuses, and offline when the file is not in the cache.
    pub fn dataset_file(&self, id: &str, file: &str, events: &dyn Events) -> Result<PathBuf> {
        self.file(&HubRepo::dataset(id), file, events)
    }

    /// Downloads some files of a model's repository into the cache, unless they are there. Returns their folder.
    ///
    /// # Errors
    /// Fails as [`Hub::dataset_file`].
    pub fn model_files(
        &self,
        repo: &HubRepo,
        files: &[&str],
        events: &dyn Events,
    ) -> Result<PathBuf> {
        let mut folder = PathBuf::new();
        for file in files {
            folder = self.file(repo, file, events)?;
        }
        Ok(folder)
    }

    /// Downloads a file, unless it is in the cache.
    fn file(&self, repo: &HubRepo, file: &str, events: &dyn Events) -> Result<PathBuf> {
        let transfer = Transfer::new(self, repo, events);
        let cache = &transfer.cache;
        let cached = || cache.commit().filter(|commit| cache.has(commit, file));
        if self.settings.offline_for(repo).is_some() {
            let commit = cached().ok_or_else(|| transfer.not_cached(Some(file)))?;
            return Ok(cache.snapshot(&commit));
        }
        let remote = match transfer.describe(None, file) {
            Ok(remote) => remote,
            Err(unanswered) => {
                let commit = cached().filter(|_| unanswered.is_unreachable);
                let commit = commit.ok_or(unanswered.failure.clone())?;
                transfer.warn_of_cache(&unanswered.failure, &commit);
                return Ok(cache.snapshot(&commit));
            }
        };
        if !cache.has(&remote.commit, file) {
            let total = remote.bytes.unwrap_or_default();
            let mut meter = Meter::start(events, format!("download {}", repo.id()), total);
            transfer.fetch(&remote, Some(&mut meter))?;
            meter.finish();
        }
        cache.write_reference(&remote.commit)?;
        Ok(cache.snapshot(&remote.commit))
    }
}
