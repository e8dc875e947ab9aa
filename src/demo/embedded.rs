//! The model of `prune demo`, compiled into the binary: a Llama of 1.05 M parameters that tells simple stories, its
//! tokenizer and its configuration. It is written to a folder before use, so that the real reader runs on it.
//!
//! `examples/train_demo` made the files; docs/demo.md says how.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// A beginning that asks for a fact the model has learnt: a fox lives in a den and eats some berries.
pub const PROMPT: &str = "One sunny morning, Mia went to the forest. Everyone knows that a fox";

/// Names and contents; `config.json` last, because a folder without it is no model.
const FILES: [(&str, &[u8]); 5] = [
    (
        "model.safetensors",
        include_bytes!("assets/model.safetensors"),
    ),
    ("tokenizer.json", include_bytes!("assets/tokenizer.json")),
    (
        "tokenizer_config.json",
        include_bytes!("assets/tokenizer_config.json"),
    ),
    (
        "generation_config.json",
        include_bytes!("assets/generation_config.json"),
    ),
    ("config.json", include_bytes!("assets/config.json")),
];

/// Writes the model into `folder`, which is made where it does not exist.
///
/// # Errors
/// Fails when a file cannot be written, naming it.
pub fn write_model(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("creating `{}`", folder.display()))?;
    for (name, bytes) in FILES {
        let path = folder.join(name);
        fs::write(&path, bytes).with_context(|| format!("writing `{}`", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_small_enough_to_be_carried_about() {
        let bytes: usize = FILES.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(bytes <= 3_000_000, "{bytes} bytes");
    }
}
