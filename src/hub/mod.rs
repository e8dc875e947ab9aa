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
//! | `exchange` | a request and its answer |
//! | `files` | single files, without a list of the repository's files |
//! | `id` | names on the hub |
//! | `lock` | a lock per file: the first process downloads the file, and processes that come later wait for it |
//! | `partial` | the partial file of a download: it grows by what arrives, and knows the SHA-256 of its bytes |
//! | `refusal` | refusals of the hub: each status and each network error becomes a message with a remedy here, and nowhere else |

mod cache;
mod certificates;
mod exchange;
mod files;
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
pub use http::Hub;
pub use id::HubRepo;
pub use settings::HubSettings;

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
