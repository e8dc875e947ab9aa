//! [`Worker`]: a thread of the merge pass, with the memory of its pieces.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

use super::devices::{MergeDevice, OnDevice};
use super::merge_pass::{Groups, MergePass, MergeTensor};
use super::rows::SourceRows;
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::linalg::convert::{narrow, widen};
use crate::linalg::select::first_not_finite;
use crate::merging::methods::{
    MethodSettings, Mixer, OnCpu, RowBlock, SourceTask, TensorMerge, TensorTask, dot,
    sign_conflicts, square_distance, weighted_square_distance,
};
use crate::merging::recipe::{TensorRecipe, TensorSource};
use crate::run::Stopped;
use crate::run::merging::{MergedTensor, OutputErrors, SourceDistance};

/// The largest finite number of f16.
const LARGEST_F16: f32 = 65504.0;

/// A thread of the pass.
pub(super) struct Worker<'p> {
    pass: &'p MergePass<'p>,
    /// Computes the linears.
    device: Option<&'p MergeDevice>,
    /// Set when a worker has failed.
    ends: &'p AtomicBool,
    /// Stored bytes that are read.
    stored: Vec<u8>,
    /// Per source the rows of the current piece.
    sources: Vec<Vec<f32>>,
    merged: Vec<f32>,
    /// Rows of an adapted source before its factors, with `--keep-zeros`.
    before_factors: Vec<f32>,
    bytes: Vec<u8>,
}

/// The opened sources of a tensor.
type OpenedSources<'a> = Vec<Box<dyn SourceRows + 'a>>;

impl<'p> Worker<'p> {
    pub(super) fn new(
        pass: &'p MergePass<'p>,
        device: Option<&'p MergeDevice>,
        ends: &'p AtomicBool,
    ) -> Self {
        Self {
            pass,
            device,
            ends,
            stored: Vec::new(),
            sources: Vec::new(),
            merged: Vec::new(),
            before_factors: Vec::new(),
            bytes: Vec::new(),
        }
    }

    /// Measures a tensor in a read of its group, and returns the number of reads that the tensor needs.
    pub(super) fn measure(&mut self, at: usize, groups: &Groups, read: usize) -> Result<usize> {
        let tensor = &self.pass.tensors[at];
        let tasks = source_tasks(tensor);
        let task = task_of(tensor, &tasks, &self.pass.settings);
        let mut merge = self.pass.method.begin(&task, groups.of(at))?;
        let reads = merge.reads();
        if read < reads {
            let opened = self.open(tensor)?;
            self.read_through(tensor, &opened, read == 0, |rows| merge.measure(read, rows))?;
            merge.measured(read);
        }
        Ok(reads)
    }

    /// Merges a tensor and writes it.
    pub(super) fn merge(&mut self, at: usize, groups: &Groups) -> Result<MergedTensor> {
        let tensor = &self.pass.tensors[at];
        let tasks = source_tasks(tensor);
        let task = task_of(tensor, &tasks, &self.pass.settings);
        let group = groups.of(at);
        let mut merge = self.pass.method.begin(&task, group)?;
        let opened = self.open(tensor)?;
        let mut is_checked = false;
        if !groups.are_shared {
            for read in 0..merge.reads() {
                self.read_through(tensor, &opened, !is_checked, |rows| {
                    merge.measure(read, rows);
                })?;
                merge.measured(read);
                group.settle();
                is_checked = true;
            }
        }
        self.write(tensor, &opened, !is_checked, &mut *merge)
    }

    fn open(&self, tensor: &MergeTensor) -> Result<OpenedSources<'p>> {
        let sources = tensor.recipe.sources.iter();
        sources.map(|source| self.pass.inputs.open(source.model, &source.tensor)).collect()
    }

    /// Reads all rows in pieces and calls `take` with each piece.
    fn read_through(
        &mut self,
        tensor: &MergeTensor,
        opened: &OpenedSources<'_>,
        checks: bool,
        mut take: impl FnMut(&RowBlock<'_>),
    ) -> Result<()> {
        let (rows, _) = tensor.matrix();
        let step = self.rows_of_a_piece(tensor);
        for first in (0..rows).step_by(step) {
            self.read(tensor, opened, first..(first + step).min(rows), checks)?;
            let sources: Vec<&[f32]> =
                self.sources[..opened.len()].iter().map(|of| &of[..]).collect();
            take(&RowBlock { first_row: first, sources: &sources });
        }
        Ok(())
    }

    fn rows_of_a_piece(&self, tensor: &MergeTensor) -> usize {
        (self.pass.piece_elements / tensor.matrix().1.max(1)).max(1)
    }

    /// Reads rows of every source.
    fn read(
        &mut self,
        tensor: &MergeTensor,
        opened: &OpenedSources<'_>,
        rows: std::ops::Range<usize>,
        checks: bool,
    ) -> Result<()> {
        self.pass.events.check()?;
        if self.ends.load(Ordering::Relaxed) {
            return Err(Stopped.into());
        }
        let columns = tensor.matrix().1;
        self.sources.resize_with(opened.len().max(self.sources.len()), Vec::new);
        let sources = opened.iter().zip(&mut self.sources).enumerate();
        for (at, (source, values)) in sources {
            values.resize(rows.len() * columns, 0.0);
            source.read(rows.clone(), values, &mut self.stored)?;
            if checks && let Some(bad) = first_not_finite(values) {
                let source = &tensor.recipe.sources[at];
                let (row, column) = (rows.start + bad / columns, bad % columns);
                return Err(Failure::new(format!(
                    "tensor `{}` of model {} is not finite",
                    source.tensor,
                    source.model + 1
                ))
                .detail(format!("row {row}, column {column} is {}", values[bad]))
                .hint("download the model again, or leave it out")
                .into());
            }
        }
        Ok(())
    }

    /// Merges and writes all rows.
    fn write(
        &mut self,
        tensor: &MergeTensor,
        opened: &OpenedSources<'_>,
        checks: bool,
        merge: &mut dyn TensorMerge,
    ) -> Result<MergedTensor> {
        let (rows, columns) = tensor.matrix();
        let step = self.rows_of_a_piece(tensor);
        let mut stream = self.pass.writer.begin(&tensor.recipe.name)?;
        let mut counts = TensorCounts::new(tensor);
        let mut on_device = self.device.filter(|_| tensor.is_linear()).map(|device| OnDevice {
            device,
            linear: tensor.module(),
            events: self.pass.events,
            is_left: false,
        });
        for first in (0..rows).step_by(step) {
            self.read(tensor, opened, first..(first + step).min(rows), checks)?;
            let sources: Vec<&[f32]> =
                self.sources[..opened.len()].iter().map(|of| &of[..]).collect();
            let block = RowBlock { first_row: first, sources: &sources };
            self.merged.resize(sources[0].len(), 0.0);
            let mixer: &mut dyn Mixer = match &mut on_device {
                Some(device) => device,
                None => &mut OnCpu,
            };
            merge.merge(&block, mixer, &mut self.merged)?;
            if self.pass.keep_zeros {
                let rows = first..first + self.merged.len() / columns;
                let mut scratch = (&mut self.before_factors, &mut self.stored);
                counts.kept_zeros +=
                    keep_zeros(opened, rows, &sources, &mut self.merged, &mut scratch)?;
            }
            check_merged(tensor, first, columns, &self.merged)?;
            counts.add(tensor, &block, columns, &self.merged);
            narrow(tensor.dtype, &self.merged, &mut self.bytes);
            stream.write(&self.bytes)?;
            if !counts.distances.is_empty() {
                widen(tensor.dtype, &self.bytes, &mut self.merged);
                counts.compare(tensor, &block, columns, &self.merged);
            }
        }
        stream.finish()?;
        Ok(counts.of(tensor, merge.kept(), self.pass.keep_zeros))
    }
}

/// The sources of a tensor, as the method sees them.
pub(super) fn source_tasks(tensor: &MergeTensor) -> Vec<SourceTask<'_>> {
    let sources = tensor.recipe.sources.iter().zip(&tensor.squares);
    sources
        .map(|(source, squares)| SourceTask {
            model: source.model,
            values: &source.values,
            squares: squares.as_deref(),
        })
        .collect()
}

/// A tensor, as the method sees it.
pub(super) fn task_of<'a>(
    tensor: &'a MergeTensor,
    sources: &'a [SourceTask<'a>],
    settings: &'a MethodSettings,
) -> TensorTask<'a> {
    let (rows, columns) = tensor.matrix();
    TensorTask {
        name: &tensor.recipe.name,
        rows,
        columns,
        sources,
        base: tensor.recipe.base,
        shared: &tensor.recipe.shared,
        settings,
    }
}

/// Sets weights to zero that are zero in every source, and returns their number. An adapter knows no mask, so the zeros of a source with
/// factors are the zeros before the factors were added. `scratch` holds rows and stored bytes.
fn keep_zeros(
    opened: &OpenedSources<'_>,
    rows: std::ops::Range<usize>,
    sources: &[&[f32]],
    merged: &mut [f32],
    scratch: &mut (&mut Vec<f32>, &mut Vec<u8>),
) -> Result<u64> {
    let mut is_zero = vec![true; merged.len()];
    for (source, adapted) in opened.iter().zip(sources) {
        let (before, stored) = scratch;
        before.resize(merged.len(), 0.0);
        let values = match source.read_before_factors(rows.clone(), before, stored)? {
            true => before.as_slice(),
            false => adapted,
        };
        for (is_zero, value) in is_zero.iter_mut().zip(values) {
            *is_zero &= *value == 0.0;
        }
    }
    let mut zeros = 0;
    for (merged, is_zero) in merged.iter_mut().zip(is_zero) {
        if is_zero {
            *merged = 0.0;
            zeros += 1;
        }
    }
    Ok(zeros)
}

/// Refuses merged values that the output's dtype cannot hold.
fn check_merged(tensor: &MergeTensor, first: usize, columns: usize, merged: &[f32]) -> Result<()> {
    let is_f16 = tensor.dtype == StoredDtype::F16;
    let bad = first_not_finite(merged).or_else(|| {
        // Half a step above the largest number rounds to infinity.
        is_f16.then(|| merged.iter().position(|value| value.abs() >= LARGEST_F16 + 16.0))?
    });
    let Some(at) = bad else { return Ok(()) };
    let failure = Failure::new(format!(
        "the merged tensor `{}` does not fit {}",
        tensor.recipe.name,
        tensor.dtype.name()
    ))
    .detail(format!(
        "row {}, column {} is {}",
        first + at / columns,
        at % columns,
        merged[at]
    ));
    Err(match is_f16 && merged[at].is_finite() {
        true => failure.hint("use --out-dtype bf16"),
        false => failure.hint("use smaller weights or a smaller lambda"),
    }
    .into())
}

/// Counts of a merged tensor.
struct TensorCounts {
    zeros: u64,
    kept_zeros: u64,
    errors: Option<OutputErrors>,
    distances: Vec<SourceDistance>,
    sign_conflicts: Option<u64>,
}

impl TensorCounts {
    fn new(tensor: &MergeTensor) -> Self {
        let observed = tensor.observed.iter().enumerate();
        let is_observed =
            |(at, of): (usize, &Option<_>)| of.is_some() && Some(at) != tensor.recipe.base;
        let TensorRecipe { sources, base, layer, .. } = &tensor.recipe;
        // A tensor with one source is a copy of it.
        let compared = if layer.is_some() && sources.len() > 1 { &sources[..] } else { &[] };
        let distance =
            |source: &TensorSource| SourceDistance { model: source.model, ..Default::default() };
        Self {
            zeros: 0,
            kept_zeros: 0,
            distances: compared.iter().map(distance).collect(),
            sign_conflicts: (base.is_some() && compared.len() > 2).then_some(0),
            errors: observed
                .into_iter()
                .any(is_observed)
                .then(|| OutputErrors { before: tensor.recipe.base.map(|_| 0.0), after: 0.0 }),
        }
    }

    /// Adds rows: zeros, and Σ_t Σ_ij a_tj² (W − W_t)_ij² for the merged rows and for the base's.
    fn add(&mut self, tensor: &MergeTensor, rows: &RowBlock<'_>, columns: usize, merged: &[f32]) {
        self.zeros += merged.iter().filter(|value| **value == 0.0).count() as u64;
        let Some(errors) = &mut self.errors else {
            return;
        };
        let base = tensor.recipe.base;
        for (at, squares) in tensor.observed.iter().enumerate() {
            let Some(squares) = squares.as_ref().filter(|_| Some(at) != base) else {
                continue;
            };
            let expert = rows.sources[at].chunks(columns);
            for (row, expert) in expert.enumerate() {
                let range = row * columns..(row + 1) * columns;
                errors.after += weighted_square_distance(&merged[range.clone()], expert, squares);
                if let (Some(base), Some(before)) = (base, &mut errors.before) {
                    let base = &rows.sources[base][range];
                    *before += weighted_square_distance(base, expert, squares);
                }
            }
        }
    }

    /// Adds rows as they are written to the distances from the sources, and the conflicts of the sources' signs.
    fn compare(
        &mut self,
        tensor: &MergeTensor,
        rows: &RowBlock<'_>,
        columns: usize,
        written: &[f32],
    ) {
        let base = tensor.recipe.base;
        let mut experts: Vec<&[f32]> = Vec::with_capacity(rows.sources.len());
        for (row, written) in written.chunks(columns).enumerate() {
            let place = row * columns..(row + 1) * columns;
            for (of, source) in self.distances.iter_mut().zip(rows.sources) {
                let source = &source[place.clone()];
                of.square_distance += square_distance(written, source);
                of.square_norm += dot(source, source);
            }
            if let (Some(conflicts), Some(base)) = (&mut self.sign_conflicts, base) {
                let others = rows.sources.iter().enumerate().filter(|(at, _)| *at != base);
                experts.clear();
                experts.extend(others.map(|(_, source)| &source[place.clone()]));
                *conflicts += sign_conflicts(&rows.sources[base][place], &experts);
            }
        }
    }

    fn of(self, tensor: &MergeTensor, kept: Vec<u64>, keeps_zeros: bool) -> MergedTensor {
        MergedTensor {
            name: tensor.recipe.name.clone(),
            shape: tensor.shape.clone(),
            zeros: self.zeros,
            kept_zeros: keeps_zeros.then_some(self.kept_zeros),
            kept,
            output_errors: self.errors,
            distances: self.distances,
            sign_conflicts: self.sign_conflicts,
        }
    }
}
