//! An output that a second process continues, and tensors that are copied early.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use safetensors::Dtype;

use super::test_files::{counting, file_bytes, folder, write, write_sharded, write_single};
use super::writer_tests::{data_of, pruned, says, start};
use super::{Checkpoint, CheckpointWriter, WeightSource};
use crate::run::Silent;
use crate::run::verification::VerifyLevel;

/// The names of two rewritten matrices, and their dtypes.
fn two(source: &Path) -> anyhow::Result<Vec<(String, Dtype)>> {
    let checkpoint = Checkpoint::open(source)?;
    let matrices = checkpoint.tensors().filter(|entry| entry.shape.len() == 2);
    Ok(matrices.take(2).map(|entry| (entry.name.clone(), entry.dtype)).collect())
}

#[test]
fn another_process_continues_from_the_synced_tensors() -> anyhow::Result<()> {
    let (source, out, whole) = (folder(), folder(), folder());
    write_sharded(source.path());
    let two = two(source.path())?;
    let mut writer = start(source.path(), whole.path())?;
    for (name, dtype) in &two {
        writer.write(name, &pruned(name, *dtype))?;
    }
    let expected = writer.finish(&[], VerifyLevel::Full, &Silent)?;

    let mut writer = start(source.path(), out.path())?;
    let (first, dtype) = &two[0];
    writer.write(first, &pruned(first, *dtype))?;
    let finished = writer.sync()?;
    assert_eq!(finished.keys().collect::<Vec<_>>(), [first]);
    // Half of the second tensor is written when the process ends.
    let (second, dtype) = &two[1];
    writer.write(second, &vec![7; data_of(second).len()])?;
    drop(writer);

    let checkpoint = Arc::new(Checkpoint::open(source.path())?);
    let reopen = |finished: &_| {
        let reopened = CheckpointWriter::reopen(&checkpoint, out.path(), finished, &Silent)?;
        anyhow::Ok(reopened.expect("the files are there"))
    };
    let (mut reopened, damaged) = reopen(&finished)?;
    assert!(damaged.is_empty());
    let written = reopened.written()?;
    let bytes_of = |name: &str| -> anyhow::Result<Vec<u8>> {
        let entry = written.entry(name).expect("a tensor");
        let mut bytes = vec![0; entry.bytes as usize];
        written.read(entry, 0, &mut bytes)?;
        let beyond = written.read(entry, entry.bytes, &mut [0]);
        assert!(beyond.is_err(), "{name}");
        Ok(bytes)
    };
    assert_eq!(bytes_of(first)?, pruned(first, two[0].1));
    assert_eq!(bytes_of(second)?, data_of(second), "the source's");
    let again = reopened.write(first, &data_of(first));
    assert!(says(again).contains("written twice"));
    reopened.write(second, &pruned(second, *dtype))?;
    let found = reopened.finish(&[], VerifyLevel::Full, &Silent)?;
    assert_eq!(found, expected);

    // Published but not recorded: reopening succeeds again, and nothing loads until the end.
    let mut finished = finished;
    finished.insert(second.clone(), finished[first].clone());
    finished.insert("gone".into(), "x".into());
    let other = CheckpointWriter::reopen(&checkpoint, out.path(), &finished, &Silent)?;
    assert!(other.is_none(), "it may be another run's");
    assert!(Checkpoint::open(out.path()).is_ok() && !nothing_loads(out.path()));
    finished.remove(second);
    finished.remove("gone");
    let (mut writer, _) = reopen(&finished)?;
    assert!(nothing_loads(out.path()));
    writer.write(second, &pruned(second, *dtype))?;
    assert_eq!(writer.finish(&[], VerifyLevel::Full, &Silent)?, expected);
    Ok(())
}

fn nothing_loads(target: &Path) -> bool {
    !target.join("config.json").exists() && Checkpoint::open(target).is_err()
}

#[test]
fn missing_and_different_files_cannot_be_reopened() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    let checkpoint = Arc::new(Checkpoint::open(source.path())?);
    let is_there = || -> anyhow::Result<bool> {
        let none = std::collections::BTreeMap::new();
        Ok(CheckpointWriter::reopen(&checkpoint, out.path(), &none, &Silent)?.is_some())
    };
    assert!(!is_there()?);
    drop(start(source.path(), out.path())?);
    assert!(is_there()?);
    let partial = out.path().join("model.safetensors.partial");
    let whole = fs::read(&partial)?;
    fs::write(&partial, &whole[..whole.len() - 1])?;
    assert!(!is_there()?);
    let mut other = whole;
    other[20] ^= 1;
    fs::write(&partial, other)?;
    assert!(!is_there()?);
    Ok(())
}

#[test]
fn unchanged_tensors_are_copied_piece_by_piece_until_told_to_stop() -> anyhow::Result<()> {
    // Three pieces, of which the last is short.
    let tensors = [
        counting("a.weight", Dtype::F32, &[4, 8]),
        counting("b.embedding", Dtype::F32, &[600, 256]),
        counting("c.norm", Dtype::F32, &[8]),
    ];
    let pieces_of_all = 4;
    for enough in 0..=pieces_of_all + 1 {
        let (source, out) = (folder(), folder());
        write_single(source.path(), Some("pt"));
        let bytes = file_bytes(Some("pt"), &tensors);
        write(source.path(), "model.safetensors", &bytes);
        let mut writer = start(source.path(), out.path())?;
        writer.will_write(["a.weight"]);
        let asked = std::cell::Cell::new(0);
        writer.copy_untouched_until(&|| {
            asked.set(asked.get() + 1);
            asked.get() > enough
        })?;
        assert_eq!(asked.get(), pieces_of_all.min(enough + 1));
        let mut kept = tensors[0].data.clone();
        kept[..4].fill(0);
        writer.write("a.weight", &kept)?;
        // Copied tensors are in no record of finished layers.
        assert_eq!(writer.sync()?.len(), 1);
        let verification = writer.finish(&[], VerifyLevel::Full, &Silent)?;
        assert_eq!(verification.tensors_rewritten, 1);
        assert_eq!(verification.tensors_copied, 2);
        let mut wanted = bytes;
        let data = wanted.len() - tensors.iter().map(|one| one.data.len()).sum::<usize>();
        wanted[data..data + 4].fill(0);
        let written = fs::read(out.path().join("model.safetensors"))?;
        assert!(written == wanted, "after {enough} pieces");
    }
    Ok(())
}
