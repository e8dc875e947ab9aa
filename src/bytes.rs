//! Byte counts, and small files that are read whole.
//!
//! A [`ByteSize`] prints in binary units ("1.50 GiB"), is parsed from "24GiB", and adds without overflow. Every amount of memory or
//! disk in plans, errors and reports is a `ByteSize`, so that units cannot be mixed up. [`read_whole`] reads a file that the program
//! itself wrote, up to a limit, so that no file decides the size of an allocation. Input files are opened through [`crate::input`].

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::iter::Sum;
use std::ops::Add;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Returns the bytes of 64 hexadecimal digits, a SHA-256 written by [`hex`].
pub fn unhex(digits: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

/// Returns bytes as lower-case hexadecimal digits, the form of all printed hashes.
pub fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Returns the text of a JSON file: indented, with a line break at its end.
///
/// # Errors
/// Fails for a value without a JSON form.
pub fn json_file(value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

/// The largest file of settings that is read: a `config.json`, a device map, a chat template. Real files have kilobytes.
pub const LARGEST_SETTINGS: ByteSize = ByteSize(16 << 20);

/// The largest record of a run that is read. Each matrix takes a few hundred bytes, so the largest models have less than a MiB.
pub const LARGEST_RECORD: ByteSize = ByteSize(64 << 20);

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// Fails when the file is missing or cannot be read, is larger, or is a folder, a pipe or a device: these may never end.
pub fn read_whole(path: &Path, most: ByteSize) -> io::Result<Vec<u8>> {
    regular_file(path)?;
    read_up_to(File::open(path)?, most)
}

/// Checks that a path is a regular file, before it is opened: opening a pipe waits for a writer.
///
/// # Errors
/// Fails when the file is missing, and for a folder, a pipe or a device.
pub fn regular_file(path: &Path) -> io::Result<()> {
    let metadata = std::fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(())
}

/// Reads a file, a pipe or standard input to its end.
///
/// # Errors
/// Fails when reading fails, and when there are more than `most` bytes.
pub fn read_up_to(reader: impl Read, most: ByteSize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(most.0.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most.0 {
        return Err(io::Error::other(format!(
            "it is larger than {most}, the most that is read of such a file"
        )));
    }
    Ok(bytes)
}

/// A number of bytes. Sums saturate at `u64::MAX`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// Returns the bytes of `count` items of `each` bytes.
    pub fn of(count: usize, each: usize) -> Self {
        Self((count as u64).saturating_mul(each as u64))
    }

    /// The value in GiB, for tables.
    pub fn gib(self) -> f64 {
        self.0 as f64 / (1u64 << 30) as f64
    }

    /// The value in MiB, for tables.
    pub fn mib(self) -> f64 {
        self.0 as f64 / (1u64 << 20) as f64
    }
}

impl Add for ByteSize {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sum for ByteSize {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] =
            [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        for (unit, bytes) in UNITS {
            if self.0 >= bytes {
                let text = format!("{:.2} {unit}", self.0 as f64 / bytes as f64);
                return f.pad(&text);
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

impl FromStr for ByteSize {
    type Err = Failure;

    /// Reads "24GiB", "1.5 GB" (powers of 1000) or a plain number of bytes, in upper or lower case. Units of two letters that
    /// end in a small b, as in "40Gb", are refused, because elsewhere they mean bits.
    fn from_str(text: &str) -> Result<Self, Failure> {
        let bad = |why: &str| {
            Failure::usage(format!("`{text}` is not an amount of memory: {why}"))
                .hint("write it like 24GiB, 512MiB or 10GB")
        };
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = (&trimmed[..split], trimmed[split..].trim());
        if unit.len() == 2 && unit.ends_with('b') {
            return Err(bad("a lower-case `b` means bits elsewhere"));
        }
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(bad("the unit is unknown")),
        };
        let value: f64 = number.parse().map_err(|_| bad("it has no number"))?;
        let bytes = value * factor as f64;
        if !(0.0..=u64::MAX as f64 / 2.0).contains(&bytes) {
            return Err(bad("it is too large"));
        }
        Ok(Self(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_print_in_binary_units() {
        assert_eq!(ByteSize(3 << 29).to_string(), "1.50 GiB");
        assert_eq!(ByteSize(1023).to_string(), "1023 B");
        assert_eq!(ByteSize(1 << 20).to_string(), "1.00 MiB");
    }

    #[test]
    fn sizes_parse_both_families_of_units_and_refuse_bits() {
        assert_eq!("24GiB".parse(), Ok(ByteSize(24 << 30)));
        assert_eq!("1.5 GB".parse(), Ok(ByteSize(1_500_000_000)));
        assert_eq!("77".parse(), Ok(ByteSize(77)));
        assert!("40Gb".parse::<ByteSize>().is_err_and(|failure| failure.message.contains("bits")));
        assert!("GiB".parse::<ByteSize>().is_err());
        assert!("1e400GiB".parse::<ByteSize>().is_err());
    }

    #[test]
    fn a_file_is_read_whole_up_to_a_size_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, b"abc\xff").unwrap();
        assert_eq!(read_whole(&path, ByteSize(4)).unwrap(), b"abc\xff");
        let says = |result: io::Result<Vec<u8>>| result.unwrap_err().to_string();
        assert_eq!(
            says(read_whole(&path, ByteSize(3))),
            "it is larger than 3 B, the most that is read of such a file"
        );
        let kind = |path: &Path| read_whole(path, ByteSize(4)).unwrap_err().kind();
        assert_eq!(kind(folder.path()), io::ErrorKind::IsADirectory);
        assert_eq!(kind(&folder.path().join("y")), io::ErrorKind::NotFound);
        #[cfg(unix)]
        {
            let endless = Path::new("/dev/zero");
            let refused = says(read_whole(endless, ByteSize(4)));
            assert_eq!(refused, "it is not a regular file");
            let refused = says(read_up_to(File::open(endless).unwrap(), ByteSize(4)));
            assert!(refused.starts_with("it is larger than 4 B"), "{refused}");
        }
    }

    #[test]
    fn sums_saturate() {
        assert_eq!(ByteSize(u64::MAX) + ByteSize(1), ByteSize(u64::MAX));
        assert_eq!([ByteSize(1), ByteSize(2)].into_iter().sum::<ByteSize>(), ByteSize(3));
    }
}
