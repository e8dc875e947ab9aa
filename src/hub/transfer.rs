//! One file from the hub into the cache: asked after, resumed where it broke off, verified, and shown in its snapshot.
//!
//! What arrives is appended to `blobs/<etag>.incomplete`, the Python client's name for it, and renamed when it is whole. The
//! name is the content's own, so a partial file belongs to this content and no other: large files are named by their SHA-256,
//! which is compared at the end. The bytes themselves are fetched by `append`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::append::truncate;
use super::cache::{RepoCache, cannot_write};
use super::http::{Answer, Asked, Client, Request, Trouble};
use super::id::HubRepo;
use super::meter::Meter;
use super::{lock, refusal};
use crate::failure::Failure;
use crate::run::Events;

/// What the hub says of a file before it is downloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Remote {
    /// The content's name: a SHA-256 for large files, a git hash for small ones.
    pub(super) etag: String,
    pub(super) bytes: Option<u64>,
    pub(super) commit: Option<String>,
}

impl Remote {
    /// The SHA-256 of the content, where the hub names it by that.
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

impl Transfer<'_> {
    /// Asks what a file is at a commit or revision.
    ///
    /// # Errors
    /// Fails for everything the hub refuses, and when it does not name the content.
    pub(super) fn ask(&self, revision: &str, file: &str) -> Result<Remote> {
        self.client.patiently(self.events, || {
            let answer = self.client.send(&Request {
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
            // Another process may have finished it while we waited.
            if !is_whole(&blob, remote) {
                let mut partial = blob.clone().into_os_string();
                if lock.is_none() {
                    // Nobody else may write into ours.
                    partial.push(format!(".{}", std::process::id()));
                }
                partial.push(".incomplete");
                self.download(
                    commit,
                    file,
                    remote,
                    &PathBuf::from(partial),
                    meter.as_deref_mut(),
                )?;
            }
        }
        self.cache.link(commit, file, &remote.etag)?;
        if let Some(meter) = meter {
            let stored = fs::metadata(&blob).map_or(0, |data| data.len());
            meter.file_done(remote.bytes.unwrap_or(stored));
        }
        Ok(())
    }

    pub(super) fn asked<'b>(&'b self, file: &'b str) -> Asked<'b> {
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
                Failure::new(format!("`{}` does not answer as a hub does", answer.origin))
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

    /// Downloads until the file is whole; the blob appears at the end.
    fn download(
        &self,
        commit: &str,
        file: &str,
        remote: &Remote,
        partial: &Path,
        mut meter: Option<&mut Meter<'_>>,
    ) -> Result<()> {
        let mut store = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(partial)
            .map_err(|error| cannot_write(partial, &error))?;
        let mut was_other = false;
        self.client.patiently(self.events, || {
            let digest = self.append(
                commit,
                file,
                remote,
                &mut store,
                partial,
                meter.as_deref_mut(),
            )?;
            match remote.sha256() {
                Some(expected) if expected != digest => {
                    truncate(&mut store, partial)?;
                    let failure = self.other_content(file, expected, &digest);
                    // Once may be an old partial file; twice is what the hub has.
                    if was_other {
                        return Err(failure.into());
                    }
                    was_other = true;
                    Err(Trouble::passing(failure))
                }
                _ => Ok(()),
            }
        })?;
        let blob = self.cache.blob(&remote.etag);
        store
            .sync_all()
            .map_err(|error| cannot_write(partial, &error))?;
        fs::rename(partial, &blob).map_err(|error| cannot_write(&blob, &error))?;
        Ok(())
    }

    fn other_content(&self, file: &str, expected: &str, found: &str) -> Failure {
        Failure::new(format!(
            "{} arrived damaged: its hash is another one",
            refusal::what(self.asked(file))
        ))
        .detail(format!("SHA-256 {found}, the hub says {expected}"))
        .hint("check HF_ENDPOINT and the proxy; the damaged file was removed")
    }
}

/// Whether a blob is there with the size the hub says.
fn is_whole(blob: &Path, remote: &Remote) -> bool {
    fs::metadata(blob)
        .is_ok_and(|data| data.is_file() && remote.bytes.is_none_or(|bytes| bytes == data.len()))
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
}
