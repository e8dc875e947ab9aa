//! Input that nobody means well with: files that lie about themselves, never end, grow or nest, and numbers out of every range. Each is
//! one error with the file and what to do, exit code 1 or 2, in bounded time and memory; nothing is written.
//!
//! `errors` holds the mistakes people make, `hub` what a server can do; these are the rest.

mod mutations;
mod mutators;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use prune::checkpoint::{Checkpoint, encode_header};
use prune::demo::RandomCheckpoint;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};

use crate::cli::{Place, Ran, TEXTS, words};
use crate::errors::{edit_json, refuses, refuses_command, rewrite, sharded};

const AGAIN: &str = "hint: download this file again";
const OTHER_CONFIG: &str =
    "hint: take the config.json this checkpoint was published with, or correct the value";
const ONE_OBJECT: &str = "hint: every line must be a JSON object with a string `text`, as in {\"text\": \"...\"}; give plain text as a .txt file";
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
    column
        .typed::<ByteArrayType>()
        .write_batch(&rows, None, None)
        .expect("memory");
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
    refuses(place, &["--dataset", name], 1, first, hint)
}

#[test]
fn headers_that_lie_are_refused_before_they_are_believed() {
    let place = Place::new();
    let tensor = |name: &str, shape: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let file = |length: Option<u64>, json: &str, data: usize| {
        let length = length.unwrap_or(json.len() as u64);
        [&length.to_le_bytes()[..], json.as_bytes(), &vec![0; data]].concat()
    };
    let one =
        |shape: &str, offsets: &str| file(None, &format!("{{{}}}", tensor("a", shape, offsets)), 8);
    let two = |first: &str, second: &str, name: &str| {
        let both = [tensor("a", "[2]", first), tensor(name, "[2]", second)];
        file(None, &format!("{{{}}}", both.join(",")), 16)
    };
    for (bytes, why) in [
        (
            file(Some(u64::MAX), "{}", 8),
            "it is not a safetensors file",
        ),
        (
            file(Some(1000), "{}", 8),
            "it is truncated inside its header",
        ),
        (file(None, &nested(), 0), "its header is not valid"),
        (
            file(None, &format!("{{\"a\":{}", nested()), 0),
            "its header is not valid",
        ),
        (one("[2]", "[0,8000]"), "tensor `a` does not fit its bytes"),
        (
            one("[2000]", "[0,8000]"),
            "it is truncated, 7992 bytes are missing",
        ),
        (
            one("[2]", "[18446744073709551608,18446744073709551615]"),
            "tensor `a` does not fit its bytes",
        ),
        (
            one("[4294967296,4294967296]", "[0,8]"),
            "tensor `a` has an impossible shape [4294967296, 4294967296]",
        ),
        (
            one("[9223372036854775808,2]", "[0,0]"),
            "tensor `a` has an impossible shape [9223372036854775808, 2]",
        ),
        (one("[-1]", "[0,8]"), "its header is not valid"),
        (one("[1e308]", "[0,8]"), "its header is not valid"),
        (
            two("[0,8]", "[4,12]", "b"),
            "tensor `b` overlaps its neighbour",
        ),
        (
            two("[0,8]", "[0,8]", "b"),
            "tensor `b` overlaps its neighbour",
        ),
        (two("[0,8]", "[8,16]", "a"), "its header is not valid"),
        (
            two("[8,16]", "[16,8]", "b"),
            "tensor `b` ends at byte 8, before its start 16",
        ),
        // Nothing of the name reaches the terminal as it is.
        (
            two("[0,8]", "[4,12]", "\\u001b]0;x\\u0007\\nhint: b"),
            "tensor `\\u{1b}]0;x\\u{7}\\nhint: b` overlaps its neighbour",
        ),
    ] {
        put(&place, "m/model.safetensors", bytes);
        let first = format!("error: cannot read `m/model.safetensors`: {why}");
        refuses(&place, &[], 1, &first, AGAIN);
    }
}

#[test]
fn a_quotation_of_megabytes_is_cut() {
    let place = Place::new();
    let name = "x".repeat(3_000_000);
    let info = TensorInfo {
        dtype: Dtype::F32,
        shape: vec![1; 1_000_000],
        data_offsets: (0, 8),
    };
    let file = encode_header(&BTreeMap::new(), &[(name, info)]);
    put(&place, "m/model.safetensors", file);
    let ran = place.run(&["inspect", "m"]);
    assert_eq!(ran.code, 1);
    assert!(
        ran.stderr.len() < 3000 && ran.stderr.contains("` does not fit its bytes\n"),
        "{} bytes",
        ran.stderr.len()
    );
}

#[test]
fn an_index_names_files_in_its_folder_and_tensors_that_are_there() {
    let place = sharded();
    let index = "m/model.safetensors.index.json";
    let good = fs::read_to_string(place.path(index)).unwrap();
    let cannot = |why: &str| format!("error: cannot read `{index}`: {why}");
    let outside = cannot("it names a file outside its folder");
    let invalid = cannot("it is not a valid index");
    for name in [
        "../train.txt",
        "../m/model-00001-of-00003.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        "",
        "C:\\model.safetensors",
        "a\\u0000.safetensors",
    ] {
        let json = format!(
            r#"{{"weight_map": {{"a": "{}"}}}}"#,
            name.replace('\\', "\\\\").replace("\\\\u", "\\u")
        );
        put(&place, index, json);
        refuses(&place, &[], 1, &outside, AGAIN);
    }
    for (text, first) in [
        (nested(), &invalid),
        (format!("{{\"weight_map\": {}", nested()), &invalid),
        ("{}".into(), &invalid),
        ("{\"weight_map\": {\"a\": 5}}".into(), &invalid),
        (
            "{\"weight_map\": {}}".into(),
            &cannot("it names no tensors"),
        ),
        (
            "{\"weight_map\": {\"a\": \"config.json\"}}".into(),
            &cannot("it names a file that is not safetensors"),
        ),
    ] {
        put(&place, index, text);
        refuses(&place, &[], 1, first, AGAIN);
    }
    // Nothing but zeros, most of them not even on the disk.
    let larger = fs::File::create(place.path(index)).unwrap();
    larger.set_len(1 << 32).unwrap();
    let first = cannot("it is larger than 64.00 MiB, the most that is read of such a file");
    let ran = place.run(&["inspect", "m"]);
    assert_eq!((ran.code, ran.stderr), (1, format!("{first}\n{AGAIN}\n")));
    put(&place, index, &good);
    edit_json(&place.path(index), |json| {
        json["weight_map"]["model.layers.7.what"] = json["weight_map"]["model.norm.weight"].clone();
    });
    let shard = place
        .names("m")
        .into_iter()
        .rfind(|name| name.ends_with(".safetensors"));
    let shard = shard.expect("there are shards");
    refuses(
        &place,
        &[],
        1,
        &format!("error: shard `{shard}` does not hold tensor `model.layers.7.what`"),
        "hint: download the checkpoint again",
    );
    // A tensor in two files: the index cannot say which is meant.
    put(&place, index, good.replace("00002-of", "00009-of"));
    let (from, to) = (
        place.path("m/model-00001-of-00003.safetensors"),
        place.path("m/model-00009-of-00003.safetensors"),
    );
    fs::copy(from, to).unwrap();
    let ran = place.run(&["inspect", "m"]);
    assert!(
        ran.code == 1
            && ran.stderr.starts_with("error: tensor `")
            && ran.stderr.contains("` stands in two files\n"),
        "{}",
        ran.stderr
    );
}

/// The hub's cache is made of such links; where they lead is as trusted as the folder. One that leads nowhere is a missing file.
#[cfg(unix)]
#[test]
fn shards_may_be_links_out_of_the_folder_as_in_the_hubs_cache() {
    use std::os::unix::fs::symlink;

    let place = sharded();
    fs::create_dir(place.path("blobs")).unwrap();
    let shards: Vec<String> = place
        .names("m")
        .into_iter()
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    for name in &shards {
        fs::rename(place.path("m").join(name), place.path("blobs").join(name)).unwrap();
        symlink(Path::new("../blobs").join(name), place.path("m").join(name)).unwrap();
    }
    assert!(Checkpoint::open(&place.path("m")).is_ok());
    let ran = place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "none",
        "--save",
        "out",
    ]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    fs::remove_dir_all(place.path("out")).unwrap();
    fs::remove_file(place.path("blobs").join(&shards[1])).unwrap();
    let is_missing = || {
        let ran = place.run(&["inspect", "m"]);
        let first = format!("error: shard `{}` is missing in `m`\n", shards[1]);
        assert!(
            ran.code == 1
                && ran.stderr.starts_with(&first)
                && ran
                    .stderr
                    .ends_with("hint: download the checkpoint again, this file at least\n"),
            "{}",
            ran.stderr
        );
    };
    is_missing();
    // A link to itself.
    fs::remove_file(place.path("m").join(&shards[1])).unwrap();
    symlink(&shards[1], place.path("m").join(&shards[1])).unwrap();
    is_missing();
}

/// Reading a device fills the memory, and opening a pipe waits for ever.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_not_read() {
    use std::os::unix::fs::symlink;

    let layout = "hint: --model wants a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json";
    let place = Place::new();
    for (name, hint) in [
        ("config.json", layout),
        (
            "tokenizer.json",
            "hint: copy it from the model's page again",
        ),
    ] {
        let place = Place::new();
        fs::remove_file(place.path("m").join(name)).unwrap();
        symlink("/dev/zero", place.path("m").join(name)).unwrap();
        let first = format!("error: cannot read `m/{name}`: it is not a regular file");
        let ran = place.run(&[
            "--model",
            "m",
            "--sparsity-ratio",
            "0.5",
            "--dataset",
            "train.txt",
            "--eval",
            "none",
            "--seqlen",
            "64",
            "--no-save-model",
        ]);
        assert!(
            ran.code == 1 && ran.stderr.contains(&first) && ran.stderr.contains(hint),
            "{}",
            ran.stderr
        );
    }
    symlink("/dev/zero", place.path("z.jsonl")).unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(place.path("pipe.txt"))
        .status();
    let mut texts = vec!["/dev/zero", "z.jsonl"];
    // Where there is no such program, the devices will do.
    texts.extend(
        made.is_ok_and(|status| status.success())
            .then_some("pipe.txt"),
    );
    for text in texts {
        let ran = place.run(&[
            "eval",
            "--model",
            "m",
            "--eval-dataset",
            text,
            "--seqlen",
            "64",
        ]);
        assert!(
            ran.code == 1
                && ran
                    .stderr
                    .contains(&format!("error: `{text}` is not a regular file\n"))
                && ran.stderr.contains(
                    "hint: write the text to a file first, and name that with --eval-dataset\n"
                ),
            "{}",
            ran.stderr
        );
    }
    for (flag, first, hint) in [
        (
            "--layer-ratios",
            "error: cannot read layer ratios from `/dev/zero`: it is larger than 16.00 MiB, the most that is read of such a file",
            RATIOS,
        ),
        (
            "--device-map",
            "error: cannot read the device map `/dev/zero`: it is larger than 16.00 MiB, the most that is read of such a file",
            MAP,
        ),
    ] {
        let ran = place.run(
            &[
                &["--model", "m", "--sparsity-ratio", "0.5", flag, "/dev/zero"],
                &TEXTS[..],
            ]
            .concat(),
        );
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        assert_eq!(ran.stderr, format!("{first}\n{hint}\n"));
    }
}

#[test]
fn config_values_out_of_range_are_named_with_what_they_may_be() {
    let place = Place::new();
    let good = fs::read(place.path("m/config.json")).unwrap();
    let llama3 = |key: &str, value: Value| {
        let mut scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64});
        scaling[key] = value;
        scaling
    };
    let size = |key: &str, value: &str| {
        let most = if key == "num_hidden_layers" {
            4096
        } else {
            1 << 24
        };
        format!("`{key}` is {value}; it must be a whole number from 1 to {most}")
    };
    let mut refused: Vec<(&str, Value, String)> = Vec::new();
    for key in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "head_dim",
    ] {
        refused.push((key, json!(0), size(key, "0")));
        refused.push((key, json!(1u64 << 40), size(key, "1099511627776")));
    }
    let factor = |value: &str| {
        format!("`rope_scaling.factor` is {value}; it must be a number from 1 to 1e12")
    };
    refused.extend([
        ("vocab_size", json!(-1), size("vocab_size", "-1")),
        ("hidden_size", json!(2.5), size("hidden_size", "2.5")),
        ("hidden_size", json!(1e308), size("hidden_size", "1e+308")),
        ("hidden_size", json!("64"), size("hidden_size", "\"64\"")),
        ("num_hidden_layers", json!(1_000_000_000), size("num_hidden_layers", "1000000000")),
        ("num_attention_heads", json!(3), "`num_attention_heads` 3 is not a multiple of `num_key_value_heads` 2".into()),
        ("hidden_size", json!(66), "`hidden_size` 66 is not a multiple of `num_attention_heads` 4, and there is no `head_dim`".into()),
        ("head_dim", json!(5), "`head_dim` 5 is odd; rotary positions need pairs".into()),
        ("head_dim", json!(1 << 23), "`num_attention_heads` 4 times `head_dim` 8388608 is more than 16777216".into()),
        ("rms_norm_eps", json!(0), "`rms_norm_eps` is 0; it must lie between 0 and 1".into()),
        ("rms_norm_eps", json!("x"), "`rms_norm_eps` is \"x\"; it must lie between 0 and 1".into()),
        ("rope_theta", json!(0), "`rope_theta` is 0; it must be a number above 1, and up to 1e12".into()),
        ("rope_theta", json!(1e308), "`rope_theta` is 1e+308; it must be a number above 1, and up to 1e12".into()),
        ("rope_scaling", json!(4), "`rope_scaling` is 4; it must be an object, or null".into()),
        ("rope_scaling", json!({"type": "linear", "factor": 0}), factor("0")),
        ("rope_scaling", json!({"type": "dynamic", "factor": 1e-300}), factor("1e-300")),
        ("rope_scaling", llama3("factor", json!(-8)), factor("-8")),
        ("rope_scaling", llama3("low_freq_factor", json!(4)), "`rope_scaling`: low_freq_factor 4 must be smaller than high_freq_factor 4".into()),
        ("rope_scaling", llama3("original_max_position_embeddings", json!(1e300)), size("original_max_position_embeddings", "1e+300")),
        ("tie_word_embeddings", json!("yes"), "`tie_word_embeddings` is \"yes\"; it must be true or false".into()),
        ("hidden_act", json!(7), "`hidden_act` is 7; a Llama's MLP uses \"silu\"".into()),
    ]);
    for (key, value, message) in refused {
        put(&place, "m/config.json", &good);
        edit_json(&place.path("m/config.json"), |config| {
            config[key] = value;
            // The width of a head comes from the others, unless it is what is tried.
            if key != "head_dim" {
                config.as_object_mut().unwrap().remove("head_dim");
            }
        });
        refuses(&place, &[], 1, &format!("error: {message}"), OTHER_CONFIG);
    }
    for (text, why) in [
        (nested(), "recursion limit exceeded at line 1 column 128"),
        (
            "{\"rope_theta\": NaN}".into(),
            "expected value at line 1 column 16",
        ),
        (
            "{\"rope_theta\": 1e999}".into(),
            "number out of range at line 1 column 20",
        ),
    ] {
        put(&place, "m/config.json", text);
        let first = format!("error: `m/config.json` is not JSON: {why}");
        refuses(&place, &[], 1, &first, OTHER_CONFIG);
    }
}

/// Positions that are stretched as far as asked have no end of their own.
#[test]
fn a_sequence_longer_than_any_is_refused_where_positions_are_stretched_too() {
    let place = Place::new();
    edit_json(&place.path("m/config.json"), |config| {
        config["rope_scaling"] = json!({"type": "dynamic", "factor": 2.0});
    });
    for seqlen in ["18446744073709551615", "16777217"] {
        let first =
            format!("error: --seqlen {seqlen} is longer than the model's 16777216 positions");
        let hint = "hint: use --seqlen 16777216 or less";
        refuses(&place, &["--seqlen", seqlen], 2, &first, hint);
    }
    let ran = place.run(&[
        "plan",
        "--model",
        "m",
        "--seqlen",
        "16777216",
        "--nsamples",
        "1000000",
        "--eval-windows",
        "4294967295",
        "--max-memory",
        "cpu=1GiB",
    ]);
    assert!(
        ran.code == 1 && ran.stderr.starts_with("error: "),
        "{}",
        ran.stderr
    );
}

#[test]
fn weights_that_are_no_numbers_are_named_wherever_they_are() {
    for (name, says) in [
        ("model.embed_tokens.weight", "is not finite"),
        ("model.layers.0.input_layernorm.weight", "is not finite"),
        (
            "model.layers.1.post_attention_layernorm.weight",
            "is not finite",
        ),
    ] {
        let place = Place::new();
        rewrite(&place, |found, _, bytes| {
            if found == name {
                for weight in bytes.chunks_exact_mut(4) {
                    weight.copy_from_slice(&f32::NAN.to_le_bytes());
                }
            }
            true
        });
        let ran = place.run(
            &[
                &[
                    "--model",
                    "m",
                    "--sparsity-ratio",
                    "0.5",
                    "--eval",
                    "none",
                    "--save",
                    "out",
                ],
                &TEXTS[..],
            ]
            .concat(),
        );
        let error = &ran.stderr[ran.stderr.find("error: ").unwrap_or(0)..];
        assert!(
            ran.code == 1 && error.contains(says) && error.contains("hint: "),
            "{name}: {}",
            ran.stderr
        );
        assert!(
            !place.path("out/run.json").exists() && !place.path("out/model/config.json").exists()
        );
    }
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
        (
            "{\"00\": 0.5}".into(),
            1,
            ratios("`00` is not a layer's index"),
            RATIOS,
        ),
        (
            "{\"-1\": 0.5}".into(),
            1,
            ratios("`-1` is not a layer's index"),
            RATIOS,
        ),
        ("[-0.5, 0.5]".into(), 2, range("-0.5"), ""),
        (
            "{\"18446744073709551615\": 0.5}".into(),
            2,
            "error: --layer-ratios names layer 18446744073709551615, the model has layers 0 to 1"
                .into(),
            "",
        ),
    ] {
        put(&place, "x.json", text);
        refuses(&place, &["--layer-ratios", "x.json"], code, &first, hint);
    }
    for (text, first) in [
        (nested(), "error: the device map `x.json` is not JSON: recursion limit exceeded at line 1 column 128".into()),
        ("{\"\": 1e308}".into(), map("``: 1e+308 is no device; they are \"cpu\", \"disk\", 0 or \"cuda:0\"")),
        ("{\"\": \"cuda:99999999999999999999\"}".into(), map("``: \"cuda:99999999999999999999\" is no device; they are \"cpu\", \"disk\", 0 or \"cuda:0\"")),
        ("{\"\": [0]}".into(), map("``: [0] is no device; they are \"cpu\", \"disk\", 0 or \"cuda:0\"")),
    ] {
        put(&place, "x.json", text);
        refuses(&place, &["--device-map", "x.json"], 1, &first, MAP);
    }
    put(&place, "x.json", b"\xff");
    let first = "error: cannot read the device map `x.json`: it is not UTF-8 text from byte 0 on";
    refuses(&place, &["--device-map", "x.json"], 1, first, MAP);
}

#[test]
fn lines_that_are_no_documents_are_named() {
    let place = Place::new();
    let good = documents(5);
    let is_no = |line: usize, why: &str| {
        format!("error: line {line} of `d.jsonl` is not a document: {why}")
    };
    let first_lines = [
        (
            "{\"txt\": \"a\"}\n".to_string(),
            is_no(1, "missing field `text` at line 1 column 12"),
        ),
        (
            "{\"text\": 5}\n".into(),
            is_no(
                1,
                "invalid type: integer `5`, expected a string at line 1 column 10",
            ),
        ),
        (
            "{\"text\": null}\n".into(),
            is_no(
                1,
                "invalid type: null, expected a string at line 1 column 13",
            ),
        ),
        (
            format!("{{\"text\": {}\n", nested()),
            is_no(
                1,
                "invalid type: sequence, expected a string at line 1 column 9",
            ),
        ),
        (
            "\0\0\0\0\n".into(),
            is_no(1, "expected value at line 1 column 1"),
        ),
        ("\n \n".into(), "error: no documents in `d.jsonl`".into()),
    ];
    for (text, first) in first_lines {
        let ran = refuses_text(&place, "d.jsonl", text.as_bytes(), &first, ONE_OBJECT);
        assert!(
            ran.stderr.starts_with("error: "),
            "before any work: {}",
            ran.stderr
        );
    }
    // The sixth line, found when it is drawn.
    let text = format!("{good}{}", "{\"txt\": 1}\n".repeat(1000));
    put(&place, "d.jsonl", text);
    let ran = place.run(
        &[
            &[
                "--model",
                "m",
                "--sparsity-ratio",
                "0.5",
                "--dataset",
                "d.jsonl",
            ],
            &TEXTS[2..],
        ]
        .concat(),
    );
    assert!(
        ran.code == 1
            && ran
                .stderr
                .contains("of `d.jsonl` is not a document: missing field `text`")
            && ran.stderr.contains("fields found: txt\n"),
        "{}",
        ran.stderr
    );
    // What a line holds instead is quoted in part.
    for line in [format!("\"{}\"\n", "x".repeat(5_000_000)), {
        let fields: Vec<String> = (0..100_000).map(|at| format!("\"f{at}\":1")).collect();
        format!("{{{}}}\n", fields.join(","))
    }] {
        put(&place, "d.jsonl", line);
        let ran = place.run(&[
            "eval",
            "--model",
            "m",
            "--eval-dataset",
            "d.jsonl",
            "--seqlen",
            "64",
        ]);
        assert!(
            ran.code == 1 && ran.stderr.len() < 3000,
            "{} bytes",
            ran.stderr.len()
        );
    }
    let texts = "{\"text\":\"\"}\n".repeat(1000);
    let ran = refuses_text(
        &place,
        "d.jsonl",
        texts.as_bytes(),
        "error: found 0 of 4 documents with more than --seqlen 64 tokens",
        "hint: use a text of long documents, such as --dataset wikitext2:PATH",
    );
    assert!(
        ran.stderr
            .contains("\n  1000 different documents of 1000 tried in `d.jsonl`\n"),
        "{}",
        ran.stderr
    );
}

#[test]
fn archives_that_are_damaged_or_never_end_are_refused() {
    let place = Place::new();
    let good = gzipped(documents(50).as_bytes(), 1);
    let damaged = "hint: the file is damaged or incomplete: copy it again";
    let mut wrong_sum = good.clone();
    let sum = wrong_sum.len() - 8;
    wrong_sum[sum..].fill(0);
    for (bytes, why) in [
        (&good[..good.len() - 20], "incomplete deflate stream"),
        (
            &[&b"\x1f\x8b"[..], &[7; 500]].concat(),
            "invalid gzip header",
        ),
        (
            &wrong_sum,
            "corrupt gzip stream does not have a matching checksum",
        ),
        (
            &[&good[..], b"more than a header"].concat(),
            "invalid gzip header",
        ),
    ] {
        let first = format!("error: cannot read `d.gz`: {why}");
        refuses_text(&place, "d.gz", bytes, &first, damaged);
    }
    // Lines that hold next to nothing, and lines that are blank, 70 and more members of them.
    let hint = "hint: if it is meant, unpack it (gzip -dc FILE.gz > text.jsonl) and name the unpacked file";
    let line = b"{\"text\":\"a\"}\n".repeat(1 << 16);
    for bomb in [
        gzipped(&line, 80),
        gzipped(
            &[&documents(1).into_bytes()[..], &vec![b'\n'; 1 << 20]].concat(),
            70,
        ),
    ] {
        let first = "error: `d.gz` unpacks to more than 64.00 MiB";
        let ran = refuses_text(&place, "d.gz", &bomb, first, hint);
        assert!(
            ran.stderr
                .contains("more than 100 times its file's size is no text\n"),
            "{}",
            ran.stderr
        );
    }
    let long = [&documents(1).into_bytes()[..], &vec![b'x'; (64 << 20) + 1]].concat();
    refuses_text(
        &place,
        "d.gz",
        &gzipped(&long, 1),
        "error: `d.gz` unpacks to more than 64.00 MiB",
        hint,
    );
}

#[test]
fn parquet_of_another_schema_cut_or_made_up_is_refused() {
    let place = Place::new();
    let rows: Vec<Vec<u8>> = (0..50).map(|seed| words(seed, 30).into_bytes()).collect();
    let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
    let good = parquet_bytes("text", &rows);
    let copy = "hint: copy the file again; uncompressed, snappy and zstd columns are read";
    let cannot = |why: &str| format!("error: cannot read `d.parquet` as parquet: {why}");
    refuses_text(
        &place,
        "d.parquet",
        &parquet_bytes("content", &rows),
        "error: `d.parquet` has no string column `text`",
        "hint: rename the column that holds the text to `text`",
    );
    let truncated = "it does not end as parquet does: it is truncated, or something else";
    let mut long_footer = good.clone();
    let at = long_footer.len() - 8;
    long_footer[at..at + 4].fill(0xff);
    for (bytes, why) in [
        (&b"PAR1"[..], "4 bytes are too few"),
        (&good[..good.len() / 2], truncated),
        (&[&b"PAR1"[..], &[0xa5; 300]].concat(), truncated),
        (
            &long_footer,
            &format!("its footer is said to have 4294967295 bytes, of {at} before it"),
        ),
    ] {
        refuses_text(&place, "d.parquet", bytes, &cannot(why), copy);
    }
    // One value, written once and meant 70 times.
    let value = vec![b'x'; 1 << 20];
    let bomb = parquet_bytes("text", &[&value[..]; 70]);
    assert!(bomb.len() < 1 << 20, "{} bytes", bomb.len());
    refuses_text(
        &place,
        "d.parquet",
        &bomb,
        "error: `d.parquet` unpacks to more than 64.00 MiB",
        "hint: if it is meant, write its rows as JSON lines ({\"text\": ...}) and name that file",
    );
}

#[test]
fn a_line_and_a_word_without_an_end_are_refused() {
    let place = Place::new();
    let endless = b"layer norm ".repeat(((64 << 20) / 11) + 1);
    put(&place, "wiki.train.raw", &endless);
    let ran = place.run(
        &[
            &[
                "--model",
                "m",
                "--sparsity-ratio",
                "0.5",
                "--dataset",
                "wikitext2:wiki.train.raw",
            ],
            &TEXTS[2..],
        ]
        .concat(),
    );
    assert!(
        ran.code == 1
            && ran
                .stderr
                .contains("error: a line of `wiki.train.raw` is longer than 64.00 MiB\n")
            && ran.stderr.contains("hint: "),
        "{}",
        ran.stderr
    );
    let text = [&b"{\"text\":\"a\"}\n{\"text\":\""[..], &endless].concat();
    put(&place, "d.jsonl", text);
    let ran = place.run(
        &[
            &[
                "--model",
                "m",
                "--sparsity-ratio",
                "0.5",
                "--dataset",
                "d.jsonl",
            ],
            &TEXTS[2..],
        ]
        .concat(),
    );
    assert!(
        ran.code == 1
            && ran
                .stderr
                .contains("error: a line of `d.jsonl` is longer than 64.00 MiB\n")
            && ran.stderr.contains("hint: "),
        "{}",
        ran.stderr
    );
    put(&place, "word.txt", vec![b'a'; (32 << 20) + (1 << 20)]);
    let ran = place.run(
        &[
            &[
                "--model",
                "m",
                "--sparsity-ratio",
                "0.5",
                "--dataset",
                "word.txt",
            ],
            &TEXTS[2..],
        ]
        .concat(),
    );
    assert!(
        ran.code == 1
            && ran.stderr.contains("error: a text has more than 32.00 MiB")
            && ran.stderr.contains("hint: "),
        "{}",
        ran.stderr
    );
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
        (
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": 5}),
        ),
        ("pre_tokenizer", json!([])),
        (
            "model",
            json!({"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        ),
        (
            "model",
            json!({"type": "BPE", "vocab": {"a": 1}, "merges": [["b", "c"]]}),
        ),
        (
            "model",
            json!({"type": "Unigram", "vocab": [], "unk_id": 7}),
        ),
        ("model", json!(null)),
        ("added_tokens", json!([{"id": 1e308}])),
        ("truncation", json!({"max_length": 0, "stride": 5})),
    ] {
        spoilt(&|json| json[key] = value.clone());
        let ran = place.run(&[&["--model", "m", "--sparsity-ratio", "0.5"], &TEXTS[..]].concat());
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
        let ran = place.run(&[&["--model", "m", "--sparsity-ratio", "0.5"], &TEXTS[..]].concat());
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
        &[],
        1,
        "error: `m/tokenizer_config.json` is not valid JSON: recursion limit exceeded at line 1 column 128",
        "hint: copy it from the model's page again",
    );
}

#[test]
fn token_ids_beyond_the_embedding_are_refused_by_every_command() {
    let place = Place::with(&RandomCheckpoint {
        vocab_size: 300,
        ..RandomCheckpoint::default()
    });
    edit_json(&place.path("m/tokenizer.json"), |tokenizer| {
        tokenizer["model"]["vocab"]["a"] = json!(4_000_000_000u32);
    });
    let hint = "hint: use the tokenizer.json this checkpoint was published with";
    let first = "error: the tokenizer of `m` is larger than its embedding";
    for arguments in [
        &["generate", "--model", "m", "--prompt", "a"][..],
        &[
            "eval",
            "--model",
            "m",
            "--eval-dataset",
            "test.txt",
            "--seqlen",
            "64",
        ],
        &[
            "--model",
            "m",
            "--sparsity-ratio",
            "0.5",
            "--dataset",
            "train.txt",
            "--nsamples",
            "2",
            "--seqlen",
            "64",
            "--eval",
            "none",
            "--no-save-model",
        ],
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
        let ran = place.run(&["generate", "--model", "m", "--chat", "--prompt", "x"]);
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
