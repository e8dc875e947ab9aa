//! A training has the same bits with any number of threads, in memory and on disk; a step that fails changes nothing.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};

use candle_core::DType;

use super::fixture::{FACTORS, TestModel, Text, Training, bits, unchanged};
use crate::bytes::ByteSize;
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::recovery::BufferReuse;
use crate::recovery::optimizers::TrainingStep;
use crate::recovery::optimizers::rounding::Bf16Rounding;
use crate::recovery::{
    BaseLayers, BaseReader, ChangedParameter, Example, MaskFile, StorePlace, TrainedForm, Trainer,
};
use crate::run::{MemorySettings, Silent};
use crate::runtime::Clock;

const SEQLEN: usize = 20;

fn texts(count: usize, pace: usize) -> Vec<Text> {
    let ids: Vec<u32> = (0..count * SEQLEN).map(|at| (at * pace % 130) as u32).collect();
    ids.chunks(SEQLEN).map(Text::new).collect()
}

fn step(trainer: &mut Trainer<'_>, texts: &[Text], number: u64) -> (f64, f64) {
    let examples: Vec<_> = texts.iter().map(Text::example).collect();
    let outcome = trainer.step(&examples, TrainingStep { number, rate: 1e-2 });
    let outcome = outcome.unwrap();
    (outcome.loss, outcome.norm)
}

/// Losses and norms of four steps with three examples, the held-out loss before, between and after them, and the bits of all parameters.
type Outcome = (Vec<(f64, f64)>, [f64; 3], Vec<Vec<Vec<u32>>>);

fn trained(model: &TestModel, training: &Training) -> Outcome {
    let (clock, events) = (Clock::new(), Silent);
    let mut trainer = training.trainer(model, &clock, &events);
    trainer.initialise(9, &unchanged).unwrap();
    let held_out = texts(2, 11);
    let held_out: Vec<_> = held_out.iter().map(Text::example).collect();
    let before = trainer.loss(&held_out).unwrap();
    let mut steps = vec![step(&mut trainer, &texts(3, 7), 1)];
    steps.push(step(&mut trainer, &texts(3, 17), 2));
    let between = trainer.loss(&held_out).unwrap();
    steps.extend((3..5).map(|number| step(&mut trainer, &texts(3, 7), number)));
    let after = trainer.loss(&held_out).unwrap();
    (steps, [before, between, after], bits(trainer.store()))
}

#[test]
fn threads_places_and_reads_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let model = TestModel::small(dtype);
        for form in [TrainedForm::Weights, FACTORS] {
            let mut base = Training::new(model.part(form), SEQLEN);
            base.part.norms = form == FACTORS;
            let on = |threads: usize, training: &Training| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                pool.unwrap().install(|| trained(&model, training))
            };
            let expected = on(1, &base);
            let (steps, held_out, _) = &expected;
            assert!(steps[3].0 < steps[0].0, "{steps:?}");
            assert!(held_out.iter().all(|loss| loss.is_finite()));
            let with = |change: &dyn Fn(&mut Training)| {
                let mut training = base.clone();
                change(&mut training);
                training
            };
            let masks =
                MaskFile::of(&*model.pruned, &model.config, &base.part, folder.path()).unwrap();
            let masks = Some(Arc::new(masks));
            let spilled = Some(folder.path().to_owned());
            let file = StorePlace::File(folder.path().to_owned());
            let variants = [
                ("read ahead", with(&|training| training.reads = (0, true))),
                ("one resident", with(&|training| training.reads = (1, true))),
                ("two resident", with(&|training| training.reads = (2, false))),
                ("all resident", with(&|training| training.reads = (9, true))),
                ("one kept", with(&|training| training.kept_layers = 1)),
                ("all kept", with(&|training| training.kept_layers = 9)),
                ("spilled", with(&|training| training.spill_folder = spilled.clone())),
                ("in a file", with(&|training| training.place = file.clone())),
                ("masks in a file", with(&|training| training.masks = masks.clone())),
                ("head at rest", with(&|training| training.memory.head_rows = Some(64))),
            ];
            assert!(on(4, &base) == expected, "four threads, {form:?}, {dtype:?}");
            for (name, training) in variants {
                assert!(on(2, &training) == expected, "{name}, {form:?}, {dtype:?}");
            }
        }
    }
}

#[test]
fn small_parts_and_bf16_states_change_little() {
    let model = TestModel::small(DType::F32);
    let base = Training::new(model.part(FACTORS), SEQLEN);
    let exact = trained(&model, &base);
    let parts = Training {
        memory: MemorySettings {
            mlp_tokens: 8,
            logits_bytes: ByteSize::of(8 * 130, 4),
            ..MemorySettings::default()
        },
        ..base.clone()
    };
    let narrow = Training { states: DType::BF16, ..base };
    for (training, limit) in [(parts, 1e-5), (narrow, 2e-2)] {
        let got = trained(&model, &training);
        for ((got, _), (exact, _)) in got.0.iter().zip(&exact.0) {
            assert!((got - exact).abs() <= limit, "{got} {exact}");
        }
        // The states of held-out examples are f32.
        assert!((got.1[0] - exact.1[0]).abs() <= 1e-5);
    }
}

#[test]
fn the_loss_is_the_mean_over_all_predicted_tokens() {
    let model = TestModel::small(DType::F32);
    let (clock, events) = (Clock::new(), Silent);
    let training = Training::new(model.part(TrainedForm::Weights), SEQLEN);
    let outcome = |examples: &[Example<'_>]| {
        let mut trainer = training.trainer(&model, &clock, &events);
        trainer.initialise(1, &unchanged).unwrap();
        let held_out = trainer.loss(examples).unwrap();
        let at = TrainingStep { number: 1, rate: 0.0 };
        let outcome = trainer.step(examples, at).unwrap();
        assert!((held_out - outcome.loss).abs() < 1e-6);
        outcome
    };
    let texts = texts(2, 7);
    let mut few = vec![None; SEQLEN];
    few[..4].copy_from_slice(&texts[1].example().targets[..4]);
    let first = texts[0].example();
    let second = Example { targets: &few, ..texts[1].example() };
    let [both, one, other] = [&[first, second][..], &[first], &[second]].map(outcome);
    assert_eq!((both.predicted, one.predicted, other.predicted), (23, 19, 4));
    let mean = (19.0 * one.loss + 4.0 * other.loss) / 23.0;
    assert!((both.loss - mean).abs() < 1e-6, "{} {mean}", both.loss);
    // An example that is given twice has the same gradient and loss.
    let twice = outcome(&[first, first]);
    assert!((twice.norm / one.norm - 1.0).abs() < 1e-5 && twice.loss == one.loss);
}

#[test]
fn a_loss_or_gradient_that_is_not_finite_stops_before_the_update() {
    let model = TestModel::small(DType::F32);
    let (clock, events) = (Clock::new(), Silent);
    for form in [TrainedForm::Weights, FACTORS] {
        let training = Training::new(model.part(form), SEQLEN);
        let mut trainer = training.trainer(&model, &clock, &events);
        trainer.initialise(1, &unchanged).unwrap();
        let texts = texts(2, 7);
        step(&mut trainer, &texts, 1);
        let mut good = Vec::new();
        trainer.store().save(&mut good).unwrap();
        let poison = &mut |changed: ChangedParameter<'_>| changed.values[0] = f32::NAN;
        trainer.parameters_mut().update(1, poison).unwrap();
        let poisoned = bits(trainer.store());
        let examples: Vec<_> = texts.iter().map(Text::example).collect();
        let at = TrainingStep { number: 2, rate: 1e-2 };
        let error = trainer.step(&examples, at).unwrap_err();
        let text = format!("{error:?}");
        assert!(text.contains("the loss is NaN in step 2, with a learning rate of 1e-2"), "{text}");
        assert!(bits(trainer.store()) == poisoned);
        // The trainer continues with good values as if nothing had been.
        trainer.parameters_mut().load(&mut good.as_slice()).unwrap();
        let resumed = step(&mut trainer, &texts, 2);
        let mut other = training.trainer(&model, &clock, &events);
        other.initialise(1, &unchanged).unwrap();
        other.parameters_mut().load(&mut good.as_slice()).unwrap();
        assert_eq!(step(&mut other, &texts, 2), resumed);
        assert!(bits(other.store()) == bits(trainer.store()));
    }
}

#[test]
fn the_mask_of_a_file_decides_whatever_the_base_holds() {
    let model = TestModel::small(DType::F32);
    let folder = tempfile::tempdir().unwrap();
    let part = model.part(FACTORS);
    let masks = MaskFile::of(&*model.pruned, &model.config, &part, folder.path()).unwrap();
    // A dense base under the masks of the pruned model.
    let layers = |source: &Arc<dyn WeightSource>, masks| {
        let (source, config) = (Arc::clone(source), Arc::clone(&model.config));
        BaseLayers::new(BaseReader { source, config, part: part.clone(), masks }, 0)
    };
    let mut dense = layers(&model.dense, Some(Arc::new(masks)));
    let mut pruned = layers(&model.pruned, None);
    for index in 0..3 {
        let [dense, pruned] = [&mut dense, &mut pruned].map(|base| base.take(index, None).unwrap());
        assert_eq!(dense.pruned, pruned.pruned);
        let values = part.initial(&model.config, &dense, 1).unwrap().values;
        let values: Vec<_> = values.into_iter().map(Cow::Owned).collect();
        let [dense, pruned] = [dense, pruned].map(|base| {
            let rounding = Bf16Rounding::Nearest;
            let mut spare = BufferReuse::default();
            let applied = part.applied(&model.config, base, &values, rounding, &mut spare);
            applied.unwrap()
        });
        for id in model.config.linears() {
            let [dense, pruned] = [&dense, &pruned].map(|layer| {
                let weight = layer.layer.linear(id).weight().held();
                weight.unwrap().as_bytes().to_vec()
            });
            assert!(dense == pruned, "{id:?}");
        }
    }
}

/// A source that notes which threads read which tensors.
struct NotedReads {
    source: Arc<dyn WeightSource>,
    reads: Mutex<Vec<(String, bool)>>,
}

impl WeightSource for NotedReads {
    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.source.entry(name)
    }

    fn read(&self, entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
        let is_ahead = std::thread::current().name() == Some("reading ahead");
        let read = (entry.name.clone(), is_ahead);
        self.reads.lock().unwrap().push(read);
        self.source.read(entry, start, buffer)
    }
}

#[test]
fn layers_behind_resident_ones_are_read_ahead_and_resident_ones_once() {
    let model = TestModel::small(DType::F32);
    let noted = Arc::new(NotedReads { source: Arc::clone(&model.pruned), reads: Mutex::default() });
    let source: Arc<dyn WeightSource> = Arc::<NotedReads>::clone(&noted);
    let (config, part) = (Arc::clone(&model.config), model.part(FACTORS));
    let reader = BaseReader { source, config, part, masks: None };
    let mut base = BaseLayers::new(reader, 1).reading_ahead(true);
    // Two steps: forwards, then backwards.
    let order = [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0];
    for (at, &index) in order.iter().enumerate() {
        base.take(index, order.get(at + 1).copied()).unwrap();
    }
    let reads = noted.reads.lock().unwrap();
    let of_layer = |layer: usize| {
        let name = format!("model.layers.{layer}.mlp.up_proj.weight");
        let reads = reads.iter().filter(|(read, _)| *read == name);
        reads.map(|(_, is_ahead)| *is_ahead).collect::<Vec<_>>()
    };
    assert_eq!(of_layer(0), [false]);
    assert_eq!(of_layer(1), [true; 4]);
    assert_eq!(of_layer(2), [true; 4]);
}
