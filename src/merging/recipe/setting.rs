//! The values of a parameter over the tensors of a model: scalars, gradients over depth, filters on names.
//!
//! With the points v₀ … v₍ₙ₋₁₎ and the depth t of a layer in its slice (0 first, 1 last),
//!
//! ```text
//! x = t · (n − 1),   i = ⌊x⌋,   f = x − i
//! value = (1 − f) · vᵢ + f · vᵢ₊₁
//! ```
//!
//! in f64. A switch takes vᵢ. One point is a scalar. The first case counts whose filter is part of the tensor's name; a case without a
//! filter, or with `*`, takes every tensor. If no case of a setting matches, a wider scope decides. All of this is mergekit's
//! `evaluate_setting`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::parameter::Parameter;
use super::place::{Place, Placed};
use crate::failure::Failure;

/// The values of a parameter in a scope.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The first case that takes a tensor gives its value. Never empty.
    pub cases: Vec<Case>,
}

/// Values for the tensors whose names contain the filter.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// A part of the name; `None` takes every tensor.
    pub filter: Option<String>,
    /// Points over depth, equally spaced from the first layer of a slice to its last. Never empty.
    pub points: Vec<f64>,
}

impl Setting {
    /// The same value for all tensors.
    pub fn scalar(value: f64) -> Self {
        Self { cases: vec![Case { filter: None, points: vec![value] }] }
    }

    /// Returns the value for a tensor at depth `t` (0..=1), or nothing where no filter matches.
    pub fn at(&self, tensor: &str, t: f64, is_switch: bool) -> Option<f64> {
        let case = self.cases.iter().find(|case| match &case.filter {
            Some(filter) => tensor.contains(filter.as_str()),
            None => true,
        })?;
        Some(case.at(t, is_switch))
    }
}

impl Case {
    fn at(&self, t: f64, is_switch: bool) -> f64 {
        let last = self.points.len() - 1;
        let x = t * last as f64;
        let i = (x as usize).min(last);
        if is_switch {
            return self.points[i];
        }
        let f = x - i as f64;
        (1.0 - f) * self.points[i] + f * self.points[(i + 1).min(last)]
    }
}

/// Refuses a value outside its parameter's range with a reason.
pub(super) fn check_range(parameter: Parameter, value: f64) -> Result<(), String> {
    let (name, range) = (parameter.name(), parameter.range());
    if range.contains(&value) {
        return Ok(());
    }
    if !value.is_finite() {
        return Err(format!("`{name}` is {value}; it must be a finite number"));
    }
    Err(format!("`{name}` is {value}; it lies between {} and {}", range.start(), range.end()))
}

/// A number or a switch.
#[derive(Deserialize)]
#[serde(untagged)]
enum PointForm {
    Number(f64),
    Switch(bool),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseForm {
    filter: Option<String>,
    value: OneOrMore<PointForm>,
}

/// A setting as a recipe writes it.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number (finite, decimal), true, false, a list of them, or a list of {filter: TEXT, value: VALUE}"
)]
enum SettingForm {
    Points(OneOrMore<PointForm>),
    Cases(OneOrMore<CaseForm>),
}

impl<T> OneOrMore<T> {
    fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(item) => vec![item],
            Self::More(items) => items,
        }
    }
}

impl SettingForm {
    /// The cases of a parameter, or the reason against them.
    fn cases(self, parameter: Parameter) -> Result<Vec<Case>, String> {
        let cases = match self {
            Self::Points(value) => vec![CaseForm { filter: None, value }],
            Self::Cases(cases) => cases.into_vec(),
        };
        let case = |case: CaseForm| {
            let points = case.value.into_vec().into_iter().map(|point| value(parameter, &point));
            let points: Vec<f64> = points.collect::<Result<_, _>>()?;
            if points.is_empty() {
                return Err(format!("`{}` is an empty list", parameter.name()));
            }
            Ok(Case { filter: case.filter.filter(|filter| filter != "*"), points })
        };
        cases.into_iter().map(case).collect()
    }
}

/// The value of a point, or the reason against it.
fn value(parameter: Parameter, point: &PointForm) -> Result<f64, String> {
    let name = parameter.name();
    match *point {
        PointForm::Switch(is_on) if parameter.is_switch() => Ok(f64::from(u8::from(is_on))),
        PointForm::Switch(is_on) => Err(format!("`{name}` must be a number, found `{is_on}`")),
        // mergekit takes 0 and 1 for a switch.
        PointForm::Number(number) if parameter.is_switch() && ![0.0, 1.0].contains(&number) => {
            Err(format!("`{name}` must be true or false, found `{number}`"))
        }
        PointForm::Number(number) => check_range(parameter, number).map(|()| number),
    }
}

/// The settings of a scope, by parameter.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(try_from = "ParametersForm")]
pub struct Parameters(BTreeMap<Parameter, Placed<Setting>>);

/// The settings of a scope as a recipe writes them; nothing is none.
type ParametersForm = Option<BTreeMap<Parameter, Placed<SettingForm>>>;

impl TryFrom<ParametersForm> for Parameters {
    type Error = Failure;

    fn try_from(forms: ParametersForm) -> Result<Self, Failure> {
        let setting = |(parameter, Placed { place, value }): (Parameter, Placed<SettingForm>)| {
            let cases = value.cases(parameter).map_err(|reason| place.failure(reason))?;
            Ok((parameter, Placed { place, value: Setting { cases } }))
        };
        forms.unwrap_or_default().into_iter().map(setting).collect::<Result<_, _>>().map(Self)
    }
}

impl Parameters {
    /// The setting of a parameter.
    pub fn get(&self, parameter: Parameter) -> Option<&Placed<Setting>> {
        self.0.get(&parameter)
    }

    /// Sets a parameter.
    pub fn set(&mut self, parameter: Parameter, setting: Placed<Setting>) {
        self.0.insert(parameter, setting);
    }

    /// Keeps the settings that `keeps` returns true for.
    pub(super) fn retain(&mut self, mut keeps: impl FnMut(Parameter, &Place) -> bool) {
        self.0.retain(|parameter, setting| keeps(*parameter, &setting.place));
    }

    /// All settings, ordered by parameter.
    pub fn iter(&self) -> impl Iterator<Item = (Parameter, &Placed<Setting>)> {
        self.0.iter().map(|(parameter, setting)| (*parameter, setting))
    }

    /// True for a scope that sets nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn setting(cases: &[(Option<&str>, &[f64])]) -> Setting {
        let cases = cases.iter().map(|(filter, points)| Case {
            filter: filter.map(str::to_string),
            points: points.to_vec(),
        });
        Setting { cases: cases.collect() }
    }

    #[test]
    fn a_gradient_is_linear_between_its_points() {
        let gradient = setting(&[(None, &[0.9, 0.3, 0.6])]);
        let at = |t| gradient.at("x", t, false).unwrap();
        assert_eq!((at(0.0), at(0.5), at(1.0)), (0.9, 0.3, 0.6));
        // x = 0.25 · 2 = 0.5: halfway from 0.9 to 0.3; x = 1.5: halfway from 0.3 to 0.6.
        assert_eq!(at(0.25), 0.5 * 0.9 + 0.5 * 0.3);
        assert_eq!(at(0.75), 0.5 * 0.3 + 0.5 * 0.6);
        // A switch takes the point before: x = 1.5 is point 1.
        assert_eq!(gradient.at("x", 0.75, true), Some(0.3));
        assert_eq!(setting(&[(None, &[0.7])]).at("x", 0.4, false), Some(0.7));
    }

    #[test]
    fn the_first_matching_filter_counts_and_none_says_nothing() {
        let setting = setting(&[
            (Some("self_attn"), &[1.0]),
            (Some("q_proj"), &[2.0]),
            (Some("mlp"), &[3.0]),
        ]);
        let at = |name| setting.at(name, 0.0, false);
        assert_eq!(at("model.layers.0.self_attn.q_proj.weight"), Some(1.0));
        assert_eq!(at("model.layers.0.mlp.up_proj.weight"), Some(3.0));
        assert_eq!(at("model.norm.weight"), None);
    }

    proptest! {
        #[test]
        fn a_gradient_stays_between_its_neighbours(
            points in prop::collection::vec(-2.0..2.0f64, 1..9),
            t in 0.0..=1.0f64,
        ) {
            let value = setting(&[(None, &points)]).at("x", t, false).unwrap();
            let x = t * (points.len() - 1) as f64;
            let near: Vec<f64> = points
                .iter()
                .enumerate()
                .filter(|(at, _)| (*at as f64 - x).abs() < 1.0)
                .map(|(_, point)| *point)
                .collect();
            let low = near.iter().copied().fold(f64::INFINITY, f64::min);
            let high = near.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            // The sum of two products rounds three times.
            prop_assert!(value >= low - 1e-15 * 4.0 && value <= high + 1e-15 * 4.0);
        }
    }
}
