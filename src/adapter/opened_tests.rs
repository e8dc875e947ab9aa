//! Tests of whole adapters: what is read, and what is refused.

use std::fs;

use super::test_files::{TestTensor, adapter, base, config, pair, tensor, waves, write};
use super::{Adapter, TensorChange};
use crate::linalg::StoredDtype;

fn key(rest: &str) -> String {
    format!("base_model.model.{rest}")
}

/// Opens an adapter and checks it against the base.
fn open(config: &str, tensors: &[TestTensor]) -> anyhow::Result<Adapter> {
    let folder = adapter(config, tensors);
    let (_base_folder, base) = base(StoredDtype::F32);
    let adapter = Adapter::open(folder.path())?;
    adapter.check(&base)?;
    Ok(adapter)
}

fn refusal(config: &str, tensors: &[TestTensor]) -> String {
    open(config, tensors).unwrap_err().to_string()
}

fn change(adapter: &Adapter, tensor: &str) -> TensorChange {
    adapter.change(tensor).unwrap().unwrap()
}

/// The change applied to zeros.
fn delta(adapter: &Adapter, tensor: &str, rows: usize, columns: usize) -> Vec<f32> {
    let mut values = vec![0.0; rows * columns];
    change(adapter, tensor).apply(0..rows, &mut values).unwrap();
    values
}

#[test]
fn a_linear_layer_gets_s_b_a() {
    let a = tensor(&key("v.lora_A.weight"), &[2, 4], &[1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0]);
    let b = tensor(&key("v.lora_B.weight"), &[2, 2], &[1.0, 0.0, 0.5, 1.0]);
    let adapter = open(&config(""), &[a, b]).unwrap();
    assert_eq!(adapter.changed().collect::<Vec<_>>(), ["v.weight"]);
    // s = 4 / 2; B A = [[1 2 3 4] [10.5 21 31.5 42]].
    assert_eq!(delta(&adapter, "v.weight", 2, 4), [2.0, 4.0, 6.0, 8.0, 21.0, 42.0, 63.0, 84.0]);
    assert!(adapter.change("q.weight").unwrap().is_none());
}

#[test]
fn an_embedding_gets_the_transpose() {
    // A [2, 5] over tokens, B [4, 2] over columns.
    let a: Vec<f32> = (0..10).map(|i| i as f32).collect();
    let b = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 0.0];
    let adapter = open(
        &config(""),
        &[
            tensor(&key("embed.lora_embedding_A"), &[2, 5], &a),
            tensor(&key("embed.lora_embedding_B"), &[4, 2], &b),
        ],
    )
    .unwrap();
    let found = delta(&adapter, "embed.weight", 5, 4);
    // Token 3 has A[:, 3] = (3, 8): 2 · (3, 8, 11, 6).
    assert_eq!(found[12..16], [6.0, 16.0, 22.0, 12.0]);
}

#[test]
fn factors_of_halves_are_widened() {
    for dtype in [StoredDtype::F16, StoredDtype::Bf16] {
        let one = [1.0, 0.5, -2.0, 0.25, 3.0, 1.5, 0.0, -0.125];
        let tensors = [
            tensor(&key("v.lora_A.weight"), &[2, 4], &one).stored_as(dtype),
            tensor(&key("v.lora_B.weight"), &[2, 2], &one[..4]).stored_as(dtype),
        ];
        let halves = open(&config(""), &tensors).unwrap();
        let singles = tensors.map(|tensor| tensor.stored_as(StoredDtype::F32));
        let singles = open(&config(""), &singles).unwrap();
        assert_eq!(delta(&halves, "v.weight", 2, 4), delta(&singles, "v.weight", 2, 4));
    }
}

#[test]
fn a_saved_module_replaces_the_base_in_every_spelling() {
    for spelling in
        ["embed.weight", "embed.modules_to_save.weight", "embed.modules_to_save.default.weight"]
    {
        let tensors = [
            waves(&key(spelling), &[5, 4], 7.0),
            waves(&key("embed.original_module.weight"), &[5, 4], 8.0),
        ];
        let adapter = open(&config(""), &tensors).unwrap();
        let expected = &tensors[0].values;
        assert_eq!(&delta(&adapter, "embed.weight", 5, 4), expected);
        let mut rows = [9.0; 8];
        change(&adapter, "embed.weight").apply(2..4, &mut rows).unwrap();
        assert_eq!(rows, expected[8..16]);
    }
}

#[test]
fn a_copy_of_the_base_stands_under_the_factors() {
    let mut tensors = pair("v", 2, 4);
    let factors = open(&config(""), &tensors).unwrap();
    tensors.push(tensor(&key("v.base_layer.weight"), &[2, 4], &[100.0; 8]));
    let adapter = open(&config(""), &tensors).unwrap();
    let mut expected = vec![100.0; 8];
    change(&factors, "v.weight").apply(0..2, &mut expected).unwrap();
    assert_eq!(delta(&adapter, "v.weight", 2, 4), expected);
}

#[test]
fn biases_are_replaced_and_added_to() {
    let mut tensors = pair("q", 3, 4);
    tensors.push(tensor(&key("q.lora_B.bias"), &[3], &[1.0, 2.0, 3.0]));
    let adapter = open(&config(r#", "lora_bias": true"#), &tensors).unwrap();
    assert_eq!(adapter.changed().collect::<Vec<_>>(), ["q.bias", "q.weight"]);
    assert_eq!(delta(&adapter, "q.bias", 1, 3), [2.0, 4.0, 6.0]);
    tensors.push(tensor(&key("q.base_layer.bias"), &[3], &[10.0; 3]));
    let adapter = open(&config(r#", "bias": "all""#), &tensors).unwrap();
    assert_eq!(delta(&adapter, "q.bias", 1, 3), [12.0, 14.0, 16.0]);
    let tensors = [tensor(&key("v.bias"), &[2], &[1.0; 2])];
    let found = refusal(&config(r#", "bias": "all""#), &tensors);
    assert!(found.contains("`v.bias`, which the base does not have"));
    assert!(found.contains("without one"));
}

#[test]
fn trained_tokens_replace_their_rows() {
    let delta_key = key("embed.token_adapter.trainable_tokens_delta");
    let tensors = [tensor(&delta_key, &[2, 4], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])];
    let with = |rows: &str| config(&format!(r#", "trainable_token_indices": {rows}"#));
    let adapter = open(&with("[4, 1]"), &tensors).unwrap();
    let found = delta(&adapter, "embed.weight", 5, 4);
    assert_eq!(found[4..8], [5.0, 6.0, 7.0, 8.0]);
    assert_eq!(found[16..], [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(found[..4], [0.0; 4]);
    for (rows, expected) in [
        ("[1]", "names 1 tokens"),
        ("[1, 1]", "names token 1 twice"),
        ("[1, 5]", "changes row 5"),
        ("null", "does not name this module"),
        (r#"{"lm_head": [1, 2]}"#, "does not name this module"),
    ] {
        let found = refusal(&with(rows), &tensors);
        assert!(found.contains(expected), "{rows}: {found}");
    }
}

#[test]
fn dora_needs_a_magnitude_for_every_linear_layer() {
    let with_dora = config(r#", "use_dora": true"#);
    let mut tensors = pair("v", 2, 4);
    assert!(refusal(&with_dora, &tensors).contains("no magnitude vector for `v.weight`"));
    for ending in ["lora_magnitude_vector", "lora_magnitude_vector.weight"] {
        let mut tensors = tensors.clone();
        tensors.push(tensor(&key(&format!("v.{ending}")), &[2], &[1.0, 2.0]));
        let adapter = open(&with_dora, &tensors).unwrap();
        let found = delta(&adapter, "v.weight", 2, 4);
        let norm = found[4..].iter().map(|value| value * value).sum::<f32>();
        assert!((norm.sqrt() - 2.0).abs() < 1e-6, "{norm}");
        assert!(refusal(&config(""), &tensors).contains("`use_dora` is not set"));
    }
    tensors.push(waves(&key("v.lora_magnitude_vector"), &[3], 0.0));
    assert!(refusal(&with_dora, &tensors).contains("the factors make 2 rows"));
    let embedding = [
        waves(&key("embed.lora_embedding_A"), &[2, 5], 0.0),
        waves(&key("embed.lora_embedding_B"), &[4, 2], 0.0),
    ];
    assert!(refusal(&with_dora, &embedding).contains("embedding `embed.weight` by DoRA"));
}

#[test]
fn factors_that_do_not_fit_are_refused() {
    let a = |shape: &[usize]| waves(&key("v.lora_A.weight"), shape, 0.0);
    let b = |shape: &[usize]| waves(&key("v.lora_B.weight"), shape, 0.0);
    for (a, b) in [
        // Ranks differ from one another, then from the config.
        (a(&[2, 4]), b(&[2, 3])),
        (a(&[3, 4]), b(&[2, 3])),
        (a(&[8]), b(&[2, 2])),
        (a(&[2, 4]), b(&[2, 2, 1])),
        (a(&[2, 0]), b(&[2, 2])),
    ] {
        let found = refusal(&config(""), &[a, b]);
        assert!(found.contains("factors of `v.weight` do not fit"));
        assert!(found.contains("rank 2"), "{found}");
    }
    let found = refusal(&config(""), &[a(&[2, 5]), b(&[2, 2])]);
    assert!(found.contains("does not fit `v.weight` of the base"));
    assert!(found.contains("[2, 5]") && found.contains("[2, 4]"), "{found}");
    for lonely in [a(&[2, 4]), b(&[2, 2])] {
        assert!(refusal(&config(""), &[lonely]).contains("has no partner"));
    }
}

#[test]
fn keys_that_are_not_understood_are_named() {
    for unknown in [
        key("v.lora_C.weight"),
        key("v.lora_A.other.weight"),
        "v.lora_A.weight".into(),
        key("v.lora_diag"),
    ] {
        let mut tensors = pair("v", 2, 4);
        tensors.push(waves(&unknown, &[2, 4], 0.0));
        let found = refusal(&config(""), &tensors);
        assert!(found.contains(&format!("`{unknown}` has an unknown name")));
    }
    let found = refusal(&config(""), &pair("k", 2, 4));
    assert!(found.contains("changes `k.weight`, which the base does not have"));
    let found = refusal(&config(""), &pair("lm_head", 5, 4));
    assert!(found.contains("changes `lm_head.weight`"), "{found}");
}

#[test]
fn two_ways_of_changing_a_tensor_exclude_one_another() {
    let mut tensors = pair("v", 2, 4);
    tensors.push(waves(&key("v.weight"), &[2, 4], 0.0));
    assert!(refusal(&config(""), &tensors).contains("changes `v.weight` in two ways"));
    let twice = [
        waves(&key("embed.modules_to_save.weight"), &[5, 4], 0.0),
        waves(&key("embed.modules_to_save.default.weight"), &[5, 4], 0.0),
    ];
    assert!(refusal(&config(""), &twice).contains("have the same meaning"));
    let mut tensors = pair("v", 2, 4);
    tensors.push(waves(&key("v.base_layer.weight"), &[8], 0.0));
    assert!(refusal(&config(""), &tensors).contains("parts of `v.weight` do not fit"));
}

#[test]
fn a_saved_module_of_another_shape_is_refused_with_both_shapes() {
    let tensors = [waves(&key("embed.weight"), &[7, 4], 0.0)];
    let found = refusal(&config(""), &tensors);
    assert!(found.contains("[7, 4]") && found.contains("[5, 4]"), "{found}");
    let scalar = [waves(&key("q.bias"), &[], 0.0)];
    assert!(refusal(&config(""), &scalar).contains("does not fit `q.bias`"));
}

#[test]
fn numbers_that_are_not_finite_are_refused_when_they_are_read() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut tensors = pair("v", 2, 4);
        tensors[0] =
            tensor(&key("v.lora_A.weight"), &[2, 4], &[0.0, 0.0, bad, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let adapter = adapter(&config(""), &tensors);
        let opened = Adapter::open(adapter.path()).unwrap();
        let error = opened.change("v.weight").unwrap_err().to_string();
        assert!(error.contains("lora_A.weight` is broken"), "{error}");
    }
}

#[test]
fn scales_are_checked_with_the_file() {
    for settings in [
        r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 0}"#,
        r#"{"peft_type": "LORA", "r": 2, "lora_alpha": -4}"#,
    ] {
        let found = refusal(settings, &pair("v", 2, 4));
        assert!(found.contains("not a positive number"), "{found}");
    }
    let nan = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}"#;
    assert!(refusal(nan, &pair("v", 2, 4)).contains("cannot read"));
    let zero = r#"{"peft_type": "LORA", "r": 0}"#;
    assert!(refusal(zero, &pair("v", 2, 4)).contains("has rank 0"));
}

#[test]
fn folders_that_are_no_adapters_are_refused() {
    let empty = tempfile::tempdir().unwrap();
    let at = |name: &str| empty.path().join(name);
    let refusal = |path: &std::path::Path| Adapter::open(path).unwrap_err().to_string();
    assert!(refusal(&at("absent")).contains("is not there"));
    assert!(refusal(empty.path()).contains("is not an adapter"));
    fs::write(at("config.json"), "{}").unwrap();
    assert!(refusal(empty.path()).contains("it is a model"));
    assert!(refusal(&at("config.json")).contains("is a file"));
    fs::write(at("adapter_config.json"), config("")).unwrap();
    assert!(refusal(empty.path()).contains("has no `adapter_model.safetensors`"));
    fs::write(at("adapter_model.bin"), "pickle").unwrap();
    assert!(refusal(empty.path()).contains("torch.load"));
    write(empty.path(), "adapter_model.safetensors", &[]);
    assert!(refusal(empty.path()).contains("holds no tensors"));
    write(empty.path(), "adapter_model.safetensors", &pair("v", 2, 4));
    Adapter::open(empty.path()).unwrap();
    // A file that was cut.
    let bytes = fs::read(at("adapter_model.safetensors")).unwrap();
    for length in [bytes.len() - 1, 20, 3] {
        fs::write(at("adapter_model.safetensors"), &bytes[..length]).unwrap();
        assert!(refusal(empty.path()).contains("adapter_model.safetensors"));
    }
    for text in ["", "{", "[]", "{\"r\": \"many\"}"] {
        fs::write(at("adapter_config.json"), text).unwrap();
        assert!(refusal(empty.path()).contains("adapter_config.json"), "{text}");
    }
}

#[test]
fn the_base_that_the_config_names_is_only_told() {
    let named = config(r#", "base_model_name_or_path": "../../etc""#);
    let adapter = open(&named, &pair("v", 2, 4)).unwrap();
    assert_eq!(adapter.base_model_name(), Some("../../etc"));
}
