//! A recipe from flags of the command line: `--base B --model E1 --model E2 --method ties --density 0.5 --weight 0.6,0.4`.

use anyhow::Result;

use super::check::not_of;
use super::contents::{Inputs, MergeDtype, ModelInput, Recipe, declaration};
use super::model_spec::ModelSpec;
use super::parameter::{BaseModel, Declaration, Otherwise, Parameter};
use super::place::Place;
use super::setting::{Parameters, Setting, check_range};
use super::tokenizer::{TokenizerRecipe, TokenizerSource};
use crate::failure::Failure;

/// The flags of a merge without a file. Lists hold no value, one for all models, or one per model.
#[derive(Debug, Clone, Default)]
pub struct FlagRecipe {
    /// `--base`
    pub base: Option<String>,
    /// `--model`, once or more.
    pub models: Vec<String>,
    /// `--method`
    pub method: String,
    /// `--density`
    pub density: Vec<f64>,
    /// `--weight`; 1 for every model where the method needs weights.
    pub weight: Vec<f64>,
    /// `--gamma`
    pub gamma: Vec<f64>,
    /// `--epsilon`
    pub epsilon: Vec<f64>,
    /// `--lambda`
    pub lambda: Option<f64>,
    /// `--t`
    pub t: Option<f64>,
    /// `--normalize`
    pub normalize: Option<bool>,
    /// `--rescale`
    pub rescale: Option<bool>,
    /// `--dtype`
    pub dtype: Option<MergeDtype>,
    /// `--out-dtype`
    pub out_dtype: Option<MergeDtype>,
    /// The vocabulary of the output.
    pub tokenizer: Option<TokenizerSource>,
}

impl Recipe {
    /// Builds the recipe that flags describe.
    ///
    /// A method without a base model (`linear`) averages the models alone: `--base` is not one of them then, unless `--model` repeats
    /// it. In a file, `base_model` is always one of the models, as in mergekit.
    ///
    /// # Errors
    /// Fails for a method that does not exist, a flag that the method does not have, a value out of range, another count of values than
    /// one or one per model, and models that the method cannot have.
    pub fn from_flags(flags: FlagRecipe, methods: &[Declaration]) -> Result<Self> {
        let place = Place::Flags;
        let declaration = declaration(&flags.method, methods, &place)?;
        let specs = flags.models.iter().map(|model| spec(model));
        let specs: Vec<ModelSpec> = specs.collect::<Result<_, _>>()?;
        if specs.is_empty() {
            return Err(place
                .failure("a merge needs models")
                .hint("add --model MODEL, once per model")
                .into());
        }
        let per_model = model_parameters(&flags, declaration, specs.len())?;
        let base = flags.base.as_deref().map(spec).transpose()?;
        let is_input = |base: &ModelSpec| {
            declaration.base_model == BaseModel::Required || specs.contains(base)
        };
        let base_model = base.clone().filter(is_input);
        let tokenizer = flags.tokenizer.clone().map(|source| match (source, &base) {
            // The recipe does not name this base.
            (TokenizerSource::Base, Some(base)) if base_model.is_none() => {
                TokenizerSource::Model(base.clone())
            }
            (source, _) => source,
        });
        let inputs = specs.into_iter().zip(per_model);
        let inputs = inputs.map(|(model, parameters)| ModelInput {
            place: Place::Flags,
            model,
            parameters,
        });
        let recipe = Self {
            inputs: Inputs::Models(inputs.collect()),
            base_model,
            module_parameters: Parameters::default(),
            parameters: shared_parameters(&flags, declaration)?,
            merge_method: flags.method,
            dtype: flags.dtype,
            out_dtype: flags.out_dtype,
            tokenizer: tokenizer.map(TokenizerRecipe::of),
            chat_template: None,
        };
        recipe.check(declaration)?;
        Ok(recipe)
    }
}

fn spec(text: &str) -> Result<ModelSpec, Failure> {
    text.parse().map_err(|failure| Failure {
        is_usage: true,
        ..failure
    })
}

/// The parameters of each of `count` models.
fn model_parameters(
    flags: &FlagRecipe,
    declaration: &Declaration,
    count: usize,
) -> Result<Vec<Parameters>, Failure> {
    let needs_weight = declaration
        .per_model
        .contains(&(Parameter::Weight, Otherwise::Required));
    let weight = match flags.weight.as_slice() {
        [] if needs_weight => &[1.0],
        given => given,
    };
    let mut per_model = vec![Parameters::default(); count];
    for (parameter, values) in [
        (Parameter::Weight, weight),
        (Parameter::Density, &flags.density),
        (Parameter::Gamma, &flags.gamma),
        (Parameter::Epsilon, &flags.epsilon),
    ] {
        if values.is_empty() {
            continue;
        }
        if ![1, count].contains(&values.len()) {
            return Err(Place::Flags
                .failure(format!(
                    "--{} has {} values for {count} models",
                    parameter.name(),
                    values.len()
                ))
                .hint("give one value for all models, or one per model in the order of --model"));
        }
        for (parameters, value) in per_model.iter_mut().zip(values.iter().cycle()) {
            set(parameters, declaration, parameter, *value)?;
        }
    }
    Ok(per_model)
}

/// The parameters of the whole recipe.
fn shared_parameters(flags: &FlagRecipe, declaration: &Declaration) -> Result<Parameters, Failure> {
    let switch = |is_on: Option<bool>| is_on.map(|is_on| f64::from(u8::from(is_on)));
    let mut parameters = Parameters::default();
    for (parameter, value) in [
        (Parameter::Lambda, flags.lambda),
        (Parameter::T, flags.t),
        (Parameter::Normalize, switch(flags.normalize)),
        (Parameter::Rescale, switch(flags.rescale)),
    ] {
        if let Some(value) = value {
            set(&mut parameters, declaration, parameter, value)?;
        }
    }
    Ok(parameters)
}

fn set(
    parameters: &mut Parameters,
    declaration: &Declaration,
    parameter: Parameter,
    value: f64,
) -> Result<(), Failure> {
    let mut declared = declaration.per_model.iter().chain(declaration.shared);
    if declared.all(|(of, _)| *of != parameter) {
        return Err(not_of(declaration, parameter, &Place::Flags));
    }
    check_range(parameter, value, &Place::Flags)?;
    parameters.set(parameter, Setting::scalar(value, Place::Flags));
    Ok(())
}
