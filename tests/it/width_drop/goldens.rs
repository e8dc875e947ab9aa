//! FLAP's scores of every channel, on the models of the goldens.

use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use prune::bytes::hex;
use prune::checkpoint::Checkpoint;
use prune::data::Tokenizer;
use prune::linalg::Products;
use prune::model::{
    DecoderLayer, Embedding, InputId, LayerContext, LinearId, ModelConfig, Observer,
};
use prune::pruning::width::channel_scores;
use prune::pruning::{InPlaceStatistics, InputGram};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::golden_file;
use crate::golden::dataset;
use crate::support;

/// The largest relative difference of a score: the bound that the goldens' README states.
const SCORE: f64 = 1e-5;

/// Gram matrices of the inputs of o and down.
struct Inputs {
    of_o: InputGram,
    of_down: InputGram,
}

impl Observer for Inputs {
    fn observe(&mut self, point: InputId, rows: &[f32]) {
        match point {
            InputId::O => self.of_o.add_rows(rows),
            InputId::Down => self.of_down.add_rows(rows),
            _ => {}
        }
    }
}

/// The calibration samples of a golden.
fn samples(shared: &Path, golden: &Value, model: &Path) -> Result<Vec<Vec<u32>>> {
    let train = golden["settings"]["train"].as_str().context("a name")?;
    let place = dataset(shared, train)?;
    let text = std::fs::read_to_string(place.trim_start_matches("wikitext2:"))?;
    // Rows of the hub's datasets: a blank line is an empty row, any other line keeps its newline. One space joins them.
    let row = |line: &str| match line.trim() {
        "" => String::new(),
        _ => line.to_string(),
    };
    let rows: Vec<String> = text.split_inclusive('\n').map(row).collect();
    let tokens = Tokenizer::load(model)?.encode(&rows.join(" "))?;
    let starts = golden["calibration_starts"].as_array().context("a list")?;
    let mut samples = Vec::new();
    let mut bytes = Vec::new();
    for start in starts {
        let start = start.as_u64().context("a number")? as usize;
        let sample = tokens.get(start..start + 512).context("the text is long enough")?;
        bytes.extend(sample.iter().flat_map(|token| token.to_le_bytes()));
        samples.push(sample.to_vec());
    }
    let hash = hex(&Sha256::digest(&bytes));
    assert_eq!(golden["calibration_tokens_sha256_int32le"], hash);
    Ok(samples)
}

#[test]
fn scores_of_channels_are_flaps() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let golden = std::fs::read(golden_file(&shared, "stories-0.2.json"))?;
    let golden: Value = serde_json::from_slice(&golden)?;
    let theirs = candle_core::safetensors::load(
        golden_file(&shared, "stories-0.2.scores.safetensors"),
        &Device::Cpu,
    )?;
    let model = shared.join("models/stories260k");
    let config = ModelConfig::load(&model)?;
    let checkpoint = Checkpoint::open(&model)?;
    let embedding = Embedding::open(&checkpoint, &config)?;
    let samples = samples(&shared, &golden, &model)?;
    let hidden = samples.iter().map(|sample| embedding.rows(sample));
    let mut hidden = hidden.collect::<Result<Vec<_>>>()?;
    let mut context = LayerContext::new(&config, 512);
    let mut compared = 0;
    for index in 0..config.num_hidden_layers {
        let layer = DecoderLayer::load(&checkpoint, &config, index)?;
        let width = |id: LinearId| id.shape(&config).1;
        let mut inputs = Inputs {
            of_o: InputGram::new(width(LinearId::O), Products::F32),
            of_down: InputGram::new(width(LinearId::DOWN), Products::F32),
        };
        for state in &mut hidden {
            layer.capture(state, &mut context, &mut inputs)?;
            inputs.of_o.end_sample();
            inputs.of_down.end_sample();
            *state = layer.forward(state, &mut context)?;
        }
        for (id, gram) in [(LinearId::O, &inputs.of_o), (LinearId::DOWN, &inputs.of_down)] {
            let name = id.full_name(index);
            let weight = layer.linear(id).weight().held().context("it is loaded")?;
            let ours = channel_scores(weight, &gram.columns().variance_of_all(), &name)?;
            // The reference's fluctuation is a multiple of the variance, nearly; its score has that factor.
            let [score, variance, fluctuation] = ["wifv", "variance", "fluctuation"]
                .map(|part| theirs[&format!("{name}.{part}")].to_dtype(DType::F64));
            let theirs: Vec<f64> = ((score? * variance?)? / fluctuation?)?.to_vec1()?;
            assert_eq!(ours.len(), theirs.len(), "{name}");
            for (channel, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                let apart = (ours / theirs - 1.0).abs();
                assert!(apart < SCORE, "{name} {channel}: {ours} {theirs}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 5 * (64 + 172));
    Ok(())
}
