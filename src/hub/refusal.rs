//! Refusals of the hub: each status and each network error becomes a message with a remedy here, and nowhere else.

use std::io;
use std::time::Duration;

use ureq::http::HeaderMap;
use ureq::{Error, Timeout};

use super::exchange::{Answer, HttpRequest, header};
use super::settings::{HubSettings, Origin};
use crate::failure::Failure;

/// The most characters of a server's explanation that are shown.
const MAX_SAID: usize = 300;

/// The remedy for an answer that a hub does not give.
pub(super) const CHECK_ENDPOINT: &str = "check HF_ENDPOINT and the proxy; or name a local folder";

/// The words of rustls for a certificate that it refuses, which arrives inside an error of the connection.
const BAD_CERTIFICATE: &str = "invalid peer certificate";

const LATER: &str = "try again later; the downloaded part is kept";

/// The failure of a request.
#[derive(Debug)]
pub(super) struct RequestError {
    pub(super) failure: Failure,
    pub(super) retry: Retry,
}

/// Advice on trying a request again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retry {
    /// The same request will fail again.
    Never,
    /// The same request may succeed later.
    Later,
    /// The server asks for this wait.
    After(Duration),
    /// No server answered.
    Unreachable,
    /// The download made progress, so tries are counted from zero.
    Progressed,
}

impl RequestError {
    pub(super) fn later(failure: Failure) -> Self {
        let retry = Retry::Later;
        Self { failure, retry }
    }
}

impl From<Failure> for RequestError {
    fn from(failure: Failure) -> Self {
        let retry = Retry::Never;
        Self { failure, retry }
    }
}

/// The failure for an answer that is neither a success nor a redirect. `is_home`: the endpoint itself answered, to a request with the
/// token.
pub(super) fn refused(
    settings: &HubSettings,
    request: &HttpRequest<'_>,
    answer: &Answer,
    is_home: bool,
) -> RequestError {
    let (status, headers) = (answer.response.status(), answer.response.headers());
    let reason = status.canonical_reason().unwrap_or_default();
    let answered = format!("`{}` answered {} {reason}", answer.origin, status.as_u16());
    let answered = answered.trim_end();
    let about = format!("{answered} for {}", request.repo.named(request.file));
    let later = wait(headers).map_or(Retry::Later, Retry::After);
    let (failure, retry) = match status.as_u16() {
        429 => {
            let hint = match settings.token {
                Some(_) => "wait some minutes; the downloaded part is kept",
                None => "wait some minutes, or set HF_TOKEN: with a token more is allowed",
            };
            let slow = format!("{answered}: it asks to slow down");
            (Failure::new(slow).hint(hint), later)
        }
        408 | 500..=599 => (Failure::new(answered).hint(LATER), later),
        // Signed addresses expire; the next try gets a new address.
        400..=499 if !is_home => (Failure::new(about).hint(LATER), Retry::Later),
        401 | 403 | 404 => {
            let code = header(headers, "x-error-code").unwrap_or_default();
            let denied = denied(settings, request, status.as_u16(), code);
            (denied.detail(answered), Retry::Never)
        }
        _ => {
            let hint = "check HF_ENDPOINT; or name a local folder";
            (Failure::new(about).hint(hint), Retry::Never)
        }
    };
    let failure = match said(settings, headers) {
        Some(said) => failure.detail(format!("its message: {said}")),
        None => failure,
    };
    RequestError { failure, retry }
}

/// The failure for a repository that is missing or forbidden. The hub often hides the difference, to keep private names private.
fn denied(settings: &HubSettings, request: &HttpRequest<'_>, status: u16, code: &str) -> Failure {
    let (repo, origin, endpoint) = (request.repo, &settings.origin, &settings.endpoint);
    let (the_repo, revision) = (repo.named(None), repo.revision());
    let page = format!("{endpoint}/{}", repo.repo().url());
    let has_token = settings.token.is_some();
    let is_gated = code == "GatedRepo" || status == 403;
    let is_file = code == "EntryNotFound" || (code.is_empty() && request.file.is_some());
    let (message, hint) = match (status, code) {
        _ if is_gated && has_token => (
            format!("the token gives no access to {the_repo}"),
            format!(
                "accept the licence at {page} with the token's account (its owner may have to approve), and set HF_TOKEN to a \
                 token that may read gated repositories"
            ),
        ),
        _ if is_gated => (
            format!(
                "{the_repo} is gated: only users who accepted its licence may download its files"
            ),
            format!("accept the licence at {page}, then set HF_TOKEN to your token"),
        ),
        (_, "RevisionNotFound") => (
            format!("{the_repo} has no revision `{revision}`"),
            format!("see {page}, or use --revision main"),
        ),
        (404, _) if is_file => {
            let file = repo.named(request.file);
            (
                format!("there is no {file} at revision `{revision}`"),
                format!("see {page}/tree/{revision}"),
            )
        }
        (401, "") if has_token => (
            format!("`{origin}` does not accept the token"),
            format!(
                "set HF_TOKEN to a new one ({endpoint}/settings/tokens), or unset it for public repositories"
            ),
        ),
        _ => {
            let absent = format!("{the_repo} is not on `{origin}`");
            let failure = if has_token {
                Failure::new(format!("{absent}, or the token may not see it"))
                    .hint("check the spelling, and whose token it is")
            } else if status == 401 {
                Failure::new(format!("{absent}, or not public")).hint(format!(
                    "check the spelling; for a private or gated one accept the licence at {page} and set HF_TOKEN to your token"
                ))
            } else {
                Failure::new(format!("there is no {} `{}` on `{origin}`", repo.noun(), repo.id()))
                    .hint("check the spelling; a private one needs HF_TOKEN")
            };
            return repo.taken_for_id(failure);
        }
    };
    Failure::new(message).hint(hint)
}

/// The explanation in the server's answer, without the token.
fn said(settings: &HubSettings, headers: &HeaderMap) -> Option<String> {
    let said = header(headers, "x-error-message").filter(|said| !said.is_empty())?;
    let said: String = said.chars().take(MAX_SAID).collect();
    Some(match &settings.token {
        Some(token) => token.hidden_in(&said),
        None => said,
    })
}

/// The wait that the server asks for: `Retry-After` in seconds, else the hub's `RateLimit: ...;t=SECONDS`.
fn wait(headers: &HeaderMap) -> Option<Duration> {
    let limit = || {
        let mut parts = header(headers, "ratelimit")?.split(';');
        parts.find_map(|part| part.trim().strip_prefix("t=")?.parse().ok())
    };
    let seconds = header(headers, "retry-after").and_then(|value| value.parse().ok());
    Duration::try_from_secs_f64(seconds.or_else(limit)?).ok()
}

/// The failure for an answer of a server that is no hub, such as the login page of a network.
pub(super) fn not_a_hub(origin: &Origin, detail: String) -> Failure {
    Failure::new(format!("`{origin}` does not answer like a hub"))
        .detail(detail)
        .hint("check HF_ENDPOINT; a login page of the network may answer in its place")
}

/// The failure for a request without an answer.
pub(super) fn unanswered(settings: &HubSettings, origin: &Origin, error: &Error) -> RequestError {
    use io::ErrorKind as Kind;
    // An error inside a secure connection arrives as invalid data of the connection below.
    let is_tls = match error {
        Error::Rustls(_) | Error::Tls(_) | Error::Pem(_) | Error::TlsRequired => true,
        Error::Io(error) => origin.is_https && error.kind() == Kind::InvalidData,
        _ => false,
    };
    let broke_off = |error: &io::Error| {
        matches!(
            error.kind(),
            Kind::UnexpectedEof
                | Kind::ConnectionReset
                | Kind::ConnectionAborted
                | Kind::BrokenPipe
        )
    };
    let offline = format!(
        "name a local folder, or set HF_ENDPOINT to a mirror you can reach, or HF_HOME to a cache that holds all files; `{}` does not",
        settings.cache.display()
    );
    let cause = error.to_string();
    if cause.contains(BAD_CERTIFICATE) {
        return not_trusted(settings, origin, cause).into();
    }
    let (message, hint, retry) = match error {
        _ if is_tls => (
            format!("no secure connection to `{origin}`"),
            "check HF_ENDPOINT and HTTPS_PROXY: the server may speak plain http",
            Retry::Never,
        ),
        Error::InvalidProxyUrl | Error::BadUri(_) | Error::Http(_) => (
            format!("cannot ask `{origin}`"),
            "check HTTPS_PROXY, ALL_PROXY and HF_ENDPOINT",
            Retry::Never,
        ),
        Error::Io(error) if broke_off(error) => {
            (format!("the connection to `{origin}` broke off"), LATER, Retry::Later)
        }
        Error::Timeout(timeout) if !matches!(timeout, Timeout::Resolve | Timeout::Connect) => (
            format!("`{origin}` is silent for {} s", settings.silence.as_secs_f64()),
            "try again later, the downloaded part is kept; or allow longer with HF_HUB_DOWNLOAD_TIMEOUT=120",
            Retry::Later,
        ),
        Error::Io(_)
        | Error::HostNotFound
        | Error::ConnectionFailed
        | Error::Timeout(_)
        | Error::ConnectProxyFailed(_) => {
            (format!("cannot reach `{origin}`"), offline.as_str(), Retry::Unreachable)
        }
        _ => (format!("the answer of `{origin}` cannot be read"), CHECK_ENDPOINT, Retry::Later),
    };
    let failure = Failure::new(message).detail(cause).hint(hint);
    RequestError { failure, retry }
}

/// The failure for a certificate that cannot be verified.
fn not_trusted(settings: &HubSettings, origin: &Origin, cause: String) -> Failure {
    Failure::new(format!("the certificate of `{origin}` is not trusted"))
        .detail(cause)
        .detail(format!("it is checked against {}", settings.trusted.place))
        .detail("a proxy may be inspecting TLS: it answers with a certificate of its own authority")
        .hint(
            "name the file of that authority: SSL_CERT_FILE=/path/to/ca.pem; without such a proxy, check the clock and HF_ENDPOINT",
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_read_from_either_header() {
        let waits = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().expect("a header"));
            wait(&headers)
        };
        assert_eq!(waits("retry-after", "7"), Some(Duration::from_secs(7)));
        assert_eq!(waits("retry-after", "Fri, 31 Dec 1999 23:59:59 GMT"), None);
        assert_eq!(waits("retry-after", "-1"), None);
        assert_eq!(waits("ratelimit", "\"api\";r=0;t=55"), Some(Duration::from_secs(55)));
        assert_eq!(wait(&HeaderMap::new()), None);
    }
}
