//! `cell.json`: the settings of a cell, and the error if the cell failed. A sweep continues in a folder only where all settings are equal.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;

use super::cells::PlannedCell;
use crate::bytes::{LARGEST_RECORD, json_file, read_whole};
use crate::checkpoint::write_atomic;
use crate::failure::Failure;
use crate::job::folder::{MANIFEST, lock};
use crate::job::opened::OpenedModel;
use crate::job::same_run::with_differences;
use crate::run::Manifest;
use crate::run::grid::{CELL_FILE, CellRecord, CellReport, GridCell, SCHEMA};
use crate::settings::Settings;

/// The settings that all cells share, as text by name.
pub(super) type CommonSettings = BTreeMap<String, String>;

/// The settings in which cells differ.
const OF_THE_CELL: [&str; 4] = ["prune_method", "sparsity_ratio", "sparsity_type", "seed"];

/// Settings that lead to texts and arithmetic. A cell that is finished is compared by their names.
const BY_NAME: [&str; 10] = [
    "dataset",
    "eval_dataset",
    "eval_windows",
    "dtype",
    "kl_positions",
    "tasks",
    "eval_zero_shot",
    "num_fewshot",
    "limit",
    "add_bos",
];

/// Returns the settings of all cells that decide the outcome, and the source.
pub(super) fn common(run: &Settings, model: &OpenedModel) -> Result<CommonSettings> {
    let mut common = run.deciding()?;
    common.retain(|name, _| !OF_THE_CELL.contains(&name.as_str()));
    let all = run.by_name()?;
    for name in BY_NAME {
        let text = match all.get(name) {
            Some(serde_json::Value::String(text)) => text.clone(),
            Some(serde_json::Value::Null) | None => "none".to_string(),
            Some(other) => other.to_string(),
        };
        common.insert(name.to_string(), text);
    }
    common.extend(
        [
            ("seqlen", model.seqlen.to_string()),
            ("source", model.checkpoint.fingerprint()?),
            ("config", serde_json::to_string(&*model.config)?),
        ]
        .map(|(name, value)| (name.to_string(), value)),
    );
    Ok(common)
}

/// The record of a cell; `None` if the folder has no such record.
///
/// # Errors
/// Fails for a file that is no such record, and for a record of a later version.
pub(super) fn read(folder: &Path) -> Result<Option<CellRecord>> {
    let path = folder.join(CELL_FILE);
    match read_json::<CellRecord>(&path)? {
        Some(record) if record.schema > SCHEMA => {
            Err(unreadable(&path, &format!("its schema is {}", record.schema)).into())
        }
        record => Ok(record),
    }
}

/// A record of this program; `None` if there is no such file.
fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Failure> {
    match read_whole(path, LARGEST_RECORD) {
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(unreadable(path, &error)),
        Ok(text) => {
            serde_json::from_slice(&text).map(Some).map_err(|error| unreadable(path, &error))
        }
    }
}

/// Returns whether a file is not there; its folder may be a file.
fn is_absent(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory)
}

fn unreadable(path: &Path, why: &dyn std::fmt::Display) -> Failure {
    Failure::new(format!("`{}` is not a record of this program", path.display()))
        .detail(why.to_string())
        .hint("remove its folder, or choose another --save folder")
}

/// The record of a finished run; `None` if the folder has no such record.
pub(in crate::job) fn manifest(folder: &Path) -> Result<Option<Manifest>> {
    Ok(read_json(&folder.join(MANIFEST))?)
}

/// The report of the cell in a folder; `None` if the folder has no cell.
///
/// # Errors
/// Fails for records that cannot be read.
pub(super) fn report(folder: &Path) -> Result<Option<CellReport>> {
    let record = read(folder)?;
    let Some((cell, error)) = record.and_then(|record| Some((record.cell?, record.error))) else {
        return Ok(None);
    };
    let manifest = manifest(folder)?;
    Ok(Some(CellReport::of(cell, error, manifest.as_ref())))
}

/// The records of all cells in the folder of a sweep, by the names of their folders.
///
/// # Errors
/// Fails for a folder that cannot be listed, and for a record that cannot be read.
pub(super) fn all(out: &Path) -> Result<BTreeMap<String, CellRecord>> {
    let mut found = BTreeMap::new();
    let entries = match std::fs::read_dir(out) {
        Err(error) if is_absent(&error) => return Ok(found),
        entries => entries.with_context(|| format!("listing `{}`", out.display()))?,
    };
    for entry in entries {
        let entry = entry.with_context(|| format!("listing `{}`", out.display()))?;
        if let Some(record) = read(&entry.path())? {
            found.insert(entry.file_name().to_string_lossy().into_owned(), record);
        }
    }
    found.retain(|_, record| record.cell.is_some());
    Ok(found)
}

/// Refuses a folder that holds cells whose settings differ. With `--force` the cells of this grid may differ, since they are replaced.
///
/// # Errors
/// Fails with the differences.
pub(super) fn check(
    out: &Path,
    common: &CommonSettings,
    cells: &[PlannedCell],
    is_forced: bool,
) -> Result<()> {
    let is_planned = |name: &String| cells.iter().any(|cell| cell.name() == *name);
    for (name, record) in all(out)? {
        if record.settings != *common && !(is_forced && is_planned(&name)) {
            return Err(refusal(out, &name, &record.settings, common).into());
        }
    }
    for cell in cells.iter().filter(|_| !is_forced) {
        let folder = &cell.folder;
        if read(folder)?.is_none() && has_files(folder) {
            return Err(Failure::new(format!(
                "`{}` holds files that are not of a sweep",
                folder.display()
            ))
            .hint("choose another --save folder, or replace these files with --force")
            .into());
        }
    }
    Ok(())
}

/// Returns whether a folder has files besides the traces of an attempt that ended before it had a record.
fn has_files(folder: &Path) -> bool {
    let is_foreign =
        |name: &str| !name.starts_with(lock::FILE) && !name.starts_with(&format!(".{CELL_FILE}."));
    // A folder that cannot be listed is refused when the cell begins.
    std::fs::read_dir(folder).is_ok_and(|mut entries| {
        entries
            .any(|entry| entry.is_ok_and(|entry| is_foreign(&entry.file_name().to_string_lossy())))
    })
}

fn refusal(out: &Path, name: &str, there: &CommonSettings, here: &CommonSettings) -> Failure {
    let names: BTreeSet<&String> = there.keys().chain(here.keys()).collect();
    let value = |settings: &CommonSettings, name| {
        settings.get(name).map_or("none".to_string(), String::clone)
    };
    let all = names.into_iter().map(|name| (name.clone(), value(there, name), value(here, name)));
    let differences: Vec<_> = all.filter(|(_, then, now)| then != now).collect();
    let refusal = format!("`{}` holds cells of a sweep with other settings", out.display());
    let failure = Failure::new(refusal).detail(format!("in `{name}`:"));
    with_differences(failure, &differences).hint(
        "give the settings of that sweep, choose another --save folder, or replace its cells with --force",
    )
}

/// Records that a cell begins. A record that says so already stays.
pub(super) fn begin(cell: &PlannedCell, common: &CommonSettings) -> Result<()> {
    let record = record_of(Some(cell.cell.clone()), common, None);
    if read(&cell.folder)?.as_ref() == Some(&record) {
        return Ok(());
    }
    write(&cell.folder, &record)
}

/// Records the error of a cell.
pub(super) fn failed(cell: &PlannedCell, common: &CommonSettings, error: &str) -> Result<()> {
    let error = Some(error.to_string());
    write(&cell.folder, &record_of(Some(cell.cell.clone()), common, error))
}

/// The record of a cell; without `cell`, of the dense model.
pub(super) fn record_of(
    cell: Option<GridCell>,
    common: &CommonSettings,
    error: Option<String>,
) -> CellRecord {
    CellRecord { schema: SCHEMA, cell, settings: common.clone(), error }
}

/// Writes `cell.json`.
pub(super) fn write(folder: &Path, record: &CellRecord) -> Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("creating the folder `{}`", folder.display()))?;
    write_atomic(&folder.join(CELL_FILE), &json_file(record)?)
}
