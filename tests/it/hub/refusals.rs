//! Refusals of the hub, and failing networks: the message names the repository, the reason and the fix.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use prune::synthetic::RandomCheckpoint;

use super::server::{COMMIT, Fault};
use super::{MODEL, QUICK, REPO, TOKEN, assert_no_token, command, refuses, with_model};
use crate::support::{Place, ran};

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
            command(&place, &server, QUICK).env_remove("HF_TOKEN"),
            1,
            &format!(
                "error: the model `{MODEL}` is gated: only users who accepted its licence may download its files"
            ),
            &format!("hint: accept the licence at {page}, then set HF_TOKEN to your token"),
        );
        assert!(
            ran.stderr.contains(&format!("`{}` answered {status}", server.host())),
            "{}",
            ran.stderr
        );
    }
    let mut headers = code("GatedRepo");
    headers.push(("X-Error-Message", format!("Access to model is restricted, not for {TOKEN}")));
    server.home_fails("/resolve/", 1, Fault::Status(403, headers));
    let ran = refuses(
        &mut command(&place, &server, QUICK),
        1,
        &format!("error: the token gives no access to the model `{MODEL}`"),
        &format!(
            "hint: accept the licence at {page} with the token's account (its owner may have to approve), and set HF_TOKEN to a \
             token that may read gated repositories"
        ),
    );
    assert!(
        ran.stderr.contains("its message: Access to model is restricted, not for (token)"),
        "{}",
        ran.stderr
    );
    assert!(!server.seen().iter().any(|request| request.path.contains("safetensors")));
}

/// The detail of a failure for an id that may be a mistyped path.
fn taken_for_id(id: &str) -> String {
    format!("  there is no folder `{id}`, so it was taken for an id of the hub\n")
}

#[test]
fn what_is_not_there_and_tokens_that_are_not_valid_are_told_apart() {
    let (server, place) = with_model();
    let host = server.host();
    let unknown = QUICK.replace(MODEL, "some-owner/Tiny-Lama");
    let ran = refuses(
        command(&place, &server, &unknown).env_remove("HF_TOKEN"),
        1,
        &format!("error: there is no model `some-owner/Tiny-Lama` on `{host}`"),
        "hint: check the spelling; a private one needs HF_TOKEN",
    );
    assert!(ran.stderr.contains(&taken_for_id("some-owner/Tiny-Lama")), "{}", ran.stderr);
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
        &mut command(&place, &server, QUICK),
        1,
        &format!("error: `{host}` does not accept the token"),
        &format!(
            "hint: set HF_TOKEN to a new one ({}/settings/tokens), or unset it for public repositories",
            server.endpoint()
        ),
    );
    refuses(
        &mut command(&place, &server, &format!("{QUICK} --revision v9")),
        1,
        &format!("error: the model `{MODEL}` has no revision `v9`"),
        &format!("hint: see {}/{MODEL}, or use --revision main", server.endpoint()),
    );
    refuses(
        &mut command(&place, &server, &format!("{QUICK} --revision 'a b'")),
        2,
        "error: `--revision a b` is not a branch, tag or commit",
        "hint: use a name like main, v1.0 or refs/pr/1, or a commit's hash",
    );
    server.home_fails("tokenizer.json", 1, Fault::Status(404, code("EntryNotFound")));
    refuses(
        &mut command(&place, &server, QUICK),
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
    let ran = ran(&mut command(&place, &server, QUICK));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(started.elapsed() >= Duration::from_secs(1), "Retry-After is a promise");
    assert!(ran.stderr.contains("trying again in 1 s (1 of 2)"), "{}", ran.stderr);
    server.behave();
    let patience = "hint: wait some minutes; the downloaded part is kept";
    server.home_fails("/api/", 9, Fault::Status(429, wait("0")));
    let slow = format!("error: `{host}` answered 429 Too Many Requests: it asks to slow down");
    let ran = refuses(&mut command(&place, &server, QUICK), 1, &slow, patience);
    assert!(ran.stderr.contains("\n  tried 3 times\n"), "{}", ran.stderr);
    server.behave();
    server.home_fails("/api/", 9, Fault::Status(429, wait("3600")));
    let ran = refuses(&mut command(&place, &server, QUICK), 1, &slow, patience);
    assert!(ran.stderr.contains("\n  it asks to wait 3600 s\n"), "{}", ran.stderr);
    server.behave();
    server.home_fails("/api/", 9, Fault::Status(503, Vec::new()));
    let ran = refuses(
        &mut command(&place, &server, QUICK),
        1,
        &format!("error: `{host}` answered 503 Service Unavailable"),
        "hint: try again later; the downloaded part is kept",
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
    refuses(&mut command(&place, &server, QUICK), 1, &nowhere, fix);
    let own = format!("{}/{MODEL}/resolve/{COMMIT}/config.json", server.endpoint());
    server.home_fails("/config.json", 99, Fault::Redirect(own));
    let circle = format!("error: `{host}` redirects in a circle: 10 redirects and no answer");
    refuses(&mut command(&place, &server, QUICK), 1, &circle, fix);
    server.behave();
    server.home_fails("/config.json", 1, Fault::Redirect("file:///etc/passwd".to_string()));
    let odd = format!("error: `{host}` redirects to something that is no address");
    refuses(&mut command(&place, &server, QUICK), 1, &odd, fix);
    server.home_fails("/api/", 1, Fault::Page);
    refuses(
        &mut command(&place, &server, QUICK),
        1,
        &format!("error: `{host}` does not answer like a hub"),
        "hint: check HF_ENDPOINT; a login page of the network may answer in its place",
    );
}

#[test]
fn a_connection_that_is_not_secure_is_refused_at_once() {
    let (server, place) = with_model();
    let ran = refuses(
        command(&place, &server, QUICK).env("HF_ENDPOINT", format!("https://{}", server.host())),
        1,
        &format!("error: no secure connection to `{}`", server.host()),
        "hint: check HF_ENDPOINT and HTTPS_PROXY: the server may speak plain http",
    );
    assert!(!ran.stderr.contains("trying again"), "{}", ran.stderr);
}

#[test]
fn the_token_does_not_come_back_from_another_host() {
    let (server, place) = with_model();
    let away = format!("http://{}/bounce/{MODEL}/resolve/{COMMIT}/config.json", server.storage());
    server.home_fails("/config.json", 1, Fault::Redirect(away));
    let ran = ran(&mut command(&place, &server, QUICK));
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
                "hint: name a local folder, or set HF_ENDPOINT to a mirror you can reach, or HF_HOME to a cache that holds all files; `{}` does not",
                cache.display()
            ),
        )
    };
    let ran = unreachable(&mut command(&place, &server, QUICK));
    assert!(ran.stderr.contains(&taken_for_id(MODEL)), "{}", ran.stderr);
    let offline = "run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give";
    let ran = refuses(
        command(&place, &server, QUICK).env("HF_HUB_OFFLINE", "1"),
        1,
        &format!(
            "error: the model `{MODEL}` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it"
        ),
        &format!("hint: {offline} a local folder to --model"),
    );
    assert!(ran.stderr.contains(&taken_for_id(MODEL)), "{}", ran.stderr);
    assert!(
        ran.stderr.contains(&format!("the cache is `{}`", place.path("hf/hub").display())),
        "{}",
        ran.stderr
    );
    place.checkpoint("m", &RandomCheckpoint::default());
    let dataset = "--model m --sparsity-ratio 0.5 --eval none";
    refuses(
        command(&place, &server, dataset).env("HF_HUB_OFFLINE", "1"),
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
        &mut command(&place, &server, QUICK),
        1,
        &format!("error: `{}` answered 500 Internal Server Error", server.storage()),
        "hint: try again later; the downloaded part is kept",
    );
    server.behave();
    let commit = format!("{QUICK} --revision {COMMIT}");
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
}

#[test]
fn a_complete_cache_is_used_with_a_warning_without_a_network_and_without_a_word_offline() {
    let (server, place) = with_model();
    let whole = ran(&mut command(&place, &server, QUICK));
    assert_eq!(whole.code, 0, "{}", whole.stderr);
    let closed = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let host = closed.local_addr().expect("bound").to_string();
    drop(closed);
    let warning = format!(
        "warning: cannot reach `{host}`; the model `{MODEL}` is taken from the cache at commit {COMMIT}"
    );
    let plan = format!("plan {}", QUICK.replace("--sparsity-ratio 0.5 ", ""));
    for line in [QUICK, &plan] {
        let away = ran(command(&place, &server, line).env("HF_ENDPOINT", format!("http://{host}")));
        assert_eq!(away.code, 0, "{}", away.stderr);
        assert!(away.stderr.contains(&warning), "{}", away.stderr);
        assert_no_token(&place, &away);
    }
    // A server that answers is asked again later; the cache does not speak for it.
    server.home_fails("/api/", 9, Fault::Status(503, Vec::new()));
    assert_eq!(ran(&mut command(&place, &server, QUICK)).code, 1);
    server.behave();
    server.home_fails("/api/", 9, Fault::Status(404, Vec::new()));
    assert_eq!(ran(&mut command(&place, &server, QUICK)).code, 1);
    server.behave();
    // No request, and so no token, under every variable of the Python clients.
    for variable in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
        server.seen();
        let offline = ran(command(&place, &server, QUICK).env(variable, "True"));
        assert_eq!(offline.code, 0, "{}", offline.stderr);
        assert!(!offline.stderr.contains("is taken from the cache"), "{}", offline.stderr);
        assert!(server.seen().is_empty(), "{variable}");
        let other = QUICK.replace(MODEL, "some-owner/Absent");
        let absent = ran(command(&place, &server, &other).env(variable, "1"));
        let forbids = format!("{variable} forbids to download it");
        assert!(absent.stderr.contains(&forbids), "{}", absent.stderr);
        assert!(server.seen().is_empty(), "{variable}");
    }
    // A variable of data sets alone lets the model be asked for, and no text.
    let text = format!("{} --prune-method wanda", QUICK.replace(" --prune-method magnitude", ""));
    let datasets = ran(command(&place, &server, &text).env("HF_DATASETS_OFFLINE", "1"));
    let forbids = "HF_DATASETS_OFFLINE forbids to download it";
    assert!(datasets.stderr.contains(forbids), "{}", datasets.stderr);
    assert!(server.seen().iter().all(|request| !request.path.contains("datasets")));
}

#[test]
fn repositories_that_cannot_be_pruned_are_refused_before_anything_large_is_downloaded() {
    let (server, place) = with_model();
    for name in ["config.json", "tokenizer.json", "pytorch_model-00001-of-00002.bin"] {
        server.add("models/a/pickled", name, "{}");
    }
    for name in ["config.json", "adapter_config.json", "adapter_model.safetensors"] {
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
        ("a/adapter", "error: `a/adapter` is an adapter, not a whole model"),
        ("a/gguf", "error: `a/gguf` holds GGUF weights, not safetensors"),
        ("a/empty", "error: `a/empty` holds no model at revision `main`"),
        ("a/no-config", "error: `a/no-config` has no config.json at revision `main`"),
    ] {
        let arguments = QUICK.replace(MODEL, name);
        let ran = ran(&mut command(&place, &server, &arguments));
        assert_eq!((ran.code, ran.stderr.lines().next()), (1, Some(first)), "{}", ran.stderr);
        assert!(ran.stderr.contains("\nhint: "), "{}", ran.stderr);
        assert_eq!(server.seen().len(), 1, "only the list");
    }
    let config = fs::read_to_string(place.path("published/config.json")).expect("written");
    server.add(
        REPO,
        "config.json",
        config.replace("\"llama\"", "\"mamba\"").replace("LlamaForCausalLM", "MambaForCausalLM"),
    );
    refuses(
        &mut command(&place, &server, QUICK),
        1,
        "error: the architecture `MambaForCausalLM` is not supported",
        "hint: choose a model of a supported family (docs/families.md); a changed config.json does not make it one",
    );
    assert!(server.seen().iter().all(|request| request.path.contains("/api/") || request.path.ends_with("/config.json")));
    let config = config.into_bytes();
    server.add(REPO, "config.json", config);
    let index = r#"{"weight_map": {"a": "model-00001.safetensors", "b": "gone.safetensors"}}"#;
    server.add(REPO, "model.safetensors.index.json", index);
    let fresh = format!("{QUICK} --cache-dir fresh");
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
    let ran = place.run("--model m --sparsity-ratio 0.5 --dataset ptb");
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("its licence forbids copies"), "{}", ran.stderr);
    assert!(ran.stderr.contains("ptb:data/ptb.train.txt"), "{}", ran.stderr);
}
