//! A file from the hub to the cache: its description, its bytes from where an earlier download stopped, and its hash.
//!
//! A partial file is named by the content's own name, so it belongs to this content alone. Large files are named by their
//! SHA-256, which is compared at the end. An answer is used only if it fits: a part must begin where ours ends, the announced length
//! must be the file's, and a whole file in answer to a range starts the download over. `If-Range` is sent for small files only. Their
//! ETag is the address's own; a large file comes from a storage host with a different ETag, which would restart every download.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use super::cache::{RepoCache, cannot_write, is_plain_commit};
use super::exchange::{Answer, HttpRequest};
use super::http::{Hub, Unanswered};
use super::id::HubRepo;
use super::lock;
use super::partial::{BUFFER, Partial};
use super::refusal::{CHECK_ENDPOINT, RequestError, Retry, not_a_hub, unanswered};
use super::settings::Origin;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::{Events, Meter};

/// A try that brought this many bytes resets the number of failed tries.
const PROGRESS: u64 = 1 << 20;

/// The hub's description of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Remote<'a> {
    pub(super) file: &'a str,
    pub(super) commit: String,
    /// The content's name: a SHA-256 for large files, a git hash for small files.
    pub(super) etag: String,
    pub(super) bytes: Option<u64>,
}

impl Remote<'_> {
    /// The SHA-256 of the content, where it is the content's name.
    fn sha256(&self) -> Option<&str> {
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let is_hash = self.etag.len() == 64 && self.etag.bytes().all(is_digit);
        is_hash.then_some(self.etag.as_str())
    }
}

/// A repository on the hub and in the cache.
pub(super) struct Transfer<'a> {
    pub(super) hub: &'a Hub,
    pub(super) repo: &'a HubRepo,
    pub(super) cache: RepoCache,
    pub(super) events: &'a dyn Events,
}

impl<'a> Transfer<'a> {
    pub(super) fn new(hub: &'a Hub, repo: &'a HubRepo, events: &'a dyn Events) -> Self {
        let warning = hub.settings.unencrypted_token();
        if let Some(warning) = warning.filter(|_| hub.settings.offline_for(repo).is_none()) {
            events.warn(warning);
        }
        Self { hub, repo, cache: RepoCache::new(&hub.settings.cache, repo), events }
    }

    /// Puts a file into the snapshot of a commit, unless it is there.
    pub(super) fn ensure(
        &self,
        commit: &str,
        file: &str,
        meter: Option<&mut Meter<'_>>,
    ) -> Result<(), Failure> {
        if self.cache.has(commit, file) {
            return Ok(());
        }
        self.fetch(&self.describe(Some(commit), file)?, meter)
    }

    /// Asks the hub for the description of a file at `commit`; if it is `None`, at the commit that the revision has now.
    pub(super) fn describe<'f>(
        &self,
        commit: Option<&str>,
        file: &'f str,
    ) -> Result<Remote<'f>, Unanswered> {
        let revision = commit.unwrap_or(self.repo.revision());
        let request = HttpRequest { is_head: true, ..HttpRequest::file(self.repo, revision, file) };
        let hub = self.hub;
        let answer = hub.with_retries(self.events, || hub.send(&request))?;
        let etag = answer.header("x-linked-etag").or(answer.header("etag"));
        let etag = etag.unwrap_or_default().trim_start_matches("W/");
        let etag = etag.trim_matches('"');
        let unlike = |lacks: &str| {
            let named = self.repo.named(Some(file));
            not_a_hub(&answer.origin, format!("{named}: {lacks}"))
        };
        let is_letter = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_short = (1..=128).contains(&etag.len());
        if !is_short || etag.starts_with('.') || !etag.chars().all(is_letter) {
            return Err(unlike("no usable ETag").into());
        }
        let told = answer.commit.as_deref().filter(|told| is_plain_commit(told));
        let commit = commit.or(told);
        let commit = commit.ok_or_else(|| unlike("no X-Repo-Commit"))?;
        let bytes = match answer.header("x-linked-size") {
            // A redirect's own length counts the redirect's body, not the file.
            None if answer.response.status().is_redirection() => None,
            None => answer.header("content-length"),
            linked => linked,
        };
        Ok(Remote {
            file,
            commit: commit.to_string(),
            etag: etag.to_string(),
            bytes: bytes.and_then(|bytes| bytes.parse().ok()),
        })
    }

    /// Puts a file into the snapshot of its commit, from the cache's blobs or from the hub.
    pub(super) fn fetch(
        &self,
        remote: &Remote<'_>,
        mut meter: Option<&mut Meter<'_>>,
    ) -> Result<(), Failure> {
        let blob = self.cache.blob(&remote.etag);
        if !is_whole(&blob, remote) {
            let path = self.cache.lock(&remote.etag);
            let lock =
                lock::acquire(&path, remote.file, self.events).map_err(cannot_write(&path))?;
            // The process that held the lock may have finished the file during the wait.
            if !is_whole(&blob, remote) {
                let name = match &lock {
                    Some(_) => format!("{}.incomplete", remote.etag),
                    // Without a lock, every process has a partial file of its own.
                    None => format!("{}.{}.incomplete", remote.etag, std::process::id()),
                };
                let mut partial = Partial::open(self.cache.blob(&name))?;
                self.download(remote, &mut partial, meter.as_deref_mut())?;
                partial.publish(&blob)?;
            }
        }
        self.cache.link(&remote.commit, remote.file, &remote.etag)?;
        if let Some(meter) = meter {
            let stored = fs::metadata(&blob).map_or(0, |data| data.len());
            meter.add(remote.bytes.unwrap_or(stored));
        }
        Ok(())
    }

    /// Downloads until the file is whole and its hash is right.
    fn download(
        &self,
        remote: &Remote<'_>,
        partial: &mut Partial,
        mut meter: Option<&mut Meter<'_>>,
    ) -> Result<(), Failure> {
        let mut was_damaged = false;
        Ok(self.hub.with_retries(self.events, || {
            self.continue_download(remote, partial, meter.as_deref_mut())?;
            let found = partial.sha256();
            let Some(expected) = remote.sha256().filter(|expected| *expected != found) else {
                return Ok(());
            };
            partial.keep(0)?;
            let named = self.repo.named(Some(remote.file));
            let failure = Failure::new(format!("{named} arrived damaged: its hash is wrong"))
                .detail(format!("SHA-256 {found}, the hub says {expected}"))
                .hint("check HF_ENDPOINT and the proxy; the damaged file was removed");
            // The first time, an old partial file may be the cause; the second time, the hub is.
            if std::mem::replace(&mut was_damaged, true) {
                return Err(failure.into());
            }
            Err(RequestError::later(failure))
        })?)
    }

    /// Sends a request for the missing bytes and appends them.
    fn continue_download(
        &self,
        remote: &Remote<'_>,
        partial: &mut Partial,
        mut meter: Option<&mut Meter<'_>>,
    ) -> Result<(), RequestError> {
        let (size, stored) = (remote.bytes, partial.stored()?);
        // Without a size, the end of the file is unknown, so an old part is useless.
        let is_usable = size.is_some_and(|size| stored <= size);
        let have = if is_usable { stored } else { 0 };
        if have > 0 && size == Some(have) {
            return Ok(partial.keep(have)?);
        }
        let mut request = HttpRequest::file(self.repo, &remote.commit, remote.file);
        if have > 0 {
            let headers = &mut request.headers;
            headers.push(("range", format!("bytes={have}-")));
            if remote.sha256().is_none() {
                headers.push(("if-range", format!("\"{}\"", remote.etag)));
            }
        }
        let answer = self.hub.send(&request)?;
        if answer.response.status() == 416 {
            partial.keep(0)?;
            let why = "the range we asked for is refused";
            return Err(RequestError::later(self.unfit(remote, &answer.origin, why)));
        }
        partial.keep(self.start_of(remote, have, &answer)?)?;
        let (origin, started) = (answer.origin, partial.length());
        let mut body = answer.response.into_body().into_reader();
        let mut buffer = vec![0; BUFFER];
        loop {
            let have = partial.length();
            if let Some(meter) = meter.as_deref_mut() {
                meter.at(have);
            }
            let missing = size.map(|size| size - have);
            let read = match body.read(&mut buffer) {
                Ok(0) if missing.is_none_or(|missing| missing == 0) => return Ok(()),
                Ok(0) => return Err(self.broken(remote, have, started, None)),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let error = ureq::Error::from(error);
                    let cause = unanswered(&self.hub.settings, &origin, &error).failure;
                    return Err(self.broken(remote, have, started, Some(cause)));
                }
            };
            if missing.is_some_and(|missing| read as u64 > missing) {
                partial.keep(0)?;
                let why = "more bytes arrive than the repository says";
                return Err(RequestError::later(self.unfit(remote, &origin, why)));
            }
            partial.append(&buffer[..read], missing)?;
        }
    }

    /// Returns the byte of the file at which an answer's body begins: `have` if the range was honoured, 0 for the whole file.
    fn start_of(&self, remote: &Remote<'_>, have: u64, answer: &Answer) -> Result<u64, Failure> {
        let encoding = answer.header("content-encoding").unwrap_or("identity");
        let is_part = answer.response.status() == 206;
        let why = match (answer.range(), remote.bytes) {
            _ if encoding != "identity" => {
                "it is packed although we asked for it as it is".to_string()
            }
            (None, _) => "a part without a usable Content-Range".to_string(),
            (Some((start, _)), _) if is_part && start != have => {
                format!("the part begins at {start}, we asked for {have}")
            }
            (Some((_, Some(total))), Some(expected)) if total != expected => {
                format!("{total} bytes are announced, the repository says {expected}")
            }
            (Some((start, _)), _) => return Ok(start),
        };
        Err(self.unfit(remote, &answer.origin, &why))
    }

    /// The failure for an answer that does not fit the file.
    fn unfit(&self, remote: &Remote<'_>, origin: &Origin, why: &str) -> Failure {
        let named = self.repo.named(Some(remote.file));
        Failure::new(format!("`{origin}` sends something other than {named}"))
            .detail(why)
            .hint(CHECK_ENDPOINT)
    }

    /// The failure for a body that ended too early.
    fn broken(
        &self,
        remote: &Remote<'_>,
        have: u64,
        started: u64,
        cause: Option<Failure>,
    ) -> RequestError {
        let named = self.repo.named(Some(remote.file));
        let of = remote.bytes.map(|bytes| format!(" of {}", ByteSize(bytes)));
        let mut failure = Failure::new(format!(
            "the download of {named} broke off after {}{}",
            ByteSize(have),
            of.unwrap_or_default()
        ))
        .hint("start again: the downloaded part is kept, and the rest is requested");
        failure.details.extend(cause.map(|cause| cause.message));
        let retry = if have >= started + PROGRESS { Retry::Progressed } else { Retry::Later };
        RequestError { failure, retry }
    }
}

/// Returns whether a blob exists with the size that the hub announced.
fn is_whole(blob: &Path, remote: &Remote<'_>) -> bool {
    fs::metadata(blob)
        .is_ok_and(|data| data.is_file() && remote.bytes.is_none_or(|bytes| bytes == data.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sha256_is_compared_with_the_content() {
        let remote = |etag: &str| Remote {
            file: "x",
            commit: "c0".to_string(),
            etag: etag.to_string(),
            bytes: None,
        };
        assert!(remote(&"0a".repeat(32)).sha256().is_some());
        for other in ["0a".repeat(20), "0A".repeat(32), "xy".repeat(32)] {
            assert_eq!(remote(&other).sha256(), None, "{other}");
        }
    }
}
