//! The files of a split in a folder. The names come from the published archives and the hub's repositories.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::dataset::Name;
use super::dataset_folder::check_all_parts;
use super::role::Role;
use crate::failure::Failure;

/// Finds a split of WikiText-2. The order for the split `train` is: `wiki.train.raw`, `wiki.train.tokens`, a single
/// `wiki.train*.raw`, `train-*.parquet`, and the same names in `wikitext-2-raw-v1/`. Then `wikitext-train.arrow`, as the `datasets` library
/// keeps it in its cache.
pub(super) fn wikitext2(folder: &Path, role: Role) -> Result<Vec<PathBuf>> {
    let split = Name::Wikitext2.split(role);
    for folder in [folder.to_path_buf(), folder.join("wikitext-2-raw-v1")] {
        for name in [format!("wiki.{split}.raw"), format!("wiki.{split}.tokens")] {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(vec![path]);
            }
        }
        let raw = matching(&folder, &format!("wiki.{split}"), ".raw");
        if raw.len() > 1 {
            return Err(ambiguous(&folder, &raw, split, role, "wikitext2").into());
        }
        if !raw.is_empty() {
            return Ok(raw);
        }
        let parts = matching(&folder, &format!("{split}-"), ".parquet");
        if !parts.is_empty() {
            check_all_parts(&folder, &parts)?;
            return Ok(parts);
        }
    }
    let names = format!(
        "wiki.{split}.raw, wiki.{split}.tokens, wiki.{split}*.raw and {split}-*.parquet, there and in wikitext-2-raw-v1/"
    );
    let what = format!("{split} split of WikiText-2");
    let cached = matching(folder, "wikitext-", &format!("{split}.arrow"));
    if !cached.is_empty() {
        return Ok(cached);
    }
    Err(missing(&what, folder, &names, role, "wikitext2").into())
}

/// Finds the shard of C4 in a folder (the hub's repository, or its `en/`): the reference's shard, else the only shard of the split.
pub(super) fn c4(folder: &Path, role: Role) -> Result<PathBuf> {
    let (split, reference) = match role {
        Role::Calibration => ("c4-train", "c4-train.00000-of-01024.json.gz"),
        Role::Evaluation => ("c4-validation", "c4-validation.00000-of-00008.json.gz"),
    };
    let folders = [folder.to_path_buf(), folder.join("en")];
    for folder in &folders {
        for name in [reference, reference.trim_end_matches(".gz")] {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(path);
            }
        }
    }
    for folder in &folders {
        let mut shards = Vec::new();
        for suffix in [".json.gz", ".jsonl.gz", ".json", ".jsonl", ".parquet"] {
            shards.extend(matching(folder, split, suffix));
        }
        match shards.len() {
            0 => {}
            1 => return Ok(shards.remove(0)),
            _ => return Err(ambiguous(folder, &shards, split, role, "c4").into()),
        }
    }
    let names =
        format!("{reference}, unpacked or not, or a single {split}* file, there and in en/");
    let what = format!("`{split}` shard of C4");
    Err(missing(&what, folder, &names, role, "c4").into())
}

/// Finds a split of the Penn Treebank, by its published name.
pub(super) fn ptb(folder: &Path, role: Role) -> Result<PathBuf> {
    let split = Name::Ptb.split(role);
    let name = format!("ptb.{split}.txt");
    let path = folder.join(&name);
    if path.is_file() {
        return Ok(path);
    }
    let what = format!("{split} split of the Penn Treebank");
    Err(missing(&what, folder, &name, role, "ptb").into())
}

/// The files of a folder with a prefix and a suffix, sorted by name.
fn matching(folder: &Path, prefix: &str, suffix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.starts_with(prefix) && name.ends_with(suffix))
        })
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    found.sort();
    found
}

fn missing(what: &str, folder: &Path, names: &str, role: Role, dataset: &str) -> Failure {
    Failure::new(format!("no {what} in `{}`", folder.display()))
        .detail(format!("looked for {names}"))
        .hint(format!("name the file: {} {dataset}:PATH", role.flag()))
}

fn ambiguous(folder: &Path, found: &[PathBuf], split: &str, role: Role, dataset: &str) -> Failure {
    let names = found
        .iter()
        .filter_map(|path| path.file_name())
        .map(|name| name.to_string_lossy().into_owned());
    Failure::new(format!("several {split} files in `{}`", folder.display()))
        .detail(format!("found {}", names.collect::<Vec<_>>().join(", ")))
        .hint(format!("name one of them: {} {dataset}:PATH", role.flag()))
}
