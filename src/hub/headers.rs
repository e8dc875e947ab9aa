//! The headers of a model's weights without the weights: the first bytes of every shard by range requests.
//!
//! A plan needs names, shapes and dtypes. For the 138 GB of Llama-2-70B these are `config.json`, the index, and some kilobytes of each
//! shard. `model` has the names of the files and refuses unusable repositories.

use std::io::Read;

use anyhow::Result;

use super::cache::RepoCache;
use super::http::HttpRequest;
use super::id::HubRepo;
use super::listing::{Listing, listing};
use super::model::refuse_other_repositories;
use super::refusal::{self, Asked, RequestError};
use super::{Hub, ModelFiles, Snapshot};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::Events;

/// Bytes of the first request: the header's length and, for most shards, the whole header.
const FIRST_BYTES: u64 = 64 << 10;

/// The largest header; the reader of files has the same limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The beginning of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardHeader {
    /// Its name in the repository.
    pub name: String,
    /// Its JSON header, without the 8 bytes of its length.
    pub json: Vec<u8>,
    /// The length of the whole file in bytes.
    pub file_bytes: u64,
}

/// A model's headers, and its small files in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelHeaders {
    /// The folder of `config.json`.
    pub snapshot: Snapshot,
    /// Every shard, in order; `None` where the folder holds the weights themselves.
    pub shards: Option<Vec<ShardHeader>>,
}

impl Hub {
    /// Fetches `config.json`, the index and the headers of all shards, and stores the first two in the cache. Offline, and where
    /// the hub gives no list of files, a model that is whole in the cache is taken from there.
    ///
    /// # Errors
    /// Fails as [`Hub::model`] does, when the hub does not answer range requests, and for an invalid header.
    pub fn model_headers(
        &self,
        repo: &HubRepo,
        files: &dyn ModelFiles,
        events: &dyn Events,
    ) -> Result<ModelHeaders> {
        let cache = RepoCache::new(self.cache(), repo);
        let cached = || {
            self.cached_model(repo, &cache)
                .map(|snapshot| ModelHeaders {
                    snapshot,
                    shards: None,
                })
        };
        if self.client.settings().is_offline {
            return cached();
        }
        self.warn_of_open_token(events);
        let list = match self
            .client
            .with_retries(events, || listing(&self.client, repo))
        {
            Ok(list) => list,
            Err(error) => {
                let headers = cached().map_err(|_| error)?;
                events.note(format!(
                    "the hub did not list the files of the model `{}`; using the cache, which has commit {}",
                    repo.id(),
                    headers.snapshot.commit
                ));
                return Ok(headers);
            }
        };
        refuse_other_repositories(repo, &list)?;
        let transfer = self.transfer(repo, &cache, events);
        self.fetch_config(&transfer, &list, files)?;
        let names = self.fetch_index(&transfer, &list)?;
        let shards = names
            .into_iter()
            .map(|name| self.shard_header(repo, &list, name, events))
            .collect::<Result<_>>()?;
        Ok(ModelHeaders {
            snapshot: Snapshot {
                folder: cache.snapshot(&list.commit),
                commit: list.commit,
            },
            shards: Some(shards),
        })
    }

    fn shard_header(
        &self,
        repo: &HubRepo,
        list: &Listing,
        name: String,
        events: &dyn Events,
    ) -> Result<ShardHeader> {
        let unlike = |why: String| {
            Failure::new(format!(
                "cannot read the header of `{name}` of the model `{}`: {why}",
                repo.id()
            ))
            .hint("download the model and name its folder, or use another --revision")
        };
        let read = |first: u64, end: u64| {
            self.client
                .with_retries(events, || self.range(repo, &list.commit, &name, first, end))
        };
        let (begin, whole) = read(0, FIRST_BYTES)?;
        let file_bytes = list
            .files
            .get(&name)
            .copied()
            .flatten()
            .or(whole)
            .ok_or_else(|| unlike("its length is unknown".to_string()))?;
        let length = begin
            .first_chunk::<8>()
            .map(|length| u64::from_le_bytes(*length))
            .ok_or_else(|| unlike(format!("{} bytes are too few", begin.len())))?;
        if length > MAX_HEADER_BYTES || length > file_bytes.saturating_sub(8) {
            return Err(unlike(format!(
                "it announces a header of {length} bytes in a file of {file_bytes}"
            ))
            .into());
        }
        let mut json = begin[8..].to_vec();
        if (json.len() as u64) < length {
            let (rest, _) = read(8 + json.len() as u64, 8 + length)?;
            json.extend_from_slice(&rest);
        }
        if (json.len() as u64) < length {
            return Err(unlike(format!("{} of {length} bytes came", json.len())).into());
        }
        json.truncate(length as usize);
        Ok(ShardHeader {
            name,
            json,
            file_bytes,
        })
    }

    /// Requests the bytes from `first` up to `end` of a file. Returns them, fewer at the end of the file, and the file's length if the
    /// answer has it.
    fn range(
        &self,
        repo: &HubRepo,
        commit: &str,
        name: &str,
        first: u64,
        end: u64,
    ) -> Result<(Vec<u8>, Option<u64>), RequestError> {
        let asked = Asked {
            repo,
            file: Some(name),
        };
        let answer = self.client.send(&HttpRequest {
            asked,
            path: repo.file_path(commit, name),
            is_head: false,
            headers: vec![("range", format!("bytes={first}-{}", end - 1))],
        })?;
        let origin = answer.origin.clone();
        let is_part = answer.response.status() == 206;
        if !is_part && first > 0 {
            return Err(Failure::new(format!(
                "`{origin}` does not answer range requests, and the header of `{name}` is longer than {}",
                ByteSize(FIRST_BYTES)
            ))
            .hint("download the model and name its folder")
            .into());
        }
        // `bytes 0-65535/9976576152`
        let told = answer
            .header("content-range")
            .and_then(|range| range.rsplit('/').next()?.parse().ok());
        let own = answer
            .header("content-length")
            .filter(|_| !is_part)
            .and_then(|bytes| bytes.parse().ok());
        let whole = told.or(own);
        let mut bytes = Vec::new();
        // A server may ignore the range and send the whole file; the rest is not read.
        let body = answer.response.into_body().into_reader();
        body.take(end - first)
            .read_to_end(&mut bytes)
            .map_err(|error| {
                refusal::unanswered(self.client.settings(), &origin, &ureq::Error::from(error))
            })?;
        Ok((bytes, whole))
    }
}
