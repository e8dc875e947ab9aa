//! The refusal of a path that is given as a model and is something else: what was found there, and the path to name instead.
//!
//! Names decide, and for a single file its first bytes. A folder with `config.json` and weights is never refused here.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::names::{CONFIG_FILE, INDEX_FILE, SINGLE_FILE};
use crate::failure::Failure;
use crate::input::{ContentKind, read_settings};

/// The configuration of an adapter of peft.
const ADAPTER_FILE: &str = "adapter_config.json";
/// The beginning of the names of folders that the Trainer of transformers makes during a training.
const CHECKPOINT: &str = "checkpoint-";
/// The beginning of the names of folders in the hub's cache.
const CACHED_MODEL: &str = "models--";

/// Returns the failure for a path that exists and is no model folder; `None` where it may be a model folder, or does not exist.
pub fn not_a_model(path: &Path) -> Option<Failure> {
    if path.is_file() {
        return Some(file(path));
    }
    let has = |name: &str| path.join(name).is_file();
    if !path.is_dir() || has(SINGLE_FILE) || has(INDEX_FILE) {
        return None;
    }
    if has(ADAPTER_FILE) {
        return Some(adapter(path));
    }
    if has(CONFIG_FILE) {
        return None;
    }
    let shown = path.display();
    if let Some(snapshot) = snapshot_of(path) {
        return Some(
            Failure::new(format!("`{shown}` is a folder of the hub's cache, not a model folder"))
                .hint(format!("name its snapshot: {}", snapshot.display())),
        );
    }
    let folders = folders_in(path);
    if let Some(cached) = folders.iter().find(|name| name.starts_with(CACHED_MODEL)) {
        let id = cached[CACHED_MODEL.len()..].replacen("--", "/", 1);
        return Some(
            Failure::new(format!("`{shown}` is the hub's cache, not a model folder"))
                .hint(format!("name a model in it: --model {id} --cache-dir {shown}")),
        );
    }
    let step = |name: &String| name.strip_prefix(CHECKPOINT)?.parse::<u64>().ok();
    let checkpoints = folders.iter().filter_map(|name| Some((step(name)?, name)));
    let (_, last) = checkpoints.max()?;
    Some(
        Failure::new(format!("`{shown}` is the folder of a training, not a model folder"))
            .detail(format!(
                "it holds {} checkpoints of the Trainer and no `{CONFIG_FILE}`",
                folders.iter().filter_map(step).count()
            ))
            .hint(format!("name the last one: {}", path.join(last).display())),
    )
}

/// The failure for a file.
fn file(path: &Path) -> Failure {
    let shown = path.display();
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    let parent = parent.unwrap_or(Path::new("."));
    let failure = match ContentKind::of_file(path) {
        ContentKind::Gguf => {
            return Failure::new(format!("`{shown}` is a GGUF file, not a model folder")).hint(
                "name the folder of the checkpoint in safetensors that it was converted from",
            );
        }
        ContentKind::LfsPointer => {
            Failure::new(format!("`{shown}` is a git-lfs pointer, not a model folder"))
                .detail("its repository was cloned without the files")
        }
        ContentKind::Zip | ContentKind::Pickle => {
            return Failure::new(format!(
                "`{shown}` holds pickled weights, and loading a pickle can run code"
            ))
            .detail("a model is a folder of safetensors")
            .hint(format!(
                "convert its folder where you trust it: python -c \"from transformers import AutoModelForCausalLM as M; \
                 M.from_pretrained('{0}').save_pretrained('{0}-safetensors')\"",
                parent.display()
            ));
        }
        _ => Failure::new(format!("`{shown}` is a file, not a checkpoint folder")),
    };
    failure.hint(format!("pass its folder: `{}`", parent.display()))
}

/// The failure for an adapter, with the command that folds it into its base.
fn adapter(path: &Path) -> Failure {
    let shown = path.display();
    let config = read_settings(&path.join(ADAPTER_FILE)).ok();
    let config = config.and_then(|text| serde_json::from_str::<Value>(&text).ok());
    let base = config.as_ref().and_then(|config| config["base_model_name_or_path"].as_str());
    let base = base.filter(|base| !base.is_empty()).unwrap_or("BASE");
    // The name may be a path from the adapter's folder, or from the folder where peft ran.
    let is_path = base.starts_with('.') || base.starts_with('/');
    let mut places = path.ancestors().map(|folder| folder.join(base));
    let base = match (Path::new(base).is_dir(), places.find(|place| place.is_dir())) {
        (false, Some(place)) => place.display().to_string(),
        (false, None) if is_path => "BASE".to_string(),
        _ => base.to_string(),
    };
    Failure::new(format!("`{shown}` is an adapter, not a whole model"))
        .detail(format!("it has `{ADAPTER_FILE}` and no weights of a model"))
        .hint(format!(
            "fold it into its base first: prune merge --model {base}+{shown} --method linear --save merged"
        ))
}

/// The snapshot in a folder `models--owner--name` of the hub's cache: the snapshot of `main`, else the first by name.
fn snapshot_of(path: &Path) -> Option<PathBuf> {
    let snapshots = path.join("snapshots");
    let main = fs::read_to_string(path.join("refs").join("main"));
    let main = main.map(|commit| snapshots.join(commit.trim()));
    if let Some(main) = main.ok().filter(|main| main.is_dir()) {
        return Some(main);
    }
    let found = folders_in(&snapshots);
    found.first().map(|first| snapshots.join(first))
}

/// Names of the folders in a folder, sorted; none where it cannot be listed.
fn folders_in(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let names = folders.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_path_is_answered_with_the_path_to_name_instead() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let write = |name: &str, bytes: &[u8]| {
            fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            fs::write(at(name), bytes).unwrap();
        };
        write("m/config.json", b"{}");
        write("m/model.safetensors", b"x");
        write("m/model.gguf", b"GGUF\x03\0\0\0");
        write("m/pytorch_model.bin", b"PK\x03\x04");
        write("lora/adapter_config.json", br#"{"base_model_name_or_path": "acme/tiny"}"#);
        write("lora/adapter_model.safetensors", b"x");
        for step in [90, 500, 1000] {
            write(&format!("trained/checkpoint-{step}/config.json"), b"{}");
        }
        let cached = "hub/models--acme--tiny";
        write(&format!("{cached}/refs/main"), b"c2");
        write(&format!("{cached}/snapshots/c1/config.json"), b"{}");
        write(&format!("{cached}/snapshots/c2/config.json"), b"{}");
        write("weights-missing/config.json", b"{}");
        write("empty/x", b"");
        for (path, message, hint) in [
            ("m/model.gguf", "is a GGUF file", "converted from"),
            ("m/pytorch_model.bin", "holds pickled weights", "save_pretrained"),
            ("m/model.safetensors", "is a file", "pass its folder"),
            ("lora", "is an adapter", "--model acme/tiny+"),
            ("trained", "is the folder of a training", "checkpoint-1000"),
            (cached, "is a folder of the hub's cache", "snapshots/c2"),
            ("hub", "is the hub's cache", "--model acme/tiny --cache-dir"),
        ] {
            let failure = not_a_model(&at(path)).expect(path);
            assert!(failure.message.contains(message), "{path}: {failure}");
            assert!(failure.hint.unwrap().contains(hint), "{path}");
        }
        for path in ["m", "trained/checkpoint-90", "weights-missing", "empty", "nowhere"] {
            assert_eq!(not_a_model(&at(path)), None, "{path}");
        }
    }
}
