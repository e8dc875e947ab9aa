//! The end of `prune demo`: a pruned model is packed, and decodes with and without its zeros.
//!
//! Files are packed by the job of `prune pack`. Decoding is timed as in `prune generate`, with the matrices as stored and compact, in turns,
//! so that both meet the same state of the machine.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::pack::pack;
use crate::bytes::ByteSize;
use crate::checkpoint::Checkpoint;
use crate::data::Tokenizer;
use crate::demo::embedded;
use crate::generation::{GenerationRequest, Generator, Sampler, Sampling, generate};
use crate::model::{KeptShares, ModelConfig, WeightForm, WeightForms};
use crate::packed::PackedValues;
use crate::placement::{Residency, inventory};
use crate::report::demo_table::DemoPacking;
use crate::run::Silent;
use crate::runtime::LayerSource;
use crate::settings::{ConversionSettings, PackSettings};

/// Passes of decoding in each form; the fastest counts.
const PASSES: usize = 5;

/// Tokens of a pass.
const TOKENS: usize = 64;

/// Packs the model in `run`/model into `run`/packed, and times decoding in both forms.
///
/// # Arguments
/// * `name`: the name of the model's row
/// * `threads`: `--threads`
///
/// # Errors
/// Fails when the model cannot be read or the packed folder not be written.
pub(super) fn measure(name: &str, run: &Path, threads: Option<u16>) -> Result<DemoPacking> {
    let model = run.join("model");
    let report = pack(
        &PackSettings {
            values: PackedValues::Exact,
            output: ConversionSettings {
                model: model.clone(),
                save: run.join("packed"),
                force: false,
                threads,
                max_memory: None,
                arguments: ["prune", "demo"].map(String::from).to_vec(),
            },
        },
        &Silent,
    )?;
    let config = Arc::new(ModelConfig::load(&model)?);
    let checkpoint = Arc::new(Checkpoint::open(&model)?);
    let shares = KeptShares::sampled(&*checkpoint, &config)?;
    let load = |forms| -> Result<Generator> {
        let residency = Residency::all(config.num_hidden_layers);
        let layers = LayerSource {
            source: checkpoint.clone(),
            config: Arc::clone(&config),
            forms: Arc::new(forms),
        };
        Generator::load(layers, residency, &Silent)
    };
    let compact = WeightForms::new(WeightForm::Compact, shares);
    let mut generators = [load(WeightForms::dense())?, load(compact)?];
    let prompt = Tokenizer::load(&model)?.encode(embedded::PROMPT)?;
    let request = GenerationRequest { prompt: &prompt, max_tokens: TOKENS, stop_ids: &[] };
    let mut fastest = [0.0; 2];
    for _ in 0..PASSES {
        for (generator, fastest) in generators.iter_mut().zip(&mut fastest) {
            let mut sampler = Sampler::new(&Sampling::GREEDY);
            let written = generate(generator, &request, &mut sampler, |_| Ok(true))?;
            let rate = written.rate().context("the demo's model has no room for a text")?;
            *fastest = f64::max(*fastest, rate);
        }
    }
    let bytes_read = |generator: &Generator| -> ByteSize {
        generator.weights().map(|weight| weight.bytes_held()).sum()
    };
    let [dense, compact] = &generators;
    Ok(DemoPacking {
        name: name.to_owned(),
        dense_bytes: report.bytes_before,
        packed_bytes: report.bytes_after,
        dense_bytes_per_token: bytes_read(dense),
        compact_bytes_per_token: bytes_read(compact),
        dense_tokens_per_second: fastest[0],
        compact_tokens_per_second: fastest[1],
        processor_cache: inventory::largest_cache(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{EvalSides, Settings};

    #[test]
    fn bytes_with_and_without_zeros_and_two_speeds_are_measured() {
        let folder = tempfile::tempdir().unwrap();
        let (dense, run) = (folder.path().join("dense"), folder.path().join("run"));
        embedded::write_model(&dense).unwrap();
        let mut settings = Settings::pruning(dense);
        let sparsity = settings.sparsity.as_mut().unwrap();
        sparsity.prune_method = "magnitude".to_string();
        sparsity.selection.sparsity_ratio = Some(0.6);
        settings.evaluation.eval = EvalSides::None;
        settings.output.save = Some(run.clone());
        crate::job::prune(settings, &Silent, None).unwrap();
        let packing = measure("magnitude 60 %", &run, None).unwrap();
        // 1,054,080 weights of 2 bytes, and norms that a token reads by the row.
        let bytes = |of: ByteSize| of.0 as f64;
        assert!((2_108_160..2_120_000).contains(&packing.dense_bytes.0), "{packing:?}");
        // Of 921,600 weights 60 % are left out, and each has a bit: 990,720 bytes less. Rows have offsets in the file.
        let saved = bytes(packing.dense_bytes) - bytes(packing.packed_bytes);
        assert!((900_000.0..990_720.0).contains(&saved), "{packing:?}");
        let saved = bytes(packing.dense_bytes_per_token) - bytes(packing.compact_bytes_per_token);
        assert!((900_000.0..=991_000.0).contains(&saved), "{packing:?}");
        assert!(packing.dense_tokens_per_second > 0.0 && packing.compact_tokens_per_second > 0.0);
        assert!(run.join("packed/packed.json").is_file());
    }
}
