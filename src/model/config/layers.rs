//! The keys of a `config.json` that tell decoder layers apart: attention windows, and layers without rotation or with another base.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::keys::{ANOTHER_MODEL, Keys, LARGEST_SIZE};
use crate::failure::Failure;
use crate::model::family::{Family, Rotation, Windows, identify};

/// The facts in which the decoder layers of a model may differ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LayerKind {
    /// Tokens that a token sees in attention, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// Index of the layer's rotary tables; `None` for a layer without rotation.
    pub rope: Option<usize>,
}

/// The lists with which a `config.json` gives layers of these kinds their settings one by one: key, and an entry per layer.
pub fn layer_lists(family: &Family, kinds: &[LayerKind]) -> Vec<(&'static str, Vec<Value>)> {
    let mut lists = Vec::new();
    if !matches!(family.windows, Windows::Never | Windows::AllLayers { .. }) {
        let names = kinds.iter().map(|kind| match kind.window {
            Some(_) => "sliding_attention".into(),
            None => "full_attention".into(),
        });
        lists.push(("layer_types", names.collect()));
    }
    if matches!(family.rotation, Rotation::NotEvery { .. }) {
        let rotated = kinds.iter().map(|kind| u8::from(kind.rope.is_some()).into());
        lists.push(("no_rope_layers", rotated.collect()));
    }
    lists
}

/// The kinds of a model's layers, from its language model's settings, without its other settings.
///
/// # Errors
/// Fails for a family without a record, and for settings that are refused.
pub fn layer_kinds(settings: &Value, layers: usize) -> Result<(&'static Family, Vec<LayerKind>)> {
    let family = identify(settings)?;
    Ok((family, read(&Keys(settings), family, layers)?))
}

/// Reads the kind of every layer.
pub(super) fn read(keys: &Keys<'_>, family: &Family, layers: usize) -> Result<Vec<LayerKind>> {
    let rotated = rotated_layers(keys, family, layers)?;
    let windows = windows(keys, family, &rotated)?;
    let kinds = rotated.into_iter().zip(windows).map(|(is_rotated, window)| {
        let is_local = window.is_some() && matches!(family.rotation, Rotation::Local { .. });
        LayerKind { window, rope: is_rotated.then_some(usize::from(is_local)) }
    });
    Ok(kinds.collect())
}

/// Returns which layers are rotated.
fn rotated_layers(keys: &Keys<'_>, family: &Family, layers: usize) -> Result<Vec<bool>> {
    let Rotation::NotEvery { period } = family.rotation else {
        return Ok(vec![true; layers]);
    };
    if let Some(list) = keys.given("no_rope_layers") {
        let is_rotated = |value: &Value| match value.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        };
        let found = list.as_array().and_then(|list| list.iter().map(is_rotated).collect());
        let found: Option<Vec<bool>> = found;
        return match found {
            Some(mut found) if found.len() >= layers => {
                found.truncate(layers);
                Ok(found)
            }
            _ => Err(Failure::new(format!(
                "`no_rope_layers` must be a list of {layers} values 0 or 1, one per layer"
            ))
            .into()),
        };
    }
    let period = keys.size("no_rope_layer_interval", Some(period))?;
    Ok((1..=layers).map(|number| number % period != 0).collect())
}

/// The window of every layer.
fn windows(keys: &Keys<'_>, family: &Family, rotated: &[bool]) -> Result<Vec<Option<usize>>> {
    let layers = rotated.len();
    let size = |default: Option<usize>| match (keys.0.get("sliding_window"), default) {
        (Some(Value::Null), _) | (None, None) => Ok(None),
        _ => keys.size("sliding_window", default).map(Some),
    };
    // A list of types counts, else a rule by the layer's index.
    let listed = |window: Option<usize>, has_window: &dyn Fn(usize) -> bool| {
        let has_window = match layer_types(keys, layers)? {
            Some(types) => types,
            None => (0..layers).map(|layer| window.is_some() && has_window(layer)).collect(),
        };
        let is_missing = window.is_none() && has_window.contains(&true);
        if is_missing {
            return Err(Failure::new(
                "`layer_types` has `sliding_attention`, and no window is given",
            )
            .detail(format!(
                "`sliding_window` is {}, `use_sliding_window` is {}",
                keys.shown("sliding_window"),
                keys.shown("use_sliding_window")
            ))
            .into());
        }
        Ok(has_window.into_iter().map(|has| window.filter(|_| has)).collect())
    };
    let is_used = || keys.flag("use_sliding_window", false);
    match family.windows {
        Windows::Never => Ok(vec![None; layers]),
        Windows::AllLayers { default } => Ok(vec![size(default)?; layers]),
        Windows::LastLayers { default, first } => {
            let window = if is_used()? { size(Some(default))? } else { None };
            let first = keys.whole(0..=LARGEST_SIZE, "max_window_layers", Some(first))?;
            listed(window, &|layer| layer >= first)
        }
        Windows::AllButEvery { default, period, has_key } => {
            let period = match has_key {
                true => keys.size("sliding_window_pattern", Some(period))?,
                false => period,
            };
            listed(size(Some(default))?, &|layer| !(layer + 1).is_multiple_of(period))
        }
        Windows::Unrotated => {
            let window = if is_used()? { size(None)? } else { None };
            listed(window, &|layer| !rotated[layer])
        }
    }
}

/// Layers to which `layer_types` gives a window; `None` without the key.
fn layer_types(keys: &Keys<'_>, layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(list) = keys.given("layer_types") else {
        return Ok(None);
    };
    let Some(list) = list.as_array().filter(|list| list.len() == layers) else {
        return Err(Failure::new(format!(
            "`layer_types` must be a list with a name for each of the {layers} layers"
        ))
        .into());
    };
    let has_window = list.iter().map(|name| match name.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(Failure::new(format!("`layer_types` has {name}, which is not computed"))
            .detail("computed: full_attention, sliding_attention")
            .hint(ANOTHER_MODEL)
            .into()),
    });
    has_window.collect::<Result<_>>().map(Some)
}
