//! The headers of a model's weights without the weights: the first bytes of every shard by range requests.
//!
//! A plan needs names, shapes and dtypes. For the 138 GB of Llama-2-70B these are `config.json`, the index, and some kilobytes of each
//! shard. `model` has the names of the files and refuses unusable repositories.

use anyhow::Result;

use super::exchange::HttpRequest;
use super::id::HubRepo;
use super::refusal::RequestError;
use super::transfer::Transfer;
use super::{Hub, ModelFiles, Snapshot};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::Events;

/// Bytes of the first request: the header's length and, for most shards, the whole header.
const FIRST_BYTES: u64 = 64 << 10;

/// The largest header; the reader of files has the same limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The beginning of a shard: its name in the repository, its JSON header without the 8 bytes of its length, and the length of the
/// whole file in bytes.
pub type ShardHeader = (String, Vec<u8>, u64);

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
    pub fn model_headers(
        &self,
        repo: &HubRepo,
        files: &dyn ModelFiles,
        events: &dyn Events,
    ) -> Result<ModelHeaders> {
        let transfer = Transfer::new(self, repo, events);
        let cached =
            || transfer.cached_model().map(|snapshot| ModelHeaders { snapshot, shards: None });
        if self.settings.offline_for(repo).is_some() {
            return Ok(cached()?);
        }
        let list = match transfer.list() {
            Ok(list) => list,
            Err(unanswered) => {
                return Ok(ModelHeaders {
                    snapshot: transfer.cached_instead(unanswered)?,
                    shards: None,
                });
            }
        };
        let mut shards = Vec::new();
        for name in transfer.weight_files(&list, files)? {
            let announced = list.files.get(&name).copied().flatten();
            shards.push(transfer.shard_header(&list.commit, name, announced)?);
        }
        Ok(ModelHeaders { snapshot: transfer.snapshot(list.commit), shards: Some(shards) })
    }
}

impl Transfer<'_> {
    /// Fetches the header of a shard; `announced` is the length of the whole file, if the hub lists it.
    fn shard_header(
        &self,
        commit: &str,
        name: String,
        announced: Option<u64>,
    ) -> Result<ShardHeader, Failure> {
        let unlike = |why: String| {
            let named = self.repo.named(Some(&name));
            Failure::new(format!("cannot read the header of {named}: {why}"))
                .hint("download the model and name its folder, or use another --revision")
        };
        let read = |first: u64, end: u64| {
            let part = || self.part(commit, &name, first, end);
            self.hub.with_retries(self.events, part)
        };
        let (mut json, whole) = read(0, FIRST_BYTES)?;
        let file_bytes =
            announced.or(whole).ok_or_else(|| unlike("its length is unknown".to_string()))?;
        let length = json
            .first_chunk::<8>()
            .map(|length| u64::from_le_bytes(*length))
            .ok_or_else(|| unlike(format!("{} bytes are too few", json.len())))?;
        if length > MAX_HEADER_BYTES || length > file_bytes.saturating_sub(8) {
            return Err(unlike(format!(
                "it announces a header of {length} bytes in a file of {file_bytes}"
            )));
        }
        let end = 8 + length;
        if (json.len() as u64) < end {
            json.extend(read(json.len() as u64, end)?.0);
        }
        if (json.len() as u64) < end {
            let came = json.len() - 8;
            return Err(unlike(format!("{came} of {length} bytes came")));
        }
        json.truncate(end as usize);
        json.drain(..8);
        Ok((name, json, file_bytes))
    }

    /// Requests the bytes from `first` up to `end` of a file. Returns them, fewer at the end of the file, and the file's length if the
    /// answer has it.
    fn part(
        &self,
        commit: &str,
        name: &str,
        first: u64,
        end: u64,
    ) -> Result<(Vec<u8>, Option<u64>), RequestError> {
        let answer = self.hub.send(&HttpRequest {
            headers: vec![("range", format!("bytes={first}-{}", end - 1))],
            ..HttpRequest::file(self.repo, commit, name)
        })?;
        let (start, whole) = answer.range().unwrap_or((first, None));
        if start != first {
            return Err(Failure::new(format!(
                "`{}` does not answer range requests, and the header of `{name}` is longer than {}",
                answer.origin,
                ByteSize(FIRST_BYTES)
            ))
            .hint("download the model and name its folder")
            .into());
        }
        // A server may ignore the range and send the whole file; the rest is not read.
        Ok((self.hub.read(answer, end - first)?, whole))
    }
}
