//! A checkpoint is opened, pruned, written, verified and opened again, and every check fails on its kind of damage.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use safetensors::{Dtype, SafeTensors};

use super::test_files::{
    counting, element, file_bytes, folder, mixed_tensors, write, write_sharded, write_single,
};
use super::{Checkpoint, CheckpointWriter, ExpectedMatrix, WeightSource};
use crate::disk::positioned::write_all_at;
use crate::run::verification::{Verification, VerifyLevel};
use crate::run::{Event, Events, Silent};

/// Keeps notes.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Events for Notes {
    fn emit(&self, event: Event) {
        if let (Event::Note { text }, Ok(mut notes)) = (event, self.0.lock()) {
            notes.push(text);
        }
    }
}

pub(super) fn start(source: &Path, target: &Path) -> anyhow::Result<CheckpointWriter> {
    CheckpointWriter::create(&Arc::new(Checkpoint::open(source)?), target, &Silent)
}

pub(super) fn data_of(name: &str) -> Vec<u8> {
    mixed_tensors()
        .into_iter()
        .find(|tensor| tensor.name == name)
        .map(|tensor| tensor.data)
        .unwrap_or_default()
}

/// `name` with every second element zeroed: 2:4 sparse, exactly half.
pub(super) fn pruned(name: &str, dtype: Dtype) -> Vec<u8> {
    let each = dtype.bitsize() / 8;
    let mut data = data_of(name);
    for element in data.chunks_exact_mut(each).step_by(2) {
        element.fill(0);
    }
    data
}

fn matrix(name: &str, zeros: Option<u64>, group: Option<(usize, usize)>) -> ExpectedMatrix {
    ExpectedMatrix { name: name.into(), zeros, group }
}

pub(super) fn says<T>(result: anyhow::Result<T>) -> String {
    result.err().map_or("accepted".into(), |error| error.to_string())
}

/// No file of the output has its final name.
pub(super) fn nothing_was_published(target: &Path) -> anyhow::Result<bool> {
    let mut names = fs::read_dir(target)?;
    Ok(names.all(|entry| {
        entry.is_ok_and(|entry| entry.file_name().to_string_lossy().ends_with(".partial"))
    }))
}

#[test]
fn pruned_tensors_change_and_everything_else_is_byte_identical() -> anyhow::Result<()> {
    for write_source in [write_sharded, |folder: &Path| write_single(folder, Some("pt"))] {
        let (source, out) = (folder(), folder());
        write_source(source.path());
        let target = out.path().join("new/model");
        let mut writer = start(source.path(), &target)?;
        let changed = [
            ("a.weight", Dtype::F32, 16),
            ("b.weight", Dtype::F16, 8),
            ("c.weight", Dtype::BF16, 4),
        ];
        for (name, dtype, _) in changed {
            writer.write(name, &pruned(name, dtype))?;
        }
        writer.sync()?;
        let expected = changed.map(|(name, _, zeros)| matrix(name, Some(zeros), Some((2, 4))));
        let verification = writer.finish(&expected, VerifyLevel::Full, &Silent)?;
        assert_eq!((verification.tensors_rewritten, verification.tensors_copied), (3, 1));
        assert_eq!(verification.tensors_checked, 4);
        // (32 + 16 + 8) / 4 groups.
        assert_eq!(verification.groups_checked, 14);
        assert_eq!(verification.zeros[1].zeros, 8);
        assert_eq!(verification.zeros[1].elements, 16);

        let (before, after) = (Checkpoint::open(source.path())?, Checkpoint::open(&target)?);
        assert_eq!(before.identity(), after.identity());
        for (old, new) in before.tensors().zip(after.tensors()) {
            assert_eq!(old, new);
            let mut found = vec![0; new.bytes as usize];
            after.read(new, 0, &mut found)?;
            let wanted = changed
                .iter()
                .find(|(name, _, _)| *name == new.name)
                .map_or_else(|| data_of(&new.name), |(name, dtype, _)| pruned(name, *dtype));
            assert_eq!(found, wanted, "{}", new.name);
        }
        for name in ["config.json", "tokenizer.json", "LICENSE.txt"] {
            assert_eq!(fs::read(source.path().join(name))?, fs::read(target.join(name))?);
        }
        // The list of hashes is the additional file.
        assert_eq!(fs::read_dir(source.path())?.count() + 1, fs::read_dir(&target)?.count());
    }
    Ok(())
}

#[test]
fn untouched_checkpoint_is_copied_byte_for_byte_with_its_hash() -> anyhow::Result<()> {
    use sha2::Digest;
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    let verification =
        start(source.path(), out.path())?.finish(&[], VerifyLevel::Quick, &Silent)?;
    let written = fs::read(out.path().join("model.safetensors"))?;
    assert_eq!(fs::read(source.path().join("model.safetensors"))?, written);
    assert_eq!(verification.files[0].bytes, written.len() as u64);
    assert_eq!(verification.files[0].sha256, crate::bytes::hex(&sha2::Sha256::digest(&written)));
    Ok(())
}

#[test]
fn a_missing_format_is_added_with_a_note() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), None);
    let notes = Notes::default();
    let checkpoint = Arc::new(Checkpoint::open(source.path())?);
    let mut writer = CheckpointWriter::create(&checkpoint, out.path(), &notes)?;
    writer.write("b.weight", &pruned("b.weight", Dtype::F16))?;
    writer.finish(&[matrix("b.weight", Some(8), None)], VerifyLevel::Full, &notes)?;
    assert!(
        notes
            .0
            .lock()
            .is_ok_and(|notes| notes.len() == 1 && notes[0].contains("\"format\":\"pt\""))
    );

    let bytes = fs::read(out.path().join("model.safetensors"))?;
    let (_, metadata) = SafeTensors::read_metadata(&bytes)?;
    assert_eq!(
        metadata.metadata().as_ref().and_then(|texts| texts.get("format")).map(String::as_str),
        Some("pt")
    );
    let tensors = SafeTensors::deserialize(&bytes)?;
    assert_eq!(tensors.tensor("a.weight")?.data(), data_of("a.weight"));
    assert_eq!(tensors.tensor("b.weight")?.data(), pruned("b.weight", Dtype::F16));
    Ok(())
}

#[test]
fn flipped_bit_between_write_and_finish_is_caught() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    let mut writer = start(source.path(), out.path())?;
    writer.write("a.weight", &pruned("a.weight", Dtype::F32))?;
    let partial =
        fs::OpenOptions::new().write(true).open(out.path().join("model.safetensors.partial"))?;
    let offset = Checkpoint::open(source.path())?.require("a.weight", &[4, 8])?.offset;
    write_all_at(&partial, &[0x55], offset + 77)?;
    let text = says(writer.finish(&[], VerifyLevel::Quick, &Silent));
    assert!(text.contains("tensor `a.weight` is not what was written"), "{text}");
    assert!(text.contains(&format!("file offsets {offset} to {}", offset + 128)), "{text}");
    assert!(nothing_was_published(out.path())?);
    Ok(())
}

#[test]
fn damage_to_copied_tensors_and_headers_is_caught() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    let offset = Checkpoint::open(source.path())?.require("c.weight", &[2, 4])?.offset;
    for (at, expected) in
        [(offset, "tensor `c.weight` is not what"), (20, "its header differs at file offset 20")]
    {
        let mut writer = start(source.path(), out.path())?;
        writer.copy_untouched(&Silent)?;
        let partial = fs::OpenOptions::new()
            .write(true)
            .open(out.path().join("model.safetensors.partial"))?;
        write_all_at(&partial, &[0xff], at)?;
        let text = says(writer.verify(&[], VerifyLevel::Quick, &Silent));
        assert!(text.contains(expected), "{text}");
    }
    Ok(())
}

#[test]
fn violated_group_is_named_by_row_and_column() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    let mut data = pruned("a.weight", Dtype::F32);
    // Row 2, columns 4 to 7: element 20 was pruned and gets its value back.
    data[20 * 4..21 * 4].copy_from_slice(&element(Dtype::F32, 21.0));
    let mut writer = start(source.path(), out.path())?;
    writer.write("a.weight", &data)?;
    let text =
        says(writer.finish(&[matrix("a.weight", None, Some((2, 4)))], VerifyLevel::Quick, &Silent));
    assert!(text.contains("tensor `a.weight` is not 2:4 sparse"), "{text}");
    assert!(text.contains("row 2, columns 4 to 7"), "{text}");
    assert!(text.contains("hold 1 zeros, 2 needed"), "{text}");
    assert!(nothing_was_published(out.path())?);
    Ok(())
}

#[test]
fn wrong_number_of_zeros_is_caught() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    let mut writer = start(source.path(), out.path())?;
    writer.write("a.weight", &pruned("a.weight", Dtype::F32))?;
    let text =
        says(writer.finish(&[matrix("a.weight", Some(17), None)], VerifyLevel::Quick, &Silent));
    assert!(
        text.contains("tensor `a.weight` has 16 zeros\n  expected 17 of 32 elements"),
        "{text}"
    );
    Ok(())
}

#[test]
fn full_check_catches_a_changed_weight_and_a_negative_zero() -> anyhow::Result<()> {
    for wrong in [2.5, -0.0] {
        let (source, out) = (folder(), folder());
        write_single(source.path(), Some("pt"));
        let mut data = pruned("b.weight", Dtype::F16);
        data[9 * 2..10 * 2].copy_from_slice(&element(Dtype::F16, wrong));
        for level in [VerifyLevel::Quick, VerifyLevel::Full] {
            let mut writer = start(source.path(), out.path())?;
            writer.write("b.weight", &data)?;
            let text = says(writer.finish(&[], level, &Silent));
            let caught = text.contains("tensor `b.weight` has a changed weight")
                && text.contains("row 1, column 1 ");
            assert_eq!(caught, level == VerifyLevel::Full, "{text}");
        }
    }
    Ok(())
}

#[test]
fn misuse_of_write_is_an_error() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    let mut writer = start(source.path(), out.path())?;
    assert!(says(writer.write("x.weight", &[])).contains("tensor `x.weight` is not in"));
    assert_eq!(
        says(writer.write("d.ids", &[0; 8])),
        "tensor `d.ids` has 24 bytes, 8 were handed over"
    );
    writer.write("d.ids", &[0; 24])?;
    assert_eq!(says(writer.write("d.ids", &[0; 24])), "tensor `d.ids` was written twice");
    for (bad, expected) in [
        (matrix("x.weight", None, None), "does not have it"),
        (matrix("d.ids", None, None), "of dtype I64"),
        (matrix("a.weight", None, Some((1, 3))), "has no 1:3 groups"),
        (matrix("a.weight", None, Some((1, 0))), "has no 1:0 groups"),
    ] {
        let writer = start(source.path(), out.path())?;
        assert!(says(writer.finish(&[bad], VerifyLevel::Quick, &Silent)).contains(expected));
    }
    Ok(())
}

#[test]
#[cfg(unix)]
fn output_may_not_touch_the_source_folder() -> anyhow::Result<()> {
    let source = folder();
    write_single(source.path(), Some("pt"));
    let link = folder();
    std::os::unix::fs::symlink(source.path(), link.path().join("link"))?;
    let roundabout = source.path().join("../").join(source.path().file_name().unwrap_or_default());
    for (target, expected) in [
        (source.path().to_path_buf(), "is the model's folder"),
        (source.path().join("sub/deeper"), "lies inside the model's folder"),
        (roundabout.join("missing/.."), "is the model's folder"),
        (link.path().join("link"), "is the model's folder"),
        (link.path().join("link/out"), "lies inside the model's folder"),
    ] {
        let text = says(start(source.path(), &target));
        assert!(text.contains(expected), "{target:?}: {text}");
    }
    assert_eq!(fs::read_dir(source.path())?.count(), 4);
    Ok(())
}

#[test]
fn other_weights_in_the_target_are_refused_and_old_partials_replaced() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    write(out.path(), "model.safetensors.partial", b"from a killed run");
    write(out.path(), "model-00001-of-00009.safetensors.partial", b"from another");
    start(source.path(), out.path())?.finish(&[], VerifyLevel::Full, &Silent)?;
    assert_eq!(fs::read_dir(out.path())?.count(), 5);
    // The same output again replaces the old output.
    start(source.path(), out.path())?.finish(&[], VerifyLevel::Full, &Silent)?;
    for name in ["model-00001-of-00002.safetensors", "model.safetensors.index.json"] {
        write(out.path(), name, b"");
        assert!(
            says(start(source.path(), out.path())).contains(&format!("`{name}` would be loaded"))
        );
        fs::remove_file(out.path().join(name))?;
    }
    Ok(())
}

#[test]
fn partial_files_have_their_final_size_from_the_start() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    let big = counting("a.weight", Dtype::F32, &[3000, 1000]);
    write(source.path(), "model.safetensors", &file_bytes(Some("pt"), &[big]));
    let writer = start(source.path(), out.path())?;
    let size = |folder: &Path, name: &str| fs::metadata(folder.join(name)).map(|data| data.len());
    assert_eq!(
        size(source.path(), "model.safetensors")?,
        size(out.path(), "model.safetensors.partial")?
    );
    // 12 MB are more than one chunk of the copy and of the check; 2:5 groups do not divide a chunk.
    let zeros = [matrix("a.weight", Some(0), Some((0, 5)))];
    let verification = writer.finish(&zeros, VerifyLevel::Full, &Silent)?;
    assert_eq!(verification.groups_checked, 600_000);
    Ok(())
}

#[test]
fn publishing_that_fails_half_way_leaves_no_config() -> anyhow::Result<()> {
    let (source, out) = (folder(), folder());
    write_single(source.path(), Some("pt"));
    write(out.path(), "config.json", b"of an older model");
    let writer = start(source.path(), out.path())?;
    // A folder has the name of the weights, so their rename fails.
    fs::create_dir(out.path().join("model.safetensors"))?;
    let text = says(writer.finish(&[], VerifyLevel::Quick, &Silent));
    assert!(text.contains("cannot write"), "{text}");
    assert!(!out.path().join("config.json").exists());
    Ok(())
}

/// Writes a sharded checkpoint of which early checks look at so many tensors. Then damages its files, if asked, and finishes.
fn finish_after_early_checks(
    source: &Path,
    (level, enough): (VerifyLevel, usize),
    damages: bool,
) -> anyhow::Result<Verification> {
    let rewritten =
        [("a.weight", Dtype::F32, 16), ("b.weight", Dtype::F16, 8), ("c.weight", Dtype::BF16, 4)];
    let expected = rewritten.map(|(name, _, zeros)| matrix(name, Some(zeros), Some((2, 4))));
    let out = folder();
    let mut writer = start(source, out.path())?;
    writer.will_check_early(level);
    let left = std::cell::Cell::new(enough);
    let is_over = || {
        let now = left.get();
        left.set(now.saturating_sub(1));
        now == 0
    };
    for (at, (name, dtype, _)) in rewritten.into_iter().enumerate() {
        writer.check_finished_until(&expected[..at], &is_over)?;
        writer.write(name, &pruned(name, dtype))?;
        writer.sync()?;
    }
    writer.copy_untouched(&Silent)?;
    writer.sync()?;
    writer.check_finished_until(&expected, &is_over)?;
    for part in fs::read_dir(out.path())?.filter(|_| damages) {
        let path = part?.path();
        let last = fs::metadata(&path)?.len() - 1;
        write_all_at(&fs::OpenOptions::new().write(true).open(&path)?, &[0x55], last)?;
    }
    writer.finish(&expected, level, &Silent)
}

#[test]
fn files_that_were_checked_early_are_not_read_again() -> anyhow::Result<()> {
    let source = folder();
    write_sharded(source.path());
    let run = |asked, damages| finish_after_early_checks(source.path(), asked, damages);
    let whole = run((VerifyLevel::Quick, 0), false)?;
    let mut files_read_again = Vec::new();
    for enough in 0..20 {
        let asked = (VerifyLevel::Quick, enough);
        assert_eq!(run(asked, false)?, whole, "after {enough}");
        let text = says(run(asked, true));
        files_read_again.push(match () {
            () if text.contains("model-00001-of-00002") => 2,
            () if text.contains("model-00002-of-00002") => 1,
            () => 0,
        });
    }
    assert!(files_read_again.is_sorted_by(|one, next| one >= next), "{files_read_again:?}");
    for number in 0..=2 {
        assert!(files_read_again.contains(&number), "{files_read_again:?}");
    }
    // A full check compares with the source, at the end.
    let text = says(run((VerifyLevel::Full, 20), true));
    assert!(text.contains("model-00001-of-00002"), "{text}");
    Ok(())
}

#[test]
fn an_early_check_finds_damage_and_is_not_taken_for_another_expectation() -> anyhow::Result<()> {
    let source = folder();
    write_sharded(source.path());
    let begun = |target: &Path| -> anyhow::Result<CheckpointWriter> {
        let mut writer = start(source.path(), target)?;
        writer.will_check_early(VerifyLevel::Quick);
        writer.write("a.weight", &pruned("a.weight", Dtype::F32))?;
        writer.copy_untouched(&Silent)?;
        writer.sync()?;
        Ok(writer)
    };
    let out = folder();
    let mut writer = begun(out.path())?;
    let partial = out.path().join("model-00001-of-00002.safetensors.partial");
    let bytes = fs::read(&partial)?;
    let last = bytes.len() as u64 - 1;
    write_all_at(&fs::OpenOptions::new().write(true).open(&partial)?, &[0x55], last)?;
    let text = says(writer.check_finished_until(&[], &|| false));
    assert!(text.contains("is not what was written"), "{text}");

    let out = folder();
    let mut writer = begun(out.path())?;
    writer.check_finished_until(&[], &|| false)?;
    let wrong = [matrix("a.weight", Some(15), None)];
    let text = says(writer.finish(&wrong, VerifyLevel::Quick, &Silent));
    assert!(text.contains("tensor `a.weight` has 16 zeros"), "{text}");
    assert!(nothing_was_published(out.path())?);
    Ok(())
}
