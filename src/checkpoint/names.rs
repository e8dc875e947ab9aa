//! Names of the files of a checkpoint, and the size of the pieces they are read and written in.

use std::path::{Path, PathBuf};

/// The single-file name every loader looks for.
pub const SINGLE_FILE: &str = "model.safetensors";

/// The index of a sharded checkpoint: tensor name → shard.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The configuration of a model. It is written last, so that an unfinished folder does not load.
pub const CONFIG_FILE: &str = "config.json";

/// The record of a merge: its inputs, settings and versions.
pub const MERGING_FILE: &str = "merging.json";

/// The record of a packed checkpoint: what its layout cannot say of the original files.
pub const PACKED_FILE: &str = "packed.json";

/// The recipe of a merge, with every default filled in.
pub const MERGE_CONFIG_FILE: &str = "merge_config.yml";

/// The path of a file until it is finished.
pub(crate) fn partial_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(PARTIAL_SUFFIX);
    name.into()
}

/// The suffix of an unfinished file; no loader opens it.
pub const PARTIAL_SUFFIX: &str = ".partial";

/// Bytes of a piece of a copy or a check, enough for the full speed of a disk. The memory plan counts two pieces.
pub(crate) const CHUNK_BYTES: usize = 8 << 20;
