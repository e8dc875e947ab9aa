//! Damaged packed folders: each is read or refused without a panic, and what is restored is the original.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::packed::{PackedRecord, PackedSource};
use prune::run::Silent;
use prune::settings::ConversionSettings;
use prune::synthetic::RandomCheckpoint;
use tempfile::TempDir;

use super::{keep, keep_half, pack, packed_source};
use crate::hostile::mutators::{Random, spoil};
use crate::resume::outcome;
use crate::support::Place;

/// Good folders: the files of a model, and the files of its packed folder.
struct GoodFolders {
    original: BTreeMap<String, Vec<u8>>,
    packed: BTreeMap<String, Vec<u8>>,
}

fn good(values: &str, two_of_four: bool) -> GoodFolders {
    let place = Place::with(&RandomCheckpoint {
        hidden_size: 12,
        intermediate_size: 20,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        num_hidden_layers: 1,
        ..RandomCheckpoint::default()
    });
    match two_of_four {
        true => keep(&place.path("m"), 2, 4),
        false => keep_half(&place.path("m")),
    }
    pack(&place, &format!("m --save p --values {values}"));
    GoodFolders { original: outcome(&place.path("m")), packed: outcome(&place.path("p")) }
}

static GOOD: LazyLock<[GoodFolders; 3]> =
    LazyLock::new(|| [good("exact", false), good("exact", true), good("int8", false)]);

fn write(files: &BTreeMap<String, Vec<u8>>) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).expect("a new file");
    }
    folder
}

/// Reads every tensor of a folder, as a run does.
fn read_all(folder: &Path) -> anyhow::Result<()> {
    let source = packed_source(folder)?;
    for entry in source.tensors() {
        anyhow::ensure!(entry.bytes <= 1 << 20, "{entry:?}");
        let mut bytes = vec![0; entry.bytes as usize];
        source.read(entry, 0, &mut bytes)?;
    }
    Ok(())
}

/// Restores a folder; `None` where it is refused.
fn restored(folder: &Path) -> Option<BTreeMap<String, Vec<u8>>> {
    let out = tempfile::tempdir().expect("a temporary folder");
    let settings = ConversionSettings {
        model: folder.to_path_buf(),
        save: out.path().join("out"),
        force: false,
        threads: None,
        max_memory: None,
        arguments: Vec::new(),
    };
    prune::job::unpack(&settings, &Silent).ok()?;
    Some(outcome(&settings.save))
}

fn cases(cases: u32) -> ProptestConfig {
    let asked = std::env::var_os("PROPTEST_CASES").map(|_| ProptestConfig::default().cases);
    ProptestConfig {
        cases: asked.unwrap_or(cases),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(300))]

    /// Parts of matrices, whose header stays good: the bytes are changed in place.
    #[test]
    fn spoilt_parts_are_refused_or_restored(kind in 0usize..3, seed: u64) {
        let good = &GOOD[kind];
        let mut files = good.packed.clone();
        let folder = write(&files);
        let mut random = Random(seed);
        let checkpoint = Checkpoint::open(folder.path()).expect("a good checkpoint");
        let parts: Vec<_> = checkpoint
            .tensors()
            .filter(|entry| entry.name.contains("_proj."))
            .collect();
        let bytes = files.get_mut("model.safetensors").expect("weights");
        for _ in 0..=random.below(3) {
            let part = parts[random.below(parts.len())];
            let start = part.offset as usize;
            let mut changed = bytes[start..start + part.bytes as usize].to_vec();
            spoil(&mut changed, random.next());
            changed.resize(part.bytes as usize, 0);
            bytes[start..start + part.bytes as usize].copy_from_slice(&changed);
        }
        fs::write(folder.path().join("model.safetensors"), &*bytes).expect("written");
        let read = read_all(folder.path());
        let restored = restored(folder.path());
        if kind < 2 {
            prop_assert!(restored.is_none_or(|files| files == good.original));
        } else {
            prop_assert_eq!(read.is_ok(), restored.is_some());
        }
    }

    /// The whole file, the record, or the configuration.
    #[test]
    fn spoilt_files_are_refused_or_restored(kind in 0usize..3, file in 0usize..3, seed: u64) {
        let good = &GOOD[kind];
        let mut files = good.packed.clone();
        let name = ["model.safetensors", "packed.json", "config.json"][file];
        spoil(files.get_mut(name).expect("a file"), seed);
        let folder = write(&files);
        let _ = read_all(folder.path());
        // A changed record may state other files; what it states is compared with its hashes.
        let restored = restored(folder.path());
        if name != "packed.json" && kind < 2 {
            prop_assert!(restored.is_none_or(|files| files == good.original));
        }
    }

    #[test]
    fn spoilt_records_are_parsed_or_refused(kind in 0usize..3, seed: u64) {
        let mut bytes = GOOD[kind].packed["packed.json"].clone();
        spoil(&mut bytes, seed);
        let _ = PackedRecord::parse(&bytes);
    }
}

#[test]
fn rows_that_do_not_agree_are_refused_by_name() {
    let good = &GOOD[0];
    let folder = write(&good.packed);
    let source: PackedSource = packed_source(folder.path()).expect("a good folder");
    let name = "model.layers.0.mlp.down_proj.weight";
    let matrix = source.matrix(name).expect("a packed matrix");
    let offsets = matrix.row_offsets.as_ref().expect("any mask").offset as usize;
    let mask = matrix.bitmask.offset as usize;
    // 20 columns: three bytes per row, four bits of padding.
    assert_eq!((matrix.rows, matrix.columns, matrix.mask_bytes()), (12, 20, 3));
    let word = |value: i64| value.to_le_bytes().to_vec();
    for (at, bytes, why) in [
        (mask + 5, vec![0xf0], "row 1 of"),
        (offsets, word(1), "row 0 begins at value 1"),
        (offsets, word(-1), "row 0 begins at value -1"),
        (offsets + 8 * 11, word(i64::MAX), "the mask of row 10"),
        (offsets + 8 * 11, word(i64::MIN), "the mask of row 10"),
        (offsets + 8 * 3, word(0), "the mask of row 2"),
    ] {
        let mut file = good.packed["model.safetensors"].clone();
        file[at..at + bytes.len()].copy_from_slice(&bytes);
        fs::write(folder.path().join("model.safetensors"), file).expect("written");
        let error = read_all(folder.path()).expect_err(why);
        let text = prune::failure::describe(&error);
        assert!(text.contains(why) && text.contains(name), "{why}: {text}");
    }
}
