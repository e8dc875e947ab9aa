//! Trains the model of `prune demo` on the program's own stories: tokenizer, weights and configuration go into a folder.
//!
//! ```text
//! CANDLE_NUM_THREADS=1 RAYON_NUM_THREADS=1 cargo run --release --example train_demo -- OUT [STEPS]
//! cargo run --release -- eval --model OUT --eval-dataset demo
//! cargo run --release --example train_demo -- --stories src/data/assets
//! ```
//!
//! The last command writes the two texts that the program contains.
//!
//! Two threads each take half of every batch; candle's own threads inside an operator would only wait for each other. The files of
//! `src/demo/assets` were trained this way; docs/dev/demo.md has times and results. The seed is fixed, and so is the order of every sum: each
//! batch has [`THREADS`] parts on every machine, and the gradients of the parts are added in their order.

#![expect(clippy::print_stdout, reason = "an example that prints the progress of training")]

mod stories;
mod tokenizer;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use flate2::Compression;
use flate2::write::GzEncoder;
use prune::data::PythonRandom;
use prune::model::differentiable::{DifferentiableModel, Weights, loss};
use prune::model::{InputId, ModelConfig};
use safetensors::tensor::TensorView;
use serde_json::json;

use stories::Part;

const VOCAB_SIZE: usize = 1024;
/// Tokens per training sequence, and the model's context.
const SEQLEN: usize = 128;
/// Sequences per step.
const BATCH: usize = 8;
/// Parts of a batch, one per thread.
const THREADS: usize = 2;
const STEPS: usize = 1200;
const WARMUP: usize = 100;
const LEARNING_RATE: f64 = 2e-3;
/// The last learning rate, as a share of the peak.
const LAST_SHARE: f64 = 0.02;
/// Upper bound of the gradients' length.
const LARGEST_GRADIENT: f64 = 1.0;
/// Deviation of the logarithm of the norms' weights at the start. Large models have a few channels with activations far above the rest
/// (Dettmers et al. 2022, arXiv:2208.07339). Wanda's scores are about such channels. A million parameters trained for minutes have none.
/// So training starts with channels of unequal scale, and divides the columns that read them by the same factors. The function is that of
/// equal norms.
const CHANNEL_SPREAD: f32 = 0.8;
const SEED: u64 = 0;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let out = PathBuf::from(
        arguments.next().context("usage: train_demo OUT [STEPS], OUT being the folder to write")?,
    );
    if out.as_os_str() == "--stories" {
        let folder = arguments.next().context("usage: train_demo --stories FOLDER")?;
        return write_stories(Path::new(&folder));
    }
    let steps: usize =
        arguments.next().map_or(Ok(STEPS), |steps| steps.parse()).context("STEPS is a number")?;
    std::fs::create_dir_all(&out)?;

    let train = Part::Train.text();
    let tokenizer = tokenizer::train(&train, VOCAB_SIZE)?;
    let newline = tokenizer.token_to_id("Ċ").context("a byte is a token")?;
    let config = config_json(newline);
    std::fs::write(
        out.join("tokenizer.json"),
        tokenizer.to_string(false).map_err(anyhow::Error::msg)?,
    )?;
    for (name, value) in [
        ("config.json", &config),
        ("tokenizer_config.json", &tokenizer::config_json(SEQLEN)),
        ("generation_config.json", &json!({"eos_token_id": newline})),
    ] {
        std::fs::write(out.join(name), format!("{value:#}\n"))?;
    }
    let tokens = tokenizer::encode(&tokenizer, &train)?;
    let test = tokenizer::encode(&tokenizer, &Part::Test.text())?;
    println!("{} training tokens, {} test tokens", tokens.len(), test.len());

    let config = ModelConfig::from_json(&config)?;
    let model = DifferentiableModel::new(&config, SEQLEN)?;
    let mut random = PythonRandom::new(SEED);
    let variables = initial(&config, &mut random)?;
    let weights: Weights = variables
        .iter()
        .map(|(name, variable)| (name.clone(), variable.as_tensor().clone()))
        .collect();
    let parameters: usize = weights.values().map(Tensor::elem_count).sum();
    println!("{parameters} parameters, {steps} steps of {BATCH} x {SEQLEN} tokens");

    let mut optimizer = AdamW::new(
        variables.values().cloned().collect(),
        ParamsAdamW { lr: LEARNING_RATE, beta1: 0.9, beta2: 0.98, eps: 1e-8, weight_decay: 0.01 },
    )?;
    let started = Instant::now();
    let mut losses = Vec::new();
    for step in 0..steps {
        let (loss, mut gradients) = parallel_step(&model, &weights, &tokens, &mut random)?;
        ensure!(loss.is_finite(), "the loss is {loss} at step {step}");
        shorten(&mut gradients, &weights)?;
        optimizer.set_learning_rate(learning_rate(step, steps));
        optimizer.step(&gradients)?;
        losses.push(loss);
        if (step + 1) % 25 == 0 || step + 1 == steps {
            let mean = losses.iter().sum::<f64>() / losses.len() as f64;
            println!(
                "step {:5}: loss {mean:.4}, {:.0} s",
                step + 1,
                started.elapsed().as_secs_f64()
            );
            losses.clear();
        }
    }

    let rounded = save(&weights, &out)?;
    println!(
        "test perplexity {:.4} (bf16 weights, windows of {SEQLEN} tokens)",
        perplexity(&model, &rounded, &test)?
    );
    Ok(())
}

/// Writes the texts of `--dataset demo` and `--eval-dataset demo`, compressed.
fn write_stories(folder: &Path) -> Result<()> {
    for (name, part) in [("calibration", Part::Calibration), ("test", Part::Test)] {
        let file = File::create(folder.join(format!("{name}.txt.gz")))?;
        let mut encoder = GzEncoder::new(file, Compression::best());
        encoder.write_all(part.text().as_bytes())?;
        encoder.finish()?;
    }
    Ok(())
}

/// `config.json` as transformers writes it for a `LlamaForCausalLM`. A newline ends a story.
fn config_json(newline: u32) -> serde_json::Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "bos_token_id": null,
        "eos_token_id": newline,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 352,
        "max_position_embeddings": SEQLEN,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE
    })
}

/// Random weights at the start. Matrices have the deviation 1/√(2 · in_features); those that write to the residual stream are smaller by
/// √(2 · layers). The norms inside layers are spread by [`CHANNEL_SPREAD`], and the columns that read them are divided by the norm's
/// weight.
fn initial(config: &ModelConfig, random: &mut PythonRandom) -> Result<BTreeMap<String, Var>> {
    let shapes: BTreeMap<String, Vec<usize>> =
        config.tensors().map(|tensor| (tensor.name, tensor.shape)).collect();
    let mut values: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (name, shape) in &shapes {
        let count = shape.iter().product();
        let of_tensor = if name == "model.norm.weight" {
            vec![1.0; count]
        } else if name.ends_with("norm.weight") {
            (0..count).map(|_| (CHANNEL_SPREAD * normal(random)).exp()).collect()
        } else {
            let in_features = shape[shape.len() - 1] as f32;
            let writes = name.contains("o_proj") || name.contains("down_proj");
            let share = if writes { 2.0 * config.num_hidden_layers as f32 } else { 1.0 };
            let deviation = (0.5 / (in_features * share)).sqrt();
            (0..count).map(|_| deviation * normal(random)).collect()
        };
        values.insert(name.clone(), of_tensor);
    }
    for layer in 0..config.num_hidden_layers {
        for id in config.linears() {
            let norm = match id.input() {
                InputId::Attention => "input_layernorm",
                InputId::Mlp => "post_attention_layernorm",
                InputId::O | InputId::Down => continue,
            };
            let norm = values[&format!("model.layers.{layer}.{norm}.weight")].clone();
            if let Some(matrix) = values.get_mut(&id.tensor_name(layer)) {
                for row in matrix.chunks_exact_mut(norm.len()) {
                    row.iter_mut().zip(&norm).for_each(|(w, n)| *w /= n);
                }
            }
        }
    }
    values
        .into_iter()
        .map(|(name, values)| {
            let tensor = Tensor::from_vec(values, shapes[&name].as_slice(), &Device::Cpu)?;
            Ok((name, Var::from_tensor(&tensor)?))
        })
        .collect()
}

/// A nearly normal number: the sum of twelve uniform numbers, which has variance 1. It needs no logarithm, which differs by machine.
fn normal(random: &mut PythonRandom) -> f32 {
    (0..12).map(|_| random.getrandbits(24) as f32 / (1 << 24) as f32).sum::<f32>() - 6.0
}

/// Loss and gradients of one batch of windows at random starts.
fn parallel_step(
    model: &DifferentiableModel,
    weights: &Weights,
    tokens: &[u32],
    random: &mut PythonRandom,
) -> Result<(f64, GradStore)> {
    let starts: Vec<usize> =
        (0..BATCH).map(|_| random.below((tokens.len() - SEQLEN) as u64) as usize).collect();
    let part = |starts: &[usize]| -> Result<(f64, GradStore)> {
        let window = |offset: usize| -> Vec<u32> {
            starts
                .iter()
                .flat_map(|start| &tokens[start + offset..start + offset + SEQLEN])
                .copied()
                .collect()
        };
        let logits = model.logits(weights, &ids(&window(0), SEQLEN)?)?;
        let loss = loss(&logits, &ids(&window(1), SEQLEN)?)?;
        // All parts have one size, so the mean of the batch is the mean of their means.
        let loss = (loss / THREADS as f64)?;
        Ok((f64::from(loss.to_scalar::<f32>()?), loss.backward()?))
    };
    let parts: Vec<Result<(f64, GradStore)>> = std::thread::scope(|scope| {
        let workers: Vec<_> =
            starts.chunks(BATCH / THREADS).map(|starts| scope.spawn(|| part(starts))).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| anyhow::bail!("a worker panicked")))
            .collect()
    });
    let mut parts = parts.into_iter();
    let (mut loss, mut gradients) = parts.next().context("a batch has parts")??;
    for part in parts {
        let (more_loss, more) = part?;
        loss += more_loss;
        for weight in weights.values() {
            if let (Some(sum), Some(more)) = (gradients.get(weight), more.get(weight)) {
                let sum = (sum + more)?;
                gradients.insert(weight, sum);
            }
        }
    }
    Ok((loss, gradients))
}

/// Ids `[rows, seqlen]` as a tensor.
fn ids(tokens: &[u32], seqlen: usize) -> Result<Tensor> {
    let shape = (tokens.len() / seqlen, seqlen);
    Ok(Tensor::from_slice(tokens, shape, &Device::Cpu)?)
}

/// Scales all gradients down together if their length exceeds [`LARGEST_GRADIENT`].
fn shorten(gradients: &mut GradStore, weights: &Weights) -> Result<()> {
    let mut squares = 0.0;
    for weight in weights.values() {
        if let Some(gradient) = gradients.get(weight) {
            squares += f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?);
        }
    }
    let length = squares.sqrt();
    if length <= LARGEST_GRADIENT {
        return Ok(());
    }
    for weight in weights.values() {
        if let Some(gradient) = gradients.get(weight) {
            let shorter = (gradient * (LARGEST_GRADIENT / length))?;
            gradients.insert(weight, shorter);
        }
    }
    Ok(())
}

/// The learning rate of a step: a linear start, then half a cosine.
fn learning_rate(step: usize, steps: usize) -> f64 {
    if step < WARMUP {
        return LEARNING_RATE * (step + 1) as f64 / WARMUP as f64;
    }
    let done = (step - WARMUP) as f64 / steps.saturating_sub(WARMUP).max(1) as f64;
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
    LEARNING_RATE * (LAST_SHARE + (1.0 - LAST_SHARE) * cosine)
}

/// Writes `model.safetensors` in bf16 and returns the weights as rounded.
fn save(weights: &Weights, out: &std::path::Path) -> Result<Weights> {
    let mut rounded = Weights::new();
    let mut stored: BTreeMap<&str, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, weight) in weights {
        let bf16 = weight.to_dtype(DType::BF16)?;
        let values: Vec<half::bf16> = bf16.flatten_all()?.to_vec1()?;
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        stored.insert(name, (weight.dims().to_vec(), bytes));
        rounded.insert(name.clone(), bf16.to_dtype(DType::F32)?);
    }
    let views = stored
        .iter()
        .map(|(name, (shape, bytes))| {
            Ok((*name, TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let metadata = std::collections::HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize_to_file(views, Some(metadata), &out.join("model.safetensors"))?;
    Ok(rounded)
}

/// exp of the mean loss over windows. Each window predicts all its tokens but the first, as in the program.
fn perplexity(model: &DifferentiableModel, weights: &Weights, tokens: &[u32]) -> Result<f64> {
    let mut losses = Vec::new();
    for window in tokens.chunks_exact(SEQLEN) {
        let logits = model.logits(weights, &ids(window, SEQLEN)?)?;
        let loss = loss(&logits.narrow(0, 0, SEQLEN - 1)?, &ids(&window[1..], SEQLEN - 1)?)?;
        losses.push(f64::from(loss.to_scalar::<f32>()?));
    }
    Ok((losses.iter().sum::<f64>() / losses.len() as f64).exp())
}
