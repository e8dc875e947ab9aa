//! `prune inspect` and `--save-masks`: reports of the real binary about its output and about changed files.

mod masks;

use std::fs;
use std::path::Path;

use prune::checkpoint::encode_header;
use prune::linalg::StoredDtype;
use prune::run::Inspection;
use prune::synthetic::RandomCheckpoint;
use safetensors::tensor::TensorInfo;
use safetensors::{Dtype, SafeTensors};

use crate::support::{Place, Ran, assert_snapshot, edit_json};

/// The default checkpoint as `m`, pruned by magnitude into `out`.
fn pruned(more: &str) -> Place {
    let place = Place::new();
    prune_to(&place, "out", more);
    place
}

fn prune_to(place: &Place, run: &str, more: &str) -> Ran {
    let arguments = format!("--model m --prune-method magnitude --eval none --save {run} {more}");
    let ran = place.run(&arguments);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    ran
}

fn inspection(place: &Place, arguments: &str, code: i32) -> Inspection {
    let ran = place.run(&format!("inspect {arguments} --json"));
    assert_eq!(ran.code, code, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("one JSON object")
}

/// One tensor of a file.
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// Reads the tensors of `model.safetensors` in `folder`, changes them, and writes them again.
fn rewrite(folder: &Path, change: impl FnOnce(&mut Vec<Tensor>)) {
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).expect("the model was written");
    let mut tensors: Vec<Tensor> = SafeTensors::deserialize(&bytes)
        .expect("safetensors")
        .iter()
        .map(|(name, view)| Tensor {
            name: name.to_owned(),
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            data: view.data().to_vec(),
        })
        .collect();
    change(&mut tensors);
    let mut end = 0;
    let infos: Vec<(String, TensorInfo)> = tensors
        .iter()
        .map(|tensor| {
            let start = end;
            end += tensor.data.len();
            let info = TensorInfo {
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                data_offsets: (start, end),
            };
            (tensor.name.clone(), info)
        })
        .collect();
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let mut bytes = encode_header(&metadata, &infos);
    for tensor in &tensors {
        bytes.extend_from_slice(&tensor.data);
    }
    fs::write(path, bytes).expect("the file can be replaced");
}

fn named<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor of that name")
}

/// The flat index of the first f32 that is not zero at or after `from`.
fn kept_from(tensor: &Tensor, from: usize) -> usize {
    let (words, _) = tensor.data.as_chunks::<4>();
    from + words[from..].iter().position(|word| *word != [0; 4]).expect("a kept weight")
}

#[test]
fn a_2_of_4_model_shows_its_pattern_and_is_a_pruned_copy() {
    let place = pruned("--sparsity-type 2:4");
    let ran = place.run("inspect out/model --against m");
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    // The speed is this machine's.
    let settled = ran.stdout.lines().map(|line| match line.split_once("generate`: ") {
        Some((programs, _)) => format!("{programs}generate`: …\n"),
        None => format!("{line}\n"),
    });
    assert_snapshot("inspect-2of4.txt", &settled.collect::<String>());
    let fits = ran.stdout.lines().all(|line| line.chars().count() <= 80);
    assert!(fits, "{}", ran.stdout);

    let found = inspection(&place, "out/model --against m", 0);
    assert_eq!(found.patterns.len(), 1);
    for matrix in found.layers.iter().flat_map(|layer| &layer.matrices) {
        assert_eq!(matrix.pattern.as_deref(), Some("2:4"), "{}", matrix.name);
        assert_eq!(matrix.changed, Some(0));
        // Two of every four make four of every eight, and so on; 2:4 says nothing of pairs.
        let groups: Vec<(u32, usize)> =
            matrix.groups.iter().map(|group| (group.n, group.m)).collect();
        let columns = matrix.shape[1];
        let implied = [(2, 4), (4, 8), (8, 16), (16, 32)];
        let expected: Vec<_> =
            implied.into_iter().filter(|(_, m)| columns.is_multiple_of(*m)).collect();
        assert_eq!(groups, expected, "{}", matrix.name);
    }
    let against = found.against.unwrap();
    assert!(against.is_pruned_copy && against.kept_identical);
    assert_eq!((against.kept, against.changed), (46080, 0));
    // Embedding, head, last norm, two norms per layer.
    assert_eq!(against.untouched, 7);
}

#[test]
fn wanda_and_magnitude_at_half_show_what_run_json_says() {
    let place = Place::new();
    for method in ["wanda", "magnitude"] {
        place.prune(&format!(
            "--model m --prune-method {method} --sparsity-ratio 0.5 --eval none --save {method}"
        ));
        let folder = format!("{method}/model");
        let found = inspection(&place, &format!("{folder} --against m"), 0);
        let manifest = place.manifest(method);
        let sparsity = manifest.sparsity.unwrap();
        assert_eq!(
            (found.sparsity.zeros, found.sparsity.weights),
            (sparsity.zeros, sparsity.weights)
        );
        for (layer, reported) in found.layers.iter().zip(&manifest.layers) {
            assert_eq!(layer.sparsity.ratio, reported.sparsity);
            for (matrix, reported) in layer.matrices.iter().zip(&reported.matrices) {
                assert_eq!(matrix.name, reported.name);
                assert_eq!(matrix.shape, reported.shape);
                assert_eq!(matrix.sparsity.zeros, reported.zeros);
                assert_eq!((matrix.dtype.as_str(), matrix.non_finite), ("F32", 0));
            }
        }
        assert_eq!(found.patterns[0].pattern, None, "unstructured: {method}");
        assert_eq!(found.parameters, manifest.model.parameters);
        assert_eq!(found.bytes, manifest.model.bytes);
        assert!(found.against.unwrap().is_pruned_copy);
    }
}

#[test]
fn one_changed_byte_is_named_with_row_and_column_and_the_exit_code_is_1() {
    let place = pruned("--sparsity-ratio 0.5");
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut place_of_change = (0, 0);
    rewrite(&place.path("out/model"), |tensors| {
        let tensor = named(tensors, name);
        let at = kept_from(tensor, 5 * 64 + 7);
        place_of_change = (at / 64, at % 64);
        // The lowest bit of the mantissa: not to be seen in few digits.
        tensor.data[4 * at] ^= 1;
    });
    let ran = place.run("inspect out/model --against m");
    assert_eq!(ran.code, 1);
    let (row, column) = place_of_change;
    let named = format!("{name}, row {row}, column {column}");
    let sparsity = place.manifest("out").sparsity.unwrap();
    let kept = sparsity.weights - sparsity.zeros;
    for text in [&ran.stdout, &ran.stderr] {
        let count = format!("1 of {kept} kept weights differ from m");
        assert!(text.contains(&count), "{text}");
        assert!(text.contains(&named), "{text}");
    }
    assert!(
        ran.stderr.starts_with("error: `out/model` is not a pruned copy of `m`\n"),
        "{}",
        ran.stderr
    );
    assert!(ran.stdout.ends_with("verdict: not a pruned copy of m\n"));
    assert!(!ran.stdout.contains("every kept weight"));

    let found = inspection(&place, "out/model --against m", 1);
    let against = found.against.unwrap();
    assert!(!against.is_pruned_copy && !against.kept_identical);
    let first = against.first_changed.unwrap();
    assert_eq!((first.tensor.as_str(), first.row, first.column), (name, row, column));
    let (dense, found) = (first.dense.unwrap(), first.found.unwrap());
    assert_eq!(dense.to_bits() ^ found.to_bits(), 1);
    // Without DENSE there is nothing wrong with it.
    inspection(&place, "out/model", 0);

    // The record of a run whose method changes weights explains the difference.
    edit_json(&place.path("out/run.json"), |record| {
        record["pruning"]["changes_weights"] = true.into();
    });
    let ran = place.run("inspect out/model --against m");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let verdict = "verdict: m pruned by magnitude, which changes the weights it keeps\n";
    assert!(ran.stdout.ends_with(verdict), "{}", ran.stdout);
    rewrite(&place.path("out/model"), |tensors| {
        let norm = tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight");
        norm.unwrap().data[0] ^= 1;
    });
    inspection(&place, "out/model --against m", 1);
}

#[test]
fn a_tensor_that_should_be_untouched_a_missing_one_and_another_dtype_are_named() {
    let norm = "model.layers.0.input_layernorm.weight";
    let linear = "model.layers.1.self_attn.k_proj.weight";
    let says = |change: &dyn Fn(&mut Vec<Tensor>), expected: &[&str]| {
        let place = pruned("--sparsity-ratio 0.5");
        rewrite(&place.path("out/model"), |tensors| change(tensors));
        let ran = place.run("inspect out/model --against m");
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        for text in expected {
            assert!(ran.stderr.contains(text), "{}", ran.stderr);
            assert!(ran.stdout.contains(text), "{}", ran.stdout);
        }
        ran
    };
    says(
        &|tensors| named(tensors, norm).data[0] ^= 1,
        &["other tensors that differ: 1 of 7", norm],
    );
    let ran = says(
        &|tensors| tensors.retain(|tensor| tensor.name != linear),
        &["tensors missing here: 1", linear],
    );
    let row = ran.stdout.lines().find(|line| line.starts_with("layer 1"));
    assert!(row.is_some_and(|row| row.contains("  -  ")), "{row:?}");
    assert!(ran.stdout.contains(&format!("{linear}: missing")));
    says(
        &|tensors| {
            let tensor = named(tensors, linear);
            tensor.dtype = Dtype::BF16;
            // The upper half of every f32.
            let (words, _) = tensor.data.as_chunks::<4>();
            tensor.data = words.iter().flat_map(|word| [word[2], word[3]]).collect();
        },
        &["another dtype or shape, not compared: 1", "F32 [32, 64] there, BF16 [32, 64] here"],
    );
    says(
        &|tensors| {
            let mut more = Vec::new();
            more.extend_from_slice(&named(tensors, norm).data);
            tensors.push(Tensor {
                name: "extra".into(),
                dtype: Dtype::F32,
                shape: vec![64],
                data: more,
            });
        },
        &["tensors not in m: 1", "extra"],
    );
}

#[test]
fn a_dense_model_of_another_shape_is_compared_with_nothing() {
    let place = pruned("--sparsity-ratio 0.5");
    let wide = RandomCheckpoint { hidden_size: 96, ..RandomCheckpoint::default() };
    place.checkpoint("wide", &wide);
    let ran = place.run("inspect out/model --against wide");
    assert_eq!(ran.code, 1);
    for text in [
        // Every shape has the width in it.
        "tensors of another dtype or shape, not compared: 21",
        "F32 [320, 96] there, F32 [320, 64] here",
        "and 18 more",
    ] {
        assert!(ran.stderr.contains(text), "{}", ran.stderr);
    }
    assert!(!ran.stdout.contains("every"), "{}", ran.stdout);
}

#[test]
fn a_model_that_lost_a_matrix_fails_without_a_dense_one_too() {
    let place = Place::new();
    let linear = "model.layers.0.mlp.gate_proj.weight";
    rewrite(&place.path("m"), |tensors| {
        tensors.retain(|tensor| tensor.name != linear);
        named(tensors, "model.layers.1.mlp.gate_proj.weight").shape = vec![64, 176];
        named(tensors, "model.layers.1.mlp.up_proj.weight").data[..4]
            .copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let ran = place.run("inspect m");
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains(&format!("{linear}: missing")), "{}", ran.stderr);
    let shape = "model.layers.1.mlp.gate_proj.weight: shape [64, 176], [176, 64] expected";
    assert!(ran.stderr.contains(shape), "{}", ran.stderr);
    assert!(ran.stdout.contains("not finite  1 values"), "{}", ran.stdout);
}

#[test]
fn a_dense_model_has_nothing_pruned_in_every_dtype_and_any_number_of_files() {
    for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
        let place = Place::with(&RandomCheckpoint {
            dtype,
            attention_bias: true,
            max_shard: prune::bytes::ByteSize(100_000),
            ..RandomCheckpoint::default()
        });
        let found = inspection(&place, "m --against m", 0);
        assert!(found.shards.len() > 1, "{dtype:?}");
        assert_eq!(found.dtypes.len(), 1);
        assert_eq!(found.dtypes[0].dtype.to_lowercase(), dtype.name(), "as safetensors names it");
        let against = found.against.unwrap();
        assert!(against.is_pruned_copy);
        assert_eq!(against.zeros_before, found.sparsity.zeros);
        let kinds: Vec<&str> = found.other.iter().map(|kind| kind.kind.as_str()).collect();
        assert_eq!(kinds, ["embedding", "head", "norms", "biases"]);
        let ran = place.run("inspect m --against m");
        let verdict = "verdict: the weights of m; nothing was pruned\n";
        assert!(ran.stdout.ends_with(verdict), "{}", ran.stdout);
    }
}

#[test]
fn what_is_no_checkpoint_is_refused_with_the_way_out() {
    let place = pruned("--sparsity-ratio 0.5");
    fs::create_dir(place.path("bare")).unwrap();
    fs::copy(place.path("m/model.safetensors"), place.path("bare/model.safetensors")).unwrap();
    for (arguments, first, hint) in [
        (
            "nowhere",
            "error: there is no folder `nowhere`",
            "hint: name a checkpoint folder, like out/7b/model",
        ),
        ("m --against bar", "error: there is no folder `bar`", "hint: did you mean bare?"),
        (
            "m/config.json",
            "error: `m/config.json` is a file, not a checkpoint folder",
            "hint: pass its folder: `m`",
        ),
        (
            "bare",
            "error: there is no config.json in `bare`",
            "hint: copy it from the checkpoint these weights belong to",
        ),
        ("out", "error: `out` is a run folder", "hint: name its checkpoint: out/model"),
        ("m --against out", "error: `out` is a run folder", "hint: name its checkpoint: out/model"),
    ] {
        let ran = place.run(&format!("inspect {arguments}"));
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{}", ran.stderr);
        assert_eq!(ran.stderr.lines().next(), Some(first));
        let found = ran.stderr.lines().find(|line| line.starts_with("hint: "));
        assert_eq!(found.unwrap_or(""), hint);
    }
    assert_eq!(place.run("inspect").code, 2, "a folder is needed");
}
