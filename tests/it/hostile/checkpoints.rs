//! Hostile checkpoints: headers, indexes, links, special files, configuration values and weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prune::checkpoint::{Checkpoint, encode_header};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};

use super::{AGAIN, MAP, OTHER_CONFIG, RATIOS, nested, put};
use crate::support::{Place, TEXTS, edit_json, refuses, rewrite, sharded};

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
    let many: Vec<String> =
        (0..200_000).map(|at| tensor(&at.to_string(), "[0]", "[0,0]")).collect();
    let dimensions = format!("[0{}]", ",1".repeat(2_000_000));
    for (bytes, why) in [
        (file(None, &format!("{{{}}}", many.join(",")), 0), "its header holds too much"),
        (
            file(None, &format!("{{{}}}", tensor("a", &dimensions, "[0,0]")), 0),
            "its header holds too much",
        ),
        (file(Some(u64::MAX), "{}", 8), "it is not a safetensors file"),
        (file(Some(1000), "{}", 8), "it is truncated inside its header"),
        (file(None, &nested(), 0), "its header is not valid"),
        (file(None, &format!("{{\"a\":{}", nested()), 0), "its header is not valid"),
        (one("[2]", "[0,8000]"), "tensor `a` does not fit its bytes"),
        (one("[2000]", "[0,8000]"), "it is truncated, 7992 bytes are missing"),
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
        (two("[0,8]", "[4,12]", "b"), "tensor `b` overlaps its neighbour"),
        (two("[0,8]", "[0,8]", "b"), "tensor `b` overlaps its neighbour"),
        (two("[0,8]", "[8,16]", "a"), "its header is not valid"),
        (two("[8,16]", "[16,8]", "b"), "tensor `b` ends at byte 8, before its start 16"),
        // Nothing of the name reaches the terminal as it is.
        (
            two("[0,8]", "[4,12]", "\\u001b]0;x\\u0007\\nhint: b"),
            "tensor `\\u{1b}]0;x\\u{7}\\nhint: b` overlaps its neighbour",
        ),
    ] {
        put(&place, "m/model.safetensors", bytes);
        let first = format!("error: cannot read `m/model.safetensors`: {why}");
        refuses(&place, "", 1, &first, AGAIN);
    }
}

#[test]
fn a_quotation_of_megabytes_is_cut() {
    let place = Place::new();
    let name = "x".repeat(3_000_000);
    let info = TensorInfo { dtype: Dtype::F32, shape: vec![1; 1_000_000], data_offsets: (0, 8) };
    let file = encode_header(&BTreeMap::new(), &[(name, info)]);
    put(&place, "m/model.safetensors", file);
    let ran = place.run("inspect m");
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
        refuses(&place, "", 1, &outside, AGAIN);
    }
    for (text, first) in [
        (nested(), &invalid),
        (format!("{{\"weight_map\": {}", nested()), &invalid),
        ("{}".into(), &invalid),
        ("{\"weight_map\": {\"a\": 5}}".into(), &invalid),
        ("{\"weight_map\": {}}".into(), &cannot("it names no tensors")),
        (
            "{\"weight_map\": {\"a\": \"config.json\"}}".into(),
            &cannot("it names a file that is not safetensors"),
        ),
    ] {
        put(&place, index, text);
        refuses(&place, "", 1, first, AGAIN);
    }
    // Nothing but zeros, most of them not even on the disk.
    let larger = fs::File::create(place.path(index)).unwrap();
    larger.set_len(1 << 32).unwrap();
    let first = cannot("it is larger than 64.00 MiB, the most that is read of such a file");
    let ran = place.run("inspect m");
    assert_eq!((ran.code, ran.stderr), (1, format!("{first}\n{AGAIN}\n")));
    put(&place, index, &good);
    edit_json(&place.path(index), |json| {
        json["weight_map"]["model.layers.7.what"] = json["weight_map"]["model.norm.weight"].clone();
    });
    // A name that no file has and no one needs, as transformers takes it.
    let ran = place.run("inspect m");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    edit_json(&place.path(index), |json| {
        let files = json["weight_map"].as_object().expect("an index").values().cloned();
        let files: Vec<_> = files.collect();
        let other = files.iter().find(|file| **file != json["weight_map"]["model.norm.weight"]);
        json["weight_map"]["model.norm.weight"] = other.expect("there are shards").clone();
    });
    refuses(
        &place,
        "",
        1,
        "error: shard `model-00001-of-00003.safetensors` does not hold tensor `model.norm.weight`",
        "hint: download the checkpoint again",
    );
    // A tensor in two files: the index cannot say which is meant.
    put(&place, index, good.replace("00002-of", "00009-of"));
    let (from, to) = (
        place.path("m/model-00001-of-00003.safetensors"),
        place.path("m/model-00009-of-00003.safetensors"),
    );
    fs::copy(from, to).unwrap();
    let ran = place.run("inspect m");
    assert!(
        ran.code == 1
            && ran.stderr.starts_with("error: tensor `")
            && ran.stderr.contains("` is in two files\n"),
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
    let shards: Vec<String> =
        place.names("m").into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    for name in &shards {
        fs::rename(place.path("m").join(name), place.path("blobs").join(name)).unwrap();
        symlink(Path::new("../blobs").join(name), place.path("m").join(name)).unwrap();
    }
    assert!(Checkpoint::open(&place.path("m")).is_ok());
    let ran = place.prune("--model m --sparsity-ratio 0.5 --eval none --save out");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    fs::remove_dir_all(place.path("out")).unwrap();
    fs::remove_file(place.path("blobs").join(&shards[1])).unwrap();
    let is_missing = || {
        let ran = place.run("inspect m");
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

    let layout =
        "hint: name a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json";
    let place = Place::new();
    for (name, hint) in
        [("config.json", layout), ("tokenizer.json", "hint: copy it from the model's page again")]
    {
        let place = Place::new();
        fs::remove_file(place.path("m").join(name)).unwrap();
        symlink("/dev/zero", place.path("m").join(name)).unwrap();
        let first = format!("error: cannot read `m/{name}`: it is not a regular file");
        let ran = place.run(
            "--model m --sparsity-ratio 0.5 --dataset train.txt --eval none --seqlen 64 \
             --no-save-model",
        );
        assert!(
            ran.code == 1 && ran.stderr.contains(&first) && ran.stderr.contains(hint),
            "{}",
            ran.stderr
        );
    }
    symlink("/dev/zero", place.path("z.jsonl")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(place.path("pipe.txt")).status();
    let mut texts = vec!["/dev/zero", "z.jsonl"];
    // Without that program, the devices are enough.
    texts.extend(made.is_ok_and(|status| status.success()).then_some("pipe.txt"));
    for text in texts {
        let ran = place.run(&format!("eval --model m --eval-dataset {text} --seqlen 64"));
        assert!(
            ran.code == 1
                && ran.stderr.contains(&format!("error: `{text}` is not a regular file\n"))
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
        let ran = place.run(&format!("--model m --sparsity-ratio 0.5 {flag} /dev/zero {TEXTS}"));
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
        let most = if key == "num_hidden_layers" { 4096 } else { 1 << 24 };
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
        ("hidden_act", json!(7), "`hidden_act` is 7; an MLP is computed with silu or gelu_pytorch_tanh".into()),
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
        refuses(&place, "", 1, &format!("error: {message}"), OTHER_CONFIG);
    }
    for (text, why) in [
        (nested(), "recursion limit exceeded at line 1 column 128"),
        ("{\"rope_theta\": NaN}".into(), "expected value at line 1 column 16"),
        ("{\"rope_theta\": 1e999}".into(), "number out of range at line 1 column 20"),
    ] {
        put(&place, "m/config.json", text);
        let first = format!("error: `m/config.json` is not JSON: {why}");
        refuses(&place, "", 1, &first, OTHER_CONFIG);
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
        refuses(&place, &format!("--seqlen {seqlen}"), 2, &first, hint);
    }
    let ran = place.run(
        "plan --model m --seqlen 16777216 --nsamples 1000000 --eval-windows 4294967295 \
         --max-memory cpu=1GiB",
    );
    assert!(ran.code == 1 && ran.stderr.starts_with("error: "), "{}", ran.stderr);
}

#[test]
fn weights_that_are_no_numbers_are_named_wherever_they_are() {
    for (name, says) in [
        ("model.embed_tokens.weight", "is not finite"),
        ("model.layers.0.input_layernorm.weight", "is not finite"),
        ("model.layers.1.post_attention_layernorm.weight", "is not finite"),
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
        let ran =
            place.run(&format!("--model m --sparsity-ratio 0.5 --eval none --save out {TEXTS}"));
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
