//! Tokenizers of model folders: their special tokens, and the ids of the real tokenizers.

use super::*;

/// A copy of the small real tokenizer with the configuration `config` beside it.
fn stories_with(config: &str) -> Option<(tempfile::TempDir, Result<Tokenizer>)> {
    let source = shared("models/stories260k/tokenizer.json")?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::copy(source, folder.path().join("tokenizer.json")).expect("copy");
    fs::write(folder.path().join("tokenizer_config.json"), config).expect("write");
    let loaded = Tokenizer::load(folder.path());
    Some((folder, loaded))
}

#[test]
fn a_folder_without_tokenizer_json_is_told_how_to_get_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let empty = Tokenizer::load(folder.path()).err().expect("must fail").to_string();
    assert!(empty.contains("no tokenizer"), "{empty}");
    fs::write(folder.path().join("tokenizer.model"), "x").expect("write");
    let only_model = Tokenizer::load(folder.path()).err().expect("must fail").to_string();
    assert!(only_model.contains("save_pretrained"), "{only_model}");
    fs::write(folder.path().join("tokenizer.json"), "{}").expect("write");
    assert!(
        Tokenizer::load(folder.path())
            .err()
            .expect("must fail")
            .to_string()
            .contains("not a tokenizer")
    );
}

#[test]
fn explicit_add_bos_token_of_the_llama_class_overrules_tokenizer_json() {
    let Some((_folder, loaded)) =
        stories_with(r#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}"#)
    else {
        return;
    };
    let with_bos = loaded.expect("load");
    assert_eq!(with_bos.special, None, "tokenizer.json adds the same token itself");
    let ids = with_bos.encode("Once upon a time").expect("encode");
    assert_eq!(ids[0], 1, "<s> has id 1");
    assert_eq!(with_bos.decode(&ids).expect("decode"), "Once upon a time");
    assert_eq!(with_bos.largest_id(), 511, "config.json: vocab_size 512");

    let Some((_folder, loaded)) =
        stories_with(r#"{"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": false}"#)
    else {
        return;
    };
    let without = loaded.expect("load");
    assert_eq!(without.encode("Once upon a time").expect("encode"), ids[1..]);
    assert_eq!(without.sha256(), format!("{}+plain", with_bos.sha256()));

    let config = r#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false, "add_eos_token": true, "eos_token": {"content": "</s>"}}"#;
    let Some((_folder, loaded)) = stories_with(config) else {
        return;
    };
    assert_eq!(
        loaded.expect("load").encode("Once upon a time").expect("encode"),
        [&ids[1..], &[2]].concat()
    );
}

#[test]
fn other_classes_and_silent_configurations_leave_tokenizer_json_alone() {
    for config in [
        r#"{"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": false}"#,
        r#"{"tokenizer_class": "LlamaTokenizer"}"#,
    ] {
        let Some((_folder, loaded)) = stories_with(config) else {
            return;
        };
        assert_eq!(loaded.expect("load").encode("a").expect("encode")[0], 1);
    }
}

#[test]
fn a_configured_token_that_does_not_exist_is_refused() {
    let config =
        r#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "bos_token": "<no such>"}"#;
    let Some((_folder, loaded)) = stories_with(config) else {
        return;
    };
    assert!(loaded.err().expect("must fail").to_string().contains("add_bos_token"));
}

#[test]
fn the_real_llama_tokenizers_give_the_ids_of_transformers() {
    for name in ["llama2", "llama3"] {
        let Some(folder) = shared(&format!("data/tokenizers/{name}")) else {
            return;
        };
        let tokenizer = Tokenizer::load(&folder).expect("load");
        let golden: Value =
            serde_json::from_slice(&fs::read(folder.join("golden_ids.json")).expect("read"))
                .expect("JSON");
        for entry in golden["strings"].as_array().expect("a list") {
            let expected: Vec<u32> = serde_json::from_value(entry["fast"].clone()).expect("ids");
            assert_eq!(
                tokenizer.encode(entry["text"].as_str().expect("text")).expect("encode"),
                expected,
                "{name}: {}",
                entry["text"]
            );
        }
        let Some(text) = shared("data/wikitext2/wiki.test.head1000.raw") else {
            return;
        };
        let ids = tokenizer.encode(&fs::read_to_string(text).expect("read")).expect("encode");
        let expected = &golden["files"]["wiki.test.head1000.raw"]["fast"];
        assert_eq!(ids.len() as u64, expected["n"].as_u64().expect("a count"));
        assert_eq!(digest::of_ids(&ids), expected["sha256_int32le"].as_str().expect("a hash"));
    }
}
