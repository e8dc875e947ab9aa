//! Outputs with a new layout: threads that write in pieces, a second process that continues, and refusals.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Barrier};

use safetensors::Dtype;
use sha2::{Digest, Sha256};

use super::test_files::{TestTensor, counting, folder, mixed_tensors, write, write_single};
use super::writer_tests::{nothing_was_published, says};
use super::{
    Checkpoint, CheckpointWriter, ExpectedMatrix, Layout, LayoutWriter, PlannedTensor, Published,
    WeightSource,
};
use crate::bytes::hex;
use crate::disk::positioned::write_all_at;
use crate::run::Silent;
use crate::run::verification::VerifyLevel;

/// The tensors of the outputs: two files at [`SHARD_BYTES`].
fn tensors() -> [TestTensor; 3] {
    [
        counting("a.weight", Dtype::F32, &[16, 8]),
        counting("b.weight", Dtype::BF16, &[16, 16]),
        counting("c.norm", Dtype::F32, &[16]),
    ]
}

const SHARD_BYTES: u64 = 1024;

fn layout() -> Layout {
    let tensors =
        tensors().map(|TestTensor { name, dtype, shape, .. }| PlannedTensor { name, dtype, shape });
    Layout::new(tensors.into(), SHARD_BYTES).expect("a plain layout")
}

fn create(target: &Path) -> LayoutWriter {
    LayoutWriter::create(layout(), target, &[], &Silent).expect("an empty folder")
}

fn write_tensor(writer: &LayoutWriter, tensor: &TestTensor, piece: usize) -> anyhow::Result<()> {
    let mut stream = writer.begin(&tensor.name)?;
    for bytes in tensor.data.chunks(piece) {
        stream.write(bytes)?;
    }
    stream.finish()
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn with_config() -> Published {
    Published { written: vec![("config.json", b"{}".to_vec())], ..Published::default() }
}

fn holds_all_tensors(target: &Path) -> anyhow::Result<()> {
    let output = Checkpoint::open(target)?;
    assert_eq!(output.tensors().count(), tensors().len());
    for tensor in tensors() {
        let entry = output.require(&tensor.name, &tensor.shape)?;
        let mut found = vec![0; entry.bytes as usize];
        output.read(entry, 0, &mut found)?;
        assert!(entry.dtype == tensor.dtype && found == tensor.data, "{}", tensor.name);
    }
    Ok(())
}

#[test]
fn threads_write_tensors_in_pieces_and_the_output_loads() -> anyhow::Result<()> {
    let (out, other) = (folder(), folder());
    let target = out.path().join("new/model");
    let writer = create(&target);
    let [a, b, c] = &tensors();
    let begun = Barrier::new(2);
    std::thread::scope(|scope| {
        // Both are in the same file; 7 bytes end inside an element.
        for tensor in [a, b] {
            let (writer, begun) = (&writer, &begun);
            scope.spawn(move || {
                let mut stream = writer.begin(&tensor.name).expect("not written yet");
                for bytes in tensor.data.chunks(7) {
                    begun.wait();
                    stream.write(bytes).expect("the disk has room");
                }
                stream.finish().expect("all bytes");
            });
        }
    });
    assert!(writer.is_recorded("a.weight") && !writer.is_recorded("c.norm"));
    assert!(!writer.is_recorded("unknown"));
    let expected = [a, b].map(|tensor| (tensor.name.clone(), sha256(&tensor.data)));
    assert_eq!(writer.sync()?, BTreeMap::from(expected));
    write_tensor(&writer, c, 64)?;

    write(other.path(), "tokens.of.b", b"tokenizer");
    write(other.path(), "some.json", b"configuration");
    let published = Published {
        written: vec![("merging.json", b"record".to_vec())],
        copied: vec![
            (other.path().join("some.json"), "config.json".into()),
            (other.path().join("tokens.of.b"), "tokenizer.json".into()),
        ],
        ..Published::default()
    };
    let zeros = ExpectedMatrix { name: "b.weight".into(), zeros: Some(0), group: None };
    let verification = writer.finish(published, &[zeros], &Silent)?;
    assert_eq!(verification.level, VerifyLevel::Quick);
    assert_eq!((verification.tensors_checked, verification.tensors_rewritten), (3, 3));
    assert_eq!(verification.zeros[0].elements, 256);
    holds_all_tensors(&target)?;

    assert_eq!(fs::read(target.join("config.json"))?, b"configuration");
    assert_eq!(fs::read(target.join("tokenizer.json"))?, b"tokenizer");
    let sums = fs::read_to_string(target.join("SHA256SUMS"))?;
    let names: Vec<&str> = sums.lines().map(|line| &line[66..]).collect();
    let listed = [
        "config.json",
        "merging.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(names, listed);
    for line in sums.lines() {
        assert_eq!(line[..64], sha256(&fs::read(target.join(&line[66..]))?), "{line}");
    }
    // The list itself is the additional file.
    assert_eq!(fs::read_dir(&target)?.count(), listed.len() + 1);
    Ok(())
}

#[test]
fn another_process_continues_and_writes_damaged_tensors_again() -> anyhow::Result<()> {
    let (out, whole) = (folder(), folder());
    let writer = create(whole.path());
    for tensor in tensors() {
        write_tensor(&writer, &tensor, 100)?;
    }
    let expected = writer.finish(with_config(), &[], &Silent)?;

    let [a, b, c] = &tensors();
    let writer = create(out.path());
    write_tensor(&writer, a, 100)?;
    write_tensor(&writer, b, 100)?;
    let mut finished = writer.sync()?;
    // Half of this tensor is written when the process ends.
    writer.begin(&c.name)?.write(&c.data[..32])?;
    drop(writer);
    let partial = out.path().join("model-00001-of-00002.safetensors.partial");
    let damaged = fs::OpenOptions::new().write(true).open(partial)?;
    let offset = layout().entry(&b.name).expect("a tensor").offset;
    write_all_at(&damaged, &[0x55], offset + 77)?;

    let reopen = |finished: &_| LayoutWriter::reopen(layout(), out.path(), &[], finished, &Silent);
    finished.insert("gone".into(), sha256(b""));
    let (writer, damaged) = reopen(&finished)?.expect("the files are there");
    assert_eq!(damaged, ["gone", "b.weight"]);
    let recorded = [a, b, c].map(|tensor| writer.is_recorded(&tensor.name));
    assert_eq!(recorded, [true, false, false]);
    assert!(says(writer.begin(&a.name)).contains("written twice"));
    write_tensor(&writer, b, 100)?;
    write_tensor(&writer, c, 100)?;
    let finished = writer.sync()?;
    assert_eq!(finished.len(), 3);
    assert_eq!(writer.finish(with_config(), &[], &Silent)?, expected);

    // Published, but the process ended before it could say so.
    let mut other = finished.clone();
    other.insert(a.name.clone(), sha256(b"another run's"));
    assert!(reopen(&other)?.is_none());
    holds_all_tensors(out.path())?;
    let (writer, damaged) = reopen(&finished)?.expect("the files are there");
    assert!(damaged.is_empty() && !out.path().join("config.json").exists());
    assert!(Checkpoint::open(out.path()).is_err());
    assert_eq!(writer.finish(with_config(), &[], &Silent)?, expected);

    // A layout with a different tensor does not accept these files.
    let tensors =
        vec![PlannedTensor { name: "a.weight".into(), dtype: Dtype::F32, shape: vec![8, 16] }];
    let other = LayoutWriter::reopen(
        Layout::new(tensors, SHARD_BYTES)?,
        out.path(),
        &[],
        &finished,
        &Silent,
    )?;
    assert!(other.is_none());
    Ok(())
}

#[test]
fn a_tensor_takes_its_own_bytes_once_and_from_one_stream() -> anyhow::Result<()> {
    let out = folder();
    let writer = create(out.path());
    let [a, b, c] = &tensors();
    assert!(says(writer.begin("unknown")).contains("not in the layout"));
    let mut stream = writer.begin(&c.name)?;
    assert!(says(writer.begin(&c.name)).contains("is being written already"));
    stream.write(&[7; 60])?;
    assert_eq!(
        says(stream.write(&[7; 5])),
        "tensor `c.norm` has 4 of its 64 bytes left, 5 were handed over"
    );
    assert_eq!(says(stream.finish()), "tensor `c.norm` has 64 bytes, 60 were written");
    assert!(!writer.is_recorded(&c.name));
    // A dropped stream leaves nothing: the next stream begins at byte 0.
    writer.begin(&c.name)?.write(&[7; 64])?;
    assert!(writer.sync()?.is_empty());
    write_tensor(&writer, c, 16)?;
    assert!(says(writer.begin(&c.name)).contains("written twice"));
    assert!(says(writer.begin(&c.name)).contains("written twice"), "still");
    write_tensor(&writer, a, 512)?;
    let text = says(writer.finish(with_config(), &[], &Silent));
    assert!(text.contains("tensor `b.weight` was neither"), "{text}");
    assert!(nothing_was_published(out.path())?);

    let writer = create(out.path());
    for tensor in [a, b, c] {
        write_tensor(&writer, tensor, 512)?;
    }
    writer.finish(with_config(), &[], &Silent)?;
    holds_all_tensors(out.path())
}

#[test]
fn an_empty_tensor_needs_no_write() -> anyhow::Result<()> {
    let out = folder();
    let tensors = vec![PlannedTensor { name: "none".into(), dtype: Dtype::F32, shape: vec![0, 4] }];
    let writer = LayoutWriter::create(Layout::new(tensors, 0)?, out.path(), &[], &Silent)?;
    writer.begin("none")?.finish()?;
    writer.finish(with_config(), &[], &Silent)?;
    Checkpoint::open(out.path())?.require("none", &[0, 4])?;
    Ok(())
}

#[test]
fn damage_after_the_write_is_caught() -> anyhow::Result<()> {
    let out = folder();
    let writer = create(out.path());
    for tensor in tensors() {
        write_tensor(&writer, &tensor, 512)?;
    }
    let partial = out.path().join("model-00002-of-00002.safetensors.partial");
    let file = fs::OpenOptions::new().write(true).open(partial)?;
    let offset = writer.layout().entry("c.norm").expect("a tensor").offset;
    write_all_at(&file, &[0x55], offset + 3)?;
    let text = says(writer.finish(with_config(), &[], &Silent));
    assert!(text.contains("tensor `c.norm` is not what was written"), "{text}");
    assert!(nothing_was_published(out.path())?);
    Ok(())
}

#[test]
fn the_output_may_lie_in_no_source_and_beside_no_other_weights() -> anyhow::Result<()> {
    let (first, second, out) = (folder(), folder(), folder());
    let sources = [first.path(), second.path()];
    let inside = second.path().join("merged");
    let start = |target: &Path| LayoutWriter::create(layout(), target, &sources, &Silent);
    assert!(says(start(&inside)).contains("lies inside the model's folder"));
    let reopened = LayoutWriter::reopen(layout(), &inside, &sources, &BTreeMap::new(), &Silent);
    assert!(says(reopened).contains("lies inside the model's folder"));
    assert!(!inside.exists());
    assert!(says(start(first.path())).contains("is the model's folder"));

    write(out.path(), "model-00001-of-00002.safetensors.partial", b"old");
    write(out.path(), "model.safetensors.index.json", b"of the same output");
    start(out.path())?;
    write(out.path(), "model.safetensors", b"");
    assert!(says(start(out.path())).contains("`model.safetensors` would be loaded"));
    Ok(())
}

#[test]
fn publishing_that_fails_half_way_leaves_no_config() -> anyhow::Result<()> {
    let out = folder();
    write(out.path(), "config.json", b"of an older model");
    let writer = create(out.path());
    for tensor in tensors() {
        write_tensor(&writer, &tensor, 512)?;
    }
    // A folder has the name of the second file, so its rename fails.
    fs::create_dir(out.path().join("model-00002-of-00002.safetensors"))?;
    let text = says(writer.finish(with_config(), &[], &Silent));
    assert!(text.contains("cannot write"), "{text}");
    for late in ["config.json", "model.safetensors.index.json"] {
        assert!(!out.path().join(late).exists(), "{late}");
    }
    Ok(())
}

#[test]
fn the_layout_of_a_source_gives_the_same_file() -> anyhow::Result<()> {
    for format in [Some("pt"), None] {
        let (source, copy, merged) = (folder(), folder(), folder());
        write_single(source.path(), format);
        let checkpoint = Arc::new(Checkpoint::open(source.path())?);
        let writer = CheckpointWriter::create(&checkpoint, copy.path(), &Silent)?;
        writer.finish(&[], VerifyLevel::Full, &Silent)?;
        let layout = Layout::of(&checkpoint).unwrap();
        let writer = LayoutWriter::create(layout, merged.path(), &[source.path()], &Silent)?;
        for tensor in mixed_tensors() {
            write_tensor(&writer, &tensor, 5)?;
        }
        writer.finish(with_config(), &[], &Silent)?;
        let weights = |folder: &Path| fs::read(folder.join("model.safetensors"));
        assert_eq!(weights(copy.path())?, weights(merged.path())?);
    }
    Ok(())
}
