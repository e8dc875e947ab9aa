//! Verification of the written files before they get their names: one pass over the bytes for all checks.
//!
//! This file has the loop over files and tensors; `verify_tensor` checks the bytes of a tensor.

use std::collections::HashMap;

use safetensors::Dtype;
use sha2::{Digest, Sha256};

use super::layout::Layout;
use super::source::Checkpoint;
use super::verify_tensor::{ExpectedMatrix, Look, Looked, WrittenShard, check_tensor, wrong_bytes};
use super::weight_source::WeightSource;
use crate::bytes::hex;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;
use crate::run::verification::{MatrixZeros, Verification, VerifiedFile, VerifyLevel};
use crate::run::{Events, Meter};

/// Checks every file and stops at the first error. Rewritten tensors are compared with `source`, which has the same tensors, where it
/// is given.
pub(super) fn verify_shards(
    layout: &Layout,
    source: Option<&Checkpoint>,
    shards: &[WrittenShard<'_>],
    expected: &[ExpectedMatrix],
    events: &dyn Events,
) -> anyhow::Result<Verification> {
    let by_name: HashMap<&str, &ExpectedMatrix> =
        expected.iter().map(|matrix| (matrix.name.as_str(), matrix)).collect();
    for matrix in expected {
        check_expectation(matrix, layout)?;
    }
    let total = shards.iter().map(|shard| shard.file_bytes).sum();
    let mut meter = Meter::start(events, "verify", total);
    let mut files = Vec::with_capacity(shards.len());
    let mut counts: HashMap<&str, Looked> = HashMap::new();
    for shard in shards {
        let mut file_hash = Sha256::new();
        check_header(shard, &mut file_hash)?;
        meter.add(shard.header.len() as u64);
        for tensor in &shard.tensors {
            events.check()?;
            let name = tensor.entry.name.as_str();
            let matrix = by_name.get(name).copied();
            let source = source.filter(|_| tensor.rewritten).map(|source| {
                let stored = source.entry(name).expect("the source has all tensors");
                (source, stored)
            });
            let look = Look { matrix, source, shard, tensor };
            let looked = check_tensor(&look, &mut file_hash, &mut meter)?;
            if let Some(matrix) = matrix {
                counts.insert(&matrix.name, looked);
            }
        }
        check_length(shard)?;
        files.push(VerifiedFile {
            file: shard.file_name.to_owned(),
            bytes: shard.file_bytes,
            sha256: hex(&file_hash.finalize()),
        });
    }
    meter.finish();

    let all = || shards.iter().flat_map(|shard| &shard.tensors);
    let tensors_rewritten = all().filter(|tensor| tensor.rewritten).count();
    let rows = expected.iter().map(|matrix| {
        let looked = counts.get(matrix.name.as_str()).copied().unwrap_or_default();
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
