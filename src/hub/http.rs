//! One request to the hub: redirects followed by us, the token bound to its host, timeouts, and patience where it may pass.
//!
//! Redirects are followed here and not by the HTTP client, for three reasons. The token goes to the endpoint's own scheme, host
//! and port, and once a request has left them it travels without, even if it is sent back. What the hub says of a large file
//! stands in the headers of the redirect itself. And a redirect without a location, in a circle, or from https to http must
//! end in an error a person understands. Addresses are shown without their query, which may hold a signature.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use ureq::http::{HeaderMap, Response, Uri};
use ureq::{Agent, Body};

use super::id::HubRepo;
use super::refusal;
use super::settings::{Origin, Settings};
use crate::failure::Failure;
use crate::run::Events;

/// More redirects than this are a circle; the hub needs two.
const MAX_REDIRECTS: usize = 10;
/// A wait that is asked for is granted up to here: more is told, not slept through.
const MAX_WAIT: Duration = Duration::from_secs(300);
/// Our own waits grow up to here.
const MAX_DELAY: Duration = Duration::from_secs(30);
/// Tries after the first where nobody answers at all: without a network, waiting seldom helps.
const UNREACHABLE_RETRIES: u32 = 2;

/// Why a request did not succeed.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The same request may succeed later.
    Passing(Box<Passing>),
    /// It will not.
    Final(Box<Failure>),
}

/// Trouble that may pass.
#[derive(Debug)]
pub(super) struct Passing {
    pub(super) failure: Failure,
    /// How long the server asks to wait.
    pub(super) wait: Option<Duration>,
    /// Whether nobody answered at all.
    pub(super) is_unreachable: bool,
    /// Whether it came further than the time before: then tries are counted anew.
    pub(super) has_progressed: bool,
}

impl Trouble {
    pub(super) fn passing(failure: Failure) -> Self {
        Self::Passing(Box::new(Passing {
            failure,
            wait: None,
            is_unreachable: false,
            has_progressed: false,
        }))
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self::Final(Box::new(failure))
    }
}

/// What is asked for; refusals name it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) repo: &'a HubRepo,
    /// A file of it, or the list of its files.
    pub(super) file: Option<&'a str>,
}

/// A request below the endpoint.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) asked: Asked<'a>,
    /// Path and query.
    pub(super) path: String,
    /// Headers only: `HEAD`, which ends at the redirect that describes the file.
    pub(super) is_head: bool,
    pub(super) headers: Vec<(&'static str, String)>,
}

/// An answer that is no refusal: 2xx, 416, or the redirect that describes the file.
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    /// Who answered.
    pub(super) origin: Origin,
    /// The first commit that an answer on the way named.
    pub(super) commit: Option<String>,
}

impl Answer {
    /// A header as text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        header(self.response.headers(), name)
    }
}

pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
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
            // Sizes and ranges are those of the file, not of a packed form of it.
            .accept_encoding("identity")
            .timeout_resolve(Some(settings.silence))
            .timeout_connect(Some(settings.silence))
            .timeout_recv_response(Some(settings.silence))
            // Per read, not over the whole body: a shard may take hours as long as it flows.
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
    /// Fails with the last trouble.
    pub(super) fn patiently<T>(
        &self,
        events: &dyn Events,
        mut attempt: impl FnMut() -> Result<T, Trouble>,
    ) -> Result<T> {
        let mut failed = 0;
        loop {
            let trouble = match attempt() {
                Ok(answer) => return Ok(answer),
                Err(Trouble::Final(failure)) => return Err((*failure).into()),
                Err(Trouble::Passing(trouble)) => trouble,
            };
            if trouble.has_progressed {
                failed = 0;
            }
            failed += 1;
            let retries = if trouble.is_unreachable {
                self.settings.retries.min(UNREACHABLE_RETRIES)
            } else {
                self.settings.retries
            };
            let wait = trouble.wait.unwrap_or_else(|| self.delay(failed));
            if wait > MAX_WAIT {
                let asked = format!("it asks to wait {} s", wait.as_secs());
                return Err(trouble.failure.detail(asked).into());
            }
            if failed > retries {
                let times = if failed == 1 { "time" } else { "times" };
                let tried = format!("tried {failed} {times}");
                return Err(trouble.failure.detail(tried).into());
            }
            events.note(format!(
                "{}; trying again in {} s ({failed} of {retries})",
                trouble.failure.message,
                wait.as_secs_f64()
            ));
            sleep(wait);
        }
    }

    /// Doubles from the settings' delay.
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
    /// Trouble for everything but 2xx and 416.
    pub(super) fn send(&self, request: &Request<'_>) -> Result<Answer, Trouble> {
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
        request: &Request<'_>,
        uri: &Uri,
        origin: &Origin,
        is_home: bool,
    ) -> Result<Response<Body>, Trouble> {
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

/// An address without its query.
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

/// Where a redirect leads.
fn next(uri: &Uri, origin: &Origin, headers: &HeaderMap) -> Result<Uri, Trouble> {
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

/// A location as its address: absolute, without scheme, without host, or beside the page.
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
                Err(Trouble::Final(failure)) => failure.to_string(),
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
