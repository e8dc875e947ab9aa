//! A combination of adapters as a folder that peft loads: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Tensors are combined and written in turn, so memory holds the factors of a single tensor. Factors are f32 with scale 1: `lora_alpha`
//! equals `r`, which is the largest rank. Patterns give both numbers for modules of a smaller rank. The config is written last.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::Result;
use safetensors::Dtype;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::combine::{Combination, Draws};
use super::config::{CONFIG_FILE, written_config};
use super::keys::{PREFIX, inside, module_of};
use super::opened::WEIGHTS_FILE;
use super::parts::transposed;
use super::stored::Stored;
use crate::bytes::{hex, json_file};
use crate::checkpoint::{
    PARTIAL_SUFFIX, TensorEntry, cannot_write, encode_header, in_a_row, sync_folder, write_atomic,
};
use crate::disk;
use crate::run::verification::VerifiedFile;

/// Bytes of a copied tensor that are in memory at once.
const PIECE: usize = 1 << 20;

impl Combination {
    /// Writes the combined adapter into `folder`, over an adapter that is there, and returns its files.
    ///
    /// # Errors
    /// Fails when files cannot be written, when an adapter cannot be read, and for a combined element that is not finite.
    pub fn write(&self, folder: &Path, draws: &Draws<'_>) -> Result<Vec<VerifiedFile>> {
        let (config, weights) = (folder.join(CONFIG_FILE), folder.join(WEIGHTS_FILE));
        let partial = folder.join(format!("{WEIGHTS_FILE}{PARTIAL_SUFFIX}"));
        let created = std::fs::create_dir_all(folder).and_then(|()| {
            // Without its config, an adapter that is half replaced is not loaded.
            disk::remove(&config)?;
            disk::create(&partial)
        });
        let file = created.map_err(|error| cannot_write(folder, &error))?;
        let mut output = AdapterFile::new(&file, &partial);
        output.put(&self.header())?;
        for tensor in self.tensors() {
            let factors = self.factors(tensor, draws)?;
            let (a, b) = match self.shape(tensor).is_embedding {
                false => (factors.a, factors.b),
                true => {
                    (transposed(&factors.b, factors.rank), transposed(&factors.a, factors.columns))
                }
            };
            // Files are little endian, and so is every machine that this program is built for.
            output.put(bytemuck::cast_slice(&a))?;
            output.put(bytemuck::cast_slice(&b))?;
            if let Some(copy) = self.copy(tensor) {
                output.copy(copy)?;
            }
        }
        let weights_file = output.finish(&weights)?;
        sync_folder(folder)?;
        let text = json_file(&self.config())?;
        write_atomic(&config, &text)?;
        let config_file = VerifiedFile {
            file: CONFIG_FILE.to_string(),
            bytes: text.len() as u64,
            sha256: hex(&Sha256::digest(&text)),
        };
        Ok(vec![config_file, weights_file])
    }

    /// The module of a tensor, as the adapters name it.
    fn module(&self, tensor: &str) -> String {
        let module = module_of(tensor);
        match self.adapters.iter().any(|adapter| adapter.is_inside) {
            true => inside(module),
            false => module.to_owned(),
        }
    }

    /// The header of the weights.
    fn header(&self) -> Vec<u8> {
        let mut tensors = Vec::new();
        for tensor in self.tensors() {
            let of = self.shape(tensor);
            let module = format!("{PREFIX}{}", self.module(tensor));
            let ([down, up], inner, outer) = match of.is_embedding {
                false => (["lora_A.weight", "lora_B.weight"], of.columns, of.rows),
                true => (["lora_embedding_A", "lora_embedding_B"], of.rows, of.columns),
            };
            tensors.push((format!("{module}.{down}"), Dtype::F32, vec![of.rank, inner]));
            tensors.push((format!("{module}.{up}"), Dtype::F32, vec![outer, of.rank]));
            if let Some(copy) = self.copy(tensor) {
                let TensorEntry { dtype, shape, .. } = &copy.entry;
                tensors.push((copy.key().to_owned(), *dtype, shape.clone()));
            }
        }
        encode_header(&BTreeMap::from([("format".into(), "pt".into())]), &in_a_row(tensors))
    }

    /// The config. It names modules in full, so that no module gets factors by mistake.
    fn config(&self) -> serde_json::Value {
        let modules = self.tensors().map(|tensor| (self.module(tensor), self.shape(tensor).rank));
        let ranks: BTreeMap<String, usize> = modules.collect();
        let most = ranks.values().max().copied().unwrap_or(1);
        let others = ranks.iter().filter(|(_, rank)| **rank != most);
        let patterns: BTreeMap<String, usize> =
            others.map(|(module, rank)| (regex::escape(module), *rank)).collect();
        let modules: Vec<&String> = ranks.keys().collect();
        let base = self.adapters[0].base_model_name();
        let mut config = written_config(base, most, json!(most), json!(modules));
        config["rank_pattern"] = json!(patterns);
        config["alpha_pattern"] = json!(patterns);
        if self.adapters.iter().all(|adapter| adapter.keeps_tie) {
            config["ensure_weight_tying"] = true.into();
        }
        config
    }
}

/// A file that is written from its beginning to its end.
struct AdapterFile<'a> {
    file: &'a File,
    path: &'a Path,
    at: u64,
    sha256: Sha256,
}

impl<'a> AdapterFile<'a> {
    fn new(file: &'a File, path: &'a Path) -> Self {
        Self { file, path, at: 0, sha256: Sha256::new() }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        disk::write_all_at(self.file, bytes, self.at).map_err(|error| self.failed(&error))?;
        self.sha256.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Copies a tensor as it is stored.
    fn copy(&mut self, of: &Stored) -> Result<()> {
        let mut buffer = vec![0; PIECE];
        let mut at = 0;
        while at < of.entry.bytes {
            let length = (of.entry.bytes - at).min(PIECE as u64);
            let piece = &mut buffer[..length as usize];
            of.read_bytes(at, piece)?;
            self.put(piece)?;
            at += length;
        }
        Ok(())
    }

    /// Gives the file its name.
    fn finish(self, path: &Path) -> Result<VerifiedFile> {
        let named = disk::sync(self.file).and_then(|()| disk::rename(self.path, path));
        named.map_err(|error| self.failed(&error))?;
        Ok(VerifiedFile {
            file: WEIGHTS_FILE.to_string(),
            bytes: self.at,
            sha256: hex(&self.sha256.finalize()),
        })
    }

    fn failed(&self, error: &io::Error) -> crate::failure::Failure {
        cannot_write(self.path, error)
    }
}
