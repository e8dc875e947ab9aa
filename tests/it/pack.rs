//! `prune pack` and `prune unpack`, and commands that read what `pack` writes.

mod commands;
mod hostile;
mod interrupted;
mod refused;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, TensorEntry, WeightSource};
use prune::linalg::StoredDtype;
use prune::packed::{CompactRows, PackForm, PackedSource, PackedValues};
use prune::run::{PackingReport, UnpackingReport};
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use crate::resume::{assert_same, outcome};
use crate::support::Place;

/// Bytes of the tensors of a checkpoint, by name.
fn tensors(source: &dyn WeightSource, entries: Vec<TensorEntry>) -> BTreeMap<String, Vec<u8>> {
    let read = |entry: TensorEntry| {
        let mut bytes = vec![0; entry.bytes as usize];
        source.read(&entry, 0, &mut bytes).expect("a good checkpoint");
        (entry.name, bytes)
    };
    entries.into_iter().map(read).collect()
}

fn dense_tensors(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = Checkpoint::open(folder).expect("a good checkpoint");
    tensors(&checkpoint, checkpoint.tensors().cloned().collect())
}

fn packed_source(folder: &Path) -> anyhow::Result<PackedSource> {
    PackedSource::open(Arc::new(Checkpoint::open(folder)?))
}

/// Changes the decoder linears of a folder in place: `change` sees the name, the columns, the bytes of an element and the bytes.
fn change(folder: &Path, mut change: impl FnMut(&str, usize, usize, &mut [u8])) {
    let checkpoint = Checkpoint::open(folder).expect("a good checkpoint");
    for entry in checkpoint.tensors() {
        let is_linear = entry.name.contains("_proj.weight");
        if !is_linear {
            continue;
        }
        let mut bytes = vec![0; entry.bytes as usize];
        checkpoint.read(entry, 0, &mut bytes).expect("a good checkpoint");
        let each = bytes.len() / entry.elements();
        change(&entry.name, entry.shape[1], each, &mut bytes);
        let path = folder.join(&checkpoint.shards()[entry.shard].file_name);
        let mut file = fs::read(&path).expect("a file of the test");
        let start = entry.offset as usize;
        file[start..start + bytes.len()].copy_from_slice(&bytes);
        fs::write(path, file).expect("room");
    }
}

/// Sets weights to 0 that are not among the `n` kept weights of `m` in a row.
fn keep(folder: &Path, n: usize, m: usize) {
    let mut state = 7u64;
    change(folder, |_, columns, each, bytes| {
        for row in bytes.chunks_mut(columns * each) {
            for group in row.chunks_mut(m * each) {
                let elements = group.len() / each;
                let zeros = (elements * (m - n)).div_ceil(m);
                let mut places: Vec<usize> = (0..elements).collect();
                for _ in 0..zeros {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let at = places.swap_remove((state >> 33) as usize % places.len());
                    group[at * each..(at + 1) * each].fill(0);
                }
            }
        }
    });
}

/// Keeps each weight with a chance of one half.
fn keep_half(folder: &Path) {
    let mut state = 3u64;
    change(folder, |_, _, each, bytes| {
        for element in bytes.chunks_mut(each) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if state >> 63 == 0 {
                element.fill(0);
            }
        }
    });
}

fn pack(place: &Place, line: &str) -> PackingReport {
    let ran = place.run(&format!("pack {line} --json"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("a record")
}

fn unpack(place: &Place, line: &str) -> UnpackingReport {
    let ran = place.run(&format!("unpack {line} --json"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("a record")
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON")
}

/// Widths that are no multiple of 8, and some of 4.
fn odd_shape() -> RandomCheckpoint {
    RandomCheckpoint {
        hidden_size: 36,
        intermediate_size: 45,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        ..RandomCheckpoint::default()
    }
}

#[test]
fn every_byte_comes_back() {
    let shapes = [
        RandomCheckpoint::default(),
        RandomCheckpoint { dtype: StoredDtype::Bf16, ..RandomCheckpoint::default() },
        RandomCheckpoint {
            dtype: StoredDtype::F16,
            tie_word_embeddings: true,
            ..RandomCheckpoint::default()
        },
        RandomCheckpoint {
            dtype: StoredDtype::Bf16,
            max_shard: ByteSize(60_000),
            attention_bias: true,
            ..RandomCheckpoint::default()
        },
        RandomCheckpoint { dtype: StoredDtype::Bf16, ..odd_shape() },
        odd_shape(),
    ];
    for shape in shapes {
        let place = Place::with(&shape);
        keep_half(&place.path("m"));
        let each = shape.dtype.bytes();
        change(&place.path("m"), |name, _, _, bytes| {
            match name {
                "model.layers.0.self_attn.q_proj.weight" => bytes.fill(0),
                // No zeros: it stays dense.
                "model.layers.0.mlp.up_proj.weight" => bytes.fill(0x3c),
                "model.layers.1.mlp.down_proj.weight" => {
                    // −0, and a signalling NaN with a payload.
                    bytes[..each].fill(0);
                    bytes[each - 1] = 0x80;
                    bytes[each..2 * each].fill(0x7f);
                    bytes[each] = 0x9b;
                    bytes[2 * each - 2] = 0x81;
                }
                _ => {}
            }
        });
        fs::write(place.path("m/notes.txt"), "kept").expect("a new file");
        fs::write(place.path("m/README.md"), "---\nlicense: mit\n---\n").expect("a new file");
        let expected = outcome(&place.path("m"));
        let report = pack(&place, "m --save p");
        assert_eq!((report.format.as_str(), report.values.as_str()), ("sparse-bitmask", "exact"));
        assert_eq!(report.totals.matrices, 13, "{:?}", report.dense);
        let [dense] = report.dense.as_slice() else { panic!("{:?}", report.dense) };
        assert_eq!(dense.tensor, "model.layers.0.mlp.up_proj.weight");
        assert!(report.bytes_after < report.bytes_before && report.left_out.is_empty());
        let back = unpack(&place, "p --save back");
        assert_eq!(back.files_equal, expected.len());
        assert_same(&outcome(&place.path("back")), &expected, &format!("{shape:?}"));
        // As if dense, in the order of the original files.
        let source = packed_source(&place.path("p")).expect("a packed folder");
        let names: Vec<&str> = source.tensors().map(|entry| entry.name.as_str()).collect();
        let original = Checkpoint::open(&place.path("m")).expect("a good checkpoint");
        let originals: Vec<&str> = original.tensors().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, originals);
        let found = tensors(&source, source.tensors().cloned().collect());
        assert!(found == dense_tensors(&place.path("m")));
    }
}

#[test]
fn a_folder_is_as_large_as_the_formula_says() {
    for dtype in [StoredDtype::Bf16, StoredDtype::F32] {
        // Large enough for headers to be a small share.
        let place = Place::with(&RandomCheckpoint {
            dtype,
            hidden_size: 256,
            intermediate_size: 600,
            num_hidden_layers: 1,
            ..RandomCheckpoint::default()
        });
        keep_half(&place.path("m"));
        let (mut dense, mut packed) = (0, 0);
        change(&place.path("m"), |_, columns, each, bytes| {
            let kept = bytes.chunks(each).filter(|element| element.iter().any(|&b| b != 0)).count();
            let rows = bytes.len() / (columns * each);
            dense += bytes.len();
            packed += kept * each + rows * columns.div_ceil(8) + 8 * rows + 16;
        });
        let report = pack(&place, "m --save p");
        let totals = report.totals;
        assert_eq!(totals.matrix_bytes_before, ByteSize(dense as u64));
        assert_eq!(totals.matrix_bytes_after, ByteSize(packed as u64));
        let saved = report.bytes_before.0 - report.bytes_after.0;
        let ratio = saved as f64 / (dense - packed) as f64;
        assert!((ratio - 1.0).abs() < 0.02, "{ratio}");
        let file = fs::metadata(place.path("p/model.safetensors")).expect("a file").len();
        assert_eq!(ByteSize(file), report.bytes_after);
    }
}

#[test]
fn two_of_four_has_a_form_of_its_own_and_other_patterns_are_masks() {
    for (n, m, form) in [
        (2, 4, PackForm::TwoOfFour),
        (4, 8, PackForm::Bitmask),
        // At most two of four, but 2:4 would store twice the values.
        (1, 4, PackForm::Bitmask),
    ] {
        let place = Place::with(&RandomCheckpoint {
            dtype: StoredDtype::Bf16,
            ..RandomCheckpoint::default()
        });
        keep(&place.path("m"), n, m);
        if form == PackForm::TwoOfFour {
            // Groups with fewer than two kept weights.
            change(&place.path("m"), |_, _, each, bytes| bytes[..6 * each].fill(0));
        }
        let expected = outcome(&place.path("m"));
        let report = pack(&place, "m --save p");
        assert_eq!(report.format, form.name(), "{n}:{m}");
        let config = json_of(&place.path("p/config.json"));
        let sparsity = &config["quantization_config"]["sparsity_config"];
        assert_eq!(sparsity["format"], json!(form.name()));
        let structure = if form == PackForm::TwoOfFour { "2:4" } else { "unstructured" };
        assert_eq!(sparsity["sparsity_structure"], json!(structure));
        let share = sparsity["global_sparsity"].as_f64().expect("a number");
        assert!((share - (1.0 - n as f64 / m as f64)).abs() < 0.01, "{share}");
        let files = Checkpoint::open(&place.path("p")).expect("a good checkpoint");
        let shape = |name: &str| {
            let name = format!("model.layers.0.self_attn.q_proj.{name}");
            files.entry(&name).map(|entry| entry.shape.clone())
        };
        let is_two_of_four = form == PackForm::TwoOfFour;
        assert_eq!(shape("bitmask"), Some(vec![64, 8]));
        assert_eq!(shape("row_offsets").is_none(), is_two_of_four);
        assert_eq!(shape("shape"), Some(if is_two_of_four { vec![2, 1] } else { vec![2] }));
        if is_two_of_four {
            assert_eq!(shape("compressed"), Some(vec![64, 32]));
        }
        unpack(&place, "p --save back");
        assert_same(&outcome(&place.path("back")), &expected, &format!("{n}:{m}"));
    }
}

#[test]
fn the_layout_is_that_of_compressed_tensors() {
    // The smallest matrix by hand: q_proj begins with the row 0, 1, 0, 0, 2, 0, ...
    let place = Place::with(&RandomCheckpoint { dtype: StoredDtype::Bf16, ..odd_shape() });
    keep_half(&place.path("m"));
    change(&place.path("m"), |name, columns, each, bytes| {
        if name == "model.layers.0.self_attn.q_proj.weight" {
            bytes[..2 * columns * each].fill(0);
            (bytes[2], bytes[8], bytes[2 * columns - 1]) = (1, 2, 0x80);
        }
    });
    pack(&place, "m --save p");
    let files = dense_tensors(&place.path("p"));
    let part = |end: &str| &files[&format!("model.layers.0.self_attn.q_proj.{end}")];
    // Columns 1, 4 and 35 of 36; the second row is empty.
    assert_eq!(part("bitmask")[..10], [0b0001_0010, 0, 0, 0, 0b1000, 0, 0, 0, 0, 0]);
    assert_eq!(part("compressed")[..6], [1, 0, 2, 0, 0, 0x80]);
    let offsets: Vec<i64> = part("row_offsets")
        .as_chunks::<8>()
        .0
        .iter()
        .map(|&word| i64::from_le_bytes(word))
        .collect();
    assert_eq!(offsets[..3], [0, 3, 3]);
    let shape: Vec<u8> = [36i64, 36].map(i64::to_le_bytes).concat();
    assert_eq!(part("shape"), &shape);
    assert!(!files.contains_key("model.layers.0.self_attn.q_proj.weight"));
    let config = json_of(&place.path("p/config.json"));
    let quantization = &config["quantization_config"];
    assert_eq!(quantization["quant_method"], json!("compressed-tensors"));
    assert_eq!(quantization["version"], json!("0.14.0.1"));
    assert_eq!(quantization["sparsity_config"]["targets"], json!(["Linear"]));
    assert_eq!(quantization["sparsity_config"]["ignore"], json!(["lm_head"]));
}

#[test]
fn a_folder_without_packed_json_is_read_too() {
    let place = Place::new();
    keep_half(&place.path("m"));
    pack(&place, "m --save p");
    fs::remove_file(place.path("p/packed.json")).expect("it was written");
    let source = packed_source(&place.path("p")).expect("a packed folder");
    let found = tensors(&source, source.tensors().cloned().collect());
    assert!(found == dense_tensors(&place.path("m")));
    assert!(source.record().is_none());
    let back = unpack(&place, "p --save back");
    assert_eq!(back.files_equal, 0);
    assert!(dense_tensors(&place.path("back")) == found);
    let config = json_of(&place.path("back/config.json"));
    assert_eq!(config, json_of(&place.path("m/config.json")));
    assert!(place.path("back/tokenizer.json").is_file());
}

#[test]
fn reads_may_begin_and_end_anywhere_and_parts_can_be_read_alone() {
    for values in ["exact", "int8"] {
        let place = Place::with(&RandomCheckpoint { dtype: StoredDtype::Bf16, ..odd_shape() });
        keep_half(&place.path("m"));
        pack(&place, &format!("m --save p --values {values}"));
        let source = packed_source(&place.path("p")).expect("a packed folder");
        let name = "model.layers.0.mlp.down_proj.weight";
        let entry = source.entry(name).expect("a matrix");
        let mut whole = vec![0; entry.bytes as usize];
        source.read(entry, 0, &mut whole).expect("a good matrix");
        let length = whole.len();
        for (start, end) in
            [(0, 0), (0, 1), (1, 2), (3, 130), (89, 91), (90, 180), (length - 1, length)]
        {
            let mut piece = vec![9; end - start];
            source.read(entry, start as u64, &mut piece).expect("a good matrix");
            assert_eq!(piece, whole[start..end], "{start}..{end}");
        }
        let beyond = source.read(entry, length as u64, &mut [0]);
        assert!(beyond.unwrap_err().to_string().contains("down_proj"));

        let matrix = source.matrix(name).expect("a packed matrix");
        assert_eq!((matrix.rows, matrix.columns), (36, 45));
        assert_eq!(
            source.values(),
            if values == "int8" { PackedValues::Int8 } else { PackedValues::Exact }
        );
        let (mut compact, mut some) = (CompactRows::default(), vec![0; 5 * matrix.row_bytes()]);
        compact.read(source.base(), matrix, 31..36).expect("a good matrix");
        assert_eq!(compact.offsets.len(), 6);
        assert_eq!(compact.values.len(), compact.offsets[5] * matrix.value_bytes());
        compact.expand(matrix, &mut some);
        assert_eq!(some, whole[31 * matrix.row_bytes()..]);
        assert!(compact.read(source.base(), matrix, 31..37).is_err());
        assert!(source.matrix("model.norm.weight").is_none());
    }
}

#[test]
fn rounded_values_are_near_and_zeros_stay() {
    for dtype in [StoredDtype::Bf16, StoredDtype::F16, StoredDtype::F32] {
        let place = Place::with(&RandomCheckpoint { dtype, ..RandomCheckpoint::default() });
        keep_half(&place.path("m"));
        let report = pack(&place, "m --save p --values int8");
        assert_eq!((report.format.as_str(), report.values.as_str()), ("prune-bitmask", "int8"));
        assert_eq!(report.totals.matrices, 14);
        let config = json_of(&place.path("p/config.json"));
        assert_eq!(config["quantization_config"]["format"], json!("prune-bitmask"));
        // transformers refuses a folder without a method; of an unknown one it only warns.
        assert!(config["quantization_config"].get("quant_method").is_none());
        let source = packed_source(&place.path("p")).expect("a packed folder");
        let wide = |bytes: &[u8]| {
            let mut values = vec![0.0; bytes.len() / dtype.bytes()];
            prune::linalg::convert::widen(dtype, bytes, &mut values);
            values
        };
        let found = tensors(&source, source.tensors().cloned().collect());
        let mut differ = 0;
        for (name, before) in dense_tensors(&place.path("m")) {
            let after = &found[&name];
            if !name.contains("_proj.weight") {
                assert!(before == *after, "{name}");
                continue;
            }
            let (before, after) = (wide(&before), wide(after));
            let largest = before.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            for (before, after) in before.iter().zip(&after) {
                // Half a step of the largest group, and the rounding to bf16.
                let most = 0.5 * largest / 127.0 * 1.01 + before.abs() / 256.0;
                assert!((before - after).abs() <= most, "{name}: {before} {after}");
                assert!(*before != 0.0 || *after == 0.0);
                differ += usize::from(before != after);
            }
        }
        assert!(differ > 1000);
        // The dense checkpoint of the rounded model.
        let ran = place.run("unpack p --save back");
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert!(ran.stdout.contains("their values are rounded to 8 bits"), "{}", ran.stdout);
        assert!(dense_tensors(&place.path("back")) == found);
        let (mut back, mut original) = (outcome(&place.path("back")), outcome(&place.path("m")));
        for files in [&mut back, &mut original] {
            files.remove("model.safetensors");
        }
        assert_same(&back, &original, "sidecars");
    }
}

#[test]
fn a_matrix_out_of_reach_of_scales_stays_dense_and_nan_is_refused() {
    let place = Place::new();
    keep_half(&place.path("m"));
    change(&place.path("m"), |name, _, _, bytes| {
        for weight in bytes.as_chunks_mut::<4>().0 {
            let factor = match name {
                "model.layers.0.self_attn.q_proj.weight" => 1e-9,
                "model.layers.1.self_attn.k_proj.weight" => 1e9,
                _ => 1.0,
            };
            *weight = (f32::from_le_bytes(*weight) * factor).to_le_bytes();
        }
    });
    let report = pack(&place, "m --save p --values int8");
    let dense: Vec<&str> = report.dense.iter().map(|matrix| matrix.tensor.as_str()).collect();
    assert_eq!(
        dense,
        ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"]
    );
    assert!(report.dense[0].why.contains("out of reach of f16 scales"), "{}", report.dense[0].why);
    change(&place.path("m"), |name, _, _, bytes| {
        if name.contains("layers.1.mlp.up_proj") {
            bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
        }
    });
    let ran = place.run("pack m --save nan --values int8");
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("element 2 is NaN"), "{}", ran.stderr);
    assert!(!place.path("nan/config.json").exists());
}

#[test]
fn results_do_not_depend_on_threads_or_memory() {
    let place = Place::with(&RandomCheckpoint { dtype: StoredDtype::F16, ..odd_shape() });
    keep_half(&place.path("m"));
    for values in ["exact", "int8"] {
        pack(&place, &format!("m --save one-{values} --threads 1 --values {values}"));
        pack(
            &place,
            &format!("m --save two-{values} --threads 3 --max-memory 17MiB --values {values}"),
        );
        let [one, two] =
            ["one", "two"].map(|name| outcome(&place.path(&format!("{name}-{values}"))));
        assert_same(&one, &two, values);
    }
}
