//! Merges of models with different tokens: rows, tokenizers and configurations of the output, and recipes that do not fit.

use std::collections::BTreeMap;
use std::fs;

use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use super::{merge, tensors};
use crate::adapters;
use crate::support::{Place, edit_json};

/// Tokens of the synthetic tokenizer.
const TOKENS: usize = 260;
const EMBEDDING: &str = "model.embed_tokens.weight";

/// A base `m` and experts `e1`, with `<|user|>` and `<|end|>` after the base's tokens, and `e2`, with `<|end|>` alone.
fn place() -> Place {
    let place = Place::empty();
    for (name, seed, added) in
        [("m", 0, &[][..]), ("e1", 1, &["<|user|>", "<|end|>"]), ("e2", 2, &["<|end|>"])]
    {
        place.checkpoint(
            name,
            &RandomCheckpoint {
                vocab_size: TOKENS + added.len(),
                num_hidden_layers: 1,
                dtype: StoredDtype::F32,
                seed,
                ..RandomCheckpoint::default()
            },
        );
        edit_json(&place.path(name).join("tokenizer.json"), |tokenizer| {
            let tokens = tokenizer["added_tokens"].as_array_mut().expect("a list");
            for (text, id) in added.iter().zip(TOKENS..) {
                tokens.push(json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true,
                }));
            }
        });
    }
    place
}

/// Merges by a recipe with these lines after the models.
fn by_recipe(place: &Place, lines: &str, flags: &str) {
    write_recipe(place, lines);
    merge(place, &format!("r.yml {flags} --force --save out"));
}

fn write_recipe(place: &Place, lines: &str) {
    let recipe = format!(
        "merge_method: linear\nmodels:\n{}{lines}\n",
        ["m", "e1", "e2"]
            .map(|model| format!("  - {{model: {model}, parameters: {{weight: 1}}}}\n"))
            .concat()
    );
    fs::write(place.path("r.yml"), recipe).expect("a new file");
}

/// Rows of the embedding of a model.
fn rows(place: &Place, model: &str) -> Vec<Vec<f64>> {
    let mut tensors = tensors(&place.path(model).join("model.safetensors"));
    let (shape, values) = tensors.remove(EMBEDDING).expect("an embedding");
    values.chunks(shape[1]).map(<[f64]>::to_vec).collect()
}

fn json_of(place: &Place, file: &str) -> Value {
    let bytes = fs::read(place.path(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_json::from_slice(&bytes).expect("JSON")
}

/// Texts and ids of the added tokens of the output after the base's.
fn added(place: &Place) -> BTreeMap<String, u64> {
    let tokenizer = json_of(place, "out/model/tokenizer.json");
    let tokens = tokenizer["added_tokens"].as_array().expect("a list");
    let tokens = tokens.iter().map(|token| {
        let text = token["content"].as_str().expect("text");
        (text.to_string(), token["id"].as_u64().expect("an id"))
    });
    tokens.filter(|(_, id)| *id >= TOKENS as u64).collect()
}

/// The mean of rows, which `linear` with weights of 1 gives.
fn mean<const N: usize>(rows: [&Vec<f64>; N]) -> Vec<f64> {
    let columns = 0..rows[0].len();
    let sum = |column: usize| rows.iter().map(|row| row[column]).sum::<f64>();
    columns.map(|column| sum(column) / N as f64).collect()
}

#[track_caller]
fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{found} and {expected}");
    }
}

/// The output is read as any model is.
fn loads(place: &Place) {
    fs::write(place.path("text"), "The cat sat on the mat.\n".repeat(40)).expect("a new file");
    let ran = place.run("eval --model out/model --eval-dataset text --seqlen 64");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn different_vocabularies_are_refused_with_what_to_type() {
    let place = place();
    let line = "merge --base m --model e1 --model e2 --method linear --save out";
    let ran = place.run(line);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("`e1`: 262 tokens"), "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: use --vocab base"), "{}", ran.stderr);
    assert!(!place.path("out").exists(), "nothing is written");
    assert_eq!(place.run(&format!("{line} --vocab base")).code, 0);
    assert_eq!(rows(&place, "out/model").len(), TOKENS);
}

#[test]
fn a_union_has_the_tokens_of_all_models() {
    let place = place();
    by_recipe(&place, "tokenizer_source: union", "");
    assert_eq!(added(&place), [("<|user|>".to_string(), 260), ("<|end|>".to_string(), 261)].into());
    let [base, one, two, merged] = ["m", "e1", "e2", "out/model"].map(|of| rows(&place, of));
    assert_eq!(merged.len(), 262);
    close(&merged[7], &mean([&base[7], &one[7], &two[7]]));
    // The only owner's row stands for all models.
    close(&merged[260], &one[260]);
    // Two owners: their mean stands for the base.
    let of_base = mean([&one[261], &two[260]]);
    close(&merged[261], &mean([&of_base, &one[261], &two[260]]));
    assert_eq!(json_of(&place, "out/model/config.json")["vocab_size"], 262);
    let report = place.manifest("out").merge.expect("a merge").vocabulary;
    assert_eq!(report.expect("decided").added_tokens, ["<|user|>", "<|end|>"]);
    loads(&place);
    // The bits depend on nothing else.
    let expected = fs::read(place.path("out/model/model.safetensors")).expect("a model");
    for flags in ["--threads 8", "--piece-elements 1", "--piece-elements 700"] {
        by_recipe(&place, "tokenizer_source: union", flags);
        let found = fs::read(place.path("out/model/model.safetensors")).expect("a model");
        assert!(found == expected, "{flags}");
    }
}

#[test]
fn single_tokens_get_the_rows_that_the_recipe_names() {
    let place = place();
    let lines = r#"tokenizer:
  source: base
  pad_to_multiple_of: 16
  tokens:
    "<|user|>": {source: e1}
    "<new>": {source: {kind: model_token, model: m, token_id: 5}}
    "<none>": {source: {kind: zero}}
    "</s>": {source: {kind: model_token, model: e2, token: "<|end|>"}, force: true}"#;
    by_recipe(&place, lines, "");
    let expected = ["<|user|>", "<new>", "<none>"].map(str::to_string);
    assert_eq!(added(&place), expected.into_iter().zip(260..).collect());
    let [base, one, two, merged] = ["m", "e1", "e2", "out/model"].map(|of| rows(&place, of));
    assert_eq!(merged.len(), 272);
    close(&merged[260], &one[260]);
    close(&merged[261], &base[5]);
    assert!(merged[262].iter().all(|value| *value == 0.0));
    close(&merged[257], &two[260]);
    let all: Vec<&Vec<f64>> = merged[..263].iter().collect();
    let all: [&Vec<f64>; 263] = all.try_into().expect("263 rows of tokens");
    close(&merged[263], &mean(all));
    assert_eq!(merged[263], merged[271]);
    loads(&place);
}

#[test]
fn a_tokenizer_may_be_that_of_a_model_that_is_not_merged() {
    let place = place();
    let line = "--base m --model e1 --model e2 --method linear --vocab base --save out";
    merge(&place, line);
    let [one, two, merged] = ["e1", "e2", "out/model"].map(|of| rows(&place, of));
    assert_eq!(merged.len(), TOKENS);
    close(&merged[9], &mean([&one[9], &two[9]]));
    assert!(added(&place).is_empty());
}

#[test]
fn a_cut_by_number_cuts_the_tokenizer_too() {
    let place = place();
    for file in ["config.json", "generation_config.json"] {
        let path = place.path("e1").join(file);
        if !path.exists() {
            fs::write(&path, "{}").expect("a new file");
        }
        edit_json(&path, |config| {
            config["pad_token_id"] = 261.into();
            config["eos_token_id"] = json!([257, 260]);
        });
    }
    let special = r#"{"pad_token": "<|end|>", "eos_token": "</s>"}"#;
    fs::write(place.path("e1/special_tokens_map.json"), special).expect("a new file");
    let line =
        "--base e1 --model m --method task_arithmetic --unsafe-truncate-embeddings --save out";
    merge(&place, line);
    assert!(added(&place).is_empty());
    for file in ["config.json", "generation_config.json"] {
        let config = json_of(&place, &format!("out/model/{file}"));
        assert_eq!(config.get("pad_token_id"), None, "{file}");
        assert_eq!(config["eos_token_id"], json!([257]), "{file}");
    }
    assert_eq!(json_of(&place, "out/model/special_tokens_map.json"), json!({"eos_token": "</s>"}));
    let merged = rows(&place, "out/model");
    assert_eq!(merged.len(), TOKENS);
    close(&merged[11], &rows(&place, "m")[11]);
    loads(&place);
    let ran = place.run(&format!("merge {line} --vocab base"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
}

#[test]
fn as_many_tokens_that_are_others_are_a_warning() {
    let place = place();
    fs::remove_dir_all(place.path("e1")).expect("removed");
    fs::create_dir(place.path("e1")).expect("a new folder");
    for entry in fs::read_dir(place.path("m")).expect("a folder") {
        let entry = entry.expect("a file");
        fs::copy(entry.path(), place.path("e1").join(entry.file_name())).expect("copied");
    }
    let line = "--base m --model e1 --method task_arithmetic --force --save out";
    merge(&place, line);
    assert!(place.manifest("out").warnings.is_empty());
    edit_json(&place.path("e1/tokenizer.json"), |tokenizer| {
        tokenizer["added_tokens"][3]["content"] = "<other>".into();
    });
    merge(&place, line);
    let warnings = place.manifest("out").warnings;
    assert!(
        warnings[0].contains("not the same") && warnings[0].contains("--vocab base"),
        "{warnings:?}"
    );
}

#[test]
fn tokens_without_a_row_are_listed_and_leave_the_tokenizer() {
    let place = place();
    edit_json(&place.path("m/tokenizer.json"), |tokenizer| {
        let tokens = tokenizer["added_tokens"].as_array_mut().expect("a list");
        for (text, id) in [("<|end|>", 260), ("<extra>", 261)] {
            tokens.push(json!({"id": id, "content": text, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false}));
        }
    });
    let special = r#"{"pad_token": "<|end|>", "cls_token": "<extra>"}"#;
    fs::write(place.path("m/special_tokens_map.json"), special).expect("a new file");
    let line = "--base m --model e2 --method task_arithmetic --vocab union --save out";
    merge(&place, line);
    assert_eq!(added(&place), [("<|end|>".to_string(), 260)].into());
    let report = place.manifest("out").merge.expect("a merge").vocabulary;
    assert_eq!(report.expect("decided").dropped_tokens, ["<extra>"]);
    // The first has a row of the other model, so it keeps its role.
    assert_eq!(
        json_of(&place, "out/model/special_tokens_map.json"),
        json!({"pad_token": "<|end|>"})
    );
    loads(&place);
}

#[test]
fn a_damaged_tokenizer_stops_only_merges_that_need_it() {
    let place = place();
    fs::write(place.path("m/tokenizer.json"), "{").expect("replaced");
    let line = "--base m --model m --method linear --save out";
    merge(&place, line);
    let ran = place.run(&format!("merge {line} --vocab base --force"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("cannot read the tokens of `m`"), "{}", ran.stderr);
}

#[test]
fn an_id_that_no_model_has_makes_no_huge_output() {
    let place = place();
    edit_json(&place.path("m/tokenizer.json"), |tokenizer| {
        tokenizer["added_tokens"][3]["id"] = (u64::MAX - 1).into();
    });
    merge(&place, "--base m --model e1 --model e2 --method linear --vocab base --save out");
    let report = place.manifest("out").merge.expect("a merge").vocabulary;
    let report = report.expect("decided");
    assert!(report.rows <= TOKENS, "{report:?}");
}

#[test]
fn combined_adapters_keep_the_tokens_of_their_base() {
    let place = place();
    for (name, seed) in [("a", 1), ("b", 2)] {
        let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 2 * seed});
        let factors = adapters::pair("model.layers.0.self_attn.q_proj", 2, 64, 64);
        adapters::write_adapter(&place, name, &config, &factors);
    }
    let line = "merge --base m --model m+a --model m+b --method linear --semantics peft --save out";
    let ran = place.run(&format!("{line} --vocab base"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("whose tokens stay"), "{}", ran.stderr);
    assert_eq!(place.run(line).code, 0);
}

#[test]
fn a_chat_template_goes_into_the_tokenizer() {
    let place = place();
    let config = place.path("m/tokenizer_config.json");
    fs::write(place.path("m/chat_template.jinja"), "{{ old }}").expect("a new file");
    by_recipe(&place, "tokenizer_source: base\nchat_template: chatml", "");
    let written = json_of(&place, "out/model/tokenizer_config.json");
    let template = written["chat_template"].as_str().expect("a template");
    assert!(template.contains("<|im_start|>"), "{template}");
    assert!(!place.path("out/model/chat_template.jinja").exists());
    fs::remove_file(place.path("m/chat_template.jinja")).expect("removed");
    fs::write(place.path("e2/chat_template.jinja"), "{{ messages[0].content }}")
        .expect("a new file");
    by_recipe(&place, "tokenizer_source: base\nchat_template: auto", "");
    let written = json_of(&place, "out/model/tokenizer_config.json");
    assert_eq!(written["chat_template"], "{{ messages[0].content }}");
    // The rest of the file stays.
    let before: Value = serde_json::from_slice(&fs::read(config).expect("a file")).expect("JSON");
    let mut rest = written.clone();
    rest.as_object_mut().expect("an object").remove("chat_template");
    assert_eq!(rest, before);
}

#[test]
fn rows_and_templates_that_are_not_there_are_refused() {
    let place = place();
    for (lines, what) in [
        (
            r#"tokenizer: {source: union, tokens: {"<|user|>": {source: e2}}}"#,
            "the model `e2` has no token `<|user|>`",
        ),
        (
            r#"tokenizer: {source: union, tokens: {"x": {source: other}}}"#,
            "names `other`, which is not merged",
        ),
        (
            r#"tokenizer: {source: base, tokens: {"x": {source: {kind: model_token, model: m, token_id: 260}}}}"#,
            "the model `m` has no token 260: its embedding has 260 rows",
        ),
        ("tokenizer_source: nowhere", "`nowhere`"),
        ("tokenizer_source: base\nchat_template: chatlm", "no known format"),
        ("tokenizer_source: base\nchat_template: '{% for x in %}'", "chat_template"),
    ] {
        write_recipe(&place, lines);
        let ran = place.run("merge r.yml --save out");
        assert_eq!(ran.code, 1, "{lines}\n{}", ran.stderr);
        assert!(ran.stderr.contains(what), "{lines}\n{}", ran.stderr);
        let errors = ran.stderr.lines().filter(|line| line.starts_with("error: "));
        assert_eq!(errors.count(), 1, "{}", ran.stderr);
        assert!(!place.path("out").exists(), "nothing is written");
    }
    fs::remove_file(place.path("e2/tokenizer.json")).expect("removed");
    write_recipe(&place, "tokenizer_source: union");
    let ran = place.run("merge r.yml --save out");
    assert!(ran.stderr.contains("cannot read the tokens of `e2`"), "{}", ran.stderr);
}
