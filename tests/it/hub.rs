//! Models and datasets from a hub on the loopback: what is asked for, what lies in the cache, what is said when it goes wrong.
//!
//! Whole runs go through the real binary; the ways a transfer can break are tried on the library, in `transfers`.

mod server;
mod transfers;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use prune::bytes::ByteSize;
use prune::demo::RandomCheckpoint;

use crate::cli::{Place, Ran, TEXTS, ran, words};
pub(crate) use server::Server;
use server::{COMMIT, Fault, sha256};

const TOKEN: &str = "hf_TheTokenOfAPerson";
const MODEL: &str = "some-owner/Tiny-Llama";
const REPO: &str = "models/some-owner/Tiny-Llama";

/// A server with a sharded model and what lies beside one.
fn with_model() -> (Server, Place) {
    let place = Place::empty();
    place.checkpoint(
        "published",
        &RandomCheckpoint {
            max_shard: ByteSize(200 << 10),
            ..RandomCheckpoint::default()
        },
    );
    let server = Server::start();
    for name in place.names("published") {
        let content = fs::read(place.path("published").join(&name)).expect("written above");
        server.add(REPO, &name, content);
    }
    for name in [
        "LICENSE.txt",
        "README.md",
        "pytorch_model.bin",
        "original/params.json",
        "other.safetensors",
    ] {
        server.add(REPO, name, name);
    }
    (server, place)
}

/// The program with this hub, its cache in `hf`, a token, and no patience.
pub(crate) fn command(place: &Place, server: &Server, arguments: &[&str]) -> Command {
    let mut command = place.command(arguments);
    command
        .env("HF_ENDPOINT", server.endpoint())
        .env("HF_HOME", place.path("hf"))
        .env("HF_TOKEN", TOKEN)
        .env("PRUNE_HUB_RETRIES", "2")
        .env("PRUNE_HUB_RETRY_SECONDS", "0.01")
        .env_remove("HF_HUB_OFFLINE");
    command
}

/// Flags of a quick run: no texts, no output.
const QUICK: [&str; 8] = [
    "--model",
    MODEL,
    "--sparsity-ratio",
    "0.5",
    "--prune-method",
    "magnitude",
    "--eval",
    "none",
];

fn nobody_says_the_token(place: &Place, ran: &Ran) {
    assert!(!ran.stderr.contains(TOKEN) && !ran.stdout.contains(TOKEN));
    assert!(!ran.stderr.contains("sigsecret"), "{}", ran.stderr);
    let mut folders = vec![place.path(".")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("it is there").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(content) = fs::read(&path) {
                let found = content
                    .windows(TOKEN.len())
                    .any(|part| part == TOKEN.as_bytes());
                assert!(!found, "{}", path.display());
            }
        }
    }
}

#[test]
fn a_sharded_model_is_pruned_from_the_hub_and_again_offline() {
    let (server, place) = with_model();
    let run = |save: &str, more: &[(&str, &str)]| {
        let mut arguments = vec!["--model", MODEL, "--sparsity-ratio", "0.5", "--save", save];
        arguments.extend(TEXTS);
        let ran = ran(command(&place, &server, &arguments).envs(more.iter().copied()));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        nobody_says_the_token(&place, &ran);
        ran
    };
    run("first", &[]);
    let seen = server.seen();
    let published = place.names("published");
    let shards: BTreeSet<&String> = published
        .iter()
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    assert!(shards.len() > 2, "{published:?}");
    for request in &seen {
        assert_eq!(request.has_token(), request.is_home, "{request:?}");
        for unwanted in ["README", "pytorch_model", "original", "other.safe"] {
            assert!(!request.path.contains(unwanted), "{request:?}");
        }
    }
    let first_file = seen
        .iter()
        .find(|request| request.path.contains("/resolve/"));
    assert!(first_file.is_some_and(|request| request.path.ends_with("/config.json")));
    for shard in &shards {
        let times = seen
            .iter()
            .filter(|request| !request.is_home && request.path.contains(shard.as_str()))
            .count();
        assert_eq!(times, 1, "{shard}");
    }

    // The layout of the Python client.
    let folder = place.path("hf/hub/models--some-owner--Tiny-Llama");
    assert_eq!(
        fs::read_to_string(folder.join("refs/main")).expect("written"),
        COMMIT
    );
    for name in published.iter().map(String::as_str).chain(["LICENSE.txt"]) {
        let link = fs::read_link(folder.join("snapshots").join(COMMIT).join(name)).expect("a link");
        let blob = link
            .strip_prefix("../../blobs")
            .expect("relative")
            .to_path_buf();
        let content = fs::read(folder.join("blobs").join(&blob)).expect("the blob");
        let hash = sha256(&content);
        let expected = if name.ends_with(".safetensors") {
            &hash
        } else {
            &hash[..40]
        };
        assert_eq!(blob, Path::new(expected), "{name}");
    }
    assert!(place.names("first/model").contains("LICENSE.txt"));
    let manifest = place.manifest("first");
    let named = (
        manifest.model.id.as_deref(),
        manifest.model.revision.as_deref(),
        manifest.model.commit.as_deref(),
    );
    assert_eq!(named, (Some(MODEL), Some("main"), Some(COMMIT)));

    // What is there is not asked for again, but for the list; offline, nothing is.
    run("second", &[]);
    assert_eq!(server.seen().len(), 1);
    run("third", &[("HF_HUB_OFFLINE", "1")]);
    assert!(server.seen().is_empty());
    let local = [
        "--model",
        "published",
        "--sparsity-ratio",
        "0.5",
        "--save",
        "fourth",
    ];
    place.prune(&local);
    let masks = |run: &str| {
        let layers = place.manifest(run).layers.into_iter();
        let matrices = layers.flat_map(|layer| layer.matrices);
        matrices
            .map(|matrix| matrix.mask_sha256)
            .collect::<Vec<_>>()
    };
    for run in ["first", "second", "third"] {
        assert_eq!(masks(run), masks("fourth"), "{run}");
    }
}

#[test]
fn a_plan_needs_the_headers_alone() {
    let (server, place) = with_model();
    let local = place.run(&[
        "plan",
        "--model",
        "published",
        "--max-memory",
        "cpu=4GiB",
        "--json",
    ]);
    let plan = |arguments: &[&str]| {
        let ran = ran(&mut command(&place, &server, arguments));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        nobody_says_the_token(&place, &ran);
        ran.stdout
    };
    let remote = plan(&[
        "plan",
        "--model",
        MODEL,
        "--max-memory",
        "cpu=4GiB",
        "--json",
    ]);
    // What the machine has left changes from one run to the next.
    let settled = |text: &str| {
        let mut plan: serde_json::Value = serde_json::from_str(text).expect("one object");
        plan["inventory"].take();
        plan
    };
    assert_eq!(
        settled(&remote.replace(MODEL, "published")),
        settled(&local.stdout)
    );
    let weights = |request: &&server::Seen| {
        request.path.contains(".safetensors") && !request.path.contains("index")
    };
    let seen = server.seen();
    let asked: Vec<_> = seen.iter().filter(weights).collect();
    assert!(!asked.is_empty());
    for request in asked {
        assert_eq!(request.range(), Some("bytes=0-65535"), "{request:?}");
    }
    // Nothing of the weights lies in the cache, and the next run fetches them.
    let mut folders = vec![place.path("hf")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("it is there").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            assert!(!name.ends_with(".safetensors"), "{name}");
            if entry.path().is_dir() {
                folders.push(entry.path());
            }
        }
    }
    let ran = ran(&mut command(&place, &server, &QUICK));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn a_local_folder_comes_before_an_id_and_a_revision_is_not_for_it() {
    let (server, place) = with_model();
    fs::create_dir(place.path("some-owner")).expect("a new folder");
    place.checkpoint(MODEL, &RandomCheckpoint::default());
    let ran = ran(&mut command(&place, &server, &QUICK));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(server.seen().is_empty());
    let arguments = [&QUICK[..], &["--revision", "main"]].concat();
    refuses(
        &mut command(&place, &server, &arguments),
        2,
        "error: --revision main is for a model on the hub, and `some-owner/Tiny-Llama` is a local folder",
        "hint: leave --revision out, or start where no such folder is",
    );
}

#[test]
fn a_revision_and_a_cache_folder_can_be_chosen() {
    let (server, place) = with_model();
    let arguments = [
        &QUICK[..],
        &["--revision", "refs/pr/1", "--cache-dir", "elsewhere"],
    ]
    .concat();
    let first = ran(&mut command(&place, &server, &arguments));
    assert_eq!(first.code, 0, "{}", first.stderr);
    let folder = place.path("elsewhere/models--some-owner--Tiny-Llama");
    assert_eq!(
        fs::read_to_string(folder.join("refs/refs/pr/1")).expect("written"),
        COMMIT
    );
    assert!(!place.path("hf").exists());
    // A commit is its own reference.
    let arguments = [
        &QUICK[..],
        &["--revision", COMMIT, "--cache-dir", "elsewhere"],
    ]
    .concat();
    server.seen();
    let second = ran(command(&place, &server, &arguments).env("HF_HUB_OFFLINE", "yes"));
    assert_eq!(second.code, 0, "{}", second.stderr);
    assert!(server.seen().is_empty());
}

/// A parquet file of one column `text`.
pub(crate) fn parquet(rows: &[String]) -> Vec<u8> {
    let schema =
        parse_message_type("message rows { optional binary text (UTF8); }").expect("a schema");
    let mut file = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut file, Arc::new(schema), Arc::default()).expect("a writer");
    let mut group = writer.next_row_group().expect("a row group");
    let mut column = group
        .next_column()
        .expect("a column")
        .expect("the only one");
    let values: Vec<ByteArray> = rows
        .iter()
        .map(|row| ByteArray::from(row.as_str()))
        .collect();
    column
        .typed::<ByteArrayType>()
        .write_batch(&values, Some(&vec![1; rows.len()]), None)
        .expect("written");
    column.close().expect("closed");
    group.close().expect("closed");
    writer.close().expect("closed");
    file
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).expect("in memory");
    encoder.finish().expect("in memory")
}

/// A document per line, each longer than a sample of these tests.
fn documents(seed: u64) -> String {
    let document = |number| format!("{{\"text\": {:?}}}\n", words(seed + number, 200));
    (0..5).map(document).collect()
}

#[test]
fn wikitext2_and_c4_come_from_the_hub_and_again_offline() {
    let place = Place::new();
    let server = Server::start();
    let rows = |seed: u64| (0..40).map(|row| words(seed + row, 60)).collect::<Vec<_>>();
    let wikitext = "datasets/Salesforce/wikitext";
    server.add(
        wikitext,
        "wikitext-2-raw-v1/train-00000-of-00001.parquet",
        parquet(&rows(100)),
    );
    server.add(
        wikitext,
        "wikitext-2-raw-v1/test-00000-of-00001.parquet",
        parquet(&rows(200)),
    );
    server.add(
        "datasets/allenai/c4",
        "en/c4-train.00000-of-01024.json.gz",
        gzip(&documents(1)),
    );
    server.add(
        "datasets/allenai/c4",
        "en/c4-validation.00000-of-00008.json.gz",
        gzip(&documents(2)),
    );
    for (name, other) in [("wikitext2", "wikitext2 train"), ("c4", "c4 train")] {
        let mut hashes = Vec::new();
        for offline in ["0", "1"] {
            let save = format!("{name}{offline}");
            let arguments = [
                "--model",
                "m",
                "--sparsity-ratio",
                "0.5",
                "--dataset",
                name,
                "--eval-dataset",
                name,
                "--nsamples",
                "4",
                "--seqlen",
                "64",
                "--eval-windows",
                "5",
                "--no-save-model",
                "--save",
                &save,
            ];
            let ran = ran(command(&place, &server, &arguments).env("HF_HUB_OFFLINE", offline));
            assert_eq!(ran.code, 0, "{}", ran.stderr);
            assert!(
                ran.stderr
                    .contains(&format!("\ncalibration  {name}: 4 samples")),
                "{}",
                ran.stderr
            );
            nobody_says_the_token(&place, &ran);
            let manifest = place.manifest(&save);
            let calibration = manifest.calibration.expect("wanda calibrates");
            assert!(
                calibration["convention"]
                    .as_str()
                    .is_some_and(|text| text.starts_with(other)),
                "{calibration}"
            );
            let evaluation = manifest.evaluation.expect("measured");
            assert!(
                evaluation["path"]
                    .as_str()
                    .is_some_and(|path| path.contains(COMMIT)),
                "{evaluation}"
            );
            hashes.push((
                calibration["tokens_sha256"].clone(),
                evaluation["tokens_sha256"].clone(),
            ));
            assert_eq!(server.seen().is_empty(), offline == "1");
        }
        assert_eq!(hashes[0], hashes[1]);
    }
    assert!(
        place
            .path("hf/hub/datasets--Salesforce--wikitext/refs/main")
            .is_file()
    );
    assert!(
        place
            .path(&format!(
                "hf/hub/datasets--allenai--c4/snapshots/{COMMIT}/en"
            ))
            .is_dir()
    );
}

#[test]
fn two_processes_share_a_cache_and_download_each_file_once() {
    let (server, place) = with_model();
    // The first one is at it long enough for the second to arrive.
    server.storage_fails("model-00001", 1, Fault::Wait(Duration::from_millis(1500)));
    let spawn = || {
        let mut command = command(&place, &server, &QUICK);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the binary is there")
    };
    let children = [spawn(), spawn()];
    let mut said = String::new();
    for child in children {
        let output = child.wait_with_output().expect("it ends");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{stderr}");
        said += &stderr;
    }
    assert!(
        said.contains("another process downloads `model-00001"),
        "{said}"
    );
    let seen = server.seen();
    let stored: Vec<&str> = seen
        .iter()
        .filter(|request| !request.is_home)
        .map(|request| request.path.as_str())
        .collect();
    let different: BTreeSet<&str> = stored.iter().copied().collect();
    assert_eq!(stored.len(), different.len(), "{stored:?}");
}

/// Runs a command that must fail; holds the error to `first` and `hint`, and the token to silence.
#[track_caller]
fn refuses(command: &mut Command, code: i32, first: &str, hint: &str) -> Ran {
    let ran = ran(command);
    let shown = &ran.stderr;
    assert!(!shown.contains("panicked"), "{shown}");
    let error = shown.find("error: ").map_or("", |at| &shown[at..]);
    assert_eq!(error.lines().next(), Some(first), "{shown}");
    let last = error
        .lines()
        .find(|line| line.starts_with("hint: "))
        .unwrap_or("");
    assert_eq!(last, hint, "{shown}");
    assert_eq!(ran.code, code, "{shown}");
    assert!(
        !shown.contains(TOKEN) && !shown.contains("sigsecret"),
        "{shown}"
    );
    ran
}

fn code(name: &str) -> Vec<(&'static str, String)> {
    vec![("X-Error-Code", name.to_string())]
}

#[test]
fn a_gated_model_asks_for_the_licence_and_the_token() {
    let (server, place) = with_model();
    let page = format!("{}/{MODEL}", server.endpoint());
    // The list of a gated model is public, its files are not.
    for status in [401, 403] {
        server.home_fails("/resolve/", 1, Fault::Status(status, code("GatedRepo")));
        let ran = refuses(
            command(&place, &server, &QUICK).env_remove("HF_TOKEN"),
            1,
            &format!(
                "error: the model `{MODEL}` is gated: its files are for those who accepted its licence"
            ),
            &format!("hint: accept the licence at {page}, then set HF_TOKEN to your token"),
        );
        assert!(
            ran.stderr
                .contains(&format!("`{}` answered {status}", server.host())),
            "{}",
            ran.stderr
        );
    }
    let mut headers = code("GatedRepo");
    headers.push((
        "X-Error-Message",
        format!("Access to model is restricted, not for {TOKEN}"),
    ));
    server.home_fails("/resolve/", 1, Fault::Status(403, headers));
    let ran = refuses(
        &mut command(&place, &server, &QUICK),
        1,
        &format!("error: the token gives no access to the model `{MODEL}`"),
        &format!(
            "hint: accept the licence at {page} with the token's account (its owner may have to approve), and set HF_TOKEN to a \
             token that may read gated repositories"
        ),
    );
    assert!(
        ran.stderr
            .contains("it says: Access to model is restricted, not for (token)"),
        "{}",
        ran.stderr
    );
    assert!(
        !server
            .seen()
            .iter()
            .any(|request| request.path.contains("safetensors"))
    );
}

#[test]
fn what_is_not_there_and_tokens_that_are_not_valid_are_told_apart() {
    let (server, place) = with_model();
    let host = server.host();
    let unknown = [&["--model", "some-owner/Tiny-Lama"], &QUICK[2..]].concat();
    let ran = refuses(
        command(&place, &server, &unknown).env_remove("HF_TOKEN"),
        1,
        &format!("error: there is no model `some-owner/Tiny-Lama` on `{host}`"),
        "hint: check the spelling; a private one needs HF_TOKEN",
    );
    assert!(
        ran.stderr
            .contains("there is no local folder of that name either"),
        "{}",
        ran.stderr
    );
    refuses(
        &mut command(&place, &server, &unknown),
        1,
        &format!(
            "error: the model `some-owner/Tiny-Lama` is not on `{host}`, or the token may not see it"
        ),
        "hint: check the spelling, and whose token it is",
    );
    server.home_fails("/api/", 1, Fault::Status(401, code("RepoNotFound")));
    refuses(
        command(&place, &server, &unknown).env_remove("HF_TOKEN"),
        1,
        &format!("error: the model `some-owner/Tiny-Lama` is not on `{host}`, or not public"),
        &format!(
            "hint: check the spelling; for a private or gated one accept the licence at {}/some-owner/Tiny-Lama and set HF_TOKEN \
             to your token",
            server.endpoint()
        ),
    );
    server.home_fails("/api/", 1, Fault::Status(401, Vec::new()));
    refuses(
        &mut command(&place, &server, &QUICK),
        1,
        &format!("error: `{host}` does not accept the token"),
        &format!(
            "hint: set HF_TOKEN to a new one ({}/settings/tokens), or unset it for public repositories",
            server.endpoint()
        ),
    );
    refuses(
        &mut command(
            &place,
            &server,
            &[&QUICK[..], &["--revision", "v9"]].concat(),
        ),
        1,
        &format!("error: the model `{MODEL}` has no revision `v9`"),
        &format!(
            "hint: see {}/{MODEL}, or use --revision main",
            server.endpoint()
        ),
    );
    refuses(
        &mut command(
            &place,
            &server,
            &[&QUICK[..], &["--revision", "a b"]].concat(),
        ),
        2,
        "error: `--revision a b` is no branch, tag or commit",
        "hint: use a name like main, v1.0 or refs/pr/1, or a commit's hash",
    );
    server.home_fails(
        "tokenizer.json",
        1,
        Fault::Status(404, code("EntryNotFound")),
    );
    refuses(
        &mut command(&place, &server, &QUICK),
        1,
        &format!("error: there is no `tokenizer.json` of the model `{MODEL}` at revision `main`"),
        &format!("hint: see {}/{MODEL}/tree/main", server.endpoint()),
    );
}

#[test]
fn a_busy_or_failing_hub_is_asked_again_and_then_reported() {
    let (server, place) = with_model();
    let host = server.host();
    let wait = |seconds: &str| vec![("Retry-After", seconds.to_string())];
    server.home_fails("/api/", 1, Fault::Status(429, wait("1")));
    server.home_fails("/config.json", 2, Fault::Status(503, Vec::new()));
    server.storage_fails("model-00002", 1, Fault::Status(500, Vec::new()));
    // A signature that has run out: the next try gets a new one.
    server.storage_fails("model-00001", 1, Fault::Status(403, Vec::new()));
    let started = Instant::now();
    let ran = ran(&mut command(&place, &server, &QUICK));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        started.elapsed() >= Duration::from_secs(1),
        "Retry-After is a promise"
    );
    assert!(
        ran.stderr.contains("trying again in 1 s (1 of 2)"),
        "{}",
        ran.stderr
    );
    server.behave();
    let patience = "hint: wait some minutes; what was downloaded is kept";
    server.home_fails("/api/", 9, Fault::Status(429, wait("0")));
    let slow = format!("error: `{host}` answered 429 Too Many Requests: it asks to slow down");
    let ran = refuses(&mut command(&place, &server, &QUICK), 1, &slow, patience);
    assert!(ran.stderr.contains("\n  tried 3 times\n"), "{}", ran.stderr);
    server.behave();
    server.home_fails("/api/", 9, Fault::Status(429, wait("3600")));
    let ran = refuses(&mut command(&place, &server, &QUICK), 1, &slow, patience);
    assert!(
        ran.stderr.contains("\n  it asks to wait 3600 s\n"),
        "{}",
        ran.stderr
    );
    server.behave();
    server.home_fails("/api/", 9, Fault::Status(503, Vec::new()));
    let ran = refuses(
        &mut command(&place, &server, &QUICK),
        1,
        &format!("error: `{host}` answered 503 Service Unavailable"),
        "hint: try again later; what was downloaded is kept",
    );
    assert!(ran.stderr.contains("\n  tried 3 times\n"), "{}", ran.stderr);
}

#[test]
fn odd_redirects_end_in_an_error() {
    let (server, place) = with_model();
    let host = server.host();
    let fix = "hint: check HF_ENDPOINT and the proxy; or name a local folder";
    server.home_fails("/config.json", 1, Fault::RedirectNowhere);
    let nowhere = format!("error: `{host}` redirects without saying where to");
    refuses(&mut command(&place, &server, &QUICK), 1, &nowhere, fix);
    let own = format!("{}/{MODEL}/resolve/{COMMIT}/config.json", server.endpoint());
    server.home_fails("/config.json", 99, Fault::Redirect(own));
    let circle = format!("error: `{host}` redirects in a circle: 10 redirects and no answer");
    refuses(&mut command(&place, &server, &QUICK), 1, &circle, fix);
    server.behave();
    server.home_fails(
        "/config.json",
        1,
        Fault::Redirect("file:///etc/passwd".to_string()),
    );
    let odd = format!("error: `{host}` redirects to something that is no address");
    refuses(&mut command(&place, &server, &QUICK), 1, &odd, fix);
    server.home_fails("/api/", 1, Fault::Page);
    refuses(
        &mut command(&place, &server, &QUICK),
        1,
        &format!("error: `{host}` does not answer as a hub does"),
        "hint: check HF_ENDPOINT; a login page of the network may answer in its place",
    );
}

#[test]
fn a_connection_that_is_not_secure_is_refused_at_once() {
    let (server, place) = with_model();
    let ran = refuses(
        command(&place, &server, &QUICK).env("HF_ENDPOINT", format!("https://{}", server.host())),
        1,
        &format!("error: no secure connection to `{}`", server.host()),
        "hint: check the clock and HF_ENDPOINT; a proxy that opens https with its own certificate is not trusted",
    );
    assert!(!ran.stderr.contains("trying again"), "{}", ran.stderr);
}

#[test]
fn the_token_does_not_come_back_from_another_host() {
    let (server, place) = with_model();
    let away = format!(
        "http://{}/bounce/{MODEL}/resolve/{COMMIT}/config.json",
        server.storage()
    );
    server.home_fails("/config.json", 1, Fault::Redirect(away));
    let ran = ran(&mut command(&place, &server, &QUICK));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let seen = server.seen();
    let config: Vec<(bool, bool)> = seen
        .iter()
        .filter(|request| request.path.ends_with("/config.json") && request.method == "HEAD")
        .map(|request| (request.is_home, request.has_token()))
        .collect();
    assert_eq!(config, [(true, true), (false, false), (true, false)]);
}

#[test]
fn without_network_or_offline_the_ways_out_are_named() {
    let (server, place) = with_model();
    let closed = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let host = closed.local_addr().expect("bound").to_string();
    drop(closed);
    let unreachable = |command: &mut Command| {
        let cache = place.path("hf/hub");
        refuses(
            command.env("HF_ENDPOINT", format!("http://{host}")),
            1,
            &format!("error: cannot reach `{host}`"),
            &format!(
                "hint: name a local folder, or set HF_ENDPOINT to a mirror you can reach, or HF_HUB_OFFLINE=1 to use what lies in `{}`",
                cache.display()
            ),
        )
    };
    let ran = unreachable(&mut command(&place, &server, &QUICK));
    assert!(
        !ran.stderr.contains("HF_HUB_OFFLINE=1 uses that"),
        "{}",
        ran.stderr
    );
    let offline = "run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give";
    let ran = refuses(
        command(&place, &server, &QUICK).env("HF_HUB_OFFLINE", "1"),
        1,
        &format!(
            "error: the model `{MODEL}` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it"
        ),
        &format!("hint: {offline} a local folder to --model"),
    );
    assert!(
        ran.stderr.contains(&format!(
            "the cache is `{}`",
            place.path("hf/hub").display()
        )),
        "{}",
        ran.stderr
    );
    place.checkpoint("m", &RandomCheckpoint::default());
    let dataset = ["--model", "m", "--sparsity-ratio", "0.5", "--eval", "none"];
    refuses(
        command(&place, &server, &dataset).env("HF_HUB_OFFLINE", "1"),
        1,
        "error: `wikitext-2-raw-v1/train-00000-of-00001.parquet` of the dataset `Salesforce/wikitext` (revision `main`) is not in \
         the cache, and HF_HUB_OFFLINE forbids to download it",
        &format!(
            "hint: {offline} the text's path; or use --dataset wikitext2:PATH for a text on disk"
        ),
    );
    assert!(server.seen().is_empty());
    // A download that broke off: the cache has a part, and says which file is missing.
    server.storage_fails("model-00002", 9, Fault::Status(500, Vec::new()));
    refuses(
        &mut command(&place, &server, &QUICK),
        1,
        &format!(
            "error: `{}` answered 500 Internal Server Error",
            server.storage()
        ),
        "hint: try again later; what was downloaded is kept",
    );
    server.behave();
    let commit = [&QUICK[..], &["--revision", COMMIT]].concat();
    let shard = place
        .names("published")
        .into_iter()
        .find(|name| name.starts_with("model-00002"))
        .expect("a second shard");
    refuses(
        command(&place, &server, &commit).env("HF_HUB_OFFLINE", "1"),
        1,
        &format!(
            "error: `{shard}` of the model `{MODEL}` (revision `{COMMIT}`) is not in the cache, and HF_HUB_OFFLINE forbids to \
             download it"
        ),
        &format!("hint: {offline} a local folder to --model"),
    );
    // And with all of it there, an unreachable hub says that offline would do.
    let whole = crate::cli::ran(&mut command(&place, &server, &QUICK));
    assert_eq!(whole.code, 0, "{}", whole.stderr);
    let ran = unreachable(&mut command(&place, &server, &QUICK));
    assert!(
        ran.stderr.contains(&format!(
            "the cache holds it at commit {COMMIT}: HF_HUB_OFFLINE=1 uses that"
        )),
        "{}",
        ran.stderr
    );
}

#[test]
fn repositories_that_cannot_be_pruned_are_refused_before_anything_large_is_downloaded() {
    let (server, place) = with_model();
    for name in [
        "config.json",
        "tokenizer.json",
        "pytorch_model-00001-of-00002.bin",
    ] {
        server.add("models/a/pickled", name, "{}");
    }
    for name in [
        "config.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    ] {
        server.add("models/a/adapter", name, "{}");
    }
    server.add("models/a/gguf", "tiny.Q4_K_M.gguf", "GGUF");
    server.add("models/a/empty", "README.md", "nothing");
    server.add("models/a/no-config", "model.safetensors", "x");
    for (name, first) in [
        (
            "a/pickled",
            "error: `a/pickled` holds pickled weights only, and loading a pickle can run code",
        ),
        (
            "a/adapter",
            "error: `a/adapter` is an adapter, not a whole model",
        ),
        (
            "a/gguf",
            "error: `a/gguf` holds GGUF weights, not safetensors",
        ),
        (
            "a/empty",
            "error: `a/empty` holds no model at revision `main`",
        ),
        (
            "a/no-config",
            "error: `a/no-config` has no config.json at revision `main`",
        ),
    ] {
        let arguments = [&["--model", name], &QUICK[2..]].concat();
        let ran = ran(&mut command(&place, &server, &arguments));
        assert_eq!(
            (ran.code, ran.stderr.lines().next()),
            (1, Some(first)),
            "{}",
            ran.stderr
        );
        assert!(ran.stderr.contains("\nhint: "), "{}", ran.stderr);
        assert_eq!(server.seen().len(), 1, "only the list");
    }
    let config = fs::read_to_string(place.path("published/config.json")).expect("written");
    server.add(
        REPO,
        "config.json",
        config
            .replace("\"llama\"", "\"mamba\"")
            .replace("LlamaForCausalLM", "MambaForCausalLM"),
    );
    refuses(
        &mut command(&place, &server, &QUICK),
        1,
        "error: the architecture `MambaForCausalLM` is not supported",
        "hint: use a checkpoint whose config.json says `\"model_type\": \"llama\"`",
    );
    assert!(server.seen().iter().all(|request| request.path.contains("/api/") || request.path.ends_with("/config.json")));
    let config = config.into_bytes();
    server.add(REPO, "config.json", config);
    let index = r#"{"weight_map": {"a": "model-00001.safetensors", "b": "gone.safetensors"}}"#;
    server.add(REPO, "model.safetensors.index.json", index);
    let fresh = [&QUICK[..], &["--cache-dir", "fresh"]].concat();
    refuses(
        &mut command(&place, &server, &fresh),
        1,
        &format!(
            "error: the model `{MODEL}` is incomplete: `model.safetensors.index.json` names `gone.safetensors`, which is not there"
        ),
        "hint: use another --revision",
    );
}

#[test]
fn the_penn_treebank_needs_a_path() {
    let place = Place::new();
    let ran = place.run(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--dataset",
        "ptb",
    ]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(
        ran.stderr
            .contains("its licence does not allow to pass it on"),
        "{}",
        ran.stderr
    );
    assert!(
        ran.stderr.contains("ptb:data/ptb.train.txt"),
        "{}",
        ran.stderr
    );
}
