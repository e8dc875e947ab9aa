//! The safetensors files of a folder, and the refusal of a folder without usable weights.
//!
//! This file looks only at names; `source` opens the files. Pickled weights are never opened, because loading a pickle can run code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path};

use serde::Deserialize;

use super::names::{INDEX_FILE, SINGLE_FILE};
use super::not_a_model::not_a_model;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::input::{self, Expected};

/// The largest index that is read. An index has a line of JSON per tensor; published indices have up to 10 MB.
const LARGEST_INDEX: ByteSize = ByteSize(64 << 20);

const AGAIN: &str = "download this file again";

/// The weights of a folder, by name.
#[derive(Debug)]
pub(super) struct FolderWeights {
    /// Shard file names, sorted.
    pub(super) shards: Vec<String>,
    /// Tensor → shard, from the index; empty for a single file.
    pub(super) weight_map: BTreeMap<String, String>,
}

/// The used part of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Looks for `model.safetensors.index.json`, then `model.safetensors`.
///
/// Fails when the folder is missing or holds no safetensors, when the index is not valid or leads out of the folder, or
/// when a shard it names is missing.
pub(super) fn find_weights(folder: &Path) -> anyhow::Result<FolderWeights> {
    let shown = folder.display();
    if !folder.exists() {
        return Err(Failure::new(format!("there is no folder `{shown}`")).into());
    }
    if let Some(failure) = not_a_model(folder) {
        return Err(failure.into());
    }
    if folder.join(INDEX_FILE).is_file() {
        let weights = from_index(folder)?;
        let has_single = folder.join(SINGLE_FILE).is_file();
        if has_single && !weights.shards.iter().any(|shard| shard == SINGLE_FILE) {
            return Err(Failure::new(format!("`{shown}` holds two checkpoints")).detail(format!(
                "`{INDEX_FILE}` names {} files, and `{SINGLE_FILE}`, which is not one of them, is there, too; programs differ in which they load",
                weights.shards.len()
            ))
            .hint(format!(
                "move `{SINGLE_FILE}`, or the index and its files, somewhere else"
            ))
            .into());
        }
        Ok(weights)
    } else if folder.join(SINGLE_FILE).is_file() {
        Ok(FolderWeights { shards: vec![SINGLE_FILE.into()], weight_map: BTreeMap::new() })
    } else {
        for name in [INDEX_FILE, SINGLE_FILE] {
            let path = folder.join(name);
            if path.is_symlink() && !path.exists() {
                return Err(broken_link(&path).into());
            }
        }
        Err(no_safetensors(folder)?.into())
    }
}

/// The refusal of a broken link, which a hub's cache has after a file was removed.
pub(super) fn broken_link(path: &Path) -> Failure {
    Failure::new(format!("`{}` is a link to a file that is not there", path.display()))
        .hint("download the checkpoint again, this file at least")
}

fn from_index(folder: &Path) -> anyhow::Result<FolderWeights> {
    let path = folder.join(INDEX_FILE);
    let bad = |why: &str| Failure::new(format!("cannot read `{}`: {why}", path.display()));
    let text = input::read(&path, LARGEST_INDEX, Expected::Json)
        .map_err(|error| input::cannot_read(&path, &error).or_hint(AGAIN))?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|error| bad("it is not a valid index").detail(error.to_string()).hint(AGAIN))?;
    if weight_map.is_empty() {
        return Err(bad("it names no tensors").hint(AGAIN).into());
    }
    let shards: BTreeSet<&String> = weight_map.values().collect();
    for name in &shards {
        let why = if !is_plain_name(name) {
            "it names a file outside its folder"
        } else if !name.ends_with(".safetensors") {
            "it names a file that is not safetensors"
        } else {
            continue;
        };
        return Err(bad(why).detail(format!("`{name}`")).hint(AGAIN).into());
    }
    let mut missing = shards.clone();
    missing.retain(|name| !folder.join(name).is_file());
    if let Some(first) = missing.first() {
        let place = folder.display();
        let failure =
            Failure::new(format!("shard `{first}` is missing in `{place}`")).detail(format!(
                "the index names {} files, {} of them are missing",
                shards.len(),
                missing.len()
            ));
        let there = weights_beside(folder, &shards);
        return Err(match there.as_slice() {
            [] => failure.hint("download the checkpoint again, this file at least"),
            [first, ..] => failure
                .detail(format!(
                    "{} other files of weights are there, such as `{first}`: the index is not of these files",
                    there.len()
                ))
                .hint(format!("download `{INDEX_FILE}` again, or the files that it names")),
        }
        .into());
    }
    Ok(FolderWeights { shards: shards.into_iter().cloned().collect(), weight_map })
}

/// Safetensors files of a folder that its index does not name, sorted.
fn weights_beside(folder: &Path, named: &BTreeSet<&String>) -> Vec<String> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> =
        names.filter(|name| name.ends_with(".safetensors") && !named.contains(name)).collect();
    names.sort();
    names
}

/// Returns whether a name is a single ordinary path component on every platform.
pub fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let single =
        matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    single && !name.contains(['/', '\\', ':', '\0'])
}

/// The refusal of a folder without `model.safetensors` and index; it names the files found instead.
fn no_safetensors(folder: &Path) -> anyhow::Result<Failure> {
    let cannot_list = |error: std::io::Error| {
        Failure::new(format!("cannot list `{}`", folder.display())).detail(error.to_string())
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot_list)? {
        let name = entry.map_err(cannot_list)?.file_name();
        names.push(name.to_string_lossy().into_owned());
    }
    names.sort();
    let shown = folder.display();
    let first_with = |endings: &[&str]| {
        let ends = |name: &&String| endings.iter().any(|ending| name.ends_with(ending));
        names.iter().find(ends)
    };
    Ok(if names.is_empty() {
        Failure::new(format!("the folder `{shown}` is empty"))
    } else if let Some(found) = first_with(&[".safetensors"]) {
        Failure::new(format!("`{shown}` holds neither `{SINGLE_FILE}` nor `{INDEX_FILE}`"))
            .detail(format!("found `{found}`"))
            .hint("download the checkpoint again, its index at least")
    } else if let Some(found) = first_with(&[".bin", ".pth", ".pt", ".ckpt"]) {
        Failure::new(format!("`{shown}` holds pickled weights, and loading a pickle can run code"))
            .detail(format!("found `{found}`, no safetensors"))
            .hint(format!(
                "convert it where you trust it: python -c \"from transformers import AutoModelForCausalLM as M; \
                 M.from_pretrained('{shown}').save_pretrained('{shown}-safetensors', safe_serialization=True)\""
            ))
    } else if let Some(found) = first_with(&[".gguf"]) {
        Failure::new(format!("`{shown}` holds GGUF weights, not safetensors"))
            .detail(format!("found `{found}`"))
            .hint("use the checkpoint it was converted from")
    } else {
        Failure::new(format!("`{shown}` holds no weights"))
            .detail(format!("neither `{SINGLE_FILE}` nor `{INDEX_FILE}` is there"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_file_names_may_stand_in_an_index() {
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
        for name in [
            "../a.safetensors",
            "/a.safetensors",
            "a/b.safetensors",
            "..",
            ".",
            "",
            "c:\\a",
            "a\\b",
            "a\0b",
        ] {
            assert!(!is_plain_name(name), "{name:?}");
        }
    }
}
