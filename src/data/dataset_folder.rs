//! The files of a data set in a folder, as the hub and the `datasets` library lay it out.
//!
//! Read are, in this order of preference: parquet, Arrow (`save_to_disk`, and the library's cache), JSON lines and lists. Files lie in the
//! folder, in `data/` below it, or in a folder per split. A split is known by a word of the name: `train-00000-of-00002.parquet`,
//! `wikitext-test.arrow`, `validation/data-00000-of-00001.arrow`. Files without such a word are the whole data set.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::role::Role;
use crate::failure::Failure;

/// Names of splits, and the role that prefers them; the first that is there is taken.
const TRAIN: [&str; 1] = ["train"];
const TEST: [&str; 5] = ["test", "validation", "valid", "val", "dev"];
/// Endings of files, by preference.
const ENDINGS: [&[&str]; 3] =
    [&[".parquet"], &[".arrow"], &[".jsonl", ".json", ".jsonl.gz", ".json.gz"]];
/// Descriptions of a data set, which are no documents.
const DESCRIPTIONS: [&str; 4] =
    ["dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json"];
/// Files that a message names at most.
const MOST_NAMED: usize = 10;

/// Finds the files of a data set for a role, in order.
///
/// # Errors
/// Fails when the folder has no file of documents, none of the role's split, and when a part is missing.
pub(super) fn find(folder: &Path, role: Role) -> Result<Vec<PathBuf>> {
    let names = data_files(folder);
    let ending = ENDINGS.iter().find(|endings| {
        names.iter().any(|name| endings.iter().any(|ending| name.ends_with(ending)))
    });
    let Some(endings) = ending else {
        return Err(Failure::new(format!("`{}` is a folder without documents", folder.display()))
            .detail("looked for .parquet, .arrow, .jsonl and .json, there, in data/ and in a folder per split")
            .hint(format!(
                "use {0} wikitext2:{1} or {0} c4:{1} if it holds one of these, or name a file",
                role.flag(),
                folder.display()
            ))
            .into());
    };
    let is_read = |name: &&String| endings.iter().any(|ending| name.ends_with(ending));
    let names: Vec<String> = names.iter().filter(is_read).cloned().collect();
    let names = of_split(&names, role).ok_or_else(|| {
        let splits = match role {
            Role::Calibration => &TRAIN[..],
            Role::Evaluation => &TEST,
        };
        Failure::new(format!("no {} split in `{}`", splits[0], folder.display()))
            .detail(format!("found {}", shown(&names)))
            .hint(format!("name the file to read: {} {}/FILE", role.flag(), folder.display()))
    })?;
    let files: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
    check_all_parts(folder, &files)?;
    Ok(files)
}

/// Chooses the files of a role's split from the files of a data set; all files if no name has a split. `None` if the split is absent.
pub(super) fn of_split(names: &[String], role: Role) -> Option<Vec<String>> {
    let of = |split: &str| {
        let names = names.iter().filter(|name| words(name).any(|word| word == split));
        names.cloned().collect::<Vec<_>>()
    };
    let preferred = match role {
        Role::Calibration => &TRAIN[..],
        Role::Evaluation => &TEST,
    };
    let found = preferred.iter().map(|split| of(split)).find(|files| !files.is_empty());
    let has_split = TRAIN.iter().chain(&TEST).any(|split| !of(split).is_empty());
    found.or_else(|| (!has_split).then(|| names.to_vec()))
}

/// Checks that no part is missing. The hub names parts `train-00000-of-00002.parquet`; fewer parts would silently change the text.
pub(super) fn check_all_parts(folder: &Path, parts: &[PathBuf]) -> Result<()> {
    let announced = parts.iter().filter_map(|path| {
        let (_, count) = path.file_stem()?.to_str()?.rsplit_once("-of-")?;
        count.parse::<usize>().ok()
    });
    match announced.max() {
        Some(count) if count != parts.len() => {
            Err(Failure::new(format!("parts are missing in `{}`", folder.display()))
                .detail(format!("the names announce {count} parts, {} are there", parts.len()))
                .hint("copy all parts of one version into the folder, and no others")
                .into())
        }
        _ => Ok(()),
    }
}

/// Names of files, for a message.
pub(super) fn shown(names: &[String]) -> String {
    let mut shown: Vec<&str> = names.iter().take(MOST_NAMED).map(String::as_str).collect();
    if names.len() > shown.len() {
        shown.push("…");
    }
    shown.join(", ")
}

/// Returns whether a file of this name may hold documents.
pub(super) fn is_data(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    // The library keeps results of `map` and unfinished files beside the data.
    let is_left_out = DESCRIPTIONS.contains(&file)
        || file.starts_with(['.', '_'])
        || file.starts_with("cache-")
        || file.starts_with("tmp");
    !is_left_out && ENDINGS.iter().flat_map(|endings| endings.iter()).any(|end| file.ends_with(end))
}

/// The data files of a folder and of the folders below it, by their paths in it, in order.
fn data_files(folder: &Path) -> Vec<String> {
    let list = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    let is_split =
        |name: &&String| *name == "data" || TRAIN.iter().chain(&TEST).any(|split| split == name);
    let mut found = Vec::new();
    for name in list(folder) {
        match folder.join(&name).is_dir() {
            false => found.push(name),
            true if is_split(&&name) => {
                let inner = list(&folder.join(&name)).into_iter();
                found.extend(inner.map(|file| format!("{name}/{file}")));
            }
            true => {}
        }
    }
    found.retain(|name| is_data(name));
    found
}

/// The words of a path: parts between signs.
fn words(name: &str) -> impl Iterator<Item = &str> {
    name.split(|c: char| !c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        folder
    }

    fn found(names: &[&str], role: Role) -> Result<Vec<String>, String> {
        let folder = folder(names);
        let files = find(folder.path(), role).map_err(|error| error.to_string())?;
        let inside = files.iter().map(|file| file.strip_prefix(folder.path()).unwrap());
        Ok(inside.map(|file| file.display().to_string()).collect())
    }

    #[test]
    fn every_layout_gives_the_files_of_the_split() {
        use Role::{Calibration, Evaluation};
        let saved = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow", "state.json"];
        let dict = ["train/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow"];
        let cached = ["wikitext-train.arrow", "wikitext-test.arrow", "cache-1f.arrow"];
        let hub = ["README.md", "data/train-00000-of-00001.parquet", "data/dev.jsonl"];
        for (names, role, expected) in [
            (&saved[..], Calibration, &saved[..2]),
            (&saved, Evaluation, &saved[..2]),
            (&dict, Calibration, &dict[..1]),
            (&dict, Evaluation, &dict[1..]),
            (&cached, Evaluation, &cached[1..2]),
            (&hub, Calibration, &hub[1..2]),
            (
                &["a.jsonl", "b.json.gz", "dataset_info.json"],
                Calibration,
                &["a.jsonl", "b.json.gz"],
            ),
        ] {
            assert_eq!(found(names, role).unwrap(), expected);
        }
        let missing = found(&hub[..2], Evaluation).unwrap_err();
        assert!(missing.contains("no test split") && missing.contains("data/train-0"), "{missing}");
        assert!(found(&["notes.txt"], Calibration).unwrap_err().contains("without documents"));
        assert!(found(&saved[..1], Calibration).unwrap_err().contains("announce 2 parts"));
    }
}
