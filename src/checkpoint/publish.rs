//! The last step of an output: its files get their names, `config.json` last, and a list of their hashes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::atomic::{cannot_write, sync_folder, write_atomic};
use super::names::INDEX_FILE;
use super::sidecars::{CONFIG_FILE, OwnFiles, SUMS_FILE, cards_in, copy_sidecar, sidecars_in};
use super::source::Checkpoint;
use super::target::OutputShard;
use crate::bytes::hex;
use crate::disk;
use crate::failure::Failure;
use crate::run::verification::Verification;

/// Copies the sidecars, writes the run's own files and renames the partial files, `config.json` last. [`SUMS_FILE`] lists the hash of every file.
/// Fails when a partial file has disappeared, and when a file cannot be read, written or renamed.
pub(super) fn publish(
    source: &Checkpoint,
    target: &Path,
    shards: Vec<OutputShard>,
    own: &OwnFiles,
    verification: &Verification,
) -> anyhow::Result<()> {
    // Another process may have finished this model while this one slept.
    for OutputShard { partial, file, .. } in &shards {
        if !disk::is_at(file, partial).map_err(|error| cannot_write(partial, &error))? {
            return Err(
                Failure::new(format!("`{}` has disappeared", partial.display()))
                    .detail("another process has finished this model, or removed the file")
                    .hint("run the same command again: it continues from the existing files")
                    .into(),
            );
        }
    }
    // Without its configuration, an older model in this folder cannot load with half of the new files.
    let config = target.join(CONFIG_FILE);
    disk::remove(&config).map_err(|error| cannot_write(&config, &error))?;
    sync_folder(target)?;
    let files = verification.files.iter();
    let mut sums: BTreeMap<String, String> = files
        .map(|file| (file.file.clone(), file.sha256.clone()))
        .collect();
    let sidecars = sidecars_in(source.folder())?;
    let is_late = |name: &str| name == INDEX_FILE || name == CONFIG_FILE;
    for name in &sidecars {
        let sum = if is_late(name) {
            let path = source.folder().join(name);
            let bytes = fs::read(&path).map_err(|error| {
                Failure::new(format!("cannot read `{}`", path.display())).detail(error.to_string())
            })?;
            hex(&Sha256::digest(&bytes))
        } else {
            copy_sidecar(source.folder(), target, (name, name))?
        };
        sums.insert(name.clone(), sum);
    }
    put_own_files(source.folder(), target, own, &mut sums)?;
    for (output, shard) in shards.into_iter().zip(source.shards()) {
        let OutputShard { partial, file, .. } = output;
        // Windows cannot rename an open file.
        drop(file);
        let path = target.join(&shard.file_name);
        disk::rename(&partial, &path).map_err(|error| cannot_write(&path, &error))?;
    }
    let sums: String = sums
        .iter()
        .map(|(name, sum)| format!("{sum}  {name}\n"))
        .collect();
    write_atomic(&target.join(SUMS_FILE), sums.as_bytes())?;
    for name in sidecars.iter().filter(|name| is_late(name)) {
        copy_sidecar(source.folder(), target, (name, name))?;
        sync_folder(target)?;
    }
    Ok(())
}

/// Writes and copies the run's own files, and adds their hashes. An attempt with other settings may have left other cards.
fn put_own_files(
    source: &Path,
    target: &Path,
    own: &OwnFiles,
    sums: &mut BTreeMap<String, String>,
) -> anyhow::Result<()> {
    for (name, new_name) in &own.copied {
        let sum = copy_sidecar(source, target, (name, new_name))?;
        sums.insert(new_name.clone(), sum);
    }
    for (name, bytes) in &own.written {
        write_atomic(&target.join(name), bytes)?;
        sums.insert((*name).to_string(), hex(&Sha256::digest(bytes)));
    }
    let cards = cards_in(target).map_err(|error| cannot_write(target, &error))?;
    for stale in cards.iter().filter(|card| !sums.contains_key(*card)) {
        let stale = target.join(stale);
        disk::remove(&stale).map_err(|error| cannot_write(&stale, &error))?;
    }
    Ok(())
}
