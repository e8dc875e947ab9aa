//! Hostile input: files with false contents, endless or deeply nested ones, and numbers out of range. Each gives one error with the file and
//! a fix, exit code 1 or 2, in bounded time and memory, and nothing is written.
//!
//! `errors` holds the mistakes of users, `hub` the faults of servers.

mod checkpoints;
mod mutations;
pub(crate) mod mutators;
#[cfg(unix)]
mod names;
mod texts;

use std::fs;
use std::io::Write;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use crate::support::{Place, Ran, TEXTS, edit_json, refuses, refuses_command, words};

const AGAIN: &str = "hint: download this file again";
const OTHER_CONFIG: &str = "hint: take the config.json this checkpoint was published with";
const FORMS: &str = "hint: rename the fields to one of: `text`; `messages` with `role` and `content`; `conversations` with `from` and `value`; `prompt` and `completion`; `instruction`, `input` and `output`";
const OTHER_TOKENIZER: &str = "hint: copy it from the model's page again, or write it anew with a current `transformers` (save_pretrained)";
const RATIOS: &str = "hint: write [0.5, 0.6, ...] with one ratio per layer, or {\"0\": 0.3, \"31\": 0.7} for some of them";
const MAP: &str = "hint: write it like {\"model.layers.0\": 0, \"model.layers.1\": \"cpu\", \"\": \"cuda:1\"}; prune plan --json prints one";

/// `[[[[…` as deep as this is refused by every reader, without following it.
fn nested() -> String {
    "[".repeat(100_000)
}

/// Some JSON lines, each with 30 words.
fn documents(count: u64) -> String {
    (0..count)
        .map(|seed| {
            json!({"text": words(seed, 30), "url": "https://example.org"}).to_string() + "\n"
        })
        .collect()
}

/// A parquet file of one string column, compressed by zstd, with a dictionary.
fn parquet_bytes(column: &str, rows: &[&[u8]]) -> Vec<u8> {
    let schema = format!("message rows {{ required binary {column} (UTF8); }}");
    let schema = Arc::new(parse_message_type(&schema).expect("a schema"));
    let properties = WriterProperties::builder()
        .set_compression(parquet::basic::Compression::ZSTD(Default::default()))
        .set_dictionary_page_size_limit(4 << 20)
        .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None);
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties.build()))
        .expect("memory");
    let mut group = writer.next_row_group().expect("memory");
    let mut column = group.next_column().expect("memory").expect("one column");
    let rows: Vec<ByteArray> = rows.iter().map(|row| row.to_vec().into()).collect();
    column.typed::<ByteArrayType>().write_batch(&rows, None, None).expect("memory");
    column.close().expect("memory");
    group.close().expect("memory");
    writer.into_inner().expect("memory")
}

/// `text` gzipped, `times` members of it one after the other.
fn gzipped(text: &[u8], times: usize) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).expect("memory");
    encoder.finish().expect("memory").repeat(times)
}

/// Replaces whatever is at a name.
fn put(place: &Place, name: &str, content: impl AsRef<[u8]>) {
    fs::write(place.path(name), content).expect("it can be replaced");
}

/// Runs with `content` as the text `name`, which is refused.
#[track_caller]
fn refuses_text(place: &Place, name: &str, content: &[u8], first: &str, hint: &str) -> Ran {
    put(place, name, content);
    refuses(place, &format!("--dataset {name}"), 1, first, hint)
}

#[test]
fn ratios_and_maps_that_are_none_are_refused() {
    let place = Place::new();
    let ratios = |why: &str| format!("error: `x.json` does not hold layer ratios: {why}");
    let map = |why: &str| format!("error: the device map is not usable: {why}");
    let range = |ratio: &str| {
        format!(
            "error: the ratio of layer 0 is {ratio}; it is the fraction removed, from 0 up to but not including 1"
        )
    };
    for (text, code, first, hint) in [
        (
            nested(),
            1,
            ratios("it is not JSON (recursion limit exceeded at line 1 column 128)"),
            RATIOS,
        ),
        (
            "[1e999, 0.5]".into(),
            1,
            ratios("it is not JSON (number out of range at line 1 column 6)"),
            RATIOS,
        ),
        (
            "[NaN, 0.5]".into(),
            1,
            ratios("it is not JSON (expected value at line 1 column 2)"),
            RATIOS,
        ),
        ("{\"00\": 0.5}".into(), 1, ratios("`00` is not a layer's index"), RATIOS),
        ("{\"-1\": 0.5}".into(), 1, ratios("`-1` is not a layer's index"), RATIOS),
        (
            "[-0.5, 0.5]".into(),
            2,
            range("-0.5"),
            "hint: write a fraction like 0.5, which removes half of the weights",
        ),
        (
            "{\"18446744073709551615\": 0.5}".into(),
            2,
            "error: --layer-ratios names layer 18446744073709551615, the model has layers 0 to 1"
                .into(),
            "hint: leave layer 18446744073709551615 out of the file",
        ),
    ] {
        put(&place, "x.json", text);
        refuses(&place, "--layer-ratios x.json", code, &first, hint);
    }
    for (text, first) in [
        (nested(), "error: the device map `x.json` is not JSON: recursion limit exceeded at line 1 column 128".into()),
        ("{\"\": 1e308}".into(), map("``: 1e+308 is not a device; they are \"cpu\", \"disk\", 0 or \"cuda:0\"")),
        ("{\"\": \"cuda:99999999999999999999\"}".into(), map("``: \"cuda:99999999999999999999\" is not a device; they are \"cpu\", \"disk\", 0 or \"cuda:0\"")),
        ("{\"\": [0]}".into(), map("``: [0] is not a device; they are \"cpu\", \"disk\", 0 or \"cuda:0\"")),
    ] {
        put(&place, "x.json", text);
        refuses(&place, "--device-map x.json", 1, &first, MAP);
    }
    put(&place, "x.json", b"\xff");
    let first = "error: cannot read the device map `x.json`: it is not UTF-8 text from byte 0 on";
    refuses(&place, "--device-map x.json", 1, first, MAP);
}

#[test]
fn tokenizers_that_are_none_are_refused() {
    let place = Place::new();
    let good = fs::read(place.path("m/tokenizer.json")).unwrap();
    let spoilt = |change: &dyn Fn(&mut Value)| {
        put(&place, "m/tokenizer.json", &good);
        edit_json(&place.path("m/tokenizer.json"), |json| change(json));
    };
    let is_none =
        |why: &str| format!("error: `m/tokenizer.json` is not a tokenizer we can read: {why}");
    // The library panics at these.
    for (key, value) in [
        ("decoder", json!(5)),
        ("decoder", json!({"type": "Sequence", "decoders": 5})),
        ("normalizer", json!({"type": "Sequence", "normalizers": 5})),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": 5})),
        ("pre_tokenizer", json!([])),
        ("model", json!({"type": "BPE", "vocab": {"a": -1}, "merges": []})),
        ("model", json!({"type": "BPE", "vocab": {"a": 1}, "merges": [["b", "c"]]})),
        ("model", json!({"type": "Unigram", "vocab": [], "unk_id": 7})),
        ("model", json!(null)),
        ("added_tokens", json!([{"id": 1e308}])),
        ("truncation", json!({"max_length": 0, "stride": 5})),
    ] {
        spoilt(&|json| json[key] = value.clone());
        let ran = place.run(&format!("--model m --sparsity-ratio 0.5 {TEXTS}"));
        assert!(
            ran.code == 1
                && ran.stderr.contains(&is_none(""))
                && ran.stderr.contains(OTHER_TOKENIZER),
            "{key} {value}: {}",
            ran.stderr
        );
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    }
    for text in [nested(), "garbage".into(), "{}".into(), String::new()] {
        put(&place, "m/tokenizer.json", text);
        let ran = place.run(&format!("--model m --sparsity-ratio 0.5 {TEXTS}"));
        assert!(
            ran.code == 1
                && ran.stderr.contains(&is_none(""))
                && ran.stderr.contains(OTHER_TOKENIZER),
            "{}",
            ran.stderr
        );
    }
    put(&place, "m/tokenizer.json", &good);
    put(&place, "m/tokenizer_config.json", nested());
    refuses(
        &place,
        "",
        1,
        "error: `m/tokenizer_config.json` is not valid JSON: recursion limit exceeded at line 1 column 128",
        "hint: copy it from the model's page again",
    );
}

#[test]
fn token_ids_beyond_the_embedding_are_refused_by_every_command() {
    let place = Place::with(&RandomCheckpoint { vocab_size: 300, ..RandomCheckpoint::default() });
    edit_json(&place.path("m/tokenizer.json"), |tokenizer| {
        tokenizer["model"]["vocab"]["a"] = json!(4_000_000_000u32);
    });
    let hint = "hint: use the tokenizer.json this checkpoint was published with";
    let first = "error: the tokenizer of `m` is larger than its embedding";
    for arguments in [
        "generate --model m --prompt a",
        "eval --model m --eval-dataset test.txt --seqlen 64",
        "--model m --sparsity-ratio 0.5 --dataset train.txt --nsamples 2 --seqlen 64 \
         --eval none --no-save-model",
    ] {
        refuses_command(&place, arguments, 1, first, hint);
    }
}

#[test]
fn a_chat_template_that_never_ends_is_refused() {
    let place = Place::new();
    let hint = "hint: leave --chat out, and write the prompt as the model was trained to see it";
    for template in [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
            .to_string(),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(),
        format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000)),
        "{{ 'a' * 9999999999 }}".into(),
    ] {
        put(&place, "m/chat_template.jinja", template);
        let ran = place.run("generate --model m --chat --prompt x");
        assert!(
            ran.code == 1
                && ran.stderr.contains(
                    "error: the chat template of `m/chat_template.jinja` cannot be used: "
                )
                && ran.stderr.contains(hint),
            "{}",
            ran.stderr
        );
    }
}
