//! What the targets share: a folder for their files, a small model's tokenizer, the mutations of the property tests, and the one kind
//! of panic that is no finding.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use prune::checkpoint::{Checkpoint, WeightSource};
use prune::data::{self, DatasetSpec, Draw, Role, Source, TextCache, Tokenizer};
use prune::eval::Inspected;
use prune::model::{DecoderLayer, Head, KeptShares, ModelConfig, WeightForm, WeightForms};
use prune::packed::{PackedSource, PackedValues};
use prune::run::Silent;
use prune::settings::{ConversionSettings, EvalSides, PackSettings, Settings};
use prune::synthetic::RandomCheckpoint;
use tempfile::TempDir;

#[allow(dead_code)]
#[path = "../../tests/it/hostile/mutators.rs"]
mod mutators;

/// A temporary folder with a model `m` in one file and a model `s` in shards; gone when the process ends, unless it is killed.
pub struct Bench {
    folder: TempDir,
    pub tokenizer: Tokenizer,
}

pub static BENCH: LazyLock<Bench> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_models(folder.path());
    let tokenizer = Tokenizer::load(&folder.path().join("m")).expect("a tokenizer");
    Bench { folder, tokenizer }
});

/// Writes `m` and `s`.
pub fn write_models(folder: &Path) {
    for (name, max_shard) in [("m", 1 << 30), ("s", 4 << 10)] {
        let shape = RandomCheckpoint {
            hidden_size: 8,
            intermediate_size: 16,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            max_shard: prune::bytes::ByteSize(max_shard),
            ..RandomCheckpoint::default()
        };
        shape.write(&folder.join(name), &Silent).expect("a Llama's shape");
    }
}

/// The files of the packed folder `p` that are spoilt.
pub const PACKED_FILES: [&str; 2] = ["model.safetensors", "packed.json"];

static PACKED: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    write_packed(BENCH.folder.path());
    PACKED_FILES.map(|file| fs::read(BENCH.folder.path().join("p").join(file)).expect("written"))
});

/// A good file of the packed folder.
pub fn packed_file(file: &str) -> Vec<u8> {
    let files = PACKED_FILES.into_iter().zip(PACKED.iter());
    let found = files.into_iter().find(|(name, _)| *name == file);
    found.expect("a name of the list").1.clone()
}

/// Writes `h`, which is `m` half-empty, and `p`, which is `h` packed.
pub fn write_packed(folder: &Path) {
    let halved = folder.join("h");
    let mut settings = Settings::pruning(folder.join("m"));
    if let Some(sparsity) = &mut settings.sparsity {
        sparsity.prune_method = "magnitude".to_string();
        sparsity.selection.sparsity_ratio = Some(0.5);
    }
    settings.evaluation.eval = EvalSides::None;
    settings.output.save_model = Some(halved.clone());
    prune::job::prune(settings, &Silent, None).expect("a small model");
    let packed = PackSettings {
        output: ConversionSettings {
            model: halved,
            save: folder.join("p"),
            force: false,
            threads: None,
            max_memory: None,
            arguments: Vec::new(),
        },
        values: PackedValues::Exact,
    };
    prune::job::pack(&packed, &Silent).expect("a pruned model");
}

/// Reads the packed folder `p`, dense and in every form in memory; what opens can fail, but not panic.
pub fn open_packed() {
    let folder = BENCH.folder.path().join("p");
    let Ok(checkpoint) = Checkpoint::open(&folder) else {
        return;
    };
    let Ok(source) = PackedSource::open(Arc::new(checkpoint)) else {
        return;
    };
    let mut bytes = Vec::new();
    for entry in source.tensors() {
        assert!(entry.bytes <= 1 << 24, "{entry:?}");
        bytes.resize(entry.bytes as usize, 0);
        let _ = source.read(entry, 0, &mut bytes);
    }
    let config = ModelConfig::load(&BENCH.folder.path().join("m")).expect("a good model");
    let Ok(shares) = KeptShares::sampled(&source, &config) else {
        return;
    };
    for form in [WeightForm::Compact, WeightForm::Int8] {
        let forms = WeightForms::new(form, shares.clone());
        let _ = DecoderLayer::load_in(&source, &config, 0, &forms);
    }
}

/// Puts the input at a name in the folder.
pub fn put(name: &str, input: &[u8]) -> PathBuf {
    let path = BENCH.folder.path().join(name);
    fs::write(&path, input).expect("the folder is ours");
    path
}

/// Opens the model `m` or `s` as a run does; what opens can be read.
pub fn open(model: &str) {
    let folder = BENCH.folder.path().join(model);
    let Ok(config) = ModelConfig::load(&folder) else {
        return;
    };
    let Ok(checkpoint) = Checkpoint::open(&folder) else {
        return;
    };
    for layer in 0..config.num_hidden_layers {
        if DecoderLayer::check(&checkpoint, &config, layer).is_err() {
            break;
        }
    }
    let _ = Head::check(&checkpoint, &config);
    let inspected = Inspected::whole(&checkpoint);
    let _ = prune::eval::inspect(&inspected, &config, Some(&checkpoint), &Silent);
    let mut bytes = Vec::new();
    for entry in checkpoint.tensors() {
        assert!(entry.bytes <= 1 << 24, "{entry:?}");
        bytes.resize(entry.bytes as usize, 0);
        checkpoint.read(entry, 0, &mut bytes).expect("what opens can be read");
    }
}

/// Reads a text in both roles, as a run does.
pub fn read_text(name: Option<&str>, path: &Path) {
    let path = path.display();
    let spec = name.map_or(path.to_string(), |name| format!("{name}:{path}"));
    let spec: DatasetSpec = spec.parse().expect("a path");
    let (tokenizer, cache) = (&BENCH.tokenizer, TextCache::disabled());
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

/// Lets panics pass that the program turns into the refusal of a file; all others end the fuzzer, as it wants it.
pub fn expect_blame() {
    static ONCE: LazyLock<()> = LazyLock::new(|| {
        let end = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if prune::failure::blamed().is_none() {
                end(panic);
            }
        }));
    });
    LazyLock::force(&ONCE);
}

/// Half of the mutations are the fuzzer's, half those of the property tests.
pub fn mutate(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    if seed & 1 == 0 {
        return libfuzzer_sys::fuzzer_mutate(data, size, max_size);
    }
    let mut bytes = data[..size].to_vec();
    mutators::spoil(&mut bytes, seed.into());
    bytes.truncate(max_size);
    data[..bytes.len()].copy_from_slice(&bytes);
    bytes.len()
}

/// A target: its mutations and what it does with an input.
#[macro_export]
macro_rules! target {
    ($input:ident, $body:block) => {
        libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
            $crate::mutate(data, size, max_size, seed)
        });
        libfuzzer_sys::fuzz_target!(|$input: &[u8]| $body);
    };
}
