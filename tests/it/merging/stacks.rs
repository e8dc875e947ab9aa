//! Stacks of layers whose settings follow from their places: the output lists the setting of every layer, as its source has it.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Place, Ran, edit_json, shared};

/// Stacks these ranges of layers of a family's model, whose configuration may be changed.
fn stack(
    family: &str,
    ranges: &[[usize; 2]],
    change: impl FnOnce(&mut Value),
) -> Option<(Place, Ran)> {
    let source = shared()?.join("models/families").join(family);
    let place = Place::empty();
    fs::create_dir(place.path("m")).expect("a new folder");
    for entry in fs::read_dir(&source).expect("a model") {
        let entry = entry.expect("an entry");
        let bytes = fs::read(entry.path()).expect("a file of the model");
        fs::write(place.path("m").join(entry.file_name()), bytes).expect("a new file");
    }
    edit_json(&place.path("m/config.json"), change);
    let slices: String = ranges
        .iter()
        .map(|[from, to]| format!("- sources: [{{model: m, layer_range: [{from}, {to}]}}]\n"))
        .collect();
    let recipe = format!("merge_method: passthrough\nslices:\n{slices}");
    fs::write(place.path("r.yml"), recipe).expect("a new file");
    let ran = place.run("merge r.yml --save out");
    Some((place, ran))
}

fn config(place: &Place) -> Value {
    let bytes = fs::read(place.path("out/model/config.json")).expect("a config");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// The first letters of a list.
fn letters(list: &Value) -> String {
    let list = list.as_array().map_or(&[][..], Vec::as_slice);
    let letters = list.iter().map(|value| match value {
        Value::String(kind) => kind[..1].to_string(),
        other => other.to_string(),
    });
    letters.collect()
}

#[test]
fn moved_layers_keep_their_windows_and_positions() {
    // Gemma 2 alternates, with the list and without; Qwen 2 begins at layer 2; SmolLM3 leaves every third layer without positions.
    for (family, key, is_listed, ranges, expected) in [
        ("gemma2", "layer_types", true, [[0, 2], [1, 4]], "sffsf"),
        ("gemma2", "layer_types", false, [[0, 2], [1, 4]], "sffsf"),
        ("qwen2-window", "layer_types", true, [[0, 4], [1, 5]], "ffssfsss"),
        ("qwen2-window", "layer_types", false, [[0, 4], [1, 5]], "ffssfsss"),
        ("smollm3", "no_rope_layers", true, [[0, 3], [2, 5]], "110011"),
        ("smollm3", "no_rope_layers", false, [[0, 3], [2, 5]], "110011"),
    ] {
        let ran = stack(family, &ranges, |config| {
            if !is_listed {
                let config = config.as_object_mut().expect("an object");
                config.remove("layer_types");
                config.remove("no_rope_layers");
            }
        });
        let Some((place, ran)) = ran else { return };
        assert_eq!(ran.code, 0, "{family}\n{}", ran.stderr);
        let config = config(&place);
        assert_eq!(letters(&config[key]), expected, "{family}: {config}");
        assert_eq!(config["num_hidden_layers"], expected.len(), "{family}");
    }
}

#[test]
fn layers_at_their_places_leave_the_configuration_as_it_is() {
    for family in ["gemma2", "qwen2-window", "smollm3"] {
        let layers = if family == "gemma2" { 4 } else { 5 };
        let ran = stack(family, &[[0, 2], [2, layers]], |_| {});
        let Some((place, ran)) = ran else { return };
        assert_eq!(ran.code, 0, "{family}\n{}", ran.stderr);
        let before = fs::read(place.path("m/config.json")).expect("a config");
        let before: Value = serde_json::from_slice(&before).expect("JSON");
        assert_eq!(config(&place), before, "{family}");
    }
}

#[test]
fn a_stack_whose_settings_cannot_be_listed_is_refused() {
    let unknown = |config: &mut Value| {
        config["model_type"] = json!("new");
        let config = config.as_object_mut().expect("an object");
        config.remove("layer_types");
    };
    let Some((place, ran)) = stack("qwen2-window", &[[0, 3], [2, 5]], unknown) else {
        return;
    };
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("`max_window_layers`"), "{}", ran.stderr);
    assert!(!place.path("out").exists(), "nothing is written");
    // At their places the layers need no list.
    let (_, ran) = stack("qwen2-window", &[[0, 3], [3, 5]], unknown).expect("it is there");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    // Two layers of different kinds become one.
    let recipe = "merge_method: linear\nparameters: {weight: 1}\nslices:\n\
        - sources: [{model: m, layer_range: [0, 2]}, {model: out/model, layer_range: [1, 3]}]\n";
    let (place, _) = stack("gemma2", &[[0, 4]], |_| {}).expect("it is there");
    fs::write(place.path("r.yml"), recipe).expect("a new file");
    let ran = place.run("merge r.yml --save mixed");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("different settings"), "{}", ran.stderr);
}
