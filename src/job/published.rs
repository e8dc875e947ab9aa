//! The files that a pruning run publishes beside the weights: `pruning.json`, the model card, and the cards of the source.
//!
//! They must tell a stranger nothing about this machine. So both are made from named fields, never from the command line, and a path
//! is reduced to its last component.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use super::earlier_pruning::read_record;
use super::model_report::arithmetic;
use super::record::{self, RunResults};
use super::settled_run::SettledRun;
use crate::bytes::json_file;
use crate::checkpoint::{CARD_FILE, CONFIG_FILE, Published, card_of_source, cards_in};
use crate::data::DatasetSpec;
use crate::hub::HubRepo;
use crate::merging::recipe::without_folders;
use crate::model::{ModelConfig, text_settings};
use crate::pruning::Pattern;
use crate::report::card::{self, Card, CardSource};
use crate::report::cards;
use crate::report::front_matter::{self, FrontMatter};
use crate::run::PruningRecord;
use crate::run::pruning_record::{ForwardArithmetic, PRUNING_FILE, PrunedSource, SCHEMA};
use crate::settings::RecoverySettings;

/// Settings that the command which repeats a run always names, in its order. Further deciding settings follow where they differ
/// from their defaults, so a new setting is in the command without a line here.
const NAMED: [&str; 16] = [
    "drop_layers",
    "drop_rule",
    "layers_dropped",
    "drop_width",
    "width_of",
    "prune_method",
    "sparsity_ratio",
    "sparsity_type",
    "include",
    "exclude",
    "nsamples",
    "seed",
    "seqlen",
    "eval",
    "eval_windows",
    "dtype",
];

/// Settings that a resumed run must share and that change neither weights nor perplexity; and the file of ratios, which is a path.
const UNNAMED: [&str; 3] = ["layer_ratios", "no_save_model", "save_masks"];

impl SettledRun {
    /// Returns the files that are published with the model of a run with these results.
    pub(super) fn published(&self, results: &RunResults) -> Result<Published> {
        let folder = &self.model.folder;
        let before = read_record(folder).and_then(Result::ok);
        let record = self.pruning_record(results, before.as_ref())?;
        let mut written = vec![(PRUNING_FILE, json_file(&record)?)];
        if let Some(whole) = &self.model.part_of {
            written.push((CONFIG_FILE, json_file(&whole.config_json)?));
        }
        let pruned_before = before.as_ref().map(|before| &before.pruning);
        self.with_cards(written, |source| Ok(cards::pruned(&record, pruned_before, source)))
    }

    /// The files with the cards: the run's own, unless it is declined, and the source's.
    pub(super) fn with_cards(
        &self,
        mut written: Vec<(&'static str, Vec<u8>)>,
        card: impl FnOnce(CardSource) -> Result<Card>,
    ) -> Result<Published> {
        let declined = self.settings.output.no_model_card;
        if let Some(config) = self.model.own_config()? {
            written.push((CONFIG_FILE, config));
        }
        let cards = SourceCards::of(&self.model.folder, declined);
        if !declined {
            let source = cards.source(self.settings.calibration.iter().map(|of| &of.dataset));
            written.push((CARD_FILE, card(source)?.text().into_bytes()));
        }
        Ok(Published { written, copied: cards.copied, has_own_sums: false })
    }

    fn pruning_record(
        &self,
        results: &RunResults,
        before: Option<&PruningRecord>,
    ) -> Result<PruningRecord> {
        let Self { settings, model, texts, plan, .. } = self;
        let source = model.report()?;
        let arithmetic = arithmetic(model, &settings.device, plan);
        let mut pruning = self.pruning_report().context("this run prunes")?;
        for glob in pruning.include.iter_mut().chain(&mut pruning.exclude) {
            *glob = name_of_glob(glob).to_string();
        }
        let layers = results.layers.as_deref().unwrap_or_default();
        let made_from = before.and_then(PruningRecord::base_model);
        let calibration = texts.calibration.as_ref().map(|text| &text.protocol);
        let evaluation = texts.windows.as_ref().map(|text| &text.protocol);
        Ok(PruningRecord {
            schema: SCHEMA,
            prune_version: env!("CARGO_PKG_VERSION").to_string(),
            command: self.command()?,
            source: PrunedSource {
                name: source.name(),
                // Another program may have written the record, and cards link to this name.
                made_from: made_from.filter(|id| HubRepo::model(id).is_some()).map(String::from),
                id: source.id,
                commit: source.commit,
                identity: source.identity,
                parameters: source.parameters,
                bytes: source.bytes,
            },
            dtype: model.dtype().name().to_string(),
            arithmetic: ForwardArithmetic { dtype: arithmetic.dtype, kernel: arithmetic.kernel },
            layer_drop: model.part_of.as_ref().and_then(|whole| whole.layer_drop.clone()),
            width_drop: model.part_of.as_ref().and_then(|whole| whole.width_drop.clone()),
            pruning,
            calibration: calibration.map(|protocol| protocol.published()),
            sparsity: record::sparsity(layers),
            perplexity: results.perplexity.clone(),
            tasks: results.tasks.clone(),
            evaluation: evaluation.map(|protocol| protocol.published()),
            matrices: layers.iter().flat_map(|layer| layer.matrices.iter().cloned()).collect(),
        })
    }

    /// The command that repeats this run.
    pub(super) fn command(&self) -> Result<Vec<String>> {
        let settings = &self.settings;
        let model = self.model.report()?;
        let id = model.id.clone();
        let recovery = settings.recovery.as_ref();
        let mut command = vec!["prune".to_string()];
        command.extend(recovery.map(|_| "recover".to_string()));
        let mut flag = |name: &str, value: String| {
            command.extend([format!("--{}", name.replace('_', "-")), value]);
        };
        flag("model", id.unwrap_or_else(|| model.name()));
        if let Some(commit) = model.commit {
            flag("revision", commit);
        }
        if let Some(teacher) = recovery.and_then(|of| of.teacher.as_deref()) {
            flag("teacher", without_folders(&teacher.display().to_string()));
        }
        if let Some(calibration) = &settings.calibration {
            flag("dataset", calibration.dataset.without_folders());
        }
        if self.texts.windows.is_some() {
            flag("eval_dataset", settings.evaluation.eval_dataset.without_folders());
        }
        let targets = self.pruning().map(|pruning| &pruning.targets);
        let has_ratio = targets.is_some_and(|targets| targets.pattern == Pattern::Unstructured);
        let selection = settings.sparsity.as_ref().map(|sparsity| &sparsity.selection);
        let of_closing = recovery.and_then(|recovery| recovery.closing.layer_ratios.as_ref());
        let of_layers = selection.and_then(|selection| selection.layer_ratios.as_ref());
        if of_layers.or(of_closing).is_some() {
            flag("layer_ratios", "layer_ratios.json".to_string());
        }
        let (by_name, changed) = (settings.by_name()?, settings.changed()?);
        let drop = settings.layer_drop.as_ref();
        let names_layers = drop.is_some_and(|drop| !drop.layers_dropped.is_empty());
        let unread = recovery.map(RecoverySettings::unread).unwrap_or_default();
        let is_implied = |name: &str| match name {
            _ if unread.iter().any(|(of, _)| *of == name) => true,
            "trains" => settings.trains_whole(),
            "drop_layers" | "drop_rule" => names_layers,
            "sparsity_ratio" => !has_ratio,
            "sparsity_type" => has_ratio,
            "dtype" => by_name.get(name).is_some_and(|value| value == "auto"),
            _ => false,
        };
        let named = NAMED.into_iter().filter(|name| !is_implied(name));
        let others = changed
            .iter()
            .map(String::as_str)
            .filter(|name| !NAMED.contains(name) && !UNNAMED.contains(name) && !is_implied(name));
        let mut switches = Vec::new();
        for name in named.chain(others) {
            let values = match by_name.get(name) {
                None | Some(Value::Null | Value::Bool(false)) => Vec::new(),
                Some(Value::Bool(true)) => {
                    switches.push(format!("--{}", name.replace('_', "-")));
                    Vec::new()
                }
                Some(Value::Array(values)) => values.clone(),
                Some(value) => vec![value.clone()],
            };
            for value in values {
                flag(
                    if name == "trains" { "train" } else { name },
                    match value {
                        Value::String(text) => name_of_glob(&text).to_string(),
                        other => other.to_string(),
                    },
                );
            }
        }
        flag("save", "out".to_string());
        command.extend(switches);
        Ok(command)
    }
}

/// The part of a glob after its last slash. Names of matrices have no slashes, so a glob with a slash is a path by mistake.
fn name_of_glob(glob: &str) -> &str {
    glob.rsplit('/').next().unwrap_or(glob)
}

/// The cards in the folder of a source.
pub(super) struct SourceCards {
    front_matter: FrontMatter,
    class: Option<String>,
    /// The cards that are copied: their paths, and their names in the output.
    pub(super) copied: Vec<(PathBuf, String)>,
}

impl SourceCards {
    /// The cards in `folder`. They keep their names where the output declines a card of its own, unless this program wrote them: its
    /// card would be wrong about the output.
    pub(super) fn of(folder: &Path, declined: bool) -> Self {
        let card = beginning(&folder.join(CARD_FILE));
        let keeps_names = declined && !card::is_written_by_us(&card);
        let copied = cards_in(folder).unwrap_or_default().into_iter().filter_map(|name| {
            let kept = if keeps_names { name.clone() } else { card_of_source(&name)? };
            Some((folder.join(name), kept))
        });
        let config = ModelConfig::read_json(folder).unwrap_or_default();
        Self {
            front_matter: FrontMatter::of(&card),
            class: class_of(&config),
            copied: copied.collect(),
        }
    }

    /// The source for a card, with the datasets that have a repository on the hub.
    pub(super) fn source<'a>(&self, datasets: impl Iterator<Item = &'a DatasetSpec>) -> CardSource {
        let own = self.copied.iter().find(|(path, _)| path.ends_with(CARD_FILE));
        CardSource {
            front_matter: self.front_matter.clone(),
            kept_as: own.map(|(_, kept)| kept.clone()),
            datasets: hub_datasets(datasets),
            class: self.class.clone(),
        }
    }
}

/// The class of transformers that loads a model of several media, from its `config.json`; `None` for a language model by itself.
pub(super) fn class_of(config: &Value) -> Option<String> {
    let name = text_settings(config).and(config.get("architectures")?.get(0)?.as_str())?;
    let is_class = name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    is_class.then(|| name.to_owned())
}

/// The repositories on the hub of datasets that have one, each once.
pub(super) fn hub_datasets<'a>(datasets: impl Iterator<Item = &'a DatasetSpec>) -> Vec<String> {
    let repositories: BTreeSet<String> = datasets.filter_map(DatasetSpec::hub_repository).collect();
    repositories.into_iter().collect()
}

/// The entries that the cards in all folders have, with equal values.
pub(super) fn shared_front_matter<'a>(folders: impl Iterator<Item = &'a Path>) -> FrontMatter {
    let all = folders.map(|folder| FrontMatter::of(&beginning(&folder.join(CARD_FILE))));
    all.reduce(|shared, next| shared.shared_with(&next)).unwrap_or_default()
}

/// The first bytes of a card; none of a card that cannot be read.
fn beginning(card: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A folder or a pipe of this name is no card.
    if card.is_file()
        && let Ok(file) = File::open(card)
    {
        // What was read before an error is as good as a shorter card.
        let _ = file.take(front_matter::LONGEST as u64).read_to_end(&mut bytes);
    }
    bytes
}
