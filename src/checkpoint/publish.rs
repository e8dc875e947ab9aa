//! The last step of an output: its files get their names, `config.json` last, and a list of their hashes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::atomic::{cannot_write, sync_folder, write_atomic};
use super::layout::Layout;
use super::names::{CONFIG_FILE, INDEX_FILE};
use super::sidecars::{SUMS_FILE, cards_in, copy_sidecar, sidecars_in};
use super::target::OutputShard;
use crate::bytes::hex;
use crate::disk;
use crate::failure::Failure;
use crate::run::verification::Verification;

/// The files that get late names, in this order: with them the folder loads.
const LATE: [&str; 2] = [INDEX_FILE, CONFIG_FILE];

/// Files beside the weights.
#[derive(Debug, Default)]
pub struct Published {
    /// Names and contents.
    pub written: Vec<(&'static str, Vec<u8>)>,
    /// Files of any folder that are copied byte for byte: their paths, and their names here.
    pub copied: Vec<(PathBuf, String)>,
    /// True without a new list of hashes: the files equal the files of a folder that has its own list, or none.
    pub has_own_sums: bool,
}

impl Published {
    /// Returns whether a file is published under this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.written.iter().any(|(own, _)| *own == name)
            || self.copied.iter().any(|(_, own)| own == name)
    }

    /// The same with the sidecars of `source`.
    pub(super) fn with_sidecars(mut self, source: &Path) -> anyhow::Result<Self> {
        let sidecars = sidecars_in(source)?.into_iter();
        self.copied.extend(sidecars.map(|name| (source.join(&name), name)));
        Ok(self)
    }
}

/// Writes and copies the files beside the weights and renames the partial files, `config.json` last. [`SUMS_FILE`] lists the hash of
/// every file, unless the files have their own list. Fails when a partial file has disappeared, and when a file cannot be read, written or renamed.
pub(super) fn publish(
    layout: &Layout,
    target: &Path,
    shards: Vec<OutputShard>,
    published: &Published,
    verification: &Verification,
) -> anyhow::Result<()> {
    // Another process may have finished this model while this process slept.
    for OutputShard { partial, file, .. } in &shards {
        if !disk::is_at(file, partial).map_err(|error| cannot_write(partial, &error))? {
            return Err(Failure::new(format!("`{}` has disappeared", partial.display()))
                .detail("another process has finished this model, or removed the file")
                .hint("run the same command again: it continues from the existing files")
                .into());
        }
    }
    // Without its configuration, an older model in this folder cannot load with half of the new files.
    let config = target.join(CONFIG_FILE);
    disk::remove(&config).map_err(|error| cannot_write(&config, &error))?;
    sync_folder(target)?;
    let files = verification.files.iter();
    let mut sums: BTreeMap<String, String> =
        files.map(|file| (file.file.clone(), file.sha256.clone())).collect();
    put_early(target, published, &mut sums)?;
    for (output, planned) in shards.into_iter().zip(layout.files()) {
        let OutputShard { partial, file, .. } = output;
        // Windows cannot rename an open file.
        drop(file);
        let path = target.join(&planned.file_name);
        disk::rename(&partial, &path).map_err(|error| cannot_write(&path, &error))?;
    }
    if !published.has_own_sums {
        let sums: String = sums.iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect();
        write_atomic(&target.join(SUMS_FILE), sums.as_bytes())?;
    }
    put_late(target, published)
}

/// Replaces a file beside the weights of a published model, and its line in [`SUMS_FILE`].
///
/// # Errors
/// Fails when a file cannot be read or written. A run that is continued publishes all files again.
pub fn replace_published(target: &Path, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
    let list = target.join(SUMS_FILE);
    let sums = fs::read_to_string(&list).map_err(|error| {
        Failure::new(format!("cannot read `{}`", list.display())).detail(error.to_string())
    })?;
    write_atomic(&target.join(name), bytes)?;
    let sum = hex(&Sha256::digest(bytes));
    let lines = sums.lines().map(|line| match line.split_once("  ") {
        Some((_, of)) if of == name => format!("{sum}  {name}\n"),
        _ => format!("{line}\n"),
    });
    write_atomic(&list, lines.collect::<String>().as_bytes())
}

/// Copies and writes all files except the [`LATE`] files, and adds the hashes of all files to `sums`. Removes stale cards, which an
/// earlier attempt with different settings may have left.
fn put_early(
    target: &Path,
    published: &Published,
    sums: &mut BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let is_late = |name: &str| LATE.contains(&name);
    for (from, name) in &published.copied {
        let sum = if is_late(name) {
            let bytes = fs::read(from).map_err(|error| {
                Failure::new(format!("cannot read `{}`", from.display())).detail(error.to_string())
            })?;
            hex(&Sha256::digest(&bytes))
        } else {
            copy_sidecar(from, target, name)?
        };
        sums.insert(name.clone(), sum);
    }
    for (name, bytes) in &published.written {
        if !is_late(name) {
            write_atomic(&target.join(name), bytes)?;
        }
        sums.insert((*name).to_string(), hex(&Sha256::digest(bytes)));
    }
    let cards = cards_in(target).map_err(|error| cannot_write(target, &error))?;
    for stale in cards.iter().filter(|card| !sums.contains_key(*card)) {
        let stale = target.join(stale);
        disk::remove(&stale).map_err(|error| cannot_write(&stale, &error))?;
    }
    Ok(())
}

fn put_late(target: &Path, published: &Published) -> anyhow::Result<()> {
    let Published { written, copied, .. } = published;
    for late in LATE {
        if let Some((name, bytes)) = written.iter().find(|(name, _)| *name == late) {
            write_atomic(&target.join(name), bytes)?;
        } else if let Some((from, name)) = copied.iter().find(|(_, name)| name == late) {
            copy_sidecar(from, target, name)?;
            sync_folder(target)?;
        }
    }
    Ok(())
}
