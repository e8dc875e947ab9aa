//! The limit for the text of a packed file.
//!
//! Gzip packs a repeated byte to a thousandth of its size, and parquet to less: a file of megabytes can unpack to more than any disk
//! holds. Text packs to a third (C4's shards), and repetitive JSON to a tenth. So a text of more than a hundred times its file's size
//! is refused while it is unpacked. A user with such a text can unpack it and name the unpacked file.

use std::path::Path;

use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The largest ratio of a text's size to its file's size.
const MOST_TIMES: u64 = 100;
/// A size that every file may unpack to.
const LEAST: u64 = 64 << 20;

/// The unpacked bytes of a file.
#[derive(Debug)]
pub(super) struct Unpacked<'a> {
    path: &'a Path,
    file: u64,
    bytes: u64,
    remedy: &'static str,
}

impl<'a> Unpacked<'a> {
    /// The counter for `path`, a file of `file` bytes. `remedy` is the hint for a user who wants the text nevertheless.
    pub(super) fn new(path: &'a Path, file: u64, remedy: &'static str) -> Self {
        Self { path, file, bytes: 0, remedy }
    }

    /// Counts the next bytes. Fails when the text exceeds the limit.
    pub(super) fn add(&mut self, bytes: u64) -> Result<(), Failure> {
        self.bytes = self.bytes.saturating_add(bytes);
        let most = self.file.saturating_mul(MOST_TIMES).max(LEAST);
        if self.bytes <= most {
            return Ok(());
        }
        Err(Failure::new(format!(
            "`{}` unpacks to more than {}",
            self.path.display(),
            ByteSize(most)
        ))
        .detail(format!(
            "the file has {}; text packs to about a third, and the limit is {MOST_TIMES} times the file's size",
            ByteSize(self.file)
        ))
        .hint(self.remedy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_may_have_64_mib_and_a_large_one_a_hundred_times_its_size() {
        for (file, most) in [(10, 64 << 20), (1 << 20, 100 << 20), (u64::MAX, u64::MAX)] {
            let mut unpacked = Unpacked::new(Path::new("x.gz"), file, "gzip -d x.gz");
            assert_eq!(unpacked.add(most), Ok(()));
            let beyond = unpacked.add(1);
            assert_eq!(beyond.is_err(), most < u64::MAX);
        }
    }
}
