//! Adapters that are damaged, foreign or made to do harm: one clear error each, and no file is written before the weights are read.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{Tensor, pair, waves, write_adapter};
use crate::support::{Place, refuses_command};

const Q: &str = "model.layers.0.self_attn.q_proj";
const LINE: &str = "merge --base m --model m+a --method linear --save out";

/// The config of rank 2 with these settings.
fn config(settings: Value) -> Value {
    let mut config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
    let settings = settings.as_object().expect("an object").clone();
    config.as_object_mut().expect("an object").extend(settings);
    config
}

fn key(end: &str) -> String {
    format!("base_model.model.{end}")
}

/// Writes the adapter and expects the first line of the refusal.
#[track_caller]
fn refused(config: &Value, tensors: &[(String, Tensor)], first: &str) -> String {
    let place = Place::new();
    write_adapter(&place, "a", config, tensors);
    refused_in(&place, first)
}

/// Expects the first line of the refusal of the adapter that is there; whatever it is, it has no more than ten lines.
#[track_caller]
fn refused_in(place: &Place, first: &str) -> String {
    let before = place.names(".");
    let ran = place.run(LINE);
    let shown = &ran.stderr;
    assert!(!shown.contains("panicked"), "{shown}");
    let error = shown.find("error: ").map_or("", |at| &shown[at..]);
    assert_eq!(error.lines().next(), Some(first), "{shown}");
    assert_eq!(ran.code, 1, "{shown}");
    assert!(error.lines().count() <= 10, "{shown}");
    assert!(error.lines().all(|line| line.len() < 400), "{shown}");
    assert_eq!(place.names("."), before, "nothing is written");
    error.to_string()
}

#[test]
fn ranks_scales_and_shapes_that_do_not_fit_are_refused() {
    let good = pair(Q, 2, 64, 64);
    let does_not_fit = format!("error: the adapter's factors of `{Q}.weight` do not fit");
    refused(&config(json!({"r": 3})), &good, &does_not_fit);
    let mut unequal = pair(Q, 2, 64, 64);
    unequal[1].1 = waves(&[64, 3], 0.0);
    refused(&config(json!({})), &unequal, &does_not_fit);
    for (settings, what) in [
        (json!({"r": 0}), "has rank 0"),
        (json!({"r": 1_000_000_000_000u64}), "has rank 1000000000000"),
        (json!({"lora_alpha": 1e300}), "is scaled by inf, which is not a positive number"),
        (json!({"lora_alpha": -16}), "is scaled by -8, which is not a positive number"),
    ] {
        let first = format!("error: `{Q}` of the adapter {what}");
        refused(&config(settings), &good, &first);
    }
    let first = format!("error: the adapter does not fit `{Q}.weight` of the base");
    refused(&config(json!({})), &pair(Q, 2, 64, 32), &first);
    refused(&config(json!({})), &pair(Q, 2, 65, 64), &first);
}

#[test]
fn keys_without_a_meaning_or_a_place_are_refused() {
    let alone = format!(
        "error: the adapter's tensor `{}` has no partner",
        key(&format!("{Q}.lora_A.weight"))
    );
    refused(&config(json!({})), &pair(Q, 2, 64, 64)[..1], &alone);
    let with = |name: &str| {
        let mut tensors = pair(Q, 2, 64, 64);
        tensors.push((name.to_owned(), waves(&[2, 2], 0.0)));
        tensors
    };
    for name in [key(&format!("{Q}.lora_C.weight")), "q".into(), "../../x".into()] {
        let first = format!("error: the adapter's tensor `{name}` has an unknown name");
        refused(&config(json!({})), &with(&name), &first);
    }
    let far = "model.layers.9.mlp.up_proj";
    let first = format!("error: the adapter changes `{far}.weight`, which the base does not have");
    refused(&config(json!({})), &pair(far, 2, 64, 64), &first);
    // A name is never a path.
    let path = "../../../etc/passwd";
    let first = format!("error: the adapter changes `{path}.weight`, which the base does not have");
    refused(&config(json!({})), &with(&key(&format!("{path}.weight"))), &first);
}

#[test]
fn other_adapters_than_lora_and_changed_bases_are_refused() {
    let good = pair(Q, 2, 64, 64);
    let first = "error: the adapter `a` cannot be merged: its `peft_type` is `IA3`";
    refused(&json!({"peft_type": "IA3"}), &good, first);
    for kind in ["pissa", "pissa_niter_4", "olora", "corda"] {
        let first =
            format!("error: the adapter `a` cannot be merged: its `init_lora_weights` is `{kind}`");
        let error = refused(&config(json!({"init_lora_weights": kind})), &good, &first);
        assert!(error.contains("this initialisation changed the base"), "{error}");
    }
}

/// Replaces a file of a good adapter.
fn with_file(name: &str, bytes: &[u8]) -> Place {
    let place = Place::new();
    write_adapter(&place, "a", &config(json!({})), &pair(Q, 2, 64, 64));
    fs::write(place.path("a").join(name), bytes).expect("a file");
    place
}

#[test]
fn damaged_files_are_refused() {
    let place = with_file(
        "adapter_config.json",
        b"{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": NaN}",
    );
    let cannot = "error: cannot read `a/adapter_config.json`";
    refused_in(&place, cannot);
    let deep = format!("{{\"peft_type\": \"LORA\", \"x\": {}", "[".repeat(1 << 20));
    refused_in(&with_file("adapter_config.json", deep.as_bytes()), cannot);
    // A file with a hole of 1 GiB is refused by its length.
    let place = with_file("adapter_config.json", b"");
    let file = fs::File::options().write(true).open(place.path("a/adapter_config.json"));
    file.expect("a file").set_len(1 << 30).expect("a hole");
    refused_in(&place, cannot);
    let whole = fs::read(place.path("a/adapter_model.safetensors")).expect("a file");
    for length in [0, 7, 20, whole.len() - 1] {
        let place = with_file("adapter_model.safetensors", &whole[..length]);
        let ran = place.run(LINE);
        assert_eq!(ran.code, 1, "{length}: {}", ran.stderr);
        let first = ran.stderr.lines().find(|line| line.starts_with("error: "));
        let first = first.unwrap_or_default().to_owned();
        assert!(first.contains("a/adapter_model.safetensors"), "{length}: {first}");
        refused_in(&place, &first);
    }
}

#[test]
fn a_pickle_is_never_opened() {
    let place = with_file("adapter_model.bin", b"cos\nsystem\n(S'touch bad'\ntR.");
    fs::remove_file(place.path("a/adapter_model.safetensors")).expect("removed");
    let error = refused_in(&place, "error: the adapter `a` has no `adapter_model.safetensors`");
    assert!(error.contains("is a pickle"), "{error}");
}

#[test]
fn weights_that_are_not_finite_end_the_merge() {
    for value in [f32::NAN, f32::INFINITY] {
        let mut tensors = pair(Q, 2, 64, 64);
        tensors[1].1.values[70] = value;
        for semantics in ["mergekit", "peft"] {
            let place = Place::new();
            write_adapter(&place, "a", &config(json!({})), &tensors);
            let ran = place.run(&format!("{LINE} --semantics {semantics}"));
            let name = &tensors[1].0;
            let first = format!("error: the adapter's tensor `{name}` is broken");
            let error = ran.stderr.lines().find(|line| line.starts_with("error: "));
            assert_eq!(error, Some(&*first), "{}", ran.stderr);
            assert_eq!(ran.code, 1);
            assert!(!place.path("out/run.json").exists());
            assert!(!place.path("out/model/config.json").exists());
            assert!(!place.path("out/adapter/adapter_config.json").exists());
        }
    }
}

/// `base_model_name_or_path` and the names of modules are text: no file that they name is opened or written.
#[test]
fn paths_in_a_config_are_not_followed() {
    let place = Place::new();
    let settings = json!({
        "base_model_name_or_path": "../../../../etc",
        "auto_mapping": {"parent_library": "/tmp/x"},
        "target_modules": ["../../x", "q_proj"],
    });
    write_adapter(&place, "a", &config(settings), &pair(Q, 2, 64, 64));
    let before = place.names(".");
    let ran = place.run(&format!("{LINE} --semantics peft"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let mut after = place.names(".");
    assert!(after.remove("out"));
    assert_eq!(after, before);
    let text = fs::read(place.path("out/adapter/adapter_config.json")).expect("a file");
    let written: Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(written["target_modules"], json!([Q]));
}

#[test]
fn a_folder_that_is_no_adapter_is_refused() {
    let place = Place::new();
    let line =
        |adapter: &str| format!("merge --base m --model m+{adapter} --method linear --save out");
    let first = "error: `m` is not an adapter";
    refuses_command(&place, &line("m"), 1, first, "");
    let first = "error: the adapter `train.txt` is a file, not an adapter's folder";
    refuses_command(&place, &line("train.txt"), 1, first, "");
    assert!(!Path::new("out").exists());
}

/// Patterns that took 672 MiB for 300 keys and minutes for 3,000; and one large expression among names.
#[test]
fn patterns_made_to_do_harm_are_refused_at_once() {
    let many = |count: usize, key: &dyn Fn(usize) -> String| -> Value {
        let keys = (0..count).map(|at| (key(at), json!(2)));
        keys.collect::<serde_json::Map<_, _>>().into()
    };
    let place = Place::new();
    for (key, keys, why) in [
        ("rank_pattern", many(3000, &|at| format!(r"\w{{70}}{at}")), "3000 of its keys"),
        ("rank_pattern", many(300, &|at| format!(r"\w{{70}}{at}")), "300 of its keys"),
        ("alpha_pattern", many(1, &|_| "(.{1,500}){1,500}q".to_string()), "256 KiB"),
        ("alpha_pattern", many(5000, &|at| format!("layers.{at}")), "5000 keys"),
        ("rank_pattern", many(1, &|_| "q".repeat(100_000)), "100000 bytes"),
    ] {
        write_adapter(&place, "a", &config(json!({key: keys})), &pair(Q, 2, 64, 64));
        let began = std::time::Instant::now();
        let first = format!("error: the adapter `a` cannot be merged: its `{key}` cannot be used");
        let error = refused_in(&place, &first);
        assert!(error.contains(why), "{error}");
        assert!(error.contains("hint: "), "{error}");
        assert!(began.elapsed().as_secs() < 10, "{key}: {:?}", began.elapsed());
    }
    // As many names as there may be are matched.
    let names = many(4096, &|at| format!(r"layers\.{}\.self_attn.q_proj", 4095 - at));
    let tensors = pair(Q, 2, 64, 64);
    write_adapter(&place, "a", &config(json!({"r": 4, "rank_pattern": names})), &tensors);
    let ran = place.run(LINE);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let peak = place.manifest("out").peak_anonymous.expect("measured");
    assert!(peak.mib() < 24.0, "{peak}");
}
