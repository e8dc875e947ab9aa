//! The store: memory and file hold the same, and a training continues from a stream.

use candle_core::DType;

use super::fixture::{FACTORS, TestModel, Text, Training, bits, unchanged};
use crate::recovery::optimizers::TrainingStep;
use crate::recovery::optimizers::adamw8bit::AdamW8bit;
use crate::recovery::{StorePlace, TrainedForm, Trainer};
use crate::run::Silent;
use crate::runtime::Clock;

const SEQLEN: usize = 20;

/// Trains some steps, counted from 0.
fn train(trainer: &mut Trainer<'_>, steps: std::ops::Range<u64>) {
    for step in steps {
        let ids = (0..2 * SEQLEN as u64).map(|at| ((at * 7 + step * 31) % 130) as u32);
        let ids: Vec<u32> = ids.collect();
        let texts: Vec<_> = ids.chunks(SEQLEN).map(Text::new).collect();
        let examples: Vec<_> = texts.iter().map(Text::example).collect();
        let (number, rate) = (step + 1, 1e-2);
        trainer.step(&examples, TrainingStep { number, rate }).unwrap();
    }
}

fn trainings(model: &TestModel) -> Vec<Training> {
    let mut all = Vec::new();
    for form in [TrainedForm::Weights, FACTORS] {
        for norms in [false, true] {
            let mut training = Training::new(model.part(form), SEQLEN);
            training.part.norms = norms;
            if norms {
                // 8-bit states where a parameter has 4096 elements or more, else f32 states.
                training.build = |settings| Box::new(AdamW8bit::new(settings));
            }
            all.push(training);
        }
    }
    all
}

#[test]
fn memory_and_file_hold_the_same_and_a_stream_continues_either() {
    let model = TestModel::small(DType::F32);
    let folder = tempfile::tempdir().unwrap();
    let (clock, events) = (Clock::new(), Silent);
    for training in trainings(&model) {
        let begun = |place: &StorePlace| {
            let training = Training { place: place.clone(), ..training.clone() };
            let mut trainer = training.trainer(&model, &clock, &events);
            trainer.initialise(3, &unchanged).unwrap();
            trainer
        };
        let places = [StorePlace::Memory, StorePlace::File(folder.path().to_owned())];
        let saved = places.each_ref().map(|place| {
            let mut trainer = begun(place);
            let first = bits(trainer.store());
            train(&mut trainer, 0..3);
            assert_ne!(bits(trainer.store()), first);
            trainer.parameters_mut().keep_best().unwrap();
            let best = bits(trainer.store());
            train(&mut trainer, 3..5);
            let mut stream = Vec::new();
            trainer.store().save(&mut stream).unwrap();
            train(&mut trainer, 5..8);
            for (layer, best) in best.iter().enumerate() {
                let kept = trainer.store().best_values(layer).unwrap();
                let kept: Vec<Vec<u32>> = (kept.iter())
                    .map(|values| values.iter().map(|value| value.to_bits()).collect())
                    .collect();
                assert_eq!(&kept, best);
            }
            (stream, bits(trainer.store()), best)
        });
        assert!(saved[0] == saved[1], "{:?}", training.part);
        let [(stream, last, best), _] = saved;
        for place in &places {
            let mut trainer = begun(place);
            trainer.parameters_mut().load(&mut stream.as_slice()).unwrap();
            assert_ne!(bits(trainer.store()), best);
            train(&mut trainer, 5..8);
            assert!(bits(trainer.store()) == last, "{place:?} {:?}", training.part);
            let best_of_first = trainer.store().best_values(0).unwrap();
            for (got, best) in best_of_first.iter().zip(&best[0]) {
                assert!(got.iter().map(|value| value.to_bits()).eq(best.iter().copied()));
            }
            let cut = &stream[..stream.len() - 1];
            assert!(trainer.parameters_mut().load(&mut &*cut).is_err());
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn without_best_values_the_current_ones_are_the_best_and_the_formula_counts_all_bytes() {
    let model = TestModel::small(DType::F32);
    let (clock, events) = (Clock::new(), Silent);
    for training in trainings(&model) {
        let mut trainer = training.trainer(&model, &clock, &events);
        trainer.initialise(3, &unchanged).unwrap();
        train(&mut trainer, 0..1);
        let store = trainer.store();
        assert_eq!(store.values(2).unwrap(), store.best_values(2).unwrap());
        let optimizer = (training.build)(Default::default());
        let bytes = |has_best| {
            crate::recovery::ParameterStore::bytes(store.specs(), &*optimizer, 3, has_best)
        };
        let mut stream = Vec::new();
        store.save(&mut stream).unwrap();
        let masks: usize = (0..3)
            .flat_map(|layer| store.kept(layer).unwrap())
            .flatten()
            .map(|kept| kept.bits().len())
            .sum();
        // A stream has no gradients and no masks.
        let gradients = 4 * store.elements();
        assert_eq!(bytes(false), stream.len() as u64 - 1 + gradients + masks as u64);
        assert_eq!(bytes(true) - bytes(false), gradients);
    }
}
