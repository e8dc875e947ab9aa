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

use super::fields::{Fields, entries, unknown};
use super::parameter::Parameter;
use super::place::Place;
use super::yaml::{Content, Node};
use crate::failure::Failure;

/// The values of a parameter in a scope.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Its place in the recipe.
    pub place: Place,
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
    pub fn scalar(value: f64, place: Place) -> Self {
        let case = Case { filter: None, points: vec![value] };
        Self { place, cases: vec![case] }
    }

    /// Returns the value for a tensor at depth `t` (0..=1), or nothing where no filter matches.
    pub fn at(&self, tensor: &str, t: f64, is_switch: bool) -> Option<f64> {
        let case = self.cases.iter().find(|case| match &case.filter {
            Some(filter) => tensor.contains(filter.as_str()),
            None => true,
        })?;
        Some(case.at(t, is_switch))
    }

    /// Reads a scalar, a list of points, a case or a list of cases.
    fn from_node(parameter: Parameter, node: Node) -> Result<Self, Failure> {
        let place = node.place.clone();
        let cases = match node.content {
            Content::Map(_) => vec![Case::from_node(parameter, node)?],
            Content::List(items) if items.iter().any(Node::is_map) => {
                let cases = items.into_iter();
                let cases = cases.map(|item| Case::from_node(parameter, item));
                cases.collect::<Result<_, _>>()?
            }
            _ => vec![Case { filter: None, points: points(parameter, node)? }],
        };
        Ok(Self { place, cases })
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

    fn from_node(parameter: Parameter, node: Node) -> Result<Self, Failure> {
        let mut fields = Fields::open(node, "a filter", &["filter", "value"])?;
        let filter = fields.take("filter");
        let filter = filter.map(|filter| filter.text("`filter`")).transpose()?;
        Ok(Self {
            filter: filter.filter(|filter| filter != "*"),
            points: points(parameter, fields.require("value", "a filter")?)?,
        })
    }
}

impl Node {
    fn is_map(&self) -> bool {
        matches!(self.content, Content::Map(_))
    }
}

/// Reads a scalar or a list of scalars within the parameter's range.
fn points(parameter: Parameter, node: Node) -> Result<Vec<f64>, Failure> {
    let what = format!("`{}`", parameter.name());
    let point = |node: &Node| {
        let value = if parameter.is_switch() {
            // mergekit takes 0 and 1 for a switch.
            let number = node.scalar().and_then(|scalar| scalar.number());
            match number.filter(|number| [0.0, 1.0].contains(number)) {
                Some(number) => number,
                None => f64::from(u8::from(node.switch(&what)?)),
            }
        } else {
            node.number(&what)?
        };
        check_range(parameter, value, &node.place)?;
        Ok(value)
    };
    match &node.content {
        Content::List(items) if items.is_empty() => {
            Err(node.wrong(&what, "a value or a list of values"))
        }
        Content::List(items) => items.iter().map(point).collect(),
        _ => Ok(vec![point(&node)?]),
    }
}

/// Refuses a value outside its parameter's range.
pub(super) fn check_range(parameter: Parameter, value: f64, place: &Place) -> Result<(), Failure> {
    let (name, range) = (parameter.name(), parameter.range());
    if range.contains(&value) {
        return Ok(());
    }
    if !value.is_finite() {
        return Err(place.failure(format!("`{name}` is {value}; it must be a finite number")));
    }
    let (start, end) = (range.start(), range.end());
    Err(place.failure(format!("`{name}` is {value}; it lies between {start} and {end}")))
}

/// The settings of a scope, by parameter.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Parameters(BTreeMap<Parameter, Setting>);

impl Parameters {
    /// The setting of a parameter.
    pub fn get(&self, parameter: Parameter) -> Option<&Setting> {
        self.0.get(&parameter)
    }

    /// Sets a parameter.
    pub fn set(&mut self, parameter: Parameter, setting: Setting) {
        self.0.insert(parameter, setting);
    }

    /// All settings, ordered by parameter.
    pub fn iter(&self) -> impl Iterator<Item = (Parameter, &Setting)> {
        self.0.iter().map(|(parameter, setting)| (*parameter, setting))
    }

    /// True for a scope that sets nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads the map under `parameters`.
    pub(super) fn from_node(node: Option<Node>) -> Result<Self, Failure> {
        let mut parameters = Self::default();
        let Some(node) = node else {
            return Ok(parameters);
        };
        for entry in entries(node, "`parameters`")? {
            let Some(parameter) = Parameter::named(&entry.key) else {
                let message = format!("no parameter is called `{}`", entry.key);
                let known = Parameter::ALL.map(Parameter::name);
                return Err(unknown(&entry.place, &message, &entry.key, &known));
            };
            parameters.set(parameter, Setting::from_node(parameter, entry.value)?);
        }
        Ok(parameters)
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
        Setting { place: Place::Flags, cases: cases.collect() }
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
