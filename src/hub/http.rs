//! Requests to the hub: redirects, a token bound to its host, timeouts, and retries.
//!
//! Redirects are followed here and not by the HTTP client, for three reasons. First, the token is sent only to the scheme, host and
//! port of the endpoint; after a redirect elsewhere it is not sent again, even if a redirect leads back. Second, the headers of the
//! redirect describe a large file. Third, a redirect without a location, in a circle, or from https to http needs a clear error.
//! Addresses are printed without their query, which may hold a signature.

use std::io::Read;
use std::thread::sleep;
use std::time::Duration;

use ureq::Agent;
use ureq::http::{HeaderMap, Uri};
use ureq::tls::TlsConfig;

use super::exchange::{Answer, HttpRequest, header};
use super::refusal::{CHECK_ENDPOINT, RequestError, Retry, refused, unanswered};
use super::settings::{HubSettings, Origin};
use crate::failure::Failure;
use crate::run::Events;

/// The most redirects of a request; the hub needs two.
const MAX_REDIRECTS: usize = 10;
/// The longest wait that a server may ask for; a longer wait ends in an error.
const MAX_WAIT: Duration = Duration::from_secs(300);
/// The longest wait between two tries.
const MAX_DELAY: Duration = Duration::from_secs(30);
/// Retries without any answer: without a network, waiting seldom helps.
const UNREACHABLE_RETRIES: u32 = 2;

/// The hub, or its cache when offline.
pub struct Hub {
    agent: Agent,
    pub(super) settings: HubSettings,
}

/// The failure of a request after all tries.
#[derive(Debug)]
pub(super) struct Unanswered {
    pub(super) failure: Failure,
    /// No server was reached: there is no network, or none to the hub.
    pub(super) is_unreachable: bool,
}

impl From<Failure> for Unanswered {
    fn from(failure: Failure) -> Self {
        Self { failure, is_unreachable: false }
    }
}

impl From<Unanswered> for Failure {
    fn from(unanswered: Unanswered) -> Self {
        unanswered.failure
    }
}

impl From<Unanswered> for anyhow::Error {
    fn from(unanswered: Unanswered) -> Self {
        unanswered.failure.into()
    }
}

impl Hub {
    /// A hub with these settings. Nothing is connected yet.
    pub fn new(settings: HubSettings) -> Self {
        let silence = Some(settings.silence);
        let tls = TlsConfig::builder().root_certs(settings.trusted.roots.clone());
        let config = Agent::config_builder()
            .tls_config(tls.build())
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("prune/", env!("CARGO_PKG_VERSION")))
            // Sizes and ranges must count the file's own bytes, not compressed bytes.
            .accept_encoding("identity")
            .timeout_resolve(silence)
            .timeout_connect(silence)
            .timeout_recv_response(silence)
            // The limit is per read: a whole shard may take hours.
            .timeout_per_read(silence)
            .timeout_per_write(silence);
        let agent = config.build().into();
        Self { agent, settings }
    }

    /// Calls `attempt` until it succeeds, fails for good, or has failed too often in a row.
    pub(super) fn with_retries<T>(
        &self,
        events: &dyn Events,
        mut attempt: impl FnMut() -> Result<T, RequestError>,
    ) -> Result<T, Unanswered> {
        let mut failed = 0;
        loop {
            let RequestError { failure, retry } = match attempt() {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let mut retries = self.settings.retries;
            match retry {
                Retry::Never => return Err(failure.into()),
                Retry::Unreachable => retries = retries.min(UNREACHABLE_RETRIES),
                Retry::Progressed => failed = 0,
                Retry::Later | Retry::After(_) => {}
            }
            failed += 1;
            let wait = match retry {
                Retry::After(wait) => wait,
                _ => self.delay(failed),
            };
            if wait > MAX_WAIT {
                return Err(failure.detail(format!("it asks to wait {} s", wait.as_secs())).into());
            }
            if failed > retries {
                let times = if failed == 1 { "time" } else { "times" };
                return Err(Unanswered {
                    failure: failure.detail(format!("tried {failed} {times}")),
                    is_unreachable: retry == Retry::Unreachable,
                });
            }
            events.note(format!(
                "{}; trying again in {} s ({failed} of {retries})",
                failure.message,
                wait.as_secs_f64()
            ));
            sleep(wait);
        }
    }

    /// The wait after some failed tries; it doubles each time.
    fn delay(&self, failed: u32) -> Duration {
        let factor = 1u32 << (failed - 1).min(16);
        let delay = self.settings.retry_delay.saturating_mul(factor);
        delay.min(MAX_DELAY)
    }

    /// Sends a request and follows its redirects. Fails for every answer except 2xx, 416, and a redirect that describes the file.
    pub(super) fn send(&self, request: &HttpRequest<'_>) -> Result<Answer, RequestError> {
        let settings = &self.settings;
        let address = format!("{}{}", settings.endpoint, request.path);
        let mut uri: Uri = address.parse().map_err(|_| {
            Failure::new(format!("`{address}` is not an address")).hint("check HF_ENDPOINT")
        })?;
        let mut origin = settings.origin.clone();
        let (mut is_home, mut commit) = (true, None);
        for _ in 0..=MAX_REDIRECTS {
            is_home &= origin == settings.origin;
            let mut call =
                if request.is_head { self.agent.head(&uri) } else { self.agent.get(&uri) };
            for (name, value) in &request.headers {
                call = call.header(*name, value);
            }
            if let Some(token) = settings.token.as_ref().filter(|_| is_home) {
                call = call.header("authorization", token.bearer());
            }
            let response = call.call();
            let response = response.map_err(|error| unanswered(settings, &origin, &error))?;
            let (status, headers) = (response.status(), response.headers());
            commit = commit.or_else(|| header(headers, "x-repo-commit").map(str::to_string));
            let is_redirect = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
            let describes_file = request.is_head && headers.contains_key("x-linked-etag");
            if is_redirect && !describes_file {
                (uri, origin) = next(&uri, &origin, headers)?;
                continue;
            }
            let is_usable = status.is_success() || status == 416 || is_redirect;
            let answer = Answer { response, origin, commit };
            return if is_usable {
                Ok(answer)
            } else {
                Err(refused(settings, request, &answer, is_home))
            };
        }
        Err(Failure::new(format!(
            "`{}` redirects in a circle: {MAX_REDIRECTS} redirects and no answer",
            settings.origin
        ))
        .detail(format!("the last one led to `{origin}{}`", uri.path()))
        .hint(CHECK_ENDPOINT)
        .into())
    }

    /// Reads at most `most` bytes of an answer's body.
    pub(super) fn read(&self, answer: Answer, most: u64) -> Result<Vec<u8>, RequestError> {
        let mut bytes = Vec::new();
        let body = answer.response.into_body().into_reader();
        match body.take(most).read_to_end(&mut bytes) {
            Ok(_) => Ok(bytes),
            Err(error) => {
                Err(unanswered(&self.settings, &answer.origin, &ureq::Error::from(error)))
            }
        }
    }
}

/// The address to which a redirect leads.
fn next(uri: &Uri, origin: &Origin, headers: &HeaderMap) -> Result<(Uri, Origin), Failure> {
    let wrong = |why: &str| {
        Failure::new(format!("`{origin}` redirects {why}"))
            .detail(format!("asked for `{origin}{}`", uri.path()))
            .hint(CHECK_ENDPOINT)
    };
    let location = headers.get("location");
    let location = location.ok_or_else(|| wrong("without saying where to"))?;
    let next = location.to_str().ok().and_then(|text| joined(uri, text));
    let next = next.ok_or_else(|| wrong("to something that is no address"))?;
    let target =
        Origin::of(&next).ok_or_else(|| wrong("to something that is neither http nor https"))?;
    if origin.is_https && !target.is_https {
        return Err(wrong(&format!("from https to plain http (`{target}`), which is refused")));
    }
    Ok((next, target))
}

/// The address of a location, which may be absolute or relative to `uri`.
fn joined(uri: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next().filter(|part| !part.is_empty())?;
    let (scheme, authority) = (uri.scheme_str()?, uri.authority()?);
    let address = if location.contains("://") && !location.starts_with(['/', '?']) {
        location.to_string()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else if location.starts_with('?') {
        format!("{scheme}://{authority}{}{location}", uri.path())
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
        let uri: Uri = "https://hub/a?signature=secret".parse().expect("an address");
        let origin = Origin::of(&uri).expect("an origin");
        let message = |location: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("location", location.parse().expect("a header"));
            let refused = next(&uri, &origin, &headers);
            refused.expect_err(location).to_string()
        };
        let error = message("http://hub/a?signature=secret");
        assert!(error.contains("from https to plain http (`hub`)"), "{error}");
        assert!(!error.contains("secret"), "{error}");
        assert!(message("ftp://hub/a").contains("neither http nor https"));
    }
}
