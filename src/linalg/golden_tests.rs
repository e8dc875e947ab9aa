//! Tensors of the reference files of recovery, for tests: `goldens/recovery` below `$PRUNE_SHARED`, or `../shared`.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

/// The folder of the files, or `None` and a printed line where it is absent.
#[expect(clippy::print_stderr, reason = "a skipped test must say so")]
pub(crate) fn golden_folder() -> Option<PathBuf> {
    let shared = std::env::var_os("PRUNE_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    let folder = shared.join("goldens/recovery");
    if !folder.is_dir() {
        eprintln!("skipped: `{}` is not there (set PRUNE_SHARED)", folder.display());
        return None;
    }
    Some(folder)
}

/// The shape and bytes of a tensor.
pub(crate) fn golden_tensor(file: &str, name: &str) -> Option<(Vec<usize>, Vec<u8>)> {
    let path = golden_folder()?.join(file);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap_or_else(|_| panic!("no tensor `{name}` in {file}"));
    Some((tensor.shape().to_vec(), tensor.data().to_vec()))
}

/// The elements of an f32 tensor.
pub(crate) fn golden_f32(file: &str, name: &str) -> Option<Vec<f32>> {
    let (_, bytes) = golden_tensor(file, name)?;
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty(), "`{name}` is f32");
    Some(words.iter().map(|&word| f32::from_le_bytes(word)).collect())
}
