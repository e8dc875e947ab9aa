//! Parameters of merge methods: their names in a recipe, and the values that a tensor gets.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::Deserialize;

/// A number that a recipe gives to a method. Switches are 0 or 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parameter {
    /// The factor of a model or of its difference from the base.
    Weight,
    /// The share of a difference that is kept.
    Density,
    /// The share of the largest differences that breadcrumbs leaves out.
    Gamma,
    /// Half the spread of the probabilities around the density.
    Epsilon,
    /// The factor of passthrough.
    Scale,
    /// Division by the sum of the weights.
    Normalize,
    /// Differences keep their norm after trimming.
    Rescale,
    /// The factor of the merged difference.
    Lambda,
    /// The position between two models, 0 at the base.
    T,
    /// An angle per row instead of an angle per tensor.
    FilterWise,
    /// nuslerp takes a whole tensor as one vector.
    NuslerpFlatten,
    /// nuslerp takes the columns of a tensor as vectors, and its rows otherwise.
    NuslerpRowWise,
    /// multislerp divides the weights by their sum.
    NormalizeWeights,
    /// The number that multislerp adds to norms.
    Eps,
    /// The share of the entries with the largest variance that sce keeps.
    SelectTopk,
    /// Steps of the search for a Karcher mean, at most.
    MaxIter,
    /// The norm of a step that ends the search for a Karcher mean.
    Tol,
    /// A smaller mask in mergekit; it changes no result and is accepted.
    Int8Mask,
}

impl Parameter {
    /// All parameters.
    pub const ALL: [Self; 18] = [
        Self::Weight,
        Self::Density,
        Self::Gamma,
        Self::Epsilon,
        Self::Scale,
        Self::Normalize,
        Self::Rescale,
        Self::Lambda,
        Self::T,
        Self::FilterWise,
        Self::NuslerpFlatten,
        Self::NuslerpRowWise,
        Self::NormalizeWeights,
        Self::Eps,
        Self::SelectTopk,
        Self::MaxIter,
        Self::Tol,
        Self::Int8Mask,
    ];

    /// The name in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Density => "density",
            Self::Gamma => "gamma",
            Self::Epsilon => "epsilon",
            Self::Scale => "scale",
            Self::Normalize => "normalize",
            Self::Rescale => "rescale",
            Self::Lambda => "lambda",
            Self::T => "t",
            Self::FilterWise => "filter_wise",
            Self::NuslerpFlatten => "nuslerp_flatten",
            Self::NuslerpRowWise => "nuslerp_row_wise",
            Self::NormalizeWeights => "normalize_weights",
            Self::Eps => "eps",
            Self::SelectTopk => "select_topk",
            Self::MaxIter => "max_iter",
            Self::Tol => "tol",
            Self::Int8Mask => "int8_mask",
        }
    }

    /// True for a parameter that is `true` or `false`.
    pub fn is_switch(self) -> bool {
        matches!(
            self,
            Self::Normalize
                | Self::Rescale
                | Self::FilterWise
                | Self::NuslerpFlatten
                | Self::NuslerpRowWise
                | Self::NormalizeWeights
                | Self::Int8Mask
        )
    }

    /// The values that make sense.
    pub fn range(self) -> RangeInclusive<f64> {
        match self {
            Self::Density | Self::Gamma | Self::Epsilon | Self::T | Self::SelectTopk => 0.0..=1.0,
            Self::Eps | Self::Tol => 0.0..=1.0,
            Self::MaxIter => 0.0..=10_000.0,
            _ if self.is_switch() => 0.0..=1.0,
            _ => f64::MIN..=f64::MAX,
        }
    }
}

/// The value of a parameter that a recipe does not name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WhenMissing {
    /// The recipe must name it.
    Required,
    /// The method does without.
    Absent,
    /// This value.
    Is(f64),
}

/// A parameter as a method declares it.
pub type Declared = (Parameter, WhenMissing);

/// The role of `base_model` in a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaseModel {
    /// The method needs a base model, and does not treat it as an expert.
    Required,
    /// The method takes differences from a base model if there is one, which is no expert then.
    Origin,
    /// The method treats the base like any model.
    Optional,
}

impl BaseModel {
    /// True if a base model is no expert.
    pub fn is_subtracted(self) -> bool {
        self != Self::Optional
    }
}

/// The inputs that a method declares.
#[derive(Debug, Clone, PartialEq)]
pub struct Declaration {
    /// `merge_method` in a recipe.
    pub name: &'static str,
    /// The role of the base model.
    pub base_model: BaseModel,
    /// Models of a slice, the base included; without a base that is an origin.
    pub models: RangeInclusive<usize>,
    /// Parameters with a value per model. A base model that differences are taken from has no values.
    pub per_model: &'static [Declared],
    /// Parameters with a value per tensor.
    pub shared: &'static [Declared],
}

/// Values by parameter.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParameterValues(BTreeMap<Parameter, f64>);

impl ParameterValues {
    /// The value, if the recipe or the declaration gives it.
    pub fn get(&self, parameter: Parameter) -> Option<f64> {
        self.0.get(&parameter).copied()
    }

    /// The value, or 0 if there is none.
    pub fn number(&self, parameter: Parameter) -> f64 {
        self.get(parameter).unwrap_or(0.0)
    }

    /// True for a switch that is on.
    pub fn is_on(&self, parameter: Parameter) -> bool {
        self.number(parameter) != 0.0
    }

    /// Sets a value.
    pub fn set(&mut self, parameter: Parameter, value: f64) {
        self.0.insert(parameter, value);
    }

    /// All values, ordered by parameter.
    pub fn iter(&self) -> impl Iterator<Item = (Parameter, f64)> + '_ {
        self.0.iter().map(|(parameter, value)| (*parameter, *value))
    }
}

impl FromIterator<(Parameter, f64)> for ParameterValues {
    fn from_iter<I: IntoIterator<Item = (Parameter, f64)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}
