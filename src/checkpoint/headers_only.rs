//! [`HeadersOnly`]: the headers of a checkpoint whose weights were not downloaded.

use std::collections::HashMap;
use std::path::Path;

use super::header::{Header, TensorEntry};
use super::naming::Naming;
use super::source::entries_of;
use super::weight_source::WeightSource;
use crate::failure::Failure;

/// Tensors by name, without their bytes: enough to check and to plan.
#[derive(Debug)]
pub struct HeadersOnly {
    place: String,
    files: Vec<String>,
    entries: HashMap<String, TensorEntry>,
}

impl HeadersOnly {
    /// Checks the headers of all shards.
    ///
    /// # Arguments
    /// * `place`: the name of the checkpoint in errors
    /// * `shards`: for each file its name, its JSON header without the length, and its length in bytes
    ///
    /// # Errors
    /// Fails when a header is not valid, disagrees with the length of its file, or repeats a tensor.
    pub fn new(
        place: &str,
        shards: impl IntoIterator<Item = (String, Vec<u8>, u64)>,
    ) -> anyhow::Result<Self> {
        let mut found =
            Self { place: place.to_string(), files: Vec::new(), entries: HashMap::new() };
        for (name, json, file_bytes) in shards {
            let header = Header::of(json, file_bytes, Path::new(&name))?;
            for entry in entries_of(&header, found.files.len()) {
                if let Some(other) = found.entries.insert(entry.name.clone(), entry) {
                    return Err(Failure::new(format!("tensor `{}` is in two files", other.name))
                        .detail(format!("one is `{name}` of `{place}`"))
                        .into());
                }
            }
            found.files.push(name);
        }
        let naming = Naming::of(found.entries.keys().map(String::as_str));
        let entries = found.entries.into_values().map(|entry| {
            let name = naming.used(&entry.name);
            (name.clone(), TensorEntry { name, ..entry })
        });
        Ok(Self { entries: entries.collect(), ..found })
    }
}

impl WeightSource for HeadersOnly {
    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.entries.get(name)
    }

    fn read(&self, entry: &TensorEntry, _: u64, _: &mut [u8]) -> anyhow::Result<()> {
        Err(Failure::new(format!("the bytes of `{}` are not here, only its header", entry.name))
            .into())
    }

    fn place(&self) -> String {
        self.place.clone()
    }

    fn file_of(&self, entry: &TensorEntry) -> String {
        self.files.get(entry.shard).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_checked_and_weights_are_not_there() {
        let json = br#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#.to_vec();
        let bytes = 8 + json.len() as u64 + 12;
        let shard = |bytes| [("x.safetensors".to_string(), json.clone(), bytes)];
        let source = HeadersOnly::new("a model", shard(bytes)).unwrap();
        let entry = source.require("a", &[2, 3]).unwrap();
        assert_eq!((entry.bytes, source.file_of(entry)), (12, "x.safetensors".to_string()));
        assert!(source.require("b", &[1]).unwrap_err().to_string().contains("a model"));
        assert!(source.read(entry, 0, &mut [0; 12]).is_err());
        assert!(HeadersOnly::new("a model", shard(bytes - 1)).is_err(), "truncated");
        let twice = shard(bytes).into_iter().chain(shard(bytes));
        assert!(HeadersOnly::new("a model", twice).unwrap_err().to_string().contains("two files"));
    }
}
