//! The headers of a model's weights, and nothing of the weights: the first bytes of every shard by range requests.
//!
//! A plan needs names, shapes and dtypes. Of Llama-2-70B's 138 GB that is `config.json`, the index, and some kilobytes of each of
//! its shards. What a model's files are called and which repositories are refused stands in `model`.

use std::io::Read;

use anyhow::Result;

use super::cache::RepoCache;
use super::http::{Asked, Request, Trouble};
use super::id::HubRepo;
use super::listing::{Listing, listing};
use super::model::{CONFIG, INDEX, SINGLE, refuse_other_repositories, shards};
use super::transfer::Transfer;
use super::{Hub, ModelFiles, Snapshot, refusal};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::Events;

/// Asked for first: a length and, of most shards, the whole header.
const FIRST_BYTES: u64 = 64 << 10;

/// Headers above this are nonsense; the reader of files draws the same line.
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
    /// Where `config.json` lies.
    pub snapshot: Snapshot,
    /// Every shard, in order.
    pub shards: Vec<ShardHeader>,
}

impl Hub {
    /// Fetches `config.json`, the index and the headers of all shards. Only the first two go into the cache.
    ///
    /// # Errors
    /// Fails as [`Hub::model`] does, and when the hub does not answer range requests or a header is none.
    pub fn model_headers(
        &self,
        repo: &HubRepo,
        files: &dyn ModelFiles,
        events: &dyn Events,
    ) -> Result<ModelHeaders> {
        let cache = RepoCache::new(self.cache(), repo);
        self.warn_of_open_token(events);
        let list = self
            .client
            .patiently(events, || listing(&self.client, repo))?;
        refuse_other_repositories(repo, &list)?;
        let transfer = Transfer {
            client: &self.client,
            repo,
            cache: &cache,
            events,
        };
        let fetch = |name: &str| -> Result<()> {
            if cache.has(&list.commit, name) {
                return Ok(());
            }
            let remote = transfer.ask(&list.commit, name)?;
            transfer.fetch(&list.commit, name, &remote, None)
        };
        fetch(CONFIG)?;
        let folder = cache.snapshot(&list.commit);
        files.check_config(&folder)?;
        let names = if list.files.contains_key(INDEX) {
            fetch(INDEX)?;
            shards(repo, &folder)?
        } else {
            vec![SINGLE.to_string()]
        };
        let shards = names
            .into_iter()
            .map(|name| self.shard_header(repo, &list, name, events))
            .collect::<Result<_>>()?;
        Ok(ModelHeaders {
            snapshot: Snapshot {
                folder,
                commit: list.commit,
            },
            shards,
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
                .patiently(events, || self.range(repo, &list.commit, &name, first, end))
        };
        let (begin, whole) = read(0, FIRST_BYTES)?;
        let file_bytes = list
            .files
            .get(&name)
            .copied()
            .flatten()
            .or(whole)
            .ok_or_else(|| unlike("nobody says how long the file is".to_string()))?;
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

    /// The bytes from `first` up to `end` of a file, fewer where it ends before, and its whole length where that is told.
    fn range(
        &self,
        repo: &HubRepo,
        commit: &str,
        name: &str,
        first: u64,
        end: u64,
    ) -> Result<(Vec<u8>, Option<u64>), Trouble> {
        let asked = Asked {
            repo,
            file: Some(name),
        };
        let answer = self.client.send(&Request {
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
        // A server that sends the whole file is not listened to for longer than was asked.
        let body = answer.response.into_body().into_reader();
        body.take(end - first)
            .read_to_end(&mut bytes)
            .map_err(|error| {
                refusal::unanswered(self.client.settings(), &origin, &ureq::Error::from(error))
            })?;
        Ok((bytes, whole))
    }
}
