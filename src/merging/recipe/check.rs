//! The checks of a recipe against the declaration of its method, before any file of a model is opened.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use super::contents::{MergeInputs, PlacedSlice, Recipe, SliceRecipe, SliceSource};
use super::model_spec::ModelSpec;
use super::parameter::{BaseModel, Declaration, Declared, Parameter};
use super::place::{Place, Placed, listed};
use super::setting::Parameters;
use crate::failure::Failure;

impl Recipe {
    /// Takes out the parameters that the method does not read, and warns of each: mergekit ignores them. In the scope of a model, they
    /// include values for all models.
    pub(super) fn leave_out_ignored(&mut self, declaration: &Declaration) {
        let Self { module_parameters, parameters, inputs, ignored, .. } = self;
        for scope in [module_parameters, parameters] {
            ignored.extend(scope.leave_out(declaration, false));
        }
        match inputs {
            MergeInputs::Models(inputs) => {
                for input in inputs {
                    ignored.extend(input.value.parameters.leave_out(declaration, true));
                }
            }
            MergeInputs::Slices(slices) => {
                for slice in slices {
                    ignored.extend(slice.value.parameters.leave_out(declaration, false));
                    for source in &mut slice.value.sources {
                        ignored.extend(source.value.parameters.leave_out(declaration, true));
                    }
                }
            }
        }
    }

    /// Refuses models and slices that the method cannot have.
    pub(super) fn check(&self, declaration: &Declaration) -> Result<(), Failure> {
        for slice in self.slices(1).iter() {
            self.check_models(declaration, slice)?;
            check_lengths(slice)?;
        }
        Ok(())
    }

    /// The slices of the output. `models` form a single slice over `num_hidden_layers` layers, with the base model at the end if it is
    /// not in the list.
    pub(super) fn slices(&self, num_hidden_layers: usize) -> Cow<'_, [PlacedSlice]> {
        let inputs = match &self.inputs {
            MergeInputs::Slices(slices) => return Cow::Borrowed(slices),
            MergeInputs::Models(inputs) => inputs,
        };
        let place = inputs.first().map_or(&Place::Flags, |input| &input.place);
        let source = |place: &Place, model: &ModelSpec, parameters: &Parameters| Placed {
            place: place.clone(),
            value: SliceSource {
                model: model.clone(),
                layer_range: 0..num_hidden_layers,
                parameters: parameters.clone(),
            },
        };
        let mut sources: Vec<_> = inputs
            .iter()
            .map(|input| source(&input.place, &input.model, &input.parameters))
            .collect();
        if let Some(base) = &self.base_model
            && inputs.iter().all(|input| input.model != *base)
        {
            sources.push(source(place, base, &Parameters::default()));
        }
        let value = SliceRecipe { sources, base_model: None, parameters: Parameters::default() };
        Cow::Owned(vec![Placed { place: place.clone(), value }])
    }

    /// The base model of a slice.
    pub(super) fn base_of<'a>(&'a self, slice: &'a SliceRecipe) -> Option<&'a ModelSpec> {
        slice.base_model.as_ref().or(self.base_model.as_ref())
    }

    fn check_models(&self, declaration: &Declaration, slice: &PlacedSlice) -> Result<(), Failure> {
        let method = declaration.name;
        let mut models = BTreeSet::new();
        for source in &slice.sources {
            if !models.insert(&source.model) {
                return Err(source
                    .place
                    .failure(format!("`{}` is merged with itself", source.model))
                    .hint("name each model once; a larger `weight` lets a model count more"));
            }
        }
        let base = self.base_of(slice);
        let needs_base = declaration.base_model == BaseModel::Required;
        if needs_base || (declaration.base_model.is_subtracted() && base.is_some()) {
            let Some(base) = base else {
                let hint = match slice.place {
                    Place::Line(..) => "add `base_model: MODEL`",
                    Place::Flags => "add --base MODEL",
                };
                return Err(slice
                    .place
                    .failure(format!("the method `{method}` needs a base model"))
                    .hint(hint));
            };
            if !models.contains(base) {
                return Err(slice
                    .place
                    .failure(format!("the base model `{base}` is no source of this slice"))
                    .hint("add it with the layer range of the others"));
            }
        }
        let is_origin = declaration.base_model == BaseModel::Origin && base.is_some();
        let count = models.len() - usize::from(is_origin);
        if declaration.models.contains(&count) {
            return Ok(());
        }
        let beside = if is_origin { " beside the base model" } else { "" };
        let failure = slice.place.failure(format!(
            "the method `{method}` merges {} models{beside}, found {count}",
            shown(&declaration.models)
        ));
        let hint = match count < *declaration.models.start() {
            true => "add a model, or choose another method: docs/merging.md compares them",
            false => {
                "leave models out, or choose a method of several models, like `linear` or `multislerp`"
            }
        };
        let models: Vec<String> = models.iter().map(ToString::to_string).collect();
        Err(failure.detail(listed(models.iter().map(String::as_str))).hint(hint))
    }
}

/// `2`, `at least 3` or `1 to 4`.
fn shown(models: &RangeInclusive<usize>) -> String {
    match (*models.start(), *models.end()) {
        (start, end) if start == end => start.to_string(),
        (start, usize::MAX) => format!("at least {start}"),
        (start, end) => format!("{start} to {end}"),
    }
}

fn check_lengths(slice: &SliceRecipe) -> Result<(), Failure> {
    let Some(first) = slice.sources.first() else {
        return Ok(());
    };
    match slice.sources.iter().find(|source| source.layer_range.len() != first.layer_range.len()) {
        None => Ok(()),
        Some(other) => Err(other.place.failure(format!(
            "the sources of a slice have different numbers of layers: {} of `{}`, {} of `{}`",
            first.layer_range.len(),
            first.model,
            other.layer_range.len(),
            other.model
        ))),
    }
}

impl Parameters {
    /// Takes out what the method does not read in this scope, and returns a warning for each.
    fn leave_out(&mut self, declaration: &Declaration, is_of_model: bool) -> Vec<String> {
        let mut warnings: Vec<String> = Vec::new();
        let method = declaration.name;
        self.retain(|parameter, place| {
            let is_shared = is_in(parameter, declaration.shared);
            if is_in(parameter, declaration.per_model) || (is_shared && !is_of_model) {
                return true;
            }
            let name = parameter.name();
            let reason = match is_shared {
                true => "in the scope of a model: move it to the `parameters` of the slice or of the recipe",
                false => "which is a parameter of other methods",
            };
            warnings.push(format!("{place}: the method `{method}` ignores `{name}`, {reason}"));
            false
        });
        warnings
    }
}

/// True for a parameter of the list, and for `int8_mask`, which changes no result.
fn is_in(parameter: Parameter, declared: &[Declared]) -> bool {
    parameter == Parameter::Int8Mask || declared.iter().any(|(of, _)| *of == parameter)
}

/// The refusal of a parameter that a method does not have.
pub(super) fn not_of(declaration: &Declaration, parameter: Parameter, place: &Place) -> Failure {
    let (method, name) = (declaration.name, parameter.name());
    let known: Vec<&str> = declaration
        .per_model
        .iter()
        .chain(declaration.shared)
        .map(|(parameter, _)| parameter.name())
        .collect();
    let hint = match place {
        Place::Line(..) => format!("leave `{name}` out"),
        Place::Flags => format!("leave --{name} out"),
    };
    let failure = place.failure(format!("the method `{method}` has no parameter `{name}`"));
    let failure = failure.hint(hint);
    match known.as_slice() {
        [] => failure.detail("it has no parameters"),
        _ => failure.detail(format!("it has {}", listed(known.iter().copied()))),
    }
}
