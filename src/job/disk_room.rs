//! The check that disks have room for the files of a run, made before any of them is written.

use std::path::Path;

use anyhow::Result;

use crate::bytes::ByteSize;
use crate::disk::{self, Room};
use crate::failure::Failure;

/// A file or folder, the bytes that are written to it, and its name in messages.
pub(super) type Need<'a> = (&'a Path, ByteSize, &'a str);

/// Checks that every disk has room for all that is written to it.
///
/// # Errors
/// Fails with the needed and the free bytes of the first disk that is too small.
pub(super) fn check(needs: &[Need<'_>]) -> Result<()> {
    let rooms: Vec<(Room, &Need<'_>)> =
        needs.iter().filter_map(|need| Some((disk::room(need.0)?, need))).collect();
    for (room, (folder, ..)) in &rooms {
        let here = || rooms.iter().filter(|(other, _)| other.device == room.device);
        let needed: ByteSize = here().map(|(_, (_, bytes, _))| *bytes).sum();
        if needed <= room.free {
            continue;
        }
        let parts: Vec<String> =
            here().map(|(_, (_, bytes, what))| format!("{what} {bytes}")).collect();
        return Err(Failure::new(format!(
            "the disk of `{}` has too little room: {needed} are needed, {} are free",
            folder.display(),
            room.free
        ))
        .detail(parts.join(", "))
        .hint("free some space, or choose a folder on another disk with --save or --offload-folder")
        .into());
    }
    Ok(())
}
