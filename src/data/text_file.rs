//! UTF-8 text files: read in portions or line by line, with the place of the first byte that is not UTF-8.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result};

use super::line_memory::{LONGEST_LINE, LineMemory};
use super::role::Role;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::input::{self, Expected, cannot_read};

/// Bytes of a portion.
pub(super) const PORTION: usize = 64 << 10;

/// Opens a text. Fails when it cannot be opened, and for content that does not agree with its role or its name.
pub(super) fn open(path: &Path, expected: Expected) -> Result<File> {
    Ok(input::open(path, expected).map_err(|error| cannot_read(path, &error))?)
}

/// Checks that a file is not empty and that its first bytes are UTF-8. Fails when they are not, when the file cannot be read, and for
/// content that does not agree with its role or its name.
pub(super) fn check_beginning(path: &Path, expected: Expected, role: Role) -> Result<()> {
    let mut start = Vec::new();
    open(path, expected)?
        .take(PORTION as u64)
        .read_to_end(&mut start)
        .with_context(|| format!("cannot read `{}`", path.display()))?;
    if start.is_empty() {
        return Err(Failure::new(format!("`{}` is empty", path.display()))
            .hint(format!("name another text with {}", role.flag()))
            .into());
    }
    match std::str::from_utf8(&start) {
        // The end of the portion may cut a character; `error_len` is `None` then.
        Err(error) if error.error_len().is_some() => {
            Err(not_utf8(path, error.valid_up_to() as u64).into())
        }
        _ => Ok(()),
    }
}

/// Gives a file to `take` in portions of [`PORTION`] bytes, or up to three bytes less: the file may have no line ends.
/// Fails when the file cannot be read or is not UTF-8, and when `take` fails.
pub(super) fn for_each_portion(
    path: &Path,
    take: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    let reading = || format!("cannot read `{}`", path.display());
    let mut file = open(path, Expected::Text)?;
    let (mut portion, mut offset) = (Vec::with_capacity(PORTION), 0);
    loop {
        let read = (&mut file)
            .take((PORTION - portion.len()) as u64)
            .read_to_end(&mut portion)
            .with_context(reading)?;
        let valid = match std::str::from_utf8(&portion) {
            Ok(text) => text.len(),
            // The character continues in the next portion.
            Err(error) if read > 0 && error.error_len().is_none() => error.valid_up_to(),
            Err(error) => return Err(not_utf8(path, offset + error.valid_up_to() as u64).into()),
        };
        if read == 0 {
            return Ok(());
        }
        take(std::str::from_utf8(&portion[..valid]).context("text is checked twice")?)?;
        portion.drain(..valid);
        offset += valid as u64;
    }
}

/// Gives every line of a file to `take`, with its newline. The last line may have no newline.
/// Fails when the file cannot be read, is not UTF-8 or has a line that is too long for the memory budget or [`LONGEST_LINE`], and when
/// `take` fails.
pub(super) fn for_each_line(
    path: &Path,
    lines: LineMemory,
    take: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    let reading = || format!("cannot read `{}`", path.display());
    let mut reader = BufReader::new(open(path, Expected::Rows)?);
    let (mut line, mut offset) = (Vec::new(), 0);
    while (&mut reader)
        .take(lines.longest() + 1)
        .read_until(b'\n', &mut line)
        .with_context(reading)?
        > 0
    {
        if line.len() as u64 > lines.longest() {
            let whole = line.len() as u64 + reader.skip_until(b'\n').with_context(reading)? as u64;
            lines.check(path, whole.min(LONGEST_LINE))?;
            return Err(line_too_long(path)
                .detail(format!("it begins at byte {offset}"))
                .hint("check that it is a text of lines; one without them is read by its path alone, as a .txt file")
                .into());
        }
        // No character of several bytes contains the byte of a newline, so a line never ends within a character.
        let text = std::str::from_utf8(&line)
            .map_err(|error| not_utf8(path, offset + error.valid_up_to() as u64))?;
        take(text)?;
        offset += line.len() as u64;
        line.clear();
    }
    Ok(())
}

pub(super) fn line_too_long(path: &Path) -> Failure {
    Failure::new(format!(
        "a line of `{}` is longer than {}",
        path.display(),
        ByteSize(LONGEST_LINE)
    ))
}

fn not_utf8(path: &Path, offset: u64) -> Failure {
    Failure::new(format!("`{}` is not UTF-8 text", path.display()))
        .detail(format!("the first invalid byte is at offset {offset}"))
        .hint(format!(
            "convert it (iconv -f latin1 -t utf-8 '{}' > text.txt), or check that it is text at all",
            path.display()
        ))
}
