//! Adapters of a base whose head is its embedding: the output is tied only if embedding and head are one tensor, and it computes what the
//! adapted model computes.

use std::fs;

use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use super::{Tensor, merged, pair, tensors, waves, write_adapter};
use crate::support::{Place, edit_json, shared, words};

const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";
const Q: &str = "model.layers.0.self_attn.q_proj";
const SHAPE: [usize; 2] = [320, 64];

/// A tied base `m`, a base `own` with a head, and a text.
fn place() -> Place {
    let place = Place::empty();
    for (name, tie_word_embeddings) in [("m", true), ("own", false)] {
        place.checkpoint(
            name,
            &RandomCheckpoint {
                tie_word_embeddings,
                num_hidden_layers: 1,
                seed: u64::from(tie_word_embeddings),
                ..RandomCheckpoint::default()
            },
        );
    }
    fs::write(place.path("text"), words(0, 400)).expect("a new file");
    place
}

fn key(end: &str) -> String {
    format!("base_model.model.{end}")
}

fn config(settings: Value) -> Value {
    let mut config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
    let settings = settings.as_object().expect("an object").clone();
    config.as_object_mut().expect("an object").extend(settings);
    config
}

/// Embedding and head of a folded model, the head only if the model has one; the config agrees.
#[track_caller]
fn ends(place: &Place, run: &str) -> (Tensor, Option<Tensor>) {
    let mut tensors = merged(place, run);
    let text = fs::read(place.path(run).join("model/config.json")).expect("a config");
    let config: Value = serde_json::from_slice(&text).expect("JSON");
    let head = tensors.remove("lm_head.weight");
    assert_eq!(config["tie_word_embeddings"], head.is_none(), "{config}");
    let embedding = tensors.remove("model.embed_tokens.weight");
    (embedding.expect("an embedding"), head)
}

/// W + s·(B A)ᵀ of factors of an embedding, s = 2.
fn with_factors(base: &Tensor, down: &Tensor, up: &Tensor) -> Tensor {
    let mut values = base.values.clone();
    let (rank, rows, columns) = (down.shape[0], down.shape[1], up.shape[0]);
    for row in 0..rows {
        for column in 0..columns {
            let sum: f32 =
                (0..rank).map(|r| up.values[column * rank + r] * down.values[r * rows + row]).sum();
            values[row * columns + column] += 2.0 * sum;
        }
    }
    Tensor { shape: base.shape.clone(), values }
}

/// The ends of the adapted model, by hand, and the perplexity of the fold: that of the adapter on its base.
#[test]
fn embedding_and_head_are_those_of_the_adapted_model() {
    let place = place();
    let base = tensors(&place.path("m"), "model.safetensors");
    let base = &base["model.embed_tokens.weight"];
    let (one, other) = (waves(&SHAPE, 3.0), waves(&SHAPE, 4.0));
    let (down, up) = (waves(&[2, 320], 5.0), waves(&[64, 2], 6.0));
    let row = waves(&[1, 64], 7.0);
    let mut with_row = base.clone();
    with_row.values[5 * 64..6 * 64].copy_from_slice(&row.values);
    let embedding = key(&format!("{EMBEDDING}.weight"));
    let head = key(&format!("{HEAD}.weight"));
    let factors = vec![
        (key(&format!("{EMBEDDING}.lora_embedding_A")), down.clone()),
        (key(&format!("{EMBEDDING}.lora_embedding_B")), up.clone()),
    ];
    let tokens =
        vec![(key(&format!("{EMBEDDING}.token_adapter.trainable_tokens_delta")), row.clone())];
    let added = with_factors(base, &down, &up);
    let ensure = json!({"ensure_weight_tying": true});
    let none = json!({});
    let saved = |tensors: &[(&String, &Tensor)]| -> Vec<(String, Tensor)> {
        let tensors = tensors.iter();
        tensors.map(|(key, of)| ((*key).clone(), (*of).clone())).collect()
    };
    let indices = json!({"trainable_token_indices": [5]});
    // Settings, tensors, the embedding, and the head where it is another tensor.
    for (case, (settings, own, expected, expected_head)) in [
        (&none, saved(&[(&embedding, &one)]), &one, Some(base)),
        (&none, saved(&[(&head, &one)]), base, Some(&one)),
        (&none, saved(&[(&embedding, &one), (&head, &other)]), &one, Some(&other)),
        (&none, saved(&[(&embedding, &one), (&head, &one)]), &one, None),
        (&none, factors.clone(), &added, Some(base)),
        (&none, Vec::new(), base, None),
        (&indices, tokens, &with_row, None),
        (&ensure, saved(&[(&embedding, &one)]), &one, None),
        (&ensure, saved(&[(&head, &one)]), &one, None),
        (&ensure, saved(&[(&embedding, &one), (&head, &one)]), &one, None),
        (&ensure, factors, &added, None),
    ]
    .into_iter()
    .enumerate()
    {
        let mut all = pair(Q, 2, 64, 64);
        all.extend(own);
        write_adapter(&place, "a", &config(settings.clone()), &all);
        let ran = place.run(
            "merge --model m+a --method linear --eval-dataset text --seqlen 64 --force --save out",
        );
        assert_eq!(ran.code, 0, "case {case}\n{}", ran.stderr);
        let (embedding, head) = ends(&place, "out");
        for (at, (found, wanted)) in embedding.values.iter().zip(&expected.values).enumerate() {
            let difference = (found - wanted).abs();
            assert!(difference <= 1e-6, "case {case}, {at}: {found} and {wanted}");
        }
        assert_eq!(head.as_ref(), expected_head, "case {case}");
        let merge = place.manifest("out").merge.expect("a merge");
        let measured: Vec<f64> =
            merge.perplexities.iter().map(|row| row.report.perplexity).collect();
        let [adapted, folded] = measured[..] else {
            panic!("case {case}: {measured:?}");
        };
        assert!(
            (adapted / folded - 1.0).abs() < 1e-5,
            "case {case}: {adapted} on its base, {folded} folded"
        );
    }
}

#[test]
fn the_two_adapters_from_the_field_fold_as_peft_folds_them() {
    let Some(shared) = shared() else { return };
    let shared = fs::canonicalize(shared).expect("it is there");
    let base = shared.join("models/families/qwen2-tied");
    for (name, is_tied) in [("tied-save-both", false), ("tied-save-both/ensure", true)] {
        let place = Place::empty();
        let adapter = shared.join("cases/merge").join(name);
        let ran = place.run(&format!(
            "merge --model {}+{} --method linear --save out",
            base.display(),
            adapter.display()
        ));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let file = tensors(&adapter, "adapter_model.safetensors");
        let saved = |module: &str| &file[&key(&format!("{module}.weight"))];
        let (embedding, head) = ends(&place, "out");
        assert_eq!(&embedding, saved(EMBEDDING));
        assert_eq!(head.is_none(), is_tied);
        assert!(head.is_none_or(|head| &head == saved(HEAD)));
    }
}

#[test]
fn a_tied_expert_and_one_with_a_head_give_a_head() {
    let place = place();
    let of = |model: &str| tensors(&place.path(model), "model.safetensors");
    let (tied, own) = (of("m"), of("own"));
    let embedding = &tied["model.embed_tokens.weight"].values;
    let expected: Vec<f32> = embedding
        .iter()
        .zip(&own["lm_head.weight"].values)
        .map(|(tied, own)| 0.5 * tied + 0.5 * own)
        .collect();
    for order in ["--model m --model own", "--model own --model m"] {
        let ran =
            place.run(&format!("merge {order} --method linear --weight 0.5 --force --save out"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let (_, head) = ends(&place, "out");
        assert_eq!(head.expect("a head").values, expected, "{order}");
    }
    // The base of a difference may be the tied one; ours and the base's heads differ then.
    let line = "merge --base m --model own --method task_arithmetic --force --save out";
    assert_eq!(place.run(line).code, 0);
    let (found, head) = ends(&place, "out");
    for (found, wanted) in [
        (&found, &own["model.embed_tokens.weight"]),
        (head.as_ref().expect("a head"), &own["lm_head.weight"]),
    ] {
        let differences = found.values.iter().zip(&wanted.values);
        assert!(differences.into_iter().all(|(a, b)| (a - b).abs() < 1e-6));
    }
    // Of two tied models, the result is tied.
    let line = "merge --model m --model m@main --method linear --force --save out";
    assert_ne!(place.run(line).code, 0, "a folder has no revision");
    let ran = place.run("merge --base m --model m --method task_arithmetic --force --save out");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(ends(&place, "out").1, None);
}

#[test]
fn a_union_of_vocabularies_keeps_the_rows_of_a_tied_expert_in_the_head() {
    let place = place();
    place.checkpoint(
        "more",
        &RandomCheckpoint {
            tie_word_embeddings: true,
            num_hidden_layers: 1,
            vocab_size: 321,
            seed: 5,
            ..RandomCheckpoint::default()
        },
    );
    edit_json(&place.path("more/tokenizer.json"), |tokenizer| {
        let tokens = tokenizer["added_tokens"].as_array_mut().expect("a list");
        tokens.push(json!({
            "id": 320, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
    });
    let ran = place
        .run("merge --base own --model more --method task_arithmetic --vocab union --save out");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let (embedding, head) = ends(&place, "out");
    let head = head.expect("the base has a head");
    let more = tensors(&place.path("more"), "model.safetensors");
    let row = &more["model.embed_tokens.weight"].values[320 * 64..];
    let at = embedding.values.len() / 64 - 1;
    for tensor in [&embedding, &head] {
        let last = &tensor.values[at * 64..];
        assert!(last.iter().zip(row).all(|(a, b)| (a - b).abs() < 1e-6), "row {at}");
    }
}
