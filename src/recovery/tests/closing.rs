//! Masks that close: the sparsity after every choice, streams between any two steps, and places of the parameters.

use std::sync::{Arc, Mutex};

use candle_core::DType;

use super::fixture::{TestModel, Text, Training, bits, unchanged};
use crate::pruning::{Pattern, Target};
use crate::recovery::optimizers::adamw8bit::AdamW8bit;
use crate::recovery::optimizers::sgd::Sgd;
use crate::recovery::optimizers::{ClosingSchedule, KeptMask, TrainingStep};
use crate::recovery::{
    ClosingMasks, ClosingRange, ParameterStore, StorePlace, TrainedForm, Trainer,
};
use crate::run::Silent;
use crate::runtime::Clock;

const SEQLEN: usize = 20;
const STEPS: u64 = 8;

fn train(trainer: &mut Trainer<'_>, steps: std::ops::Range<u64>) {
    for step in steps {
        let ids = (0..2 * SEQLEN as u64).map(|at| ((at * 7 + step * 31) % 130) as u32);
        let ids: Vec<u32> = ids.collect();
        let texts: Vec<_> = ids.chunks(SEQLEN).map(Text::new).collect();
        let examples: Vec<_> = texts.iter().map(Text::example).collect();
        trainer.step(&examples, TrainingStep { number: step + 1, rate: 1e-2 }).unwrap();
    }
}

/// Masks of the small model that close from two thirds in the first six of eight steps, at every second step.
fn closing(training: &Training, target: Target) -> ClosingMasks {
    let range = ClosingRange { first: 0.667, target };
    ClosingMasks {
        schedule: ClosingSchedule { steps: STEPS, by: 0.75, every: 2 },
        ranges: vec![vec![range; training.part.ids.len()]; 3].into(),
        receiver: None,
    }
}

fn trainings(model: &TestModel) -> Vec<Training> {
    let mut all = Vec::new();
    let free = Target { ratio: 0.8, pattern: Pattern::Unstructured };
    let groups = Target { ratio: 0.75, pattern: Pattern::NOfM { n: 3, m: 4 } };
    for (norms, target) in [(false, free), (true, free), (false, groups)] {
        let mut training = Training::new(model.part(TrainedForm::Weights), SEQLEN);
        training.part.norms = norms;
        training.closing = Some(closing(&training, target));
        if norms {
            training.build = |settings| Box::new(AdamW8bit::new(settings));
        }
        all.push(training);
    }
    let sgd = Training { build: |settings| Box::new(Sgd::new(settings)), ..all[0].clone() };
    all.push(sgd);
    all
}

fn masks(store: &ParameterStore) -> Vec<Vec<Option<KeptMask>>> {
    (0..store.layers()).map(|layer| store.kept(layer).unwrap()).collect()
}

#[test]
fn a_stream_between_any_two_steps_continues_to_the_same_bits() {
    let model = TestModel::small(DType::F32);
    let folder = tempfile::tempdir().unwrap();
    let (clock, events) = (Clock::new(), Silent);
    for training in trainings(&model) {
        let places = [StorePlace::Memory, StorePlace::File(folder.path().to_owned())];
        let begun = |place: &StorePlace| {
            let training = Training { place: place.clone(), ..training.clone() };
            let mut trainer = training.trainer(&model, &clock, &events);
            trainer.initialise(3, &unchanged).unwrap();
            trainer
        };
        let mut whole = begun(&places[0]);
        let mut streams = Vec::new();
        for step in 0..STEPS {
            let mut stream = Vec::new();
            whole.store().save(&mut stream).unwrap();
            streams.push(stream);
            train(&mut whole, step..step + 1);
        }
        let expected = (bits(whole.store()), masks(whole.store()));
        for (step, stream) in streams.iter().enumerate() {
            let mut trainer = begun(&places[step % 2]);
            trainer.parameters_mut().load(&mut stream.as_slice()).unwrap();
            let mut again = Vec::new();
            trainer.store().save(&mut again).unwrap();
            assert!(again == *stream, "the stream of step {step} is read as it was written");
            train(&mut trainer, step as u64..STEPS);
            let got = (bits(trainer.store()), masks(trainer.store()));
            assert!(got == expected, "from step {step}, {:?}", training.part);
        }
        // A training whose masks stand still refuses a stream with masks.
        let mut other =
            Training { closing: None, ..training.clone() }.trainer(&model, &clock, &events);
        other.initialise(3, &unchanged).unwrap();
        assert!(other.parameters_mut().load(&mut streams[0].as_slice()).is_err());
    }
}

#[test]
fn every_choice_has_its_sparsity_and_removed_weights_stay_zero() {
    let model = TestModel::small(DType::F32);
    let (clock, events) = (Clock::new(), Silent);
    for mut training in trainings(&model) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let masks_of = Arc::clone(&seen);
        let closing = training.closing.as_mut().unwrap();
        let target = closing.ranges[0][0].target;
        closing.receiver = Some(Arc::new(move |mask| {
            masks_of.lock().unwrap().push((mask.step, mask.layer, mask.place, mask.kept.clone()));
        }));
        let schedule = closing.schedule;
        let mut trainer = training.trainer(&model, &clock, &events);
        trainer.initialise(3, &unchanged).unwrap();
        let mut before = masks(trainer.store());
        train(&mut trainer, 0..STEPS);
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert_eq!(seen.len(), 3 * 3 * training.part.ids.len());
        for (step, layer, place, kept) in seen {
            let elements = kept.elements();
            let old = before[layer][place].take().unwrap();
            let removed = elements - kept.count();
            if target.pattern == Pattern::Unstructured {
                let ratio = schedule.sparsity(step, 0.667, 0.8);
                assert_eq!(removed, (elements as f64 * ratio) as usize, "step {step}");
            }
            assert!((0..elements).all(|at| old.is_kept(at) || !kept.is_kept(at)), "step {step}");
            before[layer][place] = Some(kept);
        }
        for (layer, kept) in before.iter().enumerate() {
            let values = trainer.store().values(layer).unwrap();
            for (values, kept) in
                values.iter().zip(kept).filter_map(|(v, k)| Some((v, k.as_ref()?)))
            {
                let zeros = values.iter().filter(|value| value.to_bits() == 0).count();
                assert_eq!(zeros, values.len() - kept.count());
                if target.pattern == Pattern::Unstructured {
                    assert_eq!(zeros, target.count_of(values.len()));
                    continue;
                }
                let zeros = |group: &[f32]| group.iter().filter(|value| **value == 0.0).count();
                assert!(values.chunks(4).all(|group| zeros(group) == 3));
            }
        }
    }
}
