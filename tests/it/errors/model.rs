//! Refusals of checkpoints: configuration, shards, tensors and tokenizer.

use std::fs;

use prune::checkpoint::{Checkpoint, WeightSource};
use prune::synthetic::RandomCheckpoint;
use safetensors::Dtype;
use serde_json::json;

use super::{LAYOUT_HINT, TOGETHER_HINT, edit_config, refuses_at_once};
use crate::support::{Place, arguments, edit_json, refuses, rewrite, sharded};

#[test]
fn a_sequence_may_be_longer_than_the_attention_window() {
    let mistral = RandomCheckpoint::of_family("mistral").expect("Mistral has a record");
    let place = Place::with(&mistral);
    // The samples of this place have 64 tokens.
    for window in [json!(48), json!(64), json!(null)] {
        edit_config(&place, |config| config["sliding_window"] = window.clone());
        let ran = place.run(&arguments("--force"));
        assert_eq!(ran.code, 0, "{window}: {}", ran.stderr);
    }
}

#[test]
fn architectures_that_are_not_computed_yet_are_refused_with_the_reason() {
    let place = Place::new();
    for (model_type, architecture, reason) in [
        ("mixtral", "MixtralForCausalLM", "a mixture of experts"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", "a mixture of experts"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM", "gated delta nets"),
        ("gemma4_text", "Gemma4ForCausalLM", "heads of another width"),
    ] {
        edit_config(&place, |config| {
            config["model_type"] = json!(model_type);
            config["architectures"] = json!([architecture]);
        });
        let ran = place.run("eval m --eval-dataset test.txt");
        let first = format!("error: the architecture `{architecture}` is not supported yet");
        assert!(ran.stderr.starts_with(&first) && ran.stderr.contains(reason), "{}", ran.stderr);
    }
}

#[test]
fn another_architecture_is_refused_by_name() {
    let place = Place::new();
    edit_config(&place, |config| config["architectures"] = json!(["GPT2LMHeadModel"]));
    refuses_at_once(
        &place,
        "",
        1,
        "error: the architecture `GPT2LMHeadModel` is not supported",
        "hint: choose a model of a supported family (docs/families.md); a changed config.json does not make it one",
    );
}

#[test]
fn the_refusal_of_an_architecture_names_file_and_families_and_asks_for_no_edit() {
    let place = Place::new();
    for (model_type, architecture, refused) in [
        ("gpt2", "GPT2LMHeadModel", "`GPT2LMHeadModel`"),
        ("qwen2", "LlamaForCausalLM", "`LlamaForCausalLM` of model type `qwen2`"),
    ] {
        edit_config(&place, |config| {
            config["model_type"] = json!(model_type);
            config["architectures"] = json!([architecture]);
        });
        let ran = place.run("eval m --eval-dataset test.txt");
        assert_eq!(
            ran.stderr,
            format!(
                "error: the architecture {refused} is not supported\n  \
                 supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma2ForCausalLM, \
                 Gemma3ForCausalLM, Phi3ForCausalLM, Olmo2ForCausalLM, SmolLM3ForCausalLM\n  \
                 in `m/config.json`\n\
                 hint: choose a model of a supported family (docs/families.md); a changed config.json does not make it one\n"
            )
        );
    }
}

#[test]
fn arithmetic_that_is_not_computed_is_refused_without_an_invitation_to_edit() {
    let place = Place::new();
    let hint = "hint: choose another model; a changed config.json would give wrong results";
    edit_config(&place, |config| config["hidden_act"] = json!("gelu"));
    let first =
        "error: `hidden_act` is \"gelu\"; an MLP is computed with silu or gelu_pytorch_tanh";
    refuses_at_once(&place, "", 1, first, hint);
    edit_config(&place, |config| {
        config["hidden_act"] = json!("silu");
        config["rope_scaling"] = json!({"rope_type": "proportional", "factor": 4.0});
    });
    let first = "error: rotary scaling `proportional` is not supported";
    refuses_at_once(&place, "", 1, first, hint);
}

#[test]
fn a_quantised_checkpoint_is_refused() {
    let place = Place::new();
    edit_config(&place, |config| config["quantization_config"] = json!({"quant_method": "gptq"}));
    refuses_at_once(
        &place,
        "",
        1,
        "error: the checkpoint is quantised (gptq)",
        "hint: prune the unquantised checkpoint and quantise the result",
    );
}

#[test]
fn a_model_folder_that_does_not_exist_is_refused() {
    refuses_at_once(
        &Place::new(),
        "--model models/llama",
        1,
        "error: the model `models/llama` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it",
        "hint: run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give a local folder to --model",
    );
    refuses_at_once(
        &Place::new(),
        "--model ./models/llama",
        1,
        "error: the model folder `./models/llama` does not exist",
        LAYOUT_HINT,
    );
    let place = Place::new();
    fs::rename(place.path("m"), place.path("stories")).unwrap();
    let layout = LAYOUT_HINT.trim_start_matches("hint: ");
    for model in ["storys", "./storis"] {
        let near = if model.starts_with('.') { "./stories" } else { "stories" };
        refuses_at_once(
            &place,
            &format!("--model {model}"),
            1,
            &format!("error: the model folder `{model}` does not exist"),
            &format!("hint: did you mean {near}? {layout}"),
        );
    }
}

#[test]
fn a_model_folder_without_config_is_refused() {
    let place = Place::new();
    fs::remove_file(place.path("m/config.json")).unwrap();
    refuses_at_once(
        &place,
        "",
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
        "",
        1,
        "error: `m/config.json` is not JSON: EOF while parsing a value at line 1 column 15",
        "hint: take the config.json this checkpoint was published with",
    );
}

#[test]
fn a_missing_shard_is_named() {
    let place = sharded();
    let shard = place.names("m").into_iter().find(|name| name.starts_with("model-00002")).unwrap();
    fs::remove_file(place.path("m").join(&shard)).unwrap();
    refuses_at_once(
        &place,
        "",
        1,
        &format!("error: shard `{shard}` is missing in `m`"),
        "hint: download the checkpoint again, this file at least",
    );
}

#[test]
fn a_truncated_shard_is_named_with_what_is_missing() {
    let place = sharded();
    let shard = place.names("m").into_iter().find(|name| name.starts_with("model-00002")).unwrap();
    let path = place.path("m").join(&shard);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1000]).unwrap();
    refuses_at_once(
        &place,
        "",
        1,
        &format!("error: cannot read `m/{shard}`: it is truncated, 1000 bytes are missing"),
        "hint: download this file again",
    );
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
        "",
        1,
        "error: tensor `model.layers.1.mlp.down_proj.weight` in `m/model.safetensors` has the wrong shape",
        TOGETHER_HINT,
    );
    assert!(
        ran.stderr.contains("\n  expected [64, 176] by config.json, found [176, 64]\n"),
        "{}",
        ran.stderr
    );
}

#[test]
fn tensors_that_the_config_has_no_place_for_are_a_warning() {
    let place = Place::new();
    edit_config(&place, |config| config["num_hidden_layers"] = json!(1));
    let ran = place.run(&arguments("--eval none"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let warning = "warning: config.json (1 layers) has no place for 9 tensors of this checkpoint, \
                   `model.layers.1.";
    assert!(ran.stderr.contains(warning), "{}", ran.stderr);

    let place = Place::with(&prune::synthetic::RandomCheckpoint {
        attention_bias: true,
        ..Default::default()
    });
    let ran = place.run(&arguments("--eval none --save with"));
    assert!(!ran.stderr.contains("has no place for"), "{}", ran.stderr);
    edit_config(&place, |config| config["attention_bias"] = json!(false));
    let ran = place.run(&arguments("--eval none"));
    assert!(ran.stderr.contains("has no place for 8 tensors"), "{}", ran.stderr);
}

#[test]
fn two_checkpoints_in_one_folder_are_refused() {
    let place = Place::with(&prune::synthetic::RandomCheckpoint {
        max_shard: prune::bytes::ByteSize(150_000),
        ..Default::default()
    });
    let names = place.names("m");
    let shard = names.iter().find(|name| name.starts_with("model-"));
    let shard = place.path("m").join(shard.expect("several shards"));
    fs::copy(shard, place.path("m/model.safetensors")).unwrap();
    refuses_at_once(
        &place,
        "",
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
        let ran = place.run(&arguments("--eval none"));
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
        // A head without an embedding is taken for the embedding.
        let missing = name.replace("model.embed_tokens", "lm_head");
        let first = format!("error: tensor `{missing}` is missing in `m`");
        // A head and an embedding may be one tensor, see `inputs::models`.
        if name.starts_with("model.layers") || name == "model.norm.weight" {
            refuses_at_once(&place, "", 1, &first, TOGETHER_HINT);
        }
        let planned = place.run("plan --model m");
        assert_eq!(planned.code, 1, "{name}: {}", planned.stdout);
        assert!(planned.stderr.starts_with(&first), "{}", planned.stderr);
    }
    // Files that a run does not read may be missing.
    let place = Place::new();
    rewrite(&place, |found, _, _| found != "lm_head.weight");
    let ran = place.run("plan --model m --eval none");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn a_head_that_is_passed_over_for_the_embedding_is_a_warning() {
    const WARNING: &str = "warning: config.json says that the embedding is the head (`tie_word_embeddings`), \
                           and this checkpoint has another `lm_head.weight`";
    let place = Place::new();
    let ran = place.run(&arguments("--save untied"));
    assert!(!ran.stderr.contains(WARNING), "{}", ran.stderr);

    edit_config(&place, |config| config["tie_word_embeddings"] = json!(true));
    let ran = place.run(&arguments("--save tied"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains(WARNING), "{}", ran.stderr);
    let perplexity = |folder| place.manifest(folder).perplexity.pruned.unwrap().perplexity;
    assert_ne!(perplexity("untied"), perplexity("tied"));
    assert_eq!(place.manifest("tied").warnings.len(), 1);
    let ran = place.run("generate --model m --prompt a --max-tokens 1");
    assert!(ran.stderr.contains(WARNING), "{}", ran.stderr);
    // Nothing is computed with a head.
    let ran = place.run(&arguments("--eval none --save none"));
    assert!(!ran.stderr.contains(WARNING), "{}", ran.stderr);

    // A copy of the embedding is no other head, unless its last byte differs.
    let checkpoint = Checkpoint::open(&place.path("m")).expect("a good checkpoint");
    let entry = checkpoint.entry("model.embed_tokens.weight").expect("it was written");
    let mut embedding = vec![0; entry.bytes as usize];
    checkpoint.read(entry, 0, &mut embedding).expect("a good checkpoint");
    for (last, is_said) in [(0, false), (1, true)] {
        *embedding.last_mut().expect("it has rows") ^= last;
        rewrite(&place, |name, _, bytes| {
            if name == "lm_head.weight" {
                bytes.clone_from(&embedding);
            }
            true
        });
        let ran = place.run(&arguments(&format!("--save copy-{last}")));
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
        "",
        1,
        "error: tensor `model.layers.0.self_attn.v_proj.weight` in `m/model.safetensors` has an unsupported dtype",
        "hint: use the unquantised checkpoint",
    );
}

#[test]
fn pickled_weights_are_refused_with_the_way_to_convert_them() {
    let place = Place::new();
    fs::rename(place.path("m/model.safetensors"), place.path("m/pytorch_model.bin")).unwrap();
    refuses_at_once(
        &place,
        "",
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
        "",
        1,
        "error: no tokenizer in `m`",
        "hint: copy `tokenizer.json` and `tokenizer_config.json` from the model's page into the folder",
    );
    fs::write(place.path("m/tokenizer.model"), "sentencepiece").unwrap();
    refuses_at_once(
        &place,
        "",
        1,
        "error: `m` has only `tokenizer.model`; we read `tokenizer.json`",
        "hint: convert it once: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('m', \
         use_fast=True).save_pretrained('m')\"",
    );
}

#[test]
fn a_tokenizer_larger_than_the_embedding_is_refused_with_the_numbers() {
    let place = Place::with(&RandomCheckpoint { vocab_size: 300, ..RandomCheckpoint::default() });
    // `<s>` begins every text; its id moves beyond the 300 rows.
    edit_json(&place.path("m/tokenizer.json"), |tokenizer| {
        tokenizer["model"]["vocab"]["<s>"] = json!(300);
        tokenizer["added_tokens"][0]["id"] = json!(300);
        tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([300]);
    });
    let ran = refuses(
        &place,
        "--prune-method magnitude",
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
