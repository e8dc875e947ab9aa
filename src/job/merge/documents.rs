//! The recipes of a file, as mergekit-multi runs them: each but the last has a name and a folder, `SAVE/merges/NAME`, and later recipes read its
//! model by the name. The last recipe gives the result.

use std::path::Path;

use anyhow::{Context, Result};

use super::merge_recipe::merge_recipe;
use super::resolved::read_recipes;
use crate::checkpoint::CONFIG_FILE;
use crate::failure::Failure;
use crate::job::folder::MODEL;
use crate::job::grid::records;
use crate::merging::recipe::Recipe;
use crate::ranks::Ranks;
use crate::run::{Events, Manifest};
use crate::settings::{MergeEval, MergeSettings};

/// The folder of the merges before the last, in the run folder.
const MERGES: &str = "merges";

/// Performs the merges of a file, or the merge of flags, and returns the record of the last.
///
/// A merge before the last is not repeated if the same command has finished it.
///
/// # Errors
/// Fails before the first merge for everything that can be wrong with the file, and with the first error of a merge.
pub fn merge(settings: MergeSettings, events: &dyn Events) -> Result<Manifest> {
    merge_on(&Ranks::alone(), settings, events)
}

/// Merges as [`merge`] does, together with other ranks.
///
/// # Errors
/// Fails as [`merge`], and when a rank has left.
pub fn merge_on(ranks: &Ranks, settings: MergeSettings, events: &dyn Events) -> Result<Manifest> {
    ranks.or_departure(merge_all(ranks, settings, events))
}

fn merge_all(ranks: &Ranks, settings: MergeSettings, events: &dyn Events) -> Result<Manifest> {
    let mut recipes = read_recipes(&settings)?;
    let count = recipes.len();
    for at in 0..count.saturating_sub(1) {
        let recipe = recipes[at].clone();
        let name = recipe.name.clone().context("recipes before the last have names")?;
        let Some(save) = &settings.save else {
            return Err(Failure::usage("a file of several recipes needs a run folder")
                .detail(format!("the merge `{name}` is read by the recipes after it"))
                .hint("add --save DIR")
                .into());
        };
        let folder = save.join(MERGES).join(&name);
        events.note(format!("merge        {} of {count}: `{name}`", at + 1));
        let is_finished =
            ranks.decide(|| Ok(!settings.force && is_finished(&folder, &recipe, &settings)?))?;
        if is_finished {
            events.note(format!("`{}` is finished already", folder.display()));
        } else {
            let own = MergeSettings {
                save: Some(folder.clone()),
                save_model: None,
                eval: MergeEval::None,
                resume: false,
                ..settings.clone()
            };
            merge_recipe(own, recipe, ranks, events)?;
        }
        let model = folder.join(MODEL);
        recipes[at + 1..].iter_mut().for_each(|later| later.read_from(&name, &model));
    }
    if count > 1 {
        events.note(format!("merge        {count} of {count}"));
    }
    let last = recipes.pop().context("a file has recipes")?;
    merge_recipe(settings, last, ranks, events)
}

/// Returns whether the record of a folder says that this command has finished this recipe, and the model is there.
///
/// # Errors
/// Fails for a damaged record.
fn is_finished(folder: &Path, recipe: &Recipe, settings: &MergeSettings) -> Result<bool> {
    let is_published = folder.join(MODEL).join(CONFIG_FILE).is_file();
    let Some(record) = records::manifest(folder)?.filter(|_| is_published) else {
        return Ok(false);
    };
    let arguments = |of: &[String]| -> Vec<String> {
        of.iter().filter(|of| *of != "--resume").cloned().collect()
    };
    let merged = record.merge.as_ref().map(|merge| &merge.recipe);
    Ok(arguments(&record.arguments) == arguments(&settings.arguments)
        && merged == Some(&recipe.to_yaml(str::to_string)))
}
