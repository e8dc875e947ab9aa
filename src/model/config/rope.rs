//! The keys of rotary positions in a `config.json`: the base frequency and its scaling.
//!
//! transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` and `rope_scaling`. Both are read; `pairs` decides between them.
//! A family whose layers with a window have a base of their own has an object for each kind of layer in `rope_parameters`.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::keys::{ANOTHER_MODEL, Keys};
use super::pairs::{KINDS, rope_place};
use crate::failure::Failure;
use crate::model::family::{Family, Rotation};

/// Upper bound of the numbers that scale rotary frequencies. They are computed with as f32.
const LARGEST_ROPE: f64 = 1e12;

/// Rotary positions of some layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
    /// Elements of a head that are rotated; the elements after them stay. An even number.
    pub dims: usize,
}

/// Scaling of rotary frequencies, for contexts longer than the trained context.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "rope_type")]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// Ratio of the new context length to the trained context length.
        factor: f64,
    },
    /// NTK-aware: the base grows with the sequence once it is longer than the trained context.
    Dynamic {
        /// Ratio of the new context length to the trained context length.
        factor: f64,
        /// The trained context length, in tokens.
        max_position_embeddings: usize,
    },
    /// Llama 3.1's scaling: low frequencies divided by `factor`, high frequencies kept, a ramp between.
    Llama3 {
        /// Ratio of the new context length to the trained context length.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context the model was trained with, in tokens.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071): low frequencies divided by `factor`, a ramp over the index of the pair.
    Yarn {
        /// Ratio of the new context length to the trained context length.
        factor: f64,
        /// The context the model was trained with, in tokens.
        original_max_position_embeddings: usize,
        /// Pairs that turn more often in the trained context keep their frequency.
        beta_fast: f64,
        /// Pairs that turn less often in the trained context are divided by `factor`.
        beta_slow: f64,
        /// The ends of the ramp are whole indices.
        truncate: bool,
        /// Factor of cos and sin.
        attention_factor: f64,
    },
    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753): a divisor per frequency, of one list or another by the length of the sequence.
    Longrope {
        /// Divisors for sequences within the trained context.
        short_factor: Vec<f64>,
        /// Divisors for longer sequences.
        long_factor: Vec<f64>,
        /// The context the model was trained with, in tokens.
        original_max_position_embeddings: usize,
        /// Factor of cos and sin.
        attention_factor: f64,
    },
}

/// Reads a number of a scaling's object: its key, its default, and its least value.
type ReadNumber<'a> = &'a dyn Fn(&str, Option<f64>, f64) -> Result<f64>;

/// The facts outside the object of a scaling.
struct Surroundings<'a> {
    config: &'a Keys<'a>,
    family: &'a Family,
    head_dim: usize,
    positions: usize,
}

/// Reads the rotary positions of a model's layers: of all layers, and of the layers with a window if they have positions of their own.
pub(super) fn read(
    config: &Keys<'_>,
    family: &Family,
    head_dim: usize,
    positions: usize,
) -> Result<Vec<Rope>> {
    let surroundings = Surroundings { config, family, head_dim, positions };
    let default = family.defaults.rope_theta;
    let Rotation::Local { base } = family.rotation else {
        let place = rope_place(config);
        return Ok(vec![surroundings.rope(config.given(place), place, ("rope_theta", default))?]);
    };
    let [full, local] = KINDS.map(|kind| of_kind(config, kind));
    let [of_full, of_local] = KINDS.map(|kind| format!("rope_parameters.{kind}"));
    let of_full = if config.given("rope_scaling").is_some() { "rope_scaling" } else { &of_full };
    Ok(vec![
        surroundings.rope(full.as_ref(), of_full, ("rope_theta", default))?,
        surroundings.rope(local.as_ref(), &of_local, ("rope_local_base_freq", base))?,
    ])
}

/// The object of a kind of layer in `rope_parameters`. For the layers without a window, the keys of `rope_scaling` replace its keys, as
/// in transformers 5.
pub(super) fn of_kind(config: &Keys<'_>, kind: &str) -> Option<Value> {
    let parameters = config.given("rope_parameters").and_then(|of| of.get(kind));
    let parameters = parameters.filter(|of| !of.is_null());
    let scaling = config.given("rope_scaling").filter(|_| kind == KINDS[0]);
    match (parameters.cloned(), scaling) {
        (Some(Value::Object(mut parameters)), Some(Value::Object(scaling))) => {
            // The older name of the type would not count beside the newer name.
            if scaling.contains_key("type") {
                parameters.remove("rope_type");
            }
            parameters.extend(scaling.clone());
            Some(parameters.into())
        }
        (parameters, scaling) => scaling.cloned().or(parameters),
    }
}

impl Surroundings<'_> {
    /// Reads the object `parameters`, which is at `place`. The base may be outside it under another key.
    fn rope(
        &self,
        parameters: Option<&Value>,
        place: &str,
        (outside, default): (&str, f64),
    ) -> Result<Rope> {
        if let Some(parameters) = parameters.filter(|parameters| !parameters.is_object()) {
            return Err(Failure::new(format!(
                "`{place}` is {parameters}; it must be an object, or null"
            ))
            .into());
        }
        let kind = KINDS.iter().find(|kind| parameters.is_some_and(|of| of.get(**kind).is_some()));
        if let Some(kind) = kind {
            let failure = Failure::new(format!(
                "`{place}` has an object `{kind}`: rotary positions by kind of layer, which {} does not have",
                self.family.model_type
            ));
            return Err(failure.hint(ANOTHER_MODEL).into());
        }
        let inner = parameters.map(Keys);
        let with_theta = inner.as_ref().filter(|inner| inner.given("rope_theta").is_some());
        let (keys, key) = match with_theta {
            Some(inner) => (inner, "rope_theta"),
            None => (self.config, outside),
        };
        let theta = keys
            .number(key, Some(default), |theta| theta > 1.0 && theta <= LARGEST_ROPE)
            .map_err(|value| {
            Failure::new(format!(
                "`{key}` is {value}; it must be a number above 1, and up to {LARGEST_ROPE:e}"
            ))
        })?;
        let dims = self.dims(inner.as_ref())?;
        let scaling = match &inner {
            None => RopeScaling::Default,
            Some(inner) => self.scaling(inner, place, dims)?,
        };
        Ok(Rope { theta, scaling, dims })
    }

    /// The elements of a head that are rotated.
    fn dims(&self, inner: Option<&Keys<'_>>) -> Result<usize> {
        if self.family.rotation != Rotation::Partial {
            return Ok(self.head_dim);
        }
        let key = "partial_rotary_factor";
        let keys = inner.filter(|inner| inner.given(key).is_some()).unwrap_or(self.config);
        let share = keys.number(key, Some(1.0), |share| share > 0.0 && share <= 1.0);
        let share = share.map_err(|value| {
            Failure::new(format!("`{key}` is {value}; it must be a number above 0, and up to 1"))
        })?;
        let dims = (self.head_dim as f64 * share) as usize;
        match dims % 2 {
            0 if dims > 0 => Ok(dims),
            _ => Err(Failure::new(format!(
                "`{key}` {share} of `head_dim` {} is {dims}; rotary positions need pairs",
                self.head_dim
            ))
            .into()),
        }
    }

    fn scaling(&self, keys: &Keys<'_>, place: &str, dims: usize) -> Result<RopeScaling> {
        let number = |key: &str, default: Option<f64>, least: f64| {
            let is_within = |value| (least..=LARGEST_ROPE).contains(&value);
            let number = keys.number(key, default, is_within).map_err(|value| {
                Failure::new(format!(
                    "`{place}.{key}` is {value}; it must be a number from {least} to {LARGEST_ROPE:e}"
                ))
            });
            Ok(number?)
        };
        // A factor below 1 would shrink the context. transformers calls it invalid.
        let factor = || number("factor", None, 1.0);
        let name = match keys.given("rope_type").or_else(|| keys.given("type")) {
            None => "default",
            // The first name of the published models.
            Some(Value::String(name)) if name == "su" => "longrope",
            Some(Value::String(name)) => name,
            Some(other) => {
                return Err(Failure::new(format!(
                    "the type of `{place}` is {other}; it must be a name"
                ))
                .into());
            }
        };
        if !self.family.rope_types.contains(&name) {
            return Err(Failure::new(format!("rotary scaling `{name}` is not supported"))
                .detail(format!("supported: {}", self.family.rope_types.join(", ")))
                .hint(ANOTHER_MODEL)
                .into());
        }
        Ok(match name {
            "linear" => RopeScaling::Linear { factor: factor()? },
            "dynamic" => {
                RopeScaling::Dynamic { factor: factor()?, max_position_embeddings: self.positions }
            }
            "llama3" => {
                // As small as a ratio of wavelengths can sensibly be.
                let frequency = |key| number(key, None, 1e-6);
                let (low, high) = (frequency("low_freq_factor")?, frequency("high_freq_factor")?);
                // Compared as f32: a later division is by their difference.
                if low as f32 >= high as f32 {
                    return Err(Failure::new(format!(
                        "`{place}`: low_freq_factor {low} must be smaller than high_freq_factor {high}"
                    ))
                    .into());
                }
                RopeScaling::Llama3 {
                    factor: factor()?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_max_position_embeddings: self.original_length(keys)?,
                }
            }
            "yarn" => self.yarn(keys, &number)?,
            "longrope" => self.longrope(keys, place, dims, &number)?,
            _ => RopeScaling::Default,
        })
    }

    /// The context the model was trained with. A key outside the object counts before its own.
    fn original_length(&self, keys: &Keys<'_>) -> Result<usize> {
        let key = "original_max_position_embeddings";
        match self.config.given(key) {
            Some(_) => self.config.size(key, None),
            None => keys.size(key, Some(self.positions)),
        }
    }

    /// Ratio of the new context length to the trained context length, which Phi-3 does not give.
    fn extension(&self, keys: &Keys<'_>, original: usize, number: ReadNumber<'_>) -> Result<f64> {
        match keys.given("factor") {
            Some(_) => number("factor", None, 1.0),
            None => Ok(self.positions as f64 / original as f64),
        }
    }

    fn yarn(&self, keys: &Keys<'_>, number: ReadNumber<'_>) -> Result<RopeScaling> {
        let original = self.original_length(keys)?;
        let factor = self.extension(keys, original, number)?;
        let magnitude = |scale: f64| match factor > 1.0 {
            true => 0.1 * scale * factor.ln() + 1.0,
            false => 1.0,
        };
        let mut by_default = magnitude(1.0);
        if let (Some(_), Some(_)) = (keys.given("mscale"), keys.given("mscale_all_dim")) {
            let scales = [number("mscale", None, 0.0)?, number("mscale_all_dim", None, 0.0)?];
            if scales.iter().all(|scale| *scale > 0.0) {
                by_default = magnitude(scales[0]) / magnitude(scales[1]);
            }
        }
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast: number("beta_fast", Some(32.0), 1e-6)?,
            beta_slow: number("beta_slow", Some(1.0), 1e-6)?,
            truncate: keys.flag("truncate", true)?,
            attention_factor: number("attention_factor", Some(by_default), 1e-6)?,
        })
    }

    fn longrope(
        &self,
        keys: &Keys<'_>,
        place: &str,
        dims: usize,
        number: ReadNumber<'_>,
    ) -> Result<RopeScaling> {
        let original = self.original_length(keys)?;
        let factor = self.extension(keys, original, number)?;
        let by_default = match factor > 1.0 && original > 1 {
            true => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
            false => 1.0,
        };
        Ok(RopeScaling::Longrope {
            short_factor: divisors(keys, place, "short_factor", dims)?,
            long_factor: divisors(keys, place, "long_factor", dims)?,
            original_max_position_embeddings: original,
            attention_factor: number("attention_factor", Some(by_default), 1e-6)?,
        })
    }
}

/// A list with a divisor for every pair of rotated elements.
fn divisors(keys: &Keys<'_>, place: &str, key: &str, dims: usize) -> Result<Vec<f64>> {
    let refused = |found: String| {
        Failure::new(format!("`{place}.{key}` {found}")).detail(format!(
            "expected: a list of {} numbers from 1e-6 to {LARGEST_ROPE:e}, one per pair of rotated elements",
            dims / 2
        ))
    };
    let list = keys.given(key).ok_or_else(|| refused("is missing".to_owned()))?;
    let list = list.as_array().ok_or_else(|| refused("is no list".to_owned()))?;
    if list.len() != dims / 2 {
        return Err(refused(format!("is a list of {}", list.len())).into());
    }
    let divisors = list.iter().enumerate().map(|(at, value)| {
        let number = value.as_f64().filter(|number| (1e-6..=LARGEST_ROPE).contains(number));
        Ok(number.ok_or_else(|| refused(format!("has {value} at index {at}")))?)
    });
    divisors.collect()
}
