//! Whole runs of `prune recover` on the goldens' ids, orders and first factors: the loss of every step, and the perplexity afterwards.
//!
//! The goldens train models that Wanda pruned at 60 %, with PyTorch in f32. Losses are compared within 1e-4, perplexities within 0.5 %.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use prune::job::recover::GivenTraining;
use prune::job::recover_given;
use prune::quantized::FourBitFormat;
use prune::recovery::LayerParameters;
use prune::recovery::optimizers::ScheduleShape;
use prune::run::{Manifest, Silent};
use prune::settings::{
    CalibrationSettings, ComputeDtype, DeviceSettings, EvalSides, EvaluationSettings,
    ModelSettings, OutputSettings, RecoverySettings, RecoveryWay, Settings,
};
use safetensors::SafeTensors;
use serde_json::Value;

use super::reference::tensors;
use super::show;
use crate::support;

const SEQLEN: usize = 256;

/// Modules of a layer in the order of its parameters.
const MODULES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// A model of the goldens, its masks, and the text of its perplexity.
struct Subject {
    model: &'static str,
    masks: &'static str,
    test: &'static str,
}

const STORIES: Subject = Subject {
    model: "stories260k",
    masks: "stories260k-on-stories/wanda-0.6-unstructured.masks.safetensors",
    test: "stories/stories.test.txt",
};

const WIKITEXT: Subject = Subject {
    model: "wikitext-llama-8m",
    masks: "wikitext-llama-8m/wikitext-llama-8m-float32-wanda-0.6-unstructured.masks.safetensors",
    test: "wikitext2/wiki.test.head1000.raw",
};

impl Subject {
    /// Writes the pruned model into a folder, in f32 as the goldens train it.
    fn write(&self, shared: &Path, folder: &Path) -> Result<()> {
        let dense = shared.join("models").join(self.model);
        fs::create_dir(folder)?;
        for entry in fs::read_dir(&dense)? {
            let entry = entry?;
            fs::copy(entry.path(), folder.join(entry.file_name()))?;
        }
        let masks = fs::read(shared.join("goldens").join(self.masks))?;
        let masks = SafeTensors::deserialize(&masks)?;
        let file = folder.join("model.safetensors");
        let mut tensors = HashMap::new();
        for (name, tensor) in candle_core::safetensors::load(&file, &Device::Cpu)? {
            let mut tensor = tensor.to_dtype(DType::F32)?;
            if let Some(Ok(mask)) = name.strip_suffix(".weight").map(|name| masks.tensor(name)) {
                let mut values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
                for (at, value) in values.iter_mut().enumerate() {
                    if mask.data()[at / 8] >> (at % 8) & 1 == 1 {
                        *value = 0.0;
                    }
                }
                tensor = Tensor::from_vec(values, tensor.dims(), &Device::Cpu)?;
            }
            tensors.insert(name, tensor);
        }
        fs::remove_file(&file)?;
        candle_core::safetensors::save(&tensors, &file)?;
        Ok(())
    }
}

/// A curve, and the run that repeats it.
struct Curve {
    subject: Subject,
    record: &'static str,
    inputs: &'static str,
    how: RecoveryWay,
    base_quant: Option<FourBitFormat>,
    perplexity: f64,
}

impl Curve {
    fn settings(&self, shared: &Path, folder: &Path, record: &Value) -> Result<Settings> {
        let number = |name: &str| record[name].as_f64().with_context(|| name.to_owned());
        let is_whole = self.how != RecoveryWay::Blocks;
        let own = RecoverySettings::of(self.how);
        Ok(Settings {
            arguments: Vec::new(),
            model: ModelSettings {
                dtype: ComputeDtype::F32,
                ..ModelSettings::of(folder.join("pruned"))
            },
            sparsity: None,
            weights: None,
            layer_drop: None,
            width_drop: None,
            target_size: None,
            recovery: Some(RecoverySettings {
                teacher: (!is_whole).then(|| shared.join("models").join(self.subject.model)),
                rank: 8,
                alpha: 16.0,
                lr: Some(number("lr")?),
                schedule: match is_whole {
                    true => ScheduleShape::Cosine,
                    false => ScheduleShape::Constant,
                },
                warmup: is_whole.then_some(10),
                steps: is_whole.then_some(200),
                epochs: (!is_whole).then_some(3),
                batch_size: if is_whole { 4 } else { 8 },
                max_grad_norm: is_whole.then_some(1.0),
                base_quant: self.base_quant,
                held_out: 0,
                ..own
            }),
            calibration: Some(CalibrationSettings {
                dataset: dataset(&shared.join("data").join(self.subject.test))?,
                ..CalibrationSettings::default()
            }),
            seqlen: Some(SEQLEN),
            evaluation: EvaluationSettings {
                eval: EvalSides::None,
                text_cache: Some(folder.join("cache")),
                ..EvaluationSettings::default()
            },
            device: DeviceSettings { use_cpu: true, ..DeviceSettings::default() },
            output: OutputSettings { save: Some(folder.join("out")), ..OutputSettings::default() },
        })
    }

    /// Repeats the curve. Returns the largest relative difference of a loss, and the perplexity.
    fn repeat(&self, shared: &Path) -> Result<(f64, f64)> {
        let temporary = tempfile::tempdir()?;
        let folder = temporary.path();
        self.subject.write(shared, &folder.join("pruned"))?;
        let goldens = shared.join("goldens/recovery");
        let record: Value = serde_json::from_str(&fs::read_to_string(goldens.join(self.record))?)?;
        let settings = self.settings(shared, folder, &record)?;
        let manifest = recover_given(settings, given(&goldens.join(self.inputs))?, &Silent)?;
        let difference = difference(&manifest, &record)?;
        // The goldens are measured with windows of 512 tokens.
        let measured = prune::job::eval(
            Settings {
                recovery: None,
                calibration: None,
                model: ModelSettings {
                    dtype: ComputeDtype::F32,
                    ..ModelSettings::of(folder.join("out/model"))
                },
                seqlen: Some(512),
                evaluation: EvaluationSettings {
                    eval: EvalSides::Dense,
                    eval_dataset: dataset(&shared.join("data").join(self.subject.test))?,
                    text_cache: Some(folder.join("cache")),
                    ..EvaluationSettings::default()
                },
                output: OutputSettings::default(),
                ..self.settings(shared, folder, &record)?
            },
            &Silent,
        )?;
        let perplexity = measured.perplexity.dense.context("measured")?.perplexity;
        Ok((difference, perplexity))
    }

    fn check(&self) {
        let Some(shared) = support::shared() else {
            return;
        };
        let (difference, perplexity) = self.repeat(&shared).expect(self.record);
        show(&format!(
            "{}: losses differ by {difference:e} at most, perplexity {perplexity:.4} of {}",
            self.record, self.perplexity
        ));
        assert!(difference <= 1e-4, "{}: {difference:e}", self.record);
        let ratio = perplexity / self.perplexity;
        assert!((ratio - 1.0).abs() <= 0.005, "{}: {perplexity}", self.record);
    }
}

fn dataset(path: &Path) -> Result<prune::data::DatasetSpec> {
    format!("wikitext2:{}", path.display()).parse().map_err(anyhow::Error::msg)
}

/// Ids, order and first factors of a golden.
fn given(path: &Path) -> Result<GivenTraining> {
    let inputs = tensors(path)?.with_context(|| format!("no `{}`", path.display()))?;
    let order = inputs.get("order").map(|order| {
        let order: Vec<i16> = bytemuck::pod_collect_to_vec(order);
        let rows = order.chunks(128);
        rows.map(|row| row.iter().map(|&at| at as usize).collect()).collect()
    });
    let tokens: Vec<u32> = bytemuck::pod_collect_to_vec(&inputs["input_ids"]);
    let has_factors = inputs.len() > 2;
    let of_rows = |examples: usize| (0..examples).map(|at| vec![at]).collect();
    let order: Option<Vec<Vec<usize>>> = order.or_else(|| Some(of_rows(tokens.len() / SEQLEN)));
    let initial = move |layer: usize, parameters: LayerParameters| {
        // Kept weights are those of the model.
        if parameters.values.len() != 2 * MODULES.len() {
            return parameters;
        }
        let names = MODULES.iter().flat_map(|module| {
            ["A", "B"].map(|factor| format!("model.layers.{layer}.{module}.lora_{factor}.weight"))
        });
        LayerParameters {
            values: names.map(|name| bytemuck::pod_collect_to_vec(&inputs[&name])).collect(),
            ..parameters
        }
    };
    Ok(GivenTraining {
        tokens,
        order,
        initial: has_factors.then(|| Box::new(initial) as _),
        ..GivenTraining::default()
    })
}

/// The largest relative difference of a loss.
fn difference(manifest: &Manifest, record: &Value) -> Result<f64> {
    let numbers = |value: &Value| -> Vec<f64> {
        let all = value.as_array().into_iter().flatten();
        all.filter_map(Value::as_f64).collect()
    };
    let recovery = manifest.recovery.as_ref().context("a training")?;
    let mut pairs = Vec::new();
    if recovery.steps.is_empty() {
        let layers = record["layers"].as_array().context("layers")?;
        for (layer, expected) in manifest.layers.iter().zip(layers) {
            let got = layer.training.as_ref().context("losses")?;
            let expected = numbers(&expected["loss"]);
            ensure!(got.losses.len() == expected.len(), "steps of a layer");
            pairs.extend(got.losses.iter().copied().zip(expected));
        }
    } else {
        let expected = numbers(&record["loss"]);
        ensure!(recovery.steps.len() == expected.len(), "steps");
        pairs.extend(recovery.steps.iter().map(|step| step.loss).zip(expected));
    }
    ensure!(pairs.len() >= 200, "{} losses", pairs.len());
    let apart = pairs.iter().map(|(got, expected)| (got / expected - 1.0).abs());
    Ok(apart.fold(0.0, f64::max))
}

#[test]
fn full_training_repeats_the_recorded_one() {
    Curve {
        subject: STORIES,
        record: "curve.full.json",
        inputs: "curve.lora.inputs.safetensors",
        how: RecoveryWay::Full,
        base_quant: None,
        perplexity: 8.2176,
    }
    .check();
}

#[test]
fn masked_factors_repeat_the_recorded_training() {
    Curve {
        subject: STORIES,
        record: "curve.lora.json",
        inputs: "curve.lora.inputs.safetensors",
        how: RecoveryWay::Lora,
        base_quant: None,
        perplexity: 11.6988,
    }
    .check();
}

#[test]
fn a_quantised_base_repeats_the_recorded_training() {
    Curve {
        subject: STORIES,
        record: "curve.lora-nf4.json",
        inputs: "curve.lora.inputs.safetensors",
        how: RecoveryWay::Lora,
        base_quant: Some(FourBitFormat::Nf4Double),
        perplexity: 12.0672,
    }
    .check();
}

#[test]
fn layers_trained_one_by_one_repeat_the_recorded_training() {
    Curve {
        subject: STORIES,
        record: "curve.block-chain.lr1e-3.json",
        inputs: "curve.block.inputs.safetensors",
        how: RecoveryWay::Blocks,
        base_quant: None,
        perplexity: 13.1169,
    }
    .check();
}

#[test]
#[ignore = "takes minutes"]
fn factors_of_a_larger_model_repeat_the_recorded_training() {
    Curve {
        subject: WIKITEXT,
        record: "curve.wikitext-llama-8m.lora.json",
        inputs: "curve.wikitext-llama-8m.lora.inputs.safetensors",
        how: RecoveryWay::Lora,
        base_quant: None,
        perplexity: 212.9696,
    }
    .check();
}
