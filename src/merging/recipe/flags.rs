//! A recipe from flags of the command line: `--base B --model E1 --model E2 --method ties --density 0.5 --weight 0.6,0.4`.

use anyhow::Result;
use clap::Args;

use super::check::not_of;
use super::contents::{MergeInputs, ModelInput, Recipe, declaration};
use super::model_spec::ModelSpec;
use super::parameter::{Declaration, Parameter, WhenMissing};
use super::place::{Place, Placed};
use super::setting::{Parameters, Setting, check_range};
use super::tokenizer::{TokenizerRecipe, TokenizerSource};
use crate::failure::Failure;
use crate::linalg::StoredDtype;

/// The flags of a merge without a file. A list is empty, or holds a single value for all models, or a value per model.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Recipe")]
pub struct FlagRecipe {
    /// Base model
    ///
    /// A folder or a hub id, MODEL@REVISION or MODEL+ADAPTER.
    #[arg(long, value_name = "MODEL", conflicts_with = "config")]
    pub base: Option<String>,

    /// Model to merge; repeated for every model
    ///
    /// A folder or a hub id. MODEL+ADAPTER is a model with a LoRA adapter of peft, which is added tensor by tensor.
    #[arg(long = "model", value_name = "MODEL", conflicts_with = "config")]
    pub models: Vec<String>,

    /// `--method`
    #[arg(long, value_name = "METHOD", conflicts_with = "config")]
    pub method: Option<String>,

    /// Weights of the models [default: 1]
    ///
    /// One for all, or one per model.
    #[arg(
        long,
        value_name = "W,...",
        value_delimiter = ',',
        allow_negative_numbers = true,
        conflicts_with = "config"
    )]
    pub weight: Vec<f64>,

    /// Shares of the differences that are kept [default: 1]
    ///
    /// One for all, or one per model.
    #[arg(long, value_name = "D,...", value_delimiter = ',', conflicts_with = "config")]
    pub density: Vec<f64>,

    /// Factor of the merged difference from the base [default: 1]
    #[arg(
        hide_short_help = true,
        long,
        value_name = "X",
        allow_negative_numbers = true,
        conflicts_with = "config"
    )]
    pub lambda: Option<f64>,

    /// Divide by the sum of the weights, or not [default: as mergekit does for the method]
    #[arg(hide_short_help = true, long, value_name = "BOOL", conflicts_with = "config")]
    pub normalize: Option<bool>,

    /// Give trimmed differences their norm back, or not [default: as mergekit does for the method]
    #[arg(hide_short_help = true, long, value_name = "BOOL", conflicts_with = "config")]
    pub rescale: Option<bool>,

    /// Position between the base (0) and the other model (1), for slerp; reach of nearswap
    #[arg(hide_short_help = true, long, value_name = "T", conflicts_with = "config")]
    pub t: Option<f64>,

    /// Shares of the largest differences that breadcrumbs removes [default: 0.01]
    #[arg(
        hide_short_help = true,
        long,
        value_name = "G,...",
        value_delimiter = ',',
        conflicts_with = "config"
    )]
    pub gamma: Vec<f64>,

    /// Half the spread of della's probabilities [default: 0.15]
    #[arg(
        hide_short_help = true,
        long,
        value_name = "E,...",
        value_delimiter = ',',
        conflicts_with = "config"
    )]
    pub epsilon: Vec<f64>,

    /// Dtype of the output [default: the dtype of the inputs]
    ///
    /// f32 where the dtypes of the inputs differ. The arithmetic is f32 in any case, and rounded once.
    #[arg(long, value_name = "DTYPE", conflicts_with = "config")]
    pub out_dtype: Option<StoredDtype>,

    /// Vocabulary of the output
    ///
    /// Needed where the models have different vocabularies.
    #[arg(long = "vocab", value_name = "TOKENS")]
    pub tokenizer: Option<TokenizerSource>,
}

impl Recipe {
    /// Builds the recipe that flags describe.
    ///
    /// A method that needs no base model (`linear`) averages the models of `--model` alone, and leaves out `--base` unless `--model`
    /// repeats it. In a file, `base_model` always counts as a model, as in mergekit.
    ///
    /// # Errors
    /// Fails for a method that does not exist, a flag that the method does not have, a value out of range, a count of values that is
    /// neither 1 nor the number of models, and models that the method cannot have.
    pub fn from_flags(flags: FlagRecipe, methods: &[Declaration]) -> Result<Self> {
        let place = Place::Flags;
        let method = flags.method.as_ref().filter(|_| !flags.models.is_empty());
        let method = method.ok_or_else(|| {
            Failure::usage("there is nothing to merge")
                .detail("a merge has a recipe: a file, or --model and --method")
                .hint("prune merge ties.yml --save out, or see prune merge --help")
        })?;
        let declaration = declaration(method, methods, &place)?;
        let specs = flags.models.iter().map(|model| spec(model));
        let specs: Vec<ModelSpec> = specs.collect::<Result<_, _>>()?;
        let per_model = model_parameters(&flags, declaration, specs.len())?;
        let base = flags.base.as_deref().map(spec).transpose()?;
        let is_input =
            |base: &ModelSpec| declaration.base_model.is_subtracted() || specs.contains(base);
        let base_model = base.clone().filter(is_input);
        let tokenizer = flags.tokenizer.clone().map(|source| match (source, &base) {
            // The recipe does not name this base.
            (TokenizerSource::Base, Some(base)) if base_model.is_none() => {
                TokenizerSource::Model(base.clone())
            }
            (source, _) => source,
        });
        let inputs = specs.into_iter().zip(per_model);
        let inputs = inputs.map(|(model, parameters)| Placed {
            place: Place::Flags,
            value: ModelInput { model, parameters },
        });
        let recipe = Self {
            inputs: MergeInputs::Models(inputs.collect()),
            base_model,
            module_parameters: Parameters::default(),
            parameters: shared_parameters(&flags, declaration)?,
            merge_method: method.clone(),
            dtype: None,
            out_dtype: flags.out_dtype,
            tokenizer: tokenizer.map(TokenizerRecipe::of),
            chat_template: None,
            name: None,
            ignored: Vec::new(),
        };
        recipe.check(declaration)?;
        Ok(recipe)
    }
}

fn spec(text: &str) -> Result<ModelSpec, Failure> {
    text.parse().map_err(|failure| Failure { is_usage: true, ..failure })
}

/// The parameters of each of `count` models.
fn model_parameters(
    flags: &FlagRecipe,
    declaration: &Declaration,
    count: usize,
) -> Result<Vec<Parameters>, Failure> {
    let needs_weight = declaration.per_model.contains(&(Parameter::Weight, WhenMissing::Required));
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
                    "--{} has {} values for {}",
                    parameter.name(),
                    values.len(),
                    match count {
                        1 => "1 model".to_string(),
                        _ => format!("{count} models"),
                    }
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
    check_range(parameter, value).map_err(|reason| {
        let name = parameter.name();
        let example =
            if parameter.range().contains(&0.5) { 0.5 } else { *parameter.range().start() };
        // On the command line the parameter is a flag.
        let reason = reason.replacen(&format!("`{name}`"), &format!("--{name}"), 1);
        Place::Flags.failure(reason).hint(format!("use a value like --{name} {example}"))
    })?;
    parameters.set(parameter, Placed { place: Place::Flags, value: Setting::scalar(value) });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{methods, read};
    use super::*;

    fn model(text: &str) -> ModelSpec {
        text.parse().unwrap()
    }

    fn flags(method: &str, models: &[&str]) -> FlagRecipe {
        FlagRecipe {
            base: Some("base".into()),
            models: models.iter().map(|model| model.to_string()).collect(),
            method: Some(method.into()),
            ..FlagRecipe::default()
        }
    }

    #[test]
    fn flags_give_the_recipe_of_a_file() {
        let given = FlagRecipe {
            density: vec![0.5],
            weight: vec![0.6, 0.4],
            lambda: Some(1.0),
            normalize: Some(false),
            out_dtype: Some(StoredDtype::F32),
            tokenizer: Some(TokenizerSource::Base),
            ..flags("ties", &["a", "b+c"])
        };
        let recipe = Recipe::from_flags(given, &methods()).unwrap();
        let same = "merge_method: ties
base_model: base
models:
  - {model: a, parameters: {weight: 0.6, density: 0.5}}
  - {model: b+c, parameters: {weight: 0.4, density: 0.5}}
parameters: {lambda: 1, normalize: false}
out_dtype: float32
tokenizer_source: base
";
        assert_eq!(Ok(recipe), read(same));
    }

    #[test]
    fn weights_are_one_without_a_flag_and_a_base_is_no_average() {
        let recipe = Recipe::from_flags(flags("linear", &["base+lora"]), &methods()).unwrap();
        let same = "merge_method: linear\nmodels: [{model: base+lora, parameters: {weight: 1}}]\n";
        assert_eq!(Ok(recipe), read(same));
        let with_base = flags("linear", &["base", "a"]);
        let recipe = Recipe::from_flags(with_base, &methods()).unwrap();
        assert_eq!(recipe.base_model, Some(model("base")));
        assert_eq!(recipe.models().len(), 2);
        let vocabulary =
            FlagRecipe { tokenizer: Some(TokenizerSource::Base), ..flags("linear", &["a", "b"]) };
        let recipe = Recipe::from_flags(vocabulary, &methods()).unwrap();
        let tokenizer = recipe.tokenizer.unwrap();
        assert_eq!(tokenizer.source, TokenizerSource::Model(model("base")));
        // A method without weights gets none.
        let recipe = Recipe::from_flags(flags("model_stock", &["a", "b"]), &methods()).unwrap();
        let MergeInputs::Models(inputs) = &recipe.inputs else { panic!("models") };
        assert!(inputs.iter().all(|input| input.parameters.is_empty()));
    }

    #[test]
    fn flags_that_do_not_fit_are_refused_as_usage() {
        for (given, error) in [
            (flags("ties", &[]), "there is nothing to merge"),
            (flags("ram", &["a"]), "the method `ram` does not exist in this version"),
            (
                FlagRecipe { base: None, ..flags("ties", &["a"]) },
                "the method `ties` needs a base model\nhint: add --base MODEL",
            ),
            (
                FlagRecipe { weight: vec![1.0, 2.0, 3.0], ..flags("ties", &["a", "b"]) },
                "--weight has 3 values for 2 models",
            ),
            (
                FlagRecipe { density: vec![0.5], ..flags("linear", &["a"]) },
                "the method `linear` has no parameter `density`",
            ),
            (
                FlagRecipe { density: vec![1.5], ..flags("ties", &["a"]) },
                "--density is 1.5; it lies between 0 and 1",
            ),
            (
                FlagRecipe { lambda: Some(f64::NAN), ..flags("ties", &["a"]) },
                "--lambda is NaN; it must be a finite number",
            ),
            (
                FlagRecipe { t: Some(0.5), ..flags("ties", &["a"]) },
                "the method `ties` has no parameter `t`",
            ),
            (flags("ties", &["a+b+c"]), "`a+b+c` does not name a model"),
            (flags("ties", &["a", "a"]), "`a` is merged with itself"),
        ] {
            let refused = Recipe::from_flags(given, &methods()).unwrap_err();
            let failure = refused.downcast_ref::<crate::failure::Failure>().unwrap();
            assert!(failure.is_usage, "{failure}");
            assert!(failure.to_string().contains(error), "{failure}");
        }
    }
}
