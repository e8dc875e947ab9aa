//! Documents in every stored form: drawn by C4's rule, joined for evaluation, refused where they are damaged.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;

use super::*;
use crate::data::testing::{RecordedEvents, write_parquet};

/// Documents of growing length, document n being n + 1 letters.
fn texts(count: usize) -> Vec<String> {
    (0..count).map(|n| ('a'..='z').cycle().skip(n).take(n + 1).collect()).collect()
}

fn json_lines(texts: &[String]) -> String {
    texts.iter().map(|text| format!("{}\n", json!({ "url": "x", "text": text, "n": 1 }))).collect()
}

/// The same documents as JSON lines, gzipped in two members, and parquet.
fn stored_forms(folder: &Path, texts: &[String]) -> Vec<PathBuf> {
    let lines = json_lines(texts);
    let half = lines.len() / 2;
    let paths: Vec<PathBuf> =
        ["a.jsonl", "a.jsonl.gz", "a.parquet"].iter().map(|name| folder.join(name)).collect();
    fs::write(&paths[0], &lines).expect("write");
    gzip(&paths[1], &[&lines[..half], &lines[half..]]);
    write_parquet(&paths[2], "text", &[texts]);
    paths
}

#[test]
fn documents_are_drawn_by_the_rule_of_c4_whatever_their_stored_form() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let texts = texts(10);
    // import random; random.seed(0); out = []
    // for _ in range(6):
    //     while True:
    //         i = random.randint(0, 9)
    //         if i + 1 > 6: break
    //     out.append((i, random.randint(0, i + 1 - 6 - 1)))
    let expected: [(u64, u64); 6] = [(6, 0), (8, 1), (6, 0), (7, 1), (9, 1), (8, 0)];
    let cache = TextCache::open(Some(folder.path().join("cache")));
    for path in stored_forms(folder.path(), &texts) {
        // JSON lines need no copy.
        let is_packed = usize::from(!path.ends_with("a.jsonl"));
        for (cache, notes) in [(&cache, 0), (&cache, is_packed), (&TextCache::disabled(), 0)] {
            let events = RecordedEvents::default();
            let dataset = spec(&path.display().to_string());
            check(&dataset, Role::Calibration).expect("check");
            let drawn =
                calibration(&dataset, &tokenizer, 6, 6, 0, cache, &events).expect("calibration");
            assert_eq!(events.count("documents from the cache"), notes, "{}", path.display());
            let documents = drawn.protocol.documents.expect("documents");
            let pairs: Vec<(u64, u64)> = documents.into_iter().zip(drawn.protocol.starts).collect();
            assert_eq!(pairs, expected);
            for ((document, start), sample) in pairs.into_iter().zip(drawn.tokens.chunks(6)) {
                let of_letters: Vec<u32> =
                    (0..6).map(|at| ((document + start + at) % 26) as u32).collect();
                assert_eq!(sample, of_letters);
            }
            assert_eq!(
                (drawn.protocol.windows, drawn.protocol.tokens_used, drawn.protocol.seed),
                (6, 36, Some(0))
            );
        }
    }
}

#[test]
fn blank_lines_and_a_missing_last_newline_do_not_count_as_documents() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let path = folder.path().join("a.jsonl");
    fs::write(&path, "\n  \r\n{\"text\": \"abc\"}\r\n\n{\"text\": \"def\"}").expect("write");
    let result = evaluation(
        &spec(&path.display().to_string()),
        &tokenizer,
        7,
        None,
        &TextCache::disabled(),
        &Silent,
    )
    .expect("evaluation");
    assert_eq!(tokenizer.decode(&result.tokens).expect("decode").replace(' ', ""), "abcdef");
    assert_eq!((result.windows, result.protocol.total_tokens), (1, 7));
}

#[test]
fn evaluation_of_documents_joins_1100_and_keeps_256_windows() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let path = folder.path().join("c4-validation.json");
    let many: Vec<String> = (0..1200).map(|_| "ab".to_owned()).collect();
    fs::write(&path, json_lines(&many)).expect("write");
    let dataset = spec(&format!("c4:{}", folder.path().display()));
    let run = |seqlen| {
        evaluation(&dataset, &tokenizer, seqlen, None, &TextCache::disabled(), &Silent)
            .expect("evaluation")
    };
    // 1100 · 2 letters and 1099 spaces.
    assert_eq!(run(10).protocol.total_tokens, 3299);
    assert_eq!(run(10).windows, 256);
    assert_eq!(run(100).windows, 32);
    assert_eq!(run(100).tokens[..4], [0, 1, 26, 0]);
}

#[test]
fn documents_that_are_all_too_short_end_in_advice_instead_of_a_loop() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let path = folder.path().join("a.jsonl");
    fs::write(&path, json_lines(&texts(40))).expect("write");
    let dataset = spec(&path.display().to_string());
    let run =
        |seqlen| calibration(&dataset, &tokenizer, 4, seqlen, 0, &TextCache::disabled(), &Silent);
    let error = message(run(40));
    assert!(
        error.contains("40 different documents of 40")
            && error.contains("the longest had 40 tokens"),
        "{error}"
    );
    // The largest power of two below 40.
    assert!(error.contains("--seqlen 32"), "{error}");
    // A single document that fits is found, however often the short documents are drawn.
    assert_eq!(run(39).expect("calibration").protocol.documents, Some(vec![39; 4]));
}

#[test]
fn bad_documents_are_named_by_file_and_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let cache = TextCache::open(Some(folder.path().join("cache")));
    let run = |path: &Path| {
        let dataset = spec(&path.display().to_string());
        (
            check(&dataset, Role::Evaluation),
            evaluation(&dataset, &tokenizer, 1, None, &cache, &Silent),
        )
    };
    let lines = "{\"text\": \"a\"}\n\n{\"content\": \"b\", \"id\": 3}\n";
    let (plain, packed) = (folder.path().join("a.jsonl"), folder.path().join("b.json.gz"));
    fs::write(&plain, lines).expect("write");
    gzip(&packed, &[lines]);
    for path in [&plain, &packed] {
        let (checked, evaluated) = run(path);
        checked.expect("the first line is a document");
        let error = message(evaluated);
        assert!(
            error.contains("line 3 of")
                && error.contains("content, id")
                && error.contains("none of the fields that documents are made of"),
            "{error}"
        );
    }
    fs::write(&plain, "[{\"text\": \"a\"}, 3]").expect("write");
    run(&plain).0.expect("the first entry is a document");
    assert!(message(run(&plain).1).contains("it is a number, not an object"));
    fs::write(&plain, "[{\"text\": \"a\"}").expect("write");
    assert!(message(run(&plain).1).contains("the JSON list does not end"));
    fs::write(&plain, "just prose\n").expect("write");
    assert!(message(run(&plain).1).contains("it begins: just prose"));
    fs::write(&plain, "\n\n").expect("write");
    assert!(message(run(&plain).0).contains("no documents"));
    assert!(message(run(&plain).1).contains("no documents"));
}

#[test]
fn a_gzip_file_that_was_cut_is_refused_and_leaves_nothing_in_the_cache() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let path = folder.path().join("a.json.gz");
    gzip(&path, &[&json_lines(&texts(200))]);
    let bytes = fs::read(&path).expect("read");
    fs::write(&path, &bytes[..bytes.len() - 20]).expect("write");
    let cache = TextCache::open(Some(folder.path().join("cache")));
    let error = message(calibration(
        &spec(&path.display().to_string()),
        &tokenizer,
        1,
        5,
        0,
        &cache,
        &Silent,
    ));
    assert!(error.contains("damaged or incomplete"), "{error}");
    assert_eq!(fs::read_dir(folder.path().join("cache")).expect("list").count(), 0);
}

#[test]
fn a_line_without_end_is_refused_before_it_fills_the_memory() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("a.jsonl");
    // Sparse: 65 MiB of zeros, which are not blank.
    File::create(&path).expect("create").set_len(65 << 20).expect("grow");
    let error = message(calibration(
        &spec(&path.display().to_string()),
        &letters(folder.path()),
        1,
        5,
        0,
        &TextCache::disabled(),
        &Silent,
    ));
    assert!(error.contains("longer than 64.00 MiB"), "{error}");
}

#[test]
fn a_changed_source_and_a_damaged_copy_are_unpacked_again_whatever_their_size_and_time() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let cache_folder = folder.path().join("cache");
    let cache = TextCache::open(Some(cache_folder.clone()));
    let path = folder.path().join("a.json.gz");
    let write = |letter: &str| {
        let texts: Vec<String> = (5..9).map(|count| letter.repeat(count)).collect();
        // Stored, not compressed: the files of both letters have the same size.
        let mut encoder = GzEncoder::new(Vec::new(), Compression::none());
        encoder.write_all(json_lines(&texts).as_bytes()).expect("write");
        fs::write(&path, encoder.finish().expect("finish")).expect("write");
        let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1);
        File::options()
            .append(true)
            .open(&path)
            .and_then(|file| file.set_modified(time))
            .expect("set the time");
    };
    let dataset = spec(&path.display().to_string());
    let run =
        || calibration(&dataset, &tokenizer, 3, 4, 0, &cache, &Silent).expect("calibration").tokens;
    write("a");
    assert_eq!(run(), [0; 12]);
    let copy = fs::read_dir(&cache_folder).expect("list").next();
    let copy = copy.expect("a copy").expect("entry").path();
    let good = fs::read_to_string(&copy).expect("read");
    for damaged in [good.replace("aa", "bb"), good[1..].to_owned(), String::new()] {
        fs::write(&copy, damaged).expect("write");
        assert_eq!(run(), [0; 12]);
        assert_eq!(fs::read_to_string(&copy).expect("read"), good);
    }
    write("b");
    assert_eq!(run(), [1; 12]);
}

#[test]
fn processes_may_share_a_cache() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let cache = TextCache::open(Some(folder.path().join("cache")));
    let path = folder.path().join("a.json.gz");
    gzip(&path, &[&json_lines(&texts(500))]);
    let dataset = spec(&path.display().to_string());
    let run = || {
        let drawn =
            calibration(&dataset, &tokenizer, 20, 30, 1, &cache, &Silent).expect("calibration");
        let windows =
            evaluation(&dataset, &tokenizer, 30, None, &cache, &Silent).expect("evaluation");
        (drawn.protocol, windows.protocol)
    };
    let expected = run();
    fs::remove_dir_all(folder.path().join("cache")).expect("remove");
    thread::scope(|scope| {
        let runs: Vec<_> = (0..8).map(|_| scope.spawn(run)).collect();
        for run in runs {
            assert_eq!(run.join().expect("no panic"), expected);
        }
    });
    let files = fs::read_dir(folder.path().join("cache")).expect("list").count();
    assert_eq!(files, 2, "token ids and unpacked text; nothing partial");
}
