//! Everything that can be wrong before a run, one test each: the first line and the hint to the letter, the exit code, and
//! that nothing was written.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource, encode_header};
use prune::demo::RandomCheckpoint;
use prune::model::{DecoderLayer, ModelConfig};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};

use crate::cli::{Place, Ran, TEXTS};

/// A failing command's arguments: the model, half of the weights, the usual texts, saved as `out`; then `more`.
fn arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let given = |flag: &str| {
        more.iter()
            .any(|argument| argument.split('=').next() == Some(flag))
    };
    let mut arguments = Vec::new();
    let defaults = [
        ["--model", "m"],
        ["--sparsity-ratio", "0.5"],
        ["--save", "out"],
    ];
    let texts = TEXTS.chunks(2).map(|pair| [pair[0], pair[1]]);
    for pair in defaults.into_iter().chain(texts) {
        if !given(pair[0]) {
            arguments.extend(pair);
        }
    }
    arguments.extend(more);
    // `--flag -` means: without that flag.
    while let Some(at) = arguments.iter().position(|argument| *argument == "-") {
        arguments.drain(at - 1..=at);
    }
    arguments
}

/// Names and contents below the folder, the text cache aside.
fn contents(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let (root, mut found) = (place.path("."), BTreeMap::new());
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("the folder is there") {
            let path = entry.expect("the folder can be listed").path();
            let name = path
                .strip_prefix(&root)
                .expect("found below the root")
                .display()
                .to_string();
            if name == ".cache" {
                continue;
            }
            if path.is_dir() {
                found.insert(name, Vec::new());
                folders.push(path);
            } else {
                found.insert(name, fs::read(path).expect("listed above"));
            }
        }
    }
    found
}

/// Runs `prune` with [`arguments`] and holds the refusal to `code`, `first` and `hint` (empty: none); nothing may be written.
#[track_caller]
pub(crate) fn refuses(place: &Place, more: &[&str], code: i32, first: &str, hint: &str) -> Ran {
    refuses_command(place, &arguments(more), code, first, hint)
}

#[track_caller]
pub(crate) fn refuses_command(
    place: &Place,
    arguments: &[&str],
    code: i32,
    first: &str,
    hint: &str,
) -> Ran {
    let before = contents(place);
    let ran = place.run(arguments);
    let shown = &ran.stderr;
    assert!(!shown.contains("panicked"), "{shown}");
    // What was said before (tokens cached, the plan) is no part of the error.
    let error = shown.find("error: ").map_or("", |at| &shown[at..]);
    assert_eq!(error.lines().next(), Some(first), "{shown}");
    let last = error
        .lines()
        .find(|line| line.starts_with("hint: "))
        .unwrap_or("");
    assert_eq!(last, hint, "{shown}");
    assert_eq!(ran.code, code, "{shown}");
    assert_eq!(ran.stdout, "", "an error is no result");
    let after = contents(place);
    assert!(
        before == after,
        "written: {:?}",
        after
            .keys()
            .filter(|name| !before.contains_key(*name))
            .collect::<Vec<_>>()
    );
    ran
}

/// As [`refuses`]; and the error is the first thing said.
#[track_caller]
fn refuses_at_once(place: &Place, more: &[&str], code: i32, first: &str, hint: &str) {
    let ran = refuses(place, more, code, first, hint);
    assert!(ran.stderr.starts_with("error: "), "{}", ran.stderr);
}

/// Changes `m/config.json`.
fn edit_config(place: &Place, change: impl FnOnce(&mut Value)) {
    edit_json(&place.path("m/config.json"), change);
}

pub(crate) fn edit_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json =
        serde_json::from_slice(&fs::read(path).expect("it was written")).expect("it is JSON");
    change(&mut json);
    fs::write(path, json.to_string()).expect("it can be replaced");
}

const LAYOUT_HINT: &str = "hint: --model wants a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json";
const TOGETHER_HINT: &str =
    "hint: check that config.json and the weights belong together, or download them again";

#[test]
fn a_ratio_out_of_range_is_refused() {
    let place = Place::new();
    let message = |ratio| {
        format!(
            "error: --sparsity-ratio is {ratio}; it is the fraction removed, from 0 up to but not including 1"
        )
    };
    for (ratio, shown, hint) in [
        ("1", "1", ""),
        ("50", "50", "hint: for 50 percent write 0.5"),
        ("nan", "NaN", ""),
        ("inf", "inf", ""),
    ] {
        refuses_at_once(
            &place,
            &["--sparsity-ratio", ratio],
            2,
            &message(shown),
            hint,
        );
    }
    for minus in [
        &["--sparsity-ratio=-0.5"][..],
        &["--sparsity-ratio", "-0.5"],
    ] {
        refuses_at_once(&place, minus, 2, &message("-0.5"), "");
    }
}

#[test]
fn a_ratio_that_is_missing_is_asked_for() {
    refuses_at_once(
        &Place::new(),
        &["--sparsity-ratio", "-"],
        2,
        "error: --sparsity-ratio is missing",
        "hint: say how much goes, like --sparsity-ratio 0.5 or --sparsity-type 2:4",
    );
}

#[test]
fn a_model_that_is_not_named_is_asked_for() {
    refuses_at_once(
        &Place::new(),
        &["--model", "-"],
        2,
        "error: --model is missing",
        "hint: name a checkpoint folder, like --model models/llama-2-7b; see prune --help",
    );
}

#[test]
fn a_pattern_that_does_not_divide_the_inputs_is_refused() {
    let place = Place::new();
    refuses_at_once(
        &place,
        &["--sparsity-ratio", "-", "--sparsity-type", "3:5"],
        1,
        "error: `model.layers.0.self_attn.q_proj` has 64 input features, which 5 does not divide",
        "hint: use an M that divides 64, or leave the matrix out with --exclude '*q_proj'",
    );
    // 64 is a multiple of 32, 176 is not.
    refuses_at_once(
        &place,
        &["--sparsity-ratio", "-", "--sparsity-type", "16:32"],
        1,
        "error: `model.layers.0.mlp.down_proj` has 176 input features, which 32 does not divide",
        "hint: use an M that divides 176, or leave the matrix out with --exclude '*down_proj'",
    );
}

#[test]
fn a_pattern_that_contradicts_the_ratio_is_refused() {
    refuses_at_once(
        &Place::new(),
        &["--sparsity-ratio", "0.6", "--sparsity-type", "2:4"],
        2,
        "error: --sparsity-ratio 0.6 contradicts --sparsity-type 2:4, which removes 0.5",
        "hint: leave --sparsity-ratio out, or use 0.5",
    );
}

#[test]
fn a_pattern_that_is_none_is_refused() {
    let hint = "hint: use `unstructured`, or N:M with N pruned of M, like 2:4";
    for (pattern, why) in [
        ("4:2", "N must lie between 1 and M - 1, and 4 of 2 does not"),
        ("dense", "it is neither `unstructured` nor N:M"),
        ("2:x", "`x` is not a number"),
    ] {
        refuses_at_once(
            &Place::new(),
            &["--sparsity-type", pattern],
            2,
            &format!(
                "error: invalid value '{pattern}' for '--sparsity-type <TYPE>': `{pattern}` is not a sparsity type: {why}"
            ),
            hint,
        );
    }
}

#[test]
fn another_architecture_is_refused_by_name() {
    let place = Place::new();
    edit_config(&place, |config| {
        config["architectures"] = json!(["MistralForCausalLM"])
    });
    refuses_at_once(
        &place,
        &[],
        1,
        "error: the architecture `MistralForCausalLM` is not supported",
        "hint: use a checkpoint whose config.json says `\"model_type\": \"llama\"`",
    );
}

#[test]
fn a_quantised_checkpoint_is_refused() {
    let place = Place::new();
    edit_config(&place, |config| {
        config["quantization_config"] = json!({"quant_method": "gptq"})
    });
    refuses_at_once(
        &place,
        &[],
        1,
        "error: the checkpoint is quantised (gptq)",
        "hint: prune the unquantised checkpoint and quantise the result",
    );
}

#[test]
fn a_model_folder_that_does_not_exist_is_refused() {
    refuses_at_once(
        &Place::new(),
        &["--model", "models/llama"],
        1,
        "error: the model `models/llama` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it",
        "hint: run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give a local folder to --model",
    );
    refuses_at_once(
        &Place::new(),
        &["--model", "./models/llama"],
        1,
        "error: the model folder `./models/llama` does not exist",
        LAYOUT_HINT,
    );
}

#[test]
fn a_model_folder_without_config_is_refused() {
    let place = Place::new();
    fs::remove_file(place.path("m/config.json")).unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        "error: cannot read `m/config.json`: No such file or directory (os error 2)",
        LAYOUT_HINT,
    );
}

#[test]
fn a_config_that_is_damaged_is_refused() {
    let place = Place::new();
    fs::write(place.path("m/config.json"), "{\"model_type\": ").unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        "error: `m/config.json` is not JSON: EOF while parsing a value at line 1 column 15",
        "hint: take the config.json this checkpoint was published with, or correct the value",
    );
}

pub(crate) fn sharded() -> Place {
    Place::with(&RandomCheckpoint {
        max_shard: ByteSize(200 << 10),
        ..RandomCheckpoint::default()
    })
}

#[test]
fn a_missing_shard_is_named() {
    let place = sharded();
    let shard = place
        .names("m")
        .into_iter()
        .find(|name| name.starts_with("model-00002"))
        .unwrap();
    fs::remove_file(place.path("m").join(&shard)).unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        &format!("error: shard `{shard}` is missing in `m`"),
        "hint: download the checkpoint again, this file at least",
    );
}

#[test]
fn a_truncated_shard_is_named_with_what_is_missing() {
    let place = sharded();
    let shard = place
        .names("m")
        .into_iter()
        .find(|name| name.starts_with("model-00002"))
        .unwrap();
    let path = place.path("m").join(&shard);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1000]).unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        &format!("error: cannot read `m/{shard}`: it is truncated, 1000 bytes are missing"),
        "hint: download this file again",
    );
}

/// Writes `m/model.safetensors` anew with tensors changed; `change` sees name, header and bytes, and says whether it stays.
pub(crate) fn rewrite(
    place: &Place,
    mut change: impl FnMut(&str, &mut TensorInfo, &mut Vec<u8>) -> bool,
) {
    let path = place.path("m");
    let checkpoint = Checkpoint::open(&path).expect("a good checkpoint");
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    for entry in checkpoint.tensors() {
        let mut bytes = vec![0; entry.bytes as usize];
        checkpoint
            .read(entry, 0, &mut bytes)
            .expect("a good checkpoint");
        let mut info = TensorInfo {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            data_offsets: (0, 0),
        };
        if change(&entry.name, &mut info, &mut bytes) {
            info.data_offsets = (data.len(), data.len() + bytes.len());
            infos.push((entry.name.clone(), info));
            data.extend(bytes);
        }
    }
    let mut file = encode_header(&BTreeMap::from([("format".into(), "pt".into())]), &infos);
    file.extend(data);
    fs::write(path.join("model.safetensors"), file).expect("it can be replaced");
}

#[test]
fn a_tensor_of_another_shape_is_named_with_both() {
    let place = Place::new();
    rewrite(&place, |name, info, _| {
        if name == "model.layers.1.mlp.down_proj.weight" {
            info.shape.reverse();
        }
        true
    });
    let ran = refuses(
        &place,
        &[],
        1,
        "error: tensor `model.layers.1.mlp.down_proj.weight` in `m/model.safetensors` has the wrong shape",
        TOGETHER_HINT,
    );
    assert!(
        ran.stderr
            .contains("\n  expected [64, 176] by config.json, found [176, 64]\n"),
        "{}",
        ran.stderr
    );
}

#[test]
fn tensors_that_the_config_has_no_place_for_are_a_warning() {
    let place = Place::new();
    edit_config(&place, |config| config["num_hidden_layers"] = json!(1));
    let ran = place.run(&arguments(&["--eval", "none"]));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let warning = "warning: config.json (1 layers) has no place for 9 tensors of this checkpoint, \
                   `model.layers.1.";
    assert!(ran.stderr.contains(warning), "{}", ran.stderr);

    let place = Place::with(&prune::demo::RandomCheckpoint {
        attention_bias: true,
        ..Default::default()
    });
    let ran = place.run(&arguments(&["--eval", "none", "--save", "with"]));
    assert!(!ran.stderr.contains("has no place for"), "{}", ran.stderr);
    edit_config(&place, |config| config["attention_bias"] = json!(false));
    let ran = place.run(&arguments(&["--eval", "none"]));
    assert!(
        ran.stderr.contains("has no place for 8 tensors"),
        "{}",
        ran.stderr
    );
}

#[test]
fn two_checkpoints_in_one_folder_are_refused() {
    let place = Place::with(&prune::demo::RandomCheckpoint {
        max_shard: prune::bytes::ByteSize(150_000),
        ..Default::default()
    });
    let names = place.names("m");
    let shard = names.iter().find(|name| name.starts_with("model-"));
    let shard = place.path("m").join(shard.expect("several shards"));
    fs::copy(shard, place.path("m/model.safetensors")).unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        "error: `m` holds two checkpoints",
        "hint: move `model.safetensors`, or the index and its files, somewhere else",
    );
}

#[test]
#[cfg(unix)]
fn links_that_lead_nowhere_are_named() {
    let place = Place::new();
    let link = |name: &str| {
        let _ = fs::remove_file(place.path(name));
        std::os::unix::fs::symlink("blob", place.path(name)).unwrap();
    };
    for name in ["m/generation_config.json", "m/model.safetensors"] {
        link(name);
        let ran = place.run(&arguments(&["--eval", "none"]));
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        let error = format!(
            "error: `{name}` is a link to a file that is not there\n\
             hint: download the checkpoint again, this file at least\n"
        );
        assert!(ran.stderr.ends_with(&error), "{}", ran.stderr);
        assert!(!place.path("out").exists());
    }
}

#[test]
fn a_missing_tensor_is_named() {
    for name in [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ] {
        let place = Place::new();
        rewrite(&place, |found, _, _| found != name);
        let first = format!("error: tensor `{name}` is missing in `m`");
        refuses_at_once(&place, &[], 1, &first, TOGETHER_HINT);
        let planned = place.run(&["plan", "--model", "m"]);
        assert_eq!(planned.code, 1, "{name}: {}", planned.stdout);
        assert!(planned.stderr.starts_with(&first), "{}", planned.stderr);
    }
    // What a run does not read need not be there.
    let place = Place::new();
    rewrite(&place, |found, _, _| found != "lm_head.weight");
    let ran = place.run(&["plan", "--model", "m", "--eval", "none"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn a_head_that_is_passed_over_for_the_embedding_is_a_warning() {
    const WARNING: &str = "warning: config.json says that the embedding is the head (`tie_word_embeddings`), \
                           and this checkpoint has another `lm_head.weight`";
    let place = Place::new();
    let ran = place.run(&arguments(&["--save", "untied"]));
    assert!(!ran.stderr.contains(WARNING), "{}", ran.stderr);

    edit_config(&place, |config| config["tie_word_embeddings"] = json!(true));
    let ran = place.run(&arguments(&["--save", "tied"]));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains(WARNING), "{}", ran.stderr);
    let perplexity = |folder| place.manifest(folder).perplexity.pruned.unwrap().perplexity;
    assert_ne!(perplexity("untied"), perplexity("tied"));
    assert_eq!(place.manifest("tied").warnings.len(), 1);
    let ran = place.run(&[
        "generate",
        "--model",
        "m",
        "--prompt",
        "a",
        "--max-tokens",
        "1",
    ]);
    assert!(ran.stderr.contains(WARNING), "{}", ran.stderr);
    // Nothing is computed with a head.
    let ran = place.run(&arguments(&["--eval", "none", "--save", "none"]));
    assert!(!ran.stderr.contains(WARNING), "{}", ran.stderr);

    // A copy of the embedding is no other head, unless its last byte differs.
    let checkpoint = Checkpoint::open(&place.path("m")).expect("a good checkpoint");
    let entry = checkpoint
        .entry("model.embed_tokens.weight")
        .expect("it was written");
    let mut embedding = vec![0; entry.bytes as usize];
    checkpoint
        .read(entry, 0, &mut embedding)
        .expect("a good checkpoint");
    for (last, is_said) in [(0, false), (1, true)] {
        *embedding.last_mut().expect("it has rows") ^= last;
        rewrite(&place, |name, _, bytes| {
            if name == "lm_head.weight" {
                bytes.clone_from(&embedding);
            }
            true
        });
        let ran = place.run(&arguments(&["--save", &format!("copy-{last}")]));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert_eq!(ran.stderr.contains(WARNING), is_said, "{}", ran.stderr);
    }
}

#[test]
fn a_dtype_we_cannot_prune_is_refused() {
    let place = Place::new();
    rewrite(&place, |name, info, _| {
        if name == "model.layers.0.self_attn.v_proj.weight" {
            info.dtype = Dtype::I32;
        }
        true
    });
    refuses_at_once(
        &place,
        &[],
        1,
        "error: tensor `model.layers.0.self_attn.v_proj.weight` in `m/model.safetensors` has an unsupported dtype",
        "hint: use the unquantised checkpoint",
    );
}

#[test]
fn pickled_weights_are_refused_with_the_way_to_convert_them() {
    let place = Place::new();
    fs::rename(
        place.path("m/model.safetensors"),
        place.path("m/pytorch_model.bin"),
    )
    .unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        "error: `m` holds pickled weights, and loading a pickle can run code",
        "hint: convert it where you trust it: python -c \"from transformers import AutoModelForCausalLM as M; \
         M.from_pretrained('m').save_pretrained('m-safetensors', safe_serialization=True)\"",
    );
}

#[test]
fn a_folder_without_tokenizer_is_refused() {
    let place = Place::new();
    fs::remove_file(place.path("m/tokenizer.json")).unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        "error: no tokenizer in `m`",
        "hint: copy `tokenizer.json` and `tokenizer_config.json` from the model's page into the folder",
    );
    fs::write(place.path("m/tokenizer.model"), "sentencepiece").unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        "error: `m` has only `tokenizer.model`; we read `tokenizer.json`",
        "hint: convert it once: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('m', \
         use_fast=True).save_pretrained('m')\"",
    );
}

#[test]
fn a_tokenizer_larger_than_the_embedding_is_refused_with_the_numbers() {
    let place = Place::with(&RandomCheckpoint {
        vocab_size: 300,
        ..RandomCheckpoint::default()
    });
    // `<s>` begins every text; its id moves beyond the 300 rows.
    edit_json(&place.path("m/tokenizer.json"), |tokenizer| {
        tokenizer["model"]["vocab"]["<s>"] = json!(300);
        tokenizer["added_tokens"][0]["id"] = json!(300);
        tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([300]);
    });
    let ran = refuses(
        &place,
        &["--prune-method", "magnitude"],
        1,
        "error: the tokenizer of `m` is larger than its embedding",
        "hint: use the tokenizer.json this checkpoint was published with",
    );
    assert!(
        ran.stderr.contains("\n  the evaluation text has token id 300 (the tokenizer goes up to 300), the embedding has 300 rows\n"),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_calibration_text_that_is_missing_is_asked_for() {
    let place = Place::new();
    refuses_at_once(
        &place,
        &["--dataset", "-"],
        1,
        "error: `wikitext-2-raw-v1/train-00000-of-00001.parquet` of the dataset `Salesforce/wikitext` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it",
        "hint: run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give the text's path; or use --dataset wikitext2:PATH for a text on disk",
    );
    refuses_at_once(
        &place,
        &["--dataset", "wikitext2:nowhere"],
        1,
        "error: no such file or folder for --dataset: `nowhere`",
        "hint: check the path after the colon",
    );
    refuses_at_once(
        &place,
        &["--dataset", "nowhere.txt"],
        1,
        "error: no such file or folder for --dataset: `nowhere.txt`",
        "hint: use wikitext2:PATH, c4:PATH, or the path of a file (text, .jsonl, .jsonl.gz, .parquet)",
    );
}

#[test]
fn an_evaluation_text_that_is_missing_can_be_left_out() {
    let place = Place::new();
    refuses_at_once(
        &place,
        &["--eval-dataset", "-"],
        1,
        "error: `wikitext-2-raw-v1/test-00000-of-00001.parquet` of the dataset `Salesforce/wikitext` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it",
        "hint: run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give the text's path; or use --eval-dataset wikitext2:PATH for a text on disk, or prune with --eval none",
    );
    refuses_at_once(
        &place,
        &["--eval-dataset", "c4:nowhere"],
        1,
        "error: no such file or folder for --eval-dataset: `nowhere`",
        "hint: check the path after the colon, or prune with --eval none",
    );
}

#[test]
fn a_text_without_content_is_refused() {
    let place = Place::new();
    fs::write(place.path("empty.txt"), "").unwrap();
    refuses_at_once(
        &place,
        &["--dataset", "empty.txt"],
        1,
        "error: `empty.txt` is empty",
        "hint: name another text with --dataset or --eval-dataset",
    );
    fs::write(place.path("latin1.txt"), b"caf\xe9 ole").unwrap();
    refuses_at_once(
        &place,
        &["--dataset", "latin1.txt"],
        1,
        "error: `latin1.txt` is not UTF-8 text",
        "hint: convert it (iconv -f latin1 -t utf-8 'latin1.txt' > text.txt), or check that it is text at all",
    );
}

#[test]
fn a_text_too_short_for_one_sample_is_refused_with_a_length_that_fits() {
    let place = Place::new();
    // 40 bytes and <s> are 41 tokens.
    fs::write(place.path("short.txt"), "x".repeat(40)).unwrap();
    let ran = refuses(
        &place,
        &["--dataset", "short.txt"],
        1,
        "error: the calibration text is too short for one sample of 64 tokens",
        "hint: use --seqlen 32, or name a longer text with --dataset",
    );
    assert!(
        ran.stderr
            .contains("\n  `short.txt` has 41 tokens, one more than a sample is needed\n"),
        "{}",
        ran.stderr
    );
    refuses(
        &place,
        &["--eval-dataset", "short.txt"],
        1,
        "error: the evaluation text is too short for one window of 64 tokens",
        "hint: use --seqlen 32, or name a longer text with --eval-dataset, or prune with --eval none",
    );
}

#[test]
fn sequences_longer_than_the_model_are_refused() {
    let place = Place::new();
    refuses_at_once(
        &place,
        &["--seqlen", "513"],
        2,
        "error: --seqlen 513 is longer than the model's 512 positions",
        "hint: use --seqlen 512 or less",
    );
    refuses_at_once(
        &place,
        &["--seqlen", "1"],
        2,
        "error: --seqlen is 1; at least 2 tokens are needed to predict one",
        "",
    );
}

#[test]
fn the_models_own_folder_is_no_output() {
    let place = Place::new();
    let hint = "hint: choose another folder with --save or --save-model";
    for flags in [&["--save", "-", "--save-model", "m"][..], &["--save", "m"]] {
        let first = "error: the output folder `m` is the model's folder";
        refuses_at_once(&place, flags, 1, first, hint);
    }
    refuses_at_once(
        &place,
        &["--save", "m/out"],
        1,
        "error: the output folder `m/out` lies inside the model's folder",
        hint,
    );
}

/// `--force` deleted `m/config.json` and the weights before the writer refused the folder.
#[test]
fn force_does_not_delete_the_model_it_is_to_read() {
    let place = Place::new();
    refuses_at_once(
        &place,
        &["--save", "-", "--save-model", "m", "--force"],
        1,
        "error: the output folder `m` is the model's folder",
        "hint: choose another folder with --save or --save-model",
    );
    // The way it happens: prune again what was pruned, into the same run.
    fs::create_dir(place.path("out")).unwrap();
    fs::rename(place.path("m"), place.path("out/model")).unwrap();
    refuses_at_once(
        &place,
        &["--model", "out/model", "--force"],
        1,
        "error: the output folder `out/model` is the model's folder",
        "hint: choose another folder with --save or --save-model",
    );
}

#[test]
fn a_model_folder_that_holds_something_is_refused() {
    let place = Place::new();
    fs::create_dir_all(place.path("out/model")).unwrap();
    fs::write(place.path("out/model/notes.txt"), "mine").unwrap();
    refuses_at_once(
        &place,
        &[],
        1,
        "error: the model folder `out/model` is not empty: it holds `notes.txt`",
        "hint: choose another --save or --save-model folder, or replace its model files with --force",
    );
}

#[test]
fn a_finished_run_is_refused_without_force() {
    let place = Place::new();
    place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "none",
        "--save",
        "out",
    ]);
    refuses_at_once(
        &place,
        &[],
        1,
        "error: `out` holds a finished run",
        "hint: choose another --save folder, or replace it with --force",
    );
}

#[test]
fn force_does_not_leave_a_model_beside_the_record_of_another() {
    let place = Place::new();
    let ran = place.run(&arguments(&["--eval", "none"]));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    refuses(
        &place,
        &["--force", "--no-save-model", "--eval", "none"],
        1,
        "error: `out` holds a finished run and its model, and this one writes no model",
        "hint: choose another --save folder, or remove that one first",
    );
}

#[test]
fn a_file_is_no_run_folder() {
    let place = Place::new();
    for flags in [&["--save", "test.txt"][..], &["--save-model", "test.txt"]] {
        refuses_at_once(
            &place,
            flags,
            1,
            "error: `test.txt` is a file; results go into a folder",
            "hint: choose another --save or --save-model folder",
        );
    }
}

#[test]
fn a_folder_that_cannot_be_made_is_refused() {
    // Below a file no folder can be made, whoever asks; permissions would not stop root.
    refuses_at_once(
        &Place::new(),
        &["--save", "test.txt/out"],
        1,
        "error: `test.txt` is a file; results go into a folder",
        "hint: choose another --save or --save-model folder",
    );
}

#[test]
fn a_weight_that_is_no_number_is_named_by_layer_tensor_row_and_column() {
    for (method, bits) in [
        ("wanda", f32::NAN),
        ("magnitude", f32::NAN),
        ("magnitude", f32::INFINITY),
    ] {
        let place = Place::new();
        rewrite(&place, |name, _, bytes| {
            if name == "model.layers.1.self_attn.v_proj.weight" {
                // Row 5, column 7 of [32, 64].
                let at = 4 * (5 * 64 + 7);
                bytes[at..at + 4].copy_from_slice(&bits.to_le_bytes());
            }
            true
        });
        let ran = place.run(&arguments(&["--prune-method", method, "--eval", "none"]));
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        let error = &ran.stderr[ran.stderr.find("error: ").unwrap()..];
        for part in [
            "model.layers.1.self_attn.v_proj",
            "row 5",
            "column 7",
            "layer 1",
        ] {
            assert!(error.contains(part), "no `{part}`: {error}");
        }
        assert!(!error.contains("panicked"), "{error}");
        // What was begun never looks finished.
        assert!(
            !place.path("out/run.json").exists() && !place.path("out/model/config.json").exists()
        );
        assert!(!place.path("out/model/model.safetensors").exists());
    }
}

#[test]
fn an_unknown_dataset_is_refused() {
    let place = Place::new();
    for dataset in ["imdb", "imdb:here"] {
        refuses_at_once(
            &place,
            &["--dataset", dataset],
            1,
            &format!("error: no such file or folder for --dataset: `{dataset}`"),
            "hint: use wikitext2:PATH, c4:PATH, or the path of a file (text, .jsonl, .jsonl.gz, .parquet)",
        );
    }
    fs::write(place.path("text.zst"), "x").unwrap();
    refuses_at_once(
        &place,
        &["--dataset", "text.zst"],
        1,
        "error: cannot read a `.zst` file: `text.zst`",
        "hint: unpack it first; text, .jsonl, .json, .gz of these and .parquet are read",
    );
    refuses_at_once(
        &place,
        &["--dataset", "wikitext2:"],
        2,
        "error: invalid value 'wikitext2:' for '--dataset <NAME[:PATH]>': `wikitext2:` has no path after the colon",
        "hint: write it like wikitext2:PATH, c4:PATH, demo or the path of a text file",
    );
}

#[test]
fn globs_that_are_malformed_or_match_nothing_are_refused() {
    let place = Place::new();
    refuses_at_once(
        &place,
        &["--include", "[q"],
        2,
        "error: --include `[q` is not a glob: Pattern syntax error near position 0: invalid range pattern",
        "",
    );
    refuses_at_once(
        &place,
        &["--exclude", "lm_head"],
        2,
        "error: --exclude `lm_head` matches no matrix of this model",
        "hint: names look like model.layers.0.self_attn.q_proj; try '*q_proj' or 'model.layers.[0-3].*'",
    );
    refuses_at_once(
        &place,
        &["--exclude", "*"],
        2,
        "error: --include and --exclude leave no matrix to prune",
        "hint: names look like model.layers.0.self_attn.q_proj; try --include '*q_proj'",
    );
}

#[test]
fn thread_counts_that_are_none_are_refused() {
    let place = Place::new();
    for (value, why) in [
        ("0", "0 is not in 1..=1024"),
        ("1025", "1025 is not in 1..=1024"),
        ("two", "invalid digit found in string"),
    ] {
        refuses_at_once(
            &place,
            &["--threads", value],
            2,
            &format!("error: invalid value '{value}' for '--threads <N>': {why}"),
            "",
        );
    }
}

#[test]
fn layer_ratios_that_do_not_fit_are_refused() {
    let place = Place::new();
    let hint = "hint: write [0.5, 0.6, ...] with one ratio per layer, or {\"0\": 0.3, \"31\": 0.7} for some of them";
    for (text, code, first, hint) in [
        (
            "3",
            1,
            "error: `r.json` does not hold layer ratios: it is neither a list nor an object",
            hint,
        ),
        (
            "[0.5, \"x\"]",
            1,
            "error: `r.json` does not hold layer ratios: \"x\" is not a number",
            hint,
        ),
        (
            "{\"a\": 0.5}",
            1,
            "error: `r.json` does not hold layer ratios: `a` is not a layer's index",
            hint,
        ),
        (
            "[0.5,",
            1,
            "error: `r.json` does not hold layer ratios: it is not JSON (EOF while parsing a value at line 1 column 5)",
            hint,
        ),
        (
            "[0.5]",
            2,
            "error: --layer-ratios has 1 ratios, the model 2 layers",
            "",
        ),
        (
            "{\"2\": 0.5}",
            2,
            "error: --layer-ratios names layer 2, the model has layers 0 to 1",
            "",
        ),
        (
            "[0.5, 1.0]",
            2,
            "error: the ratio of layer 1 is 1; it is the fraction removed, from 0 up to but not including 1",
            "",
        ),
    ] {
        fs::write(place.path("r.json"), text).unwrap();
        refuses_at_once(&place, &["--layer-ratios", "r.json"], code, first, hint);
    }
    refuses_at_once(
        &place,
        &["--layer-ratios", "nowhere.json"],
        1,
        "error: cannot read layer ratios from `nowhere.json`: No such file or directory (os error 2)",
        "hint: write [0.5, 0.6, ...] with one ratio per layer, or {\"0\": 0.3, \"31\": 0.7} for some of them",
    );
    fs::write(place.path("r.json"), "[0.5, 0.5]").unwrap();
    refuses_at_once(
        &place,
        &["--layer-ratios", "r.json", "--sparsity-type", "2:4"],
        2,
        "error: --layer-ratios cannot be combined with the 2:4 pattern",
        "",
    );
}

#[test]
fn the_variant_belongs_to_wanda_without_a_pattern() {
    let place = Place::new();
    refuses_at_once(
        &place,
        &["--use-variant", "--prune-method", "magnitude"],
        2,
        "error: --use-variant means nothing to magnitude with unstructured sparsity",
        "hint: it belongs to --prune-method wanda with --sparsity-type unstructured",
    );
}

#[test]
fn eval_refuses_what_prune_refuses() {
    let place = Place::new();
    refuses_command(
        &place,
        &["eval", "--model", "nowhere", "--eval-dataset", "test.txt"],
        1,
        "error: the model folder `nowhere` does not exist",
        LAYOUT_HINT,
    );
    refuses_command(
        &place,
        &[
            "eval",
            "--model",
            "m",
            "--eval-dataset",
            "test.txt",
            "--seqlen",
            "600",
        ],
        2,
        "error: --seqlen 600 is longer than the model's 512 positions",
        "hint: use --seqlen 512 or less",
    );
    refuses_command(
        &place,
        &[
            "eval",
            "--model",
            "m",
            "--eval-dataset",
            "test.txt",
            "--save",
            "m",
        ],
        1,
        "error: the output folder `m` is the model's folder",
        "hint: choose another folder with --save or --save-model",
    );
}

#[test]
fn a_reader_who_left_is_no_panic() {
    let place = Place::new();
    let mut child = place
        .command(&[
            "eval",
            "--model",
            "m",
            "--eval-dataset",
            "test.txt",
            "--seqlen",
            "64",
            "--eval-windows",
            "2",
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(!messages.contains("panicked"), "{messages}");
}

/// A result that nobody gets is no success, unless nobody wants it.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_standard_output_is_an_error() {
    let place = Place::new();
    for command in [&["inspect", "m"][..], &["plan", "--model", "m", "--json"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full");
        let output = place
            .command(command)
            .stdout(full.unwrap())
            .output()
            .unwrap();
        let messages = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{messages}");
        assert!(
            messages.contains("error: cannot write the result to standard output\n  No space left"),
            "{messages}"
        );
    }
}

/// Waits until a process catches SIGTERM, where the system tells: one that is told before ends otherwise.
#[cfg(unix)]
fn listens(pid: u32) {
    const SIGTERM: u64 = 1 << 14;
    for _ in 0..600 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        match caught.map(|caught| u64::from_str_radix(caught.trim(), 16)) {
            Some(Ok(caught)) if caught & SIGTERM == 0 => {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            _ => return,
        }
    }
}

/// Whoever reads the messages may have stopped reading, and their pipe is full: a signal ends the process all the same.
#[test]
#[cfg(unix)]
fn a_signal_is_heard_while_nobody_reads() {
    use std::io::Write;
    let place = Place::new();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let filled = writer.try_clone().unwrap();
    let filling = std::thread::spawn(move || {
        // More than a pipe holds; ends with an error when the last reader is gone.
        while writer.write_all(&[b'x'; 4096]).is_ok() {}
    });
    std::thread::sleep(std::time::Duration::from_millis(300));
    let mut child = place
        .command(&arguments(&["--verbose"]))
        .stderr(filled)
        .spawn()
        .unwrap();
    // It stands at its first message.
    listens(child.id());
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert!(child.try_wait().unwrap().is_none(), "nothing stops it");
    let sent = std::process::Command::new("kill")
        .arg(child.id().to_string())
        .status();
    assert!(sent.unwrap().success());
    let ended = (0..600).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        child.try_wait().unwrap()
    });
    if ended.is_none() {
        child.kill().unwrap();
    }
    drop(reader);
    filling.join().unwrap();
    assert_eq!(ended.and_then(|status| status.code()), Some(3));
}

#[test]
fn a_perplexity_that_is_no_number_is_a_warning_and_the_manifest_stays_readable() {
    let place = Place::new();
    rewrite(&place, |name, _, bytes| {
        if name == "lm_head.weight" {
            bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        true
    });
    let ran = place.run(&arguments(&["--eval", "both"]));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for side in ["dense", "pruned"] {
        let warning = format!(
            "warning: the {side} perplexity is not finite: the model's outputs overflow or are NaN"
        );
        assert!(ran.stderr.contains(&warning), "{}", ran.stderr);
    }
    let report = place.manifest("out").perplexity.pruned.unwrap();
    assert!(!report.perplexity.is_finite(), "{report:?}");
}

/// The terminal of a batch job closes while it works: what it does is not what it says.
#[test]
fn a_run_outlives_the_reader_of_its_messages() {
    let place = Place::new();
    let mut child = place
        .command(&arguments(&[]))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(place.manifest("out").sparsity.is_some());
}

/// Opens a folder as a run does, down to the shapes; what it says does not matter here.
fn open(folder: &Path) -> anyhow::Result<()> {
    let config = ModelConfig::load(folder)?;
    let checkpoint = Checkpoint::open(folder)?;
    for layer in 0..config.num_hidden_layers {
        DecoderLayer::check(&checkpoint, &config, layer)?;
    }
    Ok(())
}

/// Some bytes replaced: where (as a fraction of the length) and by what.
fn mutations() -> impl Strategy<Value = Vec<(f64, u8)>> {
    // Half of the bytes are digits and marks, which keep JSON alive and change what it says.
    let byte = prop_oneof![
        any::<u8>(),
        prop::sample::select(b"0123456789,:{}[]\"- ".to_vec())
    ];
    prop::collection::vec((0.0..1.0f64, byte), 1..6)
}

fn mutated(bytes: &[u8], length: usize, mutations: &[(f64, u8)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (at, byte) in mutations {
        bytes[(at * length as f64) as usize] = *byte;
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_in_a_header_or_a_config_make_opening_panic(
        header in mutations(),
        config in mutations(),
        cut in 0.0..1.0f64,
    ) {
        let place = Place::new();
        let folder = place.path("m");
        let (weights_path, config_path) = (folder.join("model.safetensors"), folder.join("config.json"));
        let weights = fs::read(&weights_path).expect("it was written");
        let settings = fs::read(&config_path).expect("it was written");
        prop_assert!(open(&folder).is_ok());
        let mut length = [0; 8];
        length.copy_from_slice(&weights[..8]);
        let header_end = 8 + u64::from_le_bytes(length) as usize;

        fs::write(&weights_path, mutated(&weights, header_end, &header)).expect("it can be replaced");
        let _ = open(&folder);
        fs::write(&weights_path, &weights[..(cut * weights.len() as f64) as usize]).expect("it can be replaced");
        prop_assert!(open(&folder).is_err());
        fs::write(&weights_path, &weights).expect("it can be replaced");
        fs::write(&config_path, mutated(&settings, settings.len(), &config)).expect("it can be replaced");
        let _ = open(&folder);
    }
}
