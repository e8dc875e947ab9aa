//! Keys of a `config.json` that state a fact twice: the key that counts, and a warning where the two keys differ.
//!
//! The precedence follows transformers. Pairs that the weights decide (head sizes, rows of the vocabulary, layers) are checked
//! against the tensors' shapes; docs/dev/robustness.md has the table of all pairs.

use serde_json::Value;

use super::keys::{Keys, text_settings};
use super::rope::of_kind;
use crate::linalg::StoredDtype;
use crate::model::family::{Rotation, identify};

/// Names of the objects for kinds of layers in `rope_parameters`.
pub(super) const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// Returns a warning for every fact that a `config.json` states in two ways that differ.
///
/// # Arguments
/// * `stored`: the dtype of the decoder's matrices
pub fn disagreements(config: &Value, stored: StoredDtype) -> Vec<String> {
    let keys = Keys(text_settings(config).unwrap_or(config));
    let rotation = identify(config).map(|family| family.rotation);
    let mut found = match rotation {
        Ok(Rotation::Local { .. }) => rope_by_kind(&keys),
        _ => [rope_objects(&keys), rope_bases(&keys), rope_types(&keys)]
            .into_iter()
            .flatten()
            .collect(),
    };
    found.extend(dtypes(&keys));
    found.extend(stored_dtype(&keys, stored));
    found
}

/// The warnings for a family whose layers with a window have rotary positions of their own.
fn rope_by_kind(keys: &Keys<'_>) -> Vec<String> {
    let parameters = keys.given("rope_parameters");
    let stored = |kind: &str| parameters.and_then(|of| of.get(kind)).filter(|of| !of.is_null());
    let mut found = Vec::new();
    if parameters.is_some() && KINDS.iter().all(|kind| stored(kind).is_none()) {
        found.push(format!(
            "`rope_parameters` of config.json has no object `{}` or `{}`: it is ignored, as in transformers",
            KINDS[0], KINDS[1]
        ));
    }
    for (kind, outside) in KINDS.into_iter().zip(["rope_theta", "rope_local_base_freq"]) {
        let used = of_kind(keys, kind);
        let base = used.as_ref().and_then(|used| used.get("rope_theta"));
        if let (Some(base), Some(outer)) = (base, keys.given(outside))
            && !equal(base, outer)
        {
            found.push(format!(
                "`{outside}` is {outer} in config.json, and `rope_theta` is {base} in its `rope_parameters.{kind}`: {base} is used, as in transformers 5"
            ));
        }
        let objects = stored(kind).and_then(Value::as_object).zip(used.as_ref());
        let replaced = objects.and_then(|(stored, used)| {
            stored.iter().find(|(key, value)| used.get(key).is_some_and(|used| !equal(used, value)))
        });
        if let Some((key, value)) = replaced {
            let used = used.as_ref().and_then(|used| used.get(key)).unwrap_or(&Value::Null);
            found.push(format!(
                "config.json has `rope_scaling` and `rope_parameters.{kind}`, which differ (`{key}` is {used} and {value}): `rope_scaling` is used, as in transformers"
            ));
        }
    }
    found
}

/// The object of the rotary positions: `rope_scaling` if it has a key, else `rope_parameters`, as transformers 4 and 5 choose.
pub(super) fn rope_place(keys: &Keys<'_>) -> &'static str {
    let is_empty = |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty);
    match keys.given("rope_scaling").filter(|value| !is_empty(value)) {
        Some(_) => "rope_scaling",
        None => "rope_parameters",
    }
}

fn rope_objects(keys: &Keys<'_>) -> Option<String> {
    let object = |key| keys.given(key).and_then(Value::as_object);
    let (scaling, parameters) = (object("rope_scaling")?, object("rope_parameters")?);
    if scaling.is_empty() {
        return None;
    }
    // The older spelling calls the type `type`, and has the base outside the object.
    let fact = |object: &serde_json::Map<String, Value>, key: &str| {
        let value = object.get(key).filter(|value| !value.is_null());
        let value = value.cloned();
        match key {
            "rope_type" => value.or_else(|| object.get("type").cloned()),
            "rope_theta" => value.or_else(|| keys.given("rope_theta").cloned()),
            _ => value,
        }
    };
    let names = scaling.keys().chain(parameters.keys());
    let mut names = names.filter(|name| *name != "type");
    let differs = |name: &&String| {
        let values = [scaling, parameters].map(|object| fact(object, name));
        match &values {
            [Some(one), Some(other)] => !equal(one, other),
            [one, other] => one != other,
        }
    };
    let name = names.find(differs)?;
    let shown = |object| fact(object, name).map_or("absent".to_owned(), |value| value.to_string());
    Some(format!(
        "config.json has `rope_scaling` and `rope_parameters`, which differ (`{name}` is {} and {}): `rope_scaling` is used, as in transformers",
        shown(scaling),
        shown(parameters)
    ))
}

/// Numbers may be written as `8` and as `8.0`.
fn equal(one: &Value, other: &Value) -> bool {
    match (one.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

fn rope_bases(keys: &Keys<'_>) -> Option<String> {
    let place = rope_place(keys);
    let (inner, outer) = (keys.given(place)?.get("rope_theta")?, keys.given("rope_theta")?);
    (!inner.is_null() && !equal(inner, outer)).then(|| {
        format!(
            "`rope_theta` is {outer} in config.json and {inner} in its `{place}`: {inner} is used, as in transformers 5; transformers 4 uses {outer}"
        )
    })
}

fn rope_types(keys: &Keys<'_>) -> Option<String> {
    let place = rope_place(keys);
    let object = keys.given(place)?;
    let (new, old) = (object.get("rope_type")?, object.get("type")?);
    (new != old && !new.is_null()).then(|| {
        format!("`rope_type` is {new} and `type` is {old} in `{place}` of config.json: `rope_type` is used, as in transformers")
    })
}

fn dtypes(keys: &Keys<'_>) -> Option<String> {
    let (new, old) = (keys.given("dtype")?, keys.given("torch_dtype")?);
    (new != old).then(|| {
        format!(
            "`dtype` is {new} and `torch_dtype` is {old} in config.json: the dtype of the stored weights is used; transformers loads them as {new}"
        )
    })
}

/// The warning for weights that transformers would round when it loads them.
fn stored_dtype(keys: &Keys<'_>, stored: StoredDtype) -> Option<String> {
    let declared = keys.given("dtype").or_else(|| keys.given("torch_dtype"))?;
    let name = declared.as_str()?.trim_start_matches("torch.");
    let is_exact = match (stored, name) {
        (_, "float32" | "float64") => true,
        (StoredDtype::F16, "float16") | (StoredDtype::Bf16, "bfloat16") => true,
        (_, "float16" | "bfloat16") => false,
        // A name that is no float, such as "auto".
        _ => true,
    };
    (!is_exact).then(|| {
        format!(
            "config.json says {name}, and the weights are stored as {}: they are computed with and written as they are stored; \
             transformers rounds them to {name} when it loads them",
            stored.name()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::{ModelConfig, RopeScaling};
    use serde_json::json;

    fn with(keys: Value) -> Value {
        let mut config = json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2,
            "num_attention_heads": 8, "vocab_size": 512});
        for (name, value) in keys.as_object().unwrap() {
            config[name] = value.clone();
        }
        config
    }

    /// Two keys for a fact, the value that counts, and the beginning of the warning; `None` where the keys agree. The values come from
    /// transformers 4.46.3 and 5.2.
    #[test]
    fn two_keys_for_one_fact_agree_or_the_precedence_of_transformers_is_followed_with_a_warning() {
        let linear = |factor: f64| RopeScaling::Linear { factor };
        let llama = |keys: Value, stored| {
            let config = with(keys);
            let parsed = ModelConfig::from_json(&config).unwrap();
            let warnings = disagreements(&config, stored);
            {
                let rope = parsed.ropes[0].clone();
                (rope.theta, rope.scaling, warnings)
            }
        };
        let f32 = StoredDtype::F32;
        for (keys, theta, scaling, warning) in [
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 4}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
                1e4,
                linear(4.0),
                Some(
                    "config.json has `rope_scaling` and `rope_parameters`, which differ (`factor` is 4 and absent)",
                ),
            ),
            (
                json!({"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 5e5,
                    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}),
                5e5,
                linear(4.0),
                None,
            ),
            // transformers 5 takes the base of the object that counts, else the base outside it, else its default.
            (
                json!({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
                1e4,
                RopeScaling::Default,
                Some(
                    "config.json has `rope_scaling` and `rope_parameters`, which differ (`rope_theta`",
                ),
            ),
            (
                json!({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 7e4}}),
                7e4,
                linear(2.0),
                None,
            ),
            (
                json!({"rope_scaling": null, "rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_theta": 7e4}),
                7e4,
                linear(2.0),
                None,
            ),
            (
                json!({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
                5e5,
                RopeScaling::Default,
                Some(
                    "`rope_theta` is 10000.0 in config.json and 500000.0 in its `rope_parameters`",
                ),
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2}}),
                1e4,
                linear(2.0),
                Some("`rope_type` is \"linear\" and `type` is \"dynamic\""),
            ),
            (
                json!({"dtype": "float32", "torch_dtype": "bfloat16"}),
                1e4,
                RopeScaling::Default,
                Some("`dtype` is \"float32\" and `torch_dtype` is \"bfloat16\""),
            ),
            (
                json!({"torch_dtype": "float16"}),
                1e4,
                RopeScaling::Default,
                Some("config.json says float16, and the weights are stored as"),
            ),
            (json!({"dtype": "float32"}), 1e4, RopeScaling::Default, None),
        ] {
            let (found_theta, found_scaling, warnings) = llama(keys.clone(), f32);
            assert_eq!((found_theta, found_scaling), (theta, scaling), "{keys}");
            assert_eq!(warnings.len(), usize::from(warning.is_some()), "{keys}: {warnings:?}");
            if let (Some(found), Some(expected)) = (warnings.first(), warning) {
                assert!(found.starts_with(expected), "{keys}: {found}");
            }
        }
        let half = |dtype: &str, stored| llama(json!({"torch_dtype": dtype}), stored).2.len();
        assert_eq!(half("bfloat16", StoredDtype::Bf16), 0);
        assert_eq!(half("float32", StoredDtype::Bf16), 0);
        assert_eq!(half("float16", StoredDtype::Bf16), 1);
        assert_eq!(half("torch.bfloat16", StoredDtype::F16), 1);
    }

    /// Windows with a base of their own. The values come from transformers 5.24.
    #[test]
    fn keys_outside_the_objects_for_kinds_of_layers_count_as_in_transformers() {
        for (keys, thetas, scaling, warnings) in [
            (
                json!({"rope_parameters": {"rope_type": "linear", "factor": 8, "rope_theta": 5e5}}),
                [1e6, 1e4],
                RopeScaling::Default,
                1,
            ),
            (
                json!({"rope_theta": 3e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8}}),
                [3e5, 2e4],
                RopeScaling::Linear { factor: 8.0 },
                0,
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 8}, "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 7e3}}}),
                [5e5, 7e3],
                RopeScaling::Linear { factor: 8.0 },
                1,
            ),
            (
                json!({"rope_theta": 3e5, "rope_local_base_freq": 2e4, "rope_parameters": {
                    "full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 7e3}}}),
                [5e5, 7e3],
                RopeScaling::Default,
                2,
            ),
        ] {
            let mut config = with(keys.clone());
            config["model_type"] = "gemma3_text".into();
            let ropes = ModelConfig::from_json(&config).unwrap().ropes;
            assert_eq!([ropes[0].theta, ropes[1].theta], thetas, "{keys}");
            assert_eq!(ropes[0].scaling, scaling, "{keys}");
            let found = disagreements(&config, StoredDtype::F32);
            assert_eq!(found.len(), warnings, "{keys}: {found:?}");
        }
    }
}
