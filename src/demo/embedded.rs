//! The model of `prune demo`, compiled into the binary: a Llama of 1.05 M parameters that writes simple stories, with its tokenizer and
//! configuration. It is written to a folder before use, so that the real reader reads it.
//!
//! `examples/train_demo` wrote the files; docs/dev/demo.md describes the training.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// A prompt about a fact the model has learnt: a fox lives in a den and eats some berries.
pub const PROMPT: &str = "One sunny morning, Mia went to the forest. Everyone knows that a fox";

/// Names and contents. `config.json` is last, because a folder without it is not a model.
const FILES: [(&str, &[u8]); 5] = [
    ("model.safetensors", include_bytes!("assets/model.safetensors")),
    ("tokenizer.json", include_bytes!("assets/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("assets/tokenizer_config.json")),
    ("generation_config.json", include_bytes!("assets/generation_config.json")),
    ("config.json", include_bytes!("assets/config.json")),
];

/// Writes the model into `folder`, which is created if necessary.
///
/// # Errors
/// Fails when a file cannot be written, and names it.
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
    fn the_model_has_at_most_three_megabytes() {
        let bytes: usize = FILES.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(bytes <= 3_000_000, "{bytes} bytes");
    }
}
