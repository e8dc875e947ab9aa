//! The recorded curve of low-rank factors on an NF4 base: its checkpoint is read as the program reads it, and the masks come from the
//! pruned model before the quantisation.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::DType;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::model::{LayerContext, ModelConfig};
use prune::quantized::QuantizedSource;
use prune::recovery::{
    BaseLayers, Example, LayerParameters, MaskFile, ParameterName, Shelf, ShelfPlace, TrainedForm,
    TrainedPart, Trainer, TrainerParts,
};
use prune::run::Silent;
use prune::runtime::Clock;
use prune::training::adamw::AdamW;
use prune::training::{Hyperparameters, Schedule, ScheduleShape, TrainingStep};
use safetensors::SafeTensors;
use serde_json::Value;

use super::reference::tensors;
use super::show;
use crate::support;

const SEQLEN: usize = 256;
const BATCH: usize = 4;
/// Steps that are compared, of 200.
const STEPS: usize = 60;
const FILE: &str = "model.safetensors";

/// Writes `stories260k` with the zeros of the reference's masks to a folder.
fn write_pruned(shared: &Path, folder: &Path) -> Result<()> {
    let masks = "goldens/stories260k-on-stories/wanda-0.6-unstructured.masks.safetensors";
    let masks = tensors(&shared.join(masks))?.context("the masks")?;
    let mut bytes = std::fs::read(shared.join("models/stories260k").join(FILE))?;
    let (header, info) = SafeTensors::read_metadata(&bytes)?;
    for (name, pruned) in masks {
        let info = info.info(&format!("{name}.weight")).context(name)?;
        let (start, end) = info.data_offsets;
        let elements = bytes[8 + header + start..8 + header + end].chunks_mut(4);
        for (at, element) in elements.enumerate() {
            if pruned[at / 8] >> (at % 8) & 1 == 1 {
                element.fill(0);
            }
        }
    }
    Ok(std::fs::write(folder.join(FILE), bytes)?)
}

/// The trainer of the record, with the recorded initial factors.
fn trainer<'a>(shared: &Path, folder: &Path, clock: &'a Clock) -> Result<Trainer<'a>> {
    let goldens = shared.join("goldens/recovery");
    let config = Arc::new(ModelConfig::load(&shared.join("models/stories260k"))?);
    let part = TrainedPart {
        projections: config.projections().collect(),
        form: TrainedForm::Factors {
            rank: 8,
            alpha: 16.0,
        },
        norms: false,
    };
    write_pruned(shared, folder)?;
    let masks = MaskFile::of(&Checkpoint::open(folder)?, &config, &part, folder)?;
    let base = Checkpoint::open(&goldens.join("stories260k-wanda60-bnb4"))?;
    let source: Arc<dyn WeightSource> = Arc::new(QuantizedSource::open(Arc::new(base))?);
    let optimizer = Box::new(AdamW::new(Hyperparameters::default()));
    let specs = part.parameters(&config);
    let shelf = Shelf::new(
        specs.clone(),
        &*optimizer,
        config.num_hidden_layers,
        &ShelfPlace::Memory,
    )?;
    let mut trainer = Trainer::new(TrainerParts {
        base: BaseLayers::new(
            Arc::clone(&source),
            Arc::clone(&config),
            part.clone(),
            Some(Arc::new(masks)),
            (1, true),
        ),
        source,
        context: LayerContext::new(&config, SEQLEN),
        config,
        part,
        shelf,
        optimizer,
        max_grad_norm: Some(1.0),
        spill_folder: None,
        states: DType::F32,
        seqlen: SEQLEN,
        clock,
        events: &Silent,
    })?;
    let inputs = tensors(&goldens.join("curve.lora.inputs.safetensors"))?.context("the inputs")?;
    let of = |name: ParameterName, layer: usize| match name {
        ParameterName::A(of) => format!("{}.lora_A.weight", of.full_name(layer)),
        ParameterName::B(of) => format!("{}.lora_B.weight", of.full_name(layer)),
        ParameterName::Weight(of) => of.tensor_name(layer),
        ParameterName::Norm(norm) => format!("norm {norm}"),
    };
    trainer.initialise(0, &|layer, parameters| LayerParameters {
        values: (specs.iter())
            .map(|spec| bytemuck::pod_collect_to_vec(&inputs[&of(spec.name, layer)]))
            .collect(),
        ..parameters
    })?;
    Ok(trainer)
}

#[test]
fn factors_on_an_nf4_base_follow_the_reference() {
    let Some(shared) = support::shared() else {
        return;
    };
    let goldens = shared.join("goldens/recovery");
    let record = std::fs::read_to_string(goldens.join("curve.lora-nf4.json")).unwrap();
    let record: Value = serde_json::from_str(&record).unwrap();
    let inputs = tensors(&goldens.join("curve.lora.inputs.safetensors")).unwrap();
    let ids: Vec<u32> = bytemuck::pod_collect_to_vec(&inputs.unwrap()["input_ids"]);
    let schedule = Schedule {
        shape: ScheduleShape::Cosine,
        rate: record["lr"].as_f64().unwrap(),
        warmup: 10,
        steps: 200,
    };
    let (folder, clock) = (tempfile::tempdir().unwrap(), Clock::new());
    let mut trainer = trainer(&shared, folder.path(), &clock).unwrap();
    let mut worst = 0f64;
    for (step, ids) in ids.chunks(BATCH * SEQLEN).take(STEPS).enumerate() {
        let targets: Vec<Vec<Option<u32>>> = ids
            .chunks(SEQLEN)
            .map(|ids| ids[1..].iter().copied().map(Some).chain([None]).collect())
            .collect();
        let pairs = ids.chunks(SEQLEN).zip(&targets);
        let examples: Vec<_> = pairs
            .map(|(tokens, targets)| Example { tokens, targets })
            .collect();
        let at = TrainingStep {
            number: step as u64 + 1,
            rate: schedule.rate_of(step as u64),
        };
        let got = trainer.step(&examples, at).unwrap().loss;
        worst = worst.max((got - record["loss"][step].as_f64().unwrap()).abs());
    }
    show(&format!(
        "NF4 base, {STEPS} steps: losses differ by at most {worst:e}"
    ));
    assert!(worst <= 1e-4, "{worst:e}");
}
