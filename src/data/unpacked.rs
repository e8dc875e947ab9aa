//! How large the text of a packed file may become.
//!
//! Gzip packs a byte repeated into a thousandth, parquet into less: a file of megabytes can unpack to more than any disk holds. Text
//! packs to a third (C4's shards), repetitive JSON to a tenth. So a text that has grown a hundredfold is refused while it is being
//! unpacked, and whoever means it can unpack the file, which then is as large as it is.

use std::path::Path;

use crate::bytes::ByteSize;
use crate::failure::Failure;

/// How many times its file's size a text may have.
const MOST_TIMES: u64 = 100;
/// What any file may unpack to.
const LEAST: u64 = 64 << 20;

/// Counts what comes out of one file.
#[derive(Debug)]
pub(super) struct Unpacked<'a> {
    path: &'a Path,
    file: u64,
    bytes: u64,
    remedy: &'static str,
}

impl<'a> Unpacked<'a> {
    /// Nothing yet of `path`, a file of `file` bytes; `remedy` is how to unpack it oneself.
    pub(super) fn new(path: &'a Path, file: u64, remedy: &'static str) -> Self {
        Self {
            path,
            file,
            bytes: 0,
            remedy,
        }
    }

    /// Counts the next bytes.
    ///
    /// # Errors
    ///
    /// Fails when they are more than a text of that file can have.
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
            "the file has {}; text packs to a third, and more than {MOST_TIMES} times its file's size is no text",
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
