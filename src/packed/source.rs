//! [`PackedSource`]: a packed checkpoint, read as if its matrices were dense.
//!
//! A read of a range of `P.weight` reads the parts of the rows of that range, checks them, and restores the rows. So nothing of a matrix is
//! held between two reads, and the results equal the results of the dense checkpoint. All further tensors are read unchanged.
//!
//! [`PackedSource::checkpoint`] is the same as a [`Checkpoint`], for code that wants one. [`PackedSource::matrix`] and [`CompactRows`] give the
//! parts as they are stored, for code that computes with them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;

use super::matrix::{
    BITMASK, COMPRESSED, Expectation, OWN_METHOD, PackForm, PackedMatrix, PackedValues,
    ROW_OFFSETS, SCALE, SHAPE, WEIGHT, broken,
};
use super::record::PackedRecord;
use super::rows::CompactRows;
use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, KeptRows, TensorEntry, WeightSource};
use crate::failure::Failure;

/// Bytes of dense rows that a read restores at a time.
const BATCH_BYTES: usize = 1 << 20;

/// A packed checkpoint; see the first lines of this file.
#[derive(Debug)]
pub struct PackedSource {
    base: Arc<Checkpoint>,
    /// `packed.json`; `None` in a folder by compressed-tensors.
    record: Option<PackedRecord>,
    /// Tensors as they are presented.
    entries: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
    /// By the file and the position of the mask, which an entry keeps when it gets another name.
    matrices: HashMap<(usize, u64), PackedMatrix>,
}

impl PackedSource {
    /// Opens the matrices of a packed checkpoint. Reads `packed.json` and the shapes of the matrices.
    ///
    /// # Errors
    /// Fails for a `packed.json` that cannot be read or is of another version, for a part that is missing or has another form than the
    /// other parts need, and where a file cannot be read.
    pub fn open(base: Arc<Checkpoint>) -> Result<Self> {
        let record = PackedRecord::read(base.folder())?;
        let mut matrices = HashMap::new();
        let mut presented = HashMap::new();
        for mask in base.tensors() {
            let Some(module) = mask.name.strip_suffix(BITMASK) else {
                continue;
            };
            let name = format!("{module}{WEIGHT}");
            let stated = match &record {
                Some(record) => match record.matrices.get(&*base.stored_name(&name)) {
                    Some(stated) => Expectation {
                        form: Some(stated.form),
                        shape: Some(stated.shape),
                        dtype: Some(stated.dtype()?),
                        values: record.values,
                    },
                    None => continue,
                },
                None => Expectation::default(),
            };
            let matrix = PackedMatrix::open(&base, module, stated)?;
            let entry = TensorEntry {
                name: name.clone(),
                dtype: matrix.dtype.in_file(),
                shape: vec![matrix.rows, matrix.columns],
                shard: mask.shard,
                offset: mask.offset,
                bytes: (matrix.rows * matrix.row_bytes()) as u64,
            };
            presented.insert(name, entry);
            matrices.insert((mask.shard, mask.offset), matrix);
        }
        if let Some(record) = &record
            && let Some(missing) =
                record.matrices.keys().find(|name| !presented.contains_key(&base.used_name(name)))
        {
            let module = missing.strip_suffix(WEIGHT).unwrap_or(missing);
            return Err(broken(
                missing,
                format!("`{module}{BITMASK}` is missing in `{}`", base.place()),
            )
            .into());
        }
        let mut entries = with_dense(&base, &presented)?;
        if let Some(record) = &record {
            record.sort(&base, &mut entries)?;
        }
        let names = entries.iter().map(|entry| entry.name.clone());
        Ok(Self { by_name: names.zip(0..).collect(), entries, matrices, record, base })
    }

    /// The same as a checkpoint, whose reads restore the matrices. Its output has files of its own.
    ///
    /// # Errors
    /// Fails as [`Checkpoint::presenting`].
    pub fn checkpoint(self: &Arc<Self>) -> Result<Checkpoint> {
        let entries = self.entries.clone();
        self.base.presenting(entries, Arc::clone(self) as Arc<dyn WeightSource>)
    }

    /// The files as they are stored.
    pub fn base(&self) -> &Arc<Checkpoint> {
        &self.base
    }

    /// `packed.json`; `None` in a folder by compressed-tensors.
    pub fn record(&self) -> Option<&PackedRecord> {
        self.record.as_ref()
    }

    /// The parts of the matrix `name`, as the program names it; `None` for a tensor that is not packed.
    pub fn matrix(&self, name: &str) -> Option<&PackedMatrix> {
        self.matrix_of(self.entry(name)?)
    }

    /// All packed matrices, by name.
    pub fn matrices(&self) -> BTreeMap<&str, &PackedMatrix> {
        self.matrices.values().map(|matrix| (matrix.name.as_str(), matrix)).collect()
    }

    /// The kept values: bits of the weights, or rounded codes.
    pub fn values(&self) -> PackedValues {
        self.record.as_ref().map_or(PackedValues::Exact, |record| record.values)
    }

    /// The name of the format: compressed-tensors' for exact values.
    pub fn format(&self) -> &'static str {
        let mut forms = self.matrices.values().map(|matrix| matrix.form);
        match (self.values(), forms.next()) {
            (PackedValues::Int8, _) => OWN_METHOD,
            (PackedValues::Exact, Some(form)) => form.name(),
            (PackedValues::Exact, None) => PackForm::Bitmask.name(),
        }
    }

    /// Every tensor as it is presented, in the order of the original files where it is known.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorEntry> {
        self.entries.iter()
    }

    /// The bytes of all tensors as they are presented.
    pub fn dense_bytes(&self) -> ByteSize {
        self.entries.iter().map(|entry| ByteSize(entry.bytes)).sum()
    }

    fn matrix_of(&self, entry: &TensorEntry) -> Option<&PackedMatrix> {
        // A tensor without bytes may begin where a mask does.
        let matrix = self.matrices.get(&(entry.shard, entry.offset))?;
        (entry.shape == [matrix.rows, matrix.columns]).then_some(matrix)
    }
}

/// The tensors of a packed checkpoint with a dense matrix in place of each matrix's parts.
fn with_dense(
    base: &Checkpoint,
    presented: &HashMap<String, TensorEntry>,
) -> Result<Vec<TensorEntry>> {
    let mut entries = Vec::new();
    for entry in base.tensors() {
        let ends = [COMPRESSED, BITMASK, ROW_OFFSETS, SHAPE, SCALE].into_iter();
        let mut parts = ends.filter_map(|end| Some((end, entry.name.strip_suffix(end)?)));
        let matrix = parts
            .find_map(|(end, module)| Some((end, presented.get(&format!("{module}{WEIGHT}"))?)));
        match matrix {
            Some((BITMASK, dense)) => entries.push(dense.clone()),
            Some(_) => {}
            None if presented.contains_key(&entry.name) => {
                return Err(Failure::new(format!(
                    "`{}` holds the matrix `{}` twice, dense and packed",
                    base.place(),
                    entry.name
                ))
                .hint("download the checkpoint again")
                .into());
            }
            None => entries.push(entry.clone()),
        }
    }
    Ok(entries)
}

impl WeightSource for PackedSource {
    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.by_name.get(name).and_then(|&at| self.entries.get(at))
    }

    fn read(&self, entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> Result<()> {
        let Some(matrix) = self.matrix_of(entry) else {
            return self.base.read(entry, start, buffer);
        };
        let end = entry.end_of(start, buffer.len())?;
        if buffer.is_empty() {
            return Ok(());
        }
        let (start, end) = (start as usize, end as usize);
        let row_bytes = matrix.row_bytes();
        let step = (BATCH_BYTES / row_bytes).max(1);
        let last = end.div_ceil(row_bytes);
        let (mut compact, mut whole) = (CompactRows::default(), Vec::new());
        for first in (start / row_bytes..last).step_by(step) {
            let rows = first..last.min(first + step);
            compact.read(&self.base, matrix, rows.clone())?;
            // The bytes that these rows and the request share.
            let from = start.max(rows.start * row_bytes);
            let to = end.min(rows.end * row_bytes);
            let wanted = &mut buffer[from - start..to - start];
            if wanted.len() == rows.len() * row_bytes {
                compact.expand(matrix, wanted);
            } else {
                whole.resize(rows.len() * row_bytes, 0);
                compact.expand(matrix, &mut whole);
                let skipped = from - rows.start * row_bytes;
                wanted.copy_from_slice(&whole[skipped..skipped + wanted.len()]);
            }
        }
        Ok(())
    }

    fn kept_rows(
        &self,
        entry: &TensorEntry,
        rows: Range<usize>,
        is_coded: bool,
        take: &mut dyn FnMut(KeptRows<'_>),
    ) -> Result<bool> {
        let matrix = self.matrix_of(entry);
        let Some(matrix) = matrix.filter(|matrix| matrix.scales.is_some() == is_coded) else {
            return Ok(false);
        };
        let mut compact = CompactRows::default();
        compact.read(&self.base, matrix, rows)?;
        take(compact.kept());
        Ok(true)
    }

    fn place(&self) -> String {
        self.base.place()
    }

    fn file_of(&self, entry: &TensorEntry) -> String {
        self.base.file_of(entry)
    }
}
