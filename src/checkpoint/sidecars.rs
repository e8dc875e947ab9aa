//! The files that are copied with the weights byte for byte: config, tokenizer, chat template, settings of pictures, licence.
//!
//! Without the tokenizer the output is no usable model; without the licence it may not be distributed.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::atomic::cannot_write;
use super::folder::broken_link;
use super::names::{CONFIG_FILE, INDEX_FILE, MERGE_CONFIG_FILE, MERGING_FILE, PACKED_FILE};
use crate::bytes::hex;
use crate::disk;
use crate::failure::Failure;
use crate::input::{self, Expected};
use crate::run::pruning_record::PRUNING_FILE;

/// Bytes that [`copy_sidecar`] moves at once.
const COPY_BYTES: usize = 1 << 20;

/// The hashes of all files of the folder, in the format of `sha256sum -c`.
pub const SUMS_FILE: &str = "SHA256SUMS";

const NAMES: [&str; 15] = [
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
    // Of models of several media.
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
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

/// The card of a model: the page that the hub shows of its folder.
pub const CARD_FILE: &str = "README.md";

/// The most models whose cards a folder can hold.
const MOST_CARDS: usize = 8;

/// Returns whether a name belongs to a card: `README.md` is the card of the model itself; `README.source.md`, then
/// `README.source.source.md`, are the cards of the models it was made from.
pub(super) fn is_card(name: &str) -> bool {
    let inner = name.strip_prefix("README").and_then(|name| name.strip_suffix(".md"));
    inner.is_some_and(|inner| (0..MOST_CARDS).any(|older| inner == ".source".repeat(older)))
}

/// The name that the card `name` gets in the folder of a model made from this model; `None` for the oldest card.
pub fn card_of_source(name: &str) -> Option<String> {
    let kept = format!("{}.source.md", name.strip_suffix(".md")?);
    is_card(&kept).then_some(kept)
}

/// The cards in `folder`, its own first.
///
/// # Errors
/// Fails when the folder cannot be listed.
pub fn cards_in(folder: &Path) -> io::Result<Vec<String>> {
    let mut cards = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().into_string().unwrap_or_default();
        // A card is nice to have, so a broken link is no failure.
        if is_card(&name) && entry.path().is_file() {
            cards.push(name);
        }
    }
    cards.sort_by_key(String::len);
    Ok(cards)
}

/// Checks that the sidecars of `folder` can be read, before the run computes anything.
///
/// # Errors
/// Fails for the first unreadable file, and as [`sidecars_in`].
pub fn check_sidecars(folder: &Path) -> anyhow::Result<()> {
    let cards = cards_in(folder).unwrap_or_default();
    for name in sidecars_in(folder)?.into_iter().chain(cards) {
        let path = folder.join(name);
        let expected = match path.extension().is_some_and(|ending| ending == "json") {
            true => Expected::Json,
            false => Expected::Copied,
        };
        input::open(&path, expected).map_err(|error| {
            let failure =
                Failure::new(format!("cannot open `{}`", path.display())).detail(error.to_string());
            input::with_remedy(failure, &error)
                .or_hint("it is copied with the weights: make it readable, or remove it")
        })?;
    }
    Ok(())
}

/// Returns whether a name belongs to a checkpoint that this program writes: weights, finished or not, or a sidecar.
pub fn is_model_file(name: &str) -> bool {
    let finished = name.strip_suffix(super::PARTIAL_SUFFIX).unwrap_or(name);
    finished.ends_with(".safetensors")
        || [SUMS_FILE, PRUNING_FILE, MERGING_FILE, MERGE_CONFIG_FILE, PACKED_FILE]
            .contains(&finished)
        || is_card(finished)
        || NAMES.contains(&finished)
        || PREFIXES.iter().any(|prefix| finished.starts_with(prefix))
}

/// Copies the file `from` to `target` under the name `name`, so that it appears whole. Waits until it is on the disk, and returns the
/// SHA-256 of its bytes, in hex.
pub(super) fn copy_sidecar(from: &Path, target: &Path, name: &str) -> anyhow::Result<String> {
    let to = target.join(name);
    let temporary = target.join(format!("{name}{}", super::PARTIAL_SUFFIX));
    let cannot = |error: io::Error| cannot_write(&to, &error);
    let mut reader =
        input::open(from, Expected::Copied).map_err(|error| input::cannot_read(from, &error))?;
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
        // A record belongs to a single model, so the next model does not get it as a sidecar.
        for name in ["SHA256SUMS", "pruning.json", "merging.json", "merge_config.yml"] {
            fs::write(folder.path().join(name), name)?;
            assert!(is_model_file(name), "{name}");
        }
        assert_eq!(sidecars_in(folder.path())?, expected);
        Ok(())
    }

    #[test]
    fn cards_are_kept_with_the_models_made_from_theirs() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let others = ["README.txt", "README.md.bak", "README.sources.md", "xREADME.md"];
        for name in others.iter().chain(&["README.source.md", "README.md"]) {
            fs::write(folder.path().join(name), name)?;
            assert_eq!(is_card(name), !others.contains(name), "{name}");
        }
        assert_eq!(cards_in(folder.path())?, ["README.md", "README.source.md"]);
        let mut names = vec![CARD_FILE.to_string()];
        while let Some(kept) = names.last().and_then(|name| card_of_source(name)) {
            assert!(is_model_file(&kept), "{kept}");
            names.push(kept);
        }
        assert_eq!(names.len(), MOST_CARDS);
        assert_eq!(names[2], "README.source.source.md");
        Ok(())
    }
}
