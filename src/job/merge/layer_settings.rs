//! Settings of single layers in the configuration of a stack.
//!
//! Some families give a layer its attention window or its positions by its place: windows alternate, or begin at a layer. A stack moves
//! layers. So its configuration lists the setting of every layer, as the source has it. The family's record has the rules. An
//! architecture without a record has its lists, and is refused where a setting cannot be listed.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde_json::{Map, Value};

use super::models::InputModels;
use crate::failure::Failure;
use crate::merging::pass::MergeTensor;
use crate::model::{layer_kinds, layer_lists};

/// A configuration.
type Config = Map<String, Value>;

/// Values of all layers, by key.
type Lists = BTreeMap<String, Vec<Value>>;

/// Lists of the numbers of layers.
const LISTS_OF_NUMBERS: [&str; 2] = ["mlp_only_layers", "moe_layers"];

/// Settings that depend on the place of a layer: the key, the value that all layers share, and the list that replaces the key.
const BY_PLACE: &[(&str, Option<u64>, Option<&str>)] = &[
    ("attn_layer_period", Some(1), None),
    ("decoder_sparse_step", Some(1), None),
    ("expert_layer_period", Some(1), None),
    ("first_k_dense_replace", Some(0), None),
    ("full_attention_interval", Some(1), Some("layer_types")),
    ("global_attn_every_n_layers", Some(1), Some("layer_types")),
    ("interleave_moe_layer_step", Some(1), Some("moe_layers")),
    ("max_window_layers", None, Some("layer_types")),
    ("moe_layer_freq", Some(1), None),
    ("no_rope_layer_interval", None, Some("no_rope_layers")),
    ("num_kv_shared_layers", Some(0), None),
    ("per_layer_config", None, None),
    ("sliding_window_pattern", None, Some("layer_types")),
];

/// Lists the settings of the output's layers in `config`, the donor's configuration. A configuration that is already right stays
/// unchanged.
///
/// # Errors
/// Fails when a layer is merged from layers of different settings, and for a setting that follows from the place and cannot be listed.
pub(super) fn write(
    config: &mut Config,
    tensors: &[MergeTensor],
    inputs: &InputModels,
) -> Result<()> {
    let origins = origins(tensors);
    let in_place = |(layer, sources): (usize, &BTreeSet<(usize, usize)>)| {
        sources.iter().all(|(_, source)| *source == layer)
    };
    let moves =
        layers_of(config) != Some(origins.len()) || !origins.iter().enumerate().all(in_place);
    let used: BTreeSet<usize> = origins.iter().flatten().map(|(model, _)| *model).collect();
    let mut lists: BTreeMap<usize, Lists> = BTreeMap::new();
    for model in used {
        let input = &inputs.models[model];
        let Some(own) = input.settings().as_object() else {
            continue;
        };
        let of_model = lists_of(own, layers_of(own).unwrap_or(0));
        if moves && let Some(key) = hidden_setting(own, &of_model) {
            return Err(Failure::new(format!(
                "the stack moves layers of `{}`, and `{key}` gives a layer its setting by its place",
                input.spec
            ))
            .detail("the output would give the moved layers the settings of other layers")
            .hint("merge whole models, or leave every layer at its place")
            .into());
        }
        lists.insert(model, of_model);
    }
    let keys: BTreeSet<&String> = lists.values().flat_map(BTreeMap::keys).collect();
    let by_itself = lists_of(config, origins.len());
    for key in keys {
        let found: Result<Vec<Value>, Failure> = origins
            .iter()
            .enumerate()
            .map(|(layer, sources)| common_value(key, layer, sources, &lists, inputs))
            .collect();
        let list = match found {
            Ok(list) => list,
            // The layers of a whole model have the settings of the donor, as in mergekit.
            Err(_) if !moves => continue,
            Err(failure) => return Err(failure.into()),
        };
        if by_itself.get(key) != Some(&list) {
            config.insert(key.clone(), as_written(key, list));
        }
    }
    Ok(())
}

/// The sources of each layer of the output: models, and numbers of their layers.
fn origins(tensors: &[MergeTensor]) -> Vec<BTreeSet<(usize, usize)>> {
    let mut origins: BTreeMap<usize, BTreeSet<(usize, usize)>> = BTreeMap::new();
    for tensor in tensors {
        let Some(layer) = tensor.recipe.layer else {
            continue;
        };
        let sources = tensor.recipe.sources.iter().filter_map(|source| {
            let rest = source.tensor.strip_prefix("model.layers.")?;
            let number = rest.split('.').next()?.parse().ok()?;
            Some((source.model, number))
        });
        origins.entry(layer).or_default().extend(sources);
    }
    origins.into_values().collect()
}

/// The value that all sources of a layer have.
fn common_value(
    key: &str,
    layer: usize,
    sources: &BTreeSet<(usize, usize)>,
    lists: &BTreeMap<usize, Lists>,
    inputs: &InputModels,
) -> Result<Value, Failure> {
    let value_of = |(model, source): &(usize, usize)| {
        let list = lists.get(model).and_then(|lists| lists.get(key));
        list.and_then(|list| list.get(*source))
    };
    let mut values = sources.iter().map(value_of);
    if let Some(Some(first)) = values.next()
        && values.all(|value| value == Some(first))
    {
        return Ok(first.clone());
    }
    let failure = Failure::new(format!(
        "layer {layer} of the output is merged from layers of different settings"
    ));
    let found = sources.iter().map(|(model, source)| {
        let value = value_of(&(*model, *source));
        let value = value.map_or("nothing".to_string(), Value::to_string);
        let model = &inputs.models[*model].spec;
        format!("`{key}` of layer {source} of `{model}`: {value}")
    });
    Err(found
        .fold(failure, Failure::detail)
        .hint("choose a `layer_range` whose layers have the same settings at the same places"))
}

fn layers_of(config: &Config) -> Option<usize> {
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64);
    layers.map(|layers| layers as usize)
}

/// The settings of `layers` layers: lists of the configuration, and lists that follow from its rules.
fn lists_of(config: &Config, layers: usize) -> Lists {
    let mut lists = Lists::new();
    for (key, value) in config {
        let Value::Array(values) = value else {
            continue;
        };
        if LISTS_OF_NUMBERS.contains(&key.as_str()) {
            let has = |layer: usize| values.iter().any(|of| of.as_u64() == Some(layer as u64));
            lists.insert(key.clone(), (0..layers).map(|of| has(of).into()).collect());
        } else if key.contains("layer") && values.len() == layers {
            lists.insert(key.clone(), values.clone());
        }
    }
    for (key, list) in derived(config, layers) {
        if config.get(key).is_none_or(Value::is_null) {
            lists.insert(key.to_string(), list);
        }
    }
    lists
}

/// A list as a configuration holds it.
fn as_written(key: &str, list: Vec<Value>) -> Value {
    if !LISTS_OF_NUMBERS.contains(&key) {
        return list.into();
    }
    let numbers = list.iter().enumerate();
    let numbers = numbers.filter(|(_, value)| value.as_bool() == Some(true));
    let numbers = numbers.map(|(layer, _)| layer.into());
    numbers.collect::<Vec<Value>>().into()
}

/// The lists that follow from the rules of the family, where the configuration does not have them. Other architectures have none.
fn derived(config: &Config, layers: usize) -> Vec<(&'static str, Vec<Value>)> {
    let settings = Value::Object(config.clone());
    match layer_kinds(&settings, layers) {
        Ok((family, kinds)) => layer_lists(family, &kinds),
        Err(_) => Vec::new(),
    }
}

/// The key of a setting that follows from the place of a layer and is in none of the lists.
fn hidden_setting(config: &Config, lists: &Lists) -> Option<&'static str> {
    let is_hidden = |&&(key, shared, list): &&(&str, Option<u64>, Option<&str>)| {
        let has_meaning = match config.get(key) {
            None | Some(Value::Null) => false,
            // The window begins at this layer only if there is a window.
            Some(_) if key == "max_window_layers" => {
                config.get("use_sliding_window") == Some(&Value::Bool(true))
            }
            Some(value) => value.as_u64() != shared || shared.is_none(),
        };
        has_meaning && list.is_none_or(|list| !lists.contains_key(list))
    };
    BY_PLACE.iter().find(is_hidden).map(|(key, _, _)| *key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(config: Value, layers: usize) -> String {
        let config = config.as_object().expect("an object").clone();
        let lists = lists_of(&config, layers);
        let short = |list: &Vec<Value>| -> String {
            let letters = list.iter().map(|value| match value {
                Value::String(kind) => kind[..1].to_string(),
                other => other.to_string(),
            });
            letters.collect()
        };
        let lists = lists.iter().map(|(key, list)| format!("{key} {}", short(list)));
        lists.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn places_have_the_settings_that_transformers_gives_them() {
        use serde_json::json;
        for (config, expected) in [
            (json!({"model_type": "llama", "max_window_layers": 1}), ""),
            (json!({"model_type": "gemma2"}), "layer_types sfsfsfs"),
            (json!({"model_type": "gemma3_text"}), "layer_types sssssfs"),
            (
                json!({"model_type": "gemma3_text", "sliding_window_pattern": 3}),
                "layer_types ssfssfs",
            ),
            (
                json!({"model_type": "qwen2", "max_window_layers": 2, "use_sliding_window": true}),
                "layer_types ffsssss",
            ),
            (
                json!({"model_type": "qwen2", "max_window_layers": 2, "use_sliding_window": true,
                    "sliding_window": null}),
                "layer_types fffffff",
            ),
            (json!({"model_type": "qwen3", "max_window_layers": 2}), "layer_types fffffff"),
            (
                json!({"model_type": "smollm3", "no_rope_layer_interval": 3}),
                "layer_types fffffff, no_rope_layers 1101101",
            ),
            (
                json!({"model_type": "qwen2", "max_window_layers": 2, "use_sliding_window": true,
                    "layer_types": ["x", "y", "z", "x", "y", "z", "x"]}),
                "layer_types xyzxyzx",
            ),
            (
                json!({"model_type": "qwen3_moe", "mlp_only_layers": [1, 6]}),
                "mlp_only_layers falsetruefalsefalsefalsefalsetrue",
            ),
        ] {
            assert_eq!(lists(config.clone(), 7), expected, "{config}");
        }
    }

    #[test]
    fn a_setting_that_no_list_holds_is_found() {
        use serde_json::json;
        for (config, expected) in [
            (json!({"model_type": "llama"}), None),
            (json!({"model_type": "new", "decoder_sparse_step": 2}), Some("decoder_sparse_step")),
            (json!({"model_type": "new", "decoder_sparse_step": 1}), None),
            (
                json!({"model_type": "new", "max_window_layers": 2, "use_sliding_window": true}),
                Some("max_window_layers"),
            ),
            (
                json!({"model_type": "new", "max_window_layers": 2, "use_sliding_window": false}),
                None,
            ),
            (json!({"model_type": "qwen2", "max_window_layers": 2}), None),
            (
                json!({"model_type": "new", "sliding_window_pattern": "LLG"}),
                Some("sliding_window_pattern"),
            ),
        ] {
            let config = config.as_object().expect("an object").clone();
            let lists = lists_of(&config, 3);
            assert_eq!(hidden_setting(&config, &lists), expected, "{config:?}");
        }
    }
}
