//! A recipe as mergekit's YAML says it: [`Recipe`] and its parts, and how they are read.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;

use super::fields::{Fields, unknown};
use super::model_spec::ModelSpec;
use super::parameter::Declaration;
use super::place::{Place, listed};
use super::setting::Parameters;
use super::tokenizer::{TokenizerRecipe, TokenizerSource};
use super::yaml::{self, Node};
use crate::failure::Failure;
use crate::input::{Expected, read_given, with_remedy};
use crate::linalg::StoredDtype;

/// Methods of mergekit and peft that this version does not have.
pub const OTHER_METHODS: [&str; 13] = [
    "arcee_fusion",
    "dare_linear_svd",
    "dare_ties_svd",
    "karcher",
    "magnitude_prune_svd",
    "multislerp",
    "nearswap",
    "nuslerp",
    "ram",
    "ramplus_tl",
    "sce",
    "svd",
    "ties_svd",
];

/// A merge: models, method, parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
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
}

/// The models of a merge.
#[derive(Debug, Clone, PartialEq)]
pub enum MergeInputs {
    /// Models with all their layers. The base model is included, listed or not.
    Models(Vec<ModelInput>),
    /// Groups of layers, stacked in this order.
    Slices(Vec<SliceRecipe>),
}

/// A model with all its layers.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInput {
    /// Its place in the recipe.
    pub place: Place,
    /// The model.
    pub model: ModelSpec,
    /// Its parameters, the narrowest scope.
    pub parameters: Parameters,
}

/// Layers of the output that are merged from as many layers of each source.
#[derive(Debug, Clone, PartialEq)]
pub struct SliceRecipe {
    /// Its place in the recipe.
    pub place: Place,
    /// The models and their layers.
    pub sources: Vec<SliceSource>,
    /// The base model of this slice, if it is not the recipe's base model.
    pub base_model: Option<ModelSpec>,
    /// Parameters of this slice.
    pub parameters: Parameters,
}

/// Layers of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct SliceSource {
    /// Its place in the recipe.
    pub place: Place,
    /// The model.
    pub model: ModelSpec,
    /// Its layers, never empty.
    pub layer_range: Range<usize>,
    /// Its parameters in this slice, the narrowest scope.
    pub parameters: Parameters,
}

/// The dtype that a recipe asks for: PyTorch's name, or a short name.
fn dtype(node: Node) -> Result<StoredDtype, Failure> {
    let named = node.scalar().and_then(|scalar| StoredDtype::from_str(&scalar.text, false).ok());
    named.ok_or_else(|| node.wrong("a dtype", "`float32`, `float16` or `bfloat16`"))
}

impl Recipe {
    /// Reads a recipe file and checks it against the methods that exist.
    ///
    /// # Errors
    /// Fails when the file cannot be read, and as [`Recipe::from_yaml`].
    pub fn load(path: &Path, methods: &[Declaration]) -> Result<Self> {
        let text = read_given(path, Expected::Settings).map_err(|error| {
            let failure =
                Failure::new(format!("cannot read a recipe from `{}`: {error}", path.display()));
            with_remedy(failure, &error)
        })?;
        Self::from_yaml(&text, &path.display().to_string(), methods)
    }

    /// Reads a recipe in mergekit's YAML and checks it against the methods that exist. `file` names it in errors. Paths of models are
    /// relative to the current folder.
    ///
    /// # Errors
    /// Fails, with file and line, for text that is not YAML, for keys and parameters that are unknown, values of the wrong kind or out
    /// of range, methods that do not exist, and models, slices or parameters that the method cannot have.
    pub fn from_yaml(text: &str, file: &str, methods: &[Declaration]) -> Result<Self> {
        let root = yaml::compose(text, &Arc::from(file))?;
        let known = [
            "merge_method",
            "base_model",
            "models",
            "slices",
            "modules",
            "parameters",
            "dtype",
            "out_dtype",
            "tokenizer_source",
            "tokenizer",
            "chat_template",
        ];
        let mut fields = Fields::open(root, "a recipe", &known)?;
        let method = fields.require("merge_method", "a recipe")?;
        let name = method.text("`merge_method`")?;
        let declaration = declaration(&name, methods, &method.place)?;
        let (inputs, module_parameters) = inputs(&mut fields)?;
        let recipe = Self {
            merge_method: name,
            base_model: fields.take("base_model").map(ModelSpec::from_node).transpose()?,
            inputs,
            module_parameters,
            parameters: Parameters::from_node(fields.take("parameters"))?,
            dtype: fields.take("dtype").map(dtype).transpose()?,
            out_dtype: fields.take("out_dtype").map(dtype).transpose()?,
            tokenizer: tokenizer(&mut fields)?,
            chat_template: fields
                .take("chat_template")
                .map(|template| template.text("`chat_template`"))
                .transpose()?,
        };
        recipe.check(declaration)?;
        Ok(recipe)
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

/// The inputs under `models`, `slices` or `modules`, and the parameters under `modules`.
fn inputs(fields: &mut Fields) -> Result<(MergeInputs, Parameters), Failure> {
    let given = ["models", "slices", "modules"].map(|key| fields.take(key));
    match given {
        [Some(models), None, None] => Ok((models_of(models)?, Parameters::default())),
        [None, Some(slices), None] => Ok((slices_of(slices)?, Parameters::default())),
        [None, None, Some(modules)] => {
            let mut modules = Fields::open(modules, "`modules`", &["default"])?;
            let module = modules.require("default", "`modules`")?;
            let known = ["models", "slices", "parameters"];
            let mut module = Fields::open(module, "a module", &known)?;
            let parameters = Parameters::from_node(module.take("parameters"))?;
            match [module.take("models"), module.take("slices")] {
                [Some(models), None] => Ok((models_of(models)?, parameters)),
                [None, Some(slices)] => Ok((slices_of(slices)?, parameters)),
                _ => Err(module.place.failure("a module holds either `models` or `slices`")),
            }
        }
        _ => Err(fields
            .place
            .failure("a recipe holds exactly one of `models`, `slices` and `modules`")),
    }
}

fn models_of(node: Node) -> Result<MergeInputs, Failure> {
    let items = some_of(node, "`models`")?.into_iter();
    let inputs = items.map(|node| {
        let mut fields = Fields::open(node, "a model", &["model", "parameters"])?;
        Ok(ModelInput {
            model: ModelSpec::from_node(fields.require("model", "a model")?)?,
            parameters: Parameters::from_node(fields.take("parameters"))?,
            place: fields.place,
        })
    });
    Ok(MergeInputs::Models(inputs.collect::<Result<_, Failure>>()?))
}

fn slices_of(node: Node) -> Result<MergeInputs, Failure> {
    let items = some_of(node, "`slices`")?.into_iter();
    let slices = items.map(|node| {
        let known = ["sources", "base_model", "parameters"];
        let mut fields = Fields::open(node, "a slice", &known)?;
        let sources = some_of(fields.require("sources", "a slice")?, "`sources`")?;
        let base_model = fields.take("base_model").map(ModelSpec::from_node);
        Ok(SliceRecipe {
            sources: sources.into_iter().map(slice_source).collect::<Result<_, _>>()?,
            base_model: base_model.transpose()?,
            parameters: Parameters::from_node(fields.take("parameters"))?,
            place: fields.place,
        })
    });
    Ok(MergeInputs::Slices(slices.collect::<Result<_, Failure>>()?))
}

fn slice_source(node: Node) -> Result<SliceSource, Failure> {
    let known = ["model", "layer_range", "parameters"];
    let mut fields = Fields::open(node, "a source", &known)?;
    let range = fields.require("layer_range", "a source")?;
    let place = range.place.clone();
    let ends = range.list("`layer_range`")?;
    let ends: Vec<usize> = ends.iter().map(|end| end.count("a layer")).collect::<Result<_, _>>()?;
    let &[start, end] = ends.as_slice() else {
        return Err(place.failure(format!(
            "`layer_range` holds {} numbers; it is [first layer, layer after the last]",
            ends.len()
        )));
    };
    if start >= end {
        return Err(place.failure(format!("the layer range [{start}, {end}] is empty")));
    }
    Ok(SliceSource {
        model: ModelSpec::from_node(fields.require("model", "a source")?)?,
        layer_range: start..end,
        parameters: Parameters::from_node(fields.take("parameters"))?,
        place: fields.place,
    })
}

/// The items of a list that is not empty.
fn some_of(node: Node, what: &str) -> Result<Vec<Node>, Failure> {
    let place = node.place.clone();
    let items = node.list(what)?;
    if items.is_empty() {
        return Err(place.failure(format!("{what} is an empty list")));
    }
    Ok(items)
}

/// The tokenizer under `tokenizer_source` or `tokenizer`.
fn tokenizer(fields: &mut Fields) -> Result<Option<TokenizerRecipe>, Failure> {
    match (fields.take("tokenizer_source"), fields.take("tokenizer")) {
        (Some(source), None) => {
            let source = TokenizerSource::from_node(source)?;
            Ok(Some(TokenizerRecipe::of(source)))
        }
        (None, tokenizer) => tokenizer.map(TokenizerRecipe::from_node).transpose(),
        (Some(source), Some(_)) => Err(source
            .place
            .failure("`tokenizer_source` and `tokenizer` exclude one another")
            .hint("write `tokenizer: {source: ...}` alone")),
    }
}
