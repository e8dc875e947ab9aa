//! `prune quantize`, and commands that read what it writes.

mod interrupted;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prune::checkpoint::{Checkpoint, TensorEntry, WeightSource};
use prune::linalg::StoredDtype;
use prune::run::{Inspection, QuantizationReport};
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use crate::support::{Place, edit_json, refuses_command, rewrite, shared};

type Tensors = BTreeMap<String, (TensorEntry, Vec<u8>)>;

fn tensors(folder: &Path) -> Tensors {
    let checkpoint = Checkpoint::open(folder).expect("a file that can be read and written");
    let read = |entry: &TensorEntry| {
        let mut bytes = vec![0; entry.bytes as usize];
        checkpoint.read(entry, 0, &mut bytes).expect("a file that can be read and written");
        (entry.name.clone(), (entry.clone(), bytes))
    };
    checkpoint.tensors().map(read).collect()
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a file that can be read and written");
    for file in fs::read_dir(from).expect("a file that can be read and written") {
        let file = file.expect("a file that can be read and written");
        fs::copy(file.path(), to.join(file.file_name()))
            .expect("a file that can be read and written");
    }
}

/// `m` is stories260k with the weights of a golden mask set to 0.
fn pruned_stories(shared: &Path) -> Place {
    let place = Place::empty();
    copy_folder(&shared.join("models/stories260k"), &place.path("m"));
    let masks = "goldens/stories260k-on-stories";
    let masks =
        Checkpoint::open_file(&shared.join(masks), "wanda-0.6-unstructured.masks.safetensors");
    let masks = masks.expect("a file that can be read and written");
    let bits = |name: &str| {
        let entry = masks.entry(name).or_else(|| masks.entry(name.strip_suffix(".weight")?))?;
        let mut bits = vec![0; entry.bytes as usize];
        masks.read(entry, 0, &mut bits).expect("a file that can be read and written");
        Some(bits)
    };
    let mut matrices = 0;
    rewrite(&place, |name, _, bytes| {
        if let Some(bits) = bits(name) {
            matrices += 1;
            for (at, weight) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                if bits[at / 8] >> (at % 8) & 1 == 1 {
                    *weight = [0; 4];
                }
            }
        }
        true
    });
    assert_eq!(matrices, 35);
    place
}

fn quantized(place: &Place, format: &str, from: &str, to: &str) -> QuantizationReport {
    let ran = place.run(&format!("quantize --to {format} {from} --save {to} --json"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("a file that can be read and written")
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(
        &fs::read(folder.join("config.json")).expect("a file that can be read and written"),
    )
    .expect("JSON")
}

#[test]
#[ignore = "the codes of some scales differ from those of bitsandbytes (docs/quantize.md)"]
fn every_tensor_is_that_which_transformers_wrote() {
    let Some(shared) = shared() else { return };
    let place = pruned_stories(&shared);
    let report = quantized(&place, "nf4-double", "m", "q");
    let golden = shared.join("goldens/recovery/stories260k-wanda60-bnb4");
    let (found, expected) = (tensors(&place.path("q")), tensors(&golden));
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
    for (name, (entry, bytes)) in &expected {
        let (ours, our_bytes) = &found[name];
        assert_eq!((ours.dtype, &ours.shape), (entry.dtype, &entry.shape), "{name}");
        assert!(our_bytes == bytes, "{name}");
    }
    let [ours, theirs] = [&place.path("q"), &golden].map(|folder| config(folder));
    assert_eq!(ours["quantization_config"], theirs["quantization_config"]);

    assert_eq!(report.totals.matrices, 35);
    assert!(
        report.totals.zeros_after >= report.totals.zeros_before && report.totals.zeros_before > 0
    );
    assert!(report.bytes_after < report.bytes_before);
    assert!(place.path("q/tokenizer.json").is_file());
    assert!(place.names("q").contains("SHA256SUMS"));
}

/// The perplexity that `prune eval` prints, with all its digits.
fn perplexity(place: &Place, model: &str, texts: &str) -> f64 {
    let ran = place.run(&format!("eval {model} {texts} --json"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let record: Value =
        serde_json::from_str(&ran.stdout).expect("a file that can be read and written");
    record["perplexity"]["dense"]["perplexity"]
        .as_f64()
        .expect("a file that can be read and written")
}

#[test]
fn the_perplexity_is_that_of_the_reference() {
    let Some(shared) = shared() else { return };
    let place = Place::empty();
    copy_folder(&shared.join("models/stories260k"), &place.path("q"));
    copy_folder(&shared.join("goldens/recovery/stories260k-wanda60-bnb4"), &place.path("q"));
    let text = shared.join("data/stories/stories.test.txt");
    let texts = format!("--eval-dataset wikitext2:{} --seqlen 512 --dtype f32", text.display());
    let record = fs::read(shared.join("goldens/recovery/curve.lora-nf4.json"))
        .expect("a file that can be read and written");
    let record: Value =
        serde_json::from_slice(&record).expect("a file that can be read and written");
    let expected = record["perplexity_base"].as_f64().expect("a file that can be read and written");
    let found = perplexity(&place, "q", &texts);
    assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
}

/// Writes the model that `q` is when its matrices are restored, as `d`.
fn dequantized(place: &Place) {
    let base = std::sync::Arc::new(
        Checkpoint::open(&place.path("q")).expect("a file that can be read and written"),
    );
    let source =
        prune::quantized::QuantizedSource::open(base).expect("a file that can be read and written");
    copy_folder(&place.path("m"), &place.path("d"));
    rewrite(place, |name, _, bytes| {
        let entry = source.entry(name).expect("a file that can be read and written");
        assert_eq!(entry.bytes as usize, bytes.len());
        source.read(entry, 0, bytes).expect("a file that can be read and written");
        true
    });
    fs::rename(place.path("m/model.safetensors"), place.path("d/model.safetensors"))
        .expect("a file that can be read and written");
}

#[test]
fn a_four_bit_model_computes_as_its_dequantised_one() {
    for (dtype, format) in [
        (StoredDtype::F32, "nf4"),
        (StoredDtype::Bf16, "nf4-double"),
        (StoredDtype::F16, "nf4-double"),
    ] {
        let place = Place::with(&RandomCheckpoint { dtype, ..RandomCheckpoint::default() });
        quantized(&place, format, "m", "q");
        dequantized(&place);
        let texts = "--eval-dataset test.txt --seqlen 64 --eval-windows 5";
        let [q, d] = ["q", "d"].map(|model| perplexity(&place, model, texts));
        assert_eq!(q.to_bits(), d.to_bits(), "{dtype:?} {format}");
        let [q, d] = ["q", "d"].map(|model| {
            let ran = place
                .run(&format!("generate {model} --prompt \"a b\" --max-tokens 8 --ignore-eos"));
            assert_eq!(ran.code, 0, "{}", ran.stderr);
            ran.stdout
        });
        assert_eq!(q, d);
        let [q, d] = ["q", "d"].map(|model| {
            let ran = place.run(&format!("inspect {model} --json"));
            assert_eq!(ran.code, 0, "{}", ran.stderr);
            serde_json::from_str::<Inspection>(&ran.stdout)
                .expect("a file that can be read and written")
        });
        assert_eq!(q.layers, d.layers);
        assert_eq!(q.parameters, d.parameters);
        assert!(q.bytes < d.bytes);
    }
}

#[test]
fn reads_may_begin_and_end_anywhere() {
    let place =
        Place::with(&RandomCheckpoint { dtype: StoredDtype::Bf16, ..RandomCheckpoint::default() });
    quantized(&place, "nf4-double", "m", "q");
    let base = std::sync::Arc::new(
        Checkpoint::open(&place.path("q")).expect("a file that can be read and written"),
    );
    let source =
        prune::quantized::QuantizedSource::open(base).expect("a file that can be read and written");
    let entry = source
        .entry("model.layers.0.mlp.down_proj.weight")
        .expect("a file that can be read and written");
    let mut whole = vec![0; entry.bytes as usize];
    source.read(entry, 0, &mut whole).expect("a file that can be read and written");
    let length = whole.len();
    for (start, end) in
        [(0, 0), (0, 1), (1, 2), (3, 130), (127, 129), (255, 4001), (length - 1, length)]
    {
        let mut piece = vec![0; end - start];
        source.read(entry, start as u64, &mut piece).expect("a file that can be read and written");
        assert_eq!(piece, whole[start..end], "{start}..{end}");
    }
    let beyond = source.read(entry, length as u64, &mut [0]);
    assert!(beyond.unwrap_err().to_string().contains("down_proj"));
}

#[test]
fn results_do_not_depend_on_threads_and_pruned_weights_stay_zero() {
    let place = Place::new();
    place.prune("--model m --sparsity-ratio 0.5 --eval none --save out");
    let one = quantized(&place, "nf4", "out/model --threads 1", "one");
    let two = quantized(&place, "nf4", "out/model --threads 3", "two");
    assert_eq!(
        (one.totals.zeros_before, one.totals.zeros_after),
        (two.totals.zeros_before, two.totals.zeros_after)
    );
    assert!(
        one.totals.zeros_after >= one.totals.zeros_before
            && 2 * one.totals.zeros_before >= one.totals.weights - 64
    );
    let [one, two] = ["one", "two"].map(|folder| {
        fs::read(place.path(folder).join("model.safetensors"))
            .expect("a file that can be read and written")
    });
    assert!(one == two);
    let inspected = place.run("inspect one --json");
    let inspection: Inspection =
        serde_json::from_str(&inspected.stdout).expect("a file that can be read and written");
    assert!(inspection.sparsity.ratio >= 0.49, "{}", inspection.sparsity.ratio);
}

#[test]
fn what_cannot_be_quantised_or_pruned_is_refused() {
    let place = Place::new();
    quantized(&place, "nf4", "m", "q");
    refuses_command(
        &place,
        "quantize --to nf4 q --save again",
        1,
        "error: `q` is quantised already",
        "hint: name the unquantised checkpoint: prune quantize --to nf4-double DENSE --save OUT",
    );
    refuses_command(
        &place,
        "--model q --sparsity-ratio 0.5 --dataset train.txt --eval none --save out",
        1,
        "error: `q` is quantised to 4 bits, and its weights cannot be pruned",
        "hint: prune the unquantised checkpoint, then quantise the result: prune quantize --to nf4-double OUT/model --save OUT-4bit",
    );
    refuses_command(
        &place,
        "inspect q --against m",
        1,
        "error: `q` is quantised to 4 bits",
        "hint: leave --against out, or compare the checkpoint that was quantised",
    );
    // An output folder with a model in it, until --force.
    let again = place.run("quantize --to nf4-double m --save q");
    assert_eq!(again.code, 1);
    assert!(again.stderr.contains("--force"), "{}", again.stderr);
    let ran = place.run("quantize --to nf4-double m --save q --force");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let quantization = &config(&place.path("q"))["quantization_config"];
    assert_eq!(quantization["bnb_4bit_use_double_quant"], json!(true));
    // The source's own folder.
    let ran = place.run("quantize --to nf4 m --save m --force");
    assert_eq!(ran.code, 1);
    // Another quantisation, and weights that are not finite.
    edit_json(&place.path("q/config.json"), |config| {
        config["quantization_config"] = json!({"quant_method": "gptq"});
    });
    let ran = place.run("inspect q");
    assert!(ran.stderr.contains("quantised (gptq)"), "{}", ran.stderr);
    rewrite(&place, |name, _, bytes| {
        if name.contains("layers.1.mlp.up_proj") {
            bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        true
    });
    let ran = place.run("quantize --to nf4 m --save nan");
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("element 2 is NaN"), "{}", ran.stderr);
    assert!(!place.path("nan/config.json").exists());
}

#[test]
fn damaged_parts_are_named() {
    let place = Place::new();
    quantized(&place, "nf4-double", "m", "q");
    fs::remove_dir_all(place.path("m")).expect("a file that can be read and written");
    let q = "model.layers.1.self_attn.q_proj.weight";
    for (end, change) in [
        (".absmax", None),
        (".quant_map", Some(0)),
        (".nested_quant_map", Some(7)),
        (".quant_state.bitsandbytes__nf4", Some(0)),
    ] {
        copy_folder(&place.path("q"), &place.path("m"));
        rewrite(&place, |name, _, bytes| {
            if name == format!("{q}{end}") {
                match change {
                    None => return false,
                    Some(at) => bytes[at] ^= 0xff,
                }
            }
            true
        });
        let ran = place.run("inspect m");
        assert_eq!(ran.code, 1);
        let expected = format!("error: the 4-bit tensor `{q}` is broken");
        assert!(ran.stderr.contains(&expected), "{end}: {}", ran.stderr);
    }
}
