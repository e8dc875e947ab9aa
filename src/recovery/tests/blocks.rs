//! The recorded curve of a training layer by layer, and the merger of trained parameters.

use candle_core::DType;

use super::fixture::{FACTORS, TestModel, Training, adamw, bits, unchanged};
use crate::linalg::StoredDtype;
use crate::model::{DecoderLayer, Embedding, LayerContext};
use crate::pipeline::{Output, embed};
use crate::recovery::BufferReuse;
use crate::recovery::optimizers::rounding::Bf16Rounding;
use crate::recovery::optimizers::{Hyperparameters, Schedule, ScheduleShape};
use crate::recovery::{
    BlockTeacher, BlockTrainer, ChangedParameter, LayerOutput, LayerParameters, Merger,
    ParameterStore, TrainedForm,
};
use crate::run::Silent;
use crate::runtime::{Clock, Compute, Editor, HiddenStates};

fn output<'a>() -> LayerOutput<'a> {
    LayerOutput {
        output: Output::default(),
        layers: Vec::new(),
        norms: StoredDtype::F32,
        events: &Silent,
    }
}

fn embedded(model: &TestModel, ids: &[u32], seqlen: usize) -> HiddenStates {
    let samples = ids.len() / seqlen;
    let width = model.config.hidden_size;
    let mut states = HiddenStates::new(None, samples, [seqlen, width], DType::F32).unwrap();
    let embedding = Embedding::open(&*model.pruned, &model.config).unwrap();
    embed(&mut states, &embedding, ids, seqlen).unwrap();
    states
}

fn weights_of(layer: &DecoderLayer) -> Vec<Vec<f32>> {
    let of = |id| {
        let weight = layer.linear(id).weight().held().unwrap();
        let mut values = vec![0.0; weight.elements()];
        weight.widen_rows(0, &mut values);
        values
    };
    layer.linear_ids().map(of).collect()
}

/// The settings of a training layer by layer.
struct BlockTraining<'a> {
    form: TrainedForm,
    rate: f64,
    ids: &'a [u32],
    seqlen: usize,
    steps: u64,
}

/// Trains all layers after the `finished` layers, and checks that their pruned weights stay +0. Returns the losses of every trained
/// layer, and these layers.
fn trained_blocks(
    model: &TestModel,
    settings: &BlockTraining<'_>,
    batch: &dyn Fn(usize, u64) -> Vec<usize>,
    finished: &[DecoderLayer],
) -> (Vec<Vec<f64>>, Vec<DecoderLayer>) {
    let &BlockTraining { ids, seqlen, .. } = settings;
    let training = Training::new(model.part(settings.form), seqlen);
    let (clock, events) = (Clock::new(), Silent);
    let mut trainer = BlockTrainer {
        teacher: BlockTeacher {
            source: model.dense.clone(),
            config: model.config.clone(),
            ends: (1..=model.config.num_hidden_layers).collect(),
        },
        config: model.config.clone(),
        base: training.base(model),
        part: &training.part,
        optimizer: adamw(Hyperparameters::default()),
        closing: None,
        max_grad_norm: None,
        schedule: Schedule {
            shape: ScheduleShape::Constant,
            rate: settings.rate,
            warmup: 0,
            steps: settings.steps,
        },
        batch: Box::new(batch),
        seed: 0,
        states: embedded(model, ids, seqlen),
        targets: embedded(model, ids, seqlen),
        rounding: Bf16Rounding::Nearest,
        output: output(),
        spare: BufferReuse::default(),
        clock: &clock,
        events: &events,
    };
    let mut compute = Compute::on_cpu(LayerContext::new(&model.config, seqlen), &events);
    for layer in finished {
        trainer.pass(layer, &mut compute).unwrap();
    }
    let mut layers = Vec::new();
    for index in finished.len()..model.config.num_hidden_layers {
        let load = || DecoderLayer::load(&*model.pruned, &model.config, index).unwrap();
        let before = weights_of(&load());
        let recovered = trainer.edit(load(), &mut compute).unwrap();
        let after = weights_of(&recovered);
        assert_ne!(before, after, "layer {index} was trained");
        for (before, after) in before.iter().flatten().zip(after.iter().flatten()) {
            assert!(*before != 0.0 || after.to_bits() == 0, "pruned weights are +0");
        }
        layers.push(recovered);
    }
    for report in &trainer.output.layers {
        let matrices = &report.matrices;
        assert!(matrices.iter().all(|matrix| matrix.zeros == matrix.zeros_before));
    }
    let reports = trainer.output.layers.iter();
    let losses = reports.filter_map(|layer| Some(layer.training.as_ref()?.losses.clone()));
    (losses.collect(), layers)
}

#[test]
fn losses_fall_and_a_resumed_training_has_the_same_bits() {
    let model = TestModel::small(DType::F32);
    let ids: Vec<u32> = (0..80).map(|at| at * 7 % 130).collect();
    let batch = |_: usize, step: u64| vec![step as usize % 4, 3 - step as usize % 4];
    for form in [TrainedForm::Weights, FACTORS] {
        let settings = BlockTraining { form, rate: 1e-3, ids: &ids, seqlen: 20, steps: 12 };
        let (losses, layers) = trained_blocks(&model, &settings, &batch, &[]);
        let (of_resumed, last) = trained_blocks(&model, &settings, &batch, &layers[..2]);
        assert_eq!(of_resumed, losses[2..], "{form:?}");
        assert_eq!(weights_of(&last[0]), weights_of(&layers[2]));
        for losses in &losses {
            // Steps 0 and 8 have the same samples.
            assert!(losses[8] < losses[0], "{losses:?}");
        }
    }
}

#[test]
fn the_merger_writes_the_layer_that_was_trained() {
    for (form, dtype) in
        [(TrainedForm::Weights, DType::F32), (FACTORS, DType::F32), (FACTORS, DType::BF16)]
    {
        let model = TestModel::small(dtype);
        let training = Training::new(model.part(form), 20);
        let (clock, events) = (Clock::new(), Silent);
        let mut trainer = training.trainer(&model, &clock, &events);
        trainer.initialise(5, &unchanged).unwrap();
        let moved = |layer, values: &ParameterStore| LayerParameters {
            values: (values.values(layer).unwrap().iter())
                .map(|values| values.iter().map(|value| value * 1.5 + 0.01).collect())
                .collect(),
            kept: values.kept(layer).unwrap(),
        };
        // The best values are merged, not the current values.
        trainer.parameters_mut().keep_best().unwrap();
        let best = bits(trainer.store());
        for layer in 0..3 {
            let mut moved = moved(layer, trainer.store()).values.into_iter();
            let change = &mut |changed: ChangedParameter<'_>| {
                changed.values.copy_from_slice(&moved.next().unwrap());
                if let Some(kept) = changed.kept {
                    kept.apply(changed.values);
                }
            };
            trainer.parameters_mut().update(layer, change).unwrap();
        }
        assert_ne!(bits(trainer.store()), best);
        let store = trainer.finish().0;
        let mut merger = Merger {
            part: &training.part,
            config: &model.config,
            store: &store,
            base: training.base(&model),
            rounding: Bf16Rounding::Nearest,
            output: output(),
        };
        let mut compute = Compute::on_cpu(LayerContext::new(&model.config, 20), &events);
        for index in 0..3 {
            let load = || DecoderLayer::load(&*model.pruned, &model.config, index).unwrap();
            let merged = merger.edit(load(), &mut compute).unwrap();
            // B begins with zeros, so the best values make the base.
            assert_eq!(weights_of(&merged), weights_of(&load()));
        }
        let zeros = merger.output.layers.iter().flat_map(|layer| &layer.matrices);
        let zeros: Vec<_> = zeros.map(|matrix| (matrix.zeros_before, matrix.zeros)).collect();
        assert_eq!(zeros.len(), 21);
        assert!(zeros.iter().all(|(before, after)| before == after && *before > 0));
    }
}
