//! Input files whose content is not what their role and name promise: each is refused with a remedy, by every command that reads it.
//! And a rule of the sources: input files are opened in `src/input.rs` alone.

mod inside;
mod models;
mod templates;

use std::fs;

use prune::synthetic::RandomCheckpoint;

use crate::source_tree::{sources, tokens, without_tests};
use crate::support::{Place, words};

const LFS: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\nsize 9085657\n";
const PAGE: &str =
    "<!DOCTYPE html>\n<html><head><title>404</title></head><body>not found</body></html>\n";

/// Files that are opened in other places: those that the program itself writes, and those of the system.
const OPENED_ELSEWHERE: &[&str] = &[
    // The leaves that open for all others.
    "bytes.rs",
    "disk/faults.rs",
    "disk/mod.rs",
    "disk/positioned.rs",
    "input.rs",
    "input/content.rs",
    // Locks, states, records and results of runs.
    "checkpoint/atomic.rs",
    "checkpoint/publish.rs",
    "checkpoint/target.rs",
    "job/folder/lock.rs",
    "job/folder/mod.rs",
    "job/folder/owner.rs",
    "job/folder/state_file.rs",
    "job/grid/records.rs",
    "job/grid/table.rs",
    "job/inspect.rs",
    "job/published.rs",
    "job/recover/saved.rs",
    // The cache of texts, and the cache of the hub.
    "checkpoint/not_a_model.rs",
    "data/cache.rs",
    "data/documents.rs",
    "data/staged.rs",
    "hub/cache.rs",
    "hub/settings.rs",
    // The description of the machine and of the process.
    "data/chat/process.rs",
    "placement/inventory.rs",
    "placement/system_memory.rs",
    "runtime/hidden_states.rs",
    "runtime/memory.rs",
    "runtime/resident_set.rs",
    // Standard input, or a pipe in its place.
    "cli/generate.rs",
];

#[test]
fn input_files_are_opened_in_one_place() {
    let opens = |words: &[&str]| match words {
        ["File", ":", ":", "open"] | ["OpenOptions", ":", ":", "new"] => true,
        ["fs", ":", ":", name] => matches!(*name, "read" | "read_to_string"),
        _ => false,
    };
    for source in sources() {
        let modules = source.modules();
        let is_test = source.path.ends_with("_tests.rs")
            || modules.contains(&"tests")
            || source.path.ends_with("test_files.rs")
            || source.path.ends_with("testing.rs");
        if is_test || OPENED_ELSEWHERE.contains(&source.path.as_str()) {
            continue;
        }
        let code = without_tests(&modules, &source.text).0;
        let opening = code.windows(4).find(|words| opens(words));
        assert_eq!(
            opening, None,
            "src/{} opens a file: input files go through `input`",
            source.path
        );
        let reads_whole = tokens(&source.text).contains(&"read_whole");
        assert!(!reads_whole, "src/{} reads a file: use `input`", source.path);
    }
}

/// A line of `prune` with texts that are all right, for a model or a text that is not.
fn line(model: &str, dataset: &str, evaluation: &str) -> String {
    format!(
        "--model {model} --sparsity-ratio 0.5 --dataset {dataset} --eval-dataset {evaluation} --nsamples 2 --seqlen 32 --eval-windows 2"
    )
}

/// Runs a command that must be refused: one error with these words in it, exit code 1, no result.
#[track_caller]
fn refused(place: &Place, line: &str, words: &[&str]) {
    let ran = place.run(line);
    let error = ran.stderr.find("error: ").map_or("", |at| &ran.stderr[at..]);
    assert_eq!(ran.code, 1, "{line}\n{}", ran.stderr);
    for word in words {
        assert!(error.contains(word), "{line}: no `{word}` in\n{error}");
    }
    assert!(error.contains("hint: "), "{line}\n{error}");
}

#[test]
fn a_git_lfs_pointer_is_recognised_in_every_role() {
    let place = Place::new();
    let lfs = ["git-lfs pointer", "lfs pull"];
    for folder in ["raw", "parquet"] {
        fs::create_dir(place.path(folder)).unwrap();
    }
    for text in [
        "text.txt",
        "lines.jsonl",
        "c4.json.gz",
        "rows.parquet",
        "raw/wiki.test.raw",
        "parquet/test-00000-of-00001.parquet",
        "recipe.yml",
        "ratios.json",
    ] {
        fs::write(place.path(text), LFS).unwrap();
    }
    for text in ["text.txt", "lines.jsonl", "c4.json.gz", "rows.parquet"] {
        refused(&place, &line("m", text, "test.txt"), &lfs);
        refused(&place, &line("m", "train.txt", text), &lfs);
    }
    for folder in ["wikitext2:raw", "wikitext2:parquet"] {
        refused(&place, &line("m", "train.txt", folder), &lfs);
    }
    refused(&place, "merge recipe.yml --save merged", &lfs);
    let ratios = format!("{} --layer-ratios ratios.json", line("m", "train.txt", "test.txt"));
    refused(&place, &ratios, &lfs);
    // Every file of a model, also those that are only copied with the weights.
    for name in [
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "tokenizer.model",
        "model.safetensors.index.json",
    ] {
        let sharded = name.ends_with("index.json");
        let model = format!("with-{name}");
        place.checkpoint(&model, &RandomCheckpoint::default());
        if sharded {
            fs::remove_file(place.path(&model).join("model.safetensors")).unwrap();
        }
        fs::write(place.path(&model).join(name), LFS).unwrap();
        let saved = format!("{} --save out-{name}", line(&model, "train.txt", "test.txt"));
        refused(&place, &saved, &lfs);
        assert!(!place.path(&format!("out-{name}/model/config.json")).exists());
    }
    fs::create_dir(place.path("lora")).unwrap();
    fs::write(place.path("lora/adapter_config.json"), LFS).unwrap();
    fs::write(place.path("lora/adapter_model.safetensors"), LFS).unwrap();
    let fold = "merge --base m --model m+lora --method linear --save folded";
    refused(&place, fold, &lfs);
}

#[test]
fn pages_and_packed_files_are_no_texts_and_a_page_is_one_under_its_own_name() {
    let place = Place::new();
    fs::create_dir(place.path("wiki")).unwrap();
    let put = |name: &str, bytes: &[u8]| fs::write(place.path(name), bytes).unwrap();
    put("wiki/train-00000-of-00001.parquet", PAGE.as_bytes());
    put("wiki/test-00000-of-00001.parquet", PAGE.as_bytes());
    put("wiki.test.raw", PAGE.as_bytes());
    put("page.txt", PAGE.as_bytes());
    put("lines.parquet", b"{\"text\": \"a\"}\n");
    put("zipped.jsonl", b"PK\x03\x04\0\0\0\0");
    put("zipped.txt", b"\x1f\x8b\x08\0\0\0\0\0");
    put("rows.txt", b"PAR1\x15\x04PAR1");
    put("pickled.txt", b"\x80\x04\x95\x23\0\0\0\0\0\0\0}");
    put("stream.arrow", b"\xff\xff\xff\xff\x78\0\0\0");
    put("file.arrow", b"ARROW1\0\0\xff\xff\xff\xff");
    put("model.gguf", b"GGUF\x03\0\0\0\0\0\0\0");
    let mut tar = vec![b'a'; 257];
    tar.extend_from_slice(b"ustar\0");
    put("data.json.gz", &gzipped(&tar));
    for (dataset, words) in [
        ("wikitext2:wiki", &["page"][..]),
        ("wikitext2:wiki.test.raw", &["page"]),
        ("page.txt", &["page", "page.html"]),
        ("lines.parquet", &["not documents", "lines.jsonl"]),
        ("zipped.jsonl", &["zip archive", "unzip"]),
        ("zipped.txt", &["gzip", "gzip -dc 'zipped.txt'"]),
        ("rows.txt", &["parquet file", "mv 'rows.txt' 'rows.parquet'"]),
        ("pickled.txt", &["pickle"]),
        ("stream.arrow", &["as Arrow", "to_parquet('stream.parquet')"]),
        ("file.arrow", &["as Arrow", "to_parquet('file.parquet')"]),
        ("model.gguf", &["GGUF"]),
        ("data.json.gz", &["tar archive", "tar -xOf"]),
    ] {
        refused(&place, &line("m", dataset, "test.txt"), words);
    }
    // The cache of the `datasets` library in a folder.
    fs::create_dir(place.path("cached")).unwrap();
    put("cached/wikitext-test.arrow", b"\xff\xff\xff\xff\x78\0\0\0");
    refused(
        &place,
        &line("m", "train.txt", "wikitext2:cached"),
        &["to_parquet('cached/wikitext-test.parquet')"],
    );
    // A page under its own name is text, and so is a text that begins with a tag.
    put("page.html", PAGE.repeat(60).as_bytes());
    put("tags.txt", format!("<s> <unk> {}", words(3, 400)).as_bytes());
    for text in ["page.html", "tags.txt"] {
        let ran = place.run(&line("m", text, "test.txt"));
        assert_eq!(ran.code, 0, "{text}: {}", ran.stderr);
    }
}

fn gzipped(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

#[test]
fn wide_text_is_named_with_its_encoding_in_texts_and_in_json() {
    let place = Place::new();
    let wide = |text: &str, mark: bool| {
        let units = mark.then_some(0xfeff).into_iter().chain(text.encode_utf16());
        units.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()
    };
    fs::write(place.path("marked.txt"), wide(&words(1, 500), true)).unwrap();
    fs::write(place.path("unmarked.txt"), wide(&words(1, 500), false)).unwrap();
    fs::write(place.path("wide.jsonl"), wide("{\"text\": \"a\"}\n", true)).unwrap();
    for (text, encoding) in
        [("marked.txt", "utf-16 "), ("unmarked.txt", "utf-16le "), ("wide.jsonl", "utf-16 ")]
    {
        let command = format!("iconv -f {encoding}-t utf-8 '{text}'");
        refused(&place, &line("m", text, "test.txt"), &["UTF-16", &command]);
    }
    place.checkpoint("wide", &RandomCheckpoint::default());
    let config = place.path("wide/config.json");
    let json = fs::read_to_string(&config).unwrap();
    fs::write(&config, wide(&json, true)).unwrap();
    refused(&place, &line("wide", "train.txt", "test.txt"), &["UTF-16", "iconv"]);
}

#[test]
fn a_text_that_is_not_the_published_wikitext_2_is_measured_with_a_warning() {
    let place = Place::new();
    fs::create_dir(place.path("wiki")).unwrap();
    fs::write(place.path("wiki/wiki.test.tokens"), words(4, 2000)).unwrap();
    let eval = "eval m --eval-dataset wikitext2:wiki --seqlen 64 --eval-windows 2";
    let ran = place.run(eval);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("warning: ") && ran.stderr.contains("raw test split"),
        "{}",
        ran.stderr
    );
    let own = place.run("eval m --eval-dataset wiki/wiki.test.tokens --seqlen 64 --eval-windows 2");
    assert!(!own.stderr.contains("raw test split"), "{}", own.stderr);
}

/// A file of one line may not decide the memory of a run: 42 MB of words, and three million letters without a place to cut.
#[test]
fn a_long_line_is_refused_with_the_budget_that_is_enough_or_stays_within_its_own() {
    let place = Place::new();
    let line = |text: String| format!("{}\n", serde_json::json!({ "text": text }));
    fs::write(place.path("long.jsonl"), line("once upon a time ".repeat(2_500_000))).unwrap();
    fs::write(place.path("rows.raw"), "once upon a time ".repeat(2_500_000)).unwrap();
    fs::write(place.path("uncut.jsonl"), line("x".repeat(3_000_000))).unwrap();
    fs::write(place.path("short.jsonl"), line("once upon a time ".repeat(120_000))).unwrap();
    let with = |text: &str| {
        format!(
            "--model m --sparsity-ratio 0.5 --dataset {text} --nsamples 2 --seqlen 32 --eval none --save out-{} --max-memory cpu=60MiB",
            text.replace(':', "-")
        )
    };
    for text in ["long.jsonl", "wikitext2:rows.raw"] {
        refused(&place, &with(text), &["too long for the memory budget", "--max-memory cpu="]);
    }
    refused(&place, &with("uncut.jsonl"), &["without a place where it may be cut", "--max-memory"]);
    let ran = place.run(&with("short.jsonl"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    if let Some(peak) = place.manifest("out-short.jsonl").peak_anonymous {
        assert!(peak.0 < 60 << 20, "{peak}");
    }
}
