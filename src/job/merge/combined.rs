//! `--semantics peft`: adapters of one base are combined factor by factor. The results are an adapter, and the base with it.
//!
//! ```text
//! base+adapter, … → SAVE/adapter (the combination) → SAVE/model (the base with that adapter, by the pass of `passthrough`)
//! ```
//!
//! The combined adapter is written anew by every process that works on the run. Its factors depend on the recipe and the seed alone, so
//! a merge that is continued has the same factors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};

use super::models::{InputModelFiles, InputModels, open_adapter};
use crate::adapter::{Adapter, AdapterShare, Combination, CombinationKind};
use crate::checkpoint::{OUTPUT_FLAGS, refuse_source_folder};
use crate::failure::Failure;
use crate::merging::methods::{self, MergeMethod, Semantics, Stream};
use crate::merging::pass::{AdaptedRows, MergeSources, MergeTensor, SourceRows};
use crate::merging::recipe::{
    BaseModel, Declaration, Declared, MergeInputs, Parameter, Recipe, WhenMissing,
};
use crate::run::Phase;
use crate::run::merging::CombinedAdapter;
use crate::runtime::Reporter;
use crate::settings::MergeSettings;

/// The folder of the combined adapter, in the run folder.
const FOLDER: &str = "adapter";

/// The combinations of peft that this version has.
const KINDS: [(&str, CombinationKind); 6] = [
    ("linear", CombinationKind::Linear),
    ("ties", CombinationKind::Ties),
    ("cat", CombinationKind::Cat),
    ("dare_linear", CombinationKind::DareLinear),
    ("dare_ties", CombinationKind::DareTies),
    ("magnitude_prune", CombinationKind::MagnitudePrune),
];

/// Names of peft's combinations that no method of models has.
pub fn peft_methods() -> impl Iterator<Item = &'static str> {
    let names = KINDS.iter().map(|(name, _)| *name);
    names.filter(|name| methods::method(name).is_none())
}

fn kind(name: &str) -> Option<CombinationKind> {
    let mut kinds = KINDS.iter();
    kinds.find(|(of, _)| *of == name).map(|(_, kind)| *kind)
}

/// The inputs of a combination of peft.
fn declaration(name: &'static str, kind: CombinationKind) -> Declaration {
    const WEIGHT: Declared = (Parameter::Weight, WhenMissing::Required);
    const DENSITY: Declared = (Parameter::Density, WhenMissing::Is(1.0));
    Declaration {
        name,
        base_model: BaseModel::Required,
        models: 2..=usize::MAX,
        per_model: match kind {
            CombinationKind::Linear | CombinationKind::Cat => &[WEIGHT],
            _ => &[WEIGHT, DENSITY],
        },
        shared: &[],
    }
}

/// A declaration that refuses nothing, so that [`method`] can say why the method does not fit the semantics.
fn permissive(name: &'static str) -> Declaration {
    const ALL: [Declared; Parameter::ALL.len()] = {
        let mut all = [(Parameter::Weight, WhenMissing::Absent); Parameter::ALL.len()];
        let mut at = 0;
        while at < all.len() {
            all[at].0 = Parameter::ALL[at];
            at += 1;
        }
        all
    };
    Declaration {
        name,
        base_model: BaseModel::Optional,
        models: 1..=usize::MAX,
        per_model: &ALL,
        shared: &ALL,
    }
}

/// The methods that a recipe can name under these semantics, and the methods that [`method`] refuses.
pub(super) fn declarations(semantics: Semantics) -> Vec<Declaration> {
    let of_models = methods::METHODS.iter().map(|method| method.declaration());
    if semantics == Semantics::Peft {
        let others = of_models.filter(|of| kind(of.name).is_none());
        let own = KINDS.iter().map(|(name, kind)| declaration(name, *kind));
        return own.chain(others.map(|of| permissive(of.name))).collect();
    }
    of_models.chain(peft_methods().map(permissive)).collect()
}

/// The inputs of the recipe's method, and the method of the pass.
///
/// # Errors
/// Fails for a method that the semantics do not have, and for flags without a meaning for it.
pub(super) fn method(
    settings: &MergeSettings,
    name: &str,
) -> Result<(Declaration, &'static dyn MergeMethod)> {
    if settings.semantics != Semantics::Peft {
        if settings.majority_sign.is_some() {
            return Err(
                Failure::usage("--majority-sign has a meaning for --semantics peft only").into()
            );
        }
        let Some(method) = methods::method(name) else {
            return Err(Failure::usage(format!(
                "the method `{name}` combines the factors of adapters, as peft does"
            ))
            .hint("add --semantics peft")
            .into());
        };
        return Ok((method.declaration(), method));
    }
    let found = KINDS.iter().find(|(of, _)| *of == name);
    let Some((name, kind)) = found.copied() else {
        let names: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
        return Err(Failure::usage(format!("peft has no combination called `{name}`"))
            .detail(format!("it has {}", names.join(", ")))
            .hint("leave --semantics peft out, or choose one of these methods")
            .into());
    };
    for (flag, is_given) in [
        ("--majority-sign", settings.majority_sign.is_some() && !kind.elects()),
        ("--trim-scope", settings.trim_scope.is_some()),
        ("--saliency", settings.saliency.is_some()),
    ] {
        if is_given {
            return Err(Failure::usage(format!(
                "{flag} has no meaning for the method `{name}` with --semantics peft"
            ))
            .hint(format!("leave {flag} out"))
            .into());
        }
    }
    let pass = methods::method("passthrough").context("`passthrough` exists")?;
    Ok((declaration(name, kind), pass))
}

/// The adapters of a merge and their combination.
pub(super) struct CombinedJob {
    combination: Combination,
    /// The election of signs, for a kind that elects.
    majority_sign: Option<&'static str>,
    /// The folder of the result.
    folder: PathBuf,
}

impl CombinedJob {
    /// Checks that the models are adapters of one base. `tensors` become the tensors of the base alone. `None` without `--semantics peft`.
    ///
    /// # Errors
    /// Fails for models that are not the base with an adapter, for adapters that cannot be combined, and without a run folder.
    pub(super) fn settle(
        settings: &MergeSettings,
        recipe: &Recipe,
        inputs: &InputModels,
        tensors: &mut [MergeTensor],
    ) -> Result<Option<Self>> {
        if settings.semantics != Semantics::Peft {
            return Ok(None);
        }
        let kind = kind(&recipe.merge_method).context("the method is one of peft's")?;
        let folder = result_folder(settings, inputs)?;
        check_models(recipe, inputs)?;
        // In the order of the recipe, where the base is the first of all models and no adapter.
        let adapters: Vec<Arc<Adapter>> =
            inputs.models[1..].iter().filter_map(|model| model.adapter.clone()).collect();
        let mut shares: BTreeMap<(usize, String), AdapterShare> = BTreeMap::new();
        for tensor in tensors {
            let sources = std::mem::take(&mut tensor.recipe.sources);
            for source in sources {
                if source.model == 0 {
                    tensor.recipe.sources = vec![source];
                    continue;
                }
                let share = AdapterShare {
                    weight: source.values.number(Parameter::Weight),
                    density: source.values.get(Parameter::Density).unwrap_or(1.0),
                };
                shares.insert((source.model - 1, source.tensor), share);
            }
            tensor.recipe.base = None;
            tensor.squares = vec![None];
        }
        let share =
            |adapter: usize, tensor: &str| shares.get(&(adapter, tensor.to_owned())).copied();
        let majority_sign = settings.majority_sign.unwrap_or_default();
        Ok(Some(Self {
            combination: Combination::new(adapters, kind, majority_sign, &share)?,
            majority_sign: kind.elects().then(|| majority_sign.name()),
            folder,
        }))
    }

    /// The settings that decide the outcome in addition to the recipe, by name.
    pub(super) fn deciding(&self) -> Option<(String, String)> {
        self.majority_sign.map(|name| ("majority_sign".to_string(), name.to_string()))
    }

    /// Refuses to write over an adapter that is there, unless a run is continued or replaced.
    ///
    /// # Errors
    /// Fails for a folder that is not empty.
    pub(super) fn check_folder(&self, replaces: bool) -> Result<()> {
        let is_empty = match std::fs::read_dir(&self.folder) {
            Ok(mut entries) => entries.next().is_none(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if replaces || is_empty {
            return Ok(());
        }
        Err(Failure::new(format!(
            "`{}` is not an empty folder, and the combined adapter belongs there",
            self.folder.display()
        ))
        .hint("choose another --save folder, or replace the adapter with --force")
        .into())
    }
}

/// Checks that every model is the base with an adapter.
fn check_models(recipe: &Recipe, inputs: &InputModels) -> Result<()> {
    let models = match &recipe.inputs {
        MergeInputs::Models(models) => models,
        MergeInputs::Slices(slices) => {
            let place = slices.first().map(|slice| &slice.place);
            return Err(place
                .context("a recipe has slices")?
                .failure(
                    "adapters are combined whole: `slices` have no meaning for --semantics peft",
                )
                .hint("list the models under `models`")
                .into());
        }
    };
    let base = &inputs.models[0];
    let hint = format!(
        "write {}+ADAPTER for every model, and {} for the base",
        base.spec.model, base.spec.model
    );
    for input in models {
        let opened = |of: &&InputModelFiles| of.spec == input.model;
        let opened = inputs.models.iter().find(opened).context("all are open")?;
        let failure = |message: String| input.place.failure(message).hint(hint.clone());
        if base.spec.adapter.is_some() {
            return Err(failure(format!("the base `{}` has an adapter", base.spec)).into());
        }
        if opened.adapter.is_none() {
            return Err(failure(format!(
                "`{}` has no adapter, and --semantics peft combines adapters",
                input.model
            ))
            .into());
        }
        if real(&opened.folder)? != real(&base.folder)? {
            return Err(failure(format!(
                "`{}` is no adapter of the base `{}`",
                input.model, base.spec
            ))
            .into());
        }
    }
    Ok(())
}

fn real(folder: &Path) -> Result<PathBuf> {
    let reading = || format!("opening `{}`", folder.display());
    std::fs::canonicalize(folder).with_context(reading)
}

/// The folder of the combined adapter.
fn result_folder(settings: &MergeSettings, inputs: &InputModels) -> Result<PathBuf> {
    let output = settings.output();
    let Some(save) = &output.save else {
        return Err(Failure::usage("--semantics peft needs a run folder for the combined adapter")
            .hint(format!("add --save DIR; the adapter becomes DIR/{FOLDER}"))
            .into());
    };
    let folder = save.join(FOLDER);
    for source in inputs.folders() {
        refuse_source_folder(source, &folder, OUTPUT_FLAGS)?;
    }
    let model = output.save_model.as_ref();
    if model.is_some_and(|model| folder.starts_with(model) || model.starts_with(&folder)) {
        return Err(Failure::usage(format!(
            "the model's folder and that of the combined adapter, `{}`, lie in one another",
            folder.display()
        ))
        .hint("choose another --save-model folder")
        .into());
    }
    Ok(folder)
}

/// The base with the combined adapter, as the only input of the pass.
pub(super) struct CombinedInputs<'a> {
    base: &'a InputModels,
    adapter: Adapter,
    pub(super) report: CombinedAdapter,
}

impl CombinedJob {
    /// Combines the adapters, writes the result, and puts it on the base.
    ///
    /// # Errors
    /// Fails when an adapter cannot be read or the result cannot be written.
    pub(super) fn combine<'a>(
        &self,
        inputs: &'a InputModels,
        seed: u64,
        Reporter { clock, events }: Reporter<'_>,
    ) -> Result<CombinedInputs<'a>> {
        let draws = |adapter: usize, factor: &str, numbers: &mut [u32]| {
            Stream::new(seed, adapter, factor).fill(0, numbers);
        };
        let files = clock.measure(Phase::Merge, || self.combination.write(&self.folder, &draws))?;
        events.note(format!("adapter      {}", self.folder.display()));
        let base = &inputs.models[0];
        let adapter = open_adapter(&self.folder, base.is_tied)?;
        adapter.check(&*base.checkpoint)?;
        Ok(CombinedInputs {
            base: inputs,
            adapter,
            report: CombinedAdapter {
                folder: self.folder.display().to_string(),
                majority_sign: self.majority_sign.map(str::to_string),
                files,
            },
        })
    }
}

impl MergeSources for CombinedInputs<'_> {
    fn open(&self, model: usize, tensor: &str) -> Result<Box<dyn SourceRows + '_>> {
        let base = self.base.open(model, tensor)?;
        Ok(match self.adapter.change(tensor)? {
            None => base,
            Some(change) => Box::new(AdaptedRows { base, change }),
        })
    }
}
