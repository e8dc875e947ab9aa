//! SHA-256 in hex of bytes, files and token ids. The run record states the hashes, so that two runs can be compared.

use std::io::{self, BufReader};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::bytes::hex;
use crate::input::{self, Expected};

/// SHA-256 of some bytes in lower-case hex, as `sha256sum` prints it.
pub(super) fn of_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(super) fn of_file(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    io::copy(
        &mut BufReader::with_capacity(1 << 20, input::open(path, Expected::Copied)?),
        &mut hasher,
    )?;
    Ok(hex(&hasher.finalize()))
}

/// SHA-256 of ids written as int32, little endian: what `torch.tensor(ids).int().numpy().tobytes()` hashes to.
pub fn of_ids(ids: &[u32]) -> String {
    let mut hasher = IdHasher::default();
    hasher.add(ids);
    hasher.hex()
}

/// The hash of ids that come in parts, as [`of_ids`] computes it of all.
#[derive(Default)]
pub struct IdHasher(Sha256);

impl IdHasher {
    /// Adds the next ids.
    pub fn add(&mut self, ids: &[u32]) {
        for chunk in ids.chunks(4096) {
            self.0.update(little_endian(chunk));
        }
    }

    /// The hash of all ids.
    pub fn hex(self) -> String {
        hex(&self.0.finalize())
    }
}

/// Ids as bytes of a file.
pub(super) fn little_endian(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_hash_as_int32_little_endian() {
        // python: hashlib.sha256(numpy.array([1, 15043, 3186], numpy.int32).tobytes()).hexdigest() gives the hash of these bytes.
        let bytes = [1, 0, 0, 0, 0xc3, 0x3a, 0, 0, 0x72, 0x0c, 0, 0];
        assert_eq!(of_ids(&[1, 15043, 3186]), of_bytes(&bytes));
        // The published test vector of the standard (FIPS 180-2, "abc").
        assert_eq!(
            of_bytes(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
