//! The Hugging Face hub: ids resolved to folders of files, downloaded once into the cache that all of its clients share.
//!
//! The flow is `settings` (flags and environment) → `model` or `dataset` (which files) → `transfer` (one file, resumed and
//! verified) → `cache` (where it lies) → a snapshot folder, which the ordinary reader reads.
//!
//! The cache's names and addresses come from `hf-hub`. Its transfer does not: in 0.5 it sends the token to whichever host the
//! first redirect names, panics at a redirect without a location, appends to a partial file without asking whether the server
//! honoured the range, gives up on a lock after five seconds, retries refusals like 404, verifies no hash, and never times out.
//! Ours stands in `http` and `transfer`, over the same HTTP client.

mod append;
mod cache;
mod dataset;
mod headers;
mod http;
mod id;
mod listing;
mod lock;
mod meter;
mod model;
mod refusal;
mod settings;
mod transfer;

use std::path::{Path, PathBuf};

use anyhow::Result;

pub use headers::{ModelHeaders, ShardHeader};
pub use id::{HubRepo, RepoKind};
pub use settings::{Settings, Token};

use http::Client;

/// A connection to the hub, or to what is left of it offline.
pub struct Hub {
    client: Client,
}

/// A repository's files in the cache, at one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder that holds them, as links to the cache's blobs.
    pub folder: PathBuf,
    /// The commit they belong to.
    pub commit: String,
}

impl Hub {
    /// A hub with these settings; connects to nothing yet.
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

/// What a caller wants of a model's files.
pub trait ModelFiles {
    /// Whether a file that is no weight belongs to the model: config, tokenizer, licence.
    fn wants(&self, name: &str) -> bool;

    /// Looks at `config.json` as soon as it is there, so that a model nobody can read is not downloaded.
    ///
    /// # Errors
    /// Fails when the model is none that can be read.
    fn check_config(&self, folder: &Path) -> Result<()>;
}
