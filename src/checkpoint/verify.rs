//! Verification of the written files before they get their names: one pass over the bytes for all checks.
//!
//! This file has the loop over files and tensors; `verify_tensor` checks the bytes of a tensor.

use std::collections::HashMap;

use safetensors::Dtype;
use sha2::{Digest, Sha256};

use super::layout::Layout;
use super::source::Checkpoint;
use super::verify_tensor::{
    CheckPace, ExpectedMatrix, Look, Looked, WrittenShard, check_tensor, wrong_bytes,
};
use super::weight_source::WeightSource;
use crate::bytes::hex;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;
use crate::run::verification::{MatrixZeros, Verification, VerifiedFile, VerifyLevel};
use crate::run::{Events, Meter};

/// The checks of an output.
#[derive(Default)]
pub(super) struct Checks<'a> {
    pub(super) expected: &'a [ExpectedMatrix],
    /// The source to compare rewritten tensors with; it has the same tensors.
    pub(super) source: Option<&'a Checkpoint>,
    /// Files that were checked before, in the order of the output's; they count where the source is not compared.
    pub(super) checked: Vec<Option<CheckedFile>>,
}

/// A file that was read back and checked.
#[derive(Debug)]
pub(super) struct CheckedFile {
    file: VerifiedFile,
    /// The matrices of the file whose zeros were counted.
    matrices: Vec<(ExpectedMatrix, Looked)>,
}

impl CheckedFile {
    /// Returns whether the file was checked for what is expected now.
    fn is_for(&self, shard: &WrittenShard<'_>, expected: &HashMap<&str, &ExpectedMatrix>) -> bool {
        let names = shard.tensors.iter().map(|tensor| tensor.entry.name.as_str());
        let now = names.filter_map(|name| expected.get(name).copied());
        now.eq(self.matrices.iter().map(|(matrix, _)| matrix))
    }
}

/// The check of a file, tensor by tensor.
#[derive(Debug)]
pub(super) struct FileCheck {
    /// The place of the next tensor.
    next: usize,
    file_hash: Sha256,
    matrices: Vec<(ExpectedMatrix, Looked)>,
}

impl FileCheck {
    /// Begins with the header.
    ///
    /// # Errors
    /// Fails when the header cannot be read, or is not what was written.
    pub(super) fn begin(shard: &WrittenShard<'_>) -> anyhow::Result<Self> {
        let mut file_hash = Sha256::new();
        check_header(shard, &mut file_hash)?;
        Ok(Self { next: 0, file_hash, matrices: Vec::new() })
    }

    /// Checks the next tensor, also against `source` if the run wrote it. Returns false after the last.
    ///
    /// # Errors
    /// Fails at the first error.
    pub(super) fn step(
        &mut self,
        shard: &WrittenShard<'_>,
        expected: &HashMap<&str, &ExpectedMatrix>,
        source: Option<&Checkpoint>,
        pace: CheckPace<'_, '_>,
    ) -> anyhow::Result<bool> {
        let Some(tensor) = shard.tensors.get(self.next) else {
            return Ok(false);
        };
        let name = tensor.entry.name.as_str();
        let matrix = expected.get(name).copied();
        let source = source.filter(|_| tensor.rewritten).map(|source| {
            let stored = source.entry(name).expect("the source has all tensors");
            (source, stored)
        });
        let look = Look { matrix, source, shard, tensor };
        let looked = check_tensor(&look, &mut self.file_hash, pace)?;
        self.matrices.extend(matrix.map(|matrix| (matrix.clone(), looked)));
        self.next += 1;
        Ok(true)
    }

    /// Ends with the length of the file.
    ///
    /// # Errors
    /// Fails when the file has another length.
    pub(super) fn end(self, shard: &WrittenShard<'_>) -> anyhow::Result<CheckedFile> {
        check_length(shard)?;
        let file = VerifiedFile {
            file: shard.file_name.to_owned(),
            bytes: shard.file_bytes,
            sha256: hex(&self.file_hash.finalize()),
        };
        Ok(CheckedFile { file, matrices: self.matrices })
    }
}

/// The expected matrices by name.
///
/// # Errors
/// Fails for a matrix that the layout does not have, and for groups that its rows cannot have.
pub(super) fn by_name<'m>(
    expected: &'m [ExpectedMatrix],
    layout: &Layout,
) -> anyhow::Result<HashMap<&'m str, &'m ExpectedMatrix>> {
    expected.iter().try_for_each(|matrix| check_expectation(matrix, layout))?;
    Ok(expected.iter().map(|matrix| (matrix.name.as_str(), matrix)).collect())
}

/// Checks every file that was not checked before, and stops at the first error.
pub(super) fn verify_shards(
    layout: &Layout,
    shards: &[WrittenShard<'_>],
    checks: Checks<'_>,
    events: &dyn Events,
) -> anyhow::Result<Verification> {
    let Checks { expected, source, checked } = checks;
    let by_name = by_name(expected, layout)?;
    let mut checked = checked.into_iter();
    let checked = shards.iter().map(|shard| {
        let checked = checked.next().flatten().filter(|_| source.is_none());
        checked.filter(|checked| checked.is_for(shard, &by_name))
    });
    let checked: Vec<Option<CheckedFile>> = checked.collect();
    let left = shards.iter().zip(&checked).filter(|(_, checked)| checked.is_none());
    let mut meter = Meter::start(events, "verify", left.map(|(shard, _)| shard.file_bytes).sum());
    let mut files = Vec::with_capacity(shards.len());
    let mut counts: HashMap<String, Looked> = HashMap::new();
    for (shard, checked) in shards.iter().zip(checked) {
        let CheckedFile { file, matrices } = match checked {
            Some(checked) => checked,
            None => {
                let mut check = FileCheck::begin(shard)?;
                meter.add(shard.header.len() as u64);
                loop {
                    events.check()?;
                    if !check.step(shard, &by_name, source, CheckPace::Fast(&mut meter))? {
                        break check.end(shard)?;
                    }
                }
            }
        };
        files.push(file);
        counts.extend(matrices.into_iter().map(|(matrix, looked)| (matrix.name, looked)));
    }
    meter.finish();

    let all = || shards.iter().flat_map(|shard| &shard.tensors);
    let tensors_rewritten = all().filter(|tensor| tensor.rewritten).count();
    let rows = expected.iter().map(|matrix| {
        let looked = counts.get(&matrix.name).copied().unwrap_or_default();
        MatrixZeros { name: matrix.name.clone(), zeros: looked.zeros, elements: looked.elements }
    });
    Ok(Verification {
        level: source.map_or(VerifyLevel::Quick, |_| VerifyLevel::Full),
        files,
        tensors_checked: all().count(),
        tensors_rewritten,
        tensors_copied: all().count() - tensors_rewritten,
        zeros: rows.collect(),
        groups_checked: counts.values().map(|looked| looked.groups).sum(),
    })
}

fn check_expectation(matrix: &ExpectedMatrix, layout: &Layout) -> anyhow::Result<()> {
    let Some(entry) = layout.entry(&matrix.name) else {
        anyhow::bail!("cannot verify tensor `{}`: the checkpoint does not have it", matrix.name);
    };
    if !matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        anyhow::bail!(
            "cannot count the zeros of tensor `{}` of dtype {}",
            matrix.name,
            entry.dtype
        );
    }
    if let Some((n, m)) = matrix.group {
        let last = entry.shape.last().copied().unwrap_or(0);
        if m == 0 || n > m || last % m != 0 {
            return Err(Failure::new(format!("tensor `{}` has no {n}:{m} groups", matrix.name))
                .detail(format!("its last dimension is {last}, not a multiple of {m}"))
                .into());
        }
    }
    Ok(())
}

fn check_header(shard: &WrittenShard<'_>, file_hash: &mut Sha256) -> anyhow::Result<()> {
    let mut found = vec![0; shard.header.len()];
    read_exact_at(shard.file, &mut found, 0)
        .map_err(|error| wrong_bytes(shard, error.to_string()))?;
    if let Some(at) = found.iter().zip(shard.header).position(|(found, written)| found != written) {
        return Err(wrong_bytes(shard, format!("its header differs at file offset {at}")).into());
    }
    file_hash.update(&found);
    Ok(())
}

fn check_length(shard: &WrittenShard<'_>) -> anyhow::Result<()> {
    let found = shard.file.metadata().map_err(|error| wrong_bytes(shard, error.to_string()))?.len();
    if found != shard.file_bytes {
        let why = format!("it is {found} bytes long, {} were written", shard.file_bytes);
        return Err(wrong_bytes(shard, why).into());
    }
    Ok(())
}
