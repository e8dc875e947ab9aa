//! A hub on the loopback. It lists, describes and serves files as the real one does, and produces faults on request.
//!
//! It has two addresses. The *home* answers for repositories. It redirects requests for large files (weights, parquet, gzip) to the
//! *storage*, another host with signed addresses, which must never see a token. The server records every request.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::json;
use sha2::{Digest, Sha256};

/// The commit of every repository here.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The query of the storage's addresses.
const SIGNATURE: &str = "Signature=sigsecret";

/// Faults of an answer.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// This status with these headers, and no body.
    Status(u16, Vec<(&'static str, String)>),
    /// The connection closes after so many bytes of the body.
    BreakAfter(usize),
    /// A redirect to here.
    Redirect(String),
    /// A redirect to nowhere.
    RedirectNowhere,
    /// Another length is announced.
    Announce(usize),
    /// As many bytes, but others.
    Damage,
    /// The whole file although a part was asked for.
    WholeFile,
    /// Nothing happens for so long before the body.
    Wait(Duration),
    /// A page of HTML.
    Page,
}

/// A request that arrived.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) is_home: bool,
    pub(crate) method: String,
    /// Path and query.
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

impl Seen {
    pub(crate) fn range(&self) -> Option<&str> {
        self.headers.get("range").map(String::as_str)
    }

    pub(crate) fn has_token(&self) -> bool {
        self.headers.contains_key("authorization")
    }
}

#[derive(Default)]
struct State {
    /// `models/owner/name` or `datasets/owner/name` → file → contents.
    repos: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// (is_home, part of the path, how often, what)
    faults: Vec<(bool, String, usize, Fault)>,
    seen: Vec<Seen>,
}

/// The server; its threads end with the process.
#[derive(Clone)]
pub(crate) struct Server {
    state: Arc<Mutex<State>>,
    home: u16,
    storage: u16,
    /// With https.
    tls: Option<Arc<ServerConfig>>,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::start_with(None)
    }

    /// A server that speaks https if it is given a certificate.
    pub(crate) fn start_with(tls: Option<ServerConfig>) -> Self {
        let listen = || TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let (home, storage) = (listen(), listen());
        let port = |listener: &TcpListener| listener.local_addr().expect("bound").port();
        let server = Self {
            state: Arc::default(),
            home: port(&home),
            storage: port(&storage),
            tls: tls.map(Arc::new),
        };
        for (listener, is_home) in [(home, true), (storage, false)] {
            let server = server.clone();
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let server = server.clone();
                    // A client that leaves early is no failure of the server.
                    thread::spawn(move || match server.tls.clone() {
                        None => server.serve(stream, is_home).ok(),
                        Some(tls) => {
                            let connection = ServerConnection::new(tls).expect("a configuration");
                            let stream = StreamOwned::new(connection, stream);
                            server.serve(stream, is_home).ok()
                        }
                    });
                }
            });
        }
        server
    }

    /// `HF_ENDPOINT`.
    pub(crate) fn endpoint(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme(), self.home)
    }

    fn scheme(&self) -> &'static str {
        match self.tls {
            None => "http",
            Some(_) => "https",
        }
    }

    /// The home as messages name it.
    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.home)
    }

    /// The storage as messages name it: by name, so that host and port differ from the home's.
    pub(crate) fn storage(&self) -> String {
        format!("localhost:{}", self.storage)
    }

    /// Adds a file to `models/owner/name` or `datasets/owner/name`.
    pub(crate) fn add(&self, repo: &str, file: &str, content: impl Into<Vec<u8>>) {
        let mut state = self.state.lock().expect("no thread panics with it");
        let files = state.repos.entry(repo.to_string()).or_default();
        files.insert(file.to_string(), content.into());
    }

    /// The next `times` requests to the home whose path contains `part` go wrong.
    pub(crate) fn home_fails(&self, part: &str, times: usize, fault: Fault) {
        self.fails(true, part, times, fault);
    }

    /// The same for the storage.
    pub(crate) fn storage_fails(&self, part: &str, times: usize, fault: Fault) {
        self.fails(false, part, times, fault);
    }

    fn fails(&self, is_home: bool, part: &str, times: usize, fault: Fault) {
        let mut state = self.state.lock().expect("no thread panics with it");
        state.faults.push((is_home, part.to_string(), times, fault));
    }

    /// No faults any more.
    pub(crate) fn behave(&self) {
        self.state.lock().expect("no thread panics with it").faults.clear();
    }

    /// The requests since the last call.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.lock().expect("no thread panics with it").seen)
    }

    fn serve(&self, mut stream: impl Read + Write, is_home: bool) -> std::io::Result<()> {
        let Ok(request) = read_request(&mut stream, is_home) else {
            // Not HTTP: https, say.
            return stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        };
        let (fault, repos) = {
            let mut state = self.state.lock().expect("no thread panics with it");
            state.seen.push(request.clone());
            let found = state.faults.iter_mut().find(|(home, part, times, _)| {
                *home == is_home && *times > 0 && request.path.contains(part.as_str())
            });
            let fault = found.map(|(_, _, times, fault)| {
                *times -= 1;
                fault.clone()
            });
            (fault, state.repos.clone())
        };
        let mut answer = match &fault {
            Some(Fault::Status(status, headers)) => Answer::of(*status, headers),
            Some(Fault::Redirect(location)) => Answer::of(302, &[("Location", location.clone())]),
            Some(Fault::RedirectNowhere) => Answer::of(302, &[]),
            Some(Fault::Page) => {
                Answer { body: b"<html>please log in</html>".to_vec(), ..Answer::of(200, &[]) }
            }
            _ if is_home => self.home(&request, &repos),
            _ => self.stored(&request, &repos, matches!(fault, Some(Fault::WholeFile))),
        };
        if matches!(fault, Some(Fault::Damage)) {
            answer.body.iter_mut().for_each(|byte| *byte ^= 1);
        }
        let announced = match fault {
            Some(Fault::Announce(bytes)) => bytes,
            _ => answer.length.unwrap_or(answer.body.len()),
        };
        let mut head = format!("HTTP/1.1 {} Status\r\n", answer.status);
        for (name, value) in &answer.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Length: {announced}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        if let Some(Fault::Wait(duration)) = fault {
            stream.flush()?;
            thread::sleep(duration);
        }
        if request.method == "HEAD" {
            return Ok(());
        }
        match fault {
            Some(Fault::BreakAfter(bytes)) => {
                stream.write_all(&answer.body[..bytes.min(answer.body.len())])
            }
            _ => stream.write_all(&answer.body),
        }
    }

    /// The answer of the home: a list, a file, or the address of a file.
    fn home(&self, request: &Seen, repos: &BTreeMap<String, BTreeMap<String, Vec<u8>>>) -> Answer {
        let path = request.path.split('?').next().unwrap_or_default();
        let not_found = |code: &str| Answer::of(404, &[("X-Error-Code", code.to_string())]);
        if let Some(rest) = path.strip_prefix("/api/") {
            let (repo, revision) = rest.split_once("/revision/").unwrap_or((rest, "main"));
            let Some(files) = repos.get(repo) else {
                return not_found("RepoNotFound");
            };
            if ![COMMIT, "main", "refs%2Fpr%2F1", "refs%2Fconvert%2Fparquet"].contains(&revision) {
                return not_found("RevisionNotFound");
            }
            let siblings = files
                .iter()
                .map(|(name, content)| json!({"rfilename": name, "size": content.len()}));
            let list = json!({"sha": COMMIT, "siblings": siblings.collect::<Vec<_>>()});
            return Answer { body: list.to_string().into_bytes(), ..Answer::of(200, &[]) };
        }
        let (repo, rest) = path.split_once("/resolve/").unwrap_or((path, ""));
        let (_, file) = rest.split_once('/').unwrap_or((rest, ""));
        let repo = match repo.strip_prefix("/datasets/") {
            Some(dataset) => format!("datasets/{dataset}"),
            None => format!("models{repo}"),
        };
        let Some(files) = repos.get(&repo) else {
            return not_found("RepoNotFound");
        };
        let Some(content) = files.get(file) else {
            return not_found("EntryNotFound");
        };
        let commit = ("X-Repo-Commit", COMMIT.to_string());
        let hash = sha256(content);
        if [".safetensors", ".parquet", ".gz"].iter().any(|end| file.ends_with(end)) {
            let (scheme, storage) = (self.scheme(), self.storage());
            let location = format!("{scheme}://{storage}/{repo}/{file}?{SIGNATURE}");
            return Answer::of(
                302,
                &[
                    commit,
                    ("X-Linked-Etag", format!("\"{hash}\"")),
                    ("X-Linked-Size", content.len().to_string()),
                    ("Location", location),
                ],
            );
        }
        let etag = format!("\"{}\"", &hash[..40]);
        let is_current = request.headers.get("if-range").is_none_or(|wanted| *wanted == etag);
        let mut answer = part(request, content, !is_current);
        answer.headers.extend([commit, ("ETag", etag)]);
        if request.method == "HEAD" {
            answer.length = Some(content.len());
        }
        answer
    }

    /// The answer of the storage, with its own ETag. `/bounce/...` redirects to the home.
    fn stored(
        &self,
        request: &Seen,
        repos: &BTreeMap<String, BTreeMap<String, Vec<u8>>>,
        is_whole: bool,
    ) -> Answer {
        if let Some(back) = request.path.strip_prefix("/bounce") {
            return Answer::of(302, &[("Location", format!("{}{back}", self.endpoint()))]);
        }
        let Some(path) = request.path.strip_suffix(&format!("?{SIGNATURE}")) else {
            return Answer::of(403, &[]);
        };
        let content = repos
            .iter()
            .find_map(|(repo, files)| files.get(path.strip_prefix(&format!("/{repo}/"))?));
        match content {
            Some(content) => {
                let mut answer = part(request, content, is_whole);
                answer.headers.push(("ETag", "\"the-storages-own\"".to_string()));
                answer
            }
            None => Answer::of(404, &[]),
        }
    }
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    length: Option<usize>,
}

impl Answer {
    fn of(status: u16, headers: &[(&'static str, String)]) -> Self {
        Self { status, headers: headers.to_vec(), body: Vec::new(), length: None }
    }
}

/// The content, or the part of it that was asked for.
fn part(request: &Seen, content: &[u8], is_whole: bool) -> Answer {
    let range = request.range().and_then(|range| {
        let (start, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        let end = last.parse::<usize>().map_or(content.len(), |last| last + 1);
        Some((start.parse::<usize>().ok()?, end.min(content.len())))
    });
    match range {
        Some((start, _)) if !is_whole && start >= content.len() => {
            Answer::of(416, &[("Content-Range", format!("bytes */{}", content.len()))])
        }
        Some((start, end)) if !is_whole => Answer {
            body: content[start..end].to_vec(),
            ..Answer::of(
                206,
                &[("Content-Range", format!("bytes {start}-{}/{}", end - 1, content.len()))],
            )
        },
        _ => Answer { body: content.to_vec(), ..Answer::of(200, &[]) },
    }
}

fn read_request(stream: &mut impl Read, is_home: bool) -> std::io::Result<Seen> {
    let mut lines = BufReader::new(stream.take(1 << 16)).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut words = first.split(' ');
    let mut word = || words.next().unwrap_or_default().to_string();
    let (method, path) = (word(), word());
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.to_ascii_lowercase(), value.trim().to_string());
        }
    }
    Ok(Seen { is_home, method, path, headers })
}

/// In hex.
pub(crate) fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}
