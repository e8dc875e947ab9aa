//! `prune demo`: its table, its model, the loss its model was trained with, and its text with other models.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor, safetensors};
use prune::checkpoint::Checkpoint;
use prune::data::{DatasetSpec, Role, Source, TextCache, Tokenizer};
use prune::demo::embedded;
use prune::generation::{
    FinishReason, GenerationRequest, Generator, Sampler, Sampling, generate, sentence,
};
use prune::job;
use prune::model::ModelConfig;
use prune::model::differentiable::{DifferentiableModel, Weights, loss};
use prune::pruning::Pattern;
use prune::run::Silent;
use prune::settings::{CalibrationSettings, Settings};
use prune::synthetic::RandomCheckpoint;

use crate::support::sparsity;

/// Ids `[rows, seqlen]` as a tensor.
fn ids(tokens: &[u32], seqlen: usize) -> Result<Tensor> {
    let shape = (tokens.len() / seqlen, seqlen);
    Ok(Tensor::from_slice(tokens, shape, &Device::Cpu)?)
}

/// The folder of the embedded model.
fn dense() -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    embedded::write_model(folder.path())?;
    Ok(folder)
}

fn open(folder: &Path) -> Result<(Generator, ModelConfig, Tokenizer)> {
    let config = ModelConfig::load(folder)?;
    let checkpoint = Arc::new(Checkpoint::open(folder)?);
    let model = Generator::load_all(checkpoint, Arc::new(config.clone()), &Silent)?;
    Ok((model, config, Tokenizer::load(folder)?))
}

/// The first windows of the test stories.
fn windows(tokenizer: &Tokenizer, seqlen: usize, count: usize) -> Result<Vec<u32>> {
    let source = Source::find(&"demo".parse()?, Role::Evaluation)?;
    let cache = TextCache::disabled();
    Ok(source.evaluation(tokenizer, seqlen, Some(count), &cache, &Silent)?.tokens)
}

#[test]
fn the_differentiable_model_computes_what_the_program_computes() -> Result<()> {
    let folder = dense()?;
    let (mut model, config, tokenizer) = open(folder.path())?;
    let seqlen = config.max_position_embeddings;
    let stored = safetensors::load(folder.path().join("model.safetensors"), &Device::Cpu)?;
    let mut weights = Weights::new();
    for tensor in config.tensors() {
        let name = tensor.name;
        assert_eq!(stored[&name].dims(), tensor.shape, "{name}");
        weights.insert(name.clone(), stored[&name].to_dtype(DType::F32)?);
    }
    assert_eq!(stored.len(), weights.len(), "no other tensors");

    let tokens = windows(&tokenizer, seqlen, 2)?;
    let differentiable = DifferentiableModel::new(&config, seqlen)?;
    let theirs = differentiable.logits(&weights, &ids(&tokens, seqlen)?)?;
    let flat: Vec<f32> = theirs.flatten_all()?.to_vec1()?;
    let mut ours = Vec::new();
    let mut sequence = model.begin(seqlen)?;
    for window in tokens.chunks_exact(seqlen) {
        sequence.clear();
        for &token in window {
            ours.extend_from_slice(model.read(&mut sequence, &[token])?);
        }
    }
    assert_eq!(flat.len(), ours.len());
    let difference = flat.iter().zip(&ours).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    eprintln!("differentiable model and program: logits differ by at most {difference:e}");
    // f32 on both sides, sums in another order through five layers; logits reach some 20. A wrong rotation or a missing
    // mask moves them by more than 1.
    assert!(difference < 1e-3, "{difference}");

    // The loss that was minimised is the one perplexity is made of.
    let next: Vec<u32> = tokens[1..seqlen].to_vec();
    let loss =
        loss(&theirs.narrow(0, 0, seqlen - 1)?, &ids(&next, seqlen - 1)?)?.to_scalar::<f32>()?;
    let vocab = config.vocab_size;
    let by_hand = next
        .iter()
        .enumerate()
        .map(|(at, &next)| {
            let row = &ours[at * vocab..(at + 1) * vocab];
            let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
            sum.ln() - f64::from(row[next as usize])
        })
        .sum::<f64>()
        / next.len() as f64;
    assert!((f64::from(loss) - by_hand).abs() < 1e-4, "{loss} {by_hand}");
    Ok(())
}

#[test]
fn the_differentiable_model_has_gradients() -> Result<()> {
    // Nudging one weight of each kind changes the loss as its gradient says.
    let folder = dense()?;
    let (_, config, tokenizer) = open(folder.path())?;
    let seqlen = 16;
    let tokens = windows(&tokenizer, seqlen + 1, 1)?;
    let differentiable = DifferentiableModel::new(&config, seqlen)?;
    let stored = safetensors::load(folder.path().join("model.safetensors"), &Device::Cpu)?;
    let variables: std::collections::BTreeMap<String, candle_core::Var> = stored
        .iter()
        .map(|(name, weight)| {
            let wide = weight.to_dtype(DType::F32)?;
            Ok((name.clone(), candle_core::Var::from_tensor(&wide)?))
        })
        .collect::<Result<_>>()?;
    let weights: Weights = variables
        .iter()
        .map(|(name, variable)| (name.clone(), variable.as_tensor().clone()))
        .collect();
    let loss_of = |weights: &Weights| -> Result<Tensor> {
        let logits = differentiable.logits(weights, &ids(&tokens[..seqlen], seqlen)?)?;
        loss(&logits, &ids(&tokens[1..], seqlen)?)
    };
    let gradients = loss_of(&weights)?.backward()?;
    for name in [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.self_attn.v_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.4.mlp.down_proj.weight",
    ] {
        let gradient =
            gradients.get(&weights[name]).unwrap_or_else(|| panic!("{name} has no gradient"));
        // Along the gradient the slope is its length.
        let length = gradient.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
        let step = 0.01;
        let nudged = |sign: f64| -> Result<f32> {
            let mut other = weights.clone();
            let moved = (weights[name].detach() + (gradient * (sign * step / f64::from(length)))?)?;
            other.insert(name.to_string(), moved);
            Ok(loss_of(&other)?.to_scalar::<f32>()?)
        };
        let slope = (nudged(1.0)? - nudged(-1.0)?) / (2.0 * step as f32);
        // Differences of f32 losses near 1 over 0.02: 1e-5 absolute, and the curvature's third order.
        assert!(
            (slope - length).abs() < 0.05 * length + 1e-3,
            "{name}: slope {slope}, gradient {length}"
        );
    }
    Ok(())
}

#[test]
fn greedy_writing_is_the_same_every_time() -> Result<()> {
    let folder = dense()?;
    let (mut model, config, tokenizer) = open(folder.path())?;
    let first = sentence(&mut model, &tokenizer, embedded::PROMPT, 40)?;
    assert_eq!(first, sentence(&mut model, &tokenizer, embedded::PROMPT, 40)?);
    assert!(first.ends_with(['.', '!', '?', '"']), "{first}");
    let prompt = tokenizer.encode(embedded::PROMPT)?;
    let mut greedy = |max_tokens| {
        let request = GenerationRequest { prompt: &prompt, max_tokens, stop_ids: &[] };
        let mut sampler = Sampler::new(&Sampling::GREEDY);
        generate(&mut model, &request, &mut sampler, |_| Ok(true))
    };
    let three = greedy(3)?;
    assert_eq!((three.ids.len(), three.finish), (3, FinishReason::MaxTokens));
    let all = greedy(usize::MAX / 2)?;
    assert_eq!(
        (all.ids.len() + prompt.len(), all.finish),
        (config.max_position_embeddings, FinishReason::Positions),
        "it stops where positions end"
    );
    assert_eq!(all.ids[..3], three.ids);
    Ok(())
}

/// Two significant digits: what holds across kernels and machines.
fn rounded(number: f64) -> String {
    let digits = number.log10().floor() as i32 - 1;
    let unit = 10f64.powi(digits);
    format!("{:.*}", usize::try_from(-digits).unwrap_or(0), (number / unit).round() * unit)
}

/// Checks the block under the table. Speeds vary; the bytes do not.
#[track_caller]
fn assert_dense_against_packed(stdout: &str) {
    let block: Vec<&str> =
        stdout.lines().skip_while(|line| !line.contains(" without zeros ")).take(4).collect();
    assert_eq!(block.len(), 4, "{stdout}");
    let numbers = |line: &str| -> Vec<f64> {
        line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    assert_eq!(block[0].split_whitespace().next(), Some("wanda"), "{stdout}");
    assert!(block[1].ends_with("    2.02 MiB    1.14 MiB         0.56"), "{stdout}");
    // 990,720 of 2,108,160 bytes less, and more for the places of rows.
    let read = numbers(block[2]);
    assert!(read.len() == 3 && read[0] == 2.01 && (0.53..0.57).contains(&read[2]), "{stdout}");
    let speeds = numbers(block[3]);
    assert!(block[3].starts_with("tokens/s of decoding ") && speeds.len() == 3, "{stdout}");
    assert!(speeds.iter().all(|&number| number > 0.0), "{stdout}");
}

#[test]
fn the_demo_shows_what_wanda_keeps_and_what_ladder_and_recovery_repair() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let ran = Command::new(env!("CARGO_BIN_EXE_prune"))
        .args(["demo", "--threads", "2"])
        .env("TMPDIR", temporary.path())
        .output()?;
    let stdout = String::from_utf8(ran.stdout)?;
    let stderr = String::from_utf8(ran.stderr)?;
    assert!(ran.status.success(), "{stderr}");
    assert_eq!(std::fs::read_dir(temporary.path())?.count(), 0, "nothing is left behind");
    for line in stdout.lines().chain(stderr.lines()) {
        assert!(line.chars().count() <= 80, "{line}");
    }

    // name, zeros in percent, perplexity
    let rows: Vec<(String, f64, f64)> = stdout
        .lines()
        .skip_while(|line| !line.starts_with("model "))
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter(|line| !line.starts_with(' '))
        .map(|line| {
            let words: Vec<&str> = line[22..].split_whitespace().collect();
            Ok((line[..22].trim().to_string(), words[0].parse()?, words[2].parse()?))
        })
        .collect::<Result<_>>()?;
    let perplexity = |name: &str| {
        rows.iter()
            .find(|row| row.0 == name)
            .unwrap_or_else(|| panic!("no row `{name}` in\n{stdout}"))
            .2
    };
    for share in ["50 %", "60 %", "2:4"] {
        let wanda = perplexity(&format!("wanda {share}"));
        let magnitude = perplexity(&format!("magnitude {share}"));
        assert!(perplexity("dense") < wanda && 1.05 * wanda < magnitude, "{share}: {stdout}");
    }

    for share in ["60 %", "2:4"] {
        let ladder = perplexity(&format!("ladder {share}"));
        let wanda = perplexity(&format!("wanda {share}"));
        assert!(perplexity("dense") < ladder && ladder < wanda, "{share}: {stdout}");
    }

    let recovered = perplexity("wanda 60 %, recovered");
    assert!(
        perplexity("dense") < recovered && 1.05 * recovered < perplexity("wanda 60 %"),
        "{stdout}"
    );

    assert_dense_against_packed(&stdout);

    let sentence = stdout
        .lines()
        .skip_while(|line| !line.starts_with("dense "))
        .nth(1)
        .unwrap_or_default()
        .trim();
    let mut found: String = rows
        .iter()
        .map(|(name, zeros, perplexity)| format!("{name}\t{zeros:.0}\t{}\n", rounded(*perplexity)))
        .collect();
    found += sentence;
    found.push('\n');
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/snapshots/demo.txt");
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, &found)?;
    }
    assert_eq!(
        found,
        std::fs::read_to_string(&path)?,
        "where that is meant: UPDATE_SNAPSHOTS=1 cargo test the_demo_shows\n{stdout}"
    );
    Ok(())
}

#[test]
fn the_demo_leaves_a_folder_alone_that_holds_something() -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("mine"), "")?;
    let ran = Command::new(env!("CARGO_BIN_EXE_prune"))
        .args(["demo", "--save"])
        .arg(folder.path())
        .output()?;
    assert_eq!(ran.status.code(), Some(1));
    let stderr = String::from_utf8(ran.stderr)?;
    assert!(stderr.contains("is not an empty folder"), "{stderr}");
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 1);
    Ok(())
}

#[test]
fn the_demo_text_serves_any_tokenizer_and_says_what_it_is() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = folder.path().join("random");
    RandomCheckpoint::default().write(&model, &Silent)?;
    let mut settings = Settings::pruning(model);
    settings.sparsity = Some(sparsity("wanda", 0.5, Pattern::Unstructured));
    settings.calibration = Some(CalibrationSettings {
        dataset: "demo".parse()?,
        nsamples: 2,
        ..CalibrationSettings::default()
    });
    settings.seqlen = Some(64);
    settings.evaluation.eval_dataset = "demo".parse()?;
    settings.evaluation.eval_windows = Some(2);
    settings.evaluation.text_cache = Some(folder.path().join("cache"));
    let manifest = job::prune(settings, &Silent, None)?;
    let calibration = manifest.calibration.expect("wanda calibrates");
    assert_eq!(calibration.dataset, "demo");
    assert_eq!(calibration.path, "built in");
    assert_eq!(
        calibration.convention,
        "demo calibration: 1200 generated stories, each ended by a newline, one tokenizer call, windows at uniform starts"
    );
    let evaluation = manifest.evaluation.expect("it evaluates");
    assert_eq!(
        evaluation.convention,
        "demo test: 250 generated stories, each ended by a newline, one tokenizer call"
    );
    assert_ne!(calibration.text_sha256, evaluation.text_sha256);
    Ok(())
}

#[test]
fn the_demo_text_takes_no_path() {
    let error = "demo:stories.txt".parse::<DatasetSpec>().expect_err("refused");
    assert!(error.is_usage && error.message.contains("part of the program"));
    assert_eq!("demo".parse::<DatasetSpec>().expect("a name").to_string(), "demo");
    assert_eq!("demo.txt".parse::<DatasetSpec>().expect("a file").to_string(), "demo.txt");
}
