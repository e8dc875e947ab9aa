//! [`ResolvedMerge`]: the recipe with its models, and every tensor of the output.

use anyhow::{Context, Result};

use super::combined::{self, CombinedJob};
use super::donor::Donor;
use super::models::{InputModelFiles, InputModels};
use super::vocabulary::OutputVocabulary;
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::merging::methods::MergeMethod;
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::{Recipe, TensorRecipe, TokenizerRecipe};
use crate::model::stored_dtype;
use crate::run::Events;
use crate::settings::{MergeSettings, SaliencySource};

/// The models of a recipe, and what becomes of them.
pub(super) struct ResolvedMerge {
    pub(super) recipe: Recipe,
    pub(super) method: &'static dyn MergeMethod,
    pub(super) inputs: InputModels,
    /// The combination of adapters, with `--semantics peft`.
    pub(super) combined: Option<CombinedJob>,
    pub(super) tensors: Vec<MergeTensor>,
    /// Tensors of the donor beside its text model, which the output has unchanged.
    pub(super) beside: Vec<String>,
    /// Tensors of the inputs that the output does not have.
    pub(super) left_out: Vec<String>,
    pub(super) num_hidden_layers: usize,
    /// The tokens and the tokenizer of the output.
    pub(super) vocabulary: OutputVocabulary,
    /// The model whose configuration the output gets.
    pub(super) donor: Donor,
}

impl ResolvedMerge {
    /// Opens the models of a recipe, and resolves every tensor.
    ///
    /// # Errors
    /// Fails for everything that can be wrong with recipe and models.
    pub(super) fn of(
        settings: &MergeSettings,
        recipe: Recipe,
        events: &dyn Events,
    ) -> Result<Self> {
        recipe.ignored.iter().for_each(|warning| events.warn(warning.clone()));
        let (declaration, method) = combined::method(settings, &recipe.merge_method)?;
        check_flags(settings, method)?;
        if settings.recipe.base.is_some()
            && recipe.base_model.is_none()
            && recipe.tokenizer.is_none()
        {
            events.warn(format!(
                "--base is not used: the method `{}` has no base, and its first model gives the output all that is not merged",
                recipe.merge_method
            ));
        }
        let mut inputs = InputModels::open(
            recipe.models(),
            recipe.dtype,
            settings.cache_dir.as_deref(),
            events,
        )?;
        let shapes = inputs.shapes()?;
        let num_hidden_layers = recipe.num_hidden_layers(&shapes)?;
        let resolved = recipe.resolve(&declaration, &shapes)?;
        let tensors: Result<Vec<MergeTensor>> = resolved
            .tensors
            .into_iter()
            .map(|tensor| merge_tensor(tensor, &recipe, &inputs))
            .collect();
        let mut tensors = tensors?;
        let combined = CombinedJob::settle(settings, &recipe, &inputs, &mut tensors)?;
        let vocabulary =
            OutputVocabulary::settle(settings, &recipe, &inputs, &mut tensors, events)?;
        inputs.row_maps = vocabulary.maps.clone();
        let donor = Donor::of(&recipe, &inputs, &tensors, &vocabulary)?;
        let of_donor = &inputs.models[donor.model];
        let (beside, left_out) =
            resolved.left_out.into_iter().partition(|name| of_donor.has_beside(name));
        Ok(Self {
            recipe,
            method,
            inputs,
            combined,
            tensors,
            beside,
            left_out,
            num_hidden_layers,
            vocabulary,
            donor,
        })
    }

    /// The index of the base model.
    pub(super) fn base(&self) -> Option<usize> {
        let mut models = self.inputs.models.iter();
        models.position(|model| Some(&model.spec) == self.recipe.base_model.as_ref())
    }

    /// The model whose configuration and tokenizer the output gets.
    pub(super) fn donor(&self) -> &InputModelFiles {
        &self.inputs.models[self.donor.model]
    }

    /// Stored bytes of all sources of a tensor.
    pub(super) fn read_bytes(&self, tensor: &MergeTensor) -> u64 {
        let sources = tensor.recipe.sources.iter();
        let entries = sources.filter_map(|of| self.inputs.models[of.model].entry(&of.tensor));
        entries.map(|entry| entry.bytes).sum()
    }
}

/// Reads the recipes of a file, or the recipe of flags.
///
/// # Errors
/// Fails for everything that can be wrong with a file or flags alone.
pub(super) fn read_recipes(settings: &MergeSettings) -> Result<Vec<Recipe>> {
    let methods = combined::declarations(settings.semantics);
    match &settings.config {
        Some(path) => {
            let mut recipes = Recipe::load(path, &methods)?;
            if let (Some(source), Some(recipe)) = (&settings.recipe.tokenizer, recipes.last_mut()) {
                if recipe.tokenizer.is_some() {
                    return Err(Failure::usage("the recipe has a tokenizer, and so has --vocab")
                        .hint("leave one of them out")
                        .into());
                }
                recipe.tokenizer = Some(TokenizerRecipe::of(source.clone()));
            }
            Ok(recipes)
        }
        None => Ok(vec![Recipe::from_flags(settings.recipe.clone(), &methods)?]),
    }
}

/// Refuses flags that the method has no meaning for.
fn check_flags(settings: &MergeSettings, method: &dyn MergeMethod) -> Result<()> {
    let name = method.declaration().name;
    if settings.saliency.is_some() && !method.uses_saliency() {
        return Err(Failure::usage(format!("--saliency has no meaning for the method `{name}`"))
            .hint("leave it out, or use ties, dare_linear, dare_ties, della or regmean_diag")
            .into());
    }
    if name == "regmean_diag" && settings.saliency != Some(SaliencySource::Experts) {
        return Err(Failure::usage("regmean_diag averages by the activations of the experts")
            .hint("add --saliency experts --dataset TEXT")
            .into());
    }
    Ok(())
}

/// The tensor with its shape and dtype. Embeddings and heads may differ in rows.
fn merge_tensor(
    tensor: TensorRecipe,
    recipe: &Recipe,
    inputs: &InputModels,
) -> Result<MergeTensor> {
    let entries = tensor.sources.iter().map(|source| {
        let entry = inputs.models[source.model].entry(&source.tensor);
        entry.with_context(|| format!("tensor `{}` is missing", source.tensor))
    });
    let entries = entries.collect::<Result<Vec<_>>>()?;
    let dtypes = entries.iter().map(|entry| stored_dtype(entry));
    // PyTorch promotes different dtypes to f32.
    let promoted = |one, other| if one == other { one } else { StoredDtype::F32 };
    let dtype = dtypes.collect::<Result<Vec<_>>>()?.into_iter().reduce(promoted);
    let asked = recipe.out_dtype.or(recipe.dtype);
    let dtype = asked.or(dtype).unwrap_or(StoredDtype::F32);
    let shape = entries.first().map_or(Vec::new(), |entry| entry.shape.clone());
    Ok(MergeTensor {
        squares: vec![None; tensor.sources.len()],
        observed: vec![None; tensor.sources.len()],
        recipe: tensor,
        shape,
        dtype,
    })
}
