//! Names of the files in a run folder.

use std::path::Path;

use anyhow::{Context, Result};

/// `.run.json.1234.tmp`: a small file on its way to its name.
pub(super) fn is_temporary(name: &str) -> bool {
    let inner = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
    let number = inner.and_then(|inner| inner.rsplit_once('.'));
    number.is_some_and(|(of, number)| !of.is_empty() && number.parse::<u32>().is_ok())
}

/// The names of the files in a folder, sorted; none where the folder does not exist.
pub(super) fn files_in(folder: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("listing `{}`", folder.display())),
    };
    let names: std::io::Result<Vec<String>> =
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect();
    let mut names = names.with_context(|| format!("listing `{}`", folder.display()))?;
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_temporary_files_are_tidied_away() {
        assert!(is_temporary(".run.json.1234.tmp"));
        for other in ["run.json", ".run.json.tmp", ".tmp", "..1.tmp", ".a.x.tmp", "a.1.tmp"] {
            assert!(!is_temporary(other), "{other}");
        }
    }
}
