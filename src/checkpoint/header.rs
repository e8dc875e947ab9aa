//! The header of a safetensors file: an 8-byte little-endian length, a JSON object (tensor name → dtype, shape,
//! byte range), then the tensors' bytes without holes.
//!
//! The numbers in a header decide later reads and allocations. So every number is checked here against the length of the file, and
//! the length of the header is checked before anything is allocated. A refusal names the file, the tensor and both numbers.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::path::Path;

use anyhow::Context;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::bytes::ByteSize;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;

/// Bytes before the JSON: its length.
pub(super) const LENGTH_BYTES: u64 = 8;

/// The largest header, as in the `safetensors` library; a model of 405B has less than 1 MB.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The most commas and colons in a header. A tensor takes eleven of them and, once opened, half a KiB of memory. So this number
/// bounds memory and time, which the size of a header does not: 98 MB of empty tensors took a minute and 2.7 GB. The largest
/// published files hold a few thousand tensors.
const MOST_SEPARATORS: usize = 3 << 19;

/// The JSON key that holds free text instead of a tensor.
pub(super) const METADATA_KEY: &str = "__metadata__";

/// The position and form of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name, as stored ("model.layers.0.self_attn.q_proj.weight").
    pub name: String,
    /// The type of its elements, as stored.
    pub dtype: Dtype,
    /// Its dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// The index of its file in [`Checkpoint::shards`](super::Checkpoint::shards).
    pub shard: usize,
    /// The start of its data, in bytes from the start of the file.
    pub offset: u64,
    /// The length of its data in bytes.
    pub bytes: u64,
}

impl TensorEntry {
    /// The number of elements; cannot overflow, because the header's check multiplied the same numbers.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The end of `length` bytes from byte `start` of the tensor on.
    ///
    /// # Errors
    /// Fails when the bytes leave the tensor.
    pub fn end_of(&self, start: u64, length: usize) -> anyhow::Result<u64> {
        let end = start.checked_add(length as u64).filter(|&end| end <= self.bytes);
        end.with_context(|| {
            format!("{length} bytes from {start} leave the {} bytes of `{}`", self.bytes, self.name)
        })
    }
}

/// A checked header.
#[derive(Debug)]
pub(super) struct Header {
    /// The JSON as stored, padding included, length excluded.
    pub(super) json: Vec<u8>,
    /// The free text of `__metadata__`.
    pub(super) metadata: BTreeMap<String, String>,
    /// Tensors in the order of the JSON, `data_offsets` from the start of the data.
    pub(super) tensors: Vec<(String, TensorInfo)>,
}

impl Header {
    /// The position in the file where the tensors' bytes begin.
    pub(super) fn data_start(&self) -> u64 {
        LENGTH_BYTES + self.json.len() as u64
    }

    /// Reads and checks the header of `file`, which is `file_bytes` long; `path` is for messages.
    pub(super) fn read(file: &File, file_bytes: u64, path: &Path) -> anyhow::Result<Self> {
        let bad = |why: String| unreadable(path, &why);
        if file_bytes < LENGTH_BYTES {
            return Err(
                bad(format!("{file_bytes} bytes are too few for a safetensors file")).into()
            );
        }
        let mut length = [0; LENGTH_BYTES as usize];
        read_exact_at(file, &mut length, 0).map_err(|error| bad(error.to_string()))?;
        let length = u64::from_le_bytes(length);
        // Checked before allocating: the first eight bytes may hold any number.
        if length > MAX_HEADER_BYTES {
            return Err(bad("it is not a safetensors file".into())
                .detail(format!(
                    "its first 8 bytes announce a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed"
                ))
                .into());
        }
        if length > file_bytes - LENGTH_BYTES {
            return Err(bad("it is truncated inside its header".into())
                .detail(format!(
                    "the header needs {length} bytes, {} follow",
                    file_bytes - LENGTH_BYTES
                ))
                .into());
        }
        let mut json = vec![0; length as usize];
        read_exact_at(file, &mut json, LENGTH_BYTES).map_err(|error| bad(error.to_string()))?;
        let data_bytes = file_bytes - LENGTH_BYTES - length;
        Self::parse(json, data_bytes, path)
    }

    /// Checks a header that was downloaded without its file, which is `file_bytes` long; `path` is for messages.
    pub(super) fn of(json: Vec<u8>, file_bytes: u64, path: &Path) -> anyhow::Result<Self> {
        let data_bytes =
            file_bytes.checked_sub(LENGTH_BYTES + json.len() as u64).ok_or_else(|| {
                unreadable(path, &format!("{file_bytes} bytes are too few for its header"))
            })?;
        Self::parse(json, data_bytes, path)
    }

    /// Checks a header against the `data_bytes` that follow it.
    fn parse(json: Vec<u8>, data_bytes: u64, path: &Path) -> anyhow::Result<Self> {
        let bad = |why: String| unreadable(path, &why);
        let separators = json.iter().filter(|byte| b",:".contains(byte)).count();
        if separators > MOST_SEPARATORS {
            return Err(bad("its header holds too much".into())
                .detail(format!(
                    "{separators} commas and colons, at most {MOST_SEPARATORS} are read: enough for 130,000 tensors in a file"
                ))
                .into());
        }
        let RawHeader { metadata, tensors } = serde_json::from_slice(&json)
            .map_err(|error| bad("its header is not valid".into()).detail(error.to_string()))?;

        for (name, info) in &tensors {
            let (start, end) = info.data_offsets;
            let held = end.checked_sub(start).ok_or_else(|| {
                bad(format!("tensor `{name}` ends at byte {end}, before its start {start}"))
            })?;
            let needed = data_len(info).ok_or_else(|| {
                bad(format!("tensor `{name}` has an impossible shape {:?}", info.shape))
            })?;
            if needed != held {
                return Err(bad(format!("tensor `{name}` does not fit its bytes"))
                    .detail(format!(
                        "{} {:?} needs {needed} bytes, the header gives it {held}",
                        info.dtype, info.shape
                    ))
                    .into());
            }
        }

        let mut by_offset: Vec<_> = tensors.iter().collect();
        by_offset.sort_by_key(|(_, info)| info.data_offsets);
        let mut end = 0;
        for (name, info) in by_offset {
            let (start, stop) = info.data_offsets;
            if start < end {
                return Err(bad(format!("tensor `{name}` overlaps its neighbour"))
                    .detail(format!("it starts at data byte {start}, the one before ends at {end}"))
                    .into());
            }
            if start > end {
                return Err(bad(format!("there is a hole before tensor `{name}`"))
                    .detail(format!("data bytes {end} to {start} belong to no tensor"))
                    .into());
            }
            end = stop;
        }

        let described = end as u64;
        if described > data_bytes {
            let missing = described - data_bytes;
            return Err(bad(format!("it is truncated, {missing} bytes are missing"))
                .detail(format!(
                    "its tensors need {} ({described} bytes), {} ({data_bytes} bytes) are there",
                    ByteSize(described),
                    ByteSize(data_bytes)
                ))
                .into());
        }
        if described < data_bytes {
            let extra = data_bytes - described;
            return Err(bad(format!("{extra} bytes follow its last tensor")).into());
        }
        // An accepted file must also load in every program that uses the library.
        Metadata::new(None, sorted(&tensors))
            .map_err(|error| bad("its header is not valid".into()).detail(error.to_string()))?;
        Ok(Self { json, metadata, tensors })
    }

    /// The header to write: the source's own bytes, or, where `format` is absent, the same with `"format":"pt"`.
    pub(super) fn with_format(&self) -> OutputHeader {
        if self.metadata.contains_key("format") {
            return OutputHeader { bytes: framed(&self.json), adds_format: false };
        }
        let mut metadata = self.metadata.clone();
        metadata.insert("format".into(), "pt".into());
        OutputHeader { bytes: encode_header(&metadata, &self.tensors), adds_format: true }
    }
}

/// The first bytes of an output file: length, JSON and padding.
#[derive(Debug, Clone)]
pub(super) struct OutputHeader {
    pub(super) bytes: Vec<u8>,
    /// `format` is added to the source's header, because transformers refuses files without it.
    pub(super) adds_format: bool,
}

/// The bytes of a safetensors file before its data: length, JSON in the given order, spaces up to a multiple of 8.
///
/// `data_offsets` count from the start of the data, in bytes, without holes.
pub fn encode_header(
    metadata: &BTreeMap<String, String>,
    tensors: &[(String, TensorInfo)],
) -> Vec<u8> {
    struct Ordered<'a>(&'a BTreeMap<String, String>, &'a [(String, TensorInfo)]);
    impl serde::Serialize for Ordered<'_> {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            use serde::ser::SerializeMap;
            let mut map = serializer.serialize_map(None)?;
            if !self.0.is_empty() {
                map.serialize_entry(METADATA_KEY, self.0)?;
            }
            for (name, info) in self.1 {
                map.serialize_entry(name, info)?;
            }
            map.end()
        }
    }
    let mut json = serde_json::to_vec(&Ordered(metadata, tensors))
        .expect("strings and integers always have a JSON form");
    json.resize(json.len().next_multiple_of(8), b' ');
    framed(&json)
}

/// Places tensors, each by its name, dtype and shape, in this order and without holes.
pub fn in_a_row(
    tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
) -> Vec<(String, TensorInfo)> {
    let mut end = 0;
    let info = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name, TensorInfo { dtype, shape, data_offsets: (start, end) })
    };
    tensors.into_iter().map(info).collect()
}

/// The refusal of a file with a wrong header: the published file was different.
fn unreadable(path: &Path, why: &str) -> Failure {
    Failure::new(format!("cannot read `{}`: {why}", path.display()))
        .hint("download this file again")
}

/// The bytes of a tensor's data; `None` where they overflow or do not fill whole bytes (4- and 6-bit types).
pub(super) fn data_len(info: &TensorInfo) -> Option<usize> {
    let elements =
        info.shape.iter().try_fold(1usize, |product, &length| product.checked_mul(length))?;
    let bits = elements.checked_mul(info.dtype.bitsize())?;
    (bits % 8 == 0).then_some(bits / 8)
}

fn sorted(tensors: &[(String, TensorInfo)]) -> Vec<(String, TensorInfo)> {
    let mut sorted = tensors.to_vec();
    sorted.sort_by_key(|(_, info)| info.data_offsets);
    sorted
}

pub(super) fn framed(json: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LENGTH_BYTES as usize + json.len());
    bytes.extend_from_slice(&(json.len() as u64).to_le_bytes());
    bytes.extend_from_slice(json);
    bytes
}

/// The JSON object in its own order. The library's map would drop the order and keep the last of two equal names.
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, TensorInfo)>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OrderedHeader;
        impl<'de> Visitor<'de> for OrderedHeader {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut metadata = BTreeMap::new();
                let mut tensors = Vec::new();
                let mut seen = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format!("`{name}` appears twice")));
                    }
                    if name == METADATA_KEY {
                        metadata = map
                            .next_value::<Option<BTreeMap<String, String>>>()?
                            .unwrap_or_default();
                    } else {
                        tensors.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader { metadata, tensors })
            }
        }
        deserializer.deserialize_map(OrderedHeader)
    }
}
