//! Broken transfers, on the library: each case transfers one file of a dataset and takes milliseconds.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use prune::hub::{Hub, HubSettings};
use prune::run::{Event, Events};
use tempfile::TempDir;

use super::TOKEN;
use super::server::{Fault, Server, sha256};

const FILE: &str = "en/c4-train.00000-of-01024.json.gz";

/// A hub with one large file, a cache, and the messages.
struct Bench {
    server: Server,
    folder: TempDir,
    content: Vec<u8>,
    said: Said,
}

#[derive(Default)]
struct Said(Mutex<Vec<Event>>);

impl Events for Said {
    fn emit(&self, event: Event) {
        self.0.lock().expect("no test panics while it emits").push(event);
    }
}

impl Bench {
    fn new(bytes: usize) -> Self {
        // Bytes that differ everywhere, so that a part in the wrong place is seen.
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let content: Vec<u8> = (0..bytes).map(|_| next()).collect();
        let server = Server::start();
        server.add("datasets/allenai/c4", FILE, content.clone());
        Self {
            server,
            folder: tempfile::tempdir().expect("a temporary folder"),
            content,
            said: Said::default(),
        }
    }

    fn hub(&self, more: &[(&str, &str)]) -> Hub {
        let endpoint = self.server.endpoint();
        let mut variables = vec![
            ("HF_ENDPOINT", endpoint.as_str()),
            ("HF_TOKEN", TOKEN),
            ("PRUNE_HUB_RETRIES", "2"),
            ("PRUNE_HUB_RETRY_SECONDS", "0.01"),
        ];
        variables.extend(more);
        let lookup = |name: &str| {
            let found = variables.iter().rev().find(|(other, _)| *other == name);
            found.map(|(_, value)| OsString::from(value))
        };
        Hub::new(HubSettings::resolve(Some(self.folder.path()), &lookup).expect("valid"))
    }

    fn fetch(&self, more: &[(&str, &str)]) -> anyhow::Result<PathBuf> {
        let folder = self.hub(more).dataset_file("allenai/c4", FILE, &self.said)?;
        Ok(folder.join(FILE))
    }

    /// It must arrive, and be right.
    #[track_caller]
    fn arrives(&self, more: &[(&str, &str)]) {
        let path = self.fetch(more).expect("it arrives");
        assert!(fs::read(path).expect("readable") == self.content, "other bytes");
        assert!(!self.partial().exists());
    }

    /// It must not; the error's text.
    #[track_caller]
    fn fails(&self, more: &[(&str, &str)]) -> String {
        let error = self.fetch(more).expect_err("it must not arrive").to_string();
        assert!(!error.contains(TOKEN) && !error.contains("sigsecret"), "{error}");
        error
    }

    fn partial(&self) -> PathBuf {
        let blobs = self.folder.path().join("datasets--allenai--c4/blobs");
        blobs.join(format!("{}.incomplete", sha256(&self.content)))
    }

    /// The ranges asked of the storage.
    fn ranges(&self) -> Vec<Option<String>> {
        let seen = self.server.seen().into_iter();
        let stored = seen.filter(|request| !request.is_home);
        stored.map(|request| request.range().map(str::to_string)).collect()
    }
}

#[test]
fn a_download_that_breaks_off_goes_on_where_it_was() {
    let bench = Bench::new(500_000);
    bench.server.storage_fails("c4-train", 1, Fault::BreakAfter(123_456));
    bench.arrives(&[]);
    assert_eq!(bench.ranges(), [None, Some("bytes=123456-".to_string())]);
    let said = bench.said.0.lock().expect("nobody else");
    let note = format!(
        "the download of `{FILE}` of the dataset `allenai/c4` broke off after 120.56 KiB of 488.28 KiB; trying again in 0.01 s (1 of 2)"
    );
    assert!(said.contains(&Event::Note { text: note }), "{said:?}");
}

#[test]
fn a_broken_download_is_resumed_by_the_next_run() {
    let bench = Bench::new(500_000);
    bench.server.storage_fails("c4-train", 1, Fault::BreakAfter(200_000));
    let error = bench.fails(&[("PRUNE_HUB_RETRIES", "0")]);
    assert_eq!(
        error,
        format!(
            "the download of `{FILE}` of the dataset `allenai/c4` broke off after 195.31 KiB of 488.28 KiB\n  the connection to `{}` \
             broke off\n  tried 1 time\nhint: start again: the downloaded part is kept, and the rest is requested",
            bench.server.storage()
        )
    );
    assert_eq!(fs::metadata(bench.partial()).expect("kept").len(), 200_000);
    bench.arrives(&[]);
    assert_eq!(bench.ranges(), [None, Some("bytes=200000-".to_string())]);
}

#[test]
fn a_partial_file_of_other_bytes_or_of_any_length_does_no_harm() {
    let bench = Bench::new(300_000);
    fs::create_dir_all(bench.partial().parent().expect("a folder")).expect("made");
    let partial = |bytes: &[u8]| fs::write(bench.partial(), bytes).expect("writable");
    let forget = || fs::remove_file(bench.partial().with_extension("")).expect("the blob");
    // Damaged: the hash tells, and it is fetched anew.
    partial(&vec![7; 1000]);
    bench.arrives(&[]);
    assert_eq!(bench.ranges(), [Some("bytes=1000-".to_string()), None]);
    forget();
    // Longer than the file.
    partial(&vec![7; 300_001]);
    bench.arrives(&[]);
    assert_eq!(bench.ranges(), [None]);
    forget();
    // Whole, only not renamed.
    partial(&bench.content);
    bench.arrives(&[]);
    assert!(bench.ranges().is_empty());
    forget();
    // The server gives all of it although the end was asked for, or refuses the range.
    partial(&bench.content[..1000]);
    bench.server.storage_fails("c4-train", 1, Fault::WholeFile);
    bench.arrives(&[]);
    assert_eq!(bench.ranges(), [Some("bytes=1000-".to_string())]);
    forget();
    partial(&bench.content[..1000]);
    bench.server.storage_fails("c4-train", 1, Fault::Status(416, Vec::new()));
    bench.arrives(&[]);
    assert_eq!(bench.ranges(), [Some("bytes=1000-".to_string()), None]);
}

#[test]
fn a_small_file_goes_on_only_if_it_is_still_the_same() {
    let bench = Bench::new(10);
    let (small, repo) = ("notes.txt", "allenai/c4");
    bench.server.add("datasets/allenai/c4", small, "0123456789");
    // The first is HEAD, which has no body to break off.
    bench.server.home_fails(small, 2, Fault::BreakAfter(4));
    let folder = bench.hub(&[]).dataset_file(repo, small, &bench.said);
    let content = fs::read(folder.expect("it arrives").join(small)).expect("readable");
    assert_eq!(content, b"0123456789");
    let seen = bench.server.seen();
    let last = seen.last().expect("three requests");
    let etag = format!("\"{}\"", &sha256(b"0123456789")[..40]);
    assert_eq!((last.range(), last.headers.get("if-range")), (Some("bytes=4-"), Some(&etag)));
}

#[test]
fn a_download_that_gets_on_is_not_given_up() {
    let bench = Bench::new(5 << 20);
    // Four breaks, two retries: each brought more than a MiB.
    bench.server.storage_fails("c4-train", 4, Fault::BreakAfter(1_100_000));
    bench.arrives(&[]);
    assert_eq!(bench.ranges().len(), 5);
    let said = bench.said.0.lock().expect("nobody else");
    assert!(said.contains(&Event::PhaseStarted {
        phase: "download allenai/c4".to_string(),
        unit: "MiB",
        steps: 5
    }));
    assert!(said.contains(&Event::Progress { done: 5 }));
    drop(said);
    let stuck = Bench::new(5 << 20);
    stuck.server.storage_fails("c4-train", 9, Fault::BreakAfter(1000));
    assert!(stuck.fails(&[]).contains("tried 3 times"));
}

#[test]
fn damaged_and_wrongly_announced_files_never_reach_the_cache() {
    let bench = Bench::new(10_000);
    bench.server.storage_fails("c4-train", 1, Fault::Damage);
    bench.arrives(&[]);
    let bench = Bench::new(10_000);
    bench.server.storage_fails("c4-train", 9, Fault::Damage);
    let error = bench.fails(&[]);
    assert!(
        error.starts_with(&format!(
            "`{FILE}` of the dataset `allenai/c4` arrived damaged: its hash is wrong\n  SHA-256 "
        )),
        "{error}"
    );
    assert!(error.contains(&format!("the hub says {}", sha256(&bench.content))), "{error}");
    for announced in [9_000, 11_000] {
        let bench = Bench::new(10_000);
        bench.server.storage_fails("c4-train", 9, Fault::Announce(announced));
        let error = bench.fails(&[]);
        assert_eq!(
            error,
            format!(
                "`{}` sends something other than `{FILE}` of the dataset `allenai/c4`\n  {announced} bytes are announced, the repository says \
                 10000\nhint: check HF_ENDPOINT and the proxy; or name a local folder",
                bench.server.storage()
            )
        );
        assert!(!bench.folder.path().join("datasets--allenai--c4/snapshots").exists());
    }
}

#[test]
fn a_silent_server_is_given_up() {
    let bench = Bench::new(10_000);
    bench.server.storage_fails("c4-train", 9, Fault::Wait(Duration::from_secs(5)));
    let started = Instant::now();
    let error = bench.fails(&[("HF_HUB_DOWNLOAD_TIMEOUT", "0.2"), ("PRUNE_HUB_RETRIES", "1")]);
    assert!(started.elapsed() < Duration::from_secs(4));
    let silent = format!("`{}` is silent for 0.2 s", bench.server.storage());
    assert!(error.contains(&silent) && error.contains("tried 2 times"), "{error}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_error() {
    let bench = Bench::new(10_000);
    fs::create_dir_all(bench.partial().parent().expect("a folder")).expect("made");
    std::os::unix::fs::symlink("/dev/full", bench.partial()).expect("a link");
    let error = bench.fails(&[]);
    assert_eq!(
        error,
        format!(
            "the disk is full: cannot write `{}`\n  9.77 KiB are still to be written\nhint: free space there, or choose another cache with \
             --cache-dir or HF_HUB_CACHE; the downloaded part is kept",
            bench.partial().display()
        )
    );
}
