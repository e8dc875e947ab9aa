//! Damaged files of every kind: each is read or refused quickly, without a panic.
//!
//! `fuzz/` does the same for longer (docs/dev/robustness.md).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::data::{self, Draw, Role, Source, TextCache, Tokenizer};
use prune::merging::recipe::{BaseModel, Declaration, Parameter, Recipe, WhenMissing};
use prune::model::{DecoderLayer, Head, ModelConfig};
use prune::pipeline::LayerRatios;
use prune::placement::Device;
use prune::placement::device_map::Prefixes;
use prune::report::comparison::NamedRun;
use prune::report::page::Report;
use prune::run::{Manifest, Silent};
use prune::synthetic::RandomCheckpoint;
use tempfile::TempDir;

use super::mutators::spoil;
use super::{documents, parquet_bytes};
use crate::support::Place;

/// Good files, made once.
struct Good {
    folder: TempDir,
    sharded: TempDir,
    /// The name of one of its files.
    shard: String,
    tokenizer: Tokenizer,
    /// The record of a run.
    record: Vec<u8>,
}

static GOOD: LazyLock<Good> = LazyLock::new(|| {
    let write = |max_shard| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let shape = RandomCheckpoint {
            hidden_size: 8,
            intermediate_size: 16,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            max_shard,
            ..RandomCheckpoint::default()
        };
        let place = folder.path().join("m");
        shape.write(&place, &Silent).expect("a Llama's shape");
        folder
    };
    let folder = write(ByteSize(1 << 30));
    let tokenizer = Tokenizer::load(&folder.path().join("m")).expect("a tokenizer");
    let place = Place::new();
    place.prune("--model m --sparsity-ratio 0.5 --eval both --save out");
    let sharded = write(ByteSize(4 << 10));
    let names = fs::read_dir(sharded.path().join("m")).expect("written above");
    let mut names =
        names.map(|entry| entry.expect("written above").file_name().to_string_lossy().into_owned());
    Good {
        shard: names.find(|name| name.contains("-00002-of-")).expect("more than one shard"),
        record: fs::read(place.path("out/run.json")).expect("a finished run"),
        folder,
        sharded,
        tokenizer,
    }
});

/// A copy of a checkpoint whose file `name` is spoilt.
fn with_spoilt(checkpoint: &TempDir, name: &str, seed: u64) -> TempDir {
    let copy = tempfile::tempdir().expect("a temporary folder");
    assert!(checkpoint.path().join("m").join(name).exists(), "{name}");
    for entry in fs::read_dir(checkpoint.path().join("m")).expect("written above") {
        let path = entry.expect("written above").path();
        let to = copy.path().join(path.file_name().expect("a file's name"));
        if to.ends_with(name) {
            fs::write(to, spoilt(&fs::read(path).expect("written above"), seed))
        } else {
            fs::hard_link(&path, &to).or_else(|_| fs::copy(&path, &to).map(drop))
        }
        .expect("a new file");
    }
    copy
}

fn spoilt(good: &[u8], seed: u64) -> Vec<u8> {
    let mut bytes = good.to_vec();
    spoil(&mut bytes, seed);
    bytes
}

/// Opens a folder as a run does, down to the shapes; where that succeeds, every tensor can be read.
fn open(folder: &Path) -> Result<(), TestCaseError> {
    let Ok(config) = ModelConfig::load(folder) else {
        return Ok(());
    };
    let Ok(checkpoint) = Checkpoint::open(folder) else {
        return Ok(());
    };
    for layer in 0..config.num_hidden_layers {
        if DecoderLayer::check(&checkpoint, &config, layer).is_err() {
            break;
        }
    }
    let _ = Head::check(&checkpoint, &config);
    let _ = prune::eval::inspect(
        &prune::eval::Inspected::whole(&checkpoint),
        &config,
        Some(&checkpoint),
        &Silent,
    );
    for entry in checkpoint.tensors() {
        prop_assert!(entry.bytes <= 1 << 20, "{entry:?}");
        let mut bytes = vec![0; entry.bytes as usize];
        prop_assert!(checkpoint.read(entry, 0, &mut bytes).is_ok());
    }
    Ok(())
}

/// A spoilt file in a folder of its own.
fn file(name: &str, good: &[u8], seed: u64) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    fs::write(&path, spoilt(good, seed)).expect("a new file");
    (folder, path)
}

/// Reads a text in both roles, as a run does.
fn read_text(spec: &str) {
    let spec = spec.parse().expect("a path");
    let (tokenizer, cache) = (&GOOD.tokenizer, TextCache::disabled());
    let draw = Draw { nsamples: 2, seqlen: 16, seed: 0 };
    if let Ok(source) = Source::find(&spec, Role::Calibration) {
        let _ = source.check();
        let _ = data::calibration(&source, tokenizer, draw, &cache, &Silent);
    }
    if let Ok(source) = Source::find(&spec, Role::Evaluation) {
        let _ = source.check();
        let _ = source.evaluation(tokenizer, 16, None, &cache, &Silent);
    }
}

fn gzipped(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    std::io::Write::write_all(&mut encoder, text).expect("memory");
    encoder.finish().expect("memory")
}

/// As many cases, or as many as `PROPTEST_CASES` asks for.
fn cases(cases: u32) -> ProptestConfig {
    let asked = std::env::var_os("PROPTEST_CASES").map(|_| ProptestConfig::default().cases);
    ProptestConfig {
        cases: asked.unwrap_or(cases),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn spoilt_headers_configs_and_indexes_are_opened_or_refused(seed: u64) {
        for name in ["model.safetensors", "config.json"] {
            open(with_spoilt(&GOOD.folder, name, seed).path())?;
        }
        for name in ["model.safetensors.index.json", &GOOD.shard] {
            open(with_spoilt(&GOOD.sharded, name, seed).path())?;
        }
    }

    #[test]
    fn spoilt_device_maps_and_ratios_are_read_or_refused(seed: u64) {
        let map = br#"{"model.layers.0": 0, "model.layers.1": "cpu", "model.norm": "disk", "": "cuda:1"}"#;
        let (_folder, path) = file("map.json", map, seed);
        if let Ok(map) = Prefixes::load(&path) {
            let _ = map.gpus().count();
            for layer in [0, 1, 17, usize::MAX] {
                let _ = map.layer(layer, Device::Cpu);
            }
        }
        for ratios in [&br#"[0.5, 0.25, 0.125]"#[..], br#"{"0": 0.3, "31": 0.7}"#] {
            let (_folder, path) = file("ratios.json", ratios, seed);
            let _ = LayerRatios::load(&path);
        }
    }
}

/// A recipe with most of what YAML and mergekit know.
const RECIPE: &str = "merge_method: ties
base_model: base
slices:
  - sources:
      - {model: base, layer_range: [0, 2]}
      - model: a+lora@v1
        layer_range: [2, 4]
        parameters: &p {weight: 1e-3, density: [0.9, 0.3]}
  - sources:
      - {model: base, layer_range: [2, 5]}
      - model: {model: {path: b@c, revision: d}}
        layer_range: [0, 3]
        parameters:
          <<: *p
          weight: [{filter: mlp, value: [0.2, 1]}, {filter: '*', value: 0.5}]
parameters: {normalize: off, lambda: 1.5}
dtype: bfloat16
tokenizer:
  source: union
  pad_to_multiple_of: 8
  tokens:
    \"</s>\": {source: {kind: model_token, model: a, token_id: 2}}
chat_template: |
  {{ messages }}
";

/// The method of [`RECIPE`].
const TIES: &[Declaration] = &[Declaration {
    name: "ties",
    base_model: BaseModel::Required,
    models: 1..=usize::MAX,
    per_model: &[
        (Parameter::Weight, WhenMissing::Required),
        (Parameter::Density, WhenMissing::Is(1.0)),
    ],
    shared: &[
        (Parameter::Normalize, WhenMissing::Is(1.0)),
        (Parameter::Lambda, WhenMissing::Is(1.0)),
    ],
}];

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn spoilt_recipes_are_refused_or_written_as_they_were_read(seed: u64) {
        let text = spoilt(RECIPE.as_bytes(), seed);
        let text = String::from_utf8_lossy(&text);
        if let Ok(recipe) = Recipe::from_yaml(&text, "recipe.yml", TIES) {
            let written = recipe.to_yaml(str::to_string);
            let again = Recipe::from_yaml(&written, "written.yml", TIES);
            prop_assert_eq!(again.map_err(|error| error.to_string()), Ok(recipe), "{}", written);
        }
    }
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn spoilt_records_are_drawn_or_refused(seed: u64) {
        let record = spoilt(&GOOD.record, seed);
        if let Ok(manifest) = serde_json::from_slice::<Manifest>(&record) {
            let other = serde_json::from_slice(&GOOD.record).expect("a good record");
            let run = |name: &str, manifest| NamedRun { name: name.into(), manifest, speed: None };
            let runs = [run("a", manifest), run("b", other)];
            let _ = Report::of(&runs[..1]);
            let _ = Report::of(&runs);
            let _ = runs[0].manifest.exceeded_plan();
        }
    }
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn spoilt_texts_are_read_or_refused(seed: u64) {
        let documents = documents(20);
        for (name, good) in [
            ("d.jsonl", documents.as_bytes().to_vec()),
            ("d.jsonl.gz", gzipped(documents.as_bytes())),
            ("d.parquet", parquet_bytes("text", &documents.lines().map(str::as_bytes).collect::<Vec<_>>())),
            ("d.txt", documents.clone().into_bytes()),
        ] {
            let (_folder, path) = file(name, &good, seed);
            read_text(&path.display().to_string());
            if name.ends_with("txt") || name.ends_with("parquet") {
                read_text(&format!("wikitext2:{}", path.display()));
                read_text(&format!("ptb:{}", path.display()));
            }
        }
    }

    #[test]
    fn spoilt_tokenizers_are_loaded_or_refused(seed: u64) {
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            let folder = with_spoilt(&GOOD.folder, name, seed);
            if let Ok(tokenizer) = Tokenizer::load(folder.path()) {
                let ids = tokenizer.encode("the <s> layer é\n");
                let _ = tokenizer.decode(&ids.unwrap_or_default());
            }
        }
    }
}
