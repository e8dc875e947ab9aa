//! Names of datasets, the search for their files, and the messages for missing files.

use std::fs;

use super::*;
use crate::data::testing::write_parquet;

#[test]
fn datasets_are_read_and_printed_alike() {
    for text in [
        "wikitext2",
        "c4",
        "wikitext2:/data/wiki",
        "c4:a:b.json.gz",
        "notes.txt",
        "c4x.jsonl",
        "ptb:x",
        "jsonl:x",
        "jsonl.txt",
        "hub:acme/chats",
        "hub:acme/chats:data/train.jsonl",
    ] {
        assert_eq!(spec(text).to_string(), text);
    }
    for text in ["", "wikitext2:", "c4:", "ptb", "ptb:", "jsonl", "jsonl:"] {
        assert!(text.parse::<DatasetSpec>().is_err_and(|failure| failure.is_usage));
    }
}

#[test]
fn the_penn_treebank_is_a_file_or_the_folder_of_its_splits() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = folder.path().display();
    let dataset = spec(&format!("ptb:{root}"));
    fs::write(folder.path().join("ptb.train.txt"), " a b \n").expect("write");
    check(&dataset, Role::Calibration).expect("the train split");
    let error = message(check(&dataset, Role::Evaluation));
    assert!(
        error.contains("no test split of the Penn Treebank") && error.contains("ptb.test.txt"),
        "{error}"
    );
    let file = spec(&format!("ptb:{root}/ptb.train.txt"));
    check(&file, Role::Evaluation).expect("a file is taken as it was named");
}

#[test]
fn missing_texts_name_their_flag_and_the_way_out() {
    let error = message(check(&spec("wikitext2"), Role::Calibration));
    assert!(error.contains("use --dataset wikitext2:PATH") && !error.contains("--eval"), "{error}");
    let error = message(check(&spec("c4"), Role::Evaluation));
    assert!(error.contains("use --eval-dataset c4:PATH"), "{error}");
    assert!(message(check(&spec("no/such/file"), Role::Calibration)).contains("no such file"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = folder.path().display();
    assert!(message(check(&spec(&format!("{at}")), Role::Calibration)).contains("is a folder"));
    assert!(
        message(check(&spec(&format!("wikitext2:{at}")), Role::Evaluation))
            .contains("wiki.test.raw")
    );
    assert!(
        message(check(&spec(&format!("c4:{at}")), Role::Calibration))
            .contains("c4-train.00000-of-01024.json.gz")
    );
    fs::write(folder.path().join("a.jsonl.zst"), "x").expect("write");
    assert!(
        message(check(&spec(&format!("{at}/a.jsonl.zst")), Role::Calibration))
            .contains("unpack it")
    );
}

#[test]
fn folders_of_wikitext2_and_c4_are_searched_for_the_split() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = folder.path();
    let wikitext2 = spec(&format!("wikitext2:{}", root.display()));
    let found = |role| Source::find(&wikitext2, role).map(|source| source.path());
    let hub = root.join("wikitext-2-raw-v1");
    fs::create_dir(&hub).expect("create");
    for part in 0..2 {
        write_parquet(
            &hub.join(format!("train-0000{part}-of-00002.parquet")),
            "text",
            &[&["x".to_owned()]],
        );
    }
    let parts = found(Role::Calibration).expect("found");
    assert!(
        parts.contains("train-00000-of-00002.parquet, ")
            && parts.ends_with("train-00001-of-00002.parquet"),
        "{parts}"
    );
    fs::remove_file(hub.join("train-00001-of-00002.parquet")).expect("remove");
    assert!(message(found(Role::Calibration)).contains("announce 2 parts, 1 are there"));
    fs::write(root.join("wiki.train.head.raw"), "x").expect("write");
    assert!(found(Role::Calibration).expect("found").ends_with("wiki.train.head.raw"));
    fs::write(root.join("wiki.train.tail.raw"), "x").expect("write");
    assert!(message(found(Role::Calibration)).contains("wiki.train.head.raw, wiki.train.tail.raw"));
    fs::write(root.join("wiki.train.raw"), "x").expect("write");
    assert!(found(Role::Calibration).expect("found").ends_with("wiki.train.raw"));
    assert!(message(found(Role::Evaluation)).contains("no test split"));

    let c4 = spec(&format!("c4:{}", root.display()));
    fs::create_dir(root.join("en")).expect("create");
    gzip(&root.join("en/c4-train.00000-of-01024.json.gz"), &["{\"text\": \"x\"}\n"]);
    gzip(&root.join("en/c4-train.00001-of-01024.json.gz"), &["{\"text\": \"x\"}\n"]);
    check(&c4, Role::Calibration).expect("the reference's shard");
    assert!(message(check(&c4, Role::Evaluation)).contains("no `c4-validation` shard"));
}
