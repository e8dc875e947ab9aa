//! The output folder of a command that stores a checkpoint in another form: `prune quantize`, `prune pack`, `prune unpack`.

use std::path::Path;

use anyhow::Result;

use super::folder::RunFolder;
use super::same_run::{self, RunIdentity};
use crate::run::Events;
use crate::settings::{ConversionSettings, OutputSettings};

/// The output folder, locked, with the state of an unfinished run.
pub(super) struct ConversionFolder {
    pub(super) folder: RunFolder,
    pub(super) identity: RunIdentity,
}

impl ConversionFolder {
    /// Checks and locks the output folder.
    ///
    /// # Arguments
    /// * `deciding`: what decides the outcome, beside the program
    ///
    /// # Errors
    /// Fails for a folder that holds files, or an unfinished run with other settings.
    pub(super) fn open(
        settings: &ConversionSettings,
        source: &Path,
        deciding: Vec<(&str, String)>,
        events: &dyn Events,
    ) -> Result<Self> {
        let mut folder = RunFolder::of_model(source, &settings.save, settings.force)?;
        folder.lock(events)?;
        let program = ("program", format!("prune {}", env!("CARGO_PKG_VERSION")));
        let deciding = deciding.into_iter().chain([program]);
        let deciding = deciding.map(|(name, value)| (name.to_string(), value)).collect();
        let unfinished = match folder.look()? {
            Some(state) => {
                let output = OutputSettings { force: settings.force, ..OutputSettings::default() };
                same_run::check(state, &deciding, &folder, &output)?
            }
            None => None,
        };
        Ok(Self { folder, identity: RunIdentity { deciding, unfinished } })
    }
}
