//! Adapters whose training added tokens, adapters with a tokenizer in their folder, and `fan_in_fan_out`.

use std::fs;
use std::os::unix::fs::symlink;

use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use super::{Tensor, merge, merged, pair, tensors, waves, write_adapter};
use crate::support::{Place, edit_json, shared};

const Q: &str = "model.layers.0.self_attn.q_proj";
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// Tokens of the base, and of the adapter.
const TOKENS: [usize; 2] = [320, 323];

/// A base `m`, and an adapter `a` with three more tokens, a tokenizer of its own and a chat template.
fn place() -> Place {
    let place = Place::empty();
    let shape = RandomCheckpoint {
        num_hidden_layers: 1,
        tie_word_embeddings: false,
        ..RandomCheckpoint::default()
    };
    place.checkpoint("m", &shape);
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "modules_to_save": ["embed_tokens", "lm_head"]});
    let mut tensors = pair(Q, 2, 64, 64);
    for (name, phase) in [(EMBEDDING, 3.0), (HEAD, 4.0)] {
        tensors.push((format!("base_model.model.{name}"), waves(&[TOKENS[1], 64], phase)));
    }
    write_adapter(&place, "a", &config, &tensors);
    add_tokenizer(&place, "a");
    place
}

/// Puts the base's tokenizer into an adapter's folder, with tokens up to the last row and a chat template.
fn add_tokenizer(place: &Place, adapter: &str) {
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(place.path("m").join(name), place.path(adapter).join(name)).expect("a file");
    }
    edit_json(&place.path(adapter).join("tokenizer.json"), |json| {
        let added = json["added_tokens"].as_array_mut().expect("a list");
        for id in TOKENS[0]..TOKENS[1] {
            added.push(json!({"id": id, "content": format!("<|{id}|>"), "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false}));
        }
    });
    edit_json(&place.path(adapter).join("tokenizer_config.json"), |json| {
        json["chat_template"] = "{{ messages[0].content }}".into();
    });
}

fn json_of(place: &Place, path: &str) -> Value {
    serde_json::from_slice(&fs::read(place.path(path)).expect("a file")).expect("JSON")
}

#[test]
fn added_tokens_give_a_model_of_so_many_tokens_with_the_adapters_tokenizer() {
    let place = place();
    merge(&place, "--model m+a --method linear --save out");
    let found = merged(&place, "out");
    for (name, phase) in [(EMBEDDING, 3.0), (HEAD, 4.0)] {
        let expected: Tensor = waves(&[TOKENS[1], 64], phase);
        assert_eq!(found[name].shape, expected.shape, "{name}");
        // The output has the base's dtype.
        let far = found[name]
            .values
            .iter()
            .zip(&expected.values)
            .filter(|(one, other)| (*one - *other).abs() > 4e-3);
        assert_eq!(far.count(), 0, "{name}");
    }
    let base = tensors(&place.path("m"), "model.safetensors");
    assert_ne!(found[&format!("{Q}.weight")], base[&format!("{Q}.weight")]);
    assert_eq!(json_of(&place, "out/model/config.json")["vocab_size"], TOKENS[1]);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(
            json_of(&place, &format!("out/model/{name}")),
            json_of(&place, &format!("a/{name}"))
        );
    }
}

#[test]
fn a_base_without_the_tokens_decides_on_the_vocabulary() {
    let place = place();
    let line = "merge --base m --model m+a --method task_arithmetic --save";
    let ran = place.run(&format!("{line} refused"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("`m+a`: 323 tokens"), "{}", ran.stderr);
    let ran = place.run(&format!("{line} union --vocab union"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    // The base's tokenizer has 260 tokens, fewer than rows; the adapter's has three more.
    assert_eq!(json_of(&place, "union/model/config.json")["vocab_size"], 263);
    let tokens = json_of(&place, "union/model/tokenizer.json")["added_tokens"].to_string();
    assert!(tokens.contains("<|322|>"), "{tokens}");
}

#[test]
fn a_tokenizer_source_may_be_the_folder_of_an_adapter() {
    let place = place();
    let recipe = "merge_method: linear\nmodels: [{model: m+a, parameters: {weight: 1}}]\ntokenizer_source: a\nchat_template: auto\n";
    fs::write(place.path("r.yml"), recipe).expect("a new file");
    let ran = place.run("merge r.yml --save out");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(!ran.stderr.contains("no model has a chat template"), "{}", ran.stderr);
    assert_eq!(json_of(&place, "out/model/config.json")["vocab_size"], TOKENS[1]);
    let config = json_of(&place, "out/model/tokenizer_config.json").to_string();
    let template =
        fs::read_to_string(place.path("out/model/chat_template.jinja")).unwrap_or_default();
    assert!((config + &template).contains("messages[0].content"));
}

#[test]
fn added_tokens_without_their_tokenizer_are_a_warning() {
    let place = place();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::remove_file(place.path("a").join(name)).expect("a file");
    }
    let ran = place.run("merge --model m+a --method linear --save out");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let warning =
        "warning: the adapter in `m+a` has 323 tokens and no `tokenizer.json` in its folder";
    assert!(ran.stderr.contains(warning), "{}", ran.stderr);
}

#[test]
fn transposed_linears_are_ignored_with_a_warning() {
    let place = place();
    for (name, settings) in [("plain", json!({})), ("fan", json!({"fan_in_fan_out": true}))] {
        let mut config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
        config
            .as_object_mut()
            .expect("an object")
            .extend(settings.as_object().expect("an object").clone());
        write_adapter(&place, name, &config, &pair(Q, 2, 64, 64));
        let ran = place.run(&format!("merge --model m+{name} --method linear --save out-{name}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert_eq!(ran.stderr.contains("sets `fan_in_fan_out`"), name == "fan", "{}", ran.stderr);
    }
    assert_eq!(merged(&place, "out-plain"), merged(&place, "out-fan"));
}

/// The adapters of `cases/merge`, on real models.
#[test]
fn cases_of_adapters_fold_as_their_readme_says() {
    let Some(shared) = shared().filter(|shared| shared.join("cases/merge").is_dir()) else {
        return;
    };
    let place = Place::empty();
    symlink(shared.join("models/stories260k"), place.path("base")).expect("a link");
    symlink(shared.join("cases/merge"), place.path("cases")).expect("a link");
    merge(&place, "--model base+cases/vocab-plus2 --method linear --save plus2");
    let saved = tensors(&place.path("cases/vocab-plus2"), "adapter_model.safetensors");
    let found = merged(&place, "plus2");
    for name in [EMBEDDING, HEAD] {
        assert_eq!(found[name], saved[&format!("base_model.model.{name}")], "{name}");
    }
    assert_eq!(json_of(&place, "plus2/model/config.json")["vocab_size"], 514);
    let theirs = json_of(&place, "cases/vocab-plus2/tokenizer.json");
    assert_eq!(json_of(&place, "plus2/model/tokenizer.json"), theirs);
    merge(&place, "--model base+cases/adapter-template --method linear --save template");
    let own = json_of(&place, "cases/adapter-template/tokenizer_config.json");
    assert_eq!(
        json_of(&place, "template/model/tokenizer_config.json")["chat_template"],
        own["chat_template"]
    );
    let ran = place.run("merge --base base --model base+cases/adapter-template --method task_arithmetic --save kept");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("are left out: `tokenizer_source: base+cases/adapter-template`"),
        "{}",
        ran.stderr
    );
    let ran = place.run("merge --model base+cases/fan-in-fan-out --method linear --save fan");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("sets `fan_in_fan_out`"), "{}", ran.stderr);
}
