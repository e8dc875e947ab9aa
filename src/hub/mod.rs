//! The Hugging Face hub: turns ids into folders of files, downloaded once into the cache that all its clients share.
//!
//! The flow is `settings` (flags and environment) → `model` or `dataset` (the files) → `transfer` (one file, resumed and verified) →
//! `cache` (its folder) → a snapshot folder, which is read like any other folder.
//!
//! The cache's names and addresses come from `hf-hub`. Its transfer does not: in 0.5 it sends the token to whichever host the
//! first redirect names, panics at a redirect without a location, appends to a partial file without asking whether the server
//! honoured the range, gives up on a lock after five seconds, retries refusals like 404, verifies no hash, and never times out.
//! `http` and `transfer` replace it, with the same HTTP client.

mod cache;
mod dataset;
mod headers;
mod http;
mod id;
mod listing;
mod lock;
mod model;
mod partial;
mod refusal;
mod settings;
mod transfer;

use std::path::{Path, PathBuf};

use anyhow::Result;

pub use headers::{ModelHeaders, ShardHeader};
pub use id::{HubRepo, RepoKind};
pub use settings::{Settings, Token};

use http::Client;

/// The hub, or its cache when offline.
pub struct Hub {
    client: Client,
}

/// The files of a repository in the cache, at one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder that holds them, as links to the cache's blobs.
    pub folder: PathBuf,
    /// Their commit.
    pub commit: String,
}

impl Hub {
    /// A hub with these settings. Nothing is connected yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            client: Client::new(settings),
        }
    }

    /// The folder of the cache.
    pub fn cache(&self) -> &Path {
        &self.client.settings().cache
    }
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
