//! From a recipe and the shapes of its models to the tensors of the output: the inputs of each, and the values of its parameters.
//!
//! The semantics are mergekit's:
//!
//! - The layers of the slices are stacked. Layer `start + i` of a source becomes layer `j` of the output, and j counts on over the
//!   slices. The depth of a layer in its slice of n layers is t = i / (n − 1), or 1 for n = 1.
//! - Tensors outside the layers have t = 0. The embedding has the sources and parameters of the first slice; the final norm and the
//!   head have the sources and parameters of the last slice. (mergekit takes from the last slice only as many sources as the first slice
//!   has; here all sources count.)
//! - The head of a tied model is its embedding. The output is tied if all its heads are embeddings, and head and embedding have the same
//!   sources and values. Else it has a head of its own.
//! - The narrowest scope that has a value decides: source, slice, module, recipe. Values per model are looked up with the name of the
//!   input tensor, shared values with the name of the output tensor.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::contents::{MergeInputs, PlacedSlice, Recipe};
use super::mismatches::{Forms, Mismatches};
use super::model_spec::ModelSpec;
use super::parameter::{Declaration, Declared, Parameter, ParameterValues, WhenMissing};
use super::place::Place;
use super::setting::Parameters;
use crate::failure::Failure;
use crate::model::{EMBEDDING, HEAD};

const NORM: &str = "model.norm.weight";
const LAYERS: &str = "model.layers.";

/// Layers of the largest output; more are a mistake.
const MOST_LAYERS: usize = 4096;

/// A model as its headers and its config describe it, an adapter included.
#[derive(Debug, Clone)]
pub struct ModelShape {
    /// Layers, of the config.
    pub num_hidden_layers: usize,
    /// The head is the embedding, of the config. An adapter can end this.
    pub tie_word_embeddings: bool,
    /// Names and shapes of all tensors.
    pub tensors: BTreeMap<String, Vec<usize>>,
}

impl ModelShape {
    /// Returns whether the head is a tensor of its own.
    pub fn has_head(&self) -> bool {
        !self.tie_word_embeddings && self.tensors.contains_key(HEAD)
    }

    /// Returns whether layers of this model have a tensor in all these shapes, and others lack it where `is_lacking`.
    fn has_kinds(&self, suffix: &str, forms: &Forms, is_lacking: bool) -> bool {
        let layers = 0..self.num_hidden_layers;
        let own: BTreeSet<Option<&Vec<usize>>> =
            layers.map(|layer| self.tensors.get(&format!("{LAYERS}{layer}.{suffix}"))).collect();
        forms.keys().all(|form| own.contains(&Some(form))) && (!is_lacking || own.contains(&None))
    }

    /// The shape of a tensor outside the layers.
    fn outside(&self, name: &str) -> Option<&Vec<usize>> {
        self.tensors.get(match name {
            HEAD if !self.has_head() => EMBEDDING,
            name => name,
        })
    }
}

/// The tensors of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// Embedding, layers, norm, head. Within a layer in the order of names.
    pub tensors: Vec<TensorRecipe>,
    /// Tensors of the inputs that are no part of a decoder or are not used, such as `rotary_emb.inv_freq`.
    pub left_out: BTreeSet<String>,
}

/// A tensor of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorRecipe {
    /// Its name in the output.
    pub name: String,
    /// Its layer in the output; none for embedding, norm and head.
    pub layer: Option<usize>,
    /// Its inputs, in the order of the recipe. Shapes are equal, but the numbers of rows of embeddings and heads may differ.
    pub sources: Vec<TensorSource>,
    /// The index of the base model in `sources`.
    pub base: Option<usize>,
    /// The values of the declaration's shared parameters.
    pub shared: ParameterValues,
}

impl TensorRecipe {
    /// Returns whether two tensors have the same sources and values; their names do not count.
    fn is_merged_like(&self, other: &Self) -> bool {
        let sources = self.sources.iter().zip(&other.sources);
        self.sources.len() == other.sources.len()
            && self.base == other.base
            && self.shared == other.shared
            && sources
                .into_iter()
                .all(|(own, other)| own.model == other.model && own.values == other.values)
    }
}

/// An input of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSource {
    /// The index in [`Recipe::models`].
    pub model: usize,
    /// The name of the tensor in that model. The head of a tied model has its usual name, and the elements of the embedding.
    pub tensor: String,
    /// The values of the declaration's parameters per model; none for a base model that the method subtracts.
    pub values: ParameterValues,
}

impl Recipe {
    /// Returns the number of layers of the output. `shapes` has the shape of each of [`Recipe::models`], in that order.
    ///
    /// # Errors
    /// Fails when a range ends after the last layer of its model, when models that are merged whole have different numbers of layers,
    /// and for more than 4096 layers.
    pub fn num_hidden_layers(&self, shapes: &[ModelShape]) -> Result<usize> {
        let models = self.models();
        Ok(self.count_layers(&by_model(&models, shapes))?)
    }

    /// Returns the tensors of the output. `shapes` has the shape of each of [`Recipe::models`], in that order.
    ///
    /// # Errors
    /// Fails as [`Recipe::num_hidden_layers`]; for tensors that only some models have, and tensors of different shapes, with a list; and
    /// for a parameter that is required and has no value.
    pub fn resolve(&self, declaration: &Declaration, shapes: &[ModelShape]) -> Result<Resolved> {
        let models = self.models();
        let models = by_model(&models, shapes);
        self.count_layers(&models)?;
        // Without slices, all models have the same number of layers.
        let num_hidden_layers = shapes.first().map_or(0, |shape| shape.num_hidden_layers);
        let slices = self.slices(num_hidden_layers);
        let mut resolver = Resolver {
            recipe: self,
            declaration,
            models,
            mismatches: Mismatches::default(),
            tensors: Vec::new(),
        };
        let (Some(first), Some(last)) = (slices.first(), slices.last()) else {
            return Ok(Resolved { tensors: Vec::new(), left_out: BTreeSet::new() });
        };
        resolver.outside(EMBEDDING, EMBEDDING, first)?;
        let mut layer = 0;
        for slice in slices.iter() {
            resolver.slice(slice, &mut layer)?;
        }
        resolver.outside(NORM, NORM, last)?;
        resolver.head(last)?;
        resolver.check_kinds(layer);
        let widths = resolver.models.iter();
        let widths: Vec<(&ModelSpec, usize)> = widths
            .filter_map(|(model, (_, shape))| Some((*model, *shape.outside(NORM)?.first()?)))
            .collect();
        resolver.mismatches.refuse(&widths)?;
        Ok(Resolved { left_out: left_out(shapes), tensors: resolver.tensors })
    }

    fn count_layers(&self, models: &ByModel<'_>) -> Result<usize, Failure> {
        let layers_of = |model: &ModelSpec| models[model].1.num_hidden_layers;
        let slices = match &self.inputs {
            MergeInputs::Slices(slices) => slices,
            MergeInputs::Models(_) => {
                let counts: BTreeSet<usize> = models.keys().map(|model| layers_of(model)).collect();
                if let &[count] = counts.iter().copied().collect::<Vec<_>>().as_slice() {
                    return Ok(count);
                }
                let failure = Failure::new(
                    "the models have different numbers of layers, and no slices are given",
                );
                let failure = models.keys().fold(failure, |failure, model| {
                    failure.detail(format!("`{model}`: {} layers", layers_of(model)))
                });
                return Err(failure.hint("write `slices` with a `layer_range` for each model"));
            }
        };
        let mut count = 0;
        for slice in slices {
            for source in &slice.sources {
                let (range, layers) = (&source.layer_range, layers_of(&source.model));
                if range.end > layers {
                    let failure = source.place.failure(format!(
                        "the layer range [{}, {}] ends behind the last layer of `{}`, which has {layers} layers",
                        range.start, range.end, source.model
                    ));
                    let start = range.start.min(layers);
                    return Err(failure.hint(format!("write `layer_range: [{start}, {layers}]`")));
                }
            }
            count += slice.sources.first().map_or(0, |source| source.layer_range.len());
            if count > MOST_LAYERS {
                return Err(slice
                    .place
                    .failure(format!("the output has more than {MOST_LAYERS} layers up to here")));
            }
        }
        if count == 0 {
            return Err(Failure::new("the output has no layers")
                .detail("every `layer_range` of the recipe is empty")
                .hint(
                    "write [first layer, layer after the last], such as `layer_range: [0, 16]`",
                ));
        }
        Ok(count)
    }
}

/// Index and shape of a model.
type ByModel<'a> = BTreeMap<&'a ModelSpec, (usize, &'a ModelShape)>;

fn by_model<'a>(models: &'a [ModelSpec], shapes: &'a [ModelShape]) -> ByModel<'a> {
    assert_eq!(models.len(), shapes.len(), "one shape per model");
    let indexed = shapes.iter().enumerate();
    models.iter().zip(indexed).collect()
}

struct Resolver<'a> {
    recipe: &'a Recipe,
    declaration: &'a Declaration,
    models: ByModel<'a>,
    mismatches: Mismatches,
    tensors: Vec<TensorRecipe>,
}

impl Resolver<'_> {
    /// Adds a tensor outside the layers, with the values that the recipe has for the tensor `valued`.
    fn outside(&mut self, name: &str, valued: &str, slice: &PlacedSlice) -> Result<(), Failure> {
        for source in &slice.sources {
            let (_, shape) = self.models[&source.model];
            match shape.outside(name) {
                Some(shape) => self.mismatches.compare(name, name, &source.model, shape),
                None => self.mismatches.lacks(name, &source.model),
            }
        }
        let names = vec![valued.to_string(); slice.sources.len()];
        self.tensor(valued.to_string(), None, 0.0, slice, names)?;
        if let Some(tensor) = self.tensors.last_mut() {
            tensor.name = name.to_string();
            for source in &mut tensor.sources {
                source.tensor = name.to_string();
            }
        }
        Ok(())
    }

    /// Adds the head, unless it is the embedding of the output.
    fn head(&mut self, last: &PlacedSlice) -> Result<(), Failure> {
        let mut sources = last.sources.iter();
        if sources.any(|source| self.models[&source.model].1.has_head()) {
            return self.outside(HEAD, HEAD, last);
        }
        // A tied head has the embedding's values, so filters by name do not untie it.
        self.outside(HEAD, EMBEDDING, last)?;
        let embedding = self.tensors.first();
        if self.tensors.last().zip(embedding).is_some_and(|(head, of)| head.is_merged_like(of)) {
            self.tensors.pop();
        }
        Ok(())
    }

    /// Adds the layers of a slice, from layer `layer` of the output on.
    fn slice(&mut self, slice: &PlacedSlice, layer: &mut usize) -> Result<(), Failure> {
        let count = slice.sources.first().map_or(0, |source| source.layer_range.len());
        for i in 0..count {
            let t = if count > 1 { i as f64 / (count - 1) as f64 } else { 1.0 };
            let prefixes = slice.sources.iter();
            let prefixes: Vec<String> = prefixes
                .map(|source| format!("{LAYERS}{}.", source.layer_range.start + i))
                .collect();
            self.mismatches.expected.clear();
            for suffix in self.layer_tensors(slice, &prefixes) {
                let name = format!("{LAYERS}{layer}.{suffix}");
                let names = prefixes.iter().map(|prefix| format!("{prefix}{suffix}"));
                self.tensor(name, Some(*layer), t, slice, names.collect())?;
            }
            *layer += 1;
        }
        Ok(())
    }

    /// Records tensors that some layers of the output lack, or have in a different shape, unless a model has layers of these kinds, too: a
    /// configuration says which layers are of which kind.
    fn check_kinds(&mut self, layers: usize) {
        for (suffix, forms) in std::mem::take(&mut self.mismatches.forms) {
            let with: usize = forms.values().map(|(count, _)| count).sum();
            if (with == layers && forms.len() == 1)
                || self
                    .models
                    .values()
                    .any(|(_, shape)| shape.has_kinds(&suffix, &forms, with < layers))
            {
                continue;
            }
            if with < layers {
                let message = format!("`{suffix}`: in {with} of {layers} layers");
                self.mismatches.lacking.push(message);
            }
            let mut forms = forms.into_iter();
            if let Some((expected, (_, at))) = forms.next() {
                self.mismatches
                    .shapes
                    .extend(forms.map(|(shape, (_, of))| {
                        format!("{of} is {shape:?}, {at} is {expected:?}")
                    }));
            }
        }
    }

    /// The tensors of a layer that any source has, without the beginning of their names. Differences are recorded.
    fn layer_tensors(&mut self, slice: &PlacedSlice, prefixes: &[String]) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for (source, prefix) in slice.sources.iter().zip(prefixes) {
            let (_, shape) = self.models[&source.model];
            let tensors = shape.tensors.range(prefix.clone()..);
            let tensors = tensors.take_while(|(name, _)| name.starts_with(prefix.as_str()));
            for (name, shape) in tensors.filter(|(name, _)| !is_buffer(name)) {
                let suffix = &name[prefix.len()..];
                self.mismatches.compare(suffix, name, &source.model, shape);
                if names.insert(suffix.to_string()) {
                    let forms = self.mismatches.forms.entry(suffix.to_string()).or_default();
                    let form = forms.entry(shape.clone());
                    form.or_insert((0, format!("`{name}` of `{}`", source.model))).0 += 1;
                }
            }
        }
        for name in &names {
            for (source, prefix) in slice.sources.iter().zip(prefixes) {
                let (_, shape) = self.models[&source.model];
                let tensor = format!("{prefix}{name}");
                if !shape.tensors.contains_key(&tensor) {
                    self.mismatches.lacks(&tensor, &source.model);
                }
            }
        }
        names
    }

    /// Adds a tensor; `names` has its name in each source of the slice.
    fn tensor(
        &mut self,
        name: String,
        layer: Option<usize>,
        t: f64,
        slice: &PlacedSlice,
        names: Vec<String>,
    ) -> Result<(), Failure> {
        let base = self.recipe.base_of(slice);
        let wide = [&slice.parameters, &self.recipe.module_parameters, &self.recipe.parameters];
        let mut sources = Vec::with_capacity(names.len());
        for (source, tensor) in slice.sources.iter().zip(names) {
            let is_subtracted =
                self.declaration.base_model.is_subtracted() && base == Some(&source.model);
            let declared = if is_subtracted { &[] } else { self.declaration.per_model };
            let scopes = std::iter::once(&source.parameters).chain(wide);
            let values = values(declared, scopes, &tensor, t).map_err(|parameter| {
                self.missing(parameter, &tensor, Some(&source.model), &source.place)
            })?;
            sources.push(TensorSource { model: self.models[&source.model].0, tensor, values });
        }
        let shared = values(self.declaration.shared, wide, &name, t)
            .map_err(|parameter| self.missing(parameter, &name, None, &slice.place))?;
        let mut models = slice.sources.iter().map(|source| &source.model);
        self.tensors.push(TensorRecipe {
            name,
            layer,
            base: models.position(|model| Some(model) == base),
            sources,
            shared,
        });
        Ok(())
    }

    /// The refusal of a recipe without a value for a required parameter, of `model` or shared.
    fn missing(
        &self,
        parameter: Parameter,
        tensor: &str,
        model: Option<&ModelSpec>,
        place: &Place,
    ) -> Failure {
        let (method, name) = (self.declaration.name, parameter.name());
        let of = model.map_or(String::new(), |model| format!(" of `{model}`"));
        let failure = place.failure(format!(
            "the method `{method}` needs `{name}`, which has no value for `{tensor}`{of}"
        ));
        let is_base = model.is_some() && model == self.recipe.base_model.as_ref();
        failure.hint(match place {
            Place::Flags => format!("add --{name} NUMBER"),
            Place::Line(..) if is_base => format!(
                "`base_model` is one of the models: list it with a `{name}`, or remove `base_model`"
            ),
            Place::Line(..) => {
                format!("add `{name}: NUMBER` to the `parameters` of the model or of the recipe")
            }
        })
    }
}

/// Values of the declared parameters; the narrowest scope with a value counts. The error is a required parameter without a value.
fn values<'a>(
    declared: &[Declared],
    scopes: impl IntoIterator<Item = &'a Parameters> + Clone,
    tensor: &str,
    t: f64,
) -> Result<ParameterValues, Parameter> {
    let mut values = ParameterValues::default();
    for (parameter, otherwise) in declared {
        let given = scopes.clone().into_iter().find_map(|scope| {
            let setting = scope.get(*parameter)?;
            setting.at(tensor, t, parameter.is_switch())
        });
        match (given, otherwise) {
            (Some(value), _) => values.set(*parameter, value),
            (None, WhenMissing::Is(value)) => values.set(*parameter, *value),
            (None, WhenMissing::Absent) => {}
            (None, WhenMissing::Required) => return Err(*parameter),
        }
    }
    Ok(values)
}

/// Returns true for a buffer that old checkpoints store with the weights.
fn is_buffer(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

fn left_out(shapes: &[ModelShape]) -> BTreeSet<String> {
    let is_used = |shape: &ModelShape, name: &str| match name {
        EMBEDDING | NORM => true,
        HEAD => shape.has_head(),
        _ => {
            let layer = name.strip_prefix(LAYERS).and_then(|name| name.split_once('.'));
            let layer = layer.and_then(|(layer, _)| layer.parse::<usize>().ok());
            layer.is_some_and(|layer| layer < shape.num_hidden_layers) && !is_buffer(name)
        }
    };
    let names =
        shapes.iter().flat_map(|shape| shape.tensors.keys().filter(|name| !is_used(shape, name)));
    names.cloned().collect()
}
