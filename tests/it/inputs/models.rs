//! Paths that are given as a model and are something else, and checkpoints whose names or facts disagree.

use std::fs;

use prune::checkpoint::encode_header;
use serde_json::{Value, json};

use super::refused;
use crate::support::{Place, shared};

const EVAL: &str = "--eval-dataset test.txt --seqlen 64 --eval-windows 2";

/// Gives the tensors of `m` new names in a copy; `None` leaves a tensor out.
fn renamed(place: &Place, name: &str, new: &dyn Fn(&str) -> Option<String>) {
    let (from, to) = (place.path("m"), place.path(name));
    fs::create_dir(&to).expect("a checkpoint of this test");
    for entry in fs::read_dir(&from).expect("a checkpoint of this test") {
        let entry = entry.expect("a checkpoint of this test");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("a checkpoint of this test");
    }
    let file = fs::read(from.join("model.safetensors")).expect("a checkpoint of this test");
    let (length, rest) = file.split_first_chunk::<8>().expect("a checkpoint of this test");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Value = serde_json::from_slice(header).expect("a checkpoint of this test");
    let (mut tensors, mut bytes) = (Vec::new(), Vec::new());
    for (name, info) in header.as_object().expect("a checkpoint of this test") {
        let Some(new) = new(name).filter(|_| name != "__metadata__") else {
            continue;
        };
        let mut info: safetensors::tensor::TensorInfo =
            serde_json::from_value(info.clone()).expect("a checkpoint of this test");
        let (begin, end) = info.data_offsets;
        info.data_offsets = (bytes.len(), bytes.len() + end - begin);
        bytes.extend_from_slice(&data[begin..end]);
        tensors.push((new, info));
    }
    let mut out = encode_header(&Default::default(), &tensors);
    out.extend_from_slice(&bytes);
    fs::write(to.join("model.safetensors"), out).expect("a checkpoint of this test");
}

fn set(place: &Place, file: &str, key: &str, value: Value) {
    let path = place.path(file);
    let mut json: Value =
        serde_json::from_slice(&fs::read(&path).expect("a checkpoint of this test"))
            .expect("a checkpoint of this test");
    json[key] = value;
    fs::write(path, json.to_string()).expect("a checkpoint of this test");
}

#[test]
fn names_of_a_wrapper_are_shown_with_the_command_that_removes_them() {
    let place = Place::new();
    for (folder, prefix, words) in [
        ("compiled", "_orig_mod.", &["torch.compile", "k.removeprefix('_orig_mod.')"][..]),
        ("parallel", "module.", &["parallel training", "k.removeprefix('module.')"]),
        ("both", "module._orig_mod.", &["k.removeprefix('module._orig_mod.')"]),
        ("adapted", "base_model.model.", &["peft", "merge_and_unload"]),
    ] {
        renamed(&place, folder, &|name| Some(format!("{prefix}{name}")));
        let shown = format!("names begin with `{prefix}`");
        let words: Vec<&str> = [&shown[..]].into_iter().chain(words.iter().copied()).collect();
        refused(&place, &format!("eval {folder} {EVAL}"), &words);
    }
    // peft keeps the base's matrices under another name.
    renamed(&place, "lora", &|name| {
        let is_matrix = name.contains("q_proj");
        let name =
            if is_matrix { name.replace(".weight", ".base_layer.weight") } else { name.to_owned() };
        Some(format!("base_model.model.{name}"))
    });
    refused(&place, &format!("eval lora {EVAL}"), &["merge_and_unload"]);
}

#[test]
fn names_without_model_and_a_head_that_is_the_embedding_load_as_in_transformers() {
    let place = Place::new();
    let perplexity = |folder: &str| {
        set(&place, &format!("{folder}/config.json"), "tie_word_embeddings", json!(true));
        let ran = place.run(&format!("eval {folder} {EVAL}"));
        assert_eq!(ran.code, 0, "{folder}: {}", ran.stderr);
        let perplexity = ran.stdout.lines().find(|line| line.starts_with("perplexity"));
        perplexity.expect("a perplexity").to_owned()
    };
    let is_head = |name: &String| name == "lm_head.weight";
    renamed(&place, "tied", &|name| Some(name.to_owned()).filter(|name| !is_head(name)));
    let plain = perplexity("tied");
    renamed(&place, "bare", &|name| {
        Some(name.replacen("model.", "", 1)).filter(|name| !is_head(name))
    });
    refused(
        &place,
        &format!("eval bare {EVAL}"),
        &["lm_head.weight", "tie_word_embeddings\": true"],
    );
    assert_eq!(perplexity("bare"), plain);
    renamed(&place, "head-only", &|name| match name {
        "lm_head.weight" => None,
        "model.embed_tokens.weight" => Some("lm_head.weight".to_owned()),
        name => Some(name.to_owned()),
    });
    assert_eq!(perplexity("head-only"), plain);
}

/// The name in the first Llama checkpoints that were converted for transformers.
#[test]
fn an_earlier_name_of_the_architecture_loads_as_the_model_that_it_names() {
    let place = Place::new();
    let perplexity = |name: &str| {
        set(&place, "m/config.json", "architectures", json!([name]));
        let ran = place.run(&format!("eval m {EVAL}"));
        assert_eq!(ran.code, 0, "{name}: {}", ran.stderr);
        let perplexity = ran.stdout.lines().find(|line| line.starts_with("perplexity"));
        perplexity.expect("a perplexity").to_owned()
    };
    assert_eq!(perplexity("LLaMAForCausalLM"), perplexity("LlamaForCausalLM"));
    let line = "--model m --sparsity-ratio 0.5 --prune-method magnitude --eval none --save p";
    set(&place, "m/config.json", "architectures", json!(["LLaMAForCausalLM"]));
    assert_eq!(place.run(line).code, 0);
    assert!(
        fs::read_to_string(place.path("p/model/config.json"))
            .expect("a model")
            .contains("LLaMAForCausalLM")
    );
}

#[test]
fn a_missing_head_names_the_key_that_ties_it() {
    let place = Place::new();
    renamed(&place, "headless", &|name| {
        Some(name.to_owned()).filter(|name| name != "lm_head.weight")
    });
    refused(
        &place,
        &format!("eval headless {EVAL}"),
        &["lm_head.weight", "tie_word_embeddings\": true"],
    );
}

#[test]
fn paths_that_are_no_models_are_answered_with_the_path_to_name() {
    let place = Place::new();
    let put = |name: &str, bytes: &[u8]| {
        fs::create_dir_all(place.path(name).parent().unwrap()).unwrap();
        fs::write(place.path(name), bytes).unwrap();
    };
    put("model.gguf", b"GGUF\x03\0\0\0");
    put("pytorch_model.bin", b"PK\x03\x04");
    put("lora/adapter_config.json", br#"{"base_model_name_or_path": "m"}"#);
    put("lora/adapter_model.safetensors", b"x");
    put("trained/checkpoint-20/config.json", b"{}");
    put("trained/checkpoint-100/config.json", b"{}");
    put("hub/models--acme--tiny/snapshots/c1/config.json", b"{}");
    for (path, words) in [
        ("model.gguf", &["GGUF", "converted from"][..]),
        ("pytorch_model.bin", &["pickle", "save_pretrained"]),
        ("lora", &["is an adapter", "prune merge --model m+lora --method linear"]),
        ("trained", &["folder of a training", "trained/checkpoint-100"]),
        ("hub/models--acme--tiny", &["hub's cache", "snapshots/c1"]),
        ("hub", &["--model acme/tiny --cache-dir hub"]),
    ] {
        for command in ["eval", "inspect"] {
            if (command, path) != ("inspect", "hub") {
                refused(&place, &format!("{command} {path}"), &words[..1]);
            }
        }
        refused(&place, &format!("eval {path} {EVAL}"), words);
        refused(&place, &format!("--model {path} --sparsity-ratio 0.5 --eval none"), words);
    }
}

#[test]
fn rope_scaling_counts_where_both_spellings_exist_as_in_transformers() {
    let place = Place::new();
    let perplexity = |folder: &str, warns: bool| {
        let ran = place.run(&format!("eval {folder} {EVAL} --json"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert_eq!(ran.stderr.contains("`rope_scaling` is used"), warns, "{}", ran.stderr);
        let record: Value = serde_json::from_str(&ran.stdout).unwrap();
        record["perplexity"].to_string()
    };
    let config = |folder: &str, scaling: Value, parameters: Value| {
        renamed(&place, folder, &|name| Some(name.to_owned()));
        set(&place, &format!("{folder}/config.json"), "rope_scaling", scaling);
        set(&place, &format!("{folder}/config.json"), "rope_parameters", parameters);
    };
    let linear = json!({"rope_type": "linear", "factor": 8.0});
    config("old", linear.clone(), Value::Null);
    config("both", linear, json!({"rope_type": "default", "rope_theta": 10000.0}));
    config("neither", Value::Null, Value::Null);
    let old = perplexity("old", false);
    assert_eq!(perplexity("both", true), old);
    assert_ne!(perplexity("neither", false), old);
}

#[test]
fn the_space_before_a_text_and_its_first_token_follow_the_tokenizer_config_with_a_word() {
    let Some(shared) = shared() else { return };
    let place = Place::empty();
    let from = shared.join("models/stories260k");
    let copy = |name: &str| {
        fs::create_dir(place.path(name)).unwrap();
        for entry in fs::read_dir(&from).unwrap() {
            let entry = entry.unwrap();
            fs::write(place.path(name).join(entry.file_name()), fs::read(entry.path()).unwrap())
                .unwrap();
        }
    };
    let text = fs::read_to_string(shared.join("data/stories/stories.test.txt")).unwrap();
    let text: String = text.chars().take(6000).collect();
    fs::write(place.path("t.txt"), text).unwrap();
    let tokens = |name: &str| {
        let ran = place.run(&format!("eval {name} --eval-dataset t.txt --seqlen 32 --json"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let record: Value = serde_json::from_str(&ran.stdout).unwrap();
        (record["evaluation"]["total_tokens"].as_u64().unwrap(), ran.stderr.contains("warning: "))
    };
    copy("plain");
    assert_eq!(tokens("plain"), (2804, false));
    // The numbers are those of transformers 4.46.3.
    copy("spaceless");
    set(&place, "spaceless/tokenizer_config.json", "add_prefix_space", json!(false));
    assert_eq!(tokens("spaceless"), (2806, false));
    copy("spaced");
    set(
        &place,
        "spaced/tokenizer.json",
        "normalizer",
        json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
    );
    assert_eq!(tokens("spaced"), (2806, true), "transformers 4.46.3 has 2804, 5.2 has 2806");
    copy("first");
    set(&place, "first/tokenizer_config.json", "add_bos_token", json!(false));
    assert_eq!(tokens("first"), (2803, true));
    copy("absent");
    set(&place, "absent/tokenizer_config.json", "add_bos_token", Value::Null);
    set(&place, "absent/tokenizer.json", "post_processor", Value::Null);
    assert_eq!(tokens("absent"), (2803, true));
    copy("asked");
    set(&place, "asked/tokenizer.json", "post_processor", Value::Null);
    assert_eq!(tokens("asked"), (2804, true));
    copy("moved");
    set(
        &place,
        "moved/tokenizer_config.json",
        "added_tokens_decoder",
        json!({"7": {"content": "<s>"}}),
    );
    assert_eq!(tokens("moved"), (2804, true));
}
