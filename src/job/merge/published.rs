//! The files beside the weights of a merged model: configuration, tokenizer, recipe, record and card.

use anyhow::Result;

use super::job::MergeJob;
use crate::bytes::json_file;
use crate::checkpoint::{
    CARD_FILE, CONFIG_FILE, INDEX_FILE, MERGE_CONFIG_FILE, MERGING_FILE, Published,
    replace_published, sidecars_in,
};
use crate::data::DatasetSpec;
use crate::job::published::{class_of, hub_datasets, shared_front_matter};
use crate::merging::recipe::without_folders;
use crate::merging::vocabulary::TOKENIZER_FILES;
use crate::report::card::{Card, CardSource};
use crate::report::cards;
use crate::run::merging::MergeReport;
use crate::settings::MergeEval;

impl MergeJob {
    /// Writes the card again, with the perplexities of a finished evaluation.
    ///
    /// # Errors
    /// Fails when a file cannot be written.
    pub(super) fn publish_perplexities(&self, report: &MergeReport) -> Result<()> {
        if report.perplexities.is_empty() || self.settings.no_model_card {
            return Ok(());
        }
        let card = self.card(&self.without_paths(report));
        replace_published(self.folder.model_folder()?, CARD_FILE, card.text().as_bytes())
    }

    fn without_paths(&self, report: &MergeReport) -> MergeReport {
        report.without_paths(self.merge.recipe.to_yaml(without_folders), without_folders)
    }

    /// The card, from a record without paths.
    fn card(&self, public: &MergeReport) -> Card {
        let source = CardSource {
            front_matter: shared_front_matter(self.merge.inputs.folders().into_iter()),
            kept_as: None,
            datasets: hub_datasets(self.datasets()),
            class: class_of(&self.merge.donor.config),
        };
        cards::merged(public, source, self.command(public))
    }

    /// The texts whose activations decide the weights.
    fn datasets(&self) -> impl Iterator<Item = &DatasetSpec> {
        self.settings.dataset.iter().filter(|_| self.settings.saliency.is_some())
    }

    /// The command that repeats the merge.
    fn command(&self, public: &MergeReport) -> Vec<String> {
        let settings = &self.settings;
        let mut command = ["prune", "merge", MERGE_CONFIG_FILE].map(String::from).to_vec();
        let mut flag = |name: &str, value: &str| {
            command.extend([format!("--{name}"), value.to_string()]);
        };
        flag("semantics", &public.semantics);
        if settings.trim_scope.is_some()
            && let Some(scope) = &public.trim_scope
        {
            flag("trim-scope", scope);
        }
        if let Some(majority) = settings.majority_sign {
            flag("majority-sign", majority.name());
        }
        if let Some(of) = public.saliency.as_ref().and_then(|saliency| saliency.of.as_deref()) {
            flag("saliency", of);
            self.datasets().for_each(|of| flag("dataset", &of.without_folders()));
            flag("nsamples", &settings.nsamples.to_string());
        }
        flag("seed", &settings.seed.to_string());
        if settings.eval != MergeEval::None {
            flag("eval-dataset", &settings.evaluation_text().without_folders());
            if let Some(windows) = settings.eval_windows {
                flag("eval-windows", &windows.to_string());
            }
        }
        if let Some(seqlen) = settings.seqlen {
            flag("seqlen", &seqlen.to_string());
        }
        flag("save", "out");
        let switches = [
            ("--keep-zeros", settings.keep_zeros),
            ("--unsafe-truncate-embeddings", settings.unsafe_truncate_embeddings),
        ];
        command.extend(switches.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.into()));
        command
    }

    /// The files that are published with the merged model.
    pub(super) fn published(&self, report: &MergeReport) -> Result<Published> {
        let public = self.without_paths(report);
        let mut written = vec![
            (CONFIG_FILE, json_file(&self.merge.donor.config)?),
            (MERGE_CONFIG_FILE, public.recipe.clone().into_bytes()),
            (MERGING_FILE, json_file(&public)?),
        ];
        if !self.settings.no_model_card {
            written.push((CARD_FILE, self.card(&public).text().into_bytes()));
        }
        let donor = &self.merge.donor().folder;
        let (tokenizer, edited) = self.merge.vocabulary.files(donor)?;
        written.extend(edited.written);
        let mut copied = Vec::new();
        for (folder, has_tokenizer) in [(&**donor, false), (tokenizer, true)] {
            let sidecars = sidecars_in(folder)?.into_iter().filter(|name| {
                TOKENIZER_FILES.contains(&name.as_str()) == has_tokenizer
                    && name != INDEX_FILE
                    && !edited.left_out.contains(&name.as_str())
                    && !written.iter().any(|(own, _)| own == name)
            });
            copied.extend(sidecars.map(|name| (folder.join(&name), name)));
        }
        Ok(Published { written, copied, has_own_sums: false })
    }
}
