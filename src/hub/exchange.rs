//! A request to the hub, and its answer.

use ureq::Body;
use ureq::http::{HeaderMap, Response};

use super::id::HubRepo;
use super::settings::Origin;

/// A request below the endpoint.
#[derive(Debug)]
pub(super) struct HttpRequest<'a> {
    pub(super) repo: &'a HubRepo,
    /// A file of the repository; `None` for the list of files.
    pub(super) file: Option<&'a str>,
    /// Path and query.
    pub(super) path: String,
    /// `HEAD`: headers only, up to the redirect that describes the file.
    pub(super) is_head: bool,
    pub(super) headers: Vec<(&'static str, String)>,
}

impl<'a> HttpRequest<'a> {
    /// A request for a whole file at a commit or revision.
    pub(super) fn file(repo: &'a HubRepo, revision: &str, file: &'a str) -> Self {
        Self {
            repo,
            file: Some(file),
            path: repo.file_path(revision, file),
            is_head: false,
            headers: Vec::new(),
        }
    }
}

/// The answer to a request, after its redirects.
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    /// The server that answered.
    pub(super) origin: Origin,
    /// The first commit in the headers of the redirects and the answer.
    pub(super) commit: Option<String>,
}

impl Answer {
    /// A header as text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        header(self.response.headers(), name)
    }

    /// The first byte of the file in the body and the length of the file, if known; `None` for a part without a usable range.
    pub(super) fn range(&self) -> Option<(u64, Option<u64>)> {
        if self.response.status() == 206 {
            return content_range(self.header("content-range")?);
        }
        let length = self.header("content-length");
        Some((0, length.and_then(|bytes| bytes.parse().ok())))
    }
}

/// A header as text.
pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
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
        for wrong in ["bytes */10", "3-9/10", "bytes 3-9", "bytes x-9/10", "bytes 3-9/x"] {
            assert_eq!(content_range(wrong), None, "{wrong}");
        }
    }
}
