//! Settings of the hub from flags and environment: address, cache, token, retries, and timeouts.
//!
//! The Python client reads the same environment variables, so an existing set-up works unchanged (docs/hub.md has the table). A
//! closure reads them, so that tests do not change the environment of the process.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use ureq::http::Uri;

use super::certificates::Trusted;
use super::id::HubRepo;
use crate::failure::Failure;

/// The address of the hub without `HF_ENDPOINT`.
const HUB: &str = "https://huggingface.co";

/// A user's token. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

impl Token {
    /// The value of the header that carries it.
    pub(super) fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Replaces the token in a text from a server.
    pub(super) fn hidden_in(&self, text: &str) -> String {
        text.replace(&self.0, "(token)")
    }
}

/// Scheme, host and port; a token is bound to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) is_https: bool,
    is_loopback: bool,
    /// The host in lower case, with the port unless it is the scheme's own.
    address: String,
}

impl Origin {
    /// The origin of an absolute http or https address.
    pub(super) fn of(uri: &Uri) -> Option<Self> {
        let (is_https, usual) = match uri.scheme_str()? {
            "https" => (true, 443),
            "http" => (false, 80),
            _ => return None,
        };
        let host = uri.host().filter(|host| !host.is_empty())?;
        let host = host.to_ascii_lowercase();
        Some(Self {
            is_https,
            is_loopback: host == "localhost" || host.starts_with("127.") || host == "[::1]",
            address: match uri.port_u16() {
                Some(port) if port != usual => format!("{host}:{port}"),
                _ => host,
            },
        })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

/// Settings of the client of the hub.
#[derive(Debug, Clone)]
pub struct HubSettings {
    /// The address without a slash at the end.
    pub(super) endpoint: String,
    pub(super) origin: Origin,
    /// The folder that holds `models--owner--name`.
    pub(super) cache: PathBuf,
    pub(super) token: Option<Token>,
    pub(super) trusted: Trusted,
    /// The variable that forbids requests; `None` if none does.
    pub(super) offline: Option<&'static str>,
    /// The variable that forbids requests for data sets alone.
    offline_for_datasets: Option<&'static str>,
    /// Retries after the first try.
    pub(super) retries: u32,
    /// The wait before the second try; it doubles after each try.
    pub(super) retry_delay: Duration,
    /// The longest silence of a connection.
    pub(super) silence: Duration,
}

/// Reads a variable of the environment.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

impl HubSettings {
    /// Reads all settings from `--cache-dir` and the environment, which `lookup` reads.
    ///
    /// # Errors
    /// Fails without a folder for the cache, for an invalid endpoint, token or number, and without the certificates that a variable
    /// names.
    pub fn resolve(cache_dir: Option<&Path>, lookup: Lookup<'_>) -> Result<Self> {
        let (endpoint, origin) = endpoint(lookup)?;
        let seconds =
            |name, default| number(lookup, name, default, 86_400.0).map(Duration::from_secs_f64);
        // The values that the Python client takes for true.
        let is_true =
            |value: String| ["1", "ON", "YES", "TRUE"].contains(&&*value.to_ascii_uppercase());
        let is_set = |name: &&'static str| text(lookup, name).is_some();
        // As in `huggingface_hub.constants`: the first variable with a value decides.
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];
        let offline = offline.into_iter().find(is_set);
        let offline = offline.filter(|name| text(lookup, name).is_some_and(is_true));
        // The variable of the `datasets` library.
        let for_datasets = Some("HF_DATASETS_OFFLINE");
        let for_datasets = for_datasets.filter(|name| text(lookup, name).is_some_and(is_true));
        Ok(Self {
            endpoint,
            origin,
            cache: cache(cache_dir, lookup)?,
            token: token(lookup)?,
            // Offline nothing is asked, so nothing is trusted.
            trusted: match offline {
                Some(_) => Trusted::built_in(),
                None => Trusted::find(lookup)?,
            },
            offline,
            offline_for_datasets: for_datasets,
            // The number is from 0 to 100; the cast drops a fraction.
            retries: number(lookup, "PRUNE_HUB_RETRIES", 5.0, 100.0)? as u32,
            retry_delay: seconds("PRUNE_HUB_RETRY_SECONDS", 1.0)?,
            silence: seconds("HF_HUB_DOWNLOAD_TIMEOUT", 30.0)?.max(Duration::from_millis(1)),
        })
    }

    /// The variable that forbids requests for a repository; `None` if none does.
    pub(super) fn offline_for(&self, repo: &HubRepo) -> Option<&'static str> {
        let is_dataset = repo.noun() == "dataset";
        self.offline.or(self.offline_for_datasets.filter(|_| is_dataset))
    }

    /// The warning for a token that would travel unencrypted.
    pub(super) fn unencrypted_token(&self) -> Option<String> {
        let origin = &self.origin;
        let is_open = self.token.is_some() && !origin.is_https && !origin.is_loopback;
        is_open.then(|| {
            format!("the token travels unencrypted to `{origin}`: use https:// in HF_ENDPOINT")
        })
    }
}

/// The value of a variable; `None` if it is unset or blank.
fn text(lookup: Lookup<'_>, name: &str) -> Option<String> {
    let value = lookup(name)?.to_string_lossy().trim().to_string();
    (!value.is_empty()).then_some(value)
}

fn number(lookup: Lookup<'_>, name: &str, default: f64, most: f64) -> Result<f64, Failure> {
    let Some(value) = text(lookup, name) else {
        return Ok(default);
    };
    match value.parse() {
        Ok(number) if (0.0..=most).contains(&number) => Ok(number),
        _ => Err(Failure::usage(format!("{name} is `{value}`, not a number from 0 to {most}"))
            .hint(format!("unset it, or use {name}={default}"))),
    }
}

fn endpoint(lookup: Lookup<'_>) -> Result<(String, Origin), Failure> {
    let given = text(lookup, "HF_ENDPOINT").unwrap_or_else(|| HUB.to_string());
    let endpoint = given.trim_end_matches('/').to_string();
    let wrong = |why: &str| {
        // The address is not printed: it may hold a password.
        Failure::usage(format!("HF_ENDPOINT {why}"))
            .hint(format!("unset it, or use an address like HF_ENDPOINT={HUB}"))
    };
    let uri: Uri = endpoint.parse().map_err(|_| wrong("is not an address"))?;
    let why = match Origin::of(&uri) {
        _ if endpoint.contains('@') => "holds a user name or a password; use HF_TOKEN for a token",
        _ if uri.query().is_some() => "holds a question mark",
        Some(origin) => return Ok((endpoint, origin)),
        None => "does not begin with https:// or http://",
    };
    Err(wrong(why))
}

/// The path in a variable; `~` is the home folder, as in the Python client.
fn path(lookup: Lookup<'_>, name: &str) -> Option<PathBuf> {
    let value = lookup(name).filter(|value| !value.is_empty())?;
    let path = PathBuf::from(value);
    match (path.strip_prefix("~"), lookup("HOME")) {
        (Ok(rest), Some(home)) => Some(Path::new(&home).join(rest)),
        _ => Some(path),
    }
}

/// `HF_HOME`, else the default of the Python client.
fn home(lookup: Lookup<'_>) -> Option<PathBuf> {
    let user = || lookup("HOME").or_else(|| lookup("USERPROFILE"));
    path(lookup, "HF_HOME")
        .or_else(|| Some(path(lookup, "XDG_CACHE_HOME")?.join("huggingface")))
        .or_else(|| Some(Path::new(&user()?).join(".cache").join("huggingface")))
}

fn cache(cache_dir: Option<&Path>, lookup: Lookup<'_>) -> Result<PathBuf, Failure> {
    let found = cache_dir
        .map(Path::to_path_buf)
        .or_else(|| path(lookup, "HF_HUB_CACHE"))
        .or_else(|| path(lookup, "HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(home(lookup)?.join("hub")));
    let found = found.ok_or_else(|| {
        Failure::usage("there is no folder for the hub's files: neither HF_HOME nor HOME is set")
            .hint("name one with --cache-dir")
    })?;
    // Links in the cache are relative to it, and messages should not depend on the current folder.
    std::path::absolute(&found).map_err(|error| {
        Failure::new(format!("cannot find the folder `{}`", found.display()))
            .detail(error.to_string())
    })
}

/// `HF_TOKEN`, else the file `HF_TOKEN_PATH`, else `HF_HOME/token`.
fn token(lookup: Lookup<'_>) -> Result<Option<Token>, Failure> {
    let file = path(lookup, "HF_TOKEN_PATH").or_else(|| Some(home(lookup)?.join("token")));
    let (place, token) = match (text(lookup, "HF_TOKEN"), file) {
        (Some(token), _) => ("HF_TOKEN".to_string(), token),
        (None, None) => return Ok(None),
        (None, Some(file)) => {
            let shown = format!("`{}`", file.display());
            match std::fs::read_to_string(&file) {
                Ok(content) => (shown, content.trim().to_string()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => {
                    return Err(Failure::new(format!("cannot read the token file {shown}"))
                        .detail(error.to_string())
                        .hint("set HF_TOKEN, or HF_TOKEN_PATH to a file you may read"));
                }
            }
        }
    };
    // The token becomes a header. The message does not repeat it.
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Failure::usage(format!(
            "{place} holds no token: spaces or letters no token has"
        ))
        .hint("copy the token again; a token is one word that begins with hf_"));
    }
    Ok((!token.is_empty()).then_some(Token(token)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(cache_dir: Option<&str>, variables: &[(&str, &str)]) -> Result<HubSettings> {
        let lookup = |name: &str| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| OsString::from(value))
        };
        HubSettings::resolve(cache_dir.map(Path::new), &lookup)
    }

    #[test]
    fn the_cache_is_the_flags_then_the_variables_then_the_homes() {
        let variables = [
            ("HF_HUB_CACHE", "/cache"),
            ("HF_HOME", "/hf"),
            ("XDG_CACHE_HOME", "/xdg"),
            ("HOME", "/home/me"),
        ];
        let cache = |flag, from: usize| settings(flag, &variables[from..]).expect("valid").cache;
        assert_eq!(cache(Some("/flag"), 0), Path::new("/flag"));
        assert_eq!(cache(None, 0), Path::new("/cache"));
        assert_eq!(cache(None, 1), Path::new("/hf/hub"));
        assert_eq!(cache(None, 2), Path::new("/xdg/huggingface/hub"));
        assert_eq!(cache(None, 3), Path::new("/home/me/.cache/huggingface/hub"));
        let tilde = [("HF_HOME", "~/hf"), ("HOME", "/home/me")];
        assert_eq!(settings(None, &tilde).expect("valid").cache, Path::new("/home/me/hf/hub"));
        let error = settings(None, &[]).expect_err("no home").to_string();
        assert!(error.contains("--cache-dir"), "{error}");
    }

    #[test]
    fn the_token_is_the_variable_then_the_named_file_then_the_homes() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let home = folder.path().display().to_string();
        let named = folder.path().join("named").display().to_string();
        std::fs::write(folder.path().join("token"), "hf_home\n").expect("write");
        std::fs::write(&named, "hf_named\n").expect("write");
        let variables = [
            ("HF_TOKEN", "hf_variable"),
            ("HF_TOKEN_PATH", named.as_str()),
            ("HF_HOME", home.as_str()),
        ];
        let token = |from: usize| settings(None, &variables[from..]).expect("valid").token;
        assert_eq!(token(0), Some(Token("hf_variable".into())));
        assert_eq!(token(1), Some(Token("hf_named".into())));
        assert_eq!(token(2), Some(Token("hf_home".into())));
        assert_eq!(settings(None, &[("HF_HOME", "/none")]).expect("valid").token, None);
    }

    #[test]
    fn a_token_is_never_shown() {
        let with_token = settings(None, &[("HF_TOKEN", "hf_secret"), ("HF_HOME", "/hf")]);
        let shown = format!("{:?}", with_token.expect("valid"));
        assert!(shown.contains("Token(hidden)") && !shown.contains("hf_secret"), "{shown}");
        let spaced = settings(None, &[("HF_TOKEN", "hf_secret x"), ("HF_HOME", "/hf")]);
        let error = spaced.expect_err("two words").to_string();
        assert!(error.starts_with("HF_TOKEN") && !error.contains("secret"), "{error}");
        let inside =
            settings(None, &[("HF_ENDPOINT", "https://me:secret@host"), ("HF_HOME", "/hf")]);
        let error = inside.expect_err("a password").to_string();
        assert!(error.contains("HF_TOKEN") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn offline_has_the_variables_and_the_values_of_the_python_clients() {
        let offline = |variables: &[(&str, &str)]| {
            let all = [variables, &[("HF_HOME", "/hf")]].concat();
            let settings = settings(None, &all).expect("valid");
            let model = HubRepo::model("acme/tiny").expect("an id");
            let repos = [model, HubRepo::dataset("acme/text")];
            repos.map(|repo| settings.offline_for(&repo))
        };
        for name in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
            for value in ["1", "true", "TRUE", "yes", "On"] {
                assert_eq!(offline(&[(name, value)]), [Some(name); 2], "{value}");
            }
            for value in ["", "0", "false", "no", "off", "2"] {
                assert_eq!(offline(&[(name, value)]), [None; 2], "{value}");
            }
        }
        let datasets = "HF_DATASETS_OFFLINE";
        assert_eq!(offline(&[(datasets, "1")]), [None, Some(datasets)]);
        // The first variable with a value decides, as in Python's `or`.
        let [hub, transformers] = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];
        assert_eq!(offline(&[(hub, "0"), (transformers, "1")]), [None; 2]);
        let empty = offline(&[(hub, ""), (transformers, "1")]);
        assert_eq!(empty, [Some(transformers); 2]);
    }

    #[test]
    fn endpoints_are_addresses_and_an_unencrypted_one_gives_a_warning() {
        let at = |endpoint: &str| {
            settings(None, &[("HF_ENDPOINT", endpoint), ("HF_HOME", "/hf"), ("HF_TOKEN", "hf_x")])
        };
        let mirror = at("https://Mirror.example/hub/").expect("valid");
        assert_eq!(mirror.endpoint, "https://Mirror.example/hub");
        assert_eq!(mirror.origin.to_string(), "mirror.example");
        assert!(mirror.unencrypted_token().is_none());
        assert!(at("http://127.0.0.1:1").expect("valid").unencrypted_token().is_none());
        assert!(at("http://mirror.example").expect("valid").unencrypted_token().is_some());
        for endpoint in ["mirror.example", "ftp://mirror.example", "https://", "https://a?b", "::"]
        {
            let failure = at(endpoint).expect_err(endpoint);
            assert!(
                failure.downcast_ref::<Failure>().is_some_and(|failure| failure.is_usage),
                "{endpoint}: {failure}"
            );
        }
    }

    #[test]
    fn invalid_numbers_are_refused_with_the_name_of_the_variable() {
        for value in ["x", "-1", "nan", "1e9"] {
            let error = settings(None, &[("PRUNE_HUB_RETRIES", value), ("HF_HOME", "/hf")])
                .expect_err(value)
                .to_string();
            assert!(error.starts_with("PRUNE_HUB_RETRIES is"), "{error}");
        }
    }
}
