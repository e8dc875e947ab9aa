//! One file of a dataset's repository. It is requested without a list of files: C4 has tens of thousands.

use std::path::PathBuf;

use anyhow::Result;

use super::Hub;
use super::cache::{RepoCache, is_plain_commit};
use super::id::HubRepo;
use crate::failure::Failure;
use crate::run::{Events, Meter};

impl Hub {
    /// Downloads one file of a dataset into the cache, unless it is there. Returns the folder in which its path begins.
    ///
    /// # Errors
    /// Fails when the hub cannot be reached or refuses, and offline when the file is not in the cache.
    pub fn dataset_file(&self, id: &str, file: &str, events: &dyn Events) -> Result<PathBuf> {
        let repo = HubRepo::dataset(id);
        let cache = RepoCache::new(self.cache(), &repo);
        if self.client.settings().is_offline {
            let commit = cache
                .commit()
                .filter(|commit| cache.has(commit, file))
                .ok_or_else(|| self.not_cached(&repo, Some(file)))?;
            return Ok(cache.snapshot(&commit));
        }
        self.warn_of_open_token(events);
        let transfer = self.transfer(&repo, &cache, events);
        let remote = transfer.describe(repo.revision(), file)?;
        let commit = remote
            .commit
            .clone()
            .filter(|commit| is_plain_commit(commit));
        let commit = commit.ok_or_else(|| {
            Failure::new(format!(
                "`{}` does not answer like a hub",
                self.client.settings().origin
            ))
            .detail(format!("`{file}` of the dataset `{id}`: no X-Repo-Commit"))
            .hint("check HF_ENDPOINT, or give the text's path")
        })?;
        if !cache.has(&commit, file) {
            let total = remote.bytes.unwrap_or_default();
            let mut meter = Meter::start(events, format!("download {id}"), total);
            transfer.fetch(&commit, file, &remote, Some(&mut meter))?;
            meter.finish();
        }
        cache.write_reference(&commit)?;
        Ok(cache.snapshot(&commit))
    }
}
