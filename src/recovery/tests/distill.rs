//! A training that also learns from a dense model.

use candle_core::DType;

use super::fixture::{TestModel, Text, Training, bits, unchanged};
use crate::recovery::optimizers::TrainingStep;
use crate::recovery::{StorePlace, TrainedForm};
use crate::run::{MemorySettings, Silent};
use crate::runtime::Clock;

const SEQLEN: usize = 21;

/// Losses and norms of four steps, and the bits of the final values by layer and parameter.
type Trained = (Vec<(f64, f64)>, Vec<Vec<Vec<u32>>>);

fn trained(model: &TestModel, training: &Training) -> Trained {
    let clock = Clock::new();
    let mut trainer = training.trainer(model, &clock, &Silent);
    trainer.initialise(7, &unchanged).unwrap();
    let texts: Vec<Text> = (0..2)
        .map(|text| {
            let ids: Vec<u32> =
                (0..SEQLEN as u32).map(|at| (at * (5 + text) + text) % 130).collect();
            Text::new(&ids)
        })
        .collect();
    let examples: Vec<_> = texts.iter().map(Text::example).collect();
    let steps = (1..=4).map(|number| {
        let at = TrainingStep { number, rate: 1e-3 };
        let outcome = trainer.step(&examples, at).unwrap();
        (outcome.loss, outcome.norm)
    });
    (steps.collect(), bits(trainer.store()))
}

#[test]
fn a_dense_model_is_learned_from_by_its_share() {
    let model = TestModel::small(DType::F32);
    let with = |teacher: Option<(bool, f32)>| {
        let mut training = Training::new(model.part(TrainedForm::Weights), SEQLEN);
        training.teacher = teacher;
        training
    };
    let (alone, _) = trained(&model, &with(None));
    // With a share of 0 the loss is the loss of the tokens, but for the order of sums.
    let (unheard, _) = trained(&model, &with(Some((true, 0.0))));
    let [(loss, norm), (other, other_norm)] = [alone[0], unheard[0]];
    assert!((loss - other).abs() < 1e-6 * loss && (norm - other_norm).abs() < 1e-5 * norm);
    // The model has nothing to learn from itself.
    let (itself, _) = trained(&model, &with(Some((false, 1.0))));
    assert!(itself[0].0.abs() < 1e-6 && itself[0].1 < 1e-5, "{itself:?}");
    // The distance from the dense model falls.
    let (dense, values) = trained(&model, &with(Some((true, 1.0))));
    assert!(dense[0].0 > 0.01 && dense[3].0 < 0.9 * dense[0].0, "{dense:?}");
    // The loss of a share is the mean of both.
    let (half, _) = trained(&model, &with(Some((true, 0.5))));
    let mean = 0.5 * (alone[0].0 + dense[0].0);
    assert!((half[0].0 - mean).abs() < 1e-5 * mean, "{half:?}");
    // The head at rest, and all states on disk, change no bit.
    let folder = tempfile::tempdir().unwrap();
    let mut on_disk = with(Some((true, 1.0)));
    on_disk.spill_folder = Some(folder.path().to_owned());
    on_disk.place = StorePlace::File(folder.path().to_owned());
    on_disk.memory = MemorySettings { head_rows: Some(64), ..MemorySettings::default() };
    assert_eq!(trained(&model, &on_disk), (dense, values));
}
