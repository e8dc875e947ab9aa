//! The bytes of a file: one request for what is missing, appended to the partial file and hashed on the way.
//!
//! An answer is believed only as far as it fits: a part must begin where ours ends, the announced length must be the file's, and a
//! whole file in answer to a range means to begin anew. `If-Range` is sent for small files only, whose ETag is the address's own; a
//! large file comes from another host, whose ETag is another one and would make every resumed download begin anew.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::cache::{cannot_store, cannot_write};
use super::http::{Answer, Passing, Request, Trouble, header};
use super::meter::Meter;
use super::refusal;
use super::transfer::{Remote, Transfer};
use crate::bytes::{ByteSize, hex};
use crate::failure::Failure;

/// Bytes read at once.
const BUFFER: usize = 256 << 10;
/// A try that brought this much was worth it: tries are counted anew.
const PROGRESS: u64 = 1 << 20;

impl Transfer<'_> {
    /// One request for what is missing; the SHA-256 of the whole file when it is there.
    pub(super) fn append(
        &self,
        commit: &str,
        file: &str,
        remote: &Remote,
        store: &mut File,
        partial: &Path,
        mut meter: Option<&mut Meter<'_>>,
    ) -> Result<String, Trouble> {
        let cannot = |error: &io::Error, missing: Option<u64>| {
            cannot_store(partial, error, missing.map(ByteSize))
        };
        let mut have = store
            .metadata()
            .map_err(|error| cannot(&error, None))?
            .len();
        // Without a size nobody could tell where it ends.
        if remote.bytes.is_none_or(|bytes| have > bytes) {
            have = 0;
        }
        if have == 0 {
            truncate(store, partial)?;
        }
        let is_whole = have > 0 && remote.bytes == Some(have);
        let answer = if is_whole {
            None
        } else {
            let answer = self.request(commit, file, remote, have)?;
            if answer.response.status() == 416 {
                truncate(store, partial)?;
                return Err(Trouble::passing(self.unfit(
                    file,
                    &answer,
                    "the range we asked for is refused",
                )));
            }
            have = self.starts_at(file, remote, have, &answer)?;
            if have == 0 {
                truncate(store, partial)?;
            }
            Some(answer)
        };
        let mut hash = Sha256::new();
        hash_beginning(store, have, &mut hash).map_err(|error| cannot(&error, None))?;
        if let Some(meter) = meter.as_deref_mut() {
            meter.at(have);
        }
        let Some(answer) = answer else {
            return Ok(hex(&hash.finalize()));
        };
        let (origin, started) = (answer.origin, have);
        let mut body = answer.response.into_body().into_reader();
        let mut buffer = vec![0; BUFFER];
        loop {
            let missing = remote.bytes.map(|bytes| bytes - have);
            let read = match body.read(&mut buffer) {
                Ok(0) if missing.is_none_or(|missing| missing == 0) => break,
                Ok(0) => {
                    return Err(self.broken(file, have, started, remote, None));
                }
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let cause = refusal::unanswered(
                        self.client.settings(),
                        &origin,
                        &ureq::Error::from(error),
                    );
                    return Err(self.broken(file, have, started, remote, Some(cause)));
                }
            };
            if missing.is_some_and(|missing| read as u64 > missing) {
                truncate(store, partial)?;
                let expected = ByteSize(remote.bytes.unwrap_or_default());
                return Err(Trouble::passing(
                    Failure::new(format!(
                        "more of {} arrives than its {expected}",
                        refusal::what(self.asked(file))
                    ))
                    .hint("check HF_ENDPOINT and the proxy; or name a local folder"),
                ));
            }
            store
                .write_all(&buffer[..read])
                .map_err(|error| cannot(&error, missing))?;
            hash.update(&buffer[..read]);
            have += read as u64;
            if let Some(meter) = meter.as_deref_mut() {
                meter.at(have);
            }
        }
        Ok(hex(&hash.finalize()))
    }

    fn request(
        &self,
        commit: &str,
        file: &str,
        remote: &Remote,
        have: u64,
    ) -> Result<Answer, Trouble> {
        let mut headers = Vec::new();
        if have > 0 {
            headers.push(("range", format!("bytes={have}-")));
            if remote.sha256().is_none() {
                headers.push(("if-range", format!("\"{}\"", remote.etag)));
            }
        }
        self.client.send(&Request {
            asked: self.asked(file),
            path: self.repo.file_path(commit, file),
            is_head: false,
            headers,
        })
    }

    /// Where the body of an answer begins in the file: `have` where the range was honoured, 0 where the whole file comes.
    fn starts_at(
        &self,
        file: &str,
        remote: &Remote,
        have: u64,
        answer: &Answer,
    ) -> Result<u64, Trouble> {
        let headers = answer.response.headers();
        if header(headers, "content-encoding").is_some_and(|encoding| encoding != "identity") {
            return Err(self
                .unfit(
                    file,
                    answer,
                    "it is packed although we asked for it as it is",
                )
                .into());
        }
        let (start, total) = if answer.response.status() == 206 {
            let range = header(headers, "content-range").and_then(content_range);
            let Some((start, total)) = range else {
                return Err(self
                    .unfit(file, answer, "a part without a usable Content-Range")
                    .into());
            };
            if start != have {
                let why = format!("the part begins at {start}, we asked for {have}");
                return Err(self.unfit(file, answer, &why).into());
            }
            (start, total)
        } else {
            let length = header(headers, "content-length");
            (0, length.and_then(|bytes| bytes.parse().ok()))
        };
        match (remote.bytes, total) {
            (Some(expected), Some(total)) if expected != total => {
                let why = format!("{total} bytes are announced, the repository says {expected}");
                Err(self.unfit(file, answer, &why).into())
            }
            _ => Ok(start),
        }
    }

    /// The failure for an answer that does not fit the file.
    fn unfit(&self, file: &str, answer: &Answer, why: &str) -> Failure {
        Failure::new(format!(
            "what `{}` sends is not {}",
            answer.origin,
            refusal::what(self.asked(file))
        ))
        .detail(why)
        .hint("check HF_ENDPOINT and the proxy; or name a local folder")
    }

    /// Trouble for a body that ended too early.
    fn broken(
        &self,
        file: &str,
        have: u64,
        started: u64,
        remote: &Remote,
        cause: Option<Trouble>,
    ) -> Trouble {
        let of = remote
            .bytes
            .map_or(String::new(), |bytes| format!(" of {}", ByteSize(bytes)));
        let mut failure = Failure::new(format!(
            "the download of {} broke off after {}{of}",
            refusal::what(self.asked(file)),
            ByteSize(have)
        ))
        .hint("start again: what was downloaded is kept, and the rest is asked for");
        let cause = match cause {
            Some(Trouble::Passing(passing)) => Some(passing.failure),
            Some(Trouble::Final(failure)) => Some(*failure),
            None => None,
        };
        if let Some(cause) = cause {
            failure = failure.detail(cause.message);
        }
        Trouble::Passing(Box::new(Passing {
            failure,
            wait: None,
            is_unreachable: false,
            has_progressed: have >= started + PROGRESS,
        }))
    }
}

/// Empties the partial file.
pub(super) fn truncate(store: &mut File, partial: &Path) -> Result<(), Failure> {
    let emptied = store
        .metadata()
        // Not asked of what has no length.
        .and_then(|data| {
            if data.len() == 0 {
                Ok(())
            } else {
                store.set_len(0)
            }
        })
        .and_then(|()| store.seek(SeekFrom::Start(0)));
    emptied
        .map(drop)
        .map_err(|error| cannot_write(partial, &error))
}

/// Hashes the first `have` bytes and leaves the file's position behind them; anything after is cut off.
fn hash_beginning(store: &mut File, have: u64, hash: &mut Sha256) -> io::Result<()> {
    store.seek(SeekFrom::Start(0))?;
    let mut buffer = vec![0; BUFFER];
    let mut left = have;
    while left > 0 {
        let most = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = store.read(&mut buffer[..most])?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        hash.update(&buffer[..read]);
        left -= read as u64;
    }
    Ok(())
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
