//! A recipe as mergekit's YAML says it: [`Recipe`] and its parts, and how they are read.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use anyhow::Result;
use clap::ValueEnum;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::model_spec::ModelSpec;
use super::parameter::Declaration;
use super::place::{Place, Placed, listed, unknown};
use super::setting::Parameters;
use super::tokenizer::{TokenRow, TokenizerRecipe, TokenizerSource};
use super::yaml;
use crate::failure::Failure;
use crate::input::{Expected, read_given, with_remedy};
use crate::linalg::StoredDtype;

/// Methods of mergekit and peft that this version does not have.
pub const OTHER_METHODS: [&str; 7] = [
    "dare_linear_svd",
    "dare_ties_svd",
    "magnitude_prune_svd",
    "ram",
    "ramplus_tl",
    "svd",
    "ties_svd",
];

/// A merge: models, method, parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// The name by which later recipes of the same file read the result.
    pub name: Option<String>,
    /// The name of a method that exists.
    pub merge_method: String,
    /// The model that differences are taken from.
    pub base_model: Option<ModelSpec>,
    /// The models and their layers.
    pub inputs: MergeInputs,
    /// The parameters under `modules`, a scope wider than a slice and narrower than the recipe.
    pub module_parameters: Parameters,
    /// The parameters of the whole recipe, the widest scope.
    pub parameters: Parameters,
    /// The dtype of the arithmetic, and of the output without `out_dtype`.
    pub dtype: Option<StoredDtype>,
    /// The dtype of the output.
    pub out_dtype: Option<StoredDtype>,
    /// The vocabulary of the output; `None` keeps the inputs' vocabulary, which must be the same for all inputs.
    pub tokenizer: Option<TokenizerRecipe>,
    /// The chat template of the output: `auto`, a name or Jinja.
    pub chat_template: Option<String>,
    /// Keys that mergekit knows and the method ignores, as warnings.
    pub ignored: Vec<String>,
}

/// The models of a merge.
#[derive(Debug, Clone, PartialEq)]
pub enum MergeInputs {
    /// Models with all their layers. The base model is included, listed or not.
    Models(Vec<Placed<ModelInput>>),
    /// Groups of layers, stacked in this order.
    Slices(Vec<Placed<SliceRecipe>>),
}

/// A model with all its layers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelInput {
    /// The model.
    pub model: ModelSpec,
    /// Its parameters, the narrowest scope.
    #[serde(default)]
    pub parameters: Parameters,
}

/// Layers of the output that are merged from as many layers of each source.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceRecipe {
    /// The models and their layers.
    pub sources: Vec<Placed<SliceSource>>,
    /// The base model of this slice, if it is not the recipe's base model.
    pub base_model: Option<ModelSpec>,
    /// Parameters of this slice.
    #[serde(default)]
    pub parameters: Parameters,
}

/// A slice and its place.
pub(super) type PlacedSlice = Placed<SliceRecipe>;

/// Layers of a model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceSource {
    /// The model.
    pub model: ModelSpec,
    /// Its layers. A slice of no layers chooses embedding, norm and head alone.
    #[serde(deserialize_with = "layer_range")]
    pub layer_range: Range<usize>,
    /// Its parameters in this slice, the narrowest scope.
    #[serde(default)]
    pub parameters: Parameters,
}

/// A recipe as its file holds it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeFile {
    name: Option<String>,
    merge_method: Placed<String>,
    base_model: Option<ModelSpec>,
    models: Option<Vec<Placed<ModelInput>>>,
    slices: Option<Vec<Placed<SliceRecipe>>>,
    modules: Option<ModulesFile>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(default, deserialize_with = "dtype")]
    dtype: Option<StoredDtype>,
    #[serde(default, deserialize_with = "dtype")]
    out_dtype: Option<StoredDtype>,
    tokenizer_source: Option<Placed<TokenizerSource>>,
    tokenizer: Option<TokenizerRecipe>,
    chat_template: Option<String>,
}

/// The method of any recipe.
#[derive(Deserialize)]
struct MethodFile {
    merge_method: Placed<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModulesFile {
    default: ModuleFile,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModuleFile {
    models: Option<Vec<Placed<ModelInput>>>,
    slices: Option<Vec<Placed<SliceRecipe>>>,
    #[serde(default)]
    parameters: Parameters,
}

/// The dtype that a recipe asks for: PyTorch's name, or a short name.
fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<StoredDtype>, D::Error> {
    let Some(name) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let unknown = |_| {
        let known = "`float32`, `float16` or `bfloat16`";
        D::Error::custom(format!("a dtype must be {known}, found `{name}`"))
    };
    StoredDtype::from_str(&name, false).map(Some).map_err(unknown)
}

/// `[first layer, layer after the last]`.
fn layer_range<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Range<usize>, D::Error> {
    match Vec::deserialize(deserializer)?.as_slice() {
        &[start, end] if start <= end => Ok(start..end),
        ends => {
            let example = match ends {
                &[end, start] => format!("[{start}, {end}]"),
                _ => "[0, 16]".to_owned(),
            };
            Err(D::Error::custom(format!(
                "the layer range {ends:?} is not [first layer, layer after the last]\nhint: write `layer_range: {example}`"
            )))
        }
    }
}

impl Recipe {
    /// Reads the recipes of a file, a document each, and checks them against the methods that exist. A recipe may name the results of
    /// the recipes before it, which therefore have names.
    ///
    /// # Errors
    /// Fails when the file cannot be read, for a document without a name that is not the last, for a name that is no name of a folder or
    /// stands twice, and as [`Recipe::from_yaml`].
    pub fn load(path: &Path, methods: &[Declaration]) -> Result<Vec<Self>> {
        let text = read_given(path, Expected::Settings).map_err(|error| {
            let failure =
                Failure::new(format!("cannot read a recipe from `{}`: {error}", path.display()));
            with_remedy(failure, &error)
        })?;
        Self::all_from_yaml(&text, &path.display().to_string(), methods)
    }

    /// Reads the recipes of a file, as [`Recipe::load`] does.
    pub(super) fn all_from_yaml(
        text: &str,
        file: &str,
        methods: &[Declaration],
    ) -> Result<Vec<Self>> {
        let read = yaml::read_all::<Placed<RecipeFile>>(text, file).or_else(|failure| {
            if let Ok(all) = yaml::read_all::<MethodFile>(text, file) {
                for MethodFile { merge_method: name } in &all {
                    declaration(name, methods, &name.place)?;
                }
            }
            Err(failure)
        })?;
        let (count, mut names) = (read.len(), BTreeSet::new());
        let (mut recipes, mut places) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (at, read) in read.into_iter().enumerate() {
            let place = read.place.clone();
            match &read.name {
                Some(name) if at + 1 < count => check_name(name, &place, &mut names)?,
                None if at + 1 < count => {
                    return Err(place
                        .failure("a second recipe follows, and this recipe has no name")
                        .detail("every recipe but the last is read by its name")
                        .hint("add `name: NAME`, or write each recipe into a file of its own")
                        .into());
                }
                _ => {}
            }
            places.push(place);
            recipes.push(Self::of_file(read, methods)?);
        }
        check_order(&recipes, &places)?;
        Ok(recipes)
    }

    /// Reads a recipe in mergekit's YAML and checks it against the methods that exist. `file` names it in errors. Paths of models are
    /// relative to the current folder.
    ///
    /// # Errors
    /// Fails, with file and line, for text that is not YAML, for keys and parameters that are unknown, values of the wrong kind or out
    /// of range, methods that do not exist, and models, slices or parameters that the method cannot have.
    pub fn from_yaml(text: &str, file: &str, methods: &[Declaration]) -> Result<Self> {
        let read = yaml::read::<Placed<RecipeFile>>(text, file).or_else(|failure| {
            // Another method's parameters are unknown; the method is the reason then.
            if let Ok(MethodFile { merge_method: name }) = yaml::read(text, file) {
                declaration(&name, methods, &name.place)?;
            }
            Err(failure)
        });
        Self::of_file(read?, methods)
    }

    /// The recipe of a document.
    fn of_file(read: Placed<RecipeFile>, methods: &[Declaration]) -> Result<Self> {
        let Placed { place, value: read } = read;
        let declaration = declaration(&read.merge_method, methods, &read.merge_method.place)?;
        let (inputs, module_parameters) = match (read.models, read.slices, read.modules) {
            (None, None, Some(ModulesFile { default: module })) => {
                (inputs(module.models, module.slices), module.parameters)
            }
            (models, slices, None) => (inputs(models, slices), Parameters::default()),
            _ => (None, Parameters::default()),
        };
        let inputs = inputs.ok_or_else(|| {
            place
                .failure("a recipe holds exactly one of `models`, `slices` and `modules`")
                .detail("a module holds one of `models` and `slices`; none of the lists is empty")
        })?;
        let tokenizer = match (read.tokenizer_source, read.tokenizer) {
            (Some(source), None) => Some(TokenizerRecipe::of(source.value)),
            (None, tokenizer) => tokenizer,
            (Some(source), Some(_)) => {
                return Err(source
                    .place
                    .failure("`tokenizer_source` and `tokenizer` exclude one another")
                    .hint("write `tokenizer: {source: ...}` alone")
                    .into());
            }
        };
        let mut recipe = Self {
            name: read.name,
            merge_method: read.merge_method.value,
            base_model: read.base_model,
            inputs,
            module_parameters,
            parameters: read.parameters,
            dtype: read.dtype,
            out_dtype: read.out_dtype,
            tokenizer,
            chat_template: read.chat_template,
            ignored: Vec::new(),
        };
        recipe.leave_out_ignored(declaration);
        recipe.check(declaration)?;
        Ok(recipe)
    }

    /// Reads the model called `name` from a folder from here on.
    pub fn read_from(&mut self, name: &str, folder: &Path) {
        let replace = |spec: &mut ModelSpec| {
            if spec.model == name && spec.revision.is_none() {
                spec.model = folder.display().to_string();
            }
        };
        self.base_model.iter_mut().for_each(replace);
        match &mut self.inputs {
            MergeInputs::Models(inputs) => {
                inputs.iter_mut().for_each(|input| replace(&mut input.value.model));
            }
            MergeInputs::Slices(slices) => {
                for slice in slices {
                    slice.value.base_model.iter_mut().for_each(replace);
                    let sources = slice.value.sources.iter_mut();
                    sources.for_each(|source| replace(&mut source.value.model));
                }
            }
        }
        let Some(tokenizer) = &mut self.tokenizer else {
            return;
        };
        if let TokenizerSource::Model(spec) = &mut tokenizer.source {
            replace(spec);
        }
        for (_, token) in &mut tokenizer.tokens.0 {
            if let Some(TokenRow::Model(spec) | TokenRow::Token(spec, _)) = &mut token.source {
                replace(spec);
            }
        }
    }

    /// Every different model once: the base first, then in the order of the recipe. A model that only gives a tokenizer or the row
    /// of a token is left out.
    pub fn models(&self) -> Vec<ModelSpec> {
        let mut models: Vec<ModelSpec> = self.base_model.iter().cloned().collect();
        let mut known: BTreeSet<ModelSpec> = models.iter().cloned().collect();
        let mut add = |model: &ModelSpec| {
            if known.insert(model.clone()) {
                models.push(model.clone());
            }
        };
        match &self.inputs {
            MergeInputs::Models(inputs) => inputs.iter().for_each(|input| add(&input.model)),
            MergeInputs::Slices(slices) => {
                for slice in slices {
                    slice.sources.iter().for_each(|source| add(&source.model));
                }
            }
        }
        models
    }
}

/// Refuses a name that is no name of a folder, or that stands in the file twice.
fn check_name(name: &str, place: &Place, known: &mut BTreeSet<String>) -> Result<(), Failure> {
    let is_plain = |of: char| of.is_alphanumeric() || "._- ".contains(of);
    if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
        return Err(place
            .failure(format!("`{}` is no name for a merge", name.escape_debug()))
            .hint("use letters, digits, `.`, `-` and `_`"));
    }
    match known.insert(name.to_string()) {
        true => Ok(()),
        false => Err(place
            .failure(format!("two recipes have the name `{name}`"))
            .hint("give each recipe its own name")),
    }
}

/// Refuses a model that is the name of a recipe which is not merged yet. A folder of this name is a model.
fn check_order(recipes: &[Recipe], places: &[Place]) -> Result<(), Failure> {
    for (at, (recipe, place)) in recipes.iter().zip(places).enumerate() {
        for model in recipe.models() {
            let named = |of: &Recipe| of.name.as_deref() == Some(model.model.as_str());
            let is_later = !recipes[..at].iter().any(named) && recipes[at..].iter().any(named);
            if is_later && model.revision.is_none() && !Path::new(&model.model).exists() {
                let name = &model.model;
                let failure = place.failure(format!(
                    "the recipe reads the merge `{name}`, which is not made before it"
                ));
                return Err(match named(recipe) {
                    true => failure.hint("name another model: a merge cannot read itself"),
                    false => failure.hint(format!("move the recipe `{name}` before this one")),
                });
            }
        }
    }
    Ok(())
}

/// The declaration of a method.
pub(super) fn declaration<'a>(
    name: &str,
    methods: &'a [Declaration],
    place: &Place,
) -> Result<&'a Declaration, Failure> {
    let known: Vec<&str> = methods.iter().map(|method| method.name).collect();
    if let Some(at) = known.iter().position(|known| *known == name) {
        return Ok(&methods[at]);
    }
    if OTHER_METHODS.contains(&name) {
        return Err(place
            .failure(format!("the method `{name}` does not exist in this version"))
            .detail(format!("methods: {}", listed(known))));
    }
    let message = format!("no merge method is called `{name}`");
    Err(unknown(place, &message, name, &known))
}

/// The only list given, if it is not empty.
fn inputs(
    models: Option<Vec<Placed<ModelInput>>>,
    slices: Option<Vec<Placed<SliceRecipe>>>,
) -> Option<MergeInputs> {
    match (models, slices) {
        (Some(models), None) if !models.is_empty() => Some(MergeInputs::Models(models)),
        (None, Some(slices)) if !slices.is_empty() => Some(MergeInputs::Slices(slices)),
        _ => None,
    }
}
