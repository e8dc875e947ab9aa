//! The size of a `tokenizer.json`, and the failures of files that are missing or cannot be read.

use std::io;
use std::path::Path;

use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::input::cannot_read;

/// The largest `tokenizer.json` that is read. Published files have up to 35 MB.
pub(super) const LARGEST: ByteSize = ByteSize(256 << 20);

/// The failure for a file that exists but cannot be read.
pub(super) fn unreadable(path: &Path, error: &io::Error) -> Failure {
    cannot_read(path, error).or_hint("copy it from the model's page again")
}

/// The failure for a folder without a `tokenizer.json`.
pub(super) fn no_tokenizer(folder: &Path) -> Failure {
    let shown = folder.display();
    if folder.join("tokenizer.model").is_file() {
        return Failure::new(format!("`{shown}` has only `tokenizer.model`; we read `tokenizer.json`")).hint(format!(
            "convert it once: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{shown}', \
             use_fast=True).save_pretrained('{shown}')\""
        ));
    }
    Failure::new(format!("no tokenizer in `{shown}`")).detail("looked for `tokenizer.json`").hint(
        "copy `tokenizer.json` and `tokenizer_config.json` from the model's page into the folder",
    )
}
