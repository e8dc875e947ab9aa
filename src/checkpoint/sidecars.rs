//! The files that are copied with the weights byte for byte: config, tokenizer, chat template, licence.
//!
//! Without the tokenizer the output is no usable model; without the licence it may not be distributed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::atomic::cannot_write;
use super::folder::broken_link;
use super::names::INDEX_FILE;
use crate::bytes::hex;
use crate::disk;
use crate::failure::Failure;

/// The configuration of a model. It is written last, so that an unfinished folder does not load.
pub const CONFIG_FILE: &str = "config.json";

/// Bytes that [`copy_sidecar`] moves at once.
const COPY_BYTES: usize = 1 << 20;

/// The hashes of all files of the folder, in the format of `sha256sum -c`.
pub const SUMS_FILE: &str = "SHA256SUMS";

const NAMES: [&str; 12] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    INDEX_FILE,
    CONFIG_FILE,
];

/// Beginnings of the names of licences: `LICENSE`, `LICENSE.txt`, `USE_POLICY.md`, ...
const PREFIXES: [&str; 3] = ["LICENSE", "USE_POLICY", "NOTICE"];

/// The sidecars present in `folder`, in the order in which they are copied: the index late, `config.json` last.
///
/// # Errors
/// Fails when the folder cannot be listed, and for a broken link.
pub fn sidecars_in(folder: &Path) -> anyhow::Result<Vec<String>> {
    let cannot_list = |error: io::Error| {
        Failure::new(format!("cannot list `{}`", folder.display())).detail(error.to_string())
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot_list)? {
        let entry = entry.map_err(cannot_list)?;
        // All known names are UTF-8.
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let known = NAMES.contains(&name.as_str())
            || PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        let path = entry.path();
        if known && path.is_symlink() && !path.exists() {
            return Err(broken_link(&path).into());
        }
        // Links are followed: the files of the hub's cache are links to blobs.
        if known && path.is_file() {
            found.push(name);
        }
    }
    found.sort_by_key(|name| (name == CONFIG_FILE, name == INDEX_FILE, name.clone()));
    Ok(found)
}

/// Checks that the sidecars of `folder` can be read, before the run computes anything.
///
/// # Errors
/// Fails for the first unreadable one, and as [`sidecars_in`].
pub fn check_sidecars(folder: &Path) -> anyhow::Result<()> {
    for name in sidecars_in(folder)? {
        let path = folder.join(name);
        File::open(&path).map_err(|error| {
            Failure::new(format!("cannot open `{}`", path.display()))
                .detail(error.to_string())
                .hint("it is copied with the weights: make it readable, or remove it")
        })?;
    }
    Ok(())
}

/// Returns whether a name belongs to a checkpoint that this program writes: weights, finished or not, or a sidecar.
pub fn is_model_file(name: &str) -> bool {
    let finished = name.strip_suffix(super::PARTIAL_SUFFIX).unwrap_or(name);
    finished.ends_with(".safetensors")
        || finished == SUMS_FILE
        || NAMES.contains(&finished)
        || PREFIXES.iter().any(|prefix| finished.starts_with(prefix))
}

/// Copies one file so that it appears whole, waits until it is on the disk, and returns the SHA-256 of its bytes, in hex.
pub(super) fn copy_sidecar(source: &Path, target: &Path, name: &str) -> anyhow::Result<String> {
    let (from, to) = (source.join(name), target.join(name));
    let temporary = target.join(format!("{name}{}", super::PARTIAL_SUFFIX));
    let cannot = |error: io::Error| cannot_write(&to, &error);
    let mut reader = File::open(&from).map_err(|error| {
        Failure::new(format!("cannot open `{}`", from.display())).detail(error.to_string())
    })?;
    // `fs::copy` would also copy a read-only mode.
    let writer = disk::create(&temporary).map_err(cannot)?;
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; COPY_BYTES]);
    let mut at = 0;
    loop {
        let length = reader.read(&mut buffer).map_err(|error| {
            Failure::new(format!("cannot read `{}`", from.display())).detail(error.to_string())
        })?;
        let bytes = &buffer[..length];
        if bytes.is_empty() {
            break;
        }
        disk::write_all_at(&writer, bytes, at).map_err(cannot)?;
        hasher.update(bytes);
        at += length as u64;
    }
    disk::sync(&writer).map_err(cannot)?;
    drop(writer);
    disk::rename(&temporary, &to).map_err(cannot)?;
    Ok(hex(&hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sidecars_are_the_known_files_with_config_last() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let names = [
            "config.json",
            "tokenizer.json",
            "LICENSE.txt",
            "USE_POLICY.md",
            "model.safetensors.index.json",
            "model.safetensors",
            "consolidated.00.pth",
            "README.md",
        ];
        for name in names {
            fs::write(folder.path().join(name), name)?;
        }
        fs::create_dir(folder.path().join("chat_templates"))?;
        fs::create_dir(folder.path().join("LICENSES"))?;
        let expected = [
            "LICENSE.txt",
            "USE_POLICY.md",
            "tokenizer.json",
            "model.safetensors.index.json",
            "config.json",
        ];
        assert_eq!(sidecars_in(folder.path())?, expected);
        Ok(())
    }
}
