//! [`Layout`]: the files of an output, and the position of every tensor in them. It is known before the first weight.
//!
//! An output has the layout of its source ([`Layout::of`]) or a new layout ([`Layout::new`]). The output of a view
//! ([`Checkpoint::view`]) has a new layout. In a new layout, shards have the names and the index that Hugging Face gives them:
//! `model-00001-of-00003.safetensors` and `model.safetensors.index.json`.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::json;

use super::header::{
    Header, MAX_HEADER_BYTES, METADATA_KEY, TensorEntry, data_len, encode_header, framed,
};
use super::names::{INDEX_FILE, SINGLE_FILE};
use super::naming::Naming;
use super::source::{Checkpoint, entries_of};
use crate::bytes::{ByteSize, json_file};
use crate::failure::Failure;

/// A tensor of a new output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedTensor {
    /// Its name ("model.layers.0.self_attn.q_proj.weight").
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// A weight file of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its name in the output folder.
    pub file_name: String,
    /// Its first bytes: length, JSON and padding.
    pub header: Vec<u8>,
    /// Its length in bytes.
    pub file_bytes: u64,
}

/// The files of an output; see the first lines of this file.
#[derive(Debug, Clone)]
pub struct Layout {
    files: Vec<PlannedFile>,
    /// Tensors, ordered by file and offset.
    entries: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
    has_index: bool,
    /// Files whose source has no `format` in its header.
    added_formats: usize,
    /// The names in the files.
    naming: Naming,
}

/// The header's form of a tensor; before [`place`], its `data_offsets` begin at 0.
type Named = (String, TensorInfo);

impl Layout {
    /// The layout of a copy of `source`: its files and tensors, in its order. A header without `format` gets `"format":"pt"`. The
    /// tensors of a view get new files, none larger than the largest of the source.
    ///
    /// # Errors
    /// Fails for a view as [`Layout::new`].
    pub fn of(source: &Checkpoint) -> anyhow::Result<Self> {
        let shards = source.shards();
        if source.is_view() {
            let data_bytes = shards.iter().map(|shard| shard.file_bytes - shard.data_start);
            let tensors = source.tensors().map(|entry| PlannedTensor {
                name: entry.name.clone(),
                dtype: entry.dtype,
                shape: entry.shape.clone(),
            });
            let shard_bytes = data_bytes.max().unwrap_or_default();
            return Self::named(tensors.collect(), shard_bytes, source.naming());
        }
        let files = shards.iter().map(|shard| {
            let header = shard.output_header.bytes.clone();
            PlannedFile {
                file_name: shard.file_name.clone(),
                file_bytes: header.len() as u64 + (shard.file_bytes - shard.data_start),
                header,
            }
        });
        let entries = source.tensors().map(|entry| {
            let shard = &shards[entry.shard];
            // Only the header's length differs from the source's.
            let data_start = shard.output_header.bytes.len() as u64;
            TensorEntry { offset: data_start + (entry.offset - shard.data_start), ..entry.clone() }
        });
        let without_format = shards.iter().filter(|shard| shard.output_header.adds_format);
        Ok(Self {
            added_formats: without_format.count(),
            has_index: source.folder().join(INDEX_FILE).is_file(),
            naming: source.naming(),
            ..Self::from(files.collect(), entries.collect())
        })
    }

    /// A new layout: `tensors` in this order, in files of at most `shard_bytes` bytes of tensors. A larger tensor has a file of its
    /// own. A file whose order would give a tensor an offset that is no multiple of its element's size has the larger elements first.
    ///
    /// # Errors
    /// Fails when there is no tensor, when a name appears twice or is the key of the metadata, when a tensor has an impossible
    /// shape, and when a header is too long for its readers.
    pub fn new(tensors: Vec<PlannedTensor>, shard_bytes: u64) -> anyhow::Result<Self> {
        Self::named(tensors, shard_bytes, Naming::PLAIN)
    }

    /// [`Layout::new`] with the names of `source` in the files.
    ///
    /// # Errors
    /// Fails as [`Layout::new`].
    pub fn named_as(
        source: &Checkpoint,
        tensors: Vec<PlannedTensor>,
        shard_bytes: u64,
    ) -> anyhow::Result<Self> {
        Self::named(tensors, shard_bytes, source.naming())
    }

    /// The layout of files whose headers are known: names, JSON headers as stored, and lengths. Names of tensors are translated as those
    /// of `source`.
    ///
    /// # Errors
    /// Fails for a header that is not valid or does not agree with the length of its file, and when a name appears twice.
    pub fn restored(
        source: &Checkpoint,
        files: Vec<(String, Vec<u8>, u64)>,
        has_index: bool,
    ) -> anyhow::Result<Self> {
        let naming = source.naming();
        let (mut planned, mut entries) = (Vec::with_capacity(files.len()), Vec::new());
        for (shard, (file_name, json, file_bytes)) in files.into_iter().enumerate() {
            if json.len() as u64 > MAX_HEADER_BYTES {
                return Err(Failure::new(format!("the header of `{file_name}` is too long")).into());
            }
            let header = framed(&json);
            let parsed = Header::of(json, file_bytes, &source.folder().join(&file_name))?;
            let mut found = entries_of(&parsed, shard);
            found.iter_mut().for_each(|entry| entry.name = naming.used(&entry.name));
            entries.extend(found);
            planned.push(PlannedFile { file_name, header, file_bytes });
        }
        let layout = Self { has_index, naming, ..Self::from(planned, entries) };
        layout.check_names()?;
        Ok(layout)
    }

    fn named(
        tensors: Vec<PlannedTensor>,
        shard_bytes: u64,
        naming: Naming,
    ) -> anyhow::Result<Self> {
        if tensors.is_empty() {
            return Err(Failure::new("an output needs at least one tensor").into());
        }
        let shards = cut(tensors, shard_bytes)?;
        let (mut files, mut entries) = (Vec::with_capacity(shards.len()), Vec::new());
        let (metadata, count) = ([("format".into(), "pt".into())].into(), shards.len());
        for (shard, mut tensors) in shards.into_iter().enumerate() {
            place(&mut tensors);
            let stored = tensors.iter().map(|(name, info)| {
                let name = naming.stored(name).into_owned();
                (name, info.clone())
            });
            let header = encode_header(&metadata, &stored.collect::<Vec<_>>());
            let file_name = match count {
                1 => SINGLE_FILE.to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
            };
            let data_start = header.len() as u64;
            if data_start > MAX_HEADER_BYTES {
                return Err(Failure::new(format!("the header of `{file_name}` is too long"))
                    .detail(format!(
                        "its {} tensors need {data_start} bytes, at most {MAX_HEADER_BYTES} are allowed",
                        tensors.len()
                    ))
                    .hint("choose smaller shards")
                    .into());
            }
            entries.extend(tensors.into_iter().map(|(name, info)| TensorEntry {
                name,
                dtype: info.dtype,
                shape: info.shape,
                shard,
                offset: data_start + info.data_offsets.0 as u64,
                bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
            }));
            let data_bytes = entries.last().map_or(0, |last| last.offset + last.bytes);
            files.push(PlannedFile { file_name, header, file_bytes: data_bytes });
        }
        let layout = Self { has_index: count > 1, naming, ..Self::from(files, entries) };
        layout.check_names()?;
        Ok(layout)
    }

    fn from(files: Vec<PlannedFile>, entries: Vec<TensorEntry>) -> Self {
        let names = entries.iter().map(|entry| entry.name.clone());
        Self {
            by_name: names.zip(0..).collect(),
            files,
            entries,
            has_index: false,
            added_formats: 0,
            naming: Naming::PLAIN,
        }
    }

    fn check_names(&self) -> anyhow::Result<()> {
        for (at, TensorEntry { name, .. }) in self.entries.iter().enumerate() {
            // The map has the last of equal names.
            if self.position(name) != Some(at) {
                return Err(Failure::new(format!("tensor `{name}` is planned twice")).into());
            }
        }
        if self.entry(METADATA_KEY).is_some() {
            let why = format!("no tensor can have the name `{METADATA_KEY}`");
            return Err(Failure::new(why).into());
        }
        Ok(())
    }

    /// The weight files, in the order of their names.
    pub fn files(&self) -> &[PlannedFile] {
        &self.files
    }

    /// Every tensor with its position in the output, in file order.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// The tensor `name` with its position in the output; `None` if the output does not have it.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.position(name).and_then(|at| self.entries.get(at))
    }

    /// The bytes of all weight files.
    pub fn bytes(&self) -> ByteSize {
        let files = self.files.iter();
        files.map(|file| ByteSize(file.file_bytes)).sum()
    }

    /// The content of `model.safetensors.index.json`; `None` for an output without an index.
    pub fn index_json(&self) -> Option<Vec<u8>> {
        let file_of = |entry: &TensorEntry| self.files[entry.shard].file_name.as_str();
        let entries = self.entries.iter();
        let stored = entries.clone().map(|entry| (self.naming.stored(&entry.name), file_of(entry)));
        let weight_map: BTreeMap<Cow<'_, str>, &str> = stored.collect();
        let total_size: u64 = entries.map(|entry| entry.bytes).sum();
        let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        let text = json_file(&index).expect("strings and integers always have a JSON form");
        self.has_index.then_some(text)
    }

    /// The index of the tensor `name` in [`Layout::tensors`].
    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Returns whether the output has `model.safetensors.index.json`.
    pub(super) fn has_index(&self) -> bool {
        self.has_index
    }

    /// The number of files whose header gets a `format` that their source lacks.
    pub(super) fn added_formats(&self) -> usize {
        self.added_formats
    }
}

/// Divides tensors into files, in order.
fn cut(tensors: Vec<PlannedTensor>, shard_bytes: u64) -> anyhow::Result<Vec<Vec<Named>>> {
    let mut shards: Vec<Vec<Named>> = Vec::new();
    let (mut filled, mut total) = (0, 0);
    for PlannedTensor { name, dtype, shape } in tensors {
        let mut info = TensorInfo { dtype, shape, data_offsets: (0, 0) };
        // The sum over all files is checked too, so later sums and differences cannot overflow.
        let sized = data_len(&info).and_then(|bytes| {
            let limit = i64::MAX as u64 - MAX_HEADER_BYTES;
            let sum = u64::checked_add(total, bytes as u64).filter(|sum| *sum <= limit);
            Some((bytes, sum?))
        });
        let Some((bytes, sum)) = sized else {
            return Err(Failure::new(format!("tensor `{name}` has an impossible shape"))
                .detail(format!("{dtype} {:?}, after {total} bytes", info.shape))
                .into());
        };
        (info.data_offsets, total) = ((0, bytes), sum);
        match shards.last_mut() {
            Some(shard) if filled + bytes as u64 <= shard_bytes => {
                shard.push((name, info));
                filled += bytes as u64;
            }
            _ => {
                shards.push(vec![(name, info)]);
                filled = bytes as u64;
            }
        }
    }
    Ok(shards)
}

/// Gives the tensors of a file their offsets.
///
/// torch refuses to view bytes as elements unless they begin at a multiple of the element's size. A tensor with an odd number of
/// small elements can break that for a later tensor. With the larger elements first, every tensor is aligned.
fn place(tensors: &mut [Named]) {
    if !is_aligned_after_packing(tensors) {
        tensors.sort_by_key(|(_, info)| Reverse(info.dtype.bitsize()));
        is_aligned_after_packing(tensors);
    }
}

fn is_aligned_after_packing(tensors: &mut [Named]) -> bool {
    let (mut end, mut is_aligned) = (0, true);
    for (_, info) in tensors {
        let start = end;
        end += info.data_offsets.1 - info.data_offsets.0;
        info.data_offsets = (start, end);
        is_aligned &= start % (info.dtype.bitsize() / 8).max(1) == 0;
    }
    is_aligned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(name: &str, dtype: Dtype, shape: &[usize]) -> PlannedTensor {
        PlannedTensor { name: name.into(), dtype, shape: shape.to_vec() }
    }

    #[test]
    fn a_file_ends_before_the_tensor_that_would_pass_the_limit() -> anyhow::Result<()> {
        let tensors = vec![
            planned("z", Dtype::F32, &[2, 2]), // 16 bytes
            planned("y", Dtype::BF16, &[4]),   // 8 bytes fill the first file exactly
            planned("scalar", Dtype::F32, &[]),
            planned("big", Dtype::F32, &[8]), // 32 bytes have their own file
            planned("a", Dtype::I64, &[3]),
        ];
        let layout = Layout::new(tensors, 24)?;
        let names: Vec<&str> = layout.files().iter().map(|file| file.file_name.as_str()).collect();
        let name = |at: usize| format!("model-0000{at}-of-00004.safetensors");
        assert_eq!(names, [name(1), name(2), name(3), name(4)]);
        let shards: Vec<usize> = layout.tensors().iter().map(|entry| entry.shard).collect();
        assert_eq!(shards, [0, 0, 1, 2, 3]);
        let [first, second, ..] = layout.tensors() else { panic!("five tensors") };
        let header = &layout.files()[0].header;
        assert_eq!((first.offset, second.offset), (header.len() as u64, header.len() as u64 + 16));
        assert_eq!(layout.files()[0].file_bytes, header.len() as u64 + 24);
        let json = br#"{"__metadata__":{"format":"pt"},"z":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"y":"#;
        assert!(header[8..].starts_with(json));
        // 16 + 8 + 4 + 32 + 24 bytes; sorted keys and two spaces, as transformers writes it.
        let index = "{\n  \"metadata\": {\n    \"total_size\": 84\n  },\n  \"weight_map\": {\n    \
             \"a\": \"model-00004-of-00004.safetensors\",\n    \"big\": \"model-00003-of-00004.safetensors\",\n    \
             \"scalar\": \"model-00002-of-00004.safetensors\",\n    \"y\": \"model-00001-of-00004.safetensors\",\n    \
             \"z\": \"model-00001-of-00004.safetensors\"\n  }\n}\n";
        let found = layout.index_json().map(String::from_utf8).transpose()?;
        assert_eq!(found.as_deref(), Some(index));

        let single = Layout::new(vec![planned("z", Dtype::F32, &[2, 2])], 0)?;
        assert_eq!(single.files()[0].file_name, "model.safetensors");
        assert_eq!(single.index_json(), None);
        assert_eq!(single.bytes(), ByteSize(single.files()[0].file_bytes));
        Ok(())
    }

    #[test]
    fn larger_elements_come_first_only_where_torch_could_not_view_them() -> anyhow::Result<()> {
        let order = |tensors: &[(&str, Dtype, usize)]| -> anyhow::Result<String> {
            let tensors = tensors.iter();
            let tensors = tensors.map(|(name, dtype, length)| planned(name, *dtype, &[*length]));
            let layout = Layout::new(tensors.collect(), 1 << 20)?;
            for entry in layout.tensors() {
                let each = entry.dtype.bitsize() as u64 / 8;
                assert_eq!(entry.offset % each, 0, "{}", entry.name);
            }
            let names = layout.tensors().iter().map(|entry| entry.name.as_str());
            Ok(names.collect())
        };
        let (small, large) = (Dtype::BF16, Dtype::F32);
        assert_eq!(order(&[("a", small, 2), ("b", large, 1)])?, "ab");
        // After 3 elements of 2 bytes, 4 bytes would begin at 6.
        let odd = [("a", small, 3), ("b", large, 1), ("c", small, 1)];
        assert_eq!(order(&odd)?, "bac");
        Ok(())
    }

    #[test]
    fn impossible_outputs_are_refused() {
        let one = |name, shape: &[usize]| planned(name, Dtype::U8, shape);
        for (tensors, expected) in [
            (vec![], "at least one tensor"),
            (vec![one("a", &[1]), one("a", &[2])], "`a` is planned twice"),
            (vec![one("__metadata__", &[1])], "no tensor can have"),
            (vec![one("a", &[usize::MAX, 2])], "`a` has an impossible"),
            (vec![planned("a", Dtype::F4, &[3])], "`a` has an impossible"),
            // The eighth makes 2⁶³ bytes, more than the lengths of files can be.
            (
                ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| one(name, &[1 << 60])).into(),
                "`h` has an impossible",
            ),
        ] {
            let error = Layout::new(tensors, u64::MAX).expect_err(expected);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
