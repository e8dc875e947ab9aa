//! The record of an earlier pruning, which lies beside the weights of a model.

use std::path::Path;

use crate::bytes::LARGEST_RECORD;
use crate::input::{self, Expected};
use crate::run::pruning_record::{PRUNING_FILE, PruningRecord};

/// The record of an earlier pruning in a model's folder; `None` where there is no such file.
pub(super) fn read_record(folder: &Path) -> Option<Result<PruningRecord, String>> {
    let path = folder.join(PRUNING_FILE);
    if path.symlink_metadata().is_err() {
        return None;
    }
    let bytes =
        input::read(&path, LARGEST_RECORD, Expected::Json).map_err(|error| error.to_string());
    Some(bytes.and_then(|bytes| PruningRecord::parse(&bytes)))
}
