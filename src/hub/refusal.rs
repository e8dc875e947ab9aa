//! Refusals of the hub: each status and each network error becomes a message with a remedy here, and nowhere else.

use std::io;
use std::time::Duration;

use ureq::Body;
use ureq::http::{HeaderMap, Response};

use super::id::HubRepo;
use super::settings::{Origin, Settings};
use crate::failure::Failure;

/// The most characters of a server's explanation that are shown.
const MAX_SAID: usize = 300;

/// The failure of a request.
#[derive(Debug)]
pub(super) enum RequestError {
    /// The same request may succeed later.
    Transient(Box<Transient>),
    /// The same request will fail again.
    Permanent(Box<Failure>),
}

/// A failure that may pass.
#[derive(Debug)]
pub(super) struct Transient {
    pub(super) failure: Failure,
    /// The wait that the server asks for.
    pub(super) wait: Option<Duration>,
    /// No server answered.
    pub(super) is_unreachable: bool,
    /// The download made progress, so tries are counted from zero.
    pub(super) has_progressed: bool,
}

impl RequestError {
    pub(super) fn transient(failure: Failure) -> Self {
        Self::Transient(Box::new(Transient {
            failure,
            wait: None,
            is_unreachable: false,
            has_progressed: false,
        }))
    }
}

impl From<Failure> for RequestError {
    fn from(failure: Failure) -> Self {
        Self::Permanent(Box::new(failure))
    }
}

/// The object of a request, which refusals name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) repo: &'a HubRepo,
    /// A file of the repository; `None` for the list of files.
    pub(super) file: Option<&'a str>,
}

/// A header as text.
pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

/// The failure for an answer that is neither a success nor a redirect. `is_home`: the endpoint itself answered, to a request with the
/// token.
pub(super) fn refused(
    settings: &Settings,
    asked: Asked<'_>,
    response: &Response<Body>,
    origin: &Origin,
    is_home: bool,
) -> RequestError {
    let (status, headers) = (response.status(), response.headers());
    let answered = format!(
        "`{origin}` answered {}{}",
        status.as_u16(),
        status
            .canonical_reason()
            .map_or(String::new(), |reason| format!(" {reason}"))
    );
    let said = said(settings, headers);
    let explained = |failure: Failure| match &said {
        Some(said) => failure.detail(format!("its message: {said}")),
        None => failure,
    };
    match status.as_u16() {
        429 => {
            let hint = if settings.token.is_some() {
                "wait some minutes; the downloaded part is kept"
            } else {
                "wait some minutes, or set HF_TOKEN: with a token more is allowed"
            };
            let failure = Failure::new(format!("{answered}: it asks to slow down")).hint(hint);
            RequestError::Transient(Box::new(Transient {
                failure: explained(failure),
                wait: wait(headers),
                is_unreachable: false,
                has_progressed: false,
            }))
        }
        408 | 500..=599 => RequestError::Transient(Box::new(Transient {
            failure: explained(
                Failure::new(answered).hint("try again later; the downloaded part is kept"),
            ),
            wait: wait(headers),
            is_unreachable: false,
            has_progressed: false,
        })),
        // Signed addresses expire; the next try gets a new one.
        400..=499 if !is_home => RequestError::transient(explained(
            Failure::new(format!("{answered} for {}", what(asked)))
                .hint("try again later; the downloaded part is kept"),
        )),
        401 | 403 | 404 => {
            let code = header(headers, "x-error-code").unwrap_or_default();
            let failure = denied(settings, asked, status.as_u16(), code, origin);
            explained(failure.detail(answered)).into()
        }
        _ => explained(
            Failure::new(format!("{answered} for {}", what(asked)))
                .hint("check HF_ENDPOINT; or name a local folder"),
        )
        .into(),
    }
}

/// The failure for a repository that is missing or forbidden. The hub often hides the difference, to keep private names private.
fn denied(
    settings: &Settings,
    asked: Asked<'_>,
    status: u16,
    code: &str,
    origin: &Origin,
) -> Failure {
    let (id, noun) = (asked.repo.id(), asked.repo.noun());
    let page = format!("{}{}", settings.endpoint, asked.repo.page_path());
    let has_token = settings.token.is_some();
    let no_folder = |failure: Failure| {
        if noun == "model" {
            failure.detail("there is no local folder of that name either")
        } else {
            failure
        }
    };
    let spelling = "check the spelling";
    match (status, code) {
        (_, "GatedRepo") | (403, _) if has_token => {
            Failure::new(format!("the token gives no access to the {noun} `{id}`"))
                .hint(format!(
                    "accept the licence at {page} with the token's account (its owner may have to approve), and set HF_TOKEN \
                     to a token that may read gated repositories"
                ))
        }
        (_, "GatedRepo") | (403, _) => Failure::new(format!(
            "the {noun} `{id}` is gated: only users who accepted its licence may download its files"
        ))
        .hint(format!(
            "accept the licence at {page}, then set HF_TOKEN to your token"
        )),
        (_, "RevisionNotFound") => Failure::new(format!(
            "the {noun} `{id}` has no revision `{}`",
            asked.repo.revision()
        ))
        .hint(format!("see {page}, or use --revision main")),
        (404, "EntryNotFound") => no_file(asked, &page),
        (404, "") if asked.file.is_some() => no_file(asked, &page),
        (401, "RepoNotFound" | "") if !has_token => no_folder(Failure::new(format!(
            "the {noun} `{id}` is not on `{origin}`, or not public"
        )))
        .hint(format!(
            "{spelling}; for a private or gated one accept the licence at {page} and set HF_TOKEN to your token"
        )),
        (401, "") => Failure::new(format!("`{origin}` does not accept the token"))
            .hint(format!(
                "set HF_TOKEN to a new one ({}/settings/tokens), or unset it for public repositories",
                settings.endpoint
            )),
        _ if has_token => no_folder(Failure::new(format!(
            "the {noun} `{id}` is not on `{origin}`, or the token may not see it"
        )))
        .hint(format!("{spelling}, and whose token it is")),
        _ => no_folder(Failure::new(format!("there is no {noun} `{id}` on `{origin}`")))
            .hint(format!("{spelling}; a private one needs HF_TOKEN")),
    }
}

fn no_file(asked: Asked<'_>, page: &str) -> Failure {
    Failure::new(format!(
        "there is no {} at revision `{}`",
        what(asked),
        asked.repo.revision()
    ))
    .hint(format!("see {page}/tree/{}", asked.repo.revision()))
}

/// "`config.json` of the model `a/b`".
pub(super) fn what(asked: Asked<'_>) -> String {
    let repo = format!("the {} `{}`", asked.repo.noun(), asked.repo.id());
    match asked.file {
        Some(file) => format!("`{file}` of {repo}"),
        None => repo,
    }
}

/// The explanation in the server's answer, without the token.
fn said(settings: &Settings, headers: &HeaderMap) -> Option<String> {
    let said = header(headers, "x-error-message").filter(|said| !said.is_empty())?;
    let said: String = said.chars().take(MAX_SAID).collect();
    Some(match &settings.token {
        Some(token) => token.hidden_in(&said),
        None => said,
    })
}

/// The wait that the server asks for: `Retry-After` in seconds, else the hub's `RateLimit: ...;t=SECONDS`.
fn wait(headers: &HeaderMap) -> Option<Duration> {
    let seconds = header(headers, "retry-after")
        .and_then(|value| value.parse::<f64>().ok())
        .or_else(|| {
            let limit = header(headers, "ratelimit")?;
            limit
                .split(';')
                .find_map(|part| part.trim().strip_prefix("t=")?.parse().ok())
        })?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// The failure for a request without an answer.
pub(super) fn unanswered(
    settings: &Settings,
    origin: &Origin,
    error: &ureq::Error,
) -> RequestError {
    use ureq::Error as E;
    use ureq::Timeout as T;
    let elsewhere = "name a local folder, or set HF_ENDPOINT to a mirror you can reach";
    let broke_off = |error: &io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
        )
    };
    // An error inside a secure connection arrives as invalid data of the connection below.
    let is_tls = match error {
        E::Rustls(_) | E::Tls(_) | E::Pem(_) | E::TlsRequired => true,
        E::Io(error) => origin.is_https && error.kind() == io::ErrorKind::InvalidData,
        _ => false,
    };
    match error {
        _ if is_tls => {
            Failure::new(format!("no secure connection to `{origin}`"))
                .detail(error.to_string())
                .hint("check the clock and HF_ENDPOINT; a proxy that opens https with its own certificate is not trusted")
                .into()
        }
        E::InvalidProxyUrl | E::BadUri(_) | E::Http(_) => {
            Failure::new(format!("cannot ask `{origin}`"))
                .detail(error.to_string())
                .hint("check HTTPS_PROXY, ALL_PROXY and HF_ENDPOINT")
                .into()
        }
        E::Io(broken) if broke_off(broken) => RequestError::transient(
            Failure::new(format!("the connection to `{origin}` broke off"))
                .hint("try again later; the downloaded part is kept"),
        ),
        E::Timeout(timeout) if !matches!(timeout, T::Resolve | T::Connect) => {
            RequestError::transient(silent(settings, origin))
        }
        E::Io(_)
        | E::HostNotFound
        | E::ConnectionFailed
        | E::Timeout(_)
        | E::ConnectProxyFailed(_) => RequestError::Transient(Box::new(Transient {
            failure: Failure::new(format!("cannot reach `{origin}`"))
                .detail(error.to_string())
                .hint(format!(
                    "{elsewhere}, or HF_HUB_OFFLINE=1 to use the cache `{}`",
                    settings.cache.display()
                )),
            wait: None,
            is_unreachable: true,
            has_progressed: false,
        })),
        _ => RequestError::transient(
            Failure::new(format!("the answer of `{origin}` cannot be read"))
                .detail(error.to_string())
                .hint("check HF_ENDPOINT and the proxy; or name a local folder"),
        ),
    }
}

/// The failure for a connection that stopped transferring.
pub(super) fn silent(settings: &Settings, origin: &Origin) -> Failure {
    Failure::new(format!(
        "`{origin}` is silent for {} s",
        settings.silence.as_secs_f64()
    ))
    .hint("try again later, the downloaded part is kept; or allow longer with HF_HUB_DOWNLOAD_TIMEOUT=120")
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
        assert_eq!(
            waits("ratelimit", "\"api\";r=0;t=55"),
            Some(Duration::from_secs(55))
        );
        assert_eq!(wait(&HeaderMap::new()), None);
    }
}
