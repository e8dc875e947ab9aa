//! One file from the hub to the cache: its description, its bytes from where an earlier download stopped, and its hash.
//!
//! A partial file is named by the content's own name, so it belongs to this content and to no other. Large files are named by their
//! SHA-256, which is compared at the end. An answer is used only if it fits: a part must begin where ours ends, the announced length
//! must be the file's, and a whole file in answer to a range starts the download over. `If-Range` is sent for small files only. Their
//! ETag is the address's own; a large file comes from another host with another ETag, which would restart every download.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::cache::{RepoCache, cannot_write};
use super::http::{Answer, Client, HttpRequest};
use super::id::HubRepo;
use super::partial::{BUFFER, Partial};
use super::refusal::{Asked, RequestError, Transient, header};
use super::{lock, refusal};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::{Events, Meter};

/// A try that brought this many bytes resets the number of failed tries.
const PROGRESS: u64 = 1 << 20;

/// The hub's description of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Remote {
    /// The content's name: a SHA-256 for large files, a git hash for small ones.
    pub(super) etag: String,
    pub(super) bytes: Option<u64>,
    pub(super) commit: Option<String>,
}

impl Remote {
    /// The SHA-256 of the content, where it is the content's name.
    pub(super) fn sha256(&self) -> Option<&str> {
        let is_hash = self.etag.len() == 64
            && self
                .etag
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        is_hash.then_some(self.etag.as_str())
    }
}

/// Downloads of one repository.
pub(super) struct Transfer<'a> {
    pub(super) client: &'a Client,
    pub(super) repo: &'a HubRepo,
    pub(super) cache: &'a RepoCache,
    pub(super) events: &'a dyn Events,
}

/// A file at a commit, as the hub describes it.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    commit: &'a str,
    file: &'a str,
    remote: &'a Remote,
}

impl Transfer<'_> {
    /// Puts a file into the snapshot of a commit, unless it is there.
    ///
    /// # Errors
    /// As [`Transfer::describe`] and [`Transfer::fetch`].
    pub(super) fn ensure(
        &self,
        commit: &str,
        file: &str,
        meter: Option<&mut Meter<'_>>,
    ) -> Result<()> {
        if self.cache.has(commit, file) {
            return Ok(());
        }
        let remote = self.describe(commit, file)?;
        self.fetch(commit, file, &remote, meter)
    }

    /// Asks the hub for the description of a file at a commit or revision.
    ///
    /// # Errors
    /// Fails for everything the hub refuses, and when it does not name the content.
    pub(super) fn describe(&self, revision: &str, file: &str) -> Result<Remote> {
        self.client.with_retries(self.events, || {
            let answer = self.client.send(&HttpRequest {
                asked: self.asked(file),
                path: self.repo.file_path(revision, file),
                is_head: true,
                headers: Vec::new(),
            })?;
            Ok(self.remote(&answer, file)?)
        })
    }

    /// Puts a file into the snapshot of a commit, from the cache's blobs or from the hub.
    ///
    /// # Errors
    /// Fails when the hub refuses, the transfer breaks off too often, or the disk is full.
    pub(super) fn fetch(
        &self,
        commit: &str,
        file: &str,
        remote: &Remote,
        mut meter: Option<&mut Meter<'_>>,
    ) -> Result<()> {
        let blob = self.cache.blob(&remote.etag);
        if !is_whole(&blob, remote) {
            self.cache.create()?;
            let path = self.cache.lock(&remote.etag);
            let lock = lock::acquire(&path, file, self.events)
                .map_err(|error| cannot_write(&path, &error))?;
            // Another process may have finished it during the wait.
            if !is_whole(&blob, remote) {
                let mut partial = blob.clone().into_os_string();
                if lock.is_none() {
                    // Without a lock, every process has a partial file of its own.
                    partial.push(format!(".{}", std::process::id()));
                }
                partial.push(".incomplete");
                let wanted = Wanted {
                    commit,
                    file,
                    remote,
                };
                let partial = Partial::open(PathBuf::from(partial))?;
                self.download(wanted, partial, meter.as_deref_mut())?
                    .publish(&blob)?;
            }
        }
        self.cache.link(commit, file, &remote.etag)?;
        if let Some(meter) = meter {
            let stored = fs::metadata(&blob).map_or(0, |data| data.len());
            meter.add(remote.bytes.unwrap_or(stored));
        }
        Ok(())
    }

    fn asked<'b>(&'b self, file: &'b str) -> Asked<'b> {
        Asked {
            repo: self.repo,
            file: Some(file),
        }
    }

    /// Reads the headers that describe a file.
    fn remote(&self, answer: &Answer, file: &str) -> Result<Remote, Failure> {
        let etag = answer.header("x-linked-etag").or(answer.header("etag"));
        let etag = etag.unwrap_or_default().trim_start_matches("W/");
        let etag = etag.trim_matches('"').to_string();
        let is_name = (1..=128).contains(&etag.len())
            && !etag.starts_with('.')
            && etag
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if !is_name {
            return Err(
                Failure::new(format!("`{}` does not answer like a hub", answer.origin))
                    .detail(format!(
                        "{}: no usable ETag",
                        refusal::what(self.asked(file))
                    ))
                    .hint("check HF_ENDPOINT; a login page of the network may answer in its place"),
            );
        }
        let linked = answer.header("x-linked-size");
        // A redirect's own length is that of its body.
        let own = || {
            let is_file = answer.response.status().is_success();
            answer.header("content-length").filter(|_| is_file)
        };
        Ok(Remote {
            etag,
            bytes: linked.or_else(own).and_then(|bytes| bytes.parse().ok()),
            commit: answer.commit.clone(),
        })
    }

    /// Downloads until the file is whole and its hash is right.
    fn download(
        &self,
        wanted: Wanted<'_>,
        mut partial: Partial,
        mut meter: Option<&mut Meter<'_>>,
    ) -> Result<Partial> {
        let mut was_damaged = false;
        self.client.with_retries(self.events, || {
            self.continue_download(wanted, &mut partial, meter.as_deref_mut())?;
            let digest = partial.sha256();
            match wanted.remote.sha256() {
                Some(expected) if expected != digest => {
                    partial.keep(0)?;
                    let failure = self.damaged(wanted.file, expected, &digest);
                    // The first time, an old partial file may be the cause; the second time, the hub is.
                    if was_damaged {
                        return Err(failure.into());
                    }
                    was_damaged = true;
                    Err(RequestError::transient(failure))
                }
                _ => Ok(()),
            }
        })?;
        Ok(partial)
    }

    /// Sends one request for the missing bytes and appends them.
    fn continue_download(
        &self,
        wanted: Wanted<'_>,
        partial: &mut Partial,
        mut meter: Option<&mut Meter<'_>>,
    ) -> Result<(), RequestError> {
        let (file, size) = (wanted.file, wanted.remote.bytes);
        // Without a size, the end of the file is unknown, so an old part is useless.
        let stored = partial.stored()?;
        let is_usable = size.is_some_and(|size| stored <= size);
        let have = if is_usable { stored } else { 0 };
        if have > 0 && size == Some(have) {
            return Ok(partial.keep(have)?);
        }
        let answer = self.request(wanted, have)?;
        if answer.response.status() == 416 {
            partial.keep(0)?;
            let why = "the range we asked for is refused";
            return Err(RequestError::transient(self.unfit(file, &answer, why)));
        }
        partial.keep(self.start_of(wanted, have, &answer)?)?;
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
                Ok(0) => return Err(self.broken(wanted, have, started, None)),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let error = ureq::Error::from(error);
                    let cause = refusal::unanswered(self.client.settings(), &origin, &error);
                    return Err(self.broken(wanted, have, started, Some(cause)));
                }
            };
            if missing.is_some_and(|missing| read as u64 > missing) {
                partial.keep(0)?;
                let failure = Failure::new(format!(
                    "more bytes of {} arrive than its {}",
                    refusal::what(self.asked(file)),
                    ByteSize(size.unwrap_or_default())
                ));
                return Err(RequestError::transient(failure.hint(CHECK_ENDPOINT)));
            }
            partial.append(&buffer[..read], missing)?;
        }
    }

    fn request(&self, wanted: Wanted<'_>, have: u64) -> Result<Answer, RequestError> {
        let mut headers = Vec::new();
        if have > 0 {
            headers.push(("range", format!("bytes={have}-")));
            if wanted.remote.sha256().is_none() {
                headers.push(("if-range", format!("\"{}\"", wanted.remote.etag)));
            }
        }
        self.client.send(&HttpRequest {
            asked: self.asked(wanted.file),
            path: self.repo.file_path(wanted.commit, wanted.file),
            is_head: false,
            headers,
        })
    }

    /// Returns the byte of the file at which an answer's body begins: `have` if the range was honoured, 0 for the whole file.
    fn start_of(
        &self,
        wanted: Wanted<'_>,
        have: u64,
        answer: &Answer,
    ) -> Result<u64, RequestError> {
        let unfit = |why: &str| Err(self.unfit(wanted.file, answer, why).into());
        let headers = answer.response.headers();
        if header(headers, "content-encoding").is_some_and(|encoding| encoding != "identity") {
            return unfit("it is packed although we asked for it as it is");
        }
        let (start, total) = if answer.response.status() == 206 {
            match header(headers, "content-range").and_then(content_range) {
                None => return unfit("a part without a usable Content-Range"),
                Some((start, _)) if start != have => {
                    return unfit(&format!("the part begins at {start}, we asked for {have}"));
                }
                Some(range) => range,
            }
        } else {
            let length = header(headers, "content-length");
            (0, length.and_then(|bytes| bytes.parse().ok()))
        };
        match (wanted.remote.bytes, total) {
            (Some(expected), Some(total)) if expected != total => unfit(&format!(
                "{total} bytes are announced, the repository says {expected}"
            )),
            _ => Ok(start),
        }
    }

    /// The failure for an answer that does not fit the file.
    fn unfit(&self, file: &str, answer: &Answer, why: &str) -> Failure {
        Failure::new(format!(
            "`{}` sends something other than {}",
            answer.origin,
            refusal::what(self.asked(file))
        ))
        .detail(why)
        .hint(CHECK_ENDPOINT)
    }

    /// The failure for a body that ended too early.
    fn broken(
        &self,
        wanted: Wanted<'_>,
        have: u64,
        started: u64,
        cause: Option<RequestError>,
    ) -> RequestError {
        let of = wanted
            .remote
            .bytes
            .map_or(String::new(), |bytes| format!(" of {}", ByteSize(bytes)));
        let mut failure = Failure::new(format!(
            "the download of {} broke off after {}{of}",
            refusal::what(self.asked(wanted.file)),
            ByteSize(have)
        ))
        .hint("start again: the downloaded part is kept, and the rest is requested");
        if let Some(cause) = cause {
            failure = failure.detail(match cause {
                RequestError::Transient(transient) => transient.failure.message,
                RequestError::Permanent(failure) => failure.message,
            });
        }
        RequestError::Transient(Box::new(Transient {
            failure,
            wait: None,
            is_unreachable: false,
            has_progressed: have >= started + PROGRESS,
        }))
    }

    fn damaged(&self, file: &str, expected: &str, found: &str) -> Failure {
        Failure::new(format!(
            "{} arrived damaged: its hash is wrong",
            refusal::what(self.asked(file))
        ))
        .detail(format!("SHA-256 {found}, the hub says {expected}"))
        .hint("check HF_ENDPOINT and the proxy; the damaged file was removed")
    }
}

const CHECK_ENDPOINT: &str = "check HF_ENDPOINT and the proxy; or name a local folder";

/// Returns whether a blob exists with the size that the hub announced.
fn is_whole(blob: &Path, remote: &Remote) -> bool {
    fs::metadata(blob)
        .is_ok_and(|data| data.is_file() && remote.bytes.is_none_or(|bytes| bytes == data.len()))
}

/// `bytes 3-9/10` → (3, Some(10)); the total may be `*`.
fn content_range(value: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    let total = match total.trim() {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    Some((start.trim().parse().ok()?, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sha256_is_compared_with_the_content() {
        let remote = |etag: &str| Remote {
            etag: etag.to_string(),
            bytes: None,
            commit: None,
        };
        assert!(remote(&"0a".repeat(32)).sha256().is_some());
        for other in ["0a".repeat(20), "0A".repeat(32), "xy".repeat(32)] {
            assert_eq!(remote(&other).sha256(), None, "{other}");
        }
    }

    #[test]
    fn a_content_range_has_a_start_and_perhaps_a_total() {
        assert_eq!(content_range("bytes 3-9/10"), Some((3, Some(10))));
        assert_eq!(content_range("bytes 0-0/*"), Some((0, None)));
        for wrong in [
            "bytes */10",
            "3-9/10",
            "bytes 3-9",
            "bytes x-9/10",
            "bytes 3-9/x",
        ] {
            assert_eq!(content_range(wrong), None, "{wrong}");
        }
    }
}
