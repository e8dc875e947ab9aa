//! Models and datasets from a hub on the loopback: requests, cache, errors.
//!
//! Whole runs use the real binary. `transfers` tests broken transfers on the library.

mod refusals;
mod server;
mod tls;
mod transfers;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use prune::bytes::ByteSize;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;
use server::{COMMIT, Fault, Seen, sha256};

use crate::support::{Place, Ran, TEXTS, ran, shared, words};
pub(crate) use server::Server;

const TOKEN: &str = "hf_TheTokenOfAPerson";
const MODEL: &str = "some-owner/Tiny-Llama";
const REPO: &str = "models/some-owner/Tiny-Llama";

/// A server with a sharded model and its other files.
fn with_model() -> (Server, Place) {
    with_model_on(Server::start())
}

fn with_model_on(server: Server) -> (Server, Place) {
    let place = Place::empty();
    place.checkpoint(
        "published",
        &RandomCheckpoint { max_shard: ByteSize(200 << 10), ..RandomCheckpoint::default() },
    );
    for name in place.names("published") {
        let content = fs::read(place.path("published").join(&name)).expect("written above");
        server.add(REPO, &name, content);
    }
    for name in [
        "LICENSE.txt",
        "pytorch_model.bin",
        "original/README.md",
        "original/params.json",
        "other.safetensors",
    ] {
        server.add(REPO, name, name);
    }
    server.add(REPO, "README.md", "---\nlicense: llama2\n---\n# Tiny\n");
    (server, place)
}

/// The program with this hub, its cache in `hf`, a token, and no patience.
pub(crate) fn command(place: &Place, server: &Server, arguments: &str) -> Command {
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
const QUICK: &str =
    "--model some-owner/Tiny-Llama --sparsity-ratio 0.5 --prune-method magnitude --eval none";

fn assert_no_token(place: &Place, ran: &Ran) {
    assert!(!ran.stderr.contains(TOKEN) && !ran.stdout.contains(TOKEN));
    assert!(!ran.stderr.contains("sigsecret"), "{}", ran.stderr);
    let mut folders = vec![place.path(".")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("it is there").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(content) = fs::read(&path) {
                let found = content.windows(TOKEN.len()).any(|part| part == TOKEN.as_bytes());
                assert!(!found, "{}", path.display());
            }
        }
    }
}

/// Runs a command that must fail; holds the error to `first` and `hint`, and the token to silence.
#[track_caller]
fn refuses(command: &mut Command, code: i32, first: &str, hint: &str) -> Ran {
    let ran = ran(command);
    let shown = &ran.stderr;
    assert!(!shown.contains("panicked"), "{shown}");
    let error = shown.find("error: ").map_or("", |at| &shown[at..]);
    assert_eq!(error.lines().next(), Some(first), "{shown}");
    let last = error.lines().find(|line| line.starts_with("hint: ")).unwrap_or("");
    assert_eq!(last, hint, "{shown}");
    assert_eq!(ran.code, code, "{shown}");
    assert!(!shown.contains(TOKEN) && !shown.contains("sigsecret"), "{shown}");
    ran
}

#[test]
fn a_sharded_model_is_pruned_from_the_hub_and_again_offline() {
    let (server, place) = with_model();
    let run = |save: &str, more: &[(&str, &str)]| {
        let arguments = format!("--model {MODEL} --sparsity-ratio 0.5 --save {save} {TEXTS}");
        let ran = ran(command(&place, &server, &arguments).envs(more.iter().copied()));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert_no_token(&place, &ran);
        ran
    };
    run("first", &[]);
    let seen = server.seen();
    let published = place.names("published");
    let shards: BTreeSet<&String> =
        published.iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert!(shards.len() > 2, "{published:?}");
    for request in &seen {
        assert_eq!(request.has_token(), request.is_home, "{request:?}");
        for unwanted in ["pytorch_model", "original", "other.safe"] {
            assert!(!request.path.contains(unwanted), "{request:?}");
        }
    }
    let first_file = seen.iter().find(|request| request.path.contains("/resolve/"));
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
    assert_eq!(fs::read_to_string(folder.join("refs/main")).expect("written"), COMMIT);
    for name in published.iter().map(String::as_str).chain(["LICENSE.txt"]) {
        let link = fs::read_link(folder.join("snapshots").join(COMMIT).join(name)).expect("a link");
        let blob = link.strip_prefix("../../blobs").expect("relative").to_path_buf();
        let content = fs::read(folder.join("blobs").join(&blob)).expect("the blob");
        let hash = sha256(&content);
        let expected = if name.ends_with(".safetensors") { &hash } else { &hash[..40] };
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

    let card = fs::read(place.path("first/model/README.md")).expect("a card");
    let card = prune::report::front_matter::FrontMatter::of(&card);
    assert_eq!(card.get("license"), ["llama2"]);
    assert_eq!(card.get("base_model"), [MODEL]);
    let kept = fs::read_to_string(place.path("first/model/README.source.md"));
    assert!(kept.expect("the source's card").ends_with("# Tiny\n"));

    // Only the list is requested again; offline, nothing is.
    run("second", &[]);
    assert_eq!(server.seen().len(), 1);
    run("third", &[("HF_HUB_OFFLINE", "1")]);
    assert!(server.seen().is_empty());
    let local = "--model published --sparsity-ratio 0.5 --save fourth";
    place.prune(local);
    let masks = |run: &str| {
        let layers = place.manifest(run).layers.into_iter();
        let matrices = layers.flat_map(|layer| layer.matrices);
        matrices.map(|matrix| matrix.mask_sha256).collect::<Vec<_>>()
    };
    for run in ["first", "second", "third"] {
        assert_eq!(masks(run), masks("fourth"), "{run}");
    }
}

#[test]
fn a_plan_needs_the_headers_alone() {
    let (server, place) = with_model();
    let local = place.run("plan --model published --max-memory cpu=4GiB --json");
    let plan = |arguments: &str| {
        let ran = ran(&mut command(&place, &server, arguments));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert_no_token(&place, &ran);
        ran.stdout
    };
    let remote = plan(&format!("plan --model {MODEL} --max-memory cpu=4GiB --json"));
    // The free memory of the machine differs between runs.
    let settled = |text: &str| {
        let mut plan: serde_json::Value = serde_json::from_str(text).expect("one object");
        plan["inventory"].take();
        plan
    };
    assert_eq!(settled(&remote.replace(MODEL, "published")), settled(&local.stdout));
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
    let ran = ran(&mut command(&place, &server, QUICK));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn a_plan_uses_the_cache_offline_and_without_a_network() {
    let (server, place) = with_model();
    let plan = format!("plan --model {MODEL} --max-memory cpu=4GiB --json");
    let settled = |ran: &Ran| {
        let mut plan: serde_json::Value = serde_json::from_str(&ran.stdout).expect("one object");
        plan["inventory"].take();
        plan
    };
    refuses(
        command(&place, &server, &plan).env("HF_HUB_OFFLINE", "1"),
        1,
        &format!(
            "error: the model `{MODEL}` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it"
        ),
        "hint: run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give a local \
         folder to --model",
    );
    assert!(server.seen().is_empty());
    let online = ran(&mut command(&place, &server, &plan));
    assert_eq!(online.code, 0, "{}", online.stderr);
    let fetched = ran(&mut command(&place, &server, QUICK));
    assert_eq!(fetched.code, 0, "{}", fetched.stderr);
    assert!(!server.seen().is_empty());
    let offline = ran(command(&place, &server, &plan).env("HF_HUB_OFFLINE", "1"));
    assert_eq!(offline.code, 0, "{}", offline.stderr);
    assert_eq!(settled(&offline), settled(&online));
    let closed = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let host = closed.local_addr().expect("bound").to_string();
    drop(closed);
    let cut_off = ran(command(&place, &server, &plan).env("HF_ENDPOINT", format!("http://{host}")));
    assert_eq!(cut_off.code, 0, "{}", cut_off.stderr);
    assert_eq!(settled(&cut_off), settled(&online));
    assert!(
        cut_off.stderr.contains(&format!("is taken from the cache at commit {COMMIT}")),
        "{}",
        cut_off.stderr
    );
    assert!(server.seen().is_empty(), "neither plan asked the hub");
}

#[test]
fn a_local_folder_comes_before_an_id_and_a_revision_is_not_for_it() {
    let (server, place) = with_model();
    fs::create_dir(place.path("some-owner")).expect("a new folder");
    place.checkpoint(MODEL, &RandomCheckpoint::default());
    let ran = ran(&mut command(&place, &server, QUICK));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(server.seen().is_empty());
    let arguments = format!("{QUICK} --revision main");
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
    let arguments = format!("{QUICK} --revision refs/pr/1 --cache-dir elsewhere");
    let first = ran(&mut command(&place, &server, &arguments));
    assert_eq!(first.code, 0, "{}", first.stderr);
    let folder = place.path("elsewhere/models--some-owner--Tiny-Llama");
    assert_eq!(fs::read_to_string(folder.join("refs/refs/pr/1")).expect("written"), COMMIT);
    assert!(!place.path("hf").exists());
    // A commit is its own reference.
    let arguments = format!("{QUICK} --revision {COMMIT} --cache-dir elsewhere");
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
    let mut column = group.next_column().expect("a column").expect("the only one");
    let values: Vec<ByteArray> = rows.iter().map(|row| ByteArray::from(row.as_str())).collect();
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
    server.add(wikitext, "wikitext-2-raw-v1/train-00000-of-00001.parquet", parquet(&rows(100)));
    server.add(wikitext, "wikitext-2-raw-v1/test-00000-of-00001.parquet", parquet(&rows(200)));
    server.add("datasets/allenai/c4", "en/c4-train.00000-of-01024.json.gz", gzip(&documents(1)));
    server.add(
        "datasets/allenai/c4",
        "en/c4-validation.00000-of-00008.json.gz",
        gzip(&documents(2)),
    );
    for (name, other) in [("wikitext2", "wikitext2 train"), ("c4", "c4 train")] {
        let mut hashes = Vec::new();
        for offline in ["0", "1"] {
            let save = format!("{name}{offline}");
            let arguments = format!(
                "--model m --sparsity-ratio 0.5 --dataset {name} --eval-dataset {name} \
                 --nsamples 4 --seqlen 64 --eval-windows 5 --no-save-model --save {save}"
            );
            let ran = ran(command(&place, &server, &arguments).env("HF_HUB_OFFLINE", offline));
            assert_eq!(ran.code, 0, "{}", ran.stderr);
            assert!(
                ran.stderr.contains(&format!("\ncalibration  {name}: 4 samples")),
                "{}",
                ran.stderr
            );
            assert_no_token(&place, &ran);
            let manifest = place.manifest(&save);
            let calibration = manifest.calibration.expect("wanda calibrates");
            assert!(calibration.convention.starts_with(other), "{calibration:?}");
            let evaluation = manifest.evaluation.expect("measured");
            assert!(evaluation.path.contains(COMMIT), "{evaluation:?}");
            hashes.push((calibration.tokens_sha256, evaluation.tokens_sha256));
            assert_eq!(server.seen().is_empty(), offline == "1");
        }
        assert_eq!(hashes[0], hashes[1]);
    }
    assert!(place.path("hf/hub/datasets--Salesforce--wikitext/refs/main").is_file());
    assert!(place.path(&format!("hf/hub/datasets--allenai--c4/snapshots/{COMMIT}/en")).is_dir());
}

#[test]
fn a_file_of_any_data_set_repository_is_read_and_again_offline() {
    let place = Place::new();
    let server = Server::start();
    let chats = "datasets/acme/chats";
    server.add(chats, "README.md", "# Chats");
    server.add(chats, "data/train.jsonl", documents(1));
    server.add(chats, "data/test-00000-of-00001.parquet", parquet(&[words(7, 900)]));
    server.add(chats, "plain.txt", words(9, 900));
    let eval = "eval m --seqlen 64 --eval-windows 5 --eval-dataset";
    for offline in ["0", "1"] {
        // The only file of the split, a file by its path, and a plain text.
        for dataset in
            ["hub:acme/chats", "hub:acme/chats:data/train.jsonl", "hub:acme/chats:plain.txt"]
        {
            let arguments = format!("{eval} {dataset}");
            let ran = ran(command(&place, &server, &arguments).env("HF_HUB_OFFLINE", offline));
            assert_eq!(ran.code, 0, "{dataset}, offline {offline}: {}", ran.stderr);
            assert_no_token(&place, &ran);
        }
        assert_eq!(server.seen().is_empty(), offline == "1");
    }
    let pruned = "--model m --sparsity-ratio 0.5 --dataset hub:acme/chats --nsamples 4 --seqlen 64 --eval none";
    let ran = ran(&mut command(&place, &server, pruned));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("documents    text, 5 of 5 examples of `train.jsonl`"),
        "{}",
        ran.stderr
    );
    server.add(chats, "train-2.jsonl", documents(2));
    refuses(
        &mut command(&place, &server, pruned),
        1,
        "error: `hub:acme/chats` has 2 files for --dataset, and one is read",
        "hint: name the file: --dataset hub:acme/chats:FILE",
    );
    let missing = format!("{eval} hub:acme/chats:absent.jsonl");
    let ran = super::support::ran(&mut command(&place, &server, &missing));
    assert!(
        ran.code == 1 && ran.stderr.contains("`absent.jsonl` of the dataset"),
        "{}",
        ran.stderr
    );
}

#[test]
fn questions_of_tasks_are_downloaded_once_and_asked_again_offline() {
    let Some(shared) = shared() else { return };
    let place = Place::new();
    let server = Server::start();
    let question = |task: &str, split: &str| {
        let path = shared.join("data/tasks").join(task).join(format!("{split}.parquet"));
        fs::read(path).expect("a split of the made-up data")
    };
    // Several configurations in a repository, and a repository with a single configuration.
    for (split, name) in [("test", "0000.parquet"), ("train", "0000.parquet")] {
        for (config, task) in [("ARC-Easy", "arc_easy"), ("ARC-Challenge", "arc_challenge")] {
            let file = format!("{config}/{split}/{name}");
            server.add("datasets/allenai/ai2_arc", &file, question(task, split));
        }
    }
    let piqa = question("piqa", "validation");
    server.add("datasets/baber/piqa", "plain_text/validation/0000.parquet", piqa);
    let eval = "eval m --tasks arc_easy,arc_challenge,piqa --limit 5 --use-cpu --json";
    let asked = |arguments: &str, offline: &str| {
        let ran = ran(command(&place, &server, arguments).env("HF_HUB_OFFLINE", offline));
        assert_eq!(ran.code, 0, "offline {offline}: {}", ran.stderr);
        let json: Value = serde_json::from_str(&ran.stdout).expect("a record");
        json["tasks"].to_string()
    };
    let first = asked(eval, "0");
    let is_list = |seen: &&Seen| seen.path.contains("/revision/refs%2Fconvert%2Fparquet");
    assert_eq!(server.seen().iter().filter(is_list).count(), 2, "a list per repository");
    assert_eq!(asked(eval, "1"), first);
    assert!(server.seen().is_empty());
    let from = shared.join("data/tasks").display().to_string();
    assert_eq!(asked(&format!("{eval} --tasks-from '{from}'"), "1"), first);
    let missing = "eval m --tasks boolq --use-cpu";
    let missing = super::support::ran(command(&place, &server, missing).env("HF_HUB_OFFLINE", "1"));
    assert_eq!(missing.code, 1, "{}", missing.stderr);
    for text in ["`aps/super_glue`", "name a folder with the files: --tasks-from DIR"] {
        assert!(missing.stderr.contains(text), "{}", missing.stderr);
    }
}

#[test]
fn two_processes_share_a_cache_and_download_each_file_once() {
    let (server, place) = with_model();
    // The first one is at it long enough for the second to arrive.
    server.storage_fails("model-00001", 1, Fault::Wait(Duration::from_millis(1500)));
    let spawn = || {
        let mut command = command(&place, &server, QUICK);
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
    assert!(said.contains("another process downloads `model-00001"), "{said}");
    let seen = server.seen();
    let stored: Vec<&str> = seen
        .iter()
        .filter(|request| !request.is_home)
        .map(|request| request.path.as_str())
        .collect();
    let different: BTreeSet<&str> = stored.iter().copied().collect();
    assert_eq!(stored.len(), different.len(), "{stored:?}");
}
