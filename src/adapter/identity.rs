//! The identity of an adapter, and the memory of its factors.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::config::CONFIG_FILE;
use super::opened::{Adapter, WEIGHTS_FILE};
use super::parts::ProductSource;
use crate::bytes::hex;
use crate::input::{self, Expected};

/// Bytes that are hashed at once.
const PIECE: usize = 1 << 20;

impl Adapter {
    /// The folder in messages and records.
    pub fn folder(&self) -> &Path {
        self.place()
    }

    /// SHA-256 over the config and the weights. Adapters are small, so all bytes count.
    ///
    /// # Errors
    /// Fails when a file cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        let (mut hasher, mut buffer) = (Sha256::new(), vec![0; PIECE]);
        for name in [CONFIG_FILE, WEIGHTS_FILE] {
            let path = self.folder().join(name);
            let reading = || format!("reading `{}`", path.display());
            let mut file = input::open(&path, Expected::Copied)
                .map_err(|error| input::cannot_read(&path, &error))?;
            loop {
                let length = file.read(&mut buffer).with_context(reading)?;
                if length == 0 {
                    break;
                }
                hasher.update(&buffer[..length]);
            }
        }
        Ok(hex(&hasher.finalize()))
    }

    /// Bytes of the factors of the largest change of a tensor, in f32, as stored and as packed.
    pub fn largest_change_bytes(&self) -> u64 {
        let products = self.parts().values();
        let sizes = products.filter_map(|parts| match parts.product.as_ref()? {
            ProductSource::Stored { down, up, .. } => {
                Some(8 * (down.entry.elements() + up.entry.elements()) as u64)
            }
            ProductSource::Bias { bias, .. } => Some(8 * bias.entry.elements() as u64),
        });
        sizes.max().unwrap_or(0)
    }
}
