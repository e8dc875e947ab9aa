//! Single files of a repository, without a list of its files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;

use super::http::Hub;
use super::id::HubRepo;
use super::transfer::Transfer;
use crate::failure::Failure;
use crate::run::{Events, Meter};

/// The branch of a data set that holds it as parquet.
const PARQUET_BRANCH: &str = "refs/convert/parquet";

impl Hub {
    /// Downloads a file of a dataset into the cache, unless it is there. Returns the folder in which its path begins.
    ///
    /// The file is requested without a list of files: C4 has tens of thousands.
    ///
    /// # Errors
    /// Fails when the hub cannot be reached or refuses, and offline when the file is not in the cache.
    pub fn dataset_file(&self, id: &str, file: &str, events: &dyn Events) -> Result<PathBuf> {
        self.file(&HubRepo::dataset_named(id)?, file, events)
    }

    /// The names of the files of a dataset. Where the hub is not asked or not reached, the files in the cache.
    ///
    /// # Errors
    /// Fails when the hub refuses, and where the cache has no file of the dataset.
    pub fn dataset_files(&self, id: &str, events: &dyn Events) -> Result<Vec<String>> {
        self.files(&HubRepo::dataset_named(id)?, events)
    }

    /// The names of the parquet files of a dataset, as [`Hub::dataset_files`] returns names.
    ///
    /// The hub keeps every data set as parquet in the branch `refs/convert/parquet`, as CONFIGURATION/SPLIT/0000.parquet
    /// (<https://huggingface.co/docs/dataset-viewer/parquet>).
    ///
    /// # Errors
    /// Fails as [`Hub::dataset_files`].
    pub fn parquet_files(&self, id: &str, events: &dyn Events) -> Result<Vec<String>> {
        self.files(&HubRepo::dataset_named(id)?.at(PARQUET_BRANCH)?, events)
    }

    /// Downloads the parquet files of a split into the cache, unless they are there. Returns their paths, in order.
    ///
    /// # Arguments
    /// * `all`: the names of all parquet files of the dataset
    /// * `config`: the configuration; `None` for the only configuration with this split
    ///
    /// # Errors
    /// Fails as [`Hub::dataset_file`], and where the data set has no such split.
    pub fn parquet_split(
        &self,
        (id, all): (&str, &[String]),
        config: Option<&str>,
        split: &str,
        events: &dyn Events,
    ) -> Result<Vec<PathBuf>> {
        let repo = HubRepo::dataset_named(id)?.at(PARQUET_BRANCH)?;
        let mut by_config: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for file in all {
            if let [of, in_split, name] = file.split('/').collect::<Vec<_>>()[..]
                && in_split == split
                && name.ends_with(".parquet")
                && config.is_none_or(|config| config == of)
            {
                by_config.entry(of.to_string()).or_default().push(file.clone());
            }
        }
        let named = config.map_or(String::new(), |config| format!("{config}/"));
        let mut found = by_config.into_iter();
        let (Some((_, mut files)), None) = (found.next(), found.next()) else {
            return Err(Failure::new(format!(
                "the dataset `{id}` has no single split {named}{split} in its branch {PARQUET_BRANCH}"
            ))
            .into());
        };
        files.sort();
        let fetched = files.iter().map(|file| Ok(self.file(&repo, file, events)?.join(file)));
        fetched.collect()
    }

    /// The names of the files of a repository. Where the hub is not asked or not reached, the files in the cache.
    fn files(&self, repo: &HubRepo, events: &dyn Events) -> Result<Vec<String>> {
        let transfer = Transfer::new(self, repo, events);
        let cached = || {
            let commit = transfer.cache.commit()?;
            let files = transfer.cache.files(&commit);
            (!files.is_empty()).then_some((commit, files))
        };
        if self.settings.offline_for(repo).is_some() {
            let (_, files) = cached().ok_or_else(|| transfer.not_cached(None))?;
            return Ok(files);
        }
        match transfer.list() {
            Ok(list) => Ok(list.files.into_keys().collect()),
            Err(unanswered) => {
                let found = cached().filter(|_| unanswered.is_unreachable);
                let (commit, files) = found.ok_or_else(|| transfer.not_answered(&unanswered))?;
                transfer.warn_of_cache(&unanswered.failure, &commit);
                Ok(files)
            }
        }
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
                let commit = commit.ok_or_else(|| transfer.not_answered(&unanswered))?;
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
