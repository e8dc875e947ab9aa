//! Checks of the output folder before the first weight: it is not the source's folder, holds no weights that the output does not
//! replace, and has room. So a full disk is found before the work.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::AtomicBool;

use super::atomic::cannot_write;
use super::layout::Layout;
use super::names::{CHUNK_BYTES, CONFIG_FILE, INDEX_FILE, PARTIAL_SUFFIX, partial_of};
use super::source::Checkpoint;
use crate::bytes::ByteSize;
use crate::disk;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;
use crate::run::{Events, Meter};

/// An open weight file of the output: the file of an entry of [`Layout::files`].
#[derive(Debug)]
pub(super) struct OutputShard {
    /// `<name>.partial`, its path until it is finished.
    pub(super) partial: PathBuf,
    /// The file, open for reading and writing.
    pub(super) file: File,
    /// It may have bytes that are not on the disk.
    pub(super) is_dirty: AtomicBool,
}

/// The bytes of all weight files of an output of `source`.
///
/// # Errors
/// Fails as [`Layout::of`].
pub fn output_bytes(source: &Checkpoint) -> anyhow::Result<ByteSize> {
    Ok(Layout::of(source)?.bytes())
}

/// Opens the files that an earlier process allocated for this output. Returns them with the final names of all published files;
/// `None` if a file is missing or different. Changes nothing.
pub(super) fn left_behind(
    layout: &Layout,
    target: &Path,
) -> anyhow::Result<Option<(Vec<OutputShard>, Vec<PathBuf>)>> {
    let (mut shards, mut published) = (Vec::new(), Vec::new());
    for planned in layout.files() {
        let path = target.join(&planned.file_name);
        let partial = partial_of(&path);
        let is_published = !partial.is_file();
        let there = if is_published { &path } else { &partial };
        if !there.is_file() {
            return Ok(None);
        }
        let cannot = |error: io::Error| cannot_write(there, &error);
        let file = disk::open(there).map_err(cannot)?;
        let length = file.metadata().map_err(cannot)?.len();
        let mut found = vec![0; planned.header.len()];
        if length != planned.file_bytes
            || read_exact_at(&file, &mut found, 0).is_err()
            || found != planned.header
        {
            return Ok(None);
        }
        if is_published {
            published.push(path);
        }
        shards.push(OutputShard { partial, file, is_dirty: AtomicBool::new(true) });
    }
    Ok(Some((shards, published)))
}

/// Gives published files their partial names back: an unfinished model must not load.
pub(super) fn unpublish(target: &Path, published: &[PathBuf]) -> anyhow::Result<()> {
    let config = target.join(CONFIG_FILE);
    disk::remove(&config).map_err(|error| cannot_write(&config, &error))?;
    for path in published {
        disk::rename(path, &partial_of(path)).map_err(|error| cannot_write(path, &error))?;
    }
    // Otherwise, after a power cut, final names could stand over half-written weights.
    disk::sync_folder(target).map_err(|error| cannot_write(target, &error).into())
}

/// Creates the partial files in their final size, with headers and room for the rest. After a failure, none of them stays.
pub(super) fn allocate(
    layout: &Layout,
    target: &Path,
    events: &dyn Events,
) -> anyhow::Result<Vec<OutputShard>> {
    let ByteSize(needed) = layout.bytes();
    let mut meter = Meter::start(events, "allocate", needed);
    let mut shards: Vec<OutputShard> = Vec::with_capacity(layout.files().len());
    for planned in layout.files() {
        events.check()?;
        let partial = partial_of(&target.join(&planned.file_name));
        match allocate_file(&partial, &planned.header, planned.file_bytes, &mut meter) {
            Ok(file) => {
                shards.push(OutputShard { partial, file, is_dirty: AtomicBool::new(false) })
            }
            Err(error) => {
                // Windows cannot remove an open file, so the files are closed first.
                let mut partials: Vec<PathBuf> =
                    shards.into_iter().map(|shard| shard.partial).collect();
                partials.push(partial.clone());
                for made in &partials {
                    // The first error is reported.
                    let _ = disk::remove(made);
                }
                return Err(cannot_write(&partial, &error)
                    .detail(format!("the output needs {} ({needed} bytes)", ByteSize(needed)))
                    .into());
            }
        }
    }
    disk::sync_folder(target).map_err(|error| cannot_write(target, &error))?;
    meter.finish();
    Ok(shards)
}

/// Creates a file with room for all its bytes, so that a full disk is found now. Where the file system cannot reserve room, zeros are
/// written. (Compressing file systems keep no room for zeros; there, a full disk is found later.)
pub(super) fn allocate_file(
    path: &Path,
    header: &[u8],
    file_bytes: u64,
    meter: &mut Meter<'_>,
) -> io::Result<File> {
    let file = disk::create(path)?;
    let is_reserved = disk::reserve(&file, file_bytes)?;
    disk::write_all_at(&file, header, 0)?;
    meter.add(header.len() as u64);
    let mut at = header.len() as u64;
    if is_reserved {
        meter.add(file_bytes.saturating_sub(at));
        at = file_bytes;
    }
    let zeros = if at < file_bytes { vec![0; CHUNK_BYTES] } else { Vec::new() };
    while at < file_bytes {
        let length = (file_bytes - at).min(CHUNK_BYTES as u64);
        disk::write_all_at(&file, &zeros[..length as usize], at)?;
        at += length;
        meter.add(length);
    }
    // With delayed allocation, a full disk is reported only here.
    disk::sync(&file)?;
    Ok(file)
}

/// The flags that may have named an output folder.
pub const OUTPUT_FLAGS: &str = "--save or --save-model";

/// Refuses an output folder inside the source's folder, and returns its path without links and dots.
///
/// # Arguments
/// * `flag`: the flag that named the output folder, for the hint
///
/// # Errors
/// Fails when `target` is the source's folder or lies inside it, through links too.
pub fn refuse_source_folder(source: &Path, target: &Path, flag: &str) -> anyhow::Result<PathBuf> {
    let cannot = |error: io::Error| {
        Failure::new(format!("cannot open `{}`", source.display())).detail(error.to_string())
    };
    let source = fs::canonicalize(source).map_err(cannot)?;
    let resolved = resolve(target).map_err(|error| cannot_write(target, &error))?;
    if resolved.starts_with(&source) {
        let relation = if resolved == source { "is" } else { "lies inside" };
        return Err(Failure::new(format!(
            "the output folder `{}` {relation} the model's folder",
            target.display()
        ))
        .detail(format!("the model is read from `{}`", source.display()))
        .hint(format!("choose another folder with {flag}"))
        .into());
    }
    Ok(resolved)
}

/// Resolves links and dots in a path whose last parts may not exist yet.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let mut resolved = PathBuf::new();
    for component in absolute.components() {
        if component == Component::ParentDir {
            resolved.pop();
            continue;
        }
        resolved.push(component);
        // Links are followed at once, so that a later `..` leaves the target of the link.
        if let Ok(real) = fs::canonicalize(&resolved) {
            resolved = real;
        }
    }
    Ok(resolved)
}

/// Refuses a target folder with weights that would load instead of this output, or with it. Returns the old partial files.
pub(super) fn refuse_other_weights(layout: &Layout, target: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let files = layout.files().iter();
    let ours: HashSet<&str> = files.map(|file| file.file_name.as_str()).collect();
    let mut partials = Vec::new();
    for entry in fs::read_dir(target).map_err(|error| cannot_write(target, &error))? {
        let entry = entry.map_err(|error| cannot_write(target, &error))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let is_weights = name.ends_with(".safetensors") && !ours.contains(name.as_str());
        if is_weights || (name == INDEX_FILE && !layout.has_index()) {
            return Err(Failure::new(format!(
                "the output folder `{}` holds other weights",
                target.display()
            ))
            .detail(format!("`{name}` would be loaded with the new files"))
            .hint("choose an empty folder with --save, or remove the old weights")
            .into());
        }
        if name.ends_with(&format!(".safetensors{PARTIAL_SUFFIX}")) {
            partials.push(entry.path());
        }
    }
    Ok(partials)
}
