//! [`AdaptedSource`]: a base model with an adapter, read as if the adapted model were on disk.
//!
//! Perplexity and calibration read it in place of a checkpoint. It has the base's tensors with the base's dtypes. A read widens to
//! whole rows, applies the change in f32 and rounds once.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

use super::change::TensorChange;
use super::opened::Adapter;
use super::stored::{read_rows, stored_dtype};
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::linalg::StoredMatrix;

/// Elements that a read holds in f32 at a time: 1 MiB, or a whole row if a row is larger.
const PIECE: usize = 1 << 18;

/// Bytes of changes that stay in memory: several readers have a tensor each and read it in pieces. The latest change always stays.
const CACHED_BYTES: usize = 64 << 20;

/// A base model with the changes of an adapter.
pub struct AdaptedSource {
    base: Arc<dyn WeightSource>,
    adapter: Adapter,
    /// The head that the adapter separates from the embedding.
    own_head: Option<TensorEntry>,
    /// Tensors with more rows than the base's.
    grown: BTreeMap<String, TensorEntry>,
    /// Changes in use, the latest last.
    cached: Mutex<VecDeque<Arc<TensorChange>>>,
}

impl AdaptedSource {
    /// Puts an adapter on its base.
    ///
    /// # Errors
    /// Fails when the adapter does not fit, as [`Adapter::check`] says.
    pub fn new(base: Arc<dyn WeightSource>, adapter: Adapter) -> Result<Self> {
        adapter.check(&*base)?;
        let own_head = adapter.own_head.as_ref().and_then(|own| {
            Some(TensorEntry { name: own.head.clone(), ..base.entry(&own.embedding)?.clone() })
        });
        let grown = adapter.grown(&*base);
        Ok(Self { base, adapter, own_head, grown, cached: Mutex::default() })
    }

    /// The number of tokens, if the adapter adds tokens to the base's.
    pub fn added_rows(&self) -> Option<usize> {
        self.grown.values().next().map(|entry| entry.shape[0])
    }

    fn change(&self, tensor: &str) -> Result<Option<Arc<TensorChange>>> {
        if let Some(change) = self.cached(tensor, None) {
            return Ok(Some(change));
        }
        // The cache is not locked here, so no reader waits while the factors are read.
        let Some(change) = self.adapter.change(tensor)? else {
            return Ok(None);
        };
        Ok(self.cached(tensor, Some(Arc::new(change))))
    }

    /// Returns the change of `tensor` from the cache, after `new` was put there if it is missing.
    fn cached(&self, tensor: &str, new: Option<Arc<TensorChange>>) -> Option<Arc<TensorChange>> {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let place = cached.iter().position(|change| change.tensor == tensor);
        let found = place.and_then(|place| cached.remove(place)).or(new)?;
        cached.push_back(Arc::clone(&found));
        let mut bytes: usize = cached.iter().map(|change| change.bytes()).sum();
        while bytes > CACHED_BYTES && cached.len() > 1 {
            bytes -= cached.pop_front().map_or(0, |change| change.bytes());
        }
        Some(found)
    }

    /// The stored bytes of some adapted rows.
    fn rows(
        &self,
        entry: &TensorEntry,
        change: &TensorChange,
        rows: Range<usize>,
        wide: &mut Vec<f32>,
    ) -> Result<StoredMatrix> {
        let dtype = stored_dtype(entry)?;
        wide.resize(rows.len() * change.columns, 0.0);
        // The adapter replaces a tensor with more rows whole.
        if !self.grown.contains_key(&change.tensor) {
            read_rows(&*self.base, entry, rows.clone(), change.columns, wide)?;
        }
        change.apply(rows.clone(), wide)?;
        Ok(StoredMatrix::from_f32(dtype, rows.len(), change.columns, wide))
    }
}

impl WeightSource for AdaptedSource {
    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        let own_head = self.own_head.as_ref().filter(|head| head.name == name);
        let grown = self.grown.get(name);
        grown.or(own_head).or_else(|| self.base.entry(name))
    }

    fn read(&self, entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> Result<()> {
        let end = start.saturating_add(buffer.len() as u64);
        let change = self.change(&entry.name)?;
        let stored = self.adapter.stored_in_base(&entry.name);
        let entry = match stored == entry.name || self.grown.contains_key(&entry.name) {
            true => entry,
            false => self.base.entry(stored).unwrap_or(entry),
        };
        // The base refuses a range that leaves the tensor.
        let (Some(change), 1..) = (change, buffer.len()) else {
            return self.base.read(entry, start, buffer);
        };
        if end > entry.bytes {
            return self.base.read(entry, start, buffer);
        }
        let row_bytes = (change.columns * stored_dtype(entry)?.bytes()) as u64;
        let step = (PIECE / change.columns).max(1);
        let rows = (start / row_bytes) as usize..end.div_ceil(row_bytes) as usize;
        let mut wide = Vec::new();
        for first in rows.clone().step_by(step) {
            let piece = first..rows.end.min(first + step);
            let stored = self.rows(entry, &change, piece.clone(), &mut wide)?;
            // The bytes that the piece and the request share.
            let piece_start = piece.start as u64 * row_bytes;
            let from = start.max(piece_start);
            let to = end.min(piece.end as u64 * row_bytes);
            let shared = (from - piece_start) as usize..(to - piece_start) as usize;
            buffer[(from - start) as usize..(to - start) as usize]
                .copy_from_slice(&stored.as_bytes()[shared]);
        }
        Ok(())
    }

    fn place(&self) -> String {
        format!("{} + {}", self.base.place(), self.adapter.place().display())
    }

    fn file_of(&self, entry: &TensorEntry) -> String {
        self.base.file_of(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::test_files::{adapter, base, config, pair, tensor, waves};
    use crate::linalg::StoredDtype;

    /// A linear layer by factors, a bias by a whole tensor, an embedding by a row.
    fn adapted(dtype: StoredDtype) -> (tempfile::TempDir, AdaptedSource) {
        let mut tensors = pair("q", 3, 4);
        tensors.push(waves("base_model.model.q.bias", &[3], 5.0));
        let tokens = "base_model.model.embed.token_adapter.trainable_tokens_delta";
        tensors.push(tensor(tokens, &[1, 4], &[1.0, 2.0, 3.0, 4.0]));
        let adapter = adapter(&config(r#", "trainable_token_indices": [3]"#), &tensors);
        let adapter = Adapter::open(adapter.path()).unwrap();
        let (folder, base) = base(dtype);
        let source = AdaptedSource::new(Arc::new(base), adapter).unwrap();
        (folder, source)
    }

    fn read(source: &AdaptedSource, name: &str, range: Range<usize>) -> Vec<u8> {
        let entry = source.entry(name).unwrap();
        let mut buffer = vec![0; range.len()];
        source.read(entry, range.start as u64, &mut buffer).unwrap();
        buffer
    }

    #[test]
    fn a_tensor_is_the_base_with_its_change_rounded_once() {
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let (_folder, source) = adapted(dtype);
            for (name, rows, columns) in
                [("q.weight", 3, 4), ("q.bias", 1, 3), ("embed.weight", 5, 4)]
            {
                let entry = source.entry(name).unwrap();
                let mut stored = StoredMatrix::zeros(dtype, rows, columns).unwrap();
                source.base.read(entry, 0, stored.as_bytes_mut()).unwrap();
                let mut wide = vec![0.0; rows * columns];
                stored.widen_rows(0, &mut wide);
                let before = wide.clone();
                let change = source.adapter.change(name).unwrap().unwrap();
                change.apply(0..rows, &mut wide).unwrap();
                assert_ne!(wide, before);
                let expected = StoredMatrix::from_f32(dtype, rows, columns, &wide);
                let found = read(&source, name, 0..expected.as_bytes().len());
                assert_eq!(found, expected.as_bytes(), "{name} {dtype:?}");
            }
        }
    }

    #[test]
    fn a_read_may_begin_and_end_anywhere() {
        for dtype in [StoredDtype::F32, StoredDtype::Bf16] {
            let (_folder, source) = adapted(dtype);
            let length = 12 * dtype.bytes();
            let whole = read(&source, "q.weight", 0..length);
            for start in 0..=length {
                for end in start..=length {
                    let found = read(&source, "q.weight", start..end);
                    assert_eq!(found, whole[start..end], "{start}..{end}");
                }
            }
            let entry = source.entry("q.weight").unwrap();
            let beyond = source.read(entry, length as u64 - 1, &mut [0; 2]);
            assert!(beyond.unwrap_err().to_string().contains("q.weight"));
        }
    }

    #[test]
    fn other_tensors_are_the_bases() {
        let (_folder, source) = adapted(StoredDtype::F32);
        let mut expected = vec![0; 32];
        let entry = source.entry("v.weight").unwrap();
        source.base.read(entry, 0, &mut expected).unwrap();
        assert_eq!(read(&source, "v.weight", 0..32), expected);
        assert!(source.entry("k.weight").is_none());
    }

    #[test]
    fn a_change_is_read_once_while_it_is_in_use() {
        let (_folder, source) = adapted(StoredDtype::F32);
        let first = source.change("q.weight").unwrap().unwrap();
        source.change("embed.weight").unwrap().unwrap();
        let again = source.change("q.weight").unwrap().unwrap();
        assert!(Arc::ptr_eq(&first, &again));
        let order: Vec<_> =
            source.cached.lock().unwrap().iter().map(|of| of.tensor.clone()).collect();
        assert_eq!(order, ["embed.weight", "q.weight"]);
    }

    #[test]
    fn an_adapter_of_another_base_is_refused() {
        let adapter = adapter(&config(""), &pair("k", 3, 4));
        let adapter = Adapter::open(adapter.path()).unwrap();
        let (_folder, base) = base(StoredDtype::F32);
        let error = AdaptedSource::new(Arc::new(base), adapter).err().unwrap();
        assert!(error.to_string().contains("`k.weight`"));
    }
}
