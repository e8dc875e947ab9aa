//! The output folder before the first weight: is it another folder than the source's, does it hold other weights, is there
//! room. A full disk is found here, before the work, not in the middle of it.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use super::atomic::cannot_write;
use super::meter::Meter;
use super::source::Checkpoint;
use super::{CHUNK_BYTES, INDEX_FILE, PARTIAL_SUFFIX};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::Events;

/// One file of the output, allocated.
#[derive(Debug)]
pub(super) struct OutputShard {
    /// `<name>.partial`, until it is finished.
    pub(super) partial: PathBuf,
    /// Open for reading and writing.
    pub(super) file: File,
    /// Length, JSON and padding.
    pub(super) header: Vec<u8>,
    /// Its final length.
    pub(super) file_bytes: u64,
}

/// Makes the partial files in their final size: headers, then zeros. On failure none of them stays.
pub(super) fn allocate(
    source: &Checkpoint,
    target: &Path,
    events: &dyn Events,
) -> anyhow::Result<Vec<OutputShard>> {
    let plan: Vec<(PathBuf, Vec<u8>, u64)> = source
        .shards()
        .iter()
        .map(|shard| {
            let header = shard.output_header.0.clone();
            let file_bytes = header.len() as u64 + (shard.file_bytes - shard.data_start);
            (
                target.join(format!("{}{PARTIAL_SUFFIX}", shard.file_name)),
                header,
                file_bytes,
            )
        })
        .collect();
    let needed: u64 = plan.iter().map(|(_, _, file_bytes)| file_bytes).sum();
    let mut meter = Meter::start(events, "allocate", needed);
    let mut shards: Vec<OutputShard> = Vec::with_capacity(plan.len());
    for (partial, header, file_bytes) in plan {
        match allocate_file(&partial, &header, file_bytes, &mut meter) {
            Ok(file) => shards.push(OutputShard {
                partial,
                file,
                header,
                file_bytes,
            }),
            Err(error) => {
                // Windows removes no open file, so the handles go first.
                let mut partials: Vec<PathBuf> =
                    shards.into_iter().map(|shard| shard.partial).collect();
                partials.push(partial.clone());
                for made in &partials {
                    // The error below is the one to tell.
                    let _ = fs::remove_file(made);
                }
                return Err(cannot_write(&partial, &error)
                    .detail(format!(
                        "the output needs {} ({needed} bytes)",
                        ByteSize(needed)
                    ))
                    .into());
            }
        }
    }
    meter.finish();
    Ok(shards)
}

/// Zeros are written because a length alone takes no room: the disk would fill up in the middle of the run. (Compressing
/// file systems keep no room for zeros either; there only the later writes can tell.)
pub(super) fn allocate_file(
    path: &Path,
    header: &[u8],
    file_bytes: u64,
    meter: &mut Meter<'_>,
) -> io::Result<File> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    file.write_all(header)?;
    meter.add(header.len() as u64);
    let zeros = vec![0; CHUNK_BYTES];
    let mut left = file_bytes - header.len() as u64;
    while left > 0 {
        let length = left.min(CHUNK_BYTES as u64);
        file.write_all(&zeros[..length as usize])?;
        left -= length;
        meter.add(length);
    }
    // Delayed allocation reports a full disk only here.
    file.sync_all()?;
    Ok(file)
}

/// The output must not replace or mix with what it is made from.
///
/// # Errors
///
/// Fails when `target` is the source's folder or lies inside it, through links too.
pub fn refuse_source_folder(source: &Path, target: &Path) -> anyhow::Result<()> {
    let cannot = |error: io::Error| {
        Failure::new(format!("cannot open `{}`", source.display())).detail(error.to_string())
    };
    let source = fs::canonicalize(source).map_err(cannot)?;
    let resolved = resolve(target).map_err(|error| cannot_write(target, &error))?;
    if resolved.starts_with(&source) {
        let relation = if resolved == source {
            "is"
        } else {
            "lies inside"
        };
        return Err(Failure::new(format!(
            "the output folder `{}` {relation} the model's folder",
            target.display()
        ))
        .detail(format!("the model is read from `{}`", source.display()))
        .hint("choose another folder with --save")
        .into());
    }
    Ok(())
}

/// `path` without links and dots, although its last parts may not exist yet.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let mut resolved = PathBuf::new();
    for component in absolute.components() {
        if component == Component::ParentDir {
            resolved.pop();
            continue;
        }
        resolved.push(component);
        // What exists is followed at once, so that a later `..` leaves the link's target.
        if let Ok(real) = fs::canonicalize(&resolved) {
            resolved = real;
        }
    }
    Ok(resolved)
}

/// Weights in `target` that this output would not replace would load instead of it, or with it. Returns the old partial
/// files there.
pub(super) fn refuse_other_weights(
    source: &Checkpoint,
    target: &Path,
) -> anyhow::Result<Vec<PathBuf>> {
    let ours: HashSet<&str> = source
        .shards()
        .iter()
        .map(|shard| shard.file_name.as_str())
        .collect();
    let has_index = source.folder().join(INDEX_FILE).is_file();
    let mut partials = Vec::new();
    for entry in fs::read_dir(target).map_err(|error| cannot_write(target, &error))? {
        let entry = entry.map_err(|error| cannot_write(target, &error))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let is_weights = name.ends_with(".safetensors") && !ours.contains(name.as_str());
        if is_weights || (name == INDEX_FILE && !has_index) {
            return Err(Failure::new(format!(
                "the output folder `{}` holds other weights",
                target.display()
            ))
            .detail(format!("`{name}` would be loaded beside the new files"))
            .hint("choose an empty folder with --save, or remove the old weights")
            .into());
        }
        if name.ends_with(&format!(".safetensors{PARTIAL_SUFFIX}")) {
            partials.push(entry.path());
        }
    }
    Ok(partials)
}
