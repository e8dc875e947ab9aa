//! The files that a recovery publishes beside the weights: `recovery.json`, the record of the pruning, and a model card.
//!
//! They tell a stranger nothing about this machine: a path is reduced to its last component.

use anyhow::{Context, Result};
use serde::Serialize;

use super::super::record::RunResults;
use super::super::settled_run::SettledRun;
use crate::bytes::{LARGEST_RECORD, json_file};
use crate::checkpoint::Published;
use crate::input::{self, Expected};
use crate::report::cards::{self, CardMeasures, CardModel};
use crate::run::RecoveryReport;
use crate::run::manifest::{Perplexities, name_of};
use crate::run::pruning_record::PRUNING_FILE;

/// The record of the training in the model's folder.
pub(super) const RECOVERY_FILE: &str = "recovery.json";

/// The content of [`RECOVERY_FILE`].
#[derive(Serialize)]
struct PublishedRecovery<'a> {
    schema: u32,
    prune_version: &'a str,
    /// The name of the checkpoint that was trained.
    model: String,
    recovery: RecoveryReport,
    perplexity: &'a Perplexities,
}

impl SettledRun {
    /// Returns the files that are published with the recovered model.
    pub(in crate::job) fn published_recovery(&self, results: &RunResults) -> Result<Published> {
        let folder = &self.model.folder;
        let mut report = results.recovery.clone().context("a training has a report")?;
        report.teacher = report.teacher.as_deref().map(name_of);
        report.text = report.text.published();
        let published = PublishedRecovery {
            schema: 1,
            prune_version: env!("CARGO_PKG_VERSION"),
            model: self.model.report()?.name(),
            recovery: report,
            perplexity: &results.perplexity,
        };
        let mut written = vec![(RECOVERY_FILE, json_file(&published)?)];
        let pruning = folder.join(PRUNING_FILE);
        // Its counts of zeros are no longer true where masks have closed.
        if pruning.is_file() && published.recovery.closing.is_none() {
            let bytes = input::read(&pruning, LARGEST_RECORD, Expected::Json)
                .map_err(|error| input::cannot_read(&pruning, &error))?;
            written.push((PRUNING_FILE, bytes));
        }
        let id = self.model.hub_model.as_ref().map(|hub| hub.id.as_str());
        let on = self.texts.windows.as_ref().map(|text| &text.protocol);
        self.with_cards(written, |source| {
            Ok(cards::recovered(
                CardModel { name: &published.model, id },
                &published.recovery,
                CardMeasures { perplexity: published.perplexity, on },
                source,
                self.command()?,
            ))
        })
    }
}
