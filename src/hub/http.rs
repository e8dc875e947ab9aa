//! Requests to the hub: redirects, a token bound to its host, timeouts, and retries.
//!
//! Redirects are followed here and not by the HTTP client, for three reasons. First, the token is sent only to the scheme, host and
//! port of the endpoint; after a redirect elsewhere it is not sent again, even if a redirect leads back. Second, the headers of the
//! redirect describe a large file. Third, a redirect without a location, in a circle, or from https to http needs a clear error.
//! Addresses are printed without their query, which may hold a signature.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use ureq::http::{HeaderMap, Response, Uri};
use ureq::{Agent, Body};

use super::refusal::{self, Asked, RequestError, header};
use super::settings::{Origin, Settings};
use crate::failure::Failure;
use crate::run::Events;

/// The most redirects of a request; the hub needs two.
const MAX_REDIRECTS: usize = 10;
/// The longest wait that a server may ask for; a longer one ends in an error.
const MAX_WAIT: Duration = Duration::from_secs(300);
/// The longest wait between two tries.
const MAX_DELAY: Duration = Duration::from_secs(30);
/// Retries without any answer: without a network, waiting seldom helps.
const UNREACHABLE_RETRIES: u32 = 2;

/// A request below the endpoint.
#[derive(Debug)]
pub(super) struct HttpRequest<'a> {
    pub(super) asked: Asked<'a>,
    /// Path and query.
    pub(super) path: String,
    /// `HEAD`: headers only, up to the redirect that describes the file.
    pub(super) is_head: bool,
    pub(super) headers: Vec<(&'static str, String)>,
}

/// A usable answer: 2xx, 416, or the redirect that describes the file.
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
}

/// The client: an HTTP agent and the settings.
pub(super) struct Client {
    agent: Agent,
    settings: Settings,
}

impl Client {
    pub(super) fn new(settings: Settings) -> Self {
        let config = Agent::config_builder()
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("prune/", env!("CARGO_PKG_VERSION")))
            // Sizes and ranges must count the file's own bytes, not compressed ones.
            .accept_encoding("identity")
            .timeout_resolve(Some(settings.silence))
            .timeout_connect(Some(settings.silence))
            .timeout_recv_response(Some(settings.silence))
            // The limit is per read: a whole shard may take hours.
            .timeout_per_read(Some(settings.silence))
            .timeout_per_write(Some(settings.silence));
        Self {
            agent: config.build().into(),
            settings,
        }
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Calls `attempt` until it succeeds, fails for good, or has failed too often in a row.
    ///
    /// # Errors
    /// Fails with the last failure.
    pub(super) fn with_retries<T>(
        &self,
        events: &dyn Events,
        mut attempt: impl FnMut() -> Result<T, RequestError>,
    ) -> Result<T> {
        let mut failed = 0;
        loop {
            let error = match attempt() {
                Ok(answer) => return Ok(answer),
                Err(RequestError::Permanent(failure)) => return Err((*failure).into()),
                Err(RequestError::Transient(error)) => error,
            };
            if error.has_progressed {
                failed = 0;
            }
            failed += 1;
            let retries = if error.is_unreachable {
                self.settings.retries.min(UNREACHABLE_RETRIES)
            } else {
                self.settings.retries
            };
            let wait = error.wait.unwrap_or_else(|| self.delay(failed));
            if wait > MAX_WAIT {
                let asked = format!("it asks to wait {} s", wait.as_secs());
                return Err(error.failure.detail(asked).into());
            }
            if failed > retries {
                let times = if failed == 1 { "time" } else { "times" };
                let tried = format!("tried {failed} {times}");
                return Err(error.failure.detail(tried).into());
            }
            events.note(format!(
                "{}; trying again in {} s ({failed} of {retries})",
                error.failure.message,
                wait.as_secs_f64()
            ));
            sleep(wait);
        }
    }

    /// The wait after some failed tries; it doubles each time.
    fn delay(&self, failed: u32) -> Duration {
        let factor = 1u32 << (failed - 1).min(16);
        self.settings
            .retry_delay
            .saturating_mul(factor)
            .min(MAX_DELAY)
    }

    /// Sends a request and follows its redirects.
    ///
    /// # Errors
    /// Fails for every answer except 2xx, 416, and a redirect that describes the file.
    pub(super) fn send(&self, request: &HttpRequest<'_>) -> Result<Answer, RequestError> {
        let address = format!("{}{}", self.settings.endpoint, request.path);
        let mut uri: Uri = address.parse().map_err(|_| {
            Failure::new(format!("`{address}` is not an address")).hint("check HF_ENDPOINT")
        })?;
        let (mut is_home, mut commit) = (true, None);
        for _ in 0..=MAX_REDIRECTS {
            let origin = Origin::of(&uri).ok_or_else(|| {
                Failure::new(format!("`{}` is neither http nor https", shown(&uri)))
            })?;
            is_home &= origin == self.settings.origin;
            let response = self.call(request, &uri, &origin, is_home)?;
            let headers = response.headers();
            commit = commit.or_else(|| header(headers, "x-repo-commit").map(str::to_string));
            let status = response.status();
            let is_redirect = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
            let describes_file = request.is_head && headers.contains_key("x-linked-etag");
            if is_redirect && !describes_file {
                uri = next(&uri, &origin, headers)?;
                continue;
            }
            if status.is_success() || status == 416 || is_redirect {
                return Ok(Answer {
                    response,
                    origin,
                    commit,
                });
            }
            return Err(refusal::refused(
                &self.settings,
                request.asked,
                &response,
                &origin,
                is_home,
            ));
        }
        Err(Failure::new(format!(
            "`{}` redirects in a circle: {MAX_REDIRECTS} redirects and no answer",
            self.settings.origin
        ))
        .detail(format!("the last one led to `{}`", shown(&uri)))
        .hint("check HF_ENDPOINT and the proxy; or name a local folder")
        .into())
    }

    fn call(
        &self,
        request: &HttpRequest<'_>,
        uri: &Uri,
        origin: &Origin,
        is_home: bool,
    ) -> Result<Response<Body>, RequestError> {
        let mut builder = if request.is_head {
            self.agent.head(uri)
        } else {
            self.agent.get(uri)
        };
        for (name, value) in &request.headers {
            builder = builder.header(*name, value);
        }
        if let Some(token) = self.settings.token.as_ref().filter(|_| is_home) {
            builder = builder.header("authorization", token.bearer());
        }
        builder
            .call()
            .map_err(|error| refusal::unanswered(&self.settings, origin, &error))
    }
}

/// Returns an address without its query.
fn shown(uri: &Uri) -> String {
    let host = uri.host().unwrap_or_default();
    let port = uri
        .port_u16()
        .map_or(String::new(), |port| format!(":{port}"));
    format!(
        "{}://{host}{port}{}",
        uri.scheme_str().unwrap_or_default(),
        uri.path()
    )
}

/// The address to which a redirect leads.
fn next(uri: &Uri, origin: &Origin, headers: &HeaderMap) -> Result<Uri, RequestError> {
    let wrong = |why: &str| {
        Failure::new(format!("`{origin}` redirects {why}"))
            .detail(format!("asked for `{}`", shown(uri)))
            .hint("check HF_ENDPOINT and the proxy; or name a local folder")
    };
    let location = headers
        .get("location")
        .ok_or_else(|| wrong("without saying where to"))?;
    let location = location
        .to_str()
        .map_err(|_| wrong("to something that is no address"))?;
    let next = joined(uri, location).ok_or_else(|| wrong("to something that is no address"))?;
    let target =
        Origin::of(&next).ok_or_else(|| wrong("to something that is neither http nor https"))?;
    if origin.is_https && !target.is_https {
        return Err(wrong(&format!(
            "from https to plain http (`{target}`), which is refused"
        ))
        .into());
    }
    Ok(next)
}

/// The address of a location, which may be absolute or relative to `uri`.
fn joined(uri: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next()?;
    let (scheme, authority) = (uri.scheme_str()?, uri.authority()?);
    let address = if location.contains("://") && !location.starts_with(['/', '?']) {
        location.to_string()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else if location.starts_with('?') {
        format!("{scheme}://{authority}{}{location}", uri.path())
    } else if location.is_empty() {
        return None;
    } else {
        let (folder, _) = uri.path().rsplit_once('/')?;
        format!("{scheme}://{authority}{folder}/{location}")
    };
    address.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_may_be_absolute_or_relative() {
        let base: Uri = "https://hub/a/b?x=1".parse().expect("an address");
        for (location, expected) in [
            ("https://cdn/c?sig=://", "https://cdn/c?sig=://"),
            ("//cdn/c", "https://cdn/c"),
            ("/c?u=https://x", "https://hub/c?u=https://x"),
            ("c", "https://hub/a/c"),
            ("?y=2", "https://hub/a/b?y=2"),
            ("/c#part", "https://hub/c"),
        ] {
            let found = joined(&base, location).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), Some(expected), "{location}");
        }
        assert!(joined(&base, "").is_none() && joined(&base, "http://a b").is_none());
    }

    #[test]
    fn a_redirect_from_https_to_http_is_refused_and_its_signature_is_not_shown() {
        let uri: Uri = "https://hub/a?signature=secret"
            .parse()
            .expect("an address");
        let origin = Origin::of(&uri).expect("an origin");
        let message = |location: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("location", location.parse().expect("a header"));
            match next(&uri, &origin, &headers) {
                Err(RequestError::Permanent(failure)) => failure.to_string(),
                other => panic!("{other:?}"),
            }
        };
        let error = message("http://hub/a?signature=secret");
        assert!(
            error.contains("from https to plain http (`hub`)"),
            "{error}"
        );
        assert!(!error.contains("secret"), "{error}");
        assert!(message("ftp://hub/a").contains("neither http nor https"));
    }
}
